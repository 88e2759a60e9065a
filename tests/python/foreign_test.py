# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other programs from Python: a hub's cache, roots, folders with several sets of weights,
element types that NumPy or torch lacks."""

import dataclasses
import json
import os
import pickle
import shutil
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

    def trained(self):
        model = torch.nn.Linear(4, 4)
        optim = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optim.step()
        return model, optim

    def dcp_folder(self, path, **changes):
        """A DCP directory of a trained model, whose optimizer's state dict has `changes`."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        model, optim = self.trained()
        state = {"model": get_model_state_dict(model),
                 "optim": {**get_optimizer_state_dict(model, optim), **changes},
                 "extra": {"step": 3, "list": [1, {"a": 2}]}}
        dcp.save(state, checkpoint_id=path, no_dist=True)
        return state

    def damaged(self):
        """DCP directories whose data file is missing or truncated, each with a part of the message."""
        full = self._testMethodName
        self.dcp_folder(full)
        for how, damage, why in (("gone", os.unlink, "the file is missing"),
                                 ("cut", lambda path: os.truncate(path, 300), "the file ends after 300 bytes")):
            name = f"{full}-{how}"
            shutil.copytree(full, name)
            damage(f"{name}/__0_0.distcp")
            yield name, f"{name}: __0_0.distcp: {why}"

    def test_lost_data_are_not_taken_for_not_stored(self):
        for name, why in self.damaged():
            for policy in ("raise", "log", "return", "ignore"):
                for request, key in (({"model": {"weight": torch.zeros(4, 4)}}, "model.weight"),
                                     ({"extra": {"step": 0}}, "extra.step"),
                                     ({"extra": {"list": [5, 5]}}, "extra.list.0"),
                                     ({"extra": {}}, "extra")):
                    for options in ({}, {"strict_exempt": ["*"]}):
                        with self.subTest(name=name, key=key, policy=policy, **options):
                            with self.assertRaisesRegex(tm.DataLossError, why) as caught:
                                tm.load(request, name, not_stored=policy, **options)
                            self.assertEqual(caught.exception.key, key)
            with self.assertRaisesRegex(tm.DataLossError, why):
                tm.load({}, name, objects=["extra.step"], not_stored="ignore")
            # Keys that were never saved are still not stored.
            with self.assertRaises(tm.KeyNotFoundError):
                tm.load({"other": torch.zeros(1)}, name)
            self.assertEqual(tm.load({"other": 1}, name, not_stored="return").not_stored, ["other"])

    def lost_moments(self):
        """A DCP directory of which the moments alone are lost: another file has them."""
        name = self._testMethodName
        state = self.dcp_folder(name)
        with open(f"{name}/.metadata", "rb") as file:
            metadata = pickle.load(file)
        for index, info in metadata.storage_data.items():
            if "exp_avg" in index.fqn:
                metadata.storage_data[index] = type(info)("__9_0.distcp", info.offset, info.length)
        with open(f"{name}/.metadata", "wb") as file:
            pickle.dump(metadata, file)
        return name, state

    def test_whole_data_load_beside_lost_tensors(self):
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

        name, state = self.lost_moments()
        found = _load_state_dict_from_keys({"model"}, storage_reader=tm.torch.Reader(name))
        self.assertTrue(torch.equal(found["model"]["weight"], state["model"]["weight"]))
        with self.assertRaisesRegex(BaseException, "__9_0.distcp"):
            _load_state_dict_from_keys({"optim"}, storage_reader=tm.torch.Reader(name))
        # An empty container of a request takes plain values, of which none are lost.
        tm.load({}, name, objects=["extra.step"])
        tm.load({"optim": {"state": {}}}, name)
        key = "optim.state.weight.exp_avg"
        for rules in ([{"prefix": "model.weight", "to": key}, {"prefix": key, "to": "model.weight"}], None):
            request = {"model": {"weight": torch.zeros(4, 4)}}
            if rules is None:
                tm.load(request, name)
                continue
            with self.assertRaisesRegex(tm.DataLossError, "__9_0.distcp"):
                tm.load(request, name, key_map=rules, not_stored="return")

    def test_lost_data_have_the_names_of_the_key_map(self):
        name, why = next(self.damaged())
        rules = [{"prefix": "model.", "to": ""}, {"drop": "extra.*"}]
        with self.assertRaisesRegex(tm.DataLossError, why) as caught:
            tm.load({"weight": torch.zeros(4, 4)}, name, key_map=rules, not_stored="ignore")
        self.assertEqual(caught.exception.key, "weight")
        self.assertEqual(tm.load({"extra": {"step": 7}}, name, key_map=rules, not_stored="ignore").state,
                         {"extra": {"step": 7}})

    def test_optional_does_not_excuse_lost_data_of_a_training_state(self):
        for name, why in self.damaged():
            for options in ({}, {"optional": ["*"]}, {"optional": ["*"], "not_stored": "ignore"}):
                model, optim = self.trained()
                before = repr((model.state_dict(), optim.state_dict()))
                for wanted in ({"model": model}, {"model": model, "optim": optim}, {"extra": {"step": 0}}):
                    with self.subTest(name=name, wanted=list(wanted), **options):
                        with self.assertRaisesRegex(tm.DataLossError, why):
                            tm.torch.load(name, **wanted, **options)
                self.assertEqual(repr((model.state_dict(), optim.state_dict())), before)

    def test_lost_moments_are_not_taken_for_never_saved(self):
        # The file of one moment is missing; model and groups are whole.
        import torch.distributed.checkpoint as dcp

        self.dcp_folder("moments")
        reader = dcp.FileSystemReader("moments")
        metadata = reader.read_metadata()
        data = metadata.storage_data
        for index, info in list(data.items()):
            if index.fqn == "optim.state.weight.exp_avg":
                data[index] = type(info)(relative_path="lost.distcp", offset=info.offset, length=info.length)
        with open("moments/.metadata", "wb") as file:
            pickle.dump(metadata, file)
        model, optim = self.trained()
        with self.assertRaisesRegex(tm.DataLossError, r"lost\.distcp.*optim\.state\.weight"):
            tm.torch.load("moments", model=model, optim=optim, optional=["*"])
        tm.torch.load("moments", model=model)
        # A tensor of which a part is lost can be opened; reads of the part fail.
        whole = {"a": torch.arange(8.0), "b": torch.arange(4.0)}
        dcp.save(whole, checkpoint_id="holes", no_dist=True)
        metadata = dcp.FileSystemReader("holes").read_metadata()
        chunk, = metadata.state_dict_metadata["a"].chunks
        chunk.sizes = torch.Size([4])
        index, = (one for one in metadata.storage_data if one.fqn == "a")
        metadata.state_dict_metadata["a"].chunks.append(
            type(chunk)(offsets=torch.Size([4]), sizes=torch.Size([4])))
        metadata.storage_data[dataclasses.replace(index, offset=torch.Size([4]), index=1)] = dataclasses.replace(
            metadata.storage_data[index], relative_path="lost.distcp")
        with open("holes/.metadata", "wb") as file:
            pickle.dump(metadata, file)
        for options in ({}, {"not_stored": "ignore"}):
            with self.assertRaisesRegex(tm.DataLossError, "a"):
                tm.load({"a": torch.zeros(8)}, "holes", **options)
            self.assertEqual(tm.load({"b": torch.zeros(4)}, "holes", **options).state["b"].tolist(), [0, 1, 2, 3])

    def test_dcp_reader_reports_lost_data(self):
        import torch.distributed.checkpoint as dcp

        for name, why in self.damaged():
            for state in ({"model": {"weight": torch.zeros(4, 4)}}, {"extra": {"step": 0}}):
                for partial in (False, True):
                    with self.subTest(name=name, state=list(state), partial=partial):
                        with self.assertRaises(BaseException) as caught:
                            dcp.load(state, storage_reader=tm.torch.Reader(name), no_dist=True,
                                     planner=dcp.DefaultLoadPlanner(allow_partial_load=partial))
                        self.assertRegex(str(caught.exception), why)

    def test_tensors_of_a_missing_shard_are_lost(self):
        put("shards/model-1.safetensors", "")
        support.write_safetensors("shards/model-1.safetensors", {"w": ("F32", (3,), W)})
        put("shards/model.safetensors.index.json",
            json.dumps({"weight_map": {"w": "model-1.safetensors", "b": "model-2.safetensors"}}))
        state = {"w": torch.zeros(3)}
        tm.load(state, "shards")
        self.assertEqual(state["w"].tolist(), [1, 2, 3])
        with self.assertRaisesRegex(tm.DataLossError, "model-2.safetensors.*lost: b"):
            tm.load({"b": torch.zeros(3)}, "shards", not_stored="ignore")
        self.assertEqual(tm.load({"c": torch.zeros(3)}, "shards", not_stored="return").not_stored, ["c"])

    def test_saved_empty_groups_are_refused_before_the_load(self):
        state = self.dcp_folder("dcp", param_groups=[])
        tm.save(state, "store/a")
        for source in ("dcp", "store/a"):
            for options in ({}, {"optional": ["*"]}):
                model, optim = self.trained()
                before = repr((model.state_dict(), optim.state_dict()))
                with self.subTest(source=source, **options):
                    with self.assertRaisesRegex(tm.LayoutError, "parameter groups: .*empty list"):
                        tm.torch.load(source, model=model, optim=optim, **options)
                    self.assertEqual(repr((model.state_dict(), optim.state_dict())), before)


if __name__ == "__main__":
    unittest.main()
