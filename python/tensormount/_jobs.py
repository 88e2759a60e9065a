# SPDX-License-Identifier: Apache-2.0
"""Jobs of the C library (saves and loads): waits that signals can interrupt, the memory that jobs use, and the
end of the process."""

from __future__ import annotations

import _thread
import atexit
import collections
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, NoReturn, Optional, TypeVar

from tensormount import _abi
from tensormount._progress import Meter, Progress
from tensormount._state import State, path_bytes, status_of
from tensormount._tasks import block_signals
from tensormount.errors import (
    CancelledError,
    Error,
    InternalError,
    InvalidArgumentError,
    UnsupportedError,
)

log = logging.getLogger("tensormount")

# The longest wait within one call of the library, in milliseconds. Signal handlers run between two calls.
_SLICE_MS = 50
# Seconds that the end of the process waits for cancelled jobs.
_CANCEL_SECONDS = 10.0
# Default of `exit_wait`: seconds that the end of the process waits for a save.
EXIT_WAIT = 600.0
# Default of `liveness`, in seconds.
_LIVENESS = 30.0

# This module has no locks. A signal handler or finalizer may interrupt a thread at any point and use the same job: with
# a plain lock it would deadlock, and with a reentrant lock it would see a half-made change. Shared containers are
# changed only by single atomic operations (append, pop, remove), so that at most one thread gets an object.

_pin = ctypes.pythonapi.Py_IncRef
_unpin = ctypes.pythonapi.Py_DecRef
for _function in (_pin, _unpin):
    _function.argtypes = [ctypes.py_object]
    _function.restype = None


def hold(held: list[Any]) -> None:
    """Keeps `held` alive for the library, also during the shutdown of Python. `_unpin` releases it.

    InternalError: the shutdown has begun.
    """
    if _ending:
        raise InternalError("the interpreter is shutting down: no save or load can begin")
    _pin(held)


class Unpack:
    """Replaces typing_extensions.Unpack at run time, so that type hints can be read without that package."""

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
    """Converts a timeout option. None becomes 0, which is the default of the library; infinity becomes more than a
    year, which is no limit."""
    if seconds is None:
        return 0
    if seconds == float("inf"):
        return 1 << 53
    if not seconds > 0:
        raise ValueError(f"{name}={seconds!r}: must be a number of seconds greater than 0")
    return max(1, min(int(seconds * 1000), 1 << 53))


def set_times(
    given: Any, liveness: Optional[float], arrival: Optional[float], total: Optional[float]
) -> None:
    """Sets the timeouts (seconds) in the options of a job."""
    given.liveness_ms = milliseconds("liveness", liveness)
    given.arrival_ms = milliseconds("arrival", arrival)
    given.total_ms = milliseconds("total", total)


def _run_hook(call: Callable[[], None]) -> None:
    _in_hook.depth = getattr(_in_hook, "depth", 0) + 1
    try:
        call()
    finally:
        _in_hook.depth -= 1


def _check_hook(name: str, hook: Any) -> None:
    if hook is not None and not callable(hook):
        raise InvalidArgumentError(f"{name}={hook!r}: a function was expected")


def set_hook(given: Any, on_event: Optional[EventHook], kept: list[Any]) -> None:
    """Sets `on_event` in the options of a job. The C function is appended to `kept`, which must outlive the job.
    The hook runs on threads of the library; its exceptions are logged."""
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
            _run_hook(lambda: on_event(said))
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
    """Sets the hooks of a save. `report` converts the library's report to the dict that hooks get. An exception
    of `before_publish` fails the save on all ranks and is raised on this one (`HookFailure`); those of `on_commit`
    are logged."""
    lib = _abi.library()

    def ask(_: Any, address: int) -> int:
        assert before_publish is not None
        try:
            said = report(lib, address)
            _run_hook(lambda: before_publish(said))
            return 0
        except BaseException as error:  # The caller is C code.
            raised.error = error
            status, message = status_of(error)
            lib.tm_set_last_error(status, 0, b"before_publish: " + message)
            return status

    def tell(_: Any, address: int) -> None:
        assert on_commit is not None
        try:
            said = report(lib, address)
            _run_hook(lambda: on_commit(said))
        except BaseException:
            log.exception("on_commit")

    for name, hook in (("before_publish", before_publish), ("on_commit", on_commit)):
        _check_hook(name, hook)
    if before_publish is not None:
        raised = HookFailure()
        kept.append(raised)
        given.before_publish = _keep(_BEFORE_PUBLISH(ask), kept)
    if on_commit is not None:
        given.on_commit = _keep(_ON_COMMIT(tell), kept)


class HookFailure:
    """The exception of a hook of this rank. The wait for the job raises it."""

    error: Optional[BaseException] = None


def _keep(hook: Any, kept: list[Any]) -> Any:
    kept.append(hook)
    return ctypes.cast(hook, ctypes.c_void_p)


def exit_wait_of(seconds: Any) -> float:
    """Checks the option `exit_wait` of a background save."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise InvalidArgumentError(f"exit_wait={seconds!r}: must be a number of seconds, 0 or more")
    return float(seconds)


def in_hook() -> bool:
    """Whether a hook calls this. Hooks run on threads of the library, which must not wait for themselves."""
    return getattr(_in_hook, "depth", 0) > 0


class Job:
    """A save or load in the background.

    Any thread may wait for it, and coroutines may `await` it. The memory that the library works with lives
    until the verdict, even if the job object is dropped, an exception ends a `with` block, or the interpreter
    ends. The end of the interpreter waits for saves (`exit_wait`) and cancels loads. A failure is logged as an
    error (logger "tensormount") when the job is dropped or the process ends, unless wait() raised it,
    exception() returned it, or cancel() of this process caused it.

    A save releases its tensors before the verdict, once their bytes are copied: when the call that began it
    returns, or, with `stage_in_background`, when the job is next queried or waited for, or when another save
    or load begins.
    """

    _word = "job"
    _finishes_at_exit = False
    # Names of the functions of the library.
    _wait_function = ""
    _fd_function = ""
    _cancel_function = ""
    _free_function = ""
    # Name of the function that reports whether the library no longer uses the tensors; "": it uses them until the
    # verdict.
    _staged_function = ""
    _staged_fd_function = ""
    # Status to exception class, for statuses with a narrower meaning.
    _failures: dict[int, Any] = {}

    def __init__(self, out: ctypes.c_void_p, path: str, held: list[Any]) -> None:
        """`out`: the library stores its job there (`begin`). `held`: objects that threads of the library use; they
        live until those threads are done, even if the job is dropped."""
        self._lib = _abi.library()
        self._path = path
        self._process = os.getpid()
        self._report: Any = None
        self._failure: Optional[BaseException] = None
        self._done = False
        self._takers: list[_Taker] = []
        self._raised = [
            one for item in held if isinstance(item, list) for one in item if isinstance(one, HookFailure)
        ]
        self._handle = _Handle(out, getattr(self._lib, self._free_function))
        self._state = _LibraryJob(self, held)

    @property
    def _address(self) -> int:
        return self._handle.address

    # ---- Waiting -----------------------------------------------------------------------------

    def wait(self, timeout: Optional[float] = None, *, progress: Progress = None) -> Any:
        """Waits for the verdict: returns the report, or raises the exception that the job failed with.

        timeout   seconds, then TimeoutError; the job goes on.
        progress  called with the bytes that this rank has done and has in all; True: draws a bar if tqdm is
                  installed.

        Ctrl-C, and any other exception from a signal handler or from `progress`, ends the wait and cancels the
        job on all ranks; the exception propagates.
        """
        self._wait(self._poll, timeout, "over", progress)
        self._state.mark_reported()
        if self._failure is not None:
            raise self._failure
        return self._report

    def done(self) -> bool:
        """Whether the job has ended. Never waits."""
        return self._poll(0)

    def cancel(self) -> None:
        """Requests cancellation, without waiting.

        The ranks vote: the job ends with CancelledError on all of them, unless it ends by itself first.
        """
        self._state.cancel()

    def exception(self) -> Optional[BaseException]:
        """The exception that the job failed with; None if it succeeded or is not over."""
        if not self._poll(0):
            return None
        self._state.mark_reported()
        return self._failure

    def __await__(self) -> Generator[Any, None, Any]:
        return self._await().__await__()

    async def _await(self) -> Any:
        import asyncio

        loop = asyncio.get_running_loop()
        # Waits first until the bytes are copied, to release the tensors, then for the verdict.
        for function in (self._staged_fd_function, self._fd_function):
            descriptor = self._descriptor(function) if function else None
            if descriptor is None:
                continue
            came = loop.create_future()
            try:
                if self._poll(0):
                    continue
                loop.add_reader(descriptor, _set, came)
                try:
                    await came
                finally:
                    loop.remove_reader(descriptor)
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                os.close(descriptor)
            self._state.release()
        return self.wait()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Waits for the verdict; if the block raised, cancels the job first."""
        if kind is None:
            self.wait()
            return
        self.cancel()
        try:
            self.wait()
        except Exception as error:
            log.debug("%s %s: %s", self._word, self._path, error)

    def __reduce__(self) -> Any:
        raise UnsupportedError(f"a {self._word} cannot be pickled: it belongs to its process")

    def __repr__(self) -> str:
        state = "under way" if not self._done else "failed" if self._failure else "done"
        return f"<tensormount.{type(self).__name__} {self._path!r}: {state}>"

    # ---- Implementation ---------------------------------------------------------------------------------

    def _wait(
        self,
        poll: Callable[[int], bool],
        timeout: Optional[float],
        state: str,
        progress: Progress = None,
    ) -> None:
        """Waits until `poll(most_ms)` is true, in slices, so that signal handlers run. An exception of a handler or
        of `progress` cancels the job. TimeoutError after `timeout` seconds, which does not cancel it."""
        end = _deadline(timeout)
        if not self._done:
            self._check_process()
        try:
            with Meter(progress, f"{self._word} {self._path}") as meter:
                while not poll(_SLICE_MS if end is None else _slice_ms(end)):
                    if meter.on:
                        meter.show(*self._bytes_done())
                    if end is not None and time.monotonic() >= end:
                        break
                else:
                    self._state.release()
                    if meter.on and poll == self._poll:
                        meter.end(*self._bytes_done(), failed=self._failure is not None)
                    return
        except BaseException:
            self.cancel()
            raise
        raise TimeoutError(f"{self._word} {self._path}: not {state} after {timeout:g} s")

    def _bytes_done(self) -> tuple[int, int]:
        """The bytes that this rank has done, and all bytes that it has to do."""
        raise NotImplementedError

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise UnsupportedError(
                f"the {self._word} belongs to process {self._process}, which forked this one"
            )

    def _poll(self, most_ms: int) -> bool:
        """Waits for at most `most_ms`, takes the verdict if the job has ended, and returns whether it was taken."""
        if self._done:
            self._state.end()  # `_take` may have been ended by an exception before it called end().
            return True
        self._check_process()
        self._state.release()
        done = ctypes.c_int32()
        # Several threads may be in this call at the same time, so it does not take the report.
        status = self._query(most_ms, done, None)
        if status == 0 and not done.value:
            return False
        taker = _Taker()
        try:
            self._takers.append(taker)
            first = next(one for one in list(self._takers) if not one.over)
            # Only one thread takes the verdict, because taking that of a load fills the request, which belongs to the
            # caller afterwards. A signal handler or finalizer cannot wait for the thread that it interrupts, so it
            # takes the verdict itself.
            if first.thread == taker.thread:
                self._take()
            elif most_ms > 0:
                time.sleep(0.001)
        finally:
            taker.over = True
            if taker in self._takers:
                self._takers.remove(taker)
        return self._done

    def _query(self, most_ms: int, done: ctypes.c_int32, report: Optional[ctypes.c_void_p]) -> int:
        status: int = getattr(self._lib, self._wait_function)(
            self._address, most_ms, ctypes.addressof(done),
            None if report is None else ctypes.addressof(report),
        )
        return status

    def _take(self) -> None:
        """Takes the verdict of a job that has ended."""
        report = ctypes.c_void_p()
        status = self._query(0, ctypes.c_int32(), report)
        failure: Optional[BaseException] = None
        taken: Any = None
        if status:
            try:
                _abi.fail(status, self._failures)
            except Exception as error:
                # The traceback is dropped, because its frames would keep this job alive.
                failure = self._hook_error(error.with_traceback(None))
        else:
            assert report.value is not None
            taken = self._take_report(report.value)
        if not self._done:  # Otherwise a signal handler has taken the verdict meanwhile.
            self._report, self._failure = taken, failure
            self._state.failed(failure)
            self._done = True
        for one in self._raised:
            one.error = None  # Its traceback would keep the saved state alive.
        self._state.end()

    def _descriptor(self, function: str) -> Optional[int]:
        """A new file descriptor, which the caller closes, from the library's `function`. It becomes readable at the
        event. None: the job has ended."""
        if self._done:
            return None
        self._check_process()
        fd = ctypes.c_int()
        status = getattr(self._lib, function)(self._address, ctypes.addressof(fd))
        if status:
            _abi.fail(status)
        return os.dup(fd.value)  # A duplicate, because the original is closed with the job.

    def _hook_error(self, told: Exception) -> BaseException:
        """The exception of a hook of this rank if there is one, caused by `told`; otherwise `told`, the failure that
        the library reports."""
        for one in self._raised:
            raised = one.error
            if raised is not None:
                raised.__cause__ = told
                return raised
        return told

    def _refuse(self, own: BaseException) -> NoReturn:
        """Raises `own`, the error of this rank's arguments, with which the job fails on all ranks."""
        self.cancel()
        self._state.mark_reported()
        raise own

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
    handle: Any,
    given: Any,
    *kept: Any,
) -> _J:
    """Begins a job: calls a function of the library with a state, path, group and options.

    `handle`: the use of the group or saver; the job gets another one until its end. `built` and `kept` are kept
    alive from before the call. The library copies the options, but not the hooks that they point to. If a
    signal handler raises during the call, the job is cancelled and the exception propagates.
    """
    name = path_bytes(path)
    out = ctypes.c_void_p()
    end_dropped()
    _end_with_multiprocessing()
    held: list[Any] = [built, built.held, group, *kept]
    hold(held)
    # Made before the call, so that the library never has a job that Python does not know.
    job = kind(out, os.fsdecode(name), held)
    job._state.use = handle.another()
    job._state.tensors = built.held
    job._state.has_peers = group.size > 1
    job._state.liveness = given.liveness_ms / 1000 or _LIVENESS
    try:
        status = call(
            built.address, name, handle.address, ctypes.addressof(given), ctypes.addressof(out)
        )
        if status == 0:
            _active.add(job._state)
    except BaseException:
        if out.value is None:
            job._state.end()
        else:
            _active.add(job._state)
            job.cancel()
        raise
    if status:
        job._state.end()
        _abi.fail(status, kind._failures)
    job._state.release()
    return job


def _set(future: Any) -> None:
    if not future.done():
        future.set_result(None)


def _deadline(timeout: Optional[float]) -> Optional[float]:
    """The deadline (time.monotonic()) of a timeout in seconds; None: no limit."""
    if timeout is None or timeout == float("inf"):
        return None
    if timeout != timeout:
        raise ValueError("timeout=nan: must be a number of seconds")
    return time.monotonic() + timeout


def _slice_ms(end: float) -> int:
    return max(0, min(_SLICE_MS, int((end - time.monotonic()) * 1000) + 1))


class _Taker:
    """A thread that takes the verdict of a job, or waits to. The first one that is not over takes it."""

    __slots__ = ("over", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.over = False


class _Handle:
    """The library's job, freed when nothing refers to it any more. A call of the library holds a reference. At
    the end of the interpreter it is not freed, because threads stop in the middle of a wait."""

    __slots__ = ("_ended", "_free", "_out", "_process")

    def __init__(self, out: ctypes.c_void_p, free: Any) -> None:
        self._out = out
        self._free = free  # Kept here, because at exit the names of modules may be gone.
        self._ended = _abi.ended
        self._process = os.getpid()

    @property
    def address(self) -> int:
        """0: the job has not begun."""
        return self._out.value or 0

    def __del__(self) -> None:
        process = getattr(self, "_process", None)  # None: __init__ was interrupted.
        if process is not None and not self._ended[0] and self._out.value and process == os.getpid():
            self._free(self._out.value)


class _LibraryJob:
    """The part of a job that outlives the `Job` object of its user."""

    def __init__(self, job: Job, held: list[Any]) -> None:
        self.handle = job._handle
        self.process = job._process
        self.lib = job._lib
        self.names = (job._wait_function, job._cancel_function)
        self.staged_function = job._staged_function
        self.tensors: Optional[list[Any]] = None  # The tensors among `held`, until they are released.
        self.path = job._path
        self.label = f"{job._word} {job._path}"
        self.is_save = job._finishes_at_exit
        # Seconds that the end of the process waits for the job; with 0 the job is cancelled at once.
        self.exit_wait = EXIT_WAIT if job._finishes_at_exit else 0.0
        self.liveness = _LIVENESS
        self.has_peers = False
        # The failure, until it is reported. A text, because the traceback of an exception would keep the
        # job alive.
        self.failure: Optional[str] = None
        self.known = False  # True: the caller has got the failure, or gets it in another way.
        self.cancelled = False  # Whether this process has cancelled the job.
        self.keeps = False  # True: a device may still use the memory, so it is never released.
        self.pinned = [held]  # Empty once the job is over; the thread that pops the item ends it.
        self.use: Any = None  # The use of the group or saver.
        self.cancel_when_dropped = False
        weakref.finalize(job, self.dropped).atexit = False

    @property
    def over(self) -> bool:
        return not self.pinned

    def holds(self, one: Any) -> bool:
        return any(any(item is one for item in held) for held in list(self.pinned))

    def release(self) -> None:
        """Releases the tensors once their bytes are copied, because a state that was gathered for the save is as
        large as the model. If the copy failed, a device may still use them: they stay until the verdict."""
        address = self.handle.address
        if not self.staged_function or not self.tensors or not address:
            return
        done = ctypes.c_int32()
        staged = getattr(self.lib, self.staged_function)
        if staged(address, 0, ctypes.addressof(done)) == 0 and done.value:
            tensors, self.tensors = self.tensors, None
            if tensors:  # None: a finalizer has released them meanwhile.
                tensors.clear()

    def end(self) -> None:
        """Releases the memory, after the verdict or if the job never began."""
        try:
            held = self.pinned.pop()
        except IndexError:
            return
        _active.discard(self)
        self.use = None
        if not self.keeps:
            _unpin(held)

    def dropped(self) -> None:
        """Finalizer of the `Job` object. It may run on any thread while any lock is held, even those of logging."""
        if self.process != os.getpid() or _ending:
            return
        if self.over and self.failure is None:
            return
        if self.cancel_when_dropped:
            self.cancel()
        # A thread waits for the end of the job, to release its memory.
        try:
            _thread.start_new_thread(_run_on_thread, (self.await_end,))
        except RuntimeError:
            _dropped.append(self)  # No thread can be started, so `end_dropped` ends the job.

    def await_end(self) -> None:
        if self.over or self.wait(None):
            self.end()
            self.log_failure()

    def failed(self, failure: Optional[BaseException]) -> None:
        """Records the verdict (None: success). A failure is kept until it is reported. If a device still uses the
        memory, it is never released."""
        for one in (failure, getattr(failure, "__cause__", None)):
            self.keeps = self.keeps or getattr(one, "memory_in_use", False)
        if failure is None or (self.cancelled and isinstance(failure, CancelledError)):
            return
        if self.known or self.failure is not None:
            return
        # status_of makes the text, because str() of a hook's exception may raise.
        text = status_of(failure)[1].decode("utf-8", "replace")
        self.failure = f"{type(failure).__name__}: {text}" if isinstance(failure, Error) else text
        _unreported.add(self)

    def mark_reported(self) -> None:
        """The caller knows the verdict, or the cause of the failure: it is not logged."""
        self.known = True
        self.failure = None
        _unreported.discard(self)

    def log_failure(self) -> None:
        """Logs an unreported failure, once. It is not raised: this rank alone would then miss a collective call, in
        which the other ranks would hang."""
        failure = self.failure
        if failure is None:
            return
        _reporting.add(self)
        try:
            _unreported.remove(self)
            log.error("%s failed: %s", self.label, failure)
            self.mark_reported()
        except KeyError:
            pass  # Another thread logs it.
        finally:
            _reporting.discard(self)

    def wait(self, end: Optional[float]) -> bool:
        """Waits until `end` (time.monotonic(); None: no limit) for a job that nobody else waits for. Returns whether
        it has ended; a failure is recorded."""
        handle = self.handle
        if handle.address == 0:
            return True
        done = ctypes.c_int32()
        function = getattr(self.lib, self.names[0])
        while True:
            left = _SLICE_MS if end is None else _slice_ms(end)
            status = function(handle.address, left, ctypes.addressof(done), None)
            if status != 0:
                try:
                    _abi.fail(status)
                except Exception as error:
                    self.failed(error)
                return True
            if done.value:
                return True
            self.release()
            if end is not None and time.monotonic() >= end:
                return False

    def cancel(self) -> None:
        self.cancelled = True
        handle = self.handle
        if not self.over and handle.address != 0:
            getattr(self.lib, self.names[1])(handle.address)

    def has_hook(self) -> bool:
        hooks = (_HOOK, _BEFORE_PUBLISH, _ON_COMMIT)
        return any(isinstance(item, list) and any(type(one) in hooks for one in item)
                   for held in list(self.pinned) for item in held)


_active: set[_LibraryJob] = set()
_unreported: set[_LibraryJob] = set()  # Jobs that failed and whose failure is not reported yet.
_reporting: set[_LibraryJob] = set()  # Jobs whose failure is being logged.
_dropped: collections.deque[_LibraryJob] = collections.deque()  # Dropped jobs for which no thread could be started.
_ending = False


def _run_on_thread(call: Callable[[], None]) -> None:
    """Runs `call` on a thread of `threading`, because logging needs the thread's name. The caller is a bare thread
    of _thread, which a finalizer can start without any lock."""
    block_signals()  # Threads that this one starts inherit it.
    try:
        threading.Thread(target=call, name="tensormount-job", daemon=True).start()
    except RuntimeError:
        call()


def end_dropped() -> None:
    """Releases copied tensors, and ends dropped jobs for which no thread could be started. Runs at the beginning
    of each save and load."""
    for one in list(_active):
        if one.process == os.getpid():
            one.release()
    for _ in range(len(_dropped)):
        try:
            job = _dropped.popleft()
        except IndexError:
            return
        if job.over or job.wait(0):
            job.end()
            job.log_failure()
        else:
            _dropped.append(job)


def await_jobs_of(owner: Any) -> None:
    """Waits until no job of a group or saver is under way, because jobs use it until they end."""
    for job in _jobs_of(owner):
        if job.wait(None):
            job.end()


def cancel_jobs_of(owner: Any) -> None:
    for job in _jobs_of(owner):
        job.cancel()


def _jobs_of(owner: Any) -> list[_LibraryJob]:
    return [job for job in list(_active) if job.process == os.getpid() and job.holds(owner)]


def saves_under_way() -> list[_LibraryJob]:
    """The saves of this process that have no verdict yet."""
    now = time.monotonic()
    return [
        job for job in list(_active)
        if job.is_save and job.process == os.getpid() and not job.over and not job.wait(now)
    ]


# ---- The end of the process ------------------------------------------------------------------------


@atexit.register
def end_all() -> None:
    """Ends all jobs while the interpreter still works: later the memory of arrays is freed, and hooks cannot run.

    Saves are finished, loads cancelled, and lost saves logged. Raises nothing: Ctrl-C, or another exception of a
    signal handler, ends the wait for saves, which are then cancelled.
    """
    global _ending
    _ending = True
    end = _Shutdown()
    while True:
        try:
            end.run()
            return
        except BaseException:
            end.interrupted += 1


class _Shutdown:
    """The end of one process. After an interruption `run` is called again."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.crashed = _exits_by_exception()
        self.interrupted = 0
        self.last: Optional[float] = None

    def run(self) -> None:
        # Cancels first, so that cancelled jobs end during the waits for the others.
        jobs = [job for job in list(_active) if job.process == os.getpid()]
        for job in jobs:
            if self.deadline_of(job) <= self.begin:
                self.give_up(job)
        for job in jobs:
            if not job.cancelled and not job.over:
                job.wait(self.deadline_of(job))
                self.give_up(job)
        if self.last is None:
            self.last = time.monotonic() + _CANCEL_SECONDS
        for job in jobs:
            # A job with a hook is waited for without a limit, until the third interruption.
            if not job.over and job.wait(None if job.has_hook() and self.interrupted < 3 else self.last):
                job.end()
            # The memory of a job that has not ended is never released.
        for job in list(_unreported):
            if job.process == os.getpid():
                job.log_failure()
        end = time.monotonic() + 1
        while _reporting and time.monotonic() < end:
            time.sleep(0.001)

    def deadline_of(self, job: _LibraryJob) -> float:
        if self.interrupted or job.cancelled or job.cancel_when_dropped:
            return self.begin
        wait = job.exit_wait
        if self.crashed and job.has_peers:
            # The other ranks may wait for this rank's next call, and never finish the save.
            wait = min(wait, job.liveness)
        return self.begin + wait

    def give_up(self, job: _LibraryJob) -> None:
        if job.wait(0):
            job.end()
            return
        if not job.cancelled and not job.cancel_when_dropped and job.exit_wait > 0:
            why = " (interrupted)" if self.interrupted else ""
            if self.crashed and not self.interrupted:
                why = " (after an uncaught exception the process does not wait for the other ranks)"
            log.error(
                "%s is lost: it had not finished after %.0f s, when the process exited%s", job.label,
                time.monotonic() - self.begin, why,
            )
        job.cancel()


def _exits_by_exception() -> bool:
    """Whether an uncaught exception ends this process."""
    if hasattr(sys, "ps1"):
        return False  # At a prompt an exception does not end the process.
    # In a child of multiprocessing the exception is still propagating, so sys.last_value is not set.
    error = sys.exc_info()[1]
    return getattr(sys, "last_value", None) is not None or not isinstance(error, (SystemExit, type(None)))


_registered_in = 0


def _end_with_multiprocessing() -> None:
    """Registers `_end_of_child` as a finalizer of multiprocessing, whose children end by os._exit() without
    atexit."""
    global _registered_in
    process = sys.modules.get("multiprocessing.process")
    parent = getattr(process, "parent_process", None)
    if parent is None or parent() is None or _registered_in == os.getpid():
        return
    from multiprocessing import util

    _registered_in = os.getpid()
    util.Finalize(None, _end_of_child, exitpriority=-100)  # Runs after the finalizers of multiprocessing's queues.


def _end_of_child() -> None:
    try:
        # multiprocessing joins these threads only later, and they may still save.
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
    finally:
        end_all()


def _forked() -> None:
    global _ending
    _ending = False  # The parent may be ending, but the child is not.
    _unreported.clear()
    _reporting.clear()
    _dropped.clear()


os.register_at_fork(after_in_child=_forked)
