# SPDX-License-Identifier: Apache-2.0
"""Background saves with their own memory: `Saver`."""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

from tensormount import _abi, _save, _shards
from tensormount._jobs import (
    EXIT_WAIT,
    await_jobs_of,
    begin,
    cancel_jobs_of,
    exit_wait_of,
    in_hook,
)
from tensormount.errors import ClosedError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack
else:
    from tensormount._jobs import Unpack


class _Handle:
    """A tm_saver, freed when nothing refers to it any more. Calls of `save` and jobs hold references, so that
    close() on another thread cannot free it. `of_group`, its use of the group, lives as long."""

    def __init__(self, address: int, of_group: Any) -> None:
        self.address = address
        self.process = os.getpid()
        _abi.free_with(self, _abi.library().tm_saver_free, address, of_group)

    def another(self) -> _Handle:
        return self


class Saver:
    """Saves in the background like `async_save`, with its own memory and limits.

    Make it once for a job and keep it: the next save uses its memory again.

    group     Group; None: this process alone.
    device_staging   bytes on each device for copies of the tensors on that device. If they suffice, and the
              device has them free, `save` waits only for a copy within the device, which is faster than the
              bus; the bytes cross to the host while the save writes. Other tensors, or all if it is 0,
              are copied to the host. The saver keeps the memory until it is closed.
    staging   bytes of host memory for the copies of all saves under way on this rank. A save that finds the
              memory taken waits for an earlier save; one that can never fit ends with
              ResourceExhaustedError. None: no limit.
    stage_in_background   True: `save` returns at once, and the tensors must not change until
              `job.wait_staged()`.
    cancel_on_drop   True: a job that nothing refers to any more is cancelled.

    Every rank makes the same savers in the same order, and calls `save` of each in the same order, from one
    thread at a time. A group can have two open savers, besides the one that `async_save` uses; making a
    third before the older one is closed raises ResourceExhaustedError.

    A saver is closed by close(), at the end of `with`, with its group, or when nothing refers to it or its
    jobs under way. Saves under way end first.

        >>> import numpy, tensormount as tm
        >>> weights = numpy.ones(1000, "f4")
        >>> with tm.Saver(device_staging=8 << 30, stage_in_background=True) as saver:
        ...     job = saver.save({"w": weights}, "STORE/background", replace=True)
        ...     job.wait_staged()
        ...     weights[:] = 2  # Training goes on.
        >>> job.wait()["tensors"]
        1
    """

    def __init__(
        self,
        group: Any = None,
        *,
        device_staging: int = 0,
        staging: Optional[int] = None,
        stage_in_background: bool = False,
        cancel_on_drop: bool = False,
    ) -> None:
        self._handle: Optional[_Handle] = None
        self._group = group = _save.saving_group(group)
        given = _abi.SaverOptions(struct_size=ctypes.sizeof(_abi.SaverOptions))
        given.device_staging_bytes = _size("device_staging", device_staging, 0)
        given.staging_bytes = 0 if staging is None else _size("staging", staging, 1)
        given.stage_in_background = _save.flag("stage_in_background", stage_in_background)
        given.cancel_on_free = _save.flag("cancel_on_drop", cancel_on_drop)
        self._cancel_on_drop = bool(given.cancel_on_free)
        self._call = _abi.library().tm_saver_save
        out = ctypes.c_void_p()
        of_group = group._handle()
        status = _abi.library().tm_saver_new(
            of_group.address, ctypes.addressof(given), ctypes.addressof(out)
        )
        if status:
            _abi.fail(status)
        assert out.value is not None
        self._handle = _Handle(out.value, of_group)
        group._savers.add(self)

    @property
    def group(self) -> Any:
        """The group whose ranks save."""
        return self._group

    @property
    def closed(self) -> bool:
        return self._handle is None

    def save(
        self,
        state: Any,
        path: _save.PathLike,
        *,
        objects: Optional[Mapping[str, bytes]] = None,
        rank_objects: Optional[Mapping[str, bytes]] = None,
        metadata: Optional[Mapping[str, Any]] = None,
        exit_wait: float = EXIT_WAIT,
        **options: Unpack[_save.SaveOptions],
    ) -> _save.SaveJob:
        """Begins a background save and returns its SaveJob. Parameters and options as for `async_save`.

        Returns when the bytes of this rank's tensors are copied, or at once with `stage_in_background`. A
        mistake of this rank is raised here; the other ranks get it from their jobs. Missing memory for the
        copies is reported by the job.
        """
        handle = self._opened()
        wait = exit_wait_of(exit_wait)
        given, kept, state, path = _save._call_arguments(state, path, self._group, options)
        built, own = _save.build(
            state, self._group, _shards.SAVE, objects, rank_objects, metadata
        )

        def call(built: int, path: bytes, saver: int, given: int, out: int) -> int:
            status: int = self._call(saver, built, path, given, out)
            return status

        job = begin(
            _save.SaveJob, call, built, path, self._group, handle, given, kept, self
        )
        job._state.cancel_when_dropped = self._cancel_on_drop
        job._state.exit_wait = wait
        if own is not None:
            job._refuse(own)
        return job

    def close(self) -> None:
        """Waits for the saves under way; their verdicts stay with the jobs.

        Ctrl-C ends the wait and cancels these saves; the saver is then still open. May be called again.
        """
        handle = self._handle
        if handle is None:
            return
        if in_hook():
            raise UnsupportedError("a saver cannot be closed in a hook of a save")
        if handle.process == os.getpid():
            try:
                await_jobs_of(self)
            except BaseException:
                cancel_jobs_of(self)
                raise
        self._handle = None
        self._group._savers.discard(self)

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise UnsupportedError("a Saver cannot be pickled: it belongs to its process; make one in the other process")

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<tensormount.Saver: rank {self._group.rank} of {self._group.size}, {state}>"

    def _opened(self) -> _Handle:
        handle = self._handle
        if handle is None:
            raise ClosedError("the saver is closed")
        if handle.process != os.getpid():
            raise UnsupportedError(
                f"the saver belongs to process {handle.process}, which forked this one: make a new "
                "saver in this process"
            )
        return handle


def _size(name: str, value: Any, least: int) -> int:
    """Checks a number of bytes. InvalidArgumentError: a bool, a float, or out of range."""
    try:
        size = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = -1
    if not least <= size < 1 << 64:
        raise InvalidArgumentError(f"{name}={value!r}: must be a whole number of bytes, {least} or more")
    return size
