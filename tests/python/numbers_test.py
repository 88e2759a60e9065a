# SPDX-License-Identifier: Apache-2.0
"""Counts of values that saves take, and what a save does about NaNs and infinities.

TENSORMOUNT_TEST_SCALE multiplies the random cases (34: about 10,000), TENSORMOUNT_TEST_SEED repeats them.
"""

import os
import unittest

import ranks
import support
import tensormount as tm

try:
    import ml_dtypes
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(str(error))

CASES = int(300 * float(os.environ.get("TENSORMOUNT_TEST_SCALE", "1")))
SEED = int(os.environ.get("TENSORMOUNT_TEST_SEED", "0")) or int.from_bytes(os.urandom(4), "little")
TYPES = [np.dtype(name) for name in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")]
TYPES += [np.dtype(getattr(ml_dtypes, name)) for name in (
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")]


def random_array(random, dtype):
    """Random bits, so that every code of the type occurs, with runs of zeros and of special values."""
    shape = tuple(random.integers(0, 40, random.integers(0, 4)))
    bits = random.integers(0, 256, (*shape, dtype.itemsize), "u1")
    if dtype == np.dtype("?"):
        bits &= 1
    array = np.ascontiguousarray(bits).view(dtype).reshape(shape)
    kind = random.integers(4)
    if kind == 1:
        array = np.zeros_like(array)
    if kind == 2 and array.size:  # Most values are of a usual size.
        usual = random.standard_normal(shape) * 3
        with np.errstate(all="ignore"):
            usual = np.asarray(usual).astype("f4").astype(dtype)
        array = np.where(random.random(shape) < 0.9, usual, array).astype(dtype)
    return array


def expected(array):
    """The statistics, by NumPy."""
    if array.dtype.kind == "c":
        array = np.ascontiguousarray(array).reshape(-1).view(f"f{array.dtype.itemsize // 2}")
    if array.dtype.kind in "iub":
        largest = max((abs(int(x)) for x in array.reshape(-1)), default=None)
        return (array.size, int((array == 0).sum()), 0, 0, 0, None if largest is None else float(largest))
    with np.errstate(all="ignore"):
        wide = array.astype("f8")
    finite = np.abs(wide[np.isfinite(wide)])
    return (array.size, int((wide == 0).sum()), int(np.isnan(wide).sum()), int((wide == np.inf).sum()),
            int((wide == -np.inf).sum()), float(finite.max()) if finite.size else None)


class Counts(support.Folder):
    def test_every_type_is_counted_as_numpy_does(self):
        random = np.random.default_rng(SEED)
        for case in range(0, CASES, 20):
            state = {f"t{i}": random_array(random, TYPES[random.integers(len(TYPES))]) for i in range(20)}
            name = f"S/case-{case}"
            tm.save(state, name, page_hashes=bool(case % 40), placement=("auto", "rank-shard")[case % 3 == 0])
            with tm.open(name) as checkpoint:
                for key, array in state.items():
                    stats = checkpoint[key].stats
                    self.assertEqual(tuple(stats), expected(array), (SEED, name, key, array.dtype, array.shape))
            self.assertEqual(tm.verify(name)["damages"], 0)

    def test_any_sharding_has_the_same_counts(self):
        random = np.random.default_rng(SEED)
        for case in range(max(4, CASES // 20)):
            dtype = TYPES[random.integers(len(TYPES))]
            shape = tuple(random.integers(4, 30, 2))
            bits = random.integers(0, 256, (*shape, dtype.itemsize), "u1") & (1 if dtype == np.dtype("?") else 255)
            whole = np.ascontiguousarray(bits).view(dtype).reshape(shape)
            world, axis = 1 + case % 4, int(random.integers(2))
            cuts = [rank * shape[axis] // world for rank in range(world + 1)]

            def work(group, rank):
                box = [slice(None), slice(None)]
                box[axis] = slice(cuts[rank], cuts[rank + 1])
                begin = [0, 0]
                begin[axis] = cuts[rank]
                part = tm.Shards(shape, [(tuple(begin), np.ascontiguousarray(whole[tuple(box)]))])
                return tm.save({"w": part, "same": whole}, f"R/{case}", group=group)

            for outcome in ranks.threads(work, world):
                self.assertIsInstance(outcome, dict, (SEED, case, outcome))
            with tm.open(f"R/{case}") as checkpoint:
                for key in ("w", "same"):
                    self.assertEqual(tuple(checkpoint[key].stats), expected(whole), (SEED, case, key, dtype))

    def test_linked_data_keep_their_counts(self):
        w = np.arange(300_000, dtype="f4").reshape(300, 1000)
        w[7, 7] = np.nan
        for pages in (False, True):  # Page hashes lie between the leaves of a chunk and its counts.
            tm.save({"w": w, "n": np.zeros(3)}, f"L{pages}/one", page_hashes=pages)
            report = tm.save({"w": w, "n": np.ones(3)}, f"L{pages}/two", page_hashes=pages, statistics="off")
            self.assertGreater(report["reused_bytes"], 1_000_000)
            with tm.open(f"L{pages}/two") as checkpoint:
                self.assertEqual((checkpoint["w"].stats.nan, checkpoint["w"].stats.zeros), (1, 1))
                self.assertIsNone(checkpoint["n"].stats)
            self.assertEqual(tm.verify(f"L{pages}/two")["damages"], 0)

    def test_statistics_can_be_left_out(self):
        tm.save({"w": np.zeros(3)}, "O/one", statistics="off")
        self.assertIsNone(tm.open("O/one")["w"].stats)
        with self.assertRaisesRegex(tm.InvalidArgumentError, "needs statistics"):
            tm.save({"w": np.zeros(3)}, "O/two", statistics="off", nonfinite="refuse")
        with self.assertRaisesRegex(tm.UnsupportedError, "stats --full"):
            tm.save({"w": np.zeros(3)}, "O/two", statistics="full")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "basic"):
            tm.save({"w": np.zeros(3)}, "O/two", statistics="all")


class Guard(support.Folder):
    def test_refused_values_are_named_on_all_ranks(self):
        good = np.ones((8, 4), "f4")
        bad = good.copy()
        bad[5, 2] = np.nan
        tm.save({"w": good, "mask": good}, "G/step-30")

        def work(group, rank):
            mine = {"w": good, "mask": bad, f"own.{rank}": (bad if rank == 2 else good).copy()}
            return tm.save(mine, "G/step-31", group=group, nonfinite="refuse", nonfinite_exempt=["mask"])

        for error in ranks.threads(work, 3):
            self.assertIsInstance(error, tm.NonfiniteError)
            self.assertEqual((error.rank, error.key), (2, "own.2"))
            self.assertIn("tensor own.2: 1 NaN among the 32 values of [0:8, 0:4]", str(error))
        self.assertEqual([entry["checkpoint"] for entry in tm.Store("G").list()], ["step-30"])

    def test_warnings_reach_all_ranks(self):
        bad = np.array([1, np.inf], "f4")

        def work(group, rank):
            return tm.save({f"own.{rank}": bad}, "W/one", group=group, nonfinite="warn")

        for report in ranks.threads(work, 2):
            self.assertEqual(report["warnings"], [
                f"rank {rank}: tensor own.{rank}: 1 infinite among the 2 values of [0:2]" for rank in (0, 1)])

    def test_linked_data_are_refused_too(self):
        bad = np.full(300_000, np.nan, "f4")
        tm.save({"w": bad}, "B/one")
        tm.save({"w": bad}, "B/off", statistics="off", reuse="off")
        for base in ("B/one", "B/off"):
            with self.assertRaises(tm.NonfiniteError, msg=base):
                tm.save({"w": bad}, "B/two", nonfinite="refuse", reuse=os.path.basename(base))

    def test_a_base_without_counts_is_not_linked(self):
        good = np.ones(300_000, "f4")
        tm.save({"w": good}, "N/one", statistics="off")
        report = tm.save({"w": good}, "N/two", nonfinite="refuse")
        self.assertEqual(report["reused_bytes"], 0)
        self.assertIn("were not counted", report["note"])
        self.assertEqual(tm.open("N/two")["w"].stats.zeros, 0)


if __name__ == "__main__":
    unittest.main()
