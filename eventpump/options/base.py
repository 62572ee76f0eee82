"""The base of all option models, and the checks that they share."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from eventpump.errors import ConfigurationError
from eventpump.options.credentials import is_unicode
from eventpump.options.predecessor import option_hint

# None of these checks may show the value: people paste connection strings into the wrong field.
_HUB: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_./-]{0,254}[A-Za-z0-9])?")
_INSTANCE: Final = re.compile(r"^Input should be (a dictionary or )?an instance of ")
_LABEL: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
PLAIN_SCHEMES: Final = frozenset({"amqp", "http", "ws"})


def check_host(value: str) -> str:
    if len(value) > 253 or not all(_LABEL.fullmatch(label) for label in value.split(".")):
        try:
            ipaddress.IPv6Address(value)
        except ValueError:
            raise ValueError("must be a host name alone, such as example.servicebus.windows.net") from None
    return value.lower()


def check_hub(value: str) -> str:
    if not _HUB.fullmatch(value):
        raise ValueError(
            "must be the name of an event hub: up to 256 letters, digits and . _ / -, a letter or digit at both ends"
        )
    return value


class Endpoint(NamedTuple):
    scheme: str
    host: str
    port: int | None


def split_endpoint(value: str) -> Endpoint:
    """Split `host[:port]` or `scheme://host[:port][/]`. Raises `ValueError` with a text that does not show it."""
    problem = "must be of the form host[:port] or scheme://host[:port]/"
    if not value.isprintable() or " " in value:
        # urlsplit would drop some of these without a word.
        raise ValueError(problem)
    try:
        parts = urlsplit(value if "://" in value else f"//{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(problem) from None
    if not host or port == 0 or parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(problem)
    try:
        return Endpoint(parts.scheme, check_host(host), port)
    except ValueError:
        raise ValueError(problem) from None


class SettingsModel(BaseModel):
    """The base of every settings model: frozen, closed to unknown names, and raising one `ConfigurationError`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            # `from None`: pydantic's error holds its input, which may be a secret.
            raise _configuration_error(error, type(self).model_fields) from None


def _configuration_error(error: ValidationError, known: Iterable[str]) -> ConfigurationError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or error.title
    match first["type"]:
        case "missing":
            return ConfigurationError(field, "is required")
        case "extra_forbidden":
            return unknown_option(field, known)
    problem = first["msg"].removeprefix("Value error, ")
    return ConfigurationError(field, _INSTANCE.sub("must be a ", problem))


def unknown_option(name: str, known: Iterable[str], *, spelled: str | None = None) -> ConfigurationError:
    """Return the error for an option that does not exist. It suggests the one with the most similar name.

    Args:
        spelled: What to compare with their names, if not `name`.
    """
    if (hint := option_hint(name)) is not None and name not in known:
        return ConfigurationError(name, f"there is no such option; {hint}")
    by_lower = {each.lower(): each for each in known}
    nearest = get_close_matches((name if spelled is None else spelled).lower(), by_lower, n=1)
    hint = f"; did you mean {by_lower[nearest[0]]}?" if nearest else ""
    return ConfigurationError(name, f"there is no such option{hint}")


Seconds = Annotated[float, Field(gt=0, le=86_400)]
HostName = Annotated[str, AfterValidator(check_host)]
HubName = Annotated[str, AfterValidator(check_hub)]


_MAX_DELAY: Final = 60.0


class RetryOptions(SettingsModel):
    """How many times, and after which delays, a failed operation is retried.

    The defaults below are those of sends and requests. For an option with other defaults, such as `link_retry` and
    `handler_retry`, fields that are not given have the default of that option.

    Args:
        max_retries: The number of retries after the first attempt, 0 to 100; None for no limit. While there is no
            connection, sends are attempted more often, and only attempts that are as far apart as the delays count.
            Default: 3.
        base_delay: Seconds: the upper bound of the first delay, which doubles with each further one; if `mode` is
            "fixed", every delay. Default: 0.8.
        max_delay: Seconds: the upper bound of every delay; without effect if `mode` is "fixed". If not given, it is
            at least `base_delay`. Delays between attempts to connect are at most 5 s. Default: 60.0.
        mode: "exponential": delays are drawn at random up to a bound that doubles (full jitter), so that many clients
            do not retry at the same time. "fixed": each is `base_delay`. A throttling service may ask for more.
            Default: "exponential".
        try_timeout: Seconds that one attempt may take, including to connect and to attach, after which it is cancelled
            and counts as failed with `ServiceTimeoutError`; a plain send may be stored nevertheless. Single steps are
            limited by `operation_timeout` in any case. Not for `handler_retry`, where `handler_timeout` limits the
            calls. None for no limit. Default: None.
    """

    max_retries: int | None = Field(default=3, ge=0, le=100)
    base_delay: Seconds = 0.8
    mode: Literal["exponential", "fixed"] = "exponential"
    max_delay: Seconds = _MAX_DELAY
    try_timeout: float | None = Field(default=None, gt=0, le=86_400)

    def __init__(self, **data: Any) -> None:
        base = data.get("base_delay")
        if "max_delay" not in data and isinstance(base, int | float) and base > _MAX_DELAY:
            data["max_delay"] = base
        super().__init__(**data)

    @field_validator("max_delay")
    @classmethod
    def _not_below_base(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("base_delay", 0.0) and info.data.get("mode") != "fixed":
            raise ValueError("must not be below base_delay")
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the fields, of the last two only those that are not the default."""
        yield from ((name, getattr(self, name)) for name in ("max_retries", "base_delay", "max_delay"))
        for name in ("mode", "try_timeout"):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield name, value


def completed_by(default: RetryOptions, *, limits_tries: bool = True) -> BeforeValidator:
    """Return a validator that takes what an option's `RetryOptions` does not give from the option's own default.

    Args:
        limits_tries: Whether the option has a `try_timeout`. Default: True.
    """

    def complete(value: object) -> object:
        if isinstance(value, RetryOptions):
            value = value.model_dump(exclude_unset=True)
        if not isinstance(value, Mapping):
            return value
        given = {**default.model_dump(), **value}
        if "max_delay" not in value and isinstance(base := given["base_delay"], int | float):
            given["max_delay"] = max(base, default.max_delay)
        if given.get("try_timeout") is not None and not limits_tries:
            raise ValueError('try_timeout is not possible here; set handler_timeout, and on_handler_timeout="cancel"')
        try:
            return RetryOptions(**given)
        except ConfigurationError as error:
            raise ValueError(f"{error.field} {error.problem}") from None

    return BeforeValidator(complete)


def _check_name(value: str) -> str:
    if not value or not value.isprintable() or not is_unicode(value):
        raise ValueError("must be printable text, and not empty")
    return value


Name = Annotated[str, Field(max_length=256), AfterValidator(_check_name)]
