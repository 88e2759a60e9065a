# SPDX-License-Identifier: Apache-2.0
"""Converts nested state dicts to flat ones, and back.

Tensors get keys, other values get names. The containers and their order are the *structure*.
docs/state-dicts.md, "How a state dict is stored", specifies the form that this file writes and reads.
Nothing is pickled, and values that cannot be stored without loss are refused by name and path.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
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

from ._leaves import LeafKind, ObjectPart, registry
from ._leaves.base import ArrayKind
from ._shards import SAVE
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

# The greatest depth of nested containers.
MAX_DEPTH = 64
MAX_KEY_BYTES = 2048
# A longer dict that has only plain values (a vocabulary) is stored as one value, not as one for each key.
MAX_SPLIT_DICT = 1000

TREE_NAME = "tensormount.tree"
RESERVED = "tensormount."

# (_KEY, key of a dict), (_ITEM, index of a list) or (_TUPLE_ITEM, index of a tuple).
Step = Tuple[int, Any]
Path = Tuple[Step, ...]
_KEY, _ITEM, _TUPLE_ITEM = 0, 1, 2

Structure = Dict[str, Any]


class PerRank:
    """A plain value that differs between ranks: a position in the data, the state of a generator.

    Other values must be the same on every rank; a save in which they differ is refused (option `common`).
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


class RegisteredLeaf(NamedTuple):
    """A leaf of a registered kind, its key, and the result of `LeafKind.held`."""

    leaf: Any
    kind: LeafKind
    key: str
    held: Any


class FlatTree(NamedTuple):
    """A flattened state dict.

    `tensors`: leaves by key, each once. `repeated`: further leaves of a key, if a request has two tensors for one
    stored tensor. `common` and `rank_common`: encoded values by name (see `encode`). `structure`: None if the
    keys describe it completely. `merged`: for each tensor that a request has under several keys, the stored
    ones among these keys, if there are several. `registered`: leaves of registered kinds.
    """

    tensors: Dict[str, Any]
    common: Dict[str, Any]
    rank_common: Dict[str, Any]
    structure: Optional[Structure]
    repeated: Tuple[Tuple[str, Any], ...] = ()
    merged: Tuple[Tuple[str, ...], ...] = ()
    registered: Tuple[RegisteredLeaf, ...] = ()

    def requests_values(self) -> bool:
        """Whether a request has plain values; an empty container requests values, too."""
        nodes = self.structure["nodes"] if self.structure is not None else ()
        empty = any(type(node) is not str and not node[1] for node in nodes)
        return empty or bool(self.common) or bool(self.rank_common)

    def items(self) -> Collection[Tuple[str, Any]]:
        """Key and leaf of everything that has to be described."""
        return [*self.tensors.items(), *self.repeated] if self.repeated else self.tensors.items()

    def objects(self) -> List[Tuple[str, ObjectPart]]:
        """Key and part of the leaves that are stored as objects."""
        return [(one.key, one.held) for one in self.registered if type(one.held) is ObjectPart]

    def json_texts(self) -> Tuple[Dict[str, str], Dict[str, str]]:
        """Common values, and values of this rank, as JSON by name."""
        common = {name: to_json(value) for name, value in self.common.items()}
        rank_common = {name: to_json(value) for name, value in self.rank_common.items()}
        if self.structure is not None:
            name, text = structure_entry(self.structure)
            common[name] = text
            rank_common[TREE_NAME] = to_json(name[len(TREE_NAME) + 1 :])
        return common, rank_common


# ---- Names -----------------------------------------------------------------------------------


def step_text(key: Any) -> str:
    """The text of a step of a path in a dotted name."""
    kind = type(key)
    if kind is str:
        return str(key)
    if kind is int:
        return str(key) if INT_MIN <= key <= INT_MAX else hex(key)
    if key is None or kind is bool or kind is float:
        return repr(key)
    return to_json(encode(key))


def dotted(path: Path) -> str:
    """The steps joined by dots, as in PyTorch's checkpoints."""
    return ".".join([step[1] if type(step[1]) is str else step_text(step[1]) for step in path])


def reversible(path: Path) -> str:
    """The steps escaped and joined by dots: no two paths have the same name.

    docs/state-dicts.md, "Keys and names", specifies it.
    """
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
            # The escaped text of a str never begins with "%~", so the names cannot be equal.
            text = to_json(encode(key))
            parts.append("%~" + text.replace("%", "%25").replace(".", "%2E"))
    return ".".join(parts)


def path_text(path: Path) -> str:
    """A path for messages: state_dict['a'][0]."""
    text = "".join(f"[{step[1]!r}]" for step in path[:8])
    return "state_dict" + text + ("..." if len(path) > 8 else "")


def _assign_names(
    names: List[str], path_of: Callable[[int], Path], reserved: bool
) -> List[str]:
    """A distinct name for each leaf, independent of the order of leaves. `names`: the dotted ones.

    A leaf keeps its dotted name if no other leaf has it. Leaves that share a name take their reversible names.
    If one of these is the dotted name of another leaf, that leaf takes its reversible name, too.
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
            f"{path_text(path)}: the key is not valid Unicode (a lone surrogate)"
        ) from None
    if "\0" in name:
        raise LayoutError(f"{path_text(path)}: a key must not contain NUL")
    if size > MAX_KEY_BYTES:
        raise LayoutError(
            f"{path_text(path)}: the key would have {size} bytes, the limit is {MAX_KEY_BYTES}"
        )


# ---- Flattening ------------------------------------------------------------------------------

_DICT, _ODICT, _LIST, _TUPLE, _TENSOR, _VALUE, _PER_RANK = range(7)
# Types of dicts that are split into their items; other dicts are values.
SPLIT_DICTS = (dict, collections.OrderedDict)
_CONTAINER_NAMES = {_DICT: "dict", _ODICT: "odict", _LIST: "list", _TUPLE: "tuple"}
_LEAF_NAMES = {_TENSOR: "tensor", _VALUE: "value", _PER_RANK: "rank"}
_LEAF_WORDS = frozenset(_LEAF_NAMES.values())
_TEXT = frozenset((str,))
_EXACT = frozenset((str, int))


def is_tensor(value: Any) -> bool:
    """Whether a leaf is of a known kind (_leaves/). It may still be refused."""
    return registry.kind_of(value) is not None


_KIND_OF_TYPE: Dict[Any, int] = {
    dict: _DICT, collections.OrderedDict: _ODICT, list: _LIST, tuple: _TUPLE, PerRank: _PER_RANK,
    collections.Counter: _VALUE, **dict.fromkeys(NATIVE_SET, _VALUE),
}


def _kind_of(value: Any) -> int:
    """_DICT, ..., _PER_RANK; -1: the value cannot be stored."""
    found = _KIND_OF_TYPE.get(type(value))
    if found is not None:
        return found
    if is_tensor(value):
        return _TENSOR
    return _VALUE if encode_special(value) is not None else -1


def _is_one_value(value: Any, kind: int) -> bool:
    """Whether a container is stored as one value: lists and tuples without dicts and tensors at any depth, and
    long dicts of plain values. Other containers are split, and each item has its own name."""
    if kind == _DICT or kind == _ODICT:
        return len(value) > MAX_SPLIT_DICT and set(map(type, value.values())) <= NATIVE_SET
    if not value:
        return True
    return _only_plain(value, 0, [MAX_VALUES])


def is_one_value(value: Any) -> bool:
    """`_is_one_value` of a container."""
    return _is_one_value(value, _kind_of(value))


def _only_plain(value: Any, depth: int, room: List[int]) -> bool:
    """`room[0]`: the number of values that may still follow. Lists that share lists can have too many to visit."""
    if set(map(type, value)) <= NATIVE_SET:
        return True
    if depth > MAX_DEPTH:
        return False
    room[0] -= len(value)
    if room[0] < 0:
        raise LayoutError(f"a list or tuple has more than {MAX_VALUES} values; use an array")
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


class _Leaves:
    """Leaves of one kind in the order of the walk. Parallel lists, not one object for each leaf: tens of thousands
    of new objects would start the garbage collector, and lists can be extended by whole dicts."""

    def __init__(self) -> None:
        self.places: List[int] = []  # Index of each leaf in the nodes of the structure.
        self.parents: List[Path] = []
        self.steps: List[int] = []
        self.keys: List[Any] = []
        self.names: List[str] = []  # Dotted names.
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
    """One walk through a state dict."""

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose
        self.nodes: List[Any] = []
        self.leaves = {kind: _Leaves() for kind in _LEAF_NAMES}
        self.own: Dict[int, str] = {}  # Keys that a registered kind gave its leaves, by index of the leaf.
        self.registered: Dict[int, RegisteredLeaf] = {}  # By id of the leaf.
        self.inside: Set[int] = set()
        # Exact types of tensors, which need no further check. Nearly all tensors have one of them.
        self.plain = frozenset(registry.families())

    def root(self, tree: Any) -> None:
        self.inside.add(id(tree))
        self._container(tree, _kind_of(tree), (), "")

    def _visit(self, value: Any, parent: Path, prefix: str, step: int, key: Any) -> None:
        kind = _kind_of(value)
        if kind < 0:
            raise UnsupportedError(
                f"{path_text(parent + ((step, key),))}: {type_name(value)} cannot be stored; "
                "objects are not pickled"
            )
        name = prefix + (key if type(key) is str else step_text(key))
        if kind in _CONTAINER_NAMES:
            path = parent + ((step, key),)
            if id(value) in self.inside:
                raise LayoutError(f"{path_text(path)}: the container contains itself")
            if len(path) > MAX_DEPTH:
                raise LayoutError(f"{path_text(path)}: containers are nested more than {MAX_DEPTH} deep")
            # An empty container is a node without a value.
            if not value or not _is_one_value(value, kind):
                self.inside.add(id(value))
                self._container(value, kind, path, name + ".")
                self.inside.discard(id(value))
                return
            kind = _VALUE
        if kind == _PER_RANK:
            value = value.value
        elif type(value) is _StoredLeaf:
            if value.key != name:
                self.own[len(self.leaves[_TENSOR].values)] = value.key
            value = value.held
        self.leaves[kind].add(len(self.nodes), parent, step, key, name, value)
        self.nodes.append(_LEAF_NAMES[kind])

    def _container(self, value: Any, kind: int, path: Path, prefix: str) -> None:
        word = _CONTAINER_NAMES[kind]
        if len(self.nodes) > MAX_VALUES:  # Possible if containers share containers.
            raise LayoutError(f"{path_text(path)}: more than {MAX_VALUES} containers, tensors and values")
        if kind in (_LIST, _TUPLE):
            self.nodes.append([word, len(value)])
            step = _ITEM if kind == _LIST else _TUPLE_ITEM
            for i, item in self._resolved(enumerate(value), prefix):
                # An omitted item becomes an empty dict, so that the other items keep their indices.
                self._visit({} if item is _OMITTED else item, path, prefix, step, i)
            return
        nodes, tensors, plain = self.nodes, self.leaves[_TENSOR], self.plain
        texts = set(map(type, value)) <= _TEXT
        if texts and set(map(type, value.values())) <= plain:
            nodes.append([word, list(value)])
            tensors.add_dict(len(nodes), path, prefix, value)
            nodes.extend(itertools.repeat("tensor", len(value)))
            return
        stored = value
        if registry.registered():
            items = self._resolved(value.items(), prefix)
            stored = {key: item for key, item in items if item is not _OMITTED}
        keys = list(stored) if texts else [encode(key, path_text(path)) for key in stored]
        nodes.append([word, keys])
        for key, item in stored.items():
            if type(item) in plain and type(key) is str:
                tensors.add(len(nodes), path, _KEY, key, prefix + key, item)
                nodes.append("tensor")
            else:
                self._visit(item, path, prefix, _KEY, key)

    def _resolved(self, items: Iterable[Tuple[Any, Any]], prefix: str) -> Iterable[Tuple[Any, Any]]:
        """Items of a container, with leaves of registered kinds replaced as by `_resolve_leaf`."""
        if not registry.registered():
            return items
        return [(key, self._resolve_leaf(item, prefix, key)) for key, item in items]

    def _resolve_leaf(self, item: Any, prefix: str, step: Any) -> Any:
        """The item; for a leaf of a registered kind the _StoredLeaf tensor, or _OMITTED if it is no tensor."""
        kind = registry.kind_of(item)
        if kind is None or isinstance(kind, ArrayKind):
            return item
        key = kind.key(item, prefix + (step if type(step) is str else step_text(step)))
        registered = self.registered.get(id(item))
        if registered is None:
            try:
                held = kind.held(item, self.purpose)
                if not isinstance(registry.kind_of(held), ArrayKind) and type(held) not in _NON_TENSORS:
                    raise UnsupportedError(
                        f"the LeafKind of this value returns {type_name(held)}, which is not a built-in kind of leaf"
                    )
            except (LayoutError, UnsupportedError) as error:
                raise type(error)(f"tensor {key}: {error.message}", key=key) from None
            registered = self.registered[id(item)] = RegisteredLeaf(item, kind, key, held)
        return _OMITTED if type(registered.held) in _NON_TENSORS else _StoredLeaf(key, registered.held)


class _StoredLeaf(NamedTuple):
    """Replaces a leaf of a registered kind by the tensor that is stored for it, and its key."""

    key: str
    held: Any


_KIND_OF_TYPE[_StoredLeaf] = _TENSOR
_NON_TENSORS = (ObjectPart, type(None))
_OMITTED = object()


class Names(Protocol):
    """The names of a checkpoint for paths of a request: `stored_names`, or a `_key_map.KeyMap`."""

    def get(self, path: Path, name: str, /) -> str:
        """The stored name of a path, or `name`, its own name, if there is no other."""


def flatten(
    tree: Any,
    stored: Optional[Names] = None,
    known: Optional[Container[str]] = None,
    purpose: str = SAVE,
) -> FlatTree:
    """Flattens a state dict (a dict, list or tuple), to save, load or validate it.

    `stored`: names that a checkpoint has for paths (`stored_names`). They replace the names made here, so that
    a request for a part of a checkpoint means the same tensors. `known`: the keys of the checkpoint; of the keys
    of tied leaves, one that is stored is requested.

    LayoutError: cycles, too deep or too large, invalid keys. UnsupportedError: values that cannot be stored.
    """
    if type(tree) not in (dict, collections.OrderedDict, list, tuple):
        raise UnsupportedError(
            f"a state dict of type {type_name(tree)}: a dict, list or tuple was expected"
        )
    walk = _Walk(purpose)
    walk.root(tree)
    found = walk.leaves[_TENSOR]
    leaves, names = found.values, _names_of(found, False, stored)
    if walk.own:
        # A leaf with a key of its own is tied to no other leaf.
        leaves = [object() if i in walk.own else leaf for i, leaf in enumerate(leaves)]
        names = list(names)
        for i, key in walk.own.items():
            _check_name(key, found.path(i))
            names[i] = stored.get((), key) if stored else key
    keys, omitted, merged = _shared_names(leaves, names, known)
    tensors: Dict[str, Any] = dict(zip(keys, found.values))
    repeated = []
    if omitted or len(tensors) != len(keys):
        tensors.clear()
        for i, (key, leaf) in enumerate(zip(keys, found.values)):
            if i in omitted:
                continue
            first = tensors.setdefault(key, leaf)
            if first is not leaf and registry.identity(first) != registry.identity(leaf):
                repeated.append((key, leaf))
    special = _set_names(walk.nodes, found, keys)
    values: List[Dict[str, Any]] = []
    for kind in (_VALUE, _PER_RANK):
        plain = walk.leaves[kind]
        names = _names_of(plain, True, stored)
        _set_names(walk.nodes, plain, names)
        values.append(
            {
                name: encode(value, path_text(plain.path(i)))
                for i, (name, value) in enumerate(zip(names, plain.values))
            }
        )
    flat = type(tree) is dict and len(found.values) == len(tree) == len(walk.nodes) - 1
    registered = tuple(walk.registered.values())
    if flat and not special and set(map(type, tree)) <= _TEXT:
        return FlatTree(tensors, values[0], values[1], None, tuple(repeated), merged, registered)
    if _node_values(walk.nodes) > MAX_VALUES - 4:
        raise LayoutError(f"a state dict of {len(walk.nodes)} containers, tensors and values is too large")
    structure = {"version": 1, "nodes": walk.nodes}
    return FlatTree(tensors, values[0], values[1], structure, tuple(repeated), merged, registered)


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


def _shared_names(
    leaves: Sequence[Any], names: List[str], known: Optional[Container[str]] = None
) -> Tuple[List[str], Container[int], Tuple[Tuple[str, ...], ...]]:
    """Gives all leaves that are one tensor the same name: the first of the stored names (`known`) among theirs if
    there are any, otherwise the first of all. The first in text order, so that ranks with other orders agree.

    Parts without cells cannot be recognised as one tensor here. In a load each keeps its name if it is stored. In
    a save the ranks with cells decide, and all of those parts but the first are left out.

    Returns the names, the indices of leaves that are left out, and `FlatTree.merged`.
    """
    memory: Optional[Sequence[Any]] = registry.addresses(leaves)
    if memory is None or len(set(memory)) != len(leaves):
        memory = list(map(registry.memory, leaves))
    if len(set(memory)) == len(leaves):
        return names, (), ()
    count = collections.Counter(memory)
    groups: Dict[Any, List[int]] = {}
    for i, leaf in enumerate(leaves):
        if count[memory[i]] > 1:
            groups.setdefault(registry.identity(leaf), []).append(i)
    names = list(names)
    omitted: Set[int] = set()
    merged: List[Tuple[str, ...]] = []
    for members in groups.values():
        if len(members) > 1:
            own = [names[i] for i in members]
            there = sorted({name for name in own if known is not None and name in known})
            first = there[0] if there else min(own)
            if not registry.may_be_tied(leaves[members[0]]):
                if len(there) > 1:
                    merged.append(tuple(there))
                for i in members:
                    names[i] = first
            elif known is not None:
                for i in members:
                    names[i] = names[i] if names[i] in known else first
            else:
                omitted.update(i for i in members if names[i] != first)
    return names, omitted, tuple(merged)


def _set_names(nodes: List[Any], leaves: _Leaves, names: Sequence[str]) -> bool:
    """Puts names that differ from the dotted paths into the nodes of their leaves. Returns whether there are
    any."""
    if names == leaves.names:
        return False
    for place, dotted_name, name in zip(leaves.places, leaves.names, names):
        if name != dotted_name:
            nodes[place] = [nodes[place], name]
    return True


# ---- The structure ---------------------------------------------------------------------------


# Nodes of recent structures, and their results of `structure_entry`. A training job has one or two.
_entries: List[Tuple[List[Any], Tuple[str, str]]] = []
_MAX_ENTRIES = 4


def structure_entry(structure: Structure) -> Tuple[str, str]:
    """The name of the common value for a structure, and its JSON. The name has a hash, so that ranks with equal
    structures store one value, and different structures do not conflict."""
    nodes = structure["nodes"]
    more = [n[1] for n in nodes if type(n) is not str]
    kinds = set(map(type, itertools.chain.from_iterable(m for m in more if type(m) is list)))
    # Structures with keys of other types are not cached, because keys may be equal but not the same (1, True, 1.0).
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
        # A copy, because the caller may change the structure.
        own = [n if type(n) is str else [n[0], *map(_copied, n[1:])] for n in nodes]
        _entries[:] = [(own, entry), *_entries[: _MAX_ENTRIES - 1]]
    return entry


def _copied(more: Any) -> Any:
    return more[:] if type(more) is list else more


def structure_names(names: Iterable[str]) -> List[str]:
    """The names of structures among the names of common values, in order."""
    return sorted(name for name in names if name.startswith(TREE_NAME + "."))


# A leaf of a structure: "tensor", "value" or "rank", its path, its name.
Leaf = Tuple[str, Path, str]


class _Builder:
    """Parses a structure, which is not trusted. `leaf(word, path, name)` makes the leaves."""

    def __init__(self, structure: Any, leaf: Callable[[str, Path, str], Any]) -> None:
        if type(structure) is not dict or type(structure.get("nodes")) is not list:
            raise LayoutError("the stored structure of the state dict is damaged: not a dict with a list of nodes")
        if structure.get("version") != 1:
            raise UnsupportedError(
                f"the stored structure of the state dict is damaged: version {structure.get('version')!r} is unknown"
            )
        self.nodes = structure["nodes"]
        self.leaf = leaf
        self.next = 0

    def build(self) -> Any:
        tree = self.node(())
        if self.next != len(self.nodes):
            raise LayoutError("the stored structure of the state dict is damaged: it has entries after its end")
        return tree

    def node(self, path: Path) -> Any:
        if self.next >= len(self.nodes):
            raise LayoutError("the stored structure of the state dict is damaged: it ends too early")
        node = self.nodes[self.next]
        self.next += 1
        if type(node) is str:
            word, more = node, None
        elif type(node) is list and len(node) == 2 and type(node[0]) is str:
            word, more = node
        else:
            raise LayoutError(f"the stored structure of the state dict is damaged: malformed entry {node!r:.100}")
        if word in _LEAF_WORDS:
            if more is not None and type(more) is not str:
                raise LayoutError(f"the stored structure of the state dict is damaged: malformed entry {node!r:.100}")
            return self.leaf(word, path, dotted(path) if more is None else more)
        if len(path) > MAX_DEPTH:
            raise LayoutError(f"the stored structure of the state dict is damaged: nested more than {MAX_DEPTH} deep")
        if word in ("dict", "odict") and type(more) is list:
            found: Dict[Any, Any] = {} if word == "dict" else collections.OrderedDict()
            for stored_key in more:
                key = stored_key if type(stored_key) is str else decode(stored_key)
                try:
                    if key in found:
                        raise LayoutError(f"the stored structure of the state dict is damaged: duplicate key {key!r}")
                except TypeError:
                    raise LayoutError(
                        f"the stored structure of the state dict is damaged: malformed key {key!r:.100}"
                    ) from None
                found[key] = self.node(path + ((_KEY, key),))
            return found
        if word in ("list", "tuple") and type(more) is int and more >= 0:
            step = _ITEM if word == "list" else _TUPLE_ITEM
            items = []
            for i in range(more):
                items.append(self.node(path + ((step, i),)))
            return items if word == "list" else tuple(items)
        raise LayoutError(f"the stored structure of the state dict is damaged: malformed entry {node!r:.100}")


def structure_leaves(structure: Structure) -> List[Leaf]:
    """All leaves, in the order of the structure. LayoutError, UnsupportedError: the structure is damaged."""
    leaves: List[Leaf] = []
    _Builder(structure, lambda word, path, name: leaves.append((word, path, name))).build()
    return leaves


def stored_names(
    structures: Iterable[Structure], keys: Container[str], inherited: Iterable[Structure] = ()
) -> Dict[Path, str]:
    """Stored names that differ from the dotted paths, for `flatten(stored=...)` and `unflatten(names=...)`.
    `keys`: the stored tensors.

    A rank whose state dict had one tensor under two paths gave both the same key. If another rank stored one of
    these paths under a key of its own, that key counts: the first rank had no cells of it, or only there were
    the paths tied. `inherited`: structures of the checkpoint that was named by `inherit=`; they count only for
    paths that no other structure has.
    """
    inherited = list(inherited)
    if inherited:
        own = {path for s in structures for _, path, _ in structure_leaves(s)}
        # False, because a key without a structure belongs to the inherited checkpoint.
        names = _names_of_structures(structures, keys, False)
        later = _names_of_structures(inherited, keys, True)
        return {**{path: name for path, name in later.items() if path not in own}, **names}
    return _names_of_structures(structures, keys, True)


def _names_of_structures(
    structures: Iterable[Structure], keys: Container[str], others: bool
) -> Dict[Path, str]:
    """`others`: some ranks may have no structure, because their keys describe it completely."""
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
                name, tied = usual, False  # A rank without a structure stored it.
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
    """Builds the state dict of a structure. `tensors` by key; `common` and `rank_common` by name, as `from_json`
    returns them. A tensor with several paths is one object. Without a structure: a dict of all tensors.

    `missing(kind, path, name)` makes a leaf that is not stored; None: LayoutError. `names`: `stored_names` of
    all structures of the checkpoint. A value that cannot be read becomes Unreadable.
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
    """Unites the state dicts of several ranks: dicts by key, lists and tuples of equal length by item. Equal
    values and the same tensors become one, and of PerRank values the first is taken. LayoutError names the path
    of other differences."""
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
    raise LayoutError(f"{path_text(path)}: the value differs between the ranks that saved it")


def refill(
    request: Any,
    stored: Any,
    kept: Optional[List[Path]] = None,
    put: Optional[Mapping[int, Any]] = None,
) -> Any:
    """A copy of `request` with its own tensors, which a load has filled, and with the plain values that `stored`
    (of `unflatten`) has at the same paths. An empty dict requests all values of the stored dict.

    A value that is not stored, or stored as a tensor, stays the request's, and its path is appended to `kept`: the
    path of each value in a list or dict that is not stored, and of an empty list or dict. `put`: replacements of
    leaves, by id of the leaf. LayoutError: a requested value cannot be read.
    """
    return _refill(request, stored, (), kept if kept is not None else [], put or {})


# Replaces tensors, values of other ranks and missing values in trees of plain values.
ABSENT = object()


def _refill(
    request: Any, stored: Any, path: Path, kept: List[Path], put: Mapping[int, Any]
) -> Any:
    kind = type(request)
    if kind in SPLIT_DICTS:
        if not request:
            return _stored_value(request, stored, path, kept)
        have = stored if type(stored) in SPLIT_DICTS else {}
        filled = kind()
        for key, item in request.items():
            step: Path = path + ((_KEY, key),)
            filled[key] = _refill(item, have.get(key, ABSENT), step, kept, put)
        return filled
    if is_tensor(request):
        return put.get(id(request), request)
    if kind is list or kind is tuple:
        alike = type(stored) is kind and len(stored) == len(request)
        absent = stored is ABSENT
        if _contains(request, is_tensor) or (
            (alike or absent) and _contains(request, _is_split) or alike and _contains(stored, _is_absent)
        ):
            step_kind = _ITEM if kind is list else _TUPLE_ITEM
            return kind(
                [
                    _refill(item, stored[i] if alike else ABSENT, path + ((step_kind, i),), kept, put)
                    for i, item in enumerate(request)
                ]
            )
    return _stored_value(request, stored, path, kept)


def _stored_value(request: Any, stored: Any, path: Path, kept: List[Path]) -> Any:
    """The stored value for one value of a request; the request's own if it is not stored."""
    if type(request) in SPLIT_DICTS and type(stored) in SPLIT_DICTS:
        stored = without_absent(stored)
    # A tensor of the checkpoint, or a container with one, is not a plain value.
    elif _contains(stored, _is_absent):
        kept.append(path)
        return request
    bad = first_unreadable(stored)
    if bad is not None:
        raise LayoutError(f"{path_text(path)}: the stored value cannot be read: {bad.reason}")
    return stored


def without_absent(tree: Any) -> Any:
    """Removes tensors and values of other ranks from a result of `unflatten`. A list or tuple that contains one is
    removed as a whole, because its items would get other indices."""
    kept = {
        key: without_absent(item) if type(item) in SPLIT_DICTS else item
        for key, item in tree.items()
        if type(item) in SPLIT_DICTS or not _contains(item, _is_absent)
    }
    return type(tree)(kept)


def first_unreadable(tree: Any) -> Any:
    """The first Unreadable of a state dict; None: there is none."""
    return _first(tree, _is_unreadable)


def _is_absent(value: Any) -> bool:
    return value is ABSENT or is_tensor(value)


def _is_split(value: Any) -> bool:
    return type(value) in SPLIT_DICTS


def _is_unreadable(value: Any) -> bool:
    return type(value) is Unreadable


def _contains(value: Any, what: Callable[[Any], bool]) -> bool:
    return _first(value, what) is not None


def _first(value: Any, what: Callable[[Any], bool]) -> Any:
    """The first value at any depth for which `what` is true; None: there is none. `flatten` has refused cycles."""
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
    """Common values (`word` "rank": values of a rank), decoded, without those that tensormount itself stored.
    Only values that a structure names are in the encoded form; the others come from other programs."""
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
    """The structures among common values."""
    return [values[name] for name in structure_names(values)]
