# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of the leaves of a state dict, as the library wants it: shards.

A shard is a box of a global tensor and the memory of its cells. Arrays of NumPy, tensors of PyTorch
(DTensors, too) and arrays of JAX are described where they lie; no byte is copied. What cannot be
described exactly is refused by name.
"""

from __future__ import annotations

import array
import collections
import ctypes
import itertools
import math
import operator
import struct
import sys
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ._dtypes import all_dtypes
from .errors import LayoutError, UnsupportedError

Dims = Tuple[int, ...]

# Replica labels (TM_REPLICA_*).
UNLABELLED, MAIN, COPY = 0, 1, 2
# What the words of a shard have (TM_WORDS_*).
WORDS_STRIDED, WORDS_METADATA_ONLY, WORDS_MEMORY = 1, 4, 8
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
    raise UnsupportedError(f"tensor {key}: {_name(leaf)} is no array that is known here")


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
    dtensor = _dtensor_type()
    is_dtensor = dtensor is not None and isinstance(t, dtensor)
    if is_checkpointable(t._local_tensor if is_dtensor else t):
        return _describe_checkpointable(key, t, purpose)
    if is_dtensor:
        return _describe_dtensor(key, t, purpose, world_size)
    whole = _local_memory(key, t, purpose)
    shape = whole.shape
    return [_torch_shard(key, whole, shape, (0,) * len(shape), shape, (0,) * len(shape), 0)]


def _dtensor_type() -> Any:
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
        world_size if world_size is not None else _world_size()
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


def _world_size() -> int:
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


# ---- Memory that would be written twice --------------------------------------------------------

_MAX_RUNS = 1 << 16

_BITS = {1: 8, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 32, 8: 64, 9: 64, 10: 16, 11: 16, 12: 32}
_BITS.update({13: 64, 14: 8, 15: 8, 16: 8, 17: 8, 18: 8, 19: 6, 20: 6, 21: 4, 22: 64, 23: 128})


def _span(shard: Shard) -> Tuple[int, int]:
    """The first and last byte + 1 of a shard's memory."""
    bits = _BITS[shard.dtype]
    if shard.strides is None:
        count = 1
        for n in shard.extent:
            count *= n
        return shard.address, shard.address + (count * bits + 7) // 8
    steps = [(n - 1) * s for n, s in zip(shard.extent, shard.strides)]
    low = sum(s for s in steps if s < 0)
    high = sum(s for s in steps if s > 0)
    return shard.address + low * bits // 8, shard.address + ((high + 1) * bits + 7) // 8


def _runs(shard: Shard) -> Optional[List[Tuple[int, int]]]:
    """The byte ranges that have cells, as [begin, end), or None where these are very many."""
    if shard.strides is None:
        return [_span(shard)]
    bits = _BITS[shard.dtype]
    axes = sorted((abs(s), n, s) for n, s in zip(shard.extent, shard.strides) if n != 1)
    length = 1
    while axes and axes[0][0] == length:
        length *= axes[0][1]
        axes.pop(0)
    begins = [_span(shard)[0]]
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
        if shard.metadata_only or 0 in shard.extent:
            continue
        device = shard.memory[:2] if shard.memory is not None else (0, 0)
        begin, end = _span(shard)
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
                *(shard.strides or ()),
            )
        )
        if shard.memory is not None:
            words.extend(map(_signed, shard.memory))
    return _packed_keys(keys), words, len(shards)


def _packed_keys(keys: Sequence[str]) -> bytes:
    text = "\0".join(keys).encode()
    if text.count(b"\0") != max(0, len(keys) - 1):
        raise LayoutError("a key must not contain NUL")
    return text + b"\0" if keys else b""


def _signed(word: int) -> int:
    """Addresses with a high bit, as the 64 bits that they are."""
    return word - (1 << 64) if word >= 1 << 63 else word


# ---- Leaves by columns ---------------------------------------------------------------------------

# Of ten thousand tensors a call of Python for each is what it costs. So leaves of one family are
# asked together for what their descriptions depend on; leaves that are alike are described once, and
# leaves that are as the last time not at all.

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
        dtensor = _dtensor_type()
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
    found = [
        leaf if type(leaf) in plain else getattr(leaf, "_local_tensor", leaf) for leaf in leaves
    ]
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
            for shard, (begin, end) in zip(shards, map(_span, shards))
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
        self.keys, self.count = _packed_keys(own), len(own)
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
            world_size = _world_size()
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
