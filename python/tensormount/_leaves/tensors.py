# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch, and tensors that describe themselves by its protocol for checkpoints."""

from __future__ import annotations

import struct
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

from tensormount._abi import (
    TM_DEVICE_CUDA,
    TM_F4,
    TM_MEMORY_DEVICE,
    TM_STREAM_HANDLE,
    TM_STREAM_LEGACY_DEFAULT,
)
from tensormount._dtypes import all_dtypes, info
from tensormount._leaves.base import ArrayKind, Facts, shared, type_name
from tensormount._shards import LOAD, SAVE, UNLABELLED, VALIDATE, Dims, Shard, distinct
from tensormount.errors import LayoutError, UnsupportedError

# The number in c.h for the name of each torch dtype. One element of float4_e2m1fn_x2 is two f4 elements in a byte.
_NUMBERS = {row.torch: row.number for row in all_dtypes() if row.torch is not None}
_NUMBERS["float4_e2m1fn_x2"] = TM_F4


class TensorKind(ArrayKind):
    plain = True

    def recognises(self, kind: type) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and issubclass(kind, torch.Tensor)

    def exact(self) -> Tuple[type, ...]:
        torch = sys.modules.get("torch")
        return (torch.Tensor, torch.nn.Parameter) if torch is not None else ()

    def describe(self, key: str, leaf: Any, purpose: str, world_size: Optional[int] = None) -> List[Shard]:
        whole = local_memory(key, leaf, purpose)
        return [shard_of(whole, whole.extent, whole.begin, whole.extent, whole.begin)]

    def memory(self, leaf: Any) -> Any:
        return leaf.data_ptr()

    def identity(self, leaf: Any) -> Any:
        storage = leaf.untyped_storage()
        return (
            storage._cdata, leaf.storage_offset(), tuple(leaf.shape), leaf.stride(), leaf.dtype,
            leaf.is_conj(), leaf.is_neg(),
        )

    def tensors(self, leaf: Any) -> Sequence[Any]:
        return (leaf,)

    def addresses(self, leaves: Sequence[Any]) -> List[int]:
        return list(map(sys.modules["torch"].Tensor.data_ptr, leaves))

    def examine(self, leaves: Sequence[Any], loads: bool) -> Optional[Tuple[Facts, List[int]]]:
        if _has_read_only(leaves, loads):
            return None
        if any(t.is_neg() or t.is_conj() for t in leaves):
            return None
        places = [place for place in map(place_of, leaves) if place is not None]
        if len(places) < len(leaves):
            return None
        storage = [
            [t.storage_offset() for t in leaves],
            [t.untyped_storage().nbytes() for t in leaves],
        ]
        like: List[List[Any]] = [
            [t.dtype for t in leaves],
            shared(t.shape for t in leaves),
            shared(t.stride() for t in leaves),
        ]
        devices = _devices_of(places, leaves)
        facts = Facts(like, storage, places, devices) if devices else Facts(like, storage)
        return facts, [t.data_ptr() for t in leaves]

    def new_addresses(self, leaves: Sequence[Any], loads: bool, facts: Facts) -> Optional[List[int]]:
        if _has_read_only(leaves, loads):
            return None
        if facts.devices:
            # Work of this save or load is ordered after that of the current streams, which are a part of the layout.
            if list(map(place_of, leaves)) != facts.places:
                return None
            if _devices_of(facts.places, leaves) != facts.devices:
                return None
        elif not all(t.is_cpu for t in leaves):
            return None
        # These checks are in one pass over the tensors, so that each is fetched into the processor's cache once.
        found = [
            t.data_ptr()
            for t, dtype, shape, strides, offset, size in zip(leaves, *facts.like[:3], *facts.storage)
            if t.dtype is dtype
            and t.shape == shape
            and t.stride() == strides
            and t.storage_offset() == offset
            # A tensor may reach past the end of a storage that was shortened.
            and t.untyped_storage().nbytes() == size
            and not t.is_neg()
            and not (dtype.is_complex and t.is_conj())
        ]
        return found if len(found) == len(leaves) else None


def _has_read_only(tensors: Sequence[Any], loads: bool) -> bool:
    """Whether a load would write to an inference tensor outside of inference mode."""
    torch = sys.modules["torch"]
    if not loads or torch.is_inference_mode_enabled():
        return False
    return any(map(torch.Tensor.is_inference, tensors))


def local_memory(key: str, t: Any, purpose: str) -> Shard:
    """The shard of a local tensor as a whole, in elements of torch (one pair of f4 is one element), with strides.
    Errors as of `registry.describe`."""
    import torch

    _refuse_kinds(key, t)
    number = torch_number(key, t.dtype)
    shape = tuple(t.shape)
    strides: Dims = tuple(t.stride())
    if len(shape) > 16:
        raise LayoutError(f"tensor {key}: {len(shape)} axes, at most 16 are supported")
    metadata_only = purpose == VALIDATE
    if t.is_meta and not metadata_only:
        raise UnsupportedError(
            f"tensor {key}: a tensor on the meta device has no memory; it can be validated, not "
            + ("saved" if purpose == SAVE else "loaded into")
        )
    if t.is_conj() or t.is_neg():
        raise UnsupportedError(
            f"tensor {key}: a {'conjugate' if t.is_conj() else 'negative'} view does not have its values in "
            "memory; pass .resolve_conj().resolve_neg()"
        )
    memory = _device_words(key, t)
    if number == TM_F4 and (not shape or (shape[-1] != 1 and strides[-1] != 1)):
        raise UnsupportedError(
            f"tensor {key}: float4 elements are packed in pairs: the last axis must be contiguous"
        )
    if purpose == LOAD and not _packed(shape, strides) and not distinct(shape, strides):
        raise LayoutError(
            f"tensor {key}: elements of the tensor overlap in memory (strides {strides}), so it cannot "
            "be loaded into; load into its .contiguous()"
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
        raise UnsupportedError(f"tensor {key}: an inference tensor can only be loaded into in inference mode")
    none = (0,) * len(shape)
    return Shard(
        key, number, shape, none, shape, UNLABELLED, address, strides, memory, metadata_only, t
    )


def torch_number(key: str, dtype: Any) -> int:
    """The number of a torch.dtype in c.h. UnsupportedError: there is none."""
    name = str(dtype).split(".", 1)[-1]
    number = _NUMBERS.get(name)
    if number is None:
        raise UnsupportedError(
            f"tensor {key}: torch.{name} cannot be stored"
            + ("; store .view(torch.uint8)" if dtype.itemsize == 1 else "")
        )
    return number


def _packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides (in elements) are packed and row-major. Strides of axes with one element do not count."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _refuse_kinds(key: str, t: Any) -> None:
    """UnsupportedError: the tensor is not an array of plain elements in plain memory."""
    import torch

    kind = type(t)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        if hasattr(kind, "__create_write_items__"):
            raise UnsupportedError(
                f"tensor {key}: {type_name(t)} has __create_write_items__, but not __get_tensor_shard__, "
                "which is needed to find its memory"
            )
        # The values of subclasses with their own dispatch may not be in their memory.
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or hasattr(
            t, "materialize"  # A lazy parameter, which has no shape yet.
        ):
            raise UnsupportedError(
                f"tensor {key}: {type_name(t)} is a tensor subclass whose values are not its memory; "
                "store the tensors that it wraps"
            )
    if t.layout is not torch.strided:
        raise UnsupportedError(
            f"tensor {key}: sparse tensors ({t.layout}) cannot be stored; store their indices and values"
        )
    if t.is_nested:
        raise UnsupportedError(f"tensor {key}: nested tensors cannot be stored; store their parts")
    if t.is_quantized:
        raise UnsupportedError(
            f"tensor {key}: quantised tensors ({t.dtype}) cannot be stored; store int_repr(), scale and "
            "zero point"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        raise UnsupportedError(f"tensor {key}: tensors inside of a torch.func transform cannot be stored")


def place_of(t: Any) -> Optional[int]:
    """The number of the CUDA device that has the memory of a tensor; -1: the host has it; None: neither."""
    if t.is_cpu:
        return -1
    return t.get_device() if t.is_cuda else None


def _devices_of(places: Sequence[int], leaves: Sequence[Any]) -> Dict[int, Dims]:
    """What the library is told of each device with one of the leaves."""
    first = dict(zip(reversed(places), reversed(leaves)))
    found = {place: _device_words("", t) for place, t in first.items() if place >= 0}
    return {place: words for place, words in found.items() if words is not None}


def _device_words(key: str, t: Any) -> Optional[Dims]:
    device = t.device
    if device.type in ("cpu", "meta"):
        return None
    if device.type != "cuda":
        raise UnsupportedError(f"tensor {key}: memory of the device {device} is not supported")
    import torch

    ordinal = device.index or 0
    uuid = (0, 0)
    found = getattr(torch.cuda.get_device_properties(ordinal), "uuid", None)
    if found is not None:
        uuid = struct.unpack("<qq", bytes(getattr(found, "bytes", bytes(16)))[:16])
    stream = torch.cuda.current_stream(ordinal).cuda_stream
    kind = TM_STREAM_HANDLE if stream else TM_STREAM_LEGACY_DEFAULT
    return (TM_DEVICE_CUDA, ordinal, *uuid, TM_MEMORY_DEVICE, kind, stream)


def shard_of(
    local: Shard, shape: Dims, begin: Dims, extent: Dims, at: Dims, replica: int = UNLABELLED
) -> Shard:
    """A box of a tensor of `shape`. It begins at `at` in the local tensor `local` (of `local_memory`)."""
    steps = local.strides
    assert steps is not None
    address = local.address
    if address and any(at):
        # One element is a pair of f4 in one byte.
        address += max(1, info(local.dtype).bits // 8) * sum(b * s for b, s in zip(at, steps))
    strides = None if _packed(extent, steps) else steps
    if local.dtype == TM_F4:
        # Converts pairs to elements: two for each byte of the last axis, which has no gaps.
        shape = shape[:-1] + (2 * shape[-1],)
        begin = begin[:-1] + (2 * begin[-1],)
        extent = extent[:-1] + (2 * extent[-1],)
        if strides is not None:
            strides = tuple(2 * s for s in strides[:-1]) + (1,)
    return local._replace(
        global_shape=shape, begin=begin, extent=extent, address=address, strides=strides, replica=replica
    )


# ---- Self-describing tensors ---------------------------------------------------------------------


class SelfDescribingKind(TensorKind):
    """Tensors that list their boxes by PyTorch's protocol for checkpoints, with a tensor for each box. DTensors have
    the protocol, too, but it cannot describe all of their boxes."""

    plain = False

    def recognises(self, kind: type) -> bool:
        return super().recognises(kind) and describes_itself(kind)

    def exact(self) -> Tuple[type, ...]:
        return ()

    def describe(self, key: str, leaf: Any, purpose: str, world_size: Optional[int] = None) -> List[Shard]:
        shards = []
        for item in leaf.__create_write_items__(key, leaf):
            about = item.tensor_data
            if item.index.fqn != key or about is None:
                raise UnsupportedError(
                    f"tensor {key}: {type_name(leaf)} has a write item for {item.index.fqn} ({item.type}), "
                    "which is not a box of this tensor"
                )
            shards.append(
                shard_of_item(key, about, leaf.__get_tensor_shard__(item.index), purpose)
            )
        return shards

    def tensors(self, leaf: Any) -> Sequence[Any]:
        items = leaf.__create_write_items__("", leaf)
        return [leaf.__get_tensor_shard__(item.index) for item in items]


def describes_itself(kind: type) -> bool:
    """Whether tensors of a type describe themselves by PyTorch's protocol for checkpoints."""
    return hasattr(kind, "__create_write_items__") and hasattr(kind, "__get_tensor_shard__")


def shard_of_item(key: str, about: Any, data: Any, purpose: str) -> Shard:
    """The shard of a write item of DCP. `about`: its TensorWriteData; `data`: its tensor."""
    extent = tuple(about.chunk.sizes)
    if tuple(data.shape) != extent:
        raise LayoutError(
            f"tensor {key}: a part has the shape {tuple(data.shape)}, but its write item says {extent}"
        )
    whole = local_memory(key, data, purpose)
    return shard_of(whole, tuple(about.size), tuple(about.chunk.offsets), extent, whole.begin)
