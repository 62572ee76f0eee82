"""What a credential is worth (protocol.md 3)."""

from __future__ import annotations

import hmac
from typing import Any

import pytest

from eventpump.emulator.auth import AccessRule, Denial, Grant, Grants, KeyRing, Right, VerifiedToken
from eventpump.eventhubs import sas
from eventpump.eventhubs.addresses import parse_address
from eventpump.eventhubs.names import JWT_TOKEN_TYPE, SAS_TOKEN_TYPE

NOW = 1000.0
KEYS = KeyRing([AccessRule("root", "secret"), AccessRule("reader", "other", Right.LISTEN)])
SENDER = parse_address("hub/Partitions/0")
READER = parse_address("hub/ConsumerGroups/g/Partitions/0")


def token(resource: str = "sb://h/hub", name: str = "root", key: str = "secret", expires_at: int = 2000) -> str:
    return sas.generate(resource, name, key, expires_at)


def granted(audience: str = "sb://h/hub", **parts: object) -> Grant:
    grant = KEYS.check_token(token(**parts), SAS_TOKEN_TYPE, audience, NOW)  # type: ignore[arg-type]  # as above
    assert isinstance(grant, Grant)
    return grant


@pytest.mark.parametrize(
    ("text", "audience", "code"),
    [
        (token(key="wrong"), "sb://h/hub", 401),
        (token(name="nobody"), "sb://h/hub", 401),
        (token(expires_at=1000), "sb://h/hub", 401),
        (token(resource="sb://h/other"), "sb://h/hub", 401),
        (token(resource="sb://h/hub/Partitions/1"), "sb://h/hub/Partitions/0", 401),
        ("nonsense", "sb://h/hub", 401),
        (b"bytes", "sb://h/hub", 400),
        (token(), "sb:///", 400),
    ],
)
def test_token_with_any_defect_is_denied(text: object, audience: str, code: int) -> None:
    """Each defect is denied with its code, and the answer shows nothing of token or key."""
    denial = KEYS.check_token(text, SAS_TOKEN_TYPE, audience, NOW)
    assert isinstance(denial, Denial)
    assert denial.code == code
    assert "secret" not in denial.description
    assert "sig=" not in denial.description


def test_token_after_a_key_was_replaced_needs_the_new_key() -> None:
    """From then on only the new key signs, with the rights of the rule; what was granted before stays."""
    ring = KeyRing([AccessRule("reader", "old", Right.LISTEN)])
    ring.replace_key("reader", "new")
    denied = ring.check_token(token(name="reader", key="old"), SAS_TOKEN_TYPE, "sb://h/hub", NOW)
    assert isinstance(denied, Denial)
    grant = ring.check_token(token(name="reader", key="new"), SAS_TOKEN_TYPE, "sb://h/hub", NOW)
    assert isinstance(grant, Grant)
    assert grant.rights is Right.LISTEN
    with pytest.raises(KeyError):
        ring.replace_key("nobody", "new")


def test_token_of_an_unknown_key_name_looks_like_a_wrong_key() -> None:
    """Answers do not reveal which key names exist."""
    answers = [
        KEYS.check_token(text, SAS_TOKEN_TYPE, "sb://h/hub", NOW) for text in (token(key="x"), token(name="nobody"))
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["root", "reader", "nobody"])
def test_token_of_any_key_name_costs_one_signature(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A name that no rule has takes as long as one that a rule has."""
    signed: list[str] = []
    digest = hmac.digest
    text = token(name=name, key="wrong")

    def counted(*given: Any) -> bytes:
        signed.append(name)
        return digest(*given)

    monkeypatch.setattr(hmac, "digest", counted)
    assert isinstance(KEYS.check_token(text, SAS_TOKEN_TYPE, "sb://h/hub", NOW), Denial)
    assert signed == [name]


@pytest.mark.parametrize("resource", ["sb://h/hub", "sb://h/hub/Partitions/1", "sb://h/hub/consumergroups/g", "sb://h"])
@pytest.mark.parametrize("audience", ["amqps://h/$management", "amqps://h/Hub/$management"])
def test_token_for_the_management_node_reads_the_hub_that_it_is_signed_for(resource: str, audience: str) -> None:
    """The node serves every hub: whatever the token is put for, its signature decides whose properties it reads."""
    grants = Grants()
    grants.put(granted(audience, resource=resource))
    assert grants.allow(parse_address("$management"), Right.LISTEN)
    assert grants.allow_read("HUB")
    assert grants.allow_read("other") == (resource == "sb://h" and audience == "amqps://h/$management")
    assert not grants.allow(SENDER, Right.SEND)


def test_tokens_of_two_hubs_for_the_management_node_add_up() -> None:
    """A client of two hubs puts one for each; the second does not take the place of the first."""
    grants = Grants()
    for hub in ("hub", "other"):
        grants.put(granted("amqps://h/$management", resource=f"sb://h/{hub}"))
    assert (grants.allow_read("hub"), grants.allow_read("other"), grants.allow_read("third")) == (True, True, False)


def test_token_rights_are_bounded_by_its_audience() -> None:
    """A token opens what its audience covers, with the rights of its rule."""
    grants = Grants()
    assert not grants.allow(SENDER, Right.SEND)
    grants.put(granted("amqps://h:5671/HUB/consumergroups/G"))
    assert grants.allow(READER, Right.LISTEN)
    assert not grants.allow(SENDER, Right.SEND)
    assert not grants.allow(parse_address("hub/ConsumerGroups/x/Partitions/0"), Right.LISTEN)
    assert grants.allow_read("Hub")
    assert not grants.allow_read("other")
    grants.put(granted(name="reader", key="other"))
    assert not grants.allow(SENDER, Right.SEND)
    assert grants.allow(SENDER, None)


def test_token_rights_end_at_expiry() -> None:
    """A token put again for the same audience replaces the first; what has ended gives nothing."""
    grants = Grants()
    grants.put(granted(expires_at=1500))
    grants.put(granted("sb://h/hub/Partitions/1", expires_at=1700))
    assert grants.next_expiry() == 1500
    grants.put(granted(expires_at=1600))
    assert grants.next_expiry() == 1600
    assert not grants.expire(1599)
    assert grants.expire(1600)
    assert not grants.allow(SENDER, Right.SEND)
    assert grants.allow(parse_address("hub/Partitions/1"), Right.SEND)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (b"\0root\0secret", Right.ALL),
        (b"ignored\0reader\0other", Right.LISTEN),
        (b"\0root\0wrong", None),
        (b"\0nobody\0secret", None),
        (b"rootsecret", None),
        (b"", None),
        (None, None),
        (b"\0root\0secret\0", None),
    ],
)
def test_plain_credentials_give_the_rules_rights(response: bytes | None, right: Right | None) -> None:
    """Key name and key over SASL PLAIN give the rule's rights everywhere, or nothing."""
    grant = KEYS.check_plain(response)
    assert (None if grant is None else grant.rights) == right
    if grant is not None:
        assert grant.expires_at is None
        assert grant.audience.covers(READER)


def test_jwt_is_decided_by_the_verifier() -> None:
    """The verifier decides on rights and expiry; without one every JWT is denied."""
    keys = KeyRing([], lambda text: VerifiedToken(float(text), Right.SEND) if text.isdigit() else None)
    answers = [keys.check_token(text, JWT_TOKEN_TYPE, "sb://h/hub", NOW) for text in ("2000", "1000", "x")]
    assert isinstance(answers[0], Grant)
    assert (answers[0].rights, answers[0].expires_at) == (Right.SEND, 2000)
    assert isinstance(answers[1], Denial)
    assert isinstance(answers[2], Denial)
    assert isinstance(KEYS.check_token("2000", JWT_TOKEN_TYPE, "sb://h/hub", NOW), Denial)


def test_repr_of_a_rule_shows_no_key() -> None:
    """A rule's repr does not hold its key."""
    assert "secret" not in repr(AccessRule("root", "secret"))


def _code(keys: KeyRing, resource: str, audience: str) -> int:
    answer = keys.check_token(token(resource), SAS_TOKEN_TYPE, audience, NOW)
    return answer.code if isinstance(answer, Denial) else 202


@pytest.mark.parametrize(
    ("resource", "audience", "code"),
    [
        ("sb://localhost/hub", "sb://localhost/hub", 202),
        ("sb://LOCALHOST:5672/hub", "amqps://127.0.0.1/hub", 202),
        ("http://[::1]:5672/hub", "sb://My.Name:5671/hub", 202),
        ("my.name/hub", "sb://my.name/hub", 202),
        ("sb://evil.example/hub", "sb://evil.example/hub", 401),
        ("sb://evil.example/hub", "sb://localhost/hub", 401),
        ("sb://localhost/hub", "sb://evil.example/hub", 401),
        ("sb://my.name.evil.example/hub", "sb://my.name/hub", 401),
        ("localhost", "sb://localhost/hub", 401),
        ("hub", "sb://localhost/hub", 401),
        ("sb://localhost", "sb://localhost/hub", 202),
        ("sb://localhost/hub", "localhost", 400),
    ],
)
def test_signature_and_audience_may_name_any_host_of_the_service(resource: str, audience: str, code: int) -> None:
    """Host of signature and audience are both names of the service, whichever; a bare name is no resource."""
    keys = KeyRing([AccessRule("root", "secret")], hosts={"localhost", "127.0.0.1", "::1", "my.name"})
    assert _code(keys, resource, audience) == code


def test_signature_and_audience_must_agree_without_known_hosts() -> None:
    """A service that does not know its names takes a signature for any, but for the audience's host only."""
    assert _code(KEYS, "sb://any/hub", "sb://any/hub") == 202
    assert _code(KEYS, "sb://a/hub", "sb://b/hub") == 401
    assert _code(KEYS, "sb://localhost/hub", "sb://127.0.0.1/hub") == 202
    assert _code(KEYS, "sb://localhost/hub", "sb://b/hub") == 401
