# SPDX-License-Identifier: Apache-2.0
"""Reads, saves and loads checkpoints of distributed training.

    >>> import tensormount as tm
    >>> with tm.open("STORE/step-1") as checkpoint:
    ...     print(checkpoint["w"].shape)
    ...     rows = checkpoint["w"][0:2]
    (16, 32)

`rows` is a NumPy array. Only the parts of the files that have its bytes were read, and each byte was
compared with the checkpoint's hashes if the checkpoint has any.

open                  opens a checkpoint of tensormount, PyTorch DCP, Megatron-Core, OLMo-core, Hugging
                      Face and others, in place
refit                 brings loaded tensors to another checkpoint, reading only what differs
save, load            a state dict, on all ranks of a Group; async_save and async_load in the background
torch.save, .load     a model and its optimizers; torch.Writer and .Reader for DCP
Store                 lists, removes and pins the checkpoints of a store
verify, diff, copy, repair, adopt, derive, export, mount
Error                 the base class of the package's own exceptions

docs/python.md is the guide.

The import is cheap: names are looked up at their first use, the first call that needs the C library
opens it, and the first array or tensor imports NumPy, ml_dtypes or torch.
"""

from __future__ import annotations

# Not imported from typing, because that import would take most of this module's import time. Type checkers know the
# name and treat it as true.
TYPE_CHECKING = False

__version__ = "0.1.0"

# Plug-ins: modules that have the name of another package and import it.
_PLUGINS = ("accelerate", "fsspec", "lightning", "megatron", "olmo", "torchtitan", "transformers", "vllm")

# Maps each public name to the module that defines it. A module is imported when one of its names is first used. New
# names go here and into the imports for type checkers below.
_NAMES = {
    "Checkpoint": "_checkpoint",
    "Statistics": "_statistics",
    "Tensor": "_checkpoint",
    "open": "_checkpoint",
    "Group": "_group",
    "preemption": "_preemption",
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
    "Refit": "_refit",
    "refit": "_refit",
    "apply_key_map": "_key_map",
    "Store": "_store",
    "adopt": "_store",
    "copy": "_store",
    "derive": "_store",
    "diff": "_store",
    "export": "_store",
    "repair": "_store",
    "verify": "_verify",
    "wait_committed": "_store",
    "Mount": "_mount",
    "mount": "_mount",
    "LeafKind": "_leaves",
    "ObjectPart": "_leaves",
    "register_leaf_kind": "_leaves",
    "Unreadable": "_values",
    "Box": "_boxes",
    "Flat": "_held",
    "Shards": "_held",
    "boxes": "_boxes",
    "testing": "testing",  # The names from here to the plug-ins are modules.
    "torch": "torch",
    **{name: name for name in _PLUGINS},
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
    "NonfiniteError": "errors",
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

    from tensormount import (
        accelerate as accelerate,
        fsspec as fsspec,
        lightning as lightning,
        megatron as megatron,
        olmo as olmo,
        testing as testing,
        torch as torch,
        torchtitan as torchtitan,
        transformers as transformers,
        vllm as vllm,
    )
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
    from tensormount._leaves import (
        LeafKind as LeafKind,
        ObjectPart as ObjectPart,
        register_leaf_kind as register_leaf_kind,
    )
    from tensormount._load import (
        LoadJob as LoadJob,
        Loaded as Loaded,
        Rule as Rule,
        async_load as async_load,
        load as load,
    )
    from tensormount._mount import Mount as Mount, mount as mount
    from tensormount._preemption import preemption as preemption
    from tensormount._refit import Refit as Refit, refit as refit
    from tensormount._save import (
        SaveJob as SaveJob,
        async_save as async_save,
        dump_spec as dump_spec,
        save as save,
        validate as validate,
    )
    from tensormount._saver import Saver as Saver
    from tensormount._statistics import Statistics as Statistics
    from tensormount._store import (
        Store as Store,
        adopt as adopt,
        copy as copy,
        derive as derive,
        diff as diff,
        export as export,
        repair as repair,
        wait_committed as wait_committed,
    )
    from tensormount._tree import PerRank as PerRank
    from tensormount._values import Unreadable as Unreadable
    from tensormount._verify import verify as verify
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
        NonfiniteError as NonfiniteError,
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

# A star import omits `open`, which would hide the builtin, and `testing`. It omits `torch` and the plug-ins, too: they
# would import the package of the same name, and hide it in the importing module.
__all__ = sorted(name for name in _NAMES if name not in ("open", "testing", "torch", *_PLUGINS)) + ["__version__"]


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'tensormount' has no attribute {name!r}")
    from importlib import import_module

    try:
        found = import_module("tensormount." + module)
        value = found if module == name else getattr(found, name)
    except (AttributeError, ImportError) as error:
        _refuse_in_import(name, error)
        raise
    globals()[name] = value  # The next look-up finds it without this function.
    return value


def _refuse_in_import(name: str, error: Exception) -> None:
    """BusyError: `error` is that of a signal handler that needs a module whose import it has interrupted."""
    from sys import modules

    if "partially initialized module" in str(error):
        kind = getattr(modules.get("tensormount.errors"), "BusyError", None)
        if kind is not None:
            raise kind(
                f"tensormount.{name}: is being imported by the code that this signal handler interrupted; use "
                f"tensormount.{name} once before the handler is installed"
            ) from error


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_NAMES))


def _apply_environment() -> None:
    from os import environ

    if environ.get("TENSORMOUNT_PATCH_DCP", "0") not in ("", "0"):
        from tensormount._plugins import patch_from_environment

        patch_from_environment(environ["TENSORMOUNT_PATCH_DCP"])


_apply_environment()
