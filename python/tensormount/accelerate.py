# SPDX-License-Identifier: Apache-2.0
"""Accelerate saves to and loads from tensormount: save_state and load_state of an `Accelerator`.

    tm.accelerate.register(accelerator)
    accelerator.save_state("out/step-500")

Everything that save_state saves is one atomic checkpoint: models, optimizers, schedulers, registered objects, data
loaders, the scaler, and the random states of all ranks. Tested with Accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import accelerate
import numpy
import torch
from accelerate import accelerator as _seam
from accelerate.utils import DistributedType, load as _load_file
from accelerate.utils.other import TORCH_SAFE_GLOBALS as _SAFE_GLOBALS

from tensormount import _plugins, _save
from tensormount._archive import Archive, Content, numbered, numbered_name, scratch
from tensormount._jobs import log
from tensormount.errors import CheckpointNotFoundError, InvalidArgumentError, LayoutError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

__all__ = ["register"]

TESTED = ("1.15",)

# The functions that save_state and load_state call, with the parameters that are used here.
_CALLED: dict[str, tuple[str, ...]] = {
    "save_accelerator_state": (
        "output_dir", "model_states", "optimizers", "schedulers", "dataloaders", "process_index", "step", "scaler",
    ),
    "load_accelerator_state": (
        "input_dir", "models", "optimizers", "schedulers", "dataloaders", "process_index", "scaler", "map_location",
        "load_kwargs",
    ),
    "save_custom_state": ("obj",),
    "load_custom_state": ("obj", "path", "index"),
    "save_fsdp_model": ("model",),
    "save_fsdp_optimizer": ("optimizer",),
    "load_fsdp_model": ("model",),
    "load_fsdp_optimizer": ("optimizer",),
    "os": (),
    "shutil": (),
}
_ATTRIBUTES = (
    "_custom_objects", "distributed_type", "load_state", "project_configuration", "save_iteration", "save_state",
)
# The file that Accelerate itself writes last, and into each of its checkpoints.
_RANDOM_STATES = "random_states_0.pkl"


class register:
    """Makes `accelerator.save_state` and `load_state` save to and load from tensormount. All ranks call it.

        with tm.accelerate.register(accelerator):
            train()                       # calls accelerator.save_state("out/step-500")

    A save to directory P becomes checkpoint P/tm-state; beside it P has only what hooks put there. A load from P takes
    that checkpoint, or one of Accelerate itself, whichever was saved last. End with `with`, or undo().

    store       None: each P has its checkpoint in itself. Otherwise the store that has all checkpoints, so that
                steps share unchanged data. OUT/checkpoint_3 is "checkpoint_3".
    root        only with `store`: the directory below which all P are; None: the directory that the store is in.
    background  True: save_state returns when the tensors are copied. The next save_state or load_state, wait() and
                undo() wait for the save and raise its failure. Older checkpoints (`total_limit`) are removed then.
    options     as for `tensormount.save`. Unless set, replace is True, and replicas is "warn".

    Models are saved as they are on one process, or sharded if they are FSDP2's. UnsupportedError for DeepSpeed,
    Megatron-LM, XLA and FSDP1.
    """

    def __init__(
        self,
        accelerator: Any,
        store: Optional[_plugins.PathLike] = None,
        *,
        root: Optional[_plugins.PathLike] = None,
        background: bool = False,
        **options: Unpack[_save.SaveOptions],
    ) -> None:
        _plugins.check_version("Accelerate", accelerate.__version__, TESTED)
        for name, parameters in _CALLED.items():
            _plugins.find("tensormount.accelerate", _seam, name, parameters)
        for name in _ATTRIBUTES:
            _plugins.find("tensormount.accelerate", accelerator, name)
        if isinstance(getattr(accelerator.save_state, "__self__", None), register):
            raise InvalidArgumentError("tensormount.accelerate: the accelerator is registered already")
        self._archive = Archive(_plugins.Places(store, root), background, _beside, options)
        self._accelerator = accelerator
        self._save, self._load = accelerator.save_state, accelerator.load_state
        accelerator.save_state, accelerator.load_state = self._save_state, self._load_state

    def wait(self) -> None:
        """Waits for a background save, and raises its failure. All ranks call it."""
        self._archive.wait()

    def undo(self) -> None:
        """Gives the accelerator its own methods back, and waits for a background save. A second call does nothing."""
        for name, ours in (("save_state", self._save_state), ("load_state", self._load_state)):
            if vars(self._accelerator).get(name) == ours:
                delattr(self._accelerator, name)
        self._archive.close()

    def __enter__(self) -> register:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    # ---- Calls of the program ----------------------------------------------------------------------

    def _save_state(self, output_dir: Optional[str] = None, *arguments: Any, **options: Any) -> Any:
        accelerator = self._accelerator
        _refuse(accelerator)
        self._archive.wait()
        if accelerator.project_configuration.automatic_checkpoint_naming:
            name = f"checkpoint_{accelerator.save_iteration}"
            self._remove_interrupted(os.path.join(accelerator.project_dir, "checkpoints", name))
        model: list[Any] = []
        optimizers: list[Any] = []
        outdated: list[str] = []

        def save_accelerator_state(
            output_dir: str, model_states: Any, plain_optimizers: Any, schedulers: Any, dataloaders: Any, *rest: Any,
            **named: Any,
        ) -> Path:
            def content() -> Content:
                with scratch() as folder:
                    _ORIGINAL["save_accelerator_state"](folder, [], [], [], dataloaders, *rest, **named)
                    files = folder.read()
                return Content(
                    replicated={
                        **numbered("model", [_unwrapped(state) for state in model_states]),
                        **numbered("optim", [one.state_dict() for one in plain_optimizers]),
                    },
                    extra={
                        **numbered("scheduler", [one.state_dict() for one in schedulers]),
                        **numbered("custom_checkpoint", [one.state_dict() for one in accelerator._custom_objects]),
                    },
                    sharded=(model[0], optimizers, False) if model else None,
                    rank_files=files,
                )

            self._archive.save(output_dir, content, outdated)
            return Path(output_dir)

        with _replaced(
            save_fsdp_model=lambda plugin, accelerator, one, *_, **__: model.append(one),
            save_fsdp_optimizer=lambda plugin, accelerator, one, *_, **__: optimizers.append(_inner(one)),
            save_accelerator_state=save_accelerator_state,
            save_custom_state=lambda *_, **__: None,
            shutil=_Proxy(shutil, rmtree=outdated.append),
        ):
            return self._save(output_dir, *arguments, **options)

    def _load_state(self, input_dir: Optional[str] = None, *arguments: Any, **options: Any) -> None:
        accelerator = self._accelerator
        _refuse(accelerator)
        self._archive.wait()
        if input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming:
            input_dir = self._newest(os.path.join(accelerator.project_dir, "checkpoints"))
        path = None
        if input_dir is not None:
            directory = os.path.expanduser(input_dir)
            path = self._archive.find(directory)
            if os.path.isdir(directory) and not self._is_complete(directory):
                raise CheckpointNotFoundError(
                    f"load {directory}: has neither {self._archive.places.checkpoint(directory)} nor a checkpoint of "
                    "Accelerate; its save was perhaps interrupted"
                )
        if path is None:
            self._load(input_dir, *arguments, **options)
            return
        source: str = path
        model: list[Any] = []
        optimizers: list[Any] = []
        custom, scaler = accelerator._custom_objects, accelerator.scaler
        extra: dict[str, Any] = {}

        def load_accelerator_state(
            input_dir: str, models: Any, plain_optimizers: Any, schedulers: Any, dataloaders: Any, process_index: int,
            _: Any = None, map_location: Any = None, load_kwargs: Any = None, **model_options: Any,
        ) -> dict[str, Any]:
            if map_location not in (None, "cpu", "on_device"):
                raise InvalidArgumentError(f"map_location={map_location!r}: must be None, 'cpu' or 'on_device'")

            def current() -> dict[str, Any]:
                return {"extra": numbered("custom_checkpoint", [one.state_dict() for one in custom])}

            with torch.serialization.safe_globals(_safe_globals()):
                found = self._archive.load(
                    source, (model[0], optimizers, False) if model else None,
                    {"map_location": "cpu", **(load_kwargs or {})}, current=current,
                )
            extra.update(found.state["extra"])
            for name, ones, state in (
                ("model", models, found.state), ("optim", plain_optimizers, found.state),
                ("scheduler", schedulers, extra), ("custom_checkpoint", custom, extra),
            ):
                stored = sum(re.fullmatch(name + r"(_\d+)?", key) is not None for key in state)
                if stored != len(ones) and not (model and state is found.state):
                    raise LayoutError(
                        f"load {source}: {len(ones)} objects of the kind {name} are to be loaded, but {stored} were "
                        "saved"
                    )
            for name, one in numbered("model", models).items():
                inner = accelerator.unwrap_model(one, keep_torch_compile=False)
                inner.load_state_dict(found.state[name], **model_options)
            for name, one in numbered("optim", plain_optimizers).items():
                one.load_state_dict(found.state[name])
            for name, one in numbered("scheduler", schedulers).items():
                one.load_state_dict(extra[name])
            with scratch(found.rank_files) as folder:
                kept: dict[str, Any] = _ORIGINAL["load_accelerator_state"](
                    folder, [], [], [], dataloaders, process_index, scaler, map_location, load_kwargs
                )
                if "step" not in kept:  # More ranks than were saved: this one keeps its random state.
                    kept["step"] = _load_file(os.path.join(folder, _RANDOM_STATES))["step"]
            return kept

        def load_custom_state(one: Any, path: str, index: int = 0) -> None:
            one.load_state_dict(extra[numbered_name("custom_checkpoint", index)])

        accelerator.scaler = None  # With a scaler, Accelerate would look for a file of the scaler.
        try:
            with _replaced(
                load_fsdp_model=lambda plugin, accelerator, one, *_, **__: model.append(one),
                load_fsdp_optimizer=lambda plugin, accelerator, one, *_, **__: optimizers.append(_inner(one)),
                load_accelerator_state=load_accelerator_state,
                load_custom_state=load_custom_state,
                os=_Proxy(os, listdir=lambda path: [f"custom_checkpoint_{i}.pkl" for i in range(len(custom))]),
            ):
                self._load(input_dir, *arguments, **options)
        finally:
            accelerator.scaler = scaler

    # ---- Implementation ------------------------------------------------------------------------------------

    def _is_complete(self, directory: str) -> bool:
        own = os.path.join(directory, _RANDOM_STATES)
        return self._archive.find(directory) is not None or os.path.isfile(own)

    def _remove_interrupted(self, directory: str) -> None:
        """Removes the directory of an interrupted save, because Accelerate refuses a directory that exists."""
        if self._accelerator.is_main_process and os.path.isdir(directory) and not self._is_complete(directory):
            shutil.rmtree(directory)
        self._accelerator.wait_for_everyone()

    def _newest(self, folder: str) -> Optional[str]:
        """The newest complete checkpoint that automatic naming made, or the newest directory if none is complete."""
        names = os.listdir(folder) if os.path.isdir(folder) else []
        found = sorted((int(name[11:]), name) for name in names if re.fullmatch(r"checkpoint_\d+", name))
        for _, name in reversed(found):
            directory = os.path.join(folder, name)
            if self._is_complete(directory):
                return directory
            log.warning("%s: skipped, because the save of this checkpoint was interrupted", directory)
        return os.path.join(folder, found[-1][1]) if found else None


_ORIGINAL: dict[str, Any] = {name: getattr(_seam, name) for name in _CALLED if hasattr(_seam, name)}


class _Proxy:
    """Takes the place of a module, with some of its functions replaced."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self._module = module
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def _replaced(**functions: Any) -> Iterator[None]:
    """Replaces functions in the module of accelerate.Accelerator until the block ends."""
    try:
        vars(_seam).update(functions)
        yield
    finally:
        vars(_seam).update({name: _ORIGINAL[name] for name in functions})


def _safe_globals() -> list[Any]:
    """Classes and functions by which torch.load makes NumPy arrays and scalars, besides its own: those of Accelerate's
    `load`, and all dtypes. Accelerate itself loads registered objects without a list."""
    dtypes = [one for one in vars(numpy.dtypes).values() if isinstance(one, type) and issubclass(one, numpy.dtype)]
    return [*_SAFE_GLOBALS, *dtypes, numpy.float64(0).__reduce__()[0]]


def _refuse(accelerator: Any) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise UnsupportedError(f"tensormount.accelerate: {kind.value} has checkpoints of its own; use undo()")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UnsupportedError("tensormount.accelerate: FSDP1 is not supported; use FSDP2 (fsdp_version=2)")


def _beside(directory: str) -> str:
    """A hash of the checkpoint of Accelerate itself in a directory; "" if there is none."""
    try:
        with open(os.path.join(directory, _RANDOM_STATES), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except FileNotFoundError:
        return ""


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _unwrapped(state: Any) -> Any:
    """The state dict of a model with the names that it has where it is not compiled."""
    if not any(str(key).startswith("_orig_mod.") for key in state):
        return state
    found = OrderedDict((key.removeprefix("_orig_mod."), value) for key, value in state.items())
    metadata = getattr(state, "_metadata", {})
    found._metadata = OrderedDict(  # type: ignore[attr-defined]
        ("" if key == "_orig_mod" else key.removeprefix("_orig_mod."), value) for key, value in metadata.items()
    )
    return found
