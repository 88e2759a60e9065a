# SPDX-License-Identifier: Apache-2.0
"""Loading: `load`, `async_load`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from glob import escape
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypedDict, Union, cast

from tensormount import _abi, _key_map, _lost, _paths, _shards, _tree
from tensormount._checkpoint import open as open_checkpoint
from tensormount._jobs import EventHook, Job, begin, log, set_hook, set_times
from tensormount._leaves import ObjectPart, registry
from tensormount._names import NameOptions, Names, name_map
from tensormount._progress import Progress, check_progress
from tensormount._save import _await_verdict, _choice_number, _group, flag
from tensormount._state import (
    UNKNOWN_PATH,
    FailedState,
    State,
    cache_of,
    path_bytes,
    take_json,
    text,
    texts,
)
from tensormount.errors import (
    Error,
    InvalidArgumentError,
    KeyNotFoundError,
    LayoutError,
    StaleError,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

PathLike = Union[str, "os.PathLike[str]"]

_STRICT = ("raise", "log", "return", "ignore")  # The library counts from 1; 0 is its default.
_VERIFY = ("auto", "off", "leaves", "end")
_PATHS = ("auto", "direct", "exchange")
_VIA = ("auto", "host", "devices")
_GROW = ("error", "zero", "keep")
_GRID = ("error", "by-index", "first", "skip")
_FAILURES = {_abi.TM_INVALID_ARGUMENT: LayoutError}
# Bytes of two stored tensors that are compared at a time.
_COMPARED_BYTES = 4 << 20

_fnmatch = ctypes.CDLL(None).fnmatch
_fnmatch.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]


class Loaded:
    """The result of a load. The bytes are in the request's tensors.

    state       the request, with plain values of the checkpoint in place of its own.
    kept        paths of plain values of the request that are not stored and kept their values, as
                `not_stored`, `strict_exempt` or `optional` allow.
    report      numbers, as a dict: bytes_wanted, bytes_read, plan_seconds, ...
    uuid        the uuid of the checkpoint.
    common      plain values by name; rank_common: {rank: the values of this rank}, or, if the save had none
                for it, those of rank 0.
    metadata    values that describe the checkpoint as a whole.
    objects     the bytes requested by `objects`, by (key, index).
    not_stored  with `not_stored="return"` the requested tensors and plain values that are not stored
                ("optim.param_groups.0.lr"), and keys that `optional` of tensormount.torch.load let be absent.
    not_requested   with `not_requested="return"` the stored tensors that no rank requested.
    skipped     keys of which nothing was loaded: not stored, or left out by a rule.
    converted   keys whose elements were converted, by a rule.
    uncovered   cells that the stored tensor lacks, by a rule: (key, begin, extent, zeroed).
    """

    state: Any
    kept: list[str]
    report: dict[str, Any]
    uuid: str
    common: dict[str, Any]
    rank_common: dict[int, dict[str, Any]]
    metadata: dict[str, Any]
    objects: dict[tuple[str, tuple[int, ...]], bytes]
    not_stored: list[str]
    not_requested: list[str]
    skipped: list[str]
    converted: list[str]
    uncovered: list[tuple[str, tuple[int, ...], tuple[int, ...], bool]]
    # Names that this rank requested and that are not stored, for any value of `not_stored`.
    _absent: frozenset[str]

    def __repr__(self) -> str:
        return f"<tensormount.Loaded {self.uuid}: {self.report['bytes_wanted']} bytes>"


class LoadOptions(TypedDict, total=False):
    """Options of `load`, `async_load` and tensormount.torch.load; see `load`."""

    not_stored: str
    not_requested: str
    strict_exempt: Sequence[str]
    rules: Sequence[Rule]
    validate: bool
    verify: str
    method: str
    exchange_group: int
    exchange_via: str
    threads: int
    roots: Sequence[str]
    names: Optional[Names]
    as_: Optional[str]
    from_: Optional[str]
    numbers: Optional[Mapping[str, int]]
    config: Optional[Union[Mapping[str, Any], str, "os.PathLike[str]"]]
    liveness: Optional[float]
    arrival: Optional[float]
    total: Optional[float]
    on_event: Optional[EventHook]


class LoadJob(Job):
    """A background load, made by `async_load`."""

    _word = "load"
    _wait_function = "tm_load_job_wait"
    _fd_function = "tm_load_job_fd"
    _cancel_function = "tm_load_job_cancel"
    _free_function = "tm_load_job_free"
    _failures = _FAILURES

    _request: _LoadRequest

    def bytes_read(self) -> int:
        """Bytes that this rank has read from storage so far. Never waits."""
        self._check_process()
        return int(self._lib.tm_load_job_bytes_read(self._address))

    def _bytes_done(self) -> tuple[int, int]:
        return self.bytes_read(), self._request.bytes()

    def _take_report(self, address: int) -> Loaded:
        try:
            return _loaded(self._lib, address, self._request)
        finally:
            self._free_report(address)

    def _free_report(self, address: int) -> None:
        self._lib.tm_load_report_free(address)


class Rule:
    """Allows a load to differ from the stored tensor or object, for keys that match a glob.

    The first rule that matches a key applies. '*' in the glob also matches '/'.

    shrink    requested extents may be smaller: the tail is left out.
    grow      requested extents are larger: "error", "zero", or "keep" the request's cells.
    convert   elements may be converted to the requested dtype.
    grid      an object that is stored on another grid: "error", "by-index", "first", "skip".
    """

    def __init__(
        self,
        keys: str = "*",
        *,
        shrink: bool = False,
        grow: str = "error",
        convert: bool = False,
        grid: str = "error",
    ) -> None:
        self.keys = keys
        self.shrink = shrink
        self.grow = _choice_number("grow", grow, _GROW)
        self.convert = convert
        self.grid = _choice_number("grid", grid, _GRID)


class _LoadRequest:
    """A request while its load is under way."""

    def __init__(self, request: Any) -> None:
        self.request = request
        # The caller's request, if it has objects with a state_dict(), whose states are in `request`.
        self.given: Any = None
        self.objects: list[tuple[str, tuple[int, ...]]] = []
        self.group: Any = None
        self.stored_uuid: Optional[str] = None  # The uuid of the checkpoint that this rank opened before.
        self._bytes: Optional[int] = None
        self.flat: Optional[_tree.FlatTree] = None
        self.key_map: Optional[_key_map.Rules] = None
        self.optional: tuple[str, ...] = ()
        self.roots: Sequence[str] = ()
        self.names: NameOptions = {}
        # `absent`: requested plain values that are not stored, and requested tensors that `key_map` renamed or dropped.
        # `missing`: those of them that `Loaded.not_stored` reports.
        self.absent: list[str] = []
        self.missing: list[str] = []

    def stored_values(self, values: Mapping[str, Any], ranks: Mapping[str, Any]) -> Any:
        """The plain values of a checkpoint (`_stored_state`) under the names of the request."""
        wanted = self.flat is not None and self.flat.requests_values()
        stored = _stored_state(values, ranks, self.request if wanted else None)
        if self.key_map is None or not wanted:
            return stored
        return _key_map.renamed_values(self.request, stored, self.key_map)

    def bytes(self) -> int:
        """Bytes of the tensors that this rank wants."""
        if self._bytes is None:
            leaves = self.flat.items() if self.flat is not None else ()
            self._bytes = registry.nbytes_of(leaf for _, leaf in leaves)
        return self._bytes


def load(
    request: Any,
    source: PathLike,
    group: Any = None,
    *,
    objects: Iterable[Union[str, tuple[str, tuple[int, ...]]]] = (),
    key_map: Optional[_key_map.Rules] = None,
    progress: Progress = None,
    **options: Unpack[LoadOptions],
) -> Loaded:
    """Loads a checkpoint into the tensors of `request`, in place.

    Collective: every rank of `group` calls it with what it wants. The number of ranks, the sharding and the
    program that saved `source` may differ.

    request   a state dict like the saved one, or a part of it. Its tensors are filled; its plain values
              are replaced (in dicts and lists in place; a tuple is replaced as a whole). Objects with
              state_dict() and load_state_dict() get their states.
    source    "STORE/NAME", "STORE/latest", or a checkpoint of another program.
    group     Group; None: this process alone.
    objects   keys of objects to load; (key, index) for a part of an object on a grid.
    key_map   rules that rename stored tensors and plain values to the names in `request`, as for --map:
              [{"prefix": "model.", "to": ""}]. A key that a rule renames or drops is not stored under its
              old name any more.
    progress  called during the call with the bytes that this rank has read and wants (other ranks may read
              some of them); True: draws a bar if tqdm is installed.

    Options, which must be the same on all ranks, except on_event, exchange_group and threads:

    not_stored      "raise", "log", "return" or "ignore" requested tensors and plain values that are not
                    stored.
    not_requested   the same for stored tensors that no rank requests ("ignore").
    strict_exempt   globs of keys ("extra.*") to which neither applies.
    rules     `Rule`s that allow other shapes, dtypes and grids; otherwise these are a LayoutError.
    validate  True: the requests must cover every tensor exactly, as in a save.
    verify    "auto", "leaves", "end", "off": which hashes prove the bytes, and when (docs/loading.md, also on
              `method`).
    method    "auto", "direct": each rank reads for itself; "exchange": ranks send each other the data that they read.
    exchange_group   ranks with equal numbers exchange with each other.
    exchange_via     "host"; "devices": from GPU to GPU by NCCL; "auto": devices if much is exchanged and it
                     is possible.
    threads   threads for reads of this rank; 0: its share of the cores of the machine, at most 12.
    roots     as for `open`.
    names, as_, from_, numbers, config
              a name map, as for `open`: the request has the keys that it gives. Cannot be used with key_map.
    liveness, arrival, total, on_event   as for `save`.

    Returns `Loaded`. Raises KeyNotFoundError for keys that are not stored, CheckpointNotFoundError,
    LayoutError (another shape or dtype; one tensor under two keys whose stored tensors differ; a value
    that cannot be read), DataLossError, PeerTimeout, PeerLost, CancelledError.

    After an exception the contents of the tensors are undefined. After an exception from a signal handler
    they may be written to until the read under way has ended.

        >>> import numpy, tensormount as tm
        >>> state = {"w": numpy.zeros((16, 32), "f4")}
        >>> loaded = tm.load(state, "STORE/step-1")
        >>> loaded.report["bytes_wanted"]
        2048
    """
    return load_with(
        request, source, group, options, objects=objects, key_map=key_map, progress=progress
    )


def async_load(
    request: Any,
    source: PathLike,
    group: Any = None,
    *,
    objects: Iterable[Union[str, tuple[str, tuple[int, ...]]]] = (),
    key_map: Optional[_key_map.Rules] = None,
    **options: Unpack[LoadOptions],
) -> LoadJob:
    """Loads in the background: returns a LoadJob at once.

    Parameters and options as for `load`. The tensors belong to the load until its verdict. Loads of one
    group run one after the other, in the order of the calls.
    """
    job, own = _begin(request, source, group, objects, key_map, options)
    if own is not None:
        job._refuse(own)
    return job


# ---- Implementation -----------------------------------------------------------------------------------------


def load_with(
    request: Any,
    source: PathLike,
    group: Any,
    options: LoadOptions,
    *,
    objects: Iterable[Union[str, tuple[str, tuple[int, ...]]]] = (),
    key_map: Optional[_key_map.Rules] = None,
    progress: Progress = None,
    optional: Optional[Sequence[str]] = None,
) -> Loaded:
    """As `load`. `request` may be FailedState. `optional`: globs of keys that are exempt as by `strict_exempt`, but
    reported in `Loaded.not_stored`. If it is given, the message of KeyNotFoundError mentions the option."""
    job, own = _begin(request, source, group, objects, key_map, options, optional, progress)
    loaded: Loaded = _await_verdict(job, own, progress)
    return loaded


def _begin(
    request: Any,
    source: PathLike,
    group: Any,
    objects: Iterable[Union[str, tuple[str, tuple[int, ...]]]],
    key_map: Optional[_key_map.Rules],
    options: LoadOptions,
    optional: Optional[Sequence[str]] = None,
    progress: Progress = None,
) -> tuple[LoadJob, Optional[BaseException]]:
    from tensormount import _stateful

    group = _group(group)
    with group._handle() as handle:
        policy = _ValuePolicy("raise", (), None)
        pending = _LoadRequest(request)
        try:
            if _stateful.has_states(request):
                pending.given, pending.request = request, _stateful.with_states(request)
                _stateful.check_lengths(request, source, key_map, options.get("roots") or (), group.rank)
            options = options.copy()
            exempt = globs("strict_exempt", options.get("strict_exempt") or ())
            may_be_absent = globs("optional", optional or ())
            policy = _ValuePolicy(
                options.get("not_stored", "raise"), exempt, None if optional is None else may_be_absent
            )
            options["strict_exempt"] = exempt + may_be_absent
            given = read_options(**options)
            path_bytes(source)
            check_progress(progress)
            pending.roots = options.get("roots") or ()
            pending.names = name_options(options)
            if pending.names and key_map is not None:
                raise InvalidArgumentError("names and key_map are two ways to rename: give one")
        except Exception as error:
            if group.size == 1:
                raise
            # The load still begins, so that it fails on all ranks.
            given, source, pending = read_options(), UNKNOWN_PATH, _LoadRequest(FailedState(error))
        pending.group, pending.key_map = group, key_map
        built, own = _build(pending, source, objects, policy)
        return start(built, source, group, handle, given, pending), own


def globs(name: str, given: Any) -> tuple[str, ...]:
    """Checks an option that is a list of globs. A str is refused: it would be taken for a list of characters."""
    if isinstance(given, (str, bytes)):
        raise InvalidArgumentError(f"{name}={given!r}: a list of globs was expected: {name}=[{given!r}]")
    found = tuple(given)
    if not all(isinstance(glob, str) for glob in found):
        raise InvalidArgumentError(f"{name}={given!r}: a list of globs was expected")
    return found


def name_options(options: LoadOptions) -> NameOptions:
    """The options of a load that give tensors other names."""
    given = {name: options[name] for name in NameOptions.__annotations__ if options.get(name) is not None}  # type: ignore[literal-required]
    return cast(NameOptions, given)


def read_options(**options: Unpack[LoadOptions]) -> tuple[Any, list[Any]]:
    """tm_load_options, and the objects that they point to. TypeError: an unknown option."""
    unknown = options.keys() - LoadOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"a load has no option {', '.join(sorted(unknown))}")
    given = _abi.LoadOptions(struct_size=ctypes.sizeof(_abi.LoadOptions))
    kept: list[Any] = []
    given.not_stored = 1 + _choice_number("not_stored", options.get("not_stored", "raise"), _STRICT)
    given.not_requested = 1 + _choice_number(
        "not_requested", options.get("not_requested", "ignore"), _STRICT
    )
    given.strict_exempt, given.strict_exempt_count = texts(options.get("strict_exempt", ()), kept)
    given.validate = flag("validate", options.get("validate", False))
    given.verify = _choice_number("verify", options.get("verify", "auto"), _VERIFY)
    given.path = _choice_number("method", options.get("method", "auto"), _PATHS)
    given.exchange_group = options.get("exchange_group", 0)
    given.exchange_via = _choice_number("exchange_via", options.get("exchange_via", "auto"), _VIA)
    given.threads = options.get("threads", 0)
    given.roots, given.root_count = texts(options.get("roots", ()), kept)
    given.name_map = name_map(name_options(options))
    rules = options.get("rules", ())
    if rules:
        table = (_abi.LoadRule * len(rules))()
        for row, rule in zip(table, rules):
            row.struct_size = ctypes.sizeof(_abi.LoadRule)
            row.keys = rule.keys.encode()
            row.allow_shrink = int(rule.shrink)
            row.grow = rule.grow
            row.convert_dtype = int(rule.convert)
            row.grid = rule.grid
        kept.append(table)
        given.rules = table
        given.rule_count = len(rules)
    set_times(given, options.get("liveness"), options.get("arrival"), options.get("total"))
    set_hook(given, options.get("on_event"), kept)
    return given, kept


def _build(
    pending: _LoadRequest,
    source: PathLike,
    objects: Iterable[Union[str, tuple[str, tuple[int, ...]]]],
    policy: _ValuePolicy,
) -> tuple[State, Optional[BaseException]]:
    built = State()
    group = pending.group
    pending.optional = policy.optional or ()
    try:
        if isinstance(pending.request, FailedState):
            raise pending.request.error
        if isinstance(objects, str):
            raise InvalidArgumentError(f"objects={objects!r}: a list of keys was expected")
        for wanted in objects:
            key, index = (wanted, ()) if isinstance(wanted, str) else wanted
            built.want_object(key, index)
            pending.objects.append((key, tuple(index)))
        with _try_open(source, pending.roots, pending.names) as stored:
            keys = stored.keys() if stored is not None else []
            values = stored._values() if stored is not None else {}
            names = stored._stored_names(values, frozenset(keys)) if stored is not None else {}
            renamed = None
            if pending.key_map is not None:
                renamed = _key_map.KeyMap(pending.key_map, keys, names)
            flat = _tree.flatten(pending.request, renamed or names, frozenset(keys), _shards.LOAD)
            flat, hidden = _split_hidden(flat)
            pending.flat = flat
            if stored is not None:
                _check_merged(flat, stored, group.size)
                _check_not_lost(pending, stored, frozenset(keys), hidden, values)
                if hidden or flat.requests_values():
                    there = keys if renamed is None else renamed.new_names()
                    _check_missing(pending, stored, values, hidden, there, policy)
                if names or renamed is not None or flat.merged or flat.requests_values():
                    pending.stored_uuid = stored.uuid
        for key, part in flat.objects():
            built.want_object(key, part.index, part.grid)
        built.add_tensors(flat.items(), _shards.LOAD, cache_of(group), group.size)
    except Exception as error:
        built.fail(error)
        return built, error
    return built, None


@contextlib.contextmanager
def _try_open(source: PathLike, roots: Sequence[str], names: Optional[NameOptions] = None) -> Iterator[Any]:
    """The opened checkpoint. None: it cannot be opened, which the load itself reports to all ranks."""
    try:
        checkpoint = open_checkpoint(source, roots=roots, **(names or {}))
    except Error:
        yield None
        return
    with checkpoint:
        yield checkpoint


class _ValuePolicy(NamedTuple):
    """The options `not_stored`, `strict_exempt` and `optional`, for names that the library does not see.
    `optional` None: the caller has no such option."""

    not_stored: str
    exempt: tuple[str, ...]
    optional: Optional[tuple[str, ...]]


def _split_hidden(flat: _tree.FlatTree) -> tuple[_tree.FlatTree, list[str]]:
    """The request for the library, and the requested names that `key_map` renamed or dropped."""
    hidden = {key for key in flat.tensors if key.startswith(_key_map.HIDDEN)}
    if not hidden:
        return flat, []
    tensors = {key: leaf for key, leaf in flat.tensors.items() if key not in hidden}
    repeated = tuple(item for item in flat.repeated if item[0] not in hidden)
    names = sorted(key[len(_key_map.HIDDEN) :] for key in hidden)
    return flat._replace(tensors=tensors, repeated=repeated), names


def _check_merged(flat: _tree.FlatTree, stored: Any, world_size: int) -> None:
    """LayoutError: the request has one tensor under several keys, whose stored tensors differ, so that one of them
    would be lost."""
    for keys in flat.merged:
        first, *others = (stored[key] for key in keys)
        for other in others:
            if not _same_cells(first, other, flat.tensors[keys[0]], world_size):
                raise LayoutError(
                    f"{first.key} and {other.key} share memory in the request, but are two different "
                    f"tensors in the checkpoint: request each in memory of its own, or leave one out "
                    f'(key_map=[{{"drop": "{other.key}"}}])',
                    key=other.key,
                )


def _same_cells(a: Any, b: Any, leaf: Any, world_size: int) -> bool:
    """Whether two stored tensors are equal. Without digests only the rows that `leaf` covers are compared."""
    if (a.dtype_name, a.shape) != (b.dtype_name, b.shape):
        return False
    if a.digest is not None and b.digest is not None:
        return bool(a.digest == b.digest)
    rows, begin, end = (a.shape[0] if a.shape else 1), a.nbytes, 0
    row = a.nbytes // rows if rows and a.nbytes % rows == 0 else 0
    for shard in registry.describe(a.key, leaf, _shards.LOAD, world_size):
        first, count = (shard.begin[0], shard.extent[0]) if row and shard.begin else (0, rows)
        begin = min(begin, first * row)
        end = max(end, (first + count) * row if row else a.nbytes)
    for at in range(begin, end, _COMPARED_BYTES):
        size = min(_COMPARED_BYTES, end - at)
        if a.read_bytes(at, size) != b.read_bytes(at, size):
            return False
    return True


def _check_not_lost(
    pending: _LoadRequest, stored: Any, keys: Container[str], hidden: Sequence[str], values: Mapping[str, Any]
) -> None:
    """DataLossError: requested data of a foreign checkpoint are lost. Options that let keys be absent do not apply:
    the checkpoint has these keys. `hidden`: requested names that `key_map` gives to no stored tensor."""
    if stored.uuid is not None or not stored.warnings:
        return  # Nothing is lost.
    assert pending.flat is not None
    objects = frozenset(stored.objects.names())
    wanted = [key for key, _ in (*pending.objects, *pending.flat.objects()) if not key.startswith(_key_map.HIDDEN)]
    absent = [key for key in pending.flat.tensors if key not in keys and key not in stored]
    absent += hidden
    absent += [key for key in wanted if key not in objects]
    kept: list[Any] = []
    ranks = stored._rank_values(pending.group.rank) or stored._rank_values(0)
    if pending.flat.requests_values():
        _tree.refill(pending.request, pending.stored_values(values, ranks), kept)
    absent += map(_tree.dotted, kept)
    # A list or an empty dict of the request takes all values below its name, of which some may be lost.
    plain = {**pending.flat.common, **pending.flat.rank_common}
    containers = [name for name, value in plain.items() if isinstance(value, (list, tuple, dict))]
    containers += _empty_containers(pending.request, ())
    if absent or containers:
        _lost.lost_data(stored, pending.key_map).check(absent, containers)


def _empty_containers(request: Any, path: _tree.Path) -> Iterator[str]:
    """The dotted names of the empty containers in a request."""
    if type(request) not in (*_tree.SPLIT_DICTS, list, tuple):
        return
    if not request:
        yield _tree.dotted(path)
    items = request.items() if isinstance(request, dict) else enumerate(request)
    for key, item in items:
        yield from _empty_containers(item, (*path, (0, key)))


def _check_missing(
    pending: _LoadRequest,
    stored: Any,
    values: Mapping[str, Any],
    hidden: Sequence[str],
    keys: Sequence[str],
    policy: _ValuePolicy,
) -> None:
    """Finds requested plain values that are not stored, and requested tensors that `key_map` hides from the
    library, and treats them as `not_stored` says. Comes before the load begins, so that a KeyNotFoundError fails
    it on all ranks. `keys`: names that a request can use for the stored tensors."""
    kept: list[Any] = []
    ranks = stored._rank_values(pending.group.rank) or stored._rank_values(0)
    _tree.refill(pending.request, pending.stored_values(values, ranks), kept)
    pending.absent = list(dict.fromkeys([*hidden, *map(_tree.dotted, kept)]))
    missing = unmatched(pending.absent, (*policy.exempt, *pending.optional))
    named = set(matched(pending.absent, pending.optional))
    if policy.not_stored == "return":
        named.update(missing)
    pending.missing = [name for name in pending.absent if name in named]
    if not missing or policy.not_stored in ("return", "ignore"):
        return
    objects = frozenset(stored.objects.names())
    said = listed(missing, lambda name: _missing_text(name, objects, keys))
    if policy.not_stored == "raise":
        hint = "" if policy.optional is None else optional_hint(missing)
        raise KeyNotFoundError(f"{stored.path}: {_abi.NOT_STORED}{said}{hint}", key=missing[0])
    log.warning("%s: %s%s", stored.path, _abi.NOT_STORED, said)


def optional_hint(names: Sequence[str]) -> str:
    """The end of a message about names that are not stored, for callers with an option `optional`."""
    shown = [escape(name) for name in names[:4]] + ["..."] * (len(names) > 4)
    return f"; optional={shown} allows them to be absent"


def _missing_text(name: str, objects: Container[str], keys: Iterable[str]) -> str:
    if name in objects:
        return f"{name} (stored as an object, which is not unpickled)"
    if any(key == name or key.startswith(name + ".") for key in keys):
        return f"{name} (a tensor is stored under this name)"
    return name


def matched(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match one of the globs, by fnmatch(3) as in the library: '*' also matches '/', and a
    backslash escapes the next character."""
    packed = [pattern.encode() for pattern in patterns]
    return [name for name in names if any(_fnmatch(one, text(name), 0) == 0 for one in packed)]


def unmatched(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match none of the globs."""
    names = list(names)
    found = set(matched(names, patterns))
    return [name for name in names if name not in found]


def listed(names: Sequence[str], shown: Callable[[str], str] = str) -> str:
    """A list of names for messages: the first eight, each through `shown`, and the number of the others."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(shown, names[:8])) + more


def check_same_uuid(looked_at: Optional[str], loaded: str) -> None:
    """StaleError: the checkpoint that this rank opened before the load is not the one that was loaded.
    `looked_at`: the uuid of the former; None: none was opened, or it has no uuid."""
    if looked_at is not None and looked_at != loaded:
        raise StaleError(
            "the checkpoint was replaced while this rank read it: load again"
        )


def start(
    built: State,
    source: PathLike,
    group: Any,
    handle: Any,
    options: tuple[Any, list[Any]],
    pending: _LoadRequest,
) -> LoadJob:
    given, kept = options
    job = begin(
        LoadJob, _abi.library().tm_load_async, built, source, group, handle, given, kept, pending
    )
    job._request = pending
    return job


def _loaded(lib: Any, address: int, pending: _LoadRequest) -> Loaded:
    found = Loaded()
    said: dict[str, Any] = json.loads(_abi.get_text(lib.tm_load_report_json, address))
    found.report = said["numbers"]
    found.uuid = said["uuid"]
    check_same_uuid(pending.stored_uuid, found.uuid)
    for name in ("not_stored", "not_requested", "skipped", "converted"):
        setattr(found, name, said[name])
    of_leaves = pending.flat.objects() if pending.flat is not None else []
    objects = {key for key, _ in [*pending.objects, *of_leaves]}
    absent = [key for key in found.skipped if key not in objects]
    found._absent = frozenset([*absent, *pending.absent])
    told = [*found.not_stored, *matched(absent, pending.optional), *pending.missing]
    found.not_stored = list(dict.fromkeys(told))
    found.uncovered = [
        (cells["key"], tuple(cells["begin"]), tuple(cells["extent"]), cells["zeroed"])
        for cells in said["uncovered"]
    ]
    found.objects = {(key, index): _object(lib, address, key, index) for key, index in pending.objects}
    found.state, found.kept = pending.request, []
    if pending.flat is None:
        return found  # The request has only shards (the reader for DCP), which reads values by itself.
    values = take_json(lib.tm_load_report_common, address, None) or {}
    ranks = _rank_values(lib, address, pending.group.rank)
    found.metadata = take_json(lib.tm_load_report_metadata, address) or {}
    structures = _tree.structures_of(values)
    found.common = _tree.plain_values(values, structures)
    found.rank_common = {pending.group.rank: _tree.plain_values(ranks, structures, "rank")}
    _mark_modified(pending.flat)
    put = {
        id(one.leaf): one.kind.put(one.leaf, _put_value(lib, address, one))
        for one in pending.flat.registered
        if one.held is not None and one.key not in found.skipped
    }
    kept: list[Any] = []
    stored = pending.stored_values(values, ranks)
    found.state = _tree.refill(pending.request, stored, kept, put)
    found.kept = [_tree.path_text(path) for path in kept]
    _update_in_place(pending.request, found.state, _shared_containers(pending.request))
    if type(pending.request) is type(found.state) and isinstance(pending.request, (dict, list)):
        found.state = pending.request
    if pending.given is not None:
        from tensormount import _stateful

        _stateful.restore(pending.given, found.state)
        found.state = pending.given
    return found


def _mark_modified(flat: _tree.FlatTree) -> None:
    """Tells PyTorch's autograd that the tensors were changed in place, so that a backward pass that needs the old
    values fails."""
    tensors = registry.tensors_of(leaf for _, leaf in flat.items())
    if not tensors:
        return
    import torch

    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _put_value(lib: Any, address: int, one: _tree.RegisteredLeaf) -> Any:
    """The stored value for `LeafKind.put`."""
    held = one.held
    return _object(lib, address, one.key, held.index) if isinstance(held, ObjectPart) else held


def _object(lib: Any, address: int, key: str, index: tuple[int, ...]) -> bytes:
    at = _abi.indices(index)
    data = ctypes.c_void_p()
    size = ctypes.c_size_t()
    status = lib.tm_load_report_object(
        address, text(key), ctypes.addressof(at), len(index), ctypes.addressof(data),
        ctypes.addressof(size),
    )
    if status:
        _abi.fail(status, {_abi.TM_NOT_FOUND: KeyNotFoundError}, key)
    return _abi.take_bytes(data.value, size.value)


def _rank_values(lib: Any, address: int, rank: int) -> dict[str, Any]:
    """Encoded values that rank `rank` of the save set for itself; if it set none, those of rank 0."""
    own = take_json(lib.tm_load_report_rank_common, address, rank, None) or {}
    if own or rank == 0:
        return own
    return take_json(lib.tm_load_report_rank_common, address, 0, None) or {}


def _stored_state(values: Mapping[str, Any], ranks: Mapping[str, Any], request: Any) -> Any:
    """The plain values of the checkpoint, nested as in the saved state dict, with _tree.ABSENT in the place of
    tensors and of values of other ranks. A checkpoint that another program saved has flat names: values by name,
    and nested if the request has them nested."""
    names = _tree.structure_names(values)
    if not names:
        return _paths.add_nested(request, _tree.plain_values(values, []), values)
    own = ranks.get(_tree.TREE_NAME)
    chosen = f"{_tree.TREE_NAME}.{own}" if isinstance(own, str) else None
    # The state dict of the same rank comes first; those of other ranks add the values that it lacks.
    order = ([chosen] if chosen in names else []) + [name for name in names if name != chosen]
    trees = [
        _tree.unflatten(values[name], {}, values, ranks, missing=lambda kind, path, name: _tree.ABSENT)
        for name in order
    ]
    return _key_map.united(trees)


def _shared_containers(request: Any) -> set[int]:
    """Ids of dicts and lists that are at several places of a request: a value for one place must not appear at
    the others."""
    seen: set[int] = set()
    twice: set[int] = set()
    pending = [request]
    while pending:
        value = pending.pop()
        if not isinstance(value, (dict, list, tuple)):
            continue
        if not isinstance(value, tuple):
            if id(value) in seen:
                twice.add(id(value))
                continue
            seen.add(id(value))
        pending.extend(value.values() if isinstance(value, dict) else value)
    return twice


def _update_in_place(request: Any, filled: Any, twice: set[int]) -> None:
    """Puts the loaded plain values into the caller's own dicts and lists."""

    def put(container: Any, place: Any, item: Any, new: Any) -> None:
        alike = type(item) is type(new) and type(item) in (*_tree.SPLIT_DICTS, list)
        if alike and id(item) not in twice:
            _update_in_place(item, new, twice)
        elif item is not new:
            container[place] = new

    if isinstance(request, dict) and isinstance(filled, dict):
        if not request:
            request.update(filled)
        for key, item in list(request.items()):
            if key in filled:
                put(request, key, item, filled[key])
    elif isinstance(request, list) and isinstance(filled, list):
        if len(filled) != len(request) and not any(_tree.is_tensor(item) for item in request):
            request[:] = filled
            return
        for i, (item, new) in enumerate(zip(list(request), filled)):
            put(request, i, item, new)
