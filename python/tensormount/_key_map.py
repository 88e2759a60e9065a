# SPDX-License-Identifier: Apache-2.0
"""`key_map` of a load: the names that its rules give to stored tensors and plain values."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from tensormount import _abi, _tree
from tensormount._state import rules_text, text

Rules = Sequence[Mapping[str, str]]

# Prefix of a requested name if a tensor is stored under that name, but the rules rename or drop it. No key has a NUL,
# so such a name is never found in the checkpoint.
HIDDEN = "\0"


def apply_key_map(rules: Rules, keys: Sequence[str]) -> list[str]:
    """Applies the rules of `key_map` (`load`) to keys; "" for keys that are dropped.

    >>> import tensormount as tm
    >>> tm.apply_key_map([{"drop": "optim.*"}, {"prefix": "model.", "to": ""}], ["model.w", "optim.m"])
    ['w', '']
    """
    packed = b"".join(text(key) + b"\0" for key in keys)
    return _abi.get_list(
        _abi.library().tm_key_map_apply, rules_text(rules), packed, len(packed), len(keys),
    )


class KeyMap:
    """The new names of a checkpoint's keys; `Names` for `_tree.flatten`. A tensor that the rules rename or drop
    is not found under its old name."""

    def __init__(self, rules: Rules, keys: Sequence[str], names: Mapping[_tree.Path, str]) -> None:
        """`keys`: the stored tensors. `names`: `_tree.stored_names`."""
        renamed = dict(zip(keys, apply_key_map(rules, keys)))
        self._stored = frozenset(keys)
        self._of_new = {new: old for old, new in renamed.items() if new}
        # If the key of a tensor differs from its path (tied, escaped), the renamed path leads to it, too.
        of_path: dict[str, set[str]] = {}
        for path, name in names.items():
            dotted = _tree.dotted(path)
            if dotted and renamed.get(name) != "":
                of_path.setdefault(dotted, set()).add(name)
        paths = dict(zip(of_path, apply_key_map(rules, list(of_path))))
        self._own = {
            path: name
            for path, name in names.items()
            if paths.get(_tree.dotted(path)) == _tree.dotted(path)
        }
        for path_name, new in paths.items():
            if new and new != path_name and len(of_path[path_name]) == 1:
                self._of_new.setdefault(new, *of_path[path_name])

    def get(self, path: _tree.Path, name: str, /) -> str:
        """The stored key for a path of a request; `name`: the path's own name."""
        own = self._own.get(path)
        if own is not None:
            return own
        found = self._of_new.get(name)
        if found is not None:
            return found
        return HIDDEN + name if name in self._stored else name

    def new_names(self) -> list[str]:
        """The new names of tensors that are not dropped, and of their paths."""
        return list(self._of_new)


def renamed_values(request: Any, stored: Any, rules: Rules) -> Any:
    """Moves the plain values of a checkpoint (`stored`, nested) to the places in `request` that have their new
    names, for `_tree.refill`. The name of a value is its path, joined by dots."""
    return _Values(stored, rules).arranged(request, _tree.ABSENT, "")


_DROPPED = object()


class _Values:
    """Parts of a nested state dict by their new names. A container stays whole if all its items move together."""

    def __init__(self, tree: Any, rules: Rules) -> None:
        names: dict[str, None] = {}
        _add_names(tree, "", names)
        self._new = dict(zip(names, apply_key_map(rules, list(names))))
        self._parts: dict[str, Any] = {}
        self._put(tree, self._new_name(tree, ""))
        self._goals = sorted(self._parts)

    def _new_name(self, node: Any, name: str) -> Any:
        """The new name of a node, or _DROPPED. None: its items moved apart and are in `_parts`."""
        items = _items(node)
        if items is None:
            return (self._new[name] or _DROPPED) if name else ""
        moved = [(step, item, self._new_name(item, _join(name, step))) for step, item in items]
        goals = {_container_of(goal, step) for step, _, goal in moved}
        if len(goals) == 1 and None not in goals:
            return goals.pop()
        for _, item, goal in moved:
            self._put(item, goal)
        return None

    def _put(self, node: Any, goal: Any) -> None:
        if goal is not None and goal is not _DROPPED:
            self._parts[goal] = unite(self._parts.get(goal, _tree.ABSENT), node)

    def arranged(self, request: Any, stored: Any, name: str) -> Any:
        """The stored values for `request`, whose name is `name`. `stored`: the values that moved there together
        with the enclosing container."""
        stored = unite(self._parts.get(name, _tree.ABSENT), stored)
        kind = type(request)
        if _tree.is_tensor(request):
            return stored
        if kind in _tree.SPLIT_DICTS and request:
            have = stored if type(stored) in _tree.SPLIT_DICTS else {}
            return kind(
                (key, self._below(item, have.get(key, _tree.ABSENT), name, key))
                for key, item in request.items()
            )
        below = self._goals_below(name)
        if below and kind in (list, tuple) and stored is _tree.ABSENT:
            return kind(self._below(item, stored, name, i) for i, item in enumerate(request))
        for goal in below:
            *outer, last = goal[len(name) + 1 if name else 0 :].split(".")
            nested = {last: self._parts[goal]}
            for step in reversed(outer):
                nested = {step: nested}
            stored = unite(stored, nested)
        return stored

    def _goals_below(self, name: str) -> list[str]:
        prefix = name + "." if name else ""
        first = bisect.bisect_left(self._goals, prefix)
        goals = itertools.islice(self._goals, first, None)
        return [goal for goal in itertools.takewhile(lambda goal: goal.startswith(prefix), goals) if goal]

    def _below(self, item: Any, stored: Any, name: str, key: Any) -> Any:
        return self.arranged(item, stored, _join(name, _tree.step_text(key)))


def _items(node: Any) -> Optional[list[tuple[str, Any]]]:
    """Steps and items of a container; None: a leaf, or a container that is stored as one value."""
    taken_apart = type(node) in (*_tree.SPLIT_DICTS, list, tuple)
    if not taken_apart or not node or _tree.is_one_value(node):
        return None
    pairs: Iterable[tuple[Any, Any]] = node.items() if isinstance(node, dict) else enumerate(node)
    return [(_tree.step_text(key), item) for key, item in pairs]


def _add_names(node: Any, name: str, names: dict[str, None]) -> None:
    items = _items(node)
    if items is not None:
        for step, item in items:
            _add_names(item, _join(name, step), names)
    elif name:
        names[name] = None


def _join(name: str, step: str) -> str:
    return f"{name}.{step}" if name else step


def _container_of(goal: Any, step: str) -> Optional[str]:
    """The new name of a container whose item `step` moves to `goal`; None: there is no such name."""
    if not isinstance(goal, str):
        return None
    if goal == step:
        return ""
    return goal[: -len(step) - 1] if goal.endswith("." + step) else None


def united(trees: Sequence[Any]) -> Any:
    """The first tree, with the items that only later trees have."""
    tree = trees[0]
    for other in trees[1:]:
        tree = unite(tree, other)
    return tree


def unite(a: Any, b: Any) -> Any:
    """`a`, with the items that only `b` has. ABSENT has none."""
    if type(a) in _tree.SPLIT_DICTS and type(b) in _tree.SPLIT_DICTS:
        merged = type(a)(a)
        for key, item in b.items():
            merged[key] = unite(merged[key], item) if key in merged else item
        return merged
    return b if a is _tree.ABSENT else a
