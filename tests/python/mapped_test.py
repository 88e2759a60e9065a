# SPDX-License-Identifier: Apache-2.0
"""Name maps from Python: mapped tensors against NumPy, whole, in slices and byte ranges, in every view, and
loaded under random shardings."""

import io
import json
import os
import pickle
import shutil
import unittest

import numpy

import random_names
import support
import tensormount as tm

RULES_EACH = 10  # In one checkpoint.


def same(a, b):
    """NaN with equal bits are equal."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def packed(array):
    """A row-major copy; without axes, too."""
    return numpy.array(array, order="C")


def random_box(random, shape):
    begin = [random.randint(0, n) for n in shape]
    return tuple(slice(b, random.randint(b, n)) for b, n in zip(begin, shape))


def cut(random, array):
    """The whole array as parts with boxes, cut at random."""
    boxes = [tuple((0, n) for n in array.shape)]
    for _ in range(random.randint(0, 4)):
        box = boxes.pop(random.randrange(len(boxes)))
        axes = [a for a, (b, e) in enumerate(box) if e - b > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = random.choice(axes)
        begin, end = box[axis]
        middle = random.randint(begin + 1, end - 1)
        for part in ((begin, middle), (middle, end)):
            boxes.append(box[:axis] + (part,) + box[axis + 1 :])
    parts = []
    for box in boxes:
        data = packed(array[tuple(slice(b, e) for b, e in box)])
        parts.append((tuple(b for b, _ in box), data))
    return tm.Shards(array.shape, parts)


class Mapped(support.Folder):
    def tearDown(self):
        for name in os.listdir():
            shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)
        super().tearDown()

    def test_random_maps_read_what_numpy_makes_of_them(self):
        random, seed = support.seeded()
        data = numpy.random.default_rng(seed)
        for number in range(support.scaled(50)):
            rules = [random_names.random_rule(random, f"r{i}.", data) for i in range(RULES_EACH)]
            stored = {key: array for rule in rules for key, array in rule.stored.items()}
            mapped = {key: array for rule in rules for key, array in rule.mapped.items()}
            names = {"version": 1, "rules": [rule.json for rule in rules]}
            with self.subTest(seed=seed, number=number, names=json.dumps(names)):
                self.check_map(random, names, stored, mapped, views=number % 5 == 0)

    def test_random_maps_over_maps(self):
        random, seed = support.seeded()
        data = numpy.random.default_rng(seed)
        for number in range(support.scaled(20)):
            stored, first, second, mapped = {}, [], [], {}
            while len(first) < RULES_EACH:
                rule = random_names.random_rule(random, f"r{len(first)}.", data)
                if random_names.fills_with_zeros(rule):
                    continue
                stored.update(rule.stored)
                first.append(rule.json)
                stems = {key.split(".")[0] + "." + key.split(".")[1] for key in rule.mapped}
                for stem in sorted(stems):
                    held = {key: array for key, array in rule.mapped.items() if (key + ".").startswith(stem + ".")}
                    over = random_names.rule_over(random, stem, held)
                    second.append(over.json)
                    mapped.update(over.mapped)
            names = {"version": 1, "base": {"version": 1, "rules": first}, "rules": second}
            with self.subTest(seed=seed, number=number, names=json.dumps(names)):
                self.check_map(random, names, stored, mapped, views=number % 5 == 0)

    def check_map(self, random, names, stored, mapped, views):
        """Saves `stored` under random shardings, and reads it through the map in every way; `views`: from files, too."""
        tm.save({key: cut(random, array) for key, array in stored.items()}, "S/c", replace=True)
        with tm.open("S/c", names=names) as checkpoint:
            self.assertEqual(checkpoint.keys(), sorted(mapped))
            self.check_reads(random, checkpoint, mapped)
            if views:
                self.check_views(checkpoint, mapped)
        self.check_load(random, names, mapped)

    def check_reads(self, random, checkpoint, mapped):
        for key, array in mapped.items():
            self.assertTrue(same(checkpoint[key][...], array), key)
            box = random_box(random, array.shape)
            if box:
                self.assertTrue(same(checkpoint[key][box], array[box]), (key, box))

    def check_views(self, checkpoint, mapped):
        files = checkpoint.files()
        held = files.read("model.safetensors")
        header = json.loads(held[8 : 8 + int.from_bytes(held[:8], "little")])
        for key, array in mapped.items():
            raw = array.tobytes()
            self.assertEqual(files.read(f"tensors/{key}"), raw)
            third = len(raw) // 3
            self.assertEqual(files.read(f"tensors/{key}", third, 2 * third), raw[third : 2 * third])
            self.assertTrue(same(numpy.load(io.BytesIO(files.read(f"npy/{key}.npy"))), array), key)
            text = ",".join(f"{n // 2}:{n}" for n in array.shape)
            if array.ndim:
                box = tuple(slice(n // 2, n) for n in array.shape)
                self.assertEqual(files.read(f"slices/{key}@{text}"), array[box].tobytes(), (key, text))
            if key in header:
                begin, end = header[key]["data_offsets"]
                at = 8 + int.from_bytes(held[:8], "little")
                self.assertEqual(held[at + begin : at + end], raw, key)
        for path in files:
            if path.startswith(("zarr/", "hf/", "dcp/")):
                self.assertEqual(len(files.read(path)), files.stat(path).size, path)
        self.check_zarr(files, mapped)

    def check_zarr(self, files, mapped):
        for key, array in mapped.items():
            info = json.loads(files.read(f"zarr/{key}/zarr.json"))
            grid = info["chunk_grid"]["configuration"]["chunk_shape"]
            self.assertEqual(tuple(info["shape"]), array.shape)
            for at in numpy.ndindex(*(-(-n // c) for n, c in zip(array.shape, grid))):
                chunk = numpy.frombuffer(files.read(f"zarr/{key}/" + ".".join(["c", *map(str, at)])), array.dtype)
                box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, grid))
                held = array[box]
                inside = tuple(slice(0, n) for n in held.shape)
                self.assertTrue(same(packed(chunk.reshape(grid)[inside]), packed(held)))

    def check_load(self, random, names, mapped):
        request = {}
        for key, array in mapped.items():
            wanted = cut(random, numpy.zeros_like(array))
            if len(wanted.parts) > 1:  # Some parts are not wanted.
                wanted.parts.pop()
            request[key] = wanted
        tm.load(request, "S/c", names=names)
        for key, shards in request.items():
            for part in shards.parts:
                box = tuple(slice(b, b + n) for b, n in zip(part.begin, part.held))
                self.assertTrue(same(part.data, packed(mapped[key][box])), key)

    def test_recorded_structures_have_stored_keys(self):
        w, old = numpy.arange(12, dtype="f4").reshape(3, 4), numpy.full((3, 4), 7.0, "f4")
        tm.save({"emb": w, "head": w, "old": old, "step": 5}, "S/tied")
        names = [{"key": "emb", "to": "saved"}, {"key": "old", "to": "emb"}]
        with tm.open("S/tied", names=names) as checkpoint:
            state = checkpoint.state()
            self.assertEqual(sorted(state), ["emb", "saved", "step"])
            self.assertTrue((state["emb"] == old).all() and (state["saved"] == w).all())
        with self.assertRaises(tm.KeyNotFoundError):  # Not the bytes of another tensor.
            tm.load({"head": numpy.zeros((3, 4), "f4")}, "S/tied", names=names)
        with open("rules.json", "w") as file:
            json.dump([{"from": "old : a b", "to": "emb : b a"}, {"key": "emb", "to": "saved"}], file)
        support.run("export", "S/tied", "out.pt", "--to", "torch", "--map", "rules.json")
        support.run("export", "S/tied", "out", "--to", "dcp", "--map", "rules.json")
        for path in ("out.pt", "out"):
            with tm.open(path) as checkpoint:
                self.assertTrue((checkpoint["emb"][...] == old.T).all(), path)
                self.assertTrue((checkpoint["saved"][...] == w).all(), path)
        support.run("import", "S/tied", "S/imported", "--map", "rules.json")
        with tm.open("S/imported") as checkpoint:
            self.assertEqual(sorted(checkpoint.state()), ["emb", "saved", "step"])

    def test_a_shorter_stack_is_not_a_success(self):
        os.mkdir("lost")
        for n in range(4):
            tensors = {f"l.{n}.w": ("F32", [4], numpy.full(4, n, "f4").tobytes())}
            support.write_safetensors(f"lost/m{n}.safetensors", tensors)
        index = {"metadata": {}, "weight_map": {f"l.{n}.w": f"m{n}.safetensors" for n in range(4)}}
        with open("lost/model.safetensors.index.json", "w") as file:
            json.dump(index, file)
        stack = [{"from": "l.{l}.w : a", "to": "x : l a"}]
        with tm.open("lost", names=stack) as checkpoint:
            self.assertEqual(checkpoint["x"].shape, (4, 4))
        os.remove("lost/m3.safetensors")
        with self.assertRaisesRegex(tm.DataLossError, "l.3.w beside l.0.w, and it is lost"):
            tm.open("lost", names=stack)
        # No rule names it, and it is not taken for dropped.
        names = {"version": 1, "rules": [{"key": f"l.{n}.w", "to": f"m.{n}"} for n in range(3)]}
        with self.assertRaises(tm.DataLossError):
            tm.load({"m.0": numpy.zeros(4, "f4"), "l.3.w": numpy.zeros(4, "f4")}, "lost", names=names)

    def test_maps_of_other_types(self):
        w = numpy.arange(6, dtype="f4")
        tm.save({"w": w}, "S/c")
        with tm.open("S/c", names=(rule for rule in [{"key": "w", "to": "q"}])) as checkpoint:
            self.assertEqual(checkpoint.keys(), ["q"])
        reshape = [{"from": "w : (h d)", "to": "q : h d"}]
        with tm.open("S/c", names=reshape, numbers={"h": numpy.int64(3)}) as checkpoint:
            self.assertEqual(checkpoint["q"].shape, (3, 2))
            extents = json.loads(checkpoint.files().read("extents/q.json"))
            self.assertEqual(extents["put_together_from"], ["w"])
            with self.assertRaisesRegex(tm.UnsupportedError, "puts it together from other tensors"):
                checkpoint["q"].layout_svg()
        with self.assertRaisesRegex(tm.InvalidArgumentError, "must be an integer"):
            tm.open("S/c", names=reshape, numbers={"h": 1.5})
        with self.assertRaisesRegex(tm.InvalidArgumentError, "as_"):
            tm.open("S/c", names={"as": "hf"})

    def test_sizes_and_errors(self):
        w = numpy.arange(24, dtype="f4").reshape(6, 4)
        tm.save({"w": w, "step": 3}, "S/c")
        rule = {"from": "w : (h i j) d", "to": "q : (h j i) d", "sizes": {"j": 2, "h": "heads"}}
        with self.assertRaisesRegex(tm.InvalidArgumentError, "heads is not known"):
            tm.open("S/c", names=[rule])
        with self.assertRaisesRegex(tm.InvalidArgumentError, "need names or as_"):
            tm.open("S/c", numbers={"heads": 1})
        with self.assertRaisesRegex(tm.InvalidArgumentError, "a list of rules was expected"):
            tm.open("S/c", names="rules.json")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "two ways to rename"):
            tm.load({"w": w}, "S/c", names=[rule], key_map=[])
        with tm.open("S/c", names=[rule], numbers={"heads": 1}) as checkpoint:
            expected = w.reshape(1, 3, 2, 4).swapaxes(1, 2).reshape(6, 4)
            self.assertTrue((checkpoint["q"][...] == expected).all())
            self.assertEqual(checkpoint.common["step"], 3)
            with self.assertRaises(tm.KeyNotFoundError):
                checkpoint["w"]
            again = pickle.loads(pickle.dumps(checkpoint))
            self.assertTrue((again["q"][1:3] == expected[1:3]).all())
        loaded = {"q": numpy.zeros((6, 4), "f4"), "step": 0}
        tm.load(loaded, "S/c", names=[rule], numbers={"heads": 3})
        self.assertTrue((loaded["q"] == w).all())
        self.assertEqual(loaded["step"], 3)

    def test_slots_and_bases(self):
        w = numpy.arange(6, dtype="f4").reshape(2, 3)
        tm.save({"w": w, "m.w.avg": 2 * w, "main.w": 3 * w, "other": w[0]}, "S/c")
        rule = {"from": "w : a b", "to": "x : b a"}
        others = {"version": 1, "others": "drop"}
        slots = [{"from": "m.{key}.avg", "to": "opt.{key}"}, {"from": "main.{key}", "to": "{key}", "when": {"main": 1}}]
        for main, shown in ((0, w), (1, 3 * w)):
            names = {**others, "rules": [rule], "slots": slots, "numbers": {"main": main}}
            with tm.open("S/c", names=names) as checkpoint:
                self.assertEqual(checkpoint.keys(), ["opt.x", "x"])
                self.assertTrue((checkpoint["x"][...] == shown.T).all())
                self.assertTrue((checkpoint["opt.x"][...] == 2 * w.T).all())
        for slots_of, rule_of, keys in (("only", "m", ["opt.x"]), ("none", "w", ["x"])):
            names = {**others, "rules": [{**rule, "slots": slots_of}], "slots": slots[:1]}
            with tm.open("S/c", names=names) as checkpoint:
                self.assertEqual(checkpoint.keys(), keys, rule_of)
        for slot, why in (({"from": "m.avg", "to": "{key}"}, "must have {key} once"),
                          ({"from": "{key}.{key}", "to": "{key}"}, "must have {key} once"),
                          ({"from": "m.{l}.{key}", "to": "{key}"}, "other braces"),
                          ({"from": "{key}", "to": "x.{key}"}, "the tensor itself"),
                          ({"from": "m.{key}"}, '"to" is missing'), ({"to": "m.{key}"}, '"from" is missing'),
                          ({"from": "m.{key}", "to": "{key}", "too": 1}, 'unknown field "too"'),
                          ([], "expected an object"), ({"from": ["m.{key}"] * 33, "to": "x.{key}"}, "more than 32 slots")):
            with self.assertRaisesRegex(tm.InvalidArgumentError, why):
                tm.open("S/c", names={**others, "rules": [rule], "slots": [slot]})
        with self.assertRaisesRegex(tm.InvalidArgumentError, '"slots" must be "only" or "none"'):
            tm.open("S/c", names=[{**rule, "slots": "all"}])
        # A map may have three others below it, and no more.
        names = {**others, "rules": [{"from": "w3 : a b", "to": "w4 : b a"}]}
        for depth in (3, 2, 1):
            before = {**others, "rules": [{"from": f"w{depth - 1 or ''} : a b", "to": f"w{depth} : b a"}]}
            inner = names
            while "base" in inner:
                inner = inner["base"]
            inner["base"] = before
        with tm.open("S/c", names=names) as checkpoint:
            self.assertEqual(checkpoint.keys(), ["w4"])
            self.assertTrue((checkpoint["w4"][...] == w).all())
            extents = json.loads(checkpoint.files().read("extents/w4.json"))
            self.assertEqual(extents["put_together_from"], ["w"])
        with self.assertRaisesRegex(tm.InvalidArgumentError, "more than 3 maps in one another"):
            tm.open("S/c", names={**others, "rules": [], "base": names})
        # Cells that the first map fills with zeros are in no chunk.
        pad = {**others, "rules": [{"from": "w : a b", "to": "p : (a + z) b", "unused": ["z"], "sizes": {"z": 1}}]}
        with self.assertRaisesRegex(tm.UnsupportedError, "q would be made of p, which another name map fills with zeros"):
            tm.open("S/c", names={**others, "base": pad, "rules": [{"from": "p : a b", "to": "q : b a"}]})
        with tm.open("S/c", names={**others, "base": pad, "rules": [{"key": "p", "to": "q"}]}) as checkpoint:
            self.assertTrue((checkpoint["q"][...] == numpy.concatenate([w, numpy.zeros((1, 3), "f4")])).all())
        with self.assertRaisesRegex(tm.InvalidArgumentError, "no rule uses the number misspelled"):
            tm.open("S/c", names=names, numbers={"misspelled": 1})

    def test_commands_take_maps(self):
        w = numpy.arange(24, dtype="f4").reshape(6, 4)
        tm.save({"w": w, "b": w[0]}, "S/c")
        names = {"version": 1, "rules": [{"from": "w : (g q) d", "to": "x : q g d", "sizes": {"g": "groups"}},
                                         {"key": "b", "to": "bias"}]}
        with open("rules.json", "w") as file:
            json.dump(names, file)
        how = ("--map", "rules.json", "--set", "groups=3")
        expected = w.reshape(3, 2, 4).swapaxes(0, 1)
        support.run("export", "S/c", "out", "--to", "npy", *how)
        self.assertTrue((numpy.load("out/x.npy") == expected).all())
        support.run("import", "S/c", "S/imported", *how, "--ranks", "3")
        with tm.open("S/imported") as checkpoint:
            self.assertTrue((checkpoint["x"][...] == expected).all())
            self.assertEqual(checkpoint.keys(), ["bias", "x"])
        support.run("diff", "S/c", "S/imported", *how)
        support.run("load", "S/c", "--ranks", "2", "--shard", "cols", "--compare", "S/imported", *how)
        shown = support.run("map", "check", "rules.json", "S/c", "--set", "groups=3")
        self.assertIn("x  f32 [2, 3, 4]  <- w : (g q) d", shown)
        self.assertIn("bias  f32 [4]  <- b", shown)
        shown = json.loads(support.run("map", "check", "rules.json", "S/c", "--set", "groups=3", "--json"))
        self.assertEqual([t["shape"] for t in shown["tensors"]], [[4], [2, 3, 4]])


if __name__ == "__main__":
    unittest.main()
