# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of distributed training, read from Python.

    >>> import tensormount as tm
    >>> with tm.open("STORE/step-1") as checkpoint:
    ...     print(checkpoint["w"].shape)
    ...     rows = checkpoint["w"][0:2]
    (16, 32)

A checkpoint is one of tensormount's, or what PyTorch DCP, Megatron-Core, OLMo-core, Hugging Face
and others wrote, as it lies there. `rows` is a NumPy array; only its bytes were read, and each was
checked against the checkpoint's hashes where it has any.

Nothing heavy is imported by this module: names are looked up when they are first used, the C
library is opened by the first call that needs it, NumPy, ml_dtypes and torch by the first array of
theirs.
"""

from __future__ import annotations

# As that of typing, whose import would be most of ours; checkers know the name.
TYPE_CHECKING = False

__version__ = "0.1.0"

# Public name to the module of this package that has it. Importing a submodule costs what it costs
# only once somebody asks for a name of it; add names here, and to the imports for checkers below.
_NAMES = {
    "Checkpoint": "_checkpoint",
    "Tensor": "_checkpoint",
    "open": "_checkpoint",
    "library_path": "_abi",
    "library_version": "_abi",
    "AlreadyExistsError": "errors",
    "BusyError": "errors",
    "CancelledError": "errors",
    "CheckpointNotFoundError": "errors",
    "ClosedError": "errors",
    "DataLossError": "errors",
    "Error": "errors",
    "InternalError": "errors",
    "InvalidArgumentError": "errors",
    "KeyNotFoundError": "errors",
    "LayoutError": "errors",
    "LibraryError": "errors",
    "NotFoundError": "errors",
    "OutOfRangeError": "errors",
    "PeerLost": "errors",
    "PeerTimeout": "errors",
    "PermissionDeniedError": "errors",
    "ReadOnlyError": "errors",
    "ResourceExhaustedError": "errors",
    "StaleError": "errors",
    "UnknownOutcomeError": "errors",
    "UnsupportedError": "errors",
    "UnsupportedIndexError": "errors",
}

if TYPE_CHECKING:
    from typing import Any

    from tensormount._abi import library_path as library_path, library_version as library_version
    from tensormount._checkpoint import Checkpoint as Checkpoint, Tensor as Tensor, open as open
    from tensormount.errors import (
        AlreadyExistsError as AlreadyExistsError,
        BusyError as BusyError,
        CancelledError as CancelledError,
        CheckpointNotFoundError as CheckpointNotFoundError,
        ClosedError as ClosedError,
        DataLossError as DataLossError,
        Error as Error,
        InternalError as InternalError,
        InvalidArgumentError as InvalidArgumentError,
        KeyNotFoundError as KeyNotFoundError,
        LayoutError as LayoutError,
        LibraryError as LibraryError,
        NotFoundError as NotFoundError,
        OutOfRangeError as OutOfRangeError,
        PeerLost as PeerLost,
        PeerTimeout as PeerTimeout,
        PermissionDeniedError as PermissionDeniedError,
        ReadOnlyError as ReadOnlyError,
        ResourceExhaustedError as ResourceExhaustedError,
        StaleError as StaleError,
        UnknownOutcomeError as UnknownOutcomeError,
        UnsupportedError as UnsupportedError,
        UnsupportedIndexError as UnsupportedIndexError,
    )

# `open` is not among the names of a star import: it would hide the builtin.
__all__ = sorted(name for name in _NAMES if name != "open") + ["__version__"]


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'tensormount' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module("tensormount." + module), name)
    globals()[name] = value  # The next look-up finds it without this function.
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_NAMES))
