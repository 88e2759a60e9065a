// SPDX-License-Identifier: Apache-2.0
#include "base/hash.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/crc64_math.h"
#include "tests/support/random.h"

namespace tensormount {
namespace {

TEST(Xxh3Test, MatchesKnownValues) {
  // XXH3 with seed 0, as every implementation gives them.
  EXPECT_EQ(Xxh3("").ToHex(), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(Xxh3("abc").ToHex(), "06b05ab6733a618578af5f94892f3950");
  EXPECT_EQ(Xxh3Low64(""), 0x2D06800538D394C2u);
}

TEST(Xxh3Test, HexPrintsTheHighHalfFirst) {
  EXPECT_EQ((Hash128{0x1, 0xF0}).ToHex(), "00000000000000f00000000000000001");
}

TEST(Xxh3Test, StreamEqualsOneShotForAnyPieces) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(40); ++i) {
    const std::string data = random.Bytes(static_cast<std::size_t>(random.Int(0, 5000)));
    Xxh3Stream stream;
    for (std::size_t at = 0; at < data.size();) {
      const std::size_t n =
          std::min(data.size() - at, static_cast<std::size_t>(random.Int(0, 1500)));
      stream.Update(data.data() + at, n);
      at += n;
      EXPECT_EQ(stream.Value(), Xxh3(data.data(), at));
    }
    stream.Reset();
    EXPECT_EQ(stream.Value(), Xxh3(""));
  }
}

TEST(Xxh3Test, FirstCallIsThreadSafe) {
  const std::string data = Random(TestSeed()).Bytes(100000);
  const Hash128 want = Xxh3(data);
  std::vector<std::thread> threads;
  std::vector<Hash128> got(4);
  for (Hash128& h : got) threads.emplace_back([&h, &data] { h = Xxh3(data); });
  for (std::thread& t : threads) t.join();
  EXPECT_THAT(got, testing::Each(want));
}

TEST(Crc64Test, MatchesKnownValues) {
  EXPECT_EQ(Crc64Extend(0, "", 0), 0u);
  EXPECT_EQ(Crc64Extend(0, nullptr, 0), 0u);
  EXPECT_EQ(Crc64Extend(0, "123456789", 9), 0xAE8B14860A799888u);
  EXPECT_EQ(Crc64Bitwise(0, "123456789", 9), 0xAE8B14860A799888u);
  // NVM Express NVM Command Set Specification, "64b CRC Test Cases": 4 KiB of zeros, of ones.
  EXPECT_EQ(Crc64Extend(0, std::string(4096, '\0').data(), 4096), 0x6482D367EB22B64Eu);
  EXPECT_EQ(Crc64Extend(0, std::string(4096, '\xFF').data(), 4096), 0xC0DDBA7302ECA3ACu);
}

TEST(Crc64Test, ConstantsMatchThePolynomial) {
  EXPECT_EQ(crc64::kReflected, 0x9A6C9329AC4BC9B5u);
  EXPECT_EQ(crc64::TimesX(crc64::kInverseX), crc64::Reflect(1));
  EXPECT_EQ(crc64::kBytePowers[0], crc64::FoldConstant(8));
  EXPECT_EQ(crc64::kBytePowers[5], crc64::FoldConstant(8 * 32));
}

std::vector<crc64::Form> Forms() {
  std::vector<crc64::Form> forms = {crc64::PortableForm()};
  for (const crc64::Form* form :
       {crc64::ClmulForm(), crc64::DoubleClmulForm(), crc64::WideClmulForm()}) {
    if (form != nullptr) forms.push_back(*form);
  }
  return forms;
}

class Crc64FormTest : public testing::TestWithParam<crc64::Form> {
 protected:
  Crc64 Extend(Crc64 crc, void* dst, const void* src, std::size_t size) {
    return ~GetParam().extend(~crc, dst, src, size);
  }
};

TEST_P(Crc64FormTest, EverySizeEqualsTheDefinition) {
  Random random(TestSeed());
  const std::string data = random.Bytes(1400);
  std::string copy(1400 + 2, '\0');
  for (std::size_t size = 0; size <= 1300; ++size) {
    const std::size_t from = size % 67;
    const Crc64 start = size % 3 == 0 ? 0 : random.Next();
    const Crc64 want = Crc64Bitwise(start, data.data() + from, size);
    ASSERT_EQ(Extend(start, nullptr, data.data() + from, size), want) << size;
    std::fill(copy.begin(), copy.end(), '\x5A');
    ASSERT_EQ(Extend(start, copy.data() + 1, data.data() + from, size), want) << size;
    ASSERT_EQ(copy.substr(1, size), data.substr(from, size)) << size;
    ASSERT_EQ(copy[0], '\x5A') << size;
    ASSERT_EQ(copy[size + 1], '\x5A') << size;
  }
}

TEST_P(Crc64FormTest, LongRandomRunsEqualTheDefinition) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(20); ++i) {
    const auto size = static_cast<std::size_t>(random.Int(1000, 40000));
    const auto from = static_cast<std::size_t>(random.Int(0, 63));
    const std::string data = random.Bytes(from + size);
    std::string copy(size, '\0');
    const Crc64 want = Crc64Bitwise(7, data.data() + from, size);
    ASSERT_EQ(Extend(7, nullptr, data.data() + from, size), want) << size;
    ASSERT_EQ(Extend(7, copy.data(), data.data() + from, size), want) << size;
    ASSERT_EQ(copy, data.substr(from)) << size;
  }
}

TEST_P(Crc64FormTest, MultiplyEqualsTheDefinition) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(200); ++i) {
    const std::uint64_t a = random.Next();
    const std::uint64_t b = random.Next();
    ASSERT_EQ(GetParam().multiply(a, b), crc64::MultiplyPortable(a, b));
  }
  EXPECT_EQ(GetParam().multiply(0x1234, crc64::kInverseX), 0x1234u);
}

// Every length of a run, so every mask of a first lane; steps that go back or repeat bytes, too.
TEST_P(Crc64FormTest, RowsEqualSingleRuns) {
  if (GetParam().rows == nullptr) GTEST_SKIP() << "this form has none";
  Random random(TestSeed());
  const std::string data = random.Bytes(40000);
  for (std::size_t run = crc64::kLaneBytes; run <= crc64::kLongestRow; ++run) {
    const auto rows = static_cast<std::size_t>(random.Int(1, run % 16 == 0 ? 60 : 9));
    const auto most = static_cast<std::int64_t>((data.size() - run) / rows);
    const std::int64_t step = random.Int(0, most);
    const bool back = random.Int(0, 3) == 0;
    const char* const first = data.data() + (back ? static_cast<std::int64_t>(rows - 1) * step : 0);
    const auto distance = static_cast<std::uint64_t>(random.Int(0, 1 << 20));
    const Crc64Shift shift(distance);
    Crc64 want = 0;
    for (std::size_t r = 0; r < rows; ++r) {
      const char* const at = first + static_cast<std::int64_t>(r) * (back ? -step : step);
      want = shift.Apply(want) ^ Crc64Bitwise(0, at, run);
    }
    std::vector<std::byte> ones(crc64::PaddedRun(run));
    std::memset(ones.data() + ones.size() - run, 0xFF, 8);
    std::memcpy(ones.data() + ones.size() - 8, &crc64::kFinalOnes, 8);
    const crc64::FoldPair by = {Crc64Shift(distance + 8).factor(), shift.factor()};
    ASSERT_EQ(GetParam().rows(reinterpret_cast<const std::byte*>(first), back ? -step : step, run,
                              rows, by, ones.data()),
              want)
        << run << " x " << rows << " by " << step << ", " << distance;
    ASSERT_EQ(Crc64Rows(first, back ? -step : step, run, rows, distance), want) << run;
  }
}

// The lanes of a first row begin before its memory, of which not a byte may be touched.
TEST(Crc64Test, RowsReadNoByteOutsideTheirMemory) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* const map = mmap(nullptr, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(map, MAP_FAILED);
  auto* const middle = static_cast<std::byte*>(map) + page;
  ASSERT_EQ(mprotect(middle, page, PROT_READ | PROT_WRITE), 0);
  const std::string data = Random(TestSeed()).Bytes(page);
  std::memcpy(middle, data.data(), page);
  for (const std::size_t run : {65u, 100u, 127u, 449u, 511u}) {
    const std::size_t rows = page / run;
    const std::size_t rest = page - rows * run;
    for (const std::size_t from : {std::size_t{0}, rest}) {
      Crc64 want = 0;
      for (std::size_t r = 0; r < rows; ++r) {
        want = Crc64Shift(run).Apply(want) ^ Crc64Bitwise(0, data.data() + from + r * run, run);
      }
      EXPECT_EQ(Crc64Rows(middle + from, static_cast<std::ptrdiff_t>(run), run, rows, run), want);
    }
  }
  munmap(map, 3 * page);
}

INSTANTIATE_TEST_SUITE_P(Forms, Crc64FormTest, testing::ValuesIn(Forms()),
                         [](const auto& form) { return form.param.name; });

TEST(Crc64Test, PublicFunctionsUseTheFormForThisCpu) {
  EXPECT_EQ(Crc64IsAccelerated(), crc64::ClmulForm() != nullptr);
  const std::string data = Random(TestSeed()).Bytes(3000);
  std::string copy(3000, '\0');
  EXPECT_EQ(Crc64Copy(5, copy.data(), data.data(), 3000), Crc64Bitwise(5, data.data(), 3000));
  EXPECT_EQ(copy, data);
  EXPECT_EQ(Crc64Extend(5, data.data(), 3000), Crc64Bitwise(5, data.data(), 3000));
}

TEST(Crc64Test, CombineEqualsTheWhole) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(100); ++i) {
    const std::string data = random.Bytes(static_cast<std::size_t>(random.Int(0, 3000)));
    const auto cut =
        static_cast<std::size_t>(random.Int(0, static_cast<std::int64_t>(data.size())));
    const Crc64 a = Crc64Extend(0, data.data(), cut);
    const Crc64 b = Crc64Extend(0, data.data() + cut, data.size() - cut);
    const Crc64 whole = Crc64Extend(0, data.data(), data.size());
    ASSERT_EQ(Crc64Shift(data.size() - cut).Apply(a) ^ b, whole);
    ASSERT_EQ(Crc64Extend(a, data.data() + cut, data.size() - cut), whole);
  }
}

TEST(Crc64Test, ShiftsAddUpAndZeroChangesNothing) {
  const Crc64 crc = 0x0123456789ABCDEF;
  EXPECT_EQ(Crc64Shift(0).Apply(crc), crc);
  const std::uint64_t far = 0xFFFFFFFFFFFFFFFF;
  EXPECT_EQ(Crc64Shift(far - 5).Apply(Crc64Shift(5).Apply(crc)), Crc64Shift(far).Apply(crc));
  EXPECT_EQ(Crc64Shift(1).Apply(Crc64Shift(2).Apply(crc)), Crc64Shift(3).Apply(crc));
}

// Cuts a byte string into runs, and expects the CRCs of these, each shifted by the bytes behind it,
// to XOR to the CRC of the whole in any order.
TEST(Crc64Test, ShiftedRunsOfAnyPartitionXorToTheWhole) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(100); ++i) {
    const std::string data = random.Bytes(static_cast<std::size_t>(random.Int(0, 4000)));
    const std::int64_t longest = random.Int(1, 700);
    Crc64 even = 0;
    Crc64 odd = 0;
    for (std::size_t at = 0; at < data.size();) {
      const std::size_t n =
          std::min(data.size() - at, static_cast<std::size_t>(random.Int(0, longest)));
      const Crc64Shift behind(data.size() - at - n);
      (random.Int(0, 1) == 0 ? even : odd) ^= behind.Apply(Crc64Extend(0, data.data() + at, n));
      at += n;
    }
    ASSERT_EQ(even ^ odd, Crc64Bitwise(0, data.data(), data.size()));
  }
}

}  // namespace
}  // namespace tensormount
