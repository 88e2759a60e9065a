# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch whose bytes are read when an operation needs them (`Tensor.lazy`).

Loaders of inference engines take a whole tensor and cut each rank's part out of it. With a lazy tensor the cut only
changes the box that is read later, so that each rank reads its own part and nothing else.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, cast

import torch
from torch.utils import _pytree

from tensormount import _abi, _dtypes
from tensormount._shards import distinct
from tensormount.errors import ClosedError, Error, UnsupportedError

_aten: Any = torch.ops.aten


class LazyReads:
    """Counts what lazy tensors have read. Several tensors may share one; any thread may use it.

    reads     reads of boxes so far.
    bytes     bytes of the cells in these boxes. Storage may read more: whole leaves of 64 KiB are verified.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reads = 0
        self.bytes = 0

    def __repr__(self) -> str:
        return f"<tensormount.torch.LazyReads: {self.bytes} bytes in {self.reads} reads>"

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self.reads += 1
            self.bytes += nbytes

    def _copied(self, key: str, destination: torch.Tensor) -> None:
        """Called before a copy of a lazy tensor into `destination`, for plug-ins."""

    def _kept(self, key: str) -> None:
        """Called before a read whose result a lazy tensor keeps or gives away."""


class _View(NamedTuple):
    """A part of a stored tensor, with its axes in another order. The first three have one number for each axis of the
    stored tensor, in elements of the torch dtype (f4: in pairs)."""

    begin: tuple[int, ...]
    extent: tuple[int, ...]
    step: tuple[int, ...]
    axes: tuple[Optional[int], ...]  # The stored axis of each axis of the result; None: a new axis of one element.

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if axis is None else self.extent[axis] for axis in self.axes)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the tensor that a read makes, in elements."""
        packed = [math.prod(self.extent[axis + 1 :]) for axis in range(len(self.extent))]
        return tuple(1 if axis is None else packed[axis] for axis in self.axes)

    @property
    def selected(self) -> list[int]:
        """The stored axes that the result does not have. Each has one element."""
        return [axis for axis in range(len(self.extent)) if axis not in self.axes]


class LazyTensor(torch.Tensor):
    """A part of a checkpoint's tensor as a torch.Tensor that has no memory until an operation needs its elements.

    Made by `Tensor.lazy()`. Has shape, dtype and strides; the device is the CPU.

    These return another lazy tensor and read nothing: narrow, slices (positive steps too), select, split, chunk,
    unbind, transpose, permute, t, unsqueeze and squeeze, view and reshape that only add or remove axes of one
    element, detach, and to(dtype), which converts after the read.

    `destination.copy_(lazy)` and `lazy.clone()` read the box of this tensor and keep nothing. If the destination is
    on the CPU and has the stored dtype, the bytes are read into its memory, without a second copy.

    Every other operation reads the box of this tensor once, and this object keeps the result (`read()`). Tensors that
    were cut out of it before read for themselves. A slice with a step reads everything that it spans.

    Operations in place raise UnsupportedError, because nothing is written back; use `lazy.clone()`. So do pickling
    and copying (copy.deepcopy, torch.save). After the checkpoint was closed a read raises ClosedError; a read of
    damaged bytes is a DataLossError. Any number of threads may use one lazy tensor.
    """

    _source: Any  # The tensormount.Tensor.
    _cut: _View
    _casts: tuple[Any, ...]  # Dtypes to which to(dtype) converts, in this order.
    _counter: LazyReads
    _held: Optional[torch.Tensor]
    _lock: Any

    # Operations reach __torch_dispatch__ only.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, source: Any, cut: _View, casts: tuple[Any, ...], counter: LazyReads) -> LazyTensor:
        dtype = casts[-1] if casts else _dtypes.torch_dtype(source._row)
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,unused-ignore]
            cls, cut.shape, strides=cut.strides, dtype=dtype, device=torch.device("cpu")
        )
        made._source, made._cut, made._casts, made._counter = source, cut, casts, counter
        made._held, made._lock = None, threading.Lock()
        return cast(LazyTensor, made)

    @property
    def key(self) -> str:
        """The key of the tensor in the checkpoint."""
        return str(self._source.key)

    @property
    def reads(self) -> LazyReads:
        """The counter of this tensor and of all that were cut out of the same one."""
        return self._counter

    @property
    def was_read(self) -> bool:
        """Whether this object holds its elements."""
        return self._held is not None

    def read(self) -> torch.Tensor:
        """This tensor as an ordinary one. The first call reads; this object keeps the result."""
        if self._held is None:
            with self._lock:
                if self._held is None:
                    self._counter._kept(self.key)
                    self._held = self._fetch()
        return self._held

    def _fetch(self) -> torch.Tensor:
        """Reads the box of this tensor."""
        shape = self._cut.shape
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        with _Reading(self) as index:
            out = self._source.torch(index=index)
        axes = [axis for axis in self._cut.axes if axis is not None]
        out = out.permute((*axes, *self._cut.selected))
        for _ in self._cut.selected:
            out = out.select(-1, 0)
        for at, axis in enumerate(self._cut.axes):
            if axis is None:
                out = out.unsqueeze(at)
        for dtype in self._casts:
            out = out.to(dtype)
        return cast(torch.Tensor, out)

    def _copy_to(self, destination: torch.Tensor, non_blocking: bool) -> None:
        """Reads into `destination`, whose shape may be that to which this one is expanded."""
        self._counter._copied(self.key, destination)
        if destination.is_meta:
            return  # Programs count with such copies how many elements they will load.
        if self._held is None and self._fits(destination):
            out: Any = destination.detach()
            for at in reversed(range(len(self._cut.axes))):
                if self._cut.axes[at] is None:
                    out = out.select(at, 0)
            order = [axis for axis in self._cut.axes if axis is not None]
            out = out.permute([order.index(axis) for axis in sorted(order)])
            for axis in self._cut.selected:
                out = out.unsqueeze(axis)
            with _Reading(self) as index:
                self._source.read(index, out=out)
            return
        if destination.shape != self.shape:
            torch.empty(self.shape, device="meta").expand(destination.shape)  # An error, before anything is read.
        destination.copy_(self._held if self._held is not None else self._fetch(), non_blocking=non_blocking)

    def _fits(self, destination: torch.Tensor) -> bool:
        """Whether the library can read into the memory of `destination`."""
        return (
            destination.is_cpu
            and destination.layout is torch.strided
            and destination.dtype is self.dtype
            and destination.shape == self.shape
            and not self._casts
            and self._source._row.number != _abi.TM_F4
            and 0 not in destination.shape
            and not destination.is_conj()
            and not destination.is_neg()
            and (destination.is_contiguous() or distinct(tuple(destination.shape), destination.stride()))
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Optional[dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is _aten.copy_.default and not isinstance(first, LazyTensor):
            args[1]._copy_to(first, bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
            return first
        if isinstance(first, LazyTensor) and first._held is None:
            lazily = _LAZILY.get(func)
            if lazily is not None:
                found = lazily(first, *args[1:], **kwargs)
                if found is not NotImplemented:
                    return found
        if _is_written(func, args, kwargs):
            raise UnsupportedError(
                f"{func}: a lazy tensor of a checkpoint is read-only; use lazy.clone(), or copy_ into a tensor"
            )
        # In inference mode an operation that consists of others arrives here undivided.
        found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        args, kwargs = _pytree.tree_map(_elements, (args, kwargs))
        return func(*args, **kwargs)

    # ---- What does not reach __torch_dispatch__ ----------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        state = "read" if self.was_read else "not read"
        return f"<tensormount.torch.LazyTensor {self.key!r}: {self.dtype} {list(self.shape)}, {state}>"

    def numpy(self, *, force: bool = False) -> Any:
        return self.read().numpy(force=force)

    def tolist(self) -> Any:
        return self.read().tolist()

    def data_ptr(self) -> int:
        return self.read().data_ptr()

    def untyped_storage(self) -> Any:
        return self.read().untyped_storage()

    def __array__(self, dtype: Any = None) -> Any:
        array = self.read().numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        return self.read().__dlpack__(**options)

    def __deepcopy__(self, memo: Any) -> Any:
        raise self._not_copied()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._not_copied()

    def _not_copied(self) -> Error:
        return UnsupportedError(
            f"{self.key}: a lazy tensor cannot be pickled or copied: use lazy.clone(), which reads it, or the "
            "checkpoint's Tensor, which pickles as its path"
        )


class _Reading:
    """A read of the box of a lazy tensor: gives its index, and counts it if it succeeds."""

    def __init__(self, lazy: LazyTensor) -> None:
        self._lazy = lazy

    def __enter__(self) -> tuple[slice, ...]:
        cut, row = self._lazy._cut, self._lazy._source._row
        span = [(count - 1) * step + 1 for count, step in zip(cut.extent, cut.step)]
        index = [slice(b, b + n, step) for b, n, step in zip(cut.begin, span, cut.step)]
        self._bytes = math.prod(span) * self._lazy._source._row.bits // 8
        if row.number == _abi.TM_F4:
            index[-1] = slice(2 * cut.begin[-1], 2 * (cut.begin[-1] + span[-1]))
            self._bytes *= 2
        return tuple(index)

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        if error is None:
            self._lazy._counter._add(self._bytes)
        elif isinstance(error, ClosedError):
            raise ClosedError(
                f"{error.message}; the lazy tensor {self._lazy.key} was not read before: keep the checkpoint open "
                "until the last use of its lazy tensors"
            ) from error


def lazy(source: Any, reads: Optional[LazyReads]) -> LazyTensor:
    """The whole of a tensormount.Tensor. Errors as of Tensor.torch."""
    _dtypes.torch_dtype(source._row)
    shape = _dtypes.torch_dims(source._row, source.shape)
    cut = _View((0,) * len(shape), shape, (1,) * len(shape), tuple(range(len(shape))))
    return LazyTensor(source, cut, (), reads if reads is not None else LazyReads())


# ---- Operations that stay lazy --------------------------------------------------------------------
#
# Each takes the arguments of the operation and returns lazy tensors, or NotImplemented if it needs the elements.


def _with(self: LazyTensor, cut: _View) -> LazyTensor:
    return LazyTensor(self._source, cut, self._casts, self._counter)


def _axis(self: LazyTensor, dim: int, more: int = 0) -> int:
    axes = self.dim() + more
    if not -axes <= dim < axes:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-axes}, {axes - 1}], but got {dim})"
        )
    return dim % axes


def _replaced(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    return (*numbers[:axis], number, *numbers[axis + 1 :])


def _slice(
    self: LazyTensor, dim: int = 0, start: Optional[int] = None, end: Optional[int] = None, step: int = 1
) -> Any:
    if self.dim() == 0 or step <= 0:
        return NotImplemented  # An error, which torch reports.
    at = _axis(self, dim)
    first, last, _ = slice(start, end).indices(self.shape[at])
    count = max(0, -(-(last - first) // step))
    cut, axis = self._cut, self._cut.axes[at]
    if axis is None:
        if count == 1:
            return _with(self, cut)
        return torch.empty((*self.shape[:at], count, *self.shape[at + 1 :]), dtype=self.dtype)
    if count > 1 and step > 1 and self._source._row.number == _abi.TM_F4:
        return NotImplemented  # The library reads f4 elements without steps.
    return _with(self, _cut_axis(cut, axis, first if count else 0, count, step if count > 1 else 1))


def _cut_axis(cut: _View, axis: int, first: int, count: int, step: int) -> _View:
    return cut._replace(
        begin=_replaced(cut.begin, axis, cut.begin[axis] + first * cut.step[axis]),
        extent=_replaced(cut.extent, axis, count),
        step=_replaced(cut.step, axis, cut.step[axis] * step if count > 1 else 1),
    )


def _select(self: LazyTensor, dim: int, index: int) -> Any:
    if self.dim() == 0:
        return NotImplemented
    at = _axis(self, dim)
    size = self.shape[at]
    if not -size <= index < size:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(self.shape)} at dimension {at}")
    cut, axis = self._cut, self._cut.axes[at]
    if axis is not None:
        cut = _cut_axis(cut, axis, index % size, 1, 1)
    return _with(self, cut._replace(axes=(*cut.axes[:at], *cut.axes[at + 1 :])))


def _split(self: LazyTensor, split_size: int, dim: int = 0) -> Any:
    if self.dim() == 0 or split_size <= 0:
        return NotImplemented
    size = self.shape[_axis(self, dim)]
    return [_slice(self, dim, begin, begin + split_size) for begin in range(0, max(size, 1), split_size)]


def _split_with_sizes(self: LazyTensor, split_sizes: Sequence[int], dim: int = 0) -> Any:
    if self.dim() == 0 or min(split_sizes, default=-1) < 0 or sum(split_sizes) != self.shape[_axis(self, dim)]:
        return NotImplemented
    return list(_parts(self, split_sizes, dim))


def _parts(self: LazyTensor, sizes: Sequence[int], dim: int) -> Iterator[Any]:
    begin = 0
    for size in sizes:
        yield _slice(self, dim, begin, begin + size)
        begin += size


def _unbind(self: LazyTensor, dim: int = 0) -> Any:
    if self.dim() == 0:
        return NotImplemented
    return [_select(self, dim, index) for index in range(self.shape[_axis(self, dim)])]


def _permute(self: LazyTensor, dims: Sequence[int]) -> Any:
    if sorted(dim % max(self.dim(), 1) for dim in dims) != list(range(self.dim())):
        return NotImplemented
    axes = self._cut.axes
    return _with(self, self._cut._replace(axes=tuple(axes[_axis(self, dim)] for dim in dims)))


def _transpose(self: LazyTensor, dim0: int, dim1: int) -> Any:
    if self.dim() == 0:
        return _with(self, self._cut)
    one, other = _axis(self, dim0), _axis(self, dim1)
    dims = list(range(self.dim()))
    dims[one], dims[other] = other, one
    return _permute(self, dims)


def _t(self: LazyTensor) -> Any:
    if self.dim() > 2:
        return NotImplemented
    return _transpose(self, 0, 1) if self.dim() == 2 else _with(self, self._cut)


def _unsqueeze(self: LazyTensor, dim: int) -> Any:
    at = _axis(self, dim, more=1)
    axes = self._cut.axes
    return _with(self, self._cut._replace(axes=(*axes[:at], None, *axes[at:])))


def _squeeze(self: LazyTensor, dims: Any = None) -> Any:
    given = range(self.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    if self.dim() == 0:
        return _with(self, self._cut)
    removed = {at for at in (_axis(self, dim) for dim in given) if self.shape[at] == 1}
    axes = tuple(axis for at, axis in enumerate(self._cut.axes) if at not in removed)
    return _with(self, self._cut._replace(axes=axes))


def _view(self: LazyTensor, size: Sequence[int]) -> Any:
    sizes = list(map(operator.index, size))
    cells = self.numel()
    if sizes.count(-1) == 1 and cells:
        known = -math.prod(sizes)
        if known <= 0 or cells % known:
            return NotImplemented
        sizes[sizes.index(-1)] = cells // known
    rest = [axis for axis in self._cut.axes if axis is not None and self._cut.extent[axis] != 1]
    if [n for n in sizes if n != 1] != [self._cut.extent[axis] for axis in rest]:
        return NotImplemented
    kept = iter(rest)
    return _with(self, self._cut._replace(axes=tuple(None if n == 1 else next(kept) for n in sizes)))


def _to(self: LazyTensor, *, dtype: Any = None, memory_format: Any = None, **others: Any) -> Any:
    device = others.pop("device", None)
    if dtype is None or memory_format not in (None, torch.preserve_format) or any(others.values()):
        return NotImplemented
    if device is not None and torch.device(device).type != "cpu":
        return NotImplemented
    return LazyTensor(self._source, self._cut, (*self._casts, dtype), self._counter)


def _clone(self: LazyTensor, *, memory_format: Any = None) -> Any:
    self._counter._kept(self.key)
    out = self._fetch()
    return out if memory_format in (None, torch.preserve_format) else out.contiguous(memory_format=memory_format)


def _same(self: LazyTensor) -> Any:
    return _with(self, self._cut)


_LAZILY: dict[Any, Callable[..., Any]] = {
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.unsafe_split.Tensor: _split,
    _aten.unsafe_split_with_sizes.default: _split_with_sizes,
    _aten.unbind.int: _unbind,
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _t,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.default: _squeeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.reshape.default: _view,
    _aten._to_copy.default: _to,
    _aten.clone.default: _clone,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
}


def _elements(value: Any) -> Any:
    return value.read() if isinstance(value, LazyTensor) else value


def _is_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation writes to one of the lazy tensors among its arguments."""
    if not func._schema.is_mutable:
        return False
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            if any(isinstance(one, LazyTensor) for one in (value if isinstance(value, (list, tuple)) else (value,))):
                return True
    return False
