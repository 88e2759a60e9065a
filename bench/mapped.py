#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what a name map costs: a checkpoint with Megatron's names shown as a model of transformers.

    PYTHONPATH=python TENSORMOUNT_LIBRARY=build/release/lib/libtensormount.so \\
        python3 bench/mapped.py build/release/bin/tensormount [--dir /dev/shm] [--layers 4] [--rounds 5]

The tensors have the shapes of Llama 8B; --layers says how many layers there are. Their bytes are made up. Prints one
JSON line for each figure, medians of rounds in which both sides take turns, page cache warm:

- first byte: from a new mount to the first byte of a part in `hf/`, and of one tensor beside it;
- mount reads: query, gate and down projections through the mapped mount, compared with the same number of bytes of the
  stored tensor through a plain mount (tier daemon, as both are served by the daemon), and how many bytes were read
  from the store for each byte served;
- export: `export --as hf` compared with a converter that loads all tensors with NumPy, takes them apart and writes the
  same safetensors parts: seconds and peak memory.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

HEADS, GROUPS, HEAD, HIDDEN, INNER, VOCABULARY, PADDING = 32, 8, 128, 4096, 14336, 128256, 64
LAYERS = "decoder.layers."
MIB = 1 << 20


def say(case, **fields):
    print(json.dumps({"case": case, **fields}), flush=True)


def median(values, digits=2):
    return round(statistics.median(values), digits)


def make(folder, layers):
    import numpy as np
    import tensormount as tm

    rng = np.random.default_rng(0)

    def weight(*shape):
        return np.frombuffer(rng.bytes(2 * int(np.prod(shape))), "f2").reshape(shape)

    block = {
        "self_attention.linear_qkv.weight": weight(layers, (HEADS + 2 * GROUPS) * HEAD, HIDDEN),
        "self_attention.linear_qkv.layer_norm_weight": weight(layers, HIDDEN),
        "self_attention.linear_proj.weight": weight(layers, HIDDEN, HIDDEN),
        "mlp.linear_fc1.layer_norm_weight": weight(layers, HIDDEN),
        "mlp.linear_fc1.weight": weight(layers, 2 * INNER, HIDDEN),
        "mlp.linear_fc2.weight": weight(layers, HIDDEN, INNER),
    }
    tm.save({
        "embedding.word_embeddings.weight": weight(VOCABULARY + PADDING, HIDDEN),
        "decoder.final_layernorm.weight": weight(HIDDEN),
        "output_layer.weight": weight(VOCABULARY + PADDING, HIDDEN),
        **{LAYERS + key: value for key, value in block.items()},
    }, str(folder / "store" / "megatron"))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({
        "model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "num_hidden_layers": layers, "intermediate_size": INNER,
    }))


def convert(store, out, part=4 << 30):
    """The converter to compare with: all in memory, as those of the frameworks are, and then written part by part."""
    import numpy as np
    import tensormount as tm

    with tm.open(store) as checkpoint:
        stored = {key: checkpoint[key][...] for key in checkpoint}
    layers = stored[LAYERS + "mlp.linear_fc2.weight"].shape[0]
    model = {
        "model.embed_tokens.weight": stored["embedding.word_embeddings.weight"][:VOCABULARY],
        "lm_head.weight": stored["output_layer.weight"][:VOCABULARY],
        "model.norm.weight": stored["decoder.final_layernorm.weight"],
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        fused = stored[LAYERS + "self_attention.linear_qkv.weight"][i]
        fused = fused.reshape(GROUPS, HEADS // GROUPS + 2, HEAD, HIDDEN)
        model[layer + "self_attn.q_proj.weight"] = fused[:, :-2].reshape(-1, HIDDEN)
        model[layer + "self_attn.k_proj.weight"] = fused[:, -2].reshape(-1, HIDDEN)
        model[layer + "self_attn.v_proj.weight"] = fused[:, -1].reshape(-1, HIDDEN)
        model[layer + "self_attn.o_proj.weight"] = stored[LAYERS + "self_attention.linear_proj.weight"][i]
        model[layer + "mlp.gate_proj.weight"] = stored[LAYERS + "mlp.linear_fc1.weight"][i][:INNER]
        model[layer + "mlp.up_proj.weight"] = stored[LAYERS + "mlp.linear_fc1.weight"][i][INNER:]
        model[layer + "mlp.down_proj.weight"] = stored[LAYERS + "mlp.linear_fc2.weight"][i]
        norm = stored[LAYERS + "self_attention.linear_qkv.layer_norm_weight"][i]
        model[layer + "input_layernorm.weight"] = norm
        model[layer + "post_attention_layernorm.weight"] = stored[LAYERS + "mlp.linear_fc1.layer_norm_weight"][i]
    parts, size = [{}], 0
    for key, value in model.items():
        if parts[-1] and size + value.nbytes > part:
            parts.append({})
            size = 0
        parts[-1][key] = np.ascontiguousarray(value)
        size += value.nbytes
    out.mkdir()
    for number, tensors in enumerate(parts):
        header, at = {}, 0
        for key, value in tensors.items():
            header[key] = {"dtype": "F16", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
            at += value.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(out / f"part-{number}.safetensors", "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for value in tensors.values():
                f.write(value.data)
            os.fsync(f.fileno())


def read(path, limit=None):
    """Reads the file, or its first `limit` bytes, and returns how many bytes a second that were."""
    buffer, total = bytearray(MIB), 0
    with open(path, "rb", buffering=0) as f:
        begin = time.perf_counter()
        while limit is None or total < limit:
            got = f.readinto(buffer)
            if not got:
                break
            total += got
        return total / (time.perf_counter() - begin) / 1e9


def first_byte(path):
    begin = time.perf_counter()
    with open(path, "rb", buffering=0) as f:
        f.read(1)
    return (time.perf_counter() - begin) * 1e3


class Mount:
    def __init__(self, tool, source, target, *options):
        self.tool, self.target = tool, target
        target.mkdir(exist_ok=True)
        subprocess.run([tool, "mount", "-q", source, target, "--verify", "off", *options], check=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run([self.tool, "unmount", self.target], check=True)

    def counters(self):
        return json.loads((self.target / ".tensormount" / "stats").read_text())


def measure_mount(args, folder):
    source, model = folder / "store" / "megatron", folder / "model"
    first = {"part of hf": [], "tensor": []}
    for _ in range(args.rounds):
        with Mount(args.tensormount, source, folder / "mapped", "--as", "hf", "--with", model) as mapped:
            part = sorted((mapped.target / "hf").glob("*.safetensors"))[0]
            first["part of hf"].append(first_byte(part))
            first["tensor"].append(first_byte(mapped.target / "tensors" / "model.layers.0.self_attn.q_proj.weight"))
    for what, times in first.items():
        say(f"first byte, {what}", ms=median(times), rounds=len(times))

    pairs = {
        "query": ("self_attn.q_proj.weight", "self_attention.linear_qkv.weight"),
        "gate": ("mlp.gate_proj.weight", "mlp.linear_fc1.weight"),
        "down": ("mlp.down_proj.weight", "mlp.linear_fc2.weight"),
    }
    with Mount(args.tensormount, source, folder / "mapped", "--as", "hf", "--with", model) as mapped, \
            Mount(args.tensormount, source, folder / "plain", "--tier", "daemon") as plain:
        for what, (name, stored) in pairs.items():
            ours, theirs, served = [], [], []
            target = mapped.target / "tensors" / f"model.layers.{args.layers - 1}.{name}"
            size = target.stat().st_size
            read(target), read(plain.target / "tensors" / (LAYERS + stored), size)
            for _ in range(args.rounds):
                before = mapped.counters()
                ours.append(read(target))
                after = mapped.counters()
                served.append((before, after))
                theirs.append(read(plain.target / "tensors" / (LAYERS + stored), size))
            say(f"mount read, {what}", gb_s=median(ours), plain_gb_s=median(theirs),
                of_plain=median([a / b for a, b in zip(ours, theirs)]), mib=size // MIB,
                read_of_served=read_of_served(served), rounds=len(ours))


def read_of_served(counters):
    """Bytes that the daemon read from the store for each byte that it served."""
    def total(value):
        return sum(value(after) - value(before) for before, after in counters)
    return round(total(lambda c: c["bytes_read_from_storage"]) / total(lambda c: c["bytes"]["daemon"]), 3)


def measure_export(args, folder):
    source, model, out = folder / "store" / "megatron", folder / "model", folder / "out"
    commands = {
        "tensormount": [args.tensormount, "export", "-q", source, out / "ours", "--as", "hf", "--to", "hf",
                        "--with", model, "--hf-part-size", "4GiB"],
        "converter": [sys.executable, "-B", __file__, "--convert", source, out / "theirs"],
    }
    seconds, peak = {name: [] for name in commands}, {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, command in commands.items():
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            begin = time.perf_counter()
            child = subprocess.Popen(list(map(str, command)))
            _, status, usage = os.wait4(child.pid, 0)
            if status != 0:
                sys.exit(f"{name} failed")
            seconds[name].append(time.perf_counter() - begin)
            peak[name].append(usage.ru_maxrss >> 10)
    for name in commands:
        say(f"export, {name}", seconds=median(seconds[name]), peak_mib=median(peak[name], 0), rounds=args.rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tensormount", nargs="?")
    parser.add_argument("--dir", default="/dev/shm", help="where the data are made and removed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--make", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--convert", nargs=2, type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        return make(args.make, args.layers)
    if args.convert:
        return convert(str(args.convert[0]), args.convert[1])
    if args.tensormount is None:
        parser.error("which command? build/release/bin/tensormount")
    args.tensormount = os.path.abspath(args.tensormount)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tensormount-mapped.", dir=args.dir))
    try:
        # In a process of its own: a child's peak memory counts what its parent held when it was forked.
        subprocess.run([sys.executable, "-B", __file__, "--make", folder, "--layers", str(args.layers)], check=True)
        measure_mount(args, folder)
        measure_export(args, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
