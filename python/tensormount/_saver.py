# SPDX-License-Identifier: Apache-2.0
"""Savers, which have memory of their own for what is saved in the background: `Saver`."""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

from tensormount import _abi, _save, _shards
from tensormount._jobs import (
    EXIT_WAIT,
    await_all_of,
    begin,
    cancel_all_of,
    exit_wait_of,
    in_hook,
)
from tensormount.errors import ClosedError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack
else:
    from tensormount._jobs import Unpack


class _Handle:
    """A tm_saver, freed when nobody refers to it any more: who begins a save on another thread does
    meanwhile, and so does each of its jobs, so that close() never takes it away from under them. The
    group's communicator, of which it is a use, is there as long."""

    def __init__(self, address: int, of_group: Any) -> None:
        self.address = address
        self.process = os.getpid()
        _abi.free_with(self, _abi.library().tm_saver_free, address, of_group)

    def again(self) -> _Handle:
        return self


class Saver:
    """Saves in the background as `async_save` does, with memory and bounds that one chooses. Make one
    for a job and keep it: its memory is used again by the next save.

    group     Group; None: this process alone.
    device_staging   bytes of each device for copies of the tensors that are on it. Where they
              suffice, and the device has so much, `save` holds its caller for a copy within the
              device, which is faster than the bus, and the bytes cross while the save writes; what
              does not fit is copied to the host. 0: all is. The memory is the saver's until it is
              closed.
    staging   bytes of host memory for copies, on this rank, of all saves under way. A save that finds
              them taken waits for an earlier one; one that would never fit ends with
              ResourceExhaustedError. None: no bound.
    stage_in_background   `save` returns at once, and the tensors must be left alone until
              `job.wait_staged()`.
    cancel_on_drop   a job that nothing refers to any more is cancelled, instead of going on.

    Every rank makes the same savers in the same order, and calls `save` of each in the same order,
    from one thread at a time. A group has at most two at a time: the one that was made two before
    must be closed (ResourceExhaustedError). What `async_save` uses is not counted.

    Closed by close(), at the end of `with`, with its group, or when nothing refers to it, jobs under
    way among that; saves that are under way end first.

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
        """Whose ranks save."""
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
        """As `async_save`: returns when the bytes of this rank's tensors are copied, or at once
        (`stage_in_background`). What this rank does wrong is raised here, the other ranks have it in
        their jobs; that there is no memory for the copies is in the job."""
        handle = self._opened()
        wait = exit_wait_of(exit_wait)
        given, kept, state, path = _save._called(state, path, self._group, options)
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
        """Waits for the saves that are under way; their verdicts stay with the jobs. Ctrl-C ends the
        wait and cancels them; the saver is open then. May be called again."""
        handle = self._handle
        if handle is None:
            return
        if in_hook():
            raise UnsupportedError("a saver cannot be closed by a hook of a save")
        if handle.process == os.getpid():
            try:
                await_all_of(self)
            except BaseException:
                cancel_all_of(self)
                raise
        self._handle = None
        self._group._savers.discard(self)

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise UnsupportedError("a Saver is of its process; make one in the other process")

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<tensormount.Saver: rank {self._group.rank} of {self._group.size}, {state}>"

    def _opened(self) -> _Handle:
        handle = self._handle
        if handle is None:
            raise ClosedError("the saver is closed")
        if handle.process != os.getpid():
            raise UnsupportedError(
                f"the saver belongs to process {handle.process}, which this one was forked from: "
                "make one here"
            )
        return handle


def _size(name: str, value: Any, least: int) -> int:
    """A number of bytes; not True, which would be one, nor 8e9, which may be meant otherwise."""
    try:
        size = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = -1
    if not least <= size < 1 << 64:
        raise InvalidArgumentError(f"{name}={value!r}: a whole number of bytes, {least} or more")
    return size
