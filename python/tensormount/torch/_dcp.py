# SPDX-License-Identifier: Apache-2.0
"""A storage writer and reader for torch.distributed.checkpoint (DCP).

DCP gathers the plans of all ranks at one rank, as pickles, to decide which rank writes what. Our writer keeps
its plan and gives DCP an empty one, because the library decides that, and checks that the ranks together have
every tensor exactly, without a gather. DCP then sends 130 bytes for each rank.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import io
import operator
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
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

from tensormount import _abi, _dtypes, _load, _lost, _paths, _save, _shards, _tree, _values
from tensormount._checkpoint import open as open_checkpoint
from tensormount._group import Group, check_process_group
from tensormount._held import Shards
from tensormount._jobs import begin, log
from tensormount._leaves import dtensors, tensors
from tensormount._state import State
from tensormount.errors import InvalidArgumentError, KeyNotFoundError, LayoutError, StaleError, UnsupportedError
from tensormount.torch import _dcp_names

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

PathLike = Union[str, "os.PathLike[str]"]

# Options of a save that are functions, which cannot be pickled.
_HOOKS = ("on_event", "before_publish", "on_commit")


class _CheckpointPath:
    """The methods by which DCP sets the path of the checkpoint."""

    _path: Optional[str]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Union[str, os.PathLike[str]]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: Union[str, os.PathLike[str], None] = None) -> None:
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)


class Writer(_CheckpointPath, StorageWriter):
    """Saves for torch.distributed.checkpoint.save and async_save, as checkpoint "STORE/NAME".

    When DCP's save has ended, the checkpoint is complete and durable, or does not exist. async_save works by
    thread and by process.

    path      None: the checkpoint_id that DCP is given.
    group     a process group of torch, or a Group; None: the default process group, or this process alone
              if there is none. A process group is looked up again in each process that the writer is
              pickled to. Without a group the ranks are those that DCP saves with (process_group=, no_dist=True);
              with one they must be its ranks.
    per_rank  globs of keys of byte items (values that are not tensors) that each rank saves for itself.
              Other byte items must be equal on all ranks that have them, or the save is refused (option
              `replicas`).
    objects   further bytes by key, such as {"config.json": b"..."}: the same on all ranks that give them. A mount
              shows those of a model's files in hf/.
    options   as for `tensormount.save`: replace, placement, replicas, strategy, page_hashes, ...

    Any planner works, with or without plan caching: the data are those of its resolve_data(). A plan that
    leaves out a key of the planner's state dict is refused (LayoutError); remove keys in the planner's
    set_up_planner() instead.
    """

    def __init__(
        self,
        path: Optional[PathLike] = None,
        *,
        group: Any = None,
        per_rank: Sequence[str] = (),
        objects: Optional[Mapping[str, bytes]] = None,
        **options: Unpack[_save.SaveOptions],
    ) -> None:
        self._path = None if path is None else os.fspath(path)
        self._objects = {key: _save._bytes(key, data) for key, data in (objects or {}).items()}
        if not isinstance(group, Group):
            check_process_group(group, "of a Writer")
            if group is not None and not _has_process_group():
                raise InvalidArgumentError(
                    "group of a Writer: torch.distributed has no default process group any more; call "
                    "init_process_group first, or leave out group="
                )
        self._process_group = None if isinstance(group, Group) else group
        self._group = group if isinstance(group, Group) else None
        self._given_group = isinstance(group, Group)
        self._token: Optional[str] = None  # The name of the group that the Writer made itself.
        self._published = False
        self._per_rank = tuple(per_rank)
        self._options = options
        _save.read_options(**options)  # Wrong options raise here, not at the first save.
        self._plan: Optional[SavePlan] = None
        self._coordinator = False
        self._collective = True
        self._report: Optional[dict[str, Any]] = None

    def __getstate__(self) -> dict[str, Any]:
        if self._given_group or self._process_group is not None:
            raise UnsupportedError(
                "a Writer with a group cannot be pickled; without a group it uses the default "
                "process group of the other process"
            )
        hooks = [name for name in _HOOKS if self._options.get(name) is not None]
        if hooks:
            raise UnsupportedError(f"a Writer with {hooks[0]} cannot be pickled")
        kept = dict(self.__dict__)
        kept["_group"] = kept["_plan"] = kept["_token"] = None
        return kept

    @property
    def report(self) -> Optional[dict[str, Any]]:
        """The report of the last save, as of `tensormount.save`; None before it, and if it failed."""
        return self._report

    # ---- Calls of DCP, in this order ------------------------------------------------------------

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
        self._collective = bool(kwargs.get("use_collectives", True))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._plan = plan
        self._published = False
        # Sends this rank's number and the name of its group to the coordinator, whose prepare_global_plan answers with
        # the ranks that save together and one name.
        known = self._collective and _has_process_group()
        own = (torch.distributed.get_rank(), self._token) if known else None
        return dataclasses.replace(plan, items=[], planner_data={}, storage_data=own)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # usable=True, because a planner that caches plans would otherwise give its ranks the storage_data of an earlier
        # save.
        if not all(isinstance(plan.storage_data, tuple) for plan in plans):
            return [dataclasses.replace(plan, storage_data=None, usable=True) for plan in plans]
        ranks = tuple(rank for rank, _ in (plan.storage_data for plan in plans))
        # A range takes few bytes, whatever the number of ranks.
        members: Sequence[int] = ranks if ranks != tuple(range(len(ranks))) else range(len(ranks))
        # The ranks keep their group if all of them have the same one. Otherwise they make a group with a new random
        # name, so that saves that run at the same time never meet in one group.
        tokens = {token for _, token in (plan.storage_data for plan in plans)}
        (token,) = tokens if len(tokens) == 1 else (None,)
        assigned = (token or secrets.token_hex(8), members)
        return [dataclasses.replace(plan, storage_data=assigned, usable=True) for plan in plans]

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[Any]]:
        mine, self._plan, self._report = self._plan, None, None
        path = self._path
        assert path is not None
        group = self._ranks(plan.storage_data)
        built = State()
        own: Optional[BaseException] = None
        try:
            if mine is None:
                raise InvalidArgumentError("write_data was called before prepare_local_plan")
            whole = _whole_plan(mine, planner)
            _check_complete(whole, planner, self._coordinator)
            self._fill(built, whole, planner, group)
        except Exception as error:
            # The save still begins, so that it fails on all ranks.
            built.fail(error)
            own = error
        given, kept = _save.read_options(**self._options)
        job = begin(
            _save.SaveJob, _abi.library().tm_save_in_place, built, path, group, group._handle(),
            given, kept,
        )
        self._report = _save._await_verdict(job, own)
        self._published = True
        written: Future[list[Any]] = Future()
        written.set_result([])
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        # The checkpoint was published when write_data returned.
        if not self._published:
            raise UnsupportedError(
                f"{type(self).__name__}: its write_data does not save through tensormount's Writer; "
                "derive the class from DCP's own writer"
            )

    # ---- Implementation ------------------------------------------------------------------------------------

    def _ranks(self, assigned: Any) -> Group:
        """The group of this save. `assigned`: its name, and its ranks in the default process group; None: a planner did
        not keep them, or DCP uses no collectives."""
        known = isinstance(assigned, tuple) and len(assigned) == 2
        token, members = assigned if known else (None, ())
        own = not self._given_group and self._process_group is None
        if self._group is not None and not self._given_group and self._group._process != os.getpid():
            self._group = self._token = None  # Made before this process was forked.
        if self._group is not None and own and known and token != self._token:
            self._group.close()
            self._group = None
        if self._group is None:
            if not _has_process_group():
                self._group = _save.saving_group(None)
            elif own and known:
                self._group = Group._of_torch_ranks(members, f"dcp-{token}")
                self._token = token
            else:
                self._group = Group.from_torch(self._process_group)
        if known and len(members) != self._group.size:
            raise InvalidArgumentError(
                f"the Writer's group has {self._group.size} ranks, but DCP saves with {len(members)}"
            )
        return self._group

    def _fill(self, built: State, plan: SavePlan, planner: Any, group: Group) -> None:
        for key, content in self._objects.items():
            built.add_object(key, content)
        shards: list[Any] = []
        leaves = getattr(planner, "state_dict", None) or {}
        plain = _PlainItems(planner, group.rank)
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
                    plain.add(key, leaves.get(key), content)
                continue
            about = item.tensor_data
            if about is None:
                raise LayoutError(f"tensor {key}: its write item has no shape", key=key)
            data = data.detach()
            leaf: Any = leaves.get(key)
            if not _is_strided(leaf):
                shards.append(tensors.shard_of_item(key, about, data, _shards.SAVE))
                continue
            # DCP's planner describes the local tensor as one box, which may be wrong.
            if data.shape != leaf._local_tensor.shape:
                raise LayoutError(
                    f"tensor {key}: the planner's data has the shape {tuple(data.shape)}, but the local tensor "
                    f"has {tuple(leaf._local_tensor.shape)}",
                    key=key,
                )
            memory = tensors.local_memory(key, data, _shards.SAVE)
            shards += [
                tensors.shard_of(memory, tuple(about.size), box.begin, box.extent, box.local_begin)
                for box in dtensors.boxes_of(key, leaf)
            ]
        built.add_shards(shards)
        rank_values = self._rank_values(group.rank)
        mappings = {
            key: list(path)
            for key, path in (plan.planner_data or {}).items()
            if tuple(path) != (key,)
        } if isinstance(plan.planner_data, dict) else {}
        values = plain.values
        if mappings:
            text = _values.to_json(_values.encode(mappings))
            digest = hashlib.sha256(text.encode()).hexdigest()[:32]
            values[f"{_paths.MAPPINGS}.{digest}"] = text
        built.set_values(values, rank_values)

    def _rank_values(self, rank: int) -> dict[str, str]:
        """Values of this rank that are stored with the checkpoint, as JSON by name."""
        return {}


class _PlainItems:
    """Byte items of rank 0 whose values are plain: they become common values, too, so that every program can read them.
    The reader of DCP's own checkpoints does the same (index/foreign/dcp_objects.cc), within the same limits."""

    _METHODS = ("resolve_data", "lookup_object", "transform_object")
    MAX_VALUES = 4096
    MAX_BYTES = 64 << 10
    MAX_ALL_BYTES = 16 << 20

    def __init__(self, planner: Any, rank: int) -> None:
        own = [getattr(type(planner), name, None) for name in self._METHODS]
        # Other planners may write other bytes than those of the value in their state dict.
        self._known = rank == 0 and own == [getattr(DefaultSavePlanner, name) for name in self._METHODS]
        self._left = self.MAX_ALL_BYTES
        self.values: dict[str, str] = {}

    def add(self, key: str, value: Any, content: bytes) -> None:
        if not self._known or len(self.values) == self.MAX_VALUES or key[:1] == "$" or _paths.is_internal(key):
            return
        if len(content) > min(self.MAX_BYTES, self._left):
            return
        text = _values.native_json(value, self.MAX_BYTES)
        if text is not None:
            self.values[key] = text
            self._left -= len(content)


def _has_process_group() -> bool:
    """Whether torch has a default process group in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _whole_plan(plan: SavePlan, planner: Any) -> SavePlan:
    """The whole plan of this rank. A planner that caches plans gives a plan with usable=False instead if nothing has
    changed; its cache then has the whole plan."""
    if getattr(plan, "usable", True):
        return plan
    kept = getattr(SavePlanner, "_cached_save_plan", {})
    whole = kept.get(getattr(planner, "_cached_plans_key", None))
    if whole is None:
        raise LayoutError(
            f"{type(planner).__name__}: its plan refers to a cached plan that was not found; "
            "pass enable_plan_caching=False"
        )
    mappings = getattr(planner, "mappings", None)
    return dataclasses.replace(whole, planner_data=mappings) if mappings else whole


def _check_complete(plan: SavePlan, planner: Any, coordinator: bool) -> None:
    """LayoutError: the plan leaves out keys of the planner's state dict that this rank should save. Planners may
    rename keys, so only the numbers of missing and of unknown keys are compared."""
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
            "state dict has; remove what should not be saved in set_up_planner()",
            key=missing[0],
        )


def _has_part(leaf: Any, coordinator: bool) -> bool:
    """Whether this rank should save something of a leaf of the planner's state dict."""
    from torch.distributed.tensor import DTensor

    if isinstance(leaf, DTensor):
        return bool(leaf._local_tensor.numel())
    if hasattr(leaf, "local_shards"):  # ShardedTensor
        return bool(leaf.local_shards())
    if hasattr(type(leaf), "__create_write_items__"):
        return bool(leaf.__create_write_items__("", leaf))
    # Planners before PyTorch 2.3 let only the coordinator save values that are not tensors.
    return coordinator or isinstance(leaf, torch.Tensor)


class Reader(_CheckpointPath, StorageReader):
    """Loads for torch.distributed.checkpoint.load from anything that `tensormount.open` opens.

    That includes checkpoints of tensormount, DCP, Megatron-Core, Hugging Face and others, whatever their
    sharding. No pickle is executed to list the contents; the planner gets byte items and unpickles them.
    Parts of Megatron-Core's objects are byte items KEY/shard_INDEX_GRID, where old releases left out the
    last number of GRID.

    path      None: the checkpoint_id that DCP is given. "STORE/latest" is resolved once.
    verify    "auto", "leaves", "off". roots: as for `tensormount.open`.
    convert   True: elements may be converted to the requested dtype, as with
              `tensormount.Rule(convert=True)`. Otherwise another dtype is a LayoutError.

    Any planner works: its requests are boxes of a stored chunk. Chunks are those of its metadata, or the
    whole tensor.

    Ranks read independently, so that no group is needed. If a DTensor's part is more than one box
    (_StridedShard), use `LoadPlanner`. With DCP's own planner such a load is refused, because DCP would fill
    in the values of other cells.
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
        _load.read_options(verify=verify, roots=roots)  # Wrong options raise here, not at the first load.
        self._checkpoint: Any = None
        self._resolved: Optional[str] = None  # The path that was opened, which "latest" named.
        self._names: Optional[_dcp_names.DcpNames] = None
        self._common: Optional[dict[str, Any]] = None
        self._object_keys: Optional[frozenset[str]] = None
        self._lost: Optional[_lost.Lost] = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__, "_checkpoint": None, "_names": None, "_common": None, "_object_keys": None,
            "_lost": None,
        }

    def reset(self, checkpoint_id: Union[str, os.PathLike[str], None] = None) -> None:
        super().reset(checkpoint_id)
        self._checkpoint = None
        self._resolved = None
        self._names = None
        self._common = self._object_keys = self._lost = None

    def _opened(self) -> Any:
        if self._checkpoint is None:
            if self._path is None:
                raise InvalidArgumentError("a Reader without a path needs a checkpoint_id")
            self._checkpoint = open_checkpoint(self._resolved or self._path, roots=self._roots)
            self._resolved = self._checkpoint.path
        return self._checkpoint

    def _dcp_names(self) -> _dcp_names.DcpNames:
        """DCP's names for the tensors and values of the checkpoint."""
        if self._names is None:
            checkpoint = self._opened()
            keys, values = list(checkpoint.keys()), checkpoint._values()
            try:
                names = checkpoint._stored_names(values, frozenset(keys))
            except (LayoutError, UnsupportedError):
                names = {}
            found = _dcp_names.dcp_names(keys, checkpoint.objects.names(), values, names)
            # A checkpoint of DCP itself has objects on a grid only if Megatron-Core saved it.
            self._names = found if checkpoint.uuid is not None else _dcp_names.with_parts(found, checkpoint.objects)
        return self._names

    # Takes no **kwargs: otherwise DCP would call it again on the rank where it failed, with rank= and without
    # collectives, while the other ranks wait for this rank in a collective.
    def read_metadata(self) -> Metadata:
        self._close()  # An earlier load that failed may have left the checkpoint open.
        checkpoint = self._opened()
        named = self._dcp_names()
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
                # One chunk, so that the planner makes one request for each local part.
                chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)],
            )
        found.update({fqn: BytesStorageMetadata() for fqn in (*named.values, *named.made)})
        # Lost data have neither shape nor type here. They are listed, so that a plan with them fails in read_data, and
        # not as keys that were never saved, which DCP lets be absent (allow_partial_load).
        self._lost = _lost.lost_data(checkpoint)
        lost = [key for key in self._lost.keys() if key not in found]
        found.update({key: BytesStorageMetadata() for key in lost})
        said = _paths.stored_paths(checkpoint._values()) if lost else {}
        paths = {**{key: _paths.checked_path(key, said.get(key)) for key in lost}, **named.paths}
        return Metadata(state_dict_metadata=found, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._opened()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._opened().uuid)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        check_same_source(plans, self._path)
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        try:
            self._read_data(plan, planner)
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_not_lost(self, checkpoint: Any, plan: LoadPlan, planner: Any) -> None:
        """DataLossError: data of the plan, or of what DCP let be absent from it, are lost."""
        if self._lost is None:  # read_metadata ran on another rank only.
            self._lost = _lost.lost_data(checkpoint)
        if not self._lost:
            return
        named = self._dcp_names()
        there = {*named.tensors, *named.values, *named.made}
        planned = [item.storage_index.fqn for item in plan.items]
        requested = getattr(planner, "state_dict", None)
        absent = [fqn for fqn in (*planned, *(requested or ())) if fqn not in there]
        self._lost.check([fqn for fqn in absent if isinstance(fqn, str)])

    def _close(self) -> None:
        """Closes the checkpoint, which would keep its space after it is replaced or removed."""
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint = self._names = self._common = self._object_keys = self._lost = None

    def _read_data(self, plan: LoadPlan, planner: Any) -> None:
        checkpoint = self._opened()
        _refuse_strided(planner)
        named = self._dcp_names()
        self._check_not_lost(checkpoint, plan, planner)
        built = State()
        shards = []
        copies: list[tuple[Any, Any]] = []
        filled = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            key = named.tensors.get(item.storage_index.fqn, item.storage_index.fqn)
            target = planner.resolve_tensor(item).detach()
            filled.append((item, target))
            stored = checkpoint[key]
            begin, extent = self._box(item, target, stored, planner)
            into = target
            if not _loads_in_place(target):
                into = torch.empty(extent, dtype=target.dtype)
                copies.append((target, into))
            memory = tensors.local_memory(key, into, _shards.LOAD)
            shards.append(
                tensors.shard_of(
                    memory, _dtypes.torch_dims(stored._row, tuple(stored.shape)), begin, extent, memory.begin
                )
            )
        built.add_shards(shards)
        rules = [_load.Rule(convert=True)] if self._convert else []
        with Group.single() as group:
            pending = _load._LoadRequest({})
            pending.group = group
            # Loads from the path that was opened, because "latest" may name another checkpoint since.
            options = _load.read_options(verify=self._verify, rules=rules, roots=self._roots)
            loaded = _load.start(
                built, checkpoint.path, group, group._handle(), options, pending
            ).wait()
        if checkpoint.uuid is not None and loaded.uuid != checkpoint.uuid:
            raise LayoutError(f"{checkpoint.path}: the checkpoint was replaced while it was loaded; load again")
        for target, into in copies:
            target.copy_(into)
        for item, target in filled:
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._bytes(item.storage_index.fqn)))

    def _box(
        self, item: ReadItem, target: Any, stored: Any, planner: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Begin and extent of a request in the whole tensor. LayoutError: the planner's memory or metadata do not fit
        the stored tensor."""
        key = item.storage_index.fqn
        shape = _dtypes.torch_dims(stored._row, tuple(stored.shape))
        extent = tuple(item.lengths)
        if tuple(target.shape) != extent:
            raise LayoutError(
                f"tensor {key}: the planner's memory has the shape {tuple(target.shape)}, but its plan "
                f"says {extent}",
                key=key,
            )
        about = getattr(getattr(planner, "metadata", None), "state_dict_metadata", None) or {}
        size = getattr(about.get(key), "size", None)
        if size is not None and tuple(size) != shape:
            raise LayoutError(
                f"tensor {key}: the planner's metadata has the shape {tuple(size)}, but the stored one is "
                f"{shape}", key=key
            )
        # Offsets of a request are relative to the chunk that it names.
        chunk = item.storage_index.offset or (0,) * len(extent)
        begin = tuple(map(operator.add, chunk, item.storage_offsets))
        dtype = _dtypes.torch_dtype(stored._row)
        if target.dtype != dtype and not self._convert:
            raise LayoutError(
                f"tensor {key}: asked for as {target.dtype}, stored as {dtype}; "
                "Reader(convert=True) converts it",
                key=key,
            )
        return begin, extent

    def _bytes(self, fqn: str) -> bytes:
        """The bytes of a byte item. A plain value of `tensormount.save` is converted by torch.save."""
        checkpoint = self._opened()
        named = self._dcp_names()
        if fqn in named.parts:
            return bytes(checkpoint.object(*named.parts[fqn]))
        if fqn in named.made:
            return _torch_saved(named.made[fqn], fqn)
        key = named.values.get(fqn, fqn)
        if self._object_keys is None:
            self._object_keys = frozenset(checkpoint.objects.names())
        if key in self._object_keys:
            try:
                return bytes(checkpoint.object(key))
            except KeyNotFoundError:
                # The object has a part for each rank (Writer(per_rank=...)).
                rank = torch.distributed.get_rank() if _has_process_group() else 0
                return bytes(checkpoint.object(key, (rank,)))
        if self._common is None:
            self._common = checkpoint.common
        values = self._common
        if key not in values:
            raise KeyNotFoundError(f"no object {key}", key=key)
        return _torch_saved(values[key], key)


def _loads_in_place(t: Any) -> bool:
    """Whether the library writes to the memory of a tensor: that of the host, or of CUDA (of ROCm it does not, whose
    tensors have the same type of device)."""
    place = tensors.place_of(t)
    return place == -1 or (place is not None and getattr(torch.version, "hip", None) is None)


def check_same_source(plans: Sequence[LoadPlan], path: Optional[str]) -> None:
    """StaleError: ranks opened different checkpoints, for example because one was replaced meanwhile."""
    if len({plan.storage_data for plan in plans}) > 1:
        raise StaleError(f"{path}: the ranks opened different checkpoints: load again")


def _torch_saved(value: Any, key: str) -> bytes:
    bad = _tree.first_unreadable(value)
    if bad is not None:
        raise LayoutError(f"{key}: the stored value cannot be read: {bad.reason}", key=key)
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


class LoadPlanner(DefaultLoadPlanner):
    """DCP's default load planner, also for DTensors whose part on a rank is more than one box.

    It also handles DTensors whose boxes differ from their placements (`tensormount.boxes`).
    """

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        stored = self.metadata.state_dict_metadata
        # All such tensors, also those for which DCP's planner has no request on this rank.
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
        for box in dtensors.boxes_of(key, leaf)
        if 0 not in box.extent
    ]


def _is_strided(leaf: Any) -> bool:
    """Whether a leaf is a DTensor whose cells may not be the one box that DCP's planner assumes. If its local tensor
    describes itself, the planner uses that description."""
    from torch.distributed.tensor import DTensor, placement_types

    strided = getattr(placement_types, "_StridedShard", None)
    return (
        strided is not None
        and isinstance(leaf, DTensor)
        and any(type(placement) is strided for placement in leaf.placements)
        and not tensors.describes_itself(type(leaf._local_tensor))
    )


def _refuse_strided(planner: Any) -> None:
    if isinstance(planner, LoadPlanner):
        return
    for key, leaf in (getattr(planner, "state_dict", None) or {}).items():
        if not _is_strided(leaf):
            continue
        found = [
            (box.begin, box.extent)
            for box in dtensors.boxes_of(key, leaf)
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
                "which DCP's default planner reads wrongly; use "
                "planner=tensormount.torch.LoadPlanner()",
                key=key,
            )
