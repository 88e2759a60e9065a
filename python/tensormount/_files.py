# SPDX-License-Identifier: Apache-2.0
"""The files that a mount shows of a checkpoint, without a mount."""

from __future__ import annotations

import ctypes
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from tensormount import _abi
from tensormount._checkpoint import _Handle
from tensormount._state import rules_text

if TYPE_CHECKING:
    from tensormount._checkpoint import Checkpoint

_BUFFER = 1 << 20


class FileStat(NamedTuple):
    """A file or directory of `Files`."""

    is_directory: bool
    size: int  # Bytes; 0 for a directory.
    mtime: int  # Seconds since 1970.
    inode: int


class Files:
    """The files that a mount shows of a checkpoint: `npy/`, `zarr/`, `hf/`, `dcp/`, `slices/` and so on.

    Paths are relative to the checkpoint: "npy/layers/0/w.npy"; "" is its directory. Iteration returns the path
    of every file, views included, directory by directory; slices open by name and are not listed. Bytes that
    have hashes are verified when they are read. It and its open files keep the checkpoint open. Any number of
    threads may use it.

        >>> import tensormount as tm
        >>> files = tm.open("STORE/step-1").files()
        >>> files.read("npy/w.npy")[:6]
        b'\\x93NUMPY'
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        key_map: Optional[Sequence[Mapping[str, str]]] = None,
        hf_part_size: Optional[int] = None,
        hf_rules: Optional[Sequence[Mapping[str, str]]] = None,
    ) -> None:
        self._lib = checkpoint._lib
        options = _abi.FilesOptions(struct_size=ctypes.sizeof(_abi.FilesOptions))
        options.key_map = rules_text(key_map)
        options.hf_part_bytes = hf_part_size or 0
        options.hf_rules = rules_text(hf_rules)
        handle = checkpoint._opened()
        out = ctypes.c_void_p()
        status = self._lib.tm_files_open(
            handle.address, ctypes.addressof(options), ctypes.addressof(out)
        )
        if status:
            _abi.fail(status)
        assert out.value is not None
        self._handle = _Handle(out.value, self._lib.tm_files_close)

    def list(self, path: str = "") -> list[str]:
        """The names in a directory. Raises NotFoundError; InvalidArgumentError for a file."""
        return _abi.get_list(self._lib.tm_files_list, self._handle.address, _encoded(path))

    def stat(self, path: str) -> FileStat:
        """Raises NotFoundError if nothing has this path."""
        info = _abi.FileInfo(struct_size=ctypes.sizeof(_abi.FileInfo))
        status = self._lib.tm_files_stat(
            self._handle.address, _encoded(path), ctypes.addressof(info)
        )
        if status:
            _abi.fail(status)
        return FileStat(bool(info.is_directory), info.size, info.mtime, info.inode)

    def exists(self, path: str) -> bool:
        from tensormount.errors import NotFoundError

        try:
            self.stat(path)
        except NotFoundError:
            return False
        return True

    def open(self, path: str, buffering: int = _BUFFER) -> io.BufferedIOBase:
        """Opens a file for reading, as `open(path, "rb")` would. Raises NotFoundError; InvalidArgumentError for a
        directory. A read raises DataLossError if the bytes are damaged."""
        return io.BufferedReader(self._raw(path), max(1, buffering))

    def read(self, path: str, begin: int = 0, end: Optional[int] = None) -> bytes:
        """The bytes [begin, end) of a file; None: to its end."""
        with self._raw(path) as file:
            end = file._size if end is None else min(end, file._size)
            out = bytearray(max(0, end - begin))
            if out and file._read_at(begin, memoryview(out)) != len(out):
                raise EOFError(f"{path}: the file ends before byte {end}")
        return bytes(out)

    def __iter__(self) -> Iterator[str]:
        return self._walk("")

    def _walk(self, folder: str) -> Iterator[str]:
        for name in self.list(folder):
            path = f"{folder}/{name}" if folder else name
            if self.stat(path).is_directory:
                yield from self._walk(path)
            else:
                yield path

    def _raw(self, path: str) -> _RawFile:
        out = ctypes.c_void_p()
        status = self._lib.tm_file_open(
            self._handle.address, _encoded(path), ctypes.addressof(out)
        )
        if status:
            _abi.fail(status)
        assert out.value is not None
        return _RawFile(self._lib, path, _Handle(out.value, self._lib.tm_file_close))


class _RawFile(io.RawIOBase):
    def __init__(self, lib: Any, path: str, handle: _Handle) -> None:
        super().__init__()
        self.name = path
        self._lib = lib
        self._handle: Optional[_Handle] = handle
        self._at = 0
        self._size: int = lib.tm_file_size(handle.address)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}.get(whence)
        if base is None:
            raise ValueError(f"whence {whence}: must be 0, 1 or 2")
        if base + offset < 0:
            raise ValueError(f"{self.name}: seek to position {base + offset}, which is negative")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        got = self._read_at(self._at, memoryview(buffer).cast("B"))
        self._at += got
        return got

    def _read_at(self, offset: int, view: memoryview) -> int:
        handle = self._handle
        if handle is None:
            raise ValueError(f"{self.name}: the file is closed")
        if offset >= self._size or len(view) == 0:
            return 0
        got = ctypes.c_size_t()
        status = self._lib.tm_file_read(
            handle.address, offset, (ctypes.c_char * len(view)).from_buffer(view), len(view), ctypes.addressof(got)
        )
        if status:
            _abi.fail(status)
        return got.value

    def close(self) -> None:
        self._handle = None  # A read on another thread keeps it until the read returns.
        super().close()


def _encoded(path: str) -> bytes:
    from tensormount.errors import InvalidArgumentError

    encoded = path.encode("utf-8", "surrogateescape")
    if b"\0" in encoded:
        raise InvalidArgumentError(f"{path!r}: a path must not contain NUL")
    return encoded
