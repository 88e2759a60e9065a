# SPDX-License-Identifier: Apache-2.0
"""PyTorch: training that is resumed on other meshes, DCP through our writer and reader."""

import io
import os
import subprocess
import sys
import tempfile
import unittest

import support
import tensormount as tm

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
except ImportError as error:
    raise unittest.SkipTest(str(error))

LIMIT = 300.0
LONG = support.scaled(1) > 1
needs_long = unittest.skipUnless(LONG, "takes long: TENSORMOUNT_TEST_SCALE=20")


def torchrun(function, size, *arguments):
    """Runs `function` of this file under torchrun; what rank 0 printed."""
    here = os.path.abspath(__file__)
    package = os.path.dirname(os.path.dirname(os.path.abspath(tm.__file__)))
    path = os.pathsep.join(
        filter(None, [os.path.dirname(here), package, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as logs:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
             str(size), "--log-dir", logs, "--redirects", "2", here, function,
             *map(str, arguments)],
            capture_output=True, text=True, timeout=LIMIT, check=False,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        if done.returncode != 0:
            said = []
            for folder, _, names in os.walk(logs):
                for name in names:
                    with open(os.path.join(folder, name), errors="replace") as file:
                        said.append(f"{name} {folder}:\n{file.read()[-3000:]}")
            raise AssertionError(f"{function}: {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"
                                 + "\n".join(said))
    return done.stdout


# ---- What ranks do -------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.embed = torch.nn.Embedding(33, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 33)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(mesh_shape):
    """A model on a mesh (data) or (data, tensor), and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    model = Model()
    names = ("data", "tensor")[: len(mesh_shape)]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    if len(mesh_shape) == 2:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        for block in model.blocks:
            parallelize_module(block, mesh["tensor"],
                               {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), mesh


def train(model, optim, step, mesh, steps):
    losses = []
    for number in range(step, step + steps):
        # The same data wherever the ranks are: each takes its part of the batch.
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 33, (8, 12), generator=generator)
        parts = mesh["data"].size()
        mine = tokens.chunk(parts)[mesh["data"].get_local_rank()]
        loss = torch.nn.functional.cross_entropy(
            model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def full(state):
    """A state dict of DTensors as whole tensors."""
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found.update({f"{key}.{name}": item for name, item in full(value).items()})
        elif hasattr(value, "full_tensor"):
            found[key] = value.full_tensor()
        elif isinstance(value, torch.Tensor):
            found[key] = value.clone()
    return found


def weights_and_moments(model, optim):
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    return full({"model": get_model_state_dict(model),
                 "optim": get_optimizer_state_dict(model, optim)["state"]})


def mesh_of(text):
    return tuple(map(int, text.split("x")))


def begin_training(shape, store):
    model, optim, mesh = build(mesh_of(shape))
    with tm.Group.from_torch() as group:
        train(model, optim, 0, mesh, 3)
        extra = {"step": 3, "rng": tm.torch.rng_state()}
        job = tm.torch.async_save(f"{store}/step-3", model=model, optim=optim, extra=extra, group=group)
        drawn = torch.rand(4)
        whole = weights_and_moments(model, optim)  # What was saved, whatever training does next.
        losses = train(model, optim, 3, mesh, 4)
        report = job.wait(LIMIT)
        assert report["generation"] > 0
        if dist.get_rank() == 0:
            torch.save({"whole": whole, "losses": losses}, "expected.pt")
        torch.save(drawn, f"drawn-{dist.get_rank()}.pt")


def resume(shape, store, same):
    model, optim, mesh = build(mesh_of(shape))
    expected = torch.load("expected.pt")
    with tm.Group.from_torch() as group:
        extra = {"step": 0, "rng": tm.torch.rng_state()}
        loaded = tm.torch.load(f"{store}/latest", model=model, optim=optim, extra=extra, group=group)
        assert loaded.kept == [], loaded.kept
        assert extra["step"] == 3
        found = weights_and_moments(model, optim)
        assert found.keys() == expected["whole"].keys()
        for key, value in expected["whole"].items():
            assert torch.equal(found[key], value), key
        if same == "same":
            tm.torch.set_rng_state(extra["rng"])
            assert torch.equal(torch.rand(4), torch.load(f"drawn-{dist.get_rank()}.pt"))
            losses = train(model, optim, 3, mesh, 4)
            if dist.get_rank() == 0:
                assert losses == expected["losses"], (losses, expected["losses"])


def groups():
    """Groups through torch's store: all ranks, some of them, two at once, none left in the store."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first = tm.Group.from_torch()
    second = tm.Group.from_torch()
    assert (first.rank, first.size) == (rank, size)
    halves = [dist.new_group(list(range(0, size, 2))), dist.new_group(list(range(1, size, 2)))]
    half = tm.Group.from_torch(halves[rank % 2])
    assert (half.rank, half.size) == (rank // 2, size // 2)
    jobs = [tm.async_save({"w": torch.arange(5)}, "S/first", first),
            tm.async_save({"w": torch.arange(6)}, "S/second", second),
            tm.async_save({"w": torch.arange(7)}, f"S/half-{rank % 2}", half)]
    for job in jobs:
        job.wait(LIMIT)
    try:
        tm.Group.from_torch(halves[1 - rank % 2])
        raise AssertionError("a group that this rank is not in")
    except tm.UnsupportedError:
        pass
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if hasattr(store, "list_keys"):
        left = [key for key in store.list_keys() if "tensormount" in str(key)]
        assert not left, left
    for group in (first, second, half):
        group.close()


def without_default_group():
    try:
        tm.Group.from_torch()
        raise AssertionError("no default group")
    except tm.UnsupportedError as error:
        assert "from_env" in str(error)
    with tm.Group.from_env() as group:
        assert (group.rank, group.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        tm.save({"w": torch.arange(group.size)}, "S/env", group)


SHARDINGS = {
    "rows": lambda: [shard(0)], "columns": lambda: [shard(1)], "replicas": lambda: [replicate()],
}


def shard(axis):
    from torch.distributed.tensor import Shard

    return Shard(axis)


def replicate():
    from torch.distributed.tensor import Replicate

    return Replicate()


def sharded(placements, value=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
    return distribute_tensor(whole if value is None else torch.full_like(whole, value), mesh,
                             placements)


def dcp_pairs(how):
    for number, (name, placements) in enumerate(sorted(SHARDINGS.items())):
        path = f"S/{how}-{name}"
        state = {"model": {"w": sharded(placements()), "plain": torch.arange(4) + number},
                 "step": number, "blob": {"any": ("thing", number)}}
        writer = tm.torch.Writer(path)
        if how == "sync":
            dcp.save(state, storage_writer=writer)
            assert writer.report["path"] == path
        elif how == "no-collectives":
            dcp.save(state, storage_writer=writer, use_collectives=False)
        elif how == "thread":
            dcp.async_save(state, storage_writer=writer).result()
        elif how == "process":
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

            dcp.async_save(state, storage_writer=writer,
                           async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
        dist.barrier()
        for other, wanted in sorted(SHARDINGS.items()):
            into = {"model": {"w": sharded(wanted(), 0), "plain": torch.zeros(4, dtype=torch.int64)},
                    "step": -1, "blob": {"any": None}}
            dcp.load(into, storage_reader=tm.torch.Reader(path))
            assert torch.equal(into["model"]["w"].full_tensor(), sharded([replicate()]).to_local()), (
                name, other)
            assert torch.equal(into["model"]["plain"], torch.arange(4) + number)
            assert into["step"] == number and into["blob"] == {"any": ("thing", number)}, into


def dcp_foreign():
    """What DCP wrote, through our reader; what we wrote, through tm.load; a bad rank."""
    state = {"w": sharded([shard(0)]), "step": 5}
    dcp.save(state, checkpoint_id="dcp-folder")
    dist.barrier()
    into = {"w": sharded([shard(1)], 0), "step": 0}
    dcp.load(into, storage_reader=tm.torch.Reader("dcp-folder"))
    assert torch.equal(into["w"].full_tensor(), state["w"].full_tensor()) and into["step"] == 5
    dcp.save({"w": state["w"], "mine": dist.get_rank()}, storage_writer=tm.torch.Writer(
        "S/per-rank", per_rank=["mine"]))
    into = {"w": sharded([shard(1)], 0), "mine": None}
    dcp.load(into, storage_reader=tm.torch.Reader("S/per-rank"))
    assert into["mine"] == dist.get_rank()
    group = tm.Group.from_torch()
    into = {"w": sharded([shard(1)], 0)}
    tm.load(into, "S/per-rank", group)
    assert torch.equal(into["w"].full_tensor(), state["w"].full_tensor())
    try:
        dcp.save({"w": state["w"], "mine": dist.get_rank()}, storage_writer=tm.torch.Writer("S/bad"))
        raise AssertionError("byte items that differ")
    except dcp.api.CheckpointException as error:
        assert "mine" in str(error), error
    assert not os.path.exists("S/bad")
    group.close()


def strided():
    """FSDP over tensor parallelism: DTensors of several boxes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(8 * 3, dtype=torch.float32).reshape(8, 3)
    placements = [_StridedShard(0, split_factor=2), Replicate()]
    part = mesh.get_coordinate()[0]
    rows = [0, 1, 4, 5] if part == 0 else [2, 3, 6, 7]
    made = DTensor.from_local(whole[rows].clone(), mesh, placements, run_check=False,
                              shape=whole.shape, stride=whole.stride())
    assert len(tm.boxes(made)) == 2
    with tm.Group.from_torch() as group:
        tm.save({"w": made}, "S/strided", group)
    dist.barrier()
    with tm.open("S/strided") as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), whole)
    into = DTensor.from_local(torch.zeros(4, 3), mesh, placements, run_check=False,
                              shape=whole.shape, stride=whole.stride())
    try:
        dcp.load({"w": into}, storage_reader=tm.torch.Reader("S/strided"))
        raise AssertionError("DCP's planner reads one box")
    except dcp.api.CheckpointException as error:
        assert "LoadPlanner" in str(error), error
    dcp.load({"w": into}, storage_reader=tm.torch.Reader("S/strided"),
             planner=tm.torch.LoadPlanner())
    assert torch.equal(into.to_local(), whole[rows])


# ---- Tests ---------------------------------------------------------------------------------------


class Training(support.Folder):
    def test_fsdp_resumed_elsewhere(self):
        torchrun("begin_training", 4, "4", "F")
        torchrun("resume", 4, "4", "F", "same")
        torchrun("resume", 2, "2", "F", "other")
        if LONG:
            torchrun("resume", 4, "2x2", "F", "other")
            torchrun("resume", 1, "1", "F", "other")

    @needs_long
    def test_fsdp_with_tensor_parallelism(self):
        torchrun("begin_training", 4, "2x2", "T")
        torchrun("resume", 4, "2x2", "T", "same")
        torchrun("resume", 3, "3", "T", "other")

    def test_groups(self):
        torchrun("groups", 4)
        torchrun("without_default_group", 3)


class Dcp(support.Folder):
    def test_sync(self):
        torchrun("dcp_pairs", 4, "sync")

    @needs_long
    def test_no_collectives(self):
        torchrun("dcp_pairs", 2, "no-collectives")

    def test_thread(self):
        torchrun("dcp_pairs", 2, "thread")

    @needs_long
    def test_process(self):
        torchrun("dcp_pairs", 2, "process")

    def test_foreign(self):
        torchrun("dcp_foreign", 4)

    def test_strided(self):
        torchrun("strided", 4)

    def test_alone(self):
        state = {"model": {"w": torch.arange(6.0)}, "list": [torch.ones(2), 3]}
        dcp.save(state, storage_writer=tm.torch.Writer("S/alone"))
        into = {"model": {"w": torch.zeros(6)}, "list": [torch.zeros(2), 0]}
        dcp.load(into, storage_reader=tm.torch.Reader("S/alone"))
        self.assertTrue(torch.equal(into["model"]["w"], torch.arange(6.0)))
        self.assertTrue(torch.equal(into["list"][0], torch.ones(2)))
        self.assertEqual(into["list"][1], 3)
        # Conversion is DCP's own: its planner's memory is filled by a copy.
        half = {"model": {"w": torch.zeros(6, dtype=torch.float16)}}
        dcp.load(half, storage_reader=tm.torch.Reader("S/alone"))
        self.assertTrue(torch.equal(half["model"]["w"], torch.arange(6.0).half()))
        # Plain values of tm.save are byte items to DCP.
        tm.save({"w": torch.ones(3), "step": 9}, "S/ours")
        into = {"w": torch.zeros(3), "step": 0}
        dcp.load(into, storage_reader=tm.torch.Reader("S/ours"))
        self.assertEqual((into["step"], into["w"].tolist()), (9, [1, 1, 1]))
        with self.assertRaises(TypeError):
            tm.torch.Writer("S/x", plcement="auto")

    def test_moments_before_the_first_step(self):
        def made():
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 2)
            return model, torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(model, optim):
            optim.zero_grad()
            model(torch.ones(5, 4)).pow(2).mean().backward()
            optim.step()

        model, optim = made()
        step(model, optim)
        tm.torch.save("S/stepped", model=model, optim=optim)
        # Gradients that are there already hinder nothing, and stay.
        other, fresh = made()
        other(torch.ones(5, 4)).sum().backward()
        gradient = other.weight.grad.clone()
        tm.torch.load("S/stepped", model=other, optim=fresh)
        self.assertTrue(torch.equal(fresh.state[other.weight]["exp_avg"],
                                    optim.state[model.weight]["exp_avg"]))
        self.assertEqual(float(fresh.state[other.weight]["step"]), 1)
        self.assertTrue(torch.equal(other.weight.grad, gradient))
        # A save does not count as a step.
        (a, saved), (b, plain) = made(), made()
        tm.torch.save("S/fresh", model=a, optim=saved)
        c, loaded = made()
        tm.torch.load("S/fresh", model=c, optim=loaded)
        for _ in range(3):
            for one in ((a, saved), (b, plain), (c, loaded)):
                step(*one)
        self.assertTrue(torch.equal(a.weight, b.weight) and torch.equal(a.weight, c.weight))
        # Groups of parameters that are others are refused, where PyTorch would lose some.
        split = torch.optim.AdamW([{"params": [other.weight]}, {"params": [other.bias]}], lr=0.5)
        with self.assertRaises(tm.LayoutError):
            tm.torch.load("S/stepped", model=other, optim=split)

    def test_scheduler_and_frozen(self):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        optim = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 1)
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
        schedule.step()
        tm.torch.save("S/small", model=model, optim=optim, extra={"schedule": schedule, "n": 1})
        other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        for parameter in other[0].parameters():
            parameter.requires_grad_(False)
        fresh = torch.optim.SGD(other[1].parameters(), lr=0.5, momentum=0.9)
        again = torch.optim.lr_scheduler.StepLR(fresh, 1)
        extra = {"schedule": again, "n": 0}
        tm.torch.load("S/small", model=other, optim=fresh, extra=extra)
        self.assertEqual(extra["n"], 1)
        self.assertEqual(again.state_dict(), schedule.state_dict())
        self.assertEqual(fresh.param_groups[0]["lr"], optim.param_groups[0]["lr"])
        for a, b in zip(model.parameters(), other.parameters()):
            self.assertTrue(torch.equal(a, b))
        moments = [s["momentum_buffer"] for s in fresh.state.values()]
        self.assertTrue(all(map(torch.equal, moments,
                                [s["momentum_buffer"] for s in optim.state.values()])))
        # What is missing is said, unless it is allowed by name.
        tm.torch.save("S/weights", model=model)
        with self.assertRaises(tm.KeyNotFoundError):
            tm.torch.load("S/weights", model=other, optim=fresh)
        loaded = tm.torch.load("S/weights", model=other, optim=fresh, optional=["optim.*"])
        self.assertTrue(all(key.startswith("optim.") for key in loaded.not_stored))
        self.assertTrue(loaded.not_stored)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in globals() and "RANK" in os.environ:
        if sys.argv[1] != "without_default_group":
            dist.init_process_group("gloo")
        globals()[sys.argv[1]](*sys.argv[2:])
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        # PyTorch 2.13 aborts now and then at the end of the interpreter: a thread of gloo's drops what
        # is left of an all-gather when there is no interpreter any more (c10d::ProcessGroupGloo::
        # runLoop, PyThread_exit_thread within a destructor).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    else:
        unittest.main()
