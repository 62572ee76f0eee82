"""Connection strings of Event Hubs: parsed and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import SecretStr

from eventpump.errors import ConfigurationError
from eventpump.eventhubs import sas
from eventpump.options.base import check_hub, split_endpoint
from eventpump.options.credentials import SharedKey, SharedSignature, is_unicode

_ENDPOINT_KEYS: Final = {"endpoint", "hostname"}
_KEYS: Final = {
    "endpoint": "Endpoint",
    "hostname": "HostName",
    "sharedaccesskeyname": "SharedAccessKeyName",
    "sharedaccesskey": "SharedAccessKey",
    "sharedaccesssignature": "SharedAccessSignature",
    "entitypath": "EntityPath",
    "usedevelopmentemulator": "UseDevelopmentEmulator",
}
WHOLE: Final = "connection_string"


@dataclass(frozen=True, slots=True)
class ConnectionString:
    """A parsed connection string.

    Args:
        host: The namespace's host name, in lower case.
        port: The port of the endpoint; None if it has none.
        hub: The value of `EntityPath`; None if there is none.
        credential: The key or the signature; None if the string has neither.
        use_development_emulator: Whether to connect without TLS, as the official emulator requires.
    """

    host: str
    port: int | None
    hub: str | None
    credential: SharedKey | SharedSignature | None
    use_development_emulator: bool

    @classmethod
    def parse(cls, text: str) -> ConnectionString:
        """Parse a connection string.

        The case of keys does not matter, and unknown keys are ignored. A value may contain `=`.

        Raises:
            ConfigurationError: A part is missing or malformed; the error names the key and shows no value.
        """
        values = _pairs(text)
        host, port = _endpoint(values)
        return cls(
            host=host,
            port=port,
            hub=_entity_path(values.get("entitypath")),
            credential=_credential(values),
            use_development_emulator=_flag(values.get("usedevelopmentemulator")),
        )


def _pairs(text: object) -> dict[str, str]:
    if not isinstance(text, str) or not is_unicode(text):
        raise ConfigurationError(WHOLE, "must be Unicode text")
    values: dict[str, str] = {}
    for number, pair in enumerate(text.strip().split(";"), 1):
        if not pair.strip():
            continue
        # A key in base64 ends with equals signs, so only the first one separates.
        name, separator, value = pair.partition("=")
        key, value = name.strip().lower(), value.strip()
        if not separator or not key:
            raise ConfigurationError(WHOLE, f"its part {number} is not of the form key=value")
        if key not in _KEYS:
            continue
        if not value:
            raise ConfigurationError(_KEYS[key], "has no value in the connection string")
        if key in values:
            raise ConfigurationError(_KEYS[key], "appears twice in the connection string")
        values[key] = value
    return values


def _endpoint(values: dict[str, str]) -> tuple[str, int | None]:
    keys = [key for key in values if key in _ENDPOINT_KEYS]
    if len(keys) != 1:
        problem = "is missing in the connection string; it has the form sb://host[:port]/"
        if keys:
            problem = "cannot be given along with HostName in the connection string"
        raise ConfigurationError("Endpoint", problem)
    key = keys[0]
    value = values[key]
    if key == "endpoint" and "://" not in value:
        raise ConfigurationError("Endpoint", "must be of the form sb://host[:port]/")
    try:
        _scheme, host, port = split_endpoint(value)
    except ValueError as error:
        raise ConfigurationError(_KEYS[key], str(error)) from None
    return host, port


def _credential(values: dict[str, str]) -> SharedKey | SharedSignature | None:
    name, key = values.get("sharedaccesskeyname"), values.get("sharedaccesskey")
    signature = values.get("sharedaccesssignature")
    if signature is not None:
        if name is not None or key is not None:
            raise ConfigurationError(
                "SharedAccessSignature", "cannot be given along with a key in the connection string"
            )
        try:
            sas.parse(signature)
        except ValueError as error:
            raise ConfigurationError("SharedAccessSignature", str(error)) from None
        return SharedSignature(SecretStr(signature))
    if key is None and name is None:
        return None
    if key is None:
        raise ConfigurationError("SharedAccessKey", "is missing, though SharedAccessKeyName is given")
    if name is None:
        raise ConfigurationError("SharedAccessKeyName", "is missing, though SharedAccessKey is given")
    return SharedKey(name, SecretStr(key))


def _entity_path(value: str | None) -> str | None:
    try:
        return None if value is None else check_hub(value)
    except ValueError as error:
        raise ConfigurationError("EntityPath", str(error)) from None


def _flag(value: str | None) -> bool:
    if value is not None and value.lower() not in {"true", "false"}:
        raise ConfigurationError("UseDevelopmentEmulator", "must be true or false")
    return value is not None and value.lower() == "true"
