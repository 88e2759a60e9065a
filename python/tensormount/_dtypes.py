# SPDX-License-Identifier: Apache-2.0
"""Element types: numbers of c.h to names of ours, NumPy, ml_dtypes and torch.

NumPy, ml_dtypes and torch are imported by the function that needs them, so that reading into torch
needs no ml_dtypes, and raw bytes need nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple, Optional

from tensormount.errors import LibraryError, UnsupportedError


class DType(NamedTuple):
    number: int  # TM_BF16
    name: str  # Ours, as `tensormount ls -l` shows it.
    bits: int
    numpy: str  # Of NumPy, or where `ml` of ml_dtypes.
    ml: bool
    torch: Optional[str]  # None: torch has no type of one such element.


_TABLE = {
    row.number: row
    for row in (
        DType(1, "bool", 8, "bool", False, "bool"),
        DType(2, "i8", 8, "int8", False, "int8"),
        DType(3, "u8", 8, "uint8", False, "uint8"),
        DType(4, "i16", 16, "int16", False, "int16"),
        DType(5, "u16", 16, "uint16", False, "uint16"),
        DType(6, "i32", 32, "int32", False, "int32"),
        DType(7, "u32", 32, "uint32", False, "uint32"),
        DType(8, "i64", 64, "int64", False, "int64"),
        DType(9, "u64", 64, "uint64", False, "uint64"),
        DType(10, "f16", 16, "float16", False, "float16"),
        DType(11, "bf16", 16, "bfloat16", True, "bfloat16"),
        DType(12, "f32", 32, "float32", False, "float32"),
        DType(13, "f64", 64, "float64", False, "float64"),
        DType(14, "f8_e4m3", 8, "float8_e4m3fn", True, "float8_e4m3fn"),
        DType(15, "f8_e5m2", 8, "float8_e5m2", True, "float8_e5m2"),
        DType(16, "f8_e8m0", 8, "float8_e8m0fnu", True, "float8_e8m0fnu"),
        DType(17, "f8_e4m3fnuz", 8, "float8_e4m3fnuz", True, "float8_e4m3fnuz"),
        DType(18, "f8_e5m2fnuz", 8, "float8_e5m2fnuz", True, "float8_e5m2fnuz"),
        DType(19, "f6_e2m3", 6, "float6_e2m3fn", True, None),
        DType(20, "f6_e3m2", 6, "float6_e3m2fn", True, None),
        DType(21, "f4", 4, "float4_e2m1fn", True, None),
        DType(22, "c64", 64, "complex64", False, "complex64"),
        DType(23, "c128", 128, "complex128", False, "complex128"),
    )
}


def info(number: int) -> DType:
    """The row of a number of c.h."""
    row = _TABLE.get(number)
    if row is None:
        raise UnsupportedError(f"element type number {number} is newer than this package")
    return row


def all_dtypes() -> list[DType]:
    return list(_TABLE.values())


_numpy: dict[int, Any] = {}
numpy_empty: Any = None  # numpy.empty, once numpy_dtype has found NumPy.


def numpy_dtype(row: DType) -> Any:
    """numpy.dtype of a type; UnsupportedError for elements under a byte, LibraryError where NumPy
    or ml_dtypes is not installed."""
    global numpy_empty
    found = _numpy.get(row.number)
    if found is not None:
        return found
    if row.bits % 8 != 0:
        raise UnsupportedError(
            f"{row.name} has {row.bits} bits an element, which no array of NumPy holds packed: "
            "read_bytes(offset, size) gives the bytes as they are stored"
        )
    try:
        import numpy
    except ImportError as error:
        raise LibraryError(
            f"arrays need NumPy ({error}): pip install numpy; read_bytes() needs nothing"
        ) from error
    if row.ml:
        try:
            import ml_dtypes
        except ImportError as error:
            raise LibraryError(
                f"NumPy has no {row.numpy} ({error}): pip install ml_dtypes; .torch() and "
                "read_bytes() do without"
            ) from error
        kind = getattr(ml_dtypes, row.numpy, None)
        if kind is None:
            raise LibraryError(
                f"ml_dtypes {ml_dtypes.__version__} has no {row.numpy}: "
                "pip install --upgrade ml_dtypes"
            )
        found = numpy.dtype(kind)
    else:
        found = numpy.dtype(row.numpy)
    numpy_empty = numpy.empty
    _numpy[row.number] = found
    return found


def numpy_view(memory: Any, dtype: Any) -> Any:
    """Bytes that an object describes (__array_interface__), and that live as long as it does, as
    elements."""
    import numpy

    return numpy.asarray(memory).view(dtype)


F4 = 21
# torch has no type of one f4 element: this is two of them in a byte, along the last axis.
_PAIRS_OF_F4 = "float4_e2m1fn_x2"


def torch_dtype(row: DType) -> Any:
    """torch.dtype of a type, of f4 that of a pair; LibraryError where torch is not installed or too
    old for it, UnsupportedError where torch has none."""
    name = _PAIRS_OF_F4 if row.number == F4 else row.torch
    if name is None:
        raise UnsupportedError(
            f"torch has no type of one {row.name} element: read_bytes(offset, size) gives the "
            "bytes as they are stored"
        )
    torch = import_torch()
    found = getattr(torch, name, None)
    if found is None:
        raise LibraryError(f"torch {torch.__version__} has no torch.{name}")
    return found


def torch_dims(row: DType, dims: tuple[int, ...]) -> tuple[int, ...]:
    """A shape, an extent or offsets in elements of `torch_dtype`. UnsupportedError where they do not
    fall on pairs of f4."""
    if row.number != F4:
        return dims
    if not dims or dims[-1] % 2 != 0:
        raise UnsupportedError(
            f"torch has f4 elements in pairs along the last axis, which {list(dims)} does not fall on: "
            "read_bytes(offset, size) gives the bytes as they are stored"
        )
    return (*dims[:-1], dims[-1] // 2)


def import_torch() -> Any:
    """The module torch, untyped: whoever checks types need not have it."""
    try:
        return import_module("torch")
    except ImportError as error:
        raise LibraryError(f"tensors of torch need it ({error}): pip install torch") from error
