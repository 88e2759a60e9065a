# SPDX-License-Identifier: Apache-2.0
"""Saves and loads by several processes, without torch and MPI: what comes back, verdicts that are the
same on all ranks, ranks that come late or raise; those that die or stop: kills_test.py."""

import collections
import os
import signal
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import ranks
import support
import tensormount as tm
from tensormount import _abi, _group, _jobs
from tensormount._group import _DirectoryStore

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(str(error))

SHORT = {"liveness": 1.0, "arrival": 3.0}


def values(step=0):
    return {
        "model": {"w": np.arange(60, dtype="f4").reshape(6, 10) + step, "b": np.arange(7) + step},
        "step": step,
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}],
    }


# ---- What ranks do -------------------------------------------------------------------------------


def save_and_load(group, rank, size):
    state = values(3)
    state["mine"] = tm.PerRank({"rank": rank, "seed": rank * 11})
    state[f"only.{rank}"] = np.full(rank + 1, rank)
    first = tm.save(state, "S/all", group, rank_objects={"rng": b"%d" % rank})
    again = tm.save(state, "S/again", group, rank_objects={"rng": b"%d" % rank})
    assert again["plan_reused"] and not first["plan_reused"]
    uuids = {first["uuid"], tm.open("S/all").uuid}
    assert len(uuids) == 1, uuids
    request = values()
    request["mine"] = tm.PerRank(None)
    other = (rank + 1) % size
    request[f"only.{other}"] = np.zeros(other + 1, "i8")
    loaded = tm.load(request, "S/all", group, objects=[("rng", (other,))])
    np.testing.assert_array_equal(request["model"]["w"], values(3)["model"]["w"])
    np.testing.assert_array_equal(request[f"only.{other}"], np.full(other + 1, other))
    assert request["step"] == 3 and request["groups"] == values()["groups"], request
    assert request["mine"] == tm.PerRank({"rank": rank, "seed": rank * 11}), request
    assert loaded.objects == {("rng", (other,)): b"%d" % other}
    # In the background, side by side with a load.
    jobs = [tm.async_save(values(step), f"S/step-{step}", group) for step in range(4)]
    into = values()
    tm.async_load(into, "S/all", group).wait(ranks.LIMIT)
    assert [job.wait(ranks.LIMIT)["generation"] for job in jobs] == sorted(
        job.wait()["generation"] for job in jobs)
    print("fine")


def load_elsewhere(group, rank, size):
    request = values()
    tm.load(request, "S/all", group)
    np.testing.assert_array_equal(request["model"]["b"], values(3)["model"]["b"])
    with tm.open("S/all") as checkpoint:
        state = checkpoint.state()
    assert state["step"] == 3 and sorted(k for k in state if k.startswith("only")) == [
        "only.0", "only.1", "only.2", "only.3"]
    print("fine")


def one_is_wrong(group, rank, size):
    """Each of these fails on all ranks, with the reason of the one that was wrong."""
    for number, wrong in enumerate([{"x": object()}, {"w": np.zeros(3, ">f4")}, 5]):
        try:
            tm.save(wrong if rank == 1 else {"w": np.zeros(3)}, f"S/wrong-{number}", group)
        except tm.Error as error:
            print(type(error).__name__, error.rank)
    try:
        tm.save({"w": np.full(3, rank // 2)}, "S/differ", group, replicas="full")
    except tm.DataLossError as error:
        print("differ", error.key)
    try:
        tm.save({"step": rank}, "S/common", group)
    except tm.LayoutError as error:
        print("common", error.key)
    try:
        tm.load({"w": np.zeros(3)}, "S/nowhere", group)
    except tm.CheckpointNotFoundError:
        print("nowhere")
    tm.save({"w": np.zeros(3)}, "S/after", group)
    print("fine")


def alarmed_in_validate(group, rank, size):
    """Rank 1 does not come; what an alarm raises in rank 0 ends its wait at once."""
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    if rank == 1:
        while not os.path.exists("closed"):
            time.sleep(0.05)
        return
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    begin = time.monotonic()
    try:
        tm.validate(values(), group)
    except Alarm:
        print("alarm", time.monotonic() - begin < 2, flush=True)
    # The thread that waited lets go after three seconds, and then the group does.
    group.close()
    print("closed", time.monotonic() - begin > 3, flush=True)
    with open("closed", "w"):
        pass


def exports(group, rank, size):
    """Each says no to all, where ranks were called for different things or one cannot."""
    tm.save(values(), "S/export", group)
    said = tm.export("S/export", "out", group, format="npy")
    assert said["ranks"] == size and os.path.exists("out/model.w.npy"), said
    wrong = [
        dict(destination=f"out-{rank}"), dict(destination="x", format="npy" if rank else "hf"),
        dict(destination="out", format="npy", replace=rank == 1),
        dict(destination="a\0b" if rank == 1 else "x"), dict(destination="x", source=f"S/no-{rank}"),
    ]
    for call in wrong:
        source = call.pop("source", "S/export")
        try:
            tm.export(source, call.pop("destination"), group, **call)
        except (tm.InvalidArgumentError, tm.NotFoundError):
            continue
        print("was exported", call)
    tm.save(values(), "S/after-exports", group)
    assert not [name for name in os.listdir(".") if name.startswith(("out-", "x"))], os.listdir(".")
    print("fine")


def raises_between(group, rank, size):
    """Rank 2 leaves by an exception of its own while the others save."""
    tm.save(values(), "S/before", group)
    if rank == 2:
        raise ValueError("a bug of the trainer's")
    try:
        tm.save(values(1), "S/not-there", group, **SHORT)
    except (tm.PeerLost, tm.PeerTimeout) as error:
        print("told", error.rank)


def interrupted(group, rank, size):
    """Rank 0 gets a Ctrl-C while rank 1 does not come; the others hear of it."""
    print("begun", flush=True)
    if rank == 1:
        time.sleep(5)
        return
    try:
        tm.save(values(), "S/interrupted", group)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except tm.CancelledError as error:
        print("cancelled", error.rank, flush=True)


def closed_while_it_loads(group, rank, size):
    """Rank 1 does not come to the load, and rank 0 leaves without waiting for it."""
    tm.save(values(), "S/closed", group)
    if rank == 0:
        job = tm.async_load(values(), "S/closed", group, liveness=1.0, arrival=0.3)
        group.close()
        print(job.done(), job.exception().rank)
        with open("S/left", "w"):
            pass
    while not os.path.exists("S/left"):
        time.sleep(0.01)


class Folders(support.Folder):
    def test_last_counter_sees_the_full_count(self):
        """And nobody fails, though who is the last deletes what all others have made."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        self.addCleanup(sys.setswitchinterval, before)
        for number in range(support.scaled(100)):
            told = []

            def count(folder=f"F{number}", told=told):
                try:
                    store = _DirectoryStore(folder)
                    told.append(store.add("group/read", 1))
                    if told[-1] == 6:
                        store.delete_key("group/read")
                except Exception as error:
                    told.append(error)

            threads = [threading.Thread(target=count) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual([one for one in told if isinstance(one, Exception)], [])
            self.assertIn(6, told)
            self.assertEqual(os.listdir(f"F{number}"), [])


class Environment(unittest.TestCase):
    """What launchers say, and what they leave out."""

    NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS",
             "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID",
             "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE")

    def given(self, **variables):
        clean = {name: value for name, value in os.environ.items() if name not in self.NAMES}
        return mock.patch.dict(os.environ, {**clean, **variables}, clear=True)

    def test_ranks_are_read_from_the_environment(self):
        for variables, wanted in (
            ({}, None),
            ({"WORLD_SIZE": "4", "RANK": "3"}, (3, 4)),
            # A batch script without srun: it has the variables of a task, and is none.
            ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
            ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}, (5, 8)),
            ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (0, 1)),
            ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
            ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3)),
            # mpirun or torchrun within a step of one task, or of one a machine.
            ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "2", "PMI_SIZE": "3"}, (2, 3)),
            ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "9", "WORLD_SIZE": "16"}, (9, 16)),
        ):
            with self.subTest(variables), self.given(**variables):
                found = _group.ranks_of_environment()
                self.assertEqual(found and (found.rank, found.size), wanted)
                if wanted is None or wanted[1] == 1:
                    with tm.Group.from_env() as group:
                        self.assertEqual((group.rank, group.size), (0, 1))
        for variables in ({"RANK": "1"}, {"RANK": "4", "WORLD_SIZE": "4"}, {"PMI_RANK": "x", "PMI_SIZE": "2"},
                          {"SLURM_STEP_NUM_TASKS": "2"}):
            with self.given(**variables), self.assertRaises(tm.Error):
                tm.Group.from_env()

    def test_meeting_point_is_derived_from_slurm(self):
        slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3"}
        for nodes, host in (("gpu003", "gpu003"), ("a,b[1-2]", "a"), ("gpu[003-007,012],login", "gpu003"),
                            ("n[7,9]", "n7"), ("r[1-2]n[03-04]-ib", "r1n03-ib"), ("x-1-[5-6]", "x-1-5")):
            with self.given(SLURM_STEP_NODELIST=nodes, **slurm):
                found = _group._meeting_point(_group.ranks_of_environment())
                self.assertEqual(found[0], host)
                self.assertTrue(12000 <= found[1] < 30000)
            with self.given(SLURM_STEP_NODELIST=nodes, MASTER_PORT="99", **slurm):
                self.assertEqual(_group._meeting_point(_group.ranks_of_environment()), (host, 99))
            with self.given(SLURM_STEP_NODELIST=nodes, MASTER_PORT="99", MASTER_ADDR="m", **slurm):
                self.assertEqual(_group._meeting_point(_group.ranks_of_environment()), ("m", 99))
        for variables, missing in (({"PMI_RANK": "1", "PMI_SIZE": "3"}, "no MASTER_ADDR and no MASTER_PORT"),
                                   ({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "m"}, "no MASTER_PORT"),
                                   ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "no MASTER_ADDR")):
            with self.given(**variables), self.assertRaisesRegex(tm.UnsupportedError, missing):
                _group._meeting_point(_group.ranks_of_environment())

    def test_save_without_a_group_under_a_launcher_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "S", "x")
            with self.given(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2"):
                for call in (lambda: tm.save({"step": 1}, path), lambda: tm.async_save({"step": 1}, path),
                             lambda: tm.Saver()):
                    with self.assertRaisesRegex(tm.InvalidArgumentError, r"rank 1 of 2 .*tm.Group.single\(\)"):
                        call()
                self.assertFalse(os.path.exists(path))
                tm.save({"step": 1}, path, tm.Group.single())
                self.assertEqual(tm.load({"step": 0}, path).state, {"step": 1})
            # What is left in an environment, or makes no sense, keeps nobody from saving.
            for variables in ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, {"RANK": "1"}, {"WORLD_SIZE": "8"},
                              {"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"PMI_RANK": "0", "PMI_SIZE": ""},
                              {"RANK": "-1", "WORLD_SIZE": "2"}, {"SLURM_STEP_NUM_TASKS": "2"}, {"RANK": "0", "WORLD_SIZE": "1"},
                              {"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}):
                with self.subTest(variables), self.given(**variables):
                    tm.save({"step": 1}, path, replace=True)
            for variables in ({"RANK": "9", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, {"WORLD_SIZE": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}):
                with self.given(**variables), self.assertRaisesRegex(tm.InvalidArgumentError, "rank 1 of 2"):
                    tm.save({"step": 1}, path, replace=True)


class Groups(support.Folder):
    def test_interrupted_construction_is_cleaned_up(self):
        library = _abi.library()
        raised = []
        with mock.patch.object(sys, "unraisablehook", raised.append):
            for name in ("tm_communicator_rank", "tm_communicator_size"):
                with mock.patch.object(library, name, side_effect=KeyboardInterrupt):
                    with self.assertRaises(KeyboardInterrupt):
                        tm.Group.single()
            tm.Group.__new__(tm.Group).__del__()
            _group.Use.__new__(_group.Use).__del__()
            _jobs._Handle.__new__(_jobs._Handle).__del__()
        self.assertEqual(raised, [])

    def test_group_saves_and_loads(self):
        self.assertEqual(ranks.run("group_test:save_and_load", 4), ["fine\n"] * 4)
        self.assertEqual(ranks.run("group_test:load_elsewhere", 3), ["fine\n"] * 3)
        self.assertEqual(ranks.run("group_test:load_elsewhere", 1), ["fine\n"])

    def test_group_loads_over_tcp_only(self):
        out = ranks.run("group_test:load_by_tcp", 3)
        self.assertEqual(out, ["fine\n"] * 3)

    def test_group_savers_work(self):
        self.assertEqual(ranks.run("group_test:savers", 3), ["fine\n"] * 3)

    def test_error_of_one_rank_is_raised_on_all(self):
        outs = ranks.run("group_test:one_is_wrong", 4)
        for rank, out in enumerate(outs):
            lines = out.splitlines()
            expected = ["UnsupportedError", "UnsupportedError", "UnsupportedError"]
            self.assertEqual([line.split()[0] for line in lines[:3]], expected, out)
            if rank != 1:
                self.assertEqual([line.split()[1] for line in lines[:3]], ["1"] * 3, out)
            self.assertEqual(lines[3:], ["differ w", "common step", "nowhere", "fine"], out)

    def test_ranks_hear_of_a_rank_that_raised(self):
        outs = [rank.result() for rank in ranks.start("group_test:raises_between", 4)]
        self.assertEqual(outs[2][0], 3)
        for number in (0, 1, 3):
            self.assertEqual(outs[number], (0, "told 2\n"))
        self.assertEqual([entry["checkpoint"] for entry in tm.Store("S").list()
                          if entry["checkpoint"] in ("before", "not-there")], ["before"])

    def test_close_during_a_load_is_safe(self):
        self.assertEqual(ranks.run("group_test:closed_while_it_loads", 2), ["True 1\n", ""])

    def test_group_exports(self):
        self.assertEqual(ranks.run("group_test:exports", 3), ["fine\n"] * 3)

    def test_alarm_interrupts_a_validation(self):
        out = ranks.run("group_test:alarmed_in_validate", 2)
        self.assertEqual(out[0], "alarm True\nclosed True\n")

    def test_ctrl_c_on_one_rank_cancels_all(self):
        found = ranks.start("group_test:interrupted", 3)
        for rank in found:
            self.assertEqual(rank.process.stdout.readline(), "begun\n")
        time.sleep(0.5)
        found[0].process.send_signal(signal.SIGINT)
        self.assertEqual(found[0].process.stdout.readline(), "interrupted\n")
        self.assertEqual(found[2].result(60), (0, "cancelled 0\n"))
        found[1].result(60)
        found[0].result(60)
        self.assertFalse(os.path.exists("S/interrupted"))


def savers(group, rank, size):
    both = [tm.Saver(group, staging=1 << 20),
            tm.Saver(group, stage_in_background=True, device_staging=1 << 20)]
    jobs = [saver.save(values(step), f"Savers/{number}-{step}")
            for step in range(3) for number, saver in enumerate(both)]
    for saver in reversed(both):
        saver.close()
    assert all(job.done() for job in jobs)
    assert [job.wait()["generation"] for job in jobs[::2]] == sorted(
        job.wait()["generation"] for job in jobs[::2])
    # The next ones, and what one rank alone finds wrong; the verdict is that of all.
    with tm.Saver(group, staging=100 if rank == 1 else None) as saver:
        job = saver.save(values(), "Savers/bounded")
        try:
            job.wait(ranks.LIMIT)
        except tm.ResourceExhaustedError as error:
            assert error.rank == 1 and "of staging memory" in str(error), error
    with tm.Saver(group) as saver:
        own = {"x": object()} if rank == 2 else values()
        try:
            saver.save(own, "Savers/wrong").wait(ranks.LIMIT)
        except tm.UnsupportedError:
            pass
    assert not os.path.exists("Savers/bounded") and not os.path.exists("Savers/wrong")
    into = values()
    tm.load(into, "Savers/1-2", group)
    assert into["step"] == 2
    print("fine")


def load_by_tcp(group, rank, size):
    import tempfile

    folder = os.path.join(tempfile.gettempdir(), f"tcp-{os.getppid()}")
    with tm.Group.from_folder(folder, rank, size, unix_sockets=False, address="127.0.0.1") as tcp:
        tm.save(values(1), "S/tcp", tcp, replace=True)
        # Two groups at once.
        tm.save(values(2), "S/other", group, replace=True)
        into = values()
        tm.load(into, "S/tcp", tcp)
        assert into["step"] == 1
    print("fine")


class Mail:
    """A transport of a host program's own: queues in this process."""

    def __init__(self, queues, rank):
        self.queues, self.rank = queues, rank  # Of all ranks: (from, to, tag) to what was sent.
        self.broken = False

    def send(self, to, tag, data):
        if self.broken:
            raise OSError("the wire is cut")
        self.queues[self.rank, to, tag].append(bytes(data))

    def receive(self, source, tag, into):
        return self.queues[source, self.rank, tag], into

    def test(self, request):
        if request is None:
            return True
        queue, into = request
        if not queue:
            return False
        into[:] = queue.popleft()  # A ValueError where it is not as long.
        return True

    def cancel(self, request):
        pass


class Callbacks(support.Folder):
    def ranks(self, call, size=3):
        queues = collections.defaultdict(collections.deque)
        outcomes = [None] * size

        def run(rank):
            host = Mail(queues, rank)
            try:
                with tm.Group.from_callbacks(host, rank, size, tag=7, leave_wait=1) as group:
                    self.assertEqual((group.rank, group.size, group.kind), (rank, size, "callbacks"))
                    outcomes[rank] = call(group, host)
            except Exception as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        self.assertFalse(any(thread.is_alive() for thread in threads), outcomes)
        self.assertEqual({tag for _, _, tag in queues}, {7})
        return outcomes

    def test_callback_group_saves_and_loads(self):
        def call(group, host):
            whole = np.arange(12.0).reshape(3, 4)
            state = {"w": tm.Shards((3, 4), [((group.rank, 0), whole[group.rank : group.rank + 1].copy())]), "step": 1}
            for _ in range(2):
                tm.save(state, "S/callbacks", group, replace=True)
            request = {"w": tm.Shards((3, 4), [((0, group.rank), np.zeros((3, 1)))]), "step": 0}
            tm.load(request, "S/callbacks", group)
            return request["step"], (request["w"].parts[0].data == whole[:, group.rank : group.rank + 1]).all()

        self.assertEqual(self.ranks(call), [(1, True)] * 3)

    def test_failing_transport_is_reported(self):
        def call(group, host):
            host.broken = group.rank == 1
            tm.save({"step": 1}, "S/broken", group, **SHORT)

        with self.assertLogs("tensormount", "ERROR") as logged:
            outcomes = self.ranks(call, 2)
        self.assertIn("OSError: the wire is cut", str(logged.output))
        self.assertTrue(all(isinstance(one, (tm.PeerLost, tm.PeerTimeout)) for one in outcomes), outcomes)
        with self.assertRaises(tm.InvalidArgumentError):
            tm.Group.from_callbacks(Mail({}, 2), 2, 2)


if __name__ == "__main__":
    unittest.main()
