# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of distributed training, saved, loaded and read from Python.

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
    "Group": "_group",
    "PerRank": "_tree",
    "SaveJob": "_save",
    "async_save": "_save",
    "dump_spec": "_save",
    "save": "_save",
    "validate": "_save",
    "Saver": "_saver",
    "Loaded": "_load",
    "LoadJob": "_load",
    "Rule": "_load",
    "async_load": "_load",
    "load": "_load",
    "apply_key_map": "_key_map",
    "Store": "_store",
    "adopt": "_store",
    "copy": "_store",
    "derive": "_store",
    "diff": "_store",
    "export": "_store",
    "repair": "_store",
    "verify": "_store",
    "wait_committed": "_store",
    "Mount": "_mount",
    "mount": "_mount",
    "Unreadable": "_values",
    "Box": "_boxes",
    "Flat": "_held",
    "Shards": "_held",
    "boxes": "_boxes",
    "torch": "torch",  # Itself, a module.
    "enable_mapping_guard": "_abi",
    "library_path": "_abi",
    "library_version": "_abi",
    "AlreadyExistsError": "errors",
    "BusyError": "errors",
    "CancelledError": "errors",
    "CheckpointNotFoundError": "errors",
    "ClosedError": "errors",
    "DataLossError": "errors",
    "DeviceError": "errors",
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

    from tensormount import torch as torch
    from tensormount._abi import (
        enable_mapping_guard as enable_mapping_guard,
        library_path as library_path,
        library_version as library_version,
    )
    from tensormount._boxes import Box as Box, boxes as boxes
    from tensormount._checkpoint import Checkpoint as Checkpoint, Tensor as Tensor, open as open
    from tensormount._group import Group as Group
    from tensormount._held import Flat as Flat, Shards as Shards
    from tensormount._key_map import apply_key_map as apply_key_map
    from tensormount._load import (
        LoadJob as LoadJob,
        Loaded as Loaded,
        Rule as Rule,
        async_load as async_load,
        load as load,
    )
    from tensormount._mount import Mount as Mount, mount as mount
    from tensormount._save import (
        SaveJob as SaveJob,
        async_save as async_save,
        dump_spec as dump_spec,
        save as save,
        validate as validate,
    )
    from tensormount._saver import Saver as Saver
    from tensormount._store import (
        Store as Store,
        adopt as adopt,
        copy as copy,
        derive as derive,
        diff as diff,
        export as export,
        repair as repair,
        verify as verify,
        wait_committed as wait_committed,
    )
    from tensormount._tree import PerRank as PerRank
    from tensormount._values import Unreadable as Unreadable
    from tensormount.errors import (
        AlreadyExistsError as AlreadyExistsError,
        BusyError as BusyError,
        CancelledError as CancelledError,
        CheckpointNotFoundError as CheckpointNotFoundError,
        ClosedError as ClosedError,
        DataLossError as DataLossError,
        DeviceError as DeviceError,
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

# Not among the names of a star import: `open`, which would hide the builtin, and `torch`, which would
# import PyTorch and hide it.
__all__ = sorted(name for name in _NAMES if name not in ("open", "torch")) + ["__version__"]


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'tensormount' has no attribute {name!r}")
    from importlib import import_module

    found = import_module("tensormount." + module)
    value = found if module == name else getattr(found, name)
    globals()[name] = value  # The next look-up finds it without this function.
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_NAMES))
