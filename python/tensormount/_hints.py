# SPDX-License-Identifier: Apache-2.0
"""Hints ("did you mean") for missing keys. A hint takes a few milliseconds at most, whatever the number of
keys, because a program may try many missing keys."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Optional

# The most keys that a hint compares with the missing key.
_MAX_COMPARED = 32
# The most first parts ("model", "optim") of stored keys that are tried with the missing key.
_MAX_PREFIXES = 8
_MAX_KEY_LENGTH = 256
# A larger index is not listed for a hint. An index has about 300 bytes for each key.
_MAX_INDEX_BYTES = 256 << 10


def nearest(
    key: str, known: Optional[Sequence[str]], path: str, listed: Callable[[], list[str]]
) -> str:
    """The most similar key; "" if there is none.

    known: all keys in order, if they were listed before. None: `listed` lists them, if the checkpoint at
    `path` is small. Raises no Exception, because the caller has its own error to raise.
    """
    if not 0 < len(key) <= _MAX_KEY_LENGTH:
        return ""
    try:
        if known is None:
            known = listed() if _is_small(path) else ()
        place = bisect_left(known, key)
        if known[place : place + 1] == [key]:
            return ""
        from difflib import get_close_matches

        return next(iter(get_close_matches(key, _candidates(key, known, place), 1)), "")
    except Exception:
        return ""


def _candidates(key: str, known: Sequence[str], place: int) -> list[str]:
    if len(known) <= _MAX_COMPARED:
        chosen = list(known)
    else:
        # A typo near the end of a key leaves it next to the intended key in the order of keys.
        side = (_MAX_COMPARED - 2 * _MAX_PREFIXES) // 2
        chosen = list(known[max(0, place - side) : place + side]) + _with_other_prefixes(key, known)
    return [one for one in chosen if len(one) <= _MAX_KEY_LENGTH]


def _with_other_prefixes(key: str, known: Sequence[str]) -> list[str]:
    """The stored keys that result if the first part ("model.") of `key` is added, removed or replaced."""
    end = key.partition(".")[2]
    found = [end]
    at = 0
    for _ in range(_MAX_PREFIXES):
        if at < len(known):
            first = known[at].partition(".")[0]
            found += [f"{first}.{key}", f"{first}.{end}"]
            # "/" is the character after ".", so this skips all keys that begin with `first + "."`.
            at = bisect_left(known, first + "/")
    return [one for one in found if known[(place := bisect_left(known, one)) : place + 1] == [one]]


def _is_small(path: str) -> bool:
    """Whether the file that lists the keys is small. False for unknown formats."""
    for name in ("index/index.sst", ".metadata", "model.safetensors.index.json", "model.safetensors", ""):
        at = os.path.join(path, name) if name else path
        if not os.path.isfile(at):
            continue
        if not at.endswith(".safetensors"):
            return bool(name) and os.path.getsize(at) <= _MAX_INDEX_BYTES
        with open(at, "rb") as file:  # Its first eight bytes are the size of its header.
            return int.from_bytes(file.read(8), "little") <= _MAX_INDEX_BYTES
    return False
