# SPDX-License-Identifier: Apache-2.0
"""The exceptions of this package: one or more classes for each status of the C interface, all below `Error`.

If a built-in exception has the meaning of a class, the class derives from it, too: a `KeyNotFoundError` is a
`KeyError`, a `PeerTimeout` a `TimeoutError`. Programs that do not know tensormount then handle them correctly,
and `except tm.Error` catches all of them.
"""

from __future__ import annotations

import errno as _errno
from typing import Any, Optional


class Error(Exception):
    """The base class of the exceptions of this module.

    code    name of the status: "DATA_LOSS"
    errno   errno of the system call that failed, or the one that corresponds to the status
    rank    the rank of the group that caused the failure
    key     key of the tensor or object
    box     (begin, extent) of the cells, two tuples of int
    file    path of the file
    cause   the likely cause, as text
    device  the device that failed, or whose driver failed: "cuda:0 (NVIDIA H100 80GB HBM3)"
    memory_in_use   True: a device may still access memory of the failed call. Do not use that memory for
                anything else while the process lives (a job that knows this keeps it)

    Unknown attributes are None.
    """

    code: str = "INTERNAL"
    errno: Optional[int]  # Optional as in OSError, a base of some classes; never None here.
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
        # KeyError.__str__ would quote the message.
        return f"{self.code}: {self.message}" if self.message else self.code

    def __reduce__(self) -> Any:
        # Worker processes pickle exceptions, and the default pickle drops keyword arguments.
        fields = ("errno", "rank", "key", "box", "file", "cause", "memory_in_use", "device")
        return (_rebuild, (type(self), self.message, {n: getattr(self, n) for n in fields}))


def _rebuild(kind: type[Error], message: str, fields: dict[str, Any]) -> Error:
    return kind(message, **fields)


class InvalidArgumentError(Error, ValueError):
    """The caller passed an argument that can never work."""

    code = "INVALID_ARGUMENT"


class LayoutError(InvalidArgumentError):
    """The ranks' parts do not form a checkpoint, or do not fit the stored one.

    Examples: a box that is missing or held twice, another shape or dtype.
    """


class NonfiniteError(InvalidArgumentError):
    """A tensor has NaNs or infinities, which the save refuses (nonfinite="refuse"); key and rank name the first."""


class OutOfRangeError(InvalidArgumentError, IndexError):
    """An index is beyond the tensor."""


class NotFoundError(Error):
    """No such checkpoint, tensor, object or value."""

    code = "NOT_FOUND"


class CheckpointNotFoundError(NotFoundError, FileNotFoundError):
    """Nothing is at the path."""


class KeyNotFoundError(NotFoundError, KeyError):
    """The checkpoint has no tensor, object or value of that key."""


class AlreadyExistsError(Error, FileExistsError):
    """A checkpoint of that name exists."""

    code = "ALREADY_EXISTS"


class PermissionDeniedError(Error, PermissionError):
    """The system denies access, links lead out of the directories that may be read, or a checkpoint is pinned."""

    code = "PERMISSION_DENIED"


class ReadOnlyError(Error, OSError):
    """The file system or the mount is read-only."""

    code = "READ_ONLY"


class ResourceExhaustedError(Error, OSError):
    """Disk space, memory or quota is exhausted."""

    code = "RESOURCE_EXHAUSTED"


class DataLossError(Error, OSError):
    """Stored bytes are missing, short or fail their checksum."""

    code = "DATA_LOSS"


class PeerLost(Error, ConnectionError):
    """A rank is gone. With rank None a file system is gone (UNAVAILABLE)."""

    code = "UNAVAILABLE"


class DeviceError(Error, RuntimeError):
    """A device (`device`) or its driver is gone or unavailable, on rank `rank`, which is alive."""

    code = "UNAVAILABLE"


class PeerTimeout(Error, TimeoutError):
    """A rank did not answer in time (DEADLINE_EXCEEDED)."""

    code = "DEADLINE_EXCEEDED"


class BusyError(Error, OSError):
    """Another process or call works on the same thing: try again."""

    code = "BUSY"


class StaleError(Error, OSError):
    """The checkpoint, staging directory or group is gone or was replaced."""

    code = "STALE"


class ClosedError(StaleError, ValueError):
    """The checkpoint or saver is closed."""


class UnknownOutcomeError(Error, OSError):
    """The store did not say whether a commit happened."""

    code = "UNKNOWN"


class UnsupportedError(Error):
    """Not built in, a newer format, or an operation that this package does not have."""

    code = "UNSUPPORTED"


class UnsupportedIndexError(UnsupportedError, IndexError):
    """A form of indexing that NumPy has and tensors of checkpoints do not have."""


class LibraryError(UnsupportedError, ImportError):
    """The C library or a Python package is missing, or its version does not fit."""


class CancelledError(Error):
    """The call or job was cancelled."""

    code = "CANCELLED"


class InternalError(Error):
    """A bug in tensormount, ranks that are in different calls, or another kind of exception on another rank."""

    code = "INTERNAL"


# Indexed by status (c.h). For a device, UNAVAILABLE becomes a DeviceError (`_abi.fail`).
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

# For errors that this package finds; the library reports its own errno.
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
