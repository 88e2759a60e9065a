# SPDX-License-Identifier: Apache-2.0
"""torchtitan's checkpoints: a checkpoint manager for the configuration of its trainer.

    import tensormount as tm
    config.checkpoint = tm.torchtitan.CheckpointManager.Config(interval=500, retention="last=3,every=10000")

or, without a change to the configuration,

    python -m torchtitan.train ... --override.imports tensormount.torchtitan.checkpoints

docs/trainers.md is the guide.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Optional

import torch.distributed as dist
import torchtitan
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan import config as titan_config
from torchtitan.components import checkpointer as titan
from torchtitan.tools import filesystem, utils

from tensormount import _plugins, _save, _torch_values
from tensormount._group import Group
from tensormount._load import load
from tensormount._saver import Saver
from tensormount._state import FailedState
from tensormount._store import Store, export
from tensormount.errors import (
    AlreadyExistsError,
    CheckpointNotFoundError,
    Error,
    InvalidArgumentError,
    KeyNotFoundError,
    UnsupportedError,
)

__all__ = ["CheckpointManager", "checkpoints"]

TESTED = ("0.3",)

# Options of a save that the manager sets, or that a configuration cannot hold.
_OWN = ("retain", "ephemeral", "on_event", "before_publish", "on_commit")
_STEP = re.compile(r"step-(0|[1-9]\d*)")

_Base: Any = _plugins.find("tensormount.torchtitan", titan, "CheckpointManager")


def _check_seam() -> None:
    _plugins.check_version("torchtitan", torchtitan.__version__, TESTED)
    for owner, name, *parameters in (
        (_Base, "Config"),
        (_Base, "dcp_save", "state_dict", "checkpoint_id", "async_mode", "enable_garbage_collection", "to_hf"),
        (_Base, "dcp_load", "state_dict", "checkpoint_id", "from_hf", "from_quantized"),
        (_Base, "_save", "curr_step", "last_step"),
        (_Base, "_load", "step"),
        (_Base, "_close"),
        (_Base, "_find_load_step", "folder"),
        (_Base, "_purge_stale_checkpoints"),
        (titan_config, "derive", "source", "target_cls"),
        (titan_config, "override", "target", "exact"),
        (titan, "AsyncMode"),
        (titan, "DATALOADER"),
        (titan, "MODEL"),
    ):
        _plugins.find("tensormount.torchtitan", owner, name, parameters)


_check_seam()


class CheckpointManager(_Base):
    """Saves and loads the checkpoints of torchtitan's trainer with tensormount.

    The checkpoint folder (DUMP_FOLDER/checkpoint) is a store, and step N is the checkpoint "step-N" in it, with
    torchtitan's own keys. The options of torchtitan's manager keep their meaning; docs/trainers.md lists the
    differences. Checkpoints that torchtitan's manager wrote are loaded as before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):
        """The configuration of torchtitan's manager, and:"""

        retention: Optional[str] = None
        """Rules that say which checkpoints stay ("last=3,every=1000", or "policy" for the store's own). None: the
        last keep_latest_k; all if that is 0."""

        save_options: dict[str, Any] = field(default_factory=dict)
        """Further options of tensormount.save: placement, page_hashes, arrival, ... Unless set, replace is True, and
        replicas and common are "warn"."""

        def __post_init__(self) -> None:
            _Base.Config.__post_init__(self)
            if filesystem.is_remote(self.folder):
                raise UnsupportedError(
                    f"checkpoint.folder={self.folder}: tensormount saves to file systems only; pass a directory, or "
                    "use torchtitan's own CheckpointManager"
                )
            for name in self.save_options:
                if name in _OWN:
                    remedy = "set checkpoint.retention" if name == "retain" else "remove it"
                    raise InvalidArgumentError(f"checkpoint.save_options: {name} cannot be set there; {remedy}")
            _save.read_options(**self.save_options)
            if self.retention is not None:
                # Reports wrong rules now, not at the first save: prune parses the rules before it looks for the store.
                with tempfile.TemporaryDirectory() as no_store, contextlib.suppress(CheckpointNotFoundError):
                    Store(no_store).prune(self.retention, dry_run=True)

    stager: Any  # An attribute of the base class: the object that copies tensors for background saves.

    def __init__(self, config: Config, *, base_folder: str = "", **components: Any) -> None:
        self._group: Optional[Group] = None
        # With these options the base class makes neither a thread that removes checkpoints, nor a process group for
        # background saves.
        plain = copy.copy(config)
        plain.keep_latest_k, plain.async_mode = 0, "disabled"
        super().__init__(plain, base_folder=base_folder, **components)
        if not self.enable:
            return
        if filesystem.is_remote(self.folder):
            raise UnsupportedError(f"dump_folder={base_folder}: tensormount saves to file systems only")
        self.keep_latest_k = config.keep_latest_k
        self.async_mode = titan.AsyncMode(config.async_mode)
        rules = config.retention
        if rules is None and config.keep_latest_k > 0:
            rules = f"last={config.keep_latest_k},match=step-*"
        self._options: dict[str, Any] = {
            "replace": True, "replicas": "warn", "common": "warn", **config.save_options, "retain": rules
        }

    # ---- Save ------------------------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.stager is None and self.async_mode is not titan.AsyncMode.DISABLED and not self.load_only:
            # With pinned memory torchtitan calls maybe_wait_for_staging() before the optimizer changes the tensors.
            self.stager = Saver(
                self._ranks(), stage_in_background=self.async_mode is titan.AsyncMode.ASYNC_WITH_PINNED_MEM
            )
        return bool(super()._save(curr_step, last_step))

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Saves a state dict of torchtitan. Returns what torchtitan's own method returns."""
        options = {**self._options, "on_commit": self._free_space if self._ranks().rank == 0 else None}
        waiting: Any = None
        if to_hf:
            self._save_hf(state_dict, checkpoint_id)
        elif async_mode is titan.AsyncMode.DISABLED:
            state, objects = _to_save(state_dict)
            _save.save(state, checkpoint_id, self._ranks(), objects=objects, **options)
        else:
            state, objects = _to_save(state_dict)
            job = self.stager.save(state, checkpoint_id, objects=objects, **options)
            waiting = _Waiting(job.wait, job.done)
            if async_mode is titan.AsyncMode.ASYNC_WITH_PINNED_MEM:
                waiting = AsyncSaveResponse(
                    staging_completion=_Waiting(job.wait_staged, lambda: job.progress()["state"] != "staging"),
                    upload_completion=waiting,
                )
        if enable_garbage_collection:
            utils.GarbageCollection.collect("GC collection invoked by checkpointer.")
        return waiting

    def _save_hf(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        """Writes the model to FOLDER-hf/step-N, a directory as Hugging Face's save_pretrained makes it."""
        directory = os.path.join(f"{self.folder.rstrip('/')}-hf", os.path.basename(checkpoint_id))
        store = f"{directory}.saving"
        try:
            state: Any = self.sd_adapter.to_hf(state_dict)
        except Exception as error:
            state = FailedState(error)  # The save still begins, so that it fails on all ranks.
        _save.save(state, f"{store}/model", self._ranks(), **{**self._options, "retain": None})
        export(f"{store}/model", directory, self._ranks(), format="hf", replace=True)
        if self._ranks().rank == 0:
            shutil.rmtree(store, ignore_errors=True)

    def _free_space(self, _: dict[str, Any]) -> None:
        """Runs after a commit. Frees checkpoints that were replaced or removed earlier and were then still in use."""
        Store(self.folder).gc()

    def _purge_stale_checkpoints(self) -> None:
        """Does nothing, because each save removes checkpoints after its commit."""

    # ---- Load --------------------------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        return bool(super()._load(_told_by_rank_0(lambda: self._step_to_load(step))))

    def _step_to_load(self, step: int) -> int:
        """The step to resume from; -1: none. AlreadyExistsError: a directory is in the way of a later save."""
        if step == -1:
            step = self._find_load_step()
        found = _steps(self.folder)
        later = [number for number, kind in found.items() if kind != "tensormount" and number > step]
        if later and not self.load_only:
            raise AlreadyExistsError(
                f"{self.folder}/step-{min(later)}: not a checkpoint of tensormount, and later than "
                + (f"step {step}, from which this run resumes" if step >= 0 else "the beginning of this run")
                + ": a save of that step could not replace it. Move it away, or choose another directory by checkpoint.folder=DIR"
            )
        return step

    def _find_load_step(self, folder: str = "") -> int:
        """The highest step that `folder` has a checkpoint of, of tensormount or torchtitan; -1: none."""
        return max((number for number, kind in _steps(folder or self.folder).items() if kind), default=-1)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Loads into a state dict of torchtitan: a checkpoint of tensormount, one that torchtitan's own manager wrote,
        or with `from_hf` a directory of Hugging Face."""
        if from_hf or filesystem.isfile(filesystem.join(checkpoint_id, ".metadata")):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        try:
            request, dataloader = _plain(state_dict)
        except Exception as error:
            request, dataloader = FailedState(error), {}  # The load still begins, so that it fails on all ranks.
        try:
            loaded = load(request, checkpoint_id, self._ranks(), objects=list(dataloader))
        except KeyNotFoundError as error:
            raise KeyNotFoundError(
                f"{checkpoint_id}: {error.message}. checkpoint.exclude_from_loading leaves out a state "
                '(["dataloader"] on another number of data-parallel ranks); a checkpoint of the model alone '
                "(last_save_model_only) is loaded by checkpoint.initial_load_path",
                key=error.key,
            ) from error
        # Unpickled as by torch.distributed.checkpoint; torchtitan's state of a data loader is a pickle itself.
        values = {
            key[len(titan.DATALOADER) + 1 :]: _torch_values.from_bytes(loaded.objects[key, ()], key, weights_only=False)
            for key in dataloader
        }
        request.setdefault(titan.DATALOADER, values)
        for name, state in state_dict.items():
            if isinstance(state, Stateful):
                state.load_state_dict(request[name])
            else:
                state_dict[name] = request[name]
        if titan.MODEL in self.states:
            self.states[titan.MODEL].load_state_dict(state_dict)

    # ---- Ranks ---------------------------------------------------------------------------------------------------

    def _ranks(self) -> Group:
        if self._group is None:
            self._group = Group.from_torch() if dist.is_initialized() else _save.saving_group(None)
        return self._group

    def _close(self) -> None:
        super()._close()  # Waits for a save that is under way.
        if self._group is not None:
            self._group.close()


def checkpoints(config: Any, **options: Any) -> CheckpointManager.Config:
    """The override that replaces the configuration of torchtitan's manager. `options`: further fields, on the command
    line as JSON: --override.imports 'tensormount.torchtitan.checkpoints={"retention": "last=3"}'"""
    made: CheckpointManager.Config = titan_config.derive(config, CheckpointManager.Config, **options)
    return made


titan_config.override(target=_Base.Config, exact=True, description="Checkpoints in a store of tensormount")(checkpoints)


class _Waiting(Future):  # type: ignore[type-arg]
    """A future by which torchtitan waits for a background save. `wait(timeout)` of a job waits and raises failures."""

    def __init__(self, wait: Callable[[Optional[float]], Any], done: Callable[[], bool]) -> None:
        super().__init__()
        self._wait, self._done = wait, done

    def result(self, timeout: Optional[float] = None) -> Any:
        return self._wait(timeout)

    def exception(self, timeout: Optional[float] = None) -> Optional[BaseException]:
        try:
            self._wait(timeout)
        except Error as error:
            return error
        return None

    def done(self) -> bool:
        return self._done()


# ---- State dicts ---------------------------------------------------------------------------------------------


def _plain(state_dict: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A state dict of torchtitan as tensormount stores it, and the values of the data loader by their keys.

    The data loader of each rank has a key of its own ("dp_rank_3"). As objects they are found by key on any number
    of ranks, and the state dicts of all ranks have one structure.
    """
    state = {name: one.state_dict() if isinstance(one, Stateful) else one for name, one in state_dict.items()}
    dataloader = {}
    if isinstance(state.get(titan.DATALOADER), dict):
        dataloader = {f"{titan.DATALOADER}.{name}": value for name, value in state.pop(titan.DATALOADER).items()}
    return state, dataloader


def _to_save(state_dict: dict[str, Any]) -> tuple[Any, dict[str, bytes]]:
    """As `_plain`; the values as torch.distributed.checkpoint stores them, so that an export to DCP has them."""
    try:
        state, dataloader = _plain(state_dict)
        return state, {key: _torch_values.to_bytes(value, key) for key, value in dataloader.items()}
    except Exception as error:
        return FailedState(error), {}  # The save still begins, so that it fails on all ranks.


# ---- Checkpoint folders ----------------------------------------------------------------------------------------


def _steps(folder: str) -> dict[int, str]:
    """The directories step-N of a folder by N: "tensormount" or "torchtitan", whose checkpoint it is, or "" for
    anything else: an interrupted save of torchtitan's own manager, a directory of Hugging Face."""
    found = {}
    for name in filesystem.listdir(folder) if filesystem.isdir(folder) else ():
        step = _STEP.fullmatch(name)
        if step is not None:
            directory = filesystem.join(folder, name)
            ours, theirs = (filesystem.isfile(filesystem.join(directory, file)) for file in ("COMMIT", ".metadata"))
            found[int(step[1])] = "tensormount" if ours else "torchtitan" if theirs else ""
    return found


def _told_by_rank_0(find: Callable[[], int]) -> int:
    """The result of `find` on rank 0, on all ranks: ranks that see a directory at different times would load
    different steps. Its error is raised on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return find()
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [find()]
        except Exception as error:
            told = [error]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], Exception):
        raise told[0]
    return int(told[0])
