# SPDX-License-Identifier: Apache-2.0
"""What a process has after a thousand saves, loads and groups that it did not have before: nothing."""

import gc
import os
import time
import unittest

import ranks
import support
import tensormount as tm

try:
    import numpy as np
except ImportError as error:
    raise unittest.SkipTest(str(error))

WARM = 100  # After so many nothing is new any more; of fewer, after half.
GROWTH = 2 << 20  # From then on; a kilobyte or two a save would be more in a thousand.
LIMIT = 120.0


def threads():
    """The fewest within a second: one that was joined stands in /proc for a moment more."""
    fewest = len(os.listdir("/proc/self/task"))
    until = time.monotonic() + 1
    while fewest > 1 and time.monotonic() < until:
        time.sleep(0.01)
        fewest = min(fewest, len(os.listdir("/proc/self/task")))
    return fewest


def held():
    """Descriptors, threads, resident bytes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return len(os.listdir("/proc/self/fd")), threads(), pages * os.sysconf("SC_PAGE_SIZE")


def all_ways(group, path, number):
    """A save and a load, of another kind each time; some of them fail."""
    state = {f"t{i}": np.full((64, 8), number) for i in range(20)}
    state["step"], state["mine"] = number, tm.PerRank(group.rank)
    ways = [
        lambda: tm.save(state, f"{path}/a", group, replace=True),
        lambda: tm.async_save(state, f"{path}/a", group, replace=True).wait(LIMIT),
        lambda: tm.save({**state, f"only.{number}": np.ones(3)}, f"{path}/a", group, replace=True),
        lambda: tm.save(state, f"{path}/alone-{group.rank}", replace=True),
        lambda: fails(tm.AlreadyExistsError, lambda: tm.save(state, f"{path}/a", group)),
        lambda: fails(tm.UnsupportedError, lambda: tm.save(
            {**state, "wrong": {group.rank}}, f"{path}/wrong", group)),
        lambda: cancelled(tm.async_save(state, f"{path}/a", group, replace=True)),
    ]
    ways[number % len(ways)]()
    into = {**state, "t3": np.zeros((64, 8), int)}
    loads = [
        lambda: tm.load(into, f"{path}/0", group),
        lambda: tm.async_load(into, f"{path}/0", group).wait(LIMIT),
        lambda: fails(tm.CheckpointNotFoundError, lambda: tm.load(into, f"{path}/none", group)),
        lambda: read(f"{path}/0"),
    ]
    loads[number % len(loads)]()


def fails(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def cancelled(job):
    job.cancel()
    try:
        job.wait(LIMIT)
    except tm.CancelledError:
        pass


def read(path):
    with tm.open(path) as checkpoint:
        assert checkpoint["t3"][5, 5] == 0 and checkpoint.state()["step"] == 0


def save_often(group, rank, size, path, saves):
    first = {f"t{i}": np.zeros((64, 8), int) for i in range(20)}
    tm.save({**first, "step": 0, "mine": tm.PerRank(rank)}, f"{path}/0", group)
    before = None
    for number in range(saves):
        if number == min(WARM, saves // 2):
            before = held()
        all_ways(group, path, number)
    print(*before, *held())


def make_groups(group, rank, size, folder, groups):
    """Groups, one after another; every second one is used."""
    before = None
    for number in range(groups):
        if number == min(WARM, groups // 2):
            before = held()
        with tm.Group.from_folder(f"{folder}/{number}", rank, size) as made:
            if number % 2:
                tm.save({"w": np.zeros(3)}, f"{folder}/S/w", made, replace=True)
    print(*before, *held())


class Often(support.Folder):
    def assert_nothing_more(self, function, size, *arguments):
        # One arena: what others keep for threads that are gone says nothing.
        outs = ranks.run(f"saves_test:{function}", size, *arguments, limit=support.scaled(180),
                         MALLOC_ARENA_MAX="1")
        for out in outs:
            numbers = [int(word) for word in out.split()]
            before, after = numbers[:3], numbers[3:]
            self.assertEqual(after[:2], before[:2])
            self.assertLess(after[2] - before[2], GROWTH)

    def test_repeated_saves_of_one_process_leak_nothing(self):
        self.assert_nothing_more("save_often", 1, "A", support.scaled(50))

    def test_repeated_saves_of_ranks_leak_nothing(self):
        self.assert_nothing_more("save_often", 3, "R", support.scaled(50))

    def test_repeated_groups_leak_nothing(self):
        self.assert_nothing_more("make_groups", 2, "G", support.scaled(30))


if __name__ == "__main__":
    unittest.main()
