# SPDX-License-Identifier: Apache-2.0
"""Accelerate's save_state and load_state through tensormount.accelerate."""

import contextlib
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import unittest
import warnings
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "python"))

import support
import tensormount as tm
from torchrun import main, torchrun

try:
    import accelerate
    import numpy
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration
    from torch.utils.data import DataLoader, TensorDataset
except ImportError as error:
    raise unittest.SkipTest(str(error))

from tensormount import _archive, _plugins, _torch_values

HERE = os.path.abspath(__file__)
warnings.filterwarnings("ignore")


class Counter:
    """An object of the program, of which each rank has its own value. Rank 0's is saved."""

    def __init__(self):
        self.state = {"count": 0, "kind": {1, 2}, "shadow": torch.zeros(3)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Run:
    """A training run with all that an Accelerator saves."""

    def __init__(self, kind="plain", **configuration):
        AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        if kind == "fsdp":
            self.accelerator = self.fsdp()
        else:
            self.accelerator = accelerate.Accelerator(
                cpu=True, project_config=ProjectConfiguration(**configuration), gradient_accumulation_steps=2)
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        if kind == "plain":
            net.insert(1, torch.nn.BatchNorm1d(16))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        x = torch.arange(64 * 8.0).reshape(64, 8).sin()
        data = DataLoader(TensorDataset(x, x[:, :2].cos()), batch_size=4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.net, self.optimizer, self.data, self.schedule = self.accelerator.prepare(net, optimizer, data, schedule)
        if kind == "fsdp":
            self.net.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction.
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        torch.manual_seed(10 + self.accelerator.process_index)  # As after a while of training.
        self.losses = []

    @staticmethod
    def fsdp():
        """Accelerate turns FSDP on for devices only; what it does with it is the same on a CPU."""
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False)
        one = accelerate.Accelerator(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        return one

    def train(self, steps):
        batches = iter(self.data)
        for step in range(steps):
            x, y = next(batches)
            with self.accelerator.accumulate(self.net):
                loss = torch.nn.functional.mse_loss(self.net(x), y) * (1 + random.random() + numpy.random.rand())
                self.losses.append(float(loss.detach()))
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        self.counter.state["count"] += steps + self.accelerator.process_index
        self.counter.state["shadow"] += 1
        return self.losses

    def states(self):
        """Weights and moments, whole."""
        def whole(tensor):
            return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

        net = self.accelerator.unwrap_model(self.net)
        weights = {key: whole(value) for key, value in net.state_dict().items()}
        moments = [{key: whole(value) for key, value in self.optimizer.state[p].items()} for p in net.parameters()]
        return weights, moments


def visible(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def same(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# ---- On several ranks ----------------------------------------------------------------------------


def train(kind):
    """Eight steps, of which the last four are done again from the checkpoint of the fourth."""
    for background in (False, True):
        run = Run(kind)
        with tm.accelerate.register(run.accelerator, background=background):
            run.train(4)
            run.accelerator.save_state(f"{kind}/step-4")
            states = run.states()
            expected = run.train(4)[4:]
        if dist.get_rank() == 0:
            torch.save(states, f"{kind}/states.pt")
        again = Run(kind)
        with tm.accelerate.register(again.accelerator):
            again.accelerator.load_state(f"{kind}/step-4")
        assert again.counter.state["count"] == 4 and again.counter.state["kind"] == {1, 2}, again.counter.state
        assert again.accelerator.step == 4
        assert again.train(4) == expected, (again.losses, expected)


def load(kind, into=None):
    run = Run(into or kind)
    with tm.accelerate.register(run.accelerator):
        run.accelerator.load_state(f"{kind}/step-4")
    assert same(run.states(), torch.load(f"{kind}/states.pt")), run.states()
    assert run.schedule.state_dict()["last_epoch"] > 0 and run.accelerator.step == 4
    assert torch.equal(run.counter.state["shadow"], torch.ones(3))
    run.train(2)


def fail(kind):
    """An error of one rank is one of all ranks, and the next save works."""
    run = Run(kind)
    rank = dist.get_rank()

    def broken():
        raise RuntimeError("no state")

    with tm.accelerate.register(run.accelerator, arrival=60):
        for background in (False, True):
            if rank == 1:
                run.counter.state_dict = broken
            try:
                run.accelerator.save_state(f"{kind}/fails")
            except Exception as error:
                assert ("rank 1" in str(error) and isinstance(error, tm.Error)) == (rank == 0), error
                assert "no state" in str(error), error
            else:
                raise AssertionError("no error")
            if rank == 1:
                del run.counter.state_dict
        run.accelerator.save_state(f"{kind}/works")
        try:
            with mock.patch.object(_archive, "_empty", side_effect=RuntimeError("no memory") if rank == 1 else _archive._empty):
                run.accelerator.load_state(f"{kind}/works")
        except Exception as error:
            assert "no memory" in str(error), error
        else:
            raise AssertionError("no error")
        run.accelerator.load_state(f"{kind}/works")
    assert not os.path.exists(f"{kind}/fails/tm-state")


def killed(kind):
    """Rank 1 dies in the second save, when its bytes are written."""
    def kill(report):
        if saves and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        saves.append(report)

    saves = []
    run = Run(kind)
    with tm.accelerate.register(run.accelerator, before_publish=kill):
        for step in (1, 2):
            run.train(4)
            run.accelerator.save_state(f"killed/{kind}-{step}")


# ---- Tests ---------------------------------------------------------------------------------------


class Ranks(support.Folder):
    def test_resume_is_exact_on_2_ranks_and_on_others(self):
        torchrun(HERE, 2, ("train", "plain"), ("train", "fsdp"), ("load", "fsdp"), ("fail", "plain"), ("fail", "fsdp"))
        torchrun(HERE, 1, ("load", "plain"), ("load", "fsdp"), ("load", "fsdp", "one process"))
        for kind in ("plain", "fsdp"):
            self.assertEqual(visible(f"{kind}/step-4"), ["store.json", "tm-state"])
            self.assertTrue(tm.verify(f"{kind}/step-4/tm-state")["whole"])
        if support.LONG:
            torchrun(HERE, 4, ("load", "plain"), ("load", "fsdp"))

    def test_a_rank_that_dies_in_a_save_leaves_the_earlier_checkpoint(self):
        for kind in ("plain", "fsdp") if support.LONG else ("fsdp",):
            with self.assertRaises(AssertionError):
                torchrun(HERE, 2, ("killed", kind))
            self.assertTrue(tm.verify(f"killed/{kind}-1/tm-state")["whole"])
            self.assertFalse(os.path.exists(f"killed/{kind}-2/tm-state"))


class Registered(support.Folder):
    def setUp(self):
        super().setUp()
        _plugins._warned.clear()
        warnings.simplefilter("ignore")

    def run_in(self, folder, **configuration):
        return Run(project_dir=folder, automatic_checkpoint_naming=True, **configuration)

    def test_resume_is_exact(self):
        for number, options in enumerate(({}, {"store": "exact/store"}, {"background": True})):
            run = Run()
            with tm.accelerate.register(run.accelerator, **options):
                run.train(4)
                self.assertEqual(str(run.accelerator.save_state(f"exact/{number}")), f"exact/{number}")
                expected = run.train(4)[4:]
            again = Run()
            with tm.accelerate.register(again.accelerator, **options):
                again.accelerator.load_state(f"exact/{number}")
            self.assertEqual(again.train(4), expected)
            self.assertTrue(same(again.states(), run.states()))
            self.assertEqual(visible(f"exact/{number}"), [] if number == 1 else ["store.json", "tm-state"])

    def test_names_and_limits_are_those_of_accelerate(self):
        def run(folder, register):
            one = self.run_in(folder, total_limit=2)
            with register(one.accelerator):
                for _ in range(4):
                    one.train(2)
                    one.accelerator.save_state()
                losses = one.train(2)[-2:]
            again = self.run_in(folder, total_limit=2)
            with register(again.accelerator):
                again.accelerator.load_state()
                self.assertEqual(again.train(2), losses, folder)
            return visible(f"{folder}/checkpoints")

        expected = run("limit/theirs", contextlib.nullcontext)
        self.assertEqual(expected, ["checkpoint_2", "checkpoint_3"])
        for number, options in enumerate(({}, {"store": "limit/store"}, {"background": True})):
            folder = f"limit/{number}"
            self.assertEqual(run(folder, lambda one: tm.accelerate.register(one, **options)), expected)
        names = [one["checkpoint"] for one in tm.Store("limit/store").list()]
        self.assertEqual(sorted(names), ["1.checkpoints.checkpoint_2", "1.checkpoints.checkpoint_3"])

    def test_a_killed_save_leaves_the_earlier_checkpoint(self):
        """Although total_limit is 1."""
        def child(hook):
            run = self.run_in("killed", total_limit=1)
            with tm.accelerate.register(run.accelerator, before_publish=hook):
                for _ in range(2):
                    run.train(4)
                    run.accelerator.save_state()

        def kill(report):
            saves.append(report)
            if len(saves) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        saves = []
        process = multiprocessing.get_context("fork").Process(target=child, args=(kill,))
        process.start()
        process.join(120)
        self.assertEqual(process.exitcode, -signal.SIGKILL)
        self.assertEqual(visible("killed/checkpoints"), ["checkpoint_0", "checkpoint_1"])
        shutil.copytree("killed/checkpoints/checkpoint_1", "killed-alone/checkpoints/checkpoint_1")
        run = self.run_in("killed-alone")
        with tm.accelerate.register(run.accelerator):
            for path in (None, "killed-alone/checkpoints/checkpoint_1"):
                with self.assertRaisesRegex(tm.CheckpointNotFoundError, "checkpoint_1: has neither .* perhaps interrupted"):
                    run.accelerator.load_state(path)
        run = self.run_in("killed", total_limit=1)
        with tm.accelerate.register(run.accelerator), self.assertLogs("tensormount", logging.WARNING) as logs:
            run.accelerator.load_state()
            run.accelerator.project_configuration.iteration = 1
            run.accelerator.save_state()
        self.assertIn("checkpoint_1: skipped, because the save of this checkpoint was interrupted", logs.output[0])
        self.assertEqual(run.accelerator.step, 4)
        self.assertEqual(visible("killed/checkpoints"), ["checkpoint_1"])
        self.assertTrue(tm.verify("killed/checkpoints/checkpoint_1/tm-state")["whole"])

    def test_a_background_failure_is_raised_and_removes_nothing(self):
        def fail(report):
            reports.append(report)
            if len(reports) == 2:
                raise RuntimeError("disk on fire")

        reports = []
        run = self.run_in("fails", total_limit=1)
        with tm.accelerate.register(run.accelerator, background=True, before_publish=fail) as registered:
            run.accelerator.save_state()
            run.accelerator.save_state()
            with self.assertRaisesRegex(RuntimeError, "disk on fire"):
                registered.wait()
            self.assertTrue(os.path.exists("fails/checkpoints/checkpoint_0/tm-state"))
            run.accelerator.save_state()
        self.assertEqual(visible("fails/checkpoints"), ["checkpoint_2"])

    def test_hooks_see_and_change_what_accelerate_shows_them(self):
        calls = []

        def save_hook(models, weights, output_dir):
            calls.append((len(models), [list(one) for one in weights], output_dir))
            with open(os.path.join(output_dir, "mine.txt"), "w") as file:
                file.write("mine")
            weights.pop()

        def load_hook(models, input_dir):
            calls.append((len(models), input_dir))
            models.pop()

        run = Run()
        run.accelerator.register_save_state_pre_hook(save_hook)
        run.accelerator.register_load_state_pre_hook(load_hook)
        with tm.accelerate.register(run.accelerator):
            run.accelerator.save_state("hooks/a")
            run.train(4)
            states = run.states()
            run.accelerator.load_state("hooks/a")
        self.assertEqual(calls, [(1, [list(run.net.state_dict())], "hooks/a"), (1, "hooks/a")])
        self.assertTrue(same(run.states()[0], states[0]))  # Not loaded.
        self.assertEqual(visible("hooks/a"), ["mine.txt", "store.json", "tm-state"])
        with tm.open("hooks/a/tm-state") as checkpoint:
            self.assertEqual(checkpoint.keys("model*"), [])

    def test_the_newest_of_both_kinds_of_checkpoint_is_loaded(self):
        run = Run()

        def save(count, ours):
            run.counter.state["count"] = count
            with tm.accelerate.register(run.accelerator) if ours else contextlib.nullcontext():
                run.accelerator.save_state("both/a")

        def loaded():
            again = Run()
            with tm.accelerate.register(again.accelerator):
                again.accelerator.load_state("both/a")
            return again.counter.state["count"]

        for count, ours in enumerate((False, True, False, True)):
            random.random()  # The random states differ between two saves, as after a step.
            save(count, ours)
            self.assertEqual(loaded(), count)
        again = Run()
        again.accelerator.load_state("both/a")  # Not registered: that of Accelerate.
        self.assertEqual(again.counter.state["count"], 2)

    def test_undo_leaves_no_trace(self):
        before = dict(vars(accelerate.accelerator))
        run = Run()
        own = dict(vars(run.accelerator))
        registered = tm.accelerate.register(run.accelerator)
        run.accelerator.save_state("trace/a")
        run.accelerator.load_state("trace/a")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "registered already"):
            tm.accelerate.register(run.accelerator)
        with mock.patch.object(Counter, "load_state_dict", side_effect=RuntimeError), self.assertRaises(RuntimeError):
            run.accelerator.load_state("trace/a")
        for _ in range(2):
            registered.undo()
        self.assertEqual(dict(vars(accelerate.accelerator)), before)
        self.assertEqual(set(vars(run.accelerator)), set(own))
        self.assertEqual((run.accelerator._custom_objects, run.accelerator.scaler), ([run.counter], None))
        run.accelerator.save_state("trace/b")
        self.assertIn("random_states_0.pkl", visible("trace/b"))

    def test_other_objects_than_saved_are_refused(self):
        run = Run()
        with tm.accelerate.register(run.accelerator):
            run.accelerator.save_state("other/a")
            run.accelerator.register_for_checkpointing(Counter())
            with self.assertRaisesRegex(tm.LayoutError, "2 objects of the kind custom_checkpoint .* but 1 were saved"):
                run.accelerator.load_state("other/a")
            run.accelerator._custom_objects.pop()
            run.accelerator._models.append(torch.nn.Linear(2, 2))
            with self.assertRaisesRegex(tm.LayoutError, "2 objects of the kind model"):
                run.accelerator.load_state("other/a")

    def test_options_of_both_calls_are_kept(self):
        run = Run()
        with tm.accelerate.register(run.accelerator, ephemeral=True, store="options/store"):
            run.accelerator.save_state("options/a", safe_serialization=False)
            run.accelerator.save_state("options/b")
            self.assertEqual([one["checkpoint"] for one in tm.Store("options/store").list()], ["b"])
            run.net.extra = torch.nn.Linear(2, 2)
            with self.assertRaisesRegex(RuntimeError, "extra.weight"):
                run.accelerator.load_state("options/b")
            run.accelerator.load_state("options/b", strict=False)
            with self.assertRaisesRegex(tm.InvalidArgumentError, "map_location='cuda'"):
                run.accelerator.load_state("options/b", map_location="cuda")
        for wrong in ({"placement": "x"}, {"background": "no"}, {"root": "x"}):
            with self.assertRaises(tm.InvalidArgumentError):
                tm.accelerate.register(run.accelerator, **wrong)

    def test_compiled_models_load_into_others(self):
        class Compiled(torch.nn.Module):  # What torch.compile makes of the names.
            def __init__(self, net):
                super().__init__()
                self._orig_mod = net

        run = Run()
        with tm.accelerate.register(run.accelerator):
            run.accelerator._models[0] = Compiled(run.net)
            metadata = {key: value for key, value in run.net.state_dict()._metadata.items()}
            run.accelerator.save_state("compiled/a")
            again = Run()
            states = run.states()
            with torch.no_grad():
                again.net[0].weight.zero_()
        with tm.accelerate.register(again.accelerator):
            again.accelerator.load_state("compiled/a")
        self.assertTrue(same(again.states()[0], states[0]))
        with tm.open("compiled/a/tm-state") as checkpoint:
            found = _torch_values.join(checkpoint.state(torch=True), checkpoint.objects)
        self.assertEqual(dict(found["model"]._metadata), metadata)

    def test_a_rank_that_was_not_there_keeps_its_random_state(self):
        run = Run()
        with tm.accelerate.register(run.accelerator):
            run.train(4)
            run.accelerator.save_state("more/a")
            again = Run()
        with tm.accelerate.register(again.accelerator), mock.patch.dict(AcceleratorState._shared_state, process_index=5):
            before = random.getstate()
            random.random()
            again.accelerator.load_state("more/a")
        self.assertEqual(again.accelerator.step, 4)
        self.assertNotEqual(random.getstate(), before)

    def test_the_scaler_is_saved(self):
        run = Run()
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with tm.accelerate.register(run.accelerator):
            run.accelerator.save_state("scaler/a")
            run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            run.accelerator.load_state("scaler/a")
            self.assertEqual(run.accelerator.scaler.get_scale(), 8.0)

    def test_states_with_numpy_values_load(self):
        state = {
            "array": numpy.arange(3), "bits": numpy.zeros(2, bool), "text": numpy.array(["a"]),
            "float": numpy.float32(2.5), "int": numpy.int64(3), "random": numpy.random.RandomState(0).get_state(),
        }
        run, again = Run(), Run()
        run.counter.state = state
        with tm.accelerate.register(run.accelerator):
            run.accelerator.save_state("numpy/a")
        before = set(torch.serialization.get_safe_globals())
        with tm.accelerate.register(again.accelerator):
            again.accelerator.load_state("numpy/a")
            self.assertEqual(repr(again.counter.state), repr(state))
            self.assertEqual(set(torch.serialization.get_safe_globals()), before)
            # Other classes are loaded if the caller says so.
            again.counter.state = {"folder": Run}
            again.accelerator.save_state("numpy/b")
            with self.assertRaisesRegex(tm.UnsupportedError, "folder"):
                again.accelerator.load_state("numpy/b")
            again.accelerator.load_state("numpy/b", load_kwargs={"weights_only": False})
            self.assertEqual(again.counter.state, {"folder": Run})

    def test_a_forked_process_begins_anew(self):
        run = Run()
        for background in (False, True):
            with tm.accelerate.register(run.accelerator, background=background):
                run.accelerator.save_state(f"forked/{background}/a")
                run.accelerator.load_state(f"forked/{background}/a")  # Waits for the save.
                child = os.fork()
                if child == 0:
                    status = 1
                    try:
                        signal.alarm(60)
                        run.accelerator.load_state(f"forked/{background}/a")
                        run.accelerator.save_state(f"forked/{background}/b")
                        run.accelerator.load_state(f"forked/{background}/b")
                        status = 0
                    finally:
                        os._exit(status)
                self.assertEqual(os.waitpid(child, 0)[1], 0, background)
                run.accelerator.save_state(f"forked/{background}/c")

    def test_unsupported_setups_are_refused(self):
        run = Run()
        with tm.accelerate.register(run.accelerator):
            for kind, why in ((DistributedType.DEEPSPEED, "checkpoints of its own"), (DistributedType.FSDP, "FSDP1")):
                plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
                with mock.patch.dict(AcceleratorState._shared_state, distributed_type=kind, fsdp_plugin=plugin):
                    for call in (run.accelerator.save_state, run.accelerator.load_state):
                        with self.assertRaisesRegex(tm.UnsupportedError, why):
                            call("refused/a")

    def test_versions_warn_once_and_missing_seams_refuse(self):
        run = Run()
        with mock.patch.object(accelerate, "__version__", "9.9.0"), self.assertLogs("tensormount", logging.WARNING) as logs:
            for _ in range(2):
                tm.accelerate.register(run.accelerator).undo()
        self.assertEqual(logs.output, ["WARNING:tensormount:Accelerate 9.9.0: tensormount was tested with 1.15"])
        with mock.patch.object(accelerate.accelerator, "save_accelerator_state", lambda output_dir: None):
            with self.assertRaisesRegex(tm.UnsupportedError, "save_accelerator_state takes no model_states"):
                tm.accelerate.register(run.accelerator)

    def test_the_loop_of_the_guide_resumes(self):
        with open(os.path.join(support.ROOT, "docs", "trainers.md"), encoding="utf-8") as file:
            (loop,) = re.findall(r"<!-- executed by tests/trainers/accelerate_test.py -->\n```python\n(.*?)```", file.read(), re.DOTALL)
        os.makedirs("guide")
        os.chdir("guide")
        self.addCleanup(os.chdir, os.pardir)
        AcceleratorState._reset_state(True)
        first, second = {}, {}
        exec(loop.replace("range(progress.step, 4)", "range(2)"), first)
        AcceleratorState._reset_state(True)
        exec(loop, second)
        self.assertEqual([names["progress"].step for names in (first, second)], [2, 4])
        self.assertEqual(len(second["losses"]), 2)


if __name__ == "__main__":
    main(globals())
