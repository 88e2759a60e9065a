# SPDX-License-Identifier: Apache-2.0
"""What a load asks for and what is stored: names that rules change, what is absent, tensors that are one
here and two there, and what one rank alone finds wrong."""

import unittest

import ranks
import support
import tensormount as tm
from tensormount import _load

try:
    import numpy as np

    from save_test import equal, state_of, zeros_like
except ImportError as error:
    raise unittest.SkipTest(str(error))


class Renamed(support.Folder):
    def saved(self):
        groups = [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.8, 0.85)}]
        tm.save({"model": {"w": np.ones(2)}, "optim": {"groups": groups, "none": {}}, "step": 7,
                 "cfg": {"name": "a", "deep": {"x": [1, 2]}}, "rng": tm.PerRank(b"r")}, "S/values", replace=True)
        return groups

    def test_key_map_renames_plain_values(self):
        groups = self.saved()
        rules = [{"prefix": "optim.", "to": "optimizer."}, {"key": "step", "to": "extra.iteration"},
                 {"prefix": "cfg.", "to": ""}, {"prefix": "model.", "to": "net."}, {"key": "rng", "to": "extra.rng"}]
        request = {"net": {"w": np.zeros(2)}, "name": "", "deep": {},
                   "optimizer": {"groups": [{"lr": 0, "betas": None} for _ in groups], "none": {}},
                   "extra": {"iteration": 0, "rng": tm.PerRank(None)}}
        loaded = tm.load(request, "S/values", key_map=rules)
        self.assertEqual((request["net"].pop("w").tolist(), loaded.kept), ([1, 1], []))
        wanted = {"net": {}, "name": "a", "deep": {"x": [1, 2]}, "optimizer": {"groups": groups, "none": {}},
                  "extra": {"iteration": 7, "rng": tm.PerRank(b"r")}}
        self.assertEqual(request, wanted)
        # A name with dots, one of an item, one of a whole dict, of other numbers of items.
        for request, rules, wanted in (
            ({"extra.iteration": 0}, rules, {"extra.iteration": 7}),
            ({"optim": {"groups": [{"rate": 0}, {"betas": None}]}},
             [{"match": "optim.groups.*.lr", "to": "optim.groups.*.rate"}],
             {"optim": {"groups": [{"rate": 0.1}, {"betas": (0.8, 0.85)}]}}),
            ({"optimizer": None}, rules, {"optimizer": {"groups": groups, "none": {}}}),
            ({"all": {}}, [{"prefix": "cfg.", "to": "all.cfg."}], {"all": {"cfg": {"name": "a", "deep": {"x": [1, 2]}}}}),
            ({"cfg": {}}, [{"drop": "cfg.deep*"}], {"cfg": {"name": "a"}}),
            ({"optimizer": {"groups": [{}]}}, rules, {"optimizer": {"groups": groups}}),
            ({"step": 0}, [], {"step": 7}),
        ):
            tm.load(request, "S/values", key_map=rules)
            self.assertEqual(request, wanted)

    def test_rules_that_match_nothing_change_nothing(self):
        state = state_of()
        state |= {"in": {"": {"": 6}, "a.b": 7, "a": {"b": 8}}, "": np.ones(1), 1: np.ones(2), "1": np.ones(3)}
        tm.save(state, "S/odd-names")
        for rules in ([], [{"prefix": "nothing.", "to": "x."}]):
            request = zeros_like(state)
            loaded = tm.load(request, "S/odd-names", key_map=rules)
            self.assertTrue(equal(request, state), request)
            self.assertEqual(loaded.kept, [])

    def test_renamed_values_are_not_found_under_old_names(self):
        self.saved()
        for request, rules, missing in (
            ({"step": 0}, [{"key": "step", "to": "iteration"}], "step"),
            ({"cfg": {"name": 0}}, [{"drop": "cfg.*"}], "cfg.name"),
            ({"optim": {"groups": [{"lr": 0}, {"lr": 0}]}}, [{"prefix": "optim.", "to": "o."}], "optim.groups.0.lr"),
        ):
            with self.assertRaisesRegex(tm.KeyNotFoundError, f"not stored: {missing}"):
                tm.load(request, "S/values", key_map=rules)
        one, two = np.full(2, 1), np.full(2, 2)
        tm.save({"enc.w": one, "dec.w": two}, "S/coder", replace=True)

        def ask(*keys, rules, **options):
            request = {key: np.zeros(2, int) for key in keys}
            return [int(array[0]) for array in request.values()], tm.load(
                request, "S/coder", key_map=rules, **options), [int(array[0]) for array in request.values()]

        for rules in ([{"drop": "dec.*"}], [{"prefix": "dec.", "to": "x."}]):
            with self.assertRaises(tm.KeyNotFoundError) as caught:
                ask("enc.w", "dec.w", rules=rules)
            self.assertEqual(caught.exception.key, "dec.w")
            _, loaded, values = ask("enc.w", "dec.w", rules=rules, not_stored="return")
            self.assertEqual((loaded.not_stored, values), (["dec.w"], [1, 0]))
            for options in ({"not_stored": "ignore"}, {"strict_exempt": ["dec*"]}):
                _, loaded, values = ask("dec.w", rules=rules, **options)
                self.assertEqual((loaded.not_stored, values), ([], [0]))
        # Two that change places; and one by its new name beside its old one, which is another's now.
        swapped = [{"key": "enc.w", "to": "dec.w"}, {"key": "dec.w", "to": "enc.w"}]
        self.assertEqual(ask("enc.w", "dec.w", rules=swapped)[2], [2, 1])

    def test_key_map_renames_tied_tensors_and_paths(self):
        both = np.arange(3.0)
        tm.save({"m": {"embed": both, "head": both}}, "S/tied")
        request = {"embed": np.zeros(3), "head": np.zeros(3)}
        tm.load(request, "S/tied", key_map=[{"prefix": "m.", "to": ""}])
        self.assertEqual((request["embed"][2], request["head"][2]), (2, 2))
        with self.assertRaises(tm.KeyNotFoundError):
            tm.load({"m": {"head": np.zeros(3)}}, "S/tied", key_map=[{"drop": "m.embed"}])
        tm.save({1: np.full(3, 111), "1": np.full(3, 222)}, "S/number")
        request = {1: np.zeros(3, "i8")}
        tm.load(request, "S/number", key_map=[{"prefix": "other.", "to": ""}])
        self.assertEqual(request[1][0], 111)


class Absent(support.Folder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        tm.save({"w": np.ones(3), "none": {}, "list": [{"a": 1}]}, "S/absent")

    def test_every_absent_value_is_named(self):
        for request, names in (
            ({"x": {}}, ["x"]), ({"x": []}, ["x"]), ({"x": ()}, ["x"]), ({"x": {"y": {}}}, ["x.y"]), ({"w": {}}, ["w"]),
            ({"x": [{"lr": 1}, {"lr": 2, "n": 3}]}, ["x.0.lr", "x.1.lr", "x.1.n"]), ({"x": ({"a": [{}]},)}, ["x.0.a.0"]),
            ({"x": [[{"a": 1}], 2]}, ["x.0.0.a", "x.1"]), ({"x": [1, 2]}, ["x"]),
        ):
            before = repr(request)
            with self.assertRaises(tm.KeyNotFoundError) as caught:
                tm.load(request, "S/absent")
            self.assertEqual(caught.exception.key, names[0])
            self.assertEqual(tm.load(request, "S/absent", not_stored="return").not_stored, names)
            self.assertEqual(tm.load(request, "S/absent", strict_exempt=names).not_stored, [])
            self.assertEqual(repr(request), before)
        request = {"none": {}, "list": []}
        tm.load(request, "S/absent")
        self.assertEqual(request, {"none": {}, "list": [{"a": 1}]})

    def test_globs_match_like_those_of_the_library(self):
        names = ["a.b", "a/b", "a[1]", "a\\b", "ab", "ä.b"]
        for glob in ("a*", "a?b", "a[[]*", "a\\*", "a\\\\b", "[!a]*", "*"):
            absent = tm.load({name: np.zeros(1) for name in names}, "S/absent", not_stored="return",
                             strict_exempt=[glob]).not_stored
            self.assertEqual(sorted(_load.unmatched(names, [glob])), sorted(absent), glob)

    def test_unreadable_value_is_never_put_into_a_state(self):
        with support.stored_as("n.odd", '{"numpy":["int8",1000]}'):
            tm.save({"n": {"good": 1, "odd": 2}, "w": np.ones(2)}, "S/odd")
        for request in ({}, {"n": {}}, {"n": None}):
            before = repr(request)
            with self.assertRaisesRegex(tm.LayoutError, "cannot be read: n.odd"):
                tm.load(request, "S/odd", not_stored="ignore")
            self.assertEqual(repr(request), before)
        request = {"n": {"good": 0}}
        tm.load(request, "S/odd")
        self.assertEqual(request, {"n": {"good": 1}})


class Tied(support.Folder):
    """One tensor under two keys in the request, two in the checkpoint."""

    def test_tied_request_for_different_tensors_is_refused(self):
        one, two = np.full(3, 1.0), np.full(3, 2.0)
        tm.save({"a": one, "b": two, "c": one.copy(), "d": one.astype("f4")}, "S/two")
        support.write_safetensors("two.safetensors", {
            key: ("F64", (3,), array.tobytes()) for key, array in (("a", one), ("b", two), ("c", one))})
        for source in ("S/two", "two.safetensors"):
            into = np.zeros(3)
            with self.assertRaisesRegex(tm.LayoutError, "a and b share memory in the request") as caught:
                tm.load({"a": into, "b": into}, source)
            self.assertEqual(caught.exception.key, "b")
            self.assertFalse(into.any())
            # One of them is left out, the same twice, one is not there.
            for request, rules in (({"a": into, "b": into}, [{"drop": "a"}]), ({"a": into, "c": into}, None),
                                   ({"b": into, "x": into}, None)):
                into[:] = 0
                tm.load(request, source, key_map=rules)
                self.assertEqual(into[0], 1 if "c" in request else 2)
        with self.assertRaisesRegex(tm.LayoutError, "a and d share memory in the request"):
            tm.load({"a": into, "d": into}, "S/two", rules=[tm.Rule(convert=True)])
        # Rows that are asked for are compared where a file has no digests.
        rows = np.arange(12.0).reshape(4, 3)
        other = rows.copy()
        other[3] += 1
        support.write_safetensors("rows.safetensors", {
            key: ("F64", (4, 3), array.tobytes()) for key, array in (("a", rows), ("b", other))})
        for first, fine in ((0, True), (1, True), (2, False)):
            part = tm.Shards((4, 3), [((first, 0), np.zeros((2, 3)))])
            if fine:
                tm.load({"a": part, "b": part}, "rows.safetensors")
                np.testing.assert_array_equal(part.parts[0].data, rows[first : first + 2])
            else:
                with self.assertRaises(tm.LayoutError):
                    tm.load({"a": part, "b": part}, "rows.safetensors")


class OneRank(support.Folder):
    """What one of two ranks finds wrong before anything is sent, and the other one hears of it."""

    def told(self, call, kind, said):
        outcomes = ranks.threads(call, 2)
        for rank, outcome in enumerate(outcomes):
            self.assertIsInstance(outcome, kind, outcomes)
            self.assertRegex(str(outcome), said)
            self.assertIn(getattr(outcome, "rank", None), (1, None) if rank else (1,), outcomes)
        self.assertTrue(any("rank 1" in str(outcome) for outcome in outcomes))

    def test_wrong_arguments_are_refused_on_all_ranks(self):
        state = {"w": np.ones(2)}
        tm.save(state, "S/w")
        for options, said in (({"replace": "no"}, "replace="), ({"path": "S/\0"}, "must not contain NUL"), ({"objects": {"o": 5}}, "object o")):
            def save(group, rank, options=options):
                given = dict(options) if rank else {}
                return tm.save(state, given.pop("path", "S/never"), group, **given)

            self.told(save, tm.InvalidArgumentError, said)
        for options, said in (({"strict_exempt": "w*"}, r"strict_exempt='w\*': a list"), ({"source": "\0"}, "must not contain NUL"),
                              ({"verify": "x"}, "verify="), ({"objects": "o"}, "objects=")):
            def load(group, rank, options=options):
                given = dict(options) if rank else {}
                return tm.load({"w": np.zeros(2)}, given.pop("source", "S/w"), group, **given)

            self.told(load, tm.InvalidArgumentError, said)

        def by_saver(group, rank):
            with tm.Saver(group) as saver:
                saver.save(state, "S/never", replace="no" if rank else False).wait(ranks.LIMIT)

        self.told(by_saver, tm.Error, "replace=|rank 1")
        self.assertEqual([entry["checkpoint"] for entry in tm.Store("S").list()], ["w"])

    def test_absent_values_of_one_rank_are_reported(self):
        tm.save({"w": np.ones(2), "n": 1}, "V/values")
        into = np.zeros(2)

        def load(group, rank):
            tm.load({"w": into, **({"m": 0} if rank else {"n": 0})}, "V/values", group)

        self.told(load, tm.KeyNotFoundError, "not stored: m")
        self.assertFalse(into.any())

    def test_values_of_single_ranks_come_from_the_lowest(self):
        """Though each has a structure of its own, by whatever hash; a rank may have none."""
        for number in range(4):
            for first in (0, 1):
                def save(group, rank, number=number, first=first):
                    state = {f"only-{number}-{rank}": np.ones(rank + 1)}
                    if rank >= first:
                        state |= {"n": {"same": 1}, "rng": tm.PerRank(rank)}
                    tm.save(state, "V/each", group, replace=True)

                self.assertEqual(ranks.threads(save, 3), [None] * 3)
                with tm.open("V/each") as checkpoint:
                    state = checkpoint.state()
                self.assertEqual((state["rng"], state["n"]), (tm.PerRank(first), {"same": 1}))


if __name__ == "__main__":
    unittest.main()
