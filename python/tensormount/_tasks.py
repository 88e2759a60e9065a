# SPDX-License-Identifier: Apache-2.0
"""Long calls of the library that are not jobs. Each runs on its own thread, with a tm_task to cancel it."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
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
    the task; a call that uses the task ends at its next block, another one goes on.

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
            result.append((call(task.address), None))
        except Exception as error:
            result.append((None, error))
        finally:
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


def read_json(function: str, *arguments: Any, kinds: Optional[dict[int, Any]] = None) -> Any:
    """Calls a function of the library that returns JSON. `kinds`: as for `_abi.fail`."""
    import json

    narrower = {_abi.TM_NOT_FOUND: CheckpointNotFoundError, **(kinds or {})}
    return json.loads(_abi.get_text(getattr(_abi.library(), function), *arguments, kinds=narrower))


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
