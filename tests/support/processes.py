# SPDX-License-Identifier: Apache-2.0
"""What tests in Python ask of processes that are not their children. Needs no package."""

import os
import pathlib


def has_ended(pid):
    """Also where its parent, which may be an init that is slow to ask, does not know yet."""
    process = pathlib.Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(os.listdir(process / "task")) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True
