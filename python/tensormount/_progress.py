# SPDX-License-Identifier: Apache-2.0
"""Progress of what takes long: told to a function of the caller's, or drawn as a bar by tqdm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Optional, Union

from tensormount.errors import InvalidArgumentError

# None: nothing. A function: called with bytes done and bytes in all (0 while that is not known), on
# the thread that waits, some twenty times a second. True: a bar, where tqdm is installed.
Progress = Union[None, bool, Callable[[int, int], None]]


def check_progress(progress: Any) -> None:
    """Before what it would be told of begins."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise InvalidArgumentError(f"progress={progress!r}: True, or a function")


class Meter:
    """Shows one work until the end of `with`. What the caller's function raises goes on from `show`."""

    def __init__(self, progress: Progress, label: str) -> None:
        check_progress(progress)
        self._call: Optional[Callable[[int, int], None]] = progress if callable(progress) else None
        self._bar: Any = None
        if progress is True:
            from importlib import import_module

            try:
                bars: Any = import_module("tqdm.auto")  # Untyped: its stubs need not be there.
            except ImportError:
                return
            self._bar = bars.tqdm(desc=label, unit="B", unit_scale=True)

    @property
    def on(self) -> bool:
        """Whether anybody looks."""
        return self._call is not None or self._bar is not None

    def show(self, done: int, total: int) -> None:
        if total:
            done = min(done, total)  # What is read may be more than what was asked for.
        if self._call is not None:
            self._call(done, total)
        if self._bar is not None:
            self._bar.total = total or None
            self._bar.update(done - self._bar.n)

    def end(self, done: int, total: int, *, failed: bool) -> None:
        """When the verdict is there, which nothing changes any more: what is raised is logged."""
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
