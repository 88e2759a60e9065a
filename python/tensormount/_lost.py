# SPDX-License-Identifier: Apache-2.0
"""Lost data of foreign checkpoints: what their metadata list and their files lack (a missing or truncated file).

The library leaves such data out when it opens the checkpoint, so that the rest can be read. A load must not take them
for data that were never stored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Optional

from tensormount import _abi, _key_map
from tensormount._verify import verify
from tensormount.errors import DataLossError


class _Loss(NamedTuple):
    """`keys`: the lost keys under their new names; None: the keys are unknown. `values`: those that are no tensors.
    `text`: file and reason."""

    keys: Optional[frozenset[str]]
    values: frozenset[str]
    text: str


class Lost:
    """The losses of one opened checkpoint. False if it has none."""

    def __init__(self, path: str, losses: Sequence[_Loss]) -> None:
        self._path = path
        self._losses = losses
        self._known = frozenset(key for loss in losses for key in loss.keys or ())
        # The names of containers of lost keys, and of those that hold lost values.
        self._below = _containers_of(self._known)
        self._values = frozenset(key for loss in losses for key in loss.values)
        self._with_values = self._values | _containers_of(self._values)

    def __bool__(self) -> bool:
        return bool(self._losses)

    def keys(self) -> Collection[str]:
        """The lost keys that are known."""
        return self._known

    def check(self, absent: Iterable[str], containers: Iterable[str] = ()) -> None:
        """DataLossError: data of these names are lost. `absent`: requested names that the checkpoint does not have.
        `containers`: names that request all plain values below them, whatever the checkpoint has of them."""
        absent = list(dict.fromkeys(absent))
        found = [name for name in absent if self.has(name)]
        found += [name for name in containers if name in self._with_values]
        if found:
            raise self._error(list(dict.fromkeys(found)))
        # A loss whose keys are unknown may contain any name.
        unknown = next((loss for loss in self._losses if loss.keys is None), None)
        if unknown is not None and absent:
            raise DataLossError(
                f"{self._path}: {unknown.text}: {_listed(absent)} may be among the lost data", key=absent[0]
            )

    def has(self, name: str) -> bool:
        """Whether the data of a name that the checkpoint does not have are lost, or a part of them."""
        steps = name.split(".")
        if name in self._known or name in self._below:
            return True
        if any(".".join(steps[:i]) in self._known for i in range(1, len(steps))):
            return True  # The item of a lost value.
        # The layer of a lost stack of layers.
        return any(
            step.isdecimal() and ".".join(steps[:i] + steps[i + 1 :]) in self._known
            for i, step in enumerate(steps)
        )

    def _error(self, names: Sequence[str]) -> DataLossError:
        for loss in self._losses:
            named = [name for name in names if loss.keys and Lost("", [loss]).has(name)]
            if named:
                return DataLossError(f"{self._path}: {loss.text}: requested, but lost: {_listed(named)}", key=named[0])
        raise AssertionError(names)  # Each name is in one of the losses.


def lost_data(checkpoint: Any, key_map: Optional[_key_map.Rules] = None) -> Lost:
    """The losses of an opened checkpoint, with the names that `key_map` gives the keys, without those that it
    drops. If the opening left a warning, this opens the checkpoint once more.
    """
    # Only checkpoints of other programs, which have no uuid, can be opened without their lost data.
    if checkpoint.uuid is not None or not checkpoint.warnings:
        return Lost(checkpoint.path, ())
    there = frozenset(checkpoint.keys())
    losses = []
    for damage in verify(checkpoint.path, quick=True, roots=checkpoint._roots)["damage"]:
        if not damage.get("lost"):
            continue
        text = f"{damage['file']}: {damage['reason']}" if damage["file"] else damage["reason"]
        if not damage.get("keys"):
            losses.append(_Loss(None, frozenset(), text))
            continue
        # Tensors with holes can be opened. A read of the holes fails by itself.
        keys = [key for key in damage["keys"] if key not in there]
        new_names = keys if key_map is None else _key_map.apply_key_map(key_map, keys)
        values = frozenset(damage["keys"][-_objects_in(damage["object"]) or len(damage["keys"]):])
        if any(new_names):
            losses.append(_Loss(
                frozenset(filter(None, new_names)),
                frozenset(new for key, new in zip(keys, new_names) if new and key in values),
                text,
            ))
    return Lost(checkpoint.path, losses)


def _objects_in(summary: str) -> int:
    """How many of the keys, which are the last ones, are objects: "14 tensors and 2 objects"."""
    several = re.search(r"(\d+) objects$", summary)
    if several is not None:
        return int(several[1])
    return int(summary.startswith("object ") or summary.endswith("1 object"))


def _containers_of(keys: Iterable[str]) -> frozenset[str]:
    return frozenset(key[:at] for key in keys for at in (i for i, c in enumerate(key) if c == "."))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
