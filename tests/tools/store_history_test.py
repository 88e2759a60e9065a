# SPDX-License-Identifier: Apache-2.0
"""tensormount log, blame and watch. tests/python/follow_test.py has the many publishes at once."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np

import harness
from harness import TOOL, write_safetensors

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
os.environ.setdefault("TENSORMOUNT_LIBRARY", str(harness.BIN.parent / "lib" / "libtensormount.so"))
import tensormount as tm


class HistoryTest(harness.ToolTest):
    """Steps of tensors: `w` changes at some, `still` never. They are saved in this process, which is faster."""

    def step(self, name, w, **others):
        state = {"still": np.zeros(2, "<f4"), "w": w, **others}
        tm.save({key: value for key, value in state.items() if value is not None}, self.store / name)
        return self.store / name

    @staticmethod
    def values(number, dtype="<f4", shape=(2, 2)):
        return np.full(shape, number, dtype)

    def lines(self, *args, expect=0):
        return self.run_tool(*args, expect=expect).stdout.splitlines()

    def changes(self, *args, expect=0):
        return [(line["checkpoint"], line["change"]) for line in self.json_lines(*args, expect=expect)]

    def test_log_lists_steps_newest_first(self):
        self.step("step-1", self.values(1))
        self.step("step-2", self.values(2))
        self.step("step-10", self.values(2))
        self.run_tool("derive", self.store / "base", "--from", "step-10", "--drop", "still")
        self.run_tool("pin", self.store / "step-2")
        head, *rows = self.lines("log", self.store)
        self.assertEqual(head.split(), ["DATE", "SINCE", "SIZE", "OWN", "STATE", "NAME"])
        self.assertEqual([row.split()[-1] for row in rows], ["base", "step-10", "step-2", "step-1"])
        self.assertEqual([row.split()[-2] for row in rows], ["derived", "latest", "pin", "-"])
        self.assertEqual([row.split()[-1] for row in self.lines("log", self.store, "-n", 2, "--reverse", "-q")],
                         ["step-10", "base"])
        rows = {line["checkpoint"]: line for line in self.json_lines("log", self.store)}
        listed = {line["checkpoint"]: line for line in self.json_lines("ls", "-l", self.store)}
        for name, row in rows.items():
            for field in ("uuid", "generation", "created", "own_bytes", "stored_bytes", "latest"):
                self.assertEqual(row[field], listed[name][field], (name, field))
            self.assertEqual(row["damage"], [])
        self.assertIsNone(rows["step-1"]["since_previous"])
        self.assertEqual(rows["step-10"]["since_previous"], rows["step-10"]["created"] - rows["step-2"]["created"])
        self.assertTrue(rows["base"]["derived"] and rows["step-2"]["pinned"])

    def test_log_names_damage_and_what_cannot_be_read(self):
        for n in (1, 2, 3):
            self.step(f"step-{n}", self.values(n))
        size = (self.store / "step-3" / "COMMIT").stat().st_size
        self.flip(self.store / "step-3" / "COMMIT", size - 200)
        rows = self.json_lines("log", self.store, expect=1)
        self.assertEqual([len(row["damage"]) for row in rows], [1, 0, 0])
        self.assertIn("  latest,damaged  ", self.lines("log", self.store, "-q", expect=1)[0])
        (self.store / "step-2" / "COMMIT").unlink()
        rows = self.lines("log", self.store, "-q", expect=1)
        self.assertIn("step-2: DATA_LOSS: ", rows[1])
        self.assertTrue(rows[2].endswith("step-1"))  # A manifest tells the place of step-2.

    def test_log_shows_common_values(self):
        for n, loss in enumerate((2.5, float("nan"), "x" * 500)):
            tm.save({"loss": loss, "opt": {"lr": 0.1}, "a,b": n}, self.store / f"step-{n}")
        shown = self.lines("log", self.store, "--show", "loss,opt.lr,nothing", "--show", r"a\,b")
        self.assertEqual(shown[0].split()[5:], ["loss", "opt.lr", "nothing", "a,b", "NAME"])
        self.assertEqual(shown[2].split()[-5:], ["NaN", "0.1", "-", "1", "step-1"])
        self.assertLess(len(shown[1]), 300)
        values = [row["values"] for row in self.json_lines("log", self.store, "--show", r"loss,nothing,a\,b")]
        self.assertEqual(values[2], {"loss": 2.5, "a,b": 0})
        self.fails("log", self.store, "--show", "loss,,lr", code="INVALID_ARGUMENT", says="a path is empty")
        self.fails("log", self.store, "w", "--show", "loss", code="INVALID_ARGUMENT", says="--show")

    def test_log_of_a_key_has_each_change(self):
        self.step("step-1", None)
        self.step("step-2", self.values(1))
        self.run_tool("import", self.store / "step-2", self.store / "step-3", "--shard", "cols", "--ranks", 2)
        self.step("step-4", self.values(2))
        self.step("step-5", self.values(2, "<f8"))
        self.step("step-6", self.values(2, "<f8", (4,)))
        self.run_tool("derive", self.store / "not-a-step", "--from", "step-1")
        self.step("step-7", None)
        self.step("step-8", None)
        expected = [("step-7", "removed"), ("step-6", "shape"), ("step-5", "dtype"), ("step-4", "digest"),
                    ("step-2", "added")]
        self.assertEqual(self.changes("log", self.store, "w"), expected)
        self.assertEqual(self.changes("log", self.store, "w", "-n", 2), expected[:2])
        self.assertEqual(self.changes("log", self.store, "w", "--reverse"), expected[::-1])
        self.assertEqual(self.changes("log", self.store, "still"), [("step-1", "first")])
        digest = self.json_lines("info", self.store / "step-4", "w")[0]["digest"]
        self.assertIn(f"-> {digest}", self.lines("log", self.store, "w")[3])
        self.assertEqual(self.changes("blame", self.store, "w"), [("step-7", "removed")])
        self.assertIn("w: changed at step-7 (", self.lines("blame", self.store, "w")[0])
        self.assertIn("still: unchanged since step-1, the oldest step (", self.lines("blame", self.store, "still")[0])
        self.fails("blame", self.store, "wx", code="NOT_FOUND", says="no tensor or object wx in any step")

    def test_no_data_are_read(self):
        self.step("step-1", self.values(1))
        self.step("step-2", self.values(2))
        for step in ("step-1", "step-2"):
            shutil.rmtree(self.store / step / "data")
        self.assertEqual(self.changes("blame", self.store, "w"), [("step-2", "digest")])

    def test_blame_takes_globs(self):
        self.step("step-1", self.values(1), **{"a/1": self.values(1), "w[0]": self.values(1), "w0": self.values(1)})
        self.step("step-2", self.values(1), **{"a/1": self.values(2), "w[0]": self.values(3), "w0": self.values(1)})
        self.assertEqual([(line["key"], line["checkpoint"]) for line in self.json_lines("blame", self.store, "*")],
                         [("a/1", "step-2"), ("still", "step-1"), ("w", "step-1"), ("w0", "step-1"),
                          ("w[0]", "step-2")])
        self.assertIn("  a/1  step-2: digest ", self.lines("log", self.store, "a/*")[0])
        # A key is itself before it is a glob.
        self.assertEqual([line["key"] for line in self.json_lines("blame", self.store, "w[0]")], ["w[0]"])
        self.assertEqual([line["key"] for line in self.json_lines("blame", self.store, "w[01]")], ["w0"])
        self.fails("blame", self.store, "x*", code="NOT_FOUND", says="no key of the newest step matches it")

    def test_unreadable_steps_are_named(self):
        for n, number in ((1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (6, 3)):
            self.step(f"step-{n}", self.values(number))
        (self.store / "step-3" / "COMMIT").write_text("")
        (self.store / "step-5" / "COMMIT").unlink()
        result = self.run_tool("blame", self.store, "w", expect=1)
        self.assertIn("w: changed at step-4 or step-3, which cannot be read (", result.stdout)
        self.assertIn("; step-5 cannot be read and may have had other data", result.stdout)
        self.assertIn("warning: step-3 cannot be read: ", result.stderr)
        (line,) = self.json_lines("blame", self.store, "w", expect=1)
        self.assertEqual((line["unread"], line["unread_since"], line["before"]["checkpoint"]),
                         (["step-3"], ["step-5"], "step-2"))
        # Without a manifest nothing tells where a step belongs.
        (self.store / "step-3" / "manifest" / "coordinator.tmm").unlink()
        result = self.run_tool("blame", self.store, "w", expect=1)
        self.assertIn("step-3 cannot be read, and its place among the steps is unknown", result.stderr)
        # A damaged index is bypassed.
        index = self.store / "step-4" / "index" / "index.sst"
        os.chmod(index, 0o644)
        index.write_bytes(b"x")
        self.assertEqual(self.changes("blame", self.store, "w", expect=1), [("step-4", "digest")])

    def test_only_stores_have_a_history(self):
        self.step("step-1", self.values(1))
        for command in (("log",), ("blame", "w")):
            words = (command[0], self.store / "step-1", *command[1:])
            self.fails(*words, code="INVALID_ARGUMENT", says=f"name the store that contains it, {self.store}")
            self.fails(command[0], self.model, *command[1:], code="UNSUPPORTED", says="is not a store")
        empty = self.dir / "EMPTY"
        self.run_tool("init", empty)
        self.assertEqual(self.lines("log", empty, "-q"), [])
        self.fails("blame", empty, "w", code="NOT_FOUND", says="no checkpoint that is a step")

    def test_layers_are_told_by_their_stack(self):
        save = harness.BIN / "tests" / "save_stacked"
        subprocess.run([save, self.store / "s"], check=True, timeout=60)
        self.assertEqual(self.changes("blame", self.store, "w"), [("s", "first")])
        result = self.fails("blame", self.store, "layers.2.w", code="NOT_FOUND", says="layers.2.w: is a layer of w")
        self.assertIn("hint: name the tensor, w\n", result.stderr)

    def test_steps_without_digests_are_not_called_equal(self):
        for n in (1, 2):
            write_safetensors(self.dir / f"{n}.safetensors", {"w": ("F32", (2, 2), self.values(n).tobytes())})
            self.run_tool("adopt", self.dir / f"{n}.safetensors", self.store / f"step-{n}", "--quick")
        self.assertEqual(self.changes("blame", self.store, "w"), [("step-2", "unknown")])
        self.assertIn("changed at step-2, or earlier", self.lines("blame", self.store, "w")[0])


class WatchTest(harness.ToolTest):
    def setUp(self):
        super().setUp()
        self.children = []
        self.addCleanup(self.end_children)

    def end_children(self):
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.communicate(timeout=20)

    def watch(self, *args, **more):
        """A running watch that has begun to watch the store."""
        child = subprocess.Popen(
            [TOOL, "-v", "watch", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.dir,
            stdin=subprocess.DEVNULL, text=True, errors="surrogateescape", **more)
        self.children.append(child)
        begun = child.stderr.readline()
        self.assertTrue("watching" in begun or "waiting for it" in begun, begun)
        return child

    def ended(self, child, status):
        out, errors = child.communicate(timeout=30)
        self.assertEqual(child.returncode, status, errors)
        return out, errors

    def save(self, name):
        tm.save({"w": np.full(4, len(os.listdir(self.dir)), "<f4")}, self.store / name)
        return self.store / name

    def uuid(self, name):
        return self.json_lines("info", self.store / name)[0]["uuid"]

    def test_store_is_waited_for(self):
        child = self.watch(self.store, "--once", "--json")
        self.save("step-1")
        line = json.loads(self.ended(child, 0)[0])
        self.assertEqual((line["checkpoint"], line["uuid"], line["path"]),
                         ("step-1", self.uuid("step-1"), str(self.store / "step-1")))

    def test_timeout_fails(self):
        self.save("step-1")
        for store in (self.store, self.dir / "none"):
            self.fails("watch", store, "--timeout", 0.05, code="DEADLINE_EXCEEDED", says="no checkpoint was published")
        self.assertEqual(self.run_tool("watch", self.store, "--since-generation", 0, "--once").stdout.split("\t")[:2],
                         ["step-1", "generation 1"])
        self.fails("watch", self.store / "step-1", code="INVALID_ARGUMENT", says="is a checkpoint; watch the store")
        self.fails("watch", self.model, code="INVALID_ARGUMENT", says="is not a directory")
        self.fails("watch", self.store, "--since", "step-9", code="NOT_FOUND", says="no such checkpoint")
        self.fails("watch", self.store, "--since", "step-1", "--since-generation", 1, code="INVALID_ARGUMENT",
                   says="cannot be together")

    def test_signals_end_it(self):
        self.save("step-1")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            child = self.watch(self.store)
            child.send_signal(number)
            self.ended(child, 128 + number)
        child = self.watch(self.store, "--since-generation", 0, "--exec", "sleep", "60")
        self.assertIn("step-1", child.stdout.readline())
        child.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        self.ended(child, 128 + signal.SIGTERM)  # The pipe ends: the command was ended, too.
        self.assertLess(time.monotonic() - begin, 30)

    def test_commands_get_arguments_and_no_shell(self):
        """Each name is one argument, whatever it contains."""
        names = ["-rf", "a b", "$(touch pwned)", "x\ty\nz", "{}", "'\"", "b\udcff\udcfe", "--exec"]
        seen = self.dir / "seen"
        script = self.dir / "note.py"
        script.write_text("import json, os, sys\n"
                          f"with open({str(seen)!r}, 'a') as f: f.write(json.dumps(sys.argv[1:]) + '\\n')\n"
                          "print('output')\nsys.exit('step' in sys.argv[1])\n")
        self.save("step-0")
        child = self.watch(self.store, "--json", "--timeout", 30, "--exec", sys.executable, script, "{}",
                           "--json", "at={}/{}", "")
        self.save("step-1")
        for name in names:
            self.save(name)
        lines = [json.loads(child.stdout.readline()) for _ in range(2 * (1 + len(names)))]
        self.assertTrue(seen.exists(), lines)
        commits = [line for line in lines if line["event"] == "committed"]
        child.send_signal(signal.SIGINT)
        out, errors = self.ended(child, 130)
        self.assertEqual(out, "")
        self.assertIn("output", errors)  # The JSON lines stay alone on standard output.
        arguments = [json.loads(line) for line in seen.read_text().splitlines()]
        store = str(self.store.resolve())
        by_path = {words[0]: words for words in arguments}
        for words in by_path.values():
            self.assertEqual(words[1:], ["--json", f"at={words[0]}/{words[0]}", ""])
        self.assertEqual(set(by_path), {f"{store}/{name}" for name in [*names, "step-1"]})
        self.assertFalse((self.dir / "pwned").exists())
        self.assertEqual(len({line["uuid"] for line in commits}), len(commits))
        status = [line for line in lines if line["event"] == "command" and line["checkpoint"] == "step-1"]
        self.assertEqual([line["status"] for line in status], [1])

    def test_failing_commands_are_reported_and_do_not_end_it(self):
        for n in (1, 2, 3):
            self.save(f"step-{n}")
        child = self.watch(self.store, "--since", "step-1", "--exec", "sh", "-c", 'test "${1##*-}" = 3', "-", "{}")
        self.assertTrue(child.stdout.readline().startswith("step-2\t"))
        self.assertTrue(child.stdout.readline().startswith("step-3\t"))
        child.send_signal(signal.SIGTERM)
        self.assertEqual(self.ended(child, 143)[1],
                         "tensormount: warning: step-2: the command ended with status 1\n")
        for command, says in ((["false"], "ended with status 1"), (["nothing-of-this-name"], "No such file"),
                              (["sh", "-c", "kill -9 $$"], "killed by signal 9")):
            result = self.run_tool("watch", self.store, "--since", "step-2", "--once", "--exec", *command, expect=1)
            self.assertIn(says, result.stderr)
        self.run_tool("watch", self.store, "--since", "step-2", "--once", "--exec", "true")
        # A parent that ignores the end of children does not hide the status.
        self.run_tool("watch", self.store, "--since", "step-2", "--once", "--exec", "false", expect=1,
                      prefix=("sh", "-c", "trap '' CHLD; exec \"$@\"", "sh"))
        self.fails("watch", self.store, "--exec", code="INVALID_ARGUMENT", says="a command must follow")

    def test_names_are_escaped(self):
        self.save("step-1")
        os.rename(self.store / "step-1", self.store / "a\n\x1b[31mb\udcff")
        result = self.run_tool("watch", self.store, "--since-generation", 0, "--once")
        self.assertEqual(result.stdout.split("\t")[0], "a\\n\\u001b[31mb\\xff")
        self.assertEqual(self.run_tool("log", self.store, "-q").stdout.split("  ")[-1], "a\\n\\u001b[31mb\\xff\n")
        result = self.run_tool("blame", self.store, "w")
        self.assertIn("since a\\n\\u001b[31mb\\xff, the oldest step", result.stdout)

    def test_closed_pipe_ends_it(self):
        self.save("step-1")
        child = self.watch(self.store)
        child.stdout.close()
        child.stdout = None
        self.save("step-2")
        child.wait(timeout=30)
        self.assertNotEqual(child.returncode, 0)


if __name__ == "__main__":
    harness.main()
