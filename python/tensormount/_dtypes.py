# SPDX-License-Identifier: Apache-2.0
"""Element types: their numbers in c.h, and their names in tensormount, NumPy, ml_dtypes and torch.

Each function imports only the package that it needs, so that reads into torch work without ml_dtypes, and
reads of raw bytes without any package.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple, Optional

from tensormount import _abi
from tensormount.errors import LibraryError, UnsupportedError


class DType(NamedTuple):
    number: int  # TM_BF16
    name: str  # As `tensormount ls -l` shows it.
    bits: int
    numpy: str  # The name in ml_dtypes if `ml`, else in NumPy.
    ml: bool
    torch: Optional[str]  # None: torch has no dtype with one such element.


_TABLE = {
    row.number: row
    for row in (
        DType(_abi.TM_BOOL, "bool", 8, "bool", False, "bool"),
        DType(_abi.TM_I8, "i8", 8, "int8", False, "int8"),
        DType(_abi.TM_U8, "u8", 8, "uint8", False, "uint8"),
        DType(_abi.TM_I16, "i16", 16, "int16", False, "int16"),
        DType(_abi.TM_U16, "u16", 16, "uint16", False, "uint16"),
        DType(_abi.TM_I32, "i32", 32, "int32", False, "int32"),
        DType(_abi.TM_U32, "u32", 32, "uint32", False, "uint32"),
        DType(_abi.TM_I64, "i64", 64, "int64", False, "int64"),
        DType(_abi.TM_U64, "u64", 64, "uint64", False, "uint64"),
        DType(_abi.TM_F16, "f16", 16, "float16", False, "float16"),
        DType(_abi.TM_BF16, "bf16", 16, "bfloat16", True, "bfloat16"),
        DType(_abi.TM_F32, "f32", 32, "float32", False, "float32"),
        DType(_abi.TM_F64, "f64", 64, "float64", False, "float64"),
        DType(_abi.TM_F8E4M3, "f8_e4m3", 8, "float8_e4m3fn", True, "float8_e4m3fn"),
        DType(_abi.TM_F8E5M2, "f8_e5m2", 8, "float8_e5m2", True, "float8_e5m2"),
        DType(_abi.TM_F8E8M0, "f8_e8m0", 8, "float8_e8m0fnu", True, "float8_e8m0fnu"),
        DType(_abi.TM_F8E4M3FNUZ, "f8_e4m3fnuz", 8, "float8_e4m3fnuz", True, "float8_e4m3fnuz"),
        DType(_abi.TM_F8E5M2FNUZ, "f8_e5m2fnuz", 8, "float8_e5m2fnuz", True, "float8_e5m2fnuz"),
        DType(_abi.TM_F6E2M3, "f6_e2m3", 6, "float6_e2m3fn", True, None),
        DType(_abi.TM_F6E3M2, "f6_e3m2", 6, "float6_e3m2fn", True, None),
        DType(_abi.TM_F4, "f4", 4, "float4_e2m1fn", True, None),
        DType(_abi.TM_C64, "c64", 64, "complex64", False, "complex64"),
        DType(_abi.TM_C128, "c128", 128, "complex128", False, "complex128"),
    )
}


def info(number: int) -> DType:
    """The row of a number of c.h. UnsupportedError: the number is unknown."""
    row = _TABLE.get(number)
    if row is None:
        raise UnsupportedError(f"element type number {number} is unknown to this version of the package")
    return row


def all_dtypes() -> list[DType]:
    return list(_TABLE.values())


_numpy: dict[int, Any] = {}
numpy_empty: Any = None  # numpy.empty, once numpy_dtype has imported NumPy.


def numpy_dtype(row: DType) -> Any:
    """The numpy.dtype of a row. UnsupportedError: elements are not whole bytes. LibraryError: NumPy or ml_dtypes
    is not installed, or too old."""
    global numpy_empty
    found = _numpy.get(row.number)
    if found is not None:
        return found
    if row.bits % 8 != 0:
        raise UnsupportedError(
            f"{row.name} has {row.bits} bits per element, which NumPy arrays do not support: "
            "read_bytes(offset, size) returns the stored bytes"
        )
    try:
        import numpy
    except ImportError as error:
        raise LibraryError(
            f"arrays need NumPy ({error}): pip install numpy; read_bytes() works without it"
        ) from error
    if row.ml:
        try:
            import ml_dtypes
        except ImportError as error:
            raise LibraryError(
                f"NumPy has no {row.numpy} ({error}): pip install ml_dtypes; .torch() and "
                "read_bytes() work without it"
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
    """An array of `dtype` over the bytes that `memory` describes (__array_interface__). It keeps `memory` alive."""
    import numpy

    return numpy.asarray(memory).view(dtype)


# torch has no dtype with one f4 element. An element of this dtype is a byte with two, along the last axis.
_PAIRS_OF_F4 = "float4_e2m1fn_x2"


def torch_dtype(row: DType) -> Any:
    """The torch.dtype of a row; for f4 the dtype of a pair. LibraryError: torch is not installed, or too old.
    UnsupportedError: torch has no such dtype."""
    name = _PAIRS_OF_F4 if row.number == _abi.TM_F4 else row.torch
    if name is None:
        raise UnsupportedError(
            f"torch has no dtype for {row.name}: read_bytes(offset, size) returns the stored bytes"
        )
    torch = import_torch()
    found = getattr(torch, name, None)
    if found is None:
        raise LibraryError(f"torch {torch.__version__} has no torch.{name}: pip install --upgrade torch")
    return found


def torch_dims(row: DType, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Converts a shape, extent or offsets to elements of `torch_dtype`. UnsupportedError: pairs of f4 would be
    split."""
    if row.number != _abi.TM_F4:
        return dims
    if not dims or dims[-1] % 2 != 0:
        raise UnsupportedError(
            f"torch stores f4 elements in pairs along the last axis, which {list(dims)} would split: "
            "read_bytes(offset, size) returns the stored bytes"
        )
    return (*dims[:-1], dims[-1] // 2)


def import_torch() -> Any:
    """The module torch, as Any, because types are checked without PyTorch, too. LibraryError: not installed."""
    try:
        return import_module("torch")
    except ImportError as error:
        raise LibraryError(f"torch tensors need PyTorch ({error}): pip install torch") from error
