# SPDX-License-Identifier: Apache-2.0
"""The shards of whole state dicts: many leaves at a time, and the same ones again and again.

What a leaf is by itself says _shards.py. A call of Python for each of ten thousand tensors is what
that costs, so leaves of one family are asked together for what their descriptions depend on; leaves
that are alike are described once, and leaves that are as the last time not at all.
"""

from __future__ import annotations

import array
import collections
import ctypes
import itertools
import math
import operator
import sys
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ._held import Shards
from ._shards import (
    LOAD,
    SAVE,
    Shard,
    check_destinations,
    describe,
    dtensor_type,
    pack,
    packed_keys,
    span_of,
    world_size_of_torch,
)

_TENSORS, _DTENSORS, _ARRAYS = "tensors", "dtensors", "arrays"

_LOCAL = operator.attrgetter("_local_tensor")
_PLACEMENTS = operator.attrgetter("placements")
_MESH = operator.attrgetter("device_mesh")
_NO_BYTES = ctypes.c_char * 0


def families() -> Dict[type, str]:
    """Types whose leaves are looked at by columns. Exactly these: what is derived from them may be
    more than its memory."""
    found: Dict[type, str] = {}
    torch = sys.modules.get("torch")
    if torch is not None:
        found[torch.Tensor] = found[torch.nn.Parameter] = _TENSORS
        dtensor = dtensor_type()
        if dtensor is not None:
            found[dtensor] = _DTENSORS
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found[numpy.ndarray] = found[numpy.memmap] = _ARRAYS
    return found


def bases(leaves: Sequence[Any]) -> Optional[List[int]]:
    """Where the memory of leaves of one family begins; None where they are of several or none."""
    known = families()
    found = {known.get(kind) for kind in set(map(type, leaves))}
    family = found.pop() if len(found) == 1 else None
    try:
        if family == _ARRAYS:
            return _array_bases(leaves)
        if family is not None:
            tensors = leaves if family == _TENSORS else map(_LOCAL, leaves)
            return list(map(sys.modules["torch"].Tensor.data_ptr, tensors))
    except RuntimeError:  # Sparse, and so on.
        pass
    return None


def local_tensors(leaves: Iterable[Any]) -> List[Any]:
    """The tensors of PyTorch among them; of DTensors, those that have the memory."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    plain = (torch.Tensor, torch.nn.Parameter)
    found: List[Any] = []
    for leaf in leaves:
        if type(leaf) in plain:
            found.append(leaf)
        elif isinstance(leaf, Shards):
            found += [part.data for part in leaf.parts]
        else:
            found.append(getattr(leaf, "_local_tensor", leaf))
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def _array_bases(arrays: Sequence[Any]) -> List[int]:
    try:
        return list(map(ctypes.addressof, map(_NO_BYTES.from_buffer, arrays)))
    except (TypeError, ValueError, BufferError):
        # Not to be written to, with gaps, or of ml_dtypes' elements: four times as slow.
        return [a.__array_interface__["data"][0] for a in arrays]


class _Family:
    """Leaves of one family: all that their descriptions depend on, and where they are.

    `members`: their places among all leaves. `like`: a list for each thing asked; leaves that are
    equal in all of them have one description but for their addresses, where their storage is as long
    as that needs. `storage`: offsets in it and its sizes, of tensors. `like` None: these lists do not
    say all that there is to one of the leaves, so that each must be described by itself.
    """

    def __init__(
        self, family: Optional[str], members: Sequence[int], leaves: Sequence[Any], purpose: str
    ) -> None:
        self.family = family
        self.members = members
        self.loads = purpose == LOAD
        self.like: Optional[List[List[Any]]] = None
        self.storage: List[List[int]] = []
        self.bases: List[int] = []
        try:
            if family == _ARRAYS:
                self.bases = _array_bases(leaves)
                self.like = [
                    [a.dtype for a in leaves],
                    _shared(a.shape for a in leaves),
                    _shared(a.strides for a in leaves),
                    [a.flags.writeable for a in leaves],
                ]
            elif family is not None:
                self._look_at_tensors(leaves)
        except RuntimeError:  # Sparse, nested, within a transform of torch.func, ...
            self.like = None

    def _look_at_tensors(self, leaves: Sequence[Any]) -> None:
        tensors = self._local(leaves)
        if tensors is None or any(not t.is_cpu or t.is_neg() or t.is_conj() for t in tensors):
            return
        self.storage = [
            [t.storage_offset() for t in tensors],
            [t.untyped_storage().nbytes() for t in tensors],
        ]
        self.bases = [t.data_ptr() for t in tensors]
        like: List[List[Any]] = [
            [t.dtype for t in tensors],
            _shared(t.shape for t in tensors),
            _shared(t.stride() for t in tensors),
        ]
        if self.family == _DTENSORS:
            like += _placed(leaves)
            kinds = set(map(type, itertools.chain.from_iterable(like[-2])))
            if any(kind.__hash__ is None for kind in kinds):  # None that is known here.
                return
        self.like = like

    def _local(self, leaves: Sequence[Any]) -> Optional[Sequence[Any]]:
        """The tensors that have the memory; None where those of DTensors are no plain ones, or some
        may not be written to."""
        torch = sys.modules["torch"]
        tensors = leaves
        if self.family == _DTENSORS:
            tensors = list(map(_LOCAL, leaves))
            if set(map(type, tensors)) != {torch.Tensor}:
                return None
        if self.loads and not torch.is_inference_mode_enabled():
            if any(map(torch.Tensor.is_inference, tensors)):
                return None
        return tensors

    def again(self, leaves: Sequence[Any]) -> Optional[List[int]]:
        """Where other leaves of the same types are; None where more than that has changed."""
        if self.like is None:
            return None
        try:
            if self.family == _ARRAYS:
                same = [
                    a
                    for a, dtype, shape, strides, writeable in zip(leaves, *self.like)
                    if a.dtype == dtype
                    and a.shape == shape
                    and a.strides == strides
                    and a.flags.writeable == writeable
                ]
                return _array_bases(leaves) if len(same) == len(leaves) else None
            tensors = self._local(leaves)
            if tensors is None or (
                self.family == _DTENSORS and _placed(leaves) != self.like[3:]
            ):
                return None
            # In one go: tensors lie apart, and each is fetched into the cache once.
            found = [
                t.data_ptr()
                for t, dtype, shape, strides, offset, size in zip(
                    tensors, *self.like[:3], *self.storage
                )
                if t.dtype is dtype
                and t.shape == shape
                and t.stride() == strides
                and t.storage_offset() == offset
                # A tensor may reach past a storage that was cut.
                and t.untyped_storage().nbytes() == size
                and t.is_cpu
                and not t.is_neg()
                and not (dtype.is_complex and t.is_conj())
            ]
        except RuntimeError:
            return None
        return found if len(found) == len(leaves) else None

    def rooms(self) -> Sequence[float]:
        """Bytes from the base of each leaf to the end of its storage."""
        if self.like is None or not self.storage:
            return [math.inf] * len(self.members)
        return [
            size - offset * dtype.itemsize
            for dtype, offset, size in zip(self.like[0], *self.storage)
        ]


def _shared(values: Iterable[Any]) -> List[Any]:
    """A list of them, in which equal ones are one object: ten thousand tensors have few shapes, and
    as many objects would call the garbage collector."""
    first: Dict[Any, Any] = {}
    return [first.setdefault(value, value) for value in values]


def _placed(dtensors: Sequence[Any]) -> List[List[Any]]:
    shape = sys.modules["torch"].Tensor.shape.__get__
    placed = [list(map(of, dtensors)) for of in (_PLACEMENTS, _MESH)]
    return [_shared(map(shape, dtensors)), *placed]


class _Seen(NamedTuple):
    """Leaves, looked at: types of all, and facts by families."""

    kinds: List[type]
    families: List[_Family]

    def again(self, leaves: Sequence[Any]) -> Optional[List[int]]:
        """As `_Family.again`, of all."""
        if self.kinds != list(map(type, leaves)):
            return None
        if len(self.families) == 1:
            return self.families[0].again(leaves)
        found = [0] * len(leaves)
        for family in self.families:
            bases = family.again([leaves[i] for i in family.members])
            if bases is None:
                return None
            for i, base in zip(family.members, bases):
                found[i] = base
        return found

    def bases(self) -> List[int]:
        """Of all leaves in their order; 0 where shards have addresses of their own."""
        found = [0] * len(self.kinds)
        for family in self.families:
            for i, base in zip(family.members, family.bases):
                found[i] = base
        return found


def _look(leaves: Sequence[Any], purpose: str) -> _Seen:
    kinds = list(map(type, leaves))
    known = families()
    members: Dict[Optional[str], List[int]] = {}
    for i, kind in enumerate(kinds):
        members.setdefault(known.get(kind), []).append(i)
    return _Seen(
        kinds,
        [_Family(name, of, [leaves[i] for i in of], purpose) for name, of in members.items()],
    )


# ---- Layouts that are used again -----------------------------------------------------------------


class _Template:
    """What leaves that are alike have in common: their shards but for keys and addresses."""

    __slots__ = ("count", "offsets", "reach", "spans", "words")

    def __init__(self, shards: Sequence[Shard], base: int) -> None:
        self.count = len(shards)
        self.words = pack([shard._replace(address=0) for shard in shards])[1]
        # Of the address of each shard from that of the leaf; -1: it has none.
        self.offsets = tuple(shard.address - base if shard.address else -1 for shard in shards)
        # Its first and last byte + 1, from its address on.
        self.spans = [
            (begin - shard.address, end - shard.address)
            for shard, (begin, end) in zip(shards, map(span_of, shards))
        ]
        # So many bytes a storage must have from the base on.
        self.reach = max(
            (offset + span[1] for offset, span in zip(self.offsets, self.spans) if offset >= 0),
            default=0,
        )


class Layout:
    """The shards of a state dict without their addresses: what stays from step to step.

    `handle` is the caller's (its tm_layout). Immutable otherwise. Holds none of the leaves that it
    was made of, but those that were described by themselves, or what was made of them (`owners`):
    where there are such, the layout is for once.
    """

    def __init__(
        self,
        keys: Sequence[str],
        leaves: Sequence[Any],
        purpose: str = SAVE,
        world_size: Optional[int] = None,
    ) -> None:
        """Errors of `describe`, and of `check_destinations`."""
        self.purpose = purpose
        self.handle: Any = None
        self.owners: List[Any] = []
        self._seen = _look(leaves, purpose)
        templates = self._templates(keys, leaves, world_size)
        # Of each leaf, that of the address of each of its shards from its own.
        self._offsets = [template.offsets for template in templates]
        self._simple = set(self._offsets) <= {(0,)}
        self._absent = sum(offsets.count(-1) for offsets in self._offsets)
        spans = [span for template in templates for span in template.spans]
        self._lows, self._highs = [low for low, _ in spans], [high for _, high in spans]
        self.words = array.array("q")
        own: List[str] = []
        for key, template in zip(keys, templates):
            self.words += template.words
            own += [key] * template.count
        self.keys, self.count = packed_keys(own), len(own)
        # Of the leaves that it was made of; for whoever makes it.
        self.first = self._addresses(self._seen.bases())
        if purpose == LOAD and not self._distinct(self.first):
            check_destinations(
                [
                    shard
                    for key, leaf in zip(keys, leaves)
                    for shard in describe(key, leaf, purpose, world_size)
                ]
            )

    def _templates(
        self, keys: Sequence[str], leaves: Sequence[Any], world_size: Optional[int]
    ) -> List[_Template]:
        """Of each leaf. Of leaves that are alike only the first is described."""
        found: Dict[int, _Template] = {}
        for family in self._seen.families:
            if family.like is None:
                for i in family.members:
                    shards = describe(keys[i], leaves[i], self.purpose, world_size)
                    self.owners += [shard.owner for shard in shards]
                    found[i] = _Template(shards, 0)
                continue
            alike: Dict[Any, _Template] = {}
            rows = zip(family.members, zip(*family.like), family.bases, family.rooms())
            for i, like, base, room in rows:
                template = alike.get(like)
                if template is None or template.reach > room or (template.reach and not base):
                    # With too little memory it is refused by name.
                    shards = describe(keys[i], leaves[i], self.purpose, world_size)
                    template = alike[like] = _Template(shards, base)
                found[i] = template
        return [found[i] for i in range(len(leaves))]

    def keep_little(self) -> None:
        """Before it is kept for later."""
        self.first = []
        for family in self._seen.families:
            family.bases = []

    def addresses(self, leaves: Sequence[Any]) -> Optional[List[int]]:
        """The addresses of all shards where leaves are as those that the layout was made of, but for
        where they lie; None where they are not, so that a new layout is needed."""
        bases = self._seen.again(leaves)
        if bases is None:
            return None
        found = self._addresses(bases)
        if found.count(0) != self._absent:  # Memory that was freed.
            return None
        # Whether destinations overlap the careful way of a new layout says, and by name.
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
        """Whether no two spans overlap: the begins and the ends, each in order, alternate."""
        begins = sorted(map(operator.add, addresses, self._lows))
        ends = sorted(map(operator.add, addresses, self._highs))
        return all(map(operator.le, ends, itertools.islice(begins, 1, None)))


class LayoutCache:
    """The last layouts, by what they were for and the keys that they have. Thread-compatible."""

    def __init__(self, capacity: int = 8) -> None:
        self._capacity = capacity
        self._layouts: collections.OrderedDict[Any, Layout] = collections.OrderedDict()

    def get(
        self,
        items: Iterable[Tuple[str, Any]],
        purpose: str = SAVE,
        world_size: Optional[int] = None,
    ) -> Tuple[Layout, array.array[int], bool]:
        """The layout of `Flat.items()`, the addresses of its shards, and whether it was known.
        Errors as of `Layout`. The leaves must live until the save or load has ended."""
        if world_size is None and "torch.distributed" in sys.modules:
            world_size = world_size_of_torch()
        keys = tuple([key for key, _ in items])
        leaves = [leaf for _, leaf in items]
        name = (purpose, world_size, keys)
        layout = self._layouts.get(name)
        if layout is not None:
            found = layout.addresses(leaves)
            if found is not None:
                self._layouts.move_to_end(name)
                return layout, array.array("Q", found), True
        layout = Layout(keys, leaves, purpose, world_size)
        found = layout.first
        if not layout.owners:
            layout.keep_little()
            self._layouts[name] = layout
            self._layouts.move_to_end(name)
            while len(self._layouts) > self._capacity:
                self._layouts.popitem(last=False)
        return layout, array.array("Q", found), False
