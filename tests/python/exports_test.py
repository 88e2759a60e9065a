# SPDX-License-Identifier: Apache-2.0
"""State dicts at random, saved in each way, exported for PyTorch, and read back by PyTorch itself: nested, typed
and tied as they were."""

import collections
import json
import os
import pickle
import shutil
import struct
import subprocess
import unittest

import support
import tensormount as tm

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, load_model, save_model
    from torch.distributed.checkpoint import _version
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
except ImportError as error:
    raise unittest.SkipTest(str(error))
from random_states import FP4, Compared, Maker, difference, has_twins, in_odd_container, in_tuple, leaves, same_tensor, tensor_bytes, tied_groups
from random_states import named as report_names


def content_of(tensor):
    # The format counts elements of FP4, torch pairs.
    shape = list(tensor.shape)
    if tensor.dtype is FP4:
        shape[-1] *= 2
    return tensor.nbytes, shape, tensor_bytes(tensor)


def read_safetensors(path):
    """({name: content}, metadata); where the library of the format reads it, it says the same."""
    with open(path, "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        found[name] = (end - begin, about["shape"], data[begin:end])
    if all(about["dtype"] != "F4" for about in header.values()):
        assert {name: content_of(item) for name, item in load_file(path).items()} == found
    return found, metadata


def zeros_of(state):
    """Its tensors as zeros, in dicts and lists; tuples are one value to DCP."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state.view(torch.uint8)).view(state.dtype) if state.dtype is FP4 else torch.zeros_like(state)
    if isinstance(state, dict):
        made = {key: zeros_of(item) for key, item in state.items()}
        return {key: item for key, item in made.items() if item is not None} or None
    if isinstance(state, list):
        made = [zeros_of(item) for item in state]
        return made if made and all(item is not None for item in made) else None
    return None


def at(state, path):
    for step in path:
        state = state[int(step)] if isinstance(state, list) else {str(key): item for key, item in state.items()}[step]
    return state



class Exports(support.Folder):
    """Each state is saved in one of the ways that there are, exported to each format, and read by the
    library whose format it is. Leaves are counted: a test that compares nothing fails."""

    def test_random_states_export_and_load(self):
        generator, seed = support.seeded()
        self.leaves = collections.Counter()
        ways = [self.of_save, self.of_torch_save, self.of_writer, self.of_torch_file]
        rounds = support.scaled(148 if support.LONG else 60)
        for number in range(rounds):
            with self.subTest(seed=seed, number=number, way=ways[number % 4].__name__):
                maker = Maker(generator.getrandbits(64), fp4=number % 5 == 1)
                ways[number % 4](maker.state(), f"{seed}-{number}")
        # 15 leaves of a state on the average, 5 of them tensors.
        for way in ("save", "torch", "writer", "file"):
            for format in ("torch", "dcp", "tensors")[:3 if way in ("save", "torch") else 2]:
                self.assertGreater(self.leaves[way, format], 2 * rounds // 4, self.leaves)

    def of_save(self, state, name):
        tm.save(state, f"S/{name}")
        self.exact(state, f"S/{name}", "save")

    def of_torch_save(self, state, name):
        model = torch.nn.Module()
        model.embed = torch.nn.Embedding(3, 2)
        model.head = torch.nn.Linear(2, 3, bias=False)
        model.head.weight = model.embed.weight
        tm.torch.save(f"S/{name}", model=model, extra=state)
        whole = {"model": {key: item.detach() for key, item in model.state_dict().items()}, "extra": state}
        whole["model"]["head.weight"] = whole["model"]["embed.weight"]
        self.exact(whole, f"S/{name}", "torch", ordered=False)

    def exact(self, state, source, way, ordered=True):
        """What the Python package saved."""
        if self.export(state, source, "x.pt", "torch") is not None:
            back = torch.load("x.pt", weights_only=True)
            self.assertIsNone(difference(state, back, ordered=ordered))
            self.check_ties(state, back)
            self.leaves[way, "torch"] += len(list(leaves(state)))
        self.to_dcp(state, source, way, exact=True)
        self.to_safetensors(state, source, way)
        self.to_hf(state, source, way)

    def of_writer(self, state, name):
        if has_twins(state):
            return
        dcp.save(state, storage_writer=tm.torch.Writer(f"S/{name}"))
        self.loose(state, f"S/{name}", "writer")

    def of_torch_file(self, state, name):
        torch.save(state, "theirs.pt")
        source = "theirs.pt"
        if name.endswith("3"):  # Each fifth: the command takes its time to begin.
            support.run("import", "theirs.pt", f"S/{name}")
            source = f"S/{name}"
        self.loose(state, source, "file")

    def loose(self, state, source, way):
        """What PyTorch saved: without what is more than plain data, which the report names."""
        report = self.export(state, source, "x.pt", "torch")
        if report is not None:
            self.check(state, torch.load("x.pt", weights_only=True), way, "torch", report)
        self.to_dcp(state, source, way, exact=False)

    def export(self, state, source, to, format):
        """The report; None where the export is refused, as it may be."""
        try:
            return tm.export(source, to, format=format, replace=True)
        except tm.UnsupportedError as error:
            self.assertIn("is used twice", str(error))
            self.assertTrue(has_twins(state))
            return None

    def check(self, state, back, way, format, report):
        compared = Compared(state, back)
        self.assertEqual((compared.other, compared.more), ([], []))
        for path, leaf in compared.lost:
            # Tuples are one value to DCP; readers of torch.save files leave out lists and dicts without tensors
            # of which they do not know some value.
            if not in_odd_container(state, path) and not (way == "writer" and in_tuple(state, path)):
                self.assertNotIsInstance(leaf, (torch.Tensor, int, float, str, bytes), path)
        self.leaves[way, format] += compared.equal
        if way != "writer":  # What is in no file, nobody can name here.
            return
        count, names = report_names(report)
        told = [path for path, leaf in compared.lost if leaf != {}]
        if format == "torch":
            self.assertLessEqual(count, len(told))
            for path in told if count == len(names) else ():
                self.assertTrue(any(".".join(path[:i]) in names for i in range(1, len(path) + 1)), (path, names))

    def to_dcp(self, state, source, way, exact):
        report = self.export(state, source, "x.dcp", "dcp")
        if report is None:
            return
        try:
            dcp_to_torch_save("x.dcp", "x.dcp.pt")
        except dcp.CheckpointException:
            # A list of plain values and empty dicts only, which DCP's own writer cuts and then cannot read. After a
            # failure it would go on to take state dicts apart as PyTorch 2.3 did.
            _version._derived_version = None
            self.assertEqual(way, "writer")
            shutil.rmtree("own.dcp", ignore_errors=True)
            dcp.save(state, checkpoint_id="own.dcp")
            with self.assertRaises(dcp.CheckpointException):
                dcp_to_torch_save("own.dcp", "x.dcp.pt")
            _version._derived_version = None
            return
        back = torch.load("x.dcp.pt", weights_only=False)
        compared = Compared(state, back)
        if has_twins(state):
            self.assertEqual(compared.other, [])
            if exact and (compared.lost or compared.more):
                self.assertIn("several values the same name", str(report["notes"]))
        elif exact:
            self.assertEqual((compared.lost, compared.other, compared.more), ([], [], []))
            self.leaves[way, "dcp"] += compared.equal
        else:
            self.check(state, back, way, "dcp", report)
        # Into the tensors of a state dict of this form, under the names that DCP gives them.
        request = zeros_of(state)
        if request and not has_twins(state):
            dcp.load(request, checkpoint_id="x.dcp")
            for path, leaf in leaves(request):
                self.assertTrue(same_tensor(at(state, path), leaf), path)
            self.assertGreaterEqual(compared.tensors, len(list(leaves(request))))

    def to_safetensors(self, state, source, way):
        """One name of each tensor, the first; the header's metadata have the others."""
        tm.export(source, "x.safetensors", format="safetensors", replace=True)
        found, metadata = read_safetensors("x.safetensors")
        groups = tied_groups(state)
        self.assertEqual(len(found), len(groups))
        self.assertEqual(sorted(map(repr, found.values())),
                         sorted(repr(content_of(group[0][1])) for group in groups))
        if has_twins(state):
            return
        for group in groups:
            names = sorted(".".join(path) for path, _ in group)
            self.assertEqual(found[names[0]], content_of(group[0][1]), names)
            self.assertEqual([metadata.get(name) for name in names[1:]], names[:1] * (len(names) - 1))
        self.leaves[way, "tensors"] += len(groups)

    def to_hf(self, state, source, way):
        """Every name."""
        tm.export(source, "x.hf", format="hf", replace=True)
        found = {}
        for file in os.listdir("x.hf"):
            if file.endswith(".safetensors"):
                found.update(read_safetensors(os.path.join("x.hf", file))[0])
        if not has_twins(state):
            wanted = {".".join(path): content_of(leaf) for group in tied_groups(state) for path, leaf in group}
            self.assertEqual(found, wanted)
        self.leaves[way, "tensors"] += len(found)

    def check_ties(self, state, back):
        """Tensors that were one share their memory again."""
        places = collections.defaultdict(list)

        def walk(value, other):
            if isinstance(value, torch.Tensor):
                if value.numel():
                    places[value.data_ptr()].append(other.data_ptr())
            elif isinstance(value, dict):
                for key in value:
                    walk(value[key], other[key])
            elif isinstance(value, (list, tuple)):
                for x, y in zip(value, other):
                    walk(x, y)

        walk(state, back)
        for found in places.values():
            self.assertEqual(len(set(found)), 1)

    def test_optimizer_state_exports_and_loads(self):
        model = torch.nn.Linear(3, 2)
        optim = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 3)).sum().backward()
        optim.step()
        state = {"model": model.state_dict(), "optimizer": optim.state_dict(), "step": 1}
        torch.save(state, "theirs.pt")
        tm.save(state, "S/optimizer")
        tm.export("theirs.pt", "a.pt", format="torch")
        tm.export("S/optimizer", "b.pt", format="torch")
        tm.Store("S")
        for name in ("a.pt", "b.pt"):
            back = torch.load(name, weights_only=True)
            self.assertIsNone(difference(state, back, ordered=name == "b.pt"))
            fresh = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
            fresh.load_state_dict(back["optimizer"])
            self.assertEqual(len(fresh.state), 2)
            self.assertEqual([float(one["step"]) for one in fresh.state.values()], [1.0, 1.0])

    def test_dcp_loads_an_exported_state(self):
        state = {"model": {"a": torch.ones(2), "b.c": torch.arange(3)}, "optim": {"state": {0: {"m": torch.zeros(2)}}, "groups": [{"lr": 0.5}]},
                 "step": 7, "betas": (0.9, 0.95), "size": torch.Size([2])}
        tm.save(state, "S/dcp")
        dcp.save(state, storage_writer=tm.torch.Writer("S/by-dcp"))
        for name in ("dcp", "by-dcp"):
            tm.export(f"S/{name}", name, format="dcp")
            metadata = dcp.FileSystemReader(name).read_metadata()
            self.assertFalse([key for key in metadata.state_dict_metadata if "tensormount." in key])
            dcp_to_torch_save(name, f"{name}.pt")
            back = torch.load(f"{name}.pt", weights_only=False)
            self.assertIsNone(difference(state, back, text_keys=True))
            report = tm.export(f"S/{name}", f"{name}-plain.pt", format="torch")
            back = torch.load(f"{name}-plain.pt", weights_only=True)
            held = dict(state)
            if name == "by-dcp":  # An object that is more than plain data.
                self.assertIn("cannot store 1 object (size)", str(report))
                del held["size"]
            self.assertIsNone(difference(held, back, text_keys=True))
        # Each name of a tie, over the same bytes.
        head = torch.arange(6.0).reshape(2, 3)
        tied = {"model": {"head": head, "embed": head, "other": torch.ones(1)}, "more": [head]}
        tm.save(tied, "S/tied")
        tm.export("S/tied", "tied", format="dcp")
        fresh = {"model": {name: torch.zeros(2, 3) for name in ("head", "embed")}, "more": [torch.zeros(2, 3)]}
        dcp.load(fresh, checkpoint_id="tied")
        for found in (*fresh["model"].values(), fresh["more"][0]):
            self.assertTrue(torch.equal(found, head))
        with tm.open("tied") as checkpoint:
            self.assertTrue(torch.equal(checkpoint["model.head"].torch(), head))
            self.assertTrue(torch.equal(checkpoint["more.0"].torch(), head))
        self.assertTrue(tm.verify("tied")["whole"])
        into = {"model": {"a": torch.zeros(2), "b.c": torch.zeros(3, dtype=torch.int64)}, "step": 0}
        dcp.load(into, checkpoint_id="dcp")
        self.assertEqual((into["step"], into["model"]["b.c"].tolist()), (7, [0, 1, 2]))

    def test_name_conflicts_of_tensors_and_values_resolve(self):
        ones = torch.ones(2)
        for number, state in enumerate((
            {"a.b": ones, "a": {"b": bytearray(b"x"), "c": ones + 1}}, {"a.b": ones, "a": {"b": 5, "c": ones + 1}},
            {"model": {"w": ones}, "sched": {0.5: 0.1, None: ones}, "size": torch.Size([2]), "n": {0: {"m": ones}}},
            {"sched": {True: torch.float16}, "w": ones},
        )):
            tm.save(state, f"S/shared-{number}")
            tm.export(f"S/shared-{number}", f"shared-{number}.pt", format="torch")
            back = torch.load(f"shared-{number}.pt", weights_only=True)
            for path in (("a", "b"), ("a", "c"), ("a.b",), ("model", "w"), ("size",), ("n", 0, "m"), ("w",)):
                wanted, found = state, back
                for key in path:
                    wanted = wanted.get(key) if isinstance(wanted, dict) else None
                    found = found.get(key) if isinstance(found, dict) else None
                if isinstance(wanted, bytearray):
                    self.assertIsNone(found)
                elif wanted is not None:
                    self.assertIsNone(difference(wanted, found), (number, path))

    def test_unsupported_values_are_reported(self):
        import numpy

        state = {"w": torch.ones(1), "fine": numpy.float32(0.5), "odd": {"big": 1 << 80, "dtype": numpy.dtype("f4")}}
        tm.save(state, "S/odd")
        done = support.run("export", "S/odd", "odd.pt", "--to", "torch")
        del done
        back = torch.load("odd.pt", weights_only=True)
        self.assertEqual((back["fine"], list(back)), (0.5, ["w", "fine"]))
        report = tm.export("S/odd", "again.pt", format="torch")
        self.assertIn("odd.big, odd.dtype", str(report))


class ReaderOfOthers(support.Folder):
    """tm.torch.Reader gives DCP the names and paths that the state dict had, whoever wrote it."""

    def test_torch_reads_saved_names_and_paths(self):
        w = torch.arange(4.0)
        state = {"model": {"a.b": w, "c": torch.ones(2), "tied": w}, "step": 7,
                 "optim": {"state": {0: {"m": torch.zeros(2), "step": 3}}, "groups": [{"lr": 0.5, "params": [0, 1]}],
                           "none": [], "odd": ["plain", {}], "tensors": [{}, torch.ones(1)]}}
        dcp.save(state, checkpoint_id="theirs")
        dcp.save(state, storage_writer=tm.torch.Writer("S/writer"))
        torch.save(state, "file.pt")
        tm.save(state, "S/own")
        for source in ("S/own", "theirs"):
            tm.export(source, f"{os.path.basename(source)}.dcp", format="dcp")
        own = {"S/own", "file.pt", "own.dcp"}
        for source in ("theirs", "S/writer", "file.pt", "S/own", "own.dcp", "theirs.dcp"):
            with self.subTest(source):
                metadata = tm.torch.Reader(source).read_metadata()
                self.assertFalse([key for key in metadata.state_dict_metadata if "tensormount." in key or "planner_data" in key])
                for key in ("model", "model.a.b", "optim.groups"):
                    found = _load_state_dict_from_keys(key, storage_reader=tm.torch.Reader(source))
                    wanted = {name: item for name, item in state.items() if key.startswith(name)}
                    compared = Compared(wanted, found)
                    self.assertEqual((compared.other, compared.more), ([], []))
                    prefix = tuple(key.split(".", 1))
                    self.assertFalse([path for path, _ in compared.lost if path[:len(prefix)] == prefix], key)
                    self.assertGreater(compared.equal, 0)
                if source in own:  # DCP's writer cuts what its readers cannot put together.
                    found = _load_state_dict_from_keys(None, storage_reader=tm.torch.Reader(source))
                    compared = Compared(state, found)
                    self.assertEqual((compared.lost, compared.other, compared.more), ([], [], []))
                    self.assertGreater(compared.equal, 12)
                into = {"model": {"a.b": torch.zeros(4), "tied": torch.zeros(4)}, "step": 0,
                        "optim": {"groups": [{"lr": 0.0, "params": []}]}}
                dcp.load(into, storage_reader=tm.torch.Reader(source))
                self.assertEqual((into["step"], into["optim"]["groups"]), (7, state["optim"]["groups"]))
                for name in into["model"]:
                    self.assertTrue(torch.equal(into["model"][name], w))

    def test_conflicting_paths_are_dropped(self):
        from tensormount._paths import possible_paths

        huge = 1 << 40
        for paths in (
            {"a": ("x", huge), "b": ("x", 0)}, {"a": ("x", -1)}, {"a": (3, "x")}, {"a": ("x", "y"), "b": ("x", "y", "z")},
            {"a": ("x", "y"), "b": ("x", "y")}, {"a": ("x", 0), "b": ("x", "y")}, {"a": ("b", "c"), "b": None},
            {"a": ("x",) * 100}, {"a": 5, "b": ((1, 2),), "c": ("c", 0.5)}, {"a": ("x", True)},
            {f"k{i}": (f"k{i - 1}", "x") for i in range(1, 200)} | {"k0": (3,)},
        ):
            found, state = possible_paths(paths), {}
            self.assertEqual(set(found), set(paths))
            for number, key in enumerate(found):
                set_element(state, found[key], number)
            self.assertEqual(sorted(leaf for _, leaf in leaves(state) if leaf is not None), list(range(len(paths))))
        self.assertEqual(possible_paths({"a": ("x", [7], "m"), "b": ["x", [8], 0]}), {"a": ("x", "7", "m"), "b": ("x", "8", 0)})

    def test_hostile_planner_data_allocates_no_list(self):
        """Positions in planner_data of a DCP folder make no list of their size, wherever it goes."""
        dcp.save({"model": [torch.ones(2), torch.zeros(2)], "b": {"c": torch.ones(1)}}, checkpoint_id="hostile")
        with open("hostile/.metadata", "rb") as file:
            metadata = pickle.load(file)
        metadata.planner_data["model.0"] = ("model", 1 << 40)
        metadata.planner_data["b.c"] = ("model", -5)
        with open("hostile/.metadata", "wb") as file:
            pickle.dump(metadata, file)
        tm.export("hostile", "hostile.pt", format="torch")
        tm.export("hostile", "hostile.dcp", format="dcp")
        dcp_to_torch_save("hostile.dcp", "again.pt")
        of_reader = _load_state_dict_from_keys(None, storage_reader=tm.torch.Reader("hostile"))
        for found in (torch.load("hostile.pt"), torch.load("again.pt"), of_reader):
            tensors = [leaf for _, leaf in leaves(found) if isinstance(leaf, torch.Tensor)]
            self.assertEqual(sorted(map(torch.Tensor.tolist, tensors)), [[0.0, 0.0], [1.0], [1.0, 1.0]])


class TiedModels(support.Folder):
    def model(self):
        made = torch.nn.Module()
        made.model = torch.nn.Module()
        made.model.embed_tokens = torch.nn.Embedding(5, 3)
        made.lm_head = torch.nn.Linear(3, 5, bias=False)
        made.lm_head.weight = made.model.embed_tokens.weight
        return made

    def test_load_model_accepts_the_safetensors_export(self):
        model = self.model()
        tm.save(model.state_dict(), "S/tied")
        report = tm.export("S/tied", "m.safetensors", format="safetensors")
        self.assertIn("model.embed_tokens.weight is lm_head.weight", str(report["notes"]))
        save_model(model, "theirs.safetensors")
        self.assertEqual(read_safetensors("m.safetensors")[0], read_safetensors("theirs.safetensors")[0])
        metadata = read_safetensors("m.safetensors")[1]
        self.assertEqual(metadata, {"format": "pt", **read_safetensors("theirs.safetensors")[1]})
        fresh = self.model()
        self.assertEqual(load_model(fresh, "m.safetensors"), (set(), []))
        self.assertTrue(torch.equal(fresh.lm_head.weight, model.lm_head.weight))

    def test_hf_export_keeps_tied_names_of_the_model(self):
        model = self.model()
        state = model.state_dict()
        for config, names in ((None, list(state)), ({"tie_word_embeddings": True}, ["model.embed_tokens.weight"]),
                              ({"tie_word_embeddings": False}, list(state))):
            objects = {} if config is None else {"config.json": json.dumps(config).encode()}
            tm.save(state, "S/model", objects=objects, replace=True)
            tm.export("S/model", "hf", format="hf", replace=True)
            self.assertEqual({name: item.tolist() for name, item in load_file("hf/model.safetensors").items()},
                             {name: state[name].tolist() for name in names})
            self.assertEqual(os.path.exists("hf/config.json"), config is not None)

    @support.needs("transformers")
    def test_transformers_loads_the_export(self):
        import transformers

        config = transformers.LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                          num_attention_heads=2, tie_word_embeddings=True)
        model = transformers.LlamaForCausalLM(config)
        for text in (config.to_json_string(use_diff=False), None):
            objects = {} if text is None else {"config.json": text.encode()}
            tm.save(model.state_dict(), "S/llama", objects=objects, replace=True)
            folder = "llama" if text is None else "llama-with-config"
            tm.export("S/llama", folder, format="hf")
            if text is None:
                config.save_pretrained(folder)
            back, info = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
            self.assertFalse(info["missing_keys"])
            self.assertTrue(torch.equal(back.lm_head.weight, model.lm_head.weight))
            self.assertTrue(torch.equal(back.model.embed_tokens.weight, model.lm_head.weight))


class OldDefects(support.Folder):
    """What earlier versions made is named by `info` and `verify`, and is no damage."""

    def test_known_defects_are_reported(self):
        optimizer = {"state": {"0": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        torch.save({"optimizer": optimizer}, "text.pt")
        support.run("import", "text.pt", "S/text")
        steps = {"state": {"w": {"mu_product": torch.tensor(0.9), "step": torch.tensor(0.0)}},
                 "param_groups": [{"lr": 0.1, "momentum_decay": 4e-3, "params": ["w"]}]}
        tm.save({"optim": steps}, "S/fresh")
        for source, text in (("text.pt", "optimizer.state has text keys"), ("S/text", "optimizer.state has text keys"),
                             ("S/fresh", "(optim.state.w) have step 0")):
            found = tm.verify(source)
            self.assertTrue(found["whole"])
            self.assertIn(text, str(found["warnings"]))
            self.assertIn(text, support.run("info", source))
            self.assertIn(text, json.loads(support.run("--json", "info", source))["notes"][0])
            done = subprocess.run([support.command(), "verify", source], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0)
            self.assertIn(text, done.stderr)
        right = {"optim": {**steps, "state": {"w": {"mu_product": torch.tensor(0.9), "step": torch.tensor(1.0)}}}}
        tm.save(right, "S/right")
        self.assertEqual(tm.verify("S/right")["warnings"], [])

    def test_keys_that_are_not_text_keep_their_type(self):
        for key in (None, (1, 2), (None, ("a", 0.5)), 0.5, True, b"x", torch.float32, -1, 3):
            for value in (torch.zeros(1), 7):
                with self.subTest(key=key, value=value):
                    state = {"d": {"a": torch.ones(1), key: value}, "e": {key: {"f": value}}}
                    tm.save(state, "S/keys", replace=True)
                    report = tm.export("S/keys", "keys.pt", format="torch", replace=True)
                    back = torch.load("keys.pt", weights_only=True)
                    self.assertEqual((repr(back), report["notes"]), (repr(state), []))
        tm.save({"d": {"a": torch.ones(1), 1 << 80: 7}}, "S/keys", replace=True)
        report = tm.export("S/keys", "keys.pt", format="torch", replace=True)
        self.assertIn("torch cannot store a key", str(report["notes"]))
        self.assertIn("d.0x1", str(report["notes"]))


if __name__ == "__main__":
    unittest.main()
