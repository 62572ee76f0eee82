from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.eventhubs import sas
from eventpump.eventhubs.sas import TokenVerdict

URI = "sb://ns.servicebus.windows.net/hub"
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


def test_generate_gives_the_known_token() -> None:
    """A token is the HMAC-SHA256 over the escaped URI, a newline and the expiry, under the key's own bytes."""
    escaped = "sb%3A%2F%2Fns.servicebus.windows.net%2Fhub"
    digest = hmac.new(b"c2VjcmV0", f"{escaped}\n1700000000".encode(), hashlib.sha256).digest()
    signature = base64.b64encode(digest).decode().replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    expected = f"SharedAccessSignature sr={escaped}&sig={signature}&se=1700000000&skn=Root"
    assert sas.generate(URI, "Root", "c2VjcmV0", 1_700_000_000) == expected


@given(texts, texts, texts, st.integers(0, 2**40))
def test_verify_takes_a_signed_token_until_it_expires(uri: str, name: str, key: str, expires_at: int) -> None:
    """What we sign we read back and verify, until it expires."""
    token = sas.parse(sas.generate(uri, name, key, expires_at))
    assert (token.resource, token.key_name, token.expires_at) == (uri, name, expires_at)
    assert sas.verify(token, key, expires_at - 0.001) is TokenVerdict.VALID
    assert sas.verify(token, key, expires_at) is TokenVerdict.EXPIRED
    assert sas.verify(token, key + "x", expires_at - 1) is TokenVerdict.BAD_SIGNATURE


def test_verdict_is_true_only_when_valid() -> None:
    """A verdict can stand for a boolean."""
    assert [each for each in TokenVerdict if each] == [TokenVerdict.VALID]


def test_verify_takes_parts_in_any_order_and_escaping() -> None:
    """The parts of a token may stand in any order, and its resource may be escaped in lower case."""
    escaped = "sb%3a%2f%2fns.servicebus.windows.net%2fhub"
    digest = hmac.new(b"key", f"{escaped}\n99".encode(), hashlib.sha256).digest()
    signature = base64.b64encode(digest).decode()
    token = sas.parse(f"SharedAccessSignature skn=Root&se=99&sig={signature}&x=1&sr={escaped}")
    assert token.resource == URI
    assert sas.verify(token, "key", 98)


def test_verify_of_a_bad_signature_does_not_say_expired() -> None:
    """Whether a token has expired is not revealed to a client that cannot sign."""
    token = sas.parse(sas.generate(URI, "Root", "other", 10))
    assert sas.verify(token, "key", 20) is TokenVerdict.BAD_SIGNATURE


@pytest.mark.parametrize(
    "change", [("se=", "se=1"), ("hub", "hub2"), ("sig=", "sig=A"), ("sig=", "sig=é"), ("sig=", "sig=%FF")]
)
def test_verify_of_a_tampered_token_fails(change: tuple[str, str]) -> None:
    """A changed expiry, resource or signature does not verify."""
    text = sas.generate(URI, "Root", "key", 1000).replace(*change)
    assert sas.verify(sas.parse(text), "key", 1) is TokenVerdict.BAD_SIGNATURE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Bearer abc",
        "SharedAccessSignature",
        "SharedAccessSignature sr=a&sig=SECRET&se=1",
        "SharedAccessSignature sr=a&sig=SECRET&skn=n",
        "SharedAccessSignature sig=SECRET&se=1&skn=n",
        "SharedAccessSignature sr=a&se=1&skn=n",
        "SharedAccessSignature sr=a&sig=SECRET&sig=SECRET&se=1&skn=n",
        "SharedAccessSignature sr=a&sig=SECRET&se=soon&skn=n",
        "SharedAccessSignature sr=a&sig=SECRET&se=-1&skn=n",
        "SharedAccessSignature sr=a&sig=SECRET&se=1_0&skn=n",
        "SharedAccessSignature sr=a&sig=SECRET&se=" + "9" * 5000 + "&skn=n",
    ],
)
def test_parse_of_what_is_no_token_shows_nothing_of_it(text: str) -> None:
    """What is no signature is a `ValueError` that says why and shows nothing of it."""
    with pytest.raises(ValueError, match=r"hared access signature|SharedAccessSignature") as caught:
        sas.parse(text)
    assert "SECRET" not in str(caught.value)


@given(st.text())
def test_parse_and_verify_of_any_text_raise_only_value_error(text: str) -> None:
    """Any text is a token or a `ValueError`, and checking it never raises."""
    for each in (text, "SharedAccessSignature " + text, f"SharedAccessSignature sr={text}&sig={text}&se=1&skn=n"):
        try:
            token = sas.parse(each)
        except ValueError:
            continue
        assert not sas.verify(token, "key", 0)


def test_repr_of_a_token_shows_no_signature() -> None:
    """A token's repr does not show its signature."""
    token = sas.parse(sas.generate(URI, "Root", "key", 1000))
    assert token.signature not in repr(token)
