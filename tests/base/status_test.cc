// SPDX-License-Identifier: Apache-2.0
#include "tensormount/status.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <variant>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/checked.h"
#include "base/coding.h"
#include "base/deadline.h"
#include "base/log.h"
#include "tests/support/forked.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::hours;
using std::chrono::nanoseconds;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(StatusTest, DefaultIsOk) {
  const Status s;
  EXPECT_TRUE(s.ok());
  EXPECT_EQ(s.code(), Code::kOk);
  EXPECT_EQ(s.message(), "");
  EXPECT_EQ(s.ToErrno(), 0);
  EXPECT_EQ(s.ToString(), "OK");
  EXPECT_TRUE(Status(Code::kOk, "ignored").ok());
}

TEST(StatusTest, EachCodeHasItsErrnoAndName) {
  const std::vector<std::pair<Code, int>> table = {{Code::kInvalidArgument, EINVAL},
                                                   {Code::kNotFound, ENOENT},
                                                   {Code::kAlreadyExists, EEXIST},
                                                   {Code::kPermissionDenied, EACCES},
                                                   {Code::kReadOnly, EROFS},
                                                   {Code::kResourceExhausted, ENOSPC},
                                                   {Code::kDataLoss, EIO},
                                                   {Code::kUnavailable, EAGAIN},
                                                   {Code::kDeadlineExceeded, ETIMEDOUT},
                                                   {Code::kBusy, EBUSY},
                                                   {Code::kStale, ESTALE},
                                                   {Code::kUnknown, EIO},
                                                   {Code::kUnsupported, EOPNOTSUPP},
                                                   {Code::kCancelled, EINTR},
                                                   {Code::kInternal, EIO}};
  for (const auto& [code, err] : table) {
    EXPECT_EQ(Status(code, "x").ToErrno(), err) << CodeName(code);
    // What the kernel is told says the same to who asks again; EIO stands for four codes.
    if (err == EIO) continue;
    EXPECT_EQ(Status::FromErrno(err, "a", "b").code(), code);
  }
  EXPECT_EQ(CodeName(Code::kDataLoss), "DATA_LOSS");
  EXPECT_EQ(CodeName(Code::kInternal), "INTERNAL");
}

TEST(StatusTest, FromErrnoNamesActionObjectAndCause) {
  const Status s = Status::FromErrno(ENOSPC, "write", "data/w.bin");
  EXPECT_EQ(s.ToString(), "RESOURCE_EXHAUSTED: write data/w.bin: No space left on device");
  EXPECT_EQ(Status::FromErrno(EDQUOT, "write", "f").code(), Code::kResourceExhausted);
  EXPECT_EQ(Status::FromErrno(EDQUOT, "write", "f").ToErrno(), EDQUOT);
  EXPECT_EQ(Status::FromErrno(ENOTEMPTY, "rename", "f").code(), Code::kAlreadyExists);
  EXPECT_EQ(Status::FromErrno(ENOTDIR, "open", "f").code(), Code::kNotFound);
  EXPECT_EQ(Status::FromErrno(0, "open", "f").code(), Code::kInternal);
}

TEST(StatusTest, ContextKeepsCodeAndErrno) {
  const Status s = Status::FromErrno(EDQUOT, "write", "f").WithContext("save step-1");
  EXPECT_EQ(s.code(), Code::kResourceExhausted);
  EXPECT_EQ(s.ToErrno(), EDQUOT);
  EXPECT_THAT(s.message(), HasSubstr("save step-1: write f: "));
  EXPECT_TRUE(Status().WithContext("x").ok());
}

// What may succeed when it is tried again is told from what is wrong for good, and from a defect of
// ours.
TEST(StatusTest, NetworkErrnosAreRetryable) {
  for (const int err : {EAGAIN, ECONNRESET, ECONNREFUSED, EPIPE, EHOSTUNREACH, EHOSTDOWN,
                        ENETUNREACH, ENETDOWN, ENETRESET, ESHUTDOWN, ENOLINK, ECOMM}) {
    EXPECT_EQ(Status::FromErrno(err, "read", "/f").code(), Code::kUnavailable) << err;
  }
  EXPECT_EQ(Status::FromErrno(ETIMEDOUT, "read", "/f").code(), Code::kDeadlineExceeded);
  EXPECT_EQ(Status::FromErrno(EIO, "read", "/f").code(), Code::kDataLoss);
}

TEST(StatusTest, FromPartsKeepsCodeAndErrno) {
  const Status s = Status::FromParts(Code::kUnavailable, ECONNRESET, "rank 3: gone");
  EXPECT_EQ(s.code(), Code::kUnavailable);
  EXPECT_EQ(s.ToErrno(), ECONNRESET);
  EXPECT_EQ(Status::FromParts(Code::kBusy, 0, "x").ToErrno(), EBUSY);
}

TEST(StatusTest, ContextKeepsErrorFields) {
  const ErrorFields inner{
      .rank = 3, .key = "w", .cause = "transposed", .box_begin = {0, 4}, .box_extent = {1, 2}};
  const Status s = Status(Code::kInvalidArgument, "tensor w").With(inner).WithContext("save");
  EXPECT_EQ(s.fields(), inner);
  EXPECT_EQ(s.WithMessage("other words").fields(), inner);
  EXPECT_EQ(s.WithMessage("other words").message(), "other words");
  EXPECT_EQ(s.WithMessage("other words").ToErrno(), s.ToErrno());
  // What was known first stays; what is missing is added, but a box only to its own key.
  const Status more = s.With({.rank = 5, .key = "v", .file = "data/w.bin", .cause = "else"});
  EXPECT_EQ(more.fields().rank, 3);
  EXPECT_EQ(more.fields().key, "w");
  EXPECT_EQ(more.fields().file, "data/w.bin");
  EXPECT_EQ(more.fields().cause, "transposed");
  const Status there = s.With({.device = "cuda:0"}).With({.device = "cuda:1"});
  EXPECT_EQ(there.fields().device, "cuda:0");
  const Status keyed = Status(Code::kDataLoss, "x").With({.key = "w"});
  EXPECT_THAT(keyed.With({.key = "v", .box_begin = {1}, .box_extent = {1}}).fields().box_begin,
              testing::IsEmpty());
  EXPECT_EQ(keyed.With({.key = "w", .box_begin = {1}, .box_extent = {1}}).fields().box_begin,
            std::vector<std::int64_t>{1});
  EXPECT_EQ(Status().With(inner).fields(), ErrorFields());
  EXPECT_EQ(Status::FromErrno(ENOSPC, "write", "data/w.bin").fields().file, "data/w.bin");
}

Result<std::unique_ptr<int>> Half(int v) {
  if (v % 2 != 0) return Status(Code::kInvalidArgument, "odd");
  return std::make_unique<int>(v / 2);
}

Result<int> Quarter(int v) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<int> half, Half(v));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<int> quarter, Half(*half));
  return *quarter;
}

TEST(ResultTest, MacrosReturnFailures) {
  EXPECT_THAT(Quarter(12), IsOkAndHolds(3));
  EXPECT_THAT(Quarter(6), HasCode(Code::kInvalidArgument));
  EXPECT_ANY_THROW((void)Quarter(6).value());
}

TEST(ResultTest, OkResultHasOkStatus) {
  const Result<std::string> r = std::string("v");
  EXPECT_TRUE(r.status().ok());
  EXPECT_EQ(r.value(), "v");
}

TEST(CheckedTest, DetectsOverflow) {
  constexpr auto kMax = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(CheckedAdd(kMax - 1, std::uint64_t{1}), kMax);
  EXPECT_EQ(CheckedAdd(kMax, std::uint64_t{1}), std::nullopt);
  EXPECT_EQ(CheckedMul(std::int64_t{1} << 32, std::int64_t{1} << 31), std::nullopt);
  EXPECT_EQ(CheckedMul(std::int64_t{3}, std::int64_t{-4}), -12);
  EXPECT_EQ(CheckedCast<std::int32_t>(std::int64_t{1} << 31), std::nullopt);
  EXPECT_EQ(CheckedCast<std::uint64_t>(-1), std::nullopt);
  EXPECT_EQ(CheckedCast<std::uint8_t>(255), 255);
}

TEST(CheckedTest, RangeWithinDoesNotWrap) {
  constexpr auto kMax = std::numeric_limits<unsigned long long>::max();
  EXPECT_TRUE(RangeWithin(0, 0, 0));
  EXPECT_TRUE(RangeWithin(4, 6, 10));
  EXPECT_FALSE(RangeWithin(4, 7, 10));
  EXPECT_FALSE(RangeWithin(kMax, 2, 10));
  EXPECT_FALSE(RangeWithin(2, kMax, 10));
}

TEST(CodingTest, FieldsAreLittleEndianWithoutPadding) {
  ByteWriter w;
  w.U8(1);
  w.U16(0x0302);
  w.U32(0x07060504);
  w.U64(0x0F0E0D0C0B0A0908);
  w.String("\x11");
  EXPECT_EQ(w.bytes(), std::string("\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0A\x0B\x0C\x0D\x0E\x0F"
                                   "\x01\x00\x00\x00\x11",
                                   20));
  ByteReader r(w.bytes(), "record");
  EXPECT_EQ(r.U8(), 1);
  EXPECT_EQ(r.U16(), 0x0302);
  EXPECT_EQ(r.U32(), 0x07060504u);
  EXPECT_EQ(r.U64(), 0x0F0E0D0C0B0A0908u);
  EXPECT_EQ(r.String(10), "\x11");
  EXPECT_THAT(r.Finish(), IsOk());
}

TEST(CodingTest, FieldsRoundTrip) {
  ByteWriter w;
  w.I64(-5);
  w.F64(-0.25);
  w.Hash({1, 2});
  w.Raw("xyz", 3);
  ByteReader r(w.bytes(), "record");
  EXPECT_EQ(r.I64(), -5);
  EXPECT_EQ(r.F64(), -0.25);
  EXPECT_EQ(r.Hash(), (Hash128{1, 2}));
  EXPECT_EQ(r.Raw(3), "xyz");
  EXPECT_THAT(r.Finish(), IsOk());
}

TEST(CodingTest, ReaderStaysFailedAfterReadingPastTheEnd) {
  ByteReader r("\x01\x02\x03", "manifest/0");
  EXPECT_EQ(r.U32(), 0u);
  EXPECT_EQ(r.U8(), 0);  // Although one byte would be there.
  EXPECT_THAT(r.status(), HasCode(Code::kDataLoss));
  EXPECT_THAT(r.status().message(), HasSubstr("manifest/0: truncated at byte 3"));
  EXPECT_THAT(r.Finish(), HasCode(Code::kDataLoss));
}

TEST(CodingTest, LongStringsAreRefused) {
  ByteWriter w;
  w.String("12345");
  ByteReader r(w.bytes(), "record");
  EXPECT_EQ(r.String(4), "");
  EXPECT_THAT(r.status(), HasCode(Code::kDataLoss));
  ByteReader huge("\xFF\xFF\xFF\xFF", "record");
  EXPECT_EQ(huge.String(~std::size_t{0}), "");
  EXPECT_THAT(huge.status(), HasCode(Code::kDataLoss));
}

TEST(CodingTest, LeftoverBytesFailFinish) {
  ByteReader r("ab", "record");
  r.U8();
  EXPECT_THAT(r.status(), IsOk());
  EXPECT_THAT(r.Finish(), HasCode(Code::kDataLoss));
}

TEST(DeadlineTest, PassedDeadlineHasNoTimeLeft) {
  EXPECT_TRUE(Deadline::After(nanoseconds(-1)).Passed());
  EXPECT_EQ(Deadline::After(nanoseconds(-1)).Left(), nanoseconds(0));
  EXPECT_FALSE(Deadline::After(hours(1)).Passed());
  EXPECT_GT(Deadline::After(hours(1)).Left(), hours(0));
}

TEST(LogTest, SinkReceivesMessagesAtOrAboveTheLevel) {
  std::vector<std::string> lines;
  SetLogSink([&](LogLevel level, std::string_view line) {
    lines.push_back((level == LogLevel::kError ? "E " : "W ") + std::string(line));
    Log(LogLevel::kDebug, "a sink may log");
  });
  Log(LogLevel::kInfo, "dropped");
  Log(LogLevel::kWarning, "one");
  SetLogLevel(LogLevel::kError);
  Log(LogLevel::kWarning, "dropped");
  Log(LogLevel::kError, "two");
  SetLogLevel(LogLevel::kWarning);
  SetLogSink({});
  EXPECT_THAT(lines, ElementsAre("W one", "E two"));
}

// A sink may wait for a lock of the thread that forks, so a fork does not wait for sinks.
TEST(LogTest, ForkedChildDoesNotWaitForParentSinks) {
  const pid_t parent = getpid();
  std::promise<void> inside;
  std::promise<void> go;
  int lines = 0;
  SetLogSink([&](LogLevel, std::string_view) {
    ++lines;
    if (getpid() != parent) return;
    inside.set_value();
    go.get_future().wait();
  });
  std::thread logs([] { Log(LogLevel::kWarning, "of the parent"); });
  inside.get_future().wait();
  EXPECT_TRUE(InForkedChild([&] {
    Log(LogLevel::kWarning, "of the child");
    SetLogSink({});
    return lines == 2;
  }));
  go.set_value();
  logs.join();
  EXPECT_EQ(lines, 1);
  SetLogSink({});
}

// The lock is of the one that forks, and comes free in the child when its sink returns there.
TEST(LogTest, SinkMayFork) {
  pid_t child = -1;
  SetLogSink([&](LogLevel, std::string_view) { child = fork(); });
  Log(LogLevel::kWarning, "forks");
  if (child == 0) {
    alarm(20);
    SetLogSink({});
    _exit(0);
  }
  SetLogSink({});
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(LogTest, StandardErrorGetsOneLine) {
  testing::internal::CaptureStderr();
  Log(LogLevel::kWarning, "key a\nb");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "tensormount: WARNING: key a b\n");
}

TEST(LogTest, OneLineEscapesControlCharacters) {
  EXPECT_EQ(OneLine("a\x1b[2Jb\x7f"
                    "c\xc2\x9b"
                    "d\xe2\x80\xae"
                    "e\xe2\x81\xa6"
                    "f"),
            "a [2Jb c d e f");
  // Letters of others stay, whole or cut.
  EXPECT_EQ(OneLine("\xc3\xa9\xe2\x80\x94\xe2\x80"), "\xc3\xa9\xe2\x80\x94\xe2\x80");
}

// Programs that were compiled when Result held a std::variant pass results to the library, and the
// reverse.
template <typename T>
void ExpectLayoutOfAVariant() {
  using Variant = std::variant<T, Status>;
  static_assert(sizeof(Result<T>) == sizeof(Variant));
  static_assert(alignof(Result<T>) == alignof(Variant));
  static_assert(std::is_copy_constructible_v<Result<T>> == std::is_copy_constructible_v<Variant>);
  const Status failure(Code::kNotFound, "x");
  const Result<T> result = failure;
  const Variant variant(std::in_place_index<1>, failure);
  constexpr std::size_t kWhich = std::max(sizeof(T), sizeof(Status));
  EXPECT_EQ(reinterpret_cast<const unsigned char*>(&result)[kWhich], 1);
  EXPECT_EQ(reinterpret_cast<const unsigned char*>(&variant)[kWhich], 1);
}

TEST(ResultTest, IsLaidOutAsAVariant) {
  struct Empty {};
  struct alignas(32) Wide {
    char c;
  };
  ExpectLayoutOfAVariant<char>();
  ExpectLayoutOfAVariant<std::string>();
  ExpectLayoutOfAVariant<Empty>();
  ExpectLayoutOfAVariant<Wide>();
  ExpectLayoutOfAVariant<std::unique_ptr<int>>();
}

TEST(ResultTest, IsCopiedMovedAndAssigned) {
  Result<std::unique_ptr<int>> only(std::make_unique<int>(3));
  Result<std::unique_ptr<int>> moved = std::move(only);
  EXPECT_EQ(*moved.value(), 3);
  moved = Status(Code::kBusy, "taken");
  EXPECT_EQ(moved.status().message(), "taken");
  EXPECT_THROW(moved.value(), std::bad_variant_access);
  Result<std::string> text(std::string(100, 'x'));
  const Result<std::string> copy = text;
  text = Status(Code::kBusy, "taken");
  EXPECT_FALSE(text.ok());
  text = copy;
  text = *&text;
  EXPECT_EQ(text.value(), copy.value());
}

struct ThrowsWhenArmed {
  ThrowsWhenArmed() = default;
  ThrowsWhenArmed(const ThrowsWhenArmed&) {
    if (armed) throw 1;
  }
  static inline bool armed = false;
};

TEST(ResultTest, ThrowingAssignmentLeavesNoValue) {
  Result<ThrowsWhenArmed> result = Status(Code::kBusy, "before");
  Result<ThrowsWhenArmed> value = ThrowsWhenArmed();
  ThrowsWhenArmed::armed = true;
  EXPECT_THROW(result = std::move(value), int);
  ThrowsWhenArmed::armed = false;
  EXPECT_FALSE(result.ok());
  EXPECT_THROW((void)result.status(), std::bad_variant_access);
}

}  // namespace
}  // namespace tensormount
