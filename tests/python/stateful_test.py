# SPDX-License-Identifier: Apache-2.0
"""Objects with state_dict() and load_state_dict() in what tm.save and tm.load are given."""

import collections
import shutil
import unittest

import support
import tensormount as tm
from tensormount.testing import threads

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(str(error))


class Loader:
    """As a data loader or scheduler: plain values only."""

    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Model(Loader):
    def __init__(self, value=0.0):
        self.w = np.full((4, 3), value, "f4")

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        assert state["w"] is self.w  # Filled in place.


class Broken(Loader):
    def state_dict(self):
        raise RuntimeError("no state today")


class Stateful(support.Folder):
    def setUp(self):
        super().setUp()
        shutil.rmtree("S", ignore_errors=True)

    def test_states_come_back(self):
        saved = {"model": Model(2.0), "loaders": [Loader(3), Loader(4)], "own": tm.PerRank(Loader(5)), "step": 7}
        tm.save(saved, "S/step-1")
        into = {"model": Model(), "loaders": [Loader(), Loader()], "own": tm.PerRank(Loader()), "step": 0}
        given = dict(into)
        loaded = tm.load(into, "S/step-1")
        self.assertIs(loaded.state, into)
        self.assertEqual({key: into[key] for key in given if key != "step"}, {key: given[key] for key in given if key != "step"})
        self.assertTrue((into["model"].w == 2).all())
        self.assertEqual([one.at for one in into["loaders"]], [3, 4])
        self.assertEqual(into["own"].value.at, 5)
        self.assertEqual(into["step"], 7)
        # The stored names are those of the states.
        with tm.open("S/step-1") as checkpoint:
            self.assertEqual(checkpoint.keys(), ["model.w"])
            self.assertEqual(checkpoint.state()["loaders"], [{"at": 3}, {"at": 4}])

    def test_background_saves_and_loads_use_states_too(self):
        tm.async_save({"model": Model(2.0), "loader": Loader(3)}, "S/step-1").wait()
        into = {"model": Model(), "loader": Loader()}
        self.assertIs(tm.async_load(into, "S/step-1").wait().state, into)
        self.assertTrue((into["model"].w == 2).all())
        self.assertEqual(into["loader"].at, 3)

    def test_a_single_object_is_a_state_of_its_own(self):
        tm.save(Model(2.0), "S/step-1")
        into = Model()
        self.assertIs(tm.load(into, "S/step-1").state, into)
        self.assertTrue((into.w == 2).all())

    def test_other_containers_keep_their_type(self):
        tm.save({"loader": Loader(3), "ordered": collections.OrderedDict(b=1, a=2)}, "S/step-1")
        with tm.open("S/step-1") as checkpoint:
            ordered = checkpoint.state()["ordered"]
        self.assertEqual((type(ordered), list(ordered)), (collections.OrderedDict, ["b", "a"]))

    def test_a_failure_of_one_rank_fails_all(self):
        def save(group, rank):
            with self.assertRaisesRegex(Exception, "no state today"):
                tm.save({"loader": Broken() if rank else Loader()}, "S/never", group)
            tm.save({"loader": Loader(3)}, "S/step-1", group)
            with self.assertRaisesRegex(Exception, "no state today"):
                tm.load({"loader": Broken() if rank else Loader()}, "S/step-1", group)
            into = {"loader": Loader()}
            tm.load(into, "S/step-1", group)
            return into["loader"].at

        self.assertEqual(threads(save, 2), [3, 3])

    def test_lists_of_other_lengths_are_refused_before_the_load(self):
        tm.save({"model": Model(2.0), "loaders": [Loader(3), Loader(4)]}, "S/step-1")
        into = {"model": Model(), "loaders": [Loader()]}
        with self.assertRaisesRegex(tm.LayoutError, "loaders: this list holds states and has 1 items"):
            tm.load(into, "S/step-1")
        self.assertTrue((into["model"].w == 0).all())


if __name__ == "__main__":
    unittest.main()
