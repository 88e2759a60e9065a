# SPDX-License-Identifier: Apache-2.0
"""What can go wrong: one class for each status of the C interface, all below `Error`.

A class that stands for something Python has a name for is that, too: a `KeyNotFoundError` is a
`KeyError`, a `PeerTimeout` a `TimeoutError`. Programs that know nothing of tensormount then do the
right thing, and `except tm.Error` still meets all.
"""

from __future__ import annotations

import errno as _errno
from typing import Any, Optional


class Error(Exception):
    """Root of all exceptions of this package.

    code    name of the status: "DATA_LOSS"
    errno   of the system call that failed, or that which stands for the status
    rank    whose fault it was, in a group; None: of none, or not known
    key     of the tensor or object
    box     (begin, extent) of the cells, two tuples of int
    file    path of the data file
    cause   the likely cause, in words
    device  that failed, or whose driver did: "cuda:0 (NVIDIA H100 80GB HBM3)"
    memory_in_use   a device may still read or write memory of the call that failed: it must not be used
            for anything else as long as the process lives (a job that knows it keeps it)

    What is not known is None.
    """

    code: str = "INTERNAL"
    errno: Optional[int]  # As OSError, which some classes are, has it; never None here.
    rank: Optional[int]
    key: Optional[str]
    box: Optional[tuple[tuple[int, ...], tuple[int, ...]]]
    file: Optional[str]
    cause: Optional[str]
    device: Optional[str]
    memory_in_use: bool
    message: str

    def __init__(
        self,
        message: str = "",
        *,
        errno: int = 0,
        rank: Optional[int] = None,
        key: Optional[str] = None,
        box: Optional[tuple[tuple[int, ...], tuple[int, ...]]] = None,
        file: Optional[str] = None,
        cause: Optional[str] = None,
        memory_in_use: bool = False,
        device: Optional[str] = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.errno = errno or _ERRNO.get(self.code, _errno.EIO)
        self.rank = rank
        self.key = key
        self.box = box
        self.file = file
        self.cause = cause
        self.memory_in_use = memory_in_use
        self.device = device

    def __str__(self) -> str:
        # That of KeyError would quote it.
        return f"{self.code}: {self.message}" if self.message else self.code

    def __reduce__(self) -> Any:
        # Workers hand exceptions to their parents as pickles, and those of Python forget keywords.
        fields = ("errno", "rank", "key", "box", "file", "cause", "memory_in_use", "device")
        return (_rebuild, (type(self), self.message, {n: getattr(self, n) for n in fields}))


def _rebuild(kind: type[Error], message: str, fields: dict[str, Any]) -> Error:
    return kind(message, **fields)


class InvalidArgumentError(Error, ValueError):
    """The caller passed something that can never work."""

    code = "INVALID_ARGUMENT"


class LayoutError(InvalidArgumentError):
    """What the ranks hold together is not a checkpoint, or not the stored one: a box that is
    missing or held twice, another shape or dtype."""


class OutOfRangeError(InvalidArgumentError, IndexError):
    """An index beyond the tensor."""


class NotFoundError(Error):
    """No such checkpoint, tensor, object or value."""

    code = "NOT_FOUND"


class CheckpointNotFoundError(NotFoundError, FileNotFoundError):
    """Nothing is at the path that was to be opened."""


class KeyNotFoundError(NotFoundError, KeyError):
    """An opened checkpoint has nothing by that key."""


class AlreadyExistsError(Error, FileExistsError):
    """Refusing to overwrite a committed checkpoint."""

    code = "ALREADY_EXISTS"


class PermissionDeniedError(Error, PermissionError):
    """The system does not let this user, or the checkpoint leads out of what may be read."""

    code = "PERMISSION_DENIED"


class ReadOnlyError(Error, OSError):
    """The filesystem, or the mount, is read-only."""

    code = "READ_ONLY"


class ResourceExhaustedError(Error, OSError):
    """Disk, memory or quota."""

    code = "RESOURCE_EXHAUSTED"


class DataLossError(Error, OSError):
    """Stored bytes are missing, short or fail their checksum."""

    code = "DATA_LOSS"


class PeerLost(Error, ConnectionError):
    """A rank is gone; or, with rank None, a file system (UNAVAILABLE)."""

    code = "UNAVAILABLE"


class DeviceError(Error, RuntimeError):
    """A device (`device`) or its driver is gone, or cannot be had: on rank `rank`, which is alive."""

    code = "UNAVAILABLE"


class PeerTimeout(Error, TimeoutError):
    """Somebody, who is named, did not answer in time (DEADLINE_EXCEEDED)."""

    code = "DEADLINE_EXCEEDED"


class BusyError(Error, OSError):
    """Somebody else is at it: try again."""

    code = "BUSY"


class StaleError(Error, OSError):
    """The checkpoint or staging is gone."""

    code = "STALE"


class ClosedError(StaleError, ValueError):
    """A checkpoint or saver that was closed was used."""


class UnknownOutcomeError(Error, OSError):
    """The store did not say whether a commit happened."""

    code = "UNKNOWN"


class UnsupportedError(Error):
    """Not built in, a newer format, or a thing that this package does not do."""

    code = "UNSUPPORTED"


class UnsupportedIndexError(UnsupportedError, IndexError):
    """A form of indexing that NumPy has and tensors of checkpoints have not."""


class LibraryError(UnsupportedError, ImportError):
    """The C library, or a Python package that is needed, is not there or does not fit."""


class CancelledError(Error):
    """Asked to end, and ended."""

    code = "CANCELLED"


class InternalError(Error):
    """A bug in tensormount."""

    code = "INTERNAL"


# By number of the status, as c.h has them. UNAVAILABLE of a device is a DeviceError.
CLASSES: tuple[type[Error], ...] = (
    Error,
    InvalidArgumentError,
    NotFoundError,
    AlreadyExistsError,
    PermissionDeniedError,
    ReadOnlyError,
    ResourceExhaustedError,
    DataLossError,
    PeerLost,
    PeerTimeout,
    BusyError,
    StaleError,
    UnknownOutcomeError,
    UnsupportedError,
    CancelledError,
    InternalError,
)

# For errors that this package finds by itself; the library says its own.
_ERRNO = {
    "INVALID_ARGUMENT": _errno.EINVAL,
    "NOT_FOUND": _errno.ENOENT,
    "ALREADY_EXISTS": _errno.EEXIST,
    "PERMISSION_DENIED": _errno.EACCES,
    "READ_ONLY": _errno.EROFS,
    "RESOURCE_EXHAUSTED": _errno.ENOSPC,
    "UNAVAILABLE": _errno.EAGAIN,
    "DEADLINE_EXCEEDED": _errno.ETIMEDOUT,
    "BUSY": _errno.EBUSY,
    "STALE": _errno.ESTALE,
    "UNSUPPORTED": _errno.EOPNOTSUPP,
    "CANCELLED": _errno.ECANCELED,
}
