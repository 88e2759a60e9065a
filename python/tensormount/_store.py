# SPDX-License-Identifier: Apache-2.0
"""What an operator does with the command, for programs: `Store`, `verify`, `diff`, `adopt`,
`wait_committed`."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

from tensormount import _abi
from tensormount._state import path_bytes
from tensormount.errors import CheckpointNotFoundError, Error, NotFoundError, StaleError

PathLike = Union[str, "os.PathLike[str]"]


class Store:
    """A folder of checkpoints. Opens nothing and keeps nothing: each call looks anew.

        >>> import tensormount as tm
        >>> store = tm.Store("STORE")
        >>> "step-1" in [entry["checkpoint"] for entry in store.list()]
        True
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)

    def __repr__(self) -> str:
        return f"<tensormount.Store {self.path!r}>"

    def list(self) -> list[dict[str, Any]]:
        """The checkpoints by name: {"checkpoint", "uuid", "generation", "latest"}, and "problem"
        where one cannot be read. CheckpointNotFoundError: no store."""
        found: list[dict[str, Any]] = _json("tm_store_list", path_bytes(self.path))
        return found

    def latest(self) -> dict[str, Any]:
        """The newest: {"checkpoint", "uuid", "generation", "path", "warnings"}.
        CheckpointNotFoundError where there is none."""
        found: dict[str, Any] = _json("tm_store_latest", path_bytes(self.path))
        return found

    def remove(self, name: str) -> None:
        """Removes a checkpoint, durably. Who has it open reads on; `gc` frees its space."""
        status = _abi.library().tm_store_remove(path_bytes(os.path.join(self.path, name)))
        if status:
            _abi.fail(status, {2: CheckpointNotFoundError})

    def gc(
        self,
        *,
        grace: Optional[float] = None,
        staging_age: Optional[float] = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Deletes what was removed and nobody reads, and what crashed saves left: {"removed",
        "kept", "failed", "bytes_freed", "dry_run"}.

        grace: seconds since it was removed (60; 0: at once). staging_age: seconds after which a save
        that was not touched is taken for abandoned (a day).
        """
        given = _abi.GcOptions(struct_size=ctypes.sizeof(_abi.GcOptions), dry_run=int(dry_run))
        if grace is not None:
            given.grace_seconds = int(grace) if grace >= 1 else -1
        if staging_age is not None:
            given.staging_age_seconds = max(1, int(staging_age))
        found: dict[str, Any] = _json(
            "tm_store_gc", path_bytes(self.path), ctypes.addressof(given)
        )
        return found


def verify(path: PathLike, *, quick: bool = False, threads: int = 0) -> dict[str, Any]:
    """Every byte of a checkpoint against its hashes.

    quick: commit record, lengths and index only; no data are read. threads: 0: as many as cores.

    Returns {"whole": True or False, "tensors", "bytes", ..., "damage": [{"object", "file", "offset",
    "reason"}], "warnings"}. What cannot even be opened is an exception.

        >>> import tensormount as tm
        >>> tm.verify("STORE/step-1")["whole"]
        True
    """
    given = _abi.VerifyOptions(
        struct_size=ctypes.sizeof(_abi.VerifyOptions), quick=int(quick), threads=threads
    )
    whole = ctypes.c_int32()
    found: dict[str, Any] = _background(
        lambda: _json(
            "tm_verify", path_bytes(path), ctypes.addressof(given),
            ctypes.addressof(whole),
        )
    )
    return found


def diff(
    first: PathLike,
    second: PathLike,
    *,
    values: bool = False,
    keys: Optional[str] = None,
    key_map: Optional[Sequence[Mapping[str, str]]] = None,
    limit: int = 10_000,
) -> dict[str, Any]:
    """What two checkpoints differ in, in their own formats and shardings.

    values: how far numbers are apart, too, which reads what differs. keys: a glob. key_map: rules
    that rename the first (`tm.load`). limit: mismatches that are listed.

    Returns {"same", "added", "removed", "changed", "equal", ..., "mismatches": [{"event", "what",
    "key", ...}], "more"}.

        >>> import tensormount as tm
        >>> tm.diff("STORE/step-1", "STORE/step-1")["same"]
        True
    """
    import json

    given = _abi.DiffOptions(
        struct_size=ctypes.sizeof(_abi.DiffOptions), values=int(values), limit=max(1, limit)
    )
    given.keys = keys.encode() if keys else None
    if key_map is not None:
        given.key_map = json.dumps([dict(rule) for rule in key_map]).encode()
    same = ctypes.c_int32()
    found: dict[str, Any] = _background(
        lambda: _json(
            "tm_diff", path_bytes(first), path_bytes(second),
            ctypes.addressof(given), ctypes.addressof(same),
        )
    )
    return found


def adopt(
    source: PathLike,
    path: PathLike,
    *,
    replace: bool = False,
    quick: bool = False,
    key_map: Optional[Sequence[Mapping[str, str]]] = None,
) -> dict[str, Any]:
    """Records what another program saved as checkpoint "STORE/NAME", in place; copies nothing.

    quick: no data are read, and later reads not verified. Returns {"path", "uuid", "generation",
    "tensors", "chunks", "bytes"}.
    """
    import json

    given = _abi.AdoptOptions(
        struct_size=ctypes.sizeof(_abi.AdoptOptions), replace=int(replace), quick=int(quick)
    )
    if key_map is not None:
        given.key_map = json.dumps([dict(rule) for rule in key_map]).encode()
    found: dict[str, Any] = _background(
        lambda: _json(
            "tm_adopt", path_bytes(source), path_bytes(path),
            ctypes.addressof(given),
        )
    )
    return found


def wait_committed(
    path: PathLike, uuid: Optional[str] = None, timeout: Optional[float] = None
) -> str:
    """Waits until checkpoint "STORE/NAME" is there, by looking at the store alone: for processes
    that take no part in the save. Returns its uuid.

    uuid: of the save that is meant; StaleError once another one has the name. None: any.
    TimeoutError after `timeout` seconds.
    """
    from tensormount._checkpoint import open as open_checkpoint

    end = None if timeout is None else time.monotonic() + timeout
    pause = 0.01
    while True:
        try:
            with open_checkpoint(path) as checkpoint:
                found = checkpoint.uuid
        except NotFoundError:
            found = None
        if found is not None:
            if uuid is None or found == uuid:
                return found
            raise StaleError(f"{os.fspath(path)}: is {found}, another save than {uuid}")
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError(f"{os.fspath(path)}: not committed after {timeout:g} s")
        time.sleep(pause if left is None else min(pause, left))
        pause = min(pause * 1.5, 0.25)


# ---- How -----------------------------------------------------------------------------------------


def _json(function: str, *arguments: Any) -> Any:
    import json

    lib = _abi.library()
    out = ctypes.c_void_p()
    status = getattr(lib, function)(*arguments, ctypes.addressof(out))
    if status:
        _abi.fail(status, {2: CheckpointNotFoundError})
    assert out.value is not None
    try:
        return json.loads(ctypes.string_at(out.value))
    finally:
        lib.tm_free(out)


def _background(call: Callable[[], Any]) -> Any:
    """Runs what reads for long on a thread of its own, so that Ctrl-C ends the wait for it at once.
    (It then reads on to its end, and nobody hears of it.)"""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((call(), None))
        except Error as error:
            result.append((None, error))

    thread = threading.Thread(target=run, name="tensormount-read", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
    value, failure = result[0]
    if failure is not None:
        raise failure
    return value
