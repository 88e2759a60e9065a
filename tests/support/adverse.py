# SPDX-License-Identifier: Apache-2.0
"""A folder below tests/support/adverse_fs.cc, which plays filesystems that are not here. Needs no package."""

import os
import pathlib
import subprocess
import time


class AdverseFs:
    """`at` shows `backing`, by the rules that are given last."""

    def __init__(self, program, folder, *options):
        folder = pathlib.Path(folder)
        self.backing, self.at = folder / "backing", folder / "adverse"
        self.backing.mkdir(parents=True, exist_ok=True)
        self.at.mkdir(exist_ok=True)
        self._rules, self.log = folder / "rules", folder / "met"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([str(program), str(self.backing), str(self.at), str(self._rules), *options],
                                            stdin=subprocess.DEVNULL, stdout=log)
        end = time.monotonic() + 15
        while not os.path.ismount(self.at):
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError("adverse_fs does not mount")
            time.sleep(0.005)

    def rules(self, *lines):
        new = self._rules.with_suffix(".new")
        new.write_text("".join(line + "\n" for line in lines))
        new.replace(self._rules)

    def met(self):
        """Lines of the calls that met a rule."""
        return self.log.read_text().splitlines()

    def close(self):
        """Whatever hangs in it: those who wait hear ECONNABORTED or ENOTCONN."""
        self.process.kill()
        self.process.wait()
        subprocess.run(["umount", "-l", str(self.at)], check=False, capture_output=True)
