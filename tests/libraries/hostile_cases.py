# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save and folders of DCP that lie, made from a seed: every way in which what a
pickle or a zip says may mean something else to Python than to whoever only reads along."""

import pathlib
import random
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "golden"))
import make_bad as m  # noqa: E402

ODICT = m.name("collections", "OrderedDict")
STORAGES = {"ByteStorage": 1, "CharStorage": 1, "ShortStorage": 2, "HalfStorage": 2, "BFloat16Storage": 2,
            "IntStorage": 4, "FloatStorage": 4, "LongStorage": 8, "DoubleStorage": 8, "BoolStorage": 1}
FLOATS = ("HalfStorage", "BFloat16Storage", "FloatStorage", "DoubleStorage")


def real(v):
    return b"G" + struct.pack(">d", v)


class Case:
    """One file in the making: storages, memo slots, entries and the operations of its pickle."""

    def __init__(self, rng):
        self.rng = rng
        self.storages = {}
        self.slots = 0
        self.entries = []  # More of them, of the zip.
        self.order = ("archive/byteorder", b"little")
        self.done = []  # The ways in which it lies.

    def chance(self, p):
        return self.rng.random() < p

    def storage(self, kind=None, count=None):
        kind = kind or self.rng.choice(list(STORAGES))
        count = self.rng.randint(1, 12) if count is None else count
        key = str(len(self.storages))
        size = STORAGES[kind] * count
        self.storages[key] = bytes(self.rng.randrange(2) if kind == "BoolStorage" else self.rng.randrange(256)
                                   for _ in range(size))
        return kind, key, count

    @staticmethod
    def ident(kind, key, count, location="cpu", more=()):
        return m.tup(m.text("storage"), m.name("torch", kind), m.text(key), m.text(location), m.num(count), *more) + b"Q"

    def arguments(self, storage, shape=None, stride=None, first=0, grad=m.FALSE, more=(), ident=None):
        count = storage[2]
        if shape is None:
            rows = self.rng.choice([d for d in range(1, count + 1) if count % d == 0] or [1])
            shape = (rows, count // rows)
            stride = (1, rows) if self.chance(0.3) else (count // rows, 1)
        return m.tup(ident or self.ident(*storage), m.num(first), m.tup(*map(m.num, shape)), m.tup(*map(m.num, stride)),
                     grad, ODICT + b")R", *more)

    def tensor(self, storage=None, **how):
        return m.name("torch._utils", "_rebuild_tensor_v2") + self.arguments(storage or self.storage(), **how) + b"R"

    def put(self):
        """Operations that keep the top of the stack, and that get it again."""
        self.slots += 1
        return b"q" + bytes([self.slots - 1]), b"h" + bytes([self.slots - 1])

    def items(self, pairs, at_once=None):
        """SETITEMS of all, or SETITEM of each."""
        if self.chance(0.5) if at_once is None else at_once:
            return b"(" + b"".join(k + v for k, v in pairs) + b"u"
        return b"".join(k + v + b"s" for k, v in pairs)

    def value(self):
        return self.rng.choice([m.NONE, m.num(self.rng.randrange(100)), m.text("v"), b"]", b"}"])

    def some(self):
        return self.tensor() if self.chance(0.7) else self.value()


# --- Ways to lie: each gives the pairs of a dict ---
def equal_keys(c):
    sets = [[m.text("w")] * 3, [m.num(1), m.TRUE, real(1.0)], [m.num(0), m.FALSE, real(-0.0)], [real(7.0), m.num(7)],
            [m.text("w"), m.text("W"), b"\x8a\0"]]
    keys = [c.rng.choice(c.rng.choice(sets)) for _ in range(c.rng.randint(2, 4))]
    pairs = [(key, c.some()) for key in keys]
    for i in range(c.rng.choice([0, 0, 7, 40])):
        pairs.insert(c.rng.randrange(len(pairs) + 1), (m.text(f"n{i}") if c.chance(0.5) else m.num(i + 50), m.NONE))
    return pairs


def changed_tensor(c):
    one = c.storage("FloatStorage", 4)
    other = c.storage("FloatStorage", 4)
    base = c.tensor(one, shape=(4,), stride=(1,))
    if c.chance(0.4):
        base = m.call(m.name("torch._utils", "_rebuild_parameter"), base, c.rng.choice([m.TRUE, m.FALSE]), ODICT + b")R")
    state = m.tup(c.ident(*other), m.num(0), m.tup(m.num(4)), m.tup(m.num(1)))
    after = c.rng.choice([state + b"b", b"Nb", b"}b", b")b", m.tup(m.FALSE, m.NONE, ODICT + b")R") + b"b",
                          m.tup(c.tensor(other), m.NONE, ODICT + b")R", m.FALSE, m.NONE) + b"b",
                          m.num(0) + real(9.0) + b"s", b"(" + m.num(1) + real(9.0) + b"u", b"(u", real(9.0) + b"a"])
    return [(m.text("w"), base + after)]


def attributes(c):
    other = c.tensor(c.storage("FloatStorage", 4), shape=(4,), stride=(1,))
    pair = lambda key: (m.text(key), c.rng.choice([other, m.TRUE, m.num(3)]))
    keys = ["partition_dim", "allreduce", "data", "grad", "real", "requires_grad", "shape", "_backward_hooks", "names", "name",
            "__class__", "_is_param"]
    dict_state = m.dct([pair(c.rng.choice(keys)) for _ in range(c.rng.randrange(3))])
    state = c.rng.choice([m.NONE, dict_state, dict_state, dict_state + m.NONE + b"\x86", m.NONE + dict_state + b"\x86", b")",
                          ODICT + b")R" + c.items([pair("data")]), m.dct([(m.num(1), m.num(2))])])
    storage = c.storage("FloatStorage", 4)
    if c.chance(0.5):
        made = m.call(m.name("torch._tensor", "_rebuild_from_type_v2"), m.name("torch._utils", "_rebuild_tensor_v2"),
                      c.rng.choice([m.name("torch", "Tensor"), m.name("torch.nn.parameter", "Parameter")]),
                      c.arguments(storage, shape=(4,), stride=(1,)), state)
    else:
        made = m.call(m.name("torch._utils", "_rebuild_parameter_with_state"),
                      c.tensor(storage, shape=(4,), stride=(1,)), m.FALSE, ODICT + b")R", state)
    return [(m.text("w"), made)]


def view_bits(c):
    bit = c.rng.choice(["conj", "neg", "other"])
    value = c.rng.choice([m.TRUE, m.FALSE, m.num(1), m.num(0), m.NONE])
    pairs = [(m.text(bit), value)] * c.rng.randint(0, 2)
    metadata = c.rng.choice([m.dct(pairs), ODICT + b")R" + c.items(pairs), m.NONE, m.FALSE, m.num(0), m.tup(), m.text("conj"),
                             call_with(ODICT, m.dct(pairs))])
    return [(m.text("w"), c.tensor(c.storage(c.rng.choice(FLOATS)), more=[metadata]))]


def call_with(function, *args):
    return m.call(function, *args)


def two_storages(c):
    kind, key, count = c.storage()
    other = c.rng.choice([(c.rng.choice(list(STORAGES)), key, count),
                          (kind, key, max(1, count + c.rng.randint(-1, 1))),
                          (c.rng.choice(list(STORAGES)), key, c.rng.choice([1, 2, count, 2 * count]))])
    a, b = c.tensor((kind, key, count)), c.tensor(other)
    if c.chance(0.3):
        return [(m.text("w"), c.ident(*other) + b"0" + a)]
    return [(m.text("v"), a), (m.text("w"), b)] if c.chance(0.5) else [(m.text("v"), b), (m.text("w"), a)]


def made_dicts(c):
    def pairs():
        return [(m.text(k), c.some()) for k in c.rng.choices("uvw", k=c.rng.randint(1, 3))]
    row = lambda k, v: c.rng.choice([m.tup(k, v), m.lst(k, v)])
    rows = lambda: c.rng.choice([m.lst, m.tup])(*(row(k, v) for k, v in pairs()))
    plain = lambda: m.dct(pairs())
    made = c.rng.choice([
        lambda: m.call(ODICT, rows()), lambda: m.call(ODICT, plain()), lambda: m.call(m.name("builtins", "dict"), plain()),
        lambda: m.call(m.name("builtins", "dict"), rows()), lambda: m.call(ODICT, m.call(ODICT, rows())),
        lambda: m.call(m.name("collections", "defaultdict"), m.name("builtins", "int"), plain()),
        lambda: m.call(m.name("collections", "defaultdict"), m.NONE, rows()),
        lambda: m.call(m.name("collections", "Counter"), plain()),
        lambda: m.call(m.name("collections", "Counter"), m.lst(m.text("a"), m.text("a"))),
        lambda: ODICT + m.tup(rows()) + b"\x81", lambda: ODICT + m.tup(plain()) + b"\x81",
        lambda: m.call(ODICT, m.lst(m.text("ab"))), lambda: m.call(m.name("collections", "defaultdict")),
        lambda: m.call(m.name("argparse", "Namespace"), plain())])()
    if c.chance(0.5):
        made += c.items(pairs())
    if c.chance(0.2):
        made += c.rng.choice([m.dct([(m.text("_metadata"), m.NONE)]), m.NONE + m.dct(pairs()) + b"\x86"]) + b"b"
    return [(m.text("m"), made)]


def aliases(c):
    keep, get = c.put()
    a, b = c.tensor(), c.tensor()
    dict_of = lambda t: b"}" + keep + m.text("w") + t + b"s"
    change = get + m.text(c.rng.choice("wx")) + b + b"s0"
    ns = m.name("argparse", "Namespace") + b")\x81"
    user = c.rng.choice([lambda: m.call(ODICT, dict_of(a)), lambda: ns + dict_of(a) + b"b",
                         lambda: m.call(ODICT, dict_of(a)) + m.text("y") + b"Ns", lambda: dict_of(a)])()
    return [(m.text("m"), user + change)] if c.chance(0.8) else [(m.text("m"), user)]


def bags(c):
    ns = c.rng.choice([m.name("argparse", "Namespace") + b")\x81", m.name("types", "SimpleNamespace") + b")R"])
    pairs = [(m.text(k), c.some()) for k in c.rng.choices("uvw", k=2)]
    return [(m.text("m"), ns + c.rng.choice([m.dct(pairs) + b"b", m.NONE + m.dct(pairs) + b"\x86b", b"Nb",
                                             m.dct(pairs) + m.dct(pairs) + b"\x86b", c.items(pairs), b""]))]


def odd_keys(c):
    keys = [m.call(m.name("builtins", "complex"), real(1.0), real(0.0)), m.call(m.name("builtins", "str"), m.text("w")),
            m.call(m.name("builtins", "int"), m.text("1")), m.call(m.name("fractions", "Fraction"), m.num(1), m.num(1)),
            m.tup(m.num(1)), m.NONE, b"]", b"}", m.name("torch", "float32"), m.num(1 << 70), real(1.5), b"C\1w"]
    pairs = [(c.rng.choice(keys), c.tensor()), (m.text("w"), c.tensor()), (m.num(1), c.tensor())]
    c.rng.shuffle(pairs)
    return pairs[:c.rng.randint(1, 3)]


def arguments(c):
    storage = c.storage()
    one = c.arguments(storage, shape=(storage[2],), stride=(1,))
    made = c.rng.choice([
        lambda: m.name("torch._utils", "_rebuild_tensor_v2") + one + b"\x81",
        lambda: c.tensor(storage, grad=m.TRUE), lambda: c.tensor(storage, grad=m.num(1)), lambda: c.tensor(storage, grad=m.NONE),
        lambda: c.tensor(storage, more=[m.NONE, m.NONE]),
        lambda: c.tensor(storage, ident=c.ident(*storage, more=[m.NONE])),
        lambda: c.tensor(storage, ident=c.ident(*storage, location=c.rng.choice(["meta", "cuda:0", "other"]))),
        lambda: m.call(m.name("torch._utils", "_rebuild_tensor"), c.ident(*storage), m.num(0), m.tup(m.num(1)), m.tup(m.num(1))),
        lambda: m.call(m.name("torch._utils", "_rebuild_parameter"), c.tensor(storage), m.TRUE),
        lambda: m.call(m.name("torch._utils", "_rebuild_parameter"), c.tensor(storage), m.TRUE, ODICT + b")R"),
        lambda: m.call(m.name("torch._utils", "_rebuild_tensor_v2"), c.ident(*storage), m.num(0), m.lst(m.num(1)),
                       m.lst(m.num(1)), m.FALSE, ODICT + b")R"),
        lambda: m.call(m.name("torch.nn.parameter", "Parameter"), c.tensor(storage), m.FALSE)])()
    return [(m.text("w"), made)]


def wide_views(c):
    storage = c.storage(None, 2)
    wide = c.rng.choice([3, 1000, 1 << 22, 1 << 40])
    return [(m.text("w"), c.tensor(storage, shape=(wide, 2), stride=(0, 1)))]


def cases_of_names(c):
    name, data = c.rng.choice([("DATA.PKL", m.stream(m.dct([(m.text("w"), m.num(1))]), 2)), ("data/A", b"x" * 8),
                               ("BYTEORDER", b"big"), ("Byteorder", b"little"), ("DATA/0", b"y" * 8), ("extra", b"z")])
    c.entries.append((c.rng.choice([0, -1]), "archive/" + name, data))
    if c.chance(0.2):
        c.entries.append((c.rng.choice([0, -1]), c.rng.choice(["Archive/x", "other/data/0", "archive/version "]), b"x"))
    if c.chance(0.2):
        c.order = (c.rng.choice(["archive/BYTEORDER", "archive/byteorder"]), c.rng.choice([b"big", b"little", b"middle"]))
    return [(m.text("w"), c.tensor())]


WAYS = [equal_keys, changed_tensor, attributes, view_bits, two_storages, made_dicts, aliases, bags, odd_keys, arguments,
        wide_views, cases_of_names]


def zip_of(c, operations):
    z = m.Zip()
    entries = [("archive/data.pkl", m.stream(operations, 2)), c.order]
    entries += [(f"archive/data/{key}", data) for key, data in c.storages.items()]
    entries.append(("archive/version", b"3\n"))
    for where, name, data in c.entries:
        entries.insert(1 if where == 0 else len(entries), (name, data))
    for name, data in entries:
        z.add(name, data, described=bool(data))
    return z


def ends(c, whole, other):
    """Comments, some of which are archives."""
    with_comment = lambda archive, comment: archive[:-2] + struct.pack("<H", len(comment)) + comment
    lying = other[:-2] + struct.pack("<H", c.rng.choice([1, 7, 60000]))
    return c.rng.choice([lambda: with_comment(whole, b"words"), lambda: with_comment(whole, other),
                         lambda: with_comment(whole, lying), lambda: with_comment(whole, b"PK\5\6 no record"),
                         lambda: whole + other, lambda: whole + b"\0" * 5,
                         lambda: with_comment(whole, b"PK\5\6" + b"\0" * 30)])()


def flipped(c, operations):
    """An operation or a byte of it that is another, gone, or there twice."""
    out = bytearray(operations)
    for _ in range(c.rng.randint(1, 3)):
        at = c.rng.randrange(len(out))
        what = c.rng.randrange(4)
        if what == 0:
            out[at] = c.rng.randrange(256)
        elif what == 1:
            out[at] = c.rng.choice(b"stuabeRQ0N}])(\x81\x85\x86\x87\x88\x89")
        elif what == 2:
            del out[at:at + c.rng.randint(1, 4)]
        else:
            out[at:at] = out[at:at + c.rng.randint(1, 8)]
    return bytes(out)


def pickled(c):
    ways = c.rng.sample(WAYS, c.rng.choice([1, 1, 1, 2, 3]))
    c.done = [way.__name__ for way in ways]
    made = [way(c) for way in ways]
    # Apart from each other: what one replaces would hide how another is refused.
    pairs = made[0] if len(made) == 1 else [(m.text(f"p{i}"), b"}" + c.items(p)) for i, p in enumerate(made)]
    if c.chance(0.4):
        pairs.append((m.text("good"), c.tensor()))
    if c.chance(0.2):
        c.rng.shuffle(pairs)
    root = c.rng.choice([lambda: b"}" + c.items(pairs), lambda: ODICT + b")R" + c.items(pairs),
                         lambda: m.dct([(m.text("model"), b"}" + c.items(pairs))]),
                         lambda: m.lst(b"}" + c.items(pairs), c.tensor())])()
    if c.chance(0.15):
        c.done.append("flipped")
        root = flipped(c, root)
    return root


def torch_file(rng):
    """(what is done, {"c.pt": bytes})"""
    c = Case(rng)
    whole = zip_of(c, pickled(c)).end(zip64=c.chance(0.5))
    if c.chance(0.12):
        other = Case(rng)
        inner = zip_of(other, m.dct([(m.text("w"), other.tensor()), (m.text("z"), other.tensor())])).end()
        c.done.append("ends")
        whole = ends(c, whole, inner)
    return c.done, {"c.pt": whole}


# --- DCP ---
def dcp_folder(rng):
    """A folder of two tensors, each of one chunk, whose metadata or items lie."""
    c = Case(rng)
    items, places = b"", {}
    for key in ("v", "w"):
        one = Case(rng)
        storage = one.storage("FloatStorage", 12)
        made = one.tensor(storage, shape=(3, 4), stride=(4, 1))
        if c.chance(0.2):
            made += one.rng.choice([b"Nb", m.tup(one.ident(*one.storage("FloatStorage", 12)), m.num(0), m.tup(m.num(3), m.num(4)),
                                                 m.tup(m.num(4), m.num(1))) + b"b"])
            c.done.append("item-build")
        raw = zip_of(one, made).end(zip64=True)
        places[key] = (len(items), len(raw))
        items += raw
    tensors = [(key, ((3, 4), [((0, 0), (3, 4), "__0_0.distcp", *places[key])])) for key in places]
    metadata = m.dcp(tensors)[".metadata"]
    number = lambda key, what: m.text(what) + m.num(places[key][what == "length"])
    state = lambda key: number(key, "offset") + number(key, "length") + b"ub"
    other = m.text("offset") + m.num(places["v"][0])
    size = lambda dims: m.call(m.name("torch", "Size"), m.tup(*map(m.num, dims)))
    w = state("w")
    keep, get = b"q\0", b"h\0"
    ways = {
        "slots": (w, w[:-1] + m.dct([(m.text("offset"), m.num(places["v"][0]))]) + b"\x86b"),
        "slots-none": (w, w[:-1] + m.NONE + b"\x86b"),
        "twice": (w, w[:-2] + other + b"ub"),
        "arguments": (b"_StorageInfo\n)", b"_StorageInfo\n" + m.tup(m.text("x"), m.num(0), m.num(1), m.lst(m.text("zstd")))),
        "index-arguments": (b"MetadataIndex\n)", b"MetadataIndex\n" + m.tup(m.text("v"), size((0, 0)))),
        "changed-later": (w, w[:-1] + keep + b"b" + get + other + b"s0"),
        "shape-slots": (m.text("chunks"), m.text("chunks")),
        "key-twice": (m.text("w"), m.text("v")),
        "size-of-a-list": (size((3, 4)), m.call(m.name("torch", "Size"), m.lst(m.num(3), m.num(4)))),
        "size-is-a-list": (size((3, 4)), m.lst(m.num(3), m.num(4))),
        "offset-of-other": (number("w", "offset"), other),
        "properties-of-two": (b"t\x62", b"t\x62"),
    }
    for what in rng.sample(sorted(ways), rng.choice([1, 1, 2])):
        old, new = ways[what]
        if old in metadata:
            c.done.append(what)
            metadata = metadata.replace(old, new) if c.chance(0.7) else metadata.replace(old, new, 1)
    if c.chance(0.1):
        c.done.append("flipped")
        metadata = metadata[:2] + flipped(c, metadata[2:-1]) + b"."
    return ["dcp", *c.done], {".metadata": metadata, "__0_0.distcp": items}


def case(seed, number):
    """The same for the same two numbers."""
    rng = random.Random(f"{seed}:{number}")
    return dcp_folder(rng) if rng.random() < 0.2 else torch_file(rng)
