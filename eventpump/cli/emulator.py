"""`eventpump emulator`: run the local service until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import shlex
import ssl
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal

from eventpump.aio.signals import handling_signals
from eventpump.cli.main import CONNECTION_VARIABLE, Subparsers
from eventpump.emulator.auth import DEFAULT_KEY
from eventpump.emulator.capture import CaptureSettings
from eventpump.emulator.config import HubSpec, config_document, load_config, parse_hub
from eventpump.emulator.log import DURABLE_RETENTION, Retention
from eventpump.emulator.server import Emulator
from eventpump.emulator.web_tokens import ANY
from eventpump.errors import ConfigurationError
from eventpump.texts import without_secrets

_SAMPLE = "telemetry:4:dashboard,archive"
KEY_VARIABLE = "EVENTPUMP_EMULATOR_KEY"
"""Has the key where `--key` is not given: arguments of a process can be seen by every user of the machine."""
JWT_VARIABLE = "EVENTPUMP_EMULATOR_ACCEPT_JWT"
"""Has the secret where `--accept-jwt` is not given, for the same reason."""
BAD_INPUT = 2
"""The exit code for invalid input."""


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "emulator",
        help=summary,
        description="Run a local Event Hubs service. Prints the connection string once it accepts connections; "
        "with --ws-port, the one for WebSockets on a second line, and with --tls auto, the path of the authority's "
        "certificate on the last line.",
    )
    add = parser.add_argument
    add(
        "--hub",
        action="append",
        default=[],
        metavar="NAME:PARTITIONS[:GROUP,GROUP]",
        help="a hub to serve, with its consumer groups besides $Default; may be repeated",
    )
    add("--config", metavar="FILE", help="the official emulator's Config.json")
    add(
        "--print-config",
        action="store_true",
        help="print a Config.json with the hubs of --hub and --config, or with a sample, and exit",
    )
    add("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    add(
        "--name",
        action="append",
        default=[],
        metavar="HOST",
        help="an additional host name that clients use, accepted in signatures; may be repeated",
    )
    add("--port", help="the port; 0 selects a free one (default: 5672)")
    add("--ws-port", metavar="PORT", help="also serve AMQP over WebSockets on this port; 0 selects a free one")
    add("--data", metavar="DIR", help="store the hubs in this directory (default: in memory)")
    add("--fsync", action="store_true", help="with --data: also survive power loss")
    add("--capture", metavar="DIR", help="also write the events as Avro files of Event Hubs Capture in this directory")
    add("--capture-seconds", default="300", metavar="S", help="write a file after this long (default: %(default)s)")
    add("--capture-bytes", default="314572800", metavar="N", help="or after this many bytes (default: %(default)s)")
    _add_access_options(parser)
    add("--retention-bytes", metavar="N", help="keep at most this many bytes of events, over all partitions")
    add("--retention-seconds", metavar="S", help="keep events for at most this long")
    add(
        "--refuse-long-keys",
        action="store_true",
        help="refuse partition keys of more than 128 characters, as eventpump's clients do",
    )
    add("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)  # for programs that start it
    parser.set_defaults(run=run)


def _add_access_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of TLS and of credentials."""
    add = parser.add_argument
    add(
        "--standard-ports",
        action="store_true",
        help="with TLS: listen on 5671, and on 443 for WebSockets, where SDKs connect to by themselves; often needs a "
        "right",
    )
    add(
        "--tls",
        choices=["auto"],
        help="serve TLS with a certificate that is made for it, by an authority of its own for clients to trust",
    )
    add("--tls-directory", metavar="DIR", help="with --tls auto: keep the certificate here, so that it is trusted once")
    add("--tls-cert", metavar="FILE", help="serve TLS with this certificate chain (PEM)")
    add("--tls-key", metavar="FILE", help="the certificate's private key (PEM)")
    add(
        "--key",
        metavar="KEY",
        help=f"the key of the connection string, which other users of the machine see (default: ${KEY_VARIABLE}, or "
        f"{DEFAULT_KEY})",
    )
    add(
        "--accept-jwt",
        metavar=f"{ANY}|SECRET",
        help="accept JSON web tokens in place of Microsoft Entra's: any, on loopback only, or those signed with the "
        f"secret by HS256, with an expiration time and Event Hubs as audience (default: ${JWT_VARIABLE}, or none)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 0, or 2 for invalid input."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        if args.print_config:
            specs = _specs(args) or [parse_hub(_SAMPLE, "--hub")]
            _say(json.dumps(config_document(specs), indent=2))
        else:
            asyncio.run(_serve(_emulator(args), stops_with_stdin=args.stop_with_stdin))
    except ConfigurationError as error:
        if error.field in _OPTIONS:
            error = ConfigurationError(_option(error.field), _NAMED.sub(lambda name: _option(name[0]), error.problem))
        print(f"eventpump emulator: {without_secrets(str(error))}", file=sys.stderr)
        return BAD_INPUT
    return 0


_OPTIONS = ("accept_jwt", "port", "standard_ports", "tls_directory", "ws_port")
_NAMED = re.compile(r"\b(standard_ports|ws_port|port(?= 0| or ws_port))\b|(?<=requires )tls")
"""What errors of these options name of them."""


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _specs(args: argparse.Namespace) -> list[HubSpec]:
    specs = [parse_hub(text, "--hub") for text in args.hub]
    return specs if args.config is None else specs + load_config(Path(args.config))


def _emulator(args: argparse.Namespace) -> Emulator:
    specs = _specs(args)
    if not specs and args.data is None:
        raise ConfigurationError("--hub", "at least one is required, such as --hub telemetry:4, or a --config file")
    if args.fsync and args.data is None:
        raise ConfigurationError("--fsync", "requires --data")
    return Emulator(
        specs,
        host=args.host,
        port=0 if args.standard_ports and args.port is None else _number("--port", args.port or "5672", 65_535),
        ws_port=None if args.ws_port is None else _number("--ws-port", args.ws_port, 65_535),
        key=args.key or os.environ.get(KEY_VARIABLE) or DEFAULT_KEY,
        data=args.data,
        fsync=args.fsync,
        tls=_tls(args.tls, args.tls_cert, args.tls_key),
        tls_directory=args.tls_directory,
        standard_ports=args.standard_ports,
        accept_jwt=os.environ.get(JWT_VARIABLE) or None if args.accept_jwt is None else args.accept_jwt,
        refuse_long_keys=args.refuse_long_keys,
        names=args.name,
        capture=_capture(args.capture, args.capture_seconds, args.capture_bytes),
        retention=_retention(args.retention_bytes, args.retention_seconds, is_durable=args.data is not None),
    )


def _number(field: str, text: str, highest: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) > highest:
        raise ConfigurationError(field, f"must be a number from 0 to {highest}, not {text[:40]!r}")
    return int(text)


def _capture(directory: str | None, seconds: str, size: str) -> CaptureSettings | None:
    if directory is None:
        return None
    length = _number("--capture-seconds", seconds, 86_400)
    return CaptureSettings(directory, seconds=float(length), size=_number("--capture-bytes", size, 1 << 40))


def _retention(size: str | None, seconds: str | None, *, is_durable: bool) -> Retention:
    default = DURABLE_RETENTION if is_durable else Retention()
    return Retention(
        default.size if size is None else _number("--retention-bytes", size, 1 << 50),
        default.seconds if seconds is None else float(_number("--retention-seconds", seconds, 10**9)),
    )


def _tls(auto: Literal["auto"] | None, cert: str | None, key: str | None) -> ssl.SSLContext | Literal["auto"] | None:
    if cert is None and key is None:
        return auto
    if auto is not None:
        raise ConfigurationError("--tls", "cannot be combined with --tls-cert and --tls-key")
    if cert is None or key is None:
        raise ConfigurationError("--tls-cert", "must be used together with --tls-key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password callback OpenSSL would prompt on the terminal.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "no certificate and key in PEM"
        if isinstance(error, ssl.SSLError):
            reason = f"not a certificate with its key in PEM ({error.reason or 'unreadable'})"
        raise ConfigurationError("--tls-cert", f"{cert}, {key}: {reason}") from None
    return context


async def _serve(emulator: Emulator, *, stops_with_stdin: bool) -> None:
    stop = asyncio.Event()
    if stops_with_stdin:
        loop = asyncio.get_running_loop()
        threading.Thread(target=_wait_for_end_of_stdin, args=(loop, stop), name="stdin", daemon=True).start()
    with handling_signals(lambda _: stop.set()):
        async with emulator:
            _say(emulator.connection_string)
            if emulator.ws_port is not None:
                _say(emulator.ws_connection_string)
            if emulator.authority_file is not None:
                _say(str(emulator.authority_file))
            if sys.stdout.isatty():
                _say(hint(emulator))
            await stop.wait()


def _wait_for_end_of_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with suppress(OSError):
        while os.read(0, 1024):
            pass
    with suppress(RuntimeError):  # the loop is closed: it has stopped already
        loop.call_soon_threadsafe(stop.set)


def hint(emulator: Emulator) -> str:
    """Return what can be done now, for a person. It contains the key, so it is for the terminal and not for a log."""
    hubs = emulator.hubs
    served = ", ".join(f"{hub} ({count} partition{'s' if count != 1 else ''})" for hub, count in hubs.items())
    trusted = secured = ""
    if emulator.authority_file is not None:
        secured = "Clients have to trust the certificate of its authority, in the file above. "
        trusted = f" --ca-file {shlex.quote(str(emulator.authority_file))}"
    return f"""
Serves {served} on {emulator.host}:{emulator.port}. {secured}Ctrl-C stops it. In another terminal:

  export {CONNECTION_VARIABLE}={shlex.quote(emulator.connection_string)}
  echo hello | eventpump send --hub {next(iter(hubs))}{trusted}
  eventpump tail --hub {next(iter(hubs))}{trusted}"""


def _say(line: str) -> None:
    """Print a line. Raises `ConfigurationError` if the standard output is closed."""
    try:
        print(line, flush=True)
    except OSError as error:
        # Buffered output would fail again when the interpreter exits.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise ConfigurationError("stdout", f"the connection string cannot be printed: {error.strerror}") from None
