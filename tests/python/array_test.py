# SPDX-License-Identifier: Apache-2.0
"""Tensors as arrays of NumPy and torch, beside the same arrays in memory: every dtype, random boxes."""

import gc
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

import tensormount as tm
from support import Folder, run, scaled, seed, write_safetensors
from tensormount import _dtypes, _reads

try:
    import ml_dtypes
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(f"{error}: pip install numpy ml_dtypes")
try:
    import torch
except ImportError:
    torch = None

# What NumPy and ml_dtypes call them, not read from the package.
NAMED = {
    "bool": np.bool_, "i8": np.int8, "u8": np.uint8, "i16": np.int16, "u16": np.uint16,
    "i32": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64, "f16": np.float16,
    "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "f8_e4m3": ml_dtypes.float8_e4m3fn, "f8_e5m2": ml_dtypes.float8_e5m2,
    "f8_e8m0": ml_dtypes.float8_e8m0fnu, "f8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "f8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz, "c64": np.complex64,
}
# By name of ours, that of safetensors. It has no complex128 (which npy below has).
STORED = {row.name: row.name.upper() for row in _dtypes.all_dtypes() if row.name != "c128"}
SHAPES = [(), (0,), (5,), (7, 3), (1, 4, 2), (6, 0, 2), (3, 4, 5, 2)]


def key_of(name, shape):
    return name + "/" + "x".join(map(str, shape))


def random_index(random_, shape):
    """An index, often with an ellipsis, new axes, steps, ends beyond."""
    items = []
    for size in shape[: random_.randint(0, len(shape))]:
        kind = random_.randrange(3)
        if kind == 0 and size:
            items.append(random_.randrange(-size, size))
        else:
            ends = [random_.choice([None, random_.randint(-size - 2, size + 2)]) for _ in range(2)]
            items.append(slice(*ends, random_.choice([None, 1, 1, 2, 3])))
    if random_.random() < 0.3:
        items.insert(random_.randint(0, len(items)), Ellipsis)
        # What stands behind it names the last axes, whose sizes differ.
        at = items.index(Ellipsis)
        items[at + 1:] = [slice(None)] * (len(items) - at - 1)
    if random_.random() < 0.3:
        items.insert(random_.randint(0, len(items)), None)
    if len(items) == 1 and random_.random() < 0.5:
        return items[0]
    return tuple(items)


def raw(tensor):
    """Bytes of a torch tensor of any dtype."""
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype)
    packed.copy_(tensor.reshape(-1))
    return bytes(packed.view(torch.uint8).tolist()) if tensor.numel() else b""


class Arrays(Folder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        random_ = random.Random(seed())
        cls.expected, files = {}, {}
        for row in _dtypes.all_dtypes():
            for shape in SHAPES:
                count = 1
                for extent in shape:
                    count *= extent
                if count * row.bits % 8 or row.name == "c128":
                    continue
                data = random_.randbytes(count * row.bits // 8) if hasattr(random_, "randbytes") \
                    else bytes(random_.randrange(256) for _ in range(count * row.bits // 8))
                if row.name == "bool":
                    data = bytes(byte & 1 for byte in data)
                key = key_of(row.name, shape)
                files[key] = (STORED[row.name], shape, data)
                if row.bits >= 8:
                    cls.expected[key] = np.frombuffer(data, NAMED[row.name]).reshape(shape)
        write_safetensors("m.safetensors", files)
        cls.data = {key: data for key, (_, _, data) in files.items()}
        run("import", "m.safetensors", "STORE/step-1", "--ranks", 3, "--shard", "cols")
        cls.checkpoint = tm.open("STORE/step-1")
        cls.addClassCleanup(cls.checkpoint.close)

    def same(self, found, expected, what):
        self.assertEqual(type(found), type(expected), what)
        self.assertEqual((found.shape, found.dtype), (expected.shape, expected.dtype), what)
        self.assertEqual(found.tobytes(), expected.tobytes(), what)  # NaN too.

    def test_every_dtype_reads_exactly(self):
        self.assertEqual(len(self.expected), 19 * len(SHAPES))
        for key, expected in self.expected.items():
            tensor = self.checkpoint[key]
            self.assertEqual((tensor.shape, tensor.dtype), (expected.shape, expected.dtype))
            self.same(tensor[...], expected, key)
            self.same(np.asarray(tensor), expected, key)
            self.assertEqual(tensor.read_bytes(), expected.tobytes(), key)

    def test_random_slices_equal_those_of_numpy(self):
        random_ = random.Random(seed() + 1)
        for key, expected in self.expected.items():
            tensor = self.checkpoint[key]
            for _ in range(12):
                index = random_index(random_, expected.shape)
                what = f"{key}[{index}] (seed {seed()})"
                wanted = expected[index]
                self.same(tensor[index], wanted, what)
                # Into an array that others cut out: axes the other way round, with gaps.
                wanted = np.asarray(wanted)
                around = np.zeros(tuple(2 * n for n in wanted.shape[::-1]), wanted.dtype)
                out = around[tuple(slice(0, n) for n in wanted.shape[::-1]) + (Ellipsis,)].T
                self.assertIs(tensor.read(index, out=out), out)
                self.assertEqual(out.tobytes(), wanted.tobytes(), what)
                left = around.copy()
                left[tuple(slice(0, n) for n in wanted.shape[::-1])] = np.zeros((), wanted.dtype)
                self.assertEqual(left.tobytes(), bytes(left.nbytes), what + " wrote beside it")

    def test_mapped_arrays_equal_the_read_ones(self):
        """Of one file in place, where all is one run; and of what three ranks saved."""
        random_ = random.Random(seed() + 2)
        refused = 0
        for source, whole in (("m.safetensors", True), ("STORE/step-1", False)):
            with tm.open(source) as checkpoint:
                for key, expected in self.expected.items():
                    tensor = checkpoint[key]
                    for index in [...] + [random_index(random_, expected.shape) for _ in range(4)]:
                        what = f"{source} {key}[{index}] (seed {seed()})"
                        try:
                            found = tensor.memmap(index)
                        except tm.UnsupportedError:
                            # Steps and columns are no runs; whatever else one file has is one.
                            refused += 1
                            self.assertFalse(whole and index is ..., what)
                            continue
                        wanted = np.asarray(expected[index])
                        self.assertEqual((found.shape, found.dtype), (wanted.shape, wanted.dtype), what)
                        self.assertEqual(found.tobytes(), wanted.tobytes(), what)
                        self.assertFalse(found.flags.writeable)
        self.assertGreater(refused, 0)

    def test_mapped_array_keeps_its_checkpoint_open(self):
        key = key_of("i32", (7, 3))
        run("import", "m.safetensors", "STORE/mapped", "--reuse", "off")
        checkpoint = tm.open("STORE/mapped")
        rows = checkpoint[key].memmap(slice(1, 3))
        checkpoint.close()
        tm.Store("STORE").remove("mapped")
        tm.Store("STORE").gc(grace=0)
        gc.collect()
        np.testing.assert_array_equal(rows, self.expected[key][1:3])
        with self.assertRaises(ValueError):
            rows[0, 0] = 1
        with self.assertRaises(tm.ClosedError):
            checkpoint[key].memmap()
        with self.assertRaisesRegex(tm.UnsupportedIndexError, "not select one contiguous run"):
            self.checkpoint[key].memmap((slice(None), 1))

    def test_complex128_reads_exactly(self):
        expected = np.arange(12, dtype="complex128").reshape(3, 4) * (1 + 2j)
        np.save("c.npy", expected)
        try:
            checkpoint = tm.open("c.npy")
        except tm.UnsupportedError as error:
            self.skipTest(str(error))
        with checkpoint:
            tensor = checkpoint[checkpoint.keys()[0]]
            self.same(tensor[1:, ::2], expected[1:, ::2].copy(), "c128")

    def test_stepped_slice_keeps_only_its_bytes(self):
        part = self.checkpoint[key_of("i32", (7, 3))][::3]
        while part.base is not None:
            part = part.base
        self.assertEqual(part.nbytes, 36)

    def test_torch_and_bytes_work_without_ml_dtypes(self):
        key = key_of("bf16", (7, 3))
        code = f"""
import sys
sys.modules["ml_dtypes"] = None
import tensormount as tm
tensor = tm.open("STORE/step-1")[{key!r}]
assert len(tensor.read_bytes()) == 42
try:
    tensor[0]
    raise SystemExit("read without ml_dtypes")
except tm.LibraryError as error:
    assert "pip install ml_dtypes" in str(error), error
if {torch is not None}:
    assert tuple(tensor.torch(index=slice(2)).shape) == (2, 3)
    sys.modules["numpy"] = None
    assert tuple(tensor.torch().shape) == (7, 3)
else:
    try:
        tensor.torch()
    except tm.LibraryError as error:
        assert "pip install torch" in str(error), error
"""
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_iteration_yields_rows(self):
        key = key_of("i32", (7, 3))
        rows = list(self.checkpoint[key])
        self.assertEqual(len(rows), 7)
        self.same(np.stack(rows), self.expected[key], key)

    def test_sub_byte_dtypes_are_refused_but_readable_as_bytes(self):
        for name in ("f4", "f6_e2m3", "f6_e3m2"):
            tensor = self.checkpoint[key_of(name, (3, 4, 5, 2))]
            uses = [lambda: tensor[0], lambda: tensor.dtype, lambda: np.asarray(tensor)]
            # torch has f4, in pairs (foreign_test.py).
            for use in uses + ([tensor.torch] if name != "f4" else []):
                with self.assertRaises(tm.UnsupportedError) as caught:
                    use()
                self.assertIn(name, str(caught.exception))
                self.assertIn("read_bytes", str(caught.exception))
            self.assertEqual(tensor.read_bytes(), self.data[tensor.key])

    def test_out_of_wrong_shape_or_dtype_is_refused(self):
        tensor = self.checkpoint[key_of("f32", (7, 3))]
        read_only = np.zeros((7, 3), "f4")
        read_only.flags.writeable = False
        for out, words in ((np.zeros((7, 3)), "elements of float64"),
                           (np.zeros((3, 7), "f4"), "shape [3, 7], not [7, 3]"),
                           (read_only, "read-only"), (np.zeros((7, 3), ">f4"), "big-endian"),
                           ([0.0], "a list")):
            with self.assertRaises(tm.Error) as caught:
                tensor.read(out=out)
            self.assertIn(words, str(caught.exception))

    def test_tensor_supports_array_protocols(self):
        tensor = self.checkpoint[key_of("i16", (7, 3))]
        self.assertEqual(np.asarray(tensor, dtype="f8").dtype, np.dtype("f8"))
        self.same(np.from_dlpack(tensor) if hasattr(np, "from_dlpack") else tensor[...],
                  self.expected[tensor.key], "dlpack")
        self.assertEqual(tensor.__dlpack_device__(), (1, 0))

    def test_read_many_reads_all_requests(self):
        wanted = {str(i): (key, Ellipsis) for i, key in enumerate(self.expected)}
        for threads in (None, 1, 3):
            read = self.checkpoint.read_many(wanted, threads=threads)
            self.assertEqual(list(read), list(wanted))
            for name, (key, _) in wanted.items():
                self.same(read[name], self.expected[key], key)
        with self.assertRaises(KeyError):
            self.checkpoint.read_many({"a": "none"})
        with self.assertRaises(tm.OutOfRangeError):
            self.checkpoint.read_many({"a": (key_of("f32", (5,)), 9), "b": key_of("f32", (5,))})
        with self.assertRaises(tm.InvalidArgumentError):
            self.checkpoint.read_many({}, threads=0)
        # At the limit of threads those that there are read all of it.
        start = threading.Thread.start
        for most in (0, 1):
            begun = []

            def begin(thread, most=most, begun=begun):
                if len(begun) >= most:
                    raise RuntimeError("can't start new thread")
                begun.append(thread)
                start(thread)

            with mock.patch.object(threading.Thread, "start", begin):
                read = self.checkpoint.read_many(wanted, threads=4)
            self.assertEqual(list(read), list(wanted))
            for name, (key, _) in wanted.items():
                self.same(read[name], self.expected[key], key)

        keys = [key_of("f32", (5,)), key_of("i16", (7, 3))]
        read = self.checkpoint.read_many(iter(keys))
        self.assertEqual(list(read), keys)
        self.same(read[keys[1]], self.expected[keys[1]], keys[1])
        for wrong in ("w", ["w", 5]):
            with self.assertRaisesRegex(tm.InvalidArgumentError, "a list of keys"):
                self.checkpoint.read_many(wrong)

    def test_large_reads_in_parts_are_exact(self):
        random_ = random.Random(seed() + 3)
        with mock.patch.object(_reads, "PART_BYTES", 11):
            for key, expected in self.expected.items():
                tensor = self.checkpoint[key]
                self.same(tensor[...], expected, key)
                self.assertEqual(tensor.read_bytes(), self.data[key], key)
                for _ in range(3):
                    index = random_index(random_, expected.shape)
                    self.same(tensor[index], expected[index], (key, index))
                    wanted = np.asarray(expected[index])
                    out = np.zeros(wanted.shape[::-1], wanted.dtype).T
                    tensor.read(index, out=out)
                    self.assertEqual(out.tobytes(), wanted.tobytes(), (key, index))
            if torch is not None:
                for key in self.data:
                    if key.split("/")[0] == "f4" and hasattr(torch, "float4_e2m1fn_x2"):
                        self.assertEqual(raw(self.checkpoint[key].torch().view(torch.uint8)), self.data[key])
                    elif key.split("/")[0] == "bf16":
                        self.assertEqual(raw(self.checkpoint[key].torch()), self.data[key])

    def test_parts_cover_every_cell_once(self):
        random_ = random.Random(seed() + 4)
        for _ in range(scaled(100)):
            shape = tuple(random_.choice([1, 2, 3, 5, 17]) for _ in range(random_.randint(0, 4)))
            bits, most = random_.choice([(4, 2), (6, 3), (8, 1), (16, 7), (32, 64)])
            cells = np.zeros(shape, int)
            numbers = np.arange(cells.size).reshape(shape)
            with mock.patch.object(_reads, "PART_BYTES", most):
                for begin, extent, offset in _reads.parts((3,) * len(shape), shape, _reads.packed(shape), bits):
                    box = tuple(slice(b - 3, b - 3 + e) for b, e in zip(begin, extent))
                    cells[box] += 1
                    part = numbers[box]
                    self.assertEqual(int(part.flat[0]) * bits, offset * 8)
                    self.assertTrue((np.diff(part.reshape(-1)) == 1).all())
                    if bits >= 8:
                        self.assertLessEqual(part.size * bits, max(most * 8, bits))
            self.assertTrue((cells == 1).all(), (shape, bits, most))

    def test_signal_ends_a_large_read(self):
        """Between two parts, each of which takes 5 ms here."""
        class Enough(Exception):
            pass

        def stop(number, frame):
            raise Enough

        key = key_of("f64", (7, 3))
        with tm.open("STORE/step-1") as checkpoint, mock.patch.object(_reads, "PART_BYTES", 8):
            read, begun, over = checkpoint._read, [], threading.Event()

            def slow(*arguments):
                begun.append(1)
                time.sleep(0.005)
                return read(*arguments)

            checkpoint._read = slow
            out = np.empty((7, 3))
            before = signal.signal(signal.SIGALRM, stop)
            try:
                for call in (lambda: checkpoint[key][...], lambda: checkpoint[key].read(out=out),
                             lambda: checkpoint.read_many([key, key_of("f64", (5,))]), checkpoint.state):
                    del begun[:]
                    signal.setitimer(signal.ITIMER_REAL, 0.02)
                    with self.assertRaises(Enough):
                        call()
                    self.assertLess(len(begun), 15)  # Of 21 and more.
                    count = len(begun)
                    over.wait(0.02)
                    self.assertEqual(len(begun), count)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)

    def test_threads_do_not_mix_their_reads(self):
        failures = []

        def read(number):
            random_ = random.Random(number)
            keys = sorted(self.expected)
            for _ in range(150):
                key = random_.choice(keys)
                index = random_index(random_, self.expected[key].shape)
                try:
                    self.same(self.checkpoint[key][index], self.expected[key][index], key)
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    @unittest.skipIf(torch is None, "no torch")
    def test_tensor_reads_as_torch(self):
        random_ = random.Random(seed() + 2)
        for key, expected in self.expected.items():
            row = next(r for r in _dtypes.all_dtypes() if r.name == key.split("/")[0])
            if not hasattr(torch, row.torch):
                continue
            tensor = self.checkpoint[key]
            for index in [Ellipsis] + [random_index(random_, expected.shape) for _ in range(4)]:
                found = tensor.torch(index=index)
                wanted = np.asarray(expected[index])
                self.assertEqual((tuple(found.shape), found.dtype),
                                 (wanted.shape, getattr(torch, row.torch)), key)
                self.assertEqual(raw(found), wanted.tobytes(), (key, index))
                out = torch.zeros(tuple(wanted.shape)[::-1], dtype=found.dtype)
                out = out.permute(tuple(range(out.ndim - 1, -1, -1)))
                tensor.read(index, out=out)
                self.assertEqual(raw(out), wanted.tobytes(), (key, index))
        bf16 = self.checkpoint[key_of("bf16", (7, 3))]
        self.assertEqual(torch.from_dlpack(bf16).dtype, torch.bfloat16)
        for index in (slice(0, 2), (0, 1), Ellipsis, None):
            with self.assertRaisesRegex(TypeError, r"pass an index as torch\(index="):
                bf16.torch(index)
        with self.assertRaises(tm.UnsupportedError):
            bf16.read(out=torch.zeros((7, 3), dtype=torch.bfloat16, device="meta"))


class Destinations(Folder):
    """Memory that a read is to fill is held to what a load asks of its tensors."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        write_safetensors("c.safetensors", {
            "c": ("C64", [3], struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
            "w": ("F32", [4, 2], struct.pack("<8f", *range(8)))})

    def refused(self, key, out, error=tm.Error, said=""):
        with tm.open("c.safetensors") as checkpoint:
            for index in (..., slice(None)):
                with self.assertRaisesRegex(error, said):
                    checkpoint[key].read(index, out=out)

    @unittest.skipIf(torch is None, "not installed: torch")
    def test_unsuitable_torch_destinations_are_refused(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        z = torch.full((3,), 7 + 8j, dtype=torch.complex64)
        self.refused("c", z.conj(), tm.UnsupportedError, "conjugate")
        self.assertTrue((z == 7 + 8j).all())
        negative = z.conj().imag
        self.assertTrue(negative.is_neg())
        with tm.open("c.safetensors") as checkpoint:
            with self.assertRaisesRegex(tm.UnsupportedError, "negative"):
                checkpoint["w"].read((slice(3), 0), out=negative)
        self.refused("w", torch.zeros(1, 2).expand(4, 2), tm.LayoutError, "overlap in memory")
        self.refused("w", torch.zeros(6).as_strided((4, 2), (1, 1)), tm.LayoutError, "overlap in memory")
        cut = torch.zeros(4, 2)
        cut.untyped_storage().resize_(8)
        self.refused("w", cut, tm.LayoutError, "storage has 8 bytes")
        freed = torch.zeros(4, 2)
        freed.untyped_storage().resize_(0)
        self.refused("w", freed, tm.LayoutError, "storage has 0 bytes")
        self.refused("w", torch.zeros(4, 2, device="meta"), tm.UnsupportedError, "meta")
        with FakeTensorMode():
            fake = torch.zeros(4, 2)
        self.refused("w", fake, tm.UnsupportedError, "FakeTensor")
        with torch.inference_mode():
            inference = torch.zeros(4, 2)
        self.refused("w", inference, tm.UnsupportedError, "inference")
        for right in (torch.zeros(4, 2), torch.zeros(2, 4).t(), torch.zeros(4, 6)[:, ::3]):
            with tm.open("c.safetensors") as checkpoint:
                checkpoint["w"].read(out=right)
            self.assertEqual(right.flatten().tolist(), list(range(8)))

    def test_unsuitable_numpy_destinations_are_refused(self):
        masked = np.ma.masked_array(np.zeros((4, 2), "f4"), mask=np.ones((4, 2), bool))
        self.refused("w", masked, tm.UnsupportedError, "numpy.ma")
        base = np.zeros(6, "f4")
        overlapping = np.lib.stride_tricks.as_strided(base, (4, 2), (4, 4))
        self.refused("w", overlapping, tm.LayoutError, "overlap in memory")
        self.refused("w", np.float32(3), tm.Error, "float32")
        frozen = np.zeros((4, 2), "f4")
        frozen.flags.writeable = False
        self.refused("w", frozen, tm.UnsupportedError, "read-only")
        self.refused("w", np.zeros((4, 2), ">f4"), tm.UnsupportedError, "big-endian")
        self.refused("w", [[0.0] * 2] * 4, tm.InvalidArgumentError, "list")
        for right in (np.zeros((4, 2), "f4"), np.zeros((2, 4), "f4").T, np.zeros((4, 6), "f4")[:, ::-3]):
            with tm.open("c.safetensors") as checkpoint:
                checkpoint["w"].read(out=right)
            self.assertEqual(right.flatten().tolist(), list(range(8)))


if __name__ == "__main__":
    unittest.main()
