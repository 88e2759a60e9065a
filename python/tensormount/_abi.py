# SPDX-License-Identifier: Apache-2.0
"""Opens the C library, and converts its errors, strings, lists and memory.

Structures, constants and functions are in _abi_tables.py, which is generated from the C headers. The first
call of `library()` opens the library that the environment variable TENSORMOUNT_LIBRARY names, or the one in
this package.
"""

from __future__ import annotations

import ctypes
import os
from _thread import RLock  # The same as threading.RLock, without importing threading.
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any, NoReturn, Optional

from tensormount._abi_tables import *

Dims = c_int64 * TM_MAX_RANK

# [True] once the interpreter exits. Objects of the library are not freed after that, because a daemon thread
# may still use them. A list, because finalizers may run after the names of this module are gone.
ended = [False]


def free_with(owner: Any, function: Any, address: int, *needed: Any) -> Any:
    """Calls `function(address)` when nothing refers to `owner` any more. `needed` lives until then, even if the
    garbage collector collects both at once. Returns a function that does so earlier."""
    import weakref

    freed = weakref.finalize(owner, _free, function, address, ended, *needed)
    freed.atexit = False
    return freed


def _free(function: Any, address: int, ended: list[bool], *_: Any) -> None:
    if not ended[0]:
        function(address)


def _end(ended: list[bool] = ended) -> None:
    ended[0] = True


_library: Optional[Any] = None
_mpi: Optional[Any] = None
_path: Optional[str] = None
_lock = RLock()  # Reentrant: a signal handler may need the lock while the code that it interrupts holds it.


def bundled() -> str:
    """Path of this package's own library, which may not exist."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "libtensormount.so")


def library() -> Any:
    """The opened C library. LibraryError: it cannot be loaded, or is older than this package."""
    if _library is not None:
        return _library
    return _open()


def library_for(path: bytes) -> Any:
    """The library for calls that read `path`. For URLs its calls can be interrupted (`_tasks.RemoteLibrary`)."""
    if b"://" not in path:
        return library()
    from tensormount._tasks import remote_library

    return remote_library


def _offer_libcurl() -> None:
    """Names the libcurl that pycurl's wheel contains (the extra "remote"), for systems that have none."""
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "pycurl.libs")
    try:
        names = [name for name in os.listdir(folder) if name.startswith("libcurl")]
    except OSError:
        return
    if names:
        os.environ.setdefault("TENSORMOUNT_LIBCURL_ELSE", os.path.join(folder, min(names)))


def _open() -> Any:
    global _library, _path
    from tensormount.errors import LibraryError

    with _lock:
        if _library is not None:
            return _library
        _offer_libcurl()
        chosen = os.environ.get("TENSORMOUNT_LIBRARY")
        path = chosen or bundled()
        hint = (
            "the path is from the environment variable TENSORMOUNT_LIBRARY"
            if chosen
            else "the package does not contain the library; set TENSORMOUNT_LIBRARY to its path"
            if not os.path.exists(path)
            else "the library of the package cannot be loaded"
        )
        try:
            opened: Any = ctypes.CDLL(path)
        except OSError as error:
            raise LibraryError(f"{path}: {error} ({hint})", file=path) from None
        missing = []
        for name, (result, arguments) in FUNCTIONS.items():
            try:
                function = getattr(opened, name)
            except AttributeError:
                missing.append(name)
                continue
            function.restype = result
            function.argtypes = arguments
        if missing:
            raise LibraryError(
                f"{path} is older than this package: it lacks {', '.join(missing)}", file=path
            )
        import atexit

        atexit.register(_end)
        _path = path
        _library = opened
        return opened


def library_path() -> str:
    """The path of the C library that this process uses; opens the library."""
    library()
    assert _path is not None
    return _path


def enable_mapping_guard() -> None:
    """Lets the library read short runs through mmap, the fastest way to read columns of a sharded tensor.

    Call it once per process, after the program has set its own signal handlers (faulthandler, for example).
    A SIGBUS from a page within a read of the library becomes an exception of that read; any other SIGBUS goes to
    the earlier handler.
    """
    status = library().tm_enable_mapping_guard()
    if status:
        fail(status)


def mpi_library() -> Any:
    """Opens the MPI module (tm_mpi_*): mpi.so of the wheel, or libtensormount_mpi.so beside the library.

    LibraryError: the module is missing, or this machine lacks the MPI library that it was built with.
    """
    global _mpi
    if _mpi is not None:
        return _mpi
    from tensormount.errors import LibraryError

    folder = os.path.dirname(library_path())
    for name in ("tensormount/mpi.so", "libtensormount_mpi.so"):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        with _lock:
            try:
                # RTLD_GLOBAL: plug-ins of MPI look up symbols of the MPI library in the global scope.
                opened: Any = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise LibraryError(
                    f"MPI: {error}: install the MPI library that it was built with (Debian: the "
                    "packages libopenmpi3 and openmpi-bin)", file=path
                ) from None
            for name, (result, arguments) in MPI_FUNCTIONS.items():
                function = getattr(opened, name)
                function.restype = result
                function.argtypes = arguments
            _mpi = opened
            return opened
    raise LibraryError(
        f"MPI: no MPI module was found beside {library_path()}: install the package "
        "tensormount-mpi, or build with MPI"
    )


def library_version() -> str:
    """The version of the C library: "0.1.0"."""
    text: bytes = library().tm_version()
    return text.decode()


# First words of messages about keys (from the library) and plain values (from this package) that are not stored.
NOT_STORED = "requested, but not stored: "
# The cause of an error of a save that refuses NaNs and infinities (tensormount/save.h).
NOT_FINITE = "values that are not finite"


def fail(status: int, kinds: Optional[dict[int, Any]] = None, key: Optional[str] = None) -> NoReturn:
    """Raises the error of the last call of the library on this thread.

    kinds: status to exception class, for calls in which a status has a narrower meaning.
    key: the key of the call, used if the library does not report one.
    """
    from tensormount.errors import (
        CLASSES,
        CheckpointNotFoundError,
        DeviceError,
        InternalError,
        KeyNotFoundError,
        NonfiniteError,
        NotFoundError,
        PeerLost,
    )

    fields = {"key": key, **(status.fields if isinstance(status, FailedStatus) else last_error())}
    message = fields.pop("message")
    kind = CLASSES[status] if 0 < status < len(CLASSES) else InternalError
    if kind is NotFoundError:
        # An error about a key means that the checkpoint itself exists.
        known = fields["key"] is not None or NOT_STORED in message
        kind = KeyNotFoundError if known else CheckpointNotFoundError
    if kind is PeerLost and fields.get("device"):
        kind = DeviceError
    if fields.get("cause") == NOT_FINITE:
        raise NonfiniteError(message, **fields)
    raise (kinds or {}).get(status, kind)(message, **fields)


class FailedStatus(int):
    """The status of a call that another thread made, with what that thread's tm_last_error said."""

    fields: dict[str, Any]


def last_error() -> dict[str, Any]:
    """The error of the last call of the library on this thread, as arguments of Error."""
    lib = library()
    message = lib.tm_last_error().decode("utf-8", "surrogateescape")
    return {"message": message, "errno": lib.tm_last_errno(), **_fields(lib)}


def _fields(lib: Any) -> dict[str, Any]:
    """The fields of tm_last_error_json that are known, as arguments of Error."""
    import json

    text = c_void_p()
    if lib.tm_last_error_json(ctypes.addressof(text)) != 0 or not text.value:
        return {}
    try:
        said = json.loads(ctypes.string_at(text.value).decode("utf-8", "surrogateescape"))
    except ValueError:
        return {}
    finally:
        lib.tm_free(text)
    found = {
        name: said[name]
        for name in ("errno", "message", "rank", "key", "file", "cause", "memory_in_use", "device")
        if said.get(name) is not None
    }
    box = said.get("box")
    if isinstance(box, dict):
        found["box"] = (tuple(box.get("begin", ())), tuple(box.get("extent", ())))
    return found


def indices(numbers: Sequence[int]) -> Any:
    """An int64_t array. `numbers` may be empty."""
    return (c_int64 * max(1, len(numbers)))(*numbers)


def get_list(function: Any, *arguments: Any) -> list[str]:
    """Calls `function`, whose last argument is a tm_list**, and returns the strings. Errors as of `fail`."""
    out = c_void_p()
    status = function(*arguments, ctypes.addressof(out))
    if status:
        fail(status)
    assert out.value is not None
    return _take_list(out.value)


def get_text(function: Any, *arguments: Any, kinds: Optional[dict[int, Any]] = None,
             key: Optional[str] = None) -> bytes:
    """Calls `function`, whose last argument is a char**, and returns the string. Errors as of `fail`."""
    found = get_optional_text(function, *arguments, kinds=kinds, key=key)
    assert found is not None
    return found


def get_optional_text(function: Any, *arguments: Any, kinds: Optional[dict[int, Any]] = None,
                      key: Optional[str] = None) -> Optional[bytes]:
    """As `get_text`. None: the function set a null pointer."""
    out = c_void_p()
    status = function(*arguments, ctypes.addressof(out))
    if status:
        fail(status, kinds, key)
    if out.value is None:
        return None
    try:
        return ctypes.string_at(out.value)
    finally:
        library().tm_free(out)


def _take_list(handle: int) -> list[str]:
    """The strings of a tm_list; frees the list."""
    lib = library()
    try:
        get = lib.tm_list_get
        return [
            get(handle, i, None).decode("utf-8", "surrogateescape")
            for i in range(lib.tm_list_size(handle))
        ]
    finally:
        lib.tm_list_free(handle)


def take_bytes(address: Optional[int], size: int) -> bytes:
    """A copy of bytes that the library allocated; frees them."""
    try:
        return ctypes.string_at(address, size) if address else b""
    finally:
        library().tm_free(address)


class Frame:
    """The arguments of one read: a region and a buffer, with the arrays that they point to. Reads reuse frames,
    to save time: each pops one from FRAMES and appends it afterwards, so that two threads, or a read in a signal
    handler during another read, never share one."""

    __slots__ = ("buffer", "buffer_at", "extent", "begin", "region", "region_at", "strides",
                 "strides_at")

    def __init__(self) -> None:
        self.begin = Dims()
        self.extent = Dims()
        self.strides = Dims()
        self.strides_at = ctypes.addressof(self.strides)
        extent_at = ctypes.addressof(self.extent)
        self.region = Region(
            struct_size=ctypes.sizeof(Region),
            begin=ctypes.addressof(self.begin),
            extent=extent_at,
        )
        self.buffer = Buffer(
            struct_size=ctypes.sizeof(Buffer), device_kind=TM_DEVICE_HOST, shape=extent_at
        )
        self.region_at = ctypes.addressof(self.region)
        self.buffer_at = ctypes.addressof(self.buffer)


FRAMES: list[Frame] = []
