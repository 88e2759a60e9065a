# SPDX-License-Identifier: Apache-2.0
"""A rank is killed in the middle of torch.distributed.checkpoint.save through our Writer: the others
end with an error in time, and go on from the checkpoint before."""

import datetime
import os
import signal
import time
import unittest

import ranks
import support
from support import LONG
import tensormount as tm

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
except ImportError as error:
    raise unittest.SkipTest(str(error))

TIMES = {"liveness": 5.0, "arrival": 10.0}
GRACE = 2.0
# The writer knows at once; then DCP tells all ranks by a collective of gloo's, which may wait for the
# one that is gone until this.
GLOO = 10.0
RANKS = 4 if LONG else 3


# ---- What a rank does ----------------------------------------------------------------------------


def join(folder, attempt, rank, size):
    """The default process group; without a server, which would be killed with its rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{attempt}", rank=rank,
                            world_size=size, timeout=datetime.timedelta(seconds=GLOO))


def state_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(60.0).reshape(10, 6) + step
    return {"model": {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.arange(7) + step},
            "step": step}


def killed_in_a_save(group, rank, size, folder, victim, how):
    """Rank `victim` ends when its data are about to be written; the others load what was there before."""
    join(folder, 0, rank, size)

    def strike(event):
        if rank == victim and (event["kind"], event["phase"]) == ("start", "write"):
            print(time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif event["kind"] == "error":
            print(time.monotonic(), event["code"], event["message"], flush=True)

    def save(step, **more):
        writer = tm.torch.Writer(f"{folder}/S/step-{step}", **TIMES, **more)
        if how == "async":
            dcp.async_save(state_of(step), storage_writer=writer).result()
        else:
            dcp.save(state_of(step), storage_writer=writer)

    save(1)
    try:
        save(2, on_event=strike)
        raise AssertionError("saved without one of its ranks")
    except Exception as error:
        print(time.monotonic(), type(error).__name__, str(error).replace("\n", " "), flush=True)
    dist.destroy_process_group()
    join(folder, 1, rank - (rank > victim), size - 1)
    into = state_of(-1)
    dcp.load(into, storage_reader=tm.torch.Reader(f"{folder}/S/latest"))
    assert torch.equal(into["model"]["w"].full_tensor(), state_of(1)["model"]["w"].full_tensor())
    assert torch.equal(into["model"]["b"], torch.arange(7) + 1) and into["step"] == 1, into
    dist.barrier()
    dist.destroy_process_group()
    print("resumed")


# ---- Tests ---------------------------------------------------------------------------------------


class DcpKills(support.Folder):
    def test_killed_rank_during_a_dcp_save_is_survived(self):
        generator, seed = support.seeded()
        cases = [(victim, how) for victim in range(RANKS) for how in ("sync", "async")]
        for victim, how in cases if LONG else [generator.choice(cases)]:
            with self.subTest(victim=victim, how=how, seed=seed):
                self.kill(victim, how)

    def kill(self, victim, how):
        folder = os.path.abspath(f"{how}-{victim}")
        os.mkdir(folder)
        found = ranks.start("dcp_kills_test:killed_in_a_save", RANKS, folder, victim, how)
        try:
            results = [rank.result() for rank in found]
        finally:
            ranks.end(found)
        self.assertEqual(results[victim][0], -signal.SIGKILL, results)
        struck = float(results[victim][1])
        for number, (status, out) in enumerate(results):
            if number == victim:
                continue
            self.assertEqual(status, 0, out)
            *told, failed, resumed = out.splitlines()
            self.assertRegex(told[0], rf"UNAVAILABLE .*\brank {victim}\b")
            for line, deadline in ((told[0], GRACE), (failed, GLOO + GRACE)):
                self.assertLess(float(line.split()[0]) - struck, deadline, out)
            self.assertEqual(resumed, "resumed")
        self.assertEqual([entry["checkpoint"] for entry in tm.Store(f"{folder}/S").list()], ["step-1"])
        self.assertTrue(tm.verify(f"{folder}/S/step-1")["whole"])


if __name__ == "__main__":
    unittest.main()
