# SPDX-License-Identifier: Apache-2.0
"""Programs that only pass a path to torch.distributed.checkpoint (DCP) save and load through tensormount:
DCP's names FileSystemWriter and FileSystemReader are replaced, and put back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch.distributed.checkpoint import _storage_utils, filesystem, state_dict_saver
from torch.distributed.checkpoint.storage import StorageReader

from tensormount import _plugins, _save, _values
from tensormount._checkpoint import open as open_checkpoint
from tensormount._jobs import log
from tensormount._store import Store
from tensormount.errors import Error, InvalidArgumentError, UnsupportedError
from tensormount.torch import _dcp

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

TESTED = ("2.13",)

# Both modules derive classes from DCP's, so they must be imported before DCP's names are replaced.
for _module in ("_fsspec_filesystem", "hf_storage"):
    try:
        importlib.import_module(f"torch.distributed.checkpoint.{_module}")
    except ImportError:
        pass  # fsspec or safetensors is not installed.

_PROCESS, _THREAD = "_ProcessBasedAsyncCheckpointExecutor", "_ThreadBasedAsyncCheckpointExecutor"
_ORIGINAL: dict[str, Any] = {
    name: _plugins.find("patch_dcp", module, name)
    for name, module in (
        ("FileSystemReader", filesystem),
        ("FileSystemWriter", filesystem),
        (_PROCESS, state_dict_saver),
        (_THREAD, state_dict_saver),
    )
}
# Name of rank 0's value with the fingerprint of the checkpoint of DCP's own writer that was in the directory at the
# save.
_BESIDE = "tensormount.dcp_beside"


class _Settings(NamedTuple):
    places: _plugins.Places
    per_rank: tuple[str, ...]
    options: dict[str, Any]


class patch_dcp:
    """Makes `torch.distributed.checkpoint` save to and load from tensormount, for programs that only pass paths.

        with tm.torch.patch_dcp():
            train()                       # calls dcp.save(state, checkpoint_id="OUT/step-500")

    Replaces FileSystemWriter and FileSystemReader in torch.distributed.checkpoint, and in each loaded module that
    has imported them. A save to directory P becomes checkpoint P/tm-state. A load from P takes that, or a
    checkpoint of DCP itself, whichever was saved last. The program's own files in P stay as they are. Begin
    before the program makes its writers and readers; end with `with`, or undo(). Also for a whole program:
    `python -m tensormount.patched SCRIPT`, or TENSORMOUNT_PATCH_DCP=1 where it imports tensormount.

    store     None: each P has its checkpoint in itself. Otherwise the store that has all checkpoints, so that
              steps share unchanged data and the store's rules remove them. OUT/step-500/model is "step-500.model".
    root      only with `store`: the directory below which all P are; None: the directory that the store is in.
    per_rank  globs of keys of byte items that each rank saves for itself, as for `Writer`.
    options   as for `Writer`. Unless set, replace is the writer's `overwrite`, and replicas is "warn".

    UnsupportedError if this version of PyTorch has no such classes to replace.
    """

    def __init__(
        self,
        store: Optional[_plugins.PathLike] = None,
        *,
        root: Optional[_plugins.PathLike] = None,
        per_rank: Sequence[str] = (),
        **options: Unpack[_save.SaveOptions],
    ) -> None:
        _save.read_options(**options)
        self._settings = _Settings(_plugins.Places(store, root), tuple(per_rank), dict(options))
        _check_seam()
        _active.append(self._settings)
        try:
            _plugins.replace(_ORIGINAL, _OURS, keep=(__name__,))
        except BaseException:
            self.undo()
            raise
        if os.environ.get("RANK", "0") == "0":
            where = f"the store {self._settings.places.store}" if store is not None else f"PATH/{_plugins.STATE}"
            _plugins.warn_once(
                f"patch_dcp: what torch.distributed.checkpoint saves to PATH is a tensormount checkpoint in {where}"
            )

    def undo(self) -> None:
        """Puts DCP's names back, unless another `patch_dcp` is active. A second call does nothing."""
        for position, settings in enumerate(_active):
            if settings is self._settings:
                del _active[position]
                break
        if not _active:
            _plugins.replace(_OURS, _ORIGINAL, keep=(__name__,))

    def __enter__(self) -> patch_dcp:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


# The settings of each active `patch_dcp`. The innermost is the last.
_active: list[_Settings] = []


def _check_seam() -> None:
    _plugins.check_version("PyTorch", torch.__version__, TESTED)
    for name in ("FileSystemReader", "FileSystemWriter"):
        _plugins.find("patch_dcp", _storage_utils, name)
    _plugins.find("patch_dcp", _storage_utils, "_storage_setup", ("storage", "checkpoint_id", "reader"))


class FileSystemWriter(_dcp.Writer):
    """Takes the place and the parameters of DCP's FileSystemWriter.

    With overwrite=False a checkpoint that exists is an AlreadyExistsError; otherwise it is replaced in one step.
    Extensions and other serialization formats are refused. The other parameters say how DCP writes its own files
    and change nothing. Files are always durable.
    """

    def __init__(
        self,
        path: _plugins.PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Optional[Sequence[Any]] = None,
        serialization_format: Any = filesystem.SerializationFormat.TORCH_SAVE,
    ) -> None:
        if _extensions:
            raise UnsupportedError("patch_dcp: FileSystemWriter with extensions is not supported")
        if serialization_format is not filesystem.SerializationFormat.TORCH_SAVE:
            raise UnsupportedError(
                f"patch_dcp: FileSystemWriter with {serialization_format} is not supported; "
                "export the checkpoint to safetensors instead"
            )
        settings = _active[-1] if _active else _Settings(_plugins.Places(), (), {})
        self._places = settings.places
        self._directory = os.path.abspath(os.fspath(path))
        options: dict[str, Any] = {"replace": bool(overwrite), "replicas": "warn"}
        super().__init__(
            self._places.checkpoint(path), per_rank=settings.per_rank, **{**options, **settings.options}
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _plugins.PathLike) -> bool:
        return bool(_ORIGINAL["FileSystemWriter"].validate_checkpoint_id(checkpoint_id))

    @property
    def checkpoint_id(self) -> str:
        """The path that DCP was given, absolute."""
        return self._directory

    @property
    def path(self) -> str:
        """The path that DCP was given, absolute."""
        return self._directory

    def reset(self, checkpoint_id: Optional[_plugins.PathLike] = None) -> None:
        if checkpoint_id is not None:
            self._directory = os.path.abspath(os.fspath(checkpoint_id))
            checkpoint_id = self._places.checkpoint(checkpoint_id)
        super().reset(checkpoint_id)

    def prepare_local_plan(self, plan: Any) -> Any:
        # Makes the directory, as DCP's writer does, because programs look for it and put files of their own into it.
        os.makedirs(self._directory, exist_ok=True)
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except InvalidArgumentError as error:
            if self._places.store is not None or "cannot create a store there" not in error.message:
                raise
            raise type(error)(
                f"{error.message}. A save to a directory makes it a store of one checkpoint: save the checkpoint of "
                "the upper directory to another one beside these, or all to one store, with store=DIR",
                rank=error.rank,
            ) from error

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        if self._places.store is None and self._options.get("replace"):
            try:
                # The directory is a store with only this checkpoint. The replaced one is freed now, unless a reader has
                # it open.
                Store(self._directory).gc(grace=0)
            except Error as error:
                log.warning("%s: the space of the replaced checkpoint is not freed: %s", self._directory, error)

    def _rank_values(self, rank: int) -> dict[str, str]:
        if rank != 0:
            return {}
        return {_BESIDE: _values.to_json(_fingerprint(self._directory))}


class FileSystemReader(StorageReader):
    """Takes the place and the parameters of DCP's FileSystemReader.

    Reads the checkpoint that was saved last in the directory: that of tensormount, or that of DCP's own writer.
    """

    def __init__(self, path: _plugins.PathLike, _extension_registry: Any = None) -> None:
        super().__init__()
        self._places = _active[-1].places if _active else _plugins.Places()
        self._directory = os.path.abspath(os.fspath(path))
        self._registry = _extension_registry
        self._chosen: Any = None
        self._theirs = ""  # The fingerprint of DCP's checkpoint at the choice.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _plugins.PathLike) -> bool:
        return bool(_ORIGINAL["FileSystemReader"].validate_checkpoint_id(checkpoint_id))

    @property
    def checkpoint_id(self) -> str:
        """The path that DCP was given, absolute."""
        return self._directory

    @property
    def path(self) -> str:
        """The path that DCP was given, absolute."""
        return self._directory

    def reset(self, checkpoint_id: Optional[_plugins.PathLike] = None) -> None:
        if checkpoint_id is not None:
            self._directory = os.path.abspath(os.fspath(checkpoint_id))
        self._chosen = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if "rank" not in kwargs:
            self._chosen = None  # A load begins.
        reader = self._reader()
        if isinstance(reader, _dcp.Reader):
            if "rank" in kwargs:
                raise InvalidArgumentError(f"{reader._path}: the checkpoint has no metadata of a single rank")
            return reader.read_metadata()
        return reader.read_metadata(*args, **kwargs)

    def set_up_storage_reader(
        self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._reader().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        reader = self._reader()
        plan = reader.prepare_local_plan(plan)
        if isinstance(reader, _dcp.Reader):
            return plan
        return dataclasses.replace(plan, storage_data=self._theirs)

    def prepare_global_plan(self, plans: list[Any]) -> Any:
        _dcp.check_same_source(plans, self._directory)
        return self._reader().prepare_global_plan(plans)

    def read_data(self, plan: Any, planner: Any) -> Any:
        try:
            return self._reader().read_data(plan, planner)
        finally:
            self._chosen = None

    def _reader(self) -> Any:
        if self._chosen is None:
            path = self._places.checkpoint(self._directory)
            self._theirs = _fingerprint(self._directory)
            if not self._theirs or _is_newer(path, self._theirs):
                # If there is no checkpoint at all, the error names `path`.
                self._chosen = _dcp.Reader(path)
            else:
                self._chosen = _ORIGINAL["FileSystemReader"](self._directory, self._registry)
        return self._chosen


class _GivesWriter:
    """Makes the writer when the program calls async_save: the thread or process of the save works when DCP's names
    may be replaced no more, or never were."""

    def execute_save(self, state_dict: Any, **options: Any) -> Any:
        path = options.get("checkpoint_id")
        if options.get("storage_writer") is None and path and FileSystemWriter.validate_checkpoint_id(path):
            options["storage_writer"] = FileSystemWriter(path)
        return super().execute_save(state_dict, **options)  # type: ignore[misc]


_OURS: dict[str, Any] = {
    "FileSystemReader": FileSystemReader,
    "FileSystemWriter": FileSystemWriter,
    **{name: type(name, (_GivesWriter, _ORIGINAL[name]), {}) for name in (_PROCESS, _THREAD)},
}


def _is_newer(path: str, theirs: str) -> bool:
    """Whether the checkpoint at `path` was saved after the one of DCP's own writer with this fingerprint."""
    if not os.path.lexists(path):
        return False
    with open_checkpoint(path) as checkpoint:
        # A checkpoint that DCP wrote later has another fingerprint than the one recorded at the save.
        return bool(checkpoint._rank_values(0).get(_BESIDE, "") == theirs)


def _fingerprint(directory: str) -> str:
    """A hash of the metadata of the checkpoint that DCP's own writer made in a directory; "" if there is none."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return ""
    digest = hashlib.sha256()
    found = False
    for name in names:
        # If DCP uses no collectives, each rank has a metadata file of its own.
        if name == ".metadata" or (name.startswith("__") and name.endswith(".metadata")):
            found = True
            with open(os.path.join(directory, name), "rb") as file:
                digest.update(hashlib.sha256(name.encode() + b"\0" + file.read()).digest())
    return digest.hexdigest() if found else ""
