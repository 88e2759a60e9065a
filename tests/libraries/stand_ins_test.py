# SPDX-License-Identifier: Apache-2.0
"""That the stand-ins which write the fixtures of releases long gone write what torch writes.

tests/golden/foreign/make_dcp_old.py knows torch by the names of its classes only. Told to write as
the torch that is installed, its files must be torch's: in structure, and when torch loads them. What
it writes of older releases must at least have items that torch opens.
"""

import io
import pickle
import re
import sys
import zipfile

import libraries

libraries.need("torch")
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

GOLDEN = libraries.HERE.parent / "golden" / "foreign"

# Of five tensors in pieces and an object, as common_cases() of the stand-ins has them.
SHAPES = {"rows": (4, 6), "columns": (4, 6), "scalar": (), "empty": (0, 3), "turned": (5, 4)}
DTYPES = {"rows": torch.float32, "columns": torch.bfloat16, "scalar": torch.float64, "empty": torch.int64,
          "turned": torch.float32}


def cells(key):
    """As make_dcp.py has it."""
    index = torch.arange(int(torch.Size(SHAPES[key]).numel()))
    return ((index * 7 + 3) % 251).to(DTYPES[key]).reshape(SHAPES[key])


class Symbol:
    """An object of a class that is only a name."""

    def __init__(self, *args):
        self.args = args

    def __setstate__(self, state):
        self.state = state


def symbols(raw):
    """What a pickle says, as names and plain values that can be compared."""

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            return type(name, (Symbol,), {"called": f"{module}.{name}"})

        def persistent_load(self, key):
            return ("persistent", key)

    return plain(Reader(io.BytesIO(raw)).load())


def plain(value):
    if isinstance(value, type):
        return value.called
    if isinstance(value, Symbol):
        args = tuple(plain(a) for a in getattr(value, "args", ()))
        if value.called == "builtins.getattr":  # Which of the two depends on the release of Python.
            return (args[0], "one of its values")
        if value.called.endswith("MEM_FORMAT_ENCODING"):
            return (value.called, "one of its values")
        return (value.called, args, plain(getattr(value, "state", None)))
    if isinstance(value, dict):
        return ("dict", sorted(((plain(k), plain(v)) for k, v in value.items()), key=repr))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [plain(v) for v in value])
    return value


def entries(raw):
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return {re.sub(r"^[^/]*/", "", name): archive.read(name) for name in archive.namelist()}


class StandIns(libraries.LibraryTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        code, said = libraries.run_apart([sys.executable, "-B", "-c", f"""
import sys
sys.path.insert(0, {str(GOLDEN)!r})
import make_dcp_old as old
w = old.Writer({str(cls.made / "stand-ins")!r}, old.torch_2_6())
old.common_cases(w)
w.close()
old.torch_releases({str(cls.made)!r})
old.olmo({str(cls.made)!r})
old.megatron({str(cls.made)!r})
"""], 60)
        assert code == 0, said
        libraries.make("torch", "like_stand_ins", cls.made, 2)

    def items(self, folder):
        """(key, bytes) of every item of a checkpoint that stands in names only."""
        with open(folder / ".metadata", "rb") as f:
            (_, _, (_, fields)) = symbols(f.read())
        (storage,) = [value for name, value in fields if name == "storage_data"]
        for index, info in storage[1]:
            if not isinstance(index, tuple):
                continue
            state, where = dict(index[2][1]), dict(info[2][1])
            data = (folder / where["relative_path"]).read_bytes()
            yield state, data[where["offset"]:where["offset"] + where["length"]]

    def test_stand_in_metadata_has_the_structure_of_torch(self):
        def without(folder):
            (name, args, (kind, fields)) = symbols((folder / ".metadata").read_bytes())
            fields = dict(fields)
            extra = {key: fields.pop(key, None) for key in ("storage_meta", "version", "planner_data")}
            # Of storage, where each item lies may differ, for an archive has more records today.
            storage = [(key, info[0], sorted(dict(info[2][1]))) for key, info in fields.pop("storage_data")[1]]
            return (name, args, kind, fields, storage), extra

        real, extra = without(self.made / "like_stand_ins")
        made, _ = without(self.made / "stand-ins")
        self.assertEqual(made, real)
        self.assertEqual(extra["version"], "1.0.0")

    def test_stand_in_items_have_the_pickles_of_torch(self):
        def of(folder):
            return {(state["fqn"], str(state.get("offset"))): entries(raw) for state, raw in self.items(folder)}

        real, made = of(self.made / "like_stand_ins"), of(self.made / "stand-ins")
        self.assertEqual(sorted(real), sorted(made))
        for key, item in made.items():
            for name, raw in item.items():
                if name == "data.pkl":
                    self.assertEqual(symbols(raw), symbols(real[key][name]), key)
                else:
                    self.assertEqual(raw, real[key][name], (key, name))
            self.assertLessEqual(set(real[key]) - set(item),
                                 {".format_version", ".storage_alignment", "byteorder", ".data/serialization_id"})

    def test_torch_loads_stand_in_checkpoints(self):
        state = {key: torch.zeros(SHAPES[key], dtype=DTYPES[key]) for key in SHAPES}
        state["iteration"] = 0
        dcp.load(state, checkpoint_id=self.made / "stand-ins", no_dist=True)
        self.assertEqual(state.pop("iteration"), 1200)
        for key, value in state.items():
            self.assertTrue(torch.equal(value, cells(key)), key)

    def test_torch_opens_items_of_every_release(self):
        folders = [self.made / name for name in ("torch-1.13", "torch-2.1", "megatron", "megatron-0.19")]
        folders.append(self.made / "olmo" / "step100" / "model_and_optim")
        for folder in folders:
            opened = 0
            for state, raw in self.items(folder):
                value = torch.load(io.BytesIO(raw), weights_only=False)
                opened += 1
                if state["fqn"] in SHAPES and isinstance(value, torch.Tensor):
                    offset = tuple(state["offset"][1][0][1])
                    box = tuple(slice(o, o + n) for o, n in zip(offset, value.shape))
                    self.assertTrue(torch.equal(value, cells(state["fqn"])[box]), (folder, state))
            self.assertGreater(opened, 5, folder)

    def test_committed_fixtures_match_the_generator(self):
        compared = 0
        for folder in (GOLDEN / "dcp-old").iterdir():
            for path in folder.rglob("*"):
                made = self.made / path.relative_to(GOLDEN / "dcp-old")
                if not path.is_file() or not made.exists():
                    continue
                compared += 1
                if path.name == ".metadata":
                    self.assertEqual(symbols(path.read_bytes()), symbols(made.read_bytes()), path)
                else:
                    self.assertEqual(path.read_bytes(), made.read_bytes(), path)
        self.assertGreater(compared, 25)


if __name__ == "__main__":
    libraries.main()
