# SPDX-License-Identifier: Apache-2.0
"""The programs of coreutils and findutils, and Python's own file calls, on a mount."""

import errno
import hashlib
import mmap
import os
import pathlib
import shutil

import clients


class Programs(clients.ClientTest):
    """Every test mounts a checkpoint of column shards, so that most files are many short runs."""

    def setUp(self):
        super().setUp()
        self.save("step-1", "--shard", "cols", "--ranks", "3")
        for key, raw in self.expected().items():
            path = self.dir / "want" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        (self.dir / "keys").write_text("".join(f"{key}\n" for key in self.tensors))
        mounted = self.mounted(self.store)
        self.root = mounted.__enter__() / "step-1"
        self.addCleanup(mounted.__exit__, None, None, None)

    def test_cat_and_cp_read_every_byte(self):
        self.sh("cp", "-r", self.root / "tensors", "copy")
        self.check_copy(self.dir / "copy")
        self.sh("cp", "-a", "--sparse=always", self.root / "tensors", "sparse")
        self.check_copy(self.dir / "sparse")
        self.sh(f"cd {self.root}/tensors; find . -type f -printf '%P\\n' | sort | xargs cat > {self.dir}/all")
        want = b"".join(raw for _, raw in sorted(self.expected().items()))
        self.assertEqual((self.dir / "all").read_bytes(), want)

    def test_cmp_and_diff_find_only_real_differences(self):
        self.sh("while read -r key; do cmp MNT/step-1/tensors/$key want/$key; done < keys")
        self.sh("diff", "-r", self.root / "tensors", "want")
        # And they see a difference.
        with open(self.dir / "want" / "big", "r+b") as f:
            f.seek(3_000_001)
            f.write(bytes([self.tensors["big"][2][3_000_001] ^ 4]))
        self.assertIn("3000002", self.sh("cmp", self.root / "tensors" / "big", "want/big", expect=1))

    def test_checksum_programs_agree(self):
        lines = "".join(f"{hashlib.sha256(raw).hexdigest()}  {key}\n" for key, raw in self.expected().items())
        (self.dir / "sums").write_text(lines)
        self.sh(f"cd {self.root}/tensors; sha256sum --strict --quiet -c {self.dir}/sums")
        self.sh(f"cd want; xargs -d '\\n' cksum < ../keys > ../a; cd {self.root}/tensors;"
                f"xargs -d '\\n' cksum < {self.dir}/keys > {self.dir}/b; cmp {self.dir}/a {self.dir}/b")

    def test_dd_reads_exactly_with_odd_sizes(self):
        raw = self.tensors["big"][2]
        big = self.root / "tensors" / "big"
        for size, skip, count in [(1, 4_095, 3), (511, 7, 300), (4_097, 1, 200), (65_537, 2, 20), (1_000_003, 1, 9)]:
            self.sh("dd", f"if={big}", "of=part", f"bs={size}", f"skip={skip}", f"count={count}", "status=none")
            begin = size * skip
            self.assertEqual((self.dir / "part").read_bytes(), raw[begin:begin + size * count])
        self.sh("dd", f"if={big}", "of=part", "bs=1M", "iflag=skip_bytes,count_bytes", "skip=123457", "count=2500001",
                "status=none")
        self.assertEqual((self.dir / "part").read_bytes(), raw[123457:123457 + 2500001])
        self.sh("dd", f"if={big}", "of=part", "bs=64K", "iflag=direct", "status=none")
        self.assertEqual((self.dir / "part").read_bytes(), raw)

    def test_head_tail_split_and_od_read_exactly(self):
        raw = self.tensors["big"][2]
        big = self.root / "tensors" / "big"
        self.sh(f"tail -c 100003 {big} > tail; head -c 70001 {big} > head; tail -c +4000001 {big} > rest;"
                f"split -b 300007 {big} piece.; cat piece.* > whole")
        self.assertEqual((self.dir / "tail").read_bytes(), raw[-100003:])
        self.assertEqual((self.dir / "head").read_bytes(), raw[:70001])
        self.assertEqual((self.dir / "rest").read_bytes(), raw[4000000:])
        self.assertEqual((self.dir / "whole").read_bytes(), raw)
        self.sh(f"od -An -tx1 -v -j 2000001 -N 5000 {big} > a; od -An -tx1 -v -j 2000001 -N 5000 want/big > b; cmp a b")

    def test_stat_and_du_report_true_sizes(self):
        sizes = {key: len(raw) for key, raw in self.expected().items()}
        for key, size in sizes.items():
            path = self.root / "tensors" / key
            self.assertEqual(self.sh("stat", "-c", "%s %F", path).split(None, 1)[0], str(size))
            self.assertEqual(self.sh("wc", "-c", path).split()[0], str(size))
        listed = self.sh("find", self.root / "tensors", "-type", "f", "-printf", "%P %s\n")
        self.assertEqual(dict((k, int(s)) for k, s in (l.rsplit(" ", 1) for l in listed.splitlines())), sizes)
        large = self.sh("find", self.root / "tensors", "-type", "f", "-size", "+4095c").split()
        self.assertEqual(sorted(large), sorted(str(self.root / "tensors" / k) for k, s in sizes.items() if s > 4095))
        empty = self.sh("find", self.root / "tensors", "-type", "f", "-empty").split()
        self.assertEqual(empty, [str(self.root / "tensors" / "empty")])
        in_root = {p.name for p in (self.root / "tensors").iterdir() if p.is_file()}
        for line in self.sh("ls", "-l", self.root / "tensors").splitlines():
            if line.startswith("-"):
                fields = line.split()
                self.assertEqual(int(fields[4]), sizes[fields[-1]])
                in_root.remove(fields[-1])
        self.assertEqual(in_root, set())
        used = self.sh("du", "-s", "--apparent-size", "-B1", self.root / "tensors").split()[0]
        folders = sum(os.stat(p).st_size for p in [self.root / "tensors", *(self.root / "tensors").rglob("*")]
                      if p.is_dir())
        self.assertEqual(int(used), sum(sizes.values()) + folders)
        # Blocks are counted too, so that a plain du is right within a block a file.
        blocks = int(self.sh("du", "-s", "-B1", self.root / "tensors").split()[0])
        self.assertLess(abs(blocks - sum(sizes.values())), 8192 * (len(sizes) + 4))

    def test_writing_is_refused(self):
        for command in ["touch MNT/step-1/tensors/w", "cp want/w MNT/step-1/tensors/w", "rm MNT/step-1/tensors/w",
                        "mv MNT/step-1/tensors/w MNT/step-1/tensors/v", "truncate -s 0 MNT/step-1/tensors/w",
                        "mkdir MNT/step-1/tensors/x", "ln -s a MNT/step-1/tensors/x"]:
            self.assertIn("Read-only file system", self.sh(command, expect=1))


class Calls(clients.ClientTest):
    def setUp(self):
        super().setUp()
        self.save("step-1", "--shard", "cols", "--ranks", "3")
        mounted = self.mounted(self.store / "step-1")
        self.big = mounted.__enter__() / "tensors" / "big"
        self.addCleanup(mounted.__exit__, None, None, None)
        self.raw = self.tensors["big"][2]

    def check(self, path="out", begin=0):
        self.assertEqual((self.dir / path).read_bytes(), self.raw[begin:])

    def test_kernel_copies_are_exact(self):
        shutil.copyfile(self.big, self.dir / "out")  # sendfile
        self.check()
        # The kernel copies ranges within one kind of file system only; cp and others then go on
        # with reads.
        with open(self.big, "rb") as source, open(self.dir / "ranges", "wb") as sink:
            with self.assertRaises(OSError) as caught:
                os.copy_file_range(source.fileno(), sink.fileno(), 300_001, 777)
            self.assertEqual(caught.exception.errno, errno.EXDEV)
        reader, writer = os.pipe()
        with open(self.big, "rb") as source, open(self.dir / "spliced", "wb") as sink:
            offset = 4_095
            while moved := os.splice(source.fileno(), writer, 50_001, offset_src=offset):
                offset += moved
                while moved > 0:
                    moved -= os.splice(reader, sink.fileno(), moved)
        os.close(reader)
        os.close(writer)
        self.check("spliced", 4_095)

    def test_preadv_and_mmap_read_exactly(self):
        fd = os.open(self.big, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        buffers = [bytearray(n) for n in (1, 4_097, 100_003, 3)]
        total = os.preadv(fd, buffers, 65_531)
        self.assertEqual(total, sum(map(len, buffers)))
        self.assertEqual(b"".join(buffers), self.raw[65_531:65_531 + total])
        self.assertEqual(os.pread(fd, 100, len(self.raw) - 7), self.raw[-7:])
        self.assertEqual(os.pread(fd, 100, len(self.raw) + 7), b"")
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            self.assertEqual(mapped.find(self.raw[3_333_333:3_333_365]), 3_333_333)
            self.assertEqual(mapped[1_000_001:2_000_003], self.raw[1_000_001:2_000_003])

    def test_python_files_read_exactly(self):
        with open(self.big, "rb", buffering=8191) as f:
            f.seek(-100_001, os.SEEK_END)
            self.assertEqual(f.read(), self.raw[-100_001:])
            f.seek(12_345)
            self.assertEqual(b"".join(iter(lambda: f.read(65_521), b"")), self.raw[12_345:])
        self.assertEqual(pathlib.Path(self.big).stat().st_size, len(self.raw))


if __name__ == "__main__":
    clients.main()
