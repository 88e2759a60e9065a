# SPDX-License-Identifier: Apache-2.0
"""Long calls of the library that are not jobs. Each runs on its own thread, with a tm_task to cancel it."""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Optional

from tensormount import _abi
from tensormount._progress import Meter, Progress
from tensormount.errors import CheckpointNotFoundError

# The base class of all objects of ctypes.
_CData: Any = ctypes.c_int.__mro__[-2]
_SLICE = 0.05  # Seconds between two polls; signal handlers run between them.


class OneTimeEvent:
    """An event that is set once. Unlike with threading.Event, a signal handler may wait during a wait of the code
    that it interrupts, and `set` never waits for a thread that such a handler holds up."""

    def __init__(self) -> None:
        self._came = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """May be called once."""
        self._came = True
        self._lock.release()

    def wait(self, seconds: float) -> bool:
        if not self._came and self._lock.acquire(timeout=seconds):
            self._lock.release()  # For the next waiter. A waiter that misses this release polls again after `seconds`.
        return self._came


class Task:
    """A tm_task: cancels a call of the library and reports its progress."""

    def __init__(self) -> None:
        self._lib = _abi.library()
        out = ctypes.c_void_p()
        status = self._lib.tm_task_new(ctypes.addressof(out))
        if status:
            _abi.fail(status)
        assert out.value is not None
        self.address: int = out.value
        _abi.free_with(self, self._lib.tm_task_free, self.address)

    def cancel(self) -> None:
        self._lib.tm_task_cancel(self.address)

    def watch_thread(self) -> None:
        """Cancelling the task ends waits for servers in all later calls of this thread. For threads of the package,
        which keep the task."""
        self._lib.tm_task_watch_thread(self.address)

    def unwatch_thread(self) -> None:
        self._lib.tm_task_watch_thread(None)

    def progress(self) -> tuple[int, int]:
        """The bytes done, and the bytes in all."""
        done, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._lib.tm_task_progress(self.address, ctypes.addressof(done), ctypes.addressof(total))
        return done.value, total.value


def block_signals() -> None:
    """For a thread of the package: leaves signals of the process to the program's threads. Otherwise a sleep or read of
    the main thread, on which Python runs handlers, would not be interrupted."""
    if threading.get_ident() == threading.main_thread().ident:
        return
    own = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS}
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - own)


def run_in_background(
    call: Callable[[int], Any],
    progress: Progress = None,
    label: str = "",
    handle: Any = None,
    own: Optional[BaseException] = None,
) -> Any:
    """Runs `call(address of a task)` on a thread and returns its result. Ctrl-C ends the wait at once and cancels
    the task: a call that uses the task ends at its next block, one that waits for a server ends there, and another
    one goes on.

    `handle`: the use of the group that the call works with. The thread has another one until it ends, and close()
    of the group waits for it. `own`: the error of this rank's arguments, raised here after the call, which still
    happens so that it fails on all ranks.
    """
    task = Task()
    result: list[Any] = []
    # Thread.join() is not used: if a signal handler ends a join, threading takes the thread for stopped.
    over = OneTimeEvent()
    mine = handle.another() if handle is not None else None
    claim = threading.Lock()  # Acquired by the thread that makes the call, or by this thread to prevent the call.
    handled = sys.exc_info()[1]

    def run_on_thread() -> None:
        block_signals()
        run()

    def run() -> None:
        if not claim.acquire(blocking=False):
            return
        try:
            task.watch_thread()
            result.append((call(task.address), None))
        except Exception as error:
            result.append((None, error))
        finally:
            task.unwatch_thread()
            if mine is not None:
                mine.release()
                mine.working.discard(over)
            over.set()

    thread = threading.Thread(target=run_on_thread, name="tensormount-call", daemon=True)
    try:
        if mine is not None:
            mine.working.add(over)
        try:
            thread.start()
        except (RuntimeError, KeyError) as error:
            # A signal handler may raise while start() waits for the thread, which already runs. threading then
            # raises RuntimeError("release unlocked lock") or KeyError(thread) instead; the exception of the handler
            # is the context of that error, and is raised here.
            if error.__context__ is not None and error.__context__ is not handled:
                raise error.__context__ from None
            if not isinstance(error, RuntimeError):
                raise
            run()  # No thread can be started (limit, or end of the interpreter), so the call runs on this one.
        with Meter(progress, label) as meter:
            while not over.wait(_SLICE):
                if meter.on:
                    meter.show(*task.progress())
            meter.end(*task.progress(), failed=result[0][1] is not None)
    except BaseException:
        task.cancel()
        if mine is not None and claim.acquire(blocking=False):  # The call has not begun.
            mine.working.discard(over)
        raise
    value, failure = result[0]
    if own is not None:
        raise own from failure
    if failure is not None:
        raise failure
    return value


class _Call:
    """A call of the library for another thread to make. It is made by the thread that acquires `claim`."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.status: int = 0
        self.failure: Optional[BaseException] = None
        self.claim = threading.Lock()
        self.over = OneTimeEvent()

    def run(self) -> None:
        try:
            status: int = self.function(*self.arguments)
            if status:
                failed = _abi.FailedStatus(status)
                failed.fields = _abi.last_error()
                self.status = failed
        except BaseException as error:  # Of ctypes: an argument of a wrong type.
            self.failure = error
        finally:
            self.over.set()

    def await_end(self) -> None:
        """For a call that was cancelled. A second Ctrl-C does not end the wait: the call still uses memory."""
        while True:
            try:
                while not self.over.wait(_SLICE):
                    pass
                return
            except BaseException:
                continue  # The exception that began this wait is raised after it.


class _Helper:
    """A thread that makes calls until one of them is cancelled. Starting one costs ten times as much as a call."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.task = Task()
        self._calls: SimpleQueue[Optional[_Call]] = SimpleQueue()
        _thread.start_new_thread(self._run, ())

    def put(self, call: _Call) -> None:
        self._calls.put(call)

    def cancel(self) -> None:
        self.task.cancel()
        self._calls.put(None)

    def _run(self) -> None:
        block_signals()
        self.task.watch_thread()
        while True:
            call = self._calls.get()
            if call is None:
                return
            if call.claim.acquire(blocking=False):
                call.run()


class RemoteLibrary:
    """The C library for sources behind URLs. Python runs signal handlers on the main thread, and not while that is in
    a call of the library, which may wait for a server for minutes. So calls of the main thread that have a status are
    made by another thread. Ctrl-C ends their waits for servers, and returns when the call has ended."""

    def __init__(self) -> None:
        # Changed by single atomic operations only: a signal handler may make a call during another one.
        self._idle: list[_Helper] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(_abi.library(), name)
        if function.restype is not ctypes.c_int32:
            return function

        def call(*arguments: Any) -> int:
            if threading.get_ident() == threading.main_thread().ident:
                return self._call(function, arguments)
            status: int = function(*arguments)
            return status

        setattr(self, name, call)
        return call

    def _helper(self) -> _Helper:
        while True:
            try:
                found = self._idle.pop()
            except IndexError:
                return _Helper()
            if found.process == os.getpid():  # A forked child does not have the thread.
                return found

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> int:
        try:
            helper = self._helper()
        except RuntimeError:  # No thread can be started (limit, or end of the interpreter).
            status: int = function(*arguments)
            return status
        made = _Call(function, arguments)
        try:
            helper.put(made)
            while not made.over.wait(_SLICE):
                pass
        except BaseException:
            helper.cancel()
            if not made.claim.acquire(blocking=False):
                made.await_end()
            raise
        self._idle.append(helper)
        if made.failure is not None:
            raise made.failure
        return made.status


remote_library = RemoteLibrary()


def read_json(function: str, *arguments: Any, kinds: Optional[dict[int, Any]] = None) -> Any:
    """Calls a function of the library that returns JSON. `kinds`: as for `_abi.fail`."""
    import json

    narrower = {_abi.TM_NOT_FOUND: CheckpointNotFoundError, **(kinds or {})}
    path = arguments[0] if arguments and isinstance(arguments[0], bytes) else b""
    return json.loads(_abi.get_text(getattr(_abi.library_for(path), function), *arguments, kinds=narrower))


def call_with_progress(
    given: Any,
    function: str,
    *arguments: Any,
    progress: Progress,
    label: str,
    handle: Any = None,
    own: Optional[Exception] = None,
) -> dict[str, Any]:
    """As `read_json`, on a thread with progress (`run_in_background`). `given`: its options, whose `task` is set.

    Arguments that are objects of ctypes are passed by their addresses. They live until the library has returned,
    also if an exception ends this call before.
    """

    def call(task: int) -> Any:
        given.task = task
        return read_json(
            function, *(ctypes.addressof(one) if isinstance(one, _CData) else one for one in arguments)
        )

    found: dict[str, Any] = run_in_background(call, progress, label, handle, own)
    return found
