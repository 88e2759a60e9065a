#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of others that lie, one a name: tests/golden/bad/KIND/CODE-what.

usage: make_bad.py [DIRECTORY]      writes them anew (default: tests/golden/bad); the same every time

KIND  pickle, zip: what the parser of that says
      source: a file or folder that is opened as SOURCE
CODE  what must come of it; OK: it opens, and what is wrong with a part of it is a warning
"""

import json
import pathlib
import shutil
import struct
import sys
import zlib


# --- Pickles: operations as bytes ---
def num(n):
    """Any integer, as LONG1."""
    size = max(1, (n.bit_length() + 8) // 8)
    return b"\x8a" + bytes([size]) + n.to_bytes(size, "little", signed=True)


def text(s):
    s = s.encode() if isinstance(s, str) else s
    return b"X" + struct.pack("<I", len(s)) + s


def name(module, what):
    return b"c" + module.encode() + b"\n" + what.encode() + b"\n"


def tup(*items):
    return b"(" + b"".join(items) + b"t"


def lst(*items):
    return b"](" + b"".join(items) + b"e"


def dct(pairs):
    return b"}(" + b"".join(k + v for k, v in pairs) + b"u"


def call(function, *args):
    return function + tup(*args) + b"R"


def stream(operations, protocol=4):
    return b"\x80" + bytes([protocol]) + operations + b"."


TRUE, FALSE, NONE = b"\x88", b"\x89", b"N"


def pickles():
    yield "DATA_LOSS-empty", b""
    yield "DATA_LOSS-no-proto", b"N."
    yield "DATA_LOSS-text-protocol", b"(dp0\nS'a'\np1\nI1\ns."
    yield "DATA_LOSS-no-stop", b"\x80\4N"
    yield "DATA_LOSS-nothing-left", stream(b"")
    yield "DATA_LOSS-two-values", stream(b"NN")
    yield "DATA_LOSS-mark-left", stream(b"N(")
    yield "DATA_LOSS-trailing-bytes", stream(b"N") + b"junk"
    yield "DATA_LOSS-second-proto", stream(b"N\x80\4")
    yield "UNSUPPORTED-protocol-1", stream(b"N", 1)
    yield "UNSUPPORTED-protocol-6", stream(b"N", 6)
    yield "UNSUPPORTED-protocol-255", stream(b"N", 255)
    for code, what in [(b"i", "inst"), (b"o", "obj"), (b"\x82", "ext1"), (b"\x83", "ext2"), (b"\x84", "ext4"),
                       (b"P", "persid"), (b"\x97", "next-buffer"), (b"\x98", "readonly-buffer"), (b"2", "dup"),
                       (b"I", "int"), (b"L", "long"), (b"F", "float"), (b"S", "string"), (b"T", "binstring"),
                       (b"U", "short-binstring"), (b"V", "unicode"), (b"d", "dict"), (b"l", "list"), (b"g", "get"),
                       (b"p", "put")]:
        yield "UNSUPPORTED-operation-" + what, stream(b"N(N" + code + b"os\nsystem\n")
    for byte in [0, 0x7f, 0x99, 0xff]:
        yield f"DATA_LOSS-operation-{byte}", stream(b"N" + bytes([byte]))
    for module, what in [("os", "system"), ("posix", "system"), ("nt", "system"), ("builtins", "eval"),
                         ("builtins", "exec"), ("builtins", "compile"), ("builtins", "__import__"),
                         ("builtins", "open"), ("builtins", "setattr"), ("builtins", "delattr"),
                         ("builtins", "globals"), ("builtins", "vars"), ("__builtin__", "eval"),
                         ("__builtin__", "apply"), ("__builtin__", "file"), ("subprocess", "Popen"),
                         ("subprocess", "check_output"), ("importlib", "import_module"), ("runpy", "run_path"),
                         ("functools", "partial"), ("functools", "reduce"), ("operator", "attrgetter"),
                         ("operator", "methodcaller"), ("types", "FunctionType"), ("types", "CodeType"),
                         ("shutil", "rmtree"), ("socket", "socket"), ("ctypes", "CDLL"), ("pickle", "loads"),
                         ("_pickle", "loads"), ("torch", "load"), ("torch.hub", "load"),
                         ("torch.utils.cpp_extension", "load"), ("numpy", "load"), ("numpy.lib.npyio", "load"),
                         ("urllib.request", "urlopen"), ("code", "InteractiveInterpreter"), ("pty", "spawn"),
                         ("webbrowser", "open"), ("asyncio", "run"), ("os.path", "exists"), ("sys", "exit"),
                         ("megatron.core.utils", "os.system"), ("megatron.core.utils", "run"),
                         ("olmo_core.utils", "subprocess.run"), ("collections", "OrderedDict.__init__"),
                         ("torch", "_utils._rebuild_tensor_v2"), ("", ""), ("a" * 300, "b" * 300)]:
        label = (module + "." + what)[:60]
        yield "UNSUPPORTED-asks-for-" + (label.strip(".") or "nothing"), stream(call(name(module, what), text("true")))
    yield "UNSUPPORTED-asks-by-stack-global", stream(text("os") + text("system") + b"\x93" + tup(text("id")) + b"R")
    yield "UNSUPPORTED-asks-by-memo", stream(text("os") + b"\x940" + text("system") + b"\x940h\0h\1\x93)R")
    yield "UNSUPPORTED-asks-by-newobj", stream(name("subprocess", "Popen") + tup(text("id")) + b"\x81")
    yield "UNSUPPORTED-asks-by-newobj-ex", stream(name("subprocess", "Popen") + b")}\x92")
    yield "UNSUPPORTED-name-with-newline-escape", stream(text("o\ns") + text("sys\x1b[2Jtem") + b"\x93")
    yield "UNSUPPORTED-getattr-of-a-tensor", stream(call(name("builtins", "getattr"), name("torch", "Tensor"),
                                                         text("__reduce__")))
    yield "UNSUPPORTED-getattr-of-a-list", stream(call(name("builtins", "getattr"), b"]", text("append")))
    yield "UNSUPPORTED-getattr-with-default", stream(call(name("builtins", "getattr"), name("torch", "Size"),
                                                          text("x"), NONE))
    yield "UNSUPPORTED-calls-none", stream(b"N)R")
    yield "UNSUPPORTED-calls-what-a-call-gave", stream(call(name("collections", "OrderedDict")) + b")R")
    yield "UNSUPPORTED-newobj-of-text", stream(text("os") + b")\x81")
    yield "DATA_LOSS-calls-a-dtype", stream(name("torch", "float32") + b")R")
    yield "DATA_LOSS-arguments-are-a-list", stream(name("torch", "Size") + b"]R")
    yield "DATA_LOSS-build-of-none", stream(b"N}b")
    yield "DATA_LOSS-build-of-a-size", stream(call(name("torch", "Size"), tup(num(1))) + b"}b")
    yield "DATA_LOSS-build-twice", stream(call(name("collections", "OrderedDict")) + b"}b}b")
    yield "DATA_LOSS-append-to-none", stream(b"NNa")
    yield "DATA_LOSS-append-to-a-tuple", stream(b")Na")
    yield "DATA_LOSS-appends-to-the-mark", stream(b"(Ne")
    yield "DATA_LOSS-setitem-of-a-list", stream(b"]NNs")
    yield "DATA_LOSS-setitems-odd", stream(b"}(NNNu")
    yield "DATA_LOSS-additems-of-a-list", stream(b"](N\x90")
    yield "DATA_LOSS-stack-global-of-none", stream(b"NN\x93")
    yield "DATA_LOSS-pop-of-nothing", stream(b"0")
    yield "DATA_LOSS-pop-mark-of-nothing", stream(b"N1")
    yield "DATA_LOSS-tuple-without-mark", stream(b"Nt")
    yield "DATA_LOSS-tuple3-of-two", stream(b"NN\x87")
    yield "DATA_LOSS-tuple-over-a-mark", stream(b"N(\x85")
    yield "DATA_LOSS-reduce-over-a-mark", stream(name("torch", "Size") + b"()R")
    yield "DATA_LOSS-memo-never-filled", stream(b"h\5")
    yield "DATA_LOSS-memo-long-never-filled", stream(b"j" + b"\xff" * 4)
    yield "DATA_LOSS-memo-far-ahead", stream(b"Nr\xff\xff\xff\x7f")
    yield "DATA_LOSS-memo-4-billion", stream(b"Nr\xff\xff\xff\xff")
    yield "DATA_LOSS-memoize-of-nothing", stream(b"\x94")
    yield "DATA_LOSS-binput-of-nothing", stream(b"q\0")
    yield "DATA_LOSS-text-past-the-end", stream(b"X\xff\xff\xff\x7fa")
    yield "DATA_LOSS-text-of-2-to-64", stream(b"\x8d" + b"\xff" * 8 + b"a")
    yield "DATA_LOSS-bytes-of-2-to-63", stream(b"\x8e" + b"\0" * 7 + b"\x80a")
    yield "DATA_LOSS-bytearray-past-the-end", stream(b"\x96" + b"\xff" * 8, 5)
    yield "DATA_LOSS-frame-past-the-end", stream(b"\x95" + b"\xff" * 8 + b"N")
    yield "DATA_LOSS-number-of-negative-length", stream(b"\x8b\xff\xff\xff\xff")
    yield "DATA_LOSS-number-past-the-end", stream(b"\x8b\xff\xff\xff\x7f")
    yield "DATA_LOSS-float-cut", b"\x80\4G\0\0"
    yield "DATA_LOSS-int-cut", b"\x80\4J\0"
    yield "DATA_LOSS-name-cut", b"\x80\4cos"
    yield "DATA_LOSS-text-no-utf8", stream(b"\x8c\1\xff")
    yield "DATA_LOSS-text-surrogate", stream(b"\x8c\3\xed\xa0\x80")
    yield "DATA_LOSS-text-overlong", stream(b"\x8c\2\xc0\xaf")
    yield "DATA_LOSS-name-no-utf8", stream(b"cos\n\xff\xfe\n")
    # These are pickles; looking at them must stay cheap.
    yield "OK-list-of-itself", stream(b"]\x94h\0a")
    yield "OK-dict-of-itself", stream(b"}\x94" + text("a") + b"h\0s")
    yield "OK-nested-20000-lists", stream(b"]" * 20000 + b"a" * 19999)
    yield "OK-nested-20000-tuples", stream(b"N" + b"\x85" * 20000)
    bomb = b"]\x94"
    for i in range(40):  # 2^40 leaves, written twice each.
        bomb += b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94"
    yield "OK-billion-laughs", stream(b"(" + bomb + b"t")
    shared = b"N\x940" + b"".join(b"h" + bytes([i, 0x68, i]) + b"\x86\x940" for i in range(60))
    yield "OK-shared-tuples", stream(shared + b"h<")


# --- Zip archives ---
class Zip:
    """Every argument of add() and end() that is given replaces what would be true."""

    def __init__(self):
        self.out, self.listing, self.count = b"", b"", 0

    def add(self, entry, data=b"", flags=0, method=0, described=False, crc=None, size=None, packed=None, header=None,
            local_name=None, local_flags=None, local_method=None, local_size=None, local_crc=None, descriptor_size=None,
            descriptor_crc=None, descriptor=True, extra=b"", disk=0, local_signature=b"PK\3\4"):
        entry = entry.encode() if isinstance(entry, str) else entry
        begin = len(self.out)
        true = zlib.crc32(data)
        crc = true if crc is None else crc
        flags |= 8 if described else 0
        pick = lambda a, b: b if a is None else a
        said = 0 if described else pick(local_size, len(data))
        shown = pick(local_name, entry)
        self.out += local_signature + struct.pack(
            "<HHHIIIIHH", 0, pick(local_flags, flags), pick(local_method, method), 0,
            0 if described else pick(local_crc, crc), said, said, len(shown), len(extra)) + shown + extra + data
        if described and descriptor:
            n = pick(descriptor_size, len(data))
            self.out += struct.pack("<IIII", 0x08074b50, pick(descriptor_crc, crc), n, n)
        size = pick(size, len(data))
        self.listing += struct.pack("<IHHHHIIIIHHHHHII", 0x02014b50, 0, 0, flags, method, 0, crc, pick(packed, size),
                                    size, len(entry), len(extra), 0, disk, 0, 0, pick(header, begin)) + entry + extra
        self.count += 1
        return self

    def end(self, count=None, here=None, size=None, at=None, disk=0, comment=b"", zip64=False, locator=None, count64=None,
            size64=None, at64=None, record64=44, comment_size=None):
        pick = lambda a, b: b if a is None else a
        begin = len(self.out)
        out = self.out + self.listing
        if zip64:
            n = pick(count64, self.count)
            where = len(out)
            out += struct.pack("<IQHHIIQQQQ", 0x06064b50, record64, 0, 0, 0, 0, n, n, pick(size64, len(self.listing)),
                               pick(at64, begin))
            out += struct.pack("<IIQI", 0x07064b50, 0, pick(locator, where), 1)
        n = pick(count, self.count)
        out += struct.pack("<IHHHHIIH", 0x06054b50, disk, disk, pick(here, n), n, pick(size, len(self.listing)),
                           pick(at, begin), pick(comment_size, len(comment))) + comment
        return out


def zips():
    two = lambda **first: Zip().add("a/one", b"first", **first).add("a/two", b"second")
    yield "DATA_LOSS-empty", b""
    yield "DATA_LOSS-no-end-record", two().end()[:-8]
    yield "DATA_LOSS-only-signatures", b"PK\5\6" * 20
    yield "DATA_LOSS-cut-in-the-middle", two().end()[:60]
    for what, label in [("/etc/passwd", "absolute"), ("../x", "parent"), ("a/../../x", "parent-inside"), ("a/..", "parent-last"),
                        ("./a", "dot"), ("a\0b", "nul"), ("a\\b", "backslash"), ("a\nb", "newline"), (b"a\xff", "no-utf8"),
                        ("", "empty"), ("a\x1b[2J", "escape")]:
        yield "DATA_LOSS-name-" + label, Zip().add(what, b"data").end()
    yield "DATA_LOSS-name-twice", Zip().add("a", b"1").add("a", b"2").end()
    yield "DATA_LOSS-local-name-other", two(local_name=b"a/onf").end()
    yield "DATA_LOSS-local-name-shorter", two(local_name=b"a").end()
    yield "DATA_LOSS-local-method-other", two(local_method=8).end()
    yield "DATA_LOSS-local-flags-other", two(local_flags=0x800).end()
    yield "DATA_LOSS-local-size-other", two(local_size=4).end()
    yield "DATA_LOSS-local-crc-other", two(local_crc=1).end()
    yield "DATA_LOSS-no-local-header", two(local_signature=b"KP\3\4").end()
    yield "DATA_LOSS-descriptor-size-other", two(described=True, descriptor_size=4).end()
    yield "DATA_LOSS-descriptor-crc-other", two(described=True, descriptor_crc=4).end()
    yield "DATA_LOSS-descriptor-missing", two(described=True, descriptor=False).end()
    yield "DATA_LOSS-two-sizes", two(packed=4).end()
    yield "DATA_LOSS-size-past-the-end", two(size=5000).end()
    yield "DATA_LOSS-size-4-gib", two(size=0xfffffffe).end()
    yield "DATA_LOSS-size-says-zip64", two(size=0xffffffff).end()
    yield "DATA_LOSS-header-past-the-end", two(header=0x7fffffff).end()
    yield "DATA_LOSS-header-in-data", two(header=3).end()
    yield "DATA_LOSS-overlap", Zip().add("a", Zip().add("b", b"inner").out + b"x").add("b", b"inner", header=31).end()
    yield "DATA_LOSS-same-header", Zip().add("a", b"1").add("b", b"1", header=0).end()
    yield "DATA_LOSS-extra-past-its-end", two(extra=struct.pack("<HH", 9, 500)).end()
    yield "DATA_LOSS-zip64-field-twice", two(extra=struct.pack("<HHQ", 1, 8, 1) * 2).end()
    yield "UNSUPPORTED-deflated", two(method=8).end()
    yield "UNSUPPORTED-lzma", two(method=14).end()
    yield "UNSUPPORTED-encrypted", two(flags=1).end()
    yield "UNSUPPORTED-encrypted-strongly", two(flags=64).end()
    yield "UNSUPPORTED-masked", two(flags=1 << 13).end()
    yield "UNSUPPORTED-other-disk", two(disk=3).end()
    yield "UNSUPPORTED-several-disks", two().end(disk=1)
    yield "DATA_LOSS-count-too-small", two().end(count=1)
    yield "DATA_LOSS-count-too-large", two().end(count=60000)
    yield "DATA_LOSS-counts-differ", two().end(here=1)
    yield "DATA_LOSS-directory-elsewhere", two().end(at=1)
    yield "DATA_LOSS-directory-too-large", two().end(size=0x7fffffff)
    yield "DATA_LOSS-directory-too-small", two().end(size=10)
    yield "DATA_LOSS-zip64-missing", two().end(count=0xffff)
    yield "DATA_LOSS-zip64-locator-astray", two().end(zip64=True, locator=3)
    yield "DATA_LOSS-zip64-locator-2-to-64", two().end(zip64=True, locator=(1 << 64) - 1)
    yield "DATA_LOSS-zip64-count-differs", two().end(zip64=True, count64=1)
    yield "DATA_LOSS-zip64-count-2-to-64", two().end(zip64=True, count=0xffff, count64=(1 << 64) - 1)
    yield "DATA_LOSS-zip64-size-2-to-64", two().end(zip64=True, size=0xffffffff, size64=(1 << 64) - 1)
    yield "DATA_LOSS-zip64-place-2-to-64", two().end(zip64=True, at=0xffffffff, at64=(1 << 64) - 50)
    yield "DATA_LOSS-zip64-record-longer", two().end(zip64=True, record64=1 << 40)
    yield "DATA_LOSS-comment-longer", two().end(comment_size=10)
    yield "DATA_LOSS-directory-with-more", two().end(count=1)


# --- What is opened as SOURCE: a file, or a dict of them ---
def tensor(count=12, first=0, shape=(3, 4), stride=(4, 1), storage="FloatStorage", key="0", kind="storage",
           metadata=b""):
    ident = tup(text(kind), name("torch", storage), text(key), text("cpu"), num(count)) + b"Q"
    ordered = name("collections", "OrderedDict") + b")R"
    return name("torch._utils", "_rebuild_tensor_v2") + tup(
        ident, num(first), tup(*map(num, shape)), tup(*map(num, stride)), FALSE, ordered, metadata) + b"R"


def archive(operations, payload=b"x" * 48, byteorder=b"little", key="archive/data/0", order="archive/byteorder", more=None,
            **crooked):
    z = Zip().add("archive/data.pkl", stream(operations, 2), described=True, **crooked)
    z.add(order, byteorder, described=True)
    z.add(key, payload, described=bool(payload))
    z.add("archive/version", b"3\n", described=True)
    if more:
        z.add(more, b"x", described=True)
    return z.end(zip64=True)


def two_ends():
    """A second end record in the comment of the first, with a comment that would be longer than what is left."""
    one = archive(dct([(text("w"), tensor())]))
    end = struct.pack("<IHHHHIIH", 0x06054b50, 0, 0, 0, 0, 0, 0, 9)
    return one[:-2] + struct.pack("<H", len(end)) + end


def dcp(tensors, files=None, extra=()):
    """tensors: name -> (size, [(offsets, sizes, path, offset, length)])"""
    m = "torch.distributed.checkpoint.metadata"
    new = lambda cls, pairs: name(m, cls) + b")\x81" + dct([(text(k), v) for k, v in pairs]) + b"b"
    size = lambda dims: call(name("torch", "Size"), tup(*map(num, dims)))
    properties = name(m, "TensorProperties") + b")\x81" + tup(
        name("torch", "float32"), call(name("torch.serialization", "_get_layout"), text("torch.strided")), FALSE,
        call(name(m, "_MEM_FORMAT_ENCODING"), num(0)), FALSE) + b"b"
    metadata, storage = [], []
    for key, (shape, chunks) in tensors:
        metadata.append((text(key), new("TensorStorageMetadata", [
            ("properties", properties), ("size", size(shape)),
            ("chunks", lst(*(new("ChunkStorageMetadata", [("offsets", size(c[0])), ("sizes", size(c[1]))])
                             for c in chunks)))])))
        for offsets, _, path, offset, length in chunks:
            info = name("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b")\x81" + dct([
                (text("relative_path"), text(path)), (text("offset"), num(offset)), (text("length"), num(length))]) + b"b"
            storage.append((new("MetadataIndex", [("fqn", text(key)), ("offset", size(offsets)), ("index", NONE)]), info))
    root = new("Metadata", [("state_dict_metadata", dct(metadata)), ("planner_data", b"}"),
                            ("storage_data", dct(storage)), *extra])
    item = archive(tensor())
    return {".metadata": stream(root), "__0_0.distcp": item, **(files or {})}


def one(shape=(3, 4), offsets=(0, 0), sizes=(3, 4), path="__0_0.distcp", offset=0, length=None, key="w", **more):
    length = len(archive(tensor())) if length is None else length
    return dcp([(key, (shape, [(offsets, sizes, path, offset, length)]))], **more)


def safetensors(header, body=b"\0" * 48, size=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if size is None else size) + header + body


def npy(header, version=1, body=b"\0" * 48, size=None):
    header = header.encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I",
                                                            len(header) if size is None else size) + header + body


F32 = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
ZARRAY = {"chunks": [3, 4], "compressor": None, "dtype": "<f4", "fill_value": None, "filters": None, "order": "C",
          "shape": [3, 4], "zarr_format": 2}


def sources():
    big = (1 << 63) - 1
    # torch.save
    for what, code, made in [
            ("no-data-pkl", "DATA_LOSS", Zip().add("archive/other", b"x").end(zip64=True)),
            ("asks-for-os-system", "UNSUPPORTED", archive(call(name("os", "system"), text("true")))),
            ("big-endian", "UNSUPPORTED", archive(tensor(), byteorder=b"big")),
            ("byteorder-middle", "DATA_LOSS", archive(tensor(), byteorder=b"middle")),
            ("pickle-crc", "DATA_LOSS", archive(tensor(), crc=77)),
            ("pickle-deflated", "UNSUPPORTED", archive(tensor(), method=8)),
            ("torchscript", "UNSUPPORTED", Zip().add("a/data.pkl", stream(b"N")).add("a/constants.pkl", b"x").end()),
            ("pickle-cut", "DATA_LOSS", Zip().add("a/data.pkl", b"\x80\2}").end()),
            ("dict-of-itself", "OK", archive(b"}q\0" + text("a") + b"h\0s")),
            ("storage-missing", "OK", archive(dct([(text("w"), tensor(key="7"))]))),
            ("storage-parent", "OK", archive(dct([(text("w"), tensor(key="../0"))]))),
            ("storage-too-short", "OK", archive(dct([(text("w"), tensor())]), payload=b"x" * 47)),
            ("view-past-the-end", "OK", archive(dct([(text("w"), tensor(first=1))]))),
            ("view-overflows", "OK", archive(dct([(text("w"), tensor(shape=(big, big), stride=(1, 1)))]))),
            ("stride-overflows", "OK", archive(dct([(text("w"), tensor(stride=(big, 1)))]))),
            ("stride-negative", "OK", archive(dct([(text("w"), tensor(stride=(-4, 1)))]))),
            ("storage-overflows", "OK", archive(dct([(text("w"), tensor(count=big))]))),
            ("key-with-nul", "OK", archive(dct([(text("a\0b"), tensor())]))),
            ("key-with-newline", "OK", archive(dct([(text("a\nb"), tensor())]))),
            ("key-parent", "OK", archive(dct([(text("../../x"), tensor())]))),
            # Python keeps the last one: torch_python_test.cc says which bytes that must be.
            ("same-key-twice", "OK", archive(dct([(text("w"), tensor(shape=(4, 3), stride=(3, 1))),
                                                  (text("w"), tensor())]))),
            ("build-of-a-tensor", "OK", archive(dct([(text("w"), tensor() + b"Nb")]))),
            ("metadata-conj-false", "OK", archive(dct([(text("w"), tensor(metadata=dct([(text("conj"), FALSE)])))]))),
            ("storage-of-two-types", "OK", archive(dct([(text("v"), tensor(storage="IntStorage")),
                                                        (text("w"), tensor())]))),
            ("key-made-by-a-call", "UNSUPPORTED",
             archive(dct([(text("w"), tensor()), (call(name("builtins", "str"), text("w")), tensor())]))),
            ("key-is-a-list", "UNSUPPORTED", archive(dct([(b"]", tensor())]))),
            ("ordered-dict-of-text", "UNSUPPORTED", archive(call(name("collections", "OrderedDict"), lst(text("ab"))))),
            ("counter-of-a-list", "UNSUPPORTED", archive(call(name("collections", "Counter"), lst(tup(text("a"), num(1)))))),
            ("tensor-by-newobj", "DATA_LOSS", archive(tensor()[:-1] + b"\x81")),
            ("attributes-with-slots", "UNSUPPORTED",
             archive(call(name("argparse", "Namespace")) + tup(NONE, dct([(text("w"), tensor())])) + b"b")),
            ("attributes-changed-later", "UNSUPPORTED",
             archive(tup(dct([(text("w"), tensor())]) + b"q\1", call(name("argparse", "Namespace")) + b"h\1b",
                         b"h\1" + text("w") + NONE + b"s"))),
            ("names-but-for-case", "DATA_LOSS", archive(dct([(text("w"), tensor())]), more="archive/DATA/0")),
            ("byteorder-in-capitals", "DATA_LOSS", archive(dct([(text("w"), tensor())]), order="archive/BYTEORDER")),
            ("entry-outside", "DATA_LOSS", archive(dct([(text("w"), tensor())]), more="elsewhere")),
            ("two-end-records", "DATA_LOSS", two_ends()),
            ("shown-too-often", "OK", archive(dct([(text("w"), tensor(shape=(1 << 25, 1 << 25), stride=(0, 0)))]))),
            ("quantised", "OK", archive(dct([(text("w"), call(name("torch._utils", "_rebuild_qtensor")))])))]:
        yield f"{code}-torch-{what}.pt", made
    # DCP
    yield "DATA_LOSS-dcp-metadata-empty", {".metadata": b""}
    yield "DATA_LOSS-dcp-metadata-is-none", {".metadata": stream(b"N")}
    yield "DATA_LOSS-dcp-metadata-cut", {".metadata": one()[".metadata"][:200]}
    yield "UNSUPPORTED-dcp-metadata-asks", {".metadata": stream(call(name("os", "system"), text("true")))}
    for what, code, made in [
            ("path-parent", "PERMISSION_DENIED", one(path="../__0_0.distcp")),
            ("path-absolute", "PERMISSION_DENIED", one(path="/etc/passwd")),
            ("path-nul", "DATA_LOSS", one(path="__0_0\0.distcp")),
            ("path-newline", "OK", one(path="__0\n0.distcp")),
            ("path-empty", "DATA_LOSS", one(path="")),
            ("file-missing", "OK", one(path="__1_0.distcp")),
            ("item-past-the-end", "OK", one(offset=100)),
            ("item-offset-2-to-63", "OK", one(offset=big)),
            ("item-offset-2-to-70", "DATA_LOSS", one(offset=1 << 70)),
            ("item-offset-negative", "DATA_LOSS", one(offset=-1)),
            ("item-length-2-to-63", "OK", one(length=big)),
            ("item-length-0", "OK", one(length=0)),
            ("shape-overflows", "OK", one(shape=(big, big), sizes=(3, 4))),
            ("shape-negative", "OK", one(shape=(-3, 4))),
            ("shape-17-axes", "OK", one(shape=(1,) * 17, offsets=(0,) * 17, sizes=(1,) * 17)),
            ("chunk-outside", "OK", one(offsets=(1, 0))),
            ("chunk-offset-overflows", "OK", one(offsets=(big, 0))),
            ("chunk-of-other-rank", "OK", one(offsets=(0,), sizes=(3,))),
            ("chunk-of-nothing", "OK", one(shape=(0, 4), sizes=(0, 4))),
            ("key-empty", "OK", one(key="")),
            ("key-with-nul", "OK", one(key="a\0b")),
            ("key-with-newline", "OK", one(key="a\nb")),
            ("key-parent", "OK", one(key="../../x")),
            ("key-3000-bytes", "OK", one(key="k" * 3000))]:
        yield f"{code}-dcp-{what}", made
    n = len(archive(tensor()))
    item = ((0, 0), (3, 4), "__0_0.distcp", 0, n)
    yield "OK-dcp-chunks-overlap", dcp([("w", ((3, 4), [item, ((1, 0), (2, 4), "__0_0.distcp", 0, n)]))])
    yield "OK-dcp-hole", dcp([("w", ((6, 4), [item]))])
    yield "OK-dcp-same-key-twice", dcp([("w", ((3, 4), [item])), ("w", ((3, 4), [item]))])
    # Where it is stored is set last by its slots, or by the call that makes it.
    slots = lambda ops: ops.replace(text("length") + num(n) + b"ub", text("length") + num(n) + b"u}(" + text("offset") +
                                    num(1) + b"u\x86b")
    yield "DATA_LOSS-dcp-info-with-slots", {**one(), ".metadata": slots(one()[".metadata"])}
    called = lambda ops: ops.replace(b"_StorageInfo\n)", b"_StorageInfo\n" + tup(text("other")))
    yield "DATA_LOSS-dcp-info-with-arguments", {**one(), ".metadata": called(one()[".metadata"])}
    yield "OK-dcp-payload-of-other-shape", one(shape=(4, 3), sizes=(4, 3))
    yield "OK-dcp-item-is-junk", {**one(), "__0_0.distcp": b"junk" * 1000}
    # Safetensors
    for what, code, made in [
            ("empty", "DATA_LOSS", b""),
            ("cut-in-size", "DATA_LOSS", b"\1\0\0"),
            ("size-2-to-64", "DATA_LOSS", safetensors(b"{}", size=(1 << 64) - 1)),
            ("size-over-100-mb", "DATA_LOSS", safetensors(b"{}", size=200_000_000)),
            ("no-json", "DATA_LOSS", safetensors(b"not json at all")),
            ("json-list", "DATA_LOSS", safetensors(b"[]")),
            ("json-cut", "DATA_LOSS", safetensors(b'{"w":{"dtype":"F32"')),
            ("json-nested", "DATA_LOSS", safetensors(b'{"w":' + b"[" * 20000 + b"]" * 20000 + b"}")),
            ("json-nul", "DATA_LOSS", safetensors(b"{}\0{}")),
            ("json-no-utf8", "DATA_LOSS", safetensors(b'{"\xff":{"dtype":"U8","shape":[48],"data_offsets":[0,48]}}')),
            ("key-twice", "DATA_LOSS", safetensors(b'{"w":' + json.dumps(F32).encode() + b',"w":' +
                                                   json.dumps(F32).encode() + b"}")),
            ("dtype-twice", "DATA_LOSS",
             safetensors(b'{"w":{"dtype":"F32","dtype":"I32","shape":[3,4],"data_offsets":[0,48]}}')),
            ("dtype-number", "DATA_LOSS", safetensors({"w": {**F32, "dtype": 7}})),
            ("dtype-unknown", "UNSUPPORTED", safetensors({"w": {**F32, "dtype": "Q3"}})),
            ("shape-negative", "DATA_LOSS", safetensors({"w": {**F32, "shape": [-3, -4]}})),
            ("shape-float", "DATA_LOSS", safetensors({"w": {**F32, "shape": [3.0, 4]}})),
            ("shape-overflows", "DATA_LOSS", safetensors({"w": {**F32, "shape": [1 << 62, 1 << 62]}})),
            ("shape-overflows-to-0", "DATA_LOSS", safetensors({"w": {**F32, "shape": [1 << 32, 1 << 32]}})),
            ("shape-0-with-bytes", "DATA_LOSS", safetensors({"w": {**F32, "shape": [0, 1 << 62]}})),
            ("offsets-reversed", "DATA_LOSS", safetensors({"w": {**F32, "data_offsets": [48, 0]}})),
            ("offsets-past-the-end", "DATA_LOSS", safetensors({"w": {**F32, "data_offsets": [1, 49]}})),
            ("offsets-2-to-63", "DATA_LOSS", safetensors({"w": {**F32, "data_offsets": [big, big]}})),
            ("offsets-three", "DATA_LOSS", safetensors({"w": {**F32, "data_offsets": [0, 48, 50]}})),
            ("offsets-missing", "DATA_LOSS", safetensors({"w": {"dtype": "F32", "shape": [3, 4]}})),
            ("overlap", "DATA_LOSS", safetensors({"a": F32, "b": F32})),
            ("key-empty", "OK", safetensors({"": F32})),
            ("key-with-nul", "OK", safetensors({"a\0b": F32})),
            ("metadata-numbers", "DATA_LOSS", safetensors({"__metadata__": {"a": 7}, "w": F32}))]:
        yield f"{code}-safetensors-{what}.safetensors", made
    # Hugging Face folders
    good = safetensors({"w": F32})
    index = lambda files, **more: json.dumps({"metadata": {"total_size": 48}, "weight_map": files, **more}).encode()
    hf = "model.safetensors.index.json"
    part = "model-00001-of-00001.safetensors"
    for what, code, made in [
            ("index-no-json", "DATA_LOSS", {hf: b"nonsense", part: good}),
            ("index-list", "DATA_LOSS", {hf: b"[]", part: good}),
            ("index-without-map", "DATA_LOSS", {hf: b"{}", part: good}),
            ("index-map-number", "DATA_LOSS", {hf: b'{"weight_map":7}', part: good}),
            ("index-file-number", "DATA_LOSS", {hf: index({"w": 7}), part: good}),
            ("index-file-parent", "PERMISSION_DENIED", {hf: index({"w": "../" + part}), part: good}),
            ("index-file-absolute", "DATA_LOSS", {hf: index({"w": "/etc/passwd"}), part: good}),
            ("index-key-twice", "DATA_LOSS",
             {hf: b'{"weight_map":{"w":"' + part.encode() + b'","w":"x.safetensors"}}', part: good}),
            ("index-nested", "DATA_LOSS", {hf: b'{"weight_map":' + b"[" * 9999 + b"]" * 9999 + b"}", part: good})]:
        yield f"{code}-hf-{what}", made
    # NumPy
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"
    for what, code, made in [
            ("cut", "DATA_LOSS", b"\x93NUMPY\1"),
            ("version-9", "UNSUPPORTED", npy(head, version=9)),
            ("header-past-the-end", "DATA_LOSS", npy(head, size=60000)),
            ("header-4-gib", "UNSUPPORTED", npy(head, version=2, size=0xffffffff)),
            ("header-calls", "DATA_LOSS", npy("__import__('os').system('true')")),
            ("descr-object", "UNSUPPORTED", npy(head.replace("<f4", "|O"))),
            ("descr-record", "UNSUPPORTED", npy(head.replace("'<f4'", "[('a', '<f4')]"))),
            ("descr-big-endian", "UNSUPPORTED", npy(head.replace("<f4", ">f4"))),
            ("shape-negative", "DATA_LOSS", npy(head.replace("3, 4", "-3, 4"))),
            ("shape-overflows", "DATA_LOSS", npy(head.replace("3, 4", f"{1 << 62}, {1 << 62}"))),
            ("shape-2-to-70", "DATA_LOSS", npy(head.replace("3, 4", f"{1 << 70}, 1"))),
            ("shape-17-axes", "UNSUPPORTED", npy(head.replace("3, 4", "1, " * 17))),
            ("data-cut", "DATA_LOSS", npy(head, body=b"\0" * 47)),
            ("keys-twice", "DATA_LOSS", npy(head.replace("}", "'shape': (1,), }"))),
            ("key-missing", "DATA_LOSS", npy("{'descr': '<f4', 'shape': (3, 4), }"))]:
        yield f"{code}-npy-{what}.npy", made
    array = npy(head)
    yield "UNSUPPORTED-npz-deflated.npz", Zip().add("a.npy", array, method=8).end()
    yield "DATA_LOSS-npz-parent.npz", Zip().add("../a.npy", array).end()
    yield "DATA_LOSS-npz-crc-of-header.npz", Zip().add("a.npy", array, local_crc=5).end()
    yield "DATA_LOSS-npz-overlap.npz", Zip().add("a.npy", array).add("b.npy", array, header=0).end()
    # OLMo-core 0.1
    spec = {"flattened_offsets": [[0, 12]], "local_shape": None, "global_offset": None}
    olmo = lambda **w: {"metadata.json": json.dumps({"tensors": {"w": {
        "shape": [3, 4], "is_sharded": True, "dtype": "F32", "shard_spec_per_file": {"rank_0.safetensors": spec}, **w}}}).encode(),
        "rank_0.safetensors": safetensors({"w": {"dtype": "F32", "shape": [12], "data_offsets": [0, 48]}})}
    per_file = lambda s, f="rank_0.safetensors": {"shard_spec_per_file": {f: {**spec, **s}}}
    for what, code, made in [
            ("no-json", "DATA_LOSS", {**olmo(), "metadata.json": b'{"tensors":'}),
            ("tensors-list", "DATA_LOSS", {**olmo(), "metadata.json": b'{"tensors":[]}'}),
            ("key-twice", "DATA_LOSS", {**olmo(), "metadata.json": b'{"tensors":{"w":{"shape":[1]},"w":{"shape":[1]}}}'}),
            ("file-parent", "PERMISSION_DENIED", olmo(**per_file({}, "../rank_0.safetensors"))),
            ("shape-overflows", "DATA_LOSS", olmo(shape=[1 << 62, 1 << 62])),
            ("shape-negative", "DATA_LOSS", olmo(shape=[-3, 4])),
            ("range-reversed", "DATA_LOSS", olmo(**per_file({"flattened_offsets": [[12, 0]]}))),
            ("range-outside", "DATA_LOSS", olmo(**per_file({"flattened_offsets": [[0, 13]]}))),
            ("ranges-overlap", "OK", olmo(**per_file({"flattened_offsets": [[0, 8], [4, 8]]}))),
            ("box-outside", "DATA_LOSS", olmo(**per_file({"flattened_offsets": None, "local_shape": [3, 4],
                                                          "global_offset": [1, 0]})))]:
        yield f"{code}-olmo-{what}", made
    # zarr as Megatron-Core wrote it
    zarr = lambda chunk=b"\0" * 48, **array: {
        "metadata.json": b'{"sharded_backend":"zarr","sharded_backend_version":1}',
        "w/.zarray": json.dumps({**ZARRAY, **array}).encode(), "w/0.0": chunk}
    for what, code, made in [
            ("no-json", "OK", {**zarr(), "w/.zarray": b"{"}),
            ("key-twice", "OK", {**zarr(), "w/.zarray": b'{"zarr_format":2,"zarr_format":2}'}),
            ("compressed", "OK", zarr(compressor={"id": "blosc"})),
            ("filtered", "OK", zarr(filters=[{"id": "delta"}])),
            ("chunks-0", "OK", zarr(chunks=[0, 4])),
            ("chunks-overflow", "OK", zarr(chunks=[1 << 62, 1 << 62])),
            ("shape-overflows", "OK", zarr(shape=[1 << 62, 1 << 62])),
            ("shape-2-to-63", "OK", zarr(shape=[1 << 63, 1])),
            ("ranks-differ", "OK", zarr(chunks=[3])),
            ("dtype-object", "OK", zarr(dtype="|O")),
            ("chunk-short", "OK", zarr(chunk=b"\0" * 47)),
            ("chunk-long", "OK", zarr(chunk=b"\0" * 49))]:
        yield f"{code}-zarr-{what}", made


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "bad")
    total = 0
    for kind, made in [("pickle", pickles()), ("zip", zips()), ("source", sources())]:
        shutil.rmtree(root / kind, ignore_errors=True)
        (root / kind).mkdir(parents=True)
        for what, data in made:
            path = root / kind / what
            assert not path.exists(), what
            total += 1
            for inside, content in data.items() if isinstance(data, dict) else [("", data)]:
                file = path / inside if inside else path
                file.parent.mkdir(parents=True, exist_ok=True)
                assert len(content) < 65536, (what, len(content))
                file.write_bytes(content)
    print(f"{total} names in {root}")


if __name__ == "__main__":
    main()
