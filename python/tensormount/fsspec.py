# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as an fsspec file system, read-only: `tensormount://STORE/step-1/hf/model.safetensors`.

    fsspec.open("tensormount://STORE/step-1/npy/w.npy")
    zarr.open("tensormount:///data/STORE/latest/zarr", mode="r")
    torch.distributed.checkpoint.load(state, storage_reader=FsspecReader("tensormount://STORE/step-1/dcp"))

It shows what a mount shows (docs/mounting.md), for machines without FUSE. With the installed package fsspec finds
the protocol by itself; otherwise call `register()`.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Optional

import fsspec
from fsspec.spec import AbstractFileSystem

from tensormount._checkpoint import open as open_checkpoint
from tensormount._files import Files
from tensormount._recent import Recent
from tensormount._store import Store
from tensormount.errors import CheckpointNotFoundError, NotFoundError, UnsupportedError

__all__ = ["TensormountFileSystem", "register"]

PROTOCOL = "tensormount"
# Number of checkpoints that stay open for later accesses.
_KEPT = 16


class _Opened(NamedTuple):
    stamp: object
    files: Files


class TensormountFileSystem(AbstractFileSystem):
    """The file system `tensormount://PATH`.

    PATH begins with a path of this machine, absolute (`tensormount:///data/STORE`) or relative, to a store or
    to a checkpoint of any format. A store has its checkpoints and `latest`; below a checkpoint are the files of
    `Checkpoint.files()`. Directories of this machine outside of stores are listed, too, so that programs can
    search for steps; their files are not shown.

    key_map, hf_part_size, hf_rules   as for `Checkpoint.files`.
    roots                             as for `tensormount.open`.
    """

    protocol = PROTOCOL
    root_marker = ""
    cachable = True

    def __init__(
        self,
        key_map: Any = None,
        hf_part_size: Optional[int] = None,
        hf_rules: Any = None,
        roots: Any = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._how = (key_map, hf_part_size, hf_rules)
        self._roots = tuple(roots)
        self._opened: Recent[_Opened] = Recent(_KEPT)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, (list, tuple)):
            return [cls._strip_protocol(one) for one in path]
        text = os.fspath(path)
        for prefix in (PROTOCOL + "://", PROTOCOL + "::"):
            if text.startswith(prefix):
                text = text[len(prefix):]
        return text.rstrip("/") or ("/" if text.startswith("/") else "")

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        checkpoint, inner = _split(path)
        if checkpoint is None:
            if not os.path.isdir(path or os.curdir):
                raise FileNotFoundError(path)
            return _directory(path)
        return self._info(path, self._files(checkpoint), inner)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        checkpoint, inner = _split(path)
        if checkpoint is not None:
            files = self._files(checkpoint)
            own = self._info(path, files, inner)
            if own["type"] == "file":
                return [own] if detail else [path]
            names = files.list(inner)
        elif _is_store(path):
            names = [one["checkpoint"] for one in Store(path or os.curdir).list()]
            names += ["latest"] if names else []
        else:
            with os.scandir(path or os.curdir) as entries:
                names = sorted(one.name for one in entries if one.is_dir() and not one.name.startswith("."))
        below = [f"{path.rstrip('/')}/{name}" if path else name for name in names]
        if not detail:
            return below
        if checkpoint is None:
            return [_directory(one) for one in below]
        return [
            self._info(one, files, f"{inner}/{name}" if inner else name)
            for one, name in zip(below, names)
        ]

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> Any:
        if mode not in ("rb", "r"):
            self._refuse(path)
        checkpoint, inner = _split(self._strip_protocol(path))
        if checkpoint is None:
            raise FileNotFoundError(path)
        try:
            return self._files(checkpoint).open(inner)
        except NotFoundError as error:
            raise FileNotFoundError(f"{path}: {error}") from None

    def cat_file(
        self, path: str, start: Optional[int] = None, end: Optional[int] = None, **options: Any
    ) -> bytes:
        checkpoint, inner = _split(self._strip_protocol(path))
        if checkpoint is None:
            raise FileNotFoundError(path)
        files = self._files(checkpoint)
        try:
            size = files.stat(inner).size
            begin, stop, _ = slice(start, end).indices(size)
            return files.read(inner, begin, stop)
        except NotFoundError as error:
            raise FileNotFoundError(f"{path}: {error}") from None

    def _refuse(self, path: Any, *arguments: Any, **options: Any) -> Any:
        raise PermissionError(f"{path}: tensormount:// is read-only")

    # fsspec's own versions of some of these do nothing and succeed.
    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = mv = touch = pipe_file = put_file = _refuse

    def modified(self, path: str) -> Any:
        import datetime

        return datetime.datetime.fromtimestamp(self.info(path)["mtime"], datetime.timezone.utc)

    def ukey(self, path: str) -> str:
        found = self.info(path)
        return f"{found['name']} {found.get('ino')} {found['size']} {found.get('mtime')}"

    def _info(self, path: str, files: Files, inner: str) -> dict[str, Any]:
        try:
            stat = files.stat(inner)
        except NotFoundError as error:
            raise FileNotFoundError(f"{path}: {error}") from None
        kind = "directory" if stat.is_directory else "file"
        return {"name": path, "size": stat.size, "type": kind, "mtime": stat.mtime, "ino": stat.inode}

    def _files(self, checkpoint: str) -> Files:
        """The files of a checkpoint, opened again if another one has taken its name."""
        stamp = _stamp(checkpoint)
        found = self._opened.get(checkpoint)
        if found is not None and found.stamp == stamp:
            self._opened.keep(checkpoint, found)
            return found.files
        try:
            with open_checkpoint(checkpoint, roots=self._roots) as opened:
                files = opened.files(*self._how)
        except CheckpointNotFoundError as error:
            raise FileNotFoundError(str(error)) from None
        except UnsupportedError as error:
            # Usually a directory without a checkpoint, below which a program looks for a file.
            raise FileNotFoundError(str(error)) from error
        self._opened.keep(checkpoint, _Opened(stamp, files))
        return files


def register() -> None:
    """Makes fsspec know `tensormount://`; a second call changes nothing."""
    fsspec.register_implementation(PROTOCOL, TensormountFileSystem, clobber=True)


def _is_store(path: str) -> bool:
    return os.path.isfile(os.path.join(path or os.curdir, "store.json"))


def _split(path: str) -> tuple[Optional[str], str]:
    """The checkpoint of a path, and the path below the checkpoint. (None, ""): a store, or a directory above."""
    parts = path.split("/")
    for count in range(1, len(parts) + 1):
        prefix = "/".join(parts[:count])
        rest = "/".join(parts[count:])
        if not prefix:
            continue  # The root directory.
        if os.path.isfile(os.path.join(prefix, "COMMIT")) or _is_latest(prefix):
            return prefix, rest
        if os.path.isfile(prefix):
            return prefix, rest  # A checkpoint of another program that is one file.
        if not os.path.isdir(prefix):
            # The files of a checkpoint of another program begin where its directory ends.
            above = "/".join(parts[: count - 1])
            if count > 1 and above and not _is_store(above):
                return above, "/".join(parts[count - 1:])
            raise FileNotFoundError(path)
    return None, ""


def _is_latest(path: str) -> bool:
    return os.path.basename(path) == "latest" and _is_store(os.path.dirname(path))


def _stamp(checkpoint: str) -> object:
    """Changes if another checkpoint takes this name."""
    if _is_latest(checkpoint):
        return tuple(
            (one["checkpoint"], one.get("uuid"))
            for one in Store(os.path.dirname(checkpoint) or os.curdir).list()
            if one.get("latest")
        )
    try:
        stat = os.stat(os.path.join(checkpoint, "COMMIT"))
    except (FileNotFoundError, NotADirectoryError):
        try:
            stat = os.stat(checkpoint)
        except FileNotFoundError:
            return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def _directory(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}
