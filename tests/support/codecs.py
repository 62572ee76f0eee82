"""Codecs of payloads for tests: compression, and a cipher."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import zlib
from functools import partial

from eventpump.eventhubs.codecs import PayloadCodec

_NONCE = itertools.count(1)


def _keystream(key: bytes, nonce: bytes, size: int) -> bytes:
    blocks = (hashlib.sha256(key + nonce + bytes([number & 255])).digest() for number in range(size // 32 + 1))
    return b"".join(blocks)[:size]


def cipher(name: str, key: bytes) -> PayloadCodec:
    """Encrypt with a key and a new nonce each time, and authenticate: shaped as AES-GCM is, and a toy."""

    def encrypt(body: bytes) -> bytes:
        nonce = next(_NONCE).to_bytes(12, "big")
        sealed = bytes(map(int.__xor__, body, _keystream(key, nonce, len(body))))
        return nonce + hashlib.sha256(key + nonce + sealed).digest()[:16] + sealed

    def decrypt(body: bytes) -> bytes:
        nonce, tag, sealed = body[:12], body[12:28], body[28:]
        if hashlib.sha256(key + nonce + sealed).digest()[:16] != tag:
            raise ValueError("the tag does not match")
        return bytes(map(int.__xor__, sealed, _keystream(key, nonce, len(sealed))))

    return PayloadCodec(name, encrypt, decrypt)


GZIP = PayloadCodec("gzip", partial(gzip.compress, mtime=0), gzip.decompress)
DEFLATE = PayloadCodec("deflate", zlib.compress, zlib.decompress)
OLD_KEY, NEW_KEY = cipher("toy-2029", b"old"), cipher("toy-2030", b"new")
SPARKS = [GZIP, NEW_KEY]
"""Named by import name in Spark's tests: compressed, and then encrypted."""
STABLE = GZIP
"""Returns the same bytes for the same body."""
