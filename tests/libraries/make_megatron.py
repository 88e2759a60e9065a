# SPDX-License-Identifier: Apache-2.0
"""Saves a checkpoint with megatron.core.dist_checkpointing: make_megatron.py FOLDER. Or loads it again with
that and compares it: make_megatron.py load@FOLDER[,load@FOLDER]...

Four ranks as tensor parallelism of two by pipeline of two; one loads.
"""

import multiprocessing
import pathlib
import sys

import torch

# The save path asks for both even where all tensors are in the memory of the host.
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.dist_checkpointing.validation import StrictHandling  # noqa: E402

import formula  # noqa: E402
import make_torch  # noqa: E402
import ranks  # noqa: E402

# key -> (dtype, global shape). What the ranks hold of it stands in state().
MODEL = {
    "embedding.word_embeddings.weight": ("bf16", (64, 16)),  # A vocabulary padded for two.
    "decoder.layers.self_attention.qkv.weight": ("bf16", (4, 24, 16)),  # Four layers in one key.
    "decoder.layers.mlp.fc2.weight": ("f32", (4, 16, 20)),
    "decoder.layers.norm.weight": ("f32", (4, 16)),
    "decoder.final_norm.weight": ("f32", (16,)),
    "decoder.experts.weight": ("f16", (2, 2, 6, 8)),  # Two axes in front.
    "output_layer.weight": ("f32", (32, 16)),
    "optimizer.state.exp_avg.output_layer.weight": ("f32", (32, 16)),
    "optimizer.state.turned": ("f32", (12, 8)),
    "optimizer.state.step": ("i64", ()),
}

COMMON = {"iteration": 77, "checkpoint_version": 3.0, "args": {"lr": 0.5, "names": ["a", "b"]},
          "optimizer": {"param_groups": [{"wd": 0.1}]},
          # Tensors that nobody declared as sharded go with the rest.
          "common_tensor": make_torch.tensor("common_tensor", "f32", (3, 5))}
COMMON["args"]["scale"] = make_torch.tensor("args.scale", "f64", (4,))


def part(key, box):
    dtype, shape = MODEL[key]
    return make_torch.tensor(key, dtype, shape, box)


def state(rank):
    tp, pp = rank % 2, rank // 2
    of = {}

    def add(name, key, box, offsets, prepend=0, replica=0, turned=False, **more):
        data = part(key, box)
        data = data.reshape(data.shape[prepend:])
        if turned:
            data = data.t().contiguous().t()
        of[name] = ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica,
                                                   prepend_axis_num=prepend, **more)

    if pp == 0:
        add("embedding", "embedding.word_embeddings.weight", (slice(32 * tp, 32 * tp + 32),), [(0, tp, 2)],
            allow_shape_mismatch=True)
    for local in range(2):
        layer = 2 * pp + local
        row = slice(12 * tp, 12 * tp + 12)
        add(f"qkv{local}", "decoder.layers.self_attention.qkv.weight", (slice(layer, layer + 1), row),
            [(0, layer, 4), (1, tp, 2)], prepend=1)
        column = slice(10 * tp, 10 * tp + 10)
        add(f"fc2{local}", "decoder.layers.mlp.fc2.weight", (slice(layer, layer + 1), slice(0, 16), column),
            [(0, layer, 4), (2, tp, 2)], prepend=1)
        add(f"norm{local}", "decoder.layers.norm.weight", (slice(layer, layer + 1),), [(0, layer, 4)],
            prepend=1, replica=tp)
    add("experts", "decoder.experts.weight", (slice(pp, pp + 1), slice(tp, tp + 1)), [(0, pp, 2), (1, tp, 2)],
        prepend=2)
    if pp == 1:
        add("final", "decoder.final_norm.weight", (slice(0, 16),), [], replica=tp)
        rows = slice(16 * tp, 16 * tp + 16)
        add("output", "output_layer.weight", (rows,), [(0, tp, 2)])
        add("avg", "optimizer.state.exp_avg.output_layer.weight", (rows,), [(0, tp, 2)])
    add("turned", "optimizer.state.turned", (slice(3 * rank, 3 * rank + 3),), [(0, rank, 4)], turned=True)
    add("step", "optimizer.state.step", (), [], replica=rank)
    of["rng"] = ShardedObject("rng_state", {"seed": 11 * rank, "where": [pp, tp]}, (2, 2), (pp, tp))
    of["extra"] = ShardedObject("decoder.extra_state", [1, 2, 3], (1,), (0,), replica_id=rank)
    return {"model": of, **COMMON}


def make(rank, count, folder, manager):
    # Or each rank would start a manager of its own, which imports all of this again.
    if hasattr(filesystem_async, "_results_queue"):
        filesystem_async._results_queue = manager.Queue()
    dist_checkpointing.save(state(rank), folder)


def bits(tensor):
    """NaN, which the formula gives, is equal to nothing."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def load(rank, count, folders):
    for folder in folders:
        wanted = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(shape, dtype=getattr(torch, formula.DTYPES[dtype][2])))
                  for key, (dtype, shape) in MODEL.items()}
        objects = {f"rng{pp}{tp}": ShardedObject("rng_state", None, (2, 2), (pp, tp)) for pp in range(2) for tp in range(2)}
        objects["extra"] = ShardedObject("decoder.extra_state", None, (1,), (0,))
        found, missing, unexpected = dist_checkpointing.load(
            {"model": {**wanted, **objects}}, folder, strict=StrictHandling.RETURN_ALL)
        assert not unexpected, (folder, unexpected)
        # What is stored and not requested: tensors of the common state are items of their own, too.
        assert missing <= {"common_tensor", "args.scale"}, (folder, missing)
        for key, (dtype, shape) in MODEL.items():
            expected = part(key, tuple(slice(0, extent) for extent in shape))
            assert bits(found["model"][key]) == bits(expected), (folder, key)
        for pp in range(2):
            for tp in range(2):
                assert found["model"][f"rng{pp}{tp}"] == {"seed": 11 * (2 * pp + tp), "where": [pp, tp]}, folder
        assert found["model"]["extra"] == [1, 2, 3], folder
        for name in ("iteration", "checkpoint_version", "optimizer"):
            assert found[name] == COMMON[name], (folder, name)
        assert bits(found["common_tensor"]) == bits(COMMON["common_tensor"]), folder


def main():
    if sys.argv[1].startswith("load@"):
        ranks.run(1, load, [one.removeprefix("load@") for one in sys.argv[1].split(",")])
        return
    folder = sys.argv[1]
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("fork").Manager() as manager:
        ranks.run(4, make, folder, manager)


if __name__ == "__main__":
    main()
