# SPDX-License-Identifier: Apache-2.0
"""Random rules of name maps, and what they mean in NumPy.

The oracle knows nothing of boxes: it computes for every cell of a tensor the indices of its names, and cells
with equal indices on both sides of a rule are the same cell.
"""

import math
from typing import NamedTuple

import numpy

# Types of 1, 2, 4, 8 and 16 bytes.
DTYPES = ("u1", "f2", "f4", "f8", "c16")


class Name(NamedTuple):
    name: str
    size: int

    def text(self):
        return self.name

    def cells(self):
        return self.size

    def indices(self, at):
        """{name: index of each cell, -1 for cells of another summand}; `at`: positions on the axis."""
        return {self.name: at}


class Product(NamedTuple):
    parts: tuple

    def text(self):
        return "(" + " ".join(part.text() for part in self.parts) + ")"

    def cells(self):
        return math.prod(part.cells() for part in self.parts)

    def indices(self, at):
        found, inside = {}, at >= 0
        for part in reversed(self.parts):
            here = numpy.where(inside, at % part.cells(), -1)
            _join(found, part.indices(here))
            at = at // part.cells()
        return found


class Sum(NamedTuple):
    parts: tuple

    def text(self):
        return "(" + " + ".join(part.text()[1:-1] if isinstance(part, Product) else part.text()
                                for part in self.parts) + ")"

    def cells(self):
        return sum(part.cells() for part in self.parts)

    def indices(self, at):
        found, before = {}, 0
        for part in self.parts:
            size = part.cells()
            inside = (at >= before) & (at < before + size)
            _join(found, part.indices(numpy.where(inside, at - before, -1)))
            before += size
        return found


ONE = Product(())


def _join(found, more):
    """Adds indices; a name in two summands is in at most one of them for each cell."""
    for name, at in more.items():
        found[name] = numpy.maximum(found[name], at) if name in found else at


class Side(NamedTuple):
    """One tensor, or one for each combination of the indices in its key."""

    stem: str
    in_key: tuple
    axes: tuple

    def shape(self):
        return tuple(axis.cells() for axis in self.axes)

    def text(self):
        key = self.stem + "".join(f".{{{name.name}}}" for name in self.in_key)
        axes = " ".join("1" if axis is ONE else axis.text() for axis in self.axes)
        return f"{key} : {axes}" if axes else f"{key} :"

    def keys(self):
        """(key, {name: index})"""
        for at in numpy.ndindex(*(name.size for name in self.in_key)):
            key = self.stem + "".join(f".{i}" for i in at)
            yield key, {name.name: i for name, i in zip(self.in_key, at)}

    def codes(self, fixed, numbers):
        """A number for each cell: equal for cells with equal indices. `numbers`: all names and their sizes."""
        shape = self.shape()
        found = {name: numpy.full(shape, i) for name, i in fixed.items()}
        for axis, size in enumerate(shape):
            at = numpy.arange(size).reshape([-1 if a == axis else 1 for a in range(len(shape))])
            _join(found, self.axes[axis].indices(numpy.broadcast_to(at, shape)))
        code = numpy.zeros(shape, "i8")
        for name, size in sorted(numbers.items()):
            code = code * (size + 1) + (found[name] + 1 if name in found else 0)
        return code


class Rule(NamedTuple):
    json: dict
    stored: dict  # Key to array.
    mapped: dict


def _side(random, stem, common, own):
    common = random.sample(common, len(common))
    if len(own) == 1:
        factors = common + list(own[0])
    else:
        inner = [common.pop() for _ in range(len(common)) if random.random() < 0.3]
        summands = []
        for term in random.sample(own, len(own)):
            names = random.sample(inner + list(term), len(inner) + len(term))
            summands.append(names[0] if len(names) == 1 else Product(tuple(names)))
        factors = common + [Sum(tuple(summands))]
    random.shuffle(factors)
    in_key, rest = [], []
    may_have_key = random.random() < 0.6
    for factor in factors:
        to_key = may_have_key and isinstance(factor, Name) and random.random() < 0.3
        (in_key if to_key else rest).append(factor)
    axes = []
    while rest:
        if random.random() < 0.08:
            axes.append(ONE)
        take = random.randint(1, 3)
        together, rest = rest[:take], rest[take:]
        if len(together) == 3 and random.random() < 0.5:
            together = [together[0], Product(tuple(together[1:]))]
        axes.append(together[0] if len(together) == 1 else Product(tuple(together)))
    return Side(stem, tuple(in_key), tuple(axes))


def _sides(random, stem, common, terms):
    terms = random.sample(terms, len(terms))
    sides = []
    while terms:
        take = random.randint(1, len(terms))
        own, terms = terms[:take], terms[take:]
        sides.append(_side(random, f"{stem}{len(sides)}", common, own))
    return sides


def random_rule(random, stem, data, most=4):
    """A rule whose keys begin with `stem`. `data`: a numpy.random.Generator. `most`: the largest size of a name."""
    count = iter(range(100))
    numbers = {}

    def name():
        made = Name(f"{random.choice('abcdefgh')}{next(count)}", random.randint(1, most))
        numbers[made.name] = made.size
        return made

    common = [name() for _ in range(random.randint(0, 3))]
    terms = [tuple(name() for _ in range(random.randint(1, 2))) for _ in range(random.randint(1, 4))]
    sides = [list(terms), list(terms)]
    unused = []
    if random.random() < 0.3:  # Cells that one side does not have.
        extra = name()
        unused.append(extra.name)
        random.choice(sides).append((extra,))
    have = _sides(random, f"{stem}from", common, sides[0])
    made = _sides(random, f"{stem}to", common, sides[1])
    dtype = random.choice(DTYPES)
    stored, codes, values = {}, [], []
    for side in have:
        for key, fixed in side.keys():
            shape = side.shape()
            raw = data.integers(0, 256, (*shape, numpy.dtype(dtype).itemsize), "u1")
            stored[key] = raw.view(dtype).reshape(shape)
            codes.append(side.codes(fixed, numbers).ravel())
            values.append(stored[key].ravel())
    code, value = numpy.concatenate(codes), numpy.concatenate(values)
    order = numpy.argsort(code)
    code, value = code[order], value[order]
    mapped = {}
    for side in made:
        for key, fixed in side.keys():
            wanted = side.codes(fixed, numbers)
            at = numpy.minimum(numpy.searchsorted(code, wanted), len(code) - 1)
            mapped[key] = numpy.where(code[at] == wanted, value[at], numpy.zeros((), dtype)).astype(dtype)
    json = {"from": [side.text() for side in have], "to": [side.text() for side in made], "sizes": numbers,
            "unused": unused}
    return Rule(json, stored, mapped)


def fills_with_zeros(rule):
    """Whether a mapped tensor of the rule has cells that no stored tensor has."""
    return any(name not in " ".join(rule.json["from"]) for name in rule.json["unused"])


def _factors(random, size):
    """Random sizes with this product."""
    found = []
    while size > 1 and random.random() < 0.7:
        divisors = [n for n in range(2, size + 1) if size % n == 0]
        found.append(random.choice(divisors))
        size //= found[-1]
    return found + [size] if size > 1 or not found else found


def rule_over(random, stem, tensors):
    """A rule over tensors that there are: {"stem.0.1": array}, one for each combination of the indices. Stacks them,
    and then either splits an axis into two tensors, or cuts axes into factors that it permutes and regroups."""
    keys = {tuple(map(int, key[len(stem) + 1 :].split("."))) if key != stem else (): key for key in tensors}
    counts = [max(at) + 1 for at in zip(*keys)]
    first = next(iter(tensors.values()))
    stacked = numpy.zeros((*counts, *first.shape), first.dtype)
    for at, key in keys.items():
        stacked[at] = tensors[key]
    names = [f"k{n}" for n in range(len(counts))]
    source = stem + "".join(f".{{{name}}}" for name in names)
    axes = [n for n, size in enumerate(first.shape) if size > 1]
    made = stem.replace("to", "on")
    if axes and random.random() < 0.3:
        axis = random.choice(axes)
        middle = random.randint(1, first.shape[axis] - 1)
        own = [f"a{n}" for n in range(first.ndim)]
        halves = []
        for half in ("x", "y"):
            halves.append(" ".join(names + own[:axis] + [half] + own[axis + 1 :]))
        own[axis] = "(x + y)"
        json = {"from": f"{source} : {' '.join(own)}", "sizes": {"x": middle},
                "to": [f"{made}.x : {halves[0]}", f"{made}.y : {halves[1]}"]}
        parts = numpy.split(stacked, [middle], axis + len(counts))
        return Rule(json, tensors, {f"{made}.x": parts[0], f"{made}.y": parts[1]})
    texts, cut, all_names = [], list(counts), list(names)
    for n, size in enumerate(first.shape):
        factors = _factors(random, size)
        own = [f"a{n}{letter}" for letter, _ in zip("abcdefgh", factors)]
        texts.append(f"({' '.join(own)})" if len(own) > 1 else own[0])
        cut += factors
        all_names += own
    sizes = dict(zip(all_names, cut))
    order = random.sample(range(len(cut)), len(cut))
    out, shape, at = [], [], 0
    while at < len(order):
        take = random.randint(1, 3)
        group = [all_names[n] for n in order[at : at + take]]
        out.append(group[0] if len(group) == 1 else f"({' '.join(group)})")
        shape.append(math.prod(sizes[name] for name in group))
        at += take
    value = numpy.ascontiguousarray(stacked.reshape(cut).transpose(order)).reshape(shape)
    json = {"from": f"{source} : {' '.join(texts)}", "to": f"{made} : {' '.join(out)}",
            "sizes": {name: size for name, size in sizes.items() if name not in names}}
    return Rule(json, tensors, {made: value})
