# SPDX-License-Identifier: Apache-2.0
"""Kinds of leaves: each that is built in, and those of a plug-in, do what `tensormount.testing` asks of any."""

import dataclasses
import os
import sys
import types
import unittest
from typing import Any

import support
import tensormount as tm
from support import needs
from torchrun import main, torchrun
from tensormount._leaves import registry
from tensormount._leaves.registry import kind_of
from tensormount.testing import check_leaf_kind, threads


@dataclasses.dataclass
class Sharded:
    """As Megatron's ShardedTensor has it."""

    key: str
    data: Any
    local_shape: tuple
    global_shape: tuple
    global_offset: tuple
    replica_id: Any = 0
    prepend_axis_num: int = 0
    flattened_range: Any = None


@dataclasses.dataclass
class ShardedObject:
    key: str
    data: Any
    global_shape: tuple
    global_offset: tuple
    replica_id: Any = 0


class Local:
    """As LocalNonpersistentObject."""

    def __init__(self, obj):
        self.obj = obj


def is_main(replica):
    return not any(replica) if isinstance(replica, tuple) else replica == 0


class ShardedKind(tm.LeafKind):
    asked = 0

    def recognises(self, kind):
        return issubclass(kind, Sharded)

    def key(self, leaf, name):
        return leaf.key

    def held(self, leaf, purpose):
        self.asked += 1
        extent = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
        replica = "main" if is_main(leaf.replica_id) else "copy"
        if leaf.flattened_range is not None:
            where = tm.Flat(leaf.flattened_range.start, leaf.global_offset, extent)
            return tm.Shards(leaf.global_shape, [(where, leaf.data, replica)])
        data = leaf.data[(None,) * leaf.prepend_axis_num]
        return tm.Shards(leaf.global_shape, [(leaf.global_offset, data, replica)])


class ObjectKind(tm.LeafKind):
    def recognises(self, kind):
        return issubclass(kind, ShardedObject)

    def key(self, leaf, name):
        return leaf.key

    def held(self, leaf, purpose):
        if purpose == "save" and not is_main(leaf.replica_id):
            return None
        return tm.ObjectPart(leaf.data, leaf.global_offset, leaf.global_shape)

    def put(self, leaf, what):
        leaf.data = what
        return leaf


class LocalKind(tm.LeafKind):
    def recognises(self, kind):
        return issubclass(kind, Local)

    def held(self, leaf, purpose):
        return None


def rows(whole, rank, size):
    each = len(whole) // size
    return rank * each, whole[rank * each : (rank + 1) * each].copy()


def columns(whole, rank, size):
    each = whole.shape[1] // size
    return rank * each, whole[:, rank * each : (rank + 1) * each].copy()


def sharded(data, whole, offset, **more):
    return Sharded("stored.w", data, more.pop("local_shape", data.shape), whole.shape, offset, **more)


def sharded_rows(whole, rank, size):
    begin, data = rows(whole, rank, size)
    return sharded(data, whole, (begin, 0))


def sharded_columns(whole, rank, size):
    begin, data = columns(whole, rank, size)
    return sharded(data, whole, (0, begin))


def sharded_flat(whole, rank, size):
    """The distributed optimizer's: of all ranks the same box, of each a range of it, the last ones empty."""
    each = whole.size // max(1, size - 1)
    begin = min(whole.size, rank * each)
    data = whole.reshape(-1)[begin : begin + each].copy()
    return sharded(data, whole, (0, 0), local_shape=whole.shape, flattened_range=slice(begin, begin + len(data)))


def sharded_replicas(whole, rank, size):
    return sharded(whole.copy(), whole, (0, 0), replica_id=(0, rank))


SHARDED = {"rows": sharded_rows, "columns": sharded_columns, "flat ranges": sharded_flat, "replicas": sharded_replicas}


def on_one(make):
    """Rank 0's alone."""
    return lambda whole, rank, size: make(whole, rank, size) if rank == 0 else None


def shards_by_rows(whole, rank, size):
    begin, data = rows(whole, rank, size)
    half = len(data) // 2
    return tm.Shards(whole.shape, [((begin, 0), data[:half]), ((begin + half, 0), data[half:])])


def shards_by_columns(whole, rank, size):
    begin, data = columns(whole, rank, size)
    return tm.Shards(whole.shape, [((0, begin), data)])


def flat_shards(whole, rank, size):
    return ShardedKind().held(sharded_flat(whole, rank, size), "save")


class JaxArray:
    """What jax.Array has of attributes that are read."""

    is_fully_addressable = False
    addressable_shards = ()

    def __init__(self, whole, begin, data, replica=0):
        self.shape = whole.shape
        index = (slice(begin, begin + len(data)), slice(None))
        self.addressable_shards = [types.SimpleNamespace(index=index, replica_id=replica, data=JaxData(data))]


class JaxData:
    def __init__(self, values):
        self.values = values

    def devices(self):
        return [types.SimpleNamespace(platform="cpu")]

    def __array__(self, dtype=None, copy=None):
        return self.values


@needs("numpy")
class BuiltIn(support.Folder):
    def test_numpy_arrays_pass_the_leaf_checks(self):
        import numpy as np

        check_leaf_kind(kind_of(np.zeros(1)), {
            "whole": lambda whole, rank, size: whole.copy(),
            "by columns": lambda whole, rank, size: np.asfortranarray(whole),
            "of one rank": on_one(lambda whole, rank, size: whole.copy()),
            "a view": lambda whole, rank, size: np.repeat(whole, 2, 1)[:, ::2],
        })

    @needs("torch")
    def test_torch_tensors_pass_the_leaf_checks(self):
        import torch

        check_leaf_kind(kind_of(torch.zeros(1)), {
            "whole": lambda whole, rank, size: torch.tensor(whole),
            "transposed": lambda whole, rank, size: torch.tensor(whole.T.copy()).t(),
            "of one rank": on_one(lambda whole, rank, size: torch.tensor(whole)),
            "a parameter": lambda whole, rank, size: torch.nn.Parameter(torch.tensor(whole), whole.dtype.kind == "f"),
        })

    def test_shards_pass_the_leaf_checks(self):
        check_leaf_kind(kind_of(flat_shards(np_zeros(), 0, 2)), {
            "rows": shards_by_rows, "columns": shards_by_columns, "flat ranges": flat_shards})

    def test_jax_like_arrays_pass_the_leaf_checks(self):
        check_leaf_kind(kind_of(JaxArray(np_zeros(), 0, np_zeros())), {
            "rows": lambda whole, rank, size: JaxArray(whole, *rows(whole, rank, size)),
            "replicas": lambda whole, rank, size: JaxArray(whole, 0, whole.copy(), rank),
        }, loads=False)

    @needs("torch")
    def test_dtensors_and_self_describing_tensors_pass(self):
        said = torchrun(__file__, 2, ("of_processes", os.path.abspath("S")))
        self.assertEqual(said.count("fine"), 2)


def np_zeros():
    import numpy as np

    return np.zeros((4, 4), "f4")


def sharded_tensor_of_rows(whole, rank, size):
    """PyTorch's ShardedTensor, as FSDP1 makes them."""
    import torch
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata

    begin, data = rows(whole, rank, size)
    about = ShardMetadata([begin] + [0] * (whole.ndim - 1), list(data.shape), f"rank:{rank}/cpu")
    return sharded_tensor.init_from_local_shards([sharded_tensor.Shard(torch.tensor(data), about)], *whole.shape)


def of_processes(folder):
    """In each of two processes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    mesh = init_device_mesh("cpu", (2,))

    def placed(placement):
        return lambda whole, rank, size: distribute_tensor(torch.tensor(whole), mesh, [placement], src_data_rank=None)

    def tables(whole, rank, size):
        begin, data = rows(whole, rank, size)
        whole, half = torch.tensor(whole), len(data) // 2
        local = LocalShardsWrapper([torch.tensor(data[:half]), torch.tensor(data[half:])], [(begin, 0), (begin + half, 0)])
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    with tm.Group.from_torch() as group:
        examples = {"rows": placed(Shard(0)), "columns": placed(Shard(1)), "replicas": placed(Replicate()),
                    "rows in turn": placed(_StridedShard(0, split_factor=2)), "torchrec's tables": tables}
        kind = kind_of(examples["rows"](np_zeros(), 0, 2))
        assert check_leaf_kind(kind, examples, group=group, folder=f"{folder}/dtensors") >= 75
        # Of two rows a rank: its test cuts no others.
        examples = {"rows": lambda whole, rank, size: in_parts(torch.tensor(whole), rank, size)}
        kind = kind_of(examples["rows"](np_zeros(), 0, 2))
        assert check_leaf_kind(kind, examples, group=group, folder=f"{folder}/parts") >= 3
        examples = {"rows": sharded_tensor_of_rows}
        kind = kind_of(sharded_tensor_of_rows(np_zeros(), group.rank, 2))
        assert check_leaf_kind(kind, examples, group=group, folder=f"{folder}/sharded") >= 3
    print("fine")


@needs("numpy")
class Registered(support.Folder):
    """Kinds as a plug-in for Megatron would bring them."""

    def setUp(self):
        self.kinds = ShardedKind(), ObjectKind(), LocalKind()
        for kind in self.kinds:
            tm.register_leaf_kind(kind)
            self.addCleanup(registry.unregister_leaf_kind, kind)

    def test_registered_kind_passes_the_leaf_checks(self):
        self.assertGreater(check_leaf_kind(self.kinds[0], SHARDED), 50)

    @needs("torch")
    def test_registered_kind_may_wrap_torch(self):
        import torch

        def of_torch(make):
            def made(whole, rank, size):
                leaf = make(whole, rank, size)
                leaf.data = torch.tensor(leaf.data)
                return leaf
            return made

        check_leaf_kind(self.kinds[0], {name: of_torch(make) for name, make in SHARDED.items()})

    def test_registered_kind_may_store_objects(self):
        def part(whole, rank, size):
            return ShardedObject("rng", whole[rank].tobytes(), (size,), (rank,))

        self.assertGreater(check_leaf_kind(self.kinds[1], {"of each rank": part}), 2)

    def test_leaves_may_be_layers_of_a_stacked_tensor(self):
        """Each leaf is a layer of one tensor, whatever it is called; pipeline stages have other ones."""
        import numpy as np

        whole = np.arange(6 * 3 * 4, dtype="f4").reshape(6, 3, 4)

        def state(layers, values):
            return {"model": {f"layers.{i}": Sharded("layers.w", values[layer].copy(), (3, 4), (6, 3, 4), (layer, 0, 0),
                                                     prepend_axis_num=1) for i, layer in enumerate(layers)},
                    "list": [Local("mine"), ShardedObject("rng", b"r%d" % layers[0], (2,), (layers[0] % 2,)), 7],
                    "local": Local("mine"), "iteration": 3}

        def save(group, rank):
            layers = range(3 * rank, 3 * rank + 3)
            return tm.save(state(layers, whole), "S/stacked", group)

        for outcome in threads(save, 2):
            self.assertEqual(outcome["tensors"], 1)
        with tm.open("S/stacked") as checkpoint:
            self.assertEqual(checkpoint.keys(), ["layers.w"])
            self.assertTrue((checkpoint["layers.w"][...] == whole).all())
            self.assertEqual(checkpoint.objects["rng", 1], b"r3")
            self.assertEqual(checkpoint.common, {"iteration": 3, "list.2": 7})
            # What is left out of a dict is no item of it, and in a list an empty dict.
            whole_state = checkpoint.state()
            self.assertEqual(whole_state["list"], [{}, {}, 7])
            self.assertEqual(sorted(whole_state), ["iteration", "list", "model"])
        request = state(range(6), 0 * whole)
        request["list"][1].data, request["iteration"] = None, 0
        own = request["list"][0], request["local"]
        loaded = tm.load(request, "S/stacked")
        self.assertTrue(all((leaf.data == whole[i]).all() for i, leaf in enumerate(request["model"].values())))
        self.assertEqual((request["list"][1].data, request["list"][2], request["iteration"]), (b"r0", 7, 3))
        self.assertTrue(request["list"][0] is own[0] and request["local"] is own[1])
        self.assertEqual((loaded.kept, loaded.objects, loaded.not_stored), ([], {}, []))
        request = {"a": state([4], 0 * whole)["model"]["layers.0"]}
        tm.load(request, "S/stacked", key_map=[{"key": "layers.w", "to": "other"}], not_stored="ignore")
        self.assertFalse(request["a"].data.any())
        request["a"].key = "other"
        tm.load(request, "S/stacked", key_map=[{"key": "layers.w", "to": "other"}])
        self.assertTrue((request["a"].data == whole[4]).all())

    def test_kind_is_queried_once_and_its_layout_is_reused(self):
        leaf = sharded_rows(np_zeros(), 0, 1)
        group, state = tm.Group.single(), {"a": leaf, "b": {"c": leaf}}
        for number in range(3):
            before = self.kinds[0].asked
            report = tm.save(state, "S/again", group, replace=True)
            self.assertEqual((report["tensors"], report["plan_reused"]), (1, number > 0))
            self.assertEqual(self.kinds[0].asked, before + 1)
        (layout,) = group._cache._layouts.values()
        for change in ({"global_shape": (5, 4)}, {"global_offset": (1, 0), "global_shape": (5, 4)}, {"replica_id": 1}):
            other = dataclasses.replace(leaf, **change)
            tm.validate({"a": other}, group)
            (_, addresses, known) = group._cache.get(tree_items({"a": other}), "save", 1)
            self.assertFalse(known, change)

    def test_leaves_with_their_own_keys_are_not_tied(self):
        leaf = sharded_rows(np_zeros(), 0, 1)
        tm.save({"a": leaf, "b": dataclasses.replace(leaf, key="other"), "c": leaf}, "S/tied")
        with tm.open("S/tied") as checkpoint:
            self.assertEqual(checkpoint.keys(), ["other", "stored.w"])

    def test_registered_leaves_work_in_every_call(self):
        import numpy as np

        leaf = sharded_rows(np.arange(16, dtype="f4").reshape(4, 4), 0, 1)
        self.assertIn('"key":"stored.w","dtype":"f32","shape":[4,4]', tm.dump_spec({"w": leaf}))
        with tm.Saver() as saver:
            saver.save({"w": leaf}, "S/saver").wait()
        into = sharded_rows(np.zeros((4, 4), "f4"), 0, 1)
        tm.async_load({"w": into}, "S/saver").wait()
        self.assertTrue((into.data == leaf.data).all())
        # A padded vocabulary: allow_shape_mismatch.
        longer = sharded_rows(np.full((6, 4), 7, "f4"), 0, 1)
        with self.assertRaises(tm.LayoutError):
            tm.load({"w": longer}, "S/saver")
        tm.load({"w": longer}, "S/saver", rules=[tm.Rule("stored.w", shrink=True, grow="keep")])
        self.assertTrue((longer.data[:4] == leaf.data).all() and (longer.data[4:] == 7).all())

    def test_immutable_leaf_is_replaced_on_load(self):
        import numpy as np

        class Frozen:
            def __init__(self, values):
                self.values = tuple(values)

        class FrozenKind(tm.LeafKind):
            def recognises(self, kind):
                return issubclass(kind, Frozen)

            def held(self, leaf, purpose):
                return np.array(leaf.values, "f8")

            def put(self, leaf, what):
                return Frozen(what.tolist())

        kind = FrozenKind()
        tm.register_leaf_kind(kind)
        self.addCleanup(registry.unregister_leaf_kind, kind)
        tm.save({"w": Frozen([1, 2]), "tuple": (Frozen([3]),)}, "S/frozen")
        request = {"w": Frozen([0, 0]), "tuple": (Frozen([0]),)}
        loaded = tm.load(request, "S/frozen")
        self.assertIs(loaded.state, request)
        self.assertEqual((request["w"].values, request["tuple"][0].values), ((1.0, 2.0), (3.0,)))

    def test_invalid_leaf_descriptions_are_refused(self):
        class Odd:
            pass

        class OddKind(tm.LeafKind):
            def recognises(self, kind):
                return kind is Odd

            def held(self, leaf, purpose):
                if isinstance(leaf.gives, Exception):
                    raise leaf.gives
                return leaf.gives

        kind, leaf = OddKind(), Odd()
        tm.register_leaf_kind(kind)
        self.addCleanup(registry.unregister_leaf_kind, kind)
        for gives, error, words in (
            ([1], tm.UnsupportedError, "tensor a.b: the LeafKind of this value returns list"), (leaf, tm.UnsupportedError, "the LeafKind of this value returns .*Odd"),
            (tm.LayoutError("no box"), tm.LayoutError, "tensor a.b: no box"), (ZeroDivisionError("why"), ZeroDivisionError, "why"),
            (tm.ObjectPart("text"), tm.InvalidArgumentError, "object a.b: str, bytes were expected"),
        ):
            leaf.gives = gives
            with self.subTest(gives=gives), self.assertRaisesRegex(error, words):
                tm.save({"a": {"b": leaf}}, "S/odd")
        with self.assertRaises(tm.InvalidArgumentError):
            tm.register_leaf_kind(OddKind)

    @needs("torch")
    def test_registered_kinds_are_queried_in_order(self):
        import numpy as np
        import torch

        class Own(torch.Tensor):
            pass

        class Mine(dict):
            pass

        class All(tm.LeafKind):
            def recognises(self, kind):
                return issubclass(kind, (torch.Tensor, np.ndarray, Mine))

        own, mine = torch.ones(1).as_subclass(Own), Mine()
        self.assertEqual((kind_of(own), kind_of(mine)), (kind_of(torch.ones(1)), None))
        first, second = All(), All()
        for kind in (first, second, first):
            tm.register_leaf_kind(kind)
        self.addCleanup(registry.unregister_leaf_kind, first)
        self.assertIs(kind_of(own), second)
        registry.unregister_leaf_kind(second)
        self.assertEqual((kind_of(own), kind_of(mine), kind_of(np.ma.ones(1))), (first,) * 3)
        for plain in (torch.ones(1), torch.nn.Parameter(torch.ones(1)), np.ones(1)):
            self.assertIn(kind_of(plain), registry.BUILT_IN)


@needs("numpy")
class Conformance(unittest.TestCase):
    """What a wrong kind is told."""

    def check(self, words, examples=SHARDED, **methods):
        kind = type("Wrong", (ShardedKind,), methods)()
        with self.assertRaisesRegex(AssertionError, words):
            check_leaf_kind(kind, examples, ranks=2)

    def test_checker_finds_wrong_recognition(self):
        def imports(self, kind):
            sys.modules.pop("this", None)
            import this  # noqa: F401

        self.check("recognises.. must not import anything: it imports this", recognises=imports)
        self.check("recognises.. does not accept a Sharded", recognises=lambda self, kind: False)
        self.check("recognises.. accepts a (int|object), which is not", recognises=lambda self, kind: True)

    def test_checker_finds_wrong_saves(self):
        def upside_down(self, leaf, purpose):
            begin = (leaf.global_shape[0] - leaf.global_offset[0] - leaf.local_shape[0], 0)
            return tm.Shards(leaf.global_shape, [(begin, leaf.data)])

        self.check("rows: the stored tensor differs from the leaf", {"rows": sharded_rows}, held=upside_down)
        self.check("rows: the shards of the ranks are inconsistent", {"rows": sharded_rows}, held=lambda self, leaf, purpose: tm.Shards(leaf.global_shape, [((0, 0), leaf.data)]))
        self.check("the examples hold no data", {"rows": sharded_rows}, held=lambda self, leaf, purpose: None)

    def test_checker_finds_wrong_loads(self):
        def copied(self, leaf, purpose):
            return ShardedKind.held(self, dataclasses.replace(leaf, data=leaf.data.copy()), purpose)

        def any_type(self, leaf, purpose):
            return ShardedKind.held(self, dataclasses.replace(leaf, data=leaf.data.view("f4")), purpose)

        self.check("rows, loaded from rows: rank . loaded other values", held=copied)
        self.check("rows, with another dtype: the load was not refused", held=any_type)
        with self.assertRaisesRegex(AssertionError, "loaded other values"):
            class Forgets(ObjectKind):
                put = tm.LeafKind.put

            check_leaf_kind(Forgets(), {"one": lambda whole, rank, size: ShardedObject("o", whole[rank].tobytes(), (size,), (rank,))})

    def test_checker_finds_a_remembered_sharding(self):
        """As a layout would that does not notice a change."""
        known = {}

        def remembers(self, leaf, purpose):
            if leaf.global_shape[0] == 8 and purpose == "save":
                where = known.setdefault(leaf.data[0, 0] % 1000, (leaf.global_offset, leaf.data))
                leaf = dataclasses.replace(leaf, global_offset=where[0], data=where[1])
            return ShardedKind.held(self, leaf, purpose)

        self.check("rows, saved after rows: the stored tensor differs from the leaf", {"rows": sharded_rows}, held=remembers)


def tree_items(state):
    from tensormount import _tree

    return _tree.flatten(state).items()


def in_parts(whole, rank, size):
    """A tensor that describes itself, as that of dcp_test."""
    from dcp_test import Parts

    each = len(whole) // size
    begin = rank * each
    return Parts(whole.shape, {(row, 0): whole[row : row + 1].clone() for row in range(begin, begin + each)})


if __name__ == "__main__":
    main(globals())
