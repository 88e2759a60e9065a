# SPDX-License-Identifier: Apache-2.0
"""Shards: the parts of tensors that a rank holds, as the C library takes them.

A shard is a box of a global tensor and the memory of its cells; no byte is copied. A kind of leaves (_leaves/)
describes the shards of its leaves.
"""

from __future__ import annotations

import array
import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from ._abi import (
    TM_REPLICA_COPY,
    TM_REPLICA_MAIN,
    TM_REPLICA_UNLABELLED,
    TM_WORDS_FLAT,
    TM_WORDS_MEMORY,
    TM_WORDS_METADATA_ONLY,
    TM_WORDS_STRIDED,
)
from ._dtypes import info
from .errors import LayoutError

Dims = Tuple[int, ...]

# Replica labels.
UNLABELLED, MAIN, COPY = TM_REPLICA_UNLABELLED, TM_REPLICA_MAIN, TM_REPLICA_COPY
PURPOSES = SAVE, LOAD, VALIDATE = "save", "load", "validate"


class Shard(NamedTuple):
    """A box of a global tensor, and the memory of its cells.

    All numbers except `address` are in elements of `dtype`. `strides` None: packed, row-major. `memory`:
    device_kind, device_ordinal, two words of uuid, memory_kind, stream_kind, stream; None: host memory.
    `owner` must live, with the same size, until the save or load has ended.
    """

    key: str
    dtype: int
    global_shape: Dims
    begin: Dims
    extent: Dims
    replica: int
    address: int
    strides: Optional[Dims]
    memory: Optional[Dims]
    metadata_only: bool
    owner: Any
    # (first, count): only these elements of the box in row-major order; the memory then has one axis.
    flat: Optional[Tuple[int, int]] = None

    @property
    def held(self) -> Dims:
        """The shape of the memory."""
        return self.extent if self.flat is None else (self.flat[1],)


def distinct(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether it is certain that no two cells share memory: each stride is longer than the reach of all shorter
    strides."""
    reach = 0
    for stride, size in sorted((abs(st), n) for st, n in zip(strides, shape) if n != 1):
        if size == 0:
            return True
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


# ---- Overlapping destinations ---------------------------------------------------------------

_MAX_RUNS = 1 << 16


def span_of(shard: Shard) -> Tuple[int, int]:
    """The addresses of the first byte of a shard's memory and of its end."""
    bits = info(shard.dtype).bits
    if shard.strides is None:
        return shard.address, shard.address + (math.prod(shard.held) * bits + 7) // 8
    steps = [(n - 1) * s for n, s in zip(shard.held, shard.strides)]
    low = sum(s for s in steps if s < 0)
    high = sum(s for s in steps if s > 0)
    return shard.address + low * bits // 8, shard.address + ((high + 1) * bits + 7) // 8


def _runs(shard: Shard) -> Optional[List[Tuple[int, int]]]:
    """The byte ranges [begin, end) that have cells; None: more than _MAX_RUNS."""
    if shard.strides is None:
        return [span_of(shard)]
    bits = info(shard.dtype).bits
    axes = sorted((abs(s), n, s) for n, s in zip(shard.held, shard.strides) if n != 1)
    length = 1
    while axes and axes[0][0] == length:
        length *= axes[0][1]
        axes.pop(0)
    begins = [span_of(shard)[0]]
    for stride, n, _ in axes:
        if len(begins) * n > _MAX_RUNS:
            return None
        begins = [b + i * stride * bits // 8 for b in begins for i in range(n)]
    return [(b, b + (length * bits + 7) // 8) for b in begins]


def check_destinations(shards: Sequence[Shard]) -> None:
    """LayoutError, with both keys: a load into these shards would write a byte twice.

    Interleaved tensors (columns of one matrix) are compared run by run. If one has more than 65,536 runs, they
    are refused because they may overlap.
    """
    spans = []
    for shard in shards:
        if shard.metadata_only or 0 in shard.held:
            continue
        device = shard.memory[:2] if shard.memory is not None else (0, 0)
        begin, end = span_of(shard)
        spans.append((device, begin, end, shard))
    spans.sort(key=lambda s: s[:3])
    # The spans that reach past the begin of the current one: nearly always none.
    open_spans: List[Tuple[Any, int, int, Shard]] = []
    for span in spans:
        open_spans = [s for s in open_spans if s[0] == span[0] and s[2] > span[1]]
        for other in open_spans:
            if other[3].owner is not span[3].owner or other[3].key != span[3].key:
                _check_pair(other[3], span[3])
        open_spans.append(span)


def _check_pair(a: Shard, b: Shard) -> None:
    runs_a, runs_b = _runs(a), _runs(b)
    if runs_a is not None and runs_b is not None:
        last = 0
        for begin, end in sorted(runs_a + runs_b):
            if begin < last:
                break
            last = end
        else:
            return
    may = "" if runs_a is not None and runs_b is not None else "may "
    raise LayoutError(
        f"tensors {a.key} and {b.key} {may}share memory, and a load would write both"
    )


# ---- Packed words ------------------------------------------------------------------------------


def pack(shards: Sequence[Shard]) -> Tuple[bytes, array.array[int], int]:
    """Keys, words and count for tm_state_add_tensors and tm_layout_new (tensormount/c.h)."""
    words = array.array("q")
    keys = []
    for shard in shards:
        keys.append(shard.key)
        flags = 0
        if shard.strides is not None:
            flags |= TM_WORDS_STRIDED
        if shard.metadata_only:
            flags |= TM_WORDS_METADATA_ONLY
        if shard.memory is not None:
            flags |= TM_WORDS_MEMORY
        if shard.flat is not None:
            flags |= TM_WORDS_FLAT
        words.extend(
            (
                shard.dtype,
                flags,
                shard.replica,
                len(shard.global_shape),
                _signed(shard.address),
                *shard.global_shape,
                *shard.begin,
                *shard.extent,
                *(shard.flat or ()),
                *(shard.strides or ()),
            )
        )
        if shard.memory is not None:
            words.extend(map(_signed, shard.memory))
    return packed_keys(keys), words, len(shards)


def packed_keys(keys: Sequence[str]) -> bytes:
    text = "\0".join(keys).encode()
    if text.count(b"\0") != max(0, len(keys) - 1):
        key = next(key for key in keys if "\0" in key)
        raise LayoutError(f"{key!r}: a key must not contain NUL", key=key)
    return text + b"\0" if keys else b""


def _signed(word: int) -> int:
    """An unsigned 64-bit word (an address with the high bit set) as the signed number with the same bits."""
    return word - (1 << 64) if word >= 1 << 63 else word
