# SPDX-License-Identifier: Apache-2.0
"""Calls of the library that take long and are no jobs: on a thread of their own, with a task by which
they are asked to end."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Optional

from tensormount import _abi
from tensormount._progress import Meter, Progress

_SLICE = 0.05  # Seconds between two looks, so that a signal handler of the host gets its turn.


class Once:
    """Something that comes once, and is waited for. As threading.Event, but a signal handler in the middle
    of a wait may wait, too, and `set` never waits for a thread that such a handler holds up."""

    def __init__(self) -> None:
        self._came = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Only once."""
        self._came = True
        self._lock.release()

    def wait(self, seconds: float) -> bool:
        if not self._came and self._lock.acquire(timeout=seconds):
            self._lock.release()  # For the next; who misses it looks again after `seconds`.
        return self._came


class Task:
    """A tm_task."""

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

    def moved(self) -> tuple[int, int]:
        """Bytes done, and in all."""
        done, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._lib.tm_task_progress(self.address, ctypes.addressof(done), ctypes.addressof(total))
        return done.value, total.value


def in_background(
    call: Callable[[int], Any],
    progress: Progress = None,
    label: str = "",
    handle: Any = None,
    own: Optional[BaseException] = None,
) -> Any:
    """What `call` returns for the address of a task, so that Ctrl-C ends the wait for it at once. The
    task asks it to end then; the thread itself ends at its next block. `handle`: of the group that it
    works with, which is counted until then, and whose close() waits for it. `own`: what this rank itself
    found wrong, with all that it knows; the call tells the others, and it is raised here.
    """
    task = Task()
    result: list[Any] = []
    # And not join(): a thread whose join a signal handler ended counts as one that has stopped.
    over = Once()
    mine = handle.again() if handle is not None else None

    def run() -> None:
        try:
            result.append((call(task.address), None))
        except Exception as error:
            result.append((None, error))
        finally:
            if mine is not None:
                mine.release()
                mine.working.discard(over)
            over.set()

    thread = threading.Thread(target=run, name="tensormount-call", daemon=True)
    try:
        if mine is not None:
            mine.working.add(over)
        try:
            thread.start()
        except RuntimeError:
            run()  # There is none to be had: at the limit, or at the end of the interpreter.
        with Meter(progress, label) as meter:
            while not over.wait(_SLICE):
                if meter.on:
                    meter.show(*task.moved())
            meter.end(*task.moved(), failed=result[0][1] is not None)
    except BaseException:
        task.cancel()
        if mine is not None and thread.ident is None:  # It was never begun.
            mine.working.discard(over)
        raise
    value, failure = result[0]
    if own is not None:
        raise own from failure
    if failure is not None:
        raise failure
    return value
