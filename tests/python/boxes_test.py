#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Placements of DTensors as boxes, compared with the local tensors that PyTorch itself makes.

TENSORMOUNT_TEST_SCALE multiplies the random cases (34: 10,000), TENSORMOUNT_TEST_SEED repeats them.
"""

import collections
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest

from support import needs, scaled, seeded

from tensormount import _boxes
from tensormount.errors import LayoutError, UnsupportedError

WORLD = 12
MESHES = [(1,), (2,), (3,), (4,), (7,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (1, 3), (2, 5), (2, 2, 2), (2, 3, 2), (3, 2, 2)]


def one(global_shape, mesh, coordinate, *placements):
    return _boxes.placement_boxes(global_shape, mesh, coordinate, placements)


def numbers(boxes):
    return [(box.begin, box.extent, box.local_begin) for box in boxes]


class Arithmetic(unittest.TestCase):
    """Small cases that can be checked by eye; no PyTorch."""

    def test_even_rows_give_one_box(self):
        self.assertEqual(one((8, 3), (2,), (1,), ("shard", 0)), [_boxes.Box((4, 0), (4, 3), (0, 0), True)])

    def test_chunks_are_rounded_up_and_the_last_are_short_or_empty(self):
        held = [one((5,), (4,), (i,), ("shard", 0)) for i in range(4)]
        self.assertEqual([box.extent for (box,) in held], [(2,), (2,), (1,), (0,)])
        self.assertEqual([box.begin for (box,) in held[:3]], [(0,), (2,), (4,)])

    def test_negative_axis_counts_from_the_end(self):
        self.assertEqual(numbers(one((2, 6), (3,), (2,), ("shard", -1))), [((0, 4), (2, 2), (0, 0))])

    def test_two_mesh_axes_cut_one_axis(self):
        self.assertEqual(numbers(one((8,), (2, 2), (1, 0), ("shard", 0), ("shard", 0))), [((4,), (2,), (0,))])

    def test_fsdp_over_tensor_parallel_gives_one_box(self):
        boxes = one((8,), (2, 2), (0, 1), ("strided", 0, 2), ("shard", 0))
        self.assertEqual(numbers(boxes), [((4,), (2,), (0,))])

    def test_strided_shard_gives_boxes_in_local_row_order(self):
        boxes = one((8, 2), (2,), (1,), ("strided", 0, 2))
        self.assertEqual(numbers(boxes), [((2, 0), (2, 2), (0, 0)), ((6, 0), (2, 2), (2, 0))])

    def test_strided_shards_on_two_axes_give_their_product(self):
        boxes = one((4, 4), (2, 2), (0, 1), ("strided", 0, 2), ("strided", 1, 2))
        self.assertEqual(
            numbers(boxes),
            [((0, 1), (1, 1), (0, 0)), ((0, 3), (1, 1), (0, 1)), ((2, 1), (1, 1), (1, 0)), ((2, 3), (1, 1), (1, 1))],
        )

    def test_adjacent_boxes_are_merged(self):
        # Cut in two, of each half both rows: the halves touch again.
        self.assertEqual(numbers(one((4,), (1,), (0,), ("strided", 0, 2))), [((0,), (4,), (0,))])

    def test_main_replica_is_rank_zero_of_each_replica_axis(self):
        mains = {c: one((2,), (2, 2), c, ("replicate",), ("shard", 0))[0].main for c in itertools.product(range(2), range(2))}
        self.assertEqual(mains, {(0, 0): True, (0, 1): True, (1, 0): False, (1, 1): False})

    def test_a_scalar_is_one_box_without_axes(self):
        self.assertEqual(one((), (2,), (1,), ("replicate",)), [_boxes.Box((), (), (), False)])

    def test_tensor_without_cells_gives_one_empty_box(self):
        for shape in ((0, 3), (3, 0)):
            (box,) = one(shape, (2,), (1,), ("shard", 0))
            self.assertIn(0, box.extent)

    def test_fsdp_over_uneven_tensor_parallel_cuts(self):
        # Tensor parallelism: rows 0 to 4 and 5 to 8; of five rows four ranks get 2, 2, 1, 0.
        placements = ("strided", 0, 2), ("shard", 0)
        held = [_boxes.placement_boxes((9,), *_boxes.fsdp_cuts((4, 2), (i, 0), placements)) for i in range(4)]
        self.assertEqual([numbers(one) for one in held], [[((0,), (2,), (0,))], [((2,), (2,), (0,))], [((4,), (1,), (0,))], [((0,), (0,), (0,))]])
        for other in [("strided", 0, 4), ("shard", 0)], [("strided", 0, 2), ("shard", 1)], [("shard", 0), ("strided", 0, 4)]:
            self.assertIsNone(_boxes.fsdp_cuts((4, 2), (0, 0), other))

    def test_error_names_the_unsupported_placement(self):
        with self.assertRaisesRegex(UnsupportedError, "P.sum.*partial sums"):
            one((2,), (2,), (0,), ("partial", "P(sum)"))
        with self.assertRaisesRegex(UnsupportedError, "Fancy"):
            one((2,), (2,), (0,), ("unknown", "Fancy()"))
        with self.assertRaisesRegex(LayoutError, "axis 1"):
            one((2,), (2,), (0,), ("shard", 1))
        with self.assertRaisesRegex(LayoutError, "axis -2"):
            one((2,), (2,), (0,), ("shard", -2))
        with self.assertRaisesRegex(LayoutError, "coordinate 2"):
            one((2,), (2,), (2,), ("shard", 0))
        with self.assertRaisesRegex(LayoutError, "split factor 0"):
            one((2,), (2,), (0,), ("strided", 0, 0))
        with self.assertRaisesRegex(LayoutError, "placements"):
            one((2,), (2, 2), (0, 0), ("shard", 0))


def random_case(random):
    rank = random.choice([0, 1, 1, 2, 2, 2, 3])
    shape = tuple(random.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16]) for _ in range(rank))
    mesh = random.choice(MESHES)
    placements = []
    for _ in mesh:
        kind = random.random()
        if rank == 0 or kind < 0.25:
            placements.append(("replicate",))
        elif kind < 0.65:
            placements.append(("shard", random.randrange(rank)))
        else:
            placements.append(("strided", random.randrange(rank), random.choice([1, 2, 2, 3, 4, 5])))
    return shape, mesh, tuple(placements)


def torch_placement(placement):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if placement[0] == "replicate":
        return Replicate()
    if placement[0] == "shard":
        return Shard(placement[1])
    return _StridedShard(placement[1], split_factor=placement[2])


class FakeRanks:
    """torch.distributed as if this process were one of WORLD ranks; nothing is sent."""

    def __init__(self, rank):
        self.rank = rank

    def __enter__(self):
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=WORLD)
        self.meshes = {}
        return self

    def __exit__(self, *_):
        import torch.distributed as dist

        dist.destroy_process_group()

    def mesh(self, shape):
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        if shape not in self.meshes:
            ranks = torch.arange(math.prod(shape)).reshape(shape)
            self.meshes[shape] = DeviceMesh("cpu", ranks, _init_backend=False)
        return self.meshes[shape]


def put_together(whole, boxes, shape, dtype):
    """The local tensor that boxes say there is."""
    import torch

    local = torch.full(shape, -1, dtype=dtype)
    for box in boxes:
        there = tuple(slice(b, b + n) for b, n in zip(box.begin, box.extent))
        here = tuple(slice(b, b + n) for b, n in zip(box.local_begin, box.extent))
        local[here] = whole[there]
    return local


def dcp_box_is_right(dtensor, whole):
    """Whether the one box that DCP takes a DTensor for has the cells of its local tensor."""
    import torch
    from torch.distributed.checkpoint import planner_helpers

    local = dtensor.to_local()
    chunk = planner_helpers._create_chunk_from_dtensor(dtensor)
    if local.numel() == 0 and 0 in tuple(chunk.sizes):
        return True
    box = whole[tuple(slice(b, b + n) for b, n in zip(chunk.offsets, chunk.sizes))]
    return box.shape == local.shape and torch.equal(box, local)


def dcp_accepts(items):
    """Whether DCP's coordinator would save what the ranks' write items say."""
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        planner.create_global_plan([SavePlan([item]) for item in items])
    except ValueError:
        return False
    return True


@needs("torch")
class AgainstTorch(unittest.TestCase):
    def test_random_placements_match_distribute_tensor(self):
        import torch
        from torch.distributed.checkpoint.planner_helpers import _create_write_items_for_dtensor
        from torch.distributed.tensor import distribute_tensor

        random, seed = seeded()
        cases = [random_case(random) for _ in range(scaled(100))]
        held = [collections.Counter() for _ in cases]
        mains = [collections.Counter() for _ in cases]
        dcp = {"save": collections.Counter(), "load": collections.Counter()}
        dcp_items = [[] for _ in cases]
        dcp_wrong, refused = set(), set()
        locals_compared = several = 0
        for rank in range(WORLD):
            with FakeRanks(rank) as fake:
                for number, (shape, mesh_shape, placements) in enumerate(cases):
                    what = f"seed {seed}, case {number}, rank {rank}: {shape} on {mesh_shape}, {placements}"
                    whole = torch.arange(math.prod(shape)).reshape(shape)
                    mesh = fake.mesh(mesh_shape)
                    dtensor = distribute_tensor(whole, mesh, [torch_placement(p) for p in placements], src_data_rank=None)
                    try:
                        boxes = _boxes.boxes(dtensor)
                    except LayoutError as error:
                        # Two ways to shard it give this rank a tensor of the same shape.
                        self.assertIn("use a size that the mesh divides evenly", str(error), what)
                        self.assertTrue(any(p[0] == "strided" for p in placements), what)
                        refused.add(number)
                        continue
                    if rank >= math.prod(mesh_shape):
                        self.assertEqual(boxes, [], what)
                        continue
                    local = dtensor.to_local()
                    made = put_together(whole, boxes, local.shape, whole.dtype)
                    self.assertTrue(torch.equal(made, local), f"{what}: {boxes}")
                    self.assertEqual(sum(math.prod(box.extent) for box in boxes), local.numel(), what)
                    locals_compared += 1
                    several += len(boxes) > 1
                    for cell in local.flatten().tolist():
                        held[number][cell] += 1
                        mains[number][cell] += boxes[0].main
                    dcp_items[number].append(_create_write_items_for_dtensor("w", dtensor))
                    if not dcp_box_is_right(dtensor, whole):
                        dcp_wrong.add(number)
        self.assertLessEqual(len(refused), max(1, len(cases) // 500))
        for number, (shape, mesh_shape, placements) in enumerate(cases):
            if number in refused:
                continue
            what = f"seed {seed}, case {number}: {shape} on {mesh_shape}, {placements}"
            copies = math.prod(n for n, p in zip(mesh_shape, placements) if p[0] == "replicate")
            self.assertEqual(set(held[number]), set(range(math.prod(shape))), what)
            self.assertLessEqual(set(held[number].values()), {copies}, what)
            self.assertLessEqual(set(mains[number].values()), {1}, what)
            right = number not in dcp_wrong
            # A load asks for that one box, and nothing looks whether it is the right one.
            dcp["load"]["right" if right else "wrong"] += 1
            accepted = dcp_accepts(dcp_items[number])
            dcp["save"]["refused" if not accepted else "right" if right else "wrong"] += 1
        print(
            json.dumps(
                {
                    "cases": len(cases),
                    "local_tensors": locals_compared,
                    "of_several_boxes": several,
                    "wrong": 0,
                    "refused": len(refused),
                    "dcp_cases": {job: dict(count) for job, count in dcp.items()},
                    "torch": torch.__version__,
                }
            ),
            file=sys.stderr,
        )

    def test_partial_sums_are_refused(self):
        import torch
        from torch.distributed.tensor import DTensor, Partial

        with FakeRanks(0) as fake:
            part = DTensor.from_local(torch.ones(2), fake.mesh((2,)), [Partial()], run_check=False)
            with self.assertRaisesRegex(UnsupportedError, "P.*partial sums"):
                _boxes.boxes(part)

    def test_unknown_placement_is_described_as_unknown(self):
        from torch.distributed.tensor import Shard

        class Fancy(Shard):
            pass

        self.assertEqual(_boxes.describe_placement(Fancy(0))[0], "unknown")

    def test_local_tensor_of_another_shape_is_refused(self):
        import torch
        from torch.distributed.tensor import DTensor, Shard

        with FakeRanks(1) as fake:
            lies = DTensor.from_local(torch.ones(3, 2), fake.mesh((2,)), [Shard(0)], run_check=False, shape=torch.Size((5, 2)), stride=(2, 1))
            with self.assertRaisesRegex(LayoutError, r"local tensor of shape \(3, 2\)"):
                _boxes.boxes(lies)

    def test_fsdp_over_tensor_parallel_matches_local_shapes(self):
        """PyTorch describes uneven ones by placements that are not what it does. The shape of a local tensor tells
        that, but for the few where both have as many rows."""
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fsdp_ranks.py")
        # Of 27 rows, coordinate (2, 2) of 3 x 4 has one row, which is 20 or 26.
        meshes = {"4x2": ([8, 9, 12, 17, 1, 33], 0), "3x4": ([27, 29, 24, 50], 1)}
        if scaled(1) > 1:
            meshes |= {"3x2": (range(1, 40), 0), "8x2": (range(1, 70), 0), "4x4": ([*range(1, 37), 38], 1)}
        for mesh, (layers, refused) in meshes.items():
            command = [sys.executable, program, mesh, *map(str, layers)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=600)
            self.assertEqual(run.returncode, 0, run.stderr)
            ranks = json.loads(run.stdout)
            for number, rows in enumerate(layers):
                held = sorted(row for rank in ranks for row in rank[number][0])
                self.assertEqual(held, list(range(rows)))
                for has, said in (rank[number] for rank in ranks):
                    self.assertIn(said, (has, "refused"), f"{rows} rows on {mesh}")
            self.assertEqual(sum(said == "refused" for rank in ranks for _, said in rank), refused, mesh)


@needs("torch")
class RealRanks(unittest.TestCase):
    def test_boxes_match_on_four_gloo_processes(self):
        here = os.path.dirname(os.path.abspath(__file__))
        with tempfile.TemporaryDirectory() as logs:
            done = subprocess.run(
                [sys.executable, os.path.join(here, "torchrun.py"), "4", logs, os.path.join(here, "boxes_rank.py"), "[]"],
                capture_output=True, text=True, timeout=300)
            said = ""
            for name in os.listdir(logs):
                with open(os.path.join(logs, name)) as log:
                    said += log.read()
            self.assertEqual(done.returncode, 0, said + done.stderr)


if __name__ == "__main__":
    unittest.main()
