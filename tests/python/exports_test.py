# SPDX-License-Identifier: Apache-2.0
"""State dicts at random, saved in each way, exported for PyTorch, and read back by PyTorch itself: nested, typed
and tied as they were."""

import collections
import io
import os
import random
import unittest

import support
import tensormount as tm

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
except ImportError as error:
    raise unittest.SkipTest(str(error))

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)


class Maker:
    """State dicts of what torch.save takes and a state dict may hold."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.tensors = []

    def tensor(self):
        if self.tensors and self.random.random() < 0.2:
            return self.random.choice(self.tensors)  # Tied.
        shape = [self.random.randint(0, 4) for _ in range(self.random.randint(0, 3))]
        made = torch.empty(shape, dtype=self.random.choice(DTYPES))
        made.view(-1).view(torch.uint8)[:] = torch.tensor(
            [self.random.randint(0, 1) for _ in range(made.nbytes)], dtype=torch.uint8)
        self.tensors.append(made)
        return made

    def plain(self):
        return self.random.choice([
            None, True, 7, -(1 << 40), 0.1, float("inf"), "größe", b"\0\xff", [1, 2.5, "x"], (0.9, 0.95), [], (),
            torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), [(1, [2]), {"in a list": (3,)}],
            collections.OrderedDict(a=1), collections.Counter({3: 2, "x": 1}), {5: "five"}, {"deep": {"er": 1}}])

    def key(self):
        return self.random.choice(["w", "layers.0.w", "a b", "0", "state", "ü"]) + str(self.random.randint(0, 9))

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


def difference(a, b, text_keys=False, path=""):
    """Where two state dicts differ; None. OrderedDicts are dicts to PyTorch's formats of nested values; `text_keys`:
    so are keys of numbers texts, and tuples lists."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{path}: {a!r:.80} and {b!r:.80}"
        same = bytes(a.contiguous().view(-1).view(torch.uint8).tolist()) == bytes(b.contiguous().view(-1).view(torch.uint8).tolist())
        return None if same else f"{path}: other bytes"
    if isinstance(a, dict) and isinstance(b, dict):
        first = {str(key) if text_keys else key: item for key, item in a.items()}
        second = {str(key) if text_keys else key: item for key, item in b.items()}
        if set(first) != set(second):
            return f"{path}: keys {sorted(map(repr, first))} and {sorted(map(repr, second))}"
        found = (difference(item, second[key], text_keys, f"{path}[{key!r}]") for key, item in first.items())
        return next(filter(None, found), None)
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        alike = isinstance(b, (list, tuple)) if text_keys else type(a) is type(b)
        if not alike or len(a) != len(b):
            return f"{path}: {a!r:.80} and {b!r:.80}"
        found = (difference(x, y, text_keys, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b)))
        return next(filter(None, found), None)
    return None if type(a) is type(b) and (a == b or a != a) else f"{path}: {a!r:.80} and {b!r:.80}"


def has_dict_with_text_twins(value):
    """Whether DCP would give two values one name: {0: .., "0": ..}."""
    if isinstance(value, dict):
        return len({str(key) for key in value}) < len(value) or any(map(has_dict_with_text_twins, value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_dict_with_text_twins, value))


class Exports(support.Folder):
    def test_states_at_random(self):
        generator, seed = support.seeded()
        for number in range(support.scaled(60)):
            with self.subTest(seed=seed, number=number):
                self.one(Maker(generator.getrandbits(64)).state(), f"{seed}-{number}")

    def one(self, state, name):
        tm.save(state, f"S/{name}")
        tm.export(f"S/{name}", f"{name}.pt", format="torch")
        back = torch.load(f"{name}.pt", weights_only=True)
        self.assertIsNone(difference(state, back))
        self.check_ties(state, back)
        os.unlink(f"{name}.pt")
        # A file of torch.save, read in place.
        torch.save(state, f"{name}-theirs.pt")
        try:
            tm.export(f"{name}-theirs.pt", f"{name}.pt", format="torch")
        except tm.UnsupportedError as error:
            self.assertIn("two of", str(error))
        else:
            again = torch.load(f"{name}.pt", weights_only=True)
            self.assertIsNone(difference(again.get("optim"), state["optim"]))

    def check_ties(self, state, back):
        """Tensors that were one share their memory again."""
        places = collections.defaultdict(list)

        def walk(value, other):
            if isinstance(value, torch.Tensor):
                if value.numel():
                    places[value.data_ptr()].append(other.data_ptr())
            elif isinstance(value, dict):
                for key in value:
                    walk(value[key], other[key])
            elif isinstance(value, (list, tuple)):
                for x, y in zip(value, other):
                    walk(x, y)

        walk(state, back)
        for found in places.values():
            self.assertEqual(len(set(found)), 1)

    def test_an_optimizer(self):
        model = torch.nn.Linear(3, 2)
        optim = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 3)).sum().backward()
        optim.step()
        state = {"model": model.state_dict(), "optimizer": optim.state_dict(), "step": 1}
        torch.save(state, "theirs.pt")
        tm.save(state, "S/optimizer")
        tm.export("theirs.pt", "a.pt", format="torch")
        tm.export("S/optimizer", "b.pt", format="torch")
        tm.Store("S")
        for name in ("a.pt", "b.pt"):
            back = torch.load(name, weights_only=True)
            self.assertIsNone(difference(state, back))
            fresh = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
            fresh.load_state_dict(back["optimizer"])
            self.assertEqual(len(fresh.state), 2)
            self.assertEqual([float(one["step"]) for one in fresh.state.values()], [1.0, 1.0])

    def test_for_dcp(self):
        state = {"model": {"a": torch.ones(2), "b.c": torch.arange(3)}, "optim": {"state": {0: {"m": torch.zeros(2)}}, "groups": [{"lr": 0.5}]},
                 "step": 7, "betas": (0.9, 0.95), "size": torch.Size([2])}
        tm.save(state, "S/dcp")
        dcp.save(state, storage_writer=tm.torch.Writer("S/by-dcp"))
        for name in ("dcp", "by-dcp"):
            tm.export(f"S/{name}", name, format="dcp")
            metadata = dcp.FileSystemReader(name).read_metadata()
            self.assertFalse([key for key in metadata.state_dict_metadata if "tensormount." in key])
            dcp_to_torch_save(name, f"{name}.pt")
            back = torch.load(f"{name}.pt", weights_only=False)
            self.assertIsNone(difference(state, back, text_keys=True))
            report = tm.export(f"S/{name}", f"{name}-plain.pt", format="torch")
            back = torch.load(f"{name}-plain.pt", weights_only=True)
            held = dict(state)
            if name == "by-dcp":  # An object that is more than plain data.
                self.assertIn("no place for 1 object (size)", str(report))
                del held["size"]
            self.assertIsNone(difference(held, back, text_keys=True))
        # Each name of a tie, over the same bytes.
        head = torch.arange(6.0).reshape(2, 3)
        tied = {"model": {"head": head, "embed": head, "other": torch.ones(1)}, "more": [head]}
        tm.save(tied, "S/tied")
        tm.export("S/tied", "tied", format="dcp")
        fresh = {"model": {name: torch.zeros(2, 3) for name in ("head", "embed")}, "more": [torch.zeros(2, 3)]}
        dcp.load(fresh, checkpoint_id="tied")
        for found in (*fresh["model"].values(), fresh["more"][0]):
            self.assertTrue(torch.equal(found, head))
        with tm.open("tied") as checkpoint:
            self.assertTrue(torch.equal(checkpoint["model.head"].torch(), head))
            self.assertTrue(torch.equal(checkpoint["more.0"].torch(), head))
        self.assertTrue(tm.verify("tied")["whole"])
        into = {"model": {"a": torch.zeros(2), "b.c": torch.zeros(3, dtype=torch.int64)}, "step": 0}
        dcp.load(into, checkpoint_id="dcp")
        self.assertEqual((into["step"], into["model"]["b.c"].tolist()), (7, [0, 1, 2]))

    def test_names_that_tensors_and_values_share(self):
        ones = torch.ones(2)
        for number, state in enumerate((
            {"a.b": ones, "a": {"b": bytearray(b"x"), "c": ones + 1}}, {"a.b": ones, "a": {"b": 5, "c": ones + 1}},
            {"model": {"w": ones}, "sched": {0.5: 0.1, None: ones}, "size": torch.Size([2]), "n": {0: {"m": ones}}},
            {"sched": {True: torch.float16}, "w": ones},
        )):
            tm.save(state, f"S/shared-{number}")
            tm.export(f"S/shared-{number}", f"shared-{number}.pt", format="torch")
            back = torch.load(f"shared-{number}.pt", weights_only=True)
            for path in (("a", "b"), ("a", "c"), ("a.b",), ("model", "w"), ("size",), ("n", 0, "m"), ("w",)):
                wanted, found = state, back
                for key in path:
                    wanted = wanted.get(key) if isinstance(wanted, dict) else None
                    found = found.get(key) if isinstance(found, dict) else None
                if isinstance(wanted, bytearray):
                    self.assertIsNone(found)
                elif wanted is not None:
                    self.assertIsNone(difference(wanted, found), (number, path))

    def test_what_torch_cannot_hold_is_named(self):
        import numpy

        state = {"w": torch.ones(1), "fine": numpy.float32(0.5), "odd": {"big": 1 << 80, "dtype": numpy.dtype("f4")}}
        tm.save(state, "S/odd")
        done = support.run("export", "S/odd", "odd.pt", "--to", "torch")
        del done
        back = torch.load("odd.pt", weights_only=True)
        self.assertEqual((back["fine"], list(back)), (0.5, ["fine", "w"]))
        report = tm.export("S/odd", "again.pt", format="torch")
        self.assertIn("odd.big, odd.dtype", str(report))


if __name__ == "__main__":
    unittest.main()
