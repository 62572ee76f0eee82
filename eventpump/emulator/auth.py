"""Access control: access rules, verification of tokens, and the rights of a connection. Pure."""

from __future__ import annotations

import enum
import hmac
import secrets
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from eventpump.eventhubs import sas
from eventpump.eventhubs.addresses import Address, AddressKind, Audience, parse_audience
from eventpump.eventhubs.names import JWT_TOKEN_TYPE, SAS_TOKEN_TYPE
from eventpump.texts import excerpt

DEFAULT_KEY_NAME = "RootManageSharedAccessKey"
DEFAULT_KEY = "SAS_KEY_VALUE"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""The names of the local machine."""


class Right(enum.Flag):
    """A right that a rule or token grants."""

    SEND = enum.auto()
    LISTEN = enum.auto()
    ALL = SEND | LISTEN


@dataclass(frozen=True, slots=True)
class AccessRule:
    """A named key and the rights that it grants on the whole namespace."""

    name: str
    key: str = field(repr=False)
    rights: Right = Right.ALL


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """The result of a `token_verifier` for an accepted token.

    Args:
        expires_at: Seconds since the Unix epoch.
        app_id: The application that it was made for, which links show in their properties.
    """

    expires_at: float
    rights: Right = Right.ALL
    app_id: str = str(uuid.UUID(int=0))


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights on an entity.

    Args:
        expires_at: Seconds since the Unix epoch; None for never.
        name: The rule whose key it was signed with, or (JWT) the application.
        is_jwt: Whether it is by a JWT.
    """

    audience: Audience
    rights: Right
    expires_at: float | None
    name: str = ""
    is_jwt: bool = False


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a token was refused: a put-token status code and its description."""

    code: int
    description: str


TokenVerifier = Callable[[str], VerifiedToken | Denial | None]
"""Checks a JWT; None refuses it, and a denial says why."""


class KeyRing:
    """Checks credentials against the access rules.

    Args:
        token_verifier: Accepts JWTs; without one they are refused.
        hosts: Names and addresses of the service, in lower case, which are equivalent; a signature must be for one of
            them. None if they are unknown: a signature may then be for any host, if it equals that of the audience that
            the token is put for.
    """

    def __init__(
        self,
        rules: Iterable[AccessRule],
        token_verifier: TokenVerifier | None = None,
        *,
        hosts: Collection[str] | None = None,
    ) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._unknown = AccessRule("", secrets.token_urlsafe(), Right(0))
        self._token_verifier = token_verifier
        self._hosts = None if hosts is None else frozenset(hosts)

    def replace_key(self, name: str, key: str) -> None:
        """Replace the key of a rule: tokens signed with the old one are refused from now on.
        Raises `KeyError` for no rule."""
        self._rules[name] = AccessRule(name, key, self._rules[name].rights)

    def check_token(self, token: object, token_type: str, audience_text: str, now: float) -> Grant | Denial:
        """Check a token put for an audience. The text of a denial never contains anything of the token."""
        try:
            audience = parse_audience(audience_text)
        except ValueError as error:
            return Denial(400, str(error))
        if not isinstance(token, str):
            return Denial(400, "the token is not text")
        # Old clients put signatures as JWTs, and the service goes by the text.
        if token_type == JWT_TOKEN_TYPE and not sas.is_signature(token):
            verified = self._token_verifier(token) if self._token_verifier is not None else None
            if isinstance(verified, Denial):
                return verified
            if verified is None:
                return Denial(401, "InvalidToken: this service does not accept the JSON web token.")
            if verified.expires_at <= now:
                return Denial(401, "ExpiredToken: the token has expired.")
            return Grant(audience, verified.rights, verified.expires_at, verified.app_id, is_jwt=True)
        if token_type not in (SAS_TOKEN_TYPE, JWT_TOKEN_TYPE):
            return Denial(400, f"the token type '{excerpt(token_type)}' is not supported")
        return self._check_signature(token, audience, now)

    def _check_signature(self, token: str, audience: Audience, now: float) -> Grant | Denial:
        try:
            parsed = sas.parse(token)
            resource = parse_audience(parsed.resource)
        except ValueError as error:
            return Denial(401, f"MalformedToken: {error}")
        # An unknown name and a wrong key cannot be distinguished by the client, nor by the time that the answer takes.
        rule = self._rules.get(parsed.key_name, self._unknown)
        verdict = sas.verify(parsed, rule.key, now)
        if verdict is sas.TokenVerdict.EXPIRED:
            return Denial(401, "ExpiredToken: the token has expired.")
        if not verdict:
            return Denial(401, "InvalidSignature: The token has an invalid signature.")
        if not self._is_one_host(resource.host, audience.host) or not resource.includes(audience):
            return Denial(401, "InvalidAudience: the token's resource does not cover the audience.")
        if audience.is_management and audience.hub is None:
            # The node serves every hub, and the signature is for one.
            audience = replace(audience, hub=resource.hub)
        return Grant(audience, rule.rights, parsed.expires_at, rule.name)

    def check_request(self, token: str, hub: str, now: float) -> Denial | None:
        """Check the token in a request for a hub's properties, of either type. Returns None where it is accepted."""
        if not sas.is_signature(token):
            found = self.check_token(token, JWT_TOKEN_TYPE, f"sb://any/{hub}", now)
            return found if isinstance(found, Denial) else None
        try:
            resource = parse_audience(sas.parse(token).resource)
        except ValueError as error:
            return Denial(401, f"MalformedToken: {error}")
        if resource.hub is not None and resource.hub.lower() != hub.lower():
            return Denial(401, "InvalidAudience: the token's resource is not the hub.")
        # Clients sign for the hub, the node, or whatever they read: any of it allows reading its properties.
        found = self._check_signature(token, resource, now)
        return found if isinstance(found, Denial) else None

    def _is_one_host(self, signed: str, put_for: str) -> bool:
        if self._hosts is not None:
            return signed in self._hosts and put_for in self._hosts
        return signed == put_for or {signed, put_for} <= LOOPBACK

    def check_plain(self, response: bytes | None) -> Grant | None:
        """Check a SASL PLAIN response (RFC 4616): key name and key. None refuses it."""
        parts = (response or b"").split(b"\0")
        if len(parts) != 3:
            return None
        token_name = parts[1].decode(errors="replace")
        rule = self._rules.get(token_name, self._unknown)
        if not hmac.compare_digest(rule.key.encode(), parts[2]):
            return None
        return Grant(Audience(""), rule.rights, None, rule.name)


class Grants:
    """The rights of one connection. A later token for the same audience replaces the earlier one."""

    def __init__(self) -> None:
        self._grants: dict[Audience, Grant] = {}

    def put(self, grant: Grant) -> None:
        """Add rights, or renew them."""
        self._grants[grant.audience] = grant

    def __bool__(self) -> bool:
        return bool(self._grants)

    def allow(self, address: Address, right: Right | None) -> bool:
        """Return whether a link is allowed."""
        if address.kind is AddressKind.CBS:
            return True
        return self.granting(address, right) is not None

    def granting(self, address: Address, right: Right | None) -> Grant | None:
        """Return what allows a link, other than one to `$cbs`; None if nothing does. Parameters as of `allow`."""
        wanted = Right.ALL if right is None else right
        return next(
            (grant for grant in self._grants.values() if grant.rights & wanted and grant.audience.covers(address)), None
        )

    def allow_read(self, hub: str) -> bool:
        """Return whether a hub's properties may be read: any right on the hub, or a part of it, suffices."""
        return any(
            grant.audience.hub is None or grant.audience.hub.lower() == hub.lower() for grant in self._grants.values()
        )

    def next_expiry(self) -> float | None:
        """Return when the first rights expire, in seconds since the Unix epoch."""
        return min((grant.expires_at for grant in self._grants.values() if grant.expires_at is not None), default=None)

    def expire(self, now: float) -> bool:
        """Remove expired rights, and return whether there were any."""
        ended = [
            audience
            for audience, grant in self._grants.items()
            if grant.expires_at is not None and grant.expires_at <= now
        ]
        for audience in ended:
            del self._grants[audience]
        return bool(ended)
