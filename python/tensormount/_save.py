# SPDX-License-Identifier: Apache-2.0
"""Saving: `save`, `async_save`, `validate`, `dump_spec`."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypedDict, Union

from tensormount import _abi, _shards, _tree
from tensormount._jobs import (
    EXIT_WAIT,
    EventHook,
    Job,
    ReportHook,
    begin,
    exit_wait_of,
    set_hook,
    set_save_hooks,
    set_times,
)
from tensormount._progress import Progress, check_progress
from tensormount._state import (
    UNKNOWN_PATH,
    State,
    Unmade,
    cache_of,
    path_bytes,
    text,
    texts,
)
from tensormount._tasks import in_background
from tensormount.errors import InvalidArgumentError, LayoutError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

PathLike = Union[str, "os.PathLike[str]"]

_PLACEMENTS = ("auto", "tensor-file", "rank-shard", "safetensors")
_REPLICAS = ("rotating", "full", "off")
_STRATEGIES = ("parallel", "main")
_COMMON = ("error", "warn", "off")
_STATES = ("staging", "saving", "committed", "failed", "cancelled")
_FAILURES = {1: LayoutError}  # TM_INVALID_ARGUMENT: of a save that is the layout, nearly always.


class SaveOptions(TypedDict, total=False):
    """What `save`, `async_save`, `Saver.save`, those of tensormount.torch and `Writer` take by name;
    `save` says what each means."""

    replace: bool
    placement: str
    replicas: str
    strategy: str
    common: str
    common_exempt: Sequence[str]
    validate: bool
    page_hashes: bool
    reuse: str
    full_every: int
    inherit: Optional[str]
    producer: Optional[str]
    retain: Optional[str]
    ephemeral: bool
    liveness: Optional[float]
    arrival: Optional[float]
    total: Optional[float]
    on_event: Optional[EventHook]
    before_publish: Optional[ReportHook]
    on_commit: Optional[ReportHook]


class SaveJob(Job):
    """A save in the background; of `async_save` and `Saver.save`."""

    _word = "save"
    _finishes_at_exit = True
    _wait_function = "tm_save_job_wait_for"
    _fd_function = "tm_save_job_fd"
    _cancel_function = "tm_save_job_cancel"
    _free_function = "tm_save_job_free"
    _staged_function = "tm_save_job_wait_staged"
    _staged_fd_function = "tm_save_job_staged_fd"
    _failures = _FAILURES

    def wait_staged(self, timeout: Optional[float] = None) -> None:
        """Until the tensors may be changed again: their bytes are copied (or the save is over).
        Raises what made the save fail before that; TimeoutError after `timeout` seconds."""
        self._check_process()
        self._wait(self._poll_staged, timeout, "staged")

    def _poll_staged(self, most_ms: int) -> bool:
        done = ctypes.c_int32()
        status = self._lib.tm_save_job_wait_staged(
            self._address, most_ms, ctypes.addressof(done)
        )
        if status:
            self._state.asked()
            _abi.fail(status, _FAILURES)
        return bool(done.value)

    def progress(self) -> dict[str, Any]:
        """How far this rank is: state ("staging", "saving", "committed", "failed", "cancelled"),
        bytes_total, bytes_staged, bytes_written, stalled_seconds (waiting for memory). Never
        waits."""
        self._check_process()
        found = _abi.JobProgress(struct_size=ctypes.sizeof(_abi.JobProgress))
        status = self._lib.tm_save_job_progress(self._address, ctypes.addressof(found))
        if status:
            _abi.fail(status)
        self._state.release()
        said = _numbers(found)
        said["state"] = _STATES[found.state]
        return said

    def _moved(self) -> tuple[int, int]:
        said = self.progress()
        return said["bytes_written"], said["bytes_total"]

    def _take_report(self, address: int) -> dict[str, Any]:
        try:
            return _report(self._lib, address)
        finally:
            self._free_report(address)

    def _free_report(self, address: int) -> None:
        self._lib.tm_save_report_free(address)


def save(
    state: Any,
    path: PathLike,
    group: Any = None,
    *,
    objects: Optional[Mapping[str, bytes]] = None,
    rank_objects: Optional[Mapping[str, bytes]] = None,
    metadata: Optional[Mapping[str, Any]] = None,
    progress: Progress = None,
    **options: Unpack[SaveOptions],
) -> dict[str, Any]:
    """Saves a state dict as checkpoint "STORE/NAME". Collective: every rank of `group` calls it with
    its part, and every rank gets the same verdict. When it returns the checkpoint is complete and
    durable; when it raises it is not there.

    state     a dict (or list, tuple), nested as one likes, of arrays of NumPy, tensors and DTensors
              of PyTorch, arrays of JAX, and plain values. Tensors that are no DTensors are the same
              on all ranks that have them; so are plain values, but those in PerRank(...).
    path      the store is made on first use.
    group     Group; None: this process alone.
    objects, rank_objects   bytes by key: the same on all ranks that give them; one from each rank.
    metadata  what the application says about the checkpoint as a whole.
    progress  called with the bytes that this rank has written and has to write, while the call
              waits; True: a bar, where tqdm is installed.

    Options, which are the same on all ranks but for the hooks:

    replace   an existing checkpoint of that name is exchanged for the new one at its commit.
    placement "auto", "tensor-file", "rank-shard", "safetensors": docs/semantics.md.
    replicas  "rotating", "full", "off": how much of what several ranks hold is compared.
    strategy  "parallel"; "main": the main replica alone writes.
    common, common_exempt   "error", "warn", "off": plain values that differ between ranks; globs of
              names for which nobody cares.
    validate  False: ranks do not prove beforehand that they cover every tensor exactly.
    page_hashes   hashes of 4 KiB as well, for reads of few rows.
    reuse     "auto": what the latest checkpoint of the store holds already, byte for byte, is linked
              and not written; "off"; or the name of another checkpoint of the store.
    full_every    of so many saves in a row one writes everything anew (50); 0: none does.
    inherit   the name of a checkpoint of the store: what no rank has is taken from it, by hard
              links, so that the new one is whole.
    retain    rules, as of `Store.prune`, by which rank 0 removes checkpoints of the store after the
              commit: "last=3,every=1000"; "policy": the store's own. What goes wrong there fails no
              save.
    ephemeral the checkpoint goes when the next one is committed.
    liveness, arrival, total   time-outs in seconds: a rank that is silent for so long is taken for
              dead (30), one that does not come is given up (1,800), the whole call (none).
    on_event  called with a dict for the begin and end of each phase, on a thread of the library.
    before_publish   called with the report so far (path, uuid, files, bytes_written_here, ...) once
              this rank's bytes are durable, and nothing is published yet. What it raises fails the
              save on all ranks. It may take its time, but must not use the group.
    on_commit called with the report once the checkpoint is there, before `save` returns or the job's
              verdict comes. What it raises is logged.

    Returns the report: path, uuid, generation, tensors, bytes, bytes_written, files, warnings,
    pruned and not_pruned (of rank 0), seconds of each phase, ... Raises LayoutError (its key, box and cause), AlreadyExistsError,
    PeerTimeout and PeerLost (their rank), DataLossError where replicas differ,
    ResourceExhaustedError, UnknownOutcomeError, CancelledError.

        >>> import numpy, tensormount as tm
        >>> report = tm.save({"w": numpy.zeros((4, 4), "f4"), "step": 3}, "STORE/new", replace=True)
        >>> report["tensors"], report["bytes"]
        (1, 64)
    """
    job, own = _start(
        "tm_save_in_place", state, path, group, options, objects, rank_objects, metadata, progress
    )
    report: dict[str, Any] = _verdict(job, own, progress)
    return report


def async_save(
    state: Any,
    path: PathLike,
    group: Any = None,
    *,
    objects: Optional[Mapping[str, bytes]] = None,
    rank_objects: Optional[Mapping[str, bytes]] = None,
    metadata: Optional[Mapping[str, Any]] = None,
    exit_wait: float = EXIT_WAIT,
    **options: Unpack[SaveOptions],
) -> SaveJob:
    """As `save`, in the background: returns when the bytes of this rank's tensors are copied, and
    never waits for another rank (but the third save under way waits for the first). The tensors may
    change from then on.

        >>> import numpy, tensormount as tm
        >>> weights = numpy.ones(1000, "f4")
        >>> job = tm.async_save({"w": weights}, "STORE/background", replace=True)
        >>> weights[:] = 2  # Training goes on.
        >>> job.wait()["tensors"]
        1

    exit_wait: seconds that the end of the interpreter waits for the save, so that it is committed also
    where it is the last line of a script; 0: it is cancelled then. What is lost is logged as an error,
    as is a failure that nobody asks for.

    In a coroutine `await job` does not block the loop. What this rank does wrong is raised here; the
    other ranks have it in their jobs. `Saver` has memory of its own for the copies, and bounds.
    """
    wait = exit_wait_of(exit_wait)
    job, own = _start(
        "tm_save_async", state, path, group, options, objects, rank_objects, metadata
    )
    job._state.exit_wait = wait
    if own is not None:
        job._refuse(own)
    return job


def validate(
    state: Any,
    group: Any = None,
    *,
    limit: int = 100,
    liveness: Optional[float] = None,
    arrival: Optional[float] = None,
    total: Optional[float] = None,
) -> dict[str, Any]:
    """Whether what the ranks hold together is a checkpoint. Collective; reads no data, so that
    tensors on the meta device will do.

    Returns the report, the same on every rank: "ok", "tensors", "bytes", "findings" (each with key,
    box, ranks, message and likely cause), at most `limit` of them.
    """
    group = _group(group)
    given = _abi.ValidateOptions(struct_size=ctypes.sizeof(_abi.ValidateOptions))
    try:
        given.limit = limit
        set_times(given, liveness, arrival, total)
    except Exception as error:
        state = Unmade(error)  # The call tells the other ranks, who would wait for this one.
    with group._handle() as handle:
        built, own = build(state, group, _shards.VALIDATE)
        sound = ctypes.c_int32()

        def call(task: int) -> bytes:
            given.task = task
            return _abi.get_text(
                _abi.library().tm_validate, built.address, handle.address, ctypes.addressof(given),
                ctypes.addressof(sound),
            )

        found = in_background(call, handle=handle, own=own)
    import json

    report: dict[str, Any] = json.loads(found)
    report["ok"] = bool(sound.value)
    return report


def dump_spec(
    state: Any,
    path: Optional[PathLike] = None,
    group: Any = None,
    *,
    liveness: Optional[float] = None,
    arrival: Optional[float] = None,
    total: Optional[float] = None,
) -> str:
    """The layout of what the ranks hold together, as a text that `tensormount check` judges as
    `validate` does, without the job (docs/spec.md). Collective; reads no data, so that tensors on the
    meta device will do.

    state     as of `save`; plain values are left out.
    path      the file that rank 0 writes, or exchanges for the new one; None: none. OSError there, and
              on no other rank.
    liveness, arrival, total   as of `save`.

    Returns the text on rank 0, "" elsewhere.

        >>> import numpy, tensormount as tm
        >>> text = tm.dump_spec({"w": numpy.zeros((4, 8), "f4")}, "job.json")
        >>> '"key":"w","dtype":"f32","shape":[4,8]' in text
        True
    """
    group = _group(group)
    given = _abi.ValidateOptions(struct_size=ctypes.sizeof(_abi.ValidateOptions))
    try:
        set_times(given, liveness, arrival, total)
        if path is not None and os.fsdecode(path_bytes(path)).split("/")[0] == "~":
            raise UnsupportedError(f"{os.fspath(path)}: only a shell expands ~; os.path.expanduser() does")
    except Exception as error:
        state = Unmade(error)  # The call tells the other ranks, who would wait for this one.
    with group._handle() as handle:
        built, own = build(state, group, _shards.VALIDATE)

        def call(task: int) -> bytes:
            given.task = task
            return _abi.get_text(
                _abi.library().tm_dump_spec, built.address, handle.address, ctypes.addressof(given)
            )

        text: str = in_background(call, handle=handle, own=own).decode("utf-8", "surrogateescape")
    if path is not None and group.rank == 0:
        _write(os.fspath(path), text)
    return text


# ---- How -----------------------------------------------------------------------------------------


def build(
    state: Any,
    group: Any,
    purpose: str,
    objects: Optional[Mapping[str, bytes]] = None,
    rank_objects: Optional[Mapping[str, bytes]] = None,
    metadata: Optional[Mapping[str, Any]] = None,
) -> tuple[State, Optional[BaseException]]:
    """The state for the library, and what was wrong with it. What this rank finds wrong fails the
    job on all ranks, so the job must be begun all the same."""
    built = State()
    try:
        if isinstance(state, Unmade):
            raise state.error
        flat = _tree.flatten(state)
        built.add_tensors(flat.items(), purpose, cache_of(group), group.size)
        if purpose == _shards.SAVE:
            built.set_values(*flat.json_texts())
            for key, data in (objects or {}).items():
                built.add_object(key, _bytes(key, data))
            for key, data in (rank_objects or {}).items():
                built.add_object(key, _bytes(key, data), (group.rank,), (group.size,))
            if metadata is not None:
                built.set_metadata(metadata)
    except Exception as error:
        built.fail(error)
        return built, error
    return built, None


def _write(path: str, text: str) -> None:
    """A file with that text, which appears whole, or in the place of an earlier one. What is no file (a
    pipe, /dev/stdout) is written to."""
    at = os.path.realpath(path)
    plain = not os.path.exists(at) or os.path.isfile(at)
    temporary = f"{at}.{os.getpid()}.tmp" if plain else path
    try:
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            if plain:
                file.flush()
                os.fsync(file.fileno())
        if plain:
            os.replace(temporary, at)
    except BaseException:
        if plain:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


def _bytes(key: str, data: Any) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidArgumentError(f"object {key}: {type(data).__name__}, no bytes", key=key)
    return bytes(data)


def _group(group: Any) -> Any:
    """The group, or one of this process alone."""
    if group is not None:
        return group
    from tensormount._group import Group

    return Group.single()


def saving_group(group: Any) -> Any:
    """As `_group`, for whoever writes: ranks that each save alone would exclude each other, or the
    last would win."""
    if group is None:
        from tensormount._group import launched_among_others

        found = launched_among_others()
        if found is not None:
            raise InvalidArgumentError(
                f"group=None: this is rank {found.rank} of {found.size} ({found.names}), and would save "
                "alone. group=tm.Group.from_env() saves with the other ranks; within `if rank == 0:`, "
                "group=tm.Group.single() saves what this one has"
            )
    return _group(group)


def _start(
    function: str,
    state: Any,
    path: PathLike,
    group: Any,
    options: SaveOptions,
    objects: Optional[Mapping[str, bytes]],
    rank_objects: Optional[Mapping[str, bytes]],
    metadata: Optional[Mapping[str, Any]],
    progress: Progress = None,
) -> tuple[SaveJob, Optional[BaseException]]:
    group = saving_group(group)
    with group._handle() as handle:
        given, kept, state, path = _called(state, path, group, options, progress)
        built, own = build(state, group, _shards.SAVE, objects, rank_objects, metadata)
        call = getattr(_abi.library(), function)
        return begin(SaveJob, call, built, path, group, handle, given, kept), own


def _called(
    state: Any, path: PathLike, group: Any, options: SaveOptions, progress: Progress = None
) -> tuple[Any, list[Any], Any, PathLike]:
    """tm_save_options, what they point to, state and path of a call. Where an argument is wrong on this
    rank of several the state is Unmade: the save begins all the same, to fail on all ranks."""
    try:
        path_bytes(path)
        check_progress(progress)
        return (*read_options(**options), state, path)
    except Exception as error:
        if group.size == 1:
            raise
        return (*read_options(), Unmade(error), UNKNOWN_PATH)


def _verdict(job: Job, own: Optional[BaseException], progress: Progress = None) -> Any:
    """The report; where this rank itself was at fault, its own exception with all that it knows."""
    if own is None:
        return job.wait(progress=progress)
    try:
        job.wait()
    except Exception as told:
        raise own from told
    raise own


def _choice(name: str, value: str, choices: tuple[str, ...]) -> int:
    if value not in choices:
        raise InvalidArgumentError(f"{name}={value!r}: one of {', '.join(choices)}")
    return choices.index(value)


def read_options(**options: Unpack[SaveOptions]) -> tuple[Any, list[Any]]:
    """tm_save_options, and what it points to. TypeError for an option that there is not."""
    unknown = options.keys() - SaveOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"a save has no option {', '.join(sorted(unknown))}")
    given = _abi.SaveOptions(struct_size=ctypes.sizeof(_abi.SaveOptions))
    kept: list[Any] = []
    given.placement = _choice("placement", options.get("placement", "auto"), _PLACEMENTS)
    given.replica_check = _choice("replicas", options.get("replicas", "rotating"), _REPLICAS)
    given.strategy = _choice("strategy", options.get("strategy", "parallel"), _STRATEGIES)
    given.common_check = _choice("common", options.get("common", "error"), _COMMON)
    given.replace = flag("replace", options.get("replace", False))
    given.skip_validation = 1 - flag("validate", options.get("validate", True))
    given.page_hashes = flag("page_hashes", options.get("page_hashes", False))
    reuse = options.get("reuse", "auto")
    if not isinstance(reuse, str):
        raise InvalidArgumentError(f"reuse={reuse!r}: auto, off, or the name of a checkpoint")
    given.no_reuse = int(reuse == "off")
    if reuse not in ("auto", "off"):
        given.reuse_from = text(reuse)
    full_every = options.get("full_every", 50)
    if isinstance(full_every, bool) or not isinstance(full_every, int) or full_every < 0:
        raise InvalidArgumentError(f"full_every={full_every!r}: a number of saves, or 0")
    given.full_every = min(full_every, 2**31 - 1) or -1
    inherit = options.get("inherit")
    if inherit is not None:
        if not isinstance(inherit, str):
            raise InvalidArgumentError(f"inherit={inherit!r}: the name of a checkpoint")
        given.inherit = text(inherit)
    given.common_exempt, given.common_exempt_count = texts(options.get("common_exempt", ()), kept)
    producer = options.get("producer")
    if producer is not None:
        if not isinstance(producer, str):
            raise InvalidArgumentError(f"producer={producer!r}: a text was expected")
        given.producer = text(producer)
    retain = options.get("retain")
    if retain is not None:
        if not isinstance(retain, str):
            raise InvalidArgumentError(f"retain={retain!r}: a text was expected")
        given.retention = text(retain)
    given.ephemeral = flag("ephemeral", options.get("ephemeral", False))
    set_times(given, options.get("liveness"), options.get("arrival"), options.get("total"))
    set_hook(given, options.get("on_event"), kept)
    set_save_hooks(given, options.get("before_publish"), options.get("on_commit"), _report, kept)
    return given, kept


def flag(name: str, value: Any) -> int:
    """A yes or no; not the text "no", which would be yes."""
    if value not in (True, False):
        raise InvalidArgumentError(f"{name}={value!r}: True or False")
    return int(value)


def _numbers(structure: Any) -> dict[str, Any]:
    """Fields of a structure by name, but those that are only of C."""
    return {
        name: getattr(structure, name)
        for name, *_ in structure._fields_
        if name not in ("struct_size", "reserved", "reserved2")
    }


def _report(lib: Any, address: int) -> dict[str, Any]:
    numbers = _abi.SaveNumbers(struct_size=ctypes.sizeof(_abi.SaveNumbers))
    status = lib.tm_save_report_numbers(address, ctypes.addressof(numbers))
    if status:
        _abi.fail(status)
    said: dict[str, Any] = {
        "path": lib.tm_save_report_path(address).decode("utf-8", "surrogateescape"),
        "uuid": lib.tm_save_report_uuid(address).decode(),
        "base": lib.tm_save_report_base(address).decode("utf-8", "surrogateescape"),
        "note": lib.tm_save_report_note(address).decode("utf-8", "surrogateescape"),
    }
    said.update(_numbers(numbers))
    said["plan_reused"] = bool(said["plan_reused"])
    for name in ("files", "warnings", "pruned", "not_pruned"):
        said[name] = _abi.get_list(getattr(lib, f"tm_save_report_{name}"), address)
    return said
