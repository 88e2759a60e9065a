# SPDX-License-Identifier: Apache-2.0
"""Saving and loading by one process: what comes back, what is refused, waits. Its end, signals and forks:
process_test.py."""

import asyncio
import contextlib
import collections
import ctypes
import functools
import gc
import json
import math
import os
import pickle
import signal
import subprocess
import threading
import time
import unittest
from unittest import mock

import ranks
import support
import tensormount as tm
from tensormount import _abi, _tasks

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(str(error))

LIMIT = 120.0  # Seconds after which a wait is a failure.


def equal(a, b):
    """As ==, for arrays and NaN too, and types count."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b


def state_of(seed=0):
    random = np.random.default_rng(seed)
    shared = random.standard_normal((3, 5)).astype("f4")
    return {
        "model": {"a.b": random.integers(0, 99, (4, 6)), "w": shared, "tied": shared},
        "optim": {"state": {0: {"m": random.standard_normal(7)}, 1: {"m": np.empty((0, 3), "f2")}},
                  "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}]},
        "step": 1 << 70,
        "odd": collections.OrderedDict([("nan", math.nan), ("inf", -math.inf), ("none", None),
                                        ("bytes", b"\0\xff"), ("text", "größe/%"), (3, True)]),
        "scalar": np.array(2.5),
        "list": [np.arange(3), (np.arange(4), "x")],
        "complex": np.arange(4).astype("c8"),
        "empty": {},
    }


def zeros_like(state):
    if isinstance(state, np.ndarray):
        return np.zeros_like(state)
    if isinstance(state, dict):
        return type(state)((key, zeros_like(value)) for key, value in state.items())
    if isinstance(state, (list, tuple)):
        return type(state)(zeros_like(value) for value in state)
    return None if not isinstance(state, bool) else False


class RoundTrip(support.Folder):
    def test_state_round_trips(self):
        state = state_of()
        report = tm.save(state, "S/all")
        self.assertEqual(report["path"], "S/all")
        self.assertGreater(report["tensors"], 6)
        with tm.open("S/all") as checkpoint:
            back = checkpoint.state()
            self.assertEqual(checkpoint.uuid, report["uuid"])
            self.assertIn("optim.state.0.m", checkpoint)
            self.assertEqual(checkpoint.common["step"], 1 << 70)
            self.assertTrue(checkpoint.verify()["whole"])
        self.assertTrue(equal(back, state), back)
        self.assertIs(back["model"]["w"], back["model"]["tied"])

    def test_load_fills_tensors_in_place(self):
        state = state_of(1)
        tm.save(state, "S/place", metadata={"run": "x"}, objects={"o": b"same"},
                rank_objects={"rng": b"mine"})
        request = zeros_like(state)
        request["model"]["tied"] = request["model"]["w"]
        weights = request["model"]["w"]
        loaded = tm.load(request, "S/place", objects=["o", ("rng", (0,))])
        self.assertTrue(equal(request, state), request)
        self.assertIs(request["model"]["w"], weights)
        self.assertEqual(loaded.kept, [])
        self.assertEqual(loaded.objects, {("o", ()): b"same", ("rng", (0,)): b"mine"})
        self.assertEqual(loaded.metadata, {"run": "x"})
        self.assertEqual(loaded.uuid, tm.Store("S").latest()["uuid"])
        self.assertGreaterEqual(loaded.report["bytes_by_leaf"], 1)

    def test_counter_is_loaded_as_one_value(self):
        import collections

        tm.save({"seen": collections.Counter({3: 2, "x": 1})}, "S/counter")
        request = {"seen": collections.Counter({4: 9})}
        tm.load(request, "S/counter")
        self.assertEqual(request, {"seen": collections.Counter({3: 2, "x": 1})})
        self.assertIs(type(request["seen"]), collections.Counter)

    def test_part_of_a_state_loads(self):
        tm.save(state_of(2), "S/part")
        request = {"model": {"a.b": np.zeros((4, 6), "i8")}, "step": 0, "new": "stays"}
        loaded = tm.load(request, "S/part", strict_exempt=["new"])
        self.assertTrue(equal(request["model"]["a.b"], state_of(2)["model"]["a.b"]))
        self.assertEqual((request["step"], request["new"]), (1 << 70, "stays"))
        self.assertEqual(loaded.kept, ["state_dict['new']"])
        with self.assertRaises(tm.KeyNotFoundError) as raised:
            tm.load({"absent": np.zeros(3)}, "S/part")
        self.assertEqual(raised.exception.key, "absent")
        loaded = tm.load({"absent": np.zeros(3)}, "S/part", not_stored="return")
        self.assertEqual(loaded.not_stored, ["absent"])

    def test_ambiguous_keys_load_by_structure(self):
        tm.save({1: np.full(3, 111), "1": np.full(3, 222)}, "S/number")
        request = {1: np.zeros(3, "i8")}
        tm.load(request, "S/number")
        self.assertEqual(request[1][0], 111)
        tm.save({"a.b": np.full(3, 1), "a": {"b": np.full(3, 2)}}, "S/dots")
        request = {"a.b": np.zeros(3, "i8")}
        tm.load(request, "S/dots")
        self.assertEqual(request["a.b"][0], 1)
        both = np.arange(3.0)
        tm.save({"embed": both, "head": both}, "S/tied")
        request = {"embed": np.zeros(3), "head": np.zeros(3)}
        tm.load(request, "S/tied")
        self.assertEqual((request["embed"][2], request["head"][2]), (2, 2))
        # Tied here, and there under the other name alone, as Hugging Face has it.
        tm.save({"model.embed": both}, "S/one")
        into = np.zeros(3)
        tm.load({"lm_head": into, "model.embed": into}, "S/one")
        self.assertEqual(into[2], 2)

    def test_container_used_twice_loads_separately(self):
        tm.save({"a": [1], "b": [2], "x": {"k": 1}, "y": {"k": 2}}, "S/twice")
        numbers, words = [0], {"k": 0}
        request = {"a": numbers, "b": numbers, "x": words, "y": words}
        tm.load(request, "S/twice")
        self.assertEqual(request, {"a": [1], "b": [2], "x": {"k": 1}, "y": {"k": 2}})

    def test_shape_and_dtype_rules_apply(self):
        tm.save({"w": np.arange(12, dtype="f4").reshape(3, 4)}, "S/rules")
        with self.assertRaises(tm.LayoutError) as raised:
            tm.load({"w": np.zeros((3, 5), "f4")}, "S/rules")
        self.assertEqual(raised.exception.key, "w")
        wide = np.full((3, 5), 7, "f4")
        loaded = tm.load({"w": wide}, "S/rules", rules=[tm.Rule("w", grow="keep")])
        self.assertEqual(loaded.uncovered, [("w", (0, 4), (3, 1), False)])
        np.testing.assert_array_equal(wide[:, 4], 7)
        double = np.zeros((3, 4))
        loaded = tm.load({"w": double}, "S/rules", rules=[tm.Rule(convert=True)])
        np.testing.assert_array_equal(double, np.arange(12).reshape(3, 4))
        self.assertEqual(loaded.converted, ["w"])
        renamed = np.zeros((3, 4), "f4")
        tm.load({"model.w": renamed}, "S/rules", key_map=[{"key": "w", "to": "model.w"}])
        np.testing.assert_array_equal(renamed, double)

    def test_manual_shards_save_and_load(self):
        """A tensor cut into boxes and flat ranges, into others for the load, of NumPy and torch."""
        generator, seed = support.seeded()
        try:
            import torch
        except ImportError:
            torch = None

        def cut(shape, make):
            """Rows as boxes or as flat ranges of several parts."""
            begin, parts = 0, []
            while begin < shape[0]:
                rows = generator.randint(1, shape[0] - begin)
                where = (begin,) + (0,) * (len(shape) - 1)
                extent = (rows,) + shape[1:]
                if generator.random() < 0.5:
                    parts.append((where, make(extent)))
                else:
                    first, all_of_it = 0, math.prod(extent)
                    while first < all_of_it:
                        count = generator.randint(1, all_of_it - first)
                        parts.append((tm.Flat(first, where, extent), make((count,))))
                        first += count
                begin += rows
            return tm.Shards(shape, parts)

        for number in range(support.scaled(20)):
            shape = tuple(generator.randint(1, 6) for _ in range(generator.randint(1, 3)))
            whole = np.arange(math.prod(shape), dtype="f8").reshape(shape) + number
            saved = cut(shape, np.empty)
            for part in saved.parts:
                box = whole[tuple(map(slice, part.begin, np.add(
                    part.begin, part.flat.extent if part.flat else part.data.shape)))]
                part.data[...] = (box.reshape(-1)[part.flat.first :][: len(part.data)]
                                  if part.flat else box)
            with self.subTest(shape=shape, number=number, seed=seed):
                tm.save({"nested": {"w": saved}}, "S/by-hand", replace=True)
                with tm.open("S/by-hand") as checkpoint:
                    np.testing.assert_array_equal(checkpoint["nested.w"][...], whole)
                make = np.zeros
                if torch is not None and number % 2:
                    make = functools.partial(torch.zeros, dtype=torch.float64)
                into = cut(shape, make)
                tm.load({"nested": {"w": into}}, "S/by-hand")
                # Once more by what is known to be right.
                tm.save({"w": into}, "S/again", replace=True)
                with tm.open("S/again") as checkpoint:
                    np.testing.assert_array_equal(checkpoint["w"][...], whole)
        with self.assertRaises(tm.LayoutError) as caught:
            tm.save({"w": tm.Shards((4,), [((0,), np.zeros(3))])}, "S/hole")
        self.assertEqual((caught.exception.key, caught.exception.box), ("w", ((3,), (1,))))

    def test_strided_arrays_save_and_load(self):
        whole = np.arange(48.0).reshape(6, 8)
        tm.save({"a": whole[::2, 1::3], "b": whole.T, "c": whole[::-1]}, "S/strided")
        into = np.zeros((6, 8))
        request = {"a": into[::2, 1::3], "c": np.zeros((6, 8))[::-1]}
        tm.load(request, "S/strided")
        np.testing.assert_array_equal(into[::2, 1::3], whole[::2, 1::3])
        self.assertEqual(np.count_nonzero(into), np.count_nonzero(whole[::2, 1::3]))
        np.testing.assert_array_equal(request["c"], whole[::-1])

    def test_not_stored_policy_covers_tensors_and_values(self):
        """One policy for tensors and plain values, and nothing is touched before it is decided."""
        tm.save({"w": np.ones(3), "a": 1, "deep": {"b": [2, {"c": 3}], "t": [np.ones(2), 5]}}, "S/asked", replace=True)
        cases = [({"x": 0}, ["x"], "x"), ({"deep": {"z": None}}, ["deep.z"], "deep.z"),
                 ({"v": np.zeros(3)}, ["v"], "v"), ({"w": 0}, ["w"], r"w \(a tensor is stored under this name\)"),
                 ({"deep": {"t": 3}}, ["deep.t"], r"deep.t \(a tensor"),
                 ({"deep": {"b": [2, {"d": 0}]}}, ["deep.b.1.d"], "deep.b.1.d"),
                 ({"p": tm.PerRank(4)}, ["p"], "p")]
        for more, missing, said in cases:
            request = {"w": np.zeros(3), "a": 0, **more}
            asked = repr(more)
            for options in ({}, {"not_stored": "raise"}):
                with self.assertRaisesRegex(tm.KeyNotFoundError, said):
                    tm.load(request, "S/asked", **options)
            self.assertEqual((repr({key: request[key] for key in more}), request["a"]), (asked, 0))
            if isinstance(request["w"], np.ndarray):
                self.assertFalse(request["w"].any())
            loaded = tm.load(request, "S/asked", not_stored="return")
            self.assertEqual(loaded.not_stored, missing)
            self.assertEqual(request["a"], 1)
            for options in ({"not_stored": "ignore"}, {"strict_exempt": missing}, {"strict_exempt": ["*"]}):
                again = {"w": np.zeros(3), "a": 0, **more}
                self.assertEqual(tm.load(again, "S/asked", **options).not_stored, [], options)
                self.assertEqual(again["a"], 1)
        with self.assertLogs("tensormount", "WARNING") as logged:
            tm.load({"x": 0}, "S/asked", not_stored="log")
        self.assertIn("S/asked: requested, but not stored: x", logged.output[0])

    def test_names_of_an_inherited_base_stay_correct(self):
        """Its structures say nothing of what was saved anew: here a tie, there names."""
        one, two, tied = np.full(3, 1), np.full(3, 2), np.full(3, 7)
        tm.save({"m": {"a": one, "b": two}, "rest": {"x": one.copy()}}, "S/base")
        tm.save({"m": {"a": tied, "b": tied}}, "S/inherits", inherit="base")
        request = {"m": {"a": np.zeros(3, int), "b": np.zeros(3, int)}, "rest": {"x": np.zeros(3, int)}}
        tm.load(request, "S/inherits")
        self.assertEqual([int(v[0]) for v in (request["m"]["a"], request["m"]["b"], request["rest"]["x"])], [7, 7, 1])
        for number in range(6):
            tm.save({"a.b": np.full(3, 5), f"z{number}": one, "n": {}}, f"S/base-{number}")
            tm.save({"a.b": np.full(3, 8), "a": {"b": np.full(3, 9)}}, f"S/names-{number}", inherit=f"base-{number}")
            request = {"a.b": np.zeros(3, int), "a": {"b": np.zeros(3, int)}}
            tm.load(request, f"S/names-{number}")
            self.assertEqual((int(request["a.b"][0]), int(request["a"]["b"][0])), (8, 9))

    def test_unreadable_value_is_named_and_the_rest_loads(self):
        """As a newer version might have stored it: it is named, and the rest is there."""
        from tensormount import _tree

        plain = _tree.FlatTree.json_texts

        def other(flat):
            common, ranks = plain(flat)
            common["odd"] = '{"numpy.dtype":"<f1"}'
            return common, ranks

        _tree.FlatTree.json_texts = other
        try:
            tm.save({"w": np.ones(3), "n": {"good": 1}, "odd": 2}, "S/odd", replace=True)
        finally:
            _tree.FlatTree.json_texts = plain
        request = {"w": np.zeros(3), "n": {"good": 0}}
        loaded = tm.load(request, "S/odd")
        self.assertEqual((request["w"].sum(), request["n"]["good"]), (3, 1))
        with tm.open("S/odd") as checkpoint:
            for common in (loaded.common, checkpoint.common):
                self.assertEqual(common["n.good"], 1)
                self.assertIsInstance(common["odd"], tm.Unreadable)
                self.assertIn("<f1", common["odd"].reason)
            with self.assertRaisesRegex(tm.LayoutError, "S/odd: .*odd: .*<f1"):
                checkpoint.state()
        with self.assertRaisesRegex(tm.LayoutError, r"\['odd'\]: .*<f1"):
            tm.load({"odd": 0}, "S/odd")

    def test_unsupported_states_and_paths_are_refused(self):
        fine = {"w": np.zeros(3)}
        for state, kind, text in (
            ({"x": object()}, tm.UnsupportedError, "x"),
            ({"x": {1, 2}}, tm.UnsupportedError, "set"),
            ({"x": np.array(["a"], object)}, tm.UnsupportedError, "object"),
            ({"x": np.zeros(3, ">f4")}, tm.UnsupportedError, "big-endian"),
            ({"a\0b": 1}, tm.LayoutError, "NUL"),
            (7, tm.UnsupportedError, "int"),
        ):
            with self.subTest(text=text), self.assertRaises(kind) as raised:
                tm.save(state, "S/refused")
            self.assertIn(text, str(raised.exception))
        self.assertFalse(os.path.exists("S/refused"))
        tm.save(fine, "S/taken")
        with self.assertRaises(tm.AlreadyExistsError):
            tm.save(fine, "S/taken")
        tm.save(fine, "S/taken", replace=True)
        for options in ({"placement": "x"}, {"replicas": 3}, {"common_exempt": "abc"}):
            with self.assertRaises(tm.InvalidArgumentError):
                tm.save(fine, "S/options", **options)
        both = np.zeros(8)
        tm.save({"a": np.zeros(6), "b": np.zeros(6)}, "S/alias")
        with self.assertRaises(tm.LayoutError) as raised:
            tm.load({"a": both[:6], "b": both[2:]}, "S/alias")
        self.assertIn("share memory", str(raised.exception))
        with self.assertRaises(tm.CheckpointNotFoundError):
            tm.load({"a": both}, "S/nowhere")
        for call in (lambda: tm.save(fine, "S/x\0y"), lambda: tm.load(fine, "S/taken\0y"),
                     lambda: tm.Store("S").remove("taken\0y"), lambda: tm.verify("S/taken\0")):
            with self.assertRaises(tm.InvalidArgumentError):
                call()
        self.assertTrue(os.path.exists("S/taken"))

    def test_events_report_every_phase(self):
        seen = []
        tm.save({"w": np.zeros(3)}, "S/events", on_event=seen.append)
        phases = [event["phase"] for event in seen if event["kind"] == "end"]
        self.assertIn("write", phases)
        self.assertEqual(len(seen), 2 * len(phases))
        # What a hook raises is logged and disturbs nothing.
        with self.assertLogs("tensormount", "ERROR"):
            tm.save({"w": np.zeros(3)}, "S/hook", on_event=lambda event: 1 / 0)
        # Nor can it close what it is called by.
        group = tm.Group.single()
        with self.assertLogs("tensormount", "ERROR"):
            tm.save({"w": np.zeros(3)}, "S/close", group, on_event=lambda event: group.close())
        self.assertEqual(group.size, 1)


    def test_before_publish_hook_can_veto(self):
        """Sees what is durable and not there yet; what it raises is the verdict."""
        seen = []

        def look(report):
            self.assertEqual(report["files"], [name for name in report["files"] if name])
            self.assertFalse(os.path.exists("S/hooked"))
            seen.append(report)

        said = tm.save({"w": np.zeros(3)}, "S/hooked", before_publish=look, on_commit=seen.append)
        self.assertEqual([one["uuid"] for one in seen], [said["uuid"]] * 2)
        self.assertEqual(seen[0]["bytes_written_here"], seen[1]["bytes_written_here"])

        class Refused(Exception):
            pass

        def refuse(_):
            raise Refused("not this one")

        with self.assertRaises(Refused) as caught:
            tm.save({"w": np.ones(3)}, "S/hooked", replace=True, before_publish=refuse,
                    on_commit=seen.append)
        self.assertIsInstance(caught.exception.__cause__, tm.Error)
        self.assertIn("before_publish: Refused: not this one", str(caught.exception.__cause__))
        self.assertEqual(len(seen), 2)
        with tm.open("S/hooked") as checkpoint:
            self.assertEqual(checkpoint.uuid, said["uuid"])
        self.assertEqual(os.listdir("S/.staging"), [])
        # In the background likewise; and what on_commit raises changes nothing.
        job = tm.async_save({"w": np.ones(3)}, "S/other", before_publish=refuse)
        with self.assertRaises(Refused):
            job.wait(LIMIT)
        self.assertIsInstance(job.exception(), Refused)
        with self.assertLogs("tensormount", "ERROR"):
            tm.save({"w": np.ones(3)}, "S/other", on_commit=lambda report: 1 / 0)
        self.assertTrue(tm.verify("S/other")["whole"])

    def test_any_exception_in_a_hook_fails_the_save(self):
        class Mute(Exception):
            def __str__(self):
                raise RuntimeError

        class Bare(tm.Error):
            def __init__(self):
                pass

        for kind in (Mute, Bare, KeyboardInterrupt, SystemExit):
            def refuse(_, kind=kind):
                raise kind()

            with self.assertRaises(kind):
                tm.save({"w": np.zeros(3)}, "S/mute", before_publish=refuse)
            self.assertFalse(os.path.exists("S/mute"))

    def test_options_of_wrong_types_are_refused(self):
        for wrong in ({"replace": "no"}, {"validate": "false"}, {"page_hashes": None}, {"on_event": 5},
                      {"before_publish": "x"}, {"on_commit": 1}, {"producer": 5}, {"progress": "yes"},
                      {"common_exempt": [5]}):
            with self.subTest(wrong=wrong), self.assertRaises(tm.InvalidArgumentError):
                tm.save({"w": np.zeros(3)}, "S/types", **wrong)
            self.assertFalse(os.path.exists("S/types"))

    def test_unknown_options_are_refused(self):
        with self.assertRaisesRegex(TypeError, "no option plcement"):
            tm.save({"w": np.zeros(3)}, "S/x", plcement="auto")
        with self.assertRaisesRegex(TypeError, "no option strikt"):
            tm.load({"w": np.zeros(3)}, "S/x", strikt="raise")


class Jobs(support.Folder):
    def test_async_save_stages_and_commits(self):
        weights = np.full(100_000, 3.0)
        job = tm.async_save({"w": weights}, "S/job")
        job.wait_staged(LIMIT)
        weights[:] = 4
        report = job.wait(LIMIT)
        self.assertTrue(job.done())
        self.assertIs(job.wait(), report)
        self.assertIsNone(job.exception())
        self.assertEqual(job.progress()["state"], "committed")
        with tm.open("S/job") as checkpoint:
            self.assertEqual(float(checkpoint["w"][17]), 3.0)
        into = np.zeros(100_000)
        job = tm.async_load({"w": into}, "S/job")
        self.assertEqual(job.wait(LIMIT).report["bytes_wanted"], into.nbytes)
        self.assertGreaterEqual(job.bytes_read(), into.nbytes)
        np.testing.assert_array_equal(into, 3.0)
        with self.assertRaises(tm.UnsupportedError):
            pickle.dumps(job)

    def test_threads_of_saves_leave_signals_to_the_program(self):
        def blocked():  # By thread: whether SIGTERM cannot reach it.
            masks = {}
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended.
                    with open(f"/proc/self/task/{thread}/status") as file:
                        (mask,) = (int(line.split()[1], 16) for line in file if line.startswith("SigBlk:"))
                    masks[thread] = bool(mask >> (signal.SIGTERM - 1) & 1)
            return masks

        before, seen, hook = blocked(), {}, []

        def look(report):
            hook.append(str(threading.get_native_id()))
            seen.update(blocked())

        job = tm.async_save({"w": np.ones(1000)}, "S/signals", before_publish=look)
        job.wait(LIMIT)
        self.assertFalse([thread for thread, mask in blocked().items() if thread not in before and not mask])
        # A hook has the program's signals, for programs that it starts.
        self.assertFalse(seen[hook[0]])

    def test_jobs_can_be_awaited(self):
        async def both():
            saving = tm.async_save({"w": np.arange(1000)}, "S/await")
            await saving
            into = np.zeros(1000, "i8")
            await tm.async_load({"w": into}, "S/await")
            with self.assertRaises(tm.KeyNotFoundError):
                await tm.async_load({"absent": into}, "S/await")
            return into

        np.testing.assert_array_equal(asyncio.run(both()), np.arange(1000))

    def test_wait_times_out_and_can_be_repeated(self):
        """A wait whose time is over says so; the job goes on, and can be waited for again."""
        go_on = threading.Event()
        job = tm.async_save(
            {"w": np.zeros(3)}, "S/for-a-time", on_event=lambda event: go_on.wait(LIMIT)
        )
        try:
            with self.assertRaisesRegex(TimeoutError, "save S/for-a-time: not over after 0.2 s"):
                job.wait(timeout=0.2)
            with self.assertRaises(ValueError):
                job.wait(timeout=float("nan"))
            self.assertFalse(job.done())
        finally:
            go_on.set()
        job.wait_staged(timeout=LIMIT)
        self.assertEqual(job.wait(timeout=LIMIT)["tensors"], 1)

    def test_progress_counts_bytes(self):
        told = []
        state = {"w": np.arange(1 << 20)}
        tm.save(state, "S/progress", progress=lambda done, total: told.append((done, total)))
        self.assertEqual(told[-1], (8 << 20, 8 << 20))
        self.assertEqual(told, sorted(told))
        tm.load(state, "S/progress", progress=lambda done, total: told.append((done, total)))
        self.assertEqual(told[-1][1], 8 << 20)
        self.assertGreaterEqual(told[-1][0], 8 << 20)
        for call in (tm.verify, lambda path, **kw: tm.diff(path, path, **kw)):
            self.assertTrue(call("S/progress", progress=lambda done, total: told.append((done, total))))
        # What it raises when all is over changes nothing.
        over = threading.Event()

        def late(done, total):
            if over.is_set():
                raise ValueError

        with self.assertLogs("tensormount", "ERROR"):
            tm.save(state, "S/late", progress=late, on_commit=lambda report: over.set())
        self.assertTrue(os.path.exists("S/late"))
        # What it raises before ends the save.
        with self.assertRaises(ZeroDivisionError):
            tm.save(state, "S/never", progress=lambda done, total: 1 // 0,
                    on_event=lambda event: time.sleep(0.2))
        self.assertFalse(os.path.exists("S/never"))

    @support.needs("tqdm")
    def test_progress_bar_is_shown(self):
        import io
        from contextlib import redirect_stderr

        shown = io.StringIO()
        with redirect_stderr(shown):
            tm.save({"w": np.arange(1 << 20)}, "S/bar", progress=True)
        self.assertIn("save S/bar", shown.getvalue())
        self.assertIn("8.39M/8.39M", shown.getvalue())

    def test_job_is_a_context_manager(self):
        with tm.async_save({"w": np.zeros(3)}, "S/with") as job:
            pass
        self.assertTrue(job.done())
        with self.assertRaises(KeyboardInterrupt):
            with tm.async_save({"w": np.zeros(3)}, "S/interrupted"):
                raise KeyboardInterrupt

    def test_dropped_jobs_end(self):
        # A store of its own: what is in it is counted.
        for number in range(5):
            tm.async_save({"w": np.full(10_000, number)}, f"D/dropped-{number}")
        gc.collect()
        end = time.monotonic() + LIMIT
        while len(tm.Store("D").list() if os.path.exists("D/store.json") else []) < 5:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)
        for number in range(5):
            with tm.open(f"D/dropped-{number}") as checkpoint:
                self.assertEqual(int(checkpoint["w"][9_999]), number)

    def test_many_saves_leak_nothing(self):
        """Threads, descriptors and groups after many saves in one process."""
        group = tm.Group.single()
        state = {f"t{i}": np.full(64, i) for i in range(20)}

        def once():
            tm.save(state, "S/again", group, replace=True)
            tm.load(state, "S/again", group)
            tm.save(state, "S/alone", replace=True)

        for _ in range(3):
            once()
        gc.collect()
        before = len(os.listdir("/proc/self/fd")), threading.active_count(), self.threads()
        for _ in range(support.scaled(20)):
            once()
        gc.collect()
        after = len(os.listdir("/proc/self/fd")), threading.active_count(), self.threads()
        self.assertLessEqual(after[0], before[0])
        self.assertLessEqual(after[1:], before[1:])
        self.assertTrue(tm.save(state, "S/again", group, replace=True)["plan_reused"])
        group.close()
        with self.assertRaises(tm.StaleError):
            tm.save(state, "S/again", group, replace=True)

    @staticmethod
    def threads():
        return len(os.listdir("/proc/self/task"))


class Stores(support.Folder):
    def test_store_lists_pins_and_removes_checkpoints(self):
        for step in range(3):
            tm.save({"w": np.arange(5) + step, "step": step}, f"S/step-{step}")
        store = tm.Store("S")
        self.assertEqual([entry["checkpoint"] for entry in store.list()],
                         ["step-0", "step-1", "step-2"])
        self.assertEqual(store.latest()["checkpoint"], "step-2")
        for entry in store.list():
            self.assertEqual(entry["own_bytes"], entry["stored_bytes"])
            self.assertGreater(entry["stored_bytes"], 40)
            self.assertGreater(entry["created"], 1_700_000_000)
        self.assertEqual([one["event"] for one in tm.copy("S/step-1", "T")["checkpoints"]], ["copied"])
        copied = tm.copy(["S/step-0", "S"], "T", limit_rate=10**9)["checkpoints"]
        self.assertEqual([(one["checkpoint"], one["event"]) for one in copied],
                         [("step-0", "copied"), ("step-1", "there"), ("step-2", "copied")])
        self.assertEqual(tm.Store("T").latest()["uuid"], store.latest()["uuid"])
        self.assertTrue(tm.verify("T/step-0")["whole"])
        with self.assertRaises(tm.InvalidArgumentError):
            tm.copy("S/step-1", "S")
        with self.assertRaises(tm.NotFoundError):
            tm.copy("S/step-9", "T")
        found = tm.diff("S/step-0", "S/step-1", values=True)
        self.assertFalse(found["same"])
        self.assertEqual({one["key"] for one in found["mismatches"]}, {"w", "step"})
        store.remove("step-0")
        with self.assertRaises(tm.CheckpointNotFoundError):
            store.remove("step-0")
        self.assertTrue(any(".trash" in path for path in store.gc(grace=0)["removed"]))
        self.assertEqual(tm.wait_committed("S/step-1", timeout=5), store.list()[0]["uuid"])
        with self.assertRaises(tm.StaleError):
            tm.wait_committed("S/step-1", "0" * 32, timeout=5)
        with self.assertRaises(TimeoutError):
            tm.wait_committed("S/step-9", timeout=0.05)
        self.assertTrue(tm.validate({"w": np.zeros((3, 3))})["ok"])

    def test_spec_is_checked_without_the_job(self):
        def dump(group, rank, rows=(0, 4)):
            part = tm.Shards((8, 3), [((rows[rank], 0), np.zeros((4, 3), "f4"))])
            state = {"model": {"w": part}, "step": rank, "rng": tm.PerRank(rank)}
            return tm.dump_spec(state, "job.json", group), tm.validate(state, group)

        for rows, sound in (((0, 4), True), ((0, 3), False)):
            (text, report), (nothing, _) = ranks.threads(lambda group, rank, rows=rows: dump(group, rank, rows), 2)
            self.assertEqual(nothing, "")
            with open("job.json") as file:
                self.assertEqual(file.read(), text)
            done = subprocess.run([support.command(), "check", "job.json", "--json"], capture_output=True, text=True)
            self.assertEqual((done.returncode, report["ok"]), (0 if sound else 1, sound), done.stderr)
            judged = json.loads(done.stdout)
            self.assertEqual(judged["findings"], report["findings"])
        # What one rank finds wrong ends it on all.
        def wrong(group, rank):
            return tm.dump_spec({"w": {5} if rank else np.zeros(3)}, group=group)

        outcomes = ranks.threads(wrong, 2)
        self.assertIsInstance(outcomes[1], tm.Error)
        self.assertRegex(str(outcomes[0]), "rank 1.*set")

    def test_spec_is_written_atomically(self):
        state = {"w": np.zeros((4, 3), "f4")}
        with self.assertRaisesRegex(tm.UnsupportedError, "only a shell"):
            tm.dump_spec(state, "~/job.json")
        with open("earlier.json", "w") as file:
            file.write("earlier")
        os.symlink("earlier.json", "link.json")
        before = os.stat("earlier.json").st_ino
        with mock.patch("os.replace", side_effect=OSError("full")), self.assertRaisesRegex(OSError, "full"):
            tm.dump_spec(state, "link.json")
        with open("earlier.json") as file:
            self.assertEqual(file.read(), "earlier")
        text = tm.dump_spec(state, "link.json")
        with open("earlier.json") as file:
            self.assertEqual(file.read(), text)
        self.assertTrue(os.path.islink("link.json"))
        self.assertNotEqual(os.stat("earlier.json").st_ino, before)
        tm.dump_spec(state, "/dev/null")
        self.assertEqual([name for name in os.listdir(".") if "tmp" in name], [])

    def test_invalid_timeout_is_raised_on_all_ranks(self):
        for call in (tm.validate, lambda state, group, **times: tm.dump_spec(state, None, group, **times)):
            def wrong(group, rank, call=call):
                return call({"w": np.zeros(3)}, group, **({"liveness": -1} if rank else {"arrival": 20}))

            outcomes = ranks.threads(wrong, 2)
            self.assertIsInstance(outcomes[1], ValueError)
            self.assertRegex(str(outcomes[0]), "rank 1.*liveness=-1")

    def test_repair_restores_damaged_files(self):
        for step in (1, 2):
            tm.save({"w": np.arange(90_000, dtype="f4"), "step": step}, f"D/{step}")
        tm.copy("D/1", "E")
        tm.save({"w": np.zeros(90_000, "f4"), "step": 1}, "D/other", reuse="off")
        (name,) = [name for name in os.listdir("D/1/data") if os.stat(f"D/1/data/{name}").st_size >= 360_000]
        at = f"D/1/data/{name}"
        with open(at, "r+b") as file:
            file.seek(200_000)
            file.write(b"damage")
        # Of other bytes nothing is taken.
        self.assertFalse(tm.repair("D/1", "D/other")["whole"])
        before = os.stat(at).st_ino
        told = tm.repair("D/1", "E", dry_run=True)
        self.assertEqual((told["whole"], [file["file"] for file in told["files"]]), (True, [f"data/{name}"]))
        self.assertEqual(os.stat(at).st_ino, before)
        self.assertFalse(tm.verify("D/2")["whole"])
        calls = []
        told = tm.repair("D/1", "E/1", progress=lambda *done: calls.append(done))
        self.assertEqual((told["whole"], told["files"][0]["shared_with"], told["left"]), (True, ["2"], []))
        for step in (1, 2):
            self.assertTrue(tm.verify(f"D/{step}")["whole"])
            with tm.open(f"D/{step}") as checkpoint:
                self.assertTrue(np.array_equal(checkpoint["w"][...], np.arange(90_000, dtype="f4")))
        with self.assertRaises(tm.CheckpointNotFoundError):
            tm.repair("D/1", "E/none")
        with self.assertRaises(tm.InvalidArgumentError):
            tm.repair("D/1", "D/1")

    def test_prune_keeps_by_rules_and_pins(self):
        for step in range(6):
            tm.save({"w": np.arange(5) + step, "eval": {"loss": 1 / (step + 1)}}, f"R/step-{step}")
        store = tm.Store("R")
        names = lambda: [entry["checkpoint"] for entry in store.list()]
        listed = store.list()
        self.assertEqual([entry["pinned"] for entry in listed], [False] * 6)
        self.assertEqual([entry["file_bytes"] > 0 for entry in listed], [True] * 6)
        pin = store.pin("step-0", reason="for the paper", expires=time.time() + 3600)
        self.assertEqual((pin["name"], pin["reason"], pin["expired"]), ("step-0", "for the paper", False))
        self.assertEqual([one["uuid"] for one in store.pins()], [pin["uuid"]])
        with self.assertRaises(tm.PermissionDeniedError):
            store.remove("step-0")
        with self.assertRaises(tm.PermissionDeniedError):
            tm.save({"w": np.zeros(3)}, "R/step-0", replace=True)
        self.assertIsNone(store.policy)
        self.assertEqual(store.prune()["removed"], 0)
        store.policy = "last=2,best=eval.loss:max:2"
        self.assertEqual(store.policy, "last=2,best=eval.loss:max:2")
        dry = store.prune(dry_run=True)
        self.assertEqual([one["checkpoint"] for one in dry["checkpoints"] if not one["kept"]], ["step-3", "step-2"])
        self.assertEqual(len(names()), 6)
        self.assertEqual(store.prune()["removed"], 2)
        self.assertEqual(names(), ["step-0", "step-1", "step-4", "step-5"])
        report = tm.save({"w": np.zeros(3), "eval": {"loss": 0}}, "R/step-6", retain="policy", ephemeral=True)
        self.assertEqual((report["pruned"], report["not_pruned"]), ([], []))
        report = tm.async_save({"w": np.zeros(3), "eval": {"loss": 0}}, "R/step-7", retain="last=1").wait()
        self.assertEqual(sorted(report["pruned"]), ["step-1", "step-4", "step-5", "step-6"])
        store.unpin("step-0")
        with self.assertRaises(tm.CheckpointNotFoundError):
            store.unpin("step-0")
        store.pin("step-0")
        store.remove("step-0", force=True)
        self.assertEqual(names(), ["step-7"])
        store.policy = None
        self.assertIsNone(store.policy)
        for wrong in (lambda: store.prune("all"), lambda: tm.save({}, "R/none", retain="last=x"),
                      lambda: tm.save({}, "R/none", retain=3), lambda: store.pin("a/b")):
            with self.assertRaises(tm.InvalidArgumentError):
                wrong()
        with open("R/policy.json", "w") as file:
            file.write("{")
        with self.assertRaises(tm.DataLossError):
            store.prune("last=1")

    def test_export_writes_files(self):
        state = {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(4, dtype="i4")}
        tm.save(state, "E/export")
        said = tm.export("E/export", "out.safetensors")
        self.assertEqual((said["format"], said["files"], said["tensors"]), ("safetensors", 1, 2))
        with tm.open("out.safetensors") as checkpoint:
            np.testing.assert_array_equal(checkpoint["a"][...], state["a"])
        with self.assertRaises(tm.AlreadyExistsError):
            tm.export("E/export", "out.safetensors")
        said = tm.export("E/export", "out", format="npy", key_map=[{"prefix": "a", "to": "first"}],
                         progress=lambda done, total: None)
        np.testing.assert_array_equal(np.load("out/first.npy"), state["a"])
        tm.export("E/export", "parts", format="hf", hf_part_size=30)
        self.assertEqual(len([name for name in os.listdir("parts") if name.endswith(".safetensors")]), 2)
        for wrong in ({"format": "zip"}, {"hf_part_size": 5}, {"key_map": [{"prefx": "a"}]}):
            with self.assertRaises(tm.InvalidArgumentError):
                tm.export("E/export", "never", **wrong)
        with self.assertRaises(tm.CheckpointNotFoundError):
            tm.export("E/nothing", "never")
        self.assertFalse(os.path.exists("never"))

    def test_adopt_refuses_own_checkpoints(self):
        with self.assertRaisesRegex(tm.InvalidArgumentError, "nothing to adopt"):
            tm.save({"w": np.zeros(3)}, "A/mine", replace=True)
            tm.adopt("A/mine", "Other/mine")
        support.write_safetensors("one.safetensors", {"w": ("F32", (2,), bytes(8))})
        tm.adopt("one.safetensors", "A/adopted")
        # Nor is what another store refers to: its gc would not know of ours.
        with self.assertRaisesRegex(tm.InvalidArgumentError, "nothing to adopt"):
            tm.adopt("A/adopted", "Other/adopted")

    def test_cancelled_task_ends_the_verify_of_foreign_files(self):
        """Of archives, which are looked at entry by entry, and of plain files."""
        support.write_safetensors("plain.safetensors", {"w": ("F32", (2,), bytes(8))})
        np.savez("archive.npz", a=np.arange(5), b=np.arange(6))
        for path in ("plain.safetensors", "archive.npz"):
            self.assertTrue(tm.verify(path)["whole"])
            task = _tasks.Task()
            task.cancel()
            given = _abi.VerifyOptions(struct_size=ctypes.sizeof(_abi.VerifyOptions), task=task.address)
            whole = ctypes.c_int32()
            with self.assertRaises(tm.CancelledError):
                _tasks.read_json("tm_verify", path.encode(), ctypes.addressof(given), ctypes.addressof(whole))

    @unittest.skipUnless(os.access("/dev/fuse", os.W_OK), "no FUSE")
    def test_store_publishes_a_staging(self):
        store = tm.Store("P")
        tm.save({"w": np.zeros(3)}, "P/first")
        os.mkdir("mnt")
        support.run("mount", "P", "mnt")
        try:
            staging = os.path.join("mnt", ".staging", "second")
            os.mkdir(staging)
            with open(os.path.join(staging, "schema.json"), "w") as file:
                file.write('{"tensors": {"w": {"dtype": "f32", "shape": [4]}}}')
            with self.assertRaises(tm.DataLossError):
                store.publish("second")
            with open(os.path.join(staging, "tensors", "w"), "wb") as file:
                file.write(np.arange(4, dtype="f4").tobytes())
                file.flush()
                os.fsync(file.fileno())
                with self.assertRaises(tm.BusyError):
                    store.publish("second", wait=0.3)
            said = store.publish("second", name="other", wait=30)
        finally:
            support.run("unmount", "mnt")
        self.assertEqual((said["tensors"], said["bytes"]), (1, 16))
        with tm.open("P/other") as checkpoint:
            self.assertEqual(checkpoint["w"][...].tolist(), [0, 1, 2, 3])
        for wrong in ("nothing", "a/b", ""):
            with self.assertRaises((tm.InvalidArgumentError, tm.NotFoundError)):
                store.publish(wrong)


if __name__ == "__main__":
    unittest.main()
