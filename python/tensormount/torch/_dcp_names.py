# SPDX-License-Identifier: Apache-2.0
"""The names of torch.distributed.checkpoint (DCP) for the tensors and values of a checkpoint, and their paths in
the nested state dict (the `planner_data` of DCP's metadata).

They come from `torch.planner_data` (checkpoints of DCP, torch.save files), from mappings that our Writer stores,
and from structures of `tensormount.save`. None of these is trusted: an impossible path is replaced by its key.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple, Optional

from tensormount import _paths, _tree, _values
from tensormount._objects import Objects
from tensormount._paths import Path
from tensormount.errors import LayoutError, UnsupportedError


class DcpNames(NamedTuple):
    """By DCP's names: `tensors`: stored keys; `values`: stored names of values and objects; `made`: values that are
    not items of the checkpoint (empty containers, parts of a value); `paths`; `parts`: key and index of the parts of
    objects on a grid."""

    tensors: dict[str, str]
    values: dict[str, str]
    made: dict[str, Any]
    paths: dict[str, Path]
    parts: dict[str, tuple[str, tuple[int, ...]]]


def with_parts(named: DcpNames, objects: Objects) -> DcpNames:
    """With an item for each part of an object on a grid, as Megatron-Core stores them: KEY/shard_INDEX_GRID."""
    on_grid = frozenset(objects.names())
    parts = dict(named.parts)
    whole: dict[str, str] = {}
    for name, key in named.values.items():
        grid = objects.grid(key) if key in on_grid else ()
        if not grid:
            whole[name] = key
        for index in itertools.product(*map(range, grid)) if grid and name not in parts else ():
            parts[f"{key}/shard_{_dotted(index)}_{_dotted(grid)}"] = key, index
    paths = {name: path for name, path in named.paths.items() if name in whole or name not in named.values}
    values = {**whole, **{part: key for part, (key, _) in parts.items()}}
    return named._replace(values=values, paths={**paths, **{part: (part,) for part in parts}}, parts=parts)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def dcp_names(
    keys: Iterable[str],
    objects: Iterable[str],
    values: Mapping[str, Any],
    names: Mapping[_tree.Path, str],
) -> DcpNames:
    """`values`: common values, encoded. `names`: `_tree.stored_names` of the checkpoint."""
    stored = dict.fromkeys(keys)
    objects = frozenset(objects)
    plain = dict.fromkeys((*sorted(objects), *(name for name in values if not _paths.is_internal(name))))
    found = DcpNames({}, {}, {}, {}, {})
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
    paths = _paths.stored_paths(values)
    # The paths of structures replace others, because they also have the types of keys.
    paths.update(found.paths)
    for name in whole:
        if name not in objects and name not in encoded:
            _split_value(name, values[name], paths, found)
    known = (*found.tensors, *found.values, *found.made)
    named = found._replace(paths=_paths.possible_paths({name: paths.get(name) for name in known}))
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

    visit(name, _paths.checked_path(name, paths.get(name)), value)
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
