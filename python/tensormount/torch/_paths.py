# SPDX-License-Identifier: Apache-2.0
"""The names of torch.distributed.checkpoint (DCP) for the tensors and values of a checkpoint, and their paths in
the nested state dict (the `planner_data` of DCP's metadata).

They come from `torch.planner_data` (checkpoints of DCP, torch.save files), from mappings that our Writer stores,
and from structures of `tensormount.save`. None of these is trusted: an impossible path is replaced by its key.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any, NamedTuple, Optional, Union

from tensormount import _tree, _values
from tensormount.errors import LayoutError, UnsupportedError

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


class DcpNames(NamedTuple):
    """By DCP's names: `tensors`: stored keys; `values`: stored names of values and objects; `made`: values that are
    not items of the checkpoint (empty containers, parts of a value); `paths`."""

    tensors: dict[str, str]
    values: dict[str, str]
    made: dict[str, Any]
    paths: dict[str, Path]


def is_internal(name: str) -> bool:
    """Whether a common value does not belong to the state dict."""
    return name.startswith(_tree.RESERVED) or name == PLANNER_DATA


def dcp_names(
    keys: Iterable[str],
    objects: Iterable[str],
    values: Mapping[str, Any],
    names: Mapping[_tree.Path, str],
) -> DcpNames:
    """`values`: common values, encoded. `names`: `_tree.stored_names` of the checkpoint."""
    stored = dict.fromkeys(keys)
    objects = frozenset(objects)
    plain = dict.fromkeys((*sorted(objects), *(name for name in values if not is_internal(name))))
    found = DcpNames({}, {}, {}, {})
    encoded: set[str] = set()
    tuples: set[Path] = set()
    for structure in _tree.structures_of(values):
        _add_structure(structure, names, stored, values, found, encoded, tuples)
    taken = set(found.tensors.values())
    for key in stored:
        if key not in taken:
            found.tensors.setdefault(key, key)
    taken = set(found.values.values())
    whole = [name for name in plain if name not in taken and name not in found.tensors]
    for name in whole:
        found.values.setdefault(name, name)
    paths: dict[str, Any] = {}
    for name in sorted(values):
        if name == PLANNER_DATA and isinstance(values[name], dict):
            paths.update(values[name])
        elif name.startswith(MAPPINGS + "."):
            said = _values.decode(values[name])
            paths.update(said if isinstance(said, dict) else {})
    # The paths of structures replace others, because they also have the types of keys.
    paths.update(found.paths)
    for name in whole:
        if name not in objects and name not in encoded:
            _split_value(name, values[name], paths, found)
    known = (*found.tensors, *found.values, *found.made)
    named = found._replace(paths=possible_paths({name: paths.get(name) for name in known}))
    within = {
        fqn: _decoded(values[name], name in encoded)
        for fqn, name in found.values.items()
        if name not in objects and type(named.paths[fqn][-1]) is int
    }
    _complete_lists(named, {**within, **found.made}, tuples)
    return named


def _add_structure(
    structure: _tree.Structure,
    names: Mapping[_tree.Path, str],
    keys: Container[str],
    values: Container[str],
    found: DcpNames,
    encoded: set[str],
    tuples: set[Path],
) -> None:
    leaves: list[_tree.Leaf] = []
    empty: list[tuple[_tree.Path, Any]] = []
    try:
        tree = _tree._Builder(
            structure, lambda word, path, name: leaves.append((word, path, name))
        ).build()
    except (LayoutError, UnsupportedError):
        return  # Keys are their own paths, as without a structure.
    _find_empty(tree, (), empty, tuples)
    for word, path, name in leaves:
        dotted = _tree.dotted(path)
        if word == "tensor":
            key = names.get(path, name)
            if key in keys and found.tensors.setdefault(dotted, key) == key:
                found.paths[dotted] = _planner_path(path)
    for word, path, name in leaves:
        dotted = _tree.dotted(path)
        if word == "value":
            encoded.add(name)
        if word == "value" and name in values and dotted not in found.tensors:
            if found.values.setdefault(dotted, name) == name:
                found.paths[dotted] = _planner_path(path)
    for path, container in empty:
        dotted = _tree.dotted(path)
        if path and dotted not in found.tensors and dotted not in found.values:
            found.made[dotted] = container
            found.paths[dotted] = _planner_path(path)


def _decoded(value: Any, encoded: bool) -> Any:
    return _values.decode_or_unreadable(value, "") if encoded else value


def _split_value(name: str, value: Any, paths: dict[str, Any], found: DcpNames) -> None:
    """Splits a value as DCP's planners do: each item of a dict, or of a list that contains a dict, becomes an item.
    A value is not split if two items would have one name."""
    items: list[tuple[str, Path, Any]] = []

    def visit(fqn: str, path: Path, item: Any) -> None:
        if type(item) is dict and item:
            for key, below in item.items():
                visit(f"{fqn}.{key}", path + (str(key),), below)
        elif type(item) is list and _holds_dict(item):
            for i, below in enumerate(item):
                visit(f"{fqn}.{i}", path + (i,), below)
        else:
            items.append((fqn, path, item))

    visit(name, _path_of(name, paths.get(name)), value)
    cut = {fqn for fqn, _, _ in items}
    if name in cut or len(cut) < len(items):
        return
    if any(fqn in known for known in (found.tensors, found.values, found.made) for fqn in cut):
        return
    del found.values[name]
    for fqn, path, item in items:
        found.made[fqn] = item
        paths[fqn] = path


def _holds_dict(value: Any) -> bool:
    return type(value) is dict or (type(value) is list and any(map(_holds_dict, value)))


def _find_empty(
    tree: Any, path: _tree.Path, empty: list[tuple[_tree.Path, Any]], tuples: set[Path]
) -> None:
    """Collects the empty containers and the tuples of a tree whose leaves are None."""
    if tree is None:
        return
    if type(tree) is tuple:
        tuples.add(_planner_path(path))
    if not tree:
        empty.append((path, tree))
    for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
        step: _tree.Step = (int(not isinstance(tree, dict)), key)
        _find_empty(item, (*path, step), empty, tuples)


def _planner_path(path: _tree.Path) -> Path:
    return tuple(key if kind else _tree.step_text(key) for kind, key in path)


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
    found = {key: _path_of(key, path) for key, path in paths.items()}
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


def _complete_lists(found: DcpNames, plain: Mapping[str, Any], tuples: Container[Path]) -> None:
    """Completes lists: PyTorch rebuilds them from the paths and requests every item of a list that holds tensors or
    dicts, and any other list as a whole.

    `plain`: the values that are not tensors or objects, by DCP's names."""
    lists: dict[Path, dict[int, Optional[str]]] = collections.defaultdict(dict)
    for name, path in found.paths.items():
        for i, step in enumerate(path):
            if type(step) is int:
                leaf = name if name in plain and i + 1 == len(path) else None
                lists[path[:i]][step] = leaf
    values = dict(plain)
    for container in sorted(lists, key=len, reverse=True):  # The innermost first.
        items = lists[container]
        whole = ".".join(map(str, container))
        count = max(items) + 1
        if None not in items.values() and whole not in found.paths:
            parts = [values[str(items[i])] if i in items else None for i in range(count)]
            for name in map(str, items.values()):
                found.values.pop(name, None)
                found.made.pop(name, None)
                del found.paths[name]
            found.made[whole] = values[whole] = tuple(parts) if container in tuples else parts
            found.paths[whole] = container
            last = container[-1]
            if type(last) is int:
                lists[container[:-1]][last] = whole
            continue
        for position in set(range(count)) - set(items):
            name = f"{whole}.{position}"
            if name not in found.paths:
                found.made[name] = None
                found.paths[name] = (*container, position)


def _path_of(key: str, path: Any) -> Path:
    """`path` in the form of DCP, which has a key of a dict that is a number as a list of one number."""
    if not isinstance(path, (list, tuple)) or not 0 < len(path) <= _tree.MAX_DEPTH:
        return (key,)
    steps: list[Union[str, int]] = []
    for step in path:
        if isinstance(step, (list, tuple)) and len(step) == 1 and type(step[0]) is int:
            steps.append(str(step[0]))
        elif type(step) is str or (type(step) is int and step >= 0):
            steps.append(step)
        else:
            return (key,)
    return tuple(steps) if type(steps[0]) is str else (key,)
