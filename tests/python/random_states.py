# SPDX-License-Identifier: Apache-2.0
"""State dicts at random, and how much of one is in what was read back, leaf by leaf."""

import collections
import random
import re

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]
FP4 = getattr(torch, "float4_e2m1fn_x2", None)


class Maker:
    """State dicts of what torch.save takes and a state dict may hold."""

    def __init__(self, seed, fp4=False):
        self.random = random.Random(seed)
        self.fp4 = fp4 and FP4 is not None
        self.tensors = []

    def tensor(self):
        if self.tensors and self.random.random() < 0.2:
            return self.random.choice(self.tensors)  # Tied.
        shape = [self.random.randint(0, 4) for _ in range(self.random.randint(0, 3))]
        dtype = self.random.choice(DTYPES)
        if self.fp4 and self.random.random() < 0.2:
            # torch counts pairs.
            dtype, shape = FP4, [self.random.randint(1, 4), self.random.randint(1, 3)]
        made = torch.empty(shape, dtype=dtype)
        made.view(-1).view(torch.uint8)[:] = torch.tensor(
            [self.random.randint(0, 1) for _ in range(made.nbytes)], dtype=torch.uint8)
        self.tensors.append(made)
        return made

    def plain(self):
        return self.random.choice([
            None, True, 7, -(1 << 40), 0.1, float("inf"), "größe", b"\0\xff", [1, 2.5, "x"], (0.9, 0.95), [], (),
            torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), [(1, [2]), {"in a list": (3,)}],
            collections.OrderedDict(a=1), collections.OrderedDict(), {}, collections.Counter({3: 2, "x": 1}),
            {5: "five"}, {"deep": {"er": 1}}])

    def key(self):
        return self.random.choice(["w", "layers.0.w", "a b", "0", "state", "ü", "model.w"]) + str(self.random.randint(0, 9))

    def container(self, depth):
        kind = self.random.choice(["dict", "dict", "numbers", "list", "tuple", "odict"]) if depth else "dict"
        count = self.random.randint(1 if depth == 0 else 0, 4)
        items = [self.value(depth + 1) for _ in range(count)]
        if kind in ("list", "tuple"):
            return items if kind == "list" else tuple(items)
        keys = [self.random.randint(0, 9) if kind == "numbers" else self.key() for _ in items]
        return (collections.OrderedDict if kind == "odict" else dict)(zip(keys, items))

    def value(self, depth):
        kind = self.random.random()
        if depth < 4 and kind < 0.4:
            return self.container(depth)
        return self.tensor() if kind < 0.7 else self.plain()

    def state(self):
        return {"model": self.container(1), "w": self.tensor(), "optim": {"state": {0: {"m": self.tensor(), "step": 3}},
                "param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0]}]}, **self.container(0)}


def tensor_bytes(tensor):
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


def same_tensor(a, b):
    return isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) and tensor_bytes(a) == tensor_bytes(b)


def difference(a, b, text_keys=False, ordered=True, path=""):
    """Where two state dicts differ, types and orders of containers too; None. Not `ordered`: OrderedDicts may
    be dicts in any order. `text_keys`: and keys of numbers text, tuples lists, as DCP has them."""
    ordered = ordered and not text_keys
    if isinstance(a, torch.Tensor):
        return None if same_tensor(a, b) else f"{path}: {a!r:.80} and {b!r:.80}"
    if isinstance(a, dict) and isinstance(b, dict):
        first = {str(key) if text_keys else key: item for key, item in a.items()}
        second = {str(key) if text_keys else key: item for key, item in b.items()}
        if set(first) != set(second):
            return f"{path}: keys {sorted(map(repr, first))} and {sorted(map(repr, second))}"
        if ordered and type(a) is not type(b):
            return f"{path}: {type(a)} and {type(b)}"
        if ordered and list(a) != list(b):
            return f"{path}: the order of {list(a)} is {list(b)}"
        found = (difference(item, second[key], text_keys, ordered, f"{path}[{key!r}]") for key, item in first.items())
        return next(filter(None, found), None)
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        alike = isinstance(b, (list, tuple)) if text_keys else type(a) is type(b)
        if not alike or len(a) != len(b):
            return f"{path}: {a!r:.80} and {b!r:.80}"
        found = (difference(x, y, text_keys, ordered, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b)))
        return next(filter(None, found), None)
    return None if type(a) is type(b) and (a == b or a != a) else f"{path}: {a!r:.80} and {b!r:.80}"


def leaves(state, path=()):
    """(path, leaf) of all; keys as text, empty containers are leaves."""
    if isinstance(state, dict) and state:
        for key, item in state.items():
            yield from leaves(item, path + (str(key),))
    elif isinstance(state, (list, tuple)) and not isinstance(state, torch.Size) and state:
        for i, item in enumerate(state):
            yield from leaves(item, path + (str(i),))
    else:
        yield path, state


def in_tuple(state, path):
    """Whether a tuple leads to a leaf, or a list does that holds one with a tensor: one value to DCP."""
    for step in path:
        if isinstance(state, tuple) or isinstance(state, list) and has_tuple_of_tensors(state):
            return True
        state = state[int(step)] if isinstance(state, list) else {str(key): item for key, item in state.items()}[step]
    return False


def has_tuple_of_tensors(value):
    if isinstance(value, tuple):
        return any(isinstance(leaf, torch.Tensor) for _, leaf in leaves(value))
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(has_tuple_of_tensors, items))


def in_odd_container(state, path):
    """Whether a leaf is in a container that holds no tensor, and what is more than plain data."""
    for step in path:
        inside = [leaf for _, leaf in leaves(state)]
        if not any(isinstance(leaf, torch.Tensor) for leaf in inside) and any(
                isinstance(leaf, (torch.Size, torch.dtype, torch.device)) for leaf in inside):
            return True
        state = state[int(step)] if isinstance(state, (list, tuple)) else {str(key): item for key, item in state.items()}[step]
    return False


def has_twins(state):
    """Whether two values have one dotted name, as {"a.b": .., "a": {"b": ..}}; DCP refuses these itself."""
    names = collections.Counter()

    def count(value, name):
        names[name] += 1
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        for key, item in items:
            count(item, f"{name}.{key}" if name else str(key))

    count(state, "")
    return max(names.values()) > 1


def same_leaf(a, b):
    """As formats have them: tuples may be lists, OrderedDicts dicts."""
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, (list, tuple, dict)) and not isinstance(a, torch.Size):
        return not a and not b and isinstance(b, dict if isinstance(a, dict) else (list, tuple))
    return type(a) is type(b) and (a == b or a != a)


class Compared:
    """How many leaves of a state dict are in another, and which are not."""

    def __init__(self, wanted, found):
        there = dict(leaves(found))
        self.equal, self.lost, self.other = 0, [], []
        self.tensors = 0
        for path, leaf in leaves(wanted):
            if path in there and same_leaf(leaf, there[path]):
                self.equal += 1
                self.tensors += isinstance(leaf, torch.Tensor)
            elif there.get(path) is None:
                self.lost.append((path, leaf))
            else:
                self.other.append((path, leaf, there[path]))
        known = {path for path, _ in leaves(wanted)}
        # A gap in a list is None.
        self.more = [path for path, leaf in there.items() if path not in known and leaf is not None and leaf != {}]


def named(report):
    """Of an export's report: (how many are left out, their names as far as listed)."""
    count, names = 0, []
    for note in report["notes"]:
        found = re.fullmatch(r"\w+ cannot store (\d+) [a-z ]+ \((.*)\): left out", note)
        also = re.fullmatch(r"\w+ cannot store the values: (.*)", note)
        if found or also:
            listed = re.fullmatch(r"(.*?)(?: and (\d+) more)?", (found or also).groups()[-1])
            first = listed.group(1).split(", ")
            names += first
            count += len(first) + int(listed.group(2) or 0)
    return count, names


def tied_groups(state):
    """Paths of each tensor."""
    groups = collections.defaultdict(list)
    for path, leaf in leaves(state):
        if isinstance(leaf, torch.Tensor):
            groups[id(leaf)].append((path, leaf))
    return list(groups.values())
