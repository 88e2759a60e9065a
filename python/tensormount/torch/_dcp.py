# SPDX-License-Identifier: Apache-2.0
"""A storage writer and reader for torch.distributed.checkpoint (DCP).

DCP gathers every rank's plan at one rank, as pickles, to find out who writes what. The writer keeps
its plan to itself and brings DCP an empty one: who writes what, and whether the ranks together have
every tensor exactly, the library finds out without a gather. So what DCP sends is 130 bytes a rank.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import io
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

from tensormount import _abi, _dtypes, _load, _save, _shards, _tree, _values
from tensormount._group import Group
from tensormount._held import Shards
from tensormount._jobs import begin, log
from tensormount._state import State
from tensormount.errors import InvalidArgumentError, KeyNotFoundError, LayoutError, UnsupportedError
from tensormount.torch import _paths

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

PathLike = Union[str, "os.PathLike[str]"]

# Options of a save that are functions of the process.
_HOOKS = ("on_event", "before_publish", "on_commit")


class _AtPath:
    """What DCP calls to say which checkpoint is meant."""

    _path: Optional[str]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Union[str, os.PathLike[str]]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: Union[str, os.PathLike[str], None] = None) -> None:
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)


class Writer(_AtPath, StorageWriter):
    """Saves what torch.distributed.checkpoint.save and async_save (by thread and by process) are
    given as checkpoint "STORE/NAME": complete and durable when they return, or not there.

    path      None: the checkpoint_id that DCP is given.
    group     who saves: a process group of torch, or a Group; None: the default process group, or
              this process alone where there is none. A process group is found anew in each process
              that the writer is pickled to. With no_dist=True while there is a default group:
              Group.single().
    per_rank  globs of keys of byte items (what is no tensor) of which each rank has its own; others
              are the same on all ranks that have them, and a save in which they differ is refused.
    options   as of `tensormount.save`: replace, placement, replicas, strategy, page_hashes, ...

    Any planner will do, with or without plan caching: data are what its resolve_data() gives. A plan
    that leaves out a key of the planner's state dict is refused (LayoutError); what should not be saved
    is taken out by the planner's set_up_planner().
    """

    def __init__(
        self,
        path: Optional[PathLike] = None,
        *,
        group: Any = None,
        per_rank: Sequence[str] = (),
        **options: Unpack[_save.SaveOptions],
    ) -> None:
        self._path = None if path is None else os.fspath(path)
        self._process_group = None if isinstance(group, Group) else group
        self._group = group if isinstance(group, Group) else None
        self._given_group = isinstance(group, Group)
        self._per_rank = tuple(per_rank)
        self._options = options
        _save.read_options(**options)  # What is wrong is said now.
        self._plan: Optional[SavePlan] = None
        self._coordinator = False
        self._report: Optional[dict[str, Any]] = None

    def __getstate__(self) -> dict[str, Any]:
        if self._given_group or self._process_group is not None:
            raise UnsupportedError(
                "a writer with a group cannot go to another process; without one it uses the "
                "default process group there"
            )
        hooks = [name for name in _HOOKS if self._options.get(name) is not None]
        if hooks:
            raise UnsupportedError(f"a writer with {hooks[0]} cannot go to another process")
        kept = dict(self.__dict__)
        kept["_group"] = kept["_plan"] = None
        return kept

    @property
    def report(self) -> Optional[dict[str, Any]]:
        """The report of the last save, as of `tensormount.save`; None where it failed, and before."""
        return self._report

    # ---- What DCP calls, in this order ---------------------------------------------------------

    def reset(self, checkpoint_id: Union[str, os.PathLike[str], None] = None) -> None:
        super().reset(checkpoint_id)
        self._plan = None
        self._report = None

    def storage_meta(self) -> Optional[StorageMeta]:
        return StorageMeta(checkpoint_id=self._path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._path is None:
            raise InvalidArgumentError("a Writer without a path needs a checkpoint_id")
        self._coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._plan = plan
        return dataclasses.replace(plan, items=[], planner_data={})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[Any]]:
        mine, self._plan, self._report = self._plan, None, None
        path = self._path
        assert path is not None
        group = self._ranks()
        built = State()
        own: Optional[BaseException] = None
        try:
            if mine is None:
                raise InvalidArgumentError("write_data without prepare_local_plan before")
            whole = _whole_plan(mine, planner)
            _check_complete(whole, planner, self._coordinator)
            self._fill(built, whole, planner, group)
        except Exception as error:
            # The others must hear of it, or they would wait for this rank.
            built.fail(error)
            own = error
        given, kept = _save.read_options(**self._options)
        job = begin(
            _save.SaveJob, _abi.library().tm_save_in_place, built, path, group, group._handle(),
            given, kept,
        )
        self._report = _save._verdict(job, own)
        written: Future[list[Any]] = Future()
        written.set_result([])
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        pass  # It was published when write_data returned, on all ranks.

    # ---- How -------------------------------------------------------------------------------------

    def _ranks(self) -> Group:
        if self._group is None:
            distributed = torch.distributed
            if distributed.is_available() and distributed.is_initialized():
                self._group = Group.from_torch(self._process_group)
            else:
                self._group = _save.saving_group(None)
        return self._group

    def _fill(self, built: State, plan: SavePlan, planner: Any, group: Group) -> None:
        shards: list[Any] = []
        leaves = getattr(planner, "state_dict", None) or {}
        for item in plan.items:
            key = item.index.fqn
            if isinstance(leaves.get(key), Shards):
                raise UnsupportedError(
                    f"tensor {key}: DCP would pickle tensormount.Shards; use tensormount.save", key=key
                )
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                content = data.getvalue() if isinstance(data, io.BytesIO) else bytes(data)
                if any(fnmatch.fnmatchcase(key, glob) for glob in self._per_rank):
                    built.add_object(key, content, (group.rank,), (group.size,))
                else:
                    built.add_object(key, content)
                continue
            about = item.tensor_data
            if about is None:
                raise LayoutError(f"tensor {key}: an item without a shape", key=key)
            data = data.detach()
            leaf: Any = leaves.get(key)
            if not _is_strided(leaf):
                shards.append(_shards.checkpointable_shard(key, about, data, _shards.SAVE))
                continue
            # DCP's planner takes it for one box.
            if data.shape != leaf._local_tensor.shape:
                raise LayoutError(
                    f"tensor {key}: the planner's data are {tuple(data.shape)}, of a local tensor of "
                    f"{tuple(leaf._local_tensor.shape)}",
                    key=key,
                )
            memory = _shards._local_memory(key, data, _shards.SAVE)
            shards += [
                _shards._torch_shard(
                    key, memory, tuple(about.size), box.begin, box.extent, box.local_begin,
                    _shards.UNLABELLED,
                )
                for box in _shards.dtensor_boxes(key, leaf)
            ]
        built.add_shards(shards)
        mappings = {
            key: list(path)
            for key, path in (plan.planner_data or {}).items()
            if tuple(path) != (key,)
        } if isinstance(plan.planner_data, dict) else {}
        if mappings:
            text = _values.to_json(_values.encode(mappings))
            digest = hashlib.sha256(text.encode()).hexdigest()[:32]
            built.set_values({f"{_paths.MAPPINGS}.{digest}": text}, {})


def _whole_plan(plan: SavePlan, planner: Any) -> SavePlan:
    """All that this rank saves. A planner that caches its plans says "as the last time" instead
    (usable=False); what that was, it has kept."""
    if getattr(plan, "usable", True):
        return plan
    kept = getattr(SavePlanner, "_cached_save_plan", {})
    whole = kept.get(getattr(planner, "_cached_plans_key", None))
    if whole is None:
        raise LayoutError(
            f"{type(planner).__name__}: its plan says that nothing has changed, but not since when; "
            "enable_plan_caching=False plans each save anew"
        )
    mappings = getattr(planner, "mappings", None)
    return dataclasses.replace(whole, planner_data=mappings) if mappings else whole


def _check_complete(plan: SavePlan, planner: Any, coordinator: bool) -> None:
    """LayoutError where the planner's state dict has keys of which its plan saves nothing on this rank.
    Planners may rename keys, so that only as many must be there."""
    leaves = getattr(planner, "state_dict", None)
    if not isinstance(leaves, dict):
        return
    planned = {item.index.fqn for item in plan.items}
    missing = [
        key
        for key, leaf in leaves.items()
        if key not in planned and _has_part(leaf, coordinator)
    ]
    renamed = sum(key not in leaves for key in planned)
    if len(missing) > renamed:
        raise LayoutError(
            f"the plan of {type(planner).__name__} leaves out {_load.listed(missing)}, which its "
            "state dict has; what should not be saved is taken out in set_up_planner()",
            key=missing[0],
        )


def _has_part(leaf: Any, coordinator: bool) -> bool:
    """Whether this rank has something to save of a leaf of a state dict."""
    from torch.distributed.tensor import DTensor

    if isinstance(leaf, DTensor):
        return bool(leaf._local_tensor.numel())
    if hasattr(leaf, "local_shards"):  # ShardedTensor
        return bool(leaf.local_shards())
    if hasattr(type(leaf), "__create_write_items__"):
        return bool(leaf.__create_write_items__("", leaf))
    # Planners before PyTorch 2.3 leave values that are no tensors to the coordinator.
    return coordinator or isinstance(leaf, torch.Tensor)


class Reader(_AtPath, StorageReader):
    """Loads through torch.distributed.checkpoint.load from anything that `tensormount.open` opens,
    whatever it was sharded for: checkpoints of tensormount, of DCP itself, Megatron-Core, Hugging
    Face and others. No pickle is read to list what is there; byte items are handed to the planner,
    which unpickles them.

    path      None: the checkpoint_id that DCP is given. "STORE/latest" is looked up once.
    verify    "auto", "leaves", "off". roots: as of `tensormount.open`.
    convert   elements may be converted to the dtype asked for, as by `tensormount.Rule(convert=True)`;
              otherwise another dtype is a LayoutError.

    Any planner will do: its requests are boxes of a stored chunk, and chunks are what its metadata
    says, or the whole tensor.

    Ranks read for themselves, so it needs no group. Where a DTensor's part is more than one box
    (_StridedShard), use `LoadPlanner`; with DCP's own planner such a load is refused, where DCP would
    fill in other cells' numbers.
    """

    def __init__(
        self,
        path: Optional[PathLike] = None,
        *,
        verify: str = "auto",
        convert: bool = False,
        roots: Sequence[str] = (),
    ) -> None:
        self._path = None if path is None else os.fspath(path)
        self._verify = verify
        self._convert = bool(_save.flag("convert", convert))
        self._roots = roots
        _load.read_options(verify=verify, roots=roots)  # What is wrong is said now.
        self._checkpoint: Any = None
        self._names: Optional[_paths.DcpNames] = None
        self._common: Optional[dict[str, Any]] = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checkpoint": None, "_names": None, "_common": None}

    def reset(self, checkpoint_id: Union[str, os.PathLike[str], None] = None) -> None:
        super().reset(checkpoint_id)
        self._checkpoint = None
        self._names = None
        self._common = None

    def _opened(self) -> Any:
        if self._checkpoint is None:
            from tensormount._checkpoint import open as open_checkpoint

            if self._path is None:
                raise InvalidArgumentError("a Reader without a path needs a checkpoint_id")
            self._checkpoint = open_checkpoint(self._path, roots=self._roots)
        return self._checkpoint

    def _named(self) -> _paths.DcpNames:
        """What DCP calls the values of the checkpoint."""
        if self._names is None:
            checkpoint = self._opened()
            keys, values = list(checkpoint.keys()), checkpoint._values()
            try:
                names = checkpoint._stored_names(values, frozenset(keys))
            except (LayoutError, UnsupportedError):
                names = {}
            self._names = _paths.dcp_names(keys, checkpoint.objects.names(), values, names)
        return self._names

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        checkpoint = self._opened()
        named = self._named()
        found: dict[str, Any] = {}
        for fqn, key in named.tensors.items():
            tensor = checkpoint[key]
            try:
                dtype = _dtypes.torch_dtype(tensor._row)
                size = torch.Size(_dtypes.torch_dims(tensor._row, tuple(tensor.shape)))
            except UnsupportedError as error:
                log.warning("tensor %s: left out: %s", key, error)
                continue
            found[fqn] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype),
                size=size,
                # One for all: the planner makes one request a local part of it.
                chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)],
            )
        found.update({fqn: BytesStorageMetadata() for fqn in (*named.values, *named.made)})
        return Metadata(state_dict_metadata=found, planner_data=named.paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._opened()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        checkpoint = self._opened()
        _refuse_strided(planner)
        named = self._named()
        built = State()
        shards = []
        copies: list[tuple[Any, Any]] = []
        tensors = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            key = named.tensors.get(item.storage_index.fqn, item.storage_index.fqn)
            target = planner.resolve_tensor(item).detach()
            tensors.append((item, target))
            stored = checkpoint[key]
            begin, extent = self._box(item, target, stored, planner)
            into = target
            if target.device.type != "cpu":
                into = torch.empty(extent, dtype=target.dtype)
                copies.append((target, into))
            memory = _shards._local_memory(key, into, _shards.LOAD)
            shards.append(
                _shards._torch_shard(
                    key, memory, _dtypes.torch_dims(stored._row, tuple(stored.shape)), begin, extent,
                    (0,) * len(extent),
                    _shards.UNLABELLED,
                )
            )
        built.add_shards(shards)
        rules = [_load.Rule(convert=True)] if self._convert else []
        with Group.single() as group:
            asked = _load._Asked({})
            asked.group = group
            # By the path that was opened: "latest" must not move on meanwhile.
            options = _load.read_options(verify=self._verify, rules=rules, roots=self._roots)
            loaded = _load.start(
                built, checkpoint.path, group, group._handle(), options, asked
            ).wait()
        if checkpoint.uuid is not None and loaded.uuid != checkpoint.uuid:
            raise LayoutError(f"{checkpoint.path}: was replaced while it was loaded")
        for target, into in copies:
            target.copy_(into)
        for item, target in tensors:
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._bytes(item.storage_index.fqn)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _box(
        self, item: ReadItem, target: Any, stored: Any, planner: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where a request begins in the whole tensor, and its extent. LayoutError where the planner's
        memory or metadata are of another tensor than the stored one."""
        key = item.storage_index.fqn
        shape = _dtypes.torch_dims(stored._row, tuple(stored.shape))
        extent = tuple(item.lengths)
        if tuple(target.shape) != extent:
            raise LayoutError(
                f"tensor {key}: the planner's memory is {tuple(target.shape)}, its plan says "
                f"{extent}",
                key=key,
            )
        about = getattr(getattr(planner, "metadata", None), "state_dict_metadata", None) or {}
        size = getattr(about.get(key), "size", None)
        if size is not None and tuple(size) != shape:
            raise LayoutError(
                f"tensor {key}: the planner's metadata say {tuple(size)}, stored is {shape}", key=key
            )
        # Requests count from the begin of the chunk that they name.
        chunk = item.storage_index.offset or (0,) * len(extent)
        begin = tuple(map(operator.add, chunk, item.storage_offsets))
        dtype = _dtypes.torch_dtype(stored._row)
        if target.dtype != dtype and not self._convert:
            raise LayoutError(
                f"tensor {key}: asked for as {target.dtype}, stored as {dtype}; "
                "Reader(convert=True) converts",
                key=key,
            )
        return begin, extent

    def _bytes(self, fqn: str) -> bytes:
        """The bytes of a byte item; of a plain value of `tensormount.save`, what torch.save makes of
        it."""
        checkpoint = self._opened()
        named = self._named()
        if fqn in named.made:
            return _saved(named.made[fqn], fqn)
        key = named.values.get(fqn, fqn)
        if key in checkpoint.objects:
            try:
                return bytes(checkpoint.object(key))
            except KeyNotFoundError:
                # Each rank has its own (Writer(per_rank=...)).
                rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
                return bytes(checkpoint.object(key, (rank,)))
        if self._common is None:
            self._common = checkpoint.common
        values = self._common
        if key not in values:
            raise KeyNotFoundError(f"no object {key}", key=key)
        return _saved(values[key], key)


def _saved(value: Any, key: str) -> bytes:
    bad = _tree.first_unreadable(value)
    if bad is not None:
        raise LayoutError(f"{key}: the stored value cannot be read: {bad.reason}", key=key)
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


class LoadPlanner(DefaultLoadPlanner):
    """DCP's own planner for loads, and DTensors whose part on a rank is more than one box, or another
    than their placements say (`boxes`)."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        stored = self.metadata.state_dict_metadata
        # Also those of which DCP's planner sees nothing on this rank.
        strided = {
            key: leaf
            for key, leaf in self.state_dict.items()
            if _is_strided(leaf) and isinstance(stored.get(key), TensorStorageMetadata)
        }
        items = [item for item in plan.items if item.dest_index.fqn not in strided]
        for key, leaf in strided.items():
            items += _box_items(key, leaf)
        return dataclasses.replace(plan, items=items)


def _box_items(key: str, leaf: Any) -> list[ReadItem]:
    return [
        ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(key),
            dest_offsets=torch.Size(box.local_begin),
            storage_index=MetadataIndex(key, torch.Size([0] * len(box.begin))),
            storage_offsets=torch.Size(box.begin),
            lengths=torch.Size(box.extent),
        )
        for box in _shards.dtensor_boxes(key, leaf)
        if 0 not in box.extent
    ]


def _is_strided(leaf: Any) -> bool:
    """Whether it is a DTensor that may be other cells than the one box that DCP's planner takes it
    for. Where its local tensor describes itself, the planner asks that."""
    from torch.distributed.tensor import DTensor, placement_types

    strided = getattr(placement_types, "_StridedShard", None)
    return (
        strided is not None
        and isinstance(leaf, DTensor)
        and any(type(placement) is strided for placement in leaf.placements)
        and not _shards.is_checkpointable(leaf._local_tensor)
    )


def _refuse_strided(planner: Any) -> None:
    if isinstance(planner, LoadPlanner):
        return
    for key, leaf in (getattr(planner, "state_dict", None) or {}).items():
        if not _is_strided(leaf):
            continue
        found = [
            (box.begin, box.extent)
            for box in _shards.dtensor_boxes(key, leaf)
            if 0 not in box.extent
        ]
        taken = [
            (tuple(chunk.offsets), tuple(chunk.sizes))
            for chunk in leaf.__create_chunk_list__()
            if 0 not in chunk.sizes
        ]
        if found != taken:
            raise UnsupportedError(
                f"tensor {key}: its part on this rank is {len(found)} boxes ({leaf.placements}), "
                "which DCP's planner takes for another one; use "
                "planner=tensormount.torch.LoadPlanner()",
                key=key,
            )
