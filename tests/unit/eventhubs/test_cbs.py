from __future__ import annotations

import uuid

import pytest

from eventpump.amqp.message import AmqpValue, Data, Message, Properties
from eventpump.amqp.types import Int, Symbol, Timestamp
from eventpump.errors import AuthenticationError, EntityNotFoundError, ProtocolError, QuotaExceededError
from eventpump.eventhubs import cbs
from eventpump.eventhubs.conditions import UNAUTHORIZED_ACCESS
from eventpump.eventhubs.names import SAS_TOKEN_TYPE
from eventpump.eventhubs.requests import BadRequestError, MessageId, check_answer, correlation_id

TOKEN = "SharedAccessSignature sr=a&sig=SECRET&se=1&skn=n"
IDS: list[MessageId] = [uuid.UUID(int=7), "request-7"]


def request(message_id: MessageId = "1", reply_to: str | None = None) -> Message:
    made = cbs.put_token_request(
        TOKEN, SAS_TOKEN_TYPE, "sb://ns/hub", message_id=message_id, expires_at=1_700_000_000.5, reply_to=reply_to
    )
    return Message.decode(made.encode())


@pytest.mark.parametrize("message_id", IDS)
@pytest.mark.parametrize("reply_to", [None, "cbs-1"])
def test_request_is_read_as_it_was_written(message_id: MessageId, reply_to: str | None) -> None:
    """What the client asks is what the service reads."""
    assert cbs.parse_put_token(request(message_id, reply_to)) == cbs.PutToken(
        token=TOKEN,
        token_type=SAS_TOKEN_TYPE,
        audience="sb://ns/hub",
        expires_at=1_700_000_000.5,
        message_id=message_id,
        reply_to=reply_to,
    )


def test_request_has_the_sections_keys_and_types_of_the_service() -> None:
    """A request has the sections, keys and types the service reads."""
    made = request()
    assert made.body == AmqpValue(TOKEN)
    assert made.properties is not None
    assert made.properties.to == "$cbs"
    fields = made.application_properties
    assert fields == {
        "operation": "put-token",
        "type": "servicebus.windows.net:sastoken",
        "name": "sb://ns/hub",
        "expiration": 1_700_000_000_500,
    }
    assert type(fields["expiration"]) is Timestamp


def test_repr_of_a_request_shows_no_token() -> None:
    """Neither the request nor what is read of it shows the token in its repr."""
    made = cbs.put_token_request(TOKEN, SAS_TOKEN_TYPE, "sb://ns/hub", message_id="1")
    assert "SECRET" not in repr(made)
    assert "SECRET" not in repr(cbs.parse_put_token(Message.decode(made.encode())))


def test_request_without_an_expiry_is_read() -> None:
    """A request without an expiry is one."""
    message = Message(
        body=AmqpValue(TOKEN),
        properties=Properties(message_id="m", to="$cbs", reply_to="r"),
        application_properties={"operation": "put-token", "name": "sb://ns/hub", "type": "jwt"},
    )
    assert cbs.parse_put_token(message).expires_at is None


def test_request_with_a_token_as_bytes_is_read() -> None:
    """A token may come as ASCII bytes."""
    message = request()
    for body in (AmqpValue(TOKEN.encode()), Data((TOKEN.encode(),))):
        message.body = body
        assert cbs.parse_put_token(message).token == TOKEN


@pytest.mark.parametrize(
    "message",
    [
        Message(),
        Message(body=AmqpValue("SECRET"), application_properties={"operation": "get-token"}),
        Message(body=AmqpValue("SECRET"), application_properties={"operation": "put-token", "type": "jwt"}),
        Message(body=AmqpValue("SECRET"), application_properties={"operation": "put-token", "name": "sb://ns"}),
        Message(application_properties={"operation": "put-token", "type": "jwt", "name": "sb://ns"}),
        Message(body=AmqpValue(""), application_properties={"operation": "put-token", "type": "jwt", "name": "a"}),
        Message(body=AmqpValue(5), application_properties={"operation": "put-token", "type": "jwt", "name": "a"}),
        Message(
            body=AmqpValue(b"SECRET\xff"), application_properties={"operation": "put-token", "type": "jwt", "name": "a"}
        ),
        Message(body=AmqpValue("SECRET"), application_properties={"operation": 5, "type": "jwt", "name": "a"}),
    ],
)
def test_request_of_another_form_is_refused_with_a_status(message: Message) -> None:
    """What is no put-token request is refused with a status, and the text shows nothing of a token."""
    with pytest.raises(BadRequestError) as caught:
        cbs.parse_put_token(message)
    assert caught.value.code == 400
    assert caught.value.condition == "com.microsoft:argument-error"
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("message_id", IDS)
def test_response_echoes_the_requests_id(message_id: MessageId) -> None:
    """The answer carries the request's id back in its type, goes to its reply-to, and has an int status."""
    made = Message.decode(cbs.response(request(message_id, "cbs-1"), 202, "Accepted").encode())
    check_answer(made)
    assert correlation_id(made) == message_id
    assert type(correlation_id(made)) is type(message_id)
    assert made.properties is not None
    assert made.properties.to == "cbs-1"
    assert made.application_properties is not None
    assert type(made.application_properties["status-code"]) is Int
    assert made.application_properties == {"status-code": 202, "status-description": "Accepted"}


def test_response_to_a_request_without_properties_is_written() -> None:
    """A request without properties gets an answer all the same."""
    made = cbs.response(Message(), 400, "no")
    assert correlation_id(Message.decode(made.encode())) is None


def test_response_of_a_refusal_raises_its_conditions_error() -> None:
    """A refusal becomes the error its condition stands for, and names the audience."""
    made = cbs.response(request(), 401, "bad signature TrackingId:t1", UNAUTHORIZED_ACCESS)
    with pytest.raises(AuthenticationError, match="bad signature") as caught:
        check_answer(Message.decode(made.encode()), entity="sb://ns/hub")
    assert (caught.value.entity, caught.value.tracking_id) == ("sb://ns/hub", "t1")


@pytest.mark.parametrize(
    ("code", "kind"), [(401, AuthenticationError), (403, QuotaExceededError), (404, EntityNotFoundError)]
)
def test_response_of_a_refusal_without_a_condition_goes_by_its_code(code: int, kind: type[Exception]) -> None:
    """Without a condition the code decides."""
    with pytest.raises(kind):
        check_answer(cbs.response(request(), code, "no"))


def test_response_with_another_spelling_is_read() -> None:
    """The other spelling of the keys is understood too."""
    fields = {"statusCode": Int(401), "statusDescription": "no", "errorCondition": Symbol("amqp:unauthorized-access")}
    with pytest.raises(AuthenticationError, match="no"):
        check_answer(Message(application_properties=fields))
    check_answer(Message(application_properties={"statusCode": Int(200)}))


@pytest.mark.parametrize("fields", [None, {}, {"status-code": "200"}, {"status-code": True}])
def test_response_without_a_status_raises(fields: dict[str, object] | None) -> None:
    """An answer without a status code breaks the protocol."""
    with pytest.raises(ProtocolError, match="status code"):
        check_answer(Message(application_properties=fields))
