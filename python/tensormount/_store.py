# SPDX-License-Identifier: Apache-2.0
"""Operations on stores: `Store`, `repair`, `diff`, `adopt`, `copy`, `derive`, `export`, `wait_committed`."""

from __future__ import annotations

import ctypes
import os
import time
from _thread import RLock  # The same as threading.RLock, without importing threading.
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

from tensormount import _abi
from tensormount._checkpoint import open as open_checkpoint
from tensormount._progress import Progress
from tensormount._state import path_bytes, rules_text, texts
from tensormount._tasks import run_in_background, read_json, call_with_progress
from tensormount.errors import (
    BusyError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    NotFoundError,
    StaleError,
)

PathLike = Union[str, "os.PathLike[str]"]
Rows = list[dict[str, Any]]  # Within Store, `list` is a method.


class Store:
    """A directory of checkpoints. The object keeps nothing open: each call reads the store again.

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
        """The checkpoints by name, a dict each: "checkpoint", "uuid", "generation", "latest".

        A checkpoint that cannot be read also has "problem". The others have "created" (seconds since 1970),
        "file_bytes" (data files), "stored_bytes" (all files), "own_bytes" (what removing it frees),
        "shared_bytes" (files that other checkpoints of the store have, too), "pinned" (None: its pins cannot
        be read). CheckpointNotFoundError: there is no store.
        """
        found: list[dict[str, Any]] = read_json("tm_store_list", path_bytes(self.path))
        return found

    def latest(self) -> dict[str, Any]:
        """The newest checkpoint: {"checkpoint", "uuid", "generation", "path", "warnings"}.

        CheckpointNotFoundError: there is none.
        """
        found: dict[str, Any] = read_json("tm_store_latest", path_bytes(self.path))
        return found

    def follow(
        self, *, since: Union[None, int, str] = None, timeout: Optional[float] = None
    ) -> Follow:
        """Iterates over the checkpoints that are published from now on, each exactly once.

        since     name of a checkpoint: begins with the existing ones that are newer; a number: with those of a
                  higher generation (0: with all that exist); None: with the next one.
        timeout   seconds without a checkpoint, then TimeoutError; None: no limit. The time that the loop's own
                  code takes does not count.

        Each step is {"checkpoint", "uuid", "generation", "parent", "created", "derived", "removed", "nonfinite",
        "path"}: the same checkpoint under a new name is no new step, another save under an old name is one.
        "removed": it was removed or replaced before the store was looked at; then "path" is None, and if its files
        are gone, so are the others but "uuid". "nonfinite": NaNs and infinities in all tensors; None: not counted.
        The store may not exist yet.

        The watch begins with this call and goes on while the loop is busy; `close` or the end of a `with` block
        ends it. Raises StaleError if the store is removed, CheckpointNotFoundError if `since` does not exist.

            >>> import tensormount as tm
            >>> with tm.Store("STORE").follow(since=0, timeout=10) as steps:
            ...     print(next(steps)["checkpoint"])
            step-1
        """
        return Follow(self.path, since, timeout)

    def publish(
        self, staging: str, *, name: Optional[str] = None, wait: float = 0.0
    ) -> dict[str, Any]:
        """Publishes the checkpoint that mounts wrote below STORE/.staging/NAME.

        staging   NAME.
        name      the name of the checkpoint; None: the same.
        wait      seconds to wait for mounts that are not done or have files open.

        Returns {"checkpoint", "uuid", "generation", "tensors", "chunks", "bytes", "mounts"}. Raises BusyError
        if mounts are not done after `wait`; DataLossError if something was not written (report.txt in the
        staging directory lists all of it).
        """
        given = _abi.PublishOptions(struct_size=ctypes.sizeof(_abi.PublishOptions))
        given.name = None if name is None else _text("name", name)
        _text("staging", staging)
        path = path_bytes(os.path.join(self.path, ".staging", staging))
        end = time.monotonic() + _number("wait", wait, "a number of seconds")
        while True:
            # Waits in slices of 0.1 s, so that signal handlers run.
            left = end - time.monotonic()
            given.wait_ms = int(max(0.0, min(0.1, left)) * 1000)
            try:
                found: dict[str, Any] = read_json(
                    "tm_store_publish", path, ctypes.addressof(given), kinds={_abi.TM_UNAVAILABLE: BusyError}
                )
                return found
            except BusyError:
                if left <= 0:
                    raise

    def remove(self, name: str, *, force: bool = False) -> None:
        """Removes a checkpoint, durably. Processes that have it open can read on; `gc` frees its space.

        PermissionDeniedError: it is pinned. `force` removes it anyway.
        """
        given = _abi.RemoveOptions(struct_size=ctypes.sizeof(_abi.RemoveOptions), force=int(force))
        path = self._path_of(name)
        status = _abi.library_for(path).tm_store_remove_with(path, ctypes.addressof(given))
        if status:
            _abi.fail(status, {_abi.TM_NOT_FOUND: CheckpointNotFoundError})

    def pin(
        self, name: str, *, reason: str = "", expires: Optional[float] = None
    ) -> dict[str, Any]:
        """Protects a checkpoint from `prune` and `remove`, durably, under any name.

        expires   seconds since 1970 (`time.time() + 86400`); None: never.

        Returns {"uuid", "name", "reason", "by", "created", "expires", "expired"}.

            >>> import tensormount as tm
            >>> tm.Store("STORE").pin("step-1", reason="in the paper")["reason"]
            'in the paper'
            >>> tm.Store("STORE").unpin("step-1")
        """
        given = _abi.PinOptions(struct_size=ctypes.sizeof(_abi.PinOptions))
        given.reason = _text("reason", reason)
        expected = "seconds since 1970 (time.time() + 86400), or None for a pin that does not expire"
        if expires is not None and not 1 <= _number("expires", expires, expected) <= 100_000_000_000:
            raise InvalidArgumentError(f"expires={expires!r}: must be {expected}")
        given.expires = 0 if expires is None else int(expires)
        found: dict[str, Any] = read_json("tm_store_pin", self._path_of(name), ctypes.addressof(given))
        return found

    def unpin(self, name: str) -> None:
        """Removes a pin. CheckpointNotFoundError: no such checkpoint, or it is not pinned."""
        status = _abi.library().tm_store_unpin(self._path_of(name))
        if status:
            _abi.fail(status, {_abi.TM_NOT_FOUND: CheckpointNotFoundError})

    def pins(self) -> Rows:
        """All pins, as `pin` returns them. A pin that cannot be read has "problem"; it still protects."""
        found: Rows = read_json("tm_store_pins", path_bytes(self.path))
        return found

    def prune(self, rules: str = "policy", *, dry_run: bool = False) -> dict[str, Any]:
        """Removes the checkpoints that no rule keeps.

        rules     separated by commas: "last=3", "every=1000" (steps; also "6h", "5-generations"),
                  "best=eval.loss:min:2"; "policy": the store's own. docs/steps.md explains the rules, and what
                  is kept whatever they say.
        dry_run   True: reports only.

        Returns {"rules", "dry_run", "removed", "checkpoints": [{"checkpoint", "uuid", "generation", "kept",
        "removed", "reason", and "failed" if it could not be removed}]}, the newest first. Raises
        DataLossError, and removes nothing, if the newest checkpoint fails a quick verification or the
        policy is damaged; BusyError if another process prunes.

            >>> import tensormount as tm
            >>> tm.Store("STORE").prune("last=100", dry_run=True)["removed"]
            0
        """
        given = _abi.PruneOptions(
            struct_size=ctypes.sizeof(_abi.PruneOptions), dry_run=int(dry_run)
        )
        given.rules = _text("rules", rules, 'as text ("last=3,every=1000"), or "policy"')
        path = path_bytes(self.path)
        # The call runs on a thread, which goes on if Ctrl-C ends this function.
        found: dict[str, Any] = run_in_background(
            lambda task: read_json("tm_store_prune", path, ctypes.addressof(given))
        )
        return found

    @property
    def policy(self) -> Optional[str]:
        """The store's own rules, for every process that prunes it. None: it has none. Assignable."""
        found: Optional[str] = read_json("tm_store_policy", path_bytes(self.path))["rules"]
        return found

    @policy.setter
    def policy(self, rules: Optional[str]) -> None:
        status = _abi.library().tm_store_set_policy(
            path_bytes(self.path), None if rules is None else _text("policy", rules)
        )
        if status:
            _abi.fail(status, {_abi.TM_NOT_FOUND: CheckpointNotFoundError})

    def _path_of(self, name: str) -> bytes:
        if not _text("name", name, "of a checkpoint"):
            raise InvalidArgumentError(f"{os.fspath(self.path)}: name='': the name of the checkpoint is empty")
        if "/" in name:
            raise InvalidArgumentError(f"{name!r}: the name of a checkpoint must not contain a slash")
        return path_bytes(os.path.join(self.path, name))

    def gc(
        self,
        *,
        grace: Optional[float] = None,
        staging_age: Optional[float] = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Deletes removed checkpoints that no process reads, and leftovers of crashed saves.

        grace     seconds since the removal (60); 0: at once.
        staging_age   seconds without a change after which a save counts as abandoned (a day).
        dry_run   True: reports only.

        Returns {"removed", "kept", "failed", "bytes_freed", "dry_run"}.
        """
        given = _abi.GcOptions(struct_size=ctypes.sizeof(_abi.GcOptions), dry_run=int(dry_run))
        if grace is not None:
            given.grace_seconds = int(grace) if _number("grace", grace, "a number of seconds") >= 1 else -1
        if staging_age is not None:
            given.staging_age_seconds = max(1, int(_number("staging_age", staging_age, "a number of seconds")))
        path = path_bytes(self.path)
        # The call runs on a thread, which goes on if Ctrl-C ends this function.
        found: dict[str, Any] = run_in_background(
            lambda task: read_json("tm_store_gc", path, ctypes.addressof(given))
        )
        return found


class Follow:
    """The iterator of `Store.follow`."""

    _SLICE = 0.1  # Seconds between two polls; signal handlers run between them.

    def __init__(self, path: PathLike, since: Union[None, int, str], timeout: Optional[float]) -> None:
        given = _abi.WatchOptions(struct_size=ctypes.sizeof(_abi.WatchOptions))
        if isinstance(since, str):
            given.since = _text("since", since, "of a checkpoint, or a generation")
            if not since:
                raise InvalidArgumentError("since='': the name of the checkpoint is empty")
        elif since is not None:
            if not isinstance(since, int) or isinstance(since, bool) or not 0 <= since < 1 << 63:
                raise InvalidArgumentError(f"since={since!r}: must be the name of a checkpoint, or a generation")
            given.existing, given.above = 1, since
        if timeout is not None and _number("timeout", timeout, "a number of seconds, or None") < 0:
            raise InvalidArgumentError(f"timeout={timeout!r}: must be a number of seconds, or None")
        self._path = os.fspath(path)
        self._lib = _abi.library_for(path_bytes(path))
        self._timeout = timeout
        # Held during each call of the library, so that close() of another thread does not free the watch under it.
        # Reentrant, because a signal handler may close what it interrupts.
        self._lock = RLock()
        out = ctypes.c_void_p()
        status = self._lib.tm_store_watch(
            path_bytes(path), ctypes.addressof(given), ctypes.addressof(out)
        )
        if status:
            _abi.fail(status, {_abi.TM_NOT_FOUND: CheckpointNotFoundError})
        assert out.value is not None
        self._address: Optional[int] = out.value
        self._free = _abi.free_with(self, _abi.library().tm_watch_free, out.value)

    def __iter__(self) -> Follow:
        return self

    def __enter__(self) -> Follow:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watch. `next` then raises StopIteration, also on another thread that waits in it."""
        with self._lock:
            self._address = None
            self._free()

    def __next__(self) -> dict[str, Any]:
        import json

        end = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            left = self._SLICE if end is None else min(self._SLICE, max(0.0, end - time.monotonic()))
            with self._lock:
                if self._address is None:
                    raise StopIteration
                found = _abi.get_optional_text(
                    self._lib.tm_watch_next, self._address, int(left * 1000)
                )
            if found is not None:
                step: dict[str, Any] = json.loads(found)
                del step["event"]
                return step
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{self._path}: no checkpoint was published for {self._timeout:g} s")


def _text(argument: str, value: Any, what: str = "") -> bytes:
    """A text as bytes for the library. InvalidArgumentError: it is no str, or cannot be passed on."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{argument}={value!r}: must be a str{' ' * bool(what)}{what}")
    try:
        encoded = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{argument}={value!r}: contains a surrogate, which UTF-8 cannot express") from None
    if b"\0" in encoded:
        raise InvalidArgumentError(f"{argument}={value!r}: must not contain NUL")
    return encoded


def _number(argument: str, value: Any, expected: str) -> Any:
    """The value. InvalidArgumentError: it is no number."""
    if not isinstance(value, (int, float)) or value != value:
        raise InvalidArgumentError(f"{argument}={value!r}: must be {expected}")
    return value


def repair(
    path: PathLike,
    source: PathLike,
    *,
    dry_run: bool = False,
    roots: Sequence[str] = (),
    progress: Progress = None,
) -> dict[str, Any]:
    """Restores damaged, short and missing files of checkpoint "STORE/NAME" from `source`.

    source    a copy, or any checkpoint of the same tensors, whatever its sharding and program. Only bytes
              with the recorded hashes are taken.
    dry_run   True: reads and compares everything, and changes nothing.
    roots     as for `open`, for `source`. progress: as for `verify`.

    Checkpoints of the store that share a damaged file get the repaired one, too.

    Returns {"whole": True or False, "files": [{"file", "damage", "bytes_damaged", "bytes_repaired",
    "whole", "shared_with"}], "left": [{"object", "file", "offset", "reason"}], ...}; "left" is the remaining
    damage. Raises CheckpointNotFoundError, DataLossError if no record of the files is left, BusyError while
    another repair runs.

        >>> import tensormount as tm
        >>> said = tm.copy("STORE/step-1", "COPIES")
        >>> tm.repair("STORE/step-1", "COPIES/step-1")["whole"]
        True
    """
    given = _abi.RepairOptions(struct_size=ctypes.sizeof(_abi.RepairOptions), dry_run=int(dry_run))
    kept: list[Any] = []
    given.roots, given.root_count = texts(roots, kept)
    whole = ctypes.c_int32()

    return call_with_progress(
        given, "tm_repair", path_bytes(path), path_bytes(source), given, whole, progress=progress,
        label=f"repair {os.fspath(path)}",
    )


def diff(
    first: PathLike,
    second: PathLike,
    *,
    values: bool = False,
    keys: Optional[str] = None,
    key_map: Optional[Sequence[Mapping[str, str]]] = None,
    limit: int = 10_000,
    roots: Sequence[str] = (),
    progress: Progress = None,
) -> dict[str, Any]:
    """Compares two checkpoints, whatever their formats and shardings.

    values    True: also computes how far numbers are apart, which reads the tensors that differ.
    keys      a glob. key_map: rules that rename keys of the first (`tm.load`).
    limit     the most mismatches that are listed.
    roots     as for `open`, for both. progress: as for `verify`.

    Returns {"same", "added", "removed", "changed", "equal", ..., "mismatches": [{"event", "what",
    "key", ...}], "more"}.

        >>> import tensormount as tm
        >>> tm.diff("STORE/step-1", "STORE/step-1")["same"]
        True
    """
    given = _abi.DiffOptions(
        struct_size=ctypes.sizeof(_abi.DiffOptions), values=int(values), limit=max(1, limit)
    )
    given.keys = keys.encode() if keys else None
    given.key_map = rules_text(key_map)
    given.roots, given.root_count = texts(roots, [])
    same = ctypes.c_int32()

    return call_with_progress(
        given, "tm_diff", path_bytes(first), path_bytes(second), given, same, progress=progress,
        label=f"diff {os.fspath(first)}",
    )


def copy(
    sources: Union[PathLike, Sequence[PathLike]],
    destination: PathLike,
    *,
    limit_rate: Optional[int] = None,
    unconditional: bool = False,
    progress: Progress = None,
) -> dict[str, Any]:
    """Copies checkpoints to another store, with the same names, uuids, generations and bytes.

    Data that the destination has already are hard linked there. Every byte is compared with its hashes.
    A copy that was interrupted is continued by the next one.

    sources   "STORE/NAME", "STORE/latest", "STORE" for all its checkpoints, or a list of these.
    destination   a store, also in a bucket ("s3://BUCKET/STORE"); made if it does not exist.
    limit_rate    the most bytes per second that are read.
    unconditional True: copies into a bucket whose server ignores conditional puts, unprotected from other writers.
    progress  as for `verify`.

    Returns {"destination", "checkpoints": [{"event": "copied", "there" or "failed", "checkpoint",
    "uuid", "generation", "bytes", "bytes_copied", "bytes_linked", "bytes_kept", ...}]}; a failed one of
    several has "code" and "message". If a single copy fails that is an exception: AlreadyExistsError,
    DataLossError, UnsupportedError (an adopted checkpoint), BusyError, ...

        >>> import tensormount as tm
        >>> said = tm.copy("STORE/step-1", "BACKUP")
        >>> said["checkpoints"][0]["event"]
        'copied'
    """
    single = isinstance(sources, (str, bytes, os.PathLike))
    several = [path_bytes(one) for one in ([sources] if single else sources)]  # type: ignore
    given = _abi.CopyOptions(
        struct_size=ctypes.sizeof(_abi.CopyOptions), limit_rate=max(0, limit_rate or 0),
        unconditional=int(bool(unconditional)),
    )
    array = (ctypes.c_char_p * max(1, len(several)))(*several)
    everything = ctypes.c_int32()

    return call_with_progress(
        given, "tm_store_copy", array, len(several), path_bytes(destination), given, everything,
        progress=progress, label=f"copy to {os.fspath(destination)}",
    )


def adopt(
    source: PathLike,
    path: PathLike,
    *,
    replace: bool = False,
    quick: bool = False,
    partial: bool = False,
    key_map: Optional[Sequence[Mapping[str, str]]] = None,
    roots: Sequence[str] = (),
    progress: Progress = None,
) -> dict[str, Any]:
    """Records a checkpoint of another program as "STORE/NAME", in place. Copies nothing.

    quick     True: data are not read, and later reads are not verified.
    partial   True: leaves out tensors that the source's files lack; otherwise that is a DataLossError.
    replace   True: replaces a checkpoint of that name.
    key_map   rules that rename keys (`tm.load`).
    roots     as for `open`. progress: as for `verify`.

    Returns {"path", "uuid", "generation", "tensors", "chunks", "bytes"}.
    """
    given = _abi.AdoptOptions(
        struct_size=ctypes.sizeof(_abi.AdoptOptions), replace=int(replace), quick=int(quick),
        partial=int(partial),
    )
    given.key_map = rules_text(key_map)
    given.roots, given.root_count = texts(roots, [])

    return call_with_progress(
        given, "tm_adopt", path_bytes(source), path_bytes(path), given,
        progress=progress, label=f"adopt {os.fspath(source)}",
    )


def derive(
    path: PathLike,
    source: str,
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    key_map: Optional[Sequence[Mapping[str, str]]] = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Makes checkpoint "STORE/NEW" from a part of the one named `source` in the same store.

    Files are hard linked. Only data of files that are mostly dropped, or cannot be linked, are read and copied.

    keep, drop   globs over the old keys of tensors and objects, "optimizer.*"; each must match a key
              (NotFoundError).
    key_map   rules that rename the remaining keys (`tm.load`).
    replace   True: replaces a checkpoint of that name.

    Returns {"path", "uuid", "generation", "tensors", "objects", "dropped", "files_linked", "bytes_linked",
    "files_copied", "bytes_copied", "refused"}.

        >>> import numpy, tensormount as tm
        >>> report = tm.save({"w": [1.0], "m": numpy.ones(3)}, "DERIVED/whole", replace=True)
        >>> tm.derive("DERIVED/weights", "whole", keep=["m"], replace=True)["tensors"]
        1
    """
    given = _abi.DeriveOptions(struct_size=ctypes.sizeof(_abi.DeriveOptions), replace=int(replace))
    kept: list[Any] = []
    given.keep, given.keep_count = texts(keep, kept)
    given.drop, given.drop_count = texts(drop, kept)
    given.key_map = rules_text(key_map)
    found: dict[str, Any] = read_json(
        "tm_derive", path_bytes(path), _text("source", source), ctypes.addressof(given),
        kinds={_abi.TM_NOT_FOUND: NotFoundError},
    )
    return found


def export(
    source: PathLike,
    destination: PathLike,
    group: Any = None,
    *,
    format: str = "safetensors",
    replace: bool = False,
    partial: bool = False,
    key_map: Optional[Sequence[Mapping[str, str]]] = None,
    hf_part_size: Optional[int] = None,
    hf_rules: Optional[Sequence[Mapping[str, str]]] = None,
    roots: Sequence[str] = (),
    liveness: Optional[float] = None,
    arrival: Optional[float] = None,
    total: Optional[float] = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """Exports a checkpoint to the format of another program.

    Collective: every rank of `group` calls it with the same arguments and writes its share. `destination`
    appears complete and durable in one step, or not at all.

    source     "STORE/NAME", "STORE/latest", or a checkpoint of another program.
    group      Group; None: this process alone.
    format     "safetensors" (one file), "hf" (Hugging Face), "npy", "zarr", "dcp" (PyTorch's
               distributed checkpoint), "torch_dist" (Megatron-Core), "torch" (torch.save).
    replace    True: replaces an earlier export of that format.
    partial    True: leaves out tensors that the files of a foreign source lack.
    key_map    rules that rename keys (`tm.load`).
    hf_part_size, hf_rules   bytes of a part of "hf"; rules for its names.
    roots      as for `open`.
    liveness, arrival, total   as for `save`. progress: as for `verify`.

    Returns {"path", "format", "files", "tensors", "bytes", "bytes_written", "notes", "warnings", ...}.
    Raises UnsupportedError with the tensors that the format cannot hold; AlreadyExistsError,
    DataLossError, ResourceExhaustedError.

        >>> import tensormount as tm
        >>> said = tm.export("STORE/step-1", "step-1.safetensors", replace=True)
        >>> said["files"], said["tensors"]
        (1, 1)
    """
    from tensormount._jobs import set_times
    from tensormount._save import _group, flag

    group = _group(group)
    with group._handle() as handle:
        given = _abi.ExportOptions(struct_size=ctypes.sizeof(_abi.ExportOptions))
        paths: tuple[Optional[bytes], Optional[bytes]] = (None, None)
        own: Optional[Exception] = None
        try:
            given.replace = flag("replace", replace)
            given.partial = flag("partial", partial)
            given.format = _text("format", format)
            given.key_map = rules_text(key_map)
            given.hf_part_bytes = hf_part_size or 0
            given.hf_rules = rules_text(hf_rules)
            given.roots, given.root_count = texts(roots, [])
            set_times(given, liveness, arrival, total)
            paths = (path_bytes(source), path_bytes(destination))
        except Exception as error:  # The call still happens, so that it fails on all ranks.
            own = error

        return call_with_progress(
            given, "tm_export", *paths, handle.address, given, progress=progress,
            label=f"export {source!r}", handle=handle, own=own,
        )


def wait_committed(
    path: PathLike, uuid: Optional[str] = None, timeout: Optional[float] = None
) -> str:
    """Waits until checkpoint "STORE/NAME" exists, and returns its uuid.

    For processes that take no part in the save: it only looks at the store.

    uuid      the uuid of the expected save; StaleError if another save has the name. None: any.
    timeout   seconds, then TimeoutError; None: no limit.
    """
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
            raise StaleError(f"{os.fspath(path)}: has the uuid {found} of another save, not {uuid}")
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError(f"{os.fspath(path)}: not committed after {timeout:g} s")
        time.sleep(pause if left is None else min(pause, left))
        pause = min(pause * 1.5, 0.25)
