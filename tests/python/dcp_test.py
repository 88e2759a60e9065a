# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint (DCP) through our writer and reader."""

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import sys
import unittest

import support
from support import LONG, needs_long
import tensormount as tm
from torchrun import main, torchrun

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, SavePlan
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError as error:
    raise unittest.SkipTest(str(error))


# Axes of the mesh, and placements for n ranks in all.
SHARDINGS = {
    "rows": (1, lambda n: [Shard(0)]),
    "columns": (1, lambda n: [Shard(1)]),
    "replicas": (1, lambda n: [Replicate()]),
    "grid": (2, lambda n: [Shard(0), Shard(1)]),
    "rows twice": (2, lambda n: [Shard(0), Shard(0)]),
    "hybrid": (2, lambda n: [Replicate(), Shard(0)]),
    "columns of some": (2, lambda n: [Shard(1), Replicate()]),
    "over tensor parallelism": (2, lambda n: [_StridedShard(0, split_factor=last(n)), Shard(0)]),
    "several boxes": (2, lambda n: [_StridedShard(0, split_factor=2), Replicate()]),
}
EACH = list(SHARDINGS)
ALL = [list(pair) for pair in itertools.product(EACH, EACH)]
# Each as it is, and each from and to two others.
SOME = [[one, EACH[(i + step) % len(EACH)]] for i, one in enumerate(EACH) for step in (0, 1, 4)]
TWO = [["grid", "rows"], ["rows", "hybrid"]]


def last(ranks):
    """How many the last axis of a mesh of two has."""
    return ranks // 2 if ranks % 2 == 0 else 1


# ---- What ranks do -------------------------------------------------------------------------------


def sharded(name, whole):
    """This rank's part of what all have."""
    ranks = dist.get_world_size()
    axes, placements = SHARDINGS[name]
    shape = (ranks,) if axes == 1 else (ranks // last(ranks), last(ranks))
    return distribute_tensor(
        whole, init_device_mesh("cpu", shape), placements(ranks), src_data_rank=None)


def wholes(number=0):
    """Of four ranks the last has one row of the first, and none of the second."""
    return {"w": torch.arange(70.0).reshape(7, 10) + 100 * number,
            "small": torch.arange(15).reshape(5, 3) + number}


def load_planner(name):
    # DCP's own takes a part of several boxes for one.
    return tm.torch.LoadPlanner() if name == "several boxes" else None


def pairs(how, wanted):
    saves = list(dict.fromkeys(name for name, _ in wanted))
    for number, name in enumerate(saves):
        path = f"S/{how}-{dist.get_world_size()}-{name}"
        state = {"model": {key: sharded(name, whole) for key, whole in wholes(number).items()},
                 "plain": torch.arange(4) + number, "step": number, "blob": {"any": ("thing", number)}}
        writer = tm.torch.Writer(path)
        if how == "sync":
            dcp.save(state, storage_writer=writer)
            assert writer.report["path"] == path
        elif how == "no-collectives":
            dcp.save(state, storage_writer=writer, use_collectives=False)
        elif how == "thread":
            dcp.async_save(state, storage_writer=writer).result()
        else:
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

            dcp.async_save(state, storage_writer=writer,
                           async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
        dist.barrier()
        for _, other in filter(lambda pair: pair[0] == name, wanted):
            load(path, other, number)


def load(path, name, number):
    into = {"model": {key: sharded(name, torch.full_like(whole, -1)) for key, whole in wholes().items()},
            "plain": torch.zeros(4, dtype=torch.int64), "step": -1, "blob": {"any": None}}
    dcp.load(into, storage_reader=tm.torch.Reader(path), planner=load_planner(name))
    for key, whole in wholes(number).items():
        found, expected = into["model"][key].to_local(), sharded(name, whole).to_local()
        assert torch.equal(found, expected), (path, name, key, found, expected)
    assert torch.equal(into["plain"], torch.arange(4) + number)
    assert into["step"] == number and into["blob"] == {"any": ("thing", number)}, into


def load_elsewhere(ranks, how, wanted):
    """What so many ranks have saved with `pairs`."""
    saves = list(dict.fromkeys(name for name, _ in wanted))
    for name, other in wanted:
        load(f"S/{how}-{ranks}-{name}", other, saves.index(name))


def save_by_dcp():
    for name in ("rows", "grid", "hybrid"):
        state = {key: sharded(name, whole) for key, whole in wholes().items()}
        dcp.save({**state, "step": 5}, checkpoint_id=f"dcp-{name}")


def load_from_dcp(names):
    for saved, name in itertools.product(("rows", "grid", "hybrid"), names):
        into = {key: sharded(name, torch.full_like(whole, -1)) for key, whole in wholes().items()}
        into["step"] = 0
        dcp.load(into, storage_reader=tm.torch.Reader(f"dcp-{saved}"), planner=load_planner(name))
        for key, whole in wholes().items():
            assert torch.equal(into[key].to_local(), sharded(name, whole).to_local()), (saved, name, key)
        assert into["step"] == 5


def byte_items():
    """What each rank has for itself; the same through tm.load; a save in which ranks differ."""
    whole = wholes()["w"]
    state = {"w": sharded("rows", whole), "mine": dist.get_rank()}
    dcp.save(state, storage_writer=tm.torch.Writer("S/per-rank", per_rank=["mine"]))
    into = {"w": sharded("columns", torch.zeros_like(whole)), "mine": None}
    dcp.load(into, storage_reader=tm.torch.Reader("S/per-rank"))
    assert into["mine"] == dist.get_rank()
    into = {"w": sharded("columns", torch.zeros_like(whole))}
    with tm.Group.from_torch() as group:
        tm.load(into, "S/per-rank", group)
    assert torch.equal(into["w"].full_tensor(), whole)
    try:
        dcp.save(state, storage_writer=tm.torch.Writer("S/bad"))
        raise AssertionError("byte items that differ")
    except dcp.api.CheckpointException as error:
        assert "mine" in str(error), error
    assert not os.path.exists("S/bad")


def several_boxes():
    """A part that is several boxes is no business of DCP's own planner; tm.save needs none."""
    whole = torch.arange(24.0).reshape(8, 3)
    made = sharded("several boxes", whole)
    assert len(tm.boxes(made)) == 2
    with tm.Group.from_torch() as group:
        tm.save({"w": made}, "S/boxes", group)
    dist.barrier()
    with tm.open("S/boxes") as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), whole)
    into = {"w": sharded("several boxes", torch.zeros_like(whole))}
    try:
        dcp.load(into, storage_reader=tm.torch.Reader("S/boxes"))
        raise AssertionError("DCP's planner reads one box")
    except dcp.api.CheckpointException as error:
        assert "LoadPlanner" in str(error), error
    # A part of Shards has no place of its own; and DCP would pickle Shards.
    by_hand = tm.Shards((8, 3), [((0, 0), made)])
    try:
        with tm.Group.from_torch() as group:
            tm.load({"w": by_hand}, "S/boxes", group)
        raise AssertionError("a DTensor was filled with other rows than its own")
    except tm.UnsupportedError as error:
        assert "plain" in str(error), error
    try:
        dcp.save({"w": tm.Shards((2,), [((0,), torch.zeros(2))])},
                 storage_writer=tm.torch.Writer("S/pickled"))
        raise AssertionError("Shards were pickled")
    except dcp.api.CheckpointException as error:
        assert "Shards" in str(error), error


def fully_sharded_over_tensor_parallelism():
    """Seven rows on 3 x 2 ranks as FSDP2 cuts them: four and three for tensor parallelism, of which
    data ranks have 2, 2, 0 and 1, 1, 1. PyTorch says 2, 1, 1 and 1, 1, 1."""
    mesh = init_device_mesh("cpu", (3, 2))
    data, tensor = mesh.get_coordinate()
    whole = torch.arange(21.0).reshape(7, 3)

    def made(values):
        half = values.chunk(2)[tensor]
        local = half.tensor_split([2, 4])[data] if tensor == 0 else half[data : data + 1]
        return DTensor.from_local(
            local.clone(), mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False,
            shape=whole.shape, stride=whole.stride())

    mine = made(whole)
    dcp.save({"w": mine}, storage_writer=tm.torch.Writer("S/uneven"))
    dcp.async_save({"w": mine}, storage_writer=tm.torch.Writer("S/uneven-async")).result()
    dist.barrier()
    for path in ("S/uneven", "S/uneven-async"):
        with tm.open(path) as checkpoint:
            assert torch.equal(checkpoint["w"].torch(), whole)
    for planner in (None, tm.torch.LoadPlanner()):
        into = {"w": made(torch.zeros_like(whole))}
        try:
            dcp.load(into, storage_reader=tm.torch.Reader("S/uneven"), planner=planner)
            assert planner is not None, "DCP's planner reads what the placements say"
        except dcp.api.CheckpointException as error:
            assert planner is None and "LoadPlanner" in str(error), error
    assert torch.equal(into["w"].to_local(), mine.to_local())
    dist.barrier()


class Parts(torch.Tensor):
    """A tensor that has no memory of its own: boxes, each a tensor. As those of torchrec and torchao
    it tells DCP so by PyTorch's protocol."""

    @staticmethod
    def __new__(cls, shape, parts):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=next(iter(parts.values())).dtype)
        made.parts = parts  # Where a box begins: its tensor.
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].shape, arguments[0].parts)
        raise NotImplementedError(f"{function} of parts")

    def __create_write_items__(self, fqn, object):
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD,
                      tensor_data=TensorWriteData(
                          chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape))
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(begin), part.shape) for begin, part in self.parts.items()]

    def __get_tensor_shard__(self, index):
        return self.parts[tuple(index.offset)]


def parts(values, rank, size):
    """Rows in turn, one from each end, of 2 * size rows."""
    lower, upper = rank, 2 * size - 1 - rank
    return Parts(values.shape, {(row, 0): values[row : row + 1].clone() for row in (lower, upper)})


def tensors_of_parts():
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(2.0 * size * 3).reshape(2 * size, 3)

    def state(values):
        mesh = init_device_mesh("cpu", (size,))
        # As torchrec has its tables: a column each of a DTensor, in two parts by rows.
        columns = torch.cat([values, values[:, :1]], 1)
        mine = [columns[:size, rank : rank + 1].clone(), columns[size:, rank : rank + 1].clone()]
        local = LocalShardsWrapper(mine, [(0, rank), (size, rank)])
        return {"rows": parts(values, rank, size), "table": DTensor.from_local(
            local, mesh, [Shard(1)], run_check=False, shape=columns.shape, stride=columns.stride())}

    def tensors(held):
        return [*held["rows"].parts.values(), *held["table"]._local_tensor.local_shards()]

    expected = tensors(state(whole))
    group = tm.Group.from_torch()
    dcp.save(state(whole), storage_writer=tm.torch.Writer("S/parts-dcp"))
    # DCP's copy for saves in the background is of torchrec's kind, too.
    table = {"table": state(whole)["table"]}
    dcp.async_save(table, storage_writer=tm.torch.Writer("S/parts-async")).result()
    tm.save(state(whole), "S/parts-tm", group)
    dist.barrier()
    for path in ("S/parts-dcp", "S/parts-tm", "S/parts-async"):
        with tm.open(path) as checkpoint:
            assert torch.equal(checkpoint["table"].torch(), torch.cat([whole, whole[:, :1]], 1))
            if path == "S/parts-async":
                continue
            assert torch.equal(checkpoint["rows"].torch(), whole)
        into = state(torch.zeros_like(whole))
        dcp.load(into, storage_reader=tm.torch.Reader(path))
        assert all(map(torch.equal, tensors(into), expected)), into
        into = state(torch.zeros_like(whole))
        tm.load(into, path, group)
        assert all(map(torch.equal, tensors(into), expected)), into
    group.close()


class OwnPlanner(dcp.DefaultSavePlanner):
    """As PyTorch's documentation shows them: other keys, and half the precision."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        renamed = {f"renamed.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)

    def transform_object(self, write_item, object):
        if isinstance(object, torch.Tensor) and object.is_floating_point():
            object = object.half()
        return super().transform_object(write_item, object)


def own_planners():
    for name in ("grid", "several boxes"):
        state = {key: sharded(name, whole) for key, whole in wholes().items()}
        dcp.save(state, storage_writer=tm.torch.Writer(f"S/own-{name}"), planner=OwnPlanner())
        dist.barrier()
        with tm.open(f"S/own-{name}") as checkpoint:
            assert checkpoint.keys() == ["renamed.small", "renamed.w"]
            assert torch.equal(checkpoint["renamed.w"].torch(), wholes()["w"].half())
            assert torch.equal(checkpoint["renamed.small"].torch(), wholes()["small"])


class App:
    """A model and its optimizer as one value, as in PyTorch's tutorial on DCP."""

    def __init__(self):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, bias=False))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self):
        self.model(torch.ones(2, 7)).pow(2).sum().backward()
        self.optim.step()
        self.optim.zero_grad()

    def state_dict(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state):
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def wholes(self):
        tensors = dict(self.model.named_parameters())
        for key, parameter in self.model.named_parameters():
            tensors.update({f"{key}.{name}": value for name, value in self.optim.state[parameter].items()})
        return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in tensors.items()}


def planners_with_chunks_of_their_own():
    from torch.distributed.checkpoint.format_utils import DynamicMetaLoadPlanner

    whole = torch.arange(48.0).reshape(8, 6)
    dcp.save({"w": sharded("columns", whole)}, storage_writer=tm.torch.Writer("S/for-dynamic"))
    for name in ("rows", "columns"):
        into = {"w": sharded(name, torch.zeros(8, 6))}
        dcp.load(into, storage_reader=tm.torch.Reader("S/for-dynamic"), planner=DynamicMetaLoadPlanner())
        assert torch.equal(into["w"].full_tensor(), whole), name


def cached_plans():
    """Unchanged on all ranks, on some, on none."""
    for number, rows in enumerate((8, 8, 8, 12)):
        whole = torch.arange(rows * 6.0).reshape(rows, 6) + number
        state = {"w": sharded("rows", whole), "b": torch.full((3,), float(number)), "step": number}
        if number == 2 and dist.get_rank() == 1:
            state["mine"] = torch.ones(2)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=tm.torch.Writer(f"S/cached-{number}"), planner=planner)
        with tm.open(f"S/cached-{number}") as checkpoint:
            assert torch.equal(checkpoint["w"].torch(), whole), number
            assert torch.equal(checkpoint["b"].torch(), state["b"]), number
            assert ("mine" in checkpoint) == (number == 2)


def save_app():
    app = App()
    app.step()
    app.step()
    dcp.save({"app": app, "epoch": 4}, storage_writer=tm.torch.Writer("S/app"))
    whole = app.wholes()
    if dist.get_rank() == 0:
        torch.save(whole, "app.pt")


def load_app():
    app, expected = App(), torch.load("app.pt")
    into = {"app": app, "epoch": 0}
    dcp.load(into, storage_reader=tm.torch.Reader("S/app"))
    found = app.wholes()
    assert found.keys() == expected.keys() and len(found) == 12, found.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert into["epoch"] == 4


@contextlib.contextmanager
def gathered():
    """The bytes of this rank that DCP gathers at the coordinator."""
    plain, found = dist.gather_object, []

    def gather_object(obj, *arguments, **keywords):
        found.append(len(pickle.dumps(obj)))
        return plain(obj, *arguments, **keywords)

    dist.gather_object = gather_object
    try:
        yield found
    finally:
        dist.gather_object = plain


def what_dcp_gathers():
    """Bytes that each rank sends to the coordinator: with us as many for any number of tensors."""
    sent, many = {}, 1000 if LONG else 200
    for count in (10, many):
        state = {f"layers.{i}.weight": sharded("rows", torch.full((8, 2), float(i))) for i in range(count)}
        for name, writer in (("tensormount", tm.torch.Writer(f"S/gathered-{count}")),
                             ("dcp", dcp.FileSystemWriter(f"dcp-gathered-{count}"))):
            with gathered() as found:
                dcp.save(state, storage_writer=writer)
            sent[name, count] = sum(found)
    if dist.get_rank() == 1:
        print(json.dumps({"gathered_of_a_rank": {f"{name}, {n} tensors": b for (name, n), b in sent.items()},
                          "torch": torch.__version__}))
    assert sent["tensormount", 10] == sent["tensormount", many] <= 250, sent
    assert sent["dcp", many] > 100 * sent["tensormount", many], sent


# ---- Tests ---------------------------------------------------------------------------------------


class Dcp(support.Folder):
    def test_dcp_works_on_four_ranks(self):
        wanted = ALL if LONG else SOME
        said = torchrun(__file__, 4, ("pairs", "sync", wanted), ("byte_items",), ("several_boxes",),
                 ("tensors_of_parts",), ("own_planners",), ("planners_with_chunks_of_their_own",), ("cached_plans",), ("save_app",), ("what_dcp_gathers",), ("save_by_dcp",),
                 ("load_from_dcp", EACH if LONG else ["columns"]))
        print(said[said.index('{"gathered') :], end="", file=sys.stderr)
        for size in (3, 2, 1) if LONG else (3,):
            torchrun(__file__, size, ("load_app",), ("load_elsewhere", 4, "sync", wanted if LONG else SOME[1::3]),
                     ("load_from_dcp", EACH if LONG else ["rows", "columns"]))

    def test_dcp_works_on_two_ranks(self):
        torchrun(__file__, 2, *(("pairs", how, TWO) for how in ("thread", "no-collectives", "process")))

    @needs_long
    def test_all_shardings_work_in_other_modes(self):
        for how in ("thread", "no-collectives", "process"):
            torchrun(__file__, 4, ("pairs", how, ALL))

    @needs_long
    def test_dcp_works_on_six_ranks(self):
        torchrun(__file__, 6, ("fully_sharded_over_tensor_parallelism",), ("pairs", "sync", SOME))

    def test_dcp_works_without_a_process_group(self):
        state = {"model": {"w": torch.arange(6.0)}, "list": [torch.ones(2), 3]}
        dcp.save(state, storage_writer=tm.torch.Writer("S/alone"))
        into = {"model": {"w": torch.zeros(6)}, "list": [torch.zeros(2), 0]}
        dcp.load(into, storage_reader=tm.torch.Reader("S/alone"))
        self.assertTrue(torch.equal(into["model"]["w"], torch.arange(6.0)))
        self.assertTrue(torch.equal(into["list"][0], torch.ones(2)))
        self.assertEqual(into["list"][1], 3)
        # A conversion is asked for; integers that do not fit are refused even then.
        half = {"model": {"w": torch.zeros(6, dtype=torch.float16)}}
        with self.assertRaisesRegex(BaseException, "model.w: asked for as torch.float16, stored as torch.float32"):
            dcp.load(half, storage_reader=tm.torch.Reader("S/alone"))
        self.assertFalse(half["model"]["w"].any())
        dcp.load(half, storage_reader=tm.torch.Reader("S/alone", convert=True))
        self.assertTrue(torch.equal(half["model"]["w"], torch.arange(6.0).half()))
        dcp.save({"w": torch.tensor([1e6, 3.7, -2.5, 300])}, storage_writer=tm.torch.Writer("S/wide"))
        for convert in (False, True):
            bytes_ = {"w": torch.full((4,), 7, dtype=torch.uint8)}
            with self.assertRaisesRegex(BaseException, "w: "):
                dcp.load(bytes_, storage_reader=tm.torch.Reader("S/wide", convert=convert))
            self.assertTrue((bytes_["w"] == 7).all())
        # Plain values of tm.save are byte items to DCP.
        tm.save({"w": torch.ones(3), "step": 9}, "S/ours")
        into = {"w": torch.zeros(3), "step": 0}
        dcp.load(into, storage_reader=tm.torch.Reader("S/ours"))
        self.assertEqual((into["step"], into["w"].tolist()), (9, [1, 1, 1]))
        with support.stored_as("odd", '{"torch.device":"x"}'):
            tm.save({"w": torch.ones(1), "odd": 1}, "S/odd")
        with self.assertRaisesRegex(BaseException, "odd: the stored value cannot be read"):
            dcp.load(into := {"odd": 0}, storage_reader=tm.torch.Reader("S/odd"))
        self.assertEqual(into, {"odd": 0})
        dcp.load(into := {"w": torch.zeros(1)}, storage_reader=tm.torch.Reader("S/odd"))
        self.assertEqual(int(into["w"]), 1)
        with self.assertRaises(TypeError):
            tm.torch.Writer("S/x", plcement="auto")

    def test_cached_dcp_plans_save_current_values(self):
        """A planner that keeps its plans says of an unchanged one nothing but that it is unchanged."""
        for number in range(4):
            state = {"model": {"w": torch.full((6,), float(number)), "b": torch.arange(3) * number},
                     "step": number}
            if number == 3:
                state["model"]["new"] = torch.ones(2)
            planner = DefaultSavePlanner(enable_plan_caching=True)
            writer = tm.torch.Writer(f"S/planned-{number}")
            dcp.save(state, storage_writer=writer, planner=planner)
            self.assertEqual(writer.report["tensors"], 2 + (number == 3))
            into = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}, "step": -1}
            dcp.load(into, storage_reader=tm.torch.Reader(f"S/planned-{number}"))
            self.assertEqual(into["step"], number)
            for key, value in state["model"].items():
                self.assertTrue(torch.equal(into["model"][key], value), key)

    def test_report_describes_the_last_save(self):
        writer = tm.torch.Writer("S/reported")
        dcp.save({"w": torch.zeros(3)}, storage_writer=writer)
        self.assertEqual(writer.report["tensors"], 1)
        with self.assertRaisesRegex(BaseException, "exists already"):
            dcp.save({"w": torch.zeros(3)}, storage_writer=writer)
        self.assertIsNone(writer.report)

    def test_objects_are_saved_beside_the_state(self):
        writer = tm.torch.Writer("S/with-config", objects={"config.json": b"{}"})
        dcp.save({"w": torch.zeros(3)}, storage_writer=writer)
        with tm.open("S/with-config") as checkpoint:
            self.assertEqual(checkpoint.objects["config.json"], b"{}")
            self.assertEqual(checkpoint.files().read("hf/config.json"), b"{}")
        with self.assertRaisesRegex(tm.InvalidArgumentError, "config.json"):
            tm.torch.Writer("S/x", objects={"config.json": "text"})

    def test_incomplete_plan_is_refused(self):
        class Delta(DefaultSavePlanner):
            """As one that says what has changed in a way of its own."""

            kept = None

            def create_local_plan(self):
                plan = super().create_local_plan()
                return dataclasses.replace(plan, items=[i for i in plan.items if i.index.fqn in self.kept])

        class Forgetful(DefaultSavePlanner):
            def create_local_plan(self):
                super().create_local_plan()
                return SavePlan([], usable=False)

        state = {"w": torch.ones(2), "b": torch.ones(3), "step": 1}
        for planner, kept, said in ((Delta, (), "leaves out w, b, step"), (Delta, ("w", "b"), "leaves out step"),
                                    (Delta, ("step",), "leaves out w, b"), (Forgetful, (), "enable_plan_caching")):
            planner.kept = kept
            with self.assertRaisesRegex(BaseException, said):
                dcp.save(state, storage_writer=tm.torch.Writer("S/delta"), planner=planner())
            self.assertFalse(os.path.exists("S/delta"))

    def test_requests_use_the_chunks_of_the_planner(self):
        """Requests count from the begin of the chunk that a planner's own metadata name."""
        from torch.distributed.checkpoint.format_utils import DynamicMetaLoadPlanner
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        whole = torch.arange(48.0).reshape(8, 6)
        dcp.save({"w": whole}, storage_writer=tm.torch.Writer("S/chunks"))

        class Chunks(DefaultLoadPlanner):
            size = (8, 6)

            def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
                super().set_up_planner(state_dict, metadata, is_coordinator)
                about = metadata.state_dict_metadata["w"]
                chunks = [ChunkStorageMetadata(torch.Size((row, column)), torch.Size((4, 3)))
                          for row in (0, 4) for column in (0, 3)]
                found = dataclasses.replace(about, size=torch.Size(self.size), chunks=chunks)
                self.metadata = dataclasses.replace(metadata, state_dict_metadata={"w": found})

        for planner in (Chunks(), DynamicMetaLoadPlanner()):
            into = {"w": torch.zeros(8, 6)}
            dcp.load(into, storage_reader=tm.torch.Reader("S/chunks"), planner=planner)
            self.assertTrue(torch.equal(into["w"], whole), type(planner))
        # Of a smaller tensor there is no telling which cells are meant.
        for rows in (6, 4):
            with self.assertRaisesRegex(BaseException, "w: .*metadata has the shape|[Ss]ize"):
                dcp.load({"w": torch.zeros(rows, 6)}, storage_reader=tm.torch.Reader("S/chunks"),
                         planner=DynamicMetaLoadPlanner())

    def test_local_part_unknown_to_placements_loads(self):
        # As in fully_sharded_over_tensor_parallelism; DCP's planner takes this rank's part for empty.
        from boxes_test import FakeRanks

        whole = torch.arange(21.0).reshape(7, 3)
        tm.save({"w": whole}, "S/seven")
        metadata = tm.torch.Reader("S/seven").read_metadata()
        with FakeRanks(5) as fake:
            part = DTensor.from_local(
                whole[6:], fake.mesh((3, 2)), [_StridedShard(0, split_factor=2), Shard(0)],
                run_check=False, shape=whole.shape, stride=whole.stride())
            planner = tm.torch.LoadPlanner()
            planner.set_up_planner({"w": part}, metadata, False)
            (item,) = planner.create_local_plan().items
        self.assertEqual((item.storage_offsets, item.lengths), ((6, 0), (1, 3)))

    def test_tensors_of_parts_save_and_load(self):
        whole = torch.arange(12.0).reshape(4, 3)
        state = {"a": parts(whole, 0, 2), "b": parts(whole + 1, 1, 2)}
        # One rank of two: the library sees that rows are missing.
        with self.assertRaisesRegex(tm.LayoutError, r"tensor a: \[1:3, 0:3\] is held by no rank"):
            tm.save(state, "S/parts")
        # Those without memory of their own are not taken for each other.
        both = Parts(whole.shape, {(0, 0): whole[:1].clone(), (1, 0): whole[1:].clone()})
        other = Parts(whole.shape, {(0, 0): whole + 1})
        tm.save({"both": both, "other": other}, "S/two")
        into = {"both": torch.zeros(4, 3), "other": torch.zeros(4, 3)}
        tm.load(into, "S/two")
        self.assertTrue(torch.equal(into["both"], whole) and torch.equal(into["other"], whole + 1))
        # Parts that are not what they are said to be.
        for row, refused, why in (
            (whole[:1, :2], tm.LayoutError, "its write item says"),
            (other, tm.UnsupportedError, "its memory"),
        ):
            lies = Parts(whole.shape, {(0, 0): whole.clone()})
            lies.__get_tensor_shard__ = lambda index, row=row: row
            with self.assertRaisesRegex(refused, f"tensor w: .*{why}"):
                tm.save({"w": lies}, "S/lies")
        items = Parts(whole.shape, {(0, 0): whole.clone()})
        items.__create_write_items__ = lambda fqn, object: both.__create_write_items__("w.scale", both)
        with self.assertRaisesRegex(tm.UnsupportedError, r"tensor w: .*w\.scale"):
            tm.save({"w": items}, "S/lies")

    def test_parts_of_objects_on_a_grid_have_megatrons_names(self):
        folder = os.path.join(support.ROOT, "tests/golden/foreign/dcp-old/megatron-0.19")
        stock, ours = dcp.FileSystemReader(folder), tm.torch.Reader(folder)
        names = [name for name, item in stock.read_metadata().state_dict_metadata.items()
                 if isinstance(item, BytesStorageMetadata) and not name.startswith("old/")]
        self.assertIn("rng/a_b/shard_1.0_2.1", names)
        found = []
        for reader in (stock, ours):
            state = dict.fromkeys(names)
            dcp.load(state, storage_reader=reader, no_dist=True)
            found.append({name: value.getvalue() if hasattr(value, "getvalue") else repr(value)
                          for name, value in state.items()})
        self.assertEqual(found[0], found[1])


if __name__ == "__main__":
    main(globals())
