"""Tokens for `$cbs`: created from a credential, put once per audience, and renewed while the connection lives."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from eventpump.aio.retry import retrying
from eventpump.aio.tasks import SingleFlight, TaskSet
from eventpump.cancellation import is_failure
from eventpump.core.backoff import Unlimited
from eventpump.errors import (
    AuthenticationError,
    ClosedError,
    EventPumpError,
    ProtocolError,
    Recovery,
    ServiceError,
    ServiceTimeoutError,
)
from eventpump.eventhubs import cbs, sas
from eventpump.eventhubs.names import JWT_SCOPE, JWT_TOKEN_TYPE, SAS_TOKEN_TYPE
from eventpump.eventhubs.requests import check_answer
from eventpump.options.credentials import Credential, SharedKey, SharedSignature, TokenCredential, current_secret
from eventpump.transport.requests import RequestLinks

_LEAST_DELAY = 1.0
"""The least seconds between renewals, even if a credential's tokens expire sooner."""

_RENEWAL_RETRY: Final = Unlimited(1.0, 30.0)

_log = logging.getLogger("eventpump.transport")


@dataclass(frozen=True, slots=True)
class Token:
    """A token to be put.

    Args:
        token_type: Its type, for `$cbs`.
        expires_at: Seconds since the Unix epoch.
        refresh_after: Seconds after which to put another one; None if there will be no other.
    """

    text: str = field(repr=False)
    token_type: str
    expires_at: float
    refresh_after: float | None


class TokenSource:
    """Creates tokens from a credential; those that are signed with a key live for `sas_lifetime` seconds."""

    def __init__(
        self, credential: Credential, *, sas_lifetime: float = 3600.0, now: Callable[[], float] = time.time
    ) -> None:
        self._credential = credential
        self._sas_lifetime = sas_lifetime
        self._now = now

    async def token(self, audience: str) -> Token:
        """Return a new token. Raises `AuthenticationError` if the credential returned none, or an expired one."""
        credential = self._credential
        now = self._now()
        try:
            secret = current_secret(credential)  # as of the last `update`
        except ValueError as error:
            raise AuthenticationError(f"the credential cannot be used: {error}", entity=audience) from None
        if isinstance(secret, SharedKey):
            expires_at = math.ceil(now + self._sas_lifetime)  # the token has whole seconds
            text = sas.generate(audience, secret.name, secret.key.get_secret_value(), expires_at)
            return Token(text, SAS_TOKEN_TYPE, expires_at, self._sas_lifetime * 0.75)
        if isinstance(secret, SharedSignature):
            remaining = secret.expires_at - now
            if remaining <= 0:
                raise AuthenticationError("the shared access signature has expired", entity=audience)
            refresh_after = None if secret is credential else _refresh_after(remaining)
            return Token(secret.token.get_secret_value(), SAS_TOKEN_TYPE, secret.expires_at, refresh_after)
        assert isinstance(credential, TokenCredential)
        try:
            given = await credential.get_token(JWT_SCOPE)
            text, ends = str(given.token), float(given.expires_on)
        except EventPumpError:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            # Only the class is shown: the text of a credential's error may contain secrets. azure.identity raises this
            # class if the credential itself was refused; other errors, such as those of the network, may be transient.
            is_refused = any(kind.__name__ == "ClientAuthenticationError" for kind in type(error).__mro__)
            raise AuthenticationError(
                f"the credential gave no token: {type(error).__name__}",
                entity=audience,
                recovery=Recovery.GIVE_UP if is_refused else Recovery.RETRY,
            ) from error
        remaining = ends - self._now()
        if remaining <= 0:
            raise AuthenticationError("the credential gave an expired token", entity=audience)
        return Token(text, JWT_TOKEN_TYPE, ends, _refresh_after(remaining))

    def has_ended(self, token: Token) -> bool:
        """Return whether a token is past its end."""
        return token.expires_at <= self._now()


def _refresh_after(remaining: float) -> float:
    """Return the seconds until renewal. azure-identity returns its cached token until five minutes before its end."""
    return remaining - 300 if remaining > 600 else remaining / 2


class _Audience:
    """The token of one audience, with the tasks that put and renew it."""

    __slots__ = ("name", "putting", "renewal", "token")

    def __init__(self, name: str) -> None:
        self.name = name
        self.token: Token | None = None
        self.putting = SingleFlight[Token](f"put token {name}", of="connection")
        self.renewal: asyncio.Task[None] | None = None


class Authorizer:
    """Keeps the audiences of one connection authorized.

    Its tasks end with :meth:`aclose`. A renewal that fails is retried until the token expires. Then the service
    detaches the links, and their owners see that.

    Args:
        auth_timeout: Seconds for each of: getting a token, and putting it.
    """

    def __init__(self, source: TokenSource, links: RequestLinks, *, auth_timeout: float, rng: random.Random) -> None:
        self._source = source
        self._links = links
        self._timeout = auth_timeout
        self._rng = rng
        self._audiences: dict[str, _Audience] = {}
        self._renewals = TaskSet(_renewal_failed)
        self._is_closed = False

    async def authorize(self, audience: str) -> str:
        """Put a token for the audience, unless one is valid, and return the current one.
        Concurrent callers share one request."""
        entry = self._audiences.get(audience)
        if entry is None:
            entry = self._audiences[audience] = _Audience(audience)
        if entry.token is not None and not self._source.has_ended(entry.token):
            return entry.token.text
        if self._is_closed:
            raise ClosedError("connection")
        return (await entry.putting.run(lambda: self._put_and_renew(entry))).text

    async def _put_and_renew(self, entry: _Audience) -> Token:
        """Put a token, and begin to renew it."""
        token = await self._put(entry)
        if token.refresh_after is not None and not self._is_closed:
            if entry.renewal is not None:
                self._renewals.drop(entry.renewal)
            entry.renewal = self._renewals.spawn(self._renew(entry, token.refresh_after), f"renew token {entry.name}")
        return token

    def forget(self, audience: str) -> None:
        """Drop the current token, because the service treats it as expired: the next caller puts another one."""
        if (entry := self._audiences.get(audience)) is not None:
            entry.token = None

    async def _put(self, entry: _Audience) -> Token:
        audience = entry.name
        try:
            async with asyncio.timeout(self._timeout):
                token = await self._source.token(audience)
        except TimeoutError:
            raise ServiceTimeoutError(
                f"the credential gave no token within {self._timeout} s", entity=audience
            ) from None
        name = str(uuid.uuid4())
        answer = await self._links.request(
            lambda reply_to: cbs.put_token_request(
                token.text,
                token.token_type,
                audience,
                message_id=name,
                expires_at=token.expires_at,
                reply_to=reply_to,
            ),
            name,
            timeout=self._timeout,
        )
        try:
            check_answer(answer, entity=audience)
        except ProtocolError as error:
            raise ServiceError(f"the answer to a token: {error.description}", entity=audience) from error
        entry.token = token
        until_renewal = "not renewed" if token.refresh_after is None else f"renewed after {token.refresh_after:g} s"
        _log.debug("put a token for %s; %s", audience, until_renewal)
        return token

    async def _renew(self, entry: _Audience, delay: float | None) -> None:
        """Put a new token before the current one expires, again and again, until that fails."""

        async def renew() -> float | None:
            if entry.token is None:
                return None  # the service expired it; the next caller puts another one
            return (await self._put(entry)).refresh_after

        def is_final(error: Exception) -> bool:
            # Any error, even a refusal, may be transient while the previous token is valid.
            has_ended = entry.token is None or self._source.has_ended(entry.token)
            return has_ended or not self._links.is_alive or not isinstance(error, EventPumpError)

        def report(error: Exception, delay: float) -> None:
            _log.warning("the token for %s was not renewed, next try in %.1f s: %s", entry.name, delay, error)

        while delay is not None:
            await _rest(delay)
            try:
                delay = await retrying(
                    renew, _RENEWAL_RETRY, self._rng, is_final=is_final, on_retry=report, sleep=_rest
                )
            except EventPumpError:
                return

    async def aclose(self) -> None:
        """End every task. Callers that wait for a token fail with `ClosedError`."""
        self._is_closed = True
        audiences = list(self._audiences.values())
        for entry in audiences:
            entry.putting.cancel()
            if entry.renewal is not None:
                self._renewals.drop(entry.renewal)
        for entry in audiences:
            await entry.putting.aclose()
        await self._renewals.wait(self._timeout)


async def _rest(delay: float) -> None:
    await asyncio.sleep(max(delay, _LEAST_DELAY))


def _renewal_failed(name: str, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        # As a rule the loop ends, and the client, which was not closed, is named by a warning. Otherwise the service
        # detaches the links when the token expires, and they are attached again with another one.
        _log.debug("%s: cancelled", name)
    else:
        _log.error("%s: failed", name, exc_info=error)
