# SPDX-License-Identifier: Apache-2.0
"""`tm.refit`: targets get the values of the new checkpoint, only tensors that differ are read, and mistakes are errors
before anything is read."""

import unittest
from unittest import mock

import support
import tensormount as tm
from tensormount import _load, _refit

try:
    import numpy
    import torch
except ImportError as error:
    raise unittest.SkipTest(str(error))


def weights(generator, count=8):
    """Tensors of several dtypes by key."""
    kinds = (torch.float32, torch.bfloat16, torch.int32)
    return {f"layers.{i}.w": torch.randint(-99, 99, (4 + i, 6), generator=generator).to(kinds[i % 3]) for i in range(count)}


def copies(state):
    return {key: one.clone() for key, one in state.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class Refit(support.Folder):
    def setUp(self):
        self.generator = torch.Generator().manual_seed(support.seed())
        self.old = weights(self.generator)
        tm.save(self.old, "STORE/old", replace=True)

    def changed(self, *numbers):
        """The state dict with other values in these layers, saved as STORE/new."""
        new = copies(self.old)
        for i in numbers:
            new[f"layers.{i}.w"] += 1
        tm.save(new, "STORE/new", replace=True)
        return new

    def read_by_load(self):
        """Patches the load so that it notes the keys of each request."""
        requests = []
        real = _load.load_with

        def noted(request, *arguments, **options):
            requests.append(list(request))
            return real(request, *arguments, **options)

        return requests, mock.patch.object(_load, "load_with", noted)

    def test_random_changes_are_read_and_nothing_else(self):
        random, seed = support.seeded()
        for number in range(support.scaled(10)):
            picked = sorted(random.sample(range(8), random.randint(0, 8)))
            new = self.changed(*picked)
            held = copies(self.old)
            with self.subTest(seed=seed, number=number, picked=picked):
                requests, patched = self.read_by_load()
                with patched:
                    found = tm.refit(held, "STORE/old", "STORE/new")
                self.assertTrue(equal(held, new))
                keys = [f"layers.{i}.w" for i in picked]
                self.assertEqual(found.keys, keys)
                self.assertEqual(requests, [keys] if keys else [])
                self.assertEqual(found.unchanged, [key for key in self.old if key not in keys])
                self.assertEqual(found.nbytes, sum(new[key].numel() * new[key].element_size() for key in keys))
                with tm.open("STORE/new") as checkpoint:
                    self.assertEqual((found.uuid, found.path), (checkpoint.uuid, checkpoint.path))
                if keys:
                    self.assertEqual(found.report["bytes_wanted"], found.nbytes)

    def test_opened_checkpoints_modules_nested_states_and_arrays(self):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        tm.save(model.state_dict(), "STORE/old", replace=True)
        other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        with torch.no_grad():
            other[0].bias.copy_(model[0].bias)
        tm.save(other.state_dict(), "STORE/new", replace=True)
        with tm.open("STORE/old") as old, tm.open("STORE/new") as new:
            found = tm.refit(model, old, new)
        self.assertEqual(found.keys, ["0.weight"])
        self.assertTrue(torch.equal(model[0].weight, other[0].weight))
        tm.save({"a": {"b": numpy.ones(3)}, "step": 1}, "STORE/old", replace=True)
        tm.save({"a": {"b": numpy.full(3, 2.0)}, "step": 2}, "STORE/new", replace=True)
        held = {"a": {"b": numpy.ones(3)}, "step": 1}
        self.assertEqual(tm.refit(held, "STORE/old", "STORE/new").keys, ["a.b"])
        self.assertEqual((held["a"]["b"].tolist(), held["step"]), ([2.0] * 3, 1))

    def test_tied_targets_are_filled(self):
        table = torch.arange(6.0)
        tm.save({"embed": table, "head": table}, "STORE/old", replace=True)
        later = table + 1
        tm.save({"embed": later, "head": later}, "STORE/new", replace=True)
        tied = table.clone()
        self.assertEqual(tm.refit({"embed": tied, "head": tied}, "STORE/old", "STORE/new").keys, ["embed"])
        self.assertTrue(torch.equal(tied, later))
        apart = {"embed": table.clone(), "head": table.clone()}  # Tied in the checkpoint only.
        tm.refit(apart, "STORE/old", "STORE/new")
        self.assertTrue(torch.equal(apart["embed"], later) and torch.equal(apart["head"], later))
        tm.save({"embed": later, "head": later + 1}, "STORE/new", replace=True)
        tm.save({"embed": table, "head": table.clone()}, "STORE/old", replace=True)
        with self.assertRaisesRegex(tm.LayoutError, "embed and head share memory"):
            tm.refit({"embed": tied, "head": tied}, "STORE/old", "STORE/new")

    def test_mistakes_are_errors_before_anything_is_read(self):
        new = self.changed(1)
        held = copies(self.old)

        def refused(kind, words, targets, old="STORE/old", new="STORE/new", **options):
            before = copies(held)
            with self.assertRaisesRegex(kind, words):
                tm.refit(targets, old, new, **options)
            self.assertTrue(equal(held, before))

        refused(tm.KeyNotFoundError, "new: not stored: more", {**held, "more": torch.zeros(1)})
        tm.save({key: one for key, one in self.old.items() if key != "layers.3.w"}, "STORE/less", replace=True)
        refused(tm.KeyNotFoundError, "less: not stored: layers.3.w; the targets must hold", held, old="STORE/less")
        refused(tm.LayoutError, r"layers.0.w: the target is f32 \[4, 5\], .* is f32 \[4, 6\]",
                {**held, "layers.0.w": torch.zeros(4, 5)})
        refused(tm.LayoutError, r"layers.0.w: the target is f64", {**held, "layers.0.w": torch.zeros(4, 6).double()})
        refused(tm.CheckpointNotFoundError, "nothing", held, new="STORE/nothing")
        refused(tm.InvalidArgumentError, "refit has no option rules: use load", held, rules=[tm.Rule("*", convert=True)])
        refused(TypeError, "no option colour", held, colour=1)
        with tm.open("STORE/new") as opened:
            tm.save({**new, "layers.1.w": new["layers.1.w"] * 2}, "STORE/new", replace=True)
            with self.assertRaisesRegex(tm.StaleError, "replaced while it was read"):
                tm.refit(copies(self.old), "STORE/old", opened)

    def test_tensors_without_digests_count_as_changed(self):
        for name, values in (("a", self.old), ("b", self.old)):
            raw = {key: ("F32", list(one.shape), one.float().numpy().tobytes()) for key, one in values.items()}
            support.write_safetensors(f"{name}.safetensors", raw)
        held = {key: one.float() for key, one in self.old.items()}
        found = tm.refit(held, "a.safetensors", "b.safetensors")
        self.assertEqual((len(found.keys), found.unchanged, found.uuid), (8, [], None))

    def test_mapped_tensors_compare_the_stored_tensors_they_come_from(self):
        rules = {"version": 1, "rules": [
            {"from": "layers.{i}.w : a (l + r)", "to": ["left.{i} : a l", "right.{i} : a r"], "sizes": {"l": 2, "r": 4}}]}
        new = self.changed(2, 5)
        held = {f"left.{i}": self.old[f"layers.{i}.w"][:, :2].clone() for i in range(8)}
        found = tm.refit(held, "STORE/old", "STORE/new", names=rules)
        self.assertEqual(found.keys, ["left.2", "left.5"])
        for i in range(8):
            self.assertTrue(torch.equal(held[f"left.{i}"], new[f"layers.{i}.w"][:, :2]))
        with tm.open("STORE/old", names=rules) as one, tm.open("STORE/old", names=dict(rules, others="drop")) as other:
            # Another name map may show other cells.
            first, second = (_refit.fingerprints(checkpoint, _refit.facts(checkpoint, ["left.0"])) for checkpoint in (one, other))
            self.assertNotEqual(first["left.0"], second["left.0"])
            self.assertIsNotNone(first["left.0"])

    def test_ranks_refit_their_own_targets_and_fail_together(self):
        new = self.changed(0, 3)

        def both(*targets):
            def rank(group, number):
                try:
                    return tm.refit(targets[number], "STORE/old", "STORE/new", group)
                except tm.Error as error:
                    return error

            return tm.testing.threads(rank, 2)

        halves = [{key: self.old[key].clone() for key in list(self.old)[i::2]} for i in range(2)]
        self.assertEqual([one.keys for one in both(*halves)], [["layers.0.w"], ["layers.3.w"]])
        self.assertTrue(equal({**halves[0], **halves[1]}, new))
        results = both({"layers.1.w": self.old["layers.1.w"].clone()}, {"layers.3.w": self.old["layers.3.w"].clone()})
        self.assertEqual([one.keys for one in results], [[], ["layers.3.w"]])  # One rank has nothing to read.
        for one in both({"layers.1.w": self.old["layers.1.w"].clone()}, {"nowhere": torch.zeros(1)}):
            self.assertIn("nowhere", str(one))

    def test_the_example_of_serving_md_runs(self):
        support.check_examples(self, "serving.md", "tests/python/refit_test.py")


if __name__ == "__main__":
    unittest.main()
