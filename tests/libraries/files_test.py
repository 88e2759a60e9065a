# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save, safetensors, NumPy and zarr, read in place."""

import argparse
import collections
import json

import libraries

libraries.need("torch", "safetensors", "zarr")

import numpy as np  # noqa: E402
import safetensors.numpy  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import zarr  # noqa: E402

import formula  # noqa: E402
import make_torch  # noqa: E402

ALL = formula.expected(formula.MODEL)
NUMPY = {"bool": "?", "u8": "u1", "i8": "i1", "i16": "<i2", "u16": "<u2", "i32": "<i4", "i64": "<i8", "f16": "<f2",
         "f32": "<f4", "f64": "<f8", "c64": "<c8"}


def array(key, dtype, shape, of=None):
    values = formula.values(key, dtype, shape)
    return values.reshape(-1).view(of or NUMPY[dtype]).reshape(shape)


class TorchSave(libraries.LibraryTest):
    def tensors(self):
        return {key: make_torch.laid_out(make_torch.tensor(key, *spec[:2]), spec[2])
                for key, spec in formula.MODEL.items()}

    def test_reads_a_torch_state_dict(self):
        for name in ("model.pt", "pytorch_model.bin", "model.pth"):
            torch.save(self.tensors(), self.dir / name)
        self.check(self.dir / "model.pt", ALL)
        self.check_list(self.dir / "pytorch_model.bin", ALL)
        self.check_load(self.dir / "model.pth", ALL)

    def test_reads_a_nested_training_state(self):
        """Nested, with parameters, shared storages, windows, and what is no tensor."""
        base = make_torch.tensor("base", "f32", (20, 12))
        state = collections.OrderedDict(
            model=collections.OrderedDict(
                a=torch.nn.Parameter(base), tied=base, rows=base[3:7], columns=base[:, 2:5], every=base[::2, ::3],
                turned=base.t(), wide=base[0].expand(4, 12)),
            optimizer={"state": {0: {"step": torch.tensor(5), "exp_avg": make_torch.tensor("avg", "bf16", (8, 4))}},
                       "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]},
            args=argparse.Namespace(lr=3, name="x"), epoch=4)
        torch.save(state, self.dir / "training.pt")
        values = formula.values("base", "f32", (20, 12))
        want = {
            "model.a": values, "model.tied": values, "model.rows": values[3:7], "model.columns": values[:, 2:5],
            "model.every": values[::2, ::3], "model.turned": values.transpose(1, 0, 2),
            "model.wide": np.broadcast_to(values[0], (4, 12, 4)),
            "optimizer.state.0.exp_avg": formula.values("avg", "bf16", (8, 4)),
            "optimizer.state.0.step": np.frombuffer(np.int64(5).tobytes(), "u1"),
        }
        lines = {line["key"]: line for line in self.json_lines("ls", self.dir / "training.pt")}
        self.assertEqual(set(lines), set(want))
        for key, value in want.items():
            self.assertEqual(self.run_tool("cat", self.dir / "training.pt", key, text=False).stdout,
                             np.ascontiguousarray(value).tobytes(), key)
        for key in ("model.turned", "model.every", "model.columns"):
            self.assertEqual(self.run_tool("cat", self.dir / "training.pt", key + "[1:3,1:2]", text=False).stdout,
                             np.ascontiguousarray(want[key][1:3, 1:2]).tobytes(), key)
        self.run_tool("verify", self.dir / "training.pt")

    def test_flipped_byte_is_detected(self):
        torch.save({"w": make_torch.tensor("w", "f32", (64, 64))}, self.dir / "w.pt")
        raw = bytearray((self.dir / "w.pt").read_bytes())
        raw[raw.index(formula.raw("w", "f32", (64, 64))[:64]) + 5000] ^= 4
        (self.dir / "w.pt").write_bytes(raw)
        self.run_tool("verify", self.dir / "w.pt", expect=1)


class Safetensors(libraries.LibraryTest):
    def test_reads_one_safetensors_file(self):
        safetensors.torch.save_file({key: make_torch.tensor(key, *spec) for key, spec in ALL.items()
                                     if spec[0] != "c64"}, self.dir / "model.safetensors", {"format": "pt"})
        self.check(self.dir / "model.safetensors", {k: s for k, s in ALL.items() if s[0] != "c64"})

    def test_reads_a_directory_of_parts(self):
        folder = self.dir / "hf"
        folder.mkdir()
        names, parts = {}, [{}, {}, {}]
        some = {key: spec for key, spec in ALL.items() if spec[0] in NUMPY and spec[0] != "c64"}
        for number, (key, spec) in enumerate(some.items()):
            parts[number % 3][key] = array(key, *spec)
            names[key] = f"model-{number % 3 + 1:05d}-of-00003.safetensors"
        for number, part in enumerate(parts):
            safetensors.numpy.save_file(part, folder / f"model-{number + 1:05d}-of-00003.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
        (folder / "config.json").write_text("{}")
        self.check(folder, some)
        self.check_refused_when_changed(folder, "model-00001-of-00003.safetensors", next(iter(some)), some)


class Numpy(libraries.LibraryTest):
    def test_reads_npz(self):
        some = {key: spec for key, spec in ALL.items() if spec[0] in NUMPY}
        np.savez(self.dir / "model.npz", **{key: array(key, *spec) for key, spec in some.items()})
        self.check(self.dir / "model.npz", some)

    def test_reads_column_major_arrays(self):
        np.savez(self.dir / "model.npz", w=np.asfortranarray(array("w", "f32", (9, 14))))
        self.check(self.dir / "model.npz", {"w": ("f32", (9, 14))}, adopted=False)

    def test_compressed_npz_is_refused(self):
        np.savez_compressed(self.dir / "model.npz", w=np.zeros(1000))
        self.assertRegex(self.run_tool("ls", self.dir / "model.npz", expect=2).stderr, "(?i)compress|deflate")


class Zarr(libraries.LibraryTest):
    """Megatron-Core's form of the first years: a version 2 array a key, by zarr's own writer."""

    def test_reads_zarr_arrays(self):
        folder = self.dir / "iter_0000005"
        folder.mkdir()
        (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
        torch.save({"iteration": 5, "lr": 0.5}, folder / "common.pt")
        specs = {"model.a.weight": ("f32", (10, 6), (4, 3)), "model.b": ("f16", (7,), (3,)),
                 "model.c": ("i64", (4, 5, 6), (2, 5, 4)), "model.bf16": ("bf16", (6, 8), (4, 3)),
                 "model.bytes": ("u8", (9, 2), (5, 2)), "model.scalar": ("f32", (), ())}
        for key, (dtype, shape, chunks) in specs.items():
            values = array(key, dtype, shape, "<u2" if dtype == "bf16" else None)
            out = zarr.open_array(str(folder / key), mode="w", shape=shape, chunks=chunks, dtype=values.dtype,
                                  compressor=None, fill_value=None, zarr_format=2)
            out[...] = values
            if dtype == "bf16":  # What Megatron-Core made of zarr: the name of a type that zarr has not.
                path = folder / key / ".zarray"
                path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
        self.check(folder, {key: spec[:2] for key, spec in specs.items()})


if __name__ == "__main__":
    libraries.main()
