# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer and Fabric save and resume through tensormount.lightning and patch_dcp."""

import collections
import contextlib
import io
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import unittest
import warnings
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "python"))

import support
import tensormount as tm
from torchrun import main, torchrun

try:
    import lightning
    import torch
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as Base
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from torch.utils.data import DataLoader, TensorDataset
except ImportError as error:
    raise unittest.SkipTest(str(error))

from tensormount import _directories, _plugins

HERE = os.path.abspath(__file__)
warnings.filterwarnings("ignore")
for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self, width=16, **more):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


class Sharded(Model):
    """For ModelParallelStrategy: FSDP2 on gloo."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def configure_model(self):
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(self.net, FSDPModule):
            return
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        self.net.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction.


def data():
    x = torch.arange(32 * 8.0).reshape(32, 8).sin()
    return DataLoader(TensorDataset(x, x[:, :2].cos()), batch_size=4)


def trainer(*, epochs=1, plugins=(), callbacks=(), **options):
    return lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, plugins=list(plugins), callbacks=list(callbacks), logger=False,
        enable_progress_bar=False, enable_model_summary=False, **{"devices": 1, "default_root_dir": ".", **options})


def fit(model=None, *, resume=None, callbacks=None, folder="out", **options):
    """Trains a new model; it, and its optimizer."""
    model = Model() if model is None else model
    if callbacks is None:
        callbacks = [ModelCheckpoint(dirpath=folder, save_top_k=-1, save_last=True)]
    one = trainer(callbacks=callbacks, **options)
    one.fit(model, data(), ckpt_path=resume)
    return model, one.optimizers[0]


def difference(a, b, where="state"):
    """The first place where two states are not the same bit for bit, in their types too; "": there is none."""
    if type(a) is not type(b):
        return f"{where}: {type(a)}, {type(b)}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{where}: {list(a)}, {list(b)}"
        return next(filter(None, (difference(a[key], b[key], f"{where}[{key!r}]") for key in a)), "")
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{where}: {len(a)}, {len(b)} items"
        return next(filter(None, (difference(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b)))), "")
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(a, b)
    elif type(a).__module__ == "numpy":
        same = a.dtype == b.dtype and bool((a == b).all())
    else:
        same = a == b
    return "" if same else f"{where}: {a}, {b}"


def visible(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def files(folder):
    """All files below a folder but those of empty stores."""
    return [os.path.join(path, name) for path, _, names in os.walk(folder) for name in names]


# ---- On several ranks ----------------------------------------------------------------------------


def on_ranks(strategy, size):
    os.environ["TORCHELASTIC_RUN_ID"] = "1"  # Lightning looks for it, and then starts no processes of its own.
    options = {"strategy": strategy, "devices": size, "use_distributed_sampler": True}
    if strategy == "ddp":
        return {**options, "plugins": [tm.lightning.CheckpointIO()]}
    from lightning.pytorch.strategies import ModelParallelStrategy

    return {**options, "strategy": ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)}


def states(model, optimizer):
    """Weights and moments, whole."""
    state = {"net": model.net.state_dict(), "optimizer": [optimizer.state[p] for p in model.net.parameters()]}

    def whole(value):
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        if isinstance(value, list):
            return [whole(item) for item in value]
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()

    return whole(state)


def train(strategy, size):
    """Two epochs, of which the second is done again from the checkpoint of the first."""
    kind = Sharded if strategy == "parallel" else Model
    with tm.torch.patch_dcp():
        whole, _ = fit(kind(), folder=f"{strategy}/a", epochs=2, **on_ranks(strategy, size))
        kept, optimizer = fit(kind(), folder=f"{strategy}/b", **on_ranks(strategy, size))
        found = states(kept, optimizer)
        if int(os.environ["RANK"]) == 0:
            torch.save(found, f"{strategy}/expected.pt")
        again, _ = fit(kind(), folder=f"{strategy}/b", epochs=2, resume=f"{strategy}/b/last.ckpt", **on_ranks(strategy, size))
    assert len(whole.losses) == 2 * len(again.losses) and whole.losses[len(again.losses):] == again.losses, (whole.losses, again.losses)


class Loaded(Callback):
    """Keeps what the model and optimizer had when training began."""

    def on_train_start(self, trainer, model):
        self.states = states(model, trainer.optimizers[0])


def load(strategy, size):
    """The checkpoint of the first epoch, on another number of ranks."""
    kind = Sharded if strategy == "parallel" else Model
    loaded = Loaded()
    with tm.torch.patch_dcp():
        fit(kind(), callbacks=[loaded], epochs=2, resume=f"{strategy}/b/epoch=0-step={32 // 4 // 2}.ckpt", limit_train_batches=1,
            **{**on_ranks(strategy, size), "enable_checkpointing": False})
    expected = torch.load(f"{strategy}/expected.pt")
    assert not difference(loaded.states, expected), difference(loaded.states, expected)


def fail(strategy, size):
    def refuse(report):
        raise RuntimeError("disk on fire")

    options = on_ranks(strategy, size)
    fit(folder="fail", **{**options, "plugins": [tm.lightning.CheckpointIO(before_publish=refuse)]})


# ---- Tests ---------------------------------------------------------------------------------------


class Kind:
    """A class of the program, of which torch.load knows nothing."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return type(other) is Kind and self.name == other.name


class Plain(torch.Tensor):
    pass


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("has an open socket")


class Plugin(support.Folder):
    def setUp(self):
        super().setUp()
        _plugins._warned.clear()
        warnings.simplefilter("ignore")  # unittest has undone that of the module.

    # ---- Trainer ------------------------------------------------------------------------------

    def test_resume_is_exact(self):
        whole, _ = fit(folder="exact/a", epochs=2, plugins=[tm.lightning.CheckpointIO()])
        fit(folder="exact/b", plugins=[tm.lightning.CheckpointIO()])
        for folder, resume in (("c", "exact/b/epoch=0-step=8.ckpt"), ("b", "last")):
            again, _ = fit(folder=f"exact/{folder}", epochs=2, resume=resume, plugins=[tm.lightning.CheckpointIO()])
            self.assertEqual(whole.losses[8:], again.losses, resume)
            self.assertEqual(difference(whole.state_dict(), again.state_dict()), "")

    def test_names_and_removals_are_those_of_lightning(self):
        def run(folder, link, plugins):
            callbacks = [ModelCheckpoint(dirpath=folder, save_top_k=2, monitor="loss", mode="max", every_n_train_steps=2,
                                         save_last="link" if link else True, filename="{step}")]
            fit(callbacks=callbacks, epochs=2, plugins=plugins)
            return visible(folder), callbacks[0]

        for link in (False, True):
            expected, _ = run(f"theirs-{link}", link, [])
            self.assertEqual(len(expected), 3)
            for number, (store, background) in enumerate(((False, False), (True, False), (False, True), (True, True))):
                with self.subTest(link=link, store=store, background=background):
                    folder = f"ours-{link}-{number}"
                    options = {"store": f"{folder}-store", "root": folder} if store else {}
                    plugin = tm.lightning.CheckpointIO(background=background, **options)
                    found, callback = run(folder, link, [plugin])
                    self.assertEqual(found, expected)
                    self.assertEqual([name for name in os.listdir(folder) if name.startswith(".")], [])
                    if store:
                        names = {one["checkpoint"] for one in tm.Store(f"{folder}-store").list()}
                        links = {name for name in found if os.path.islink(f"{folder}/{name}")}
                        self.assertEqual(names, {name.replace(".", "..") for name in set(found) - links})
                        self.assertEqual(files(f"{folder}/last.ckpt"), [])
                    for path in (callback.best_model_path, f"{folder}/last.ckpt"):
                        self.assertEqual(plugin.load_checkpoint(path)["global_step"], int(re.findall(r"step=(\d+)", os.path.realpath(path) + "step=16")[0]))

    def test_files_of_lightning_load_and_are_replaced(self):
        whole, _ = fit(folder="old-whole", epochs=2)
        for number, options in enumerate(({}, {"store": "old-store", "root": "."})):
            folder = f"old-{number}"
            fit(folder=folder)
            self.assertEqual([os.path.isfile(f"{folder}/{name}") for name in os.listdir(folder)], [True, True])
            plugin = tm.lightning.CheckpointIO(**options)
            again, _ = fit(folder=folder, epochs=2, resume="last", plugins=[plugin])
            self.assertEqual(whole.losses[8:], again.losses)
            self.assertTrue(os.path.isdir(f"{folder}/last.ckpt"))
            self.assertEqual(plugin.load_checkpoint(f"{folder}/last.ckpt")["global_step"], 16)
            os.rename(f"{folder}/last.ckpt", f"aside-{number}")
            torch.save({"step": 1}, f"{folder}/last.ckpt")  # A run that went back to Lightning's own.
            self.assertEqual(plugin.load_checkpoint(f"{folder}/last.ckpt"), {"step": 1})
            for name in visible(folder):
                plugin.remove_checkpoint(f"{folder}/{name}")
            self.assertEqual(os.listdir(folder), [])

    def test_a_link_is_replaced_and_not_written_through(self):
        plugin = tm.lightning.CheckpointIO()
        plugin.save_checkpoint({"step": 1}, "link/a.ckpt")
        for target in ("a.ckpt", "nowhere"):
            os.symlink(target, "link/last.ckpt")
            plugin.save_checkpoint({"step": 2}, "link/last.ckpt")
            self.assertEqual(plugin.load_checkpoint("link/a.ckpt"), {"step": 1})
            self.assertEqual(plugin.load_checkpoint("link/last.ckpt"), {"step": 2})
            plugin.remove_checkpoint("link/last.ckpt")
        with mock.patch("tensormount.lightning._exchange", side_effect=OSError(22, "")):  # As on NFS.
            os.symlink("a.ckpt", "link/last.ckpt")
            plugin.save_checkpoint({"step": 3}, "link/last.ckpt")
        self.assertEqual(plugin.load_checkpoint("link/last.ckpt"), {"step": 3})
        self.assertEqual(os.listdir("link/a.ckpt/.trash"), [])
        self.assertEqual(sorted(os.listdir("link")), ["a.ckpt", "last.ckpt"])

    def test_a_killed_save_leaves_the_earlier_checkpoint_and_no_other(self):
        for background in (False, True):
            with self.subTest(background=background):
                folder = f"killed-{background}"

                def run(hook=None):
                    fit(folder=folder, epochs=2, callbacks=[ModelCheckpoint(dirpath=folder, save_top_k=-1)],
                        plugins=[tm.lightning.CheckpointIO(background=background, before_publish=hook)])

                def kill(report):
                    # In the background the second save may come here first.
                    if os.path.dirname(report["path"]) != _directories.sibling(os.path.abspath(first)):
                        end = time.monotonic() + 60
                        while not os.path.exists(first) and time.monotonic() < end:
                            time.sleep(0.01)
                        os.kill(os.getpid(), signal.SIGKILL)

                first = f"{folder}/epoch=0-step=8.ckpt"
                child = multiprocessing.get_context("fork").Process(target=run, args=(kill,))
                child.start()
                child.join(120)
                self.assertEqual(child.exitcode, -signal.SIGKILL)
                # A directory that is not complete would be taken for the last checkpoint.
                self.assertEqual(visible(folder), ["epoch=0-step=8.ckpt"])
                self.assertTrue(tm.verify(f"{first}/tm-state")["whole"])
                again, _ = fit(folder=folder, epochs=2, resume=first, plugins=[tm.lightning.CheckpointIO()])
                self.assertEqual(len(again.losses), 8)
                # The save has taken the place of what was left.
                self.assertEqual([name for name in os.listdir(folder) if name.startswith(".")], [])
                self.assertEqual(os.listdir(f"{folder}/epoch=1-step=16.ckpt/.staging"), [])

    def test_a_replaced_checkpoint_is_the_newest_and_frees_the_old_one(self):
        for options in ({}, {"store": "newest/store"}):
            plugin = tm.lightning.CheckpointIO(**options)
            with mock.patch.object(tm.Store, "gc", autospec=True, side_effect=tm.Store.gc) as freed:
                for name in ("a", "b", "a"):
                    plugin.save_checkpoint({"w": torch.ones(1000)}, f"newest/{name}.ckpt")
                    os.utime(f"newest/{name}.ckpt", (1, 1)) if name == "b" else None
                    os.utime("newest/a.ckpt", (0, 0)) if name == "b" else None
                # Lightning compares these times.
                self.assertGreater(os.path.getmtime("newest/a.ckpt"), os.path.getmtime("newest/b.ckpt"))
                self.assertEqual(freed.call_count, 1)
                for name in ("a", "b"):
                    plugin.remove_checkpoint(f"newest/{name}.ckpt")
                self.assertEqual(freed.call_count, 3 if options else 1)

    def test_a_failure_in_the_background_is_raised_and_removes_nothing(self):
        def fail(report):
            if len(reports) == 1:
                removing.wait(60)  # Otherwise the call that removes could already raise the failure.
                raise RuntimeError("disk on fire")
            reports.append(report)

        reports = []
        removing = threading.Event()
        plugin = tm.lightning.CheckpointIO(background=True, before_publish=fail)
        plugin.save_checkpoint({"step": 1}, "fails/a.ckpt")
        end = time.monotonic() + 60
        while not reports and time.monotonic() < end:  # Two saves may be published in any order.
            time.sleep(0.01)
        plugin.save_checkpoint({"step": 2}, "fails/b.ckpt")
        with self.assertLogs("tensormount", logging.ERROR) as logs:
            plugin.remove_checkpoint("fails/a.ckpt")
            removing.set()
            with self.assertRaisesRegex(RuntimeError, "disk on fire"):
                plugin.teardown()
        self.assertIn("fails/b.ckpt: disk on fire", logs.output[0])
        self.assertEqual(visible("fails"), ["a.ckpt"])
        plugin.teardown()  # It was raised once.
        reports.clear()
        plugin.save_checkpoint({"step": 3}, "fails/b.ckpt")
        plugin.remove_checkpoint("fails/a.ckpt")
        plugin.teardown()
        self.assertEqual((visible("fails"), plugin.load_checkpoint("fails/b.ckpt")), (["b.ckpt"], {"step": 3}))

    def test_background_saves_copy_first_and_load_waits_for_them(self):
        go_on = threading.Event()
        plugin = tm.lightning.CheckpointIO(background=True, before_publish=lambda report: go_on.wait(60) and None)
        weights = torch.ones(1000)
        plugin.save_checkpoint({"w": weights}, "copied/a.ckpt")
        weights.fill_(2)
        self.assertFalse(os.path.exists("copied/a.ckpt"))
        threading.Timer(0.3, go_on.set).start()
        plugin.save_checkpoint({"w": weights}, "copied/a.ckpt")  # Waits for the first save to the same path.
        self.assertTrue(go_on.is_set() and os.path.exists("copied/a.ckpt"))
        go_on.clear()
        threading.Timer(0.3, go_on.set).start()
        self.assertTrue(torch.equal(plugin.load_checkpoint("copied/a.ckpt")["w"], torch.full((1000,), 2.0)))
        plugin.teardown()

    def test_lightnings_own_async_plugin_works(self):
        plugin = AsyncCheckpointIO(tm.lightning.CheckpointIO())
        fit(folder="async", plugins=[plugin])
        self.assertEqual(visible("async"), ["epoch=0-step=8.ckpt", "last.ckpt"])
        self.assertEqual(tm.lightning.CheckpointIO().load_checkpoint("async/last.ckpt")["global_step"], 8)

    def test_pinned_checkpoints_are_kept(self):
        for options in ({}, {"store": "pinned/store"}):
            plugin = tm.lightning.CheckpointIO(**options)
            plugin.save_checkpoint({"step": 1}, "pinned/a.ckpt")
            store, name = ("pinned/store", "a..ckpt") if options else ("pinned/a.ckpt", "tm-state")
            tm.Store(store).pin(name)
            with self.assertLogs("tensormount", logging.WARNING) as logs:
                plugin.remove_checkpoint("pinned/a.ckpt")
            self.assertIn("pinned/a.ckpt: kept", logs.output[0])
            self.assertIn(f"{store}/{name}", logs.output[0])  # And no path of a directory for incomplete data.
            self.assertEqual(plugin.load_checkpoint("pinned/a.ckpt"), {"step": 1})
            tm.Store(store).unpin(name)
            plugin.remove_checkpoint("pinned/a.ckpt")
            plugin.remove_checkpoint("pinned/a.ckpt")  # Nothing is there.
            self.assertFalse(os.path.lexists("pinned/a.ckpt"))

    def test_a_models_class_loads_from_the_checkpoint_as_a_file(self):
        model, _ = fit(Model(width=24), folder="class", plugins=[tm.lightning.CheckpointIO()])
        found = Model.load_from_checkpoint(tm.lightning.CheckpointIO().as_file("class/last.ckpt"))
        self.assertEqual((found.hparams["width"], difference(found.state_dict(), model.state_dict())), (24, ""))

    def test_fabric_saves_and_loads(self):
        def setup():
            fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[tm.lightning.CheckpointIO()])
            torch.manual_seed(1)
            model = torch.nn.Linear(4, 4)
            model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
            return fabric, {"model": model, "optimizer": optimizer, "step": 0}

        fabric, state = setup()
        fabric.backward(state["model"](torch.ones(2, 4)).sum())
        state["optimizer"].step()
        state["step"] = 1
        fabric.save("fabric/x.ckpt", state, filter={"model": lambda key, value: key != "bias"})
        _, again = setup()
        rest = fabric.load("fabric/x.ckpt", {**again, "step": again["step"]}, strict=False)
        self.assertEqual(rest, {})
        self.assertEqual(difference(again["optimizer"].state_dict(), state["optimizer"].state_dict()), "")
        self.assertTrue(torch.equal(again["model"].weight, state["model"].weight))
        self.assertFalse(torch.equal(again["model"].bias, state["model"].bias))
        fabric.save("fabric/raw.ckpt", dict(state["model"].state_dict()))
        fabric.load_raw("fabric/raw.ckpt", again["model"])
        self.assertTrue(torch.equal(again["model"].bias, state["model"].bias))

    # ---- Values ----------------------------------------------------------------------------------

    def test_every_value_is_held(self):
        shared = torch.arange(3.0)
        norm = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
        self.assertEqual(norm._metadata["0"], {"version": 2})
        kinds = collections.defaultdict(list, a=[1])
        import numpy

        state = {
            "state_dict": norm, "tied": [shared, shared], "kind": Kind("x"), 7: {"a.b": 1, "a": {"b": Kind("y")}},
            "array": numpy.arange(3), "scalar": numpy.float32(0.1), "set": {1, 2}, "nested": (1, [Kind("z"), None]),
            "sub": torch.ones(2).as_subclass(Plain), "grad": torch.ones(2, requires_grad=True), "defaults": kinds,
            "sparse": torch.eye(3).to_sparse(), "long": list(range(70000)), "text": "x" * 70000,
            "empty": {}, "none": None, "counter": collections.Counter("abc"), "ordered": collections.OrderedDict(b=1, a=2),
            "half": torch.full((2, 2), -0.0, dtype=torch.bfloat16), "mean": {"tensormount.torch_save": "a program's own"},
            "size": torch.Size([2]), "type": torch.float16, "flags": [True, 1, 1.0, float("nan")], "bytes": b"\0" * 70000,
            "keys": {Kind: "a key that is a class"},
        }
        plugin = tm.lightning.CheckpointIO()
        plugin.save_checkpoint(state, "values/a.ckpt")
        found = plugin.load_checkpoint("values/a.ckpt", weights_only=False)
        self.assertIs(type(found["array"]), numpy.ndarray)
        self.assertEqual(difference(found.pop("sparse").to_dense(), torch.eye(3)), "")
        self.assertEqual(found["state_dict"]._metadata, norm._metadata)
        self.assertTrue(found["grad"].requires_grad)
        self.assertIs(found["tied"][0], found["tied"][1])
        self.assertEqual(repr(found["flags"]), repr(state["flags"]))
        for name in ("sparse", "flags"):
            state.pop(name), found.pop(name, None)
        self.assertEqual(difference(found, state), "")
        with tm.open("values/a.ckpt/tm-state") as checkpoint:  # Tensors are tensors, not bytes.
            self.assertIn("state_dict.0.running_mean", checkpoint.keys())
            self.assertNotIn("grad", checkpoint.keys())
        plugin.save_checkpoint({Kind: torch.ones(2)}, "values/b.ckpt")
        self.assertEqual(difference(plugin.load_checkpoint("values/b.ckpt", weights_only=False), {Kind: torch.ones(2)}), "")

    def test_classes_are_not_loaded_unasked(self):
        plugin = tm.lightning.CheckpointIO()
        plugin.save_checkpoint({"hyper_parameters": {"kind": Kind("x")}}, "classes/a.ckpt")
        with self.assertRaisesRegex(tm.UnsupportedError, r"hyper_parameters\.kind: .*[Ww]eights.only"):
            plugin.load_checkpoint("classes/a.ckpt")
        with torch.serialization.safe_globals([Kind]):
            self.assertEqual(plugin.load_checkpoint("classes/a.ckpt")["hyper_parameters"]["kind"], Kind("x"))

    def test_a_value_that_cannot_be_pickled_is_refused_by_name(self):
        plugin = tm.lightning.CheckpointIO()
        with self.assertRaisesRegex(tm.UnsupportedError, r"state_dict\['a'\]\['b'\]\[1\]: .*Unpicklable cannot be stored: has an open socket"):
            plugin.save_checkpoint({"a": {"b": [1, Unpicklable()]}}, "refused/a.ckpt")
        loop = {}
        loop["again"] = [loop]
        with self.assertRaisesRegex(tm.LayoutError, "in a cycle"):
            plugin.save_checkpoint({"loop": loop}, "refused/a.ckpt")
        self.assertFalse(os.path.exists("refused/a.ckpt"))

    def test_tensors_go_where_map_location_says(self):
        plugin = tm.lightning.CheckpointIO()
        plugin.save_checkpoint({"w": torch.ones(2), "held": [Kind(torch.ones(2))]}, "located/a.ckpt")
        for location in ("meta", torch.device("meta"), {"cpu": "meta"}):
            found = plugin.load_checkpoint("located/a.ckpt", location, weights_only=False)
            self.assertEqual((found["w"].device.type, found["held"][0].name.device.type), ("meta", "meta"), location)
        found = plugin.load_checkpoint("located/a.ckpt", lambda storage, location: storage, weights_only=False)
        self.assertEqual((found["w"].device.type, found["held"][0].name.tolist()), ("cpu", [1, 1]))

    # ---- Options and errors --------------------------------------------------------------------------

    def test_options_of_a_save_are_kept(self):
        plugin = tm.lightning.CheckpointIO(store="options/store", page_hashes=True)
        one = trainer(plugins=[plugin], callbacks=[ModelCheckpoint(dirpath="options")])
        one.fit(Model(), data())
        one.save_checkpoint("options/b.ckpt", storage_options={"ephemeral": True})
        one.save_checkpoint("options/c.ckpt")
        names = [entry["checkpoint"] for entry in tm.Store("options/store").list()]
        self.assertEqual(sorted(names), ["c..ckpt", "epoch=0-step=8..ckpt"])
        with self.assertRaisesRegex(TypeError, "no option colour"):
            one.save_checkpoint("options/d.ckpt", storage_options={"colour": 1})
        with self.assertRaisesRegex(tm.AlreadyExistsError, "c.ckpt: exists already"):
            one.save_checkpoint("options/c.ckpt", storage_options={"replace": False})
        for wrong in ({"placement": "x"}, {"background": "no"}, {"root": "x"}):
            with self.assertRaises(tm.InvalidArgumentError):
                tm.lightning.CheckpointIO(**wrong)

    def test_paths_that_have_no_checkpoint_are_named(self):
        plugin = tm.lightning.CheckpointIO(store="none/store")
        os.makedirs("none/empty.ckpt")
        for path in ("none/empty.ckpt", "none/nothing.ckpt"):
            with self.assertRaisesRegex(tm.CheckpointNotFoundError, f"not found: {path}: .*none/store/"):
                plugin.load_checkpoint(path)

    def test_urls_are_left_to_lightning(self):
        plugin = tm.lightning.CheckpointIO()
        with self.assertLogs("tensormount", logging.WARNING) as logs:
            for step in (1, 2):
                plugin.save_checkpoint({"step": step}, "memory://a.ckpt")
        self.assertEqual(len(logs.output), 1)
        self.assertEqual(plugin.load_checkpoint("memory://a.ckpt"), {"step": 2})
        plugin.remove_checkpoint("memory://a.ckpt")
        with self.assertRaises(FileNotFoundError):
            plugin.load_checkpoint("memory://a.ckpt")
        plugin.save_checkpoint({"step": 3}, f"file://{os.getcwd()}/local/a.ckpt")
        self.assertEqual(plugin.load_checkpoint("local/a.ckpt"), {"step": 3})

    def test_the_plugin_is_pickled_without_what_is_under_way(self):
        plugin = tm.lightning.CheckpointIO(background=True)
        plugin.save_checkpoint({"step": 1}, "pickled/a.ckpt")
        again = pickle.loads(pickle.dumps(plugin))
        plugin.teardown()
        again.save_checkpoint({"step": 2}, "pickled/a.ckpt")
        self.assertEqual(again.load_checkpoint("pickled/a.ckpt"), {"step": 2})
        again.teardown()

    def test_a_forked_process_begins_anew(self):
        for background in (False, True):
            plugin = tm.lightning.CheckpointIO(background=background)
            for name in "ab":
                plugin.save_checkpoint({"step": 1}, f"forked/{background}/{name}.ckpt")
            plugin._wait()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    signal.alarm(60)
                    plugin.remove_checkpoint(f"forked/{background}/b.ckpt")
                    plugin.save_checkpoint({"step": 2}, f"forked/{background}/c.ckpt")
                    plugin.teardown()
                    status = int(plugin.load_checkpoint(f"forked/{background}/a.ckpt") != {"step": 1})
                finally:
                    os._exit(status)
            self.assertEqual(os.waitpid(child, 0)[1], 0, background)
            self.assertEqual(visible(f"forked/{background}"), ["a.ckpt", "c.ckpt"])
            plugin.save_checkpoint({"step": 3}, f"forked/{background}/a.ckpt")
            plugin.teardown()
            self.assertEqual(plugin.load_checkpoint(f"forked/{background}/c.ckpt"), {"step": 2})

    def test_a_failed_save_leaves_nothing(self):
        for number, options in enumerate(({}, {"background": True}, {"store": "left/store"})):
            folder = f"left/{number}"
            hook = mock.Mock(side_effect=RuntimeError("disk on fire"))
            plugin = tm.lightning.CheckpointIO(before_publish=hook, **options)
            with self.assertRaisesRegex(RuntimeError, "disk on fire"), self.quiet():
                plugin.save_checkpoint({"w": torch.ones(9)}, f"{folder}/a.ckpt")
                plugin.save_checkpoint({"w": torch.ones(9)}, f"{folder}/b.ckpt")
                plugin.teardown()
            self.assertEqual(os.listdir(folder), [], options)
        plugin = tm.lightning.CheckpointIO()
        full = mock.patch.object(os, "rename", side_effect=OSError(28, "No space left on device"))
        with full, self.assertRaisesRegex(OSError, "No space left"):
            plugin.save_checkpoint({"w": torch.ones(9)}, "left/3/a.ckpt")
        self.assertEqual(os.listdir("left/3"), [])

    def test_an_empty_path_is_refused(self):
        os.makedirs("nowhere/inside")
        os.chdir("nowhere")
        self.addCleanup(os.chdir, os.pardir)
        plugin = tm.lightning.CheckpointIO()
        for call in (lambda: plugin.save_checkpoint({}, ""), lambda: plugin.load_checkpoint(""),
                     lambda: plugin.remove_checkpoint("")):
            with self.assertRaisesRegex(tm.InvalidArgumentError, "path='': .* is empty"):
                call()
        self.assertEqual(os.listdir("."), ["inside"])

    @contextlib.contextmanager
    def quiet(self):
        logging.getLogger("tensormount").setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logging.getLogger("tensormount").setLevel(logging.NOTSET)

    def test_versions_warn_once_and_missing_seams_refuse(self):
        with mock.patch.object(lightning, "__version__", "9.9.0"), self.assertLogs("tensormount", logging.WARNING) as logs:
            for _ in range(2):
                tm.lightning.CheckpointIO()
        self.assertEqual(logs.output, ["WARNING:tensormount:Lightning 9.9.0: tensormount was tested with 2.6"])
        with mock.patch.object(Base, "load_checkpoint", lambda self, path: None):
            with self.assertRaisesRegex(tm.UnsupportedError, "load_checkpoint takes no map_location"):
                tm.lightning.CheckpointIO()

    def test_the_loop_of_the_guide_resumes(self):
        with open(os.path.join(support.ROOT, "docs", "trainers.md"), encoding="utf-8") as file:
            (loop,) = re.findall(r"<!-- executed by tests/trainers/lightning_test.py -->\n```python\n(.*?)```", file.read(), re.DOTALL)
        os.makedirs("guide")
        os.chdir("guide")
        self.addCleanup(os.chdir, os.pardir)
        first, second = {"__name__": "guide"}, {"__name__": "guide"}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(loop.replace("max_epochs=3", "max_epochs=1"), first)
            exec(loop, second)
        self.assertEqual([names["trainer"].global_step for names in (first, second)], [4, 12])
        self.assertTrue(tm.verify("out/last.ckpt/tm-state")["whole"])


class Ranks(support.Folder):
    def test_resume_is_exact_on_2_ranks_and_on_others(self):
        torchrun(HERE, 2, ("train", "ddp", 2), ("train", "parallel", 2), ("load", "parallel", 2))
        for strategy in ("ddp", "parallel"):
            self.assertTrue(tm.verify(f"{strategy}/b/last.ckpt/tm-state")["whole"])
        self.assertTrue(os.path.isfile("parallel/b/last.ckpt/meta.pt"))
        torchrun(HERE, 1, ("load", "ddp", 1), ("load", "parallel", 1))
        if support.LONG:
            torchrun(HERE, 4, ("load", "ddp", 4), ("load", "parallel", 4))
            with self.assertRaisesRegex(AssertionError, "disk on fire"):  # Ends all ranks.
                torchrun(HERE, 2, ("fail", "ddp", 2))
        with self.assertRaisesRegex(tm.UnsupportedError, "distributed strategy of Lightning"):
            tm.lightning.CheckpointIO().load_checkpoint("parallel/b/last.ckpt")


if __name__ == "__main__":
    main(globals())
