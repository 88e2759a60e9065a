# SPDX-License-Identifier: Apache-2.0
"""Numbers of tensors: diff --stats and stats --full against NumPy and exact sums, for every dtype.

usage: statistics_test.py [--cases N] [--seed N] [unittest arguments]
"""

import argparse
import math
import pathlib
import shutil
import sys

import ml_dtypes
import numpy as np

import harness

# Name in safetensors, its NumPy type, bits of an element.
DTYPES = {
    "BOOL": (np.bool_, 8), "I8": (np.int8, 8), "U8": (np.uint8, 8), "I16": (np.int16, 16), "U16": (np.uint16, 16),
    "I32": (np.int32, 32), "U32": (np.uint32, 32), "I64": (np.int64, 64), "U64": (np.uint64, 64),
    "F16": (np.float16, 16), "BF16": (ml_dtypes.bfloat16, 16), "F32": (np.float32, 32), "F64": (np.float64, 64),
    "F8_E4M3": (ml_dtypes.float8_e4m3fn, 8), "F8_E5M2": (ml_dtypes.float8_e5m2, 8),
    "F8_E8M0": (ml_dtypes.float8_e8m0fnu, 8), "F8_E4M3FNUZ": (ml_dtypes.float8_e4m3fnuz, 8),
    "F8_E5M2FNUZ": (ml_dtypes.float8_e5m2fnuz, 8), "F6_E2M3": (ml_dtypes.float6_e2m3fn, 6),
    "F6_E3M2": (ml_dtypes.float6_e3m2fn, 6), "F4": (ml_dtypes.float4_e2m1fn, 4), "C64": (np.complex64, 64),
}
INTEGERS = {"BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"}
FLOATS = [name for name in DTYPES if name not in INTEGERS and name != "C64"]
GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "foreign"
CASES = 300
SEED = 1
EPS = 1e-12


def codes(dtype, count, raw):
    """The bits of each element, as integers."""
    bits = DTYPES[dtype][1]
    if bits >= 8:
        return np.frombuffer(raw, f"<u{bits // 8}")
    stream = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little").reshape(count, bits)
    return (stream << np.arange(bits, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)


def pack(dtype, elements):
    """The stored bytes of a NumPy array."""
    bits = DTYPES[dtype][1]
    if bits >= 8:
        return elements.tobytes()
    stream = np.unpackbits(elements.view(np.uint8).reshape(-1, 1), axis=1, bitorder="little")[:, :bits]
    return np.packbits(stream.reshape(-1), bitorder="little").tobytes()


def values(dtype, count, raw):
    """The stored values: exact integers, or doubles. Complex numbers are two values each."""
    kind, bits = DTYPES[dtype]
    if dtype == "BOOL":
        return np.frombuffer(raw, np.uint8) != 0
    array = codes(dtype, count, raw).view(kind) if bits < 8 else \
        np.frombuffer(raw, np.float32 if dtype == "C64" else kind)
    with np.errstate(invalid="ignore"):  # Signalling NaNs.
        return array if dtype in INTEGERS else array.astype(np.float64)


def exact_integers(array):
    """Integers whose sums and differences are exact in NumPy: of Python where 64 bits do not suffice."""
    return array.astype(object if array.dtype.itemsize == 8 else np.int64)


def power_for(largest):
    """A power of two: values divided by it have squares that neither overflow nor vanish."""
    return math.ldexp(1.0, min(1000, max(-1000, math.frexp(largest)[1])))


def exact_mean(floats):
    """(mean, mean of the magnitudes) of finite doubles."""
    if len(floats) == 0:
        return 0.0, 0.0
    scale = power_for(np.abs(floats).max())
    scaled = floats / scale
    return math.fsum(scaled) / len(floats) * scale, math.fsum(np.abs(scaled)) / len(floats) * scale


def exact_norm(floats):
    """(mantissa, power of two) of the Euclidean norm."""
    if len(floats) == 0:
        return 0.0, 1.0
    scale = power_for(np.abs(floats).max())
    return math.sqrt(math.fsum((floats / scale) ** 2)), scale


def product(number):
    mantissa, scale = number
    with np.errstate(over="ignore"):
        return float(np.float64(mantissa) * np.float64(scale))


def random_bytes(rng, dtype, shape):
    """Stored bytes of one of several kinds of values."""
    count = math.prod(shape)
    kind, bits = DTYPES[dtype]
    pick = rng.integers(6)
    if dtype == "BOOL":
        return rng.integers(0, 3 if pick == 0 else 2, count, dtype=np.uint8).tobytes()
    if pick == 0 or (pick == 1 and dtype in INTEGERS):  # Any bits: NaN with payloads, infinities, subnormals.
        return rng.integers(0, 256, count * bits // 8, dtype=np.uint8).tobytes()
    if dtype in INTEGERS:
        low, high = (0, 5) if pick == 2 else (np.iinfo(kind).min, np.iinfo(kind).max)
        return np.full(count, rng.integers(low, high, dtype=kind)).tobytes() if pick == 3 else \
            rng.integers(low, high, count, dtype=kind).tobytes()
    floats = rng.standard_normal(count * (2 if dtype == "C64" else 1))
    if pick == 1:
        floats = np.full_like(floats, rng.standard_normal())
    elif pick == 2:  # Zeros of both signs, and a few special values.
        floats = rng.choice([0.0, -0.0, 0.0, 1.5, np.nan, np.inf, -np.inf], floats.shape)
    elif pick == 3:  # Of any magnitude that doubles have; most are infinite or zero in smaller types.
        floats *= 10.0 ** rng.integers(-320, 308)
    elif pick == 4:
        floats *= 10.0 ** rng.integers(-8, 5)
    with np.errstate(over="ignore", invalid="ignore"):
        return pack(dtype, floats.astype(np.float32).view(np.complex64) if dtype == "C64" else floats.astype(kind))


def random_shape(rng, dtype):
    pick = rng.integers(12)
    if pick == 0:
        return (0, 4)
    if pick == 1 and DTYPES[dtype][1] >= 8:
        return ()
    rank = int(rng.integers(1, 4))
    shape = [int(n) for n in rng.integers(1, 40, rank)]
    if pick == 2:
        shape[0] = int(rng.integers(65536, 200000)) // math.prod(shape[1:]) + 1
    if DTYPES[dtype][1] < 8:
        shape[-1] = shape[-1] * 4
    return tuple(shape)


def random_pair(rng):
    """Two tensors of one shape: (dtype, shape, bytes) each."""
    dtype = str(rng.choice(list(DTYPES)))
    shape = random_shape(rng, dtype)
    first = (dtype, shape, random_bytes(rng, dtype, shape))
    pick = rng.integers(8)
    if pick == 0 and dtype != "C64":
        other = str(rng.choice([d for d in DTYPES if d != "C64" and (DTYPES[d][1] >= 8 or DTYPES[dtype][1] < 8)]))
        return first, (other, shape, random_bytes(rng, other, shape))
    if pick == 1:
        return first, first
    if pick == 2 or dtype == "BOOL":
        return first, (dtype, shape, random_bytes(rng, dtype, shape))
    raw = bytearray(first[2])  # Some bits of some bytes.
    for at in rng.integers(0, max(1, len(raw)), min(len(raw), int(rng.integers(1, 200)))) if raw else ():
        raw[at] ^= 1 << int(rng.integers(8))
    return first, (dtype, shape, bytes(raw))


class Statistics(harness.ToolTest):
    def near(self, got, want, allowed, what):
        if isinstance(got, str):
            self.assertEqual(got, "inf", what)
            got = math.inf
        if math.isinf(want) or math.isinf(got):
            return self.assertEqual(got, want, what)
        self.assertLessEqual(abs(got - want), allowed, (what, got, want))

    def check_statistics(self, line, dtype, shape, raw):
        what = (line["key"], dtype, shape)
        v = values(dtype, math.prod(shape), raw)
        integers = dtype in INTEGERS
        finite = v if integers else v[np.isfinite(v)]
        counts = {"count": len(v), "zeros": int((v == 0).sum())}
        if not integers:
            counts |= {"nan": int(np.isnan(v).sum()), "posinf": int((v == np.inf).sum()),
                       "neginf": int((v == -np.inf).sum())}
            kind = np.float32 if dtype == "C64" else DTYPES[dtype][0]
            smallest = 0.0 if dtype == "F8_E8M0" else float(ml_dtypes.finfo(kind).smallest_normal)
            counts["subnormals"] = int(((v != 0) & (np.abs(v) < smallest)).sum())
        self.assertEqual({name: line[name] for name in counts}, counts, what)
        if len(finite) == 0:
            self.assertEqual([line[n] for n in ("min", "max", "absmax", "mean", "norm")], [None] * 4 + [0], what)
            return
        low, high = (int(finite.min()), int(finite.max())) if integers else (finite.min(), finite.max())
        self.assertEqual((line["min"], line["max"], line["absmax"]), (low, high, max(-low, high)), what)
        self.assertEqual(math.copysign(1, line["min"]) < 0, low < 0, what)
        floats = finite.astype(np.float64)
        if integers:
            exact = int(exact_integers(finite).sum())
            self.assertEqual(line["sum"], str(exact), what)
            self.near(line["mean"], exact / len(finite), abs(exact / len(finite)) * 1e-15, what)
        else:
            mean, size = exact_mean(floats)
            self.near(line["mean"], mean, EPS * size + 5e-324, (what, "mean"))
        norm = product(exact_norm(floats))
        self.near(line["norm"], norm, EPS * norm + 5e-324 if norm < math.inf else 0, (what, "norm"))

    def check_change(self, stats, a, b):
        (dtype_a, shape, raw_a), (dtype_b, _, raw_b) = a, b
        count = math.prod(shape)
        what = (dtype_a, dtype_b, shape)
        va, vb = values(dtype_a, count, raw_a), values(dtype_b, count, raw_b)
        both = dtype_a in INTEGERS and dtype_b in INTEGERS and (dtype_a == "U64") == (dtype_b == "U64")
        fa, fb = va.astype(np.float64), vb.astype(np.float64)
        if dtype_a == dtype_b:
            of_bits = "F32" if dtype_a == "C64" else dtype_a
            changed = codes(of_bits, count, raw_a) != codes(of_bits, count, raw_b)
        elif both:
            changed = exact_integers(va) != exact_integers(vb)
        else:
            changed = (fa != fb) & ~(np.isnan(fa) & np.isnan(fb))
        finite = np.isfinite(fa) & np.isfinite(fb)
        self.assertEqual((stats["values"], stats["changed"], stats["non_finite"]),
                         (len(va), int(changed.sum()), int((~finite).sum())), what)
        fa, fb = fa[finite], fb[finite]
        if len(fa) == 0:
            self.assertEqual([stats[n] for n in ("max_abs", "mean_abs", "l2_change", "cosine")], [0, 0, 0, 1], what)
            return
        # Differences of half the values neither overflow nor, where that matters, lose bits.
        half = 0.5 if max(np.abs(fa).max(), np.abs(fb).max()) > 1e308 else 1.0
        if both:
            exact = np.abs(exact_integers(vb) - exact_integers(va))
            self.assertEqual(stats["max_abs"], exact.max(), what)
            change = exact.astype(np.float64)
            mean = int(exact.sum()) / len(exact)
            self.near(stats["mean_abs"], mean, EPS * mean, (what, "mean"))
        else:
            change = np.abs(fb * half - fa * half)
            with np.errstate(over="ignore"):
                largest = float(change.max() / half)
            self.near(stats["max_abs"], largest, 0, (what, "max"))
            mean, scale = exact_mean(change)[0], 1 / half
            mean = product((mean, scale))
            self.near(stats["mean_abs"], mean, EPS * mean + 5e-324 if mean < math.inf else 0, (what, "mean"))
        d, a_norm, b_norm = exact_norm(change), exact_norm(fa), exact_norm(fb)
        if d[0] == 0:
            want = 0.0
        elif a_norm[0] == 0:
            want = math.inf
        else:
            want = product((d[0] / a_norm[0], 1 / half))
            for factor in (d[1], 1 / a_norm[1]):
                want = product((want, factor))
        if 1e-290 < want < 1e290 or want in (0, math.inf):
            self.near(stats["l2_change"], want, EPS * want if want < math.inf else 0, (what, "l2"))
        if a_norm[0] and b_norm[0]:
            products = math.fsum((fa / a_norm[1]) * (fb / b_norm[1])) / a_norm[0] / b_norm[0]
            self.near(stats["cosine"], products, EPS, (what, "cosine"))
        else:
            self.assertEqual(stats["cosine"], 1 if a_norm[0] == b_norm[0] else 0, what)

    def without_kept(self, lines):
        return [{name: value for name, value in line.items() if name not in ("kept", "bytes_read")} for line in lines]

    def test_random_tensors_have_the_numbers_of_numpy(self):
        rng = np.random.default_rng(SEED)
        group = 100
        for begin in range(0, CASES, group):
            pairs = {f"t{i:03}": random_pair(rng) for i in range(min(group, CASES - begin))}
            first, second = self.dir / "first.safetensors", self.dir / "second.safetensors"
            harness.write_safetensors(first, {key: pair[0] for key, pair in pairs.items()})
            harness.write_safetensors(second, {key: pair[1] for key, pair in pairs.items()})
            shutil.rmtree(self.store, ignore_errors=True)
            saved = []
            for name, source in (("a", first), ("b", second)):
                rule = str(rng.choice(["rows", "cols", "flat"]))
                saved.append(self.save(name, "--ranks", str(rng.integers(1, 6)), "--shard", rule, model=source))
            a, b = saved
            with self.subTest(seed=SEED, begin=begin):
                lines = self.json_lines("stats", "--full", a)
                self.assertEqual([line["key"] for line in lines[:-1]], sorted(pairs))
                for line in lines[:-1]:
                    self.check_statistics(line, *pairs[line["key"]][0])
                # The last bit does not depend on the sharding.
                plain = self.json_lines("stats", "--full", first)
                self.assertEqual(self.without_kept(lines), self.without_kept(plain))
                kept = self.json_lines("stats", "--full", a)
                self.assertEqual(self.without_kept(lines), self.without_kept(kept))
                self.assertEqual((kept[-1]["kept"], kept[-1]["bytes_read"]), (len(pairs), 0))

                sources = [(a, b), (first, b), (a, second)]
                runs = [self.json_lines("diff", "--stats", x, y, expect=None) for x, y in sources]
                changes = [{e["key"]: e.get("stats") for e in events if e.get("what") == "tensor"} for events in runs]
                self.assertEqual(changes[1:], [changes[0]] * 2)
                self.assertEqual(sorted(changes[0]), [key for key, (x, y) in pairs.items() if x != y])
                for key, stats in changes[0].items():
                    if math.prod(pairs[key][0][1]) > 0:
                        self.check_change(stats, *pairs[key])
                unchanged = sum(math.prod(x[1]) * (2 if x[0] == "C64" else 1)
                                for x, y in pairs.values() if x == y)
                self.assertEqual(runs[0][-1]["unchanged_values"], unchanged)

    def test_complex_doubles_and_fortran_order_are_measured(self):
        rng = np.random.default_rng(3)
        z = rng.standard_normal((7, 9)) + 1j * rng.standard_normal((7, 9))
        np.savez(self.dir / "z.npz", z=z, f=np.asfortranarray(z.real))
        lines = {line.get("key"): line for line in self.json_lines("stats", "--full", self.dir / "z.npz")}
        self.assertEqual(lines["z"]["count"], 126)
        self.assertEqual((lines["z"]["min"], lines["z"]["max"]), (z.view("f8").min(), z.view("f8").max()))
        self.near(lines["z"]["norm"], np.linalg.norm(z), 1e-12, "z")
        self.near(lines["f"]["norm"], np.linalg.norm(z.real), 1e-12, "f")

    def model_of(self, name, **tensors):
        path = self.dir / f"{name}.safetensors"
        harness.write_safetensors(path, {key: ("F32", x.shape, x.astype("<f4").tobytes()) for key, x in tensors.items()})
        return path

    def test_rows_are_sorted_and_the_model_has_a_line(self):
        ones = np.ones((8, 8))
        a = self.model_of("a", big=ones, little=ones, same=ones, shape=ones, gone=ones)
        b = self.model_of("b", big=ones * 3, little=np.where(np.arange(64).reshape(8, 8) == 5, 1.5, 1), same=ones,
                          shape=np.ones(64), new=ones)
        out = self.run_tool("diff", "--stats", a, b, expect=1).stdout.splitlines()
        self.assertEqual([line.split()[-1] for line in out[:1]], ["NAME"])
        self.assertEqual(out[1].split(), ["~", "100%", "2", "2", "2", "1.0000000", "0", "big"])
        self.assertEqual(out[2:4], ["- gone f32 [8, 8]", "~    1.56%       0.5   0.00781    0.0625  0.9981124       0  little"])
        self.assertEqual(out[4:6], ["+ new f32 [8, 8]", "~ shape: shape [8, 8] and [64]"])
        self.assertRegex(out[6], r"^65 of 192 values changed \(33\.9%\); in the tensors that differ: max 2, mean 1\.00\d*, "
                                 r"L2 change 1\.4\d+, cosine 0\.8\d+, 0 not finite$")
        self.assertTrue(all(len(line) <= 80 for line in out[:6]))
        order = lambda *args: [line.split()[-1] for line in self.run_tool(*args, expect=None).stdout.splitlines()
                               if line.split()[-1] in ("big", "little")]
        self.assertEqual(order("diff", "--stats", "--sort", "l2", b, a), ["big", "little"])
        self.assertEqual(order("diff", "--stats", "--sort", "cosine", a, b), ["little", "big"])
        events = self.json_lines("diff", "--stats", "--sort", "cosine", a, b, expect=1)
        self.assertEqual([e.get("key") for e in events], ["gone", "new", "shape", "little", "big", None])
        self.assertEqual(order("stats", "--full", "--sort", "norm", b), ["big", "little"])
        self.assertEqual(order("stats", "--full", "--sort", "min", b), ["little", "big"])
        self.fails("diff", "--stats", "--sort", "size", a, b, code="INVALID_ARGUMENT",
                   says="must be one of changed, max, mean, l2, cosine, nonfinite")
        self.fails("stats", "--full", "--sort", "size", a, code="INVALID_ARGUMENT", says="must be one of count, zeros")
        self.fails("stats", "--full", "--keys", "none*", a, code="NOT_FOUND", says="no key matches it")
        self.fails("stats", a, code="INVALID_ARGUMENT", says="add --full")
        for wrong in (["diff", "--sort", "max", a, b], ["diff", "--stats", "--values", a, b],
                      ["stats", "--keys", "x", a], ["stats", "--full", "--watch", "1", a]):
            self.assertEqual(self.run_tool(*wrong, expect=2).stdout, "")

    def test_equal_tensors_are_not_read(self):
        a, b = self.save("a", "--ranks", "2"), self.save("b", "--ranks", "3", "--shard", "cols")
        for data in [*(a / "data").iterdir(), *(b / "data").iterdir()]:
            data.unlink()
        lines = self.run_tool("diff", "--stats", a, b).stdout.splitlines()
        values = sum(math.prod(shape) for _, shape, _ in self.tensors.values())
        self.assertEqual(lines[0], f"0 of {values} values changed (0%); in the tensors that differ: max 0, mean 0, "
                                   "L2 change 0, cosine 1.000000000, 0 not finite")

    def test_a_dcp_directory_is_compared_with_its_import(self):
        source = GOLDEN / "dcp-2.13" / "global"
        self.save("a", "--ranks", "3", model=source)
        events = self.json_lines("diff", "--stats", source, self.store / "a")
        self.assertEqual((events[-1]["unchanged_values"], events[-1]["stats"]["changed"]), (232, 0))
        self.assertEqual(self.without_kept(self.json_lines("stats", "--full", source)),
                         self.without_kept(self.json_lines("stats", "--full", self.store / "a")))

    def test_kept_statistics_are_used_replaced_and_removed(self):
        path = self.save("a", "--ranks", "2")
        part = self.json_lines("stats", "--full", "--keys", "*i*", path)
        self.assertEqual(part[-1]["kept"], 0)
        whole = self.json_lines("stats", "--full", path)
        self.assertEqual(whole[-1]["kept"], len(part) - 1)
        (uuid,) = (self.store / ".derived").iterdir()
        file = uuid / "statistics"
        # Nobody reads the data, but with --no-keep.
        data = [(f, f.read_bytes()) for f in (path / "data").iterdir()]
        for f, _ in data:
            f.unlink()
        self.assertEqual(self.without_kept(self.json_lines("stats", "--full", path)), self.without_kept(whole))
        self.run_tool("stats", "--full", "--no-keep", path, expect=2)
        for f, raw in data:
            f.write_bytes(raw)
        good = file.read_bytes()
        for bad in (b"", good[:-1], good[:40], good + b"x", b"TMSTATS2" + good[8:],
                    good[:100] + bytes([good[100] ^ 1]) + good[101:]):
            file.write_bytes(bad)
            result = self.run_tool("stats", "--full", path)
            self.assertIn("damaged, or of another version; the statistics are computed again", result.stderr)
            self.assertEqual(file.read_bytes(), good)
        # Statistics of another checkpoint under this uuid.
        other = self.save("b", model=self.model_of("x", w=np.ones(4)))
        self.run_tool("stats", "--full", other)
        (theirs,) = [d for d in (self.store / ".derived").iterdir() if d != uuid]
        file.write_bytes((theirs / "statistics").read_bytes())
        self.assertIn("another checkpoint", self.run_tool("stats", "--full", path).stderr)
        self.assertEqual(file.read_bytes(), good)
        # The rebuilt index has its place in the same directory.
        (index,) = (path / "index").iterdir()
        self.flip(index, index.stat().st_size // 2)
        self.run_tool("fsck", self.store, "--rebuild", expect=None)
        self.run_tool("stats", "--full", path)
        self.assertEqual(sorted(f.name for f in uuid.iterdir()), ["RECORD", "index", "statistics"])
        self.run_tool("rm", path)
        self.run_tool("gc", self.store, "--grace", "0")
        self.assertEqual(list((self.store / ".derived").iterdir()), [theirs])

    def test_readers_of_a_store_that_they_cannot_write_get_statistics(self):
        path = self.save("a")
        (self.store / ".derived").write_text("not a directory")
        result = self.run_tool("stats", "--full", path)
        self.assertIn("the statistics are not kept", result.stderr)
        plain = self.run_tool("-v", "stats", "--full", self.model)
        self.assertIn("a checkpoint of another program has no place for results", plain.stderr)
        self.assertFalse((self.dir / ".derived").exists())

    def test_damage_is_an_error(self):
        path = self.save("a")
        file = next((path / "data").iterdir())
        self.flip(file, file.stat().st_size - 5)
        self.fails("stats", "--full", path, code="DATA_LOSS", says="checksum mismatch")
        self.fails("diff", "--stats", path, self.model, code="DATA_LOSS", says="checksum mismatch")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seed", type=int, default=SEED)
    options, rest = parser.parse_known_args()
    CASES, SEED = options.cases, options.seed
    sys.argv[1:] = rest
    harness.main()
