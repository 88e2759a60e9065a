# SPDX-License-Identifier: Apache-2.0
"""The comparisons of scripts/demo, by NumPy, safetensors and awscrt: nothing of tensormount.

  find-model                          prints the path of the weights in the virtual environment
  largest MODEL                       prints the key of the largest tensor
  mount MODEL CHECKPOINT COUNT        compares every tensor of a mounted checkpoint as raw bytes,
                                      .npy and in model.safetensors; writes how many to COUNT
  digests CHECKPOINT LIST...          digests of `ls --json` equal each other and a CRC-64/NVME
  loaded REPORT                       prints how many tensors a `load --compare --json` compared
  change MODEL OUT KEY                writes the model with one byte of one tensor changed
  begin MODEL STAGING RANKS           makes a staging in a mount, with a schema of the model
  write MODEL STAGING RANK RANKS      writes the rows of one rank through slices/, and its done mark
"""

import json
import pathlib
import struct
import sys

import numpy as np


def fail(message):
    sys.exit(f"demo: {message}")


def read_header(path):
    """The header of a safetensors file and where its data begin, read by hand: bytes as they are."""
    with open(path, "rb") as f:
        (size,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def raw_bytes(path, entry, base):
    with open(path, "rb") as f:
        f.seek(base + entry["data_offsets"][0])
        return f.read(entry["data_offsets"][1] - entry["data_offsets"][0])


def find_model():
    import site

    for folder in site.getsitepackages():
        found = [p for p in pathlib.Path(folder).rglob("*.safetensors")]
        if found:
            print(max(found, key=lambda p: p.stat().st_size))
            return
    fail("no .safetensors file in the virtual environment; pass one: scripts/demo MODEL.safetensors")


def largest(model):
    header, _ = read_header(model)
    print(max(header, key=lambda k: header[k]["data_offsets"][1] - header[k]["data_offsets"][0]))


def compare_mount(model, checkpoint, count_file):
    from safetensors import safe_open

    checkpoint = pathlib.Path(checkpoint)
    header, base = read_header(model)
    view, view_base = read_header(checkpoint / "model.safetensors")
    if set(view) != set(header):
        fail(f"{checkpoint}/model.safetensors has other keys")
    count = 0
    with safe_open(checkpoint / "model.safetensors", framework="numpy") as opened:
        for key, entry in header.items():
            wanted = raw_bytes(model, entry, base)
            if (checkpoint / "tensors" / key).read_bytes() != wanted:
                fail(f"tensors/{key} differs")
            array = np.load(checkpoint / "npy" / (key + ".npy"), mmap_mode="r")
            if list(array.shape) != entry["shape"] or array.tobytes() != wanted:
                fail(f"npy/{key}.npy differs")
            if view[key]["dtype"] != entry["dtype"] or view[key]["shape"] != entry["shape"]:
                fail(f"model.safetensors describes {key} differently")
            if raw_bytes(checkpoint / "model.safetensors", view[key], view_base) != wanted:
                fail(f"{key} differs in model.safetensors")
            # NumPy has no bf16 or fp8: the package can only hand out the others.
            if entry["dtype"] not in ("BF16", "F8_E4M3", "F8_E5M2"):
                if opened.get_tensor(key).tobytes() != wanted:
                    fail(f"{key} differs through the safetensors package")
            count += 1
    listed = sum(1 for p in (checkpoint / "tensors").rglob("*") if p.is_file())
    if listed != len(header):
        fail(f"{listed} files under tensors/, {len(header)} tensors in the model")
    print(f"{count} tensors equal in tensors/, npy/ and model.safetensors")
    pathlib.Path(count_file).write_text(str(count))


def compare_digests(checkpoint, lists):
    from awscrt import checksums

    def load(path):
        return {t["key"]: t["digest"] for t in map(json.loads, open(path, encoding="utf-8"))}

    first = load(lists[0])
    for other in lists[1:]:
        if load(other) != first:
            fail(f"digests in {other} differ from those in {lists[0]}")
    for key, digest in first.items():
        data = (pathlib.Path(checkpoint) / "tensors" / key).read_bytes()
        crc = checksums.crc64nvme(data)
        if f"{crc:016x}" != digest:
            fail(f"{key}: digest {digest}, awscrt says {crc:016x}")
    print(f"{len(first)} digests equal under {len(lists)} shardings, and awscrt agrees")


def loaded(report):
    with open(report, encoding="utf-8") as f:
        line = [l for l in f if l.startswith("{")][-1]
    result = json.loads(line)
    if result["different_tensors"] != 0 or result["compared_bytes"] != result["bytes_wanted"]:
        fail(f"load differs: {line}")
    if result["bytes_unverified"] != 0:
        fail(f"not all bytes were verified: {line}")
    print(result["tensors"])


def change(model, out, key):
    header, base = read_header(model)
    data = bytearray(pathlib.Path(model).read_bytes())
    data[base + header[key]["data_offsets"][0]] ^= 1
    pathlib.Path(out).write_bytes(data)
    print(f"changed one bit of {key}")


def begin(model, staging, ranks):
    header, _ = read_header(model)
    names = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32", "I16": "i16",
             "I8": "i8", "U8": "u8", "BOOL": "bool", "F8_E4M3": "f8e4m3", "F8_E5M2": "f8e5m2"}
    staging = pathlib.Path(staging)
    staging.mkdir()
    tensors = {k: {"dtype": names[e["dtype"]], "shape": e["shape"]} for k, e in header.items()}
    (staging / "schema.json").write_text(json.dumps({"tensors": tensors, "writers": ranks}))
    print(f"schema.json of {len(tensors)} tensors")


def write(model, staging, rank, ranks):
    """What any program does that holds rows: a plain file of just these, under the name of the slice."""
    header, base = read_header(model)
    staging = pathlib.Path(staging)
    written = 0
    for key, entry in header.items():
        data = raw_bytes(model, entry, base)
        rows = entry["shape"][0] if entry["shape"] else 1
        each = -(-rows // ranks)
        first, last = min(rank * each, rows), min((rank + 1) * each, rows)
        if first == last:
            continue
        size = len(data) // rows
        path = staging / "slices" / (f"{key}[{first}:{last}]" if entry["shape"] else f"{key}[]")
        path.write_bytes(data[first * size : last * size])
        written += (last - first) * size
    (staging / "done" / str(rank)).touch()
    print(f"rank {rank}: {written} bytes")


def main(argv):
    commands = {
        "find-model": lambda: find_model(),
        "largest": lambda: largest(argv[2]),
        "mount": lambda: compare_mount(argv[2], argv[3], argv[4]),
        "digests": lambda: compare_digests(argv[2], argv[3:]),
        "loaded": lambda: loaded(argv[2]),
        "change": lambda: change(argv[2], argv[3], argv[4]),
        "begin": lambda: begin(argv[2], argv[3], int(argv[4])),
        "write": lambda: write(argv[2], argv[3], int(argv[4]), int(argv[5])),
    }
    if len(argv) < 2 or argv[1] not in commands:
        sys.exit(__doc__)
    commands[argv[1]]()


if __name__ == "__main__":
    main(sys.argv)
