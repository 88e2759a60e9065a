# SPDX-License-Identifier: Apache-2.0
"""Asks torch what is in files that lie, as its users do. Reads paths, some a line with tabs between
them, and writes a line of JSON for each: {"path", "loads": {"True": {...}, "False": {...}}} for a file, {"loads": {"dcp": ...}}
for a folder. A load is {"error"} or {"tensors": [[path, dtype, shape, bytes in hex]]}: no bytes where they
are too many or no rows, "!" and why where they cannot be read.

Each line is answered in a process of its own, with bounds on time and memory; where that dies, the
rest of the line in another."""

import argparse
import json
import os
import resource
import signal
import sys
import types
import warnings

import torch
import torch.distributed.checkpoint  # Once, not in every process.

NAMES = {"bool": "bool", "int8": "i8", "uint8": "u8", "int16": "i16", "int32": "i32", "int64": "i64", "float16": "f16",
         "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
LARGEST = 32 << 20
SECONDS = 20


def told(path, t):
    dtype = NAMES.get(str(t.dtype).removeprefix("torch."), str(t.dtype))
    if t.layout is not torch.strided or t.device.type != "cpu" or t.numel() * t.element_size() > LARGEST:
        return [path, dtype, list(t.shape), None]
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    return [path, dtype, list(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes().hex()]


def walk(value, path, out, depth=0):
    """A part of a path is [text], or null where no name can be made of it."""
    if depth > 50 or len(out) > 1000:
        return
    if isinstance(value, torch.Tensor):
        out.append(told(path, value))
    elif isinstance(value, dict):
        for key, item in value.items():
            good = type(key) in (str, int) and (type(key) is str or -(1 << 63) <= key < 1 << 63)
            walk(item, [*path, str(key) if good else None], out, depth + 1)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            walk(item, [*path, str(i)], out, depth + 1)
    elif isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        walk(vars(value), path, out, depth + 1)


def load_file(path, weights_only):
    out = []
    walk(torch.load(path, map_location="cpu", weights_only=weights_only), [], out)
    return {"tensors": out}


def load_folder(path):
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    out = []
    for key, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        try:
            into = torch.full(tuple(entry.size), 77, dtype=entry.properties.dtype)
            load({key: into}, storage_reader=FileSystemReader(path), no_dist=True)
            out.append(told([key], into))
        except BaseException as error:  # CheckpointException is no Exception.
            out.append([[key], "", [], "!" + repr(error)[:300]])
    return {"tensors": out}


def questions(path):
    if os.path.isdir(path):
        return {"dcp": lambda: load_folder(path)}
    return {"False": lambda: load_file(path, False), "True": lambda: load_file(path, True)}


def answer(path):
    loads = {}
    for name, load in questions(path).items():
        signal.alarm(SECONDS)
        try:
            loads[name] = load()
        except BaseException as error:
            loads[name] = {"error": repr(error)[:300]}
    return loads


def apart(paths):
    """Answers as far as the process that is asked lives."""
    ends, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        resource.setrlimit(resource.RLIMIT_CPU, (2 * SECONDS, 2 * SECONDS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with open("/proc/self/statm", encoding="ascii") as f:
            size = int(f.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), size + (1 << 30)))
        with os.fdopen(begin, "w") as f:
            for path in paths:
                f.write(json.dumps(answer(path)) + "\n")
                f.flush()
        os._exit(0)
    os.close(begin)
    with os.fdopen(ends) as f:
        said = f.read()
    os.waitpid(child, 0)
    return [json.loads(line) for line in said.split("\n")[:-1]]


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        left = line.rstrip("\n").split("\t")
        while left:
            answers = apart(left)
            if not answers:
                answers = [{name: {"error": "the process died"} for name in questions(left[0])}]
            for path, loads in zip(left, answers):
                json.dump({"path": path, "loads": loads}, sys.stdout)
                sys.stdout.write("\n")
            sys.stdout.flush()
            left = left[len(answers):]


if __name__ == "__main__":
    main()
