# SPDX-License-Identifier: Apache-2.0
"""Saves and loads models and optimizers, and connects to torch.distributed.checkpoint (DCP).

    tm.torch.save("STORE/step-1000", model=model, optim=optim, extra={"step": 1000})
    tm.torch.load("STORE/latest", model=model, optim=optim, extra=extra)

    torch.distributed.checkpoint.save(state, storage_writer=tm.torch.Writer("STORE/step-1000"))
    torch.distributed.checkpoint.load(state, storage_reader=tm.torch.Reader("STORE/latest"))

    with tm.torch.patch_dcp():            # programs that only pass a path
        torch.distributed.checkpoint.save(state, checkpoint_id="OUT/step-1000")

Tested with PyTorch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensormount.torch._dcp import (
        LoadPlanner as LoadPlanner,
        Reader as Reader,
        Writer as Writer,
    )
    from tensormount.torch._lazy import LazyReads as LazyReads, LazyTensor as LazyTensor
    from tensormount.torch._patch import patch_dcp as patch_dcp
    from tensormount.torch._train import (
        async_save as async_save,
        load as load,
        rng_state as rng_state,
        save as save,
        set_rng_state as set_rng_state,
    )

_NAMES = {
    "LazyReads": "_lazy",
    "LazyTensor": "_lazy",
    "LoadPlanner": "_dcp",
    "Reader": "_dcp",
    "Writer": "_dcp",
    "async_save": "_train",
    "load": "_train",
    "patch_dcp": "_patch",
    "rng_state": "_train",
    "save": "_train",
    "set_rng_state": "_train",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'tensormount.torch' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module("tensormount.torch." + module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_NAMES))
