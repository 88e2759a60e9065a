# SPDX-License-Identifier: Apache-2.0
"""Common values: from the JSON of docs/format.md ("common.json") to Python, without loss."""

from __future__ import annotations

import json
import struct
from typing import Any

from tensormount.errors import UnsupportedError


def parse(text: bytes) -> Any:
    """One value. What JSON lacks stands in objects whose only key begins with `$`.

    >>> parse(b'{"betas":{"$tuple":[0.9,0.95]},"seen":{"$bytes":"00ff"}}')
    {'betas': (0.9, 0.95), 'seen': b'\\x00\\xff'}
    """
    return _decode(json.loads(text.decode("utf-8", "surrogateescape")))


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((name for name in value if name.startswith("$")), None)
    if tag is None:
        return {name: _decode(item) for name, item in value.items()}
    said = value[tag]
    if tag == "$float" and said == "nan":
        bits = int(value.get("bits", "7ff8000000000000"), 16)
        return struct.unpack("<d", struct.pack("<Q", bits))[0]
    if tag == "$float":
        return float(said)
    if tag == "$bytes":
        return bytes.fromhex(said)
    if tag == "$string":
        # As os.fsdecode does it, so that encoding it gives the bytes again.
        return bytes.fromhex(said).decode("utf-8", "surrogateescape")
    if tag == "$tuple":
        return tuple(_decode(item) for item in said)
    if tag == "$dict":
        return {_decode(name): _decode(item) for name, item in said}
    raise UnsupportedError(f"a common value of the kind {tag}, which this package does not know")
