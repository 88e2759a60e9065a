# SPDX-License-Identifier: Apache-2.0
"""Mounting from a program: `mount`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, Optional, Union

from tensormount.errors import Error, UnsupportedError

PathLike = Union[str, "os.PathLike[str]"]


class Mount:
    """A mounted store, checkpoint or training directory, made by `mount`. Usable as the path of the mount point."""

    def __init__(self, path: str, program: str, made: bool) -> None:
        self.path = path
        self._process = os.getpid()
        self._program: Optional[str] = program
        self._made_directory = made  # Whether `mount` created the directory.

    def __fspath__(self) -> str:
        return self.path

    def __enter__(self) -> Mount:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<tensormount.Mount {self.path!r}{'' if self._program else ': unmounted'}>"

    def close(self, *, timeout: float = 60.0) -> None:
        """Unmounts. Raises BusyError if files are in use, and TimeoutError after `timeout` seconds; call it again
        then.

        In a forked child it does nothing: the mount belongs to the parent.
        """
        if self._program is None:
            return
        if self._process != os.getpid():
            self._program = None
            return
        _run([self._program, "unmount", self.path], timeout)
        self._program = None
        if self._made_directory:
            os.rmdir(self.path)

    def __del__(self) -> None:
        if getattr(self, "_program", None) is not None:
            try:
                self.close(timeout=10.0)
            except Exception:
                pass  # The mount stays; `tensormount unmount` ends it.


def mount(
    source: PathLike,
    where: Optional[PathLike] = None,
    *,
    read_only: bool = True,
    options: Sequence[str] = (),
    timeout: float = 60.0,
) -> Mount:
    """Mounts a store, a checkpoint, or a checkpoint of another program, so that every tensor is a file.

    where     an empty directory; None: one is made, and removed by close().
    read_only False: checkpoints can be saved below .staging/.
    options   further options of `tensormount mount` (docs/cli.md).
    timeout   seconds that mounting may take.

    The mount is a separate process, which outlives this one unless close() ends it, or the Mount is dropped.
    UnsupportedError: the machine has no FUSE (/dev/fuse, fusermount3).

        with tm.mount("STORE") as mnt:
            weights = numpy.load(f"{mnt.path}/latest/npy/w.npy", mmap_mode="r")
    """
    from tensormount._main import program

    made = where is None
    path = tempfile.mkdtemp(prefix="tensormount-") if where is None else os.fspath(where)
    name = program()
    command = [name, "mount", os.fspath(source), path, *options]
    if read_only:
        command.append("--read-only")
    try:
        _run(command, timeout)
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(path)  # Not recursively: the mount may have succeeded.
        raise
    return Mount(path, name, made)


def _run(command: list[str], timeout: float) -> None:
    """Runs the command. If it fails, raises the exception class of the error code that it prints as JSON;
    TimeoutError after `timeout` seconds; UnsupportedError if the program is missing."""
    import json

    from tensormount.errors import CLASSES

    try:
        done = subprocess.run(
            [command[0], "--json", *command[1:]], stdin=subprocess.DEVNULL, capture_output=True,
            timeout=timeout, check=False,
        )
    except FileNotFoundError as error:
        raise UnsupportedError(f"{command[0]}: {error}") from None
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{' '.join(command)}: no answer within {timeout:g} s") from None
    if done.returncode == 0:
        return
    said: dict[str, Any] = {}
    for line in done.stderr.decode("utf-8", "replace").splitlines():
        try:
            said = json.loads(line)["error"]
        except (ValueError, KeyError, TypeError):
            continue
    kinds = {kind.code: kind for kind in CLASSES[1:]}
    message = said.get("message") or done.stderr.decode("utf-8", "replace").strip()
    if said.get("hint"):
        message += f" ({said['hint']})"
    raise kinds.get(said.get("code", ""), Error)(message, errno=said.get("errno", 0))
