# SPDX-License-Identifier: Apache-2.0
"""Lightning saves to and loads from tensormount: a CheckpointIO for `Trainer` and `Fabric`.

    Trainer(plugins=[tm.lightning.CheckpointIO()], ...)

The strategies that save one file (single device, DDP) use it. ModelParallelStrategy and FSDPStrategy use
torch.distributed.checkpoint: run them within `tensormount.torch.patch_dcp()`. Tested with Lightning 2.6.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Optional

import lightning
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as _CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from tensormount import _directories, _plugins, _save, _torch_values
from tensormount._checkpoint import open as open_checkpoint
from tensormount._group import Group
from tensormount._jobs import log
from tensormount.errors import AlreadyExistsError, CheckpointNotFoundError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

__all__ = ["CheckpointIO"]

TESTED = ("2.6",)

# Lightning's default plugin, for its files and for URLs.
_THEIRS: Any = TorchCheckpointIO()
# The file with which Lightning's distributed strategies mark a directory as a checkpoint of theirs.
_DISTRIBUTED = "meta.pt"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class CheckpointIO(_CheckpointIO):
    """A plugin of Lightning's `Trainer` and `Fabric` that saves checkpoints of tensormount.

    A save to PATH ("out/epoch=0-step=10.ckpt") makes PATH a directory that has the checkpoint "tm-state". PATH
    appears when the checkpoint is complete and durable. A second save to PATH replaces the checkpoint in one step.
    Files that Lightning itself wrote are loaded, too. URLs are left to Lightning.

    store       None: each PATH has its checkpoint in itself. Otherwise the store that has all checkpoints, so
                that they share unchanged data; PATH is then an empty directory.
    root        only with `store`: the directory below which all PATHs are; None: the directory that the store
                is in. PATH "out/last.ckpt" is the checkpoint "last..ckpt" of the store "out/store".
    background  True: save_checkpoint returns when the tensors are copied. Files are removed after the saves that
                were begun before. A failure is logged, and raised by the next call, or by teardown(), which
                Lightning calls at the end of each run.
    options     as for `tensormount.save`. Unless set, replace is True. Those of one save can be passed as
                `storage_options` of `Trainer.save_checkpoint`.

    Values that tensormount cannot store by themselves (objects among the hyperparameters) are kept as bytes of
    torch.save, and are loaded by torch.load with Lightning's `weights_only`.
    """

    def __init__(
        self,
        store: Optional[_plugins.PathLike] = None,
        *,
        root: Optional[_plugins.PathLike] = None,
        background: bool = False,
        **options: Unpack[_save.SaveOptions],
    ) -> None:
        super().__init__()
        _plugins.check_version("Lightning", lightning.__version__, TESTED)
        for name, parameters in (
            ("save_checkpoint", ("checkpoint", "path", "storage_options")),
            ("load_checkpoint", ("path", "map_location", "weights_only")),
            ("remove_checkpoint", ("path",)),
            ("teardown", ()),
        ):
            _plugins.find("tensormount.lightning", _CheckpointIO, name, parameters)
        _save.read_options(**options)  # Wrong options raise here, not at the first save.
        self._places = _plugins.Places(store, root)
        self._background = bool(_save.flag("background", background))
        self._options: dict[str, Any] = {"replace": True, **options}
        self._worker: Optional[_Worker] = None
        self._own_group: Optional[Group] = None
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # Strategies that start processes pickle the plugin. Its thread and its group belong to this process.
        return {**self.__dict__, "_worker": None, "_own_group": None}

    # ---- Calls of Lightning -----------------------------------------------------------------------

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: _plugins.PathLike,
        storage_options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """Saves as PATH; called on rank 0 only. Lightning's `storage_options` are options of `tensormount.save`."""
        directory = _local(path)
        if directory is None:
            _plugins.warn_once(f"{os.fspath(path)}: a URL, so Lightning's own CheckpointIO saves there, and not tensormount")
            _THEIRS.save_checkpoint(checkpoint, path, storage_options)
            return
        options = {**self._options, **(storage_options or {})}
        _save.read_options(**options)
        self._leave_parent()
        self._wait(directory)
        if not options["replace"] and os.path.lexists(directory):
            raise AlreadyExistsError(f"save {directory}: exists already; pass replace=True to replace it")
        state, objects = _torch_values.split(checkpoint)
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        target = self._places.checkpoint(directory)
        staging: Optional[str] = None
        if self._places.store is None and not _is_own(directory):
            staging = _directories.sibling(directory)
            shutil.rmtree(staging, ignore_errors=True)  # Left by a process that was killed.
            target = os.path.join(staging, _plugins.STATE)
        if self._own_group is None:
            self._own_group = Group.single()
        if not self._background:
            with _removed_after_failure(staging):
                _save.save(state, target, self._own_group, objects=objects, **options)
                self._publish(directory, staging)
            return
        with _removed_after_failure(staging):
            job = _save.async_save(state, target, self._own_group, objects=objects, **options)
        if self._worker is None:
            self._worker = _Worker()

        def finish() -> None:
            with _removed_after_failure(staging):
                job.wait()
                self._publish(directory, staging)

        def give_up() -> None:
            with contextlib.suppress(Exception), _removed_after_failure(staging):
                job.wait()
                raise UnsupportedError("an earlier save failed")

        self._worker.submit(directory, finish, give_up)

    def load_checkpoint(
        self,
        path: _plugins.PathLike,
        map_location: Any = None,
        weights_only: Optional[bool] = None,
    ) -> dict[str, Any]:
        """Loads PATH, on each rank that calls it. `map_location` as for torch.load; None: to host memory."""
        directory = _local(path)
        self._leave_parent()
        if directory is not None:
            self._wait()
            directory = _resolved(directory)
            if os.path.isfile(os.path.join(directory, _DISTRIBUTED)):
                raise UnsupportedError(
                    f"load {directory}: was saved by a distributed strategy of Lightning; load it with "
                    "ModelParallelStrategy or FSDPStrategy, within tensormount.torch.patch_dcp()"
                )
            is_file = os.path.exists(directory) and not os.path.isdir(directory)
            found = None if is_file else _directories.find(self._places, directory)
            if found is not None:
                with open_checkpoint(found) as checkpoint:
                    state = _moved(checkpoint.state(torch=True), map_location)
                    # torch.load's own default would put tensors on the devices that they were saved from.
                    loaded: dict[str, Any] = _torch_values.join(
                        state, checkpoint.objects,
                        map_location="cpu" if map_location is None else map_location, weights_only=weights_only,
                    )
                    return loaded
            if not is_file:
                raise CheckpointNotFoundError(
                    f"Checkpoint file not found: {os.fspath(path)}: no file of Lightning, and no checkpoint "
                    f"{self._places.checkpoint(directory)}"
                )
        location = {} if map_location is None else {"map_location": map_location}
        theirs: dict[str, Any] = _THEIRS.load_checkpoint(path, weights_only=weights_only, **location)
        return theirs

    def remove_checkpoint(self, path: _plugins.PathLike) -> None:
        """Removes PATH and its checkpoint. A pinned checkpoint is kept, with a warning. In the background mode it is
        removed once the saves that were begun before have succeeded."""
        directory = _local(path)
        self._leave_parent()
        if directory is None:
            _THEIRS.remove_checkpoint(path)
        elif self._worker is None:
            _directories.remove(self._places, directory)
        else:
            self._worker.check()
            self._worker.submit(directory, lambda: _directories.remove(self._places, directory))

    def teardown(self) -> None:
        """Waits for the saves and removals under way. Raises the first failure that no call has raised."""
        self._leave_parent()
        self._wait()
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    # ---- Further calls --------------------------------------------------------------------------------

    def as_file(self, path: _plugins.PathLike, weights_only: Optional[bool] = None) -> io.BytesIO:
        """The checkpoint at PATH as the file that Lightning itself would have written, in memory.

        For functions that read such a file: `Model.load_from_checkpoint(plugin.as_file(PATH))`.
        """
        out = io.BytesIO()
        torch.save(self.load_checkpoint(path, weights_only=weights_only), out)
        out.seek(0)
        return out

    # ---- Implementation ------------------------------------------------------------------------------------

    def _leave_parent(self) -> None:
        """In a forked child: forgets the worker, whose thread is in the parent only, and the parent's group."""
        if self._process != os.getpid():
            self._process, self._worker, self._own_group = os.getpid(), None, None

    def _wait(self, directory: Optional[str] = None) -> None:
        """Waits for the saves and removals under way; with `directory` only if one of them is of this directory. Raises
        failures."""
        if self._worker is not None:
            self._worker.wait(directory)

    def _publish(self, directory: str, staging: Optional[str]) -> None:
        """Makes the directory appear, once its checkpoint is complete."""
        if staging is None and not _is_own(directory):  # With a store, for a new directory.
            staging = _directories.sibling(directory)
            os.makedirs(staging, exist_ok=True)
        if staging is not None:
            with _removed_after_failure(staging):
                _put(staging, directory)
        else:
            os.utime(directory)  # Lightning loads the "last" checkpoint with the newest time.
            _directories.free(self._places, directory)


class _Worker:
    """A thread that finishes background saves and removes files, one after the other. After a failure it does nothing
    more until the failure was raised, so that no older checkpoint is removed for a save that failed."""

    def __init__(self) -> None:
        # Its thread is joined at the end of the interpreter.
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "tensormount-lightning")
        self._under_way: dict[concurrent.futures.Future[None], str] = {}
        self._failure: Optional[BaseException] = None

    def submit(self, directory: str, call: Callable[[], None], give_up: Callable[[], None] = lambda: None) -> None:
        """`give_up` is called instead of `call` after a failure."""

        def run() -> None:
            if self._failure is not None:
                give_up()
                return
            try:
                call()
            except BaseException as error:
                log.error("%s: %s", directory, error)
                self._failure = error

        self._under_way[self._pool.submit(run)] = directory

    def wait(self, directory: Optional[str]) -> None:
        """Waits for all calls; with a directory only if a call for this directory is under way. Raises the failure."""
        for future in [future for future in self._under_way if future.done()]:
            del self._under_way[future]
        if directory is None or directory in self._under_way.values():
            concurrent.futures.wait(self._under_way)
            self._under_way.clear()
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            concurrent.futures.wait(self._under_way)  # After a failure they only remove what they began.
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        self._pool.shutdown()


def _local(path: _plugins.PathLike) -> Optional[str]:
    """The absolute path; None: it is a URL of another file system."""
    if not os.fspath(path):
        raise InvalidArgumentError("path='': the path of the checkpoint is empty; pass a path such as 'out/last.ckpt'")
    fs, local = url_to_fs(os.fspath(path))
    return os.path.abspath(local) if isinstance(fs, LocalFileSystem) else None


def _is_own(path: str) -> bool:
    """Whether there is a directory in which a checkpoint can be replaced."""
    return _directories.is_directory(path) and not os.path.isfile(os.path.join(path, _DISTRIBUTED))


def _resolved(directory: str) -> str:
    """The directory that a link leads to: ModelCheckpoint(save_last="link") makes "last.ckpt" a link."""
    for _ in range(40):
        if not os.path.islink(directory):
            break
        directory = os.path.normpath(os.path.join(os.path.dirname(directory), os.readlink(directory)))
    return directory


def _put(staging: str, directory: str) -> None:
    """Renames a directory to its final path, durably. An existing file or directory is replaced in one step, if the
    file system can exchange two names."""
    if os.path.lexists(directory):
        try:
            _exchange(staging, directory)
            old = staging
        except OSError:
            old = f"{staging}-old"
            shutil.rmtree(old, ignore_errors=True)  # Left by a process that was killed.
            os.rename(directory, old)
            try:
                os.rename(staging, directory)
            except BaseException:
                os.rename(old, directory)
                raise
        shutil.rmtree(old) if _directories.is_directory(old) else os.unlink(old)
    else:
        os.rename(staging, directory)
    descriptor = os.open(os.path.dirname(directory), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _removed_after_failure(staging: Optional[str]) -> Iterator[None]:
    """Removes the incomplete data of a save if the block fails."""
    try:
        yield
    except BaseException:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _exchange(first: str, second: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), first)


def _moved(value: Any, map_location: Any) -> Any:
    """The state dict with its tensors, which are in host memory, where torch.load would put them."""
    if map_location is None:
        return value
    if isinstance(value, torch.Tensor):
        if callable(map_location):
            storage = map_location(value.untyped_storage(), "cpu")
            return value if storage is None else value.to(storage.device)
        return value.to(map_location.get("cpu", "cpu") if isinstance(map_location, dict) else map_location)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _moved(item, map_location)
    elif type(value) in (list, tuple):
        return type(value)(_moved(item, map_location) for item in value)
    return value
