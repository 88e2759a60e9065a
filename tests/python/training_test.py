# SPDX-License-Identifier: Apache-2.0
"""A transformer that is trained, killed and resumed, on the same ranks and on others."""

import json
import math
import os
import random
import time
import unittest

import support
from support import needs_long
import tensormount as tm
from torchrun import LIMIT, Ranks, main, torchrun

try:
    import numpy
    import torch
    import torch.distributed as dist
    from torch.nn import functional
except ImportError as error:
    raise unittest.SkipTest(str(error))


# 37 rows on 3 x 2 ranks: FSDP2's parts over tensor parallelism are not what their placements say.
VOCABULARY, WIDTH, HEAD, LENGTH = 37, 16, 4, 12
BATCH = 12  # Of all ranks together.
SAVED_AT, STEPS = 3, 20


# ---- What is trained -----------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention = torch.nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.before_mlp = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        h = self.before_attention(x)
        # As many heads as this rank has.
        q, k, v = (part(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.o(h.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.before_mlp(x)))))


class Transformer(torch.nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.position = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Sampler(torch.utils.data.Sampler):
    """Numbers without an end, each epoch in another order. Its state: where it is in an epoch, and
    the generator that makes the order of this epoch and of those that follow."""

    def __init__(self, size):
        self.size = size
        self.generator = torch.Generator().manual_seed(5)
        self._begin(0)

    def _begin(self, position):
        self.began = self.generator.get_state()
        self.order = torch.randperm(self.size, generator=self.generator).tolist()
        self.position = position

    def __iter__(self):
        while True:
            if self.position == self.size:
                self._begin(0)
            self.position += 1
            yield self.order[self.position - 1]

    def state_dict(self):
        return {"position": self.position, "generator": self.began.clone()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self._begin(state["position"])


class Noise:
    """A generator that is another on each rank."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def state_dict(self):
        return {"generator": self.generator.get_state().numpy().tobytes()}

    def load_state_dict(self, state):
        self.generator.set_state(torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8))


class Texts(torch.utils.data.Dataset):
    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        return number, torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)

    def __len__(self):
        return 100


class Trainer:
    """On a mesh of data ranks, of data ranks by tensor ranks, or (h) of replicas by data ranks."""

    def __init__(self, mesh_shape, tied):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape = sizes_of(mesh_shape)
        hybrid = mesh_shape.startswith("h")
        names = ("replica", "data") if hybrid else ("data", "tensor")[: len(shape)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        data = mesh if hybrid else mesh["data"]
        torch.manual_seed(7)
        self.model = Transformer(tied)
        if "tensor" in names:
            self.parallelize(mesh["tensor"], tied)
        for block in self.model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(self.model, mesh=data)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.parts = data.size()
        self.part = dist.get_rank() if hybrid else data.get_local_rank()
        # Others on each data rank; ranks of tensor parallelism must drop the same.
        torch.manual_seed(100 + self.part)
        random.seed(dist.get_rank())
        numpy.random.seed(dist.get_rank())
        self.noise = Noise()
        self.sampler = Sampler(len(Texts()))
        # A generator of its own: it takes a seed for its workers from it whenever it begins.
        loader = torch.utils.data.DataLoader(
            Texts(), batch_size=BATCH, sampler=self.sampler, generator=torch.Generator())
        self.batches = iter(loader)

    def parallelize(self, mesh, tied):
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if not tied:
            parallelize_module(self.model, mesh, {
                "embed": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Replicate())})
        for block in self.model.blocks:
            parallelize_module(block, mesh, {
                "q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(),
                "o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})

    def train(self, steps):
        """For each step: the batch of all ranks, this rank's loss, and what other generators gave."""
        log = []
        for _ in range(steps):
            numbers, texts = next(self.batches)
            mine = texts.chunk(self.parts)[self.part]
            loss = functional.cross_entropy(
                self.model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
            self.optim.step()
            self.optim.zero_grad()
            log.append([numbers.tolist(), loss.item(), random.random(), numpy.random.rand(),
                        torch.rand((), generator=self.noise.generator).item()])
        return log

    def evaluate(self):
        """After it FSDP2 still has the outer module's parameters gathered, since no backward follows."""
        self.model.eval()
        with torch.no_grad():
            self.model(torch.zeros(1, LENGTH, dtype=torch.int64))
        self.model.train()

    def state(self, step):
        return {"model": self.model, "optim": self.optim,
                "extra": {"step": step, "rng": tm.torch.rng_state(), "data": self.sampler,
                          "noise": tm.PerRank(self.noise)}}

    def weights_and_moments(self):
        """All that the optimizer and the model have, put together without us and without what
        PyTorch's placements say of it."""
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        found = {}
        for key, value in sorted(get_model_state_dict(self.model).items()):
            found[key] = put_together(value)
        states = get_optimizer_state_dict(self.model, self.optim)["state"]
        for key, state in sorted(states.items()):
            for name, value in sorted(state.items()):
                found[f"{key}.{name}"] = put_together(value)
        return found


def put_together(value):
    """A whole tensor. Tensor parallelism, the last axis of the mesh, cut it first, then FSDP2 that
    part."""
    placements = getattr(value, "placements", None)
    if placements is None:
        return value.clone()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (value.device_mesh.get_coordinate(), value.to_local().numpy()))
    parts = {tuple(coordinate): torch.from_numpy(part) for coordinate, part in parts}
    if placements[0].is_replicate():  # On the replicas of hybrid sharding.
        parts = {coordinate[1:]: part for coordinate, part in parts.items()}
        placements = placements[1:]
    columns = []
    for last in sorted({coordinate[1:] for coordinate in parts}):
        mine = [parts[one] for one in sorted(parts) if one[1:] == last]
        columns.append(torch.cat(mine, placements[0].dim))
    if len(placements) == 1 or placements[1].is_replicate():
        assert all(torch.equal(one, columns[0]) for one in columns)
        return columns[0]
    return torch.cat(columns, placements[1].dim)


# ---- What ranks do -------------------------------------------------------------------------------


def begin(mesh_shape, tied, store, when):
    """Trains, saves, trains on; what comes after that is cut off `when` the file `now` is there."""
    trainer = Trainer(mesh_shape, tied)
    group = tm.Group.from_torch()
    trainer.train(SAVED_AT)
    trainer.evaluate()
    job = tm.torch.async_save(f"{store}/step-{SAVED_AT}", group=group, **trainer.state(SAVED_AT))
    whole = trainer.weights_and_moments()  # What was saved, whatever training does next.
    rng = tm.torch.rng_state().value
    log = trainer.train(STEPS)
    assert job.wait(LIMIT)["generation"] > 0
    if dist.get_rank() == 0:
        torch.save(whole, f"{store}.whole")
    with open(f"{store}.{dist.get_rank()}", "w") as file:
        json.dump({"log": log, "rng": repr(rng)}, file)
    dist.barrier()

    def mark():
        if dist.get_rank() == 0:
            open(f"{store}.now", "w").close()

    def here(event):
        if event["kind"] == "start" and event["phase"] == when:
            mark()
            time.sleep(LIMIT)  # The save stands still here, training does not.

    if when == "step":
        mark()
    else:
        tm.torch.async_save(f"{store}/step-{SAVED_AT + STEPS}", group=group, on_event=here,
                            **trainer.state(SAVED_AT + STEPS))
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        trainer.train(1)
    raise AssertionError("was not killed")


def resume(mesh_shape, tied, store, same):
    trainer = Trainer(mesh_shape, tied)
    rank = dist.get_rank()
    whole = torch.load(f"{store}.whole")
    before = rank if os.path.exists(f"{store}.{rank}") else 0
    with open(f"{store}.{before}") as file:
        expected = json.load(file)
    trainer.evaluate()
    with tm.Group.from_torch() as group:
        state = trainer.state(0)
        loaded = tm.torch.load(f"{store}/step-{SAVED_AT}", group=group, **state)
        assert loaded.kept == [], loaded.kept
        found = trainer.weights_and_moments()
        assert found.keys() == whole.keys(), found.keys() ^ whole.keys()
        for key, value in whole.items():
            assert torch.equal(found[key], value), key
        assert state["extra"]["step"] == SAVED_AT
        tm.torch.set_rng_state(state["extra"]["rng"])
        assert repr(tm.torch.rng_state().value) == expected["rng"]
        log = trainer.train(STEPS)
        if same:
            assert log == expected["log"], (log, expected["log"])
            # Whatever the killed one has left of that name.
            tm.torch.save(f"{store}/step-{SAVED_AT + STEPS}", group=group,
                          **trainer.state(SAVED_AT + STEPS))
        else:
            assert [one[0] for one in log] == [one[0] for one in expected["log"]]


# ---- Tests ---------------------------------------------------------------------------------------


class Training(support.Folder):
    def killed_and_resumed(self, mesh_shape, when, others, tied=False, same=True):
        store = f"{mesh_shape}-{when}-{tied}"
        size = ranks_of(mesh_shape)
        Ranks(__file__, size, ("begin", mesh_shape, tied, store, when)).kill_at(f"{store}.now")
        with tm.open(f"{store}/latest") as checkpoint:
            self.assertEqual(os.path.basename(checkpoint.path), f"step-{SAVED_AT}")
        support.run("verify", f"{store}/step-{SAVED_AT}")
        # It was killed while it saved, and has left what there was of that.
        self.assertEqual(bool(os.listdir(f"{store}/.staging")), when != "step")
        if same:
            torchrun(__file__, size, ("resume", mesh_shape, tied, store, True))
            with tm.open(f"{store}/latest") as checkpoint:
                self.assertEqual(os.path.basename(checkpoint.path), f"step-{SAVED_AT + STEPS}")
        for other in others:
            torchrun(__file__, ranks_of(other), ("resume", other, tied, store, False))

    def test_fsdp_training_resumes_after_a_kill(self):
        self.killed_and_resumed("4", "write", ["2"])

    @needs_long
    def test_fsdp_resumes_after_a_kill_before_publish(self):
        self.killed_and_resumed("4", "publish", ["3", "1", "2x2"])

    @needs_long
    def test_tensor_parallel_training_resumes_after_a_kill(self):
        self.killed_and_resumed("2x2", "write", ["4", "3", "1", "1x2"])

    @needs_long
    def test_tied_weight_training_resumes_after_a_kill(self):
        self.killed_and_resumed("4", "step", ["3", "2x2"], tied=True)
        self.killed_and_resumed("2x2", "publish", ["3", "4"], tied=True)

    @needs_long
    def test_hybrid_sharded_training_resumes_after_a_kill(self):
        self.killed_and_resumed("h2x2", "write", ["3", "2x2"])

    @needs_long
    def test_unevenly_sharded_training_resumes_after_a_kill(self):
        self.killed_and_resumed("3x2", "publish", ["4"])


def sizes_of(mesh_shape):
    return tuple(map(int, mesh_shape.removeprefix("h").split("x")))


def ranks_of(mesh_shape):
    return math.prod(sizes_of(mesh_shape))


if __name__ == "__main__":
    main(globals())
