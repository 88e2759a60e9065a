# SPDX-License-Identifier: Apache-2.0
"""Nested state dicts as flat ones, and back.

Tensors get keys, other values names, and what neither says (which containers there were, in which
order) is the *structure*. docs/python.md, "How a state dict is stored", is the contract; this file
writes and reads that form. Nothing is pickled, and what cannot be stored without loss is refused by
name and path.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import sys
from typing import (
    Any,
    Callable,
    Collection,
    Container,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Set,
    Tuple,
)

from . import _layouts
from ._held import Shards
from ._values import (
    INT_MAX,
    INT_MIN,
    MAX_VALUES,
    NATIVE_SET,
    SIMPLE_SET,
    Unreadable,
    decode,
    decode_or_unreadable,
    encode,
    encode_special,
    plain_json,
    to_json,
    type_name,
)
from .errors import LayoutError, UnsupportedError

# Containers in each other: as trees of the library (kMaxTreeDepth in tensormount/tree.h).
MAX_DEPTH = 64
MAX_KEY_BYTES = 2048
# A dict of plain values alone that is longer is one value instead of one a key: vocabularies.
MAX_SPLIT_DICT = 1000

TREE_NAME = "tensormount.tree"
RESERVED = "tensormount."

# (is an item of a list or tuple, key or index); items of tuples have 2 instead of 1.
Step = Tuple[int, Any]
Path = Tuple[Step, ...]
_KEY, _ITEM, _TUPLE_ITEM = 0, 1, 2

Structure = Dict[str, Any]


class PerRank:
    """A plain value that is each rank's own: a position in the data, the state of a generator.

    Values are the same on every rank otherwise, and a save in which they differ is refused.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is PerRank and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((PerRank, self.value))

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class Flat(NamedTuple):
    """A state dict, taken apart.

    `tensors`: leaves by key, each once. `again`: further leaves for a key, where a request has two
    tensors for what was saved as one. `common` and `rank_common`: encoded values by name (see
    `encode`). `structure`: None where the keys say all of it. `merged`: of each tensor that a request
    has under several keys, those that a checkpoint has, where these are more than one.
    """

    tensors: Dict[str, Any]
    common: Dict[str, Any]
    rank_common: Dict[str, Any]
    structure: Optional[Structure]
    again: Tuple[Tuple[str, Any], ...] = ()
    merged: Tuple[Tuple[str, ...], ...] = ()

    def asks_for_values(self) -> bool:
        """Whether a request has anything but tensors; an empty container asks for values, too."""
        nodes = self.structure["nodes"] if self.structure is not None else ()
        empty = any(type(node) is not str and not node[1] for node in nodes)
        return empty or bool(self.common) or bool(self.rank_common)

    def items(self) -> Collection[Tuple[str, Any]]:
        """All that has to be described: key and leaf."""
        return [*self.tensors.items(), *self.again] if self.again else self.tensors.items()

    def json_texts(self) -> Tuple[Dict[str, str], Dict[str, str]]:
        """What goes into the checkpoint: common values and those of this rank, JSON by name."""
        common = {name: to_json(value) for name, value in self.common.items()}
        rank_common = {name: to_json(value) for name, value in self.rank_common.items()}
        if self.structure is not None:
            name, text = structure_entry(self.structure)
            common[name] = text
            rank_common[TREE_NAME] = to_json(name[len(TREE_NAME) + 1 :])
        return common, rank_common


# ---- Names -----------------------------------------------------------------------------------


def step_text(key: Any) -> str:
    """A step of a path in a dotted name."""
    kind = type(key)
    if kind is str:
        return str(key)
    if kind is int:
        return str(key) if INT_MIN <= key <= INT_MAX else hex(key)
    if key is None or kind is bool or kind is float:
        return repr(key)
    return to_json(encode(key))


def dotted(path: Path) -> str:
    """The steps joined by dots, as PyTorch's checkpoints and `kDotted` of tensormount/tree.h."""
    return ".".join([step[1] if type(step[1]) is str else step_text(step[1]) for step in path])


def reversible(path: Path) -> str:
    """Likewise, but of each path another one (`kReversible` of tensormount/tree.h)."""
    parts = []
    for kind, key in path:
        if kind != _KEY:
            parts.append((":" if kind == _ITEM else ",") + str(key))
        elif type(key) is str:
            text = key.replace("%", "%25").replace(".", "%2E")
            if text[:1] in ("#", ":", ","):
                text = f"%{ord(text[0]):02X}{text[1:]}"
            parts.append(text or "%")
        elif type(key) is int and INT_MIN <= key <= INT_MAX:
            parts.append(f"#{key}")
        else:
            # No escape of text has a "~" behind its "%".
            text = to_json(encode(key))
            parts.append("%~" + text.replace("%", "%25").replace(".", "%2E"))
    return ".".join(parts)


def path_text(path: Path) -> str:
    """For messages."""
    text = "".join(f"[{step[1]!r}]" for step in path[:8])
    return "state_dict" + text + ("..." if len(path) > 8 else "")


def _assign_names(
    names: List[str], path_of: Callable[[int], Path], reserved: bool
) -> List[str]:
    """One name for each leaf, no two the same, whatever the order; `names` are the dotted ones.

    Dotted names where they are free. Of leaves that share one, each takes its reversible name; that
    may be the dotted name of another leaf, which then gives way, too.
    """
    distinct = set(names)
    unusable = {name for name in ("",) if name in distinct}
    if reserved:
        unusable.update(name for name in distinct if not _usable(name, reserved))
    if not unusable and len(distinct) == len(names):
        return names
    pending = [i for i, name in enumerate(names) if name in unusable]
    names = list(names)
    escaped: Set[int] = set()
    while pending or len(set(names)) != len(names):
        for i in pending:
            name = reversible(path_of(i))
            names[i] = name if _usable(name, reserved) else _escape_first(name)
        escaped.update(pending)
        count = collections.Counter(names)
        pending = [i for i, name in enumerate(names) if count[name] > 1 and i not in escaped]
    return names


def _usable(name: str, reserved: bool) -> bool:
    if not name:
        return False
    return not (reserved and (name[0] == "$" or name.startswith(RESERVED)))


def _escape_first(name: str) -> str:
    return f"%{ord(name[0]):02X}{name[1:]}" if name else "%"


def _check_name(name: str, path: Path) -> None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise LayoutError(
            f"{path_text(path)}: the key is no valid text (a lone surrogate)"
        ) from None
    if "\0" in name:
        raise LayoutError(f"{path_text(path)}: a key must not contain NUL")
    if size > MAX_KEY_BYTES:
        raise LayoutError(
            f"{path_text(path)}: the key would have {size} bytes, at most {MAX_KEY_BYTES}"
        )


# ---- Taking apart ----------------------------------------------------------------------------

_DICT, _ODICT, _LIST, _TUPLE, _TENSOR, _VALUE, _PER_RANK = range(7)
# Dicts that are taken apart; others are values.
SPLIT_DICTS = (dict, collections.OrderedDict)
_CONTAINER_NAMES = {_DICT: "dict", _ODICT: "odict", _LIST: "list", _TUPLE: "tuple"}
_LEAF_NAMES = {_TENSOR: "tensor", _VALUE: "value", _PER_RANK: "rank"}
_LEAF_WORDS = frozenset(_LEAF_NAMES.values())
_TEXT = frozenset((str,))
_EXACT = frozenset((str, int))


def is_tensor(value: Any) -> bool:
    """Whether `value` is an array of NumPy, PyTorch or JAX, or Shards; whether it can be stored is
    another question (`_shards.describe`)."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    return isinstance(value, Shards) or hasattr(type(value), "addressable_shards")


def _kind_of(value: Any) -> int:
    """-1: what cannot be stored."""
    kind = type(value)
    if kind is dict:
        return _DICT
    if kind is collections.OrderedDict:
        return _ODICT
    if kind is list:
        return _LIST
    if kind is tuple:
        return _TUPLE
    if kind is PerRank:
        return _PER_RANK
    torch = sys.modules.get("torch")
    if kind in NATIVE_SET or kind is collections.Counter or (
        torch is not None and kind is torch.Size
    ):
        return _VALUE
    if is_tensor(value):
        return _TENSOR
    return _VALUE if encode_special(value) is not None else -1


def _whole_value(value: Any, kind: int) -> bool:
    """Whether a container is stored as one value: lists and tuples that hold no dict and no tensor
    at any depth, and long dicts of plain values. Others are taken apart, so that each value has a
    name of its own."""
    if kind == _DICT or kind == _ODICT:
        return len(value) > MAX_SPLIT_DICT and set(map(type, value.values())) <= NATIVE_SET
    if not value:
        return True
    return _only_plain(value, 0, [MAX_VALUES])


def is_whole(value: Any) -> bool:
    """`_whole_value` of a container."""
    return _whole_value(value, _kind_of(value))


def _only_plain(value: Any, depth: int, room: List[int]) -> bool:
    """`room`: values that there may be. Lists that share lists have more than anybody could look at."""
    if set(map(type, value)) <= NATIVE_SET:
        return True
    if depth > MAX_DEPTH:
        return False
    room[0] -= len(value)
    if room[0] < 0:
        raise LayoutError(f"a list or tuple of more than {MAX_VALUES} values; an array holds more")
    for item in value:
        kind = type(item)
        if kind in NATIVE_SET:
            continue
        if kind is list or kind is tuple:
            if not _only_plain(item, depth + 1, room):
                return False
        elif is_tensor(item) or _kind_of(item) != _VALUE:
            return False
    return True


def identity(leaf: Any) -> Any:
    """Equal for leaves that are the same tensor: the same memory, seen in the same way. Holds only
    while the leaves live. A tensor without cells is only ever itself.

    Parts of a larger tensor that have no cells on this rank are compared by their storage: they may
    be one tensor, or empty ends of one buffer (`_may_be_tied`)."""
    try:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(leaf, torch.Tensor):
            local = getattr(leaf, "_local_tensor", None)
            if local is None:
                return _torch_identity(leaf) if leaf.numel() else id(leaf)
            if isinstance(local, torch.Tensor):
                if not leaf.numel():
                    return id(leaf)
                return (_torch_identity(local), tuple(leaf.shape), leaf.placements)
        elif isinstance(leaf, Shards):
            if 0 in leaf.shape:
                return id(leaf)
            parts = [(part.begin, part.flat, _part_identity(part.data)) for part in leaf.parts]
            return (leaf.shape, tuple(parts))
        elif hasattr(leaf, "__array_interface__") and leaf.size:
            return _array_identity(leaf)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
        pass  # Of a kind that has no plain memory.
    return id(leaf)


def _part_identity(data: Any) -> Any:
    """Of the memory of a part, with or without cells."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _torch_identity(data)
    return _array_identity(data) if hasattr(data, "__array_interface__") else id(data)


def _may_be_tied(leaf: Any) -> bool:
    """Whether `identity` is no proof: this rank has no cell of a tensor that has some elsewhere."""
    if isinstance(leaf, Shards):
        return 0 not in leaf.shape and all(0 in part.held for part in leaf.parts)
    local = getattr(leaf, "_local_tensor", None)
    return local is not None and not local.numel() and 0 not in leaf.shape


def _array_identity(array: Any) -> Any:
    address = array.__array_interface__["data"][0]
    return (address, array.shape, array.strides, array.dtype.str, array.dtype.name)


def _torch_identity(tensor: Any) -> Any:
    storage = tensor.untyped_storage()
    return (
        storage._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


class _Leaves:
    """Leaves of one kind in the order of the walk. Lists side by side and not an object each: tens
    of thousands of new objects would call the garbage collector, and lists grow by whole dicts."""

    def __init__(self) -> None:
        self.places: List[int] = []  # In the nodes of the structure.
        self.parents: List[Path] = []
        self.steps: List[int] = []
        self.keys: List[Any] = []
        self.names: List[str] = []  # Dotted.
        self.values: List[Any] = []

    def path(self, i: int) -> Path:
        return self.parents[i] + ((self.steps[i], self.keys[i]),)

    def add(self, place: int, parent: Path, step: int, key: Any, name: str, value: Any) -> None:
        self.places.append(place)
        self.parents.append(parent)
        self.steps.append(step)
        self.keys.append(key)
        self.names.append(name)
        self.values.append(value)

    def add_dict(self, place: int, parent: Path, prefix: str, items: Dict[str, Any]) -> None:
        count = len(items)
        self.places.extend(range(place, place + count))
        self.parents.extend(itertools.repeat(parent, count))
        self.steps.extend(itertools.repeat(_KEY, count))
        self.keys.extend(items)
        self.names.extend([prefix + key for key in items] if prefix else items)
        self.values.extend(items.values())


class _Walk:
    """One way through a state dict."""

    def __init__(self) -> None:
        self.nodes: List[Any] = []
        self.leaves = {kind: _Leaves() for kind in _LEAF_NAMES}
        self.inside: Set[int] = set()
        # Tensors that need no further look: nearly all that there are.
        self.plain = frozenset(_layouts.families())

    def root(self, tree: Any) -> None:
        self.inside.add(id(tree))
        self._container(tree, _kind_of(tree), (), "")

    def _visit(self, value: Any, parent: Path, prefix: str, step: int, key: Any) -> None:
        kind = _kind_of(value)
        if kind < 0:
            raise UnsupportedError(
                f"{path_text(parent + ((step, key),))}: {type_name(value)} cannot be stored; "
                "nothing is pickled"
            )
        name = prefix + (key if type(key) is str else step_text(key))
        if kind in _CONTAINER_NAMES:
            path = parent + ((step, key),)
            if id(value) in self.inside:
                raise LayoutError(f"{path_text(path)}: a container that contains itself")
            if len(path) > MAX_DEPTH:
                raise LayoutError(f"{path_text(path)}: containers more than {MAX_DEPTH} deep")
            # An empty one has no value to store.
            if not value or not _whole_value(value, kind):
                self.inside.add(id(value))
                self._container(value, kind, path, name + ".")
                self.inside.discard(id(value))
                return
            kind = _VALUE
        if kind == _PER_RANK:
            value = value.value
        self.leaves[kind].add(len(self.nodes), parent, step, key, name, value)
        self.nodes.append(_LEAF_NAMES[kind])

    def _container(self, value: Any, kind: int, path: Path, prefix: str) -> None:
        word = _CONTAINER_NAMES[kind]
        if len(self.nodes) > MAX_VALUES:  # Containers that share containers, again.
            raise LayoutError(f"{path_text(path)}: more than {MAX_VALUES} containers and leaves")
        if kind in (_LIST, _TUPLE):
            self.nodes.append([word, len(value)])
            step = _ITEM if kind == _LIST else _TUPLE_ITEM
            for i, item in enumerate(value):
                self._visit(item, path, prefix, step, i)
            return
        nodes, tensors, plain = self.nodes, self.leaves[_TENSOR], self.plain
        texts = set(map(type, value)) <= _TEXT
        if texts and set(map(type, value.values())) <= plain:
            nodes.append([word, list(value)])
            tensors.add_dict(len(nodes), path, prefix, value)
            nodes.extend(itertools.repeat("tensor", len(value)))
            return
        keys = list(value) if texts else [encode(key, path_text(path)) for key in value]
        nodes.append([word, keys])
        for key, item in value.items():
            if type(item) in plain and type(key) is str:
                tensors.add(len(nodes), path, _KEY, key, prefix + key, item)
                nodes.append("tensor")
            else:
                self._visit(item, path, prefix, _KEY, key)


class Names(Protocol):
    """Names that a checkpoint has for paths of a request: `stored_names`, or a `_key_map.KeyMap`."""

    def get(self, path: Path, name: str, /) -> str:
        """The stored name for a path; `name`, which the path has by itself, where there is no other."""


def flatten(
    tree: Any,
    stored: Optional[Names] = None,
    known: Optional[Container[str]] = None,
) -> Flat:
    """Takes a state dict (a dict, list or tuple) apart.

    `stored`: names that a checkpoint has for paths (`stored_names`), which go before those that
    would be made, so that a request for a part of a checkpoint means the same tensors. `known`: keys
    that it has: of tied leaves that one is asked for which is there.

    LayoutError: cycles, too deep, keys without a form. UnsupportedError: values without one.
    """
    if type(tree) not in (dict, collections.OrderedDict, list, tuple):
        raise UnsupportedError(
            f"a state dict of type {type_name(tree)}: a dict, list or tuple was expected"
        )
    walk = _Walk()
    walk.root(tree)
    found = walk.leaves[_TENSOR]
    keys, unsaid, merged = _tied(found.values, _names_of(found, False, stored), known)
    tensors: Dict[str, Any] = dict(zip(keys, found.values))
    again = []
    if unsaid or len(tensors) != len(keys):
        tensors.clear()
        for i, (key, leaf) in enumerate(zip(keys, found.values)):
            if i in unsaid:
                continue
            first = tensors.setdefault(key, leaf)
            if first is not leaf and identity(first) != identity(leaf):
                again.append((key, leaf))
    special = _set_names(walk.nodes, found, keys)
    values: List[Dict[str, Any]] = []
    for kind in (_VALUE, _PER_RANK):
        leaves = walk.leaves[kind]
        names = _names_of(leaves, True, stored)
        _set_names(walk.nodes, leaves, names)
        values.append(
            {
                name: encode(value, path_text(leaves.path(i)))
                for i, (name, value) in enumerate(zip(names, leaves.values))
            }
        )
    flat = type(tree) is dict and len(found.values) == len(tree) == len(walk.nodes) - 1
    if flat and not special and set(map(type, tree)) <= _TEXT:
        return Flat(tensors, values[0], values[1], None, tuple(again), merged)
    if _node_values(walk.nodes) > MAX_VALUES - 4:
        raise LayoutError(f"a state dict of {len(walk.nodes)} containers and leaves")
    structure = {"version": 1, "nodes": walk.nodes}
    return Flat(tensors, values[0], values[1], structure, tuple(again), merged)


def _node_values(nodes: Sequence[Any]) -> int:
    more = [n[1] for n in nodes if type(n) is not str]
    return len(nodes) + 2 * len(more) + sum(len(keys) for keys in more if type(keys) is list)


def _names_of(leaves: _Leaves, reserved: bool, stored: Optional[Names]) -> List[str]:
    names = _assign_names(leaves.names, leaves.path, reserved)
    text = "".join(names)
    if not text.isascii() or "\0" in text or max(map(len, names), default=0) > MAX_KEY_BYTES:
        for i, name in enumerate(names):
            _check_name(name, leaves.path(i))
    if stored:
        names = [stored.get(leaves.path(i), name) for i, name in enumerate(names)]
    return names


def _memory_of(leaf: Any) -> Any:
    """Equal for leaves with one `identity`, and perhaps for others; quicker."""
    try:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(leaf, torch.Tensor):
            local = leaf if type(leaf) is torch.Tensor else getattr(leaf, "_local_tensor", leaf)
            return local.data_ptr()
        if isinstance(leaf, Shards):
            return tuple(_memory_of(part.data) for part in leaf.parts)
        if hasattr(leaf, "__array_interface__"):
            return leaf.__array_interface__["data"][0]
    except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
        pass
    return id(leaf)


def _tied(
    leaves: Sequence[Any], names: List[str], known: Optional[Container[str]] = None
) -> Tuple[List[str], Container[int], Tuple[Tuple[str, ...], ...]]:
    """The names, but leaves that are one tensor have one: the first in the order of text, so that
    ranks with other orders agree; of those that are known, where some are.

    Of parts without cells nobody can tell here whether they are one tensor. Each keeps its name where
    a checkpoint has it (`known`). In a save ranks with cells say which it is, and of those parts all
    but the first are not said at all: the second result, as places in `leaves`. The third: `Flat.merged`.
    """
    memory: Optional[Sequence[Any]] = _layouts.bases(leaves)
    if memory is None or len(set(memory)) != len(leaves):
        memory = [_memory_of(leaf) for leaf in leaves]
    if len(set(memory)) == len(leaves):
        return names, (), ()
    count = collections.Counter(memory)
    groups: Dict[Any, List[int]] = {}
    for i, leaf in enumerate(leaves):
        if count[memory[i]] > 1:
            groups.setdefault(identity(leaf), []).append(i)
    names = list(names)
    unsaid: Set[int] = set()
    merged: List[Tuple[str, ...]] = []
    for members in groups.values():
        if len(members) > 1:
            own = [names[i] for i in members]
            there = sorted({name for name in own if known is not None and name in known})
            first = there[0] if there else min(own)
            if not _may_be_tied(leaves[members[0]]):
                if len(there) > 1:
                    merged.append(tuple(there))
                for i in members:
                    names[i] = first
            elif known is not None:
                for i in members:
                    names[i] = names[i] if names[i] in known else first
            else:
                unsaid.update(i for i in members if names[i] != first)
    return names, unsaid, tuple(merged)


def _set_names(nodes: List[Any], leaves: _Leaves, names: Sequence[str]) -> bool:
    """Whether some leaf has another name than its path says; its node gets it."""
    if names == leaves.names:
        return False
    for place, dotted_name, name in zip(leaves.places, leaves.names, names):
        if name != dotted_name:
            nodes[place] = [nodes[place], name]
    return True


# ---- The structure ---------------------------------------------------------------------------


# Nodes of structures that were stored before, and what `structure_entry` made of them: a training
# job has one or two.
_entries: List[Tuple[List[Any], Tuple[str, str]]] = []
_MAX_ENTRIES = 4


def structure_entry(structure: Structure) -> Tuple[str, str]:
    """Under which common value a structure is stored, and its JSON. The name has a hash of it, so
    that ranks with the same one store it once, and those with others do not disagree."""
    nodes = structure["nodes"]
    more = [n[1] for n in nodes if type(n) is not str]
    kinds = set(map(type, itertools.chain.from_iterable(m for m in more if type(m) is list)))
    # Of other keys equal ones need not be the same (1, True, 1.0).
    exact = kinds <= _EXACT
    if exact:
        for known, entry in _entries:
            if known == nodes:
                return entry
    text = plain_json(structure) if kinds <= SIMPLE_SET else None
    if text is None:
        text = to_json(structure)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    entry = f"{TREE_NAME}.{digest}", text
    if exact:
        # A copy: whoever has the structure may change it.
        own = [n if type(n) is str else [n[0], *map(_copied, n[1:])] for n in nodes]
        _entries[:] = [(own, entry), *_entries[: _MAX_ENTRIES - 1]]
    return entry


def _copied(more: Any) -> Any:
    return more[:] if type(more) is list else more


def structure_names(names: Iterable[str]) -> List[str]:
    """Those of common values that are structures, in order."""
    return sorted(name for name in names if name.startswith(TREE_NAME + "."))


# A leaf of a structure: "tensor", "value" or "rank", where it stands, its name.
Leaf = Tuple[str, Path, str]


class _Builder:
    """Reads a structure, which may come from anywhere."""

    def __init__(self, structure: Any, leaf: Callable[[str, Path, str], Any]) -> None:
        if type(structure) is not dict or type(structure.get("nodes")) is not list:
            raise LayoutError("the structure of a state dict: not one")
        if structure.get("version") != 1:
            raise UnsupportedError(
                f"the structure of a state dict: version {structure.get('version')!r}; this is 1"
            )
        self.nodes = structure["nodes"]
        self.leaf = leaf
        self.next = 0

    def build(self) -> Any:
        tree = self.node(())
        if self.next != len(self.nodes):
            raise LayoutError("the structure of a state dict: nodes behind its end")
        return tree

    def node(self, path: Path) -> Any:
        if self.next >= len(self.nodes):
            raise LayoutError("the structure of a state dict: ends too early")
        node = self.nodes[self.next]
        self.next += 1
        if type(node) is str:
            word, more = node, None
        elif type(node) is list and len(node) == 2 and type(node[0]) is str:
            word, more = node
        else:
            raise LayoutError(f"the structure of a state dict: a node {node!r:.100}")
        if word in _LEAF_WORDS:
            if more is not None and type(more) is not str:
                raise LayoutError(f"the structure of a state dict: a node {node!r:.100}")
            return self.leaf(word, path, dotted(path) if more is None else more)
        if len(path) > MAX_DEPTH:
            raise LayoutError(f"the structure of a state dict: more than {MAX_DEPTH} deep")
        if word in ("dict", "odict") and type(more) is list:
            found: Dict[Any, Any] = {} if word == "dict" else collections.OrderedDict()
            for stored_key in more:
                key = stored_key if type(stored_key) is str else decode(stored_key)
                try:
                    if key in found:
                        raise LayoutError(f"the structure of a state dict: the key {key!r} twice")
                except TypeError:
                    raise LayoutError(
                        f"the structure of a state dict: a key {key!r:.100}"
                    ) from None
                found[key] = self.node(path + ((_KEY, key),))
            return found
        if word in ("list", "tuple") and type(more) is int and more >= 0:
            step = _ITEM if word == "list" else _TUPLE_ITEM
            items = []
            for i in range(more):
                items.append(self.node(path + ((step, i),)))
            return items if word == "list" else tuple(items)
        raise LayoutError(f"the structure of a state dict: a node {node!r:.100}")


def structure_leaves(structure: Structure) -> List[Leaf]:
    """All leaves, in the order of the structure."""
    leaves: List[Leaf] = []
    _Builder(structure, lambda word, path, name: leaves.append((word, path, name))).build()
    return leaves


def stored_names(
    structures: Iterable[Structure], keys: Container[str], inherited: Iterable[Structure] = ()
) -> Dict[Path, str]:
    """Names that paths alone do not tell, for `flatten(stored=...)` and `unflatten(names=...)`.
    `keys`: of the tensors that are stored.

    A rank whose state dict had one tensor under two paths named both by one key. Where another rank
    stored a path under a key of its own, that rank is right: the first had no cells of it, or had it
    tied where the other had not. `inherited`: structures of a checkpoint that this one took the rest
    from; they speak of paths alone that no other has.
    """
    inherited = list(inherited)
    if inherited:
        own = {path for s in structures for _, path, _ in structure_leaves(s)}
        # A key without a structure is of the other checkpoint, then.
        names = _names_of_structures(structures, keys, False)
        later = _names_of_structures(inherited, keys, True)
        return {**{path: name for path, name in later.items() if path not in own}, **names}
    return _names_of_structures(structures, keys, True)


def _names_of_structures(
    structures: Iterable[Structure], keys: Container[str], others: bool
) -> Dict[Path, str]:
    """`others`: there may be ranks without a structure, whose keys say all."""
    found: Dict[Path, str] = {}
    worth: Dict[Path, int] = {}
    structures = list(structures)
    if not any(map(has_own_names, structures)):
        return found
    for structure in structures:
        leaves = structure_leaves(structure)
        count = collections.Counter(name for kind, _, name in leaves if kind == "tensor")
        for kind, path, name in leaves:
            usual = dotted(path)
            if kind != "tensor":
                if name != usual:
                    found[path] = name
                continue
            tied = count[name] > 1 and name != usual
            if others and tied and usual in keys and usual not in count:
                name, tied = usual, False  # Of a rank whose keys say all: it has no structure.
                found.setdefault(path, name)
            value = 0 if name not in keys else 1 if tied else 2
            if value > worth.get(path, -1):
                worth[path] = value
                if name != usual or path in found:
                    found[path] = name
            elif name != found.get(path, usual):
                found.setdefault(path, usual)
    return found


def has_own_names(structure: Structure) -> bool:
    nodes = structure.get("nodes") if type(structure) is dict else None
    return type(nodes) is list and any(type(n) is list and n[:1] and n[0] in _LEAF_WORDS for n in nodes)


def unflatten(
    structure: Optional[Structure],
    tensors: Mapping[str, Any],
    common: Optional[Mapping[str, Any]] = None,
    rank_common: Optional[Mapping[str, Any]] = None,
    missing: Optional[Callable[[str, Path, str], Any]] = None,
    names: Optional[Mapping[Path, str]] = None,
) -> Any:
    """The state dict of a structure. `tensors` by key; `common` and `rank_common` by name, as
    `from_json` gives them. A tensor that stands in several places is one object. Without a
    structure: a dict of all tensors, in the order of `tensors`.

    `missing(kind, path, name)` makes what is not there; otherwise that is LayoutError. `names`:
    `stored_names` of all structures of the checkpoint. A value that cannot be read is Unreadable.
    """
    if structure is None:
        return dict(tensors)
    sources: Dict[str, Mapping[str, Any]] = {
        "tensor": tensors,
        "value": common or {},
        "rank": rank_common or {},
    }

    def leaf(word: str, path: Path, name: str) -> Any:
        source = sources[word]
        if word == "tensor" and names:
            name = names.get(path, name)
        if name not in source:
            if missing is not None:
                return missing(word, path, name)
            raise LayoutError(f"{path_text(path)}: no {word} {name!r} is stored")
        if word == "tensor":
            return source[name]
        value = decode_or_unreadable(source[name], name)
        return PerRank(value) if word == "rank" and type(value) is not Unreadable else value

    return _Builder(structure, leaf).build()


def merge_trees(trees: Sequence[Any]) -> Any:
    """One state dict of those of several ranks: dicts are united key by key, lists and tuples of
    one length item by item, equal values and the same tensors are one. Of values of single ranks
    (PerRank) the first stays. LayoutError names the path where two cannot be one."""
    if not trees:
        return {}
    tree = trees[0]
    for other in trees[1:]:
        tree = _merge(tree, other, ())
    return tree


def _merge(a: Any, b: Any, path: Path) -> Any:
    if a is b:
        return a
    if type(a) is type(b) and type(a) in (PerRank, Unreadable):
        return a
    if type(a) is type(b):
        if type(a) in SPLIT_DICTS:
            merged = type(a)(a)
            for key, item in b.items():
                if key in merged:
                    item = _merge(merged[key], item, path + ((_KEY, key),))
                merged[key] = item
            return merged
        if type(a) in (list, tuple) and len(a) == len(b):
            pairs = enumerate(zip(a, b))
            return type(a)([_merge(x, y, path + ((_ITEM, i),)) for i, (x, y) in pairs])
        if not is_tensor(a) and to_json(encode(a)) == to_json(encode(b)):
            return a
    raise LayoutError(f"{path_text(path)}: not the same on all ranks that saved it")


def refill(request: Any, stored: Any, kept: Optional[List[Path]] = None) -> Any:
    """A state dict like `request`, whose tensors stay the request's (a load has filled them), and
    whose other values are those that `stored` (of `unflatten`) has at the same path. Where it has
    none, or has a tensor there, the request's stay, and `kept` gets their paths: each value's in a list
    or dict that is not stored, and that of an empty one.

    LayoutError: a value that is asked for and cannot be read. An empty dict asks for all that a dict
    has."""
    return _refill(request, stored, (), kept if kept is not None else [])


# Stands in trees where a state dict has a tensor, a value that is another rank's, or nothing.
ABSENT = object()


def _refill(request: Any, stored: Any, path: Path, kept: List[Path]) -> Any:
    kind = type(request)
    if kind in SPLIT_DICTS:
        if not request:
            return _taken(request, stored, path, kept)
        have = stored if type(stored) in SPLIT_DICTS else {}
        filled = kind()
        for key, item in request.items():
            step: Path = path + ((_KEY, key),)
            filled[key] = _refill(item, have.get(key, ABSENT), step, kept)
        return filled
    if is_tensor(request):
        return request
    if kind is list or kind is tuple:
        alike = type(stored) is kind and len(stored) == len(request)
        absent = stored is ABSENT
        if _holds(request, is_tensor) or (
            (alike or absent) and _holds(request, _is_split) or alike and _holds(stored, _is_absent)
        ):
            step_kind = _ITEM if kind is list else _TUPLE_ITEM
            return kind(
                [
                    _refill(item, stored[i] if alike else ABSENT, path + ((step_kind, i),), kept)
                    for i, item in enumerate(request)
                ]
            )
    return _taken(request, stored, path, kept)


def _taken(request: Any, stored: Any, path: Path, kept: List[Path]) -> Any:
    """The stored value in the place of one value of a request."""
    if type(request) in SPLIT_DICTS and type(stored) in SPLIT_DICTS:
        stored = without_absent(stored)
    # What a tensor is in the checkpoint, or holds one, is no plain value.
    elif _holds(stored, _is_absent):
        kept.append(path)
        return request
    bad = first_unreadable(stored)
    if bad is not None:
        raise LayoutError(f"{path_text(path)}: the stored value cannot be read: {bad.reason}")
    return stored


def without_absent(tree: Any) -> Any:
    """Of what `unflatten` gave: without tensors and values of other ranks. A list or tuple that
    holds one is left out: its items would stand at other places."""
    kept = {
        key: without_absent(item) if type(item) in SPLIT_DICTS else item
        for key, item in tree.items()
        if type(item) in SPLIT_DICTS or not _holds(item, _is_absent)
    }
    return type(tree)(kept)


def first_unreadable(tree: Any) -> Any:
    """The first value of a state dict that cannot be read; None."""
    return _first(tree, _is_unreadable)


def _is_absent(value: Any) -> bool:
    return value is ABSENT or is_tensor(value)


def _is_split(value: Any) -> bool:
    return type(value) in SPLIT_DICTS


def _is_unreadable(value: Any) -> bool:
    return type(value) is Unreadable


def _holds(value: Any, what: Callable[[Any], bool]) -> bool:
    return _first(value, what) is not None


def _first(value: Any, what: Callable[[Any], bool]) -> Any:
    """The first value at any depth that is `what`; None where there is none. `flatten` has refused
    cycles before."""
    pending: List[Iterator[Any]] = [iter((value,))]
    while pending:
        for item in pending[-1]:
            kind = type(item)
            if kind in NATIVE_SET:
                continue
            if what(item):
                return item
            if kind is list or kind is tuple or isinstance(item, (list, tuple)):
                pending.append(iter(item))
                break
            if isinstance(item, dict):
                pending.append(iter(item.values()))
                break
        else:
            pending.pop()
    return None


def plain_values(
    values: Mapping[str, Any], structures: Iterable[Structure], word: str = "value"
) -> Dict[str, Any]:
    """Common values (`word` "rank": those of a rank) as Python has them, without those that say how
    a state dict was built. Only what a structure names is in the encoded form; the rest is of other
    programs, and plain."""
    listed = {
        name for structure in structures for kind, _, name in structure_leaves(structure)
        if kind == word
    }
    return {
        name: decode_or_unreadable(value, name) if name in listed else value
        for name, value in values.items()
        if not name.startswith(RESERVED)
    }


def structures_of(values: Mapping[str, Any]) -> List[Structure]:
    """Those among common values."""
    return [values[name] for name in structure_names(values)]
