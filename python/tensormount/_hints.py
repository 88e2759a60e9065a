# SPDX-License-Identifier: Apache-2.0
""""Did you mean", for keys that a checkpoint does not have. A hint takes a few milliseconds at most, however
many keys there are: a program may try many, and would stand still meanwhile."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Optional

# Keys that a hint compares one by one with the one that was asked for.
_MOST_COMPARED = 32
# First parts of keys ("model", "optim") that are tried in the place of another one.
_MOST_BEGINS = 8
_MOST_LETTERS = 256
# An index of more bytes, some 300 for each key, is not listed for a hint.
_MOST_INDEX_BYTES = 256 << 10


def nearest(
    key: str, known: Optional[Sequence[str]], path: str, listed: Callable[[], list[str]]
) -> str:
    """The key that was meant, probably; "" for none.

    known: all keys in their order, where they were listed before. Otherwise `listed` lists them, if
    the checkpoint at `path` is small. Whatever fails here, the caller has an error of its own to raise.
    """
    if not 0 < len(key) <= _MOST_LETTERS:
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
    if len(known) <= _MOST_COMPARED:
        chosen = list(known)
    else:
        # An error near the end leaves the key beside the one that is meant.
        side = (_MOST_COMPARED - 2 * _MOST_BEGINS) // 2
        chosen = list(known[max(0, place - side) : place + side]) + _with_other_begins(key, known)
    return [one for one in chosen if len(one) <= _MOST_LETTERS]


def _with_other_begins(key: str, known: Sequence[str]) -> list[str]:
    """Keys whose first part, "model.", is missing in `key`, too many, or misspelled."""
    end = key.partition(".")[2]
    found = [end]
    at = 0
    for _ in range(_MOST_BEGINS):
        if at < len(known):
            first = known[at].partition(".")[0]
            found += [f"{first}.{key}", f"{first}.{end}"]
            at = bisect_left(known, first + "/")  # Which follows ".".
    return [one for one in found if known[(place := bisect_left(known, one)) : place + 1] == [one]]


def _is_small(path: str) -> bool:
    """Whether the file that has the keys says that they are few; one that is not known does not."""
    for name in ("index/index.sst", ".metadata", "model.safetensors.index.json", "model.safetensors", ""):
        at = os.path.join(path, name) if name else path
        if not os.path.isfile(at):
            continue
        if not at.endswith(".safetensors"):
            return bool(name) and os.path.getsize(at) <= _MOST_INDEX_BYTES
        with open(at, "rb") as file:  # Its first eight bytes are the size of its header.
            return int.from_bytes(file.read(8), "little") <= _MOST_INDEX_BYTES
    return False
