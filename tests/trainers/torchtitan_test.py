# SPDX-License-Identifier: Apache-2.0
"""torchtitan's trainer saves and resumes through tensormount.torchtitan."""

import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import unittest
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "python"))

import support
import tensormount as tm
from torchrun import LIMIT, Ranks, main, torchrun

try:
    import torch
    import torch.distributed as dist
    import torchtitan
    from torchtitan.components.checkpointer import AsyncMode, CheckpointManager
except ImportError as error:
    raise unittest.SkipTest(str(error))

from tensormount import _plugins

HERE = os.path.abspath(__file__)


# ---- On several ranks ----------------------------------------------------------------------------


def build(dump, steps=6, stock=False, tp=1, **options):
    """The trainer of a job that saves every second step, by torchtitan's own manager with `stock`."""
    import torchtitan_cpu

    logging.getLogger().setLevel(logging.WARNING)
    manager = CheckpointManager if stock else tm.torchtitan.CheckpointManager
    options = {"interval": 2, "last_save_model_only": False, "keep_latest_k": 0, **options}
    return torchtitan_cpu.config(dump, manager.Config(**options), steps, tp=tp).build()


def train(*arguments, **options):
    """The losses of a job, by step."""
    trainer = build(*arguments, **options)
    trainer.train()
    trainer.close()
    return trainer.losses


def state_of(trainer):
    """The whole tensors of the model and the optimizer."""
    found = {**trainer.model_parts[0].state_dict(), **trainer.optimizers.state_dict()}
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in found.items()
        if isinstance(value, torch.Tensor)
    }


def check_same(found, expected, keys=None):
    assert found.keys() == expected.keys()
    for key in keys or expected:
        assert torch.equal(found[key], expected[key]), key


def on_rank_0(work):
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def steps_of(dump):
    """The checkpoints of tensormount in a job's folder."""
    return sorted(entry["checkpoint"] for entry in tm.Store(f"{dump}/checkpoint").list() if "problem" not in entry)


def resume():
    """Each mode: the losses after a resume are those of a job that was never interrupted."""
    expected = train("stock", stock=True)
    for mode in AsyncMode:
        whole = train(mode.value, async_mode=mode.value)
        assert whole == expected, (mode, whole, expected)
        assert steps_of(mode.value) == ["step-2", "step-4", "step-6"]
        # The tensors that an async save copied are those of its step, although training went on.
        assert train(mode.value, async_mode=mode.value, load_step=4) == expected[4:], mode
        assert train(mode.value, steps=7)[0][0] == 7  # From the newest one.
        dist.barrier()
    assert tm.verify("async/checkpoint/step-6")["whole"]


def reshard():
    """A job with tensor parallelism has the weights and moments of the job with FSDP that it resumes."""
    trainer = build("disabled", steps=9)
    trainer.checkpointer.load()
    expected = state_of(trainer)
    trainer.close()
    other = build("disabled", steps=9, tp=2, exclude_from_loading=["dataloader"])
    other.checkpointer.load()
    assert other.step == trainer.step == 7
    check_same(state_of(other), expected)
    other.train()
    assert other.losses[-1][0] == 9
    other.close()
    # Back, and from the stored data of the other mesh.
    again = build("disabled", steps=9, exclude_from_loading=["dataloader"])
    again.checkpointer.load()
    check_same(state_of(again), state_of(other))
    again.close()


def two_axes():
    """FSDP over tensor parallelism, where the part of a rank may be several boxes."""
    expected = build("disabled", steps=9, exclude_from_loading=["dataloader"])
    expected.checkpointer.load(6)
    trainer = build("disabled", steps=9, tp=2, exclude_from_loading=["dataloader"])
    trainer.checkpointer.load(6)
    check_same(state_of(trainer), state_of(expected))
    trainer.checkpointer.folder = "two-axes/checkpoint"
    trainer.checkpointer.save(6)
    again = build("two-axes", exclude_from_loading=["dataloader"])
    again.checkpointer.load()
    check_same(state_of(again), state_of(expected))
    for one in (again, trainer, expected):
        one.close()


def pipeline():
    """Stages of a pipeline have other parameters each; a job without a pipeline loads all of them."""
    import torchtitan_cpu

    made = torchtitan_cpu.config("stages", tm.torchtitan.CheckpointManager.Config(interval=2), 4)
    made.parallelism.pipeline_parallel_degree = 2
    made.parallelism.pipeline_parallel_schedule = "1F1B"
    trainer = made.build()
    torch.manual_seed(dist.get_rank())
    for part in trainer.model_parts:
        for parameter in part.parameters():
            parameter.grad = torch.randn_like(parameter)
    trainer.optimizers.step()
    trainer.step = 2
    trainer.checkpointer.save(2)
    mine = state_of(trainer)
    trainer.close()
    whole = build("stages", exclude_from_loading=["dataloader"])
    whole.checkpointer.load()
    found = state_of(whole)
    assert whole.step == 2 and len(mine) < len(found)
    check_same({key: found[key] for key in mine}, mine)
    whole.close()


def fused_projections():
    """Saves and loads store the parts of a fused weight as torchtitan does, but do not gather it."""
    from torch.distributed.tensor import DTensor

    trainer = build("fused")
    manager, model = trainer.checkpointer, trainer.model_parts[0]
    expected = state_of(trainer)
    parts = [key for key in expected if re.search(r"qkv_linear\.w[qkv]\.weight$", key)]
    assert len(parts) == 6, parts
    with mock.patch.object(DTensor, "redistribute", side_effect=AssertionError("gathered")):
        manager.save(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        manager.load()
    check_same(state_of(trainer), expected)
    with tm.open("fused/checkpoint/step-2") as checkpoint:
        check_same({key: checkpoint[key].torch() for key in parts}, {key: expected[key] for key in parts})
    # torchtitan itself still has tensors.
    assert {type(value) for value in manager.states["model"].state_dict().values()} == {DTensor}
    trainer.close()


def keys_of_ranks():
    """A rank finds its data loader's state under its own key, or an error that says what to do."""
    trainer = build("disabled")
    with tm.open("disabled/checkpoint/step-6") as checkpoint:
        names = [name for name in checkpoint.objects if name.startswith("dataloader.")]
        assert sorted(names) == ["dataloader.dp_rank_0", "dataloader.dp_rank_1", "dataloader.world_size"], names
        # All ranks have one structure, whatever their number.
        assert len([name for name in checkpoint._values() if name.startswith("tensormount.tree.")]) == 1
    trainer.dataloader._rank_id = f"dp_rank_{5 + dist.get_rank()}"
    try:
        trainer.checkpointer.load(6)
    except tm.KeyNotFoundError as error:
        assert "dataloader.dp_rank_5" in str(error) and "disabled/checkpoint/step-6" in str(error), error
        assert 'exclude_from_loading' in str(error), error
    else:
        raise AssertionError("no error")
    trainer.close()


def ranks_that_differ():
    """The lowest rank's value is stored, as by DCP, and the difference is reported."""
    trainer = build("differ")
    trainer.ntokens_seen = 100 + dist.get_rank()
    told = []
    if dist.get_rank() == 0:
        trainer.checkpointer._options["before_publish"] = lambda report: told.append(str(report["warnings"]))
    trainer.checkpointer.save(2)
    trainer.checkpointer.load()
    assert trainer.ntokens_seen == 100, trainer.ntokens_seen
    assert dist.get_rank() > 0 or "train_state.ntokens_seen" in told[0], told
    trainer.close()


def stock_checkpoints():
    """A folder of torchtitan's own manager: the job resumes, and a job can go back to torchtitan's own."""
    expected = train("old", steps=8, stock=True)
    on_rank_0(lambda: [shutil.rmtree(f"old/checkpoint/step-{step}") for step in (6, 8)])
    assert train("old", steps=8) == expected[4:]
    with tm.open("old/checkpoint/step-4") as checkpoint:
        assert checkpoint.uuid is None  # Not touched.
    assert steps_of("old") == ["step-6", "step-8"]
    on_rank_0(lambda: os.makedirs("back/checkpoint"))
    group = tm.Group.from_torch()
    tm.export("old/checkpoint/step-6", "back/checkpoint/step-6", group, format="dcp")
    group.close()
    assert train("back", steps=8, stock=True) == expected[6:]
    # The model alone, from both.
    for step in (4, 6):
        trainer = build(f"new-{step}", initial_load_path=os.path.abspath(f"old/checkpoint/step-{step}"))
        assert trainer.checkpointer.load()
        other = build("old")
        other.checkpointer.load(step)
        model = trainer.model_parts[0].state_dict().keys()
        check_same(state_of(trainer), state_of(other), model)
        assert (trainer.step, other.step) == (0, step)
        trainer.close()
        other.close()


def retention():
    """keep_latest_k, and rules: an old checkpoint is removed when the next one is committed, and not before."""
    on_rank_0(lambda: tm.save({"w": torch.zeros(3)}, "kept/checkpoint/best", tm.Group.single()))
    trainer = build("kept", steps=8, keep_latest_k=2, enable_first_step_checkpoint=True)
    present = []
    if dist.get_rank() == 0:
        trainer.checkpointer._options["before_publish"] = lambda report: present.append(steps_of("kept"))
    trainer.train()
    trainer.close()
    dist.barrier()  # Rank 0 removes checkpoints when the others have returned.
    assert steps_of("kept") == ["best", "step-6", "step-8"], steps_of("kept")
    if dist.get_rank() == 0:
        assert present[-1] == ["best", "step-4", "step-6"], present
        assert present[1] == ["best", "step-1"], present
    assert os.listdir("kept/checkpoint/.trash") == []
    dist.barrier()
    train("kept", steps=12, retention="last=1,every=6,match=step-*")
    dist.barrier()
    assert steps_of("kept") == ["best", "step-12", "step-6"], steps_of("kept")


def last_step():
    """The model alone at the end, in another dtype, and in Hugging Face's format."""
    trainer = build("last", steps=3, last_save_model_only=True, export_dtype="bfloat16")
    trainer.train()
    with tm.open("last/checkpoint/step-3") as checkpoint:
        keys = set(checkpoint.keys())
        assert keys == set(trainer.model_parts[0].state_dict()), keys
        assert {checkpoint[key].torch().dtype for key in keys} == {torch.bfloat16}
    trainer.close()
    again = build("last", steps=4)
    try:
        again.checkpointer.load()
    except tm.KeyNotFoundError as error:
        assert "last_save_model_only" in str(error), error
    else:
        raise AssertionError("no error")
    again.close()

    trainer = build("hf", steps=3, last_save_model_only=True, last_save_in_hf=True)
    trainer.train()
    expected = trainer.checkpointer.sd_adapter.to_hf(trainer.model_parts[0].state_dict())
    expected = {key: value.full_tensor() for key, value in expected.items()}
    trainer.close()
    dist.barrier()
    from safetensors.torch import load_file

    assert os.listdir("hf/checkpoint-hf") == ["step-3"], os.listdir("hf/checkpoint-hf")
    check_same(load_file("hf/checkpoint-hf/step-3/model.safetensors"), expected)
    assert steps_of("hf") == ["step-2"]
    again = build("hf-again", initial_load_path=os.path.abspath("hf/checkpoint-hf/step-3"), initial_load_in_hf=True)
    assert again.checkpointer.load()
    found = again.checkpointer.sd_adapter.to_hf(again.model_parts[0].state_dict())
    check_same({key: value.full_tensor() for key, value in found.items()}, expected)
    again.close()


def one_rank_fails():
    """An error on one rank is an error on all of them, soon, and the manager goes on."""
    for mode in ("disabled", "async"):
        trainer = build(f"fails-{mode}", async_mode=mode)
        manager, began = trainer.checkpointer, time.monotonic()
        if dist.get_rank() == 1:
            trainer.dataloader.state_dict = mock.Mock(side_effect=RuntimeError("no state"))

        def save(manager=manager):
            manager.save(2)
            manager.maybe_wait_for_saving()

        expect(RuntimeError if dist.get_rank() == 1 else tm.Error, "no state", save)
        assert time.monotonic() - began < 20
        trainer.dataloader.__dict__.pop("state_dict", None)
        manager.save_future = None
        manager.save(4)
        manager.maybe_wait_for_saving()
        trainer.close()
        assert steps_of(f"fails-{mode}") == ["step-4"]
        # Rank 0 says what all ranks load.
        trainer = build(f"fails-{mode}")
        if dist.get_rank() == 0:
            trainer.checkpointer._find_load_step = mock.Mock(side_effect=PermissionError("not yours"))
        expect(PermissionError, "not yours", trainer.checkpointer.load)
        trainer.close()


def killed(signal_number):
    """Trains until rank 1 ends within the save of step 6, when its bytes are durable and nothing is published."""
    trainer = build("killed", steps=8, async_mode="async")
    manager = trainer.checkpointer

    def strike(report):
        if dist.get_rank() == 1 and report["path"].endswith("step-6"):
            if signal_number:
                os.kill(os.getpid(), signal_number)
            os._exit(0)

    manager._options["before_publish"] = strike
    manager._options["liveness"] = 5.0
    if signal_number:
        trainer.train()
        raise AssertionError("not killed")
    # Without a signal the other rank goes on, and must not wait for the one that is gone.
    for step in (2, 4):
        manager.save(step)
    manager.save(6)
    began = time.monotonic()
    expect(tm.PeerLost, "rank 1", manager.maybe_wait_for_saving)
    assert time.monotonic() - began < 30
    trainer.close()
    print("rank 0 knows")
    sys.stdout.flush()
    os._exit(0)


def after_the_kill():
    """The steps before are whole, and the job goes on as if nothing had happened."""
    assert steps_of("killed") == ["step-2", "step-4"]
    assert train("killed", steps=8) == train("reference", steps=8, stock=True)[4:]
    assert steps_of("killed") == ["step-2", "step-4", "step-6", "step-8"]


def seed_checkpoint():
    trainer = build("seed", create_seed_checkpoint=True, last_save_model_only=True)
    trainer.checkpointer.save(curr_step=0, last_step=True)
    torch.save(state_of(trainer), "seed.pt")
    trainer.close()


def from_seed():
    trainer = build("seed")
    assert trainer.checkpointer.load()
    model = trainer.model_parts[0].state_dict().keys()
    check_same(state_of(trainer), torch.load("seed.pt") | {
        key: value for key, value in state_of(trainer).items() if key not in model})
    assert trainer.step == 0
    trainer.close()


def guide(loop):
    """The loop of the guide, with the configuration of these tests, to step 4 and then to step 8."""
    import torchtitan_cpu
    from torchtitan.models.llama3 import config_registry

    for last in (4, 8):
        made = torchtitan_cpu.config("outputs", CheckpointManager.Config(), last)
        with mock.patch.object(config_registry, "llama3_debugmodel", lambda made=made: made):
            exec(loop, {"__name__": "guide"})
    dist.barrier()
    assert steps_of("outputs") == ["step-4", "step-6", "step-8"], steps_of("outputs")


def command_line():
    """The override replaces torchtitan's manager, without a change to the program."""
    import torchtitan_cpu

    made = torchtitan_cpu.config("cli", CheckpointManager.Config(interval=2), 2)
    made.override.imports = [("tensormount.torchtitan.checkpoints", {"retention": "last=3"})]
    trainer = made.build()
    manager = trainer.checkpointer
    assert type(manager) is tm.torchtitan.CheckpointManager and manager.interval == 2, manager
    assert manager._options["retain"] == "last=3", manager._options
    trainer.close()


def expect(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError("no error")


# ---- Tests ---------------------------------------------------------------------------------------


def scenario(name, *arguments):
    globals()[name](*arguments)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"passed: {name}", flush=True)


class Trainers(support.Folder):
    """The real trainer on two ranks. One pair of processes runs all scenarios, because importing torchtitan takes
    them ten seconds; each test asks for one."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        import torchtitan_cpu

        torchtitan_cpu.make_assets()
        cls.enterClassContext(mock.patch.dict(os.environ, HF_HOME=os.path.abspath("hf-home")))
        with open(os.path.join(support.ROOT, "docs", "trainers.md"), encoding="utf-8") as file:
            loops = re.findall(r"<!-- executed by tests/trainers/torchtitan_test.py -->\n```python\n(.*?)```",
                               file.read(), re.DOTALL)
        torchrun(HERE, 1, ("seed_checkpoint",))
        cls.killed = Ranks(HERE, 2, ("killed", signal.SIGKILL))
        cls.killed_status = cls.killed.agent.wait(LIMIT)
        cls.killed.close()
        names = ("after_the_kill", "resume", "reshard", "pipeline", "fused_projections", "keys_of_ranks",
                 "ranks_that_differ", "stock_checkpoints", "retention", "last_step", "from_seed", "command_line", "one_rank_fails")
        try:
            cls.said = torchrun(HERE, 2, *(("scenario", name) for name in names), ("scenario", "guide", *loops))
        except AssertionError as error:
            cls.said = str(error)

    def check(self, *names):
        for name in names:
            if f"passed: {name}\n" not in self.said:
                self.fail(f"{name}: {self.said}")

    def test_fused_projections_are_not_gathered(self):
        self.check("fused_projections")

    def test_losses_after_a_resume_are_exact(self):
        self.check("resume")

    def test_weights_and_moments_on_another_mesh_are_exact(self):
        self.check("reshard", "pipeline")

    @support.needs_long
    def test_weights_on_a_mesh_of_two_axes_are_exact(self):
        torchrun(HERE, 4, ("two_axes",))

    def test_each_rank_finds_the_state_of_its_data_loader(self):
        self.check("keys_of_ranks")

    def test_checkpoints_of_torchtitan_load_and_ours_export_to_it(self):
        self.check("stock_checkpoints")

    def test_rules_remove_old_steps_after_the_commit_of_the_next(self):
        self.check("retention")

    def test_the_last_step_has_the_model_and_its_format(self):
        self.check("last_step")

    def test_a_seed_checkpoint_of_one_rank_loads_on_two(self):
        self.check("from_seed")

    def test_the_override_of_the_command_line_replaces_the_manager(self):
        self.check("command_line")

    def test_an_error_on_one_rank_fails_all(self):
        self.check("one_rank_fails")

    def test_a_rank_killed_in_a_save_leaves_the_steps_before(self):
        self.assertEqual(self.killed_status, 1)
        self.check("after_the_kill")

    def test_the_other_ranks_hear_of_a_lost_one(self):
        shutil.rmtree("killed")
        self.assertIn("rank 0 knows", torchrun(HERE, 2, ("killed", 0)))

    def test_the_loop_of_the_guide_resumes(self):
        self.check("guide")


class Part:
    """A stateful part of a trainer."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Linear(3, 4, bias=False)
        self.output = torch.nn.Linear(3, 4, bias=False)
        self.output.weight = self.embedding.weight


class Manager(support.Folder):
    """The manager by itself, in this process."""

    def setUp(self):
        self.dump = os.path.join(self.folder, self._testMethodName)

    def manager(self, stock=False, dataloader=None, model=None, state=None, base_folder=None, **options):
        kind = CheckpointManager if stock else tm.torchtitan.CheckpointManager
        options = {"enable": True, "interval": 1, "last_save_model_only": False, "keep_latest_k": 0, **options}
        made = kind(
            kind.Config(**options), dataloader=dataloader or Part(), model_parts=[model or torch.nn.Linear(3, 2)],
            optimizers=Part(moment=torch.ones(2)), lr_schedulers=Part(last_epoch=3, lr_lambdas=[{}]),
            states={"train_state": Part(**(state or {"step": 7}))}, sd_adapter=None,
            base_folder=self.dump if base_folder is None else base_folder)
        self.addCleanup(made.close)
        return made

    def names(self):
        return [entry["checkpoint"] for entry in tm.Store(f"{self.dump}/checkpoint").list()]

    def test_values_of_the_data_loader_need_not_be_plain(self):
        state = {"dp_rank_0": b"\x80\x04", "words": {"a", "b"}, "deep": {"t": torch.arange(3), "range": range(3)}}
        self.manager(dataloader=Part(**state)).save(1)
        loader = Part(**{key: None for key in state})
        self.assertTrue(self.manager(dataloader=loader).load())
        self.assertEqual((loader.state["dp_rank_0"], loader.state["words"], loader.state["deep"]["range"]),
                         (b"\x80\x04", {"a", "b"}, range(3)))
        self.assertTrue(torch.equal(loader.state["deep"]["t"], torch.arange(3)))
        # Elsewhere they are refused by name, and nothing is saved.
        with self.assertRaisesRegex(tm.UnsupportedError, r"\['train_state'\]\['words'\]: set"):
            self.manager(state={"words": {1}}).save(2)
        with self.assertRaisesRegex(tm.UnsupportedError, "dataloader.f: "):
            self.manager(dataloader=Part(f=lambda: 0)).save(2)
        self.assertEqual(self.names(), ["step-1"])

    def test_tied_parameters_stay_tied(self):
        model, other = Tied(), Tied()
        self.manager(model=model).save(1)
        self.assertTrue(self.manager(model=other).load())
        self.assertTrue(torch.equal(other.output.weight, model.embedding.weight))
        tm.export(f"{self.dump}/checkpoint/step-1", f"{self.dump}/dcp", format="dcp")
        third = Tied()
        stock = self.manager(stock=True, model=third, initial_load_path=f"{self.dump}/dcp", folder="none")
        self.assertTrue(stock.load())
        self.assertTrue(torch.equal(third.output.weight, model.embedding.weight))

    def test_a_failed_background_save_is_raised_at_the_next_one(self):
        for mode in ("async", "async_with_pinned_mem"):
            manager = self.manager(async_mode=mode, folder=mode)
            manager.save(1)
            manager._options["before_publish"] = mock.Mock(side_effect=tm.BusyError("not now"))
            manager.save(2)
            manager.maybe_wait_for_staging()
            self.assertIsNone(manager.staging_future)
            with self.assertRaisesRegex(tm.BusyError, "not now"):
                manager.save(3)
            self.assertIsInstance(manager.save_future.exception(), tm.BusyError)
            self.assertTrue(manager.save_future.done())
            self.assertEqual([entry["checkpoint"] for entry in tm.Store(manager.folder).list()], ["step-1"])

    def test_background_saves_hold_the_tensors_of_their_step(self):
        for mode in ("async", "async_with_pinned_mem"):
            manager = self.manager(async_mode=mode, folder=mode, model=torch.nn.Linear(2048, 4096))
            pinned = mode == "async_with_pinned_mem"
            weight = manager.states["model"].model[0].weight
            expected = weight.detach().clone()
            with mock.patch.object(tm.torchtitan, "Saver", wraps=tm.Saver) as saver:
                manager.save(1)
            # With pinned memory the copy is made while training goes on, until the optimizer's step.
            self.assertEqual(saver.call_args.kwargs, {"stage_in_background": pinned})
            staging = manager.staging_future
            self.assertEqual(staging is not None, pinned)
            manager.maybe_wait_for_staging()
            self.assertTrue(staging is None or (staging.done() and staging.exception() is None))
            with torch.no_grad():
                weight.zero_()
            self.assertIsNone(manager.staging_future)
            manager.maybe_wait_for_saving()
            again = self.manager(folder=mode, model=torch.nn.Linear(2048, 4096))
            again.load()
            self.assertTrue(torch.equal(again.states["model"].model[0].weight, expected), mode)

    def test_a_save_is_done_when_it_is_committed(self):
        go_on = threading.Event()
        self.addCleanup(go_on.set)
        manager = self.manager(async_mode="async")
        manager._options["before_publish"] = lambda report: go_on.wait(60)
        manager.save(1)
        self.assertFalse(manager.save_future.done())
        with self.assertRaises(TimeoutError):
            manager.save_future.result(timeout=0.05)
        with self.assertRaises(TimeoutError):
            manager.save_future.exception(timeout=0.05)
        go_on.set()
        self.assertIsNone(manager.save_future.exception())
        self.assertTrue(manager.save_future.done())

    def test_close_waits_for_the_save_under_way(self):
        manager = self.manager(async_mode="async")
        manager._options["before_publish"] = lambda report: time.sleep(0.5)
        manager.save(1)
        manager.close()
        self.assertEqual(self.names(), ["step-1"])

    def test_steps_are_those_of_whole_names(self):
        manager = self.manager()
        self.assertEqual((manager._find_load_step(), manager.load()), (-1, False))
        for step in (9, 10):
            manager.save(step)
        for name in ("step-11-backup", "step-012", "a-step-13"):
            os.makedirs(f"{self.dump}/checkpoint/{name}")
            open(f"{self.dump}/checkpoint/{name}/.metadata", "w").close()
        self.assertEqual(manager._find_load_step(), 10)
        with self.assertRaisesRegex(FileNotFoundError, "load_step=12"):
            manager.load(12)

    def test_a_directory_in_the_way_is_reported_at_the_start(self):
        self.manager(stock=True).save(2)
        os.makedirs(f"{self.dump}/checkpoint/step-5")  # An interrupted save of torchtitan.
        with self.assertRaisesRegex(tm.AlreadyExistsError, "step-5: not a checkpoint.* later than step 2, .*Move it"):
            self.manager().load()
        reader = self.manager(load_only=True, async_mode="async")
        self.assertTrue(reader.load())
        self.assertFalse(reader.save(5, last_step=True) or reader.stager)
        os.rmdir(f"{self.dump}/checkpoint/step-5")
        self.manager().load()
        self.manager().save(5)
        self.manager(stock=True).save(9)
        with self.assertRaisesRegex(tm.AlreadyExistsError, "step-9: .* later than step 5"):
            self.manager().load(5)

    def test_a_step_is_replaced_and_its_space_freed_at_a_later_save(self):
        manager = self.manager()
        manager.save(1)
        first = tm.Store(manager.folder).latest()["uuid"]
        manager.save(1)
        self.assertNotEqual(tm.Store(manager.folder).latest()["uuid"], first)
        trash = f"{manager.folder}/.trash"
        self.assertTrue(os.listdir(trash))
        with mock.patch.object(tm.Store, "gc", lambda store, gc=tm.Store.gc: gc(store, grace=0)):
            manager.save(2)
        self.assertEqual(os.listdir(trash), [])
        with mock.patch.object(tm.Store, "gc", side_effect=tm.BusyError("later")), self.assertLogs("tensormount"):
            manager.save(3)
        self.assertEqual(self.names(), ["step-1", "step-2", "step-3"])

    def test_configurations_that_cannot_work_are_refused(self):
        config = tm.torchtitan.CheckpointManager.Config
        for kind, text, options in (
            (tm.InvalidArgumentError, 'rule "last=x"', {"retention": "last=x"}),
            (tm.InvalidArgumentError, "retain cannot be set there", {"save_options": {"retain": "last=3"}}),
            (tm.InvalidArgumentError, "before_publish cannot be", {"save_options": {"before_publish": print}}),
            (tm.InvalidArgumentError, "placement='x'", {"save_options": {"placement": "x"}}),
            (TypeError, "no option durable", {"save_options": {"durable": True}}),
            (tm.UnsupportedError, "gs://b/run: tensormount saves to file systems only", {"folder": "gs://b/run"}),
            (ValueError, "at least 2 checkpoint replicas", {"keep_latest_k": 1}),
            (ValueError, "Invalid async_mode", {"async_mode": "soon"}),
        ):
            with self.subTest(text), self.assertRaisesRegex(kind, text):
                config(**options)
        with self.assertRaisesRegex(tm.UnsupportedError, "dump_folder=gs://b"):
            self.manager(base_folder="gs://b")
        self.assertEqual(config(retention="policy", keep_latest_k=0).retention, "policy")

    def test_options_reach_the_save(self):
        far = f"{self.dump}/far"
        manager = self.manager(
            save_options={"page_hashes": True, "producer": "mine"}, retention="last=1", folder=far)
        for step in (1, 2):
            manager.save(step)
        self.assertEqual([entry["checkpoint"] for entry in tm.Store(far).list()], ["step-2"])
        self.assertIn("mine", support.run("info", f"{far}/step-2"))
        manager = self.manager(save_options={"replace": False}, folder="once")
        manager.save(1)
        with self.assertRaises(tm.AlreadyExistsError):
            manager.save(1)

    def test_a_failed_export_leaves_no_copy_of_the_model(self):
        manager = self.manager(folder="failed")
        manager.sd_adapter = mock.Mock(to_hf=dict)
        for name in ("export", "_save.save"):
            with mock.patch(f"tensormount.torchtitan.{name}", side_effect=tm.ResourceExhaustedError("disk full")):
                with self.assertRaisesRegex(tm.ResourceExhaustedError, "disk full"):
                    manager._save_hf({"w": torch.ones(9)}, f"{self.dump}/failed/step-5")
            left = f"{self.dump}/failed-hf"
            self.assertEqual(os.listdir(left) if os.path.isdir(left) else [], [])

    def test_a_disabled_manager_does_nothing(self):
        manager = self.manager(enable=False)
        self.assertFalse(manager.save(1) or manager.load())
        manager.maybe_wait_for_saving()
        self.assertFalse(os.path.exists(self.dump))

    def test_torchtitan_itself_is_unchanged(self):
        manager = self.manager(stock=True)
        manager.save(1)
        self.assertEqual(os.listdir(f"{self.dump}/checkpoint"), ["step-1"])
        self.assertTrue(os.path.isfile(f"{self.dump}/checkpoint/step-1/.metadata"))

    def test_versions_warn_once_and_missing_seams_refuse(self):
        _plugins._warned.clear()
        newer = mock.patch.object(torchtitan, "__version__", "9.0")
        with newer, self.assertLogs("tensormount", logging.WARNING) as logs:
            for _ in range(2):
                tm.torchtitan._check_seam()
        self.assertEqual(logs.output, ["WARNING:tensormount:torchtitan 9.0: tensormount was tested with 0.3"])
        with mock.patch.object(CheckpointManager, "dcp_save", lambda self, state_dict: None):
            with self.assertRaisesRegex(tm.UnsupportedError, "dcp_save takes no checkpoint_id"):
                tm.torchtitan._check_seam()


if __name__ == "__main__":
    main(globals())
