# SPDX-License-Identifier: Apache-2.0
"""What `tensormount export` writes, opened by the libraries that the formats belong to."""

import contextlib

import libraries

libraries.need("torch", "safetensors", "zarr")

import numpy as np  # noqa: E402
import safetensors  # noqa: E402
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import zarr  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp  # noqa: E402

import formula  # noqa: E402
import make_torch  # noqa: E402

harness = libraries.harness
# Without the bytes of the large one there is nothing to wait for.
ALL = formula.expected(formula.MODEL)
NUMPY = {"bool": "?", "u8": "u1", "i8": "i1", "i16": "<i2", "u16": "<u2", "i32": "<i4", "i64": "<i8", "f16": "<f2",
         "f32": "<f4", "f64": "<f8", "c64": "<c8"}


def raw_of(tensor):
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Export(libraries.LibraryTest):
    """Of a checkpoint of ours, whose ranks held columns, and of one that torch saved."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        libraries.make("torch", "dcp", cls.made)

    def sources(self):
        plain = self.dir / "plain.safetensors"
        harness.write_safetensors(plain, {key: (formula.DTYPES[dtype][1], shape, formula.raw(key, dtype, shape))
                                          for key, (dtype, shape) in ALL.items()})
        self.run_tool("import", plain, self.dir / "STORE" / "ours", "--ranks", "3", "--shard", "cols")
        return [self.dir / "STORE" / "ours", self.made / "dcp"]

    def exported(self, to, *more, name="out"):
        """(source, what was written) for each source; on three ranks."""
        for number, source in enumerate(self.sources()):
            out = self.dir / f"{number}{name}"
            self.run_tool("export", source, out, "--to", to, "--ranks", "3", *more)
            yield source, out

    def check_tensors(self, found, expected=None):
        expected = ALL if expected is None else expected
        self.assertEqual(set(found), set(expected))
        for key, (dtype, shape) in expected.items():
            self.assertEqual(found[key].dtype, getattr(torch, formula.DTYPES[dtype][2]), key)
            self.assertEqual(tuple(found[key].shape), shape, key)
            self.assertEqual(raw_of(found[key]), formula.raw(key, dtype, shape), key)

    def test_torch_loads_dcp_exports(self):
        exported = list(self.exported("dcp"))
        if libraries.HAVE_FUSE:
            # What a mount shows of them without an export.
            with contextlib.ExitStack() as mounts:
                shown = [(source, mounts.enter_context(self.mounted(source, name=f"MNT{number}")) / "dcp")
                         for number, (source, _) in enumerate(exported)]
                libraries.make("torch", ",".join(f"load@{out}" for _, out in shown), self.dir, 2, 3)
        # Two and three ranks, which hold rows of everything that has rows.
        libraries.make("torch", ",".join(f"load@{out}" for _, out in exported), self.dir, 2, 3)
        for source, out in exported:
            self.check_list(out, ALL)
            self.check_load(out, ALL)
            self.run_tool("diff", source, out)

    def test_safetensors_opens_hf_exports(self):
        for _, out in self.exported("hf", "--hf-part-size", "200K"):
            found = {}
            parts = sorted(out.glob("*.safetensors"))
            self.assertGreater(len(parts), 1)
            self.assertTrue((out / "model.safetensors.index.json").exists())
            for part in parts:
                with safetensors.safe_open(part, "pt") as f:
                    found.update({key: f.get_tensor(key) for key in f.keys()})
            self.check_tensors(found)

    def test_safetensors_opens_safetensors_exports(self):
        for _, out in self.exported("safetensors", name="out.safetensors"):
            with safetensors.safe_open(out, "pt") as f:
                self.check_tensors({key: f.get_tensor(key) for key in f.keys()})

    def test_torch_loads_torch_exports(self):
        for _, out in self.exported("torch", name="out.pt"):
            found = torch.load(out, weights_only=True)
            flat = {}

            def walk(prefix, value):
                if isinstance(value, torch.Tensor):
                    flat[prefix] = value
                elif isinstance(value, dict):
                    for key, inner in value.items():
                        walk(f"{prefix}.{key}" if prefix else str(key), inner)

            walk("", found)
            self.check_tensors({key: value for key, value in flat.items() if key in ALL})
            mapped = torch.load(out, weights_only=True, mmap=True)
            self.assertEqual(set(mapped), set(found))

    def test_numpy_loads_npy_exports(self):
        for _, out in self.exported("npy"):
            files = {str(path.relative_to(out))[:-4]: path for path in out.rglob("*.npy")}
            self.assertEqual(set(files), set(ALL))
            for key, (dtype, shape) in ALL.items():
                array = np.load(files[key], mmap_mode="r" if 0 not in shape else None)
                self.assertEqual(array.shape, shape, key)
                self.assertEqual(np.ascontiguousarray(array).tobytes(), formula.raw(key, dtype, shape), key)
                if dtype in NUMPY:
                    self.assertEqual(array.dtype, np.dtype(NUMPY[dtype]), key)

    def test_zarr_opens_zarr_exports(self):
        for _, out in self.exported("zarr"):
            for key, (dtype, shape) in ALL.items():
                if dtype not in NUMPY:
                    continue
                array = zarr.open_array(str(out / key), mode="r")[...]
                self.assertEqual(np.shape(array), shape, key)
                self.assertEqual(np.ascontiguousarray(array).tobytes(), formula.raw(key, dtype, shape), key)

    def test_torch_save_file_becomes_a_dcp_checkpoint(self):
        """A file that torch.save wrote becomes a checkpoint that any number of ranks can load."""
        flat = {key: make_torch.laid_out(make_torch.tensor(key, dtype, shape), how)
                for key, (dtype, shape, how) in formula.MODEL.items()}
        tied = flat["model.layers.0.attn.qkv"]
        views = {"tied": tied, "turned": tied.t(), "window": tied[3:60:2, 5:9], "rows": tied[10:20], "many": tied[0].expand(5, 48)}
        values = {"step": 7, "lr": 0.5, "name": "x", "betas": (0.9, 0.95)}
        saved = {**formula.nested(flat), "views": {"of one": views}, "values": values, "more": {
            "groups": [{"lr": 0.5, "params": [0, 1]}, {}], "state": {0: {"step": torch.tensor(3.0)}, 1: {"step": 4}},
            "pair": [torch.ones(2), 5], "nothing": {}}}
        torch.save(saved, self.dir / "saved.pt")
        out = self.dir / "out"
        self.run_tool("export", self.dir / "saved.pt", out, "--to", "dcp", "--ranks", "3")
        libraries.make("torch", f"load@{out}", self.dir, 2, 3)
        wanted = {"views": {"of one": {name: torch.full(view.shape, -1.0) for name, view in views.items()}},
                  "values": {name: None for name in values}}
        dcp.load(wanted, checkpoint_id=out, no_dist=True)
        for name, view in views.items():
            self.assertTrue(torch.equal(wanted["views"]["of one"][name].view(torch.int32),
                                        view.contiguous().view(torch.int32)), name)
        self.assertEqual(wanted["values"], values)
        # Under the names that torch gives, but for empty dicts, which theirs loses; and back by theirs.
        torch_save_to_dcp(self.dir / "saved.pt", self.dir / "theirs")
        ours, theirs = (dcp.FileSystemReader(path).read_metadata().planner_data for path in (out, self.dir / "theirs"))
        self.assertEqual({key: path for key, path in ours.items() if key not in ("more.nothing", "more.groups.1")}, theirs)
        dcp_to_torch_save(out, self.dir / "back.pt")
        back = torch.load(self.dir / "back.pt", weights_only=True)

        def walk(path, first, second):
            self.assertIs(type(first), type(second), path)
            if isinstance(first, dict):
                self.assertEqual({str(key) for key in first}, set(second), path)
                for key in first:
                    walk(f"{path}/{key}", first[key], second[str(key)])
            elif isinstance(first, list):
                self.assertEqual(len(first), len(second), path)
                for one, other in zip(first, second):
                    walk(f"{path}/[]", one, other)
            elif isinstance(first, torch.Tensor):
                self.assertEqual((first.dtype, first.shape), (second.dtype, second.shape), path)
                self.assertEqual(raw_of(first), raw_of(second), path)
            else:
                self.assertEqual(first, second, path)

        walk("", saved, back)


if __name__ == "__main__":
    libraries.main()
