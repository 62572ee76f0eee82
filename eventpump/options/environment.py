"""The variables of the environment that `from_env` and the command read. Nothing else of the library reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from eventpump.errors import ConfigurationError

PREFIX: Final = "EVENTPUMP"
"""What the variables begin with, unless another prefix is given."""

CONNECTION_STRING: Final = "CONNECTION_STRING"
NAMESPACE: Final = "NAMESPACE"
HUB: Final = "HUB"
CONSUMER_GROUP: Final = "CONSUMER_GROUP"
HOST_NAME: Final = "HOST_NAME"
STORAGE_CONNECTION_STRING: Final = "STORAGE_CONNECTION_STRING"
STORAGE_URL: Final = "STORAGE_URL"
CONTAINER: Final = "CONTAINER"

_OTHER_NAMES: Final = {CONNECTION_STRING: "CONNECTIONSTRING"}
"""As Aspire names them."""

_OPTIONS: Final = {
    "connection_string": CONNECTION_STRING,
    "fully_qualified_namespace": NAMESPACE,
    "hub": HUB,
    "consumer_group": CONSUMER_GROUP,
    "owner_id": HOST_NAME,
}
"""The variables by the options that they are given to."""


def has_variable(name: str) -> bool:
    """Return whether the environment has a variable of this name, in upper or lower case."""
    return any(each.lower() == name.lower() for each in os.environ)


class Environment:
    """Reads variables of one prefix, which is followed by "_". An empty one counts as not set."""

    def __init__(self, prefix: str = PREFIX) -> None:
        if not prefix or not isinstance(prefix, str):
            raise ConfigurationError("prefix", 'must be what the variables begin with, such as "EVENTPUMP"')
        self._prefix = prefix

    def name(self, variable: str) -> str:
        """Return the whole name of a variable: that of the two that is set, where there are two."""
        other = _OTHER_NAMES.get(variable)
        whole = f"{self._prefix}_{variable}"
        if other is not None and not os.environ.get(whole) and os.environ.get(f"{self._prefix}_{other}"):
            return f"{self._prefix}_{other}"
        return whole

    def get(self, variable: str) -> str | None:
        """Return the value of a variable; None if it is not set."""
        return os.environ.get(self.name(variable)) or None

    def connection(self, given: Mapping[str, object]) -> dict[str, Any]:
        """Return the options of a connection that are set, and were not given in the program, which counts."""
        found: dict[str, Any] = {}
        if given.get("source") is not None:
            return found
        if (hub := self.get(HUB)) is not None:
            found["hub"] = hub
        if not given.keys() & {"connection_string", "fully_qualified_namespace"} and not _is_object(given):
            text, namespace = self.get(CONNECTION_STRING), self.get(NAMESPACE)
            if text is not None and namespace is not None:
                raise ConfigurationError(self.name(NAMESPACE), f"is set along with {self.name(CONNECTION_STRING)}")
            if text is not None:
                found["connection_string"] = text
            elif namespace is None:
                problem = f"is not set, and neither is {self.name(NAMESPACE)}"
                raise ConfigurationError(self.name(CONNECTION_STRING), problem)
            elif given.get("credential") is None:
                problem = "names a namespace, for which `credential` has to be given, such as a DefaultAzureCredential"
                raise ConfigurationError(self.name(NAMESPACE), problem)
            else:
                found["fully_qualified_namespace"] = namespace
        return found

    def store(self) -> tuple[str, dict[str, Any]]:
        """Return the container of the leases, and how the storage account is reached: a connection string or a URL."""
        container, text, url = self.get(CONTAINER), self.get(STORAGE_CONNECTION_STRING), self.get(STORAGE_URL)
        if container is None:
            raise ConfigurationError(self.name(CONTAINER), "is not set, and no `lease_store` is given")
        if text is not None and url is not None:
            raise ConfigurationError(
                self.name(STORAGE_URL), f"is set along with {self.name(STORAGE_CONNECTION_STRING)}"
            )
        if text is not None:
            return container, {"connection_string": text}
        if url is not None:
            return container, {"account_url": url}
        problem = f"is not set, and neither is {self.name(STORAGE_URL)}"
        raise ConfigurationError(self.name(STORAGE_CONNECTION_STRING), problem)

    @contextmanager
    def naming(self, found: Mapping[str, object], given: Mapping[str, object]) -> Iterator[None]:
        """Have errors about values of the environment, not about those given, name their variables."""
        try:
            yield
        except ConfigurationError as error:
            option, variable, problem = error.field, None, error.problem
            if option in found or (option == "hub" and option not in given):
                variable = self.name(_OPTIONS[option])
            elif option[:1].isupper() and "connection_string" in found:  # a part of it, such as Endpoint
                variable, problem = self.name(CONNECTION_STRING), f"{option}: {error.problem}"
            if variable is not None:
                raise ConfigurationError(variable, problem) from None
            raise


def _is_object(given: Mapping[str, object]) -> bool:
    """Return whether the connection is given as an object."""
    return not isinstance(given.get("transport", ""), str)
