# SPDX-License-Identifier: Apache-2.0
"""Loading: `load`, `async_load`."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from glob import escape
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypedDict, Union

from tensormount import _abi, _key_map, _layouts, _shards, _tree
from tensormount._jobs import EventHook, Job, begin, log, set_hook, set_times
from tensormount._progress import Progress, check_progress
from tensormount._save import _choice, _group, _numbers, _verdict, flag
from tensormount._state import (
    UNKNOWN_PATH,
    State,
    Unmade,
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

_STRICT = ("raise", "log", "return", "ignore")  # From 1; 0 is the default of the library.
_VERIFY = ("auto", "off", "leaves")
_PATHS = ("auto", "direct", "exchange")
_VIA = ("auto", "host", "devices")
_GROW = ("error", "zero", "keep")
_GRID = ("error", "by-index", "first", "skip")
_FAILURES = {1: LayoutError}  # TM_INVALID_ARGUMENT
# Of two stored tensors at a time.
_COMPARED_BYTES = 4 << 20

_fnmatch = ctypes.CDLL(None).fnmatch
_fnmatch.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]


class Loaded:
    """What a load found besides the bytes, which are in the request's tensors.

    state       the request, with the plain values of the checkpoint in place of its own.
    kept        paths of plain values that the checkpoint has none for: the request's stayed.
                Not empty only where `not_stored` or `strict_exempt` let the load go on without.
    report      numbers as a dict: bytes_wanted, bytes_read, plan_seconds, ...
    uuid        of the checkpoint.
    common      plain values by name; rank_common: those of single ranks of the save.
    metadata    what the application said about the checkpoint as a whole.
    objects     bytes that were asked for, by (key, index).
    not_stored, not_requested   keys on one side only, where those options said "return". Of tensors
                and, in not_stored, of plain values ("optim.param_groups.0.lr"). In not_stored also what
                `optional` of tensormount.torch.load let be absent.
    skipped     keys of which nothing was loaded, by a rule; converted: whose elements were.
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
    # What this rank asked for and is not stored, whatever `not_stored` says.
    _absent: frozenset[str]

    def __repr__(self) -> str:
        return f"<tensormount.Loaded {self.uuid}: {self.report['bytes_wanted']} bytes>"


class LoadOptions(TypedDict, total=False):
    """What `load`, `async_load` and those of tensormount.torch take by name; `load` says what each
    means."""

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
    liveness: Optional[float]
    arrival: Optional[float]
    total: Optional[float]
    on_event: Optional[EventHook]


class LoadJob(Job):
    """A load in the background; of `async_load`."""

    _word = "load"
    _wait_function = "tm_load_job_wait"
    _fd_function = "tm_load_job_fd"
    _cancel_function = "tm_load_job_cancel"
    _free_function = "tm_load_job_free"
    _failures = _FAILURES

    _asked: _Asked

    def bytes_read(self) -> int:
        """From storage, by this rank so far. Never waits."""
        self._check_process()
        return int(self._lib.tm_load_job_bytes_read(self._address))

    def _moved(self) -> tuple[int, int]:
        return self.bytes_read(), self._asked.bytes()

    def _take_report(self, address: int) -> Loaded:
        try:
            return _loaded(self._lib, address, self._asked)
        finally:
            self._free_report(address)

    def _free_report(self, address: int) -> None:
        self._lib.tm_load_report_free(address)


class Rule:
    """What a load may do for keys that match a glob ('*' crosses '/'), where the stored tensor or
    object is another than the one asked for. The first rule that matches holds.

    shrink    extents asked for may be smaller: the tail is left out.
    grow      extents asked for are larger: "error", "zero", or "keep" what the caller has there.
    convert   elements may be converted to the dtype asked for.
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
        self.grow = _choice("grow", grow, _GROW)
        self.convert = convert
        self.grid = _choice("grid", grid, _GRID)


class _Asked:
    """A request, as long as its load goes on."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.objects: list[tuple[str, tuple[int, ...]]] = []
        self.group: Any = None
        self.stored_uuid: Optional[str] = None  # Of the checkpoint that names were taken from.
        self._bytes: Optional[int] = None
        self.flat: Optional[_tree.Flat] = None
        self.key_map: Optional[_key_map.Rules] = None
        self.optional: tuple[str, ...] = ()
        self.roots: Sequence[str] = ()
        # Of what this rank asks for and is not stored under its name, plain values, and tensors that
        # `key_map` renamed or dropped: all, and those that `not_stored` of the result names.
        self.absent: list[str] = []
        self.missing: list[str] = []

    def values_of(self, stored: Any) -> Any:
        """The plain values of a checkpoint (`_stored_state`) under the names of the request."""
        if self.key_map is None or self.flat is None or not self.flat.asks_for_values():
            return stored
        return _key_map.renamed_values(self.request, stored, self.key_map)

    def bytes(self) -> int:
        """Of the tensors that this rank wants."""
        if self._bytes is None:
            leaves = self.flat.items() if self.flat is not None else ()
            self._bytes = sum(getattr(leaf, "_local_tensor", leaf).nbytes for _, leaf in leaves)
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
    """Fills the tensors of `request` in place, whatever the sharding, the number of ranks and the
    program that saved `source`. Collective: every rank of `group` calls it with what it wants.

    request   a state dict like that which was saved, or a part of it: tensors to be filled, and
              plain values, of which those of the checkpoint take the place (in dicts and lists in
              place; tuples are exchanged).
    source    "STORE/NAME", "STORE/latest", or what another program saved.
    group     Group; None: this process alone.
    objects   keys of objects to load, as a list; (key, index) for a part of those on a grid.
    key_map   rules that rename what is stored, tensors and plain values, to what `request` calls it, as
              --map has them: [{"prefix": "model.", "to": ""}]. What they rename or drop is not stored
              under its old name.
    progress  called with the bytes that this rank has read and wants, while the call waits (others
              may read some for it); True: a bar, where tqdm is installed.

    Options, which are the same on all ranks but for on_event, exchange_group and threads:

    not_stored, not_requested   "raise", "log", "return" or "ignore" tensors and plain values that
              are asked for and absent, and tensors that nobody asks for. strict_exempt: globs of keys
              ("extra.*") that count as neither.
    rules     `Rule`s for shapes, dtypes and grids that differ; otherwise that is LayoutError.
    validate  requests must cover every tensor exactly, as on a save.
    verify    "auto", "leaves", "off"; method: "auto", "direct", "exchange"; exchange_group: ranks
              with equal numbers exchange what they read; exchange_via: "host", "devices" (from
              GPU to GPU by NCCL), "auto": that where much is exchanged and it can be.
              docs/semantics.md.
    threads   that read what this rank reads for itself; 0: as many as have a core each, with the
              other ranks of the machine, at most 12.
    roots     as of `open`.
    liveness, arrival, total, on_event   as of `save`.

    Returns `Loaded`. Raises KeyNotFoundError for keys that are not stored, CheckpointNotFoundError,
    LayoutError (another shape or dtype; one tensor under two keys whose stored tensors differ; a value
    that cannot be read), DataLossError, PeerTimeout, PeerLost, CancelledError. After an exception the
    contents of the tensors are undefined; after one that a signal raised they are still written to
    until the read that is under way has ended.

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
    """As `load`, in the background: returns at once. The tensors are the load's until the verdict.
    Loads of one group run one after the other, in the order of the calls."""
    job, own = _begin(request, source, group, objects, key_map, options)
    if own is not None:
        job._refuse(own)
    return job


# ---- How -----------------------------------------------------------------------------------------


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
    """As `load`. `request` may be Unmade. `optional`: globs of keys that count as `strict_exempt` does,
    but `not_stored` of the result names them; a KeyNotFoundError then says that there are such globs."""
    job, own = _begin(request, source, group, objects, key_map, options, optional, progress)
    loaded: Loaded = _verdict(job, own, progress)
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
    group = _group(group)
    with group._handle() as handle:
        policy = _ValuePolicy("raise", (), None)
        asked = _Asked(request)
        try:
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
            asked.roots = options.get("roots") or ()
        except Exception as error:
            if group.size == 1:
                raise
            # The load begins all the same, to fail on all ranks.
            given, source, asked = read_options(), UNKNOWN_PATH, _Asked(Unmade(error))
        asked.group, asked.key_map = group, key_map
        built, own = _build(asked, source, objects, policy)
        return start(built, source, group, handle, given, asked), own


def globs(name: str, given: Any) -> tuple[str, ...]:
    """An option that is a list of globs. A text alone would be taken for a list of letters."""
    if isinstance(given, (str, bytes)):
        raise InvalidArgumentError(f"{name}={given!r}: a list of globs was expected: {name}=[{given!r}]")
    found = tuple(given)
    if not all(isinstance(glob, str) for glob in found):
        raise InvalidArgumentError(f"{name}={given!r}: a list of globs was expected")
    return found


def read_options(**options: Unpack[LoadOptions]) -> tuple[Any, list[Any]]:
    """tm_load_options, and what it points to. TypeError for an option that there is not."""
    unknown = options.keys() - LoadOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"a load has no option {', '.join(sorted(unknown))}")
    given = _abi.LoadOptions(struct_size=ctypes.sizeof(_abi.LoadOptions))
    kept: list[Any] = []
    given.not_stored = 1 + _choice("not_stored", options.get("not_stored", "raise"), _STRICT)
    given.not_requested = 1 + _choice(
        "not_requested", options.get("not_requested", "ignore"), _STRICT
    )
    given.strict_exempt, given.strict_exempt_count = texts(options.get("strict_exempt", ()), kept)
    given.validate = flag("validate", options.get("validate", False))
    given.verify = _choice("verify", options.get("verify", "auto"), _VERIFY)
    given.path = _choice("method", options.get("method", "auto"), _PATHS)
    given.exchange_group = options.get("exchange_group", 0)
    given.exchange_via = _choice("exchange_via", options.get("exchange_via", "auto"), _VIA)
    given.threads = options.get("threads", 0)
    given.roots, given.root_count = texts(options.get("roots", ()), kept)
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
    asked: _Asked,
    source: PathLike,
    objects: Iterable[Union[str, tuple[str, tuple[int, ...]]]],
    policy: _ValuePolicy,
) -> tuple[State, Optional[BaseException]]:
    built = State()
    group = asked.group
    asked.optional = policy.optional or ()
    try:
        if isinstance(asked.request, Unmade):
            raise asked.request.error
        if isinstance(objects, str):
            raise InvalidArgumentError(f"objects={objects!r}: a list of keys was expected")
        for wanted in objects:
            key, index = (wanted, ()) if isinstance(wanted, str) else wanted
            built.want_object(key, index)
            asked.objects.append((key, tuple(index)))
        with _look(source, asked.roots) as stored:
            keys = stored.keys() if stored is not None else []
            values = stored._values() if stored is not None else {}
            names = stored._stored_names(values, frozenset(keys)) if stored is not None else {}
            renamed = None
            if asked.key_map is not None:
                renamed = _key_map.KeyMap(asked.key_map, keys, names)
            flat = _tree.flatten(asked.request, renamed or names, frozenset(keys))
            flat, hidden = _without_hidden(flat)
            asked.flat = flat
            if stored is not None:
                _check_merged(flat, stored, group.size)
                if hidden or flat.asks_for_values():
                    there = keys if renamed is None else renamed.new_names()
                    _look_for_missing(asked, stored, values, hidden, there, policy)
                if names or renamed is not None or flat.merged or flat.asks_for_values():
                    asked.stored_uuid = stored.uuid
        built.add_tensors(flat.items(), _shards.LOAD, cache_of(group), group.size)
    except Exception as error:
        built.fail(error)
        return built, error
    return built, None


@contextlib.contextmanager
def _look(source: PathLike, roots: Sequence[str]) -> Iterator[Any]:
    """The checkpoint, opened; None where it cannot be: the load says that, to all ranks."""
    from tensormount._checkpoint import open as open_checkpoint

    try:
        checkpoint = open_checkpoint(source, roots=roots)
    except Error:
        yield None
        return
    with checkpoint:
        yield checkpoint


class _ValuePolicy(NamedTuple):
    """What `not_stored`, `strict_exempt` and `optional` say, for what the library does not see. `optional`
    None: the caller has no such option."""

    not_stored: str
    exempt: tuple[str, ...]
    optional: Optional[tuple[str, ...]]


def _without_hidden(flat: _tree.Flat) -> tuple[_tree.Flat, list[str]]:
    """What the library is asked for, and the names of tensors that `key_map` renamed or dropped."""
    hidden = {key for key in flat.tensors if key.startswith(_key_map.HIDDEN)}
    if not hidden:
        return flat, []
    tensors = {key: leaf for key, leaf in flat.tensors.items() if key not in hidden}
    again = tuple(item for item in flat.again if item[0] not in hidden)
    names = sorted(key[len(_key_map.HIDDEN) :] for key in hidden)
    return flat._replace(tensors=tensors, again=again), names


def _check_merged(flat: _tree.Flat, stored: Any, world_size: int) -> None:
    """LayoutError where a request has one tensor under several keys, and the checkpoint has others under
    these: one of them would be lost."""
    for keys in flat.merged:
        first, *others = (stored[key] for key in keys)
        for other in others:
            if not _same_cells(first, other, flat.tensors[keys[0]], world_size):
                raise LayoutError(
                    f"{first.key} and {other.key} are one tensor in the request and two different ones "
                    f"in the checkpoint: ask for each in memory of its own, or leave one out "
                    f'(key_map=[{{"drop": "{other.key}"}}])',
                    key=other.key,
                )


def _same_cells(a: Any, b: Any, leaf: Any, world_size: int) -> bool:
    """Whether two stored tensors are the same. Where they have no digests, in the rows that `leaf` is."""
    if (a.dtype_name, a.shape) != (b.dtype_name, b.shape):
        return False
    if a.digest is not None and b.digest is not None:
        return bool(a.digest == b.digest)
    rows, begin, end = (a.shape[0] if a.shape else 1), a.nbytes, 0
    row = a.nbytes // rows if rows and a.nbytes % rows == 0 else 0
    for shard in _shards.describe(a.key, leaf, _shards.LOAD, world_size):
        first, count = (shard.begin[0], shard.extent[0]) if row and shard.begin else (0, rows)
        begin = min(begin, first * row)
        end = max(end, (first + count) * row if row else a.nbytes)
    for at in range(begin, end, _COMPARED_BYTES):
        size = min(_COMPARED_BYTES, end - at)
        if a.read_bytes(at, size) != b.read_bytes(at, size):
            return False
    return True


def _look_for_missing(
    asked: _Asked,
    stored: Any,
    values: Mapping[str, Any],
    hidden: Sequence[str],
    keys: Sequence[str],
    policy: _ValuePolicy,
) -> None:
    """Plain values that are asked for and not stored, as the library finds tensors, and tensors that
    `key_map` hides from it. KeyNotFoundError under "raise", before a byte is read, so that all ranks hear
    of it. `keys`: of the stored tensors, as the request would name them."""
    kept: list[Any] = []
    ranks = stored._rank_values(asked.group.rank) or stored._rank_values(0)
    _tree.refill(asked.request, asked.values_of(_stored_state(values, ranks)), kept)
    asked.absent = list(dict.fromkeys([*hidden, *map(_tree.dotted, kept)]))
    missing = unmatched(asked.absent, (*policy.exempt, *asked.optional))
    named = set(matched(asked.absent, asked.optional))
    if policy.not_stored == "return":
        named.update(missing)
    asked.missing = [name for name in asked.absent if name in named]
    if not missing or policy.not_stored in ("return", "ignore"):
        return
    objects = frozenset(stored.objects.names())
    said = listed(missing, lambda name: _why_missing(name, objects, keys))
    if policy.not_stored == "raise":
        hint = "" if policy.optional is None else optional_hint(missing)
        raise KeyNotFoundError(f"{_abi.NOT_STORED}{said}{hint}", key=missing[0])
    log.warning("%s: %s%s", stored.path, _abi.NOT_STORED, said)


def optional_hint(names: Sequence[str]) -> str:
    """The end of a message about names that are not stored, for who has an option `optional`."""
    shown = [escape(name) for name in names[:4]] + ["..."] * (len(names) > 4)
    return f"; optional={shown} lets what is absent stay as it is"


def _why_missing(name: str, objects: Container[str], keys: Iterable[str]) -> str:
    if name in objects:
        return f"{name} (stored as an object, which is not unpickled)"
    if any(key == name or key.startswith(name + ".") for key in keys):
        return f"{name} (a tensor is stored there)"
    return name


def matched(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that one of the globs matches, by the function that the library uses, so that both agree:
    '*' crosses '/', and a backslash takes its meaning from the next character."""
    packed = [pattern.encode() for pattern in patterns]
    return [name for name in names if any(_fnmatch(one, text(name), 0) == 0 for one in packed)]


def unmatched(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that none of the globs matches."""
    names = list(names)
    found = set(matched(names, patterns))
    return [name for name in names if name not in found]


def listed(names: Sequence[str], shown: Callable[[str], str] = str) -> str:
    """For messages: the first names, each as `shown` has it, and how many more there are."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(shown, names[:8])) + more


def check_same(looked_at: Optional[str], loaded: str) -> None:
    """StaleError where the checkpoint that a rank looked at first was not the one that was loaded.
    `looked_at`: its uuid; None: it looked at none, or that has no uuid."""
    if looked_at is not None and looked_at != loaded:
        raise StaleError(
            "another checkpoint was published under that name while this rank looked at it: load again"
        )


def start(
    built: State,
    source: PathLike,
    group: Any,
    handle: Any,
    options: tuple[Any, list[Any]],
    asked: _Asked,
) -> LoadJob:
    given, kept = options
    job = begin(
        LoadJob, _abi.library().tm_load_async, built, source, group, handle, given, kept, asked
    )
    job._asked = asked
    return job


def _loaded(lib: Any, address: int, asked: _Asked) -> Loaded:
    found = Loaded()
    numbers = _abi.LoadNumbers(struct_size=ctypes.sizeof(_abi.LoadNumbers))
    status = lib.tm_load_report_numbers(address, ctypes.addressof(numbers))
    if status:
        _abi.fail(status)
    found.report = _numbers(numbers)
    found.report["plan_reused"] = bool(found.report["plan_reused"])
    found.uuid = lib.tm_load_report_uuid(address).decode()
    check_same(asked.stored_uuid, found.uuid)
    for name in ("not_stored", "not_requested", "skipped", "converted"):
        setattr(found, name, _abi.get_list(getattr(lib, f"tm_load_report_{name}"), address))
    objects = {key for key, _ in asked.objects}
    absent = [key for key in found.skipped if key not in objects]
    found._absent = frozenset([*absent, *asked.absent])
    told = [*found.not_stored, *matched(absent, asked.optional), *asked.missing]
    found.not_stored = list(dict.fromkeys(told))
    found.uncovered = []
    row = _abi.Uncovered(struct_size=ctypes.sizeof(_abi.Uncovered))
    for i in range(lib.tm_load_report_uncovered_count(address)):
        status = lib.tm_load_report_uncovered(address, i, ctypes.addressof(row))
        if status:
            _abi.fail(status)
        found.uncovered.append(
            (
                row.key.decode("utf-8", "surrogateescape"),
                tuple(row.begin[: row.rank]),
                tuple(row.extent[: row.rank]),
                bool(row.zeroed),
            )
        )
    found.objects = {(key, index): _object(lib, address, key, index) for key, index in asked.objects}
    values = take_json(lib.tm_load_report_common, address, None) or {}
    ranks = _rank_values(lib, address, asked.group.rank)
    found.metadata = take_json(lib.tm_load_report_metadata, address) or {}
    structures = _tree.structures_of(values)
    found.common = _tree.plain_values(values, structures)
    found.rank_common = {asked.group.rank: _tree.plain_values(ranks, structures, "rank")}
    found.state, found.kept = asked.request, []
    if asked.flat is None:
        return found  # Of tensors alone, which were described one by one.
    _written(asked.flat)
    kept: list[Any] = []
    found.state = _tree.refill(asked.request, asked.values_of(_stored_state(values, ranks)), kept)
    found.kept = [_tree.path_text(path) for path in kept]
    _put_back(asked.request, found.state, _standing_twice(asked.request))
    if type(asked.request) is type(found.state) and isinstance(asked.request, (dict, list)):
        found.state = asked.request
    return found


def _written(flat: _tree.Flat) -> None:
    """Tells autograd of PyTorch that tensors have other values now: a graph that kept an old one
    must not be used any more."""
    import sys

    torch = sys.modules.get("torch")
    if torch is None:
        return
    for local in _layouts.local_tensors(leaf for _, leaf in flat.items()):
        if not local.is_inference():
            torch.autograd.graph.increment_version(local)


def _object(lib: Any, address: int, key: str, index: tuple[int, ...]) -> bytes:
    at = _abi.indices(index)
    data = ctypes.c_void_p()
    size = ctypes.c_size_t()
    status = lib.tm_load_report_object(
        address, text(key), ctypes.addressof(at), len(index), ctypes.addressof(data),
        ctypes.addressof(size),
    )
    if status:
        _abi.fail(status, {2: KeyNotFoundError}, key)
    return _abi.take_bytes(data.value, size.value)


def _rank_values(lib: Any, address: int, rank: int) -> dict[str, Any]:
    """What the rank of that number of the save set for itself; where there is none, rank 0."""
    own = take_json(lib.tm_load_report_rank_common, address, rank, None) or {}
    if own or rank == 0:
        return own
    return take_json(lib.tm_load_report_rank_common, address, 0, None) or {}


def _stored_state(values: Mapping[str, Any], ranks: Mapping[str, Any]) -> Any:
    """The plain values of the checkpoint where the state dict had them; _tree.ABSENT where it had
    tensors, or values of other ranks."""
    names = _tree.structure_names(values)
    if not names:
        return _tree.plain_values(values, [])
    own = ranks.get(_tree.TREE_NAME)
    chosen = f"{_tree.TREE_NAME}.{own}" if isinstance(own, str) else None
    # That of the same rank first, then whatever others had.
    order = ([chosen] if chosen in names else []) + [name for name in names if name != chosen]
    trees = [
        _tree.unflatten(values[name], {}, values, ranks, missing=lambda kind, path, name: _tree.ABSENT)
        for name in order
    ]
    return _key_map.united(trees)


def _standing_twice(request: Any) -> set[int]:
    """Ids of dicts and lists that stand in several places of a request: what one of the places gets
    must not be seen in the others."""
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


def _put_back(request: Any, filled: Any, twice: set[int]) -> None:
    """Plain values into the caller's own dicts and lists."""

    def put(container: Any, place: Any, item: Any, new: Any) -> None:
        alike = type(item) is type(new) and type(item) in (*_tree.SPLIT_DICTS, list)
        if alike and id(item) not in twice:
            _put_back(item, new, twice)
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
