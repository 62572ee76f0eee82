"""The options that name a consumer group and where its checkpoints are."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from eventpump.checkpoints import BlobCheckpointWriter, SqliteCheckpointWriter
from eventpump.errors import ConfigurationError
from eventpump.lag import BlobCheckpointReader, CheckpointReader, SparkCheckpointReader, SqliteCheckpointReader
from eventpump.options.environment import CONTAINER, STORAGE_CONNECTION_STRING, STORAGE_URL, Environment
from eventpump.storage.checkpoints.blobs import FUNCTIONS_CONTAINER

ENVIRONMENT: Final = Environment()
STORAGE_VARIABLE: Final = ENVIRONMENT.name(STORAGE_CONNECTION_STRING)
"""The environment variable with the storage account's connection string."""
URL_VARIABLE: Final = ENVIRONMENT.name(STORAGE_URL)
"""The environment variable with its URL."""
CONTAINER_VARIABLE: Final = ENVIRONMENT.name(CONTAINER)
"""The environment variable with the container."""
TARGET: Final = "to-"
"""What the options of the store begin with that `checkpoints copy` writes to."""

_FORMATS: Final = {
    "v5": "v5",
    "eph": "event-processor-host",
    "eph-python": "event-processor-host-python",
    "functions": "functions",
}
_WRITTEN: Final = ("v5", "eph")
_GOES_WITH: Final = {
    "container": ("storage-connection-string", "account-url", "preserve-case", "prefix", "namespace"),
    "leases": ("subscription",),
}
_OPTIONS: Final = {
    "path": "leases",
    "directory": "spark",
    "container": "container",
    "subscription": "subscription",
    "credential": "storage-connection-string",
    "preserve_case": "preserve-case",
    "lease_store": "container",
}
"""The options by the names of the parameters that they are given to."""
_OF_ACCOUNT: Final = {"connection_string": "storage-connection-string", "account_url": "account-url"}
"""Others, whose parameters are named as those of the hub's connection."""


def add_store_options(
    parser: argparse.ArgumentParser, start: str = "", *, is_written: bool = False, is_strict: bool = False
) -> None:
    """Add the options that name a store of checkpoints.

    Args:
        start: What the names of the options begin with. Default: "".
        is_written: Whether only stores are offered that can be written. Default: False.
        is_strict: Whether the spelling of names can be given either way; see `checkpoint_store`. Default: False.
    """
    where = "where the checkpoints are" if not start else "where they are copied to"
    store = parser.add_argument_group(f"{where} (one of them)")
    default = "" if start else f" (default: ${CONTAINER_VARIABLE})"
    store.add_argument(f"--{start}container", metavar="NAME", help=f"a blob container; see --{start}format{default}")
    store.add_argument(f"--{start}leases", metavar="FILE", help="the file of a SqliteLeaseStore")
    if not is_written:
        store.add_argument(
            f"--{start}spark", metavar="DIR", help="the checkpointLocation of a Spark query, on this machine"
        )
    blobs = parser.add_argument_group(f"with --{start}container")
    text = (
        "v5: BlobOwnershipStore, azure-eventhub 5 and the SDKs of all languages; eph: BlobLeaseStore, and the "
        "EventProcessorHosts of .NET and Java"
    )
    if not is_written:
        text += f"; eph-python: azure-eventhub 1; functions: Azure Functions, in {FUNCTIONS_CONTAINER}"
    else:
        text += f"; Azure Functions reads v5 in {FUNCTIONS_CONTAINER}"
    choices = _WRITTEN if is_written else tuple(_FORMATS)
    blobs.add_argument(f"--{start}format", choices=choices, default="v5", help=f"{text} (default: v5)")
    shared = f"${STORAGE_VARIABLE}" if not start else "that of the source"
    blobs.add_argument(
        f"--{start}storage-connection-string",
        metavar="TEXT",
        help=f"the storage account's connection string (default: {shared})",
    )
    default = "" if start else f" (default: ${URL_VARIABLE})"
    blobs.add_argument(
        f"--{start}account-url", metavar="URL", help=f"the storage account's URL with a SAS token, instead{default}"
    )
    blobs.add_argument(
        f"--{start}prefix", default="", metavar="TEXT", help="eph: what goes before the consumer group in names"
    )
    case = "v5: names as configured, as Java, Go and Dapr write them"
    if is_strict:
        action = argparse.BooleanOptionalAction
        blobs.add_argument(f"--{start}preserve-case", action=action, default=None, help=case)
    else:
        blobs.add_argument(f"--{start}preserve-case", action="store_true", help=case)
    blobs.add_argument(
        f"--{start}namespace",
        metavar="NAME",
        help="v5: the namespace in the names, if it is not the connection string's host",
    )
    leases = parser.add_argument_group(f"with --{start}leases")
    leases.add_argument(f"--{start}subscription", metavar="NAME", help="a subscription of the hosts (default: default)")


def checkpoint_reader(args: argparse.Namespace) -> CheckpointReader:
    """Return what reads the store that the options name. Raises `ConfigurationError` if they do not name one."""
    check_place(args, "")
    if args.leases is not None:
        return SqliteCheckpointReader(args.leases, **_subscription(args, ""))
    if args.spark is not None:
        return SparkCheckpointReader(args.spark)
    with _naming_account(""):
        return _blob_reader(args, "", preserve_case=args.preserve_case)


def checkpoint_store(args: argparse.Namespace, start: str = "", *, may_be_new: bool = False) -> CheckpointReader:
    """Return what reads the store that the options name, and writes it where that is possible.

    It does not take names in another spelling for those that were asked for.

    Args:
        may_be_new: Whether a file need not exist yet. Default: False.

    Raises:
        ConfigurationError: They name none, or several, or do not go together.
    """
    check_place(args, start, may_be_new=may_be_new)
    if (path := _value(args, start, "leases")) is not None:
        return SqliteCheckpointWriter(path, **_subscription(args, start))
    if (directory := _value(args, start, "spark")) is not None:
        return SparkCheckpointReader(directory)
    with _naming_account(start):
        format_ = _value(args, start, "format")
        if format_ not in _WRITTEN:
            return _blob_reader(args, start)
        spelling: bool | None = _value(args, start, "preserve-case")
        made: Any = _FORMATS[format_]
        container = _value(args, start, "container")
        return BlobCheckpointWriter(container, format=made, preserve_case=spelling, **blob_options(args, start))


def _blob_reader(args: argparse.Namespace, start: str, *, preserve_case: bool = False) -> CheckpointReader:
    made: Any = _FORMATS[_value(args, start, "format")]
    container = _value(args, start, "container")
    return BlobCheckpointReader(container, format=made, preserve_case=preserve_case, **blob_options(args, start))


@contextlib.contextmanager
def _naming_account(start: str) -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        name = _OF_ACCOUNT.get(error.field)
        if name is None:
            raise
        raise ConfigurationError(f"--{start}{name}", error.problem) from None


def in_options(error: ConfigurationError, others: Mapping[str, str], start: str = "") -> ConfigurationError:
    """Return an error of a parameter as one of the option that it was given by.

    Args:
        others: The options of other parameters than those of a store, by parameter.
    """
    name = _OPTIONS.get(error.field)
    option = others.get(error.field) or (error.field if name is None else f"--{start}{name}")
    return ConfigurationError(option, error.problem.replace(", or give create=True to create it", ""))


def _value(args: argparse.Namespace, start: str, name: str) -> Any:
    return getattr(args, f"{start}{name}".replace("-", "_"), None)


def _subscription(args: argparse.Namespace, start: str) -> dict[str, str]:
    subscription = _value(args, start, "subscription")
    return {} if subscription is None else {"subscription": subscription}


def check_place(args: argparse.Namespace, start: str, *, may_be_new: bool = False) -> None:
    """Check that the options name one store, and no option of another; a container may be that of the environment."""
    places = [name for name in ("container", "leases", "spark") if _value(args, start, name) is not None]
    if _value(args, start, "format") == "functions" and not places:
        args.container = FUNCTIONS_CONTAINER
        places = ["container"]
    if not places and not start and (container := ENVIRONMENT.get(CONTAINER)) is not None:
        args.container = container
        places = ["container"]
    if len(places) != 1:
        others = f"--{start}leases or --spark" if hasattr(args, "spark") and not start else f"or --{start}leases"
        raise ConfigurationError(f"--{start}container", f"{others} is required, and only one of them")
    for place, names in _GOES_WITH.items():
        for name in names:
            if place not in places and _value(args, start, name):
                raise ConfigurationError(f"--{start}{name}", f"goes with --{start}{place}")
    path = _value(args, start, "leases")
    if path is not None and not may_be_new and not os.path.isfile(path):
        raise ConfigurationError(f"--{start}leases", f"{path}: there is no such file")


def blob_options(args: argparse.Namespace, start: str) -> dict[str, Any]:
    """Return where the account is, and the prefix of blobs. Raises `ConfigurationError` if no account is named."""
    url = _value(args, start, "account-url")
    account = _value(args, start, "storage-connection-string")
    if start and not account and not url:
        # The account of the source, if that is one.
        account, url = args.storage_connection_string, args.account_url
    if not account and not url:
        account, url = ENVIRONMENT.get(STORAGE_CONNECTION_STRING), ENVIRONMENT.get(STORAGE_URL)
        if account is not None and url is not None:
            raise ConfigurationError(URL_VARIABLE, f"is set along with {STORAGE_VARIABLE}")
    if not account and not url:
        problem = f"is required, here or in {STORAGE_VARIABLE}, or --{start}account-url"
        raise ConfigurationError(f"--{start}storage-connection-string", problem)
    return {
        "connection_string": account,
        "account_url": url,
        "prefix": _value(args, start, "prefix"),
        "namespace": _value(args, start, "namespace"),
    }
