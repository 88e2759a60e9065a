# SPDX-License-Identifier: Apache-2.0
"""Saves of a process that a scheduler is about to kill."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, Optional

from tensormount import _jobs
from tensormount._jobs import log
from tensormount._tasks import block_signals
from tensormount.errors import Error, InvalidArgumentError

# Seconds for cancelling, which takes a vote of all ranks and the removal of the files.
_FOR_CANCEL = 2.0
_STEP = 0.02


class preemption:
    """Lets saves finish when a scheduler stops the job with SIGTERM and kills it some seconds later.

        with tm.preemption(seconds=30):
            train()

    At the signal, saves under way in this process go on until 2 seconds before the kill. Those that are still
    running then are cancelled on all ranks, so that none is killed in the middle. A line of the log says which
    checkpoint is the latest. The signal handler from before is called at once, for example one that makes the
    program save and end; if there was none, the process ends by the signal after its saves. Without `preemption`
    the package handles no signals.

    seconds   the time between the signal and the kill: `--signal=TERM@30` of Slurm,
              `terminationGracePeriodSeconds` of Kubernetes.
    signum    another signal than SIGTERM.

    Call it on the main thread. undo(), or the end of `with`, puts the earlier handler back. InvalidArgumentError:
    `seconds` is not above 2.
    """

    def __init__(self, seconds: float, *, signum: int = signal.SIGTERM) -> None:
        # NaN is refused, too.
        if not isinstance(seconds, (int, float)) or not _FOR_CANCEL < seconds:
            raise InvalidArgumentError(
                f"preemption: seconds={seconds!r}: must be a number above {_FOR_CANCEL:g}, the time that cancelling takes"
            )
        try:
            self._signum = signal.Signals(signum)
        except ValueError:
            raise InvalidArgumentError(
                f"preemption: signum={signum!r}: must be a signal, such as signal.SIGTERM"
            ) from None
        self._seconds = seconds
        self._process = os.getpid()
        self._watch: Optional[threading.Thread] = None
        self._end = 0.0
        self._before: Any = signal.signal(signum, self._handle)
        self._undone = False

    def undo(self) -> None:
        """Puts the earlier signal handler back. A second call does nothing. After the signal, saves under way keep
        their limit."""
        if self._undone:
            return
        self._undone = True
        if signal.getsignal(self._signum) == self._handle:
            signal.signal(self._signum, self._before if self._before is not None else signal.SIG_DFL)

    def __enter__(self) -> preemption:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _handle(self, signum: int, frame: Any) -> None:
        # A forked child, such as a worker that loads data, has no saves of this process.
        mine = os.getpid() == self._process
        if mine and self._watch is None:
            self._end = time.monotonic() + self._seconds - _FOR_CANCEL
            self._watch = threading.Thread(target=self._run, name="tensormount-preemption", daemon=True)
            self._watch.start()
        if callable(self._before):
            self._before(signum, frame)
        elif self._before != signal.SIG_IGN:
            if mine and self._watch is not None:
                self._watch.join()
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def _run(self) -> None:
        block_signals()
        name = self._signum.name
        stores: set[str] = set()
        saves = _saves(stores)
        log.warning(
            "%s: %s", name,
            f"{', '.join(saves)}: may go on for {self._seconds - _FOR_CANCEL:g} s" if saves else "no save is under way",
        )
        # With a handler of the program, the wait lasts until the limit, because the handler may begin another save.
        goes_on = callable(self._before)
        while (goes_on or _saves(stores)) and time.monotonic() < self._end:
            time.sleep(_STEP)
        late = _saves(stores)
        if late:
            log.warning("%s: cancelled for lack of time: %s", name, ", ".join(late))
            for job in _jobs.saves_under_way():
                job.cancel()
            end = time.monotonic() + _FOR_CANCEL / 2
            while _saves(stores) and time.monotonic() < end:
                time.sleep(_STEP)
        for store in sorted(stores):
            log.warning("%s: the latest checkpoint is %s", name, _latest(store))


def _saves(stores: set[str]) -> list[str]:
    """Names of the saves under way, whose stores are added to `stores`."""
    jobs = _jobs.saves_under_way()
    stores.update(os.path.dirname(job.path) or os.curdir for job in jobs)
    return [job.label for job in jobs]


def _latest(store: str) -> str:
    from tensormount._store import Store

    try:
        return str(Store(store).latest()["path"])
    except Error as error:
        return f"unknown: {error}"
