# SPDX-License-Identifier: Apache-2.0
"""`install` and `SaveStrategy`, which replace the functions of megatron.core.dist_checkpointing that save and read."""

from __future__ import annotations

import fcntl
import io
import os
import tempfile
import threading
from glob import escape
from typing import TYPE_CHECKING, Any, Optional

import megatron.core
import torch
from megatron.core.dist_checkpointing import dict_utils, mapping, serialization
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from tensormount import _abi, _plugins, _save, _values
from tensormount._checkpoint import open as open_checkpoint
from tensormount._group import Group
from tensormount._held import Shards
from tensormount._jobs import begin, log
from tensormount._shards import SAVE
from tensormount._state import State, cache_of
from tensormount._store import Store, derive
from tensormount._tasks import block_signals
from tensormount.errors import Error, LayoutError, UnsupportedError
from tensormount.megatron import _optimizer
from tensormount.torch import _dcp, _dcp_names, _patch

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

TESTED = ("0.16.1", "0.19.2")

_SaveStrategy = _plugins.find("megatron", strategies, "TorchDistSaveShardedStrategy")
_LoadStrategy = _plugins.find("megatron", strategies, "TorchDistLoadShardedStrategy")
_READER = "_get_filesystem_reader"
_PARAM_STATE = "sharded_param_state_fully_reshardable"
_LOAD_PARAM_STATE = "load_parameter_state_from_fully_reshardable"

# What `install` replaces: owner, name and parameters. _OURS has the functions that take their places.
_SEAM: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (strategies, _READER, ("checkpoint_dir", "cache_metadata")),
    *([(serialization, _READER, ("checkpoint_dir",))] if hasattr(serialization, _READER) else []),
    (_SaveStrategy, "save", ("sharded_state_dict", "checkpoint_dir")),
    (_SaveStrategy, "async_save", ("sharded_state_dict", "checkpoint_dir")),
    (_LoadStrategy, "remove_sharded_tensors", ("checkpoint_dir", "key_prefix")),
    (DistributedOptimizer, _PARAM_STATE, ("model_sharded_state_dict", "is_loading", "metadata")),
    (DistributedOptimizer, _LOAD_PARAM_STATE, ("state_dict",)),
)
_ORIGINAL: dict[str, Any] = {name: _plugins.find("megatron", owner, name) for owner, name, _ in _SEAM}
# Methods that a class inherits. `undo` deletes our method, so that the inherited one is found again.
_INHERITED = [(owner, name) for owner, name, _ in _SEAM if name not in vars(owner)]


class install:
    """Makes megatron.core.dist_checkpointing save to and load from tensormount, until undo() or the end of a `with`
    block.

    A save to directory P (RUN/iter_0001000) becomes checkpoint P/tm-state. A load from P takes that, or a torch_dist
    checkpoint of Megatron itself, whichever was saved last. This holds for every strategy of class
    TorchDistSaveShardedStrategy, also within FullyParallelSaveStrategyWrapper, and for all functions that load.
    URLs (msc://...) go to Megatron's own writer.

    DistributedOptimizer saves its state as "fully_reshardable" (--dist-ckpt-optim-fully-reshardable) without a gather:
    each rank saves and loads the part that it owns. Its checkpoints load on any mesh, and into Megatron itself.

    store     None: each P has its checkpoint in itself. Otherwise the store that has all checkpoints, so that
              steps share unchanged data. RUN/iter_0001000 is "iter_0001000".
    root      only with `store`: the directory below which all P are; None: the directory that the store is in.
    gather_optimizer   True: DistributedOptimizer gathers its state, as without tensormount.
    options   as for `tensormount.save`. Unless set, replace is True, and replicas is "warn".

    UnsupportedError if this version of Megatron-Core has no such names to replace.
    """

    def __init__(
        self,
        store: Optional[_plugins.PathLike] = None,
        *,
        root: Optional[_plugins.PathLike] = None,
        gather_optimizer: bool = False,
        **options: Unpack[_save.SaveOptions],
    ) -> None:
        self._saves = _Saves(store, root, options)
        self._gather_optimizer = bool(_save.flag("gather_optimizer", gather_optimizer))
        _check_seam()
        _active.append(self)
        try:
            for owner, name, _ in _SEAM:
                setattr(owner, name, _OURS[name])
        except BaseException:
            self.undo()
            raise
        if os.environ.get("RANK", "0") == "0":
            where = f"the store {self._saves.places.store}" if store is not None else f"PATH/{_plugins.STATE}"
            _plugins.warn_once(f"megatron: what Megatron-Core saves to PATH is a tensormount checkpoint in {where}")

    def undo(self) -> None:
        """Puts Megatron's names back, unless another `install` is active. Saves in the background go on. A second call
        does nothing."""
        if self in _active:
            _active.remove(self)
        if _active:
            return
        for owner, name, _ in _SEAM:
            if (owner, name) not in _INHERITED:
                setattr(owner, name, _ORIGINAL[name])
            elif name in vars(owner):
                delattr(owner, name)

    def __enter__(self) -> install:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class SaveStrategy(strategies.TorchDistSaveShardedStrategy):
    """A strategy for megatron.core.dist_checkpointing.save that saves to tensormount:

        checkpointing_context["save_strategy"] = tm.megatron.SaveStrategy()

    Loads need `install`.

    store, root, options   as for `install`.
    keep_only_main_replica   False: all ranks that hold a tensor write a part of it, so that
              FullyParallelSaveStrategyWrapper is not needed. Replicas are compared: unless set, `replicas` is
              "rotating", which fails the save if they differ. A save in the background copies all replicas.
              True: only main replicas are copied and written, as by Megatron's own strategy. With that wrapper each
              rank has some of them.
    """

    def __init__(
        self,
        store: Optional[_plugins.PathLike] = None,
        *,
        root: Optional[_plugins.PathLike] = None,
        keep_only_main_replica: bool = False,
        **options: Unpack[_save.SaveOptions],
    ) -> None:
        _check_seam()
        only_main = bool(_save.flag("keep_only_main_replica", keep_only_main_replica))
        super().__init__("torch_dist", 1, keep_only_main_replica=only_main)
        if not only_main:
            options.setdefault("replicas", "rotating")
        self._saves = _Saves(store, root, options)

    def save(self, sharded_state_dict: Any, checkpoint_dir: _plugins.PathLike) -> None:
        self._saves.save(self, sharded_state_dict, checkpoint_dir)

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: _plugins.PathLike, *args: str, **named: str
    ) -> Any:
        return self._saves.async_save(self, sharded_state_dict, checkpoint_dir, *args, **named)


# The innermost `install` is the last.
_active: list[install] = []


def _check_seam() -> None:
    _plugins.check_version("Megatron-Core", megatron.core.__version__, TESTED)
    for owner, name, parameters in (
        *_SEAM,
        (serialization, "save", ("sharded_state_dict", "checkpoint_dir", "sharded_strategy", "async_sharded_save")),
        (serialization, "load", ("sharded_state_dict", "checkpoint_dir", "sharded_strategy")),
        (_SaveStrategy, "__init__", ("backend", "version", "keep_only_main_replica")),
        (async_utils, "AsyncRequest", ("async_fn", "async_fn_args", "finalize_fns")),
        (dict_utils, "nested_values", ()),
        (mapping, "ShardedTensor", ("global_shape", "global_offset", "prepend_axis_num", "flattened_range")),
        (mapping, "ShardedObject", ("global_shape", "global_offset")),
        (mapping, "is_main_replica", ("replica_id",)),
    ):
        _plugins.find("megatron", owner, name, parameters)


def _save_now(self: Any, sharded_state_dict: Any, checkpoint_dir: _plugins.PathLike) -> None:
    """Takes the place of TorchDistSaveShardedStrategy.save."""
    if _is_url(checkpoint_dir):
        _ORIGINAL["save"](self, sharded_state_dict, checkpoint_dir)
    else:
        _active[-1]._saves.save(self, sharded_state_dict, checkpoint_dir)


def _save_in_background(
    self: Any, sharded_state_dict: Any, checkpoint_dir: _plugins.PathLike, *args: str, **named: str
) -> Any:
    """Takes the place of TorchDistSaveShardedStrategy.async_save."""
    if _is_url(checkpoint_dir):
        return _ORIGINAL["async_save"](self, sharded_state_dict, checkpoint_dir, *args, **named)
    return _active[-1]._saves.async_save(self, sharded_state_dict, checkpoint_dir, *args, **named)


def _reader_of(checkpoint_dir: _plugins.PathLike, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of _get_filesystem_reader, which all functions of Megatron that load call."""
    path = _ours(checkpoint_dir)
    return _ORIGINAL[_READER](checkpoint_dir, *args, **kwargs) if path is None else _Reader(path)


def _remove_tensors(self: Any, checkpoint_dir: _plugins.PathLike, key_prefix: str) -> None:
    """Takes the place of TorchDistLoadShardedStrategy.remove_sharded_tensors, which one rank calls."""
    path = _ours(checkpoint_dir)
    if path is None:
        _ORIGINAL["remove_sharded_tensors"](self, checkpoint_dir, key_prefix)
        return
    with open_checkpoint(path) as checkpoint:
        found = any(key.startswith(key_prefix) for key in (*checkpoint.keys(), *checkpoint.objects.names()))
    if found:
        derive(path, os.path.basename(path), drop=[escape(key_prefix) + "*"], replace=True)
    else:
        log.warning('%s: no key begins with "%s": nothing is removed', path, key_prefix)


def _param_state(
    self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> Any:
    """Takes the place of DistributedOptimizer.sharded_param_state_fully_reshardable."""
    if _active[-1]._gather_optimizer:
        return _ORIGINAL[_PARAM_STATE](self, model_sharded_state_dict, is_loading, metadata)
    try:
        return _optimizer.sharded_state(self, model_sharded_state_dict, is_loading)
    except Error as error:
        # The other ranks would wait for this one. A save finds the error in the state dict, and fails on all ranks; a
        # load finds that this key is not stored.
        log.error("the state of the distributed optimizer cannot be saved or loaded: %s", error)
        key = f"tensormount.refused.{torch.distributed.get_rank()}"
        return {0: {"refused": mapping.ShardedObject(key, error, (1,), (0,))}}


def _load_param_state(self: Any, state_dict: Any) -> None:
    """Takes the place of DistributedOptimizer.load_parameter_state_from_fully_reshardable."""
    load = _optimizer.load_state if _optimizer.is_state(state_dict) else _ORIGINAL[_LOAD_PARAM_STATE]
    load(self, state_dict)


_OURS: dict[str, Any] = {
    "save": _save_now,
    "async_save": _save_in_background,
    "remove_sharded_tensors": _remove_tensors,
    _READER: _reader_of,
    _PARAM_STATE: _param_state,
    _LOAD_PARAM_STATE: _load_param_state,
}


def _ours(directory: _plugins.PathLike) -> Optional[str]:
    """The checkpoint to load for a directory; None: Megatron's own, for URLs and if that was saved later."""
    if _is_url(directory):
        return None
    path = _active[-1]._saves.places.checkpoint(directory)
    theirs = _patch._fingerprint(os.path.abspath(os.fspath(directory)))
    # If there is no checkpoint at all, the error names `path`.
    return path if not theirs or _patch._is_newer(path, theirs) else None


def _is_url(path: _plugins.PathLike) -> bool:
    return "://" in str(path)


# ---- Saving --------------------------------------------------------------------------------------


class _Saves:
    """The saves of an `install` or a `SaveStrategy`."""

    def __init__(
        self, store: Optional[_plugins.PathLike], root: Optional[_plugins.PathLike], options: _save.SaveOptions
    ) -> None:
        _save.read_options(**options)  # Wrong options raise here, not at the first save.
        self.places = _plugins.Places(store, root)
        self._options: _save.SaveOptions = {"replace": True, "replicas": "warn", **options}

    def save(self, strategy: Any, sharded_state_dict: Any, directory: _plugins.PathLike) -> None:
        _save._await_verdict(*self._begin("tm_save_in_place", strategy, sharded_state_dict, directory))
        self._free_replaced(directory)

    def async_save(
        self, strategy: Any, sharded_state_dict: Any, directory: _plugins.PathLike, async_strategy: str = "nvrx"
    ) -> Any:
        """An AsyncRequest of Megatron, or of the package that `async_strategy` names. The save runs in this process,
        whose tensors are copied when this returns; the function of the request only waits for its verdict."""
        modules = getattr(strategies, "get_async_strategy", None)
        request = async_utils.AsyncRequest if modules is None else modules(async_strategy)[1]["AsyncRequest"]
        job, own = self._begin("tm_save_async", strategy, sharded_state_dict, directory)
        # `own` is raised by `finish`: the other ranks get a request, too, and finalize it in collective calls, which a
        # rank whose save raises here would never join.
        try:
            path = _lock_until_end(job)
        except BaseException:
            job.cancel()  # Cancels the save on all ranks.
            raise

        def finish() -> None:
            _save._await_verdict(job, own)
            self._free_replaced(directory)

        return request(_wait_for_lock, (path,), [finish])

    def _begin(
        self, function: str, strategy: Any, sharded_state_dict: Any, directory: _plugins.PathLike
    ) -> tuple[_save.SaveJob, Optional[BaseException]]:
        """A save, and the error of this rank's state dict or None."""
        if _is_url(directory):
            raise UnsupportedError(f"{directory}: tensormount saves to local directories only")
        path = self.places.checkpoint(directory)
        group = _ranks()
        built = State()
        own: Optional[BaseException] = None
        try:
            _fill(built, sharded_state_dict, strategy.keep_only_main_replica, group)
            if group.rank == 0:
                beside = _values.to_json(_patch._fingerprint(os.fspath(directory)))
                built.set_values({}, {_patch._BESIDE: beside})
        except Exception as error:
            # The save still begins, so that it fails on all ranks.
            built.fail(error)
            own = error
        given, kept = _save.read_options(**self._options)
        call = getattr(_abi.library(), function)
        return begin(_save.SaveJob, call, built, path, group, group._handle(), given, kept), own

    def _free_replaced(self, directory: _plugins.PathLike) -> None:
        if self.places.store is not None or not self._options["replace"] or torch.distributed.get_rank() != 0:
            return
        try:
            # The directory is a store with only this checkpoint. The replaced one is freed now, unless a reader has it
            # open.
            Store(directory).gc(grace=0)
        except Error as error:
            log.warning("%s: the space of the replaced checkpoint is not freed: %s", directory, error)


# The default process group, and the group of its ranks.
_group: list[Any] = []


def _ranks() -> Group:
    world = torch.distributed.group.WORLD
    if not _group or _group[0] is not world:
        if _group:
            _group.pop().close()
            _group.clear()
        _group[:] = [world, Group.from_torch()]
    group: Group = _group[1]
    return group


def _fill(built: State, sharded_state_dict: Any, only_main: bool, group: Group) -> None:
    """Adds this rank's parts of the tensors and objects. Main replicas come first.

    A copy is added only if `only_main` is False and the parts of its tensor form a grid, on all ranks the same:
    replicas must be equal boxes. Copies of objects are left out: they may differ (random states)."""
    shapes: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, list[Any]] = {}
    objects: dict[Any, list[Any]] = {}
    leaves = [(mapping.is_main_replica(one.replica_id), one) for one in dict_utils.nested_values(sharded_state_dict)]
    for main, leaf in sorted(leaves, key=lambda pair: not pair[0]):
        if isinstance(leaf.data, Error):
            raise leaf.data  # `_param_state` has put the error into the state dict.
        if isinstance(leaf, mapping.ShardedObject):
            if main:
                index, grid = _numbers(leaf.global_offset), _numbers(leaf.global_shape)
                objects.setdefault((leaf.key, index, grid), []).append(leaf.data)
            continue
        if not isinstance(leaf, mapping.ShardedTensor):
            raise UnsupportedError(f"{leaf.key}: a {type(leaf).__name__} cannot be saved", key=leaf.key)
        with_copies = not only_main and leaf.has_regular_grid
        parts = tensors.get(leaf.key, [])
        if not main and (not with_copies or _numbers(leaf.global_offset) in (part[0] for part in parts)):
            continue
        if shapes.setdefault(leaf.key, _numbers(leaf.global_shape)) != _numbers(leaf.global_shape):
            raise LayoutError(
                f"tensor {leaf.key}: has two global shapes, {shapes[leaf.key]} and {tuple(leaf.global_shape)}",
                key=leaf.key,
            )
        label = None if not with_copies else "main" if main else "copy"
        tensors.setdefault(leaf.key, parts).append((_numbers(leaf.global_offset), _data(leaf), label))
    items = {}
    for key, parts in tensors.items():
        try:
            items[key] = Shards(shapes[key], parts)
        except LayoutError as error:
            raise LayoutError(f"tensor {key}: {error.message}", key=key) from None
    built.add_tensors(items.items(), SAVE, cache_of(group), group.size)
    for (key, index, grid), data in objects.items():
        content = io.BytesIO()
        torch.save(data, content)  # `data` is a list, as in Megatron's own checkpoints.
        built.add_object(key, content.getvalue(), index, grid)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values))


def _data(leaf: Any) -> Any:
    """The local tensor of a ShardedTensor, with its prepended axes."""
    if leaf.data is None:
        raise LayoutError(f"tensor {leaf.key}: its ShardedTensor has no data", key=leaf.key)
    if leaf.flattened_range is not None:
        raise UnsupportedError(
            f"tensor {leaf.key}: ShardedTensors with a flattened range are not supported; set the sharding of the "
            "distributed optimizer to fully_reshardable or dp_reshardable",
            key=leaf.key,
        )
    data = leaf.data.detach()
    if type(data) is not torch.Tensor and hasattr(data, "dequantize"):
        # A tensor of Transformer Engine. Megatron's own writer stores its dequantised values, too.
        data = data.dequantize()
    return data[(None,) * leaf.prepend_axis_num] if leaf.prepend_axis_num else data


def _lock_until_end(job: _save.SaveJob) -> str:
    """The path of a file that is locked until the save has its verdict. Locks of this kind belong to a process: its
    forked children do not inherit them, and they end with it."""
    descriptor, path = tempfile.mkstemp(prefix="tensormount-save-")

    def unlock() -> None:
        os.unlink(path)
        os.close(descriptor)

    def wait() -> None:
        block_signals()
        try:
            job._wait(job._poll, None, "over")  # Unlike job.wait(), it does not count as noticing a failure.
        finally:
            unlock()

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        threading.Thread(target=wait, name="tensormount-save", daemon=True).start()
    except BaseException:
        unlock()
        raise
    return path


def _wait_for_lock(path: str) -> None:
    """Returns when the file is not locked any more, or does not exist. Megatron calls this in a process of its own,
    which shows by its end that the save is over."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


# ---- Loading -------------------------------------------------------------------------------------


class _Reader(_dcp.Reader):
    """Gives parts of objects the names that Megatron has for them: KEY/shard_INDEX_GRID."""

    def __init__(self, path: _plugins.PathLike) -> None:
        super().__init__(path, convert=True)  # Megatron converts dtypes without an error.
        self._metadata: Any = None

    def read_metadata(self) -> Any:
        # Megatron reads the metadata before and after a load.
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata

    def _dcp_names(self) -> Any:
        if self._names is None:
            named = _dcp_names.with_parts(super()._dcp_names(), self._opened().objects)
            self._names = named._replace(paths={})
        return self._names
