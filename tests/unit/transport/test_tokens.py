"""Tokens: put once per audience, renewed in time on a live connection, and never shown."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from pydantic import SecretStr

from eventpump.amqp.message import Message, Properties
from eventpump.amqp.types import Symbol
from eventpump.errors import AuthenticationError, ConnectionLostError, Recovery, ServiceError, ServiceTimeoutError
from eventpump.eventhubs import cbs, sas
from eventpump.eventhubs.names import JWT_SCOPE, JWT_TOKEN_TYPE, SAS_TOKEN_TYPE
from eventpump.eventhubs.requests import correlation_id, message_id
from eventpump.options.credentials import SharedKey, SharedSignature
from tests.unit.transport.service import KEY, Service, open_reader, open_sender, settle

AUDIENCE = "sb://example.test/telemetry"
UNAUTHORIZED = Symbol("amqp:unauthorized-access")


def now() -> float:
    return asyncio.get_running_loop().time()


def wall() -> float:
    """The time the transports of the service see."""
    return time.time() + now()


@dataclass
class AccessToken:
    token: str
    expires_on: int


@dataclass
class Credential:
    """Gives tokens of a life, or fails.

    Attributes:
        given: How often it was asked.
    """

    epoch: float
    life: float = 3600.0
    error: BaseException | None = None
    hangs: bool = False
    given: int = 0
    scopes: list[str] = field(default_factory=list)

    async def get_token(self, *scopes: str) -> AccessToken:
        self.given += 1
        self.scopes += scopes
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return AccessToken(f"jwt-{self.given}", int(self.epoch + now() + self.life))


class ClientAuthenticationError(Exception):
    """What azure.identity raises for a credential that is refused."""


async def test_put_of_a_token_is_shared_by_callers(service: Service) -> None:
    """However many links ask for an audience at once, its token is put once, and then serves all that follow."""
    transport = service.transport()
    await asyncio.gather(*(open_sender(transport, str(number)) for number in range(10)))
    await open_sender(transport, "11")
    assert [put.audience for _, put in service.tokens] == [AUDIENCE]
    await open_reader(transport)
    assert [put.audience for _, put in service.tokens][1:] == [f"{AUDIENCE}/consumergroups/$Default"]
    await transport.aclose()


async def test_token_that_is_signed_is_renewed(service: Service) -> None:
    """A token signed with a key lives an hour, and another is put well before, again and again."""
    transport = service.transport()
    await open_sender(transport)
    await asyncio.sleep(4 * 3600)
    assert [round(at - service.tokens[0][0]) for at, _ in service.tokens] == [2700 * turn for turn in range(6)]
    tokens = [sas.parse(put.token) for _, put in service.tokens]
    assert all(put.token_type == SAS_TOKEN_TYPE for _, put in service.tokens)
    assert [token.expires_at - tokens[0].expires_at for token in tokens] == [2700 * turn for turn in range(6)]
    assert len(service.connections) == 1
    await transport.aclose()


async def test_renewal_that_fails_is_repeated_and_logged(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """Refused or unanswered, a renewal is repeated with growing delays, and reported in the log, without the token."""
    transport = service.transport()
    link = await open_sender(transport)
    await asyncio.sleep(2600)
    put = service.script.answer
    service.script.answer = lambda request: cbs.response(request, 401, "no", UNAUTHORIZED)
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(200)
    failed = len(service.tokens) - 1
    assert 4 <= failed <= 10
    service.script.answer = put
    await asyncio.sleep(60)
    renewed = len(service.tokens)
    await asyncio.sleep(2000)
    assert len(service.tokens) == renewed == failed + 2
    assert link.is_attached
    assert len(caplog.records) == failed
    assert not any(secret in caplog.text for _, secret_put in service.tokens for secret in (KEY, secret_put.token))
    await transport.aclose()


async def test_token_that_expired_is_put_again(service: Service) -> None:
    """When renewals failed until the token ended they stop, and who opens a link then has a fresh one put."""
    transport = service.transport()
    await open_sender(transport)
    put = service.script.answer
    service.script.answer = lambda request: cbs.response(request, 401, "no", UNAUTHORIZED)
    await asyncio.sleep(4000)
    count = len(service.tokens)
    await asyncio.sleep(4000)
    assert len(service.tokens) == count
    with pytest.raises(AuthenticationError) as caught:
        await open_sender(transport, "1")
    assert caught.value.recovery is Recovery.GIVE_UP
    service.script.answer = put
    await open_sender(transport, "2")
    count = len(service.tokens)
    await asyncio.sleep(2701)
    assert len(service.tokens) == count + 1
    await transport.aclose()


async def test_renewals_end_with_their_connection(service: Service) -> None:
    """After a reconnect tokens are put on the new connection, and no renewal of the old one goes on."""
    transport = service.transport()
    for _ in range(3):
        _, sink = await open_reader(transport)
        service.connection.drop()
        await sink.ended()
    await open_reader(transport)
    await settle()
    renewals = [task for task in asyncio.all_tasks() if task.get_name().startswith("renew")]
    assert len(renewals) == 1
    await transport.aclose()


async def test_signature_that_was_given_is_put_as_it_is(service: Service) -> None:
    """A signature that was given is put once, and again for a new connection; it cannot be renewed."""
    token = sas.generate(AUDIENCE, "key", KEY, int(time.time()) + 7200)
    transport = service.transport(credential=SharedSignature(SecretStr(token)))
    await open_sender(transport)
    await asyncio.sleep(5000)
    assert [put.token for _, put in service.tokens] == [token]
    await transport.aclose()


async def test_signature_that_expired_is_not_put(service: Service) -> None:
    """A signature past its end, from the start or later, is an error to give up on, and the service never sees it."""
    token = sas.generate(AUDIENCE, "key", KEY, int(time.time()) + 2000)
    transport = service.transport(credential=SharedSignature(SecretStr(token)))
    await open_sender(transport)
    await asyncio.sleep(2001)
    for _ in range(2):
        with pytest.raises(AuthenticationError, match="expired") as caught:
            await open_sender(transport, "1")
        assert caught.value.recovery is Recovery.GIVE_UP
        assert token not in str(caught.value)
    assert len(service.tokens) == 1
    await transport.aclose()


async def test_key_after_update_signs_the_next_token(service: Service) -> None:
    """The token after `update` is signed with the new key under its new name; a useless one is an error of its own."""
    credential = AzureNamedKeyCredential("first", "key-one")
    transport = service.transport(credential=credential)
    link = await open_sender(transport)
    await asyncio.sleep(100)
    credential.update("second", "key-two")
    await asyncio.sleep(2700)
    tokens = [sas.parse(put.token) for _, put in service.tokens]
    assert [token.key_name for token in tokens] == ["first", "second"]
    assert sas.verify(tokens[0], "key-one", wall())
    assert sas.verify(tokens[1], "key-two", wall())
    assert link.is_attached
    credential.update("second", "")
    service.connection.drop()
    await settle()
    with pytest.raises(AuthenticationError, match="needs a name and a key") as caught:
        await open_sender(transport)
    assert caught.value.recovery is Recovery.GIVE_UP
    await transport.aclose()


async def test_sas_lifetime_is_the_life_of_signed_tokens(service: Service) -> None:
    """`sas_lifetime` is the life of each signed token, and three quarters of it the time until the next."""
    transport = service.transport(sas_lifetime=120.0)
    await open_sender(transport)
    await asyncio.sleep(200)
    assert [round(sas.parse(put.token).expires_at - time.time() - at) for at, put in service.tokens] == pytest.approx(
        [120] * 3, abs=1
    )
    assert [round(at - service.tokens[0][0]) for at, _ in service.tokens] == pytest.approx([0, 90, 180], abs=2)
    await transport.aclose()


async def test_signature_after_update_is_put_in_time(service: Service) -> None:
    """A signature exchanged by `update` is put in time; one that is not ends, and the next task gets that error."""
    first, second = (sas.generate(AUDIENCE, "key", KEY, int(wall()) + life) for life in (1000, 3000))
    credential = AzureSasCredential(first)
    transport = service.transport(credential=credential)
    await open_sender(transport)
    await asyncio.sleep(600)
    credential.update(second)
    await asyncio.sleep(200)
    assert [put.token for _, put in service.tokens] == [first, second]
    await asyncio.sleep(2201)
    assert {put.token for _, put in service.tokens[1:]} == {second}
    with pytest.raises(AuthenticationError, match="expired") as caught:
        await open_sender(transport, "1")
    assert second not in str(caught.value)
    credential.update("no signature")
    with pytest.raises(AuthenticationError, match="begins with") as caught:
        await open_sender(transport, "1")
    assert "no signature" not in str(caught.value)
    await transport.aclose()


@pytest.mark.parametrize(
    ("life", "moments"), [(3600.0, [0, 3300, 6600]), (1000.0, [0, 700, 1400]), (60.0, [0, 30, 60])]
)
async def test_credential_is_asked_again_before_its_token_ends(
    service: Service, life: float, moments: list[int]
) -> None:
    """A credential is asked again five minutes before its token ends, or half-way where it does not live that long."""
    credential = Credential(time.time(), life)
    transport = service.transport(credential=credential)
    await open_sender(transport)
    await asyncio.sleep(moments[-1] + 5)
    assert [abs(at - service.tokens[0][0] - due) < 2 for (at, _), due in zip(service.tokens, moments, strict=True)]
    assert [put.token for _, put in service.tokens] == ["jwt-1", "jwt-2", "jwt-3"]
    assert {put.token_type for _, put in service.tokens} == {JWT_TOKEN_TYPE}
    assert set(credential.scopes) == {JWT_SCOPE}
    await transport.aclose()


@pytest.mark.parametrize(
    ("error", "recovery"),
    [
        (ClientAuthenticationError("secret-words"), Recovery.GIVE_UP),
        (OSError("secret-words"), Recovery.RETRY),
        (asyncio.CancelledError("secret-words"), Recovery.RETRY),
    ],
    ids=["refused", "unreachable", "cancelled"],
)
async def test_credential_that_fails_gives_up_or_is_retried(
    service: Service, error: BaseException, recovery: Recovery
) -> None:
    """A credential that was refused is to give up on, one that cannot be reached is not; its words are not repeated.

    Nor is its `CancelledError` taken for a cancellation of a caller.
    """
    credential = Credential(time.time(), error=error)
    transport = service.transport(credential=credential)
    with pytest.raises(AuthenticationError) as caught:
        await open_sender(transport)
    assert caught.value.recovery is recovery
    assert type(error).__name__ in str(caught.value)
    assert "secret-words" not in str(caught.value)
    credential.error = None
    await open_sender(transport)
    await transport.aclose()


async def test_connection_replaced_during_a_wait_for_its_token_is_to_be_repeated(service: Service) -> None:
    """A caller that waits for a token while others replace the connection gets the connection's error, not its own."""
    credential = Credential(time.time(), hangs=True)
    transport = service.transport(credential=credential)
    waiting = asyncio.ensure_future(open_sender(transport))
    await asyncio.sleep(1)
    service.connection.drop()
    await asyncio.sleep(1)
    other = asyncio.ensure_future(open_sender(transport))
    with pytest.raises(ConnectionLostError) as caught:
        await waiting
    assert caught.value.recovery is Recovery.RECONNECT
    with pytest.raises(ServiceTimeoutError):
        await other
    await transport.aclose()


async def test_credential_that_hangs_ends_in_time(service: Service) -> None:
    """A credential gets as long as the service: the authentication time-out."""
    credential = Credential(time.time(), hangs=True)
    transport = service.transport(credential=credential, auth_timeout=7.0)
    before = now()
    with pytest.raises(ServiceTimeoutError, match="credential"):
        await open_sender(transport)
    assert now() - before == 7.0
    credential.hangs = False
    await open_sender(transport)
    await transport.aclose()


@pytest.mark.parametrize("given", [None, "text", AccessToken("t", 5), object()], ids=["None", "text", "old", "object"])
async def test_credential_that_gives_no_token_raises(service: Service, given: Any) -> None:
    """What is no token, or an old one, is an error of the credential, whatever it is."""

    class Odd:
        async def get_token(self, *scopes: str) -> Any:
            return given

    transport = service.transport(credential=Odd())
    with pytest.raises(AuthenticationError):
        await open_sender(transport)
    assert service.tokens == []
    await transport.aclose()


async def test_token_that_is_refused_is_put_again_by_the_next_caller(service: Service) -> None:
    """A refusal is raised in all that waited for that put, and the next to ask puts again."""
    transport = service.transport()
    put = service.script.answer
    service.script.answer = lambda request: cbs.response(request, 401, "InvalidSignature", UNAUTHORIZED)
    outcomes = await asyncio.gather(*(open_sender(transport) for _ in range(4)), return_exceptions=True)
    assert len(service.tokens) == 1
    for outcome in outcomes:
        assert isinstance(outcome, AuthenticationError)
        assert (outcome.entity, outcome.recovery) == (AUDIENCE, Recovery.GIVE_UP)
        assert KEY not in str(outcome)
    service.script.answer = put
    await open_sender(transport)
    await transport.aclose()


async def test_answer_without_a_status_raises(service: Service) -> None:
    """An answer without a status is an error of the service, and does not look like success."""
    transport = service.transport()
    service.script.answer = lambda request: Message(properties=Properties(correlation_id=message_id(request)))
    with pytest.raises(ServiceError, match="status"):
        await open_sender(transport)
    await transport.aclose()


async def test_answer_to_another_request_is_passed_over(service: Service) -> None:
    """An answer with an id without a waiter is skipped; the wait goes on to its end."""
    transport = service.transport()

    def other(request: Message) -> Message:
        answer = cbs.response(request, 202, "Accepted")
        assert correlation_id(answer) is not None
        answer.properties = Properties(correlation_id=17)
        return answer

    service.script.answer = other
    before = now()
    with pytest.raises(ServiceTimeoutError):
        await open_sender(transport)
    assert now() - before == 10.0
    await transport.aclose()


async def test_put_whose_caller_is_cancelled_goes_on(service: Service) -> None:
    """Cancelled while a token is being put, a caller does not affect others that wait for the same."""
    transport = service.transport()
    requests: list[Message] = []
    service.script.answer = requests.append
    first, second = asyncio.ensure_future(open_sender(transport)), asyncio.ensure_future(open_sender(transport, "1"))
    await settle()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled()
    (request,) = requests
    (reply,) = (link for link in service.connection.links["$cbs"] if not link.is_receiver)
    reply.send(cbs.response(request, 202, "Accepted").encode(), settled=True)
    service.connection.flush()
    assert (await second).is_attached
    assert len(service.tokens) == 1
    await transport.aclose()


def test_repr_of_a_credential_shows_no_secret() -> None:
    """Neither a credential nor what holds a token has a repr with a secret in it."""
    shared = SharedKey("key", SecretStr(KEY))
    signature = SharedSignature(SecretStr(sas.generate(AUDIENCE, "key", KEY, 1)))
    from eventpump.transport.tokens import Token

    shown = repr(shared) + repr(signature) + repr(Token("secret-words", SAS_TOKEN_TYPE, 1.0, None))
    assert KEY not in shown
    assert "secret-words" not in shown
    assert "sig=" not in shown
