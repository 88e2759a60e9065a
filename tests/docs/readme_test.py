# SPDX-License-Identifier: Apache-2.0
"""The README's commands do what they say, and the documents' links lead somewhere."""

import os
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tools"))
import harness  # noqa: E402


class Readme(harness.ToolTest):
    def test_commands(self):
        harness.need_fuse()
        text = (ROOT / "README.md").read_text()
        blocks = re.findall(r"<!-- executed by tests/docs -->\n```sh\n(.*?)```", text, re.S)
        self.assertEqual(len(blocks), 3)
        self.mounts.append(self.dir / "MNT")
        env = {**os.environ, "PATH": f"{harness.BIN}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-euxo", "pipefail", "-c", "".join(blocks)], cwd=self.dir, env=env, text=True,
                              capture_output=True, timeout=100)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("all bytes equal", done.stdout)
        self.assertIn("whole", done.stdout)
        self.assertTrue((self.dir / "STORE" / "step-3" / "COMMIT").exists())
        self.assertEqual((self.dir / "copy" / "tensors" / "w").read_bytes(), self.tensors["w"][2])

    def test_links(self):
        documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        links = 0
        for document in documents:
            for link in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
                if "://" not in link:
                    self.assertTrue((document.parent / link).exists(), f"{document.name}: {link}")
                    links += 1
        self.assertGreater(links, 100)

    def test_every_command_is_documented(self):
        text = (ROOT / "docs" / "cli.md").read_text()
        listed = self.run_tool("--help").stdout
        built = listed.split("Not implemented yet")[0]
        commands = re.findall(r"^  ([a-z]+) ", built, re.M)
        self.assertGreater(len(commands), 20)
        for command in commands:
            self.assertIn(f"`{command} ", text)


if __name__ == "__main__":
    harness.main()
