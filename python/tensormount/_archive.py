# SPDX-License-Identifier: Apache-2.0
"""The common code of the plug-ins for Accelerate and the Hugging Face Trainer: it stores the whole state of a training
run as one checkpoint.

    model, optim, model_1, ...   state dicts, replicated on all ranks, or sharded (FSDP2)
    extra                        state dicts of rank 0: schedulers, objects of the program; DTensors of all ranks
    files/NAME                   objects: files that the framework wrote on rank 0
    rank_files                   an object with one part for each rank: files that the framework wrote there
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed.tensor import DTensor

from tensormount import _directories, _dtypes, _load, _plugins, _save, _torch_values, _tree, _values
from tensormount._checkpoint import open as open_checkpoint
from tensormount._group import Group
from tensormount._state import UNKNOWN_PATH, FailedState
from tensormount.errors import LayoutError
from tensormount.torch import _train

_FILES = "files/"
_RANK_FILES = "rank_files"
_BESIDE = "beside"  # Metadata name of the hash (`Archive.beside`) of the framework's own checkpoint in the directory.

# A model, its optimizers, and whether parameters without gradients are left out.
Sharded = tuple[Any, Sequence[Any], bool]


class Content(NamedTuple):
    """The values that one rank saves. The docstring of this module lists their names in the checkpoint."""

    replicated: dict[str, Any]
    extra: dict[str, Any]
    sharded: Optional[Sharded]
    rank_files: Mapping[str, bytes]
    files: Mapping[str, bytes] = {}


class Loaded(NamedTuple):
    """The values that one rank has loaded. Models and optimizers of `Sharded` are loaded in place, not in `state`."""

    state: dict[str, Any]
    files: dict[str, bytes]
    rank_files: dict[str, bytes]  # The files of rank 0, except those of which this rank has its own.


class Archive:
    """Saves to and loads from the directories of a framework.

    beside    returns a hash of the checkpoint that the framework itself wrote into a directory; "": there is none.
    """

    def __init__(
        self, places: _plugins.Places, background: bool, beside: Callable[[str], str], options: Mapping[str, Any]
    ) -> None:
        _save.read_options(**options)  # Wrong options raise here, not at the first save.
        self.places = places
        self._background = bool(_save.flag("background", background))
        self._beside = beside
        # If replicated values differ between ranks, rank 0's are saved, as by the frameworks, but with a warning.
        self._options: dict[str, Any] = {"replace": True, "replicas": "warn", **options}
        self._job: Optional[_save.SaveJob] = None
        self._finish: Optional[Callable[[], None]] = None
        self._own_group: Optional[Group] = None
        self._process = os.getpid()

    # ---- Saving ----------------------------------------------------------------------------------

    def save(self, directory: str, content: Callable[[], Content], outdated: Sequence[str]) -> None:
        """Saves the checkpoint of a directory. Collective. An error in `content` fails the save on all ranks.
        `outdated`: directories and files that rank 0 removes after the commit."""
        self.wait()
        group = self._group()
        state: Any = {}
        path = UNKNOWN_PATH
        objects: dict[str, bytes] = {}
        own: dict[str, bytes] = {}
        metadata: Optional[dict[str, str]] = None
        replaces = False
        try:
            path = self.places.checkpoint(directory)
            os.makedirs(directory, exist_ok=True)
            found = content()
            state, objects = _packed(found, group.rank)
            own = {_RANK_FILES: _values.to_json(dict(found.rank_files)).encode()}
            if group.rank == 0:
                objects.update({_FILES + name: data for name, data in found.files.items()})
                metadata = {_BESIDE: self._beside(directory)}
                replaces = os.path.lexists(path)
        except Exception as error:
            state = FailedState(error)  # The save still begins, so that it fails on all ranks.

        def finish() -> None:
            if group.rank == 0:
                if replaces:
                    _directories.free(self.places, directory)
                for one in outdated:
                    _directories.remove(self.places, os.path.abspath(one))

        arguments: dict[str, Any] = {"objects": objects, "rank_objects": own, "metadata": metadata, **self._options}
        if self._background:
            self._job, self._finish = _save.async_save(state, path, group, **arguments), finish
        else:
            _save.save(state, path, group, **arguments)
            finish()

    def wait(self) -> None:
        """Waits for a background save and raises its failure."""
        self._leave_parent()
        job, finish, self._job, self._finish = self._job, self._finish, None, None
        if job is not None and finish is not None:
            job.wait()
            finish()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            if self._own_group is not None:
                self._own_group.close()
                self._own_group = None

    # ---- Loading ---------------------------------------------------------------------------------

    def find(self, directory: str) -> Optional[str]:
        """The path of the checkpoint of a directory. None: there is none, or the framework itself has saved a later
        one."""
        path = _directories.find(self.places, os.path.abspath(directory))
        theirs = self._beside(directory) if path is not None else ""
        if path is None or not theirs:
            return path
        with open_checkpoint(path) as checkpoint:
            return path if checkpoint.metadata.get(_BESIDE) == theirs else None

    def load(
        self,
        path: str,
        sharded: Optional[Sharded],
        options: Mapping[str, Any],
        *,
        only: Optional[Container[str]] = None,
        current: Callable[[], dict[str, Any]] = dict,
        then: Callable[[Loaded], None] = lambda loaded: None,
    ) -> Loaded:
        """Loads a checkpoint. Collective.

        options   of torch.load, for values that tensormount.save cannot store.
        only      parts of the state dict ("extra"); None: all but what `sharded` loads.
        current   a state dict whose DTensors are filled in place.
        then      called before the ranks agree that all have read their files; an error in it fails all ranks.
        """
        group = self._group()
        request: Any = {}
        found = Loaded({}, {}, {})
        if sharded is not None and only is None:
            only = ("extra",)
        uuid: Optional[str] = None
        held: dict[str, bytes] = {}
        try:
            with open_checkpoint(path) as checkpoint:
                uuid = checkpoint.uuid
                places = dict(_dtensors("", current()))
                request = {
                    key: places[key] if key in places else _empty(tensor)
                    for key, tensor in checkpoint.items()
                    if only is None or key.partition(".")[0] in only
                }
                found.state.update(_tree_of(checkpoint, request, only))
                for name in checkpoint.objects.names():
                    if name.startswith(_FILES):
                        found.files[name[len(_FILES) :]] = checkpoint.objects[name]
                    elif name != _RANK_FILES:
                        held[name] = checkpoint.objects[name]
                (size,) = checkpoint.objects.grid(_RANK_FILES)
                for rank in [0, group.rank] if group.rank < size else [0]:
                    found.rank_files.update(_values.from_json(checkpoint.objects[_RANK_FILES, rank]))
            then(found)
        except Exception as error:
            request = FailedState(error)  # The load still begins, so that it fails on all ranks.
        loaded = _load.load_with(request, path, group, {})
        _load.check_same_uuid(uuid, loaded.uuid)
        if sharded is not None:
            model, optimizers, ignore_frozen = sharded
            done = _train.load(path, model=model, optim=optimizers or None, group=group, ignore_frozen=ignore_frozen)
            _load.check_same_uuid(uuid, done.uuid)
        return found._replace(state=_torch_values.join(found.state, held, **options))

    def _leave_parent(self) -> None:
        """In a forked child: forgets the parent's save and group."""
        if self._process != os.getpid():
            self._process, self._job, self._finish, self._own_group = os.getpid(), None, None, None

    def _group(self) -> Group:
        self._leave_parent()
        if self._own_group is None:
            distributed = torch.distributed
            several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
            self._own_group = Group.from_torch() if several else Group.single()
        return self._own_group


def numbered(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """The values as NAME, NAME_1, NAME_2, ..., as Accelerate numbers its files."""
    return {numbered_name(name, i): value for i, value in enumerate(values)}


def numbered_name(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


class Folder(str):
    """A directory for files that a framework writes or reads."""

    def read(self) -> dict[str, bytes]:
        """The files by their paths below the directory."""
        found = {}
        for folder, _, names in os.walk(self):
            for name in names:
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    found[os.path.relpath(path, self)] = file.read()
        return found


@contextlib.contextmanager
def scratch(files: Mapping[str, bytes] = {}) -> Iterator[Folder]:  # noqa: B006
    """A temporary directory with these files."""
    with tempfile.TemporaryDirectory(prefix="tensormount-") as folder:
        for name, data in files.items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(data)
        yield Folder(folder)


def _packed(content: Content, rank: int) -> tuple[Any, dict[str, bytes]]:
    """The state dict that this rank saves, and values that are objects. Ranks other than 0 have only tensors of which
    they write a part, without a structure, so that their other values are never mixed with rank 0's."""
    whole: dict[str, Any] = dict(content.replicated)
    if content.sharded is not None:
        model, optimizers, ignore_frozen = content.sharded
        state = _train._state_to_save(model, optimizers or None, None, ignore_frozen)
        if isinstance(state, FailedState):
            raise state.error
        whole.update(state)
    if rank == 0:
        return _torch_values.split({**whole, "extra": content.extra})
    tree, _ = _torch_values.split(whole)
    tensors = dict(_tree.flatten(tree).tensors)
    tensors.update(_dtensors("extra.", content.extra))
    return tensors, {}


def _dtensors(prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """The DTensors of a state dict, by the keys that `tensormount.save` gives them."""
    for key, item in tree.items():
        if isinstance(item, dict):
            yield from _dtensors(f"{prefix}{key}.", item)
        elif isinstance(item, DTensor):
            yield f"{prefix}{key}", item


def _empty(tensor: Any) -> Any:
    """Memory for a whole tensor of a checkpoint."""
    return torch.empty(_dtypes.torch_dims(tensor._row, tuple(tensor.shape)), dtype=_dtypes.torch_dtype(tensor._row))


def _tree_of(checkpoint: Any, tensors: Mapping[str, Any], only: Optional[Container[str]]) -> dict[str, Any]:
    """The saved state dict, or some parts of it, with these tensors in the place of the stored ones."""
    values = checkpoint._values()
    names = checkpoint._stored_names(values, frozenset(checkpoint.keys()))
    missing = None if only is None else lambda *_: _tree.ABSENT
    trees = [
        _tree.unflatten(values[name], tensors, values, ranks, names=names, missing=missing)
        for name, ranks in checkpoint._structures_by_rank(values).items()
    ]
    state: dict[str, Any] = _tree.merge_trees(trees)
    if only is not None:
        state = {name: part for name, part in state.items() if name in only}
    bad = _tree.first_unreadable(state)
    if bad is not None:
        raise LayoutError(f"{checkpoint.path}: a stored value cannot be read: {bad.reason}")
    return state
