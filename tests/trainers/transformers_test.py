# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face transformers saves and resumes through tensormount.transformers."""

import contextlib
import io
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import unittest
import warnings
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "python"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import support
import tensormount as tm
from torchrun import main, torchrun

try:
    import torch
    import torch.distributed as dist
    import transformers
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
except ImportError as error:
    raise unittest.SkipTest(str(error))

from tensormount import _plugins

HERE = os.path.abspath(__file__)
warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

DATA = [{"input_ids": [(3 * i + j) % 64 for j in range(8)], "labels": [(3 * i + j) % 64 for j in range(8)]} for i in range(64)]


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        attention_dropout=0.1, tie_word_embeddings=True))


def trainer(folder, *, own=None, kind=Trainer, callbacks=(), fsdp=False, **options):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True, per_device_train_batch_size=2,
        **{"max_steps": 8, "save_steps": 4, "lr_scheduler_type": "cosine", **options})
    one = kind(
        model() if own is None else own, arguments, train_dataset=DATA, eval_dataset=DATA[:4],
        callbacks=[*callbacks, *([Gloo()] if fsdp else [])])
    one.remove_callback(transformers.trainer_callback.PrinterCallback)
    if fsdp:
        # Accelerate turns FSDP on for devices only; what the Trainer does with it is the same on a CPU.
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        one.is_fsdp_enabled = True
    return one


class Gloo(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **rest):
        model.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction.


class Began(TrainerCallback):
    """Keeps what the model and optimizer had when training began."""

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **rest):
        self.states = states(model, optimizer)


class OwnFormat(Trainer):
    """A Trainer that saves the model in its own way, as sentence-transformers does."""

    def _save(self, output_dir=None, state_dict=None):
        os.makedirs(output_dir, exist_ok=True)
        torch.save(self.model.state_dict(), os.path.join(output_dir, "pytorch_model.bin"))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.model.load_state_dict(torch.load(os.path.join(resume_from_checkpoint, "pytorch_model.bin")))


def states(model, optimizer):
    """Weights and moments, whole."""
    def whole(tensor):
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    weights = {key.removeprefix("module."): whole(value) for key, value in model.state_dict().items()}
    return weights, [{key: whole(value) for key, value in optimizer.state[p].items()} for p in model.parameters()]


def losses(one):
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


def same(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def visible(folder):
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


# ---- On several ranks ----------------------------------------------------------------------------


def train(kind):
    """Eight steps, of which the last four are done again from the checkpoint of the fourth."""
    folder, fsdp = f"ranks/{kind}", kind == "fsdp"
    one = trainer(folder, fsdp=fsdp)
    with tm.transformers.register(one, background=fsdp):
        one.train()
    began = Began()
    again = trainer(folder, fsdp=fsdp, callbacks=[began])
    with tm.transformers.register(again):
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    assert losses(again) == losses(one), (losses(again), losses(one))
    if dist.get_rank() == 0:
        torch.save(began.states, f"{folder}/states.pt")


def load(kind, fsdp):
    began = Began()
    one = trainer(f"ranks/{kind}-again", fsdp=fsdp, callbacks=[began], max_steps=5)
    with tm.transformers.register(one):
        one.train(resume_from_checkpoint=f"ranks/{kind}/checkpoint-4")
    assert same(began.states, torch.load(f"ranks/{kind}/states.pt"))
    assert len(losses(one)) == 5


def fail():
    """An error of one rank is one of all ranks."""
    rank = dist.get_rank()
    broken = mock.patch.object(torch.random, "get_rng_state", side_effect=RuntimeError("no state"))
    one = trainer("ranks/fails", max_steps=1, save_steps=1)
    with tm.transformers.register(one, arrival=60), broken if rank == 1 else contextlib.nullcontext():
        try:
            one.train()
        except Exception as error:
            assert "no state" in str(error) and ("rank 1" in str(error)) == (rank == 0), error
        else:
            raise AssertionError("no error")
    assert not os.path.exists("ranks/fails/checkpoint-1/tm-state")


def killed(kind):
    """Rank 1 dies in the second save, when its bytes are written."""
    def kill(report):
        if saves and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        saves.append(report)

    saves = []
    one = trainer("killed-rank", fsdp=kind == "fsdp")
    with tm.transformers.register(one, before_publish=kill):
        one.train()


# ---- Tests ---------------------------------------------------------------------------------------


class Ranks(support.Folder):
    def test_resume_is_exact_on_2_ranks_and_on_others(self):
        torchrun(HERE, 2, ("train", "ddp"), ("train", "fsdp"), ("load", "fsdp", True), ("fail",))
        torchrun(HERE, 1, ("load", "ddp", False), ("load", "fsdp", True), ("load", "fsdp", False))
        for kind in ("ddp", "fsdp"):
            self.assertEqual(visible(f"ranks/{kind}/checkpoint-8"),
                             ["config.json", "generation_config.json", "store.json", "tm-state", "trainer_state.json", "training_args.bin"])
            self.assertTrue(tm.verify(f"ranks/{kind}/checkpoint-8/tm-state")["whole"])
        if support.LONG:
            torchrun(HERE, 4, ("load", "ddp", False), ("load", "fsdp", True))


    def test_a_rank_that_dies_in_a_save_leaves_the_earlier_checkpoint(self):
        with self.assertRaises(AssertionError):
            torchrun(HERE, 2, ("killed", "fsdp"))
        self.assertTrue(tm.verify("killed-rank/checkpoint-4/tm-state")["whole"])
        self.assertFalse(os.path.exists("killed-rank/checkpoint-8/tm-state"))


class Registered(support.Folder):
    def setUp(self):
        super().setUp()
        _plugins._warned.clear()
        warnings.simplefilter("ignore")

    def train(self, folder, *, resume=None, background=False, store=None, hook=None, **options):
        one = trainer(folder, **options)
        with tm.transformers.register(one, store, background=background, before_publish=hook):
            one.train(resume_from_checkpoint=resume)
        return one

    def test_resume_is_exact(self):
        for number, options in enumerate(({}, {"store": "exact/store"}, {"background": True})):
            folder = f"exact/{number}"
            one = self.train(folder, **options)
            self.assertEqual(visible(folder), ["checkpoint-4", "checkpoint-8"])
            again = self.train(folder, resume=f"{folder}/checkpoint-4", **options)
            self.assertEqual(losses(again), losses(one))
            self.assertTrue(same(*(states(of.model, of.optimizer) for of in (one, again))))
        self.assertEqual(sorted(one["checkpoint"] for one in tm.Store("exact/store").list()), ["1.checkpoint-4", "1.checkpoint-8"])

    def test_the_last_checkpoint_and_limits_are_those_of_the_trainer(self):
        def run(folder, **options):
            one = trainer(folder, save_total_limit=2, save_steps=2)
            with tm.transformers.register(one, **options) if options else contextlib.nullcontext():
                one.train()
            again = trainer(folder, save_total_limit=2, save_steps=2, max_steps=9)
            with tm.transformers.register(again, **options) if options else contextlib.nullcontext():
                again.train(resume_from_checkpoint=True)
            return visible(folder), losses(again)

        expected = run("limit/theirs")
        self.assertEqual(expected[0], ["checkpoint-8", "checkpoint-9"])
        for number, options in enumerate(({"replace": True}, {"store": "limit/store"}, {"background": True})):
            self.assertEqual(run(f"limit/{number}", **options), expected)
        self.assertEqual(sorted(one["checkpoint"] for one in tm.Store("limit/store").list()), ["1.checkpoint-8", "1.checkpoint-9"])

    def test_the_best_model_is_loaded(self):
        class Worse(TrainerCallback):
            """The first evaluation is the best one."""

            def on_evaluate(self, args, state, control, metrics=None, **rest):
                metrics["eval_loss"] = float(state.global_step)

        def run(folder, kind=Trainer, **options):
            one = trainer(folder, kind=kind, save_total_limit=1, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2,
                          save_steps=2, metric_for_best_model="eval_loss", max_steps=4, callbacks=[Worse()])
            with tm.transformers.register(one, **options) if options else contextlib.nullcontext():
                one.train()
            return visible(folder), one.model.state_dict()

        expected = run("best/theirs")
        self.assertEqual(expected[0], ["checkpoint-2"])
        for number, options in enumerate(({"replace": True}, {"store": "best/store"}, {"background": True})):
            found = run(f"best/{number}", **options)
            self.assertEqual(found[0], expected[0])
            self.assertTrue(same(dict(found[1]), dict(expected[1])))
        self.assertEqual([one["checkpoint"] for one in tm.Store("best/store").list()], ["1.checkpoint-2"])

    def test_a_killed_save_leaves_the_earlier_checkpoint(self):
        """Although save_total_limit is 1."""
        def kill(report):
            saves.append(report)
            if len(saves) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        saves = []
        process = multiprocessing.get_context("fork").Process(
            target=lambda: self.train("killed", save_total_limit=1, hook=kill))
        process.start()
        process.join(120)
        self.assertEqual(process.exitcode, -signal.SIGKILL)
        self.assertEqual(visible("killed"), ["checkpoint-4", "checkpoint-8"])
        with self.assertRaisesRegex(tm.CheckpointNotFoundError, "checkpoint-8: the directory has no checkpoint: its save was interrupted"):
            self.train("killed", resume="killed/checkpoint-8")
        with self.assertRaisesRegex(tm.CheckpointNotFoundError, "nothing: the directory has no complete checkpoint"):
            self.train("nothing", resume=True)
        with self.assertLogs("tensormount", logging.WARNING) as logs:
            again = self.train("killed", resume=True, max_steps=6, save_steps=6, save_total_limit=1)
        self.assertIn("checkpoint-8: skipped, because the save of this checkpoint was interrupted", logs.output[0])
        self.assertEqual(len(losses(again)), 6)
        self.assertEqual(visible("killed"), ["checkpoint-6"])  # What was left of the other is removed.

    def test_a_background_failure_is_raised_and_removes_nothing(self):
        def fail(report):
            reports.append(report)
            if len(reports) == 2:
                raise RuntimeError("disk on fire")

        reports = []
        with self.assertRaisesRegex(RuntimeError, "disk on fire"):
            self.train("fails", save_total_limit=1, background=True, hook=fail)
        self.assertTrue(tm.verify("fails/checkpoint-4/tm-state")["whole"])

    def test_training_ends_with_its_last_background_save(self):
        one = trainer("ends", save_total_limit=1)
        with tm.transformers.register(one, background=True, before_publish=lambda report: time.sleep(0.5)):
            one.train()
            self.assertEqual(visible("ends"), ["checkpoint-8"])
            self.assertNotIn("tm-unfinished", visible("ends/checkpoint-8"))

    def test_the_newest_of_both_kinds_of_checkpoint_is_loaded(self):
        """Step 4 is saved by the Trainer itself, by us, and by the Trainer again, with other data each time."""
        for number in range(4):
            one = trainer("both", max_steps=4, seed=number)
            with tm.transformers.register(one) if number % 2 else contextlib.nullcontext():
                one.train()
            self.assertEqual("model.safetensors" in visible("both/checkpoint-4"), number % 2 == 0)
            again = trainer("both", max_steps=5)
            with tm.transformers.register(again):
                again.train(resume_from_checkpoint="both/checkpoint-4")
            self.assertEqual(losses(again)[:4], losses(one), number)
            began = Began()
            resumed = trainer("both-again", max_steps=5, callbacks=[began])
            with tm.transformers.register(resumed):
                resumed.train(resume_from_checkpoint="both/checkpoint-4")
            self.assertTrue(same(began.states, states(one.model, one.optimizer)), number)

    def test_files_of_the_checkpoint_are_restored(self):
        one = self.train("files", max_steps=4)
        with open("files/checkpoint-4/trainer_state.json") as file:
            text = file.read()
        os.unlink("files/checkpoint-4/config.json")
        with open("files/checkpoint-4/trainer_state.json", "w") as file:
            file.write(text[:100])  # As after a power cut.
        again = self.train("files", resume="files/checkpoint-4", max_steps=5)
        self.assertEqual(losses(again)[:4], losses(one))
        self.assertTrue(os.path.isfile("files/checkpoint-4/config.json"))
        with open("files/checkpoint-4/trainer_state.json") as file:
            self.assertEqual(file.read(), text)

    def test_only_the_model_is_saved_where_that_is_asked_for(self):
        one = self.train("model-only", max_steps=4, save_only_model=True)
        with tm.open("model-only/checkpoint-4/tm-state") as checkpoint:
            self.assertEqual(checkpoint.keys("optim*"), [])
        began = Began()
        self.train("model-only", resume=True, max_steps=5, callbacks=[began])
        self.assertTrue(same(began.states[0], states(one.model, one.optimizer)[0]))
        self.assertEqual(began.states[1][0], {})

    def test_a_trainer_with_a_format_of_its_own_resumes(self):
        one = self.train("own", kind=OwnFormat)
        again = self.train("own", kind=OwnFormat, resume="own/checkpoint-4")
        self.assertEqual(losses(again), losses(one))
        theirs = trainer("own", kind=OwnFormat, max_steps=4, seed=1)
        theirs.train()  # The Trainer itself saves the step again.
        again = self.train("own", kind=OwnFormat, resume="own/checkpoint-4", max_steps=5)
        self.assertEqual(losses(again)[:4], losses(theirs))
        with tm.open("own/checkpoint-4/tm-state") as checkpoint:
            self.assertIn("files/pytorch_model.bin", checkpoint.objects)
            self.assertEqual(checkpoint.keys("model*"), [])

    @support.needs("peft")
    def test_adapters_resume(self):
        import peft

        def adapted():
            return peft.get_peft_model(model(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, r=2))

        options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4}
        one = self.train("adapters", own=adapted(), **options)
        again = self.train("adapters", own=adapted(), resume="adapters/checkpoint-4", **options)
        self.assertEqual(losses(again), losses(one))
        self.assertIn("adapter_model.safetensors", visible("adapters/checkpoint-4"))
        with tm.open("adapters/checkpoint-4/tm-state") as checkpoint:
            self.assertEqual(checkpoint.keys("model*"), [])

    def test_the_checkpoint_is_exported_for_from_pretrained(self):
        one = self.train("export", max_steps=4)
        tm.export("export/checkpoint-4/tm-state", "export/hf", format="hf",
                  hf_rules=[{"prefix": "model.", "to": ""}, {"drop": "*"}])
        found = LlamaForCausalLM.from_pretrained("export/hf")
        inputs = torch.tensor([DATA[0]["input_ids"]])
        with torch.no_grad():
            self.assertTrue(torch.equal(found.eval()(inputs).logits, one.model.eval()(inputs).logits))

    def test_undo_leaves_no_trace(self):
        module, utils = dict(vars(transformers.trainer)), dict(vars(transformers.trainer_utils))
        one = trainer("trace", max_steps=2, save_steps=1, save_total_limit=1)
        before = [name for name in vars(one) if callable(vars(one)[name]) and hasattr(Trainer, name)]
        registered = tm.transformers.register(one)
        with self.assertRaisesRegex(tm.InvalidArgumentError, "registered already"):
            tm.transformers.register(one)
        one.train()
        for _ in range(2):
            registered.undo()
        self.assertEqual([name for name in vars(one) if callable(vars(one)[name]) and hasattr(Trainer, name)], before)
        self.assertEqual((dict(vars(transformers.trainer)), dict(vars(transformers.trainer_utils))), (module, utils))
        one.train()
        self.assertIn("optimizer.pt", visible("trace/checkpoint-2"))

    def test_unsupported_setups_are_refused(self):
        one = trainer("refused")
        with tm.transformers.register(one):
            for name, why in (("is_deepspeed_enabled", "DeepSpeed"), ("is_distributed_loading_by_transformers", "itself shards")):
                with mock.patch.object(one, name, True), self.assertRaisesRegex(tm.UnsupportedError, why):
                    one.train()
            with mock.patch.object(one.args, "push_to_hub", True), self.assertRaisesRegex(tm.UnsupportedError, "push_to_hub"):
                one.train()
        for wrong in ({"placement": "x"}, {"background": "no"}, {"root": "x"}):
            with self.assertRaises(tm.InvalidArgumentError):
                tm.transformers.register(one, **wrong)

    def test_versions_warn_once_and_missing_seams_refuse(self):
        one = trainer("versions")
        with mock.patch.object(tm.transformers.transformers, "__version__", "9.9.0"), self.assertLogs("tensormount", logging.WARNING) as logs:
            for _ in range(2):
                tm.transformers.register(one).undo()
        self.assertEqual(logs.output, ["WARNING:tensormount:transformers 9.9.0: tensormount was tested with 5.24"])
        with mock.patch.object(Trainer, "_save_rng_state", lambda self: None):
            with self.assertRaisesRegex(tm.UnsupportedError, "_save_rng_state takes no output_dir"):
                tm.transformers.register(one)

    def test_the_loop_of_the_guide_resumes(self):
        with open(os.path.join(support.ROOT, "docs", "trainers.md"), encoding="utf-8") as file:
            (loop,) = re.findall(r"<!-- executed by tests/trainers/transformers_test.py -->\n```python\n(.*?)```", file.read(), re.DOTALL)
        names = {"model": model(), "data": DATA, "options": {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}}
        os.makedirs("guide")
        os.chdir("guide")
        self.addCleanup(os.chdir, os.pardir)
        AcceleratorState._reset_state(True)
        with contextlib.redirect_stdout(io.StringIO()):
            first, second = dict(names), {**names, "model": model()}
            exec(loop.replace("max_steps=8", "max_steps=4"), first)
            exec(loop, second)
        self.assertEqual([len(losses(of["trainer"])) for of in (first, second)], [4, 8])
        self.assertEqual(visible("out"), ["checkpoint-4", "checkpoint-8"])


if __name__ == "__main__":
    main(globals())
