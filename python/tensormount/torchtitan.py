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
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.distributed as dist
import torchtitan
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan import config as titan_config
from torchtitan.components import checkpointer as titan
from torchtitan.tools import filesystem, utils

from tensormount import _boxes, _plugins, _save, _torch_values
from tensormount._checkpoint import open as open_checkpoint
from tensormount._group import Group
from tensormount._held import Shards
from tensormount._leaves import dtensors
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
# States of torchtitan that count steps, and the names of the counts.
_COUNTS = {"train_state": "step", "lr_scheduler": "last_epoch"}

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
        (_Base, "_flattened_model_states_sd", "state_dict"),
        (titan.ModelWrapper, "_get_state_dict"),
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
        with _split_as_boxes(components.get("model_parts") or ()):
            super().__init__(plain, base_folder=base_folder, **components)
        if not self.enable:
            return
        self._forget_boxes()
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

    def _flattened_model_states_sd(self, state_dict: Optional[dict[str, Any]] = None) -> dict[str, Any]:
        """As torchtitan's, but without a gather: parts of fused projections are `Shards` (`_split_as_boxes`)."""
        states: dict[str, Any] = dict(self.states if state_dict is None else state_dict)
        model = states.pop(titan.MODEL, None)
        if model is not None:
            with _split_as_boxes(model.model):
                states.update(model._get_state_dict())
        return states

    def _forget_boxes(self) -> None:
        """Removes `Shards` from torchtitan's cached state dict, which shall have tensors only."""
        if titan.MODEL in self.states:
            model = self.states[titan.MODEL]
            kept = {key: one for key, one in model.cached_state_dict.items() if not isinstance(one, Shards)}
            model.cached_state_dict = kept

    def _save_hf(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        """Writes the model to FOLDER-hf/step-N, a directory as Hugging Face's save_pretrained makes it."""
        directory = os.path.join(f"{self.folder.rstrip('/')}-hf", os.path.basename(checkpoint_id))
        store = f"{directory}.saving"
        try:
            state: Any = self.sd_adapter.to_hf(state_dict)
        except Exception as error:
            state = FailedState(error)  # The save still begins, so that it fails on all ranks.
        try:
            _save.save(state, f"{store}/model", self._ranks(), **{**self._options, "retain": None})
            export(f"{store}/model", directory, self._ranks(), format="hf", replace=True)
        finally:
            # The other ranks are done with the checkpoint, because both calls have one verdict for all ranks.
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
            if any(isinstance(one, Shards) for one in state_dict.values()):
                state_dict.update(self.states[titan.MODEL].state_dict())
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        try:
            request, dataloader = _plain(state_dict)
        except Exception as error:
            request, dataloader = FailedState(error), {}  # The load still begins, so that it fails on all ranks.
        try:
            loaded = load(request, checkpoint_id, self._ranks(), objects=list(dataloader))
        except KeyNotFoundError as error:
            if self._load_from_another_trainer(request, checkpoint_id):
                state_dict.pop(titan.DATALOADER, None)
                self._take(state_dict, request)
                return
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
        self._take(state_dict, request)

    def _load_from_another_trainer(self, request: dict[str, Any], checkpoint_id: str) -> bool:
        """Loads a checkpoint that `tensormount import --as torchtitan:FAMILY` made of another trainer's: it has weights
        and moments, and neither hyperparameters nor counts. Counts are the number of the step, by the directory's name.
        False: the checkpoint is not such a one. Collective: each rank finds the same."""
        step = _STEP.fullmatch(os.path.basename(os.path.normpath(checkpoint_id)))
        with open_checkpoint(checkpoint_id) as checkpoint:
            # Megatron's common values have "optimizer", too.
            own = [key for key in checkpoint.common
                   if key.startswith(("train_state", "lr_scheduler", "optimizer.param_groups"))]
            has_moments = any(key.startswith("optimizer.state.") for key in checkpoint.keys())
        if step is None or own or not has_moments:
            return False
        weights = {name: one for name, one in request.items() if name not in (*_COUNTS, "optimizer")}
        optimizer = request.get("optimizer", {})
        moments = {key: one for key, one in optimizer.items() if key.endswith((".exp_avg", ".exp_avg_sq"))}
        load({**weights, "optimizer": moments}, checkpoint_id, self._ranks())
        for key, one in optimizer.items():
            if key.startswith("state.") and key.endswith(".step"):
                one.fill_(int(step[1]))
        for name, count in _COUNTS.items():
            if name in request:
                request[name][count] = int(step[1])
        _plugins.warn_once(
            f"{checkpoint_id}: the checkpoint of another trainer: weights and moments are loaded, and the run goes on at step "
            f"{step[1]}; the optimizer's hyperparameters are those of this configuration, and the data begin anew"
        )
        return True

    def _take(self, state_dict: dict[str, Any], request: dict[str, Any]) -> None:
        """Hands what was loaded to torchtitan."""
        for name, state in state_dict.items():
            if isinstance(state, Stateful):
                state.load_state_dict(request[name])
            else:
                state_dict[name] = request[name]
        if titan.MODEL in self.states:
            # The memory of Shards is that of the parameters, so it is loaded already.
            whole = {name: state for name, state in state_dict.items() if not isinstance(state, Shards)}
            model = self.states[titan.MODEL]
            with _split_as_boxes(model.model):
                model.load_state_dict(whole)
            self._forget_boxes()

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


# ---- Fused projections -----------------------------------------------------------------------------------------


def _split_hook() -> Any:
    """The hook by which torchtitan gathers the fused weight of the query, key and value projections on every rank and
    splits its rows into three tensors, at each state_dict(). None: no such model, or another torchtitan."""
    attention = sys.modules.get("torchtitan.models.common.attention")  # Imported by every model that has the hook.
    return getattr(getattr(attention, "FusedQKVLinear", None), "_split_qkv_on_save", None)


@contextlib.contextmanager
def _split_as_boxes(parts: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within this context, state dicts of these modules have the parts of a fused projection as `Shards` of the fused
    tensor's memory."""
    split = _split_hook()
    hooks = [
        (module._state_dict_hooks, number)
        for part in (parts if split is not None else ())
        for module in part.modules()
        for number, hook in module._state_dict_hooks.items()
        if hook is split
    ]
    for of_module, number in hooks:
        of_module[number] = _boxes_instead
    try:
        yield
    finally:
        for of_module, number in hooks:
            of_module[number] = split


def _boxes_instead(module: Any, state_dict: dict[str, Any], prefix: str, about: Any) -> None:
    """Takes the place of torchtitan's hook."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        fused = state_dict[key]
        if not isinstance(fused, torch.Tensor) or fused.dim() == 0:
            continue
        # torchtitan's own hook says which rows go where: it is given the numbers of the rows.
        numbers = torch.arange(fused.shape[0]).reshape(-1, *[1] * (fused.dim() - 1))
        split = {key: numbers}
        _split_hook()(module, split, prefix, about)
        if key not in split:
            del state_dict[key]
            for name, rows in split.items():
                state_dict[name] = _shards_of_rows(fused, rows.flatten())


def _shards_of_rows(fused: Any, rows: torch.Tensor) -> Shards:
    """The tensor that consists of the rows `rows` of `fused`, as the parts that this rank holds. No data are copied."""
    place = torch.full((fused.shape[0],), -2)  # -2: not in `rows`. (Row 0 would continue a run of -1.)
    place[rows] = torch.arange(len(rows))
    nowhere = (0,) * fused.dim()
    local, boxes, labelled = fused, [_boxes.Box(nowhere, tuple(fused.shape), nowhere, True)], False
    if hasattr(fused, "device_mesh"):
        local, boxes = fused._local_tensor, _boxes.boxes(fused)
        labelled = dtensors.knows_replicas(fused)
    found: list[tuple[tuple[int, ...], torch.Tensor, Optional[str]]] = []
    for box in boxes:
        held = local
        for axis, (begin, extent) in enumerate(zip(box.local_begin, box.extent)):
            held = held.narrow(axis, begin, extent)
        to = place[box.begin[0] : box.begin[0] + box.extent[0]]
        # Runs of rows that follow each other in both tensors.
        ends = [0, *((to.diff() != 1).nonzero().flatten() + 1).tolist(), len(to)]
        for begin, end in zip(ends, ends[1:]):
            if begin < end and to[begin] >= 0:
                label = ("main" if box.main else "copy") if labelled else None
                found.append(((int(to[begin]), *box.begin[1:]), held[begin:end], label))
    return Shards((len(rows), *fused.shape[1:]), found or [(nowhere, local.new_empty(nowhere), None)])


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
