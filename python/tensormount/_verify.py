# SPDX-License-Identifier: Apache-2.0
"""Verification of stored bytes: `verify`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, Union

from tensormount import _abi
from tensormount._progress import Progress
from tensormount._state import path_bytes, texts
from tensormount._tasks import call_with_progress

PathLike = Union[str, "os.PathLike[str]"]


def verify(
    path: PathLike,
    *,
    quick: bool = False,
    threads: int = 0,
    roots: Sequence[str] = (),
    progress: Progress = None,
) -> dict[str, Any]:
    """Compares every stored byte of a checkpoint with its hash.

    quick     True: checks commit record, lengths and index only; no data are read.
    threads   0: as many as cores.
    roots     as for `open`.
    progress  called with the bytes done and the bytes in all; True: draws a bar if tqdm is installed.

    Returns {"whole": True or False, "tensors", "bytes", ..., "damage": [{"object", "file", "offset",
    "reason"}], "warnings"}. Damage in a file that other checkpoints of the store share has "shared_with",
    their names. A checkpoint that cannot be opened raises an exception.

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

    return call_with_progress(
        given, "tm_verify", path_bytes(path), given, whole,
        progress=progress, label=f"verify {os.fspath(path)}",
    )
