# SPDX-License-Identifier: Apache-2.0
"""The shards of whole state dicts, described together and reused from step to step.

A kind of leaves (_leaves/) describes a single leaf, which is slow for ten thousand tensors. Leaves of one family
are therefore examined together, leaves that are alike are described once, and unchanged leaves not at all.
"""

from __future__ import annotations

import array
import itertools
import math
import operator
import sys
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ._held import Part
from ._leaves.base import ArrayKind, Facts
from ._leaves.dtensors import world_size_of_torch
from ._leaves.parts import describe_part
from ._leaves.registry import describe, families, kind_of
from ._recent import Recent
from ._shards import LOAD, SAVE, Shard, check_destinations, pack, packed_keys, span_of


class _Rows:
    """The rows to describe: each is a leaf, or a part of one."""

    def __init__(self, items: Iterable[Tuple[str, Any]]) -> None:
        self.keys = [key for key, _ in items]
        self.leaves = [leaf for _, leaf in items]
        self.parts: Optional[List[Optional[Part]]] = None  # None: no row is a part.
        self.types = list(map(type, self.leaves))
        if not set(self.types) <= families().keys():
            self._take_apart()

    def _take_apart(self) -> None:
        rows: List[Tuple[str, Any, Optional[Part]]] = []
        for key, leaf in zip(self.keys, self.leaves):
            kind = kind_of(leaf)
            parts = kind.parts(leaf) if isinstance(kind, ArrayKind) else None
            if parts is None:
                rows.append((key, leaf, None))
            else:
                rows.extend((key, part.data, part) for part in parts)
        if any(part is not None for _, _, part in rows):
            self.keys = [key for key, _, _ in rows]
            self.leaves = [leaf for _, leaf, _ in rows]
            self.parts = [part for _, _, part in rows]
            self.types = list(map(type, self.leaves))

    def places(self, members: Sequence[int]) -> List[Any]:
        """`Part.place` of each member, None for a member that is not a part. Empty if no row is a part."""
        parts = self.parts
        if parts is None:
            return []
        return [part and part.place for part in map(parts.__getitem__, members)]

    def describe(self, i: int, purpose: str, world_size: Optional[int]) -> List[Shard]:
        part = self.parts[i] if self.parts is not None else None
        if part is not None:
            return [describe_part(self.keys[i], part, purpose)]
        return describe(self.keys[i], self.leaves[i], purpose, world_size)


class _Family:
    """Rows whose leaves are of one kind, with their common `Facts` and their base addresses.

    `members`: their indices among all rows. `facts` None: each leaf must be described by itself.
    """

    def __init__(
        self, kind: Optional[ArrayKind], members: Sequence[int], rows: _Rows, purpose: str
    ) -> None:
        self.kind = kind
        self.members = members
        self.loads = purpose == LOAD
        self.places = rows.places(members)
        self.facts: Optional[Facts] = None
        self.bases: List[int] = []
        found = None
        if kind is not None:
            try:
                found = kind.examine([rows.leaves[i] for i in members], self.loads)
            except RuntimeError:  # Raised for sparse or nested tensors, transforms of torch.func, ...
                pass
        if found is not None:
            self.facts, self.bases = found

    def new_addresses(self, rows: _Rows) -> Optional[List[int]]:
        """Base addresses of the leaves of other rows of the same types; None: more than the addresses changed."""
        if self.kind is None or self.facts is None or self.places != rows.places(self.members):
            return None
        whole = len(self.members) == len(rows.leaves)
        leaves = rows.leaves if whole else [rows.leaves[i] for i in self.members]
        try:
            return self.kind.new_addresses(leaves, self.loads, self.facts)
        except RuntimeError:
            return None

    def signatures(self) -> Optional[Iterable[Tuple[Any, ...]]]:
        """A tuple for each row; rows with equal tuples have the same shards. None: there are no facts."""
        if self.facts is None:
            return None
        return zip(*self.facts.like, *filter(None, (self.facts.places, self.places)))

    def rooms(self) -> Sequence[float]:
        """Bytes from the base address of each leaf to the end of its storage; infinity if that is unknown."""
        if self.facts is None or not self.facts.storage:
            return [math.inf] * len(self.members)
        return [
            size - offset * dtype.itemsize
            for dtype, offset, size in zip(self.facts.like[0], *self.facts.storage)
        ]


class _RowFacts(NamedTuple):
    """Facts of all rows: their types, and their families."""

    types: List[type]
    families: List[_Family]

    def new_addresses(self, rows: _Rows) -> Optional[List[int]]:
        """As `_Family.new_addresses`, for all rows."""
        if self.types != rows.types:
            return None
        if len(self.families) == 1:
            return self.families[0].new_addresses(rows)
        found = [0] * len(rows.leaves)
        for family in self.families:
            bases = family.new_addresses(rows)
            if bases is None:
                return None
            for i, base in zip(family.members, bases):
                found[i] = base
        return found

    def bases(self) -> List[int]:
        """Base addresses in the order of the rows; 0 for leaves that were described by themselves."""
        found = [0] * len(self.types)
        for family in self.families:
            for i, base in zip(family.members, family.bases):
                found[i] = base
        return found


def _collect_facts(rows: _Rows, purpose: str) -> _RowFacts:
    known = families()
    members: Dict[Optional[ArrayKind], List[int]] = {}
    for i, kind in enumerate(rows.types):
        members.setdefault(known.get(kind), []).append(i)
    return _RowFacts(rows.types, [_Family(kind, of, rows, purpose) for kind, of in members.items()])


# ---- Layouts -----------------------------------------------------------------------------------------


class _Template:
    """The shards of rows that are alike, without keys and addresses."""

    __slots__ = ("count", "offsets", "reach", "spans", "words")

    def __init__(self, shards: Sequence[Shard], base: int) -> None:
        self.count = len(shards)
        self.words = pack([shard._replace(address=0) for shard in shards])[1]
        # Offset of the address of each shard from the base of the leaf; -1: the shard has no address.
        self.offsets = tuple(shard.address - base if shard.address else -1 for shard in shards)
        # First byte and end of each shard, relative to its address.
        self.spans = [
            (begin - shard.address, end - shard.address)
            for shard, (begin, end) in zip(shards, map(span_of, shards))
        ]
        # Bytes that the storage must have from the base on.
        self.reach = max(
            (offset + span[1] for offset, span in zip(self.offsets, self.spans) if offset >= 0),
            default=0,
        )


class Layout:
    """The shards of a state dict without their addresses, which stay the same from step to step.

    Immutable, except `handle`, which belongs to the caller (its tm_layout). Keeps no leaf alive, except leaves
    that were described by themselves, or copies of them (`owners`). A layout with owners is not reused.
    """

    def __init__(self, rows: _Rows, purpose: str, world_size: Optional[int]) -> None:
        """Errors as of `describe` and `check_destinations`."""
        self.purpose = purpose
        self.handle: Any = None
        self.owners: List[Any] = []
        self._seen = _collect_facts(rows, purpose)
        templates = self._templates(rows, world_size)
        # For each row, the offsets of its shards from its base.
        self._offsets = [template.offsets for template in templates]
        self._simple = set(self._offsets) <= {(0,)}
        self._absent = sum(offsets.count(-1) for offsets in self._offsets)
        spans = [span for template in templates for span in template.spans]
        self._lows, self._highs = [low for low, _ in spans], [high for _, high in spans]
        self.words = array.array("q")
        own: List[str] = []
        for key, template in zip(rows.keys, templates):
            self.words += template.words
            own += [key] * template.count
        self.keys, self.count = packed_keys(own), len(own)
        # The addresses of the leaves that the layout was made of.
        self.first = self._addresses(self._seen.bases())
        if purpose == LOAD and not self._distinct(self.first):
            check_destinations(
                [
                    shard
                    for i in range(len(rows.keys))
                    for shard in rows.describe(i, purpose, world_size)
                ]
            )

    def _templates(self, rows: _Rows, world_size: Optional[int]) -> List[_Template]:
        """The template of each row. Of rows that are alike only the first is described, and those with too little
        memory."""
        found: Dict[int, _Template] = {}
        for family in self._seen.families:
            likes = family.signatures()
            if likes is None:
                for i in family.members:
                    shards = rows.describe(i, self.purpose, world_size)
                    self.owners += [shard.owner for shard in shards]
                    found[i] = _Template(shards, 0)
                continue
            alike: Dict[Any, _Template] = {}
            for i, like, base, room in zip(family.members, likes, family.bases, family.rooms()):
                template = alike.get(like)
                if template is None or template.reach > room or (template.reach and not base):
                    # A leaf with too little memory is described by itself, which refuses it by name.
                    shards = rows.describe(i, self.purpose, world_size)
                    template = alike[like] = _Template(shards, base)
                found[i] = template
        return [found[i] for i in range(len(rows.keys))]

    def drop_addresses(self) -> None:
        """Drops the addresses. Called before the layout is kept."""
        self.first = []
        for family in self._seen.families:
            family.bases = []

    def addresses(self, rows: _Rows) -> Optional[List[int]]:
        """The addresses of all shards, if the leaves differ from those of the layout only in their addresses. None:
        a new layout is needed."""
        bases = self._seen.new_addresses(rows)
        if bases is None:
            return None
        found = self._addresses(bases)
        if found.count(0) != self._absent:  # The memory of a leaf was freed.
            return None
        # If destinations may overlap, a new layout checks them exactly, and reports them by name.
        return None if self.purpose == LOAD and not self._distinct(found) else found

    def _addresses(self, bases: List[int]) -> List[int]:
        if self._simple:
            return bases
        return [
            base + offset if offset >= 0 else 0
            for base, offsets in zip(bases, self._offsets)
            for offset in offsets
        ]

    def _distinct(self, addresses: Sequence[int]) -> bool:
        """Whether no two spans overlap: in order, each end is at most the next begin."""
        begins = sorted(map(operator.add, addresses, self._lows))
        ends = sorted(map(operator.add, addresses, self._highs))
        return all(map(operator.le, ends, itertools.islice(begins, 1, None)))


class LayoutCache:
    """The last layouts, by purpose, world size and keys. Threads may share it, as `Recent`."""

    def __init__(self, capacity: int = 8) -> None:
        self._layouts: Recent[Layout] = Recent(capacity)

    def get(
        self,
        items: Iterable[Tuple[str, Any]],
        purpose: str = SAVE,
        world_size: Optional[int] = None,
    ) -> Tuple[Layout, array.array[int], bool]:
        """The layout of `FlatTree.items()`, the addresses of its shards, and whether the layout was known.
        The leaves must live until the save or load has ended. Errors as of `Layout`."""
        if world_size is None and "torch.distributed" in sys.modules:
            world_size = world_size_of_torch()
        rows = _Rows(items)
        name = (purpose, world_size, tuple(rows.keys))
        layout = self._layouts.get(name)
        if layout is not None:
            found = layout.addresses(rows)
            if found is not None:
                self._layouts.keep(name, layout)
                return layout, array.array("Q", found), True
        layout = Layout(rows, purpose, world_size)
        found = layout.first
        if not layout.owners:
            layout.drop_addresses()
            self._layouts.keep(name, layout)
        return layout, array.array("Q", found), False
