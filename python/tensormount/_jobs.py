# SPDX-License-Identifier: Apache-2.0
"""What saves and loads have in common: jobs of the C library, waits that signals can interrupt, the
memory that they use, and the end of the process."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, Optional, TypeVar

from tensormount import _abi
from tensormount._progress import Meter, Progress
from tensormount._state import State, path_bytes, status_of
from tensormount.errors import (
    CancelledError,
    Error,
    InternalError,
    InvalidArgumentError,
    UnsupportedError,
)

log = logging.getLogger("tensormount")

# How long one call of the library waits: a signal handler of the host gets its turn after it.
_SLICE_MS = 50
# How long the end of the process waits for jobs that it has cancelled.
_LAST_SECONDS = 10.0
# How long it waits for saves under way that it has not, where `exit_wait` says nothing else.
EXIT_WAIT = 600.0

_pin = ctypes.pythonapi.Py_IncRef
_unpin = ctypes.pythonapi.Py_DecRef
for _function in (_pin, _unpin):
    _function.argtypes = [ctypes.py_object]
    _function.restype = None


def hold(held: list[Any]) -> None:
    """What the library is about to work with lives from now on, whatever becomes of Python."""
    if _ending:
        raise InternalError("the interpreter ends: no save or load can begin")
    _pin(held)


class Unpack:
    """As that of typing, for whoever asks for type hints where typing_extensions is not installed."""

    def __class_getitem__(cls, item: Any) -> Any:
        return item


EventHook = Callable[[dict[str, Any]], None]
ReportHook = Callable[[dict[str, Any]], None]
_EVENT_KINDS = ("start", "end", "error")
_in_hook = threading.local()
_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_abi.Event))
_BEFORE_PUBLISH = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
_ON_COMMIT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


def milliseconds(name: str, seconds: Optional[float]) -> int:
    """For options: 0 is the default of the library."""
    if seconds is None or seconds == float("inf"):
        return 0
    if not seconds > 0:
        raise ValueError(f"{name}={seconds!r}: seconds, more than 0")
    return max(1, min(int(seconds * 1000), 1 << 53))


def set_times(
    given: Any, liveness: Optional[float], arrival: Optional[float], total: Optional[float]
) -> None:
    """The time-outs of a job, in its options."""
    given.liveness_ms = milliseconds("liveness", liveness)
    given.arrival_ms = milliseconds("arrival", arrival)
    given.total_ms = milliseconds("total", total)


def _in_a_hook(call: Callable[[], None]) -> None:
    _in_hook.depth = getattr(_in_hook, "depth", 0) + 1
    try:
        call()
    finally:
        _in_hook.depth -= 1


def _check_hook(name: str, hook: Any) -> None:
    if hook is not None and not callable(hook):
        raise InvalidArgumentError(f"{name}={hook!r}: a function was expected")


def set_hook(given: Any, on_event: Optional[EventHook], kept: list[Any]) -> None:
    """`on_event` in the options of a job, as a C function, kept in `kept`, which must live as long as
    the job. It is called on threads of the library; what it raises is logged, since nobody there
    could catch it."""
    _check_hook("on_event", on_event)
    if on_event is None:
        return

    def call(_: Any, event: Any) -> None:
        try:
            e = event.contents
            said: dict[str, Any] = {
                "kind": _EVENT_KINDS[e.kind] if 0 <= e.kind < len(_EVENT_KINDS) else str(e.kind),
                "job": (e.job or b"").decode(),
                "path": (e.path or b"").decode("utf-8", "surrogateescape"),
                "phase": (e.phase or b"").decode(),
                "rank": e.rank,
                "bytes": e.bytes,
                "seconds": e.seconds,
            }
            if said["kind"] == "error":
                said["code"] = _abi.library().tm_status_name(e.status).decode()
                said["message"] = (e.message or b"").decode("utf-8", "surrogateescape")
            _in_a_hook(lambda: on_event(said))
        except Exception:
            log.exception("on_event")

    given.on_event = _keep(_HOOK(call), kept)


def set_save_hooks(
    given: Any,
    before_publish: Optional[ReportHook],
    on_commit: Optional[ReportHook],
    report: Callable[[Any, int], dict[str, Any]],
    kept: list[Any],
) -> None:
    """Those of a save that are given its report, which `report` makes of the library's. What
    `before_publish` raises fails the save on all ranks, and is raised on this one (`Raised`)."""
    lib = _abi.library()

    def ask(_: Any, address: int) -> int:
        assert before_publish is not None
        try:
            said = report(lib, address)
            _in_a_hook(lambda: before_publish(said))
            return 0
        except BaseException as error:  # There is nobody above to catch it.
            raised.error = error
            status, message = status_of(error)
            lib.tm_set_last_error(status, 0, b"before_publish: " + message)
            return status

    def tell(_: Any, address: int) -> None:
        assert on_commit is not None
        try:
            said = report(lib, address)
            _in_a_hook(lambda: on_commit(said))
        except BaseException:
            log.exception("on_commit")

    for name, hook in (("before_publish", before_publish), ("on_commit", on_commit)):
        _check_hook(name, hook)
    if before_publish is not None:
        raised = Raised()
        kept.append(raised)
        given.before_publish = _keep(_BEFORE_PUBLISH(ask), kept)
    if on_commit is not None:
        given.on_commit = _keep(_ON_COMMIT(tell), kept)


class Raised:
    """What a hook of this rank raised, for whoever waits for the job."""

    error: Optional[BaseException] = None


def _keep(hook: Any, kept: list[Any]) -> Any:
    kept.append(hook)
    return ctypes.cast(hook, ctypes.c_void_p)


def exit_wait_of(seconds: Any) -> float:
    """The option `exit_wait` of a save in the background."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise InvalidArgumentError(f"exit_wait={seconds!r}: seconds, 0 or more")
    return float(seconds)


def in_hook() -> bool:
    """Whether this is called by a hook, on a thread of the library, which must not wait for itself."""
    return getattr(_in_hook, "depth", 0) > 0


class Job:
    """A save or load that goes on in the background.

    Any thread may wait for it, for a time or until its end, and `await` it where an event loop runs.
    What the library works with (`held`) lives until the verdict, whatever happens to the job object:
    dropping it, an exception in `with`, the end of the interpreter. That end waits for saves
    (`exit_wait`) and cancels loads. A failure that nobody asked for by wait() or exception() is logged
    as an error (logger "tensormount") when the job is dropped or the process ends.
    """

    _word = "job"
    _finishes_at_exit = False
    # Functions of the library, by what they do.
    _wait_function = ""
    _fd_function = ""
    _cancel_function = ""
    _free_function = ""
    # Status to class, where a status means something narrower.
    _failures: dict[int, Any] = {}

    def __init__(self, out: ctypes.c_void_p, path: str, held: list[Any]) -> None:
        """`out`: where the library will put its job (`begin`)."""
        self._lib = _abi.library()
        self._out = out
        self._path = path
        self._process = os.getpid()
        self._report: Any = None
        self._failure: Optional[BaseException] = None
        self._done = False
        self._lock = threading.Lock()
        # The library's threads read or write this memory. It must outlive them even where nobody
        # refers to the job any more, and where the interpreter has forgotten its modules.
        self._held: list[Any] = held  # Held since before the library was called.
        self._state = _Live(self)

    @property
    def _address(self) -> int:
        return self._out.value or 0

    # ---- Waiting -----------------------------------------------------------------------------

    def wait(self, timeout: Optional[float] = None, *, progress: Progress = None) -> Any:
        """Until the verdict, which is the report, or the exception that the job failed with.

        timeout: seconds; TimeoutError where the verdict is not there by then (the job goes on).
        progress: called with the bytes that this rank has done and has in all; True: a bar, where
        tqdm is installed.
        Ctrl-C, or whatever else a signal handler or `progress` raises, ends the wait and cancels the
        job on all ranks; the exception goes on.
        """
        self._wait(self._poll, timeout, "over", progress)
        self._state.asked()
        if self._failure is not None:
            raise self._failure
        return self._report

    def done(self) -> bool:
        """Whether the verdict is there. Never waits."""
        return self._poll(0)

    def cancel(self) -> None:
        """Asks for the end of the job. The ranks vote: it ends with CancelledError on all of them, or
        its end comes first. Does not wait."""
        self._state.cancelled = True
        with self._lock:
            if not self._done:
                getattr(self._lib, self._cancel_function)(self._address)

    def exception(self) -> Optional[BaseException]:
        """What the job failed with; None where it did not, or is not over."""
        if not self._poll(0):
            return None
        self._state.asked()
        return self._failure

    def __await__(self) -> Generator[Any, None, Any]:
        return self._await().__await__()

    async def _await(self) -> Any:
        import asyncio

        loop = asyncio.get_running_loop()
        descriptor = self._descriptor(self._fd_function)
        if descriptor is not None and not self._poll(0):
            came = loop.create_future()
            loop.add_reader(descriptor, _set, came)
            try:
                await came
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        elif descriptor is not None:
            os.close(descriptor)
        return self.wait()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Waits for the verdict; cancels first where the block raised."""
        if kind is None:
            self.wait()
            return
        self.cancel()
        try:
            self.wait()
        except Exception as error:
            log.debug("%s %s: %s", self._word, self._path, error)

    def __reduce__(self) -> Any:
        raise UnsupportedError(f"a {self._word} is of its process")

    def __repr__(self) -> str:
        state = "under way" if not self._done else "failed" if self._failure else "done"
        return f"<tensormount.{type(self).__name__} {self._path!r}: {state}>"

    # ---- How ---------------------------------------------------------------------------------

    def _wait(
        self,
        poll: Callable[[int], bool],
        timeout: Optional[float],
        state: str,
        progress: Progress = None,
    ) -> None:
        """Until `poll`, which waits for at most so many milliseconds, is true: in slices, so that
        signal handlers get their turn. What they raise cancels the job (one that is over does not
        hear of it). TimeoutError after `timeout` seconds, which does not."""
        end = _ends(timeout)
        if not self._done:
            self._check_process()
        try:
            with Meter(progress, f"{self._word} {self._path}") as meter:
                while not poll(_SLICE_MS if end is None else _left(end)):
                    if meter.on:
                        meter.show(*self._moved())
                    if end is not None and time.monotonic() >= end:
                        break
                else:
                    if meter.on and poll == self._poll:
                        meter.end(*self._moved(), failed=self._failure is not None)
                    return
        except BaseException:
            self.cancel()
            raise
        raise TimeoutError(f"{self._word} {self._path}: not {state} after {timeout:g} s")

    def _moved(self) -> tuple[int, int]:
        """Bytes that this rank has done, and has in all."""
        raise NotImplementedError

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise UnsupportedError(
                f"the {self._word} is of process {self._process}, which this one was forked from"
            )

    def _poll(self, most_ms: int) -> bool:
        """Waits for at most one slice; takes the verdict where it is there."""
        if self._done:
            return True
        self._check_process()
        # Without the lock: waits of several threads are side by side.
        done = ctypes.c_int32()
        report = ctypes.c_void_p()
        status = getattr(self._lib, self._wait_function)(
            self._address, most_ms, ctypes.addressof(done), ctypes.addressof(report)
        )
        if status == 0 and not done.value:
            return False
        failure: Optional[BaseException] = None
        if status:
            try:
                _abi.fail(status, self._failures)
            except Exception as error:
                failure = self._raised_by_hook(error)
        with self._lock:
            if self._done:
                if report.value:
                    self._free_report(report.value)
                return True
            if failure is None:
                assert report.value is not None
                self._report = self._take_report(report.value)
            self._failure = failure
            self._end()
        return True

    def _end(self) -> None:
        # The library's job stays until this object goes: another thread may be waiting for it.
        self._done = True
        self._state.failed(self._failure)
        self._state.end()
        self._held = []

    def _descriptor(self, function: str) -> Optional[int]:
        """A descriptor of one's own that is readable once it is so; None where it is over."""
        with self._lock:
            if self._done:
                return None
            self._check_process()
            fd = ctypes.c_int()
            status = getattr(self._lib, function)(self._address, ctypes.addressof(fd))
            if status:
                _abi.fail(status)
            return os.dup(fd.value)  # That of the job goes with it.

    def _raised_by_hook(self, told: Exception) -> BaseException:
        """What a hook of this rank raised, where that is why the job failed."""
        for item in self._held:
            for one in item if isinstance(item, list) else ():
                if isinstance(one, Raised) and one.error is not None:
                    raised, one.error = one.error, None  # It has frames, and these what was saved.
                    raised.__cause__ = told
                    return raised
        return told

    def _take_report(self, address: int) -> Any:
        raise NotImplementedError

    def _free_report(self, address: int) -> None:
        raise NotImplementedError


_J = TypeVar("_J", bound=Job)


def begin(
    kind: type[_J],
    call: Callable[[int, bytes, int, int, int], int],
    built: State,
    path: Any,
    group: Any,
    handle: int,
    given: Any,
    *kept: Any,
) -> _J:
    """The job that a function of the library begins for a state, path, group (its `handle`) and
    options. What the library may use lives from before the call: it copies of the options what it
    needs but the hooks.
    What a signal handler raises meanwhile goes on from here; nobody has the job then, which is
    cancelled."""
    name = path_bytes(path)
    out = ctypes.c_void_p()
    held: list[Any] = [built, built.held, group, *kept]
    hold(held)
    # Before the call, so that there is no moment at which the library has a job and Python none.
    job = kind(out, os.fsdecode(name), held)
    try:
        status = call(built.address, name, handle, ctypes.addressof(given), ctypes.addressof(out))
        if status == 0:
            _live.add(job._state)
    except BaseException:
        if out.value is None:
            job._state.end()
        else:
            _live.add(job._state)
            job.cancel()
        raise
    if status:
        job._state.end()
        _abi.fail(status, kind._failures)
    return job


def _set(future: Any) -> None:
    if not future.done():
        future.set_result(None)


def _ends(timeout: Optional[float]) -> Optional[float]:
    """When a wait of so many seconds ends; None: never."""
    if timeout is None or timeout == float("inf"):
        return None
    if timeout != timeout:
        raise ValueError("timeout=nan: seconds")
    return time.monotonic() + timeout


def _left(end: float) -> int:
    return max(0, min(_SLICE_MS, int((end - time.monotonic()) * 1000) + 1))


class _Live:
    """A job of the library, without the object that its user has.

    The library's handle is freed once nobody waits for it any more, by whoever is the last; never at
    the end of the interpreter, when threads stop in the middle of a wait.
    """

    def __init__(self, job: Job) -> None:
        self.out = job._out
        self.process = job._process
        self.lib = job._lib
        self.names = (job._wait_function, job._cancel_function, job._free_function)
        self.label = f"{job._word} {job._path}"
        # Seconds that the end of the process waits for it; 0: it is cancelled.
        self.exit_wait = EXIT_WAIT if job._finishes_at_exit else 0.0
        # What it failed with, until somebody was told. The text: an exception has frames, which have
        # the job.
        self.failure: Optional[str] = None
        self.cancelled = False  # By this process.
        self.keeps = False  # What it holds, beyond its end.
        self.held = job._held
        self.over = False
        self.waiting = 0
        self.nobodys = False
        self.cancel_when_dropped = False
        self.lock = threading.Lock()
        weakref.finalize(job, self.dropped).atexit = False

    @property
    def address(self) -> int:
        """0: it has not begun, or was freed."""
        return self.out.value or 0

    def end(self) -> None:
        """The verdict is there, or it never began: the library is done with the memory."""
        with self.lock:
            if self.over:
                return
            self.over = True
        _live.discard(self)
        held, self.held = self.held, []
        if not self.keeps:
            _unpin(held)

    def dropped(self) -> None:
        """Nobody has the job any more."""
        if self.process != os.getpid() or _ending:
            return
        self.nobodys = True
        self.tell()
        if self.over:
            self.free()
        else:
            if self.cancel_when_dropped:
                self.cancel()
            # It ends by itself; somebody must give its memory back then.
            threading.Thread(target=self.await_end, name="tensormount-job", daemon=True).start()

    def free(self) -> None:
        with self.lock:
            if _ending or self.waiting > 0 or not self.nobodys or self.address == 0:
                return
            address, self.out.value = self.address, None
        getattr(self.lib, self.names[2])(address)

    def await_end(self) -> None:
        if self.wait(None):
            self.end()
            self.tell()
            self.free()

    def failed(self, failure: Optional[BaseException]) -> None:
        """The verdict. Where it is a failure somebody is to be told of it; where a device is still at
        the memory, that is kept for ever."""
        for one in (failure, getattr(failure, "__cause__", None)):
            self.keeps = self.keeps or getattr(one, "memory_in_use", False)
        if failure is None or (self.cancelled and isinstance(failure, CancelledError)):
            return
        # The text of an exception of a hook may be anything, and may raise.
        text = status_of(failure)[1].decode("utf-8", "replace")
        self.failure = f"{type(failure).__name__}: {text}" if isinstance(failure, Error) else text
        _untold.add(self)

    def asked(self) -> None:
        """Whoever has the job knows the verdict."""
        self.failure = None
        _untold.discard(self)

    def tell(self) -> None:
        """Logs a failure that nobody asked for. It is not raised: this rank alone would miss a
        collective call, and the others hang in it."""
        failure = self.failure
        if failure is not None:
            self.asked()
            log.error("%s failed: %s", self.label, failure)

    def wait(self, end: Optional[float]) -> bool:
        """Whether the verdict, which nobody asks for, came before `end`."""
        with self.lock:
            if self.address == 0:
                return True
            self.waiting += 1
        done = ctypes.c_int32()
        function = getattr(self.lib, self.names[0])
        try:
            while True:
                status = function(self.address, _SLICE_MS, ctypes.addressof(done), None)
                if status != 0:
                    try:
                        _abi.fail(status)
                    except Exception as error:
                        self.failed(error)
                    return True
                if done.value:
                    return True
                if end is not None and time.monotonic() > end:
                    return False
        finally:
            with self.lock:
                self.waiting -= 1

    def cancel(self) -> None:
        self.cancelled = True
        with self.lock:
            if not self.over and self.address != 0:
                getattr(self.lib, self.names[1])(self.address)

    def has_hook(self) -> bool:
        hooks = (_HOOK, _BEFORE_PUBLISH, _ON_COMMIT)
        return any(isinstance(item, list) and any(type(one) in hooks for one in item)
                   for item in self.held)


_live: set[_Live] = set()
_untold: set[_Live] = set()  # Over, failed, and nobody asked.
_ending = False


def await_all_of(owner: Any) -> None:
    """Until no job of a group or saver is under way: a load would go on with a group that is gone."""
    for job in _all_of(owner):
        if job.wait(None):
            job.end()


def cancel_all_of(owner: Any) -> None:
    for job in _all_of(owner):
        job.cancel()


def _all_of(owner: Any) -> list[_Live]:
    return [job for job in list(_live)
            if job.process == os.getpid() and any(one is owner for one in job.held)]


@atexit.register
def end_all() -> None:
    """While the interpreter still works: afterwards memory of arrays is gone, and a hook would call
    into nothing. Saves are finished, loads cancelled. What is lost is logged; this raises nothing."""
    global _ending
    _ending = True
    jobs = [job for job in list(_live) if job.process == os.getpid()]
    unfinished = [job for job in jobs if not _finish(job)]
    for job in unfinished:
        job.cancel()
    end = time.monotonic() + _LAST_SECONDS
    for job in unfinished:
        # One with a hook is waited for as long as it takes.
        if job.wait(None if job.has_hook() else end):
            job.end()
        # Otherwise its memory stays for ever.
    for job in list(_untold):
        if job.process == os.getpid():
            job.tell()


_interrupted = False


def _finish(job: _Live) -> bool:
    """Whether a job came to its end by itself, within its `exit_wait`. Ctrl-C ends the wait for all."""
    global _interrupted
    wait = 0.0 if job.cancel_when_dropped or _interrupted else job.exit_wait
    begin = time.monotonic()
    try:
        if wait > 0 and job.wait(begin + wait):
            job.end()
            return True
    except KeyboardInterrupt:
        _interrupted = True
    if job.exit_wait > 0 and not job.cancel_when_dropped:
        log.error(
            "%s is lost: the process ends, and it was not over after %.0f s%s", job.label,
            time.monotonic() - begin, " (interrupted)" if _interrupted else "",
        )
    return False


def _forked() -> None:
    global _ending
    _ending = False  # The child's own end comes later.
    _untold.clear()


os.register_at_fork(after_in_child=_forked)
