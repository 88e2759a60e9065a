# SPDX-License-Identifier: Apache-2.0
"""OLMo-core saves to and loads from tensormount:

    import tensormount as tm

    tm.olmo.install()                      # before the trainer is built
    trainer = config.trainer.build(train_module, data_loader)
    trainer.fit()

OLMo-core still decides when to save, which step to resume from and which step to remove. Only the writer and the
reader of `olmo_core.distributed.checkpoint` are replaced, and the functions that recognise and remove a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import olmo_core.distributed.checkpoint
import olmo_core.io
import olmo_core.train.checkpoint
from olmo_core.version import VERSION

from tensormount import _plugins, _save
from tensormount._jobs import log
from tensormount._store import Store
from tensormount.errors import AlreadyExistsError, Error, UnsupportedError
from tensormount.torch import _dcp, _patch

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

__all__ = ["install"]

TESTED = ("3.0",)

_SEAM: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (olmo_core.distributed.checkpoint, "RemoteFileSystemWriter", ("path", "thread_count", "process_group")),
    (olmo_core.distributed.checkpoint, "RemoteFileSystemReader", ("path", "thread_count", "pre_download", "work_dir")),
    (olmo_core.train.checkpoint, "clear_directory", ("dir", "force")),
    (olmo_core.train.checkpoint, "file_exists", ("path",)),
)
_ORIGINAL: dict[str, Any] = {name: _plugins.find("olmo", module, name) for module, name, _ in _SEAM}
_CHECKPOINTER = olmo_core.train.checkpoint.Checkpointer
_original_tmp_dir = _plugins.find("olmo", _CHECKPOINTER, "_get_tmp_dir")

# olmo_core.io keeps its functions for its own use.
_KEEP = (__name__, "olmo_core.io")
# The file by which OLMo-core recognises a checkpoint.
_INDEX = ".metadata"


class _Settings(NamedTuple):
    places: _Places
    options: dict[str, Any]


class install:
    """Makes OLMo-core save to and load from tensormount, until undo() or the end of a `with` block.

    A save to directory P becomes checkpoint P/tm-state; P is STEP/model_and_optim where the trainer saves. A load
    from P takes that, or a checkpoint of OLMo-core itself, whichever was saved last. This holds for all functions of
    olmo_core.distributed.checkpoint, for Checkpointer, and for train modules with a save_state_dict_direct() of
    OLMo-core. The trainer's own files in STEP stay as they are. URLs (gs://, s3://) go to OLMo-core's own writer.

    store     None: each P has its checkpoint in itself. Otherwise the store that has all checkpoints, so that
              steps share unchanged data. RUN/step500/model_and_optim is "step500.model_and_optim", and P/tm-state
              is a symbolic link to it. When OLMo-core removes a step, its checkpoint is removed from the store.
    root      only with `store`: the directory below which all P are; None: the directory that the store is in.
    options   as for `tensormount.torch.Writer`. Unless set, replace is True, and replicas is "warn".

    UnsupportedError if this version of OLMo-core has no such names to replace.
    """

    def __init__(
        self,
        store: Optional[_plugins.PathLike] = None,
        *,
        root: Optional[_plugins.PathLike] = None,
        **options: Unpack[_save.SaveOptions],
    ) -> None:
        _save.read_options(**options)
        self._settings = _Settings(_Places(store, root), {"replace": True, "replicas": "warn", **options})
        _check_seam()
        _active.append(self._settings)
        try:
            _plugins.replace(_ORIGINAL, _OURS, keep=_KEEP)
            setattr(_CHECKPOINTER, "_get_tmp_dir", _get_tmp_dir)
        except BaseException:
            self.undo()
            raise
        if os.environ.get("RANK", "0") == "0":
            where = f"the store {self._settings.places.store}" if store is not None else f"PATH/{_plugins.STATE}"
            _plugins.warn_once(f"olmo: what OLMo-core saves to PATH is a tensormount checkpoint in {where}")

    def undo(self) -> None:
        """Puts OLMo-core's names back, unless another `install` is active. Saves that have begun go on. A second call
        does nothing."""
        for position, settings in enumerate(_active):
            if settings is self._settings:
                del _active[position]
                break
        if not _active:
            _plugins.replace(_OURS, _ORIGINAL, keep=_KEEP)
            setattr(_CHECKPOINTER, "_get_tmp_dir", _original_tmp_dir)

    def __enter__(self) -> install:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


# The settings of each active `install`. The innermost is the last.
_active: list[_Settings] = []


def _check_seam() -> None:
    _plugins.check_version("OLMo-core", VERSION, TESTED)
    for module, name, parameters in _SEAM:
        _plugins.find("olmo", module, name, parameters)
    _plugins.find("olmo", _CHECKPOINTER, "_get_tmp_dir", ("dir",))


def _local(path: _plugins.PathLike) -> str:
    """The absolute path of a local directory that OLMo-core was given."""
    if olmo_core.io.is_url(path):
        raise UnsupportedError(f"{path}: tensormount saves to and loads from local directories only")
    return os.path.abspath(olmo_core.io.normalize_path(path))


class _Places(_plugins.Places):
    """Where the checkpoint of a directory is. Checkpointer.save() saves to a temporary directory, which it renames
    afterwards: a checkpoint in a store is named by the new name."""

    temporary: dict[str, str] = {}

    def checkpoint(self, directory: _plugins.PathLike) -> str:
        parent, name = os.path.split(os.path.abspath(os.fspath(directory)))
        if self.store is not None:
            parent = self.temporary.get(parent, parent)
        return super().checkpoint(os.path.join(parent, name))


def _get_tmp_dir(self: Any, dir: Any) -> Path:
    """Takes the place of Checkpointer._get_tmp_dir."""
    made: Path = _original_tmp_dir(self, dir)
    _Places.temporary.clear()
    if not olmo_core.io.is_url(dir):
        _Places.temporary[os.path.abspath(made)] = _local(dir)
    return made


class _LocalOnly:
    """The writer and the reader: those of a URL are OLMo-core's own."""

    def __new__(cls, path: _plugins.PathLike = "", *args: Any, **options: Any) -> Any:
        if cls is _OURS.get(cls.__name__) and olmo_core.io.is_url(path):
            return _ORIGINAL[cls.__name__](path, *args, **options)
        return super().__new__(cls)


class RemoteFileSystemWriter(_LocalOnly, _patch.FileSystemWriter):
    """Takes the place and the parameters of OLMo-core's RemoteFileSystemWriter.

    The ranks of the save are those of DCP's process group, which OLMo-core gives to DCP, too. The other parameters say
    how OLMo-core writes its own files and change nothing. An existing checkpoint is replaced in one step.
    """

    def __init__(
        self,
        path: _plugins.PathLike,
        thread_count: Optional[int] = None,
        process_count: Optional[int] = None,
        process_group: Any = None,
        throttle_uploads: bool = False,
    ) -> None:
        settings = _active[-1] if _active else _Settings(_Places(), {"replace": True, "replicas": "warn"})
        self._places = settings.places
        self._directory = _local(path)
        _dcp.Writer.__init__(self, self._places.checkpoint(self._directory), **settings.options)

    def reset(self, checkpoint_id: Optional[_plugins.PathLike] = None) -> None:
        super().reset(None if checkpoint_id is None else _local(checkpoint_id))

    def prepare_local_plan(self, plan: Any) -> Any:
        link = os.path.join(self._directory, _plugins.STATE)
        if self._places.store is not None and os.path.isdir(link) and not os.path.islink(link):
            raise AlreadyExistsError(
                f"{link}: was saved without store=, so a link to the store cannot take its place; remove it"
            )
        return super().prepare_local_plan(plan)

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        if self._places.store is not None and self._path is not None:
            # With a link, a step that OLMo-core renames keeps its checkpoint. A directory that OLMo-core has cleared
            # has no link, so its old checkpoint is not loaded.
            new = os.path.join(self._directory, f".{_plugins.STATE}.new")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            os.symlink(os.path.relpath(self._path, self._directory), new)
            os.replace(new, os.path.join(self._directory, _plugins.STATE))


class RemoteFileSystemReader(_LocalOnly, _patch.FileSystemReader):
    """Takes the place and the parameters of OLMo-core's RemoteFileSystemReader.

    Reads the checkpoint that was saved last in the directory: that of tensormount, or OLMo-core's own, for which
    the parameters are used.
    """

    def __init__(self, path: _plugins.PathLike, **options: Any) -> None:
        super().__init__(_local(path))
        self._places = _Places()  # Without the store, because the directory has a link to its checkpoint in the store.
        self._options = options

    def reset(self, checkpoint_id: Optional[_plugins.PathLike] = None) -> None:
        super().reset(None if checkpoint_id is None else _local(checkpoint_id))

    # These two methods take no **kwargs, like those of OLMo-core's own reader.
    def read_metadata(self) -> Any:
        return super().read_metadata()

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        super().set_up_storage_reader(metadata, is_coordinator)

    def _reader(self) -> Any:
        if self._chosen is None:
            path = self._places.checkpoint(self._directory)
            self._theirs = _patch._fingerprint(self._directory)
            ours = os.path.lexists(path) and (not self._theirs or _patch._is_newer(path, self._theirs))
            # If there is no checkpoint at all, the error is OLMo-core's.
            self._chosen = _dcp.Reader(path) if ours else _ORIGINAL["RemoteFileSystemReader"](
                self._directory, **self._options
            )
        return self._chosen


def file_exists(path: _plugins.PathLike) -> bool:
    """Takes the place of olmo_core.io.file_exists where OLMo-core asks whether a directory has a checkpoint."""
    if _ORIGINAL["file_exists"](path):
        return True
    directory, name = os.path.split(olmo_core.io.normalize_path(path))
    return name == _INDEX and not olmo_core.io.is_url(path) and os.path.isdir(os.path.join(directory, _plugins.STATE))


def clear_directory(dir: _plugins.PathLike, force: bool = False) -> None:
    """Takes the place of olmo_core.io.clear_directory, with which OLMo-core removes steps: also removes their
    checkpoints from the store."""
    if _active and not olmo_core.io.is_url(dir):
        _remove_from_store(_active[-1].places, _local(dir))
    _ORIGINAL["clear_directory"](dir, force)


def _remove_from_store(places: _Places, directory: str) -> None:
    """Removes the checkpoints in the store that were saved for a directory, or for a directory in it."""
    if places.store is None or not os.path.isdir(directory):
        return
    try:
        inner = [entry.path for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
        for saved in (directory, *inner):
            link = os.path.join(saved, _plugins.STATE)
            path = places.checkpoint(saved) if os.path.islink(link) else None
            # A link that another program made is not followed.
            if path is not None and os.path.realpath(link) == os.path.realpath(path):
                store = Store(places.store)
                store.remove(os.path.basename(path))
                store.gc()  # Deletes what was removed earlier.
    except (Error, OSError) as error:
        log.warning("%s: its checkpoint is not removed from the store %s: %s", directory, places.store, error)


_OURS: dict[str, Any] = {
    "RemoteFileSystemReader": RemoteFileSystemReader,
    "RemoteFileSystemWriter": RemoteFileSystemWriter,
    "clear_directory": clear_directory,
    "file_exists": file_exists,
}
