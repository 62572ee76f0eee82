"""Tokens for `$cbs`: made from a credential, put once per audience, and renewed while the connection lives."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from eventpump.cancellation import is_failure
from eventpump.core.backoff import Backoff
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
from eventpump.options.credentials import Credential, SharedKey, SharedSignature, TokenCredential, current_secret
from eventpump.transport.requests import RequestLinks

_LEAST_DELAY = 1.0
"""Seconds between renewals at least, however short a life a credential's tokens have."""

_log = logging.getLogger("eventpump.transport")


@dataclass(frozen=True, slots=True)
class Token:
    """A token ready to be put.

    :param expires_at: seconds since the Unix epoch.
    :param refresh_after: seconds after which to put another; None where there will be no other.
    """

    text: str = field(repr=False)
    token_type: str
    expires_at: float
    refresh_after: float | None


class TokenSource:
    """Makes tokens from a credential.

    :param sas_lifetime: seconds a token signed with a key lives.
    :param now: the time in seconds since the Unix epoch.
    """

    def __init__(
        self, credential: Credential, *, sas_lifetime: float = 3600.0, now: Callable[[], float] = time.time
    ) -> None:
        self._credential = credential
        self._sas_lifetime = sas_lifetime
        self._now = now

    async def token(self, audience: str) -> Token:
        """Make a token for an audience. :raises AuthenticationError: the credential gives none, or an expired one."""
        credential = self._credential
        now = self._now()
        try:
            secret = current_secret(credential)  # whatever `update` made of it by now
        except ValueError as error:
            raise AuthenticationError(f"the credential cannot be used: {error}", entity=audience) from None
        if isinstance(secret, SharedKey):
            expires_at = math.ceil(now + self._sas_lifetime)  # it is told in whole seconds
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
            # Only the kind is told: a credential's words may hold what it was made of. Where the credential itself was
            # refused, azure.identity says so by this class; the rest, such as a network that is away, may pass.
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
        """Tell whether a token is past its end."""
        return token.expires_at <= self._now()


def _refresh_after(remaining: float) -> float:
    """Say when to ask again. azure-identity hands out its cached token until five minutes before its end."""
    return remaining - 300 if remaining > 600 else remaining / 2


class Authorizer:
    """Keeps the audiences of one connection authorised.

    The tasks it starts end with :meth:`aclose`. A renewal that fails is tried again until the token ends; then the
    service drops the links, which is how their owners learn of it.

    :param auth_timeout: seconds to get a token and put it.
    """

    def __init__(self, source: TokenSource, links: RequestLinks, *, auth_timeout: float, rng: random.Random) -> None:
        self._source = source
        self._links = links
        self._timeout = auth_timeout
        self._rng = rng
        self._putting: dict[str, asyncio.Task[Token]] = {}
        self._current: dict[str, Token] = {}
        self._renewals: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    async def authorize(self, audience: str) -> str:
        """Put a token for the audience, unless one is in force; a second caller waits for the first's.

        :returns: the text of the current token.
        :raises ServiceError: no token, or refused. Cancelled, the request goes on for those who ask next.
        """
        token = self._current.get(audience)
        if token is not None and not self._source.has_ended(token):
            return token.text
        if self._is_closed:
            raise ClosedError("connection")
        task = self._putting.get(audience)
        if task is None:
            task = self._putting[audience] = asyncio.create_task(self._put(audience), name=f"put token {audience}")
            task.add_done_callback(lambda done: self._put_or_not(audience, done))
        await asyncio.wait({task})  # no shield: closing cancels the task, and that is no cancellation of the caller
        if task.cancelled():
            raise ClosedError("connection")
        return task.result().text

    def _put_or_not(self, audience: str, task: asyncio.Task[Token]) -> None:
        del self._putting[audience]
        if task.cancelled() or task.exception() is not None or self._is_closed:
            return  # told to those who waited, if any still do
        delay = task.result().refresh_after
        if delay is None:
            return
        if (renewal := self._renewals.pop(audience, None)) is not None:
            renewal.cancel()
        renewal = asyncio.create_task(self._renew(audience, delay), name=f"renew token {audience}")
        self._renewals[audience] = renewal
        renewal.add_done_callback(lambda done: self._renewed(audience, done))

    def _renewed(self, audience: str, task: asyncio.Task[None]) -> None:
        if self._renewals.get(audience) is task:
            del self._renewals[audience]

    def forget(self, audience: str) -> None:
        """Learn that the service takes the token in force for ended: who asks next puts another."""
        self._current.pop(audience, None)

    async def _put(self, audience: str) -> Token:
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
            cbs.check_response(answer, entity=audience)
        except ProtocolError as error:
            raise ServiceError(f"the answer to a token: {error.description}", entity=audience) from error
        self._current[audience] = token
        return token

    async def _renew(self, audience: str, delay: float) -> None:
        """Put a token before the last one ends, for as long as it has not ended."""
        backoff = Backoff(1.0, 30.0)
        while True:
            await asyncio.sleep(max(delay, _LEAST_DELAY))
            current = self._current.get(audience)
            if current is None:
                return  # the service ended it; who needs it asks
            try:
                token = await self._put(audience)
            except EventPumpError as error:
                if self._source.has_ended(current) or not self._links.is_alive:
                    return
                delay = backoff.next(self._rng)
                _log.warning("the token for %s was not renewed, next try in %.1f s: %s", audience, delay, error)
                continue
            backoff.reset()
            if token.refresh_after is None:
                return
            delay = token.refresh_after

    async def aclose(self) -> None:
        """End every task. Those who wait for a token fail with `ClosedError`."""
        self._is_closed = True
        tasks = [*self._putting.values(), *self._renewals.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
