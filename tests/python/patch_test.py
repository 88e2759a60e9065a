# SPDX-License-Identifier: Apache-2.0
"""Programs that only pass a path to torch.distributed.checkpoint (DCP), through tm.torch.patch_dcp."""

import logging
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
import types
import unittest
from unittest import mock

import support
import tensormount as tm
from torchrun import main, torchrun

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner, _storage_utils, filesystem
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
except ImportError as error:
    raise unittest.SkipTest(str(error))

from tensormount import _plugins

HERE = os.path.abspath(__file__)


# ---- On several ranks ----------------------------------------------------------------------------


def whole(number):
    return torch.arange(70.0).reshape(7, 10) + 100 * number


def sharded(tensor):
    return distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)], src_data_rank=None)


def save_steps(how):
    """Steps 1 and 2, and a program's own file beside each."""
    for step in (1, 2):
        path = f"out-{how}/step-{step}/model"
        os.makedirs(path, exist_ok=True)  # As frameworks do, on each rank.
        state = {"model": {"w": sharded(whole(step))}, "step": step}
        with tm.torch.patch_dcp():
            if how == "sync":
                dcp.save(state, checkpoint_id=path)
            elif how == "thread":
                dcp.async_save(state, checkpoint_id=path).result()
            else:
                dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
        dist.barrier()
        with open(f"{path}/rank-{dist.get_rank()}.txt", "w") as file:
            file.write("mine")


def load_steps(how):
    for step in (1, 2):
        into = {"model": {"w": sharded(torch.zeros(7, 10))}, "step": 0}
        with tm.torch.patch_dcp():
            dcp.load(into, checkpoint_id=f"out-{how}/step-{step}/model")
        expected = sharded(whole(step)).to_local()
        assert torch.equal(into["model"]["w"].to_local(), expected) and into["step"] == step, into


def save_alone_and_in_a_subgroup():
    rank = dist.get_rank()
    with tm.torch.patch_dcp():
        # Each rank by itself, although there is a default process group.
        dcp.save({"w": torch.full((3,), float(rank))}, checkpoint_id=f"alone-{rank}", no_dist=True)
        into = {"w": torch.zeros(3)}
        dcp.load(into, checkpoint_id=f"alone-{rank}", no_dist=True)
        assert torch.equal(into["w"], torch.full((3,), float(rank)))
    some = dist.new_group([0, 2])
    if rank != 1:
        with tm.torch.patch_dcp(per_rank=["mine"]):
            dcp.save({"w": torch.full((3,), 7.0), "mine": rank}, checkpoint_id="some", process_group=some)
    dist.barrier()
    with tm.open("some/tm-state") as checkpoint:
        assert checkpoint.objects.grid("mine") == (2,), checkpoint.objects
    # A group of another size is refused, not waited for.
    try:
        dcp.save({"w": torch.zeros(1)}, storage_writer=tm.torch.Writer("S/x", group=tm.Group.single()))
    except BaseException as error:
        assert "1 ranks, but DCP saves with 3" in str(error), error
    else:
        raise AssertionError("no error")


def saves_beside_each_other():
    """An async save on a process group of its own, and a sync save on the default one: each checkpoint is whole."""
    own = dist.new_group()
    rank = dist.get_rank()

    class Late(DefaultSavePlanner):
        """Rank 1's thread comes after its main thread, that of the others before."""

        def finish_plan(self, plan):
            time.sleep(1 if rank == 1 else 0)
            return super().finish_plan(plan)

    for number in range(2):
        first, second = (sharded(torch.full((7, 10), float(value))) for value in (1 + number, 100 + number))
        with tm.torch.patch_dcp():
            job = dcp.async_save({"w": first}, checkpoint_id="beside/a", process_group=own, planner=Late())
            if rank != 1:
                time.sleep(0.5)
            dcp.save({"w": second}, checkpoint_id="beside/b")
            job.result()
            for path, expected in (("a", first), ("b", second)):
                into = {"w": sharded(torch.zeros(7, 10))}
                dcp.load(into, checkpoint_id=f"beside/{path}")
                assert torch.equal(into["w"].to_local(), expected.to_local()), path
        dist.barrier()


def cached_plans():
    """A planner that caches its plans gives a later save nothing of an earlier one."""
    rank = dist.get_rank()

    def planner():
        return DefaultSavePlanner(enable_plan_caching=True)

    with tm.torch.patch_dcp():
        for step in range(3):
            state = {"w": sharded(whole(step)), "step": step}
            dcp.save(state, checkpoint_id="cached", planner=planner())
            into = {"w": sharded(torch.zeros(7, 10)), "step": -1}
            dcp.load(into, checkpoint_id="cached")
            assert into["step"] == step and torch.equal(into["w"].to_local(), state["w"].to_local()), (rank, into)
            dist.barrier()


def save_what_differs():
    """Replicas that differ between ranks: the lowest rank's is stored, as with DCP."""
    rank = dist.get_rank()
    with tm.torch.patch_dcp():
        dcp.save({"w": torch.full((4,), float(rank)), "name": f"rank {rank}"}, checkpoint_id="differs")
    into = {"w": torch.zeros(4), "name": ""}
    with tm.torch.patch_dcp():
        dcp.load(into, checkpoint_id="differs")
    assert torch.equal(into["w"], torch.zeros(4)) and into["name"] == "rank 0", into


# ---- Tests ---------------------------------------------------------------------------------------


class Patch(support.Folder):
    def setUp(self):
        super().setUp()
        _plugins._warned.clear()

    def names(self):
        """What each loaded module has under the names that are replaced."""
        return {
            (module, name): found
            for module, value in list(sys.modules.items())
            if isinstance(value, types.ModuleType) and module != "tensormount.torch._patch"
            for name in ("FileSystemWriter", "FileSystemReader", "_ProcessBasedAsyncCheckpointExecutor",
                         "_ThreadBasedAsyncCheckpointExecutor")
            if (found := value.__dict__.get(name)) is not None
        }

    def load(self, path, **state):
        into = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in state.items()}
        dcp.load(into, checkpoint_id=path)
        return into

    def test_names_are_replaced_and_put_back(self):
        program = types.ModuleType("a_program")
        program.FileSystemWriter = filesystem.FileSystemWriter
        with mock.patch.dict(sys.modules, {"a_program": program}):
            before = self.names()
            with tm.torch.patch_dcp():
                for module in (dcp, _storage_utils, program):
                    self.assertTrue(issubclass(module.FileSystemWriter, tm.torch.Writer), module)
                with tm.torch.patch_dcp(store="store"):
                    pass
                self.assertTrue(issubclass(dcp.FileSystemWriter, tm.torch.Writer))
                late = types.ModuleType("late")
                late.FileSystemReader = dcp.FileSystemReader
                sys.modules["late"] = late
            after = self.names()
            self.assertIs(late.FileSystemReader, filesystem.FileSystemReader)
            del after[("late", "FileSystemReader")]
            self.assertEqual(before, after)
            self.assertIs(filesystem.FileSystemWriter, program.FileSystemWriter)

    def test_a_save_replaces_the_last_one_and_frees_it(self):
        os.makedirs("out")
        with open("out/scheduler.bin", "w") as file:
            file.write("mine")
        with tm.torch.patch_dcp():
            for step in range(3):
                state = {"w": torch.full((1000,), float(step)), "step": step}
                dcp.save(state, checkpoint_id="out")
                found = self.load("out", **state)
                self.assertTrue(torch.equal(found["w"], state["w"]) and found["step"] == step)
        self.assertEqual(sorted(name for name in os.listdir("out") if not name.startswith(".")),
                         ["scheduler.bin", "store.json", "tm-state"])
        self.assertEqual(os.listdir("out/.trash"), [])
        self.assertTrue(tm.verify("out/tm-state")["whole"])
        with self.assertRaisesRegex(BaseException, "exists already"), tm.torch.patch_dcp():
            dcp.save({"w": torch.zeros(1)}, storage_writer=dcp.FileSystemWriter("out", overwrite=False))

    def test_the_newest_of_both_kinds_of_checkpoint_is_loaded(self):
        def state(number):
            return {"w": torch.full((5,), float(number)), "step": number}

        dcp.save(state(1), checkpoint_id="both")
        with tm.torch.patch_dcp():
            self.assertEqual(self.load("both", **state(0))["step"], 1)
            dcp.save(state(2), checkpoint_id="both")
            self.assertEqual(self.load("both", **state(0))["step"], 2)
        dcp.save(state(3), checkpoint_id="both")
        with tm.torch.patch_dcp():
            self.assertEqual(self.load("both", **state(0))["step"], 3)
            dcp.save(state(4), checkpoint_id="both")
            found = self.load("both", **state(0))
        self.assertTrue(torch.equal(found["w"], state(4)["w"]))
        self.assertEqual(self.load("both", **state(0))["step"], 3)  # Unpatched: that of DCP.

    def test_readers_and_writers_are_reused_and_paths_are_absolute(self):
        def state(number):
            return {"w": torch.full((5,), float(number)), "step": number}

        dcp.save(state(1), checkpoint_id="moved/p")
        with tm.torch.patch_dcp():
            reader = dcp.FileSystemReader("moved/p")
            into = state(0)
            dcp.load(into, storage_reader=reader)
            self.assertEqual(into["step"], 1)
            writer = dcp.FileSystemWriter("moved/p")
            os.chdir("moved")
            self.addCleanup(os.chdir, os.pardir)
            for step in (2, 3):
                dcp.save(state(step), storage_writer=writer)
                dcp.load(into, storage_reader=reader)
                self.assertEqual(into["step"], step)

    def test_a_loads_failure_does_not_stick_to_its_reader(self):
        tm.save({"w": torch.zeros(3)}, "sticky/tm-state")
        with tm.torch.patch_dcp():
            reader = dcp.FileSystemReader("sticky")
            with self.assertRaises(BaseException):
                dcp.load({"other": torch.zeros(3)}, storage_reader=reader)
            tm.save({"w": torch.ones(3)}, "sticky/tm-state", replace=True)
            into = {"w": torch.zeros(3)}
            dcp.load(into, storage_reader=reader)
            self.assertTrue(torch.equal(into["w"], torch.ones(3)))

    def test_other_checkpoints_of_a_directory_stay(self):
        tm.save({"w": torch.zeros(3)}, "kept/best")
        with tm.torch.patch_dcp():
            for _ in range(2):
                dcp.save({"w": torch.ones(3)}, checkpoint_id="kept")
        self.assertEqual({one["checkpoint"] for one in tm.Store("kept").list()}, {"best", "tm-state"})

    def test_groups_of_other_kinds_are_refused_with_a_remedy(self):
        mesh = type("DeviceMesh", (), {})()
        for wrong, remedy in ((0, "int"), ("world", "str"), ([0], "list"), (dcp, "module"), (mesh, r"mesh.get_group\(\)")):
            for call in (lambda: tm.torch.Writer("wrong/a", group=wrong), lambda: tm.Group.from_torch(wrong),
                         lambda: tm.save({}, "wrong/a", wrong)):
                with self.assertRaisesRegex(tm.InvalidArgumentError, f"group .*must be .*{remedy}"):
                    call()
        self.assertFalse(os.path.exists("wrong"))

    def test_a_writer_in_a_forked_process_begins_anew(self):
        writer = tm.torch.Writer("forked/a")
        dcp.save({"w": torch.ones(2)}, storage_writer=writer)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                dcp.save({"w": torch.ones(2)}, storage_writer=writer, checkpoint_id="forked/b")
                status = 0
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(len(tm.Store("forked").list()), 2)

    def test_a_directory_below_a_checkpoint_is_refused_with_a_remedy(self):
        with tm.torch.patch_dcp():
            for path in ("below/step-1", "below", "below/step-1"):
                dcp.save({"w": torch.ones(2)}, checkpoint_id=path)
            with self.assertRaisesRegex(BaseException, "below is a store.*store=DIR"):
                dcp.save({"w": torch.ones(2)}, checkpoint_id="below/step-2")
        with tm.torch.patch_dcp(store="below-store/all"):
            for path in ("below-store/out/step-1", "below-store/out", "below-store/out/step-2"):
                dcp.save({"w": torch.ones(2)}, checkpoint_id=path)

    def test_a_subclass_that_does_not_save_is_refused(self):
        with tm.torch.patch_dcp():
            class Own(dcp.FileSystemWriter):
                def write_data(self, plan, planner):
                    written = torch.futures.Future()
                    written.set_result([])
                    return written

            with self.assertRaisesRegex(BaseException, "Own: its write_data does not save"):
                dcp.save({"w": torch.ones(3)}, storage_writer=Own("own"))

    def test_late_imports_get_the_replaced_classes(self):
        with tm.torch.patch_dcp():
            from torch.distributed.checkpoint.filesystem import FileSystemWriter as Late

            self.assertTrue(issubclass(Late, tm.torch.Writer))

    def test_one_store_has_all_steps(self):
        state = {"w": torch.arange(100_000.0), "step": 1}
        with tm.torch.patch_dcp(store="shared/store"):
            for step in (1, 2):
                for part in ("model", "optim"):
                    dcp.save({**state, "step": step, "part": part}, checkpoint_id=f"shared/checkpoint-{step}/{part}")
            self.assertEqual(self.load("shared/checkpoint-2/optim", **state, part="")["part"], "optim")
        names = [one["checkpoint"] for one in tm.Store("shared/store").list()]
        self.assertEqual(sorted(names), [f"checkpoint-{step}.{part}" for step in (1, 2) for part in ("model", "optim")])
        self.assertEqual(os.listdir("shared/checkpoint-1/model"), [])  # Made, as by DCP.

    def test_directories_have_names_of_their_own(self):
        places = _plugins.Places("run/store")
        found = {}
        for path in ("run/a/b", "run/a.b", "run/a", "run/a/b.c", "run/a.b/c", "run/a/b/c", "run/a../b"):
            name = os.path.basename(places.checkpoint(path))
            self.assertNotIn(name, found, (path, found))
            found[name] = path
        for path, why in (("elsewhere/a", "not below"), ("run", "not below"), ("run/store/x", "inside the store"),
                          ("run/a/.b", "begins with a dot"), ("run/latest", "newest checkpoint")):
            with self.assertRaisesRegex(tm.InvalidArgumentError, why):
                places.checkpoint(path)
        with self.assertRaisesRegex(tm.InvalidArgumentError, "without store="):
            tm.torch.patch_dcp(root="run")
        other = _plugins.Places("elsewhere/store", root="run")
        self.assertEqual(os.path.basename(other.checkpoint("run/epoch=3.ckpt")), "epoch=3..ckpt")

    def test_options_that_cannot_be_kept_are_refused(self):
        with tm.torch.patch_dcp():
            with self.assertRaisesRegex(tm.UnsupportedError, "extensions"):
                dcp.FileSystemWriter("x", _extensions=[object()])
            with self.assertRaisesRegex(tm.UnsupportedError, "SAFETENSORS"):
                dcp.FileSystemWriter("x", serialization_format=filesystem.SerializationFormat.SAFETENSORS)
        with self.assertRaisesRegex(tm.InvalidArgumentError, "placement"):
            tm.torch.patch_dcp(placement="x")
        self.assertIs(dcp.FileSystemWriter, filesystem.FileSystemWriter)

    def test_versions_warn_once_and_missing_seams_refuse(self):
        with mock.patch.object(torch, "__version__", "9.9.0"), self.assertLogs("tensormount", logging.WARNING) as logs:
            for _ in range(2):
                tm.torch.patch_dcp().undo()
        self.assertEqual([line for line in logs.output if "9.9.0" in line],
                         ["WARNING:tensormount:PyTorch 9.9.0: tensormount was tested with 2.13"])
        with mock.patch.object(_storage_utils, "_storage_setup", lambda storage: None):
            with self.assertRaisesRegex(tm.UnsupportedError, "_storage_setup takes no checkpoint_id"):
                tm.torch.patch_dcp()
        with mock.patch.object(_storage_utils, "FileSystemReader", None):
            with self.assertRaisesRegex(tm.UnsupportedError, "has no FileSystemReader"):
                tm.torch.patch_dcp()
        self.assertIs(dcp.FileSystemWriter, filesystem.FileSystemWriter)

    def test_writers_can_be_pickled(self):
        with tm.torch.patch_dcp(store="run/store"):
            writer = dcp.FileSystemWriter("run/a")
        again = pickle.loads(pickle.dumps(writer))
        again.reset("run/b")
        self.assertEqual((again.checkpoint_id, os.path.basename(again._path)), (os.path.abspath("run/b"), "b"))

    def test_the_loop_of_the_guide_resumes(self):
        with open(os.path.join(support.ROOT, "docs", "trainers.md"), encoding="utf-8") as file:
            (loop,) = re.findall(r"<!-- executed by tests/python -->\n```python\n(.*?)```", file.read(), re.DOTALL)
        os.makedirs("guide")
        os.chdir("guide")
        self.addCleanup(os.chdir, os.pardir)
        first, second, third = {}, {}, {}
        exec(loop.replace("4):", "3):"), first)  # Stops after step 2.
        exec(loop, second)
        exec(loop, third)
        self.assertEqual([names["state"]["step"] for names in (first, second, third)], [2, 3, 3])
        expected = torch.arange(12.0).reshape(3, 4) + 3
        for names in (second, third):
            self.assertTrue(torch.equal(names["state"]["model"]["w"], expected))

    def test_a_program_is_patched_from_outside(self):
        with open("program.py", "w") as file:
            file.write(textwrap.dedent("""
                import sys
                import torch
                from torch.distributed.checkpoint import FileSystemWriter, save
                assert __name__ == "__main__"
                save({"w": torch.arange(3.0)}, storage_writer=FileSystemWriter(sys.argv[1]))
                print(sys.argv[1:])
            """))
        package = os.path.dirname(os.path.dirname(os.path.abspath(tm.__file__)))
        for number, (how, env) in enumerate((
            (["-m", "tensormount.patched", "program.py", "out-0", "--lr", "3"], {}),
            (["-m", "tensormount.patched", "--store", "run/store", "-m", "program", "run/out-1"], {}),
            (["-c", "import sys, runpy, tensormount; sys.argv = ['program.py', 'out-2']; runpy.run_path('program.py', run_name='__main__')"],
             {"TENSORMOUNT_PATCH_DCP": "1"}),
        )):
            done = subprocess.run([sys.executable, *how], capture_output=True, text=True, timeout=120,
                                  env={**os.environ, "PYTHONPATH": package, **env})
            self.assertEqual(done.returncode, 0, done.stderr)
            where = "run/store/out-1" if number == 1 else f"out-{number}/tm-state"
            with tm.open(where) as checkpoint:
                self.assertEqual(checkpoint["w"][:].tolist(), [0.0, 1.0, 2.0])
            if number == 0:
                self.assertEqual(done.stdout.strip(), "['out-0', '--lr', '3']")
            self.assertEqual(done.stderr.count("patch_dcp: what"), 1, done.stderr)
        for how, why in ((["-m", "tensormount.patched"], "is missing"), (["-m", "tensormount.patched", "-m"], "is missing")):
            done = subprocess.run([sys.executable, *how], capture_output=True, text=True, timeout=60,
                                  env={**os.environ, "PYTHONPATH": package})
            self.assertEqual(done.returncode, 2)
            self.assertIn(why, done.stderr)


class Ranks(support.Folder):
    def test_steps_load_on_other_numbers_of_ranks(self):
        torchrun(HERE, 2, ("save_steps", "sync"), ("save_steps", "thread"), ("save_steps", "process"), ("load_steps", "sync"))
        torchrun(HERE, 3, ("load_steps", "sync"), ("load_steps", "thread"), ("load_steps", "process"))
        for how in ("sync", "thread", "process"):
            self.assertEqual(sorted(name for name in os.listdir(f"out-{how}/step-2/model") if not name.startswith(".")),
                             ["rank-0.txt", "rank-1.txt", "store.json", "tm-state"])

    def test_the_writer_saves_with_the_ranks_of_dcp(self):
        torchrun(HERE, 3, ("save_alone_and_in_a_subgroup",), ("save_what_differs",), ("cached_plans",),
                 ("saves_beside_each_other",))


if __name__ == "__main__":
    main(globals())
