# SPDX-License-Identifier: Apache-2.0
"""docs/map.schema.json says of a name map what the command says, as far as a schema can tell."""

import copy
import glob
import json
import os
import unittest

import jsonschema
import numpy

import support
import tensormount as tm

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)
RULE = {"from": "a.w : (g h) d", "to": "b.w : g h d", "sizes": {"h": 2}}
MAP = {
    "version": 1, "about": "for people", "others": "keep", "sizes": {"g": "heads / 2"},
    "numbers": {"heads": 4, "n": ["config.n", "common.args.n if common.args.m"]},
    "counts": {"l": "n"}, "needs": ["x.{l}.w", ["y", "z"]],
    "slots": [{"from": ["opt.{key}.m", "m.{key}"], "to": "{key}.m", "when": {"n": 1}}],
    "base": [{"prefix": "p.", "to": ""}],
    "family": "llama", "layout": "megatron", "detect": ["a"], "absent": ["b"], "guards": {"common.x": 1},
    "config": {"if": {"common.x": ["rope", None, 1.5]}, "same": [["numbers.n", "shape.b.0 or common.n"]],
               "values": {"model_type": "llama", "n": "=not common.y"}},
    "rules": [
        RULE, {"from": ["a : d", "b : e"], "to": "c : (d + e)", "unused": ["d"], "optional": True, "slots": "only"},
        {"from": "s : l d", "to": "x.{l}.w : d", "back": False, "when": {"n": 2}},
        {"alias": "q", "of": "b.w", "optional": True, "when": {"n": 1}},
        {"key": "k", "to": "k2"}, {"prefix": "p.", "to": "q."}, {"match": "*.a", "to": "*.b", "when": {"n": 1}},
        {"drop": "opt*", "when": {"n": 0}},
    ],
}


def changed(path, value):
    """MAP with another value at a path; without it, if the value is None."""
    found = copy.deepcopy(MAP)
    at = found
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return found


# Maps that the schema and the command refuse.
WRONG = [
    {}, [], 7, "rules", {"version": 1}, {"rules": []}, {"version": 2, "rules": []}, [7], [{}], [{"from": "a"}],
    [{"to": "a"}], [{"from": "a", "to": "b", "too": 1}], [{"from": [], "to": "b"}], [{"from": 1, "to": "b"}],
    [{"from": "a", "to": ["b"] * 65}], [{"drop": "a", "to": "b"}], [{"key": "a", "prefix": "b", "to": "c"}],
    [{"key": "a"}], [{"alias": "a"}], [{"alias": "a", "of": "b", "sizes": {}}], [{"alias": "a", "of": "b", "slots": "only"}],
    [{"drop": "a", "optional": True}], [RULE] * 1025,
    changed(["rules"], {}), changed(["rules", 0, "from"], None), changed(["rules", 0, "sizes", "h"], -2),
    changed(["rules", 0, "sizes", "h"], 2.5), changed(["rules", 0, "sizes", "3h"], 2), changed(["rules", 1, "unused"], "d"),
    changed(["rules", 1, "optional"], 1), changed(["rules", 1, "slots"], "all"), changed(["rules", 2, "back"], "no"),
    changed(["rules", 2, "when"], {"n": "2"}), changed(["rules", 2, "when"], []), changed(["rules", 4, "to"], 3),
    changed(["rules", 7, "keep"], "a"), changed(["others"], "copy"), changed(["sizes"], []), changed(["numbers"], 3),
    changed(["numbers", "heads"], -1), changed(["numbers", "n"], []), changed(["numbers", "n"], ["args.n"]),
    changed(["numbers", "n"], ["config.n if args.m"]), changed(["numbers", "a b"], 1), changed(["counts"], []),
    changed(["counts", "l"], 3), changed(["needs"], "x"), changed(["needs", 0], 3), changed(["slots"], {}),
    changed(["slots", 0, "from"], []), changed(["slots", 0, "to"], "m"), changed(["slots", 0, "to"], "{key}{key}"),
    changed(["slots", 0, "from"], "{key}.{l}"), changed(["slots", 0, "when"], {"n": True}), changed(["slots", 0, "of"], "x"),
    changed(["slots"], [MAP["slots"][0]] * 33), changed(["base"], 3), changed(["base"], {"rules": []}),
    changed(["family"], 3), changed(["detect"], "a"), changed(["absent"], [1]), changed(["guards"], {"x": 1}),
    changed(["guards"], {"common.x": "y"}), changed(["config", "values"], None), changed(["config", "values"], {"n": 1}),
    changed(["config", "if"], {"x": [1]}), changed(["config", "if"], {"common.x": []}),
    changed(["config", "if"], {"common.x": [[]]}), changed(["config", "more"], 1), changed(["more"], 1),
    changed(["config", "same"], [["numbers.n"]]), changed(["config", "same"], [["numbers.n", "n"]]),
    changed(["config", "values", "n"], "="), changed(["needs"], [[]]), changed(["numbers", "heads"], 1 << 63),
    changed(["guards"], {"common.x": 1 << 70}), changed(["sizes"], {"a": ""}), changed(["rules", 4, "key"], ""),
    changed(["rules", 5, "prefix"], ""), changed(["rules", 7, "drop"], ""), changed(["rules", 0, "from"], ""),
    changed(["slots", 0, "from"], "{key}"),
]
# Maps that only the command refuses.
TOLD_BY_THE_COMMAND = [
    [{"from": "a : (b", "to": "c : b"}], [{"from": "a.{l} : d", "to": "b.{l} : l d"}], [{"from": "a[.{l} : d", "to": "b : d"}],
    [{"alias": "a : d", "of": "b"}], [{"match": "*.*", "to": "*"}], changed(["counts"], {"i": "n"}),
    changed(["rules", 1, "unused"], ["x"]), changed(["config", "values", "n"], "=some.where"),
]


class Schema(support.Folder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with open(os.path.join(TREE, "docs", "map.schema.json"), encoding="utf-8") as file:
            schema = json.load(file)
        jsonschema.Draft202012Validator.check_schema(schema)
        cls.schema = jsonschema.Draft202012Validator(schema)
        tm.save({"w": numpy.zeros(2)}, "S/c")

    def accepts(self, rules):
        """Whether the command can read the map. Whether it fits the checkpoint is another error."""
        with open("rules.json", "w", encoding="utf-8") as file:
            json.dump(rules, file)
        try:
            support.run("map", "check", "rules.json", "S/c")
        except AssertionError as error:
            return "rules.json: name map: " not in str(error)
        return True

    def test_both_accept_maps_and_packs(self):
        packs = glob.glob(os.path.join(TREE, "index", "foreign", "packs", "*.json"))
        self.assertGreater(len(packs), 10)
        known = [MAP, MAP["rules"][:1], {"version": 1, "rules": []}, changed(["numbers", "n"], ["common.a b"])]
        for path in packs:
            with open(path, encoding="utf-8") as file:
                known.append(json.load(file))
        for rules in known:
            self.schema.validate(rules)
            self.assertTrue(self.accepts(rules), rules)

    def test_both_refuse_what_is_wrong(self):
        for rules in WRONG:
            with self.subTest(rules=rules):
                # An empty list is a map that changes nothing.
                self.assertEqual(self.schema.is_valid(rules), rules == [])
                self.assertEqual(self.accepts(rules), rules == [])

    def test_the_command_refuses_more(self):
        for rules in TOLD_BY_THE_COMMAND:
            with self.subTest(rules=rules):
                self.schema.validate(rules)
                self.assertFalse(self.accepts(rules))


if __name__ == "__main__":
    unittest.main()
