// SPDX-License-Identifier: Apache-2.0
#include "index/archives/pickle.h"

#include <algorithm>
#include <cstdlib>

#include "index/archives/pickle_record.h"
#include "tests/adopt/bytes.h"
#include "tests/support/status_matchers.h"

namespace tensormount::pickle {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Result<Document> ParseOps(std::string_view operations, int protocol = 4) {
  return Parse(Pickle(operations, protocol));
}

// Of a stream that must be one.
Document Read(std::string_view operations, int protocol = 4) {
  Result<Document> document = ParseOps(operations, protocol);
  EXPECT_OK(document);
  if (!document.ok()) std::abort();
  return std::move(document).value();
}

std::string Listing(std::string_view operations) { return Describe(Read(operations)); }

TEST(Pickle, ReadsScalars) {
  EXPECT_EQ(Listing("N"), "None\n");
  EXPECT_EQ(Listing(Bytes(0x88)), "True\n");
  EXPECT_EQ(Listing(Bytes(0x89)), "False\n");
  EXPECT_EQ(Listing(Bytes('J', U32(0xfffffffe))), "-2\n");
  EXPECT_EQ(Listing(Bytes('K', 255)), "255\n");
  EXPECT_EQ(Listing(Bytes('M', U16(65535))), "65535\n");
  // Big-endian, unlike all else.
  EXPECT_EQ(Listing(Bytes('G', 0x3f, 0xf8, 0, 0, 0, 0, 0, 0)), "1.5\n");
}

TEST(Pickle, LongListingIsTruncated) {
  const Document document = Read(Bytes(']', '(', 'K', 1, 'K', 2, Str("x"), 'e'));
  const std::string whole = Describe(document);
  const auto lines = static_cast<std::size_t>(std::count(whole.begin(), whole.end(), '\n'));
  ASSERT_GT(lines, 2u) << whole;
  EXPECT_EQ(Describe(document, lines), whole);
  const std::string cut = Describe(document, lines - 1);
  EXPECT_EQ(cut, whole.substr(0, whole.rfind('\n', whole.size() - 2) + 1) + "...\n");
}

TEST(Pickle, ReadsLongIntegers) {
  EXPECT_EQ(Listing(Bytes(0x8a, 0)), "0\n");
  EXPECT_EQ(Listing(Bytes(0x8a, 1, 0xff)), "-1\n");
  EXPECT_EQ(Listing(Bytes(0x8a, 5, 0, 0, 0, 0, 1)), "4294967296\n");
  EXPECT_EQ(Listing(Bytes(0x8b, U32(2), 0, 0x80)), "-32768\n");
  // The sign repeated says nothing.
  EXPECT_EQ(Listing(Bytes(0x8a, 12, 7, std::string(11, '\0'))), "7\n");
  EXPECT_EQ(Listing(Bytes(0x8a, 8, std::string(7, '\0'), 0x80)), "-9223372036854775808\n");
  const Document large = Read(Bytes(0x8a, 9, std::string(7, '\0'), 0x80, 0));
  EXPECT_EQ(large.root().kind(), Kind::kLong);
  EXPECT_EQ(large.root().text().size(), 9u);
  EXPECT_THAT(ParseOps(Bytes(0x8b, U32(0xffffffff))), HasMessage("negative length"));
}

TEST(Pickle, ReadsTextAndBytes) {
  EXPECT_EQ(Read(Str("caf\xc3\xa9")).root().text(), "caf\xc3\xa9");
  EXPECT_EQ(Read(Bytes('X', U32(2), "ab")).root().text(), "ab");
  EXPECT_EQ(Read(Bytes(0x8d, U64(3), "abc")).root().text(), "abc");
  for (const std::string& ops : {Bytes('C', 2, 0xff, 0), Bytes('B', U32(2), 0xff, 0),
                                 Bytes(0x8e, U64(2), 0xff, 0), Bytes(0x96, U64(2), 0xff, 0)}) {
    const Document document = Read(ops, 5);
    EXPECT_EQ(document.root().kind(), Kind::kBytes);
    EXPECT_EQ(document.root().text(), std::string_view("\xff\0", 2));
  }
  EXPECT_THAT(ParseOps(Str("\xff")),
              AllOf(HasCode(Code::kDataLoss), HasMessage("not valid UTF-8")));
  EXPECT_THAT(ParseOps(Str("\xed\xa0\x80")), HasMessage("not valid UTF-8"));  // A lone surrogate.
}

TEST(Pickle, ReadsTuples) {
  EXPECT_EQ(Listing(")"), "()\n");
  EXPECT_EQ(Listing(Bytes('N', 0x85)), "(None,)\n");
  EXPECT_EQ(Listing(Bytes("NN", 0x86)), "(None, None)\n");
  EXPECT_EQ(Listing(Bytes("NNN", 0x87)), "(None, None, None)\n");
  EXPECT_EQ(Listing("(t"), "()\n");
  EXPECT_EQ(Listing(Bytes("(K", 1, "K", 2, "NNt")), "(1, 2, None, None)\n");
  // Rows of integers are kept apart; nobody can tell.
  const Document ints = Read(Bytes('K', 3, 'J', U32(0xffffffff), 0x86, 0x85));
  EXPECT_EQ(ints.root().size(), 1u);
  EXPECT_EQ(ints.root().item(0).size(), 2u);
  EXPECT_EQ(ints.root().item(0).item(1).integer(), -1);
  const Document empty = Read(Bytes(')', 0x85));
  EXPECT_EQ(empty.root().size(), 1u);
  EXPECT_EQ(empty.root().item(0).size(), 0u);
}

TEST(Pickle, ReadsListsSetsAndDicts) {
  EXPECT_EQ(Listing("]Na"), "list of 1\n  None\n");
  EXPECT_EQ(Listing(Bytes("](NNNe(e(", 0x88, "e")), "list of 4\n  None\n  None\n  None\n  True\n");
  EXPECT_EQ(Listing(Bytes(0x8f, "(K", 1, "K", 2, 0x90)), "set of 2\n  1\n  2\n");
  EXPECT_EQ(Listing(Bytes("(K", 1, 0x91)), "set of 1\n  1\n");
  EXPECT_EQ(Listing(Bytes('}', Str("a"), 'K', 1, 's')), "dict of 1\n  \"a\": 1\n");
  EXPECT_EQ(Listing(Bytes("}(", Str("a"), 'K', 1, Str("b"), 'N', "u")),
            "dict of 2\n  \"a\": 1\n  \"b\": None\n");
  EXPECT_EQ(Listing("}(u"), "dict of 0\n");
}

// In the place of the first, as in Python.
TEST(Pickle, LastValueOfADuplicateKeyWins) {
  std::string ops = "}(";
  const auto put = [&](const std::string& key, int value) { ops += Str(key) + Bytes('K', value); };
  put("a", 1);
  put("b", 2);
  put("a", 3);
  const Document small = Read(ops + "u");
  EXPECT_EQ(small.root().size(), 2u);
  EXPECT_EQ(small.root().key(0).text(), "a");
  EXPECT_EQ(small.root().item(0).integer(), 3);
  EXPECT_EQ(small.root().Find("a")->integer(), 3);
  EXPECT_FALSE(small.root().Find("c").has_value());
  // Over 16 pairs there is an index.
  for (int i = 0; i < 100; ++i) put("key" + std::to_string(i), i);
  put("a", 4);
  put("b", 5);
  ops += Bytes('K', 9, 'K', 9);
  const Document large = Read(ops + "u");
  EXPECT_EQ(large.root().size(), 103u);
  EXPECT_EQ(large.root().key(0).text(), "a");
  EXPECT_EQ(large.root().Find("a")->integer(), 4);
  EXPECT_EQ(large.root().Find("b")->integer(), 5);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(large.root().Find("key" + std::to_string(i))->integer(), i);
  }
  EXPECT_FALSE(large.root().Find("key100").has_value());
  EXPECT_EQ(large.root().key(102).integer(), 9);
}

// Objects of one class share their keys; a dict that grows afterwards does not change the others.
TEST(Pickle, DictsWithTheSameKeysAreIndependent) {
  const std::string keys = Bytes(Str("x"), 0x94, '0', Str("y"), 0x94, '0');
  std::string ops = keys + "(";
  for (int i = 0; i < 4; ++i) {
    ops += Bytes("}(h", 0, 'K', i, 'h', 1, 'K', 10 + i, 'u');
    if (i == 2) ops += Bytes(Str("z"), 'K', 99, 's');
  }
  const Document document = Read(ops + "t");
  for (std::size_t i = 0; i < 4; ++i) {
    const Value dict = document.root().item(i);
    EXPECT_EQ(dict.size(), i == 2 ? 3u : 2u);
    EXPECT_EQ(dict.Find("x")->integer(), static_cast<int>(i));
    EXPECT_EQ(dict.Find("y")->integer(), 10 + static_cast<int>(i));
    EXPECT_EQ(dict.Find("z").has_value(), i == 2);
    EXPECT_EQ(dict.key(1).text(), "y");
  }
}

TEST(Pickle, ValuesAreSharedAndFormCycles) {
  // A list that holds itself: MEMOIZE comes before APPEND.
  const Document cycle = Read(Bytes(']', 0x94, 'h', 0, 'a'));
  EXPECT_TRUE(cycle.root().item(0).SameAs(cycle.root()));
  EXPECT_EQ(Describe(cycle), "list of 1\n  list of 1, shown above\n");
  // What is put in later is seen through every reference.
  const Document shared = Read(Bytes("(]", 0x94, 'h', 0, "Na", 't'));
  EXPECT_EQ(shared.root().item(0).size(), 1u);
  EXPECT_TRUE(shared.root().item(0).SameAs(shared.root().item(1)));
}

TEST(Pickle, ReadsAndChecksTheMemo) {
  EXPECT_EQ(Listing(Bytes("(K", 7, 0x94, "K", 8, 0x94, 'h', 0, 'j', U32(1), 't')),
            "(7, 8, 7, 8)\n");
  EXPECT_EQ(Listing(Bytes("(K", 7, 'q', 0, "K", 8, 'r', U32(1), 'h', 0, 't')), "(7, 8, 7)\n");
  // A slot may be filled again; Python 2 begins with one.
  EXPECT_EQ(Listing(Bytes("(K", 7, 'q', 1, "K", 8, 'q', 1, 'h', 1, 't')), "(7, 8, 8)\n");
  EXPECT_THAT(ParseOps(Bytes('h', 0)), HasMessage("byte 2: memo slot 0 was never filled"));
  EXPECT_THAT(ParseOps(Bytes('N', 'q', 1, 'h', 0)), HasMessage("slot 0 was never filled"));
  EXPECT_THAT(ParseOps(Bytes('N', 'q', 2)),
              HasMessage("memo slot 2 is out of range: there are 0 entries"));
  EXPECT_THAT(ParseOps(Bytes('N', 'r', U32(0xfffffff0))),
              AllOf(HasCode(Code::kDataLoss),
                    HasMessage("memo slot 4294967280 is out of range: there are 0 entries")));
  EXPECT_THAT(ParseOps(Bytes(0x94)), HasMessage("takes 1 values, but the stack has 0"));
  EXPECT_THAT(ParseOps(Bytes("N(", 0x94)), HasMessage("takes 1 values"));
}

TEST(Pickle, ReadsPopAndMarks) {
  EXPECT_EQ(Listing("NK\1"
                    "0"),
            "None\n");
  EXPECT_EQ(Listing("N(0"), "None\n");  // Of a mark.
  EXPECT_EQ(Listing("N(NN1"), "None\n");
  EXPECT_THAT(ParseOps("0"), HasMessage("takes 1 values"));
  EXPECT_THAT(ParseOps("N1"), HasMessage("there is no mark"));
  EXPECT_THAT(ParseOps("N(\x85"), HasMessage("takes 1 values, but the stack has 0"));
}

TEST(Pickle, GlobalsAreNeverImported) {
  const Document size =
      Read(Bytes(Str("torch"), Str("Size"), 0x93, 'K', 2, 'K', 3, 0x86, 0x85, 'R'));
  EXPECT_TRUE(size.root().Is(KnownClass::kTorchSize));
  EXPECT_EQ(size.root().callee().name(), "Size");
  EXPECT_EQ(size.root().args().item(0).item(1).integer(), 3);
  EXPECT_EQ(size.root().state().kind(), Kind::kNone);
  EXPECT_EQ(Describe(size), "torch.Size(2, 3)\n");
  const Document dtype = Read(Glob("torch", "bfloat16"));
  EXPECT_EQ(dtype.root().known(), KnownClass::kTorchDtype);
  EXPECT_EQ(dtype.root().module(), "torch");
  EXPECT_EQ(dtype.root().name(), "bfloat16");
  EXPECT_THAT(ParseOps(Bytes(Str("torch"), 'N', 0x93)),
              HasMessage("the arguments of STACK_GLOBAL are not"));
  EXPECT_THAT(ParseOps("ctorch"), HasMessage("a line without an end"));
}

TEST(Pickle, ErrorNamesTheUnlistedClass) {
  for (const auto& [module, name] :
       std::vector<std::pair<std::string, std::string>>{{"os", "system"},
                                                        {"posix", "system"},
                                                        {"builtins", "eval"},
                                                        {"builtins", "exec"},
                                                        {"__builtin__", "apply"},
                                                        {"builtins", "__import__"},
                                                        {"builtins", "open"},
                                                        {"subprocess", "Popen"},
                                                        {"importlib", "import_module"},
                                                        {"functools", "partial"},
                                                        {"operator", "attrgetter"},
                                                        {"torch", "load"},
                                                        {"torch.hub", "load"},
                                                        {"megatron.core.utils", "os.system"},
                                                        {"megatron.core.utils", "run"},
                                                        {"megatron.core./../x", "Class"}}) {
    const std::string wanted =
        "byte 2: contains a Python object (" + module + "." + name + ") that is not loaded";
    EXPECT_THAT(ParseOps(Bytes(Glob(module, name), Str("true"), 0x85, 'R')),
                AllOf(HasCode(Code::kUnsupported), HasMessage(wanted)));
  }
  // Told to show what a stream asks for, the machine keeps the name.
  Options inert;
  inert.unknown = Unknown::kInert;
  ASSERT_OK_AND_ASSIGN(
      const Document shown,
      Parse(Pickle(Bytes(Glob("os", "system"), Str("rm -rf /"), 0x85, 'R')), inert));
  EXPECT_EQ(shown.root().callee().known(), KnownClass::kUnknown);
  EXPECT_EQ(Describe(shown), "os.system (not called)\n  argument: \"rm -rf /\"\n");
}

// One long text, said once and used everywhere, must not cost its length every time.
TEST(Pickle, LongTextsAreNotLookedUpAsNames) {
  const std::string module = "megatron.core." + std::string(300, 'a');
  EXPECT_THAT(ParseOps(Bytes(Str(module.substr(0, 250)), Str("Class"), 0x93)), IsOk());
  EXPECT_THAT(ParseOps(Bytes('X', U32(static_cast<std::uint32_t>(module.size())), module,
                             Str("Class"), 0x93)),
              HasCode(Code::kUnsupported));
  // Of a large dict with long keys each is found all the same.
  const auto text = [](char c, std::size_t n) {
    return Bytes('X', U32(static_cast<std::uint32_t>(n)), std::string(n, c));
  };
  std::string dict = "}(";
  for (char c = 'a'; c <= 'z'; ++c) dict += Bytes(text(c, 3000), 'K', c, text(c, 30), 'K', c - 32);
  dict += Bytes(text('q', 3000), 'K', 1);
  const Document document = Read(Bytes(dict, "u"));
  for (char c = 'a'; c <= 'z'; ++c) {
    const auto lengthy = document.root().Find(std::string(3000, c));
    const auto brief = document.root().Find(std::string(30, c));
    ASSERT_TRUE(lengthy && brief);
    EXPECT_EQ(lengthy->integer(), c == 'q' ? 1 : c);
    EXPECT_EQ(brief->integer(), c - 32);
  }
  EXPECT_FALSE(document.root().Find(std::string(3001, 'a')));
  // A stream of 1.3 MB that would take minutes.
  std::string many = Bytes('X', U32(1 << 20), std::string(1 << 20, 'k'), 'q', 0, "0}(");
  for (int i = 0; i < 100000; ++i) many += Bytes('h', 0, 'N');
  EXPECT_THAT(ParseOps(Bytes(many, "u")), IsOk());
}

KnownClass FindClass(std::string_view module, std::string_view name) {
  KnownClass of_module = KnownClass::kUnknown;
  const ClassRow* row = FindClassRow(module, name, &of_module);
  return row == nullptr ? of_module : row->known;
}

TEST(Pickle, TrainerClassesAreRecognized) {
  EXPECT_EQ(Read(Glob("megatron.core.transformer.enums", "AttnBackend")).root().known(),
            KnownClass::kTrainerRecord);
  EXPECT_EQ(FindClass("torch.distributed._shard.checkpoint.metadata", "Metadata"),
            KnownClass::kMetadata);
  EXPECT_EQ(FindClass("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"),
            KnownClass::kStorageInfo);
  EXPECT_EQ(FindClass("numpy._core.multiarray", "_reconstruct"), KnownClass::kNumpyReconstruct);
  EXPECT_EQ(FindClass("pathlib._local", "PosixPath"), KnownClass::kPath);
  EXPECT_EQ(FindClass("torch", "nonsense"), KnownClass::kUnknown);
  // What a DTensor of torch 2.13 speaks of: one is left out, not all that is stored with it.
  for (const auto& [module, name] : std::vector<std::pair<const char*, const char*>>{
           {"torch.distributed._mesh_layout", "_MeshLayout"},
           {"torch.distributed._mesh_layout", "_FlatLayout"},
           {"torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"},
           {"torch.distributed.tensor.placement_types", "_StridedShard"}}) {
    EXPECT_EQ(FindClass(module, name), KnownClass::kTorchOther) << name;
  }
}

TEST(Pickle, ReadsObjects) {
  const std::string metadata = Glob("torch.distributed.checkpoint.metadata", "MetadataIndex");
  const Document built = Read(
      Bytes(metadata, ')', 0x81, 0x94, "}(", Str("fqn"), Str("w"), Str("index"), 'K', 4, "ub"));
  EXPECT_TRUE(built.root().Is(KnownClass::kMetadataIndex));
  EXPECT_EQ(built.root().Find("fqn")->text(), "w");
  EXPECT_EQ(built.root().Find("index")->integer(), 4);
  EXPECT_FALSE(built.root().Find("offset").has_value());
  EXPECT_EQ(built.root().size(), 0u);
  // (dict, slots)
  const Document slots = Read(Bytes(metadata, ")\x81", "N}", Str("fqn"), Str("v"), "s\x86", "b"));
  EXPECT_EQ(slots.root().Find("fqn")->text(), "v");
  const Document ordered =
      Read(Bytes(Glob("collections", "OrderedDict"), ")R", Str("k"), 'K', 1, 's'));
  EXPECT_EQ(ordered.root().size(), 1u);
  EXPECT_EQ(ordered.root().key(0).text(), "k");
  EXPECT_EQ(ordered.root().item(0).integer(), 1);
  const Document deque = Read(Bytes(Glob("collections", "deque"), ")R(K", 1, "K", 2, "e"));
  EXPECT_EQ(deque.root().size(), 2u);
  EXPECT_EQ(deque.root().item(1).integer(), 2);
  const Document named = Read(Bytes(metadata, ")}", Str("a"), "Ns", 0x92));
  EXPECT_EQ(named.root().args().size(), 1u);
  EXPECT_EQ(named.root().args().item(0).kind(), Kind::kDict);
  EXPECT_EQ(Read(Bytes(metadata, "N\x85}", 0x92)).root().args().size(), 1u);
  const Document persistent = Read(Bytes(Str("storage"), 0x85, 'Q'));
  EXPECT_EQ(persistent.root().kind(), Kind::kPersistent);
  EXPECT_EQ(persistent.root().args().item(0).text(), "storage");
}

// Python makes dicts from lists of pairs; a Counter counts what is in a list, and a namespace takes
// nothing by position.
TEST(Pickle, OnlyDictsAreBuiltFromListsOfPairs) {
  const std::string pairs = Bytes("]", Str("k"), "K", 1, 0x86, "a");
  const Document ordered = Read(Bytes(Glob("collections", "OrderedDict"), pairs, 0x85, "R"));
  ASSERT_EQ(ordered.root().size(), 1u);
  EXPECT_EQ(ordered.root().key(0).text(), "k");
  const std::string named = Glob("collections", "defaultdict");
  EXPECT_EQ(Read(Bytes(named, "N", pairs, 0x86, "R")).root().size(), 1u);
  EXPECT_EQ(Read(Bytes(named, "N", 0x85, "R")).root().size(), 0u);
  EXPECT_THAT(ParseOps(Bytes(named, "N", "N", pairs, 0x87, "R")),
              HasMessage("neither a dict nor a list of pairs"));
  EXPECT_THAT(ParseOps(Bytes(Glob("collections", "Counter"), pairs, 0x85, "R")),
              AllOf(HasCode(Code::kUnsupported), HasMessage("neither a dict nor a list of pairs")));
  EXPECT_THAT(ParseOps(Bytes(Glob("types", "SimpleNamespace"), pairs, 0x85, "R")),
              HasMessage("neither a dict nor a list of pairs"));
}

TEST(Pickle, GetattrIsRefusedExceptForEnums) {
  const auto getattr = [](const std::string& of, const std::string& member) {
    return ParseOps(Bytes(Glob("builtins", "getattr"), of, Str(member), 0x86, 'R'));
  };
  const std::string module = "torch.distributed.checkpoint.metadata";
  ASSERT_OK_AND_ASSIGN(const Document member,
                       getattr(Glob(module, "_MEM_FORMAT_ENCODING"), "TORCH_CONTIGUOUS_FORMAT"));
  EXPECT_TRUE(member.root().Is(KnownClass::kGetattr));
  EXPECT_THAT(
      getattr(Glob("torch", "Tensor"), "__init__"),
      AllOf(HasCode(Code::kUnsupported), HasMessage("calls getattr(torch.Tensor, \"__init__\")")));
  EXPECT_THAT(getattr("N", "x"), HasMessage("getattr on something that is not a class"));
}

TEST(Pickle, MisuseIsRefused) {
  const std::string object = Bytes(Glob("collections", "OrderedDict"), ")R");
  const struct {
    std::string ops;
    Code code;
    std::string message;
  } cases[] = {
      {"NNR", Code::kUnsupported, "byte 4: REDUCE calls None, not a class"},
      {Bytes(object, ")R"), Code::kUnsupported, "calls an object, not a class"},
      {Bytes("N)", 0x81), Code::kUnsupported, "NEWOBJ calls None, not a class"},
      {Bytes("N)}", 0x92), Code::kUnsupported, "NEWOBJ_EX calls None, not a class"},
      {Bytes(Glob("torch", "float32"), ")R"), Code::kDataLoss, "which is not a function"},
      {Bytes(Glob("torch", "Size"), "NR"), Code::kDataLoss, "arguments that are None"},
      {Bytes(Glob("torch", "Size"), "NN", 0x92), Code::kDataLoss, "are not a tuple and a dict"},
      {Bytes("N", 0x92), Code::kDataLoss, "takes 3 values, but the stack has 1"},
      {"NNb", Code::kDataLoss, "BUILD of None"},
      {Bytes(Glob("torch", "Size"), "K\1\x85\x85RNb"), Code::kDataLoss, "BUILD of an object"},
      {Bytes(object, "}b}b"), Code::kDataLoss, "BUILD is applied twice"},
      {"NNa", Code::kDataLoss, "appends to None"},
      {"}Na", Code::kDataLoss, "appends to a dict"},
      {"(Ne", Code::kDataLoss, "no list on the stack"},
      {"](](Na", Code::kDataLoss, "takes 2 values, but the stack has 1"},
      {"Na", Code::kDataLoss, "takes 2 values"},
      {"](Nu", Code::kDataLoss, "a key without a value"},
      {"](NNu", Code::kDataLoss, "sets items of a list"},
      {"NNNs", Code::kDataLoss, "sets items of None"},
      {"(NNu", Code::kDataLoss, "no dict on the stack"},
      {Bytes("](N", 0x90), Code::kDataLoss, "appends to a list"},
      {"e", Code::kDataLoss, "there is no mark"},
      {"t", Code::kDataLoss, "there is no mark"},
      {"\x91", Code::kDataLoss, "there is no mark"},
      {"", Code::kDataLoss, "ends with 0 values and 0 marks"},
      {"NN", Code::kDataLoss, "ends with 2 values"},
      {"N(", Code::kDataLoss, "ends with 1 values and 1 marks"},
      {Bytes('N', 0x80, 4), Code::kDataLoss, "PROTO is not the first operation"},
      {Bytes(0x95, U64(100), 'N'), Code::kDataLoss, "truncated: 100 bytes wanted, 2 left"},
      {Bytes(0x95, 1), Code::kDataLoss, "truncated: 8 bytes wanted"},
      {Bytes('X', U32(0xffffffff), "ab"), Code::kDataLoss, "truncated: 4294967295 bytes wanted"},
      {Bytes(0x8d, U64(~std::uint64_t{0}), "ab"), Code::kDataLoss, "bytes wanted, 3 left"},
      {Bytes(0x8e, U64(std::uint64_t{1} << 63)), Code::kDataLoss, "bytes wanted"},
      {Bytes('N', 0xff), Code::kDataLoss, "byte 3: operation 255 does not exist"},
      {Bytes('N', 0), Code::kDataLoss, "operation 0 does not exist"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(ParseOps(c.ops), AllOf(HasCode(c.code), HasMessage(c.message)));
  }
}

TEST(Pickle, ErrorNamesTheUnsupportedOperation) {
  for (const auto& [op, name] : std::vector<std::pair<int, std::string>>{{'i', "INST"},
                                                                         {'o', "OBJ"},
                                                                         {0x82, "EXT1"},
                                                                         {0x83, "EXT2"},
                                                                         {0x84, "EXT4"},
                                                                         {'P', "PERSID"},
                                                                         {0x97, "NEXT_BUFFER"},
                                                                         {0x98, "READONLY_BUFFER"},
                                                                         {'2', "DUP"},
                                                                         {'I', "INT"},
                                                                         {'L', "LONG"},
                                                                         {'F', "FLOAT"},
                                                                         {'S', "STRING"},
                                                                         {'T', "BINSTRING"},
                                                                         {'U', "SHORT_BINSTRING"},
                                                                         {'V', "UNICODE"},
                                                                         {'d', "DICT"},
                                                                         {'l', "LIST"},
                                                                         {'g', "GET"},
                                                                         {'p', "PUT"}}) {
    EXPECT_THAT(
        ParseOps(Bytes("N(", op, "1\n1\n")),
        AllOf(HasCode(Code::kUnsupported), HasMessage("operation " + name + " is not supported")));
  }
}

TEST(Pickle, RefusesMalformedStreams) {
  EXPECT_THAT(Parse(""), HasMessage("byte 0: truncated: no STOP"));
  EXPECT_THAT(Parse("N."), HasMessage("not a pickle of protocol 2 or later"));
  EXPECT_THAT(ParseOps("N", 1), AllOf(HasCode(Code::kUnsupported), HasMessage("protocol 1")));
  EXPECT_THAT(ParseOps("N", 6), AllOf(HasCode(Code::kUnsupported), HasMessage("protocol 6")));
  const std::string stream = Pickle("N");
  EXPECT_THAT(Parse(stream + "rest"), HasMessage("ends 4 bytes before the end of the stream"));
  Options options;
  options.trailing_bytes = true;
  ASSERT_OK_AND_ASSIGN(const Document document, Parse(stream + "rest", options));
  EXPECT_EQ(document.bytes(), stream.size());
  options.max_bytes = 3;
  EXPECT_THAT(Parse(stream, options), HasCode(Code::kResourceExhausted));
}

// Every prefix of a stream ends in an error, never in a value.
TEST(Pickle, EveryTruncationIsDataLoss) {
  const std::string stream = Pickle(Bytes(0x95, U64(2), Glob("collections", "OrderedDict"), ")R",
                                          0x94, '(', Str("a"), Bytes(0x8a, 3, 1, 2, 3), 'X', U32(1),
                                          "b", 'G', U64(0), 'u', "}(K", 1, "K", 2, "ub"));
  ASSERT_OK(Parse(stream));
  for (std::size_t n = 0; n < stream.size(); ++n) {
    EXPECT_THAT(Parse(stream.substr(0, n)), HasCode(Code::kDataLoss)) << n;
  }
}

TEST(Pickle, MemoryIsBoundedByTheStream) {
  // 16 bytes a value of one byte: over 48 MiB this is more than four times the stream.
  const std::string nones = Pickle("](" + std::string(8 << 20, 'N') + "e");
  EXPECT_THAT(Parse(nones), HasCode(Code::kResourceExhausted));
  const std::string marks = Pickle(std::string(16 << 20, '('));
  EXPECT_THAT(Parse(marks), HasCode(Code::kResourceExhausted));
  const std::string memos = Pickle("N" + std::string(16 << 20, '\x94'));
  EXPECT_THAT(Parse(memos), HasCode(Code::kResourceExhausted));
  const std::string lists = Pickle("(" + std::string(16 << 20, ']') + "t");
  EXPECT_THAT(Parse(lists), HasCode(Code::kResourceExhausted));
}

// Nests as deep as one likes; nobody walks it without counting.
TEST(Pickle, DeepNestingIsBounded) {
  std::string ops(100000, ']');
  ops += std::string(99999, 'a');
  const Document document = Read(ops);
  EXPECT_THAT(Describe(document), HasSubstr("..."));
  EXPECT_LT(Describe(document).size(), 10000u);
  std::string tuples = "N" + std::string(100000, '\x85');
  EXPECT_LT(Describe(Read(tuples)).size(), 10000u);
}

TEST(Pickle, ListingsAreBounded) {
  std::string ops = "](";
  for (int i = 0; i < 100; ++i) ops += Bytes('K', i);
  EXPECT_EQ(Describe(Read(ops + "e"), 3), "list of 100\n  0\n  1\n...\n");
  const std::string text = Listing(Bytes('X', U32(1000), std::string(1000, 'x')));
  EXPECT_LT(text.size(), 120u);
  EXPECT_EQ(Listing(Str("a\nb\x1b[31m")), "\"a\\x0ab\\x1b[31m\"\n");
  EXPECT_EQ(Listing(Bytes('C', 3, "abc")), "3 bytes\n");
}

}  // namespace
}  // namespace tensormount::pickle
