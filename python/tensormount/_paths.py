# SPDX-License-Identifier: Apache-2.0
"""Paths in nested state dicts of the flat keys that torch.distributed.checkpoint (DCP) stores.

They come from `torch.planner_data` (checkpoints of DCP, torch.save files) and from mappings that our Writer stores.
Neither is trusted: an impossible path is replaced by its key.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Union

from tensormount import _tree, _values

# Name of the common value of foreign checkpoints that has DCP's planner_data; also in index/read/saved_paths.h.
PLANNER_DATA = "torch.planner_data"
# Prefix of the common values in which our Writer stores the paths of flat keys in the nested state dict.
MAPPINGS = _tree.RESERVED + "dcp"

Path = tuple[Union[str, int], ...]
# Replacing an impossible path can make another path impossible, so the paths are checked in rounds. After this many
# rounds each value gets its key as its path.
_MAX_ROUNDS = 8
# A list may lack items that were left out, so positions may exceed the number of its items, but not by more than these
# limits allow.
_MAX_GAPS = 64
_MAX_GAPS_PER_ITEM = 4


def is_internal(name: str) -> bool:
    """Whether a common value does not belong to the state dict."""
    return name.startswith(_tree.RESERVED) or name == PLANNER_DATA


def stored_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the common values of a checkpoint say of the paths of its keys. `values`: encoded."""
    paths: dict[str, Any] = {}
    for name in sorted(values):
        if name == PLANNER_DATA and isinstance(values[name], dict):
            paths.update(values[name])
        elif name.startswith(MAPPINGS + "."):
            said = _values.decode(values[name])
            paths.update(said if isinstance(said, dict) else {})
    return paths


def _only_dicts(paths: Collection[Path]) -> bool:
    """Whether the paths have no positions, and none ends at or above the end of another: the usual case, which is
    quick to tell."""
    ends = set(paths)
    return len(ends) == len(paths) and not any(
        any(type(step) is int for step in path) or any(path[:i] in ends for i in range(1, len(path)))
        for path in paths
    )


def possible_paths(paths: Mapping[str, Any]) -> dict[str, Path]:
    """The paths, with those that cannot be in one state dict replaced by (key,).

    The first step is a str, the others are str or positions. No path leads through the value of another, or has a
    str where another has a position. Positions are not negative, and not far past the end.
    """
    found = {key: checked_path(key, path) for key, path in paths.items()}
    if _only_dicts(found.values()):
        return found
    # steps: for each container its keys, by the next step of their paths.
    for _ in range(_MAX_ROUNDS):
        steps: dict[Path, dict[Union[str, int], list[str]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        for key, path in found.items():
            for i, step in enumerate(path):
                steps[path[:i]][step].append(key)
        bad: set[str] = set()
        for container, below in steps.items():
            positions = [step for step in below if type(step) is int]
            last = max(positions, default=-1)
            mixed = 0 < len(positions) < len(below)
            if mixed or last >= _MAX_GAPS + _MAX_GAPS_PER_ITEM * len(below):
                bad.update(key for step in positions for key in below[step])
            for step, through in below.items():
                # If one path ends here, no other path may end here or lead through it.
                if len(through) > 1 and any(len(found[key]) == len(container) + 1 for key in through):
                    bad.update(key for key in through if found[key] != (key,))
        if not bad:
            return found
        found.update({key: (key,) for key in bad})
    return {key: (key,) for key in found}


def checked_path(key: str, path: Any) -> Path:
    """`path` in the form of DCP, which has a key of a dict that is a number as a list of one number."""
    if not isinstance(path, (list, tuple)) or not 0 < len(path) <= _tree.MAX_DEPTH:
        return (key,)
    if set(map(type, path)) == {str}:
        return tuple(path)
    steps: list[Union[str, int]] = []
    for step in path:
        if isinstance(step, (list, tuple)) and len(step) == 1 and type(step[0]) is int:
            steps.append(str(step[0]))
        elif type(step) is str or (type(step) is int and step >= 0):
            steps.append(step)
        else:
            return (key,)
    return tuple(steps) if type(steps[0]) is str else (key,)


def add_nested(request: Any, values: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """`values` (decoded, by name); if `request` is a dict with keys, also nested as `stored`, the common values of the
    checkpoint, says. Tensors, objects and items that are not stored are `_tree.ABSENT` there."""
    said = stored_paths(stored) if isinstance(request, dict) and request else {}
    if not said:
        return values
    tree = _Container()
    for name, path in possible_paths({name: said.get(name) for name in (*said, *values)}).items():
        container = tree
        for step in path[:-1]:
            container = container.setdefault(step, _Container())
        container[path[-1]] = values.get(name, _tree.ABSENT)
    return {**_like(request, tree), **values}


class _Container(dict[Any, Any]):
    """The items of a dict or list by step. Another type than that of stored values, which may be dicts, too."""


def _like(request: Any, tree: Any) -> Any:
    """The containers of a tree of steps: dicts, with the request's keys where these differ from their texts, and
    lists."""
    if type(tree) is not _Container:
        return tree
    if all(type(step) is int for step in tree):
        items = list(request) if isinstance(request, (list, tuple)) else []
        return [_like(items[i] if i < len(items) else None, tree.get(i, _tree.ABSENT)) for i in range(max(tree) + 1)]
    own = {_tree.step_text(key): key for key in request} if isinstance(request, dict) else {}
    return {
        own.get(step, step): _like(request.get(own.get(step)) if step in own else None, item)
        for step, item in tree.items()
    }
