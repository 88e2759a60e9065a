# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of the leaves of a state dict, as the library wants it: shards.

A shard is a box of a global tensor and the memory of its cells. Arrays of NumPy, tensors of PyTorch
(DTensors, too) and arrays of JAX are described where they lie; no byte is copied. What cannot be
described exactly is refused by name.
"""

from __future__ import annotations

import array
import math
import struct
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ._dtypes import all_dtypes
from ._held import Shards
from .errors import LayoutError, UnsupportedError

Dims = Tuple[int, ...]

# Replica labels (TM_REPLICA_*).
UNLABELLED, MAIN, COPY = 0, 1, 2
# What the words of a shard have (TM_WORDS_*).
WORDS_STRIDED, WORDS_FLAT, WORDS_METADATA_ONLY, WORDS_MEMORY = 1, 2, 4, 8
# TM_DEVICE_*, TM_MEMORY_*, TM_STREAM_*.
_DEVICE_CUDA = 1
_MEMORY_DEVICE = 3
_STREAM_LEGACY_DEFAULT, _STREAM_HANDLE = 1, 3

# Numbers of element types by what torch and NumPy (with ml_dtypes) call them. torch has a name for
# two of our four-bit elements in a byte.
_F4 = 21
_TORCH_DTYPES = {row.torch: row.number for row in all_dtypes() if row.torch is not None}
_TORCH_DTYPES["float4_e2m1fn_x2"] = _F4
# NumPy's types under a byte take a byte an element in memory, ours do not.
_NUMPY_DTYPES = {row.numpy: row.number for row in all_dtypes() if row.bits % 8 == 0}

SAVE, LOAD, VALIDATE = "save", "load", "validate"


class Shard(NamedTuple):
    """A box of a global tensor, and where its cells are.

    All numbers in elements of `dtype` but `address`. `strides` None: packed, row-major. `memory`:
    device_kind, device_ordinal, two words of uuid, memory_kind, stream_kind, stream; None: memory
    of the host. `owner` must live, unchanged in size, until the save or load has ended.
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
    # Of the box in row-major order only these elements: (first, count). Then the memory has one axis.
    flat: Optional[Tuple[int, int]] = None

    @property
    def held(self) -> Dims:
        """The shape of the memory."""
        return self.extent if self.flat is None else (self.flat[1],)


def describe(
    key: str, leaf: Any, purpose: str = SAVE, world_size: Optional[int] = None
) -> List[Shard]:
    """The shards of one leaf on this rank. `purpose`: "save", "load" (the memory is written to)
    or "validate" (no memory is needed). `world_size`: ranks of the group that saves or loads;
    replicas of a DTensor are labelled only where its mesh has all of them, since a rank knows
    nothing of the copies on other meshes. None: that of torch.distributed.

    Empty where this rank is not part of a DTensor's mesh. UnsupportedError: a kind of array,
    element or memory that cannot be stored, or filled. LayoutError: a DTensor that contradicts
    itself, memory in which cells lie upon each other (loads).
    """
    if purpose not in (SAVE, LOAD, VALIDATE):
        raise ValueError(f"purpose {purpose!r}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return _describe_torch(key, leaf, purpose, world_size)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.ndarray):
        return [_describe_numpy(key, leaf, purpose)]
    if hasattr(type(leaf), "addressable_shards"):
        return _describe_jax(key, leaf, purpose)
    if isinstance(leaf, Shards):
        return _describe_shards(key, leaf, purpose)
    raise UnsupportedError(f"tensor {key}: {_name(leaf)} is no array that is known here")


def destination(key: str, leaf: Any) -> Shard:
    """The memory of one array or tensor on the host that is to be filled as a whole. Errors of
    `describe`; UnsupportedError for what knows of a place of its own in a larger tensor (DTensors)."""
    if not _is_plain(leaf):
        raise UnsupportedError(f"tensor {key}: {_name(leaf)} is no plain array and no plain tensor")
    (shard,) = describe(key, leaf, LOAD)
    if shard.memory is not None:
        raise UnsupportedError(f"tensor {key}: memory on {leaf.device}: read into memory of the host")
    return shard


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides (in elements) are those of packed rows; those of axes of one are free."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _distinct(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two cells certainly share memory: along each axis a step is longer than all that
    the shorter steps can reach."""
    reach = 0
    for stride, size in sorted((abs(st), n) for st, n in zip(strides, shape) if n != 1):
        if size == 0:
            return True
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


# ---- NumPy -----------------------------------------------------------------------------------


def _describe_numpy(key: str, a: Any, purpose: str) -> Shard:
    import numpy

    if type(a) is not numpy.ndarray and type(a) is not numpy.memmap:
        raise UnsupportedError(
            f"tensor {key}: {_name(a)}; what it has beside its numbers would be lost: "
            "numpy.asarray(...) is what can be stored"
        )
    dtype = a.dtype
    number = _NUMPY_DTYPES.get(dtype.name)
    if number is None or dtype.names is not None or dtype.subdtype is not None:
        raise UnsupportedError(f"tensor {key}: NumPy arrays of {dtype} cannot be stored")
    if not dtype.isnative:
        raise UnsupportedError(
            f"tensor {key}: big-endian numbers ({dtype.str}); "
            ".astype(dtype.newbyteorder('=')) has them in order"
        )
    if purpose == LOAD and not a.flags.writeable:
        raise UnsupportedError(f"tensor {key}: a read-only NumPy array cannot be loaded into")
    strides: Optional[Dims] = None
    if not a.flags.c_contiguous:
        if any(n > 1 and stride % dtype.itemsize for n, stride in zip(a.shape, a.strides)):
            raise UnsupportedError(
                f"tensor {key}: elements of {dtype.itemsize} bytes lie {a.strides} bytes apart, "
                "which is no whole number of elements; a copy can be stored"
            )
        strides = tuple(stride // dtype.itemsize for stride in a.strides)
        if purpose == LOAD and not _distinct(a.shape, strides):
            raise LayoutError(f"tensor {key}: cells of the array lie upon each other")
    rank = len(a.shape)
    if rank > 16:
        raise LayoutError(f"tensor {key}: {rank} axes, at most 16")
    return Shard(
        key,
        number,
        a.shape,
        (0,) * rank,
        a.shape,
        UNLABELLED,
        a.__array_interface__["data"][0],
        strides,
        None,
        purpose == VALIDATE,
        a,
    )


# ---- PyTorch ---------------------------------------------------------------------------------


def _torch_number(key: str, dtype: Any) -> int:
    name = str(dtype).split(".", 1)[-1]
    number = _TORCH_DTYPES.get(name)
    if number is None:
        raise UnsupportedError(
            f"tensor {key}: torch.{name} cannot be stored"
            + ("; .view(torch.uint8) has its bytes" if dtype.itemsize == 1 else "")
        )
    return number


def _describe_torch(
    key: str, t: Any, purpose: str, world_size: Optional[int]
) -> List[Shard]:
    dtensor = dtensor_type()
    is_dtensor = dtensor is not None and isinstance(t, dtensor)
    if is_checkpointable(t._local_tensor if is_dtensor else t):
        return _describe_checkpointable(key, t, purpose)
    if is_dtensor:
        return _describe_dtensor(key, t, purpose, world_size)
    whole = _local_memory(key, t, purpose)
    shape = whole.shape
    return [_torch_shard(key, whole, shape, (0,) * len(shape), shape, (0,) * len(shape), 0)]


def dtensor_type() -> Any:
    # The module is there once a DTensor is.
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None) if module is not None else None


class _LocalMemory(NamedTuple):
    """A local tensor, in its own elements (float4: two of ours each)."""

    dtype: int
    address: int
    strides: Dims
    packed: bool
    itemsize: int
    shape: Dims
    memory: Optional[Dims]
    metadata_only: bool
    owner: Any


def _local_memory(key: str, t: Any, purpose: str) -> _LocalMemory:
    import torch

    _refuse_kinds(key, t)
    number = _torch_number(key, t.dtype)
    shape = tuple(t.shape)
    strides: Dims = tuple(t.stride())
    if len(shape) > 16:
        raise LayoutError(f"tensor {key}: {len(shape)} axes, at most 16")
    metadata_only = purpose == VALIDATE
    if t.is_meta and not metadata_only:
        raise UnsupportedError(
            f"tensor {key}: a tensor on the meta device has no memory; it can be validated, not "
            + ("saved" if purpose == SAVE else "loaded into")
        )
    if t.is_conj() or t.is_neg():
        raise UnsupportedError(
            f"tensor {key}: a view whose numbers are other than its memory "
            f"({'conjugate' if t.is_conj() else 'negative'}); "
            ".resolve_conj().resolve_neg() has them"
        )
    memory = _device_words(key, t)
    if number == _F4 and (not shape or (shape[-1] != 1 and strides[-1] != 1)):
        raise UnsupportedError(
            f"tensor {key}: float4 elements, two a byte, need a last axis without gaps"
        )
    packed = _packed(shape, strides)
    if purpose == LOAD and not packed and not _distinct(shape, strides):
        raise LayoutError(
            f"tensor {key}: cells of the tensor lie upon each other (strides {strides}), so that "
            "it cannot be loaded into; .contiguous() can"
        )
    address = 0
    if not metadata_only and 0 not in shape:
        storage = t.untyped_storage()
        last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(shape, strides))
        if (last + 1) * t.dtype.itemsize > storage.nbytes():
            raise LayoutError(
                f"tensor {key}: its storage has {storage.nbytes()} bytes, the tensor needs "
                f"{(last + 1) * t.dtype.itemsize} (freed, or not gathered?)"
            )
        address = t.data_ptr()
        if address == 0:
            raise LayoutError(f"tensor {key}: has no memory")
    if purpose == LOAD and torch.is_inference(t) and not torch.is_inference_mode_enabled():
        raise UnsupportedError(f"tensor {key}: an inference tensor cannot be written here")
    return _LocalMemory(
        number, address, strides, packed, t.dtype.itemsize, shape, memory, metadata_only, t
    )


def _refuse_kinds(key: str, t: Any) -> None:
    """What is no array of plain elements in plain memory."""
    import torch

    kind = type(t)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        if hasattr(kind, "__create_write_items__"):
            raise UnsupportedError(
                f"tensor {key}: {_name(t)} describes itself to PyTorch's checkpoints "
                "(__create_write_items__), but not by tensors that are their memory "
                "(__get_tensor_shard__)"
            )
        # Subclasses with a dispatch of their own need not be their memory.
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or hasattr(
            t, "materialize"  # A parameter that has no shape yet.
        ):
            raise UnsupportedError(
                f"tensor {key}: {_name(t)} is a tensor that is more than its memory; "
                "what it stands for must be taken out of it first"
            )
    if t.layout is not torch.strided:
        raise UnsupportedError(
            f"tensor {key}: a sparse tensor ({t.layout}); its parts (indices, values) can be stored"
        )
    if t.is_nested:
        raise UnsupportedError(f"tensor {key}: a nested tensor; its parts can be stored")
    if t.is_quantized:
        raise UnsupportedError(
            f"tensor {key}: a quantised tensor ({t.dtype}); int_repr(), scale and zero point can "
            "be stored"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        raise UnsupportedError(f"tensor {key}: a tensor inside of a torch.func transform")


def _device_words(key: str, t: Any) -> Optional[Dims]:
    device = t.device
    if device.type in ("cpu", "meta"):
        return None
    if device.type != "cuda":
        raise UnsupportedError(f"tensor {key}: memory of the device {device}")
    import torch

    ordinal = device.index or 0
    uuid = (0, 0)
    found = getattr(torch.cuda.get_device_properties(ordinal), "uuid", None)
    if found is not None:
        uuid = struct.unpack("<qq", bytes(getattr(found, "bytes", bytes(16)))[:16])
    stream = torch.cuda.current_stream(ordinal).cuda_stream
    kind = _STREAM_HANDLE if stream else _STREAM_LEGACY_DEFAULT
    return (_DEVICE_CUDA, ordinal, *uuid, _MEMORY_DEVICE, kind, stream)


def _torch_shard(
    key: str,
    local: _LocalMemory,
    global_shape: Dims,
    begin: Dims,
    extent: Dims,
    local_begin: Dims,
    replica: int,
) -> Shard:
    strides: Optional[Dims] = local.strides
    if (local.packed and extent == local.shape) or _packed(extent, local.strides):
        strides = None
    address = local.address
    if address and any(local_begin):
        address += local.itemsize * sum(b * s for b, s in zip(local_begin, local.strides))
    if local.dtype == _F4:
        # Two elements a byte of the last axis, which has no gaps.
        global_shape = global_shape[:-1] + (2 * global_shape[-1],)
        begin = begin[:-1] + (2 * begin[-1],)
        extent = extent[:-1] + (2 * extent[-1],)
        if strides is not None:
            strides = tuple(2 * s for s in strides[:-1]) + (1,)
    return Shard(
        key,
        local.dtype,
        global_shape,
        begin,
        extent,
        replica,
        address,
        strides,
        local.memory,
        local.metadata_only,
        local.owner,
    )


def _describe_dtensor(
    key: str, t: Any, purpose: str, world_size: Optional[int]
) -> List[Shard]:
    found = dtensor_boxes(key, t)
    if not found:
        return []
    local = t._local_tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    memory = _local_memory(key, local, purpose)
    labelled = any(p.is_replicate() for p in t.placements) and t.device_mesh.size() == (
        world_size if world_size is not None else world_size_of_torch()
    )
    shape = tuple(t.shape)
    shards = []
    for box in found:
        replica = (MAIN if box.main else COPY) if labelled else UNLABELLED
        shards.append(
            _torch_shard(key, memory, shape, box.begin, box.extent, box.local_begin, replica)
        )
    return shards


def dtensor_boxes(key: str, t: Any) -> List[Any]:
    """As `boxes`; what is refused is refused by its key."""
    from ._boxes import boxes

    try:
        return list(boxes(t))
    except UnsupportedError as error:
        raise UnsupportedError(f"tensor {key}: {error}", key=key) from None
    except LayoutError as error:
        raise LayoutError(f"tensor {key}: {error}", key=key) from None


def is_checkpointable(t: Any) -> bool:
    """Whether a tensor describes itself by PyTorch's protocol for checkpoints."""
    kind = type(t)
    return hasattr(kind, "__create_write_items__") and hasattr(kind, "__get_tensor_shard__")


def _describe_checkpointable(key: str, t: Any, purpose: str) -> List[Shard]:
    """What a tensor says of itself by PyTorch's protocol for checkpoints: boxes, and a tensor for
    each. (DTensors have it, too, but a box is not enough for theirs.)"""
    shards = []
    for item in t.__create_write_items__(key, t):
        about = item.tensor_data
        if item.index.fqn != key or about is None:
            raise UnsupportedError(
                f"tensor {key}: {_name(t)} wants to be saved as {item.index.fqn} ({item.type}), "
                "which is no box of it"
            )
        shards.append(
            checkpointable_shard(key, about, t.__get_tensor_shard__(item.index), purpose)
        )
    return shards


def checkpointable_shard(key: str, about: Any, data: Any, purpose: str) -> Shard:
    """The shard that a write item of DCP is. `about`: its TensorWriteData; `data`: its tensor."""
    extent = tuple(about.chunk.sizes)
    if tuple(data.shape) != extent:
        raise LayoutError(
            f"tensor {key}: a part of it is {tuple(data.shape)}, and said to be {extent}"
        )
    return _torch_shard(
        key,
        _local_memory(key, data, purpose),
        tuple(about.size),
        tuple(about.chunk.offsets),
        extent,
        (0,) * len(extent),
        UNLABELLED,
    )


def world_size_of_torch() -> int:
    import torch.distributed

    if not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size())


# ---- JAX -------------------------------------------------------------------------------------


def _describe_jax(key: str, a: Any, purpose: str) -> List[Shard]:
    import numpy

    if purpose == LOAD:
        raise UnsupportedError(
            f"tensor {key}: JAX arrays never change; load into NumPy arrays and make new ones"
        )
    shape = tuple(int(n) for n in a.shape)
    # Devices of one process may hold the same cells; a rank says each cell once.
    found: Dict[Tuple[Dims, Dims], Any] = {}
    for shard in a.addressable_shards:
        begin, extent = _of_slices(key, shard.index, shape)
        other = found.get((begin, extent))
        if other is None or shard.replica_id < other.replica_id:
            found[(begin, extent)] = shard
    shards = []
    for (begin, extent), shard in found.items():
        platform = next(iter(shard.data.devices())).platform
        if platform != "cpu":
            raise UnsupportedError(f"tensor {key}: memory of the device {shard.data.devices()}")
        data = numpy.asarray(shard.data)
        if data.shape != extent:
            raise LayoutError(f"tensor {key}: a shard of {data.shape} at [{begin}, {extent}]")
        local = _describe_numpy(key, data, purpose)
        # An array of this process alone: others may have the same one, and nobody numbered them.
        replica = UNLABELLED
        if not a.is_fully_addressable:
            replica = MAIN if shard.replica_id == 0 else COPY
        shards.append(
            local._replace(global_shape=shape, begin=begin, extent=extent, replica=replica)
        )
    return shards


def _of_slices(key: str, index: Sequence[Any], shape: Dims) -> Tuple[Dims, Dims]:
    if len(index) != len(shape):
        raise LayoutError(f"tensor {key}: an index of {len(index)} axes, of {len(shape)}")
    begin, extent = [], []
    for part, size in zip(index, shape):
        first, end, step = part.indices(size)
        if step != 1:
            raise UnsupportedError(f"tensor {key}: a shard with steps of {step}")
        begin.append(first)
        extent.append(max(0, end - first))
    return tuple(begin), tuple(extent)


# ---- Boxes by hand -------------------------------------------------------------------------------


def _describe_shards(key: str, leaf: Shards, purpose: str) -> List[Shard]:
    found = []
    for part in leaf.parts:
        whole = describe(key, part.data, purpose) if _is_plain(part.data) else []
        if len(whole) != 1 or whole[0].dtype == _F4:
            raise UnsupportedError(
                f"tensor {key}: a part of Shards is a plain array or tensor, of elements of a byte and "
                f"more, not {_name(part.data)}"
            )
        (shard,) = whole
        if shard.extent != part.held:
            raise LayoutError(f"tensor {key}: a part of Shards has another shape since it was given")
        if part.flat is None:
            begin, extent, flat = part.begin, shard.extent, None
        else:
            begin, extent = part.flat.begin, part.flat.extent
            flat = (part.flat.first, shard.extent[0])
        found.append(
            shard._replace(
                global_shape=leaf.shape, begin=begin, extent=extent, flat=flat, replica=part.replica,
                owner=part,  # Each its own: two parts may not be filled in one place.
            )
        )
    return found


def _is_plain(data: Any) -> bool:
    """Whether it is its memory and nothing else, so that it knows of no place of its own."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(data, numpy.ndarray):
        return True
    torch = sys.modules.get("torch")
    dtensor = dtensor_type()
    return (
        torch is not None
        and isinstance(data, torch.Tensor)
        and not (dtensor is not None and isinstance(data, dtensor))
        and not is_checkpointable(data)
    )


# ---- Memory that would be written twice --------------------------------------------------------

_MAX_RUNS = 1 << 16

_BITS = {1: 8, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 32, 8: 64, 9: 64, 10: 16, 11: 16, 12: 32}
_BITS.update({13: 64, 14: 8, 15: 8, 16: 8, 17: 8, 18: 8, 19: 6, 20: 6, 21: 4, 22: 64, 23: 128})


def span_of(shard: Shard) -> Tuple[int, int]:
    """The first and last byte + 1 of a shard's memory."""
    bits = _BITS[shard.dtype]
    if shard.strides is None:
        return shard.address, shard.address + (math.prod(shard.held) * bits + 7) // 8
    steps = [(n - 1) * s for n, s in zip(shard.held, shard.strides)]
    low = sum(s for s in steps if s < 0)
    high = sum(s for s in steps if s > 0)
    return shard.address + low * bits // 8, shard.address + ((high + 1) * bits + 7) // 8


def _runs(shard: Shard) -> Optional[List[Tuple[int, int]]]:
    """The byte ranges that have cells, as [begin, end), or None where these are very many."""
    if shard.strides is None:
        return [span_of(shard)]
    bits = _BITS[shard.dtype]
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
    """LayoutError, with both keys, where a load into these shards would write some byte twice.

    Tensors that are interleaved (columns of one matrix) are looked at run by run; those of more
    than 65,536 runs are refused where they could overlap.
    """
    spans = []
    for shard in shards:
        if shard.metadata_only or 0 in shard.held:
            continue
        device = shard.memory[:2] if shard.memory is not None else (0, 0)
        begin, end = span_of(shard)
        spans.append((device, begin, end, shard))
    spans.sort(key=lambda s: s[:3])
    # Each beside all whose spans reach past its begin: nearly always none.
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
            flags |= WORDS_STRIDED
        if shard.metadata_only:
            flags |= WORDS_METADATA_ONLY
        if shard.memory is not None:
            flags |= WORDS_MEMORY
        if shard.flat is not None:
            flags |= WORDS_FLAT
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
        raise LayoutError("a key must not contain NUL")
    return text + b"\0" if keys else b""


def _signed(word: int) -> int:
    """Addresses with a high bit, as the 64 bits that they are."""
    return word - (1 << 64) if word >= 1 << 63 else word
