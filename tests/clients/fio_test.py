# SPDX-License-Identifier: Apache-2.0
"""fio proves every block: files that fio wrote with its own marks are saved as tensors, cut in awkward ways, and read
back through the mount by four fio processes.

A mark is a header with magic, length, offset and checksum at every `interval` bytes, so a block that is wrong, moved
or missing is found. An odd interval makes every read begin and end at odd offsets.
"""

import concurrent.futures
import json

import clients

clients.programs("fio")
harness = clients.harness

ROWS = 1024
ODD = 4093
EVEN = 4096
RULES = {
    "columns": ["--shard", "cols", "--ranks", "3"],
    "second axis": ["--shard", "dim:1", "--ranks", "4", "--placement", "rank-shard"],
    "grid": ["--shard", "grid:2x3", "--ranks", "6"],
    "flat, uneven": ["--shard", "flat", "--ranks", "7"],
    "rows": ["--shard", "rows", "--ranks", "5"],
}


class Fio(clients.ClientTest):
    def setUp(self):
        super().setUp()
        self.tensors = {}
        for key, interval, kind in [("odd", ODD, "xxhash"), ("even", EVEN, "crc32c")]:
            self.sh("fio", "--name=write", f"--filename={self.dir / key}", f"--size={interval * ROWS}", f"--bs={interval}",
                    "--rw=write", "--ioengine=psync", f"--verify={kind}", "--do_verify=0", "--verify_state_save=0")
            # As rows of another length than the interval: cuts fall into the blocks.
            shape = {"odd": (ODD, ROWS), "even": (ROWS // 8, EVEN * 8)}[key]
            self.tensors[key] = ("U8", shape, (self.dir / key).read_bytes())
        harness.write_safetensors(self.model, self.tensors)

    def read_back(self, path, interval, kind, access, direct):
        """By four processes at once, each its quarter, in blocks of several sizes."""
        quarter = interval * (ROWS // 4)
        output = f"fio-{kind}-{access}.json"
        command = ["fio", "--output-format=json", f"--output={output}", "--readonly"]
        for i, blocks in enumerate((1, 4, 16, 64)):
            command += [f"--name=process{i}", f"--filename={path}", f"--rw={access}", "--ioengine=psync",
                        f"--bs={interval * blocks}", f"--offset={quarter * i}", f"--size={quarter}",
                        f"--verify={kind}", f"--verify_interval={interval}", "--verify_fatal=1",
                        f"--direct={direct}", "--allow_file_create=0", "--randseed=7"]
        done = self.sh(*command, expect=None)
        text = (self.dir / output).read_text()
        self.assertIn("{", text, f"{command}\n{done}{text}")
        jobs = json.loads(text[text.index("{"):])["jobs"]
        self.assertEqual([(job["error"], job["read"]["io_bytes"]) for job in jobs], [(0, quarter)] * 4,
                         f"{command}\n{done}{text[:text.index('{')]}")

    def run_all(self, placement, direct):
        for i, (name, rule) in enumerate(RULES.items()):
            self.save(f"step-{i}", *rule, *placement)
        with self.mounted(self.store) as mnt:
            for i, name in enumerate(RULES):
                with self.subTest(shard=name):
                    tensors = mnt / f"step-{i}" / "tensors"
                    # Beside each other: fio mostly waits for its own processes.
                    with concurrent.futures.ThreadPoolExecutor(4) as pool:
                        readings = []
                        for access in ["read", "randread"]:
                            readings.append(pool.submit(self.read_back, tensors / "even", EVEN, "crc32c", access, direct))
                            if not direct:  # Which wants even offsets.
                                readings.append(pool.submit(self.read_back, tensors / "odd", ODD, "xxhash", access, 0))
                    for reading in readings:
                        reading.result()

    def test_fio_verifies_cached_reads(self):
        self.run_all([], 0)

    def test_fio_verifies_direct_reads(self):
        self.run_all([], 1)


if __name__ == "__main__":
    clients.main()
