# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other programs from Python: a hub's cache, roots, folders with several sets of weights,
element types that NumPy or torch lacks."""

import json
import os
import pickle
import struct
import subprocess
import unittest
import warnings

import support

import tensormount as tm

try:
    import torch
except ImportError:
    torch = None

W = struct.pack("<3f", 1, 2, 3)
OTHER = struct.pack("<3f", 7, 7, 7)


def put(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def run(*arguments):
    return subprocess.run([support.command(), *arguments], capture_output=True, check=True)


class Foreign(support.Folder):
    def tensors(self, path, tensors):
        put(path, "")
        support.write_safetensors(path, tensors)

    def test_hub_cache_opens_without_options(self):
        self.tensors("hub/models--x/blobs/aaaa", {"w": ("F32", (3,), W)})
        snapshot = "hub/models--x/snapshots/0123"
        put(f"{snapshot}/README.md", "")
        os.symlink("../../blobs/aaaa", f"{snapshot}/model.safetensors")
        with tm.open(snapshot) as checkpoint:
            self.assertEqual(checkpoint["w"].read_bytes(), W)
            self.assertTrue(checkpoint.verify()["whole"])
        with tm.open(f"{snapshot}/model.safetensors") as checkpoint:
            self.assertEqual(checkpoint.keys(), ["w"])

    def test_roots_allow_links_out(self):
        self.tensors("nfs/blobs/aaaa", {"w": ("F32", (3,), W)})
        put("ssd/snap/README.md", "")
        os.symlink("../../nfs/blobs/aaaa", "ssd/snap/model.safetensors")
        with self.assertRaises(tm.PermissionDeniedError):
            tm.open("ssd/snap")
        for roots in (["nfs/blobs"], ["ssd", "nfs"]):
            with tm.open("ssd/snap", roots=roots) as checkpoint:
                self.assertEqual(checkpoint["w"].read_bytes(), W)
                self.assertTrue(checkpoint.verify()["whole"])
                with pickle.loads(pickle.dumps(checkpoint)) as again:
                    self.assertEqual(again["w"].read_bytes(), W)
                checkpoint._handle.process = 0  # As in a forked child, which opens it anew.
                self.assertEqual(checkpoint["w"].read_bytes(), W)
        self.assertTrue(tm.verify("ssd/snap", roots=["nfs"])["whole"])
        for call in (tm.verify, lambda one, **options: tm.diff(one, one, **options),
                     lambda one, **options: tm.adopt(one, "ssd/store/x", **options),
                     lambda one, **options: tm.export(one, "ssd/out.safetensors", **options)):
            with self.assertRaises(tm.PermissionDeniedError):
                call("ssd/snap")
            with self.assertRaisesRegex(tm.InvalidArgumentError, "a list of str"):
                call("ssd/snap", roots="nfs")
            call("ssd/snap", roots=["nfs"])
        # A load looks at what is stored by the same roots: a value that is not is no value that stays.
        with self.assertRaisesRegex(tm.KeyNotFoundError, "step"):
            tm.load({"step": 5}, "ssd/snap", roots=["nfs"])
        if torch is not None:
            import torch.distributed.checkpoint as dcp

            state = {"w": torch.zeros(3)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                dcp.load(state, storage_reader=tm.torch.Reader("ssd/snap", roots=["nfs"]), no_dist=True)
            self.assertEqual(state["w"].tolist(), [1, 2, 3])
        with tm.open("ssd/store/x", roots=["nfs"]) as checkpoint:
            self.assertEqual(checkpoint["w"].read_bytes(), W)
        with tm.open("ssd/out.safetensors") as checkpoint:
            self.assertEqual(checkpoint["w"].read_bytes(), W)

    def test_file_selects_one_of_several_weight_sets(self):
        self.tensors("both/model.safetensors", {"w": ("F32", (3,), W)})
        self.tensors("both/one.safetensors", {"w": ("F32", (3,), OTHER), "b": ("U8", (1,), b"b")})
        put("both/model.safetensors.index.json",
            json.dumps({"weight_map": {"w": "one.safetensors", "b": "one.safetensors"}}))
        with self.assertRaises(tm.UnsupportedError) as caught:
            tm.open("both")
        for name in ("model.safetensors", "model.safetensors.index.json"):
            self.assertIn(name, str(caught.exception))
        with tm.open("both", file="model.safetensors") as checkpoint:
            self.assertEqual(checkpoint["w"].read_bytes(), W)
        with tm.open("both", file="model.safetensors.index.json") as checkpoint:
            self.assertEqual(checkpoint["w"].read_bytes(), OTHER)
            self.assertEqual(checkpoint.keys(), ["b", "w"])
        for name, expected in (("model.safetensors", W), ("model.safetensors.index.json", OTHER)):
            self.assertEqual(run("cat", "both", "w", "--file", name).stdout, expected)

    def test_files_beside_the_weights_are_reported(self):
        self.tensors("trainer/checkpoint-20/model.safetensors", {"w": ("F32", (3,), W)})
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            put(f"trainer/checkpoint-20/{name}", "x")
        info = json.loads(run("info", "trainer/checkpoint-20", "--json").stdout)
        self.assertEqual(info["beside"], ["optimizer.pt", "rng_state.pth", "scheduler.pt"])
        told = run("import", "trainer/checkpoint-20", "trainer-store/x")
        self.assertIn(b"optimizer.pt, rng_state.pth, scheduler.pt", told.stderr)


@unittest.skipIf(torch is None, "PyTorch is not there")
class OfTorch(support.Folder):
    def test_f4_pairs_read_as_torch_dtype(self):
        data = bytes(range(12))
        support.write_safetensors("f4.safetensors", {"f4": ("F4", (3, 8), data),
                                                     "w": ("F32", (3,), W)})
        with tm.open("f4.safetensors") as checkpoint:
            read = checkpoint["f4"].torch()
            self.assertEqual((read.dtype, tuple(read.shape)), (torch.float4_e2m1fn_x2, (3, 4)))
            self.assertEqual(bytes(read.view(torch.uint8).flatten().tolist()), data)
            rows = checkpoint["f4"].torch(index=(slice(1, 3), slice(2, 6)))
            self.assertEqual(rows.view(torch.uint8).tolist(), [[5, 6], [9, 10]])
            with self.assertRaises(tm.UnsupportedError):
                checkpoint["f4"].torch(index=(slice(None), slice(1, 5)))
            state = checkpoint.state(torch=True)
            self.assertEqual(state["f4"].dtype, torch.float4_e2m1fn_x2)
            with self.assertLogs("tensormount", "WARNING") as told:
                state = checkpoint.state()
            self.assertIn("f4 (f4)", told.output[0])
            self.assertEqual(state["w"].tolist(), [1, 2, 3])
            self.assertEqual(state["f4"].read_bytes(), data)

    def test_unsupported_dtype_does_not_fail_the_state(self):
        support.write_safetensors("f6.safetensors", {"f6": ("F6_E2M3", (4,), b"abc"),
                                                     "w": ("F32", (3,), W)})
        with tm.open("f6.safetensors") as checkpoint:
            with self.assertLogs("tensormount", "WARNING") as told:
                state = checkpoint.state(torch=True)
            self.assertIn("f6 (f6_e2m3)", told.output[0])
            self.assertEqual(state["w"].tolist(), [1, 2, 3])

    def test_dcp_reads_tensors_beside_f4(self):
        import torch.distributed.checkpoint as dcp

        data = bytes(range(12))
        support.write_safetensors("dcp.safetensors", {"f4": ("F4", (3, 8), data),
                                                      "f6": ("F6_E2M3", (4,), b"abc"),
                                                      "w": ("F32", (3,), W)})
        state = {"w": torch.zeros(3),
                 "f4": torch.zeros((3, 4), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
        dcp.load(state, storage_reader=tm.torch.Reader("dcp.safetensors"), no_dist=True)
        self.assertEqual(state["w"].tolist(), [1, 2, 3])
        self.assertEqual(bytes(state["f4"].view(torch.uint8).flatten().tolist()), data)


if __name__ == "__main__":
    unittest.main()
