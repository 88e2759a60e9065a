# SPDX-License-Identifier: Apache-2.0
"""Runs a function on some ranks of torch.distributed (gloo), one forked process each.

The caller of the whole program holds the deadline and ends its process group: libraries under test
may wait for ever for a rank that died.
"""

import contextlib
import datetime
import os
import pathlib
import sys
import tempfile
import traceback


def run(count, function, *args):
    """function(rank, count, *args) on each; ends the program with 1 where one failed."""
    # What torch imports at its first save: a second of each rank's time, or of all ranks'.
    with contextlib.suppress(ImportError):
        import fsspec.core  # noqa: F401
        import torch._dynamo  # noqa: F401
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(count):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    one(rank, count, pathlib.Path(folder) / "meeting", function, args)
                    code = 0
                except BaseException:  # Some libraries' errors are no Exception.
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            children[child] = rank
        while children:
            child, status = os.wait()
            rank = children.pop(child, None)
            if rank is not None and status != 0:
                print(f"rank {rank} failed", file=sys.stderr)
                for other in children:
                    os.kill(other, 9)
                sys.exit(1)


def one(rank, count, meeting, function, args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo",
                      LOCAL_WORLD_SIZE=str(count))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count,
                            timeout=datetime.timedelta(seconds=60))
    try:
        function(rank, count, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
