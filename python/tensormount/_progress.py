# SPDX-License-Identifier: Apache-2.0
"""Progress of long calls: a function of the caller, or a bar of tqdm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Optional, Union

from tensormount.errors import InvalidArgumentError

# None, False: no progress. A function: called with the bytes done and the bytes in all (0 while unknown), on
# the waiting thread, about twenty times a second. True: a bar, if tqdm is installed.
Progress = Union[None, bool, Callable[[int, int], None]]


def check_progress(progress: Any) -> None:
    """Raises InvalidArgumentError for other types. Called before the work begins."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise InvalidArgumentError(f"progress={progress!r}: must be True, False, None or a function")


class Meter:
    """Shows the progress of one call until the end of `with`. `show` raises the exceptions of the caller's
    function."""

    def __init__(self, progress: Progress, label: str) -> None:
        check_progress(progress)
        self._call: Optional[Callable[[int, int], None]] = progress if callable(progress) else None
        self._bar: Any = None
        if progress is True:
            from importlib import import_module

            try:
                bars: Any = import_module("tqdm.auto")  # Any: type stubs of tqdm may be missing.
            except ImportError:
                return
            self._bar = bars.tqdm(desc=label, unit="B", unit_scale=True)

    @property
    def on(self) -> bool:
        """Whether progress is shown."""
        return self._call is not None or self._bar is not None

    def show(self, done: int, total: int) -> None:
        if total:
            done = min(done, total)  # A load may read more than was requested.
        if self._call is not None:
            self._call(done, total)
        if self._bar is not None:
            self._bar.total = total or None
            self._bar.update(done - self._bar.n)

    def end(self, done: int, total: int, *, failed: bool) -> None:
        """Shows the end of a call that succeeded. Exceptions are logged, because the call has already succeeded."""
        if failed or not self.on:
            return
        try:
            self.show(max(done, total), total)
        except Exception:
            logging.getLogger("tensormount").exception("progress")

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
