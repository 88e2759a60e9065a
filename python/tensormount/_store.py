# SPDX-License-Identifier: Apache-2.0
"""What an operator does with the command, for programs: `Store`, `verify`, `diff`, `adopt`, `copy`,
`export`, `wait_committed`."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

from tensormount import _abi
from tensormount._progress import Progress
from tensormount._state import path_bytes, rules_text, text, texts
from tensormount._tasks import in_background
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
        where one cannot be read; of the others "created" (seconds since 1970), "file_bytes" (of data
        files), "stored_bytes" (of all), "own_bytes" (what removing it frees), "shared_bytes" (of files
        that others of the store have, too), "pinned" (None: its pins cannot be read).
        CheckpointNotFoundError: no store."""
        found: list[dict[str, Any]] = _json("tm_store_list", path_bytes(self.path))
        return found

    def latest(self) -> dict[str, Any]:
        """The newest: {"checkpoint", "uuid", "generation", "path", "warnings"}.
        CheckpointNotFoundError where there is none."""
        found: dict[str, Any] = _json("tm_store_latest", path_bytes(self.path))
        return found

    def publish(
        self, staging: str, *, name: Optional[str] = None, wait: float = 0.0
    ) -> dict[str, Any]:
        """Publishes what mounts wrote below STORE/.staging/NAME: {"checkpoint", "uuid",
        "generation", "tensors", "chunks", "bytes", "mounts"}.

        staging: NAME. name: of the checkpoint; None: the same. wait: seconds for mounts that are not
        done yet, or have files open. Then it is BusyError; DataLossError where something was not
        written: report.txt in the staging lists all of it.
        """
        given = _abi.PublishOptions(struct_size=ctypes.sizeof(_abi.PublishOptions))
        given.name = None if name is None else text(name)
        path = path_bytes(os.path.join(self.path, ".staging", staging))
        end = time.monotonic() + wait
        while True:
            # In slices: a signal handler gets its turn.
            left = end - time.monotonic()
            given.wait_ms = int(max(0.0, min(0.1, left)) * 1000)
            try:
                found: dict[str, Any] = _json(
                    "tm_store_publish", path, ctypes.addressof(given), kinds={8: BusyError}
                )
                return found
            except BusyError:
                if left <= 0:
                    raise

    def remove(self, name: str, *, force: bool = False) -> None:
        """Removes a checkpoint, durably. Who has it open reads on; `gc` frees its space.
        PermissionDeniedError where it is pinned, but with force."""
        given = _abi.RemoveOptions(struct_size=ctypes.sizeof(_abi.RemoveOptions), force=int(force))
        status = _abi.library().tm_store_remove_with(self._path_of(name), ctypes.addressof(given))
        if status:
            _abi.fail(status, {2: CheckpointNotFoundError})

    def pin(
        self, name: str, *, reason: str = "", expires: Optional[float] = None
    ) -> dict[str, Any]:
        """Keeps a checkpoint from `prune` and `remove`, durably: {"uuid", "name", "reason", "by",
        "created", "expires", "expired"}. It holds what was saved, whatever its name is.

        expires: seconds since 1970 (`time.time() + 86400`); None: never.

            >>> import tensormount as tm
            >>> tm.Store("STORE").pin("step-1", reason="in the paper")["reason"]
            'in the paper'
            >>> tm.Store("STORE").unpin("step-1")
        """
        given = _abi.PinOptions(struct_size=ctypes.sizeof(_abi.PinOptions))
        given.reason = text(reason)
        if expires is not None and not 1 <= expires <= 100_000_000_000:
            raise InvalidArgumentError(
                f"expires={expires}: want seconds since 1970; None: it is held for ever"
            )
        given.expires = 0 if expires is None else int(expires)
        found: dict[str, Any] = _json("tm_store_pin", self._path_of(name), ctypes.addressof(given))
        return found

    def unpin(self, name: str) -> None:
        """CheckpointNotFoundError: there is no such checkpoint, or it is not pinned."""
        status = _abi.library().tm_store_unpin(self._path_of(name))
        if status:
            _abi.fail(status, {2: CheckpointNotFoundError})

    def pins(self) -> Rows:
        """All pins, as of `pin`; "problem" where one cannot be read, which holds all the same."""
        found: Rows = _json("tm_store_pins", path_bytes(self.path))
        return found

    def prune(self, rules: str = "policy", *, dry_run: bool = False) -> dict[str, Any]:
        """Removes the checkpoints that no rule keeps: {"rules", "dry_run", "removed", "checkpoints":
        [{"checkpoint", "uuid", "generation", "kept", "removed", "reason", and "failed" where it could
        not be removed}]}, the newest first.

        rules: with commas between them, "last=3", "every=1000" (steps; "6h", "5-generations"),
        "best=eval.loss:min:2"; "policy": the store's own. docs/semantics.md has what they mean, and
        what stays whatever they say. DataLossError: the newest does not pass a quick verification,
        or the policy is damaged, and nothing was removed; BusyError: somebody else prunes.

            >>> import tensormount as tm
            >>> tm.Store("STORE").prune("last=100", dry_run=True)["removed"]
            0
        """
        given = _abi.PruneOptions(
            struct_size=ctypes.sizeof(_abi.PruneOptions), dry_run=int(dry_run)
        )
        given.rules = text(rules)
        path = path_bytes(self.path)
        # On a thread, which removes on where nobody waits for it any more.
        found: dict[str, Any] = in_background(
            lambda task: _json("tm_store_prune", path, ctypes.addressof(given))
        )
        return found

    @property
    def policy(self) -> Optional[str]:
        """The store's own rules, for all who prune it; None: it has none. Assign to it to change
        them."""
        found: Optional[str] = _json("tm_store_policy", path_bytes(self.path))["rules"]
        return found

    @policy.setter
    def policy(self, rules: Optional[str]) -> None:
        status = _abi.library().tm_store_set_policy(
            path_bytes(self.path), None if rules is None else text(rules)
        )
        if status:
            _abi.fail(status, {2: CheckpointNotFoundError})

    def _path_of(self, name: str) -> bytes:
        if "/" in name:
            raise InvalidArgumentError(f"{name!r}: the name of a checkpoint has no slash")
        return path_bytes(os.path.join(self.path, name))

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
        path = path_bytes(self.path)
        # On a thread, which deletes on where nobody waits for it any more.
        found: dict[str, Any] = in_background(
            lambda task: _json("tm_store_gc", path, ctypes.addressof(given))
        )
        return found


def verify(
    path: PathLike,
    *,
    quick: bool = False,
    threads: int = 0,
    roots: Sequence[str] = (),
    progress: Progress = None,
) -> dict[str, Any]:
    """Every byte of a checkpoint against its hashes.

    quick: commit record, lengths and index only; no data are read. threads: 0: as many as cores.
    roots: as of `open`.
    progress: called with bytes done and in all; True: a bar, where tqdm is installed.

    Returns {"whole": True or False, "tensors", "bytes", ..., "damage": [{"object", "file", "offset",
    "reason"}], "warnings"}. A damage of a file that other checkpoints of the store share has
    "shared_with", their names. What cannot even be opened is an exception.

        >>> import tensormount as tm
        >>> tm.verify("STORE/step-1")["whole"]
        True
    """
    given = _abi.VerifyOptions(
        struct_size=ctypes.sizeof(_abi.VerifyOptions), quick=int(quick), threads=threads
    )
    kept: list[Any] = []
    given.roots, given.root_count = texts(roots, kept)
    whole = ctypes.c_int32()

    return _watched(
        given, "tm_verify", path_bytes(path), ctypes.addressof(given), ctypes.addressof(whole),
        progress=progress, label=f"verify {os.fspath(path)}",
    )


def repair(
    path: PathLike,
    source: PathLike,
    *,
    dry_run: bool = False,
    roots: Sequence[str] = (),
    progress: Progress = None,
) -> dict[str, Any]:
    """Makes damaged, short and missing files of checkpoint "STORE/NAME" whole again, with the bytes
    of `source`: a copy, or any checkpoint of the same tensors, cut as it likes or of another program.
    Only bytes that have the recorded hashes are taken. Checkpoints of the store that share a damaged
    file have the new one, too.

    dry_run: reads and compares everything, and changes nothing. roots: as of `open`, of `source`.
    progress: as of `verify`.

    Returns {"whole": True or False, "files": [{"file", "damage", "bytes_damaged", "bytes_repaired",
    "whole", "shared_with"}], "left": [{"object", "file", "offset", "reason"}], ...}; "left" is what is
    damaged still. Raises CheckpointNotFoundError, DataLossError where nothing says what was there,
    BusyError while another repair is under way.

        >>> import tensormount as tm
        >>> said = tm.copy("STORE/step-1", "COPIES")
        >>> tm.repair("STORE/step-1", "COPIES/step-1")["whole"]
        True
    """
    given = _abi.RepairOptions(struct_size=ctypes.sizeof(_abi.RepairOptions), dry_run=int(dry_run))
    kept: list[Any] = []
    given.roots, given.root_count = texts(roots, kept)
    whole = ctypes.c_int32()

    return _watched(
        given, "tm_repair", path_bytes(path), path_bytes(source), ctypes.addressof(given),
        ctypes.addressof(whole), progress=progress, label=f"repair {os.fspath(path)}",
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
    """What two checkpoints differ in, in their own formats and shardings.

    values: how far numbers are apart, too, which reads what differs. keys: a glob. key_map: rules
    that rename the first (`tm.load`). limit: mismatches that are listed. roots: as of `open`, for both.
    progress: as of `verify`.

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

    return _watched(
        given, "tm_diff", path_bytes(first), path_bytes(second), ctypes.addressof(given),
        ctypes.addressof(same), progress=progress, label=f"diff {os.fspath(first)}",
    )


def copy(
    sources: Union[PathLike, Sequence[PathLike]],
    destination: PathLike,
    *,
    limit_rate: Optional[int] = None,
    progress: Progress = None,
) -> dict[str, Any]:
    """Copies checkpoints to another store, as the same checkpoints: names, uuids, generations, every
    byte. What the destination has already is linked there and not copied; every byte is compared
    with its hashes on the way. An interrupted copy is gone on with by the next one.

    sources: "STORE/NAME", "STORE/latest", "STORE" for all of its, or several of these. destination:
    a store, made where there is none. limit_rate: most bytes a second that are read. progress: as of
    `verify`.

    Returns {"destination", "checkpoints": [{"event": "copied", "there" or "failed", "checkpoint",
    "uuid", "generation", "bytes", "bytes_copied", "bytes_linked", "bytes_kept", ...}]}; where one of
    several failed it has "code" and "message". A single one that fails is an exception:
    AlreadyExistsError, DataLossError, UnsupportedError (an adopted one), BusyError, ...

        >>> import tensormount as tm
        >>> said = tm.copy("STORE/step-1", "BACKUP")
        >>> said["checkpoints"][0]["event"]
        'copied'
    """
    single = isinstance(sources, (str, bytes, os.PathLike))
    several = [path_bytes(one) for one in ([sources] if single else sources)]  # type: ignore
    given = _abi.CopyOptions(
        struct_size=ctypes.sizeof(_abi.CopyOptions), limit_rate=max(0, limit_rate or 0)
    )
    array = (ctypes.c_char_p * max(1, len(several)))(*several)
    everything = ctypes.c_int32()

    return _watched(
        given, "tm_store_copy", ctypes.addressof(array), len(several), path_bytes(destination),
        ctypes.addressof(given), ctypes.addressof(everything), progress=progress,
        label=f"copy to {os.fspath(destination)}",
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
    """Records what another program saved as checkpoint "STORE/NAME", in place; copies nothing.

    quick: no data are read, and later reads not verified. partial: without what its files lack, which
    is a DataLossError otherwise. key_map: rules that rename keys (`tm.load`). roots: as of `open`.
    progress: as of `verify`. Returns {"path", "uuid", "generation", "tensors", "chunks", "bytes"}.
    """
    given = _abi.AdoptOptions(
        struct_size=ctypes.sizeof(_abi.AdoptOptions), replace=int(replace), quick=int(quick),
        partial=int(partial),
    )
    given.key_map = rules_text(key_map)
    given.roots, given.root_count = texts(roots, [])

    return _watched(
        given, "tm_adopt", path_bytes(source), path_bytes(path), ctypes.addressof(given),
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
    """A checkpoint "STORE/NEW" out of the one called `source` in the same store, by hard links: no
    data are read, but what is copied out of files that are mostly dropped.

    keep, drop: globs over the old keys of tensors and objects, "optimizer.*"; each must match
    something (NotFoundError). key_map: rules that rename what is left (`tm.load`). Returns {"path",
    "uuid", "generation", "tensors", "objects", "dropped", "files_linked", "bytes_linked",
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
    found: dict[str, Any] = _json(
        "tm_derive", path_bytes(path), text(source), ctypes.addressof(given),
        kinds={2: NotFoundError},
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
    """Real files out of a checkpoint, for programs that know nothing of it. Collective: every rank of
    `group` calls it with the same arguments, and each writes its share. `destination` appears whole
    and durable in one step, or not at all.

    source     "STORE/NAME", "STORE/latest", or what another program saved.
    group      Group; None: this process alone.
    format     "safetensors" (one file), "hf" (Hugging Face), "npy", "zarr", "dcp" (PyTorch's
               distributed checkpoint), "torch" (torch.save).
    replace    an earlier export of that format is replaced.
    partial    of a checkpoint of another program whose files lack some of it: exports the rest.
    key_map    rules that rename keys (`tm.load`).
    hf_part_size, hf_rules   bytes of a part of "hf"; rules that make its names.
    roots      as of `open`.
    liveness, arrival, total   as of `save`. progress: as of `verify`.

    Returns {"path", "format", "files", "tensors", "bytes", "bytes_written", "notes", "warnings", ...}.
    UnsupportedError names the tensors that the format cannot hold; AlreadyExistsError,
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
            given.format = text(format)
            given.key_map = rules_text(key_map)
            given.hf_part_bytes = hf_part_size or 0
            given.hf_rules = rules_text(hf_rules)
            given.roots, given.root_count = texts(roots, [])
            set_times(given, liveness, arrival, total)
            paths = (path_bytes(source), path_bytes(destination))
        except Exception as error:  # The call tells the others, who would wait for this rank.
            own = error

        return _watched(
            given, "tm_export", *paths, handle.address, ctypes.addressof(given), progress=progress,
            label=f"export {source!r}", handle=handle, own=own,
        )


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


def _json(
    function: str, *arguments: Any, kinds: Optional[dict[int, Any]] = None
) -> Any:
    import json

    narrower = {2: CheckpointNotFoundError, **(kinds or {})}
    return json.loads(_abi.get_text(getattr(_abi.library(), function), *arguments, kinds=narrower))


def _watched(
    given: Any,
    function: str,
    *arguments: Any,
    progress: Progress,
    label: str,
    handle: Any = None,
    own: Optional[Exception] = None,
) -> dict[str, Any]:
    """What a function that takes long gives as JSON. `given`: its options, which have a task."""

    def call(task: int) -> Any:
        given.task = task
        return _json(function, *arguments)

    found: dict[str, Any] = in_background(call, progress, label, handle, own)
    return found
