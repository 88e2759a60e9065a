# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that saves, validates and loads over TCP; started by wire.py.

usage: wire_ranks.py FOLDER RANK SIZE ELEMENTS

Prints a line of JSON for each call: [call, verdict, words]. A load that says it is good is compared byte by
byte: "WRONG" is the verdict of one that is not."""

import json
import sys

import numpy as np

import tensormount as tm

TIMES = {"liveness": 3.0, "arrival": 6.0, "total": 30.0}


def state(rank, size, elements, version):
    """Rows of one tensor, one that all have, one of this rank alone, and plain values."""
    whole = np.arange(size * elements, dtype=np.float32).reshape(size, elements) + version
    return {"rows": tm.Shards(whole.shape, [((rank, 0), whole[rank:rank + 1])]), "all": np.arange(elements) * 3 + version,
            f"only.{rank}": np.full(elements // 4 + 1, rank + version, dtype=np.int16), "step": version,
            "mine": tm.PerRank(rank)}


def main():
    folder, rank, size, elements = sys.argv[1], *map(int, sys.argv[2:])

    def attempt(call, work):
        said = ""
        try:
            verdict = work() or "ok"
        except tm.Error as error:
            verdict, said = type(error).__name__, str(error)
        except Exception as error:  # Not one of ours.
            verdict, said = f"RAISED {type(error).__name__}", str(error)
        print(json.dumps([call, verdict, said]), flush=True)
        return verdict == "ok"

    def save(version):
        tm.save(state(rank, size, elements, version), f"{folder}/store/{version}", group, **TIMES)

    def load(version):
        """Other rows than were saved here, so that they come from other ranks."""
        columns = np.zeros((size, elements // size), dtype=np.float32)
        into = {"rows": tm.Shards((size, elements), [((0, rank * (elements // size)), columns)]),
                "all": np.zeros(elements, dtype=int), "step": -1}
        tm.load(into, f"{folder}/store/{version}", group, method="exchange", not_requested="ignore", **TIMES)
        whole = np.arange(size * elements, dtype=np.float32).reshape(size, elements) + version
        same = (np.array_equal(columns, whole[:, rank * columns.shape[1]:(rank + 1) * columns.shape[1]])
                and np.array_equal(into["all"], np.arange(elements) * 3 + version) and into["step"] == version)
        return None if same else "WRONG"

    def validate():
        found = tm.validate(state(rank, size, elements, 1), group, **TIMES)
        return None if found["ok"] else "WRONG"

    try:
        group = tm.Group.from_folder(f"{folder}/meet", rank, size, timeout=20)
    except tm.Error as error:
        print(json.dumps(["group", type(error).__name__, str(error)]), flush=True)
        return
    (attempt("save 1", lambda: save(1)) and attempt("load 1", lambda: load(1)) and attempt("validate", validate)
     and attempt("save 2", lambda: save(2)) and attempt("load 2", lambda: load(2)))
    group.close()


if __name__ == "__main__":
    main()
