"""Web tokens in place of Entra's: what is accepted, and the words of each refusal."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.emulator.auth import Denial, KeyRing, VerifiedToken
from eventpump.emulator.web_tokens import UNSTATED_LIFE, accepting
from eventpump.eventhubs.names import JWT_TOKEN_TYPE

NOW = 1_800_000_000.0
SECRET = "a secret of the tests"
RESOURCE = "https://eventhubs.azure.net"


def _part(content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


def token(claims: object, header: object = None, secret: str = SECRET) -> str:
    """Return a token with these claims, signed by HS256."""
    start = f"{_part({'alg': 'HS256'} if header is None else header)}.{_part(claims)}"
    signature = hmac.digest(secret.encode(), start.encode(), hashlib.sha256)
    return f"{start}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


ANY = accepting("any", hosts={"localhost"}, now=lambda: NOW)
SIGNED = accepting(SECRET, hosts={"localhost"}, now=lambda: NOW)
GOOD: dict[str, Any] = {"aud": RESOURCE, "exp": NOW + 60}


@pytest.mark.parametrize("text", ["stub", "", "a.b.c", "a.b.c.d", token([1]), token({"exp": "soon"}), token({})])
def test_any_text_is_a_token_that_lives_an_hour(text: str) -> None:
    """Where any token is accepted, it may be a word; without a time of its own it lives an hour."""
    assert ANY(text) == VerifiedToken(NOW + UNSTATED_LIFE)


def test_expiration_time_is_kept_where_any_token_is_accepted() -> None:
    """A stub that states a time can try its renewal."""
    assert ANY(token({"exp": NOW + 5}, secret="unknown")) == VerifiedToken(NOW + 5)
    expired = ANY(token({"exp": NOW}, secret="unknown"))
    assert expired == Denial(401, "ExpiredToken: The token is expired. Expiration time: '2027-01-15 08:00:00Z'")


@pytest.mark.parametrize(
    "audience",
    [RESOURCE, f"{RESOURCE}/", "https://servicebus.azure.net", "sb://localhost/telemetry", ["other", RESOURCE]],
)
def test_signed_token_for_the_service_is_accepted(audience: object) -> None:
    """The resource of Event Hubs, with and without a slash, or the service's name, alone or among others."""
    assert SIGNED(token(GOOD | {"aud": audience})) == VerifiedToken(NOW + 60)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("stub", "MalformedToken: Failed to read"),
        ("a.b.c", "MalformedToken: Failed to read"),
        (token([1, 2]), "MalformedToken: Failed to read"),
        ("é.é.é", "MalformedToken: Failed to read"),
        (token(GOOD, secret="another"), "InvalidSignature: The token has an invalid signature."),
        (token(GOOD).rpartition(".")[0] + ".", "InvalidSignature: The token has an invalid signature."),
        (token(GOOD, header={"alg": "none"}), "InvalidSignature: The token has an invalid signature."),
        (token(GOOD, header={"alg": "HS512"}), "InvalidSignature: The token has an invalid signature."),
        (token({"aud": RESOURCE}), "MalformedToken: The token has no expiration time."),
        (token(GOOD | {"exp": True}), "MalformedToken: The token has no expiration time."),
        (token(GOOD | {"exp": 10**400}), "MalformedToken: The token has no expiration time."),
        (token(GOOD | {"exp": float("nan")}), "MalformedToken: The token has no expiration time."),
        (token(GOOD | {"exp": NOW - 1}), "ExpiredToken: The token is expired. Expiration time:"),
        (token({"exp": NOW + 60}), "InvalidAudience: Invalid authorization token audience."),
        (token(GOOD | {"aud": "https://storage.azure.com"}), "InvalidAudience:"),
        (token(GOOD | {"aud": "sb://elsewhere/telemetry"}), "InvalidAudience:"),
        (token(GOOD | {"aud": "http://[broken"}), "InvalidAudience:"),
        (token(GOOD | {"aud": 7}), "InvalidAudience:"),
    ],
)
def test_other_token_is_refused_with_its_reason(text: str, reason: str) -> None:
    """Each reason is the service's word for it, with the status code 401."""
    refused = SIGNED(text)
    assert isinstance(refused, Denial)
    assert (refused.code, refused.description[: len(reason)]) == (401, reason)


@given(st.one_of(st.text(), st.lists(st.text(), min_size=3, max_size=3).map(".".join)))
def test_hostile_text_is_refused(text: str) -> None:
    """No text is accepted without the secret, and none raises."""
    assert isinstance(SIGNED(text), Denial)
    assert isinstance(ANY(text), VerifiedToken)


def test_reason_of_a_verifier_is_the_answer() -> None:
    """A verifier of one's own may say why, too; without a reason the answer has the general one."""
    keys = KeyRing([], lambda text: Denial(401, "InvalidIssuer: ours") if text == "known" else None)
    for text, reason in (("known", "InvalidIssuer: ours"), ("other", "InvalidToken: ")):
        refused = keys.check_token(text, JWT_TOKEN_TYPE, "sb://localhost/telemetry", NOW)
        assert isinstance(refused, Denial)
        assert refused.description.startswith(reason)
