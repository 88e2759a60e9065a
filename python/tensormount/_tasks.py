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
    group: Any = None,
    own: Optional[BaseException] = None,
) -> Any:
    """What `call` returns for the address of a task, so that Ctrl-C ends the wait for it at once. The
    task asks it to end then; the thread itself ends at its next block, and a `group` that it works with
    is not closed before. `own`: what this rank itself found wrong, with all that it knows; the call
    tells the others, and it is raised here.
    """
    task = Task()
    result: list[Any] = []
    # And not join(): a thread whose join a signal handler ended counts as one that has stopped.
    over = threading.Event()

    def run() -> None:
        try:
            result.append((call(task.address), None))
        except Exception as error:
            result.append((None, error))
        finally:
            if group is not None:
                group._working.discard(over)
            over.set()

    thread = threading.Thread(target=run, name="tensormount-call", daemon=True)
    try:
        if group is not None:
            group._working.add(over)
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
        if group is not None and thread.ident is None:  # It was never begun.
            group._working.discard(over)
        raise
    value, failure = result[0]
    if own is not None:
        raise own from failure
    if failure is not None:
        raise failure
    return value
