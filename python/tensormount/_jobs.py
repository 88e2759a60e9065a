# SPDX-License-Identifier: Apache-2.0
"""What saves and loads have in common: jobs of the C library, waits that signals can interrupt, the
memory that they use, and the end of the process."""

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
# Seconds that a silent rank is waited for, where `liveness` says nothing else.
_LIVENESS = 30.0

# There is no lock in here. A signal handler or a finalizer may come between any two steps of the main
# thread, or of any thread, and ask for the same job: a lock would wait for itself, and one that may be
# taken twice would let it see half a change. What several threads write to is changed by single steps of
# Python's own containers (append, pop, remove of a set), of which one thread at most gets the object.

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
    dropping it, an exception in `with`, the end of the interpreter, which waits for saves (`exit_wait`)
    and cancels loads. A failure that nobody asked for by wait() or exception() is logged as an error
    (logger "tensormount") when the job is dropped or the process ends.

    The tensors of a save are let go of before the verdict, once their bytes are copied: when the call
    that began it returns, or, where they are copied in the background, by what asks the job or waits
    for it, and by the next save or load.
    """

    _word = "job"
    _finishes_at_exit = False
    # Functions of the library, by what they do.
    _wait_function = ""
    _fd_function = ""
    _cancel_function = ""
    _free_function = ""
    # Says when the library is done with the tensors, before the verdict; "": it works on until then.
    _staged_function = ""
    _staged_fd_function = ""
    # Status to class, where a status means something narrower.
    _failures: dict[int, Any] = {}

    def __init__(self, out: ctypes.c_void_p, path: str, held: list[Any]) -> None:
        """`out`: where the library will put its job (`begin`). `held`: what its threads read or write,
        which must outlive them even where nobody refers to the job any more."""
        self._lib = _abi.library()
        self._path = path
        self._process = os.getpid()
        self._report: Any = None
        self._failure: Optional[BaseException] = None
        self._done = False
        self._takers: list[_Taker] = []
        self._raised = [
            one for item in held if isinstance(item, list) for one in item if isinstance(one, Raised)
        ]
        self._handle = _Handle(out, getattr(self._lib, self._free_function))
        self._state = _Live(self, held)

    @property
    def _address(self) -> int:
        return self._handle.address

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
        self._state.cancel()

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
        # The tensors are let go of (`_poll`) before the verdict, once their bytes are copied.
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
                    self._state.release()
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
            self._state.end()  # What came in between may have kept `_take` from it.
            return True
        self._check_process()
        self._state.release()
        done = ctypes.c_int32()
        # Waits of several threads are side by side.
        status = self._look(most_ms, done, None)
        if status == 0 and not done.value:
            return False
        taker = _Taker()
        try:
            self._takers.append(taker)
            first = next(one for one in list(self._takers) if not one.over)
            # One thread takes it: a load fills the request then, which is the caller's afterwards. A
            # signal handler or finalizer in the middle of that cannot wait for it, and does the same.
            if first.thread == taker.thread:
                self._take()
            elif most_ms > 0:
                time.sleep(0.001)
        finally:
            taker.over = True
            if taker in self._takers:
                self._takers.remove(taker)
        return self._done

    def _look(self, most_ms: int, done: ctypes.c_int32, report: Optional[ctypes.c_void_p]) -> int:
        status: int = getattr(self._lib, self._wait_function)(
            self._address, most_ms, ctypes.addressof(done),
            None if report is None else ctypes.addressof(report),
        )
        return status

    def _take(self) -> None:
        """The verdict, which is there."""
        report = ctypes.c_void_p()
        status = self._look(0, ctypes.c_int32(), report)
        failure: Optional[BaseException] = None
        taken: Any = None
        if status:
            try:
                _abi.fail(status, self._failures)
            except Exception as error:
                # Without frames: they have this job, which nobody could drop then.
                failure = self._raised_by_hook(error.with_traceback(None))
        else:
            assert report.value is not None
            taken = self._take_report(report.value)
        if not self._done:  # Who came in between has handed it out already.
            self._report, self._failure = taken, failure
            self._state.failed(failure)
            self._done = True
        for one in self._raised:
            one.error = None  # It has frames, and these what was saved.
        self._state.end()

    def _descriptor(self, function: str) -> Optional[int]:
        """A descriptor of one's own that is readable once it is so; None where it is over."""
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
        for one in self._raised:
            raised = one.error
            if raised is not None:
                raised.__cause__ = told
                return raised
        return told

    def _refuse(self, own: BaseException) -> NoReturn:
        """Raises what this rank itself found wrong, for which the job fails on the other ranks."""
        self.cancel()
        self._state.asked()
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
    """The job that a function of the library begins for a state, path, group and options. `handle`: of
    the group or saver, counted for the job until its end (`again`). What the library may use lives from
    before the call: it copies of the options what it needs but the hooks.
    What a signal handler raises meanwhile goes on from here; nobody has the job then, which is
    cancelled."""
    name = path_bytes(path)
    out = ctypes.c_void_p()
    tell_of_dropped()
    _end_with_multiprocessing()
    held: list[Any] = [built, built.held, group, *kept]
    hold(held)
    # Before the call, so that there is no moment at which the library has a job and Python none.
    job = kind(out, os.fsdecode(name), held)
    job._state.use = handle.again()
    job._state.tensors = built.held
    job._state.has_peers = group.size > 1
    job._state.liveness = given.liveness_ms / 1000 or _LIVENESS
    try:
        status = call(
            built.address, name, handle.address, ctypes.addressof(given), ctypes.addressof(out)
        )
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
    job._state.release()
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


class _Taker:
    """Who takes the verdict of a job, or wants to: the first that is not over does."""

    __slots__ = ("over", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.over = False


class _Handle:
    """The library's job. It is freed when nobody refers to it any more: whoever calls the library with
    it does meanwhile. Never at the end of the interpreter, when threads stop in the middle of a wait."""

    __slots__ = ("_ended", "_free", "_out", "_process")

    def __init__(self, out: ctypes.c_void_p, free: Any) -> None:
        self._out = out
        self._free = free  # Here, because at exit the module may be gone before this is.
        self._ended = _abi.ended
        self._process = os.getpid()

    @property
    def address(self) -> int:
        """0: it has not begun."""
        return self._out.value or 0

    def __del__(self) -> None:
        if not self._ended[0] and self._out.value and self._process == os.getpid():
            self._free(self._out.value)


class _Live:
    """A job of the library, without the object that its user has."""

    def __init__(self, job: Job, held: list[Any]) -> None:
        self.handle = job._handle
        self.process = job._process
        self.lib = job._lib
        self.names = (job._wait_function, job._cancel_function)
        self.staged_function = job._staged_function
        self.tensors: Optional[list[Any]] = None  # A part of what is held, until it is let go.
        self.label = f"{job._word} {job._path}"
        # Seconds that the end of the process waits for it; 0: it is cancelled.
        self.exit_wait = EXIT_WAIT if job._finishes_at_exit else 0.0
        self.liveness = _LIVENESS
        self.has_peers = False
        # What it failed with, until somebody was told. The text: an exception has frames, which have
        # the job.
        self.failure: Optional[str] = None
        self.known = False  # Somebody was told, or will be by another way.
        self.cancelled = False  # By this process.
        self.keeps = False  # What it holds, beyond its end.
        self.pinned = [held]  # Empty once it is over: whoever takes it out ends it.
        self.use: Any = None  # Of the group or saver.
        self.cancel_when_dropped = False
        weakref.finalize(job, self.dropped).atexit = False

    @property
    def over(self) -> bool:
        return not self.pinned

    def holds(self, one: Any) -> bool:
        return any(any(item is one for item in held) for held in list(self.pinned))

    def release(self) -> None:
        """Lets go of tensors once their bytes are copied: a state that was gathered for the save is
        as large as the model. Where that failed a device may be at them still: the verdict says so."""
        address = self.handle.address
        if not self.staged_function or not self.tensors or not address:
            return
        done = ctypes.c_int32()
        staged = getattr(self.lib, self.staged_function)
        if staged(address, 0, ctypes.addressof(done)) == 0 and done.value:
            tensors, self.tensors = self.tensors, None
            if tensors:  # A finalizer in between has let them go.
                tensors.clear()

    def end(self) -> None:
        """The verdict is there, or it never began: the library is done with the memory."""
        try:
            held = self.pinned.pop()
        except IndexError:
            return
        _live.discard(self)
        self.use = None
        if not self.keeps:
            _unpin(held)

    def dropped(self) -> None:
        """Nobody has the job any more. This is called by finalizers: wherever the collector happens to
        run, with whatever locks are held there, those of logging among them."""
        if self.process != os.getpid() or _ending:
            return
        if self.over and self.failure is None:
            return
        if self.cancel_when_dropped:
            self.cancel()
        # It ends by itself; somebody must give its memory back then.
        try:
            _thread.start_new_thread(_on_a_thread, (self.await_end,))
        except RuntimeError:
            _dropped.append(self)  # There is none to be had: later.

    def await_end(self) -> None:
        if self.over or self.wait(None):
            self.end()
            self.tell()

    def failed(self, failure: Optional[BaseException]) -> None:
        """The verdict. Where it is a failure somebody is to be told of it; where a device is still at
        the memory, that is kept for ever."""
        for one in (failure, getattr(failure, "__cause__", None)):
            self.keeps = self.keeps or getattr(one, "memory_in_use", False)
        if failure is None or (self.cancelled and isinstance(failure, CancelledError)):
            return
        if self.known or self.failure is not None:
            return
        # The text of an exception of a hook may be anything, and may raise.
        text = status_of(failure)[1].decode("utf-8", "replace")
        self.failure = f"{type(failure).__name__}: {text}" if isinstance(failure, Error) else text
        _untold.add(self)

    def asked(self) -> None:
        """Whoever has the job knows the verdict, or what makes it fail."""
        self.known = True
        self.failure = None
        _untold.discard(self)

    def tell(self) -> None:
        """Logs a failure that nobody asked for, once. It is not raised: this rank alone would miss a
        collective call, and the others hang in it."""
        failure = self.failure
        if failure is None:
            return
        _telling.add(self)
        try:
            _untold.remove(self)
            log.error("%s failed: %s", self.label, failure)
            self.asked()
        except KeyError:
            pass  # Another thread does.
        finally:
            _telling.discard(self)

    def wait(self, end: Optional[float]) -> bool:
        """Whether the verdict, which nobody asks for, came before `end`."""
        handle = self.handle
        if handle.address == 0:
            return True
        done = ctypes.c_int32()
        function = getattr(self.lib, self.names[0])
        while True:
            left = _SLICE_MS if end is None else _left(end)
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


_live: set[_Live] = set()
_untold: set[_Live] = set()  # Over, failed, and nobody asked.
_telling: set[_Live] = set()  # Being logged.
_dropped: collections.deque[_Live] = collections.deque()  # For want of a thread.
_ending = False


def _on_a_thread(call: Callable[[], None]) -> None:
    """On a thread that threading knows, since logging asks for its name; this one, which a finalizer
    could start without any lock, it does not know."""
    try:
        threading.Thread(target=call, name="tensormount-job", daemon=True).start()
    except RuntimeError:
        call()


def tell_of_dropped() -> None:
    """What was left to be done for jobs that nobody has, or asked; where a call of the user's begins."""
    for one in list(_live):
        if one.process == os.getpid():
            one.release()
    for _ in range(len(_dropped)):
        try:
            job = _dropped.popleft()
        except IndexError:
            return
        if job.over or job.wait(0):
            job.end()
            job.tell()
        else:
            _dropped.append(job)


def await_all_of(owner: Any) -> None:
    """Until no job of a group or saver is under way: a load would go on with a group that is gone."""
    for job in _all_of(owner):
        if job.wait(None):
            job.end()


def cancel_all_of(owner: Any) -> None:
    for job in _all_of(owner):
        job.cancel()


def _all_of(owner: Any) -> list[_Live]:
    return [job for job in list(_live) if job.process == os.getpid() and job.holds(owner)]


# ---- The end of the process ------------------------------------------------------------------------


@atexit.register
def end_all() -> None:
    """While the interpreter still works: afterwards memory of arrays is gone, and a hook would call
    into nothing. Saves are finished, loads cancelled. What is lost is logged; this raises nothing:
    Ctrl-C, or what another signal handler raises, ends the wait for saves, and they are cancelled."""
    global _ending
    _ending = True
    end = _End()
    while True:
        try:
            end.run()
            return
        except BaseException:
            end.interrupted += 1


class _End:
    """One end of the process. `run` begins again where it was interrupted."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.crashed = _ends_by_exception()
        self.interrupted = 0
        self.last: Optional[float] = None

    def run(self) -> None:
        # Those that nobody waits for first: they end while others are waited for.
        jobs = [job for job in list(_live) if job.process == os.getpid()]
        for job in jobs:
            if self.waits_until(job) <= self.begin:
                self.give_up(job)
        for job in jobs:
            if not job.cancelled and not job.over:
                job.wait(self.waits_until(job))
                self.give_up(job)
        if self.last is None:
            self.last = time.monotonic() + _LAST_SECONDS
        for job in jobs:
            # One with a hook is waited for as long as it takes, but for a user who insists.
            if not job.over and job.wait(None if job.has_hook() and self.interrupted < 3 else self.last):
                job.end()
            # Otherwise its memory stays for ever.
        for job in list(_untold):
            if job.process == os.getpid():
                job.tell()
        end = time.monotonic() + 1
        while _telling and time.monotonic() < end:
            time.sleep(0.001)

    def waits_until(self, job: _Live) -> float:
        if self.interrupted or job.cancelled or job.cancel_when_dropped:
            return self.begin
        wait = job.exit_wait
        if self.crashed and job.has_peers:
            # They may wait for what this rank would have called next, and never come.
            wait = min(wait, job.liveness)
        return self.begin + wait

    def give_up(self, job: _Live) -> None:
        if job.wait(0):
            job.end()
            return
        if not job.cancelled and not job.cancel_when_dropped and job.exit_wait > 0:
            why = " (interrupted)" if self.interrupted else ""
            if self.crashed and not self.interrupted:
                why = " (after an uncaught exception the other ranks are waited for no longer)"
            log.error(
                "%s is lost: the process ends, and it was not over after %.0f s%s", job.label,
                time.monotonic() - self.begin, why,
            )
        job.cancel()


def _ends_by_exception() -> bool:
    """Whether an exception that nobody caught ends this process."""
    if hasattr(sys, "ps1"):
        return False  # At a prompt they end nothing.
    # In a child of multiprocessing it is on its way.
    error = sys.exc_info()[1]
    return getattr(sys, "last_value", None) is not None or not isinstance(error, (SystemExit, type(None)))


_registered_in = 0


def _end_with_multiprocessing() -> None:
    """Its children end by os._exit(), without what atexit has; after finalizers of its own."""
    global _registered_in
    process = sys.modules.get("multiprocessing.process")
    parent = getattr(process, "parent_process", None)
    if parent is None or parent() is None or _registered_in == os.getpid():
        return
    from multiprocessing import util

    _registered_in = os.getpid()
    util.Finalize(None, _end_of_child, exitpriority=-100)  # After those of its queues.


def _end_of_child() -> None:
    try:
        # It would wait for them next, and they may still save.
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
    finally:
        end_all()


def _forked() -> None:
    global _ending
    _ending = False  # The child's own end comes later.
    _untold.clear()
    _telling.clear()
    _dropped.clear()


os.register_at_fork(after_in_child=_forked)
