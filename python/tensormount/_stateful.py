# SPDX-License-Identifier: Apache-2.0
"""Objects of a state dict that have a state of their own: state_dict() and load_state_dict(), as in the protocol
`Stateful` of torch.distributed.checkpoint. They may be in dicts, lists and tuples, and in PerRank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from tensormount import _key_map, _load, _tree
from tensormount._tree import PerRank
from tensormount.errors import LayoutError


def has_states(value: Any) -> bool:
    """Whether a value is, or contains, an object that loads a state."""
    return _has(value, "load_state_dict")


def with_states(value: Any) -> Any:
    """`value`, with each object that has a state_dict() replaced by its state. Containers without such objects stay
    the same."""
    if not _has(value, "state_dict"):
        return value
    if isinstance(value, dict):
        return {key: with_states(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(with_states, value))
    if isinstance(value, PerRank):
        return PerRank(with_states(value.value))
    return value.state_dict()


def _has(value: Any, method: str) -> bool:
    if isinstance(value, dict):
        return any(_has(item, method) for item in value.values())
    if type(value) in (list, tuple):
        return any(_has(item, method) for item in value)
    if isinstance(value, PerRank):
        return _has(value.value, method)
    return hasattr(value, method) and not _tree.is_tensor(value)


def restore(extra: Any, loaded: Any) -> None:
    """Puts loaded values into the caller's dict or list, and calls load_state_dict() of the objects in it."""
    if not isinstance(extra, dict):
        given = _restored(extra, loaded)
        if given is not extra and type(extra) is list:
            extra[:] = given
        return
    if not extra and isinstance(loaded, dict):
        extra.update(loaded)  # An empty dict requests everything.
    for key, item in list(extra.items()):
        if key in loaded:
            given = _restored(item, loaded[key])
            if given is not item:
                extra[key] = given


def is_filled_in_place(value: Any) -> bool:
    """Whether the object itself takes all values that are loaded for it."""
    if isinstance(value, dict) or _tree.is_tensor(value) or hasattr(value, "load_state_dict"):
        return True
    if isinstance(value, PerRank):
        return has_states(value.value) and is_filled_in_place(value.value)
    if type(value) is list and has_states(value):
        return True
    return type(value) in (list, tuple) and bool(value) and all(map(is_filled_in_place, value))


def check_lengths(
    given: Any,
    source: Any,
    key_map: Optional[_key_map.Rules],
    roots: Sequence[str],
    rank: int,
    name: str = "",
) -> None:
    """Checks, before a load, that the stored lists have the lengths of lists and tuples in `given` that hold states.
    LayoutError. `name`: the key of `given` in the checkpoint's state; "": it is the state."""
    if not _holds_states_in_lists(given):
        return
    with _load._try_open(source, roots) as checkpoint:
        if checkpoint is None:
            return  # The load raises the reason.
        ranks = checkpoint._rank_values(rank) or checkpoint._rank_values(0)
        wanted = {name: with_states(given)} if name else with_states(given)
        stored = _load._stored_state(checkpoint._values(), ranks, wanted)
    if key_map is not None:
        stored = _key_map.renamed_values(wanted, stored, key_map)
    if not name:
        _check_lengths(given, stored, "")
    elif isinstance(stored, dict):
        _check_lengths(given, stored.get(name, _tree.ABSENT), name)


def _restored(item: Any, loaded: Any) -> Any:
    """The replacement of `item` after a load: `item` itself if it has a state or is filled in place, otherwise the
    loaded value."""
    if isinstance(item, PerRank):
        if not has_states(item.value):
            return loaded
        given = _restored(item.value, loaded.value)
        return item if given is item.value else PerRank(given)
    if _tree.is_tensor(item):
        return item
    if hasattr(item, "load_state_dict"):
        item.load_state_dict(loaded)
        return item
    if isinstance(item, dict):
        if not isinstance(loaded, dict):
            return loaded  # `item` is an empty dict, and the stored value is not a dict.
        restore(item, loaded)
        return item
    if type(item) in (list, tuple) and has_states(item):
        _check_length(item, loaded, "extra")  # The checkpoint may have been replaced since `check_lengths`.
        each = [_restored(one, new) for one, new in zip(item, loaded)]
        if type(item) is tuple:
            return tuple(each)
        item[:] = each
        return item
    return loaded


def _holds_states_in_lists(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_states_in_lists, value.values()))
    if isinstance(value, PerRank):
        return _holds_states_in_lists(value.value)
    return type(value) in (list, tuple) and has_states(value)


def _check_lengths(item: Any, stored: Any, name: str) -> None:
    """LayoutError: the stored list for a list or tuple with states has another length, or is no list."""
    if stored is _tree.ABSENT or _tree.is_tensor(item) or hasattr(item, "load_state_dict"):
        return
    if isinstance(item, PerRank):
        _check_lengths(item.value, stored.value if isinstance(stored, PerRank) else stored, name)
    elif isinstance(item, dict):
        for key, one in item.items() if isinstance(stored, dict) else ():
            _check_lengths(one, stored.get(key, _tree.ABSENT), f"{name}.{key}".lstrip("."))
    elif type(item) in (list, tuple) and has_states(item):
        _check_length(item, stored, name)
        for i, (one, new) in enumerate(zip(item, stored)):
            _check_lengths(one, new, f"{name}.{i}".lstrip("."))


def _check_length(item: Any, stored: Any, name: str) -> None:
    if type(stored) not in (list, tuple) or len(stored) != len(item):
        had = f"{len(stored)} items" if type(stored) in (list, tuple) else "something else"
        raise LayoutError(
            f"{name}: this {type(item).__name__} holds states and has {len(item)} items, but the "
            f"checkpoint has {had}: they cannot be matched",
            key=name,
        )
