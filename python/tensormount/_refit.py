# SPDX-License-Identifier: Apache-2.0
"""`refit`: brings tensors from one checkpoint to another, and reads only those that differ."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

from tensormount import _abi, _dtypes, _load, _names, _shards, _tree
from tensormount._checkpoint import Checkpoint, PathLike
from tensormount._checkpoint import open as open_checkpoint
from tensormount._leaves import registry
from tensormount._progress import Progress
from tensormount._save import _group
from tensormount._state import FailedState
from tensormount.errors import (
    InvalidArgumentError,
    KeyNotFoundError,
    LayoutError,
    NotFoundError,
    StaleError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

# Options of a load that would let a target keep values of neither checkpoint.
_REFUSED = ("rules", "not_stored", "not_requested", "strict_exempt", "validate")
# The file of a mount that lists the stored tensors of a mapped one names at most so many.
_MAX_STORED_KEYS = 1000


class Refit:
    """The result of `refit`.

    path, uuid   of the checkpoint whose values the targets have now; uuid None: a format of another program.
    keys         keys of the tensors that this rank read, in the order of the targets.
    unchanged    keys of the targets that are equal in both checkpoints.
    nbytes       bytes of this rank's parts of the tensors in `keys`.
    report       numbers of the load, as of `Loaded.report`; empty if nothing was read.
    """

    def __init__(self, path: str, uuid: Optional[str], keys: list[str], unchanged: list[str], nbytes: int,
                 report: dict[str, Any]) -> None:
        self.path = path
        self.uuid = uuid
        self.keys = keys
        self.unchanged = unchanged
        self.nbytes = nbytes
        self.report = report

    def __repr__(self) -> str:
        return (
            f"<tensormount.Refit {self.uuid or self.path}: {len(self.keys)} tensors read, {self.nbytes} bytes; "
            f"{len(self.unchanged)} unchanged>"
        )


def refit(
    targets: Any,
    old: Union[PathLike, Checkpoint],
    new: Union[PathLike, Checkpoint],
    group: Any = None,
    *,
    progress: Progress = None,
    **options: Unpack[_load.LoadOptions],
) -> Refit:
    """Loads checkpoint `new` into tensors that hold the values of checkpoint `old`, and reads only what differs.

    A tensor is unchanged if both checkpoints have the same dtype, shape and digest for it. Without a digest (formats
    of other programs) it counts as changed. A tensor that a name map puts together is unchanged if all stored tensors
    from which it comes are.

    targets   a dict of tensors by key, a nested state dict, or a module. Tensors on any device and DTensors, as for
              `load`. Plain values in it stay as they are.
    old, new  checkpoints as for `open`, or opened ones. The targets must hold the values of `old`: that is not
              checked.
    group     Group; None: this process alone. All ranks call it, each with its own targets.
    progress  as for `load`.
    options   of `load`: roots; names, as_, from_, numbers and config for sources that are not opened yet; verify,
              method, exchange_group, exchange_via, threads, liveness, arrival, total, on_event.

    Before anything is read it raises KeyNotFoundError for a target that one of the checkpoints lacks, LayoutError for
    one of another shape or dtype, and CheckpointNotFoundError. Other errors are those of `load`; the contents of the
    changed targets are undefined then: load `new` as a whole. StaleError: `new` was replaced meanwhile.

        >>> import numpy, tensormount as tm
        >>> tm.save({"a": numpy.zeros(4), "b": numpy.ones(4)}, "STORE/old", replace=True)["tensors"]
        2
        >>> tm.save({"a": numpy.zeros(4), "b": numpy.full(4, 7.0)}, "STORE/new", replace=True)["tensors"]
        2
        >>> held = {"a": numpy.zeros(4), "b": numpy.ones(4)}
        >>> tm.refit(held, "STORE/old", "STORE/new").keys
        ['b']
        >>> held["b"].tolist()
        [7.0, 7.0, 7.0, 7.0]
    """
    group = _group(group)
    refused = [name for name in _REFUSED if name in options]
    if refused:
        raise InvalidArgumentError(f"refit has no option {refused[0]}: use load")
    with contextlib.ExitStack() as opened:
        source: Any = new
        try:
            roots, names = options.get("roots") or (), _load.name_options(options)
            before = _opened(old, roots, names, opened)
            after = _opened(new, roots, names, opened)
            source = after.path
            request = _Request(targets, before, after, group.size)
        except Exception as error:
            if group.size > 1:  # The load fails on all ranks then.
                _load.load_with(FailedState(error), _path(source), group, options)
            raise
        if not request.changed and group.size == 1:
            return Refit(after.path, after.uuid, [], request.unchanged, 0, {})
        options = options.copy()
        options["roots"] = after._roots
        for name in _names.NameOptions.__annotations__:
            options.pop(name, None)  # type: ignore[misc]
        options.update(_names.options_of(after._names))  # type: ignore[typeddict-item]
        loaded = _load.load_with(dict(request.changed), source, group, options, progress=progress)
        if after.uuid is not None and loaded.uuid != after.uuid:
            raise StaleError(
                f"{after.path}: the checkpoint was replaced while it was read (uuid {after.uuid}, now {loaded.uuid}): "
                "load it as a whole"
            )
        request.copy_repeated()
        nbytes = registry.nbytes_of(request.changed.values())
        return Refit(after.path, after.uuid, list(request.changed), request.unchanged, nbytes, loaded.report)


class _Request:
    """The targets by stored key, those that changed, and checks that need no data."""

    def __init__(self, targets: Any, before: Checkpoint, after: Checkpoint, world_size: int) -> None:
        keys = after.keys()
        names = after._stored_names(after._values(), frozenset(keys))
        flat = _tree.flatten(_state_of(targets), names, frozenset(keys), _shards.LOAD)
        if flat.registered:
            raise UnsupportedError(
                f"{flat.registered[0].key}: refit takes arrays and tensors, no values of registered kinds"
            )
        stored = _checked(after, flat.tensors, "")
        held = _checked(
            before, flat.tensors, "; the targets must hold this checkpoint's values: load the new one as a whole"
        )
        for key, leaf in flat.items():
            _check_shape(after.path, key, stored[key], leaf, world_size)
        _load._check_merged(flat, after, world_size)
        was, now = fingerprints(before, held), fingerprints(after, stored)
        same = {key for key in flat.tensors if was[key] is not None and was[key] == now[key]}
        self.unchanged = [key for key in flat.tensors if key in same]
        self.changed = {key: leaf for key, leaf in flat.tensors.items() if key not in same}
        self._repeated = [(key, leaf) for key, leaf in flat.repeated if key not in same]

    def copy_repeated(self) -> None:
        """Targets in memory of their own whose stored tensor another target has, too (tied in the checkpoint)."""
        for key, leaf in self._repeated:
            first = self.changed[key]
            if hasattr(leaf, "detach"):
                leaf.detach().copy_(first.detach())
            else:
                leaf[...] = first


def _checked(checkpoint: Checkpoint, keys: Collection[str], advice: str) -> dict[str, Facts]:
    """`facts` of these keys. KeyNotFoundError, which names all keys that are not stored."""
    found = facts(checkpoint, keys)
    absent = [key for key in keys if key not in found]
    if absent:
        raise KeyNotFoundError(f"{checkpoint.path}: not stored: {_load.listed(absent)}{advice}", key=absent[0])
    return found


def _check_shape(path: str, key: str, stored: Facts, leaf: Any, world_size: int) -> None:
    row = _dtypes.info(stored.dtype)
    if tuple(leaf.shape) == stored.shape and str(leaf.dtype).rpartition(".")[2] in (row.numpy, row.torch):
        return  # A tenth of the time that a description takes.
    for shard in registry.describe(key, leaf, _shards.LOAD, world_size)[:1]:
        if shard.global_shape != stored.shape or shard.dtype != row.number:
            raise LayoutError(
                f"{key}: the target is {_dtypes.info(shard.dtype).name} {list(shard.global_shape)}, the tensor in "
                f"{path} is {row.name} {list(stored.shape)}",
                key=key,
            )


def _state_of(targets: Any) -> Any:
    from tensormount import _stateful

    if not isinstance(targets, (dict, list, tuple)) and hasattr(targets, "state_dict"):
        return dict(targets.state_dict())
    return _stateful.with_states(targets) if _stateful.has_states(targets) else targets


def _path(source: Any) -> Any:
    return source.path if isinstance(source, Checkpoint) else source


def _opened(source: Any, roots: Any, names: _names.NameOptions, opened: contextlib.ExitStack) -> Checkpoint:
    if isinstance(source, Checkpoint):
        return source
    return opened.enter_context(open_checkpoint(source, roots=roots, **names))


# ---- Fingerprints --------------------------------------------------------------------------------


class Facts(NamedTuple):
    """What the index says of a tensor. `dtype`: a number of c.h; `digest` None: none is stored."""

    dtype: int
    shape: tuple[int, ...]
    digest: Optional[int]


def facts(checkpoint: Checkpoint, keys: Iterable[str]) -> dict[str, Facts]:
    """The facts of those of these tensors that exist. Makes no `Tensor`, which takes three times as long."""
    found: dict[str, Facts] = {}
    info = _abi.TensorInfo(struct_size=ctypes.sizeof(_abi.TensorInfo))
    address, handle, look_up = ctypes.addressof(info), checkpoint._opened(), checkpoint._lib.tm_checkpoint_tensor
    for key in keys:
        status = look_up(handle.address, key.encode("utf-8", "surrogateescape"), address)
        if status:
            try:
                _abi.fail(status, {_abi.TM_NOT_FOUND: KeyNotFoundError}, key)
            except KeyNotFoundError:
                continue
        found[key] = Facts(info.dtype, tuple(info.shape[: info.rank]), info.digest if info.has_digest else None)
    return found


def fingerprints(checkpoint: Checkpoint, tensors: Mapping[str, Facts]) -> dict[str, Optional[tuple[Any, ...]]]:
    """For each of these tensors a value that is equal only for equal tensors, without reading any data; None: nothing
    is known.

    It has the digest of the tensor; for a tensor that a name map puts together, the name map and the digests of all
    stored tensors from which it comes.
    """
    found: dict[str, Optional[tuple[Any, ...]]] = {
        key: None if tensor.digest is None else tensor for key, tensor in tensors.items()
    }
    if checkpoint._names is None:
        return found
    together = [key for key, known in found.items() if known is None]
    if together:
        with open_checkpoint(checkpoint.path, roots=checkpoint._roots) as stored:
            if stored.uuid is not None and stored.uuid == checkpoint.uuid:
                every = facts(stored, stored.keys())
                for key, sources in _sources(checkpoint, together):
                    parts = tuple((source, every.get(source)) for source in sources)
                    if all(part is not None and part.digest is not None for _, part in parts):
                        found[key] = (*tensors[key], key, checkpoint._names, parts)
    return found


def _sources(checkpoint: Checkpoint, keys: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """The mapped tensors among these, with the keys of the stored tensors from which each comes."""
    files = checkpoint.files()
    for key in keys:
        try:
            about: Mapping[str, Any] = json.loads(files.read(f"extents/{key}.json"))
        except NotFoundError:
            continue  # A key that cannot be a path.
        sources = list(about.get("put_together_from", ()))
        if 0 < len(sources) < _MAX_STORED_KEYS:
            yield key, sources
