#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Arrays and tensors as shards: the memory that is described has the cells that it should, or there is a refusal.

`Memory` reads what a shard describes through its address, as the library would; so the oracle of each test is the array.
"""

import ctypes
import gc
import itertools
import types
import unittest

from support import needs, scaled, seeded

from tensormount import _abi, _layouts, _shards
from tensormount._dtypes import all_dtypes
from tensormount._held import Flat, Shards
from tensormount._leaves import tensors
from tensormount._leaves.registry import describe
from tensormount._shards import LOAD, SAVE, VALIDATE, check_destinations, pack
from tensormount.errors import LayoutError, UnsupportedError

BITS = {row.number: row.bits for row in all_dtypes()}


def memory(shard):
    """The bytes of the shard's cells in row-major order, read where it says that they are."""
    size = BITS[shard.dtype] // 8
    strides = shard.strides
    if strides is None:
        strides = [1] * len(shard.extent)
        for axis in range(len(strides) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * shard.extent[axis + 1]
    cells = itertools.product(*(range(n) for n in shard.extent))
    places = (shard.address + size * sum(i * s for i, s in zip(cell, strides)) for cell in cells)
    return b"".join(ctypes.string_at(place, size) for place in places)


def unpacked(words, count):
    """The words of pack() as the header describes them: what a reader in C sees."""
    at, found = 0, []
    for _ in range(count):
        dtype, flags, replica, rank, address = words[at : at + 5]
        at += 5
        parts = []
        for _ in range(3 + (flags & 1)):
            parts.append(tuple(words[at : at + rank]))
            at += rank
        if not flags & 1:
            parts.append(None)
        device = None
        if flags & 8:
            device = tuple(words[at : at + 7])
            at += 7
        found.append((dtype, flags, replica, address % (1 << 64), *parts, device))
    assert at == len(words), (at, len(words))
    return found


@needs("numpy")
class NumPy(unittest.TestCase):
    def check(self, a, purpose=SAVE):
        (shard,) = describe("w", a, purpose)
        self.assertEqual(memory(shard), a.tobytes())
        self.assertEqual((shard.global_shape, shard.begin, shard.extent), (a.shape, (0,) * a.ndim, a.shape))
        return shard

    def test_arrays_of_any_strides_are_described(self):
        import numpy as np

        a = np.arange(120, dtype=np.int32).reshape(4, 5, 6)
        for view in (a, a[1:], a[:, ::2], a[::-1], a[..., ::-2], a.T, np.asfortranarray(a), a[2], a[2, 3], a[2, 3, 4:5], a[2, 3, 4, ...], a[:, :0], a[:0, ::2], np.asarray(3.5), np.broadcast_to(a[0, 0], (3, 6))):
            self.check(view)
        self.assertIsNone(self.check(a[1:3]).strides)
        self.assertEqual(self.check(a[::-1]).strides, (-30, 6, 1))

    def test_numpy_dtypes_are_mapped(self):
        import numpy as np

        numbers = {name: describe("w", np.ones(3, name))[0].dtype for name in ("bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", "<f4", "=i2")}
        self.assertEqual(list(numbers.values()), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 22, 23, 12, 4])

    def test_error_names_the_unsupported_array(self):
        import numpy as np

        fields = np.zeros(3, [("a", "i1"), ("b", "i4")])
        for a, why in (
            (np.ones(2, ">f4"), "big-endian"), (np.array([object()]), "object"), (fields, "cannot be stored"), (np.array(["a"]), "<U1"),
            (np.array(["2020"], "M8[D]"), "datetime64"), (np.array([1], "m8[s]"), "timedelta64"), (np.ones(2, "V3"), "V3"), (np.array([b"a"]), "S1"),
            (np.ma.masked_array([1]), "MaskedArray"), (np.ones(2, np.longdouble), "float128"), (fields["b"], "not multiples of the element size"),
            (np.matrix([1]), "matrix"),
        ):  # fmt: skip
            with self.subTest(why):
                with self.assertRaisesRegex(UnsupportedError, f"tensor w: .*{why}"):
                    describe("w", a)
        with self.assertRaisesRegex(UnsupportedError, "list is not a known type of arrays"):
            describe("w", [1])

    def test_read_only_arrays_save_but_do_not_load(self):
        import numpy as np

        a = np.arange(3)
        a.flags.writeable = False
        self.check(a)
        with self.assertRaisesRegex(UnsupportedError, "read-only"):
            describe("w", a, LOAD)

    def test_overlapping_arrays_save_but_do_not_load(self):
        import numpy as np

        a = np.arange(6)
        for view in (np.lib.stride_tricks.as_strided(a, (3, 2), (8, 8)), np.lib.stride_tricks.as_strided(a, (3,), (0,))):
            self.check(view)
            with self.assertRaisesRegex(LayoutError, "overlap in memory"):
                describe("w", view, LOAD)
        for view in (a[::2], a[::-1], a.reshape(2, 3).T, np.lib.stride_tricks.as_strided(a, (1, 3), (0, 8))):
            describe("w", view, LOAD)

    @needs("ml_dtypes")
    def test_ml_dtypes_are_mapped(self):
        import ml_dtypes
        import numpy as np

        kinds = {"bfloat16": 11, "float8_e4m3fn": 14, "float8_e5m2": 15, "float8_e8m0fnu": 16, "float8_e4m3fnuz": 17, "float8_e5m2fnuz": 18}
        for name, number in kinds.items():
            self.assertEqual(self.check(np.ones(3, getattr(ml_dtypes, name))[::2]).dtype, number)
        # A byte an element in memory, which is not what is stored.
        for name in ("float4_e2m1fn", "int4", "float6_e2m3fn", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz"):
            with self.assertRaisesRegex(UnsupportedError, name):
                describe("w", np.ones(2, getattr(ml_dtypes, name)))

    def test_seventeen_axes_are_refused(self):
        import numpy as np

        self.check(np.ones((1,) * 16))
        with self.assertRaisesRegex(LayoutError, "17 axes"):
            describe("w", np.ones((1,) * 17))


def torch_bytes(t):
    import torch

    if t.numel() == 0:
        return b""
    return bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist())


@needs("torch")
class PyTorch(unittest.TestCase):
    def check(self, t, purpose=SAVE):
        (shard,) = describe("w", t, purpose)
        if t.numel():
            self.assertEqual(memory(shard), torch_bytes(t))
        self.assertEqual((shard.extent, shard.replica), (tuple(t.shape), 0))
        return shard

    def test_every_torch_dtype_is_stored_or_refused(self):
        import torch

        stored = set()
        for dtype in {v for v in vars(torch).values() if isinstance(v, torch.dtype)}:
            name = str(dtype).split(".")[1]
            try:
                t = torch.empty(2, 4, dtype=dtype)
            except (RuntimeError, NotImplementedError, TypeError):
                t = torch.empty(2, 4, dtype=torch.uint8)
                with self.assertRaisesRegex(UnsupportedError, f"w: torch.{name}"):
                    tensors.torch_number("w", dtype)
                continue
            if name in tensors._NUMBERS:
                (shard,) = describe("w", t)
                bits = BITS[shard.dtype]
                self.assertEqual(bits * shard.extent[0] * shard.extent[1], 8 * 8 * dtype.itemsize, name)
                stored.add(name)
            else:
                with self.assertRaisesRegex(UnsupportedError, f"w: .*{name}"):
                    describe("w", t)
        self.assertEqual(stored, set(tensors._NUMBERS))

    def test_torch_views_are_described(self):
        import torch

        base = torch.arange(120, dtype=torch.int16).reshape(4, 5, 6)
        for t in (base, base[1:], base[:, ::2], base.permute(2, 0, 1), base[3, 4, 5], base[:, :0], base[0].expand(3, 5, 6), base.as_strided((3, 2), (1, 1)), base[:, 2:4]):
            self.check(t)
        self.check(torch.nn.Parameter(torch.ones(3)))
        self.check(torch.ones(2, 3, requires_grad=True) * 2)
        self.check(torch.ones(4, dtype=torch.bfloat16)[::2])
        self.assertIsNone(self.check(base[1:2]).strides)
        self.assertIsNone(self.check(base.as_strided((1, 3), (7, 1))).strides)

    def test_float4_counts_two_elements_per_byte(self):
        import torch

        t = torch.arange(24, dtype=torch.uint8).reshape(4, 6).view(torch.float4_e2m1fn_x2)
        (shard,) = describe("w", t)
        self.assertEqual((shard.dtype, shard.global_shape, shard.extent, shard.strides), (21, (4, 12), (4, 12), None))
        (shard,) = describe("w", t[::2])
        self.assertEqual((shard.extent, shard.strides, _shards.span_of(shard)), ((2, 12), (24, 1), (t.data_ptr(), t.data_ptr() + 18)))
        for bad in (t[:, ::2], t.t(), t[0, 0]):
            with self.assertRaisesRegex(UnsupportedError, "float4"):
                describe("w", bad)

    def test_error_names_the_unsupported_tensor(self):
        import torch

        class Tagged(torch.Tensor):
            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                raise AssertionError

        class SelfDescribing(torch.Tensor):
            def __create_write_items__(self, fqn, object):
                raise AssertionError

        from torch._subclasses.fake_tensor import FakeTensorMode

        cases = [
            (torch.eye(2).to_sparse(), "sparse.*coo"), (torch.eye(2).to_sparse_csr(), "sparse.*csr"),
            (torch.ones(2, dtype=torch.complex64).conj(), "conjugate"), (torch.ones(2, dtype=torch.complex64).conj().imag, "negative"),
            (torch.ones(2).as_subclass(Tagged), "Tagged"), (torch.ones(2).as_subclass(SelfDescribing), "__create_write_items__"),
            (torch.nn.parameter.UninitializedParameter(), "UninitializedParameter"), (torch.ones(2, device="meta"), "meta device"),
            (FakeTensorMode().from_tensor(torch.ones(2)), "FakeTensor"), (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested|NestedTensor"),
            (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised|qint8"),
        ]  # fmt: skip
        for t, why in cases:
            with self.subTest(why):
                with self.assertRaisesRegex(UnsupportedError, f"tensor w: .*({why})"):
                    describe("w", t)

    def test_subclass_over_plain_memory_is_described(self):
        import torch

        class Named(torch.Tensor):
            pass

        self.check(torch.ones(2).as_subclass(Named))

    def test_meta_tensors_can_be_validated(self):
        import torch

        (shard,) = describe("w", torch.empty(3, 4, device="meta"), VALIDATE)
        self.assertEqual((shard.metadata_only, shard.address, shard.extent), (True, 0, (3, 4)))
        with self.assertRaisesRegex(UnsupportedError, "meta device.*loaded into"):
            describe("w", torch.empty(3, device="meta"), LOAD)

    def test_tensor_over_a_short_storage_is_refused(self):
        import torch

        t = torch.ones(8)
        t.untyped_storage().resize_(0)
        with self.assertRaisesRegex(LayoutError, "storage has 0 bytes"):
            describe("w", t)
        t = torch.ones(8)
        t.untyped_storage().resize_(16)
        with self.assertRaisesRegex(LayoutError, "storage has 16 bytes, the tensor needs 32"):
            describe("w", t)

    def test_overlapping_tensors_save_but_do_not_load(self):
        import torch

        base = torch.arange(12.0)
        for t in (base[0].expand(3), base.as_strided((3, 4), (2, 1))):
            self.check(t)
            with self.assertRaisesRegex(LayoutError, "overlap in memory"):
                describe("w", t, LOAD)
        for t in (base[::3], base.view(3, 4).t(), base[:1].expand(1), base[:0].expand(5, 0)):
            describe("w", t, LOAD)

    def test_device_memory_is_described_with_its_stream(self):
        """What the words of a CUDA tensor are; there is no device here, so it is described by hand."""
        words = (_abi.TM_DEVICE_CUDA, 1, 0, 0, _abi.TM_MEMORY_DEVICE, _abi.TM_STREAM_HANDLE, 0xFFFF800000000000)
        shard = _shards.Shard("w", 12, (2,), (0,), (2,), 0, 0x7F0000000000, None, words, False, None)
        _, packed, count = pack([shard])
        ((_, flags, _, address, *_, device),) = unpacked(packed, count)
        self.assertEqual((flags, address, device[:6], device[6] % (1 << 64)), (8, 0x7F0000000000, words[:6], words[6]))


@needs("torch")
class DTensors(unittest.TestCase):
    def test_dtensor_of_several_boxes_is_described(self):
        import torch
        from boxes_test import FakeRanks
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        whole = torch.arange(11 * 6, dtype=torch.float32).reshape(11, 6)
        with FakeRanks(3) as fake:
            mesh = fake.mesh((2, 2))
            for placements in ([_StridedShard(0, split_factor=3), Shard(1)], [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)], [Replicate(), Shard(0)], [Shard(1), Replicate()]):
                shards = describe("w", distribute_tensor(whole, mesh, placements, src_data_rank=None), world_size=4)
                for shard in shards:
                    box = whole[tuple(slice(b, b + n) for b, n in zip(shard.begin, shard.extent))]
                    self.assertEqual(memory(shard), torch_bytes(box))
                    self.assertEqual(shard.global_shape, (11, 6))
                replicas = {shard.replica for shard in shards}
                self.assertEqual(replicas, {_shards.COPY} if Replicate() in placements else {_shards.UNLABELLED})

    def test_replicas_are_labelled_only_on_a_full_mesh(self):
        import torch
        from boxes_test import FakeRanks
        from torch.distributed.tensor import Replicate, distribute_tensor

        with FakeRanks(0) as fake:
            t = distribute_tensor(torch.ones(2), fake.mesh((2, 2)), [Replicate(), Replicate()], src_data_rank=None)
            self.assertEqual(describe("w", t, world_size=4)[0].replica, _shards.MAIN)
            # On the other meshes of a job of 8 there may be another main.
            self.assertEqual(describe("w", t, world_size=8)[0].replica, _shards.UNLABELLED)
            self.assertEqual(describe("w", t)[0].replica, _shards.UNLABELLED)

    def test_rank_outside_the_mesh_holds_nothing(self):
        import torch
        from boxes_test import FakeRanks
        from torch.distributed.tensor import Shard, distribute_tensor

        with FakeRanks(3) as fake:
            self.assertEqual(describe("w", distribute_tensor(torch.ones(4), fake.mesh((2,)), [Shard(0)], src_data_rank=None)), [])
            (shard,) = describe("w", distribute_tensor(torch.ones(5, 2), fake.mesh((4,)), [Shard(0)], src_data_rank=None))
            self.assertEqual((shard.global_shape, shard.extent, shard.address), ((5, 2), (0, 2), 0))

    def test_float4_dtensor_is_sharded_on_its_last_axis(self):
        import torch
        from boxes_test import FakeRanks
        from torch.distributed.tensor import DTensor, Shard

        with FakeRanks(1) as fake:
            local = torch.zeros(3, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
            t = DTensor.from_local(local, fake.mesh((2,)), [Shard(1)], run_check=False)
            (shard,) = describe("w", t)
            self.assertEqual((shard.global_shape, shard.begin, shard.extent, shard.strides), ((3, 8), (0, 4), (3, 4), None))

    def test_pending_local_tensor_is_awaited(self):
        import torch
        from boxes_test import FakeRanks
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
        from torch.distributed.tensor import DTensor, Replicate

        with FakeRanks(0) as fake:
            t = DTensor.from_local(torch.ones(2), fake.mesh((1,)), [Replicate()], run_check=False)
            t._local_tensor = AsyncCollectiveTensor(torch.arange(2.0))
            (shard,) = describe("w", t)
            self.assertEqual(memory(shard), torch_bytes(torch.arange(2.0)))

    def test_unsupported_local_tensors_are_refused(self):
        import torch
        from boxes_test import FakeRanks
        from torch.distributed.tensor import DTensor, Partial, Replicate

        class Tagged(torch.Tensor):
            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*(a.as_subclass(torch.Tensor) if isinstance(a, Tagged) else a for a in args), **(kwargs or {}))

        with FakeRanks(0) as fake:
            t = DTensor.from_local(torch.ones(2), fake.mesh((1,)), [Replicate()], run_check=False)
            t._local_tensor = torch.ones(2).as_subclass(Tagged)
            with self.assertRaisesRegex(UnsupportedError, "tensor w: .*Tagged"):
                describe("w", t)
            t = DTensor.from_local(torch.ones(2), fake.mesh((2,)), [Partial()], run_check=False)
            with self.assertRaisesRegex(UnsupportedError, "tensor w: .*partial sums"):
                describe("w", t)


@needs("numpy")
class Jax(unittest.TestCase):
    """By duck typing: what jax.Array has of attributes that are read."""

    def array(self, shape, shards, fully_addressable=False):
        import numpy as np

        whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)

        class Data:
            def __init__(self, values):
                self.values = values

            def devices(self):
                return [types.SimpleNamespace(platform="cpu")]

            def __array__(self, dtype=None, copy=None):
                return self.values

        class Array:
            is_fully_addressable = fully_addressable

            @property
            def addressable_shards(self):
                return [types.SimpleNamespace(index=index, replica_id=replica, data=Data(whole[index].copy())) for index, replica in shards]

        Array.shape, Array.dtype = shape, whole.dtype
        return whole, Array()

    def test_jax_shards_and_replicas_are_described(self):
        whole, a = self.array((4, 6), [((slice(0, 2), slice(None)), 0), ((slice(2, 4), slice(None)), 1)])
        shards = describe("w", a)
        self.assertEqual([(s.begin, s.extent, s.replica) for s in shards], [((0, 0), (2, 6), _shards.MAIN), ((2, 0), (2, 6), _shards.COPY)])
        for shard in shards:
            self.assertEqual(memory(shard), whole[shard.begin[0] : shard.begin[0] + 2].tobytes())

    def test_jax_copies_within_a_process_are_described_once(self):
        _, a = self.array((4,), [((slice(None),), 2), ((slice(None),), 0)], fully_addressable=True)
        self.assertEqual([s.replica for s in describe("w", a)], [_shards.UNLABELLED])
        for order in ((2, 0, 1), (0, 1, 2)):
            _, a = self.array((4,), [((slice(None),), replica) for replica in order])
            self.assertEqual([s.replica for s in describe("w", a)], [_shards.MAIN])

    def test_jax_loads_and_strided_shards_are_refused(self):
        _, a = self.array((4,), [((slice(None),), 0)])
        with self.assertRaisesRegex(UnsupportedError, "JAX arrays are immutable"):
            describe("w", a, LOAD)
        _, a = self.array((4,), [((slice(0, 4, 2),), 0)])
        with self.assertRaisesRegex(UnsupportedError, "step 2 is not supported"):
            describe("w", a)

    @needs("jax")
    def test_real_jax_array_is_described(self):
        import jax.numpy as jnp
        import numpy as np

        a = jnp.arange(12.0).reshape(3, 4)
        (shard,) = describe("w", a)
        self.assertEqual(memory(shard), np.asarray(a).tobytes())


@needs("numpy")
class Destinations(unittest.TestCase):
    def loads(self, **leaves):
        check_destinations([shard for key, leaf in leaves.items() for shard in describe(key, leaf, LOAD)])

    def test_error_names_overlapping_destinations(self):
        import numpy as np

        a = np.zeros((8, 6), np.float32)
        for views in ({"x": a, "y": a[7:]}, {"x": a[:5], "y": a[4:]}, {"x": a[:, :4], "y": a[:, 3:]}, {"x": a[::2], "y": a[4]}, {"x": a, "y": a}, {"x": a[::-1], "y": a[0, :1]}, {"x": a.T, "z": a[5]}, {"x": a.view(np.uint8)[0, 3:5], "y": a[0]}):
            with self.assertRaisesRegex(LayoutError, "tensors [xyz] and [xyz] share memory"):
                self.loads(**views)
        # Not with its neighbour in the order of memory.
        with self.assertRaisesRegex(LayoutError, "tensors x and z share memory"):
            self.loads(x=a[:, 0], y=a[1, 1:2], z=a[5, :1])

    def test_adjacent_destinations_are_accepted(self):
        import numpy as np

        a = np.zeros((8, 6), np.float32)
        wide = np.zeros((3, 80000), np.int8)
        self.loads(x=wide[:, :40000], y=wide[:, 40000:])
        check_destinations(describe("x", a, VALIDATE) + describe("y", a, LOAD))
        for views in ({"x": a[:4], "y": a[4:]}, {"x": a[:, :4], "y": a[:, 4:]}, {"x": a[::2], "y": a[1::2]}, {"x": a[:0], "y": a}, {"x": a[4:4, ::2], "y": a}, {"x": a[:, 0], "y": a[:, 1], "z": a[:, :1:-1]}):
            self.loads(**views)

    def test_overlap_check_matches_a_byte_model(self):
        import numpy as np

        random, seed = seeded()
        for case in range(scaled(300)):
            a = np.zeros((6, 7, 3), random.choice([np.int8, np.int32]))

            def view():
                v = a[tuple(slice(random.randrange(n), random.randrange(n + 1), random.choice([1, 1, 2])) for n in a.shape)]
                return v.transpose(random.sample(range(3), 3))[:: random.choice([1, -1])]

            x, y = view(), view()
            a[...] = 0
            x[...] = 1
            overlap = bool((y == 1).any())
            try:
                self.loads(x=x, y=y)
                said = False
            except LayoutError:
                said = True
            self.assertEqual(said, overlap, f"seed {seed}, case {case}: {x.shape} {x.strides} {y.shape} {y.strides}")

    def test_destinations_of_too_many_runs_are_refused(self):
        import numpy as np

        a = np.zeros((70000, 2), np.int8)
        with self.assertRaisesRegex(LayoutError, "may share memory"):
            self.loads(x=a[:, 0], y=a[:, 1])


@needs("numpy")
class Packing(unittest.TestCase):
    def test_packed_words_match_the_header(self):
        import numpy as np

        a = np.arange(24, dtype=np.float32).reshape(4, 6)
        shards = describe("first", a) + describe("zweité", a[:, ::2]) + describe("0-d", a[1, 1, ...]) + describe("v", a, VALIDATE)
        keys, words, count = pack(shards)
        self.assertEqual(keys.split(b"\0"), [b"first", "zweité".encode(), b"0-d", b"v", b""])
        at = a.__array_interface__["data"][0]
        self.assertEqual(
            unpacked(words, count)[:2],
            [(12, 0, 0, at, (4, 6), (0, 0), (4, 6), None, None), (12, 1, 0, at, (4, 3), (0, 0), (4, 3), (6, 2), None)],
        )
        self.assertEqual(unpacked(words, count)[2][4:7], ((), (), ()))
        self.assertEqual(unpacked(words, count)[3][1], 4)
        self.assertEqual(pack([])[::2], (b"", 0))

    def test_high_addresses_are_packed(self):
        shard = _shards.Shard("w", 12, (1,), (0,), (1,), 0, (1 << 64) - 8, None, None, False, None)
        self.assertEqual(unpacked(*pack([shard])[1:])[0][3], (1 << 64) - 8)

    def test_nul_in_a_key_is_refused(self):
        import numpy as np

        with self.assertRaisesRegex(LayoutError, r"'a\\x00b': a key must not contain NUL") as caught:
            pack(describe("a", np.ones(1)) + describe("a\0b", np.ones(1)))
        self.assertEqual(caught.exception.key, "a\0b")


class ByHand(unittest.TestCase):
    """Shards: boxes and flat ranges that a caller names itself."""

    @needs("numpy")
    def test_manual_shards_are_described_as_given(self):
        import numpy as np

        rows, rest = np.zeros((2, 4), "f4"), np.zeros(10, "f4")[::2]
        leaf = Shards([5, 4], [((1, 0), rows, "copy"), (Flat(3, (3, 0), (2, 4)), rest)])
        first, second = describe("w", leaf)
        self.assertEqual((first.global_shape, first.begin, first.extent, first.replica, first.flat),
                         ((5, 4), (1, 0), (2, 4), _shards.COPY, None))
        self.assertEqual((second.begin, second.extent, second.flat, second.strides, second.held),
                         ((3, 0), (2, 4), (3, 5), (2,), (5,)))
        _, words, count = pack([second])
        self.assertEqual(count, 1)
        self.assertEqual(list(words)[1], _abi.TM_WORDS_FLAT | _abi.TM_WORDS_STRIDED)
        self.assertEqual(list(words)[5:], [5, 4, 3, 0, 2, 4, 3, 5, 2])
        self.assertEqual(leaf.nbytes, 32 + 20)

    @needs("numpy")
    def test_shards_outside_the_tensor_are_refused(self):
        import numpy as np

        for parts in (
            [((4, 0), np.zeros((2, 4)))], [((-1, 0), np.zeros((2, 4)))], [((0,), np.zeros((2, 4)))],
            [(Flat(4, (0, 0), (1, 4)), np.zeros(1))], [(Flat(-1, (0, 0), (2, 4)), np.zeros(1))],
            [(Flat(0, (0, 0), (2, 4)), np.zeros((1, 1)))], [(Flat(0, (4, 0), (2, 4)), np.zeros(1))],
            [((0, 0), np.zeros((2, 4)), "maybe")], [((0, 0), np.zeros((2, 4)), ["copy"])], [],
            [((0.5, 0), np.zeros((2, 4)))], [(0, np.zeros((2, 4)))], [((0, 0), [[1, 2]])], [((0, 0),)],
        ):
            with self.subTest(parts=parts), self.assertRaises(LayoutError):
                Shards((5, 4), parts)
        with self.assertRaises(LayoutError):
            Shards((5.5, 4), [((0, 0), np.zeros((2, 4)))])
        # What knows of a place of its own would be filled with another one's cells.
        inner = Shards((8,), [((4,), np.zeros(2))])
        for part in (_Shaped(), inner):
            with self.assertRaises(UnsupportedError):
                describe("w", Shards((8,), [((0,), part)]))
        data = np.zeros((2, 4))
        leaf = Shards((5, 4), [((0, 0), data)])
        data.shape = (4, 2)
        with self.assertRaises(LayoutError):
            describe("w", leaf)

    @needs("numpy")
    def test_overlapping_load_shards_are_refused(self):
        import numpy as np

        data = np.zeros(8, "f4")
        parts = [(Flat(0, (0,), (16,)), data[:5]), (Flat(8, (0,), (16,)), data[4:])]
        cache = _layouts.LayoutCache()
        with self.assertRaises(LayoutError):
            cache.get([("a", Shards((16,), parts[:1])), ("b", Shards((16,), parts[1:]))], LOAD, 1)
        parts[1] = (parts[1][0], data[5:])
        cache.get([("a", Shards((16,), parts[:1])), ("b", Shards((16,), parts[1:]))], LOAD, 1)
        # Two parts of one tensor in the same array, too.
        with self.assertRaises(LayoutError):
            cache.get([("a", Shards((16,), [((0,), data), ((8,), data)]))], LOAD, 1)

    @needs("numpy")
    def test_recreated_shards_of_one_memory_are_tied(self):
        """Made anew of the same memory they are one tensor, as plain ones are."""
        import numpy as np

        from tensormount import _tree

        data, other = np.zeros(8), np.zeros(8)

        def made(memory, begin=0):
            return Shards((16,), [((begin,), memory)])

        self.assertEqual(len(_tree.flatten({"a": made(data), "b": made(data)}).tensors), 1)
        for b in (made(other), made(data, 8)):
            self.assertEqual(len(_tree.flatten({"a": made(data), "b": b}).tensors), 2)


class _Shaped:
    shape = (2,)


class Cache(_layouts.LayoutCache):
    """With a dict for what a cache is asked."""

    def get(self, tensors, *rest):
        return super().get(list(tensors.items()), *rest)


@needs("torch", "numpy")
class Layouts(unittest.TestCase):
    def test_second_save_reuses_the_layout_with_new_addresses(self):
        import numpy as np
        import torch

        cache = Cache()
        make = lambda: {"a": torch.ones(3, 4), "b": torch.ones(8)[::2], "c": np.ones(3), "d": torch.empty(0), "e": torch.nn.Parameter(torch.ones(2))}  # noqa: E731
        first, second = make(), make()
        layout, addresses, known = cache.get(first)
        self.assertFalse(known)
        again, moved, known = cache.get(second)
        self.assertTrue(known)
        self.assertIs(again, layout)
        at = lambda tensors: [shard.address for item in tensors.items() for shard in describe(*item)]  # noqa: E731
        self.assertEqual(list(moved), at(second))
        self.assertEqual(list(addresses), at(first))
        self.assertNotEqual(list(addresses), list(moved))

    def test_any_change_makes_another_layout(self):
        import numpy as np
        import torch

        base = {"a": torch.ones(4, 4), "n": np.ones(4)}
        complex_one = torch.ones(4, 4, dtype=torch.complex64)
        for name, change in {
            "shape": {"a": torch.ones(4, 5)}, "strides": {"a": torch.ones(4, 4).t()}, "type": {"a": torch.ones(4, 4, dtype=torch.int32)},
            "array": {"a": np.ones((4, 4), np.float32)}, "numpy strides": {"n": np.ones(8)[::2]}, "numpy type": {"n": np.ones(4, np.int64)},
            "key": {"z": torch.ones(1)}, "storage": {"a": torch.ones(8, 4)[:4]},
        }.items():  # fmt: skip
            with self.subTest(name):
                cache = Cache()
                cache.get(base)
                self.assertFalse(cache.get({**base, **change})[2])
        for name, bad in {"meta": torch.ones(4, 4, device="meta"), "sparse": torch.eye(4).to_sparse(), "big-endian": np.ones((4, 4), ">f4")}.items():
            with self.subTest(name):
                cache = Cache()
                cache.get(base)
                with self.assertRaises(UnsupportedError):
                    cache.get({**base, "a": bad})
        cache = Cache()
        cache.get({"a": complex_one})
        with self.assertRaisesRegex(UnsupportedError, "conjugate"):
            cache.get({"a": complex_one.conj()})
        cache.get({"a": complex_one.imag})
        with self.assertRaisesRegex(UnsupportedError, "negative"):
            cache.get({"a": complex_one.conj().imag})

    def test_freed_and_shrunk_storages_are_detected(self):
        import torch

        for size in (0, 16):
            cache, t = Cache(), torch.ones(8)
            cache.get({"a": t})
            t.untyped_storage().resize_(size)
            with self.assertRaisesRegex(LayoutError, "storage has"):
                cache.get({"a": t})

    def test_load_layouts_check_overlap_every_time(self):
        import numpy as np

        cache, a = Cache(), np.zeros(8)
        cache.get({"x": a[:4], "y": a[4:]}, LOAD)
        self.assertTrue(cache.get({"x": a[4:], "y": a[:4]}, LOAD)[2])
        with self.assertRaisesRegex(LayoutError, "x and y share memory"):
            cache.get({"x": a[:4], "y": a[2:6]}, LOAD)
        self.assertFalse(cache.get({"x": a[:4], "y": a[2:6]}, SAVE)[2])
        a.flags.writeable = False
        with self.assertRaisesRegex(UnsupportedError, "read-only"):
            cache.get({"x": a[:4], "y": a[4:]}, LOAD)

    def test_dtensor_layouts_are_cached(self):
        import torch
        from boxes_test import FakeRanks
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        with FakeRanks(1) as fake:
            make = lambda p: {"w": distribute_tensor(torch.arange(32.0).reshape(8, 4), fake.mesh((2,)), [p], src_data_rank=None)}  # noqa: E731
            cache = Cache()
            cache.get(make(_StridedShard(0, split_factor=2)))
            tensors = make(_StridedShard(0, split_factor=2))
            layout, addresses, known = cache.get(tensors)
            self.assertTrue(known)
            self.assertEqual(len(addresses), 2)
            local = tensors["w"].to_local()
            self.assertEqual(list(addresses), [local.data_ptr(), local[2:].data_ptr()])
            # The same local shape, other rows.
            self.assertFalse(cache.get(make(Shard(0)))[2])
            self.assertFalse(cache.get(make(Replicate()))[2])
            # One of several that are alike.
            several = lambda p: {**make(Shard(0)), **{f"v{i}": make(q)["w"] for i, q in enumerate((Shard(0), p, Shard(0)))}}  # noqa: E731
            for placement in (Shard(0), Shard(1), Replicate(), _StridedShard(0, split_factor=2)):
                self.check(cache, several(placement))
                self.assertTrue(self.check(cache, several(placement)))
            tensors = several(Shard(0))
            cache.get(tensors)
            tensors["v1"]._local_tensor = torch.ones(4, 4, dtype=torch.float64)
            self.assertFalse(self.check(cache, tensors))
            tensors["v1"]._local_tensor = torch.ones(3, 4)
            with self.assertRaisesRegex(LayoutError, "tensor v1: .*has a local tensor of"):
                cache.get(tensors)

    def check(self, cache, tensors, purpose=SAVE):
        """What a cache says is what describing one by one says; whether it was known."""
        shards = [shard for key, leaf in tensors.items() for shard in describe(key, leaf, purpose)]
        layout, addresses, known = cache.get(tensors, purpose)
        keys, words, count = pack([shard._replace(address=0) for shard in shards])
        self.assertEqual((layout.keys, layout.words, layout.count), (keys, words, count))
        self.assertEqual(list(addresses), [shard.address for shard in shards])
        return known

    def test_in_place_change_of_a_tensor_is_detected(self):
        import torch

        def flag(t):
            t.requires_grad_(not t.requires_grad)

        pool = torch.zeros(64)
        for name, change, known in (
            ("nothing", lambda t: None, True), ("values", lambda t: t.add_(1), True), ("requires_grad", flag, True),
            ("other memory", lambda t: setattr(t, "data", torch.ones(4, 4)), True),
            ("shape", lambda t: t.resize_(2, 2), False), ("transposed", lambda t: t.t_(), False), ("flat", lambda t: t.as_strided_((16,), (1,)), False),
            ("another storage", lambda t: t.set_(pool.untyped_storage(), 8, (4, 4), (4, 1)), False),
            ("of another shape", lambda t: setattr(t, "data", torch.ones(5)), False),
            ("of another type", lambda t: setattr(t, "data", torch.ones(4, 4, dtype=torch.float64)), False),
            ("a longer storage", lambda t: t.untyped_storage().resize_(256), False),
        ):  # fmt: skip
            with self.subTest(name):
                cache, t = Cache(), torch.ones(4, 4)
                tensors = {"a": torch.ones(4, 4), "t": t, "z": torch.ones(4, 4)}
                self.assertFalse(self.check(cache, tensors))
                change(t)
                self.assertEqual(self.check(cache, tensors), known)
                self.assertTrue(self.check(cache, tensors))

    def test_replaced_leaf_makes_another_layout(self):
        import numpy as np
        import torch

        base = {"a": torch.ones(4, 4), "b": torch.ones(4, 4), "n": np.ones((4, 4), "f4"), "m": np.ones((4, 4), "f4")}
        frozen = np.ones((4, 4), "f4")
        frozen.flags.writeable = False
        for name, leaf in {
            "shape": torch.ones(2, 8), "strides": torch.ones(4, 4).t(), "type": torch.ones(4, 4, dtype=torch.int32), "parameter": torch.nn.Parameter(torch.ones(4, 4)),
            "array": np.ones((4, 4), "f4"), "array by columns": np.ones((4, 4), "f4", order="F"), "array to be read": frozen, "array of integers": np.ones((4, 4), "i4"),
            "array of no cells": np.ones((0, 4), "f4"), "tensor of no cells": torch.ones(0, 4), "view": torch.ones(8, 4)[2:6], "scalar": torch.tensor(1.0),
        }.items():  # fmt: skip
            for key in base:
                with self.subTest(name, key=key):
                    cache = Cache()
                    self.check(cache, base)
                    self.check(cache, {**base, key: leaf})
                    self.assertTrue(self.check(cache, {**base, key: leaf}))
                    self.check(cache, base)

    def test_reordered_or_fewer_keys_make_another_layout(self):
        import torch

        cache, a, b = Cache(), torch.ones(2), torch.ones(2)
        for tensors in ({"a": a, "b": b}, {"b": b, "a": a}, {"a": b, "b": a}, {"a": a}, {"b": a}, {}, {"a": a, "b": a}):
            self.check(cache, tensors)
            self.assertTrue(self.check(cache, tensors))

    def test_each_view_of_a_storage_is_checked(self):
        import torch

        # Alike but for where they lie in a storage, which is cut behind the first.
        pool = torch.ones(16)
        first, second = pool[:4], pool[8:12]
        pool.untyped_storage().resize_(4 * 4)
        Cache().get({"a": first})
        with self.assertRaisesRegex(LayoutError, "tensor b: its storage has 16 bytes, the tensor needs 48"):
            Cache().get({"a": first, "b": second})
        cache = Cache()
        cache.get({"b": first})
        with self.assertRaisesRegex(LayoutError, "tensor b: its storage"):
            cache.get({"b": second})
        freed = torch.ones(16)
        freed.untyped_storage().resize_(0)
        with self.assertRaisesRegex(LayoutError, "tensor c: its storage has 0 bytes"):
            Cache().get({"a": torch.ones(16), "c": freed})

    def test_cached_layout_still_refuses_unwritable_tensors(self):
        import torch

        with torch.inference_mode():
            inference = torch.ones(4)
        cache = Cache()
        cache.get({"a": torch.ones(4), "b": torch.ones(4)}, LOAD)
        with self.assertRaisesRegex(UnsupportedError, "tensor b: an inference tensor"):
            cache.get({"a": torch.ones(4), "b": inference}, LOAD)
        with torch.inference_mode():
            self.assertTrue(cache.get({"a": torch.ones(4), "b": inference}, LOAD)[2])
        cache.get({"a": torch.ones(4)})
        with self.assertRaisesRegex(UnsupportedError, "negative"):
            cache.get({"a": torch._neg_view(torch.ones(4))})

    def test_cache_keeps_no_leaf_alive(self):
        import weakref

        import numpy as np
        import torch

        cache = Cache()
        for purpose in (SAVE, LOAD):
            tensors = {"t": torch.ones(4), "n": np.ones(4), "s": torch.ones(4, 4)[:, 1]}
            watched = [weakref.ref(leaf) for leaf in tensors.values()]
            cache.get(tensors, purpose)
            cache.get(tensors, purpose)
            del tensors
            gc.collect()
            self.assertEqual([ref() for ref in watched], [None] * 3)

    def test_random_leaves_match_uncached_layouts(self):
        import numpy as np
        import torch

        rng, said = seeded()
        made = (
            lambda: torch.ones(rng.choice((0, 1, 3)), 4), lambda: torch.nn.Parameter(torch.ones(4)), lambda: torch.ones(8)[rng.randrange(4):][::2],
            lambda: np.ones((rng.choice((0, 2)), 3)), lambda: np.ones((4, 3), "f4").T, lambda: torch.ones(3, dtype=torch.complex64), lambda: np.ones(()),
        )  # fmt: skip
        for case in range(scaled(30)):
            with self.subTest(seed=said, case=case):
                cache = Cache()
                tensors = {f"k{i}": rng.choice(made)() for i in range(rng.randrange(12))}
                for _ in range(6):
                    self.check(cache, tensors)
                    self.assertTrue(self.check(cache, tensors))
                    if tensors:
                        tensors[rng.choice(list(tensors))] = rng.choice(made)()

    def test_cache_keeps_a_limited_number_of_layouts(self):
        import numpy as np

        cache = Cache(capacity=2)
        for name in "abc":
            cache.get({name: np.ones(1)})
        self.assertTrue(cache.get({"c": np.ones(1)})[2])
        self.assertFalse(cache.get({"a": np.ones(1)})[2])

    def test_finalizers_of_replaced_layouts_may_use_the_cache(self):
        import numpy as np

        class Freed:
            def __del__(self):
                for name in "wxyz":
                    cache.get({name: np.ones(1)})

        cache = Cache(capacity=2)
        cache.get({"a": np.ones(1)})[0].handle = Freed()
        gc.collect()
        cache.get({"a": np.ones(2)})  # Other shapes: frees the first layout.
        gc.collect()
        for name in "bcde":
            cache.get({name: np.ones(1)})
        self.assertTrue(cache.get({"e": np.ones(1)})[2])
        self.assertEqual(len(cache._layouts.values()), 2)


if __name__ == "__main__":
    unittest.main()
