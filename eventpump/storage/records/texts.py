"""Bodies of records that a blob's metadata can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping


def encode_texts(texts: Mapping[str, str]) -> bytes:
    """Encode a body that can be kept in metadata: one form for equal texts."""
    return json.dumps(dict(texts), separators=(",", ":"), sort_keys=True).encode()
