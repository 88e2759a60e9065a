#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory is a GPU's: PyTorch's part is played by hand, the driver's by that of the tests
(tests/gpu/fake_cuda.cc); what lies between is the package, the library and its part with CUDA.
"""

import ctypes
import os
import subprocess
import sys
import threading
import unittest

import ranks
from support import Folder, needs

import tensormount as tm
from tensormount import _abi, _save, _state
from tensormount._leaves import tensors

BUILD = os.path.dirname(os.path.dirname(os.path.realpath(os.environ.get("TENSORMOUNT_LIBRARY", "/none/none/none"))))
DRIVER = os.path.join(BUILD, "fake_driver", "libcuda.so.1")
PART = os.path.join(BUILD, "lib", "tensormount", "libtensormount_cuda.so")


class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "allocations", "pinned_bytes", "streams", "events", "launches", "copies", "crossed_bytes")]


class FakeDevice:
    """What tests/gpu/fake_cuda.h offers, by position."""

    def __init__(self):
        driver = ctypes.CDLL(DRIVER)
        driver.fake_cuda_control.restype = ctypes.POINTER(ctypes.c_void_p)
        table = driver.fake_cuda_control()
        self._reveal = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(table[5])
        self._make = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)(table[6])
        self.counts = ctypes.CFUNCTYPE(Counts)(table[15])

    def tensor(self, values):
        """A tensor like `values` with the same bytes, in memory that only the device can reach."""
        import torch

        size = values.untyped_storage().nbytes()
        address = self._make(0, size)
        AREAS.append(range(address, address + size))
        ctypes.memmove(self._reveal(address), values.untyped_storage().data_ptr(), size)
        there = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=values.dtype)
        moved = there.as_strided(values.shape, values.stride(), values.storage_offset())
        moved.on_device = True
        return moved

    def bytes(self, t):
        size = t.untyped_storage().nbytes()
        return ctypes.string_at(self._reveal(t.untyped_storage().data_ptr()), size)


AREAS = []  # Addresses of memory of the device: views of a tensor are other objects.


def is_on_device(t):
    return getattr(t, "on_device", False) or any(t.data_ptr() in area for area in AREAS)


def on_device(key, t):
    words = (_abi.TM_DEVICE_CUDA, 0, 0, 0, _abi.TM_MEMORY_DEVICE, _abi.TM_STREAM_LEGACY_DEFAULT, 0)
    return words if is_on_device(t) else None


def place_on_device(t):
    return 0 if is_on_device(t) else -1


def layouts_are_kept(device, store):
    """Ten tensors of a device and one of the host: only their addresses are new in the second save. Other streams and
    other places are another layout."""
    import torch

    def described(key, t):
        calls.append(key)
        return with_stream(key, t)

    def with_stream(key, t):
        words = on_device(key, t)
        return words and (*words[:5], _abi.TM_STREAM_HANDLE if stream else words[5], stream)

    def state():
        found = {f"w{i}": device.tensor(values[i]) for i in range(10)}
        return {**found, "host": torch.ones(300)}

    values, calls, stream, group = torch.randn(10, 300), [], 0, tm.Group.single()
    cache, tensors._device_words = _save.cache_of(group), described
    try:
        def known(items):
            calls.clear()
            return cache.get(list(items.items()), "save", 1)[2]

        assert not known(state())
        assert len(calls) == 3, calls  # Once for the device, and for the two templates.
        assert known(state()) and calls == [""], calls
        changed = state()
        changed["w3"] = values[3]
        assert not known(changed)
        changed["w3"], changed["host"] = device.tensor(values[3]), device.tensor(torch.ones(300))
        assert not known(changed)
        assert not known(state()) and known(state())
        stream = 5
        assert not known(state()) and known(state())
        stream = 0
        for number in range(3):
            report = tm.save(state(), f"{store}/kept", group, replace=True)
            assert report["plan_reused"] == (number > 0), number
        read = {f"w{i}": torch.zeros(300) for i in range(10)}
        tm.load(read, f"{store}/kept")
        assert all(torch.equal(read[f"w{i}"], values[i]) for i in range(10))
    finally:
        tensors._device_words = on_device


def copied_within_the_device(device, store):
    """A saver's device_staging: `save` returns before any byte has crossed, and later writes to the
    tensors are not seen. Where it does not suffice they cross for `save` to return."""
    import torch

    values = torch.randn(300, 400)
    size = values.numel() * 4
    # The hook holds the save up, so that nothing crosses but what `save` waits for.
    for bound, background in ((size * 2, False), (size - 1, False), (0, False), (size, True)):
        go_on, t = threading.Event(), device.tensor(values)
        with tm.Saver(device_staging=bound, stage_in_background=background) as saver:
            for number in range(2):  # The second in memory that was kept.
                ctypes.memmove(device._reveal(t.data_ptr()), values.data_ptr(), size)
                go_on.clear()
                before = device.counts()
                job = saver.save({"t": t}, f"{store}/within", replace=True, on_event=lambda event: go_on.wait(60))
                try:
                    job.wait_staged(60)
                    after = device.counts()
                    ctypes.memset(device._reveal(t.data_ptr()), 0, size)
                    staged = job.progress()["bytes_staged"]
                finally:
                    go_on.set()
                within = after.crossed_bytes == before.crossed_bytes
                assert within == (bound >= size), (bound, background, within)
                if within and number == 0:
                    assert after.allocations > before.allocations, "no memory of the device was taken"
                assert staged == size, staged
                job.wait(60)
                read = torch.zeros_like(values)
                tm.load({"t": read}, f"{store}/within")
                assert torch.equal(read, values), (bound, background, number)


def loaded_by_dcp(device, store, state):
    """DCP's reader writes straight to the device, without host memory of the tensors' sizes."""
    import torch
    import torch.distributed.checkpoint as dcp

    host, torch.empty = torch.empty, None  # The memory of the old way.
    try:
        blank = {key: device.tensor(torch.zeros(value.shape, dtype=value.dtype)) for key, value in state.items()}
        reader = tm.torch.Reader(f"{store}/step")
        metadata = reader.read_metadata()
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner(blank, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    finally:
        torch.empty = host
    for key, value in state.items():
        got = torch.frombuffer(bytearray(device.bytes(blank[key])), dtype=value.dtype).view(value.shape)
        assert torch.equal(got, value), key


def child():
    """In a process of its own, whose driver is that of the tests."""
    import torch

    device = FakeDevice()
    tensors._device_words = on_device
    tensors.place_of = place_on_device
    layouts_are_kept(device, sys.argv[2])
    base = torch.randn(40, 30)
    state = {"w": base, "t": base.t(), "columns": base[:, 3:20:2], "b": torch.arange(100, dtype=torch.uint8)[10:90],
             "host": torch.ones(5)}
    moved = {key: value if key == "host" else device.tensor(value) for key, value in state.items()}
    store = sys.argv[2]
    report = tm.save(moved, f"{store}/step")
    assert report["tensors"] == 5, report
    read = {key: torch.zeros_like(value, memory_format=torch.contiguous_format) for key, value in state.items()}
    tm.load(read, f"{store}/step")
    for key, value in state.items():
        assert torch.equal(read[key], value), key
    # Back to the device, by other strides; in the background, too.
    blank = {key: value if key == "host" else device.tensor(torch.zeros(value.t().shape, dtype=value.dtype).t() if value.dim() == 2 else torch.zeros_like(value)) for key, value in state.items()}
    tm.async_load(blank, f"{store}/step").wait()
    for key, value in state.items():
        if key != "host":
            got = torch.frombuffer(bytearray(device.bytes(blank[key])), dtype=value.dtype).as_strided(value.shape, blank[key].stride())
            assert torch.equal(got, value), key
    job = tm.async_save(moved, f"{store}/background")
    job.wait()
    tm.load(read, f"{store}/background")
    assert all(torch.equal(read[key], value) for key, value in state.items())
    copied_within_the_device(device, store)
    loaded_by_dcp(device, store, state)
    # What is no memory of the device is refused by its name.
    stray = torch.ones(4)
    stray.on_device = True
    try:
        tm.save({"stray": stray}, f"{store}/stray")
        raise AssertionError("memory of the host was taken for the device's")
    except tm.InvalidArgumentError as e:
        assert "stray" in str(e) and "is not known to CUDA" in str(e), e
    print("fine")


@needs("torch")
class DeviceTensors(Folder):
    def setUp(self):
        super().setUp()
        if not os.path.exists(PART):
            self.skipTest("this build has no part with CUDA")

    def test_cuda_tensors_save_and_load(self):
        if not os.path.exists(DRIVER):
            self.skipTest("this build has no driver for tests")
        done = subprocess.run([sys.executable, os.path.realpath(__file__), "child", "device_store"], capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stdout), (0, "fine\n"), done.stderr)

    def test_missing_cuda_driver_is_reported(self):
        import torch

        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("this machine has one")
        t = torch.ones(4)
        t.on_device = True
        words, tensors._device_words = tensors._device_words, on_device
        place, tensors.place_of = tensors.place_of, place_on_device
        try:
            # Not PeerLost, a ConnectionError, by which programs take a rank for dead.
            with self.assertRaisesRegex(tm.DeviceError, "tensor w: .*no CUDA driver: libcuda.so.1") as caught:
                tm.save({"w": t}, "store/step")
            self.assertNotIsInstance(caught.exception, tm.PeerLost)
            self.assertEqual((caught.exception.code, caught.exception.device), ("UNAVAILABLE", "cuda:0"))
        finally:
            tensors._device_words = words
            tensors.place_of = place


class ErrorsOfOtherRanks(Folder):
    """What one rank says of its failure is what all ranks get."""

    def test_error_fields_reach_the_other_ranks(self):
        def call(group, rank, error):
            state = {"w": 1} if rank == 0 else _state.FailedState(error)
            tm.save(state, "store/step", group=group, arrival=30)

        for error in (tm.DeviceError("it fell off the bus", device="cuda:0", key="w", box=((0, 1), (2, 3))),
                      tm.DataLossError("damaged", file="data/0\0\udc80", cause="a disk", errno=5),
                      tm.KeyNotFoundError("not there", key="lr")):
            got, own = ranks.threads(lambda group, rank, error=error: call(group, rank, error), 2)
            self.assertIs(own, error)
            self.assertIs(type(got), type(error))
            self.assertEqual(got.rank, 1)
            for name in ("device", "key", "box", "cause", "errno"):
                self.assertEqual(getattr(got, name), getattr(error, name), name)
            self.assertEqual(got.file, error.file and "data/0??")
            self.assertIn(error.message, str(got))

    def test_unencodable_error_fields_are_dropped(self):
        def call(group, rank):
            error = tm.DeviceError("it fell off the bus", device="cuda:0")
            error.box = "none"
            tm.save({"w": 1} if rank == 0 else _state.FailedState(error), "store/step", group=group, arrival=30)

        for got in ranks.threads(call, 2):
            self.assertEqual(got.code, "UNAVAILABLE")
            self.assertIn("it fell off the bus", str(got))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child()
    else:
        unittest.main()
