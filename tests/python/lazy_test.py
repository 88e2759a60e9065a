# SPDX-License-Identifier: Apache-2.0
"""Lazy tensors: random chains of operations against plain torch, what each of them reads, and refused uses."""

import copy
import io
import pickle
import threading
import unittest
from unittest import mock

import support
import tensormount as tm
from tensormount import _dtypes

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(str(error))

DTYPES = [getattr(torch, row.torch) for row in _dtypes.all_dtypes() if row.torch is not None]


def filled(shape, dtype, generator):
    """Random bytes as a tensor; bool has only 0 and 1."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def bits(tensor):
    """The bytes of the elements in row-major order; NaN with equal bits are equal."""
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype)
    packed.view(tensor.shape).copy_(tensor)
    return packed.view(torch.uint8).numpy().tobytes()


def is_lazy(tensor):
    return type(tensor) is tm.torch.LazyTensor


# ---- Random operations ---------------------------------------------------------------------------


def chained(random, shape):
    """A random operation that stays lazy, for a tensor of this shape, as (name, function)."""
    axes = len(shape)
    axis = random.randrange(axes) if axes else 0
    signed = axis - axes if random.random() < 0.3 else axis
    size = shape[axis] if axes else 0
    begin = random.randint(0, size)
    end = random.randint(begin, size)
    order = random.sample(range(axes), axes)
    known = [
        ("detach", lambda t: t.detach()),
        ("unsqueeze", lambda t: t.unsqueeze(random_at)),
        ("squeeze", lambda t: t.squeeze()),
        ("permute", lambda t: t.permute(order)),
        ("ones", lambda t: t.view(1, *t.shape, 1)),
        ("reshape", lambda t: t.reshape([-1 if n == longest else n for n in t.shape] if longest > 1 else t.shape)),
    ]
    random_at = random.randint(0, axes)
    longest = max(shape, default=1)
    if sum(n == longest for n in shape) != 1 or 0 in shape:
        longest = 0
    if axes == 2:
        known.append(("t", lambda t: t.t()))
    if axes:
        other, step, number = random.randrange(axes), random.randint(1, 3), random.randint(1, 4)
        sizes = [end - begin, size - (end - begin)]
        known += [
            ("narrow", lambda t: t.narrow(signed, begin, end - begin)),
            ("slice", lambda t: t[(slice(None),) * axis + (slice(begin, end),)]),
            ("step", lambda t: t[(slice(None),) * axis + (slice(begin, None, step),)]),
            ("tail", lambda t: t[..., -2:]),
            ("transpose", lambda t: t.transpose(signed, other)),
            ("split", lambda t: t.split(number, dim=signed)[-1]),
            ("sizes", lambda t: t.split(sizes, dim=signed)[1]),
            ("chunk", lambda t: t.chunk(number, dim=signed)[0]),
            ("squeeze one", lambda t: t.squeeze(signed)),
        ]
        if size:
            at = random.randrange(size)
            known += [
                ("select", lambda t: t.select(signed, at)),
                ("index", lambda t: t[(slice(None),) * axis + (at - size,)]),
                ("unbind", lambda t: t.unbind(signed)[at]),
            ]
    return random.choice(known)


def chain(random, plain, lazy, longest):
    """Applies the same random operations to both. The results, and the names of the operations."""
    names = []
    for _ in range(random.randint(0, longest)):
        name, operation = chained(random, tuple(plain.shape))
        names.append(name)
        plain, lazy = operation(plain), operation(lazy)
    return plain, lazy, names


class Lazy(support.Folder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.w = torch.arange(16 * 32, dtype=torch.float32).reshape(16, 32)
        tm.save({"w": cls.w, "b": torch.arange(6, dtype=torch.bfloat16)}, "STORE/step-1")

    def opened(self, path="STORE/step-1", **names):
        checkpoint = tm.open(path, **names)
        self.addCleanup(checkpoint.close)
        return checkpoint

    def lazy(self, key="w"):
        return self.opened()[key].lazy()

    def check(self, lazy, plain):
        """Reads by one of the ways there are, and compares."""
        self.assertEqual((tuple(lazy.shape), lazy.dtype), (tuple(plain.shape), plain.dtype))
        self.assertEqual(bits(lazy.read()), bits(plain))

    def test_random_chains_equal_torch_and_read_the_remaining_box_once(self):
        random, seed = support.seeded()
        generator = torch.Generator().manual_seed(seed)
        for number in range(support.scaled(400)):
            dtype = DTYPES[number % len(DTYPES)]
            if dtype is DTYPES[0]:  # One checkpoint for all dtypes.
                shapes = [[random.randint(1, 6) for _ in range(random.randint(0, 4))] for _ in DTYPES]
                tensors = {str(one): filled(shape, one, generator) for one, shape in zip(DTYPES, shapes)}
                tm.save(tensors, "S/c", replace=True)
                checkpoint = self.opened("S/c")
            plain = tensors[str(dtype)]
            with torch.inference_mode(number % 3 == 0):
                lazy = checkpoint[str(dtype)].lazy()
                cut, lazily, names = chain(random, plain, lazy, 5)
                with self.subTest(seed=seed, number=number, dtype=dtype, shape=list(plain.shape), names=names):
                    self.assertTrue(is_lazy(lazily) or cut.numel() == 0)
                    self.assertEqual(lazy.reads.reads, 0)
                    self.read_somehow(random, lazily, cut)
                    self.assertLessEqual(lazy.reads.reads, 1)
                    if "step" not in names and cut.numel():
                        self.assertEqual(lazy.reads.bytes, cut.numel() * dtype.itemsize)

    def read_somehow(self, random, lazy, plain):
        way = random.randrange(4)
        if way == 0:
            lazy = lazy.clone()
        elif way == 1:
            into = torch.empty(plain.shape, dtype=plain.dtype)
            into.copy_(lazy)
            lazy = into
        elif way == 2:  # Strided memory.
            into = torch.empty([*reversed(plain.shape), 2], dtype=plain.dtype)[..., 1]
            into = into.permute(tuple(reversed(range(plain.dim()))))
            into.copy_(lazy)
            lazy = into
        elif is_lazy(lazy):
            lazy = lazy.read()
        self.assertEqual((tuple(lazy.shape), lazy.dtype), (tuple(plain.shape), plain.dtype))
        self.assertEqual(bits(lazy), bits(plain))

    def test_to_converts_after_the_read(self):
        lazy = self.lazy().to(torch.float64)[2:4].to(torch.bfloat16).t()
        self.assertTrue(is_lazy(lazy))
        self.assertEqual((lazy.dtype, lazy.reads.reads), (torch.bfloat16, 0))
        self.assertTrue(torch.equal(lazy.read(), self.w[2:4].to(torch.bfloat16).t()))
        self.assertEqual(lazy.reads.bytes, 2 * 32 * 4)
        into = torch.empty(16, 32, dtype=torch.float64)
        into.copy_(self.lazy())  # The copy converts.
        self.assertTrue(torch.equal(into, self.w.double()))

    def test_other_operations_read_once_and_keep_the_result(self):
        lazy = self.lazy()
        rows = lazy[0:4]
        for _ in range(2):
            self.assertTrue(torch.equal(rows + 1, self.w[0:4] + 1))
            self.assertTrue(torch.equal(rows.view(-1)[5:9], self.w.view(-1)[5:9]))
            self.assertTrue(torch.equal(torch.cat([rows, rows]), torch.cat([self.w[0:4]] * 2)))
            self.assertEqual(rows.tolist(), self.w[0:4].tolist())
            self.assertEqual(rows.numpy().tobytes(), self.w[0:4].numpy().tobytes())
            self.assertEqual(float(rows.sum()), float(self.w[0:4].sum()))
        self.assertEqual((lazy.reads.reads, lazy.reads.bytes, lazy.was_read), (1, 4 * 32 * 4, False))
        self.assertFalse(is_lazy(rows[1]))  # A view of what was read.
        self.assertTrue(torch.equal(lazy[torch.tensor([3, 1])], self.w[[3, 1]]))
        self.assertEqual((lazy.reads.reads, lazy.was_read), (2, True))

    def test_copies_go_into_the_memory_of_the_destination(self):
        lazy = self.lazy()
        whole = torch.full((8, 64), -1.0)
        into = whole[2:6, 3:35]
        with mock.patch.object(tm.torch.LazyTensor, "_fetch", side_effect=AssertionError("a second copy")):
            into.copy_(lazy[4:8])
            torch.nn.Parameter(torch.empty(32, 16), requires_grad=False).copy_(lazy.t())
        self.assertTrue(torch.equal(into, self.w[4:8]))
        self.assertEqual(float(whole.sum()), float(self.w[4:8].sum()) - (8 * 64 - 4 * 32))
        self.assertEqual((lazy.reads.reads, lazy.reads.bytes, lazy.was_read), (2, (4 + 16) * 32 * 4, False))

    def test_copies_broadcast_and_copies_to_meta_read_nothing(self):
        lazy = self.lazy("b")
        torch.empty(6, dtype=torch.bfloat16, device="meta").copy_(lazy)
        self.assertEqual(lazy.reads.reads, 0)
        into = torch.empty(3, 6)
        into.copy_(lazy)
        self.assertTrue(torch.equal(into, torch.arange(6.0).expand(3, 6)))
        with self.assertRaises(RuntimeError):
            torch.empty(5).copy_(lazy)
        with torch.no_grad():
            parameter = torch.nn.Parameter(torch.empty(6, dtype=torch.bfloat16))
            parameter.copy_(lazy)
            parameter.data[2:4].copy_(lazy.narrow(0, 0, 2))
        self.assertEqual(parameter.tolist(), [0, 1, 0, 1, 4, 5])
        model = torch.nn.Linear(32, 16, bias=False)
        model.load_state_dict({"weight": self.lazy()})
        self.assertTrue(torch.equal(model.weight, self.w))

    def test_writes_and_pickles_are_refused(self):
        lazy = self.lazy()
        for write in (lambda: lazy.zero_(), lambda: lazy[0:2].add_(1), lambda: lazy.__setitem__(0, 1.0),
                      lambda: lazy.copy_(self.w), lambda: torch.add(self.w, 1, out=lazy)):
            with self.assertRaisesRegex(tm.UnsupportedError, "read-only; use lazy.clone"):
                write()
        for copied in (lambda: pickle.dumps(lazy), lambda: copy.deepcopy(lazy), lambda: copy.copy(lazy),
                       lambda: torch.save(lazy, io.BytesIO())):
            with self.assertRaisesRegex(tm.UnsupportedError, "w: a lazy tensor cannot be pickled or copied"):
                copied()
        self.assertEqual(lazy.reads.reads, 0)
        self.assertEqual(repr(lazy), "<tensormount.torch.LazyTensor 'w': torch.float32 [16, 32], not read>")
        for wrong in (lambda: lazy.select(0, 16), lambda: lazy.narrow(0, 10, 7), lambda: lazy.transpose(0, 2),
                      lambda: lazy.split(0), lambda: lazy.view(5, -1)):
            with self.assertRaises((IndexError, RuntimeError)):
                wrong()

    def test_reads_after_the_checkpoint_was_closed_are_refused(self):
        with tm.open("STORE/step-1") as checkpoint:
            read, lazy = checkpoint["w"].lazy(), checkpoint["w"].lazy()
            read.read()
        for use in (lambda: lazy[0:2].sum(), lambda: torch.empty(16, 32).copy_(lazy), lambda: lazy.clone()):
            with self.assertRaisesRegex(tm.ClosedError, "the checkpoint is closed; the lazy tensor w was not read"):
                use()
        self.assertEqual((lazy.reads.reads, lazy.reads.bytes), (0, 0))
        self.assertTrue(torch.equal(read[1:], self.w[1:]))

    def test_a_lazy_tensor_keeps_the_checkpoint_open(self):
        lazy = tm.open("STORE/step-1")["w"].lazy()[3]
        self.assertTrue(torch.equal(lazy.read(), self.w[3]))

    def test_damage_is_an_error_and_not_counted(self):
        tm.save({"w": self.w}, "BAD/step-1")
        support.damage("BAD/step-1", "w", b"\xff")
        with tm.open("BAD/step-1") as checkpoint:
            lazy = checkpoint["w"].lazy()
            with self.assertRaises(tm.DataLossError):
                lazy.sum()
            with self.assertRaises(tm.DataLossError):
                torch.empty(16, 32).copy_(lazy)
            self.assertEqual((lazy.reads.reads, lazy.was_read), (0, False))

    def test_threads_that_read_one_tensor_at_once_get_its_elements(self):
        checkpoint = self.opened()
        for _ in range(20):
            lazy, found = checkpoint["w"].lazy(), []
            threads = [threading.Thread(target=lambda: found.append(torch.equal(lazy, self.w))) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(found, [True] * 4)
            self.assertEqual(lazy.reads.reads, 1)

    def test_counters_are_shared_on_request(self):
        checkpoint, reads = self.opened(), tm.torch.LazyReads()
        for key in ("w", "b"):
            checkpoint[key].lazy(reads)[0:2].read()
        self.assertEqual((reads.reads, reads.bytes), (2, 2 * 32 * 4 + 2 * 2))
        self.assertEqual(repr(reads), "<tensormount.torch.LazyReads: 260 bytes in 2 reads>")

    def test_mapped_and_foreign_tensors(self):
        rules = {"version": 1, "rules": [{"from": "w : (q + k) d", "to": ["q : d q", "k : k d"], "sizes": {"q": 4}}],
                 "others": "drop"}
        mapped = self.opened(names=rules)
        q, k = mapped["q"].lazy(), mapped["k"].lazy()
        into = torch.empty(3, 8)
        into.copy_(q[8:16, 1:].t())
        self.assertTrue(torch.equal(into, self.w[1:4, 8:16]))
        self.assertTrue(torch.equal(k[2].read(), self.w[6]))
        self.assertEqual((q.reads.bytes, k.reads.bytes), (into.numel() * 4, 32 * 4))
        support.write_safetensors("model.safetensors", {"w": ("F32", self.w.shape, self.w.numpy().tobytes())})
        with tm.open("model.safetensors") as foreign:
            self.assertTrue(torch.equal(foreign["w"].lazy()[:, 3].read(), self.w[:, 3]))

    def test_pairs_of_f4_are_cut_whole(self):
        kind = torch.float4_e2m1fn_x2
        raw = torch.arange(64, dtype=torch.uint8).reshape(4, 16)
        tm.save({"f4": raw.view(kind)}, "S/f4", replace=True)
        with tm.open("S/f4") as checkpoint:
            lazy = checkpoint["f4"].lazy()
            self.assertEqual((lazy.dtype, tuple(lazy.shape)), (kind, (4, 16)))
            cut = lazy[1:3, 4:7]
            self.assertTrue(torch.equal(cut.read().view(torch.uint8), raw[1:3, 4:7]))
            self.assertEqual(lazy.reads.bytes, 6)
            self.assertTrue(torch.equal(lazy[2].read().view(torch.uint8), raw[2]))
            self.assertTrue(torch.equal(lazy[:, 3].read().view(torch.uint8), raw[:, 3]))

    def test_every_dtype_is_covered(self):
        # All but f4, which has a test of its own, and f6, which torch lacks.
        self.assertEqual(len(DTYPES), len(_dtypes.all_dtypes()) - 3)

    def test_the_example_of_serving_md_runs(self):
        support.check_examples(self, "serving.md", "tests/python/lazy_test.py")


if __name__ == "__main__":
    unittest.main()
