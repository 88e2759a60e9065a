# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core through tm.megatron.install, on CPU ranks."""

import contextlib
import gc
import itertools
import logging
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import time
import unittest
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "python"))

import support
import tensormount as tm
from torchrun import Ranks, main, torchrun

try:
    import torch
    import torch.distributed as dist
    import megatron_cpu
    from megatron.core import dist_checkpointing as dc
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor, serialization
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.dist_checkpointing.strategies import async_utils
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )
except ImportError as error:
    raise unittest.SkipTest(str(error))

from tensormount import _plugins
from tensormount.megatron import _optimizer, _strategy

HERE = os.path.abspath(__file__)
megatron_cpu.keep_results_in_this_process()
OLD = megatron_cpu.megatron.core.__version__.startswith("0.16")
# A strategy of Megatron itself, as its trainer makes it.
THEIRS = strategies.TorchDistSaveShardedStrategy
MCORE_ASYNC = {} if OLD else {"async_strategy": "mcore"}


def made(directory):
    """The directory, which rank 0 makes, as Megatron's trainer does."""
    if dist.get_rank() == 0:
        os.makedirs(directory, exist_ok=True)
    dist.barrier()
    return directory


def theirs(**options):
    return THEIRS("torch_dist", 1, **options)


# ---- Models, on several ranks --------------------------------------------------------------------


def save_model(tp, pp, ep, experts):
    """The same model through us, and by Megatron itself."""
    megatron_cpu.parallel(tp, pp, ep)
    model = megatron_cpu.gpt(experts)
    for who in ("ours", "theirs"):
        state = {**model.sharded_state_dict(), "iteration": 3, "args": {"tp": 2}}
        with tm.megatron.install() if who == "ours" else contextlib.nullcontext():
            dc.save(state, made(f"{who}-{experts}"), theirs(), content_metadata={"kind": experts})


def load_model(tp, pp, ep, experts):
    """Both checkpoints load into the same weights on another mesh, that of Megatron also through us."""
    megatron_cpu.parallel(tp, pp, ep)
    found = []
    for who, patched in (("theirs", False), ("theirs", True), ("ours", True)):
        torch.manual_seed(99)
        model = megatron_cpu.gpt(experts)
        before = [one.clone() for one in model.parameters()]
        with tm.megatron.install() if patched else contextlib.nullcontext():
            state, missing, unexpected = dc.load(model.sharded_state_dict(), f"{who}-{experts}", strict="return_all")
            common = dc.load_common_state_dict(f"{who}-{experts}")
            tensors = dc.load_tensors_metadata(f"{who}-{experts}")
            everything = serialization.load_sharded_metadata(f"{who}-{experts}")
            plain = dc.load_plain_tensors(f"{who}-{experts}")
            assert serialization.load_content_metadata(f"{who}-{experts}") == {"kind": experts}
        assert not missing and not unexpected, (missing, unexpected)
        assert dc.check_is_distributed_checkpoint(f"{who}-{experts}")
        assert (state.pop("iteration"), state.pop("args"), common["iteration"]) == (3, {"tp": 2}, 3), common
        state.pop("content_metadata")
        model.load_state_dict(state)
        assert any(not torch.equal(one, old) for one, old in zip(model.parameters(), before))
        shapes = {key: (one.global_shape, one.dtype) for key, one in tensors.items()}
        objects = {key for key, one in everything.items() if isinstance(one, ShardedObject)}
        found.append((dict(model.named_parameters()), plain, shapes, objects))
    for weights, plain, shapes, objects in found[1:]:
        assert (shapes, objects) == found[0][2:]
        assert_equal(weights, found[0][0])
        assert_equal({key: plain[key] for key in shapes}, {key: found[0][1][key] for key in shapes})


def assert_equal(found, expected):
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


# ---- State dicts of every kind, on two ranks -----------------------------------------------------


def every_kind(seed, fill=True):
    """A state dict whose leaves are of every kind. `fill`: with values of that seed; otherwise to load into."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == 2

    def values(*shape):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1000 * seed
        return whole if fill else torch.full_like(whole, -1.0)

    def halves(key, tensor, replica_id, flattened_range):
        """As Megatron's gated layers: a local tensor that is two parts of the whole one."""
        return {
            str(number): ShardedTensor.from_rank_offsets(
                key, part, (0, 2 * number + rank, 4), replica_id=replica_id)
            for number, part in enumerate(tensor.chunk(2))
        }

    uneven = values(7, 3)[(0, 5)[rank]:(5, 7)[rank]].clone()
    rows = values(6, 4)[3 * rank:3 * rank + 3].clone()
    gated = torch.cat([values(8, 3)[2 * rank:2 * rank + 2], values(8, 3)[2 * rank + 4:2 * rank + 6]])
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, 2)),
        "layers": [
            ShardedTensor.from_rank_offsets(
                "layer", values(4, 5)[2 * rank + number].clone(), (0, 2 * rank + number, 4), prepend_axis_num=1)
            for number in range(2)
        ],
        "uneven": ShardedTensor("uneven", uneven, uneven.dtype, tuple(uneven.shape), (7, 3), ((0, 0), (5, 0))[rank],
                                None),
        "both": ShardedTensor.from_rank_offsets("both", values(5).clone(), replica_id=rank),
        "gated": ShardedTensorFactory("gated", gated, halves, lambda parts: torch.cat([*parts.values()])),
        "padded": ShardedTensor.from_rank_offsets(
            "padded", values(8)[4 * rank:4 * rank + 4].clone(), (0, rank, 2), allow_shape_mismatch=True),
        "rng": ShardedObject("rng", [seed, rank, {"state": b"\0"}] if fill else None, (1, 2), (0, rank)),
        # Its copies differ.
        "copies": ShardedObject("copies", f"{seed} of {rank}" if fill else None, (1,), (0,), replica_id=1 - rank),
        "once": ShardedObject("once", f"seed {seed}" if fill else None, (1,), (0,), replica_id=rank),
        "mine": LocalNonpersistentObject(("local", rank)),
        "common": {"step": seed, "betas": (0.9, 0.95)},
        7: "a key that is a number",
    }


def assert_every_kind(found, seed):
    rank = dist.get_rank()
    expected = every_kind(seed)
    assert torch.equal(found["rows"], expected["rows"].data)
    assert len(found["layers"]) == 2
    for one, other in zip(found["layers"], expected["layers"]):
        assert torch.equal(one, other.data)
    for key in ("uneven", "both", "gated", "padded"):
        assert torch.equal(found[key], expected[key].data), key
    assert found["copies"] == f"{seed} of 1", found["copies"]
    assert found["rng"] == [seed, rank, {"state": b"\0"}] and found["once"] == f"seed {seed}"
    assert found["mine"] == ("local", rank)
    assert found["common"] == {"step": seed, "betas": (0.9, 0.95)} and found[7] == "a key that is a number"


def save_and_load_every_kind():
    """Through each strategy, with and without the wrappers that spread the work over the ranks."""
    for number, (strategy, wrapped) in enumerate((
        (lambda: None, False),
        (theirs, True),
        (tm.megatron.SaveStrategy, False),
        (tm.megatron.SaveStrategy, True),
        (lambda: tm.megatron.SaveStrategy(keep_only_main_replica=True), True),
    )):
        path = made(f"kinds-{number}")
        saves, loads = strategy(), None
        if wrapped:
            saves = FullyParallelSaveStrategyWrapper(saves, dist.group.WORLD, True)
            loads = FullyParallelLoadStrategyWrapper(strategies.TorchDistLoadShardedStrategy(), dist.group.WORLD)
        with tm.megatron.install():
            for seed in (1, 2):
                dc.save(every_kind(seed), path, saves)
                state, missing, unexpected = dc.load(every_kind(0, fill=False), path, loads, strict="return_all")
                assert not missing and not unexpected, (missing, unexpected)
                assert_every_kind(state, seed)
        if dist.get_rank() == 0:
            names = sorted(name for name in os.listdir(path) if not name.startswith("."))
            expected = ["metadata.json", "store.json", "tm-state"]
            assert names == (["common.pt"] if OLD else []) + expected, names
            assert tm.verify(f"{path}/tm-state")["whole"]
            with tm.open(f"{path}/tm-state") as checkpoint:
                assert checkpoint["layer"].shape == (4, 5) and checkpoint.objects.grid("rng") == (1, 2)
        dist.barrier()


def load_into_other_shapes():
    """A padded tensor loads what is stored of it, and zeros; a type is converted, as by Megatron."""
    rank = dist.get_rank()
    with tm.megatron.install():
        state = {
            "padded": ShardedTensor.from_rank_offsets(
                "padded", torch.full((6,), -1.0), (0, rank, 2), allow_shape_mismatch=True),
            "rows": ShardedTensor.from_rank_offsets("rows", torch.zeros(3, 4, dtype=torch.float64), (0, rank, 2)),
        }
        found = dc.load(state, "kinds-0")
        whole = torch.cat([torch.arange(8.0) + 2000, torch.zeros(4)])
        assert torch.equal(found["padded"], whole[6 * rank:6 * rank + 6]), found
        assert found["rows"].dtype == torch.float64 and found["rows"][0, 0] == 2000 + 12 * rank
        state = {"rows": ShardedTensor.from_rank_offsets("rows", torch.zeros(4, 4), (0, rank, 2))}
        with failing(BaseException, "shape mismatch"):
            dc.load(state, "kinds-0")


@contextlib.contextmanager
def failing(kind, text):
    """The block raises, with that text, within the time that a rank waits for others."""
    begin = time.monotonic()
    try:
        yield
    except kind as error:
        assert text in str(error), error
        assert time.monotonic() - begin < 60
    else:
        raise AssertionError(f"no {text}")


def one_rank_fails():
    """An error on one rank fails the save on all of them, and the checkpoint from before stays."""
    rank = dist.get_rank()

    def refuse(report):
        if rank == 1:
            raise ValueError("the disk of rank 1")

    path = made("fails")
    with tm.megatron.install():
        dc.save(every_kind(1), path)
    for number, (options, text) in enumerate((({"before_publish": refuse}, "the disk of rank 1"), ({}, "no data"))):
        state = every_kind(2)
        if number == 1 and rank == 1:
            state["rows"].data = None
        with tm.megatron.install(**options):
            with failing(Exception, text):
                dc.save(state, path)
            # Each rank has a request, a rank whose own state cannot be saved too: ranks finalize in collective calls.
            state = every_kind(2)
            if number == 1 and rank == 1:
                state["rows"].data = None
            later = made(f"fails-later-{number}")
            request = dc.save(state, later, async_sharded_save=True, **MCORE_ASYNC)
            with failing(Exception, text):
                finish([request])
            assert not dc.check_is_distributed_checkpoint(later)
    with tm.megatron.install():
        state = every_kind(0, fill=False)
        del state["common"], state[7]  # Megatron's own common.pt is already that of the second save.
        found = dc.load(state, path)
        assert found["once"] == "seed 1" and torch.equal(found["both"], every_kind(1)["both"].data)


def finish(requests, poll=None):
    """Runs requests as Megatron's trainer does: each step it asks whether they have ended."""
    calls = async_utils.AsyncCallsQueue()
    for request in requests:
        calls.schedule_async_request(request)
    if poll is not None:
        # Without a collective call: the ranks need not agree to learn that the save is over.
        for _ in range(5):
            assert calls.maybe_finalize_async_calls(no_dist=True) == [], "the save has not ended"
            time.sleep(0.05)
        poll()
    end = time.monotonic() + 60
    done = []
    while calls.get_num_unfinalized_calls():
        assert time.monotonic() < end
        done += calls.maybe_finalize_async_calls(no_dist=True)
        time.sleep(0.01)
    assert done == list(range(len(requests)))


def saves_in_background():
    """The tensors may change after the call, and nothing waits for the save before it has ended."""
    rank = dist.get_rank()

    def held(report):
        end = time.monotonic() + 60
        while not os.path.exists("go") and time.monotonic() < end:
            time.sleep(0.01)

    with tm.megatron.install(before_publish=held):
        state = every_kind(3)
        request = dc.save(state, made("later"), async_sharded_save=True, **MCORE_ASYNC)
        assert isinstance(request, async_utils.AsyncRequest)
        for one in (state["rows"], state["both"], state["uneven"]):
            one.data.zero_()
        # What Megatron sends to its own worker, which may be a spawned process.
        work = pickle.dumps(request._replace(finalize_fns=[]))
        worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent("""
            import pickle, sys
            sys.path.insert(0, sys.argv[1])
            import megatron_cpu
            request = pickle.loads(sys.stdin.buffer.read())
            request.async_fn(*request.async_fn_args)
            print("over")
            """), os.path.dirname(HERE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        worker.stdin.write(work)
        worker.stdin.close()

        def let_go():
            assert worker.poll() is None
            assert not os.path.exists("later/tm-state") and not dc.check_is_distributed_checkpoint("later")
            dist.barrier()
            if rank == 0:
                open("go", "w").close()

        finish([request], let_go)
        assert worker.wait(60) == 0 and worker.stdout.read() == b"over\n"
        worker.stdout.close()
    with tm.megatron.install():
        assert_every_kind(dc.load(every_kind(0, fill=False), "later"), 3)
        # Two saves under way, to one directory: the later one stays.
        requests = [
            dc.save(every_kind(seed), made("later"), async_sharded_save=True, **MCORE_ASYNC) for seed in (4, 5)
        ]
        finish(requests)
        assert_every_kind(dc.load(every_kind(0, fill=False), "later"), 5)
        # As a synchronous save of Megatron runs it.
        dc.save(every_kind(6), "later", async_sharded_save=True, **MCORE_ASYNC).execute_sync()
        assert_every_kind(dc.load(every_kind(0, fill=False), "later"), 6)


def replicas_are_shared_and_compared():
    """Without copies the main replica is written; with them each rank writes a part, and differences are noticed."""
    rank, reports = dist.get_rank(), []

    def state(value):
        whole = torch.full((1 << 18,), 1.0)
        whole[7] = value
        return {key: ShardedTensor.from_rank_offsets(key, whole.clone(), replica_id=(0, 0, 1 - rank))
                for key in "uvwxyz"}

    def cut(ends):
        """A tensor whose parts are of other sizes on each rank, which are no grid."""
        return [
            ShardedTensor("cuts", torch.arange(7.0)[begin:end].clone(), torch.float32, (end - begin,), (7,), (begin,),
                          None, replica_id=rank)
            for begin, end in zip((0, *ends), (*ends, 7))
        ]

    shares = []
    for number, only_main in enumerate((True, False)):
        strategy = tm.megatron.SaveStrategy(keep_only_main_replica=only_main, on_commit=reports.append)
        dc.save({**state(1), "cuts": cut(((), (3,))[rank])}, made(f"replicas-{number}"), strategy)
        with tm.megatron.install():
            found = dc.load({"cuts": cut(((2, 5), ())[rank])}, f"replicas-{number}")
            assert torch.equal(torch.cat(found["cuts"]), torch.arange(7.0))
        shares.append(reports[-1]["bytes_written_here"])
    assert (shares[0] >= 6 << 20) == (rank == 1) and shares[1] >= 1 << 20, shares
    with failing(tm.DataLossError, "differ"):
        dc.save(state(rank), "replicas-1", tm.megatron.SaveStrategy(replicas="full"))
    dc.save(state(rank), "replicas-1", tm.megatron.SaveStrategy(replicas="warn", on_commit=reports.append))
    assert any("differ" in one for one in reports[-1]["warnings"]), reports[-1]["warnings"]
    with tm.megatron.install():
        assert dc.load_plain_tensors("replicas-1")["w"][7] == 1  # Of the main replica, on rank 1.


class Quantized(torch.Tensor):
    """Stands in for a tensor of Transformer Engine: its values are not its memory."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values_ = values

    def dequantize(self):
        return self.values_

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default, function
        return cls(args[0].values_)


# ---- The distributed optimizer, on several ranks -------------------------------------------------


def save_state(training, directory, patched=True, sharding="fully_reshardable", wrapped=False, **options):
    strategy = FullyParallelSaveStrategyWrapper(theirs(), dist.group.WORLD) if wrapped else theirs()
    with tm.megatron.install(**options) if patched else contextlib.nullcontext():
        dc.save(training.sharded_state_dict(sharding=sharding), made(directory), strategy)


def load_state(directory, patched=True, sharding="fully_reshardable", wrapped=False, **model):
    """A model with other weights, and what a load into it gives."""
    torch.manual_seed(99)
    training = megatron_cpu.Training(**model)
    strategy = strategies.TorchDistLoadShardedStrategy()
    if wrapped:
        strategy = FullyParallelLoadStrategyWrapper(strategy, dist.group.WORLD)
    with tm.megatron.install() if patched else contextlib.nullcontext():
        state, missing, unexpected = dc.load(
            training.sharded_state_dict(loads=True, sharding=sharding), directory, strategy, strict="return_all")
        assert not missing and not unexpected, (missing, unexpected)
        training.load_state_dict(state)
    return training


def train_without_stop():
    """Steps 1 to 4 without us. Megatron itself saves step 2, with a gather."""
    megatron_cpu.parallel()
    training, losses = megatron_cpu.Training(), []
    for step in range(1, 5):
        losses.append(training.step(step))
        if step == 2:
            save_state(training, "theirs/iter_0000002", patched=False)
    torch.save((losses, training.state()), f"uninterrupted-{dist.get_rank()}")


def train_until_killed():
    """The same training saves steps 2 and 4 in the background, and is killed while it saves step 4."""
    megatron_cpu.parallel()
    training, calls = megatron_cpu.Training(), async_utils.AsyncCallsQueue()

    def stop_at_the_second(report):
        if report["path"].endswith("iter_0000004/tm-state"):
            if dist.get_rank() == 1:
                open("publishing", "w").close()
            time.sleep(60)

    with tm.megatron.install(before_publish=stop_at_the_second):
        for step in range(1, 5):
            training.step(step)
            if step % 2 == 0:
                calls.maybe_finalize_async_calls(blocking=True)
                state = {**training.sharded_state_dict(), "step": step}
                path = made(f"ours/iter_{step:07d}")
                request = dc.save(state, path, theirs(), async_sharded_save=True, **MCORE_ASYNC)
                calls.schedule_async_request(request)
            # Not no_dist=True: ranks that see the end of a save at different steps would wait for each other.
            calls.maybe_finalize_async_calls()
        calls.maybe_finalize_async_calls(blocking=True)


def resume():
    """On the same mesh: each loss and all state as without a stop."""
    assert not dc.check_is_distributed_checkpoint("ours/iter_0000004")
    megatron_cpu.parallel()
    losses, state = torch.load(f"uninterrupted-{dist.get_rank()}")
    training = load_state("ours/iter_0000002")
    found = [training.step(step) for step in (3, 4)]
    assert found == losses[2:], (found, losses)
    assert_equal(training.state(), state)
    # The step is saved again, over what the killed save left.
    save_state(training, "ours/iter_0000004")
    assert_equal(load_state("ours/iter_0000004").state(), state)


def resume_elsewhere(tp, pp, ours, theirs_too, model):
    """On another mesh: bit for bit what Megatron itself loads of its own checkpoint, which it gathered."""
    megatron_cpu.parallel(tp, pp, model.pop("ep", 1))
    model = {**model, **({"dtype": getattr(torch, model["dtype"])} if "dtype" in model else {})}
    expected = load_state(theirs_too, patched=False, **model).state()
    assert_equal(load_state(ours, **model).state(), expected)
    assert_equal(load_state(theirs_too, **model).state(), expected)
    if not model.get("tied"):
        # Each rank reads a part, and sends it to the others that need it.
        assert_equal(load_state(ours, wrapped=True, **model).state(), expected)


def save_both(tp, pp, name, model):
    megatron_cpu.parallel(tp, pp, model.pop("ep", 1))
    model = {**model, **({"dtype": getattr(torch, model["dtype"])} if "dtype" in model else {})}
    ours, gathered, own = (f"{kind}-{name}" for kind in ("ours", "gathered", "theirs"))
    training = megatron_cpu.Training(**model)
    for seed in range(2):
        training.fill(seed)
    save_state(training, ours, wrapped=True)
    save_state(training, gathered, gather_optimizer=True)
    save_state(training, own, patched=False)
    if dist.get_rank() == 0:
        with tm.open(f"{ours}/tm-state") as ours, tm.open(f"{gathered}/tm-state") as gathered, tm.open(own) as whole:
            assert ours.keys() == gathered.keys() == whole.keys()
            assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in ours.keys())
            assert_equal({key: ours[key].torch() for key in ours}, {key: whole[key].torch() for key in whole})
            assert_equal({key: ours[key].torch() for key in ours}, {key: gathered[key].torch() for key in gathered})
    dist.barrier()


def keep_every_bucket():
    """With several padded buckets, where Megatron's own gather shifts the state (0.16 to 0.19). The state goes to
    another mesh and comes back."""
    megatron_cpu.parallel()
    training = megatron_cpu.Training(bucket_size=5000)
    buckets = training.parts[0].buffers[0].buckets
    assert len(buckets) > 2 and any(one.numel_unpadded < one.grad_data.numel() for one in buckets)
    for seed in range(2):
        training.fill(seed)
    expected = training.state()
    save_state(training, "buckets")
    assert_equal(load_state("buckets", bucket_size=5000).state(), expected)
    megatron_cpu.parallel(tp=2)
    save_state(load_state("buckets", bucket_size=3000), "buckets-elsewhere")
    megatron_cpu.parallel()
    assert_equal(load_state("buckets-elsewhere", bucket_size=5000).state(), expected)


def keep_other_formats():
    """Megatron's other formats are saved and loaded as they are, and those that it saved itself load in place."""
    megatron_cpu.parallel()
    training = megatron_cpu.Training(torch.bfloat16)
    training.fill(1)
    expected = training.state()
    for sharding in ("dp_reshardable", "dp_zero_gather_scatter"):
        for patched in (True, False):
            path = f"{sharding}-{patched}"
            save_state(training, path, patched, sharding)
            assert os.path.exists(f"{path}/tm-state") == patched
            assert_equal(load_state(path, sharding=sharding, dtype=torch.bfloat16).state(), expected)
    with failing(Exception, "flattened_range is not supported"):
        training.sharded_state_dict(sharding="fully_sharded_model_space")
    # A checkpoint without the optimizer: its absence is an error, not a state of any numbers.
    with tm.megatron.install():
        dc.save({"model": training.model.module.sharded_state_dict()}, made("weights"))
        state = training.sharded_state_dict(loads=True)
        found, missing, unexpected = dc.load(state, "weights", strict="return_all")
        assert len(unexpected) > 3 and not missing
        found["optimizer"] = {**state["optimizer"], "param_state": {}}
        with failing(tm.KeyNotFoundError, "elements that this rank owns are not loaded"):
            training.load_state_dict(found)


def fail_for_one_optimizer():
    """An optimizer that one rank refuses fails the save, and the load, on all of them."""
    megatron_cpu.parallel()
    training = megatron_cpu.Training()
    training.fill(1)
    refusal = mock.patch.object(_optimizer, "_layout", side_effect=tm.UnsupportedError("layer.w: refused"))
    with refusal if dist.get_rank() == 1 else contextlib.nullcontext():
        with failing(tm.UnsupportedError, "layer.w: refused"):
            save_state(training, "refused")
        save_state(training, "refused", gather_optimizer=True)
        if OLD:  # Later versions load on each rank by itself.
            with failing(BaseException, "tensormount.refused.1"), tm.megatron.install():
                dc.load(training.sharded_state_dict(loads=True), "refused")


def follow_the_guide(stop):
    """The loop of docs/trainers.md, until that iteration."""
    with open(os.path.join(support.ROOT, "docs", "trainers.md"), encoding="utf-8") as file:
        (loop,) = re.findall(
            r"<!-- executed by tests/trainers/megatron_test.py -->\n```python\n(.*?)```", file.read(), re.DOTALL)
    megatron_cpu.parallel()
    made("out")
    names = {"build": megatron_cpu.Training}
    exec(loop.replace("range(first, 5)", f"range(first, {stop + 1})"), names)
    assert names["iteration"] == stop
    if stop == 4:
        assert names["first"] == 3
        assert_equal(names["training"].state(), torch.load(f"uninterrupted-{dist.get_rank()}")[1])
    _strategy._active.pop().undo()


def measure_memory():
    """A save, and a load on another mesh, need less than 64 MiB on each rank, where the gathered state has 97."""
    big = dict(hidden_size=512, ffn_hidden_size=2048, num_query_groups=4, kv_channels=128)
    megatron_cpu.parallel(tp=2)
    training = megatron_cpu.Training(**big)
    training.fill(0)
    own = sum(one.nbytes for key, one in training.state().items() if not key.startswith("model."))
    assert own > 48 << 20, own
    with tm.megatron.install():
        saved = peak(lambda: dc.save(training.sharded_state_dict(), made("big")))
    with tm.megatron.install(gather_optimizer=True):
        gathered = peak(training.sharded_state_dict)
    del training
    megatron_cpu.parallel()
    training = megatron_cpu.Training(**big)
    training.fill(0)
    with tm.megatron.install():
        state = training.sharded_state_dict(loads=True)
        loaded = peak(lambda: training.load_state_dict(dc.load(state, "big")))
    print(f"MiB above the own shards: save {saved >> 20}, load {loaded >> 20}, gather {gathered >> 20}")
    assert saved < 64 << 20 and loaded < 64 << 20 < gathered, (saved, loaded, gathered)


def peak(function):
    """Bytes of memory that a call needs at its peak, beside what this process had before."""
    def status(name):
        with open("/proc/self/status") as file:
            return 1024 * int(next(line.split()[1] for line in file if line.startswith(name)))

    gc.collect()
    dist.barrier()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins anew.
    before = status("VmRSS")
    function()
    return max(0, status("VmHWM") - before)


# ---- Tests ---------------------------------------------------------------------------------------


class OnOneRank(support.Folder):
    """What needs no second rank, in this process."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            dist.init_process_group("gloo", init_method=f"file://{cls.folder}/rendezvous", rank=0, world_size=1)
        cls.addClassCleanup(dist.destroy_process_group)
        parallel_state.initialize_model_parallel()
        cls.addClassCleanup(parallel_state.destroy_model_parallel)

    def setUp(self):
        super().setUp()
        _plugins._warned.clear()

    def state(self, number, **more):
        tensor = torch.full((1000,), float(number))
        return {"w": ShardedTensor.from_rank_offsets("w", tensor), "step": number, **more}

    def save(self, number, path, **options):
        os.makedirs(path, exist_ok=True)
        dc.save(self.state(number), path, **options)

    def load(self, path):
        found = dc.load(self.state(0), path)
        self.assertTrue(torch.equal(found["w"], torch.full((1000,), float(found["step"]))), found)
        return found["step"]

    def names(self):
        """All that `install` may replace."""
        owners = [module for name, module in sys.modules.items() if name.startswith("megatron.") and module]
        owners += [one for one in vars(strategies).values() if isinstance(one, type)]
        found = {}
        for owner in owners:
            for name, value in list(vars(owner).items()):
                if callable(value):
                    found[getattr(owner, "__module__", ""), owner.__name__, name] = value
        return found

    def test_uninstalling_leaves_no_trace(self):
        before = self.names()
        outer = tm.megatron.install()
        inner = tm.megatron.install(store="inner/store")
        self.assertNotEqual(before, self.names())
        inner.undo()
        self.save(1, "traces")
        self.assertTrue(os.path.exists("traces/tm-state"))
        outer.undo()
        outer.undo()
        self.assertEqual(before, self.names())
        self.save(2, "plain")
        self.assertTrue(os.path.exists("plain/.metadata"))
        self.assertFalse(os.path.exists("plain/tm-state"))

    def test_the_newest_of_both_kinds_of_checkpoint_is_loaded(self):
        self.save(1, "both")
        with tm.megatron.install():
            self.assertEqual(self.load("both"), 1)
            self.save(2, "both")
            self.assertEqual(self.load("both"), 2)
        self.save(3, "both")
        with tm.megatron.install():
            self.assertEqual(self.load("both"), 3)
            self.save(4, "both")
            self.assertEqual(self.load("both"), 4)

    def test_a_save_replaces_the_last_one_and_frees_it(self):
        with tm.megatron.install():
            for number in (1, 2, 3):
                self.save(number, "again")
                self.assertEqual(self.load("again"), number)
            self.assertEqual(os.listdir("again/.trash"), [])
        with tm.megatron.install(replace=False), self.assertRaises(tm.AlreadyExistsError):
            self.save(4, "again")

    def test_steps_share_data_in_one_store(self):
        with tm.megatron.install(store="run/store", retain="last=2"):
            for step in (1, 2, 3):
                self.save(7, f"run/iter_{step:07d}")
                self.assertEqual(self.load(f"run/iter_{step:07d}"), 7)
        self.assertEqual([one["checkpoint"] for one in tm.Store("run/store").list()], ["iter_0000002", "iter_0000003"])
        self.assertFalse(os.path.exists("run/iter_0000003/tm-state"))
        self.assertTrue(os.path.exists("run/iter_0000003/metadata.json"))
        strategy = tm.megatron.SaveStrategy(store="run/store")
        self.save(8, "run/iter_0000004", sharded_strategy=strategy)
        with tm.megatron.install(store="run/store"):
            self.assertEqual(self.load("run/iter_0000004"), 8)

    def test_tensors_are_removed_by_their_prefix(self):
        more = {name: ShardedTensor.from_rank_offsets(name, torch.ones(10)) for name in ("model.[x]", "model.x")}
        more["teacher"] = ShardedObject("model.[x].extra", 5, (1,), (0,))
        with tm.megatron.install():
            os.makedirs("removed")
            dc.save(self.state(1, **more), "removed")
            dc.remove_sharded_tensors("removed", "model.[x]")
            self.assertEqual(set(dc.load_tensors_metadata("removed")), {"w", "model.x"})
            with tm.open("removed/tm-state") as checkpoint:
                self.assertNotIn("model.[x].extra", checkpoint.objects)
            self.assertEqual(self.load("removed"), 1)
            with self.assertLogs("tensormount", logging.WARNING) as logs:
                dc.remove_sharded_tensors("removed", "nothing")
            self.assertIn('no key begins with "nothing"', logs.output[0])
        self.save(2, "theirs")
        with tm.megatron.install(), self.assertWarnsRegex(UserWarning, "no files in theirs"):
            dc.remove_sharded_tensors("theirs", "w")  # Megatron's own.

    def test_parts_that_cannot_be_saved_are_refused_by_name(self):
        flat = ShardedTensor.from_rank_offsets("flat", torch.zeros(3))
        flat.flattened_range = slice(0, 3)
        sparse = ShardedTensor.from_rank_offsets("sparse", torch.zeros(3))
        sparse.data = sparse.data.to_sparse()
        other = ShardedTensor.from_rank_offsets("w", torch.zeros(1000), (0, 1, 2))
        for leaf, why in ((flat, "tensor flat: .*flattened range"), (sparse, "tensor sparse: .*sparse"),
                          (other, "tensor w: has two global shapes")):
            os.makedirs("refused", exist_ok=True)
            with tm.megatron.install(), self.assertRaisesRegex(tm.Error, why):
                dc.save(self.state(1, leaf=leaf), "refused", validate_access_integrity=False)
        self.assertFalse(os.path.exists("refused/tm-state"))

    def test_quantized_weights_are_stored_as_their_values(self):
        leaf = ShardedTensor.from_rank_offsets("w", Quantized(torch.arange(6.0).bfloat16()))
        with tm.megatron.install():
            os.makedirs("quantized")
            dc.save({"w": leaf}, "quantized")
            found = dc.load_plain_tensors("quantized")["w"]
        self.assertTrue(torch.equal(found, torch.arange(6.0).bfloat16()))

    def test_an_exported_step_loads_without_us(self):
        more = {"o": ShardedObject("o", {"a": 1}, (1, 2), (0, 0)), "p": ShardedObject("o", {"b": 2}, (1, 2), (0, 1))}
        with tm.megatron.install():
            os.makedirs("ours")
            dc.save(self.state(5, **more), "ours")
        support.run("export", "ours/tm-state", "exported", "--to", "torch_dist")
        os.unlink("exported/common.pt")
        if OLD:
            shutil.copy("ours/common.pt", "exported")
        found, missing, unexpected = dc.load(self.state(0, **more), "exported", strict="return_all")
        self.assertEqual((found["step"], found["o"], found["p"]), (5, {"a": 1}, {"b": 2}))
        self.assertFalse(missing or unexpected)
        self.assertTrue(torch.equal(found["w"], torch.full((1000,), 5.0)))

    def test_a_missing_checkpoint_is_named(self):
        with tm.megatron.install(), self.assertRaisesRegex(BaseException, "gone/tm-state"):
            self.save(1, "gone")
            tm.Store("gone").remove("tm-state")
            self.load("gone")

    def test_options_that_cannot_be_kept_are_refused(self):
        for make in (tm.megatron.install, tm.megatron.SaveStrategy):
            with self.assertRaisesRegex(tm.InvalidArgumentError, "placement"):
                make(placement="x")
            with self.assertRaisesRegex(TypeError, "no option strict"):
                make(strict=True)
            with self.assertRaisesRegex(tm.InvalidArgumentError, "without store="):
                make(root="run")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "keep_only_main_replica"):
            tm.megatron.SaveStrategy(keep_only_main_replica="no")
        self.assertFalse(_strategy._active)
        with self.assertRaisesRegex(tm.UnsupportedError, "local directories only"):
            tm.megatron.SaveStrategy().save({}, "msc://bucket/iter_1")

    def test_urls_stay_with_megatron(self):
        asked = []
        with tm.megatron.install(), mock.patch.dict(_strategy._ORIGINAL):
            for name in ("save", "async_save", "remove_sharded_tensors"):
                _strategy._ORIGINAL[name] = lambda self, *args, name=name: asked.append((name, args[-1]))
            strategy = theirs()
            strategy.save({}, "msc://bucket/1")
            strategy.async_save({}, "msc://bucket/2")
            strategies.TorchDistLoadShardedStrategy().remove_sharded_tensors("msc://bucket/3", "w")
        self.assertEqual(asked, [("save", "msc://bucket/1"), ("async_save", "msc://bucket/2"),
                                 ("remove_sharded_tensors", "w")])
        self.assertIsNone(_strategy._ours("msc://bucket/4"))

    def test_versions_warn_once_and_missing_seams_refuse(self):
        core = megatron_cpu.megatron.core
        with mock.patch.object(core, "__version__", "9.9.0"), self.assertLogs("tensormount", logging.WARNING) as logs:
            for _ in range(2):
                tm.megatron.install().undo()
        self.assertEqual([line for line in logs.output if "9.9.0" in line],
                         ["WARNING:tensormount:Megatron-Core 9.9.0: tensormount was tested with 0.16.1, 0.19.2"])
        before = self.names()
        with mock.patch.object(serialization, "save", lambda state: None):
            with self.assertRaisesRegex(tm.UnsupportedError, "save takes no sharded_state_dict"):
                tm.megatron.install()
        self.assertEqual(before, self.names())


class Ranges(unittest.TestCase):
    """The boxes of what a rank owns of a parameter."""

    def leaf(self, key, shape, **more):
        leaf = ShardedTensor.from_rank_offsets(key, torch.empty(shape), replica_id=(0, 0, 0), **more)
        return leaf

    def layout(self, leaf, first, size):
        optimizer = mock.Mock(distributed_optimizer_instance_id=0)
        return _optimizer._layout(optimizer, leaf, first, size)

    def check(self, leaf, whole, first, size):
        """`whole`: by key the global tensors, with the element of the local parameter at each place."""
        at = 0
        for begin, part in self.layout(leaf, first, size):
            box = tuple(slice(a, a + n) for a, n in zip(part.global_offset, part.local_shape))
            cells = whole[part.key][box]
            self.assertEqual(tuple(cells.shape), part.local_shape)
            expected = first + begin + torch.arange(cells.numel())
            self.assertTrue(torch.equal(cells.reshape(-1), expected), (leaf, first, size, part))
            self.assertFalse(part.has_regular_grid)
            at += cells.numel()
        self.assertEqual(at, size)

    def test_ranges_of_every_shape_are_covered_once(self):
        generator, seed = support.seeded()
        for _ in range(support.scaled(200)):
            shape = tuple(generator.randint(1, 5) for _ in range(generator.randint(0, 4)))
            count = math.prod(shape)
            ahead = generator.randint(0, 2)
            layers = [(axis, 1, 3) for axis in range(ahead)]
            leaf = self.leaf("w", shape)
            leaf = ShardedTensor.from_rank_offsets(
                "w", leaf.data, *layers, replica_id=(0, 0, 0), prepend_axis_num=ahead)
            whole = torch.full(leaf.global_shape, -1)
            whole[(1,) * ahead] = torch.arange(count).reshape(shape)
            first = generator.randrange(count)
            size = generator.randint(1, count - first)
            with self.subTest(seed=seed, shape=shape, ahead=ahead, first=first, size=size):
                self.check(leaf, {"w": whole}, first, size)
                self.assertLessEqual(len(self.layout(leaf, first, size)), max(1, 2 * len(shape) - 1))

    def test_copies_are_loaded_but_not_saved(self):
        for replica_id, saved in (((0, 0, 5), 2), ((0, 1, 0), 0), ((1, 0, 0), 0)):
            param = torch.nn.Parameter(torch.zeros(3, 4))
            ranges = {"param": mock.Mock(start=2, end=8)}
            optimizer = mock.Mock(
                distributed_optimizer_instance_id=0, gbuf_ranges=[{"dtypes": [{"param_map": {param: ranges}}]}])
            optimizer._get_main_param_and_optimizer_states.return_value = {
                "param": torch.arange(6.0), "exp_avg": torch.zeros(6), "step": torch.tensor(1.0)}
            model = {"w": ShardedTensor.from_rank_offsets("w", param, replica_id=replica_id)}
            for loads, count in ((False, saved), (True, 2)):
                (states,) = _optimizer.sharded_state(optimizer, model, loads).values()
                found = {name: len(parts) for name, parts in states.items()}
                self.assertEqual(found, {"param": count, "exp_avg": count})

    def test_factories_that_cut_a_parameter_are_followed(self):
        for axis, (rows, columns) in itertools.product((0, 1), ((6, 4), (2, 8))):
            def build(key, tensor, replica_id, flattened_range, axis=axis):
                parts = torch.chunk(tensor, 2, axis)
                return [{"one": ShardedTensor.from_rank_offsets(
                    f"{key}_{name}", part, (axis, 1, 3), replica_id=replica_id), "note": LocalNonpersistentObject(1)}
                    for name, part in zip("wv", parts)]

            factory = ShardedTensorFactory("w", torch.empty(rows, columns), build, None, (0, 0, 0))
            local = torch.arange(rows * columns).reshape(rows, columns)
            whole = {}
            for name, part in zip("wv", torch.chunk(local, 2, axis)):
                shape = [n * (3 if i == axis else 1) for i, n in enumerate(part.shape)]
                whole[f"w_{name}"] = torch.full(shape, -1)
                whole[f"w_{name}"].narrow(axis, part.shape[axis], part.shape[axis]).copy_(part)
            for first in range(local.numel()):
                for size in range(1, local.numel() - first + 1):
                    self.check(factory, whole, first, size)

    def test_parameters_that_cannot_be_followed_are_refused_by_name(self):
        def made(*changes):
            return lambda key, tensor, replica_id, flattened_range: [
                ShardedTensor.from_rank_offsets(key, change(tensor), replica_id=replica_id) for change in changes]

        for changes, why in (([torch.clone], "layer.w: .*copies the parameter"),
                             ([lambda tensor: tensor[:1]], "layer.w: .*each element of the parameter once"),
                             ([lambda tensor: tensor.expand(2, 3, 4)], "layer.w: .*each element of the parameter once"),
                             ([lambda tensor: tensor[:1], lambda tensor: tensor[:2]], "layer.w: .*each element")):
            factory = ShardedTensorFactory("layer.w", torch.empty(3, 4), made(*changes), None, (0, 0, 0))
            with self.assertRaisesRegex(tm.UnsupportedError, why):
                self.layout(factory, 0, 12)
        factory = ShardedTensorFactory("layer.w", torch.empty(300, 400), made(torch.t), None, (0, 0, 0))
        with self.assertRaisesRegex(tm.UnsupportedError, "layer.w: .*120000 blocks"):
            self.layout(factory, 0, 1)
        with self.assertRaisesRegex(tm.UnsupportedError, "layer.w: the replica id 0"):
            self.layout(ShardedTensor.from_rank_offsets("layer.w", torch.empty(3)), 0, 1)


class OnTwoRanks(support.Folder):
    def test_models_and_optimizers_load_on_other_meshes(self):
        torchrun(HERE, 2, ("save_model", 2, 1, 1, 0), ("load_model", 1, 2, 1, 0), ("load_model", 1, 1, 1, 0),
                 ("save_model", 1, 1, 2, 4), ("load_model", 1, 2, 1, 4),
                 ("save_both", 2, 1, "bf16", {"dtype": "bfloat16"}),
                 ("resume_elsewhere", 1, 2, "ours-bf16", "theirs-bf16", {"dtype": "bfloat16"}),
                 ("save_both", 1, 2, "tied", {"tied": True}),
                 ("resume_elsewhere", 2, 1, "ours-tied", "theirs-tied", {"tied": True}),
                 ("keep_every_bucket",), ("keep_other_formats",), ("fail_for_one_optimizer",))

    def test_every_kind_of_leaf_is_saved(self):
        torchrun(HERE, 2, ("save_and_load_every_kind",), ("load_into_other_shapes",), ("saves_in_background",),
                 ("one_rank_fails",), ("replicas_are_shared_and_compared",))

    def test_a_killed_training_resumes_exactly(self):
        Ranks(HERE, 2, ("train_without_stop",), ("train_until_killed",)).kill_at("publishing")
        elsewhere = ("ours/iter_0000002", "theirs/iter_0000002", {})
        torchrun(HERE, 2, ("resume",), ("resume_elsewhere", 2, 1, *elsewhere), ("follow_the_guide", 2),
                 ("follow_the_guide", 4))


@support.needs_long
class OnFourRanks(support.Folder):
    def test_models_load_on_other_meshes(self):
        meshes = [(2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 1), (1, 1, 1)]
        torchrun(HERE, 4, ("save_model", 2, 2, 1, 0), *(("load_model", *mesh, 0) for mesh in meshes))
        meshes = [(1, 2, 2), (1, 1, 4), (1, 1, 2), (1, 4, 1), (1, 2, 1)]
        torchrun(HERE, 4, ("save_model", 1, 2, 2, 4), *(("load_model", *mesh, 4) for mesh in meshes))

    def test_the_optimizer_loads_on_other_meshes(self):
        for dtype in ("float32", "bfloat16"):
            torchrun(HERE, 4, ("save_both", 2, 1, dtype, {"dtype": dtype}), *(
                ("resume_elsewhere", *mesh, f"ours-{dtype}", f"theirs-{dtype}", {"dtype": dtype})
                for mesh in ((1, 1), (4, 1), (1, 2), (2, 2), (1, 4))))
        torchrun(HERE, 4, ("save_both", 1, 2, "tied", {"tied": True}), *(
            ("resume_elsewhere", *mesh, "ours-tied", "theirs-tied", {"tied": True})
            for mesh in ((1, 1), (2, 2), (1, 4))))
        # Megatron has an optimizer of its own for experts, on all meshes or on none.
        torchrun(HERE, 4, ("save_both", 1, 2, "experts", {"experts": 4, "ep": 2}), *(
            ("resume_elsewhere", 1, pp, "ours-experts", "theirs-experts", {"experts": 4, "ep": ep})
            for pp, ep in ((1, 4), (1, 2), (2, 2))))

    def test_a_rank_needs_little_memory_beside_its_own_shards(self):
        print(torchrun(HERE, 4, ("measure_memory",)))


if __name__ == "__main__":
    main(globals())
