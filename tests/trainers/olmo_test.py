# SPDX-License-Identifier: Apache-2.0
"""OLMo-core through tm.olmo.install: its functions, its Checkpointer, and its trainer on several ranks."""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
import types
import unittest
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "python"))

import support
import tensormount as tm
from torchrun import Ranks, main, torchrun

try:
    import olmo_train
    import torch
    import torch.distributed as dist
    from olmo_core import io
    from olmo_core.distributed import checkpoint as olmo
    from olmo_core.generate.generation_module import TransformerGenerationModule
    from olmo_core.generate.generation_module.config import GenerationConfig
    from olmo_core.train import checkpoint as train_checkpoint
    from olmo_core.train.callbacks import checkpointer as callback
    from olmo_core.train.checkpoint import Checkpointer
    from olmo_core.train.train_module.transformer.ddp_train_module import OLMoDDPTrainModule
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
except ImportError as error:
    raise unittest.SkipTest(str(error))

from tensormount import _plugins

HERE = os.path.abspath(__file__)


# ---- On several ranks ----------------------------------------------------------------------------


def run_without_us():
    olmo_train.train("stock", 6, max_checkpoints=None)


def run_is_killed():
    """Rank 1 is killed in the background save of step 4, when its data are about to be written."""
    saves = []

    def strike(event):
        if (event["kind"], event["phase"]) == ("start", "write"):
            saves.append(event)
            if len(saves) == 3 and dist.get_rank() == 1:  # Steps 0, 2 and 4.
                os.kill(os.getpid(), signal.SIGKILL)

    tm.olmo.install(on_event=strike)
    olmo_train.train("ours", 6, max_checkpoints=None)


def run(folder, steps, options, checkpoints):
    with tm.olmo.install(**options) if options is not None else contextlib.nullcontext():
        olmo_train.train(folder, steps, **checkpoints)


def load_and_compare(step, expected, replicas):
    with tm.olmo.install():
        trainer = olmo_train.build("elsewhere", 6, replicas=replicas)
        trainer.load_checkpoint(step)
    state = olmo_train.whole_state(trainer.train_module)
    if dist.get_rank() == 0:
        assert_equal(state, torch.load(expected))
    assert trainer.global_step == 4


def assert_equal(found, expected, path=""):
    assert type(found) is type(expected), (path, type(found), type(expected))
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (path, found.keys() ^ expected.keys())
        for key in expected:
            assert_equal(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), path
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for number, one in enumerate(expected):
            assert_equal(found[number], one, f"{path}[{number}]")
    else:
        assert found == expected, (path, found, expected)


def sharded(tensor, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


def model_and_optim(seed, shard=False):
    """A small model after one step of training."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False))
    if shard:
        fully_shard(model).set_force_sum_reduction_for_comms(True)
    optim = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.01 * seed}, {"params": model[1].parameters(), "lr": 0.02 * seed}]
    )
    model(torch.arange(12.0).reshape(2, 6) * seed).sum().backward()
    optim.step()
    return model, optim


def moments(model, optim):
    """What a checkpoint has to keep, as local tensors."""
    local = [getattr(one, "_local_tensor", one).detach().clone() for one in model.parameters()]
    for one in model.parameters():
        local += [getattr(value, "_local_tensor", value).clone() for value in optim.state[one].values()]
    return local, [group["lr"] for group in optim.param_groups]


def functions_on_ranks(how):
    """save_model_and_optim_state and its like on a sharded model, on a process group of their own."""
    os.environ["OLMO_SHARED_FS"] = "1"
    own = dist.new_group()
    for flatten in (False, True):
        with tm.olmo.install():
            model, optim = model_and_optim(1, shard=True)
            expected = moments(model, optim)
            path = f"functions-{how}-{flatten}"
            if how == "sync":
                olmo.save_model_and_optim_state(
                    path, model, optim, process_group=own, flatten_optimizer_state=flatten, thread_count=2
                )
            else:
                olmo.async_save_model_and_optim_state(
                    path, model, optim, process_group=own, flatten_optimizer_state=flatten
                ).result()
            other, other_optim = model_and_optim(2, shard=True)
            olmo.load_model_and_optim_state(
                path, other, other_optim, process_group=own, flatten_optimizer_state=flatten
            )
        assert_equal(moments(other, other_optim), expected)


def state_dicts_on_ranks():
    """save_state_dict and its like: of a subgroup, with replicas that differ, and over an existing checkpoint."""
    os.environ["OLMO_SHARED_FS"] = "1"
    rank = dist.get_rank()
    some = dist.new_group([0, 2])
    with tm.olmo.install():
        if rank != 1:
            olmo.save_state_dict("some", {"w": torch.full((4,), 7.0), "step": 3}, process_group=some)
        dist.barrier()
        for number in range(2):
            state = {"w": sharded(torch.arange(10.0) + number), "rank": torch.full((2,), float(rank))}
            olmo.async_save_state_dict("again", state, process_group=dist.new_group(), save_overwrite=True).result()
            into = {"w": sharded(torch.zeros(10)), "rank": torch.zeros(2)}
            olmo.load_state_dict("again", into)
            assert torch.equal(into["w"].to_local(), state["w"].to_local()), (number, into)
            assert torch.equal(into["rank"], torch.zeros(2)), into  # The lowest rank's, as OLMo-core keeps it.
            dist.barrier()
        # An error of one rank ends the save on all of them.
        try:
            olmo.save_state_dict("fails", {"w": sharded(torch.zeros(9)), **({"v": Unsaveable()} if rank == 2 else {})})
        except BaseException as error:
            assert "Unsaveable" in str(error), error
        else:
            raise AssertionError("no error")
    dist.barrier()
    if rank == 0:
        assert not os.path.exists("fails/tm-state")
        with tm.open("some/tm-state") as checkpoint:
            assert checkpoint["w"][:].tolist() == [7.0] * 4


class Unsaveable:
    def __reduce__(self):
        raise ValueError("Unsaveable")


class Optimizer:
    """What OLMoDDPTrainModule asks of its optimizer: flat state, sharded over the ranks, and lists of numbers."""

    LOSSES_STATE_DICT_KEY, GRAD_NORMS_STATE_DICT_KEY = "losses", "grad_norms"
    device = torch.device("cpu")
    loaded = None

    def __init__(self, start):
        self.start = start

    def state_dict(self):
        flat = {
            f"model.w.{kind}": sharded(torch.arange(13.0) * (number + 1) + self.start)
            for number, kind in enumerate(("main", "exp_avg", "exp_avg_sq"))
        }
        return {**flat, "model.w.step": torch.tensor(float(self.start)), "losses": [self.start + 0.5], "grad_norms": []}

    def load_state_dict(self, state, **options):
        self.loaded = state

    def _copy_main_params_to_model_params(self):
        pass


class DirectModule(OLMoDDPTrainModule):
    """OLMoDDPTrainModule's own saving and loading. Its model needs a GPU."""

    def __init__(self, start):
        self.optim = Optimizer(start)
        self.bias = torch.full((3,), float(start))
        self.eval_only = self.expand_shared_qk_norm_on_load = self.reset_optimizer_states_on_load = False

    def _persistent_model_buffer_state_dict(self):
        return {"model.router.score_bias": self.bias}


def direct_module_saves():
    os.environ["OLMO_SHARED_FS"] = "1"
    with tm.olmo.install():
        checkpointer = Checkpointer(work_dir="work")
        checkpointer.save("direct/step1", DirectModule(5), {"rank": dist.get_rank()})
    assert os.path.isdir("direct/step1/model_and_optim/tm-state")


def direct_module_loads():
    os.environ["OLMO_SHARED_FS"] = "1"
    with tm.olmo.install():
        module = DirectModule(0)
        Checkpointer(work_dir="work").load("direct/step1", module)
    expected = Optimizer(5).state_dict()
    found = {key: getattr(value, "_local_tensor", value) for key, value in module.optim.loaded.items()}
    assert_equal(found, {key: getattr(value, "_local_tensor", value) for key, value in expected.items()})
    assert torch.equal(module.bias, torch.full((3,), 5.0)), module.bias


# ---- Tests ---------------------------------------------------------------------------------------


class Module:
    """A train module for Checkpointer, with one tensor and one value."""

    def __init__(self, number, state=None):
        self.number = number
        self.state = {"model": {"w": torch.full((1000,), float(number))}, "optim": {"lr": 0.1 * number}}
        self.state.update(state or {})

    def state_dict_to_save(self):
        return self.state

    def state_dict_to_load(self, metadata, optim=None):
        self.keys = set(metadata.state_dict_metadata)
        return self.state

    def load_state_dict(self, state):
        self.state = state

    def is_loaded(self, number):
        return torch.equal(self.state["model"]["w"], torch.full((1000,), float(number))) and (
            self.state["optim"]["lr"] == 0.1 * number
        )


class OneProcess(support.Folder):
    def setUp(self):
        super().setUp()
        _plugins._warned.clear()
        self.checkpointer = Checkpointer(work_dir="work")

    def names(self):
        """What each loaded module has under the names that are replaced."""
        found = {
            (module, name): value.__dict__[name]
            for module, value in list(sys.modules.items())
            if isinstance(value, types.ModuleType) and module != "tensormount.olmo"
            for name in ("RemoteFileSystemWriter", "RemoteFileSystemReader", "clear_directory", "file_exists")
            if name in value.__dict__
        }
        return {**found, "_get_tmp_dir": Checkpointer._get_tmp_dir}

    def steps(self, folder):
        return sorted(step for step, _ in Checkpointer.find_checkpoints(folder))

    def stored(self, store):
        return sorted(one["checkpoint"] for one in tm.Store(store).list())

    def test_names_are_replaced_and_put_back(self):
        before = self.names()
        self.assertEqual({one.__module__.split(".")[0] for one in before.values()}, {"olmo_core"})
        with tm.olmo.install():
            for module, name in (
                (olmo, "RemoteFileSystemWriter"), (olmo, "RemoteFileSystemReader"), (callback, "clear_directory"),
                (train_checkpoint, "file_exists"),
                (sys.modules[OLMoDDPTrainModule.__module__], "RemoteFileSystemWriter"),
            ):
                self.assertIsNot(getattr(module, name), before[module.__name__, name])
            self.assertIs(io.file_exists, before["olmo_core.io", "file_exists"])
            inner = tm.olmo.install(store="inner/store")
            inner.undo()
            inner.undo()
            self.assertTrue(issubclass(olmo.RemoteFileSystemWriter, tm.torch.Writer))
            late = types.ModuleType("late")
            late.RemoteFileSystemReader = olmo.RemoteFileSystemReader
            sys.modules["late"] = late
        self.assertIs(sys.modules.pop("late").RemoteFileSystemReader, before[olmo.__name__, "RemoteFileSystemReader"])
        self.assertEqual(self.names(), before)

    def test_versions_warn_once_and_missing_seams_refuse(self):
        with mock.patch("tensormount.olmo.VERSION", "9.9.0"), self.assertLogs("tensormount", logging.WARNING) as logs:
            for _ in range(2):
                tm.olmo.install().undo()
        self.assertEqual([line for line in logs.output if "9.9.0" in line],
                         ["WARNING:tensormount:OLMo-core 9.9.0: tensormount was tested with 3.0"])
        before = self.names()
        for owner, name, replaced, why in (
            (olmo, "RemoteFileSystemWriter", None, "has no RemoteFileSystemWriter"),
            (olmo, "RemoteFileSystemReader", lambda path: None, "RemoteFileSystemReader takes no thread_count"),
            (train_checkpoint, "file_exists", None, "has no file_exists"),
            (Checkpointer, "_get_tmp_dir", lambda self: None, "_get_tmp_dir takes no dir"),
        ):
            with mock.patch.object(owner, name, replaced), self.assertRaisesRegex(tm.UnsupportedError, why):
                tm.olmo.install()
        with self.assertRaisesRegex(tm.InvalidArgumentError, "placement"):
            tm.olmo.install(placement="x")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "without store="):
            tm.olmo.install(root="run")
        self.assertEqual(self.names(), before)

    def test_urls_go_to_olmo_core(self):
        stock = olmo.RemoteFileSystemWriter, olmo.RemoteFileSystemReader
        with tm.olmo.install():
            for made, kind in zip((olmo.RemoteFileSystemWriter("gs://bucket/x", thread_count=3),
                                   olmo.RemoteFileSystemReader("s3://bucket/x", thread_count=3)), stock):
                self.assertIs(type(made), kind)
                self.assertEqual(made.thread_count, 3)
            for name in ("RemoteFileSystemWriter", "RemoteFileSystemReader"):
                one = getattr(olmo, name)("file://" + os.path.abspath("local") + "/")
                self.assertEqual(one.checkpoint_id, os.path.abspath("local"))
                with self.assertRaisesRegex(tm.UnsupportedError, "s3://x/y: .*local directories only"):
                    one.reset("s3://x/y")

                class Own(getattr(olmo, name)):
                    pass

                with self.assertRaisesRegex(tm.UnsupportedError, "local directories only"):
                    Own("gs://bucket/x")

    def test_functions_of_olmo_core_save_and_load(self):
        with tm.olmo.install():
            for flatten in (False, True):
                path = f"alone-{flatten}"
                model, optim = model_and_optim(1)
                olmo.save_model_and_optim_state(path, model, optim, flatten_optimizer_state=flatten)
                self.assertTrue(tm.verify(f"{path}/tm-state")["whole"])
                other, other_optim = model_and_optim(2)
                olmo.load_model_and_optim_state(path, other, other_optim, flatten_optimizer_state=flatten)
                assert_equal(moments(other, other_optim), moments(model, optim))
                metadata = olmo.get_checkpoint_metadata(path).state_dict_metadata
                self.assertEqual(metadata["model.0.weight"].size, torch.Size([5, 6]))
                self.assertEqual("optim.param_groups.0.params" in metadata, not flatten)
                weight, state = olmo.load_keys(path, ["model.0.weight", "optim"])
                self.assertTrue(torch.equal(weight, model[0].weight))
                self.assertEqual(state["param_groups.1.weight.lr"] if flatten else state["param_groups"][1]["lr"], 0.02)
                with self.assertRaises(FileExistsError):
                    olmo.save_model_and_optim_state(path, model, optim)
            # Other names than in the checkpoint.
            renamed = torch.nn.ModuleDict({"first": torch.nn.Linear(6, 5), "1": torch.nn.Linear(5, 3, bias=False)})
            mapping = {"first.weight": "0.weight", "first.bias": "0.bias"}
            olmo.load_model_and_optim_state("alone-True", renamed, key_mapping=mapping)
            self.assertTrue(torch.equal(renamed["first"].weight, model[0].weight))
            # As files of torch and of safetensors.
            weights, optim_state = olmo.unshard_checkpoint("alone-False", "unsharded", quiet=True)
            assert_equal(dict(torch.load(weights)), dict(model.state_dict()))
            self.assertEqual([group["lr"] for group in torch.load(optim_state)["param_groups"]], [0.01, 0.02])
            strategy = olmo.UnshardStrategy.one_file_per_tensor()
            folder, _ = olmo.unshard_checkpoint("alone-False", "tensors", unshard_strategy=strategy,
                                                use_safetensors=True, quiet=True)
            self.assertEqual(len(os.listdir(folder)), 3)

    def test_steps_are_recognised_loaded_and_removed(self):
        with tm.olmo.install():
            for step in (1, 2, 3):
                self.checkpointer.save(f"run/step{step}", Module(step), {"step": step}, ephemeral=step == 2)
            self.assertEqual(sorted(os.listdir("run/step3")), [".metadata.json", "model_and_optim", "train"])
            self.assertTrue(os.path.isdir("run/step3/model_and_optim/tm-state"))
            self.assertEqual(self.steps("run"), [1, 2, 3])
            self.assertEqual([step for step, _ in Checkpointer.find_checkpoints("run", ephemeral=True)], [2])
            self.assertEqual(Checkpointer.latest_checkpoint("run"), "run/step3")
            self.assertTrue(Checkpointer.contains_checkpoint("run"))
            for path, number in (("run/step2", 2), ("run/step3/model_and_optim", 3)):
                module = Module(0)
                found = self.checkpointer.load(path, module)
                self.assertTrue(module.is_loaded(number))
                self.assertEqual(module.keys, {"model.w", "optim.lr"})
                self.assertEqual(found, {"step": 2} if number == 2 else None)
            # Only weights, as save_state_dict leaves them.
            self.assertTrue(Checkpointer.dir_is_checkpoint("run/step3/model_and_optim"))
            callback.clear_directory("run/step3")
            self.assertFalse(os.path.exists("run/step3"))
            self.assertEqual(self.steps("run"), [1, 2])
            for path, why in (("run/step9", "not a distributed checkpoint folder"),
                              ("run/step1", "Did you mean to use '.*/run/step1/model_and_optim'")):
                with self.assertRaisesRegex(FileNotFoundError, why):
                    olmo.get_checkpoint_metadata(path)
                with self.assertRaisesRegex(BaseException, why) as caught:
                    olmo.load_state_dict(path, Module(0).state)
                self.assertNotIn("rank", str(caught.exception).split("metadata is None")[1])
        self.assertEqual(self.steps("run"), [])  # Without us they are not checkpoints of OLMo-core.

    def test_existing_checkpoints_of_olmo_core_load(self):
        self.checkpointer.save("old/step1", Module(1), {"step": 1})
        with tm.olmo.install():
            self.checkpointer.save("old/step2", Module(2), {"step": 2})
            self.assertEqual(self.steps("old"), [1, 2])
            for step in (1, 2):
                module = Module(0)
                self.assertEqual(self.checkpointer.load(f"old/step{step}", module), {"step": step})
                self.assertTrue(module.is_loaded(step))
                self.assertEqual(next(olmo.load_keys(f"old/step{step}/model_and_optim", ["optim.lr"])), 0.1 * step)
            # Both in one directory, which OLMo-core clears before a save: the one that was saved last.
            writer = olmo.RemoteFileSystemWriter("old/step1/model_and_optim")
            torch.distributed.checkpoint.save(Module(3).state, storage_writer=writer)
            module = Module(0)
            self.checkpointer.load("old/step1", module)
            self.assertTrue(module.is_loaded(3))
        module = Module(0)
        self.checkpointer.load("old/step1", module)
        self.assertTrue(module.is_loaded(1))
        writer = olmo.RemoteFileSystemWriter("old/step1/model_and_optim")
        torch.distributed.checkpoint.save(Module(4).state, storage_writer=writer)
        with tm.olmo.install():
            self.checkpointer.load("old/step1", module)
        self.assertTrue(module.is_loaded(4))
        # And back.
        support.run("export", "--to", "dcp", "old/step2/model_and_optim/tm-state", "back")
        module = Module(0)
        olmo.load_state_dict("back", module.state)
        self.assertTrue(module.is_loaded(2))

    def test_a_failed_background_save_is_not_a_checkpoint(self):
        def fail(report):
            raise OSError("the disk is gone")

        with tm.olmo.install():
            self.checkpointer.save("failed/step1", Module(1), {})
            with tm.olmo.install(before_publish=fail):
                future = self.checkpointer.save_async("failed/step2", Module(2), {})
            with self.assertRaisesRegex(BaseException, "the disk is gone"):
                future.result()
            deadline = time.monotonic() + 20
            while not os.path.exists("failed/step2/.metadata.json"):  # OLMo-core writes it all the same.
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            self.assertEqual(Checkpointer.latest_checkpoint("failed"), "failed/step1")

    def test_a_store_shares_data_and_follows_removals(self):
        constant = {"frozen": torch.arange(100_000.0)}
        with tm.olmo.install(store="shared/store"):
            for step in (1, 2, 3):
                self.checkpointer.save(f"shared/step{step}", Module(step, constant), {"step": step})
            self.checkpointer.save_async("shared/step4", Module(4, constant), {"step": 4}).result()
            self.assertEqual(self.stored("shared/store"), [f"step{step}.model_and_optim" for step in (1, 2, 3, 4)])
            self.assertEqual(os.readlink("shared/step3/model_and_optim/tm-state"), "../../store/step3.model_and_optim")
            self.assertFalse(os.path.exists("shared/step3-tmp"))
            about = json.loads(support.run("info", "--json", "shared/store/step4.model_and_optim"))
            self.assertLess(about["own_bytes"], 100_000)
            os.rename("shared/step2", "shared/renamed")  # The link goes with it.
            module = Module(0, {"frozen": torch.zeros(100_000)})
            self.checkpointer.load("shared/renamed", module)
            self.assertTrue(module.is_loaded(2) and torch.equal(module.state["frozen"], constant["frozen"]))
            # A link that another program made.
            os.makedirs("shared/step2/model_and_optim")
            os.symlink("../../store/step1.model_and_optim", "shared/step2/model_and_optim/tm-state")
            for path in ("shared/step2", "shared/step3", "shared/absent"):
                callback.clear_directory(path)
                self.assertFalse(os.path.exists(path))
            # Only the checkpoint that was saved for the directory.
            self.assertEqual(self.stored("shared/store"), [f"step{step}.model_and_optim" for step in (1, 2, 4)])
            tm.Store("shared/store").pin("step4.model_and_optim")
            with self.assertLogs("tensormount", logging.WARNING) as logs:
                callback.clear_directory("shared/step4")
            self.assertIn("pinned", logs.output[0])
            self.assertIn("step4.model_and_optim", self.stored("shared/store"))
            # A directory that is gone does not get its old checkpoint back.
            os.makedirs("shared/step4/train")
            for name in ("train/rank0.pt", ".metadata.json"):
                open(f"shared/step4/{name}", "w").close()
            self.assertEqual(self.steps("shared"), [1])
            tm.Store("shared/store").remove("step1.model_and_optim")
            self.assertEqual(self.steps("shared"), [])
            with self.assertRaises(FileNotFoundError):
                self.checkpointer.load("shared/step1", Module(0), load_trainer_state=False)

    def test_a_link_does_not_replace_a_checkpoint(self):
        with tm.olmo.install():
            olmo.save_state_dict("both", Module(1).state)
        with tm.olmo.install(store="store", root="."):
            os.makedirs("linked")
            os.symlink("nowhere", "linked/.tm-state.new")  # As a save leaves it that is killed.
            for number in (2, 3):
                writer = olmo.RemoteFileSystemWriter("linked")
                torch.distributed.checkpoint.save(Module(number).state, storage_writer=writer)
            self.assertEqual(os.listdir("linked"), ["tm-state"])
            writer = olmo.RemoteFileSystemWriter("both")
            with self.assertRaisesRegex(BaseException, "both/tm-state: was saved without store="):
                torch.distributed.checkpoint.save(Module(2).state, storage_writer=writer)
            into = Module(0).state
            olmo.load_state_dict("both", into)
            self.assertEqual(into["optim"]["lr"], 0.1)
            olmo.load_state_dict("linked", into)
            self.assertAlmostEqual(into["optim"]["lr"], 0.3)

    def test_options_reach_the_save(self):
        saved = []
        with tm.olmo.install(on_commit=saved.append, replace=False):
            olmo.save_state_dict("options", {"w": torch.zeros(3)})
            writer = olmo.RemoteFileSystemWriter("options")
            with self.assertRaisesRegex(BaseException, "exists already"):
                torch.distributed.checkpoint.save({"w": torch.zeros(3)}, storage_writer=writer)
        self.assertEqual([os.path.basename(report["path"]) for report in saved], ["tm-state"])

    def test_readers_leave_nothing_open(self):
        with tm.olmo.install():
            olmo.save_state_dict("closed", {"w": torch.zeros(3)})
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                olmo.get_checkpoint_metadata("closed")
                olmo.load_state_dict("closed", {"w": torch.zeros(3)})
            self.assertLessEqual(len(os.listdir("/proc/self/fd")), before)


class Functions(support.Folder):
    def test_functions_save_and_load_on_ranks(self):
        torchrun(HERE, 2, ("functions_on_ranks", "sync"), ("functions_on_ranks", "async"), ("direct_module_saves",),
                 ("direct_module_loads",))
        torchrun(HERE, 3, ("state_dicts_on_ranks",), ("direct_module_loads",))


class Trainer(support.Folder):
    """The trainer of OLMo-core. `stock` is what it does without us."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        olmo_train.write_tokens()
        # In the foreground, because the trainer removes steps only while no save goes on in the background.
        kept = {"save_interval": 3, "ephemeral_save_interval": 1, "max_checkpoints": 1, "save_async": False}
        torchrun(HERE, 2, ("run_without_us",), ("run", "kept-stock", 5, None, kept), ("run", "kept-own", 5, {}, kept),
                 ("run", "kept-shared", 5, {"store": "kept-shared/store"}, kept))
        cls.stock = cls.losses("stock", 6)

    @staticmethod
    def losses(folder, steps):
        with open(f"losses-{folder}-{steps}") as file:
            return {int(step): loss for step, loss in json.load(file).items()}

    def steps(self, folder):
        return sorted(name for name in os.listdir(folder) if re.fullmatch(r"step\d+", name))

    def test_resume_after_a_killed_save_is_exact(self):
        with self.assertRaisesRegex(AssertionError, "run_is_killed on 2 ranks: 1"):
            torchrun(HERE, 2, ("run_is_killed",))
        with tm.olmo.install():
            self.assertEqual(Checkpointer.latest_checkpoint("ours"), "ours/step2")
        self.assertTrue(os.path.isdir("ours/step4/train"))
        shutil.copytree("stock", "old", ignore=shutil.ignore_patterns("step6"))
        torchrun(HERE, 2, ("run", "ours", 6, {}, {"max_checkpoints": None}), ("run", "old", 6, {}, {}))
        found = self.losses("ours", 6)
        self.assertEqual(found, {step: self.stock[step] for step in (3, 4, 5, 6)})
        # From a checkpoint of OLMo-core itself.
        self.assertEqual(self.losses("old", 6), {step: self.stock[step] for step in (5, 6)})
        self.assertTrue(os.path.isdir("old/step6/model_and_optim/tm-state"))
        self.assertTrue(os.path.isfile("old/step4/model_and_optim/.metadata"))
        for size, replicas in ((4, 2), (1, 1)):
            torchrun(HERE, size, ("load_and_compare", "ours/step4", "state-stock", replicas))

    def test_the_trainer_removes_the_same_steps(self):
        expected = self.steps("kept-stock")
        self.assertEqual(expected, ["step3", "step4", "step5"])
        self.assertEqual(self.steps("kept-own"), expected)
        self.assertEqual(self.steps("kept-shared"), expected)
        self.assertEqual(sorted(one["checkpoint"] for one in tm.Store("kept-shared/store").list()),
                         [f"{step}.model_and_optim" for step in expected])
        self.assertEqual(self.losses("kept-own", 5), self.losses("kept-stock", 5))


class Guide(support.Folder):
    def test_the_loop_of_the_guide_resumes(self):
        with open(os.path.join(support.ROOT, "docs", "trainers.md"), encoding="utf-8") as file:
            section = file.read().split("<!-- executed by tests/trainers/olmo_test.py -->\n")[1]
        loop = re.match(r"```python\n(.*?)```", section, re.DOTALL)[1]
        olmo_train.write_tokens()
        first, second = {}, {}
        for names, steps in ((first, 2), (second, 4)):
            self.addCleanup(lambda names=names: names["installed"].undo())
            exec(loop.replace("steps(4)", f"steps({steps})"), names)
        self.assertEqual([names["trainer"].global_step for names in (first, second)], [2, 4])
        self.assertEqual([names["trainer"].checkpoint_loaded for names in (first, second)], [False, True])
        self.assertTrue(tm.verify("out/step4/model_and_optim/tm-state")["whole"])
        # The model for generation is that of the last step.
        generation = TransformerGenerationModule.from_checkpoint(
            "out/step4", transformer_config=second["config"],
            generation_config=GenerationConfig(pad_token_id=1, eos_token_id=0),
        )
        assert_equal(dict(generation.model.state_dict()), dict(second["model"].state_dict()))


if __name__ == "__main__":
    main(globals())
