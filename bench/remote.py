#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures reads from a server, beside libcurl's multi interface asking for the same ranges. Prints JSON lines.

    cmake --build build/release --target tensormount remotefloor
    PYTHONPATH=python python3 bench/remote.py [--gib 1] [--rounds 7] [--delay-ms 20] [--dir /dev/shm] [--peers]

Starts nginx (of Debian) on the loopback interface, with a checkpoint and a safetensors file of the same tensors in --dir,
and takes turns. Figures: seconds of the median round, and the ratio to the floor of the same round. --delay-ms: each
answer waits so long, in a proxy of this program. --peers: also PyTorch's DCP through fsspec (with torch, fsspec and
aiohttp), and TensorStore reading the tensors as zarr arrays in chunks of 8 MiB without compression (with tensorstore).
  tensor     one tensor of 64 MiB, verified and not
  load       all tensors by one process, verified and not
"""

import argparse
import asyncio
import contextlib
import json
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TENSOR = 64 << 20


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def nginx(folder, root):
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(
        f"worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
        "events { worker_connections 512; }\n"
        f"http {{ access_log off; sendfile on; keepalive_requests 100000; server {{ listen 127.0.0.1:{port}; root {root}; }} }}\n")
    server = subprocess.Popen(["nginx", "-c", str(config)])
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", port
    finally:
        server.terminate()
        server.wait()


class Delay:
    """A proxy that holds the first bytes after each request for some time."""

    def __init__(self, port, seconds):
        self.target, self.seconds, self.port = port, seconds, free_port()
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def serve():
            await asyncio.start_server(self.client, "127.0.0.1", self.port, limit=1 << 20)
            ready.set()

        def run():
            self.loop.run_until_complete(serve())
            self.loop.run_forever()

        threading.Thread(target=run, daemon=True).start()
        ready.wait()

    async def client(self, reader, writer):
        with contextlib.suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target, limit=1 << 20)

            async def down():
                while data := await up_reader.read(1 << 20):
                    writer.write(data)
                    await writer.drain()
                writer.close()

            task = asyncio.ensure_future(down())
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self.seconds)
                up_writer.write(data)
            up_writer.close()
            task.cancel()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--peers", action="store_true")
    args = parser.parse_args()
    import numpy as np
    import tensormount as tm
    from safetensors.numpy import save_file

    work = pathlib.Path(tempfile.mkdtemp(dir=args.dir))
    root = work / "www"
    root.mkdir()
    count = max(1, int(args.gib * (1 << 30)) // TENSOR)
    state = {f"w{i}": np.random.default_rng(i).integers(0, 255, (1024, TENSOR // 1024), np.uint8) for i in range(count)}
    tm.save(state, str(root / "store" / "step"))
    save_file(state, root / "m.safetensors")
    subprocess.run(["chmod", "-R", "a+rX", str(work)], check=True)
    floor = ROOT / "build/release/bin/remotefloor"
    try:
        with nginx(work, root) as (url, port):
            if args.delay_ms:
                url = f"http://127.0.0.1:{Delay(port, args.delay_ms / 1e3).port}"

            def raw(size):
                out = subprocess.run([floor, f"{url}/m.safetensors", str(size), str(8 << 20), "32"],
                                     check=True, capture_output=True, text=True)
                return float(out.stdout)

            def tensor(source, number):
                with tm.open(f"{url}/{source}") as checkpoint:
                    into = np.full_like(state["w0"], 1)  # All pages exist, as those of the floor do.
                    begin = time.perf_counter()
                    checkpoint[f"w{number}"].read(out=into)
                    return time.perf_counter() - begin

            def load(source, verify):
                into = {key: np.full_like(value, 1) for key, value in state.items()}
                begin = time.perf_counter()
                tm.load(into, f"{url}/{source}", verify=verify)
                return time.perf_counter() - begin

            whole = count * TENSOR
            cases = {
                "raw tensor": lambda r: raw(TENSOR),
                "tensor, verified": lambda r: tensor("store/step", r % count),
                "tensor, unverified": lambda r: tensor("m.safetensors", r % count),
                "raw load": lambda r: raw(whole),
                "load, verified": lambda r: load("store/step", "auto"),
                "load, unverified": lambda r: load("store/step", "off"),
            }
            if args.peers:
                import tensorstore
                import torch
                import torch.distributed.checkpoint as dcp
                from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

                torch_state = {key: torch.from_numpy(value) for key, value in state.items()}
                dcp.save(torch_state, checkpoint_id=str(root / "dcp"), no_dist=True)
                subprocess.run(["chmod", "-R", "a+rX", str(work)], check=True)

                def fsspec(r):
                    into = {key: torch.ones_like(value) for key, value in torch_state.items()}
                    begin = time.perf_counter()
                    dcp.load(into, storage_reader=FsspecReader(f"{url}/dcp"), no_dist=True)
                    seconds = time.perf_counter() - begin
                    assert all(torch.equal(into[key], value) for key, value in torch_state.items())
                    return seconds

                cases["DCP by fsspec"] = fsspec

                def of_dcp(r):
                    into = {key: torch.ones_like(value) for key, value in torch_state.items()}
                    begin = time.perf_counter()
                    tm.load(into, f"{url}/dcp")
                    return time.perf_counter() - begin

                cases["load of the DCP folder"] = of_dcp

                chunk = [(8 << 20) // (TENSOR // 1024), TENSOR // 1024]
                for key, value in state.items():
                    tensorstore.open(
                        {"driver": "zarr", "kvstore": f"file://{root}/zarr/{key}/",
                         "metadata": {"shape": value.shape, "chunks": chunk, "dtype": "|u1", "compressor": None}},
                        create=True).result().write(value).result()
                subprocess.run(["chmod", "-R", "a+rX", str(work)], check=True)
                limits = tensorstore.Context({"http_request_concurrency": {"limit": 32}})

                def of_tensorstore(r):
                    into = {key: np.full_like(value, 1) for key, value in state.items()}
                    begin = time.perf_counter()
                    opened = [tensorstore.open({"driver": "zarr", "kvstore": f"{url}/zarr/{key}/"}, open=True,
                                               context=limits) for key in into]
                    copies = [tensorstore.array(value, copy=False).write(array.result())
                              for array, value in zip(opened, into.values())]
                    for copy in copies:
                        copy.result()
                    seconds = time.perf_counter() - begin
                    assert all((into[key] == value).all() for key, value in state.items())
                    return seconds

                cases["TensorStore, zarr"] = of_tensorstore
            taken = {name: [] for name in cases}
            for turn in range(args.rounds + 1):
                for name, case in cases.items():
                    seconds = case(turn)
                    if turn:
                        taken[name].append(seconds)
            for name, seconds in taken.items():
                bytes_read = TENSOR if "tensor" in name else whole
                base = taken["raw tensor" if "tensor" in name else "raw load"]
                print(json.dumps({
                    "bench": "remote", "what": name, "delay_ms": args.delay_ms, "bytes": bytes_read,
                    "ms": round(1e3 * statistics.median(seconds), 1),
                    "gb_s": round(bytes_read / statistics.median(seconds) / 1e9, 2),
                    "of_raw_rate": round(statistics.median(b / s for b, s in zip(base, seconds)), 2)}), flush=True)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
