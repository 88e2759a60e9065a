# SPDX-License-Identifier: Apache-2.0
"""The directories that a framework makes for checkpoints, which plug-ins find and remove with their checkpoint
(`_plugins.Places`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from typing import Optional

from tensormount import _plugins
from tensormount._jobs import log
from tensormount._store import Store
from tensormount.errors import Error, NotFoundError, PermissionDeniedError


def find(places: _plugins.Places, directory: str) -> Optional[str]:
    """The path of the checkpoint of tensormount that belongs to a directory; None: there is none. If `places` has a
    store, a checkpoint in the directory itself, saved earlier without the store, is found, too."""
    for path in (places.checkpoint(directory), os.path.join(directory, _plugins.STATE)):
        if os.path.lexists(path):
            return path
    return None


def remove(places: _plugins.Places, directory: str) -> None:
    """Removes a directory and its checkpoint; also a file or link of that path. A pinned checkpoint is kept with its
    directory. A failure is a warning: a run need not end because an old checkpoint stays."""
    try:
        if not is_directory(directory):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory)
            return
        if places.store is not None:
            with contextlib.suppress(NotFoundError):  # Rules of the store have removed it, or there was none.
                Store(places.store).remove(os.path.basename(places.checkpoint(directory)))
                free(places, directory)
        # The directory is renamed first, so that a half-removed one is never taken for a checkpoint.
        aside = sibling(directory)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(directory, aside)
        try:
            with contextlib.suppress(NotFoundError):
                Store(aside).remove(_plugins.STATE)
        except PermissionDeniedError:
            os.rename(aside, directory)
            raise
        shutil.rmtree(aside)
    except (Error, OSError) as error:
        log.warning("%s: kept: %s", directory, str(error).replace(sibling(directory), directory))


def free(places: _plugins.Places, directory: str) -> None:
    """Frees the space of checkpoints that were replaced or removed."""
    try:
        if places.store is not None:
            Store(places.store).gc()
        else:
            Store(directory).gc(grace=0)  # Such a store has only this checkpoint.
    except Error as error:
        log.warning("%s: the space of replaced or removed checkpoints is not freed: %s", directory, error)


def is_directory(path: str) -> bool:
    """Whether a directory, and not a link to one, is at the path."""
    return os.path.isdir(path) and not os.path.islink(path)


def sibling(directory: str) -> str:
    """A path beside the directory, for incomplete data. Frameworks find checkpoints by parts of directory names, so
    this name contains no part of the directory's name."""
    folder, name = os.path.split(directory)
    return os.path.join(folder, f".tm-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}")
