# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed.checkpoint (DCP) calls the tensors and values of a checkpoint, and where they
stood in the nested state dict: the `planner_data` of its metadata.

Three places say so: `torch.planner_data` (a checkpoint of DCP, or a torch.save file), the mappings that
our Writer keeps, and the structures of `tensormount.save`. All of them are input from outside: a path
that no state dict can have is replaced by its key.
"""

from __future__ import annotations

import collections
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple, Optional, Union

from tensormount import _tree, _values
from tensormount.errors import LayoutError, UnsupportedError

# As index/read/saved_paths.h: foreign checkpoints have it.
PLANNER_DATA = "torch.planner_data"
# Common values in which our Writer says which path of the nested state dict a flat key stood for.
MAPPINGS = _tree.RESERVED + "dcp"

Path = tuple[Union[str, int], ...]
# Names that displace each other: after so many rounds each value stands under its key.
_MOST_ROUNDS = 8
# A list may lack items that were left out: positions go at most so far past its number of items.
_MOST_GAPS = 64
_MOST_GAPS_PER_ITEM = 4


class DcpNames(NamedTuple):
    """By the names that DCP has: stored keys of tensors, stored names of values and objects, values that
    are no item of the checkpoint (empty containers, parts of a value), and paths."""

    tensors: dict[str, str]
    values: dict[str, str]
    made: dict[str, Any]
    paths: dict[str, Path]


def is_internal(name: str) -> bool:
    """Whether a common value is no value of the state dict."""
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
    # A structure says more than these: the types of keys.
    paths.update(found.paths)
    for name in whole:
        if name not in objects and name not in encoded:
            _cut(name, values[name], paths, found)
    known = (*found.tensors, *found.values, *found.made)
    named = found._replace(paths=possible_paths({name: paths.get(name) for name in known}))
    within = {
        fqn: _decoded(values[name], name in encoded)
        for fqn, name in found.values.items()
        if name not in objects and type(named.paths[fqn][-1]) is int
    }
    _mend_lists(named, {**within, **found.made}, tuples)
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
        return  # Keys stand for themselves, as where there is none.
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


def _cut(name: str, value: Any, paths: dict[str, Any], found: DcpNames) -> None:
    """As DCP's planners cut: what stands in a dict, or in a list that holds one, is an item by itself. Not
    where two items would have one name."""
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
    """Empty containers and tuples of a tree whose leaves are None."""
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


def possible_paths(paths: Mapping[str, Any]) -> dict[str, Path]:
    """Paths of which one state dict can be made; each other one is (key,).

    The first step is text and the others text or positions; no path leads through another's value, or
    has text where another has a position; positions are not negative and not far past the end.
    """
    found = {key: _path_of(key, path) for key, path in paths.items()}
    # Of each container: its paths, by the next step.
    for _ in range(_MOST_ROUNDS):
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
            if mixed or last >= _MOST_GAPS + _MOST_GAPS_PER_ITEM * len(below):
                bad.update(key for step in positions for key in below[step])
            for step, through in below.items():
                # One path ends here: nothing else may have it, or lead through it.
                if len(through) > 1 and any(len(found[key]) == len(container) + 1 for key in through):
                    bad.update(key for key in through if found[key] != (key,))
        if not bad:
            return found
        found.update({key: (key,) for key in bad})
    return {key: (key,) for key in found}


def _mend_lists(found: DcpNames, plain: Mapping[str, Any], tuples: Container[Path]) -> None:
    """torch makes its lists anew from the paths, and then asks for what it has cut from them: for every
    item of one that holds tensors or dicts, and for one without these as a whole.

    `plain`: values by DCP's names, where they are no tensors and no objects."""
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
    """`path` in the form of DCP; a key of a dict that is a number is a list of one in it."""
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
