# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face transformers saves to and loads from tensormount.

    tm.transformers.register(trainer)
    trainer.train(resume_from_checkpoint=True)

Everything that the Trainer writes into "OUT/checkpoint-500" is one atomic checkpoint. A TrainerCallback cannot do
that: it is called when the files are written. Tested with transformers 5.24.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional

import transformers
from transformers import trainer as _trainer_module, trainer_utils

from tensormount import _directories, _plugins, _save
from tensormount._archive import Archive, Content, Loaded, scratch
from tensormount._checkpoint import open as open_checkpoint
from tensormount._jobs import log
from tensormount.errors import CheckpointNotFoundError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

__all__ = ["register"]

TESTED = ("5.24",)

_seam: Any = _trainer_module

# The methods of the Trainer that are replaced or called, with the parameters that are used here.
_METHODS: dict[str, tuple[str, ...]] = {
    "train": ("resume_from_checkpoint",),
    "_save_checkpoint": ("model", "trial"),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "_load_best_model": (),
    "save_model": ("output_dir", "_internal_call"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_save_rng_state": ("output_dir",),
    "_save": ("output_dir", "state_dict"),
    "_get_output_dir": ("trial",),
    "_issue_warnings_after_load": ("load_result",),
}
_LASTING = (
    "train", "_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state",
    "_load_best_model",
)
# A file in a directory whose first save is under way.
_UNFINISHED = "tm-unfinished"
# Files and directories by which a checkpoint of the Trainer itself is recognised.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_THEIRS = re.compile(
    r"(model|pytorch_model|optimizer|rng_state)[^/]*\.(safetensors|bin|pt|pth|index\.json)|pytorch_model_fsdp.*"
)
# Files with more bytes than this are compared only by their sizes.
_MAX_COMPARED = 1 << 20


class register:
    """Makes a `transformers.Trainer` save to and resume from tensormount. All ranks call it.

        with tm.transformers.register(trainer) as registered:
            trainer.train(resume_from_checkpoint=registered.last_checkpoint())

    A save to "OUT/checkpoint-500" becomes checkpoint "OUT/checkpoint-500/tm-state". It has the model, the optimizer,
    the scheduler, the random states of all ranks, and all files that the Trainer writes. The small files
    (config.json, trainer_state.json, a tokenizer) are beside it, too. A resume takes that checkpoint, or one of the
    Trainer itself, whichever was saved last. End with `with`, or undo().

    store       None: each directory has its checkpoint in itself. Otherwise the store that has all checkpoints, so
                that steps share unchanged data.
    root        only with `store`: the directory below which all directories are; None: the one that the store is in.
    background  True: training goes on once the tensors are copied. The next save, the end of `train`, wait() and undo()
                wait for the save and raise its failure. Older checkpoints (`save_total_limit`) are removed then.
    options     as for `tensormount.save`. Unless set, replace is True, and replicas is "warn".

    UnsupportedError for DeepSpeed, XLA, SageMaker, FSDP1, models that transformers itself shards, and push_to_hub.
    """

    def __init__(
        self,
        trainer: Any,
        store: Optional[_plugins.PathLike] = None,
        *,
        root: Optional[_plugins.PathLike] = None,
        background: bool = False,
        **options: Unpack[_save.SaveOptions],
    ) -> None:
        _plugins.check_version("transformers", transformers.__version__, TESTED)
        for name, parameters in _METHODS.items():
            _plugins.find("tensormount.transformers", trainer, name, parameters)
        _plugins.find("tensormount.transformers", _seam, "rotate_checkpoints", ("output_dir", "save_total_limit"))
        for module in (_seam, trainer_utils):
            _plugins.find("tensormount.transformers", module, "shutil")
        if isinstance(getattr(trainer.train, "__self__", None), register):
            raise InvalidArgumentError("tensormount.transformers: the trainer is registered already")
        self._archive = Archive(_plugins.Places(store, root), background, _beside, options)
        self._trainer = trainer
        self._theirs = {name: getattr(trainer, name) for name in _METHODS}
        self._ours = {name: getattr(self, "_train" if name == "train" else name) for name in _LASTING}
        vars(trainer).update(self._ours)
        self._training = False
        self._sharded_model: Any = None  # A model whose load waits for that of the optimizer.
        # The path of the checkpoint that was loaded last, and this rank's files in it.
        self._rank_files: tuple[str, dict[str, bytes]] = ("", {})

    def last_checkpoint(self, output_dir: Optional[_plugins.PathLike] = None) -> Optional[str]:
        """The directory of the newest complete checkpoint in `output_dir` (None: that of the trainer), of tensormount
        or of the Trainer itself; None: there is none. Directories that an interrupted save has left do not count."""
        folder = os.fspath(self._trainer.args.output_dir if output_dir is None else output_dir)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        prefix = trainer_utils.PREFIX_CHECKPOINT_DIR
        found = sorted((int(name[len(prefix) + 1 :]), name) for name in names if re.fullmatch(prefix + r"-\d+", name))
        for _, name in reversed(found):
            directory = os.path.join(folder, name)
            if not self._is_interrupted(directory):
                return directory
            log.warning("%s: skipped, because the save of this checkpoint was interrupted", directory)
        return None

    def wait(self) -> None:
        """Waits for a background save, and raises its failure. All ranks call it."""
        self._archive.wait()

    def undo(self) -> None:
        """Gives the trainer its own methods back, and waits for a background save. A second call does nothing."""
        for name, ours in self._ours.items():
            if vars(self._trainer).get(name) == ours:
                delattr(self._trainer, name)
        self._archive.close()

    def __enter__(self) -> register:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    # ---- Methods of the trainer: training and saving -------------------------------------------------

    def _train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        self._refuse()
        resume = resume_from_checkpoint
        if resume is True:
            resume = self.last_checkpoint()
            if resume is None:
                folder = self._trainer.args.output_dir
                raise CheckpointNotFoundError(f"{folder}: the directory has no complete checkpoint to resume from")
        if isinstance(resume, (str, os.PathLike)):
            resume = os.fspath(resume)
            if self._is_interrupted(resume):
                raise CheckpointNotFoundError(f"{resume}: the directory has no checkpoint: its save was interrupted")
            self._restore_files(resume)
        self._training = True
        try:
            with _replaced(_seam, shutil=_Proxy(shutil, rmtree=self._remove)):
                result = self._theirs["train"](resume, *arguments, **options)
            self._archive.wait()
            return result
        finally:
            self._training = False

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        trainer = self._trainer
        self._refuse()
        self._archive.wait()
        folder = trainer._get_output_dir(trial=trial)
        directory = os.path.join(folder, f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
        outdated: list[str] = []
        if trainer.is_world_process_zero():
            self._begin(folder, directory, outdated)
        called: set[str] = set()
        native = self._saves_weights()
        sharded = trainer.is_fsdp_enabled

        def save_model(output_dir: str, _internal_call: bool = False) -> None:
            if native:
                self._save_without_weights(output_dir)
            else:
                self._theirs["save_model"](output_dir, _internal_call=_internal_call)

        def rotate_checkpoints(*arguments: Any, **options: Any) -> None:
            with _replaced(trainer_utils, shutil=_Proxy(shutil, rmtree=lambda path, *_, **__: outdated.append(path))):
                trainer_utils.rotate_checkpoints(*arguments, **options)

        def content() -> Content:
            replicated: dict[str, Any] = {}
            optimizer = "_save_optimizer_and_scheduler" in called
            if native and not sharded:
                replicated["model"] = trainer.model.state_dict()
            if optimizer and not sharded:
                replicated["optim"] = trainer.optimizer.state_dict()
            rank_files: dict[str, bytes] = {}
            if "_save_rng_state" in called:
                with scratch() as own:
                    self._theirs["_save_rng_state"](own)
                    rank_files = own.read()
            return Content(
                replicated=replicated,
                extra={"scheduler": trainer.lr_scheduler.state_dict()} if optimizer else {},
                sharded=self._sharded(trainer.model, optimizer) if sharded else None,
                rank_files=rank_files,
                files=_files(directory) if trainer.is_world_process_zero() else {},
            )

        with _replaced(_seam, rotate_checkpoints=rotate_checkpoints), _replaced(
            trainer,
            save_model=save_model,
            _save_optimizer_and_scheduler=lambda output_dir: called.add("_save_optimizer_and_scheduler"),
            _save_rng_state=lambda output_dir: called.add("_save_rng_state"),
        ):
            self._theirs["_save_checkpoint"](model, trial)
        self._archive.save(directory, content, [*outdated, os.path.join(directory, _UNFINISHED)])

    def _save_without_weights(self, output_dir: str) -> None:
        """Writes the files that the Trainer writes besides weights: the configuration, the tokenizer, its arguments."""
        if not self._trainer.args.should_save:
            return
        with scratch() as folder:
            self._theirs["_save"](folder, state_dict={})
            for name in _WEIGHTS:  # These files have no tensors.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
            shutil.copytree(folder, output_dir, dirs_exist_ok=True)

    # ---- Methods of the trainer: loading --------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = self._archive.find(resume_from_checkpoint)
        if path is None or not _has(path, "model"):
            self._theirs["_load_from_checkpoint"](resume_from_checkpoint, model)
            return
        model = self._trainer.model if model is None else model
        if self._trainer.is_fsdp_enabled and self._training:
            self._sharded_model = model
        else:
            self._load_model(path, model)

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        path = None if checkpoint is None else self._archive.find(checkpoint)
        if path is None:
            self._theirs["_load_optimizer_and_scheduler"](checkpoint)
            return
        trainer = self._trainer
        model, self._sharded_model = self._sharded_model, None
        saved = _has(path, "extra.scheduler")
        sharded = self._sharded(model, saved) if model is not None else None
        found = self._load(path, sharded, ("optim", "extra") if sharded is None else ("extra",))
        if "optim" in found.state and saved:
            trainer.optimizer.load_state_dict(found.state["optim"])
        if saved:
            trainer.lr_scheduler.load_state_dict(found.state["extra"]["scheduler"])

    def _load_rng_state(self, checkpoint: Optional[str]) -> None:
        path = None if checkpoint is None else self._archive.find(checkpoint)
        if path is None:
            self._theirs["_load_rng_state"](checkpoint)
            return
        if self._rank_files[0] != path:
            self._load(path, None, ())
        with scratch(self._rank_files[1]) as folder:
            self._theirs["_load_rng_state"](folder)

    def _load_best_model(self) -> None:
        self._archive.wait()
        path = self._archive.find(self._trainer.state.best_model_checkpoint)
        if path is None or not _has(path, "model"):
            self._theirs["_load_best_model"]()
        else:
            self._load_model(path, self._trainer.model)

    # ---- Implementation ------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        trainer = self._trainer
        plugin: Any = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        for what, there in (
            ("DeepSpeed", trainer.is_deepspeed_enabled),
            ("XLA", trainer.is_fsdp_xla_enabled or _seam.is_torch_xla_available()),
            ("SageMaker's model parallelism", _seam.is_sagemaker_mp_enabled()),
            ("FSDP1", trainer.is_fsdp_enabled and plugin.fsdp_version != 2),
            ("a model that transformers itself shards", trainer.is_distributed_loading_by_transformers),
            ("push_to_hub", trainer.args.push_to_hub),
        ):
            if there:
                raise UnsupportedError(f"tensormount.transformers: {what} is not supported; use undo()")

    def _saves_weights(self) -> bool:
        """Whether the weights are tensors of the checkpoint. Otherwise they are files that the trainer writes: those of
        adapters, and of a class that saves a model in its own way."""
        trainer, own = type(self._trainer), _seam.Trainer
        names = ("save_model", "_save", "_load_from_checkpoint")
        plain = all(getattr(trainer, name) is getattr(own, name) for name in names)
        return self._trainer.is_fsdp_enabled or (plain and not _seam._is_peft_model(self._trainer.model))

    def _sharded(self, model: Any, optimizer: bool) -> Any:
        one = self._trainer.optimizer
        # If the model has adapters, only the adapters are saved, as by the Trainer.
        return model, [getattr(one, "optimizer", one)] if optimizer else [], _seam._is_peft_model(self._trainer.model)

    def _load(self, path: str, sharded: Any, only: Any, then: Any = lambda found: None) -> Loaded:
        found = self._archive.load(path, sharded, {"map_location": "cpu", "weights_only": True}, only=only, then=then)
        self._rank_files = path, found.rank_files
        return found

    def _load_model(self, path: str, model: Any) -> None:
        if self._trainer.is_fsdp_enabled:
            self._load(path, self._sharded(model, False), ())
            return
        found = self._load(path, None, ("model",))
        self._trainer._issue_warnings_after_load(model.load_state_dict(found.state["model"], False))

    def _begin(self, folder: str, directory: str, outdated: list[str]) -> None:
        """Prepares a directory for a save, on rank 0, and removes those of interrupted saves."""
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            other = os.path.join(folder, name)
            if other != directory and self._is_interrupted(other):
                shutil.rmtree(other)
        if os.path.isdir(directory) and self._archive.find(directory) is None:
            # The Trainer's own checkpoint of this step, or an interrupted save of it. The new checkpoint replaces it.
            aside = _directories.sibling(directory)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(directory, aside)
            outdated.append(aside)
        os.makedirs(directory, exist_ok=True)
        if self._archive.find(directory) is None:
            with open(os.path.join(directory, _UNFINISHED), "w"):
                pass

    def _is_interrupted(self, directory: str) -> bool:
        unfinished = os.path.isfile(os.path.join(directory, _UNFINISHED))
        return unfinished and self._archive.find(directory) is None

    def _restore_files(self, directory: str) -> None:
        """Makes the small files in a directory those of its checkpoint, which the Trainer will read."""
        path = self._archive.find(directory)
        if path is None:
            return

        def write(found: Loaded) -> None:
            if not self._trainer.is_world_process_zero():
                return
            for name, data in found.files.items():
                file = os.path.join(directory, name)
                if _read(file) != data:
                    os.makedirs(os.path.dirname(file), exist_ok=True)
                    with open(file + ".tm-new", "wb") as out:
                        out.write(data)
                    os.replace(file + ".tm-new", file)

        self._load(path, None, (), write)

    def _remove(self, path: str, *arguments: Any, **options: Any) -> None:
        """Takes the place of shutil.rmtree at the end of training."""
        self._archive.wait()
        _directories.remove(self._archive.places, os.path.abspath(path))


class _Proxy:
    """Takes the place of a module, with some of its functions replaced."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self._module = module
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replaces attributes of a module or object until the block ends."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        vars(owner).update(values)
        yield
    finally:
        for name in values:
            if name in before:
                vars(owner)[name] = before[name]
            else:
                del vars(owner)[name]


def _has(path: str, name: str) -> bool:
    """Whether a checkpoint has tensors or values of that name, or below it."""
    with open_checkpoint(path) as checkpoint:
        return any(one == name or one.startswith(name + ".") for one in (*checkpoint.keys(), *checkpoint._values()))


def _files(directory: str) -> dict[str, bytes]:
    """The files in a directory that the Trainer has written."""
    found = {}
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".") and name != _plugins.STATE]
        for name in names:
            if not name.startswith(".") and name not in (_UNFINISHED, "store.json"):
                with open(os.path.join(folder, name), "rb") as file:
                    found[os.path.relpath(os.path.join(folder, name), directory)] = file.read()
    return found


def _read(path: str) -> Optional[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _beside(directory: str) -> str:
    """A hash of the checkpoint of the Trainer itself in a directory; "" if there is none."""
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    digest = hashlib.sha256()
    found = False
    for name in filter(_THEIRS.fullmatch, names):
        found = True
        path = os.path.join(directory, name)
        size = os.path.getsize(path)
        data = _read(path) if os.path.isfile(path) and size <= _MAX_COMPARED else b""
        digest.update(hashlib.sha256(f"{name}\0{size}\0".encode() + (data or b"")).digest())
    return digest.hexdigest() if found else ""
