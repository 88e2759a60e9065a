# SPDX-License-Identifier: Apache-2.0
"""What people look at in a terminal of 80 columns: help, listings and tables do not wrap."""

import os
import re
import signal
import subprocess
import time

import harness

KEY = "bert.encoder.layer.{}.attention.output.LayerNorm.some_longer_name.weight"


def on_terminal(*command, columns=80):
    """What the command prints to a terminal of that width."""
    terminal = harness.Terminal(columns)
    child = subprocess.run([str(part) for part in command], stdout=terminal.child, stderr=subprocess.DEVNULL,
                           stdin=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": "1", "TERM": "xterm"}, timeout=30)
    out = terminal.text()
    assert child.returncode == 0, (command, out)
    return out.splitlines()


def slowed(*command):
    """What the command prints to a terminal on standard error when it gets a tenth of the time."""
    terminal = harness.Terminal()
    child = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=terminal.child,
                             stdin=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"})
    while child.poll() is None:
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.09)
        child.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    out = terminal.text()
    assert child.returncode == 0, (command, out)
    return out


class Columns(harness.ToolTest):
    def test_import_progress_counts_bytes_read(self):
        # A line shows after a second: a fast machine needs more to do.
        for size in [4 << 20, 8 << 20, 16 << 20]:
            harness.write_safetensors(self.model, {f"t{i}": ("U8", (size,), bytes(size)) for i in range(48)})
            lines = re.findall(r"import: ([\d.]+) (\w+) of ([\d.]+) MB",
                               slowed(harness.TOOL, "import", self.model, self.store / str(size), "--ranks", "2"))
            if lines:
                break
        self.assertTrue(lines)
        self.assertEqual({total for _, _, total in lines}, {f"{48 * size / 1e6:.1f}"})
        done = [float(number) * {"B": 0, "kB": 0.001, "MB": 1}[unit] for number, unit, _ in lines]
        self.assertEqual(done, sorted(done))

    def fits(self, lines):
        for line in lines:
            self.assertLessEqual(len(line), 80, line)

    def commands(self):
        out = self.run_tool("--help").stdout
        return re.findall(r"^  ([a-z]+)  ", out[out.index("\nSubcommands:"):], re.M)

    def test_help_fits_the_terminal(self):
        self.fits(self.run_tool("--help").stdout.splitlines())
        commands = self.commands()
        self.assertIn("publish", commands)
        for command in commands:
            out = self.run_tool(command, "--help").stdout
            self.fits(out.splitlines())
            self.assertIn(f"Usage: tensormount {command}", out)
        # The example is still one command for a shell.
        example = self.run_tool("import", "--help").stdout.split("Example:\n")[1]
        self.assertEqual(" ".join(example.replace("\\\n", " ").split()),
                         "mpirun -n 4 tensormount import model.safetensors STORE/step-0 --shard grid:2x2")
        ranks = re.search(r"--ranks INT +(.*\n +.*\n)", self.run_tool("load", "--help").stdout).group(1)
        self.assertIn("[1..4096]", ranks)

    def test_long_keys_fit_the_terminal(self):
        keys = [KEY.format(i) for i in range(3)]
        harness.write_safetensors(self.model, {k: ("F32", (30522, 768), bytes(4 * 30522 * 768)) for k in keys[:1]} |
                                  {k: ("F32", (3, 7), bytes(84)) for k in keys[1:]})
        path = self.save()
        lines = on_terminal(harness.TOOL, "ls", "-l", path)
        self.assertEqual(len(lines), 3)
        self.fits(lines)
        for line in lines:
            self.assertTrue(line.startswith("f32") and "..." in line and line.endswith("name.weight"), line)
        # Nothing is shortened where a program may read it, nor with -v.
        for out in (self.run_tool("ls", "-l", path).stdout.splitlines(),
                    on_terminal(harness.TOOL, "ls", "-l", "-v", path), on_terminal(harness.TOOL, "ls", path)):
            self.assertEqual([line.split()[-1] for line in out], keys)
        self.assertIn("tensor-file", self.run_tool("ls", "-l", "-v", path).stdout)
        # A terminal that is narrower than the columns before it leaves something of the name.
        self.assertTrue(on_terminal(harness.TOOL, "ls", "-l", path, columns=20)[0].endswith(".weight"))

    def test_store_listing_fits_the_terminal(self):
        begin = time.time()
        for name in ("step-1", "step-10"):
            self.save(name)
        lines = self.run_tool("ls", "-l", self.store).stdout.splitlines()
        self.fits(lines)
        self.assertEqual([line.split()[-1] for line in lines], ["step-1", "step-10"])
        self.assertEqual(["latest" in line for line in lines], [False, True])
        for line in lines:
            self.assertRegex(line, r"^ +\d+ \d{4}-\d\d-\d\d \d\d:\d\d +[\d.]+ MB ")
        first, last = self.json_lines("ls", "-l", self.store)
        self.assertEqual((first["latest"], last["latest"]), (False, True))
        self.assertTrue(begin - 2 <= last["created"] <= time.time() + 2)
        size = sum(file.stat().st_size for file in (self.store / "step-10" / "data").iterdir())
        self.assertEqual(last["file_bytes"], size)
        self.run_tool("rm", self.store / "step-1")
        lines = self.run_tool("ls", "-l", self.store).stdout.splitlines()
        self.assertEqual(len(lines), 2, lines)
        self.assertRegex(lines[1], r"^besides +[\d.]+ MB in \.trash, which gc frees$")
        # Without -l nothing is opened for it.
        self.assertEqual(set(self.json_lines("ls", self.store)[0]), {"checkpoint", "uuid", "generation", "latest"})

    def test_training_directory_listing_shows_steps_and_times(self):
        for step in (10, 20):
            folder = self.dir / "run" / f"iter_{step:07}"
            folder.mkdir(parents=True)
            harness.write_safetensors(folder / "model.safetensors", self.tensors)
        lines = self.run_tool("ls", "-l", self.dir / "run").stdout.splitlines()
        self.assertEqual([line.split()[-1] for line in lines], ["iter_0000010", "iter_0000020"])
        self.assertIn("latest", lines[1])
        self.assertAlmostEqual(self.json_lines("ls", "-l", self.dir / "run")[0]["modified"], time.time(), delta=60)

    def test_layout_table_fits_the_terminal(self):
        harness.write_safetensors(self.model, {"w": ("F32", (1024, 64, 2), bytes(4 * 1024 * 128))})
        path = self.save("step-1", "--ranks", "4", "--shard", "cols")
        lines = on_terminal(harness.TOOL, "layout", path, "w")
        self.fits(lines)
        table = lines[[line.startswith("box ") for line in lines].index(True):]
        self.assertEqual(len(table), 5)  # A header and four chunks, a line each.
        for line in on_terminal(harness.TOOL, "layout", path, "w", columns=50)[-10:]:
            self.assertLessEqual(len(line), 50, line)


if __name__ == "__main__":
    harness.main()
