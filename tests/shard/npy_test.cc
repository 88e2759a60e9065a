// SPDX-License-Identifier: Apache-2.0
#include "shard/npy.h"

#include <map>
#include <string>

#include "base/coding.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

std::string Golden(const std::string& dict) {
  std::string header("\x93NUMPY\x01\x00v\x00", 10);
  return header + dict + std::string(117 - dict.size(), ' ') + "\n";
}

// What numpy.save of NumPy 2 (with ml_dtypes) wrote.
TEST(NpyTest, HeadersEqualThoseOfNumPy) {
  EXPECT_THAT(MakeNpyHeader(DType::kBF16, {2}),
              IsOkAndHolds(Golden("{'descr': '<V2', 'fortran_order': False, 'shape': (2,), }")));
  EXPECT_THAT(MakeNpyHeader(DType::kBool, {}),
              IsOkAndHolds(Golden("{'descr': '|b1', 'fortran_order': False, 'shape': (), }")));
  EXPECT_THAT(
      MakeNpyHeader(DType::kC64, {3, 0, 2}),
      IsOkAndHolds(Golden("{'descr': '<c8', 'fortran_order': False, 'shape': (3, 0, 2), }")));
}

TEST(NpyTest, LongShapesStayAligned) {
  // NumPy's own sizes at the boundary.
  Dims shape = Dims::Filled(13, 2);
  shape.push_back(10);
  EXPECT_EQ(MakeNpyHeader(DType::kF32, shape).value().size(), 128u);
  shape[13] = 100;
  EXPECT_EQ(MakeNpyHeader(DType::kF32, shape).value().size(), 192u);
  const auto header = MakeNpyHeader(DType::kF32, Dims::Filled(16, 1'234'567'890'123));
  ASSERT_OK(header);
  EXPECT_EQ(header.value().size() % 64, 0u);
  EXPECT_EQ(header.value().back(), '\n');
}

TEST(NpyTest, SubByteTypesAreUnsupported) {
  EXPECT_THAT(MakeNpyHeader(DType::kF4, {2}), HasCode(Code::kUnsupported));
}

// A file's first bytes around a dictionary.
std::string NpyFile(const std::string& dict, char major = 1) {
  std::string out = std::string("\x93NUMPY") + major + '\0';
  out += static_cast<char>(dict.size() & 0xFF);
  out += static_cast<char>(dict.size() >> 8);
  if (major > 1) out += std::string(2, '\0');
  return out + dict;
}

std::string Descr(const std::string& descr) {
  return NpyFile("{'descr': " + descr + ", 'fortran_order': False, 'shape': (2,), }\n");
}

TEST(NpyTest, OwnHeadersRoundTrip) {
  for (const DTypeInfo& info : AllDTypes()) {
    if (info.npy_descr.empty() || info.npy_descr == "<V1") continue;
    for (const Dims& shape : {Dims{}, Dims{7}, Dims{3, 0, 2}, Dims::Filled(16, 2)}) {
      const std::string bytes = MakeNpyHeader(info.dtype, shape).value();
      const auto header = ParseNpyHeader(bytes + "elements");
      ASSERT_OK(header);
      EXPECT_EQ(header.value().dtype, info.dtype);
      EXPECT_EQ(header.value().shape, shape);
      EXPECT_FALSE(header.value().fortran_order);
      EXPECT_EQ(header.value().data_offset, bytes.size());
    }
  }
}

TEST(NpyTest, ReadsOtherSpellingsOfAHeader) {
  for (const std::string& bytes : {
           NpyFile("{'descr':'<f4','fortran_order':True,'shape':(2,3)}"),
           NpyFile("{\"shape\": (2, 3,), \"descr\": \"<f4\", \"fortran_order\": True}  \n"),
           NpyFile("{'descr': '<f4', 'fortran_order': True, 'shape': (2L, 3L), }\n"),
           NpyFile("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }\n", 2),
           NpyFile("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }\n", 3),
       }) {
    const auto header = ParseNpyHeader(bytes);
    ASSERT_OK(header);
    EXPECT_EQ(header.value().dtype, DType::kF32);
    EXPECT_EQ(header.value().shape, (Dims{2, 3}));
    EXPECT_TRUE(header.value().fortran_order);
    EXPECT_EQ(header.value().data_offset, bytes.size());
  }
}

TEST(NpyTest, RefusesNonNumericTypesByName) {
  EXPECT_EQ(ParseNpyHeader(Descr("'<V2'")).value().dtype, DType::kBF16);
  EXPECT_EQ(ParseNpyHeader(Descr("'<f1'")).value().dtype, DType::kF8E5M2);
  EXPECT_EQ(ParseNpyHeader(Descr("'<u1'")).value().dtype, DType::kU8);
  const std::map<std::string, std::string> refused = {
      {"'|O'", "element type '|O' is not supported: Python objects"},
      {"'>f4'", "element type '>f4' is not supported: big-endian"},
      {"'>i8'", "big-endian"},
      {"'<U5'", "text"},
      {"'|S3'", "text"},
      {"'<M8[ns]'", "dates"},
      {"'|V2'", "raw bytes"},
      {"'<V1'", "several formats"},
      {"'<f16'", "unknown type"},
      {"''", "unknown type"},
      {"[('a', '<f4'), ('b', '<i4')]", "elements with several fields"},
  };
  for (const auto& [descr, message] : refused) {
    const auto header = ParseNpyHeader(Descr(descr));
    EXPECT_THAT(header, HasCode(Code::kUnsupported)) << descr;
    EXPECT_THAT(header, HasMessage(message)) << descr;
  }
  EXPECT_THAT(ParseNpyHeader(NpyFile("{'descr': '<f4', 'fortran_order': False, 'shape': (" +
                                     [] {
                                       std::string s;
                                       for (int i = 0; i < 17; ++i) s += "1,";
                                       return s;
                                     }() +
                                     ")}")),
              HasCode(Code::kUnsupported));
}

TEST(NpyTest, HeadersAreReadUpToAMebibyte) {
  const auto offset = [](std::uint64_t header) {
    std::string first("\x93NUMPY\x02\x00", 8);
    first.resize(12);
    StoreLittle(first.data() + 8, static_cast<std::uint32_t>(header - 12));
    return NpyDataOffset(first);
  };
  EXPECT_THAT(offset(kMaxNpyHeader), IsOkAndHolds(kMaxNpyHeader));
  EXPECT_THAT(offset(kMaxNpyHeader + 1), HasCode(Code::kUnsupported));
}

TEST(NpyTest, RefusesHeadersThatAreNotALiteral) {
  const std::map<std::string, std::string> bad = {
      {"", "not a dictionary"},
      {"{'descr': '<f4', 'fortran_order': False}", "is missing"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'shape': (3,)}", "occurs twice"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': 1}", "unknown key 'x'"},
      {"{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}", "neither True nor False"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2)}", "not a tuple"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': 2}", "not a tuple"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}", "not an integer"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2 ,3 4)}", "not a tuple"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
       "not an integer"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", "4294967296"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} or exit()", "after the dictionary"},
      {"{'descr': __import__('os'), 'fortran_order': False, 'shape': (2,)}",
       "descr is not a string"},
      {"{'descr': '\\x3cf4', 'fortran_order': False, 'shape': (2,)}", "descr is not a string"},
      {"{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}", "comma"},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)", "comma"},
  };
  for (const auto& [dict, message] : bad) {
    const auto header = ParseNpyHeader(NpyFile(dict));
    EXPECT_THAT(header, HasCode(Code::kDataLoss)) << dict;
    EXPECT_THAT(header, HasMessage(message)) << dict;
  }
  EXPECT_THAT(ParseNpyHeader("PK\3\4 and so on"), HasCode(Code::kDataLoss));
  EXPECT_THAT(ParseNpyHeader(NpyFile("{}", 4)), HasCode(Code::kUnsupported));
  const std::string whole = MakeNpyHeader(DType::kF32, {2}).value();
  for (std::size_t n = 0; n < whole.size(); ++n) {
    EXPECT_THAT(ParseNpyHeader(whole.substr(0, n)), HasCode(Code::kDataLoss)) << n;
  }
  const std::string long_one = std::string("\x93NUMPY\x02\0", 8) + "\xff\xff\xff\x7f";
  EXPECT_THAT(ParseNpyHeader(long_one), HasCode(Code::kUnsupported));
}

}  // namespace
}  // namespace tensormount
