# SPDX-License-Identifier: Apache-2.0
"""Shared by the plug-ins for training frameworks: where they save, and checks of the framework's version.

A framework makes a directory P for a checkpoint and puts files of its own into it (a scheduler, a
tokenizer, Python's random state). The checkpoint of the plug-in is

    P/tm-state      without a store: P is its store, and removing P removes the checkpoint
    STORE/NAME      with a store: steps share unchanged data, and the store's rules remove checkpoints
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Iterable
from typing import Any, Optional, Union

from tensormount._jobs import log
from tensormount.errors import InvalidArgumentError, UnsupportedError

PathLike = Union[str, "os.PathLike[str]"]

# Name of the checkpoint in a directory of a framework.
STATE = "tm-state"

_warned: set[str] = set()


class Places:
    """Where the checkpoint of a framework's directory is.

    store   None: in the directory itself, as "tm-state". Otherwise all checkpoints are in this store.
    root    only with `store`: the directory below which all directories are; None: the directory that the
            store is in. A checkpoint is named by its directory's path below `root`, with "." for "/" and ".."
            for ".": OUT/checkpoint-500/optimizer_0 is "checkpoint-500.optimizer_0". Two directories never
            have the same name.
    """

    def __init__(self, store: Optional[PathLike] = None, root: Optional[PathLike] = None) -> None:
        if store is None and root is not None:
            raise InvalidArgumentError("root= is given without store=: pass the store, too")
        self.store = None if store is None else os.path.abspath(os.fspath(store))
        if root is not None:
            self.root = os.path.abspath(os.fspath(root))
        else:
            self.root = os.path.dirname(self.store) if self.store is not None else ""

    def checkpoint(self, directory: PathLike) -> str:
        """The checkpoint of a framework's directory. InvalidArgumentError if it is not below `root`, is one of the
        store's own, or gives no valid name."""
        directory = os.path.abspath(os.fspath(directory))
        if self.store is None:
            return os.path.join(directory, STATE)
        if directory == self.store or directory.startswith(self.store + "/"):
            raise InvalidArgumentError(
                f"{directory}: inside the store {self.store}; save to a directory outside the store"
            )
        parts = os.path.relpath(directory, self.root).split("/")
        if parts[0] in (os.curdir, os.pardir):
            raise InvalidArgumentError(
                f"{directory}: not below {self.root}; pass root=, a directory that all checkpoints are below"
            )
        hidden = [part for part in parts if part.startswith(".")]
        if hidden:
            raise InvalidArgumentError(
                f"{directory}: {hidden[0]} begins with a dot, which names of checkpoints cannot express"
            )
        name = ".".join(part.replace(".", "..") for part in parts)
        if name == "latest":
            raise InvalidArgumentError(f"{directory}: \"latest\" is the newest checkpoint of a store, not a name")
        return os.path.join(self.store, name)


def patch_from_environment(value: str) -> None:
    """Applies TENSORMOUNT_PATCH_DCP at `import tensormount`: "1" is `tensormount.torch.patch_dcp()` for the whole
    process."""
    if value != "1":
        raise InvalidArgumentError(f"TENSORMOUNT_PATCH_DCP={value}: must be 1, or 0 for no patch")
    try:
        from tensormount.torch import patch_dcp
    except ImportError as error:
        log.warning("TENSORMOUNT_PATCH_DCP=1 has no effect: %s", error)
        return
    patch_dcp()


def warn_once(text: str) -> None:
    """Logs a warning, once in this process."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


def check_version(framework: str, installed: str, tested: Iterable[str]) -> None:
    """Warns once if the plug-in's tests did not run with this version of the framework. `tested`: "2.13" includes
    2.13.1."""
    tested = tuple(tested)
    release = installed.split("+")[0]
    if not any(release == version or release.startswith(version + ".") for version in tested):
        warn_once(f"{framework} {installed}: tensormount was tested with {', '.join(tested)}")


def replace(those: dict[str, Any], by: dict[str, Any], keep: Iterable[str] = ()) -> None:
    """Replaces functions and classes in each loaded module that has them, under whatever name. `keep`: modules that
    stay as they are."""
    new = {id(value): by[name] for name, value in those.items()}
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or module_name in keep:
            continue
        for name, value in list(vars(module).items()):
            if id(value) in new:
                setattr(module, name, new[id(value)])


def find(plugin: str, owner: Any, name: str, parameters: Iterable[str] = ()) -> Any:
    """Returns `owner.name`, which the plug-in replaces, or calls with these parameters. UnsupportedError: it does not
    exist, or does not take one of them."""
    where = getattr(owner, "__name__", type(owner).__name__)
    found = getattr(owner, name, None)
    if found is None:
        raise UnsupportedError(f"{plugin}: {where} has no {name}; this version of the framework is not supported")
    called = inspect.signature(found).parameters if parameters else {}
    any_name = any(one.kind is one.VAR_KEYWORD for one in called.values())
    missing = [one for one in parameters if one not in called and not any_name]
    if missing:
        raise UnsupportedError(
            f"{plugin}: {where}.{name} takes no {missing[0]}; this version of the framework is not supported"
        )
    return found
