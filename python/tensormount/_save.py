# SPDX-License-Identifier: Apache-2.0
"""Saving: `save`, `async_save`, `validate`, `dump_spec`."""

from __future__ import annotations

import contextlib
import ctypes
import json
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
    FailedState,
    State,
    cache_of,
    path_bytes,
    text,
    texts,
)
from tensormount._tasks import run_in_background
from tensormount.errors import InvalidArgumentError, LayoutError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Unpack
else:
    from tensormount._jobs import Unpack

PathLike = Union[str, "os.PathLike[str]"]

_PLACEMENTS = ("auto", "tensor-file", "rank-shard", "safetensors")
_REPLICAS = ("rotating", "full", "off", "warn")
_STRATEGIES = ("parallel", "main")
_COMMON = ("error", "warn", "off")
_STATISTICS = ("basic", "off")
_NONFINITE = ("allow", "warn", "refuse")
_STATES = ("staging", "saving", "committed", "failed", "cancelled")
_FAILURES = {_abi.TM_INVALID_ARGUMENT: LayoutError}  # This status of a save nearly always means a wrong layout.


class SaveOptions(TypedDict, total=False):
    """Options of `save`, `async_save`, `Saver.save`, tensormount.torch and `Writer`; see `save`."""

    replace: bool
    placement: str
    replicas: str
    strategy: str
    common: str
    common_exempt: Sequence[str]
    validate: bool
    page_hashes: bool
    statistics: str
    nonfinite: str
    nonfinite_exempt: Sequence[str]
    reuse: str
    full_every: int
    inherit: Optional[str]
    producer: Optional[str]
    retain: Optional[str]
    ephemeral: bool
    staging: Optional[PathLike]
    writers: int
    liveness: Optional[float]
    arrival: Optional[float]
    total: Optional[float]
    on_event: Optional[EventHook]
    before_publish: Optional[ReportHook]
    on_commit: Optional[ReportHook]


class SaveJob(Job):
    """A background save, made by `async_save` or `Saver.save`."""

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
        """Waits until the tensors may be changed: their bytes are copied, or the save is over.

        Raises the failure of the save if it failed before that; TimeoutError after `timeout` seconds.
        """
        self._check_process()
        self._wait(self._poll_staged, timeout, "staged")

    def _poll_staged(self, most_ms: int) -> bool:
        done = ctypes.c_int32()
        status = self._lib.tm_save_job_wait_staged(
            self._address, most_ms, ctypes.addressof(done)
        )
        if status:
            self._state.mark_reported()
            _abi.fail(status, _FAILURES)
        return bool(done.value)

    def progress(self) -> dict[str, Any]:
        """The progress of this rank, without waiting, as a dict:

        state             "staging", "saving", "committed", "failed" or "cancelled"
        bytes_total, bytes_staged, bytes_written
        stalled_seconds   time spent waiting for memory
        """
        self._check_process()
        found = _abi.JobProgress(struct_size=ctypes.sizeof(_abi.JobProgress))
        status = self._lib.tm_save_job_progress(self._address, ctypes.addressof(found))
        if status:
            _abi.fail(status)
        self._state.release()
        said = {name: getattr(found, name) for name, *_ in found._fields_ if name != "struct_size"}
        said["state"] = _STATES[found.state]
        return said

    def _bytes_done(self) -> tuple[int, int]:
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
    """Saves a state dict as checkpoint "STORE/NAME".

    Collective: every rank of `group` calls it with its part, and all ranks get the same verdict. When it
    returns, the checkpoint is complete and durable. If it raises, the checkpoint does not exist (after
    UnknownOutcomeError, or an exception of a signal handler, it may).

    state     a dict (or list, tuple), nested as you like, of NumPy arrays, PyTorch tensors and DTensors,
              JAX arrays, and plain values. An object with state_dict() and load_state_dict() is saved
              through it. Tensors other than DTensors, and plain values, must be equal
              on all ranks that have them; put a value that differs into PerRank(...).
    path      "STORE/NAME". The first save makes the store.
    group     Group; None: this process alone.
    objects, rank_objects   bytes by key: the same on all ranks that give them; one for each rank.
    metadata  values that describe the checkpoint as a whole.
    progress  called during the call with the bytes that this rank has written and has to write; True:
              draws a bar if tqdm is installed.

    Options, which must be the same on all ranks, except writers and the hooks (on_event, before_publish, on_commit):

    replace   True: if the name exists, the commit exchanges that checkpoint for the new one.
    placement "auto", "tensor-file", "rank-shard", "safetensors": which files the data go to.
    replicas  "rotating", "full", "off": how many replicas of each cell are compared; a difference is a
              DataLossError. "warn": as "rotating", but a difference is a warning of the report and the log,
              and the lowest rank's copy is stored, as DCP does; likewise for objects.
    strategy  "parallel": all holders of a replica write a part of it; "main": the main replica writes.
    common    "error", "warn", "off": what happens if a plain value differs between ranks.
    common_exempt   globs of names of plain values that are not compared.
    validate  False: skip the proof, before writing, that the ranks cover every tensor exactly.
    page_hashes   True: also store hashes of 4 KiB pages, for reads of few rows.
    statistics    "basic": zeros, NaNs, infinities and the largest magnitude of each tensor are counted while
              it is hashed, and kept with the checkpoint; "off": they are not.
    nonfinite "refuse": a tensor with NaNs or infinities fails the save on all ranks, before anything is
              published (InvalidArgumentError with key and rank); "warn": a warning of the report and the
              log; "allow".
    nonfinite_exempt   globs of keys of tensors that may have them: ("*.mask",).
    reuse     "auto": data that the latest checkpoint of the store already has, byte for byte, are hard
              linked instead of written; "off": all data are written; or the name of the checkpoint to
              link to.
    writers   threads that read, hash and write this rank's data, each into files of its own (at most 16); 0: as
              many as the machine has cores for each of its ranks, at most 8, and half of them in the background.
    full_every    number of saves in a row of which one writes all data anew (50); 0: none does.
    inherit   the name of a checkpoint of the store: keys that no rank has are hard linked from it.
    retain    rules for `Store.prune` ("last=3,every=1000"), or "policy" for the store's own. Rank 0 removes
              checkpoints by them after the commit; a failure to do so does not fail the save.
    ephemeral True: the checkpoint is temporary; the next commit removes it.
    staging   for a path "s3://BUCKET/STORE/NAME": a directory that all ranks see. The save is made there, and rank
              0 copies it into the bucket before the call or job ends (docs/remote.md, "Saves"). None: the
              environment variable TENSORMOUNT_STAGING.
    liveness, arrival, total   timeouts in seconds: silence after which a rank counts as dead (30), wait
              for a rank that does not come (1,800), the whole call (none).
    on_event  called with a dict at the begin and end of each phase, on a thread of the library.
    before_publish   called with the report so far (path, uuid, files, bytes_written_here, ...) when this
              rank's bytes are durable and nothing is published yet. If it raises, the save fails on all
              ranks. It may take its time, but must not use the group.
    on_commit called with the report once the checkpoint is published, before `save` returns or the job
              has its verdict. Exceptions in it are logged.

    Returns the report, a dict: path, uuid, generation, tensors, bytes, bytes_written, files, warnings,
    pruned and not_pruned (on rank 0), seconds of each phase, ...

    Raises LayoutError (with key, box and cause), AlreadyExistsError, PeerTimeout and PeerLost (with rank),
    DataLossError if replicas differ, ResourceExhaustedError, UnknownOutcomeError, CancelledError.

        >>> import numpy, tensormount as tm
        >>> report = tm.save({"w": numpy.zeros((4, 4), "f4"), "step": 3}, "STORE/new", replace=True)
        >>> report["tensors"], report["bytes"]
        (1, 64)
    """
    job, own = _start(
        "tm_save_in_place", state, path, group, options, objects, rank_objects, metadata, progress
    )
    report: dict[str, Any] = _await_verdict(job, own, progress)
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
    """Saves in the background: returns a SaveJob when the bytes of this rank's tensors are copied.

    Parameters and options as for `save`. The tensors may change from then on. The call never waits for
    another rank; with two saves under way, a third waits for the first.

        >>> import numpy, tensormount as tm
        >>> weights = numpy.ones(1000, "f4")
        >>> job = tm.async_save({"w": weights}, "STORE/background", replace=True)
        >>> weights[:] = 2  # Training goes on.
        >>> job.wait()["tensors"]
        1

    exit_wait   seconds that the end of the interpreter waits for the save, so that it may be the last line
                of a script (600); 0: the save is cancelled then. A lost save is logged as an error.

    Call `job.wait()` or `job.exception()`: otherwise a failure is only logged. In a coroutine
    `await job` does not block the event loop. A mistake of this rank is raised by this call; the other
    ranks get it from their jobs. `Saver` has its own memory for the copies, with limits.
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
    """Checks that the parts of all ranks form a valid checkpoint. Collective.

    Reads no data, so that tensors on the meta device suffice. `state` and `group` as for `save`.

    limit     the most findings that are returned.
    liveness, arrival, total   as for `save`.

    Returns the report, the same on every rank: "ok", "tensors", "bytes", "findings" (each with key, box,
    ranks, message and likely cause).
    """
    group = _group(group)
    given = _abi.ValidateOptions(struct_size=ctypes.sizeof(_abi.ValidateOptions))
    try:
        given.limit = limit
        set_times(given, liveness, arrival, total)
    except Exception as error:
        state = FailedState(error)  # The call still happens, so that it fails on all ranks.
    with group._handle() as handle:
        built, own = build(state, group, _shards.VALIDATE)
        sound = ctypes.c_int32()

        def call(task: int) -> bytes:
            given.task = task
            return _abi.get_text(
                _abi.library().tm_validate, built.address, handle.address, ctypes.addressof(given),
                ctypes.addressof(sound),
            )

        found = run_in_background(call, handle=handle, own=own)
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
    """Describes the layout of all ranks as a text that `tensormount check` can validate without the job.

    Collective. The text is in the format of docs/spec.md. Reads no data, so that tensors on the meta device
    suffice.

    state     as for `save`; plain values are left out.
    path      the file that rank 0 writes or replaces; None: none. OSError is raised on rank 0 only.
    liveness, arrival, total   as for `save`.

    Returns the text on rank 0, "" on other ranks.

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
            raise UnsupportedError(f"{os.fspath(path)}: only a shell expands ~; use os.path.expanduser()")
    except Exception as error:
        state = FailedState(error)  # The call still happens, so that it fails on all ranks.
    with group._handle() as handle:
        built, own = build(state, group, _shards.VALIDATE)

        def call(task: int) -> bytes:
            given.task = task
            return _abi.get_text(
                _abi.library().tm_dump_spec, built.address, handle.address, ctypes.addressof(given)
            )

        text: str = run_in_background(call, handle=handle, own=own).decode("utf-8", "surrogateescape")
    if path is not None and group.rank == 0:
        _write(os.fspath(path), text)
    return text


# ---- Implementation -----------------------------------------------------------------------------------------


def build(
    state: Any,
    group: Any,
    purpose: str,
    objects: Optional[Mapping[str, bytes]] = None,
    rank_objects: Optional[Mapping[str, bytes]] = None,
    metadata: Optional[Mapping[str, Any]] = None,
) -> tuple[State, Optional[BaseException]]:
    """The state for the library, and this rank's own error or None. After an error the job must still begin, so
    that it fails on all ranks."""
    built = State()
    try:
        if isinstance(state, FailedState):
            raise state.error
        from tensormount._stateful import with_states

        flat = _tree.flatten(with_states(state), purpose=purpose)
        built.add_tensors(flat.items(), purpose, cache_of(group), group.size)
        if purpose == _shards.SAVE:
            built.set_values(*flat.json_texts())
            for key, data in (objects or {}).items():
                built.add_object(key, _bytes(key, data))
            for key, part in flat.objects():
                built.add_object(key, _bytes(key, part.data), part.index, part.grid)
            for key, data in (rank_objects or {}).items():
                built.add_object(key, _bytes(key, data), (group.rank,), (group.size,))
            if metadata is not None:
                built.set_metadata(metadata)
    except Exception as error:
        built.fail(error)
        return built, error
    return built, None


def _write(path: str, text: str) -> None:
    """Writes a file atomically; it may replace an earlier one. A pipe or device is written to."""
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
        raise InvalidArgumentError(f"object {key}: {type(data).__name__}, bytes were expected", key=key)
    return bytes(data)


def _group(group: Any) -> Any:
    """The group, or one of this process alone. InvalidArgumentError: it is another object."""
    from tensormount._group import Group

    if group is None:
        return Group.single()
    if not isinstance(group, Group):
        name = {"ProcessGroup": "group", "DeviceMesh": "mesh.get_group()"}.get(type(group).__name__)
        hint = f": use tm.Group.from_torch({name}), once for a job" if name else ""
        raise InvalidArgumentError(f"group must be a tensormount.Group, not {type(group).__name__}{hint}")
    return group


def saving_group(group: Any) -> Any:
    """As `_group`, for saves. InvalidArgumentError: no group is given and a launcher started several ranks, which
    would each save alone."""
    if group is None:
        from tensormount._group import launched_with_others

        found = launched_with_others()
        if found is not None:
            raise InvalidArgumentError(
                f"group=None: this is rank {found.rank} of {found.size} ({found.names}), and would save "
                "alone. Pass group=tm.Group.from_env() to save with the other ranks, or, within "
                "`if rank == 0:`, group=tm.Group.single() to save only what this rank has"
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
        given, kept, state, path = _call_arguments(state, path, group, options, progress)
        built, own = build(state, group, _shards.SAVE, objects, rank_objects, metadata)
        call = getattr(_abi.library(), function)
        return begin(SaveJob, call, built, path, group, handle, given, kept), own


def _call_arguments(
    state: Any, path: PathLike, group: Any, options: SaveOptions, progress: Progress = None
) -> tuple[Any, list[Any], Any, PathLike]:
    """tm_save_options, the objects that they point to, the state and the path of a call. If an argument is wrong
    and the group has several ranks, the state is a FailedState, so that the save fails on all ranks."""
    try:
        path_bytes(path)
        check_progress(progress)
        return (*read_options(**options), state, path)
    except Exception as error:
        if group.size == 1:
            raise
        return (*read_options(), FailedState(error), UNKNOWN_PATH)


def _await_verdict(job: Job, own: Optional[BaseException], progress: Progress = None) -> Any:
    """Waits for the job and returns its report. Raises `own`, the error of this rank's arguments, if there is
    one."""
    if own is None:
        return job.wait(progress=progress)
    try:
        job.wait()
    except Exception as told:
        raise own from told
    raise own


def _choice_number(name: str, value: str, choices: tuple[str, ...]) -> int:
    if value not in choices:
        raise InvalidArgumentError(f"{name}={value!r}: must be one of {', '.join(choices)}")
    return choices.index(value)


def read_options(**options: Unpack[SaveOptions]) -> tuple[Any, list[Any]]:
    """tm_save_options, and the objects that they point to. TypeError: an unknown option."""
    unknown = options.keys() - SaveOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"a save has no option {', '.join(sorted(unknown))}")
    given = _abi.SaveOptions(struct_size=ctypes.sizeof(_abi.SaveOptions))
    kept: list[Any] = []
    given.placement = _choice_number("placement", options.get("placement", "auto"), _PLACEMENTS)
    given.replica_check = _choice_number("replicas", options.get("replicas", "rotating"), _REPLICAS)
    given.strategy = _choice_number("strategy", options.get("strategy", "parallel"), _STRATEGIES)
    given.common_check = _choice_number("common", options.get("common", "error"), _COMMON)
    given.replace = flag("replace", options.get("replace", False))
    given.skip_validation = 1 - flag("validate", options.get("validate", True))
    given.page_hashes = flag("page_hashes", options.get("page_hashes", False))
    statistics = options.get("statistics", "basic")
    if statistics == "full":
        raise UnsupportedError("statistics='full': a save takes the basic ones; `tensormount stats --full` takes all later")
    given.no_statistics = _choice_number("statistics", statistics, _STATISTICS)
    given.nonfinite = _choice_number("nonfinite", options.get("nonfinite", "allow"), _NONFINITE)
    given.nonfinite_exempt, given.nonfinite_exempt_count = texts(options.get("nonfinite_exempt", ()), kept)
    reuse = options.get("reuse", "auto")
    if not isinstance(reuse, str):
        raise InvalidArgumentError(f"reuse={reuse!r}: must be auto, off, or the name of a checkpoint")
    given.no_reuse = int(reuse == "off")
    if reuse not in ("auto", "off"):
        given.reuse_from = text(reuse)
    full_every = options.get("full_every", 50)
    if isinstance(full_every, bool) or not isinstance(full_every, int) or full_every < 0:
        raise InvalidArgumentError(f"full_every={full_every!r}: must be a number of saves, or 0")
    given.full_every = min(full_every, 2**31 - 1) or -1
    inherit = options.get("inherit")
    if inherit is not None:
        if not isinstance(inherit, str):
            raise InvalidArgumentError(f"inherit={inherit!r}: must be the name of a checkpoint")
        given.inherit = text(inherit)
    given.common_exempt, given.common_exempt_count = texts(options.get("common_exempt", ()), kept)
    producer = options.get("producer")
    if producer is not None:
        if not isinstance(producer, str):
            raise InvalidArgumentError(f"producer={producer!r}: a str was expected")
        given.producer = text(producer)
    retain = options.get("retain")
    if retain is not None:
        if not isinstance(retain, str):
            raise InvalidArgumentError(f"retain={retain!r}: a str was expected")
        given.retention = text(retain)
    given.ephemeral = flag("ephemeral", options.get("ephemeral", False))
    staging = options.get("staging")
    if staging is not None:
        given.staging = path_bytes(staging)
    writers = options.get("writers", 0)
    if isinstance(writers, bool) or not isinstance(writers, int) or not 0 <= writers <= 16:
        raise InvalidArgumentError(f"writers={writers!r}: must be a number of threads from 1 to 16, or 0")
    given.writers = writers
    set_times(given, options.get("liveness"), options.get("arrival"), options.get("total"))
    set_hook(given, options.get("on_event"), kept)
    set_save_hooks(given, options.get("before_publish"), options.get("on_commit"), _report, kept)
    return given, kept


def flag(name: str, value: Any) -> int:
    """1 or 0 for an option that is True or False. Other values are refused: the text "no" would be true."""
    if value not in (True, False):
        raise InvalidArgumentError(f"{name}={value!r}: must be True or False")
    return int(value)


def _report(lib: Any, address: int) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(_abi.get_text(lib.tm_save_report_json, address))
    # The path in the JSON report is not used, because JSON cannot hold bytes that are not UTF-8.
    said["path"] = lib.tm_save_report_path(address).decode("utf-8", "surrogateescape")
    return said
