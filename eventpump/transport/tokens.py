"""Tokens for `$cbs`: made from a credential, put once per audience, and renewed while the connection lives."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from eventpump.core.backoff import Backoff
from eventpump.dialect import cbs, sas
from eventpump.dialect.names import CBS_NODE, JWT_SCOPE, JWT_TOKEN_TYPE, SAS_TOKEN_TYPE
from eventpump.errors import AuthenticationError, EventPumpError
from eventpump.settings import Credential, SharedKey, SharedSignature
from eventpump.transport.requests import RequestLinks

SAS_LIFETIME = 3600
"""Seconds a signed token lives."""

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

    :param now: the time in seconds since the Unix epoch.
    """

    def __init__(self, credential: Credential, *, now: Callable[[], float] = time.time) -> None:
        self._credential = credential
        self._now = now

    async def token(self, audience: str) -> Token:
        """Make a token for an audience. :raises AuthenticationError: the credential gives none, or an expired one."""
        credential = self._credential
        now = self._now()
        if isinstance(credential, SharedKey):
            expires_at = int(now) + SAS_LIFETIME
            text = sas.generate(audience, credential.name, credential.key.get_secret_value(), expires_at)
            return Token(text, SAS_TOKEN_TYPE, expires_at, SAS_LIFETIME * 0.75)
        if isinstance(credential, SharedSignature):
            if credential.expires_at <= now:
                raise AuthenticationError("the shared access signature has expired", entity=audience)
            return Token(credential.token.get_secret_value(), SAS_TOKEN_TYPE, credential.expires_at, None)
        try:
            given = await credential.get_token(JWT_SCOPE)
        except EventPumpError:
            raise
        except Exception as error:
            # Only the kind is told: a credential's words may hold what it was made of.
            raise AuthenticationError(
                f"the credential gave no token: {type(error).__name__}", entity=audience
            ) from error
        remaining = given.expires_on - self._now()
        if remaining <= 0:
            raise AuthenticationError("the credential gave an expired token", entity=audience)
        # azure-identity hands out its cached token until five minutes before it ends.
        return Token(
            given.token, JWT_TOKEN_TYPE, given.expires_on, remaining - 300 if remaining > 600 else remaining / 2
        )


class Authorizer:
    """Keeps the audiences of one connection authorised.

    The tasks it starts end with :meth:`aclose`. A renewal that fails is tried again until the token ends; then the
    service drops the links, which is how their owners learn of it.
    """

    def __init__(self, source: TokenSource, links: RequestLinks, *, auth_timeout: float, rng: random.Random) -> None:
        self._source = source
        self._links = links
        self._timeout = auth_timeout
        self._rng = rng
        self._first: dict[str, asyncio.Task[None]] = {}
        self._current: dict[str, Token] = {}
        self._renewals: set[asyncio.Task[None]] = set()

    async def authorize(self, audience: str) -> str:
        """Put a token for the audience, once; a second caller waits for the first's.

        :returns: the text of the current token.
        :raises ServiceError: no token, or refused. Cancelled, the request goes on for those who ask next.
        """
        task = self._first.get(audience)
        if task is None:
            task = self._first[audience] = asyncio.create_task(self._authorize(audience), name=f"authorize {audience}")
            task.add_done_callback(lambda done: self._forget(audience, done))
        await asyncio.shield(task)
        return self._current[audience].text

    def _forget(self, audience: str, task: asyncio.Task[None]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._first.get(audience) is task:
            del self._first[audience]

    async def _authorize(self, audience: str) -> None:
        token = await self._put(audience)
        if token.refresh_after is not None:
            renewal = asyncio.create_task(self._renew(audience, token.refresh_after), name=f"renew {audience}")
            self._renewals.add(renewal)
            renewal.add_done_callback(self._renewals.discard)

    async def _put(self, audience: str) -> Token:
        token = await self._source.token(audience)
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
        cbs.check_response(answer, entity=audience)
        self._current[audience] = token
        return token

    async def _renew(self, audience: str, delay: float) -> None:
        backoff = Backoff(1.0, 30.0)
        while True:
            await asyncio.sleep(max(delay, 0.05))
            try:
                token = await self._put(audience)
            except EventPumpError as error:
                delay = backoff.next(self._rng)
                _log.warning("the token for %s was not renewed, next try in %.1f s: %s", audience, delay, error)
                continue
            backoff.reset()
            if token.refresh_after is None:
                return
            delay = token.refresh_after

    async def aclose(self) -> None:
        """End every task."""
        tasks = [*self._first.values(), *self._renewals]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def node(self) -> str:
        """The node tokens are put to."""
        return CBS_NODE
