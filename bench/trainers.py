#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures saves and loads of each training framework by itself and through its plug-in. Prints JSON lines.

usage: trainers.py [--rounds N] [--folder FOLDER] [torchtitan | megatron | olmo | accelerate | transformers | lightning]...

Two gloo ranks on this machine (Lightning: one process), a state of some 10 to 100 MiB, in turns: "own_s" is the median
time of rank 0 by the framework itself, "ours_s" through tensormount, "ratio" the median of the ratios of the rounds.
"resume" is a whole run that resumes and trains one step. The frameworks sync nothing and check nothing.

Needs the frameworks (scripts/setup --with trainers: .cache/venv-trainers/bin/python3), and PYTHONPATH and
TENSORMOUNT_LIBRARY as for tests/python.
"""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "tests", "trainers"), os.path.join(ROOT, "tests", "python")]


class Times:
    """The times of calls, by what was measured and by whose code."""

    def __init__(self):
        self.seconds = {}

    @contextlib.contextmanager
    def of(self, what, ours):
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter()
        yield
        self.seconds.setdefault((what, ours), []).append(time.perf_counter() - begin)

    def told(self, framework, nbytes):
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_rank() != 0:
            return
        for what in dict.fromkeys(what for what, _ in self.seconds):
            # The first round is a warm-up.
            own, ours = (self.seconds[what, whose][1:] for whose in (False, True))
            print(json.dumps({
                "bench": "trainers", "framework": framework, "what": what, "mib": round(nbytes / (1 << 20), 1),
                "own_s": round(statistics.median(own), 3), "ours_s": round(statistics.median(ours), 3),
                "ratio": round(statistics.median(b / a for a, b in zip(own, ours)), 3), "n": len(own)}), flush=True)


def big_net():
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])


def state_bytes(model, optimizer):
    """The bytes of the weights and moments of this rank."""
    found = list(model.parameters())
    found += [value for one in list(found) for value in optimizer.state[one].values() if hasattr(value, "nbytes")]
    return sum(getattr(one, "_local_tensor", one).nbytes for one in found)


# ---- Each framework, on its ranks ----------------------------------------------------------------------------


def torchtitan(rounds):
    tests = importlib.import_module("torchtitan_test")
    import torch
    import torchtitan_cpu

    times, trainers = Times(), {}
    for ours in (False, True):
        manager = tests.tm.torchtitan.CheckpointManager if ours else tests.CheckpointManager
        options = manager.Config(interval=1, last_save_model_only=False, keep_latest_k=2)
        trainers[ours] = torchtitan_cpu.config(f"titan-{ours}", options, 9, layers=6).build()
        for one in trainers[ours].model_parts[0].parameters():
            one.grad = torch.ones_like(one)
        trainers[ours].optimizers.step()
        trainers[ours].optimizers.zero_grad()
    for number in range(1, rounds + 2):
        for ours, trainer in trainers.items():
            with torch.no_grad():
                for one in trainer.model_parts[0].parameters():
                    one.add_(0.001)
            trainer.step = number
            with times.of("save", ours):
                trainer.checkpointer.save(number)
            with times.of("load", ours):
                trainer.checkpointer.load(number)
    model = trainers[True].model_parts[0]
    times.told("torchtitan", 3 * sum(one._local_tensor.nbytes for one in model.parameters()) * 2)
    for trainer in trainers.values():
        trainer.close()


def megatron(rounds):
    tests = importlib.import_module("megatron_test")
    import megatron_cpu

    megatron_cpu.parallel()
    times = Times()
    big = dict(hidden_size=512, ffn_hidden_size=2048, num_query_groups=4, kv_channels=128)
    training = megatron_cpu.Training(**big)
    training.fill(0)
    for number in range(rounds + 1):
        training.fill(number + 1)
        for ours in (False, True):
            with times.of("save", ours):
                tests.save_state(training, f"megatron-{ours}-{number}", patched=ours)
            installed = tests.tm.megatron.install() if ours else contextlib.nullcontext()
            strategy = tests.strategies.TorchDistLoadShardedStrategy()
            with times.of("load", ours), installed:
                state = tests.dc.load(
                    training.sharded_state_dict(loads=True, sharding="fully_reshardable"), f"megatron-{ours}-{number}",
                    strategy)
                training.load_state_dict(state)
    times.told("megatron", sum(one.nbytes for one in training.state().values()))


def olmo(rounds):
    tests = importlib.import_module("olmo_test")
    import torch

    os.environ["OLMO_SHARED_FS"] = "1"
    times, model = Times(), big_net()
    tests.fully_shard(model).set_force_sum_reduction_for_comms(True)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 1024)).sum().backward()
    optim.step()
    for number in range(rounds + 1):
        with torch.no_grad():
            for one in model.parameters():
                one.add_(0.001)
        for ours in (False, True):
            with tests.tm.olmo.install() if ours else contextlib.nullcontext():
                with times.of("save", ours):
                    tests.olmo.save_model_and_optim_state(f"olmo-{ours}-{number}", model, optim)
                with times.of("load", ours):
                    tests.olmo.load_model_and_optim_state(f"olmo-{ours}-{number}", model, optim)
    times.told("olmo", 2 * state_bytes(model, optim))


def accelerate(rounds):
    tests = importlib.import_module("accelerate_test")
    import torch

    times = Times()
    tests.AcceleratorState._reset_state(True)
    accelerator = tests.accelerate.Accelerator(cpu=True)
    net = big_net()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(net(torch.ones(2, 1024)).sum())
    optimizer.step()
    for number in range(rounds + 1):
        with torch.no_grad():
            for one in net.parameters():
                one.add_(0.001)
        for ours in (False, True):
            with tests.tm.accelerate.register(accelerator) if ours else contextlib.nullcontext():
                with times.of("save", ours):
                    accelerator.save_state(f"accelerate-{ours}-{number}")
                with times.of("load", ours):
                    accelerator.load_state(f"accelerate-{ours}-{number}")
    times.told("accelerate", state_bytes(net, optimizer))


def transformers(rounds):
    tests = importlib.import_module("transformers_test")
    from transformers import LlamaConfig, LlamaForCausalLM

    times = Times()

    def trainer(folder, steps):
        own = LlamaForCausalLM(LlamaConfig(
            vocab_size=1024, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4))
        return tests.trainer(folder, own=own, max_steps=steps, save_steps=1, save_total_limit=1)

    for number in range(rounds + 1):
        for ours in (False, True):
            folder = f"transformers-{ours}-{number}"
            one = trainer(folder, 1)
            with tests.tm.transformers.register(one) if ours else contextlib.nullcontext():
                one.train()
                with times.of("save", ours):
                    one._save_checkpoint(one.model, None)
            again = trainer(folder, 2)
            with tests.tm.transformers.register(again) if ours else contextlib.nullcontext():
                with times.of("resume", ours):
                    again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    times.told("transformers", 3 * sum(one.nbytes for one in one.model.parameters()))


def lightning(rounds):
    tests = importlib.import_module("lightning_test")
    import torch

    class Big(tests.Model):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 1024), big_net(), torch.nn.Linear(1024, 2))

    times, trainers = Times(), {}
    for ours in (False, True):
        plugins = [tests.tm.lightning.CheckpointIO()] if ours else []
        trainers[ours] = tests.trainer(plugins=plugins, limit_train_batches=1, enable_checkpointing=False)
        trainers[ours].fit(Big(), tests.data())
    for number in range(rounds + 1):
        for ours, trainer in trainers.items():
            with torch.no_grad():
                for one in trainer.lightning_module.parameters():
                    one.add_(0.001)
            path = os.path.abspath(f"lightning-{ours}/{number}.ckpt")
            with times.of("save", ours):
                trainer.save_checkpoint(path)
            with times.of("load", ours):
                trainer.strategy.checkpoint_io.load_checkpoint(path, weights_only=False)
    times.told("lightning", state_bytes(trainer.lightning_module, trainer.optimizers[0]))


# ---- Here ----------------------------------------------------------------------------------------------------


FRAMEWORKS = {one.__name__: one for one in (torchtitan, megatron, olmo, accelerate, transformers, lightning)}


def run_on_a_rank(name, rounds):
    FRAMEWORKS[name](rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the checkpoints lie; default: a new one in TMPDIR")
    parser.add_argument("what", nargs="*", default=list(FRAMEWORKS))
    arguments = parser.parse_args()
    from torchrun import torchrun

    folder = arguments.folder or tempfile.mkdtemp()
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        for name in arguments.what:
            if name == "torchtitan":
                import torchtitan_cpu

                torchtitan_cpu.make_assets()
                os.environ["HF_HOME"] = os.path.abspath("hf-home")
            if name == "lightning":
                lightning(arguments.rounds)
                continue
            for line in torchrun(os.path.abspath(__file__), 2, ("run_on_a_rank", name, arguments.rounds)).splitlines():
                if line.startswith("{"):
                    print(line, flush=True)
    finally:
        os.chdir(ROOT)
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    import torchrun

    # A rank that torchrun.py started has its calls in the arguments.
    if len(sys.argv) > 1 and sys.argv[1].startswith("["):
        torchrun.main(globals())
    else:
        main()
