"""Connection strings of services that need not exist."""

from __future__ import annotations


def connection_string_to(
    host: str, port: int | None = None, *, key: str = "key", hub: str | None = None, is_plain: bool = False
) -> str:
    """Return a connection string.

    Args:
        host: The service's host.
        port: Its port; None for the default one.
        key: The key, of the name "name". One of fewer than four characters is not looked for as a leak.
        hub: The hub that the string names; None for none.
        is_plain: Whether the service is one for development, which uses no TLS.
    """
    address = host if port is None else f"{host}:{port}"
    entity = "" if hub is None else f";EntityPath={hub}"
    development = ";UseDevelopmentEmulator=true" if is_plain else ""
    return f"Endpoint=sb://{address};SharedAccessKeyName=name;SharedAccessKey={key}{entity}{development}"
