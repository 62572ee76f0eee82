"""Bodies of records that a blob's metadata can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

# Made once: `json.dumps` with options makes an encoder in each call.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), sort_keys=True)


def encode_texts(texts: Mapping[str, str]) -> bytes:
    """Encode a body that can be kept in metadata: one form for equal texts."""
    return _ENCODER.encode(dict(texts)).encode()
