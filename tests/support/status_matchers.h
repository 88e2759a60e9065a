// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_STATUS_MATCHERS_H_
#define TENSORMOUNT_TESTS_SUPPORT_STATUS_MATCHERS_H_

#include <ostream>
#include <string>
#include <type_traits>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensormount/status.h"

namespace tensormount {

inline void PrintTo(const Status& status, std::ostream* os) { *os << status.ToString(); }
inline void PrintTo(Code code, std::ostream* os) { *os << CodeName(code); }
template <typename T>
void PrintTo(const Result<T>& result, std::ostream* os) {
  if (!result.ok()) {
    *os << result.status().ToString();
  } else if constexpr (requires {
                         *os << result.status().ToString()
                             << testing::PrintToString(result.value());
                       }) {
    *os << "OK: " << testing::PrintToString(result.value());
  } else {
    *os << "OK";
  }
}

// The Status of a Status or of a Result.
inline const Status& StatusOf(const Status& status) { return status; }
template <typename T>
Status StatusOf(const Result<T>& result) {
  return result.status();
}

// A matcher of the Status of a Status or of a Result. It is of one type whatever the Result holds:
// to compile EXPECT_THAT for each of them took a third of the time of all tests
// (testing::internal::MakePredicateFormatterFromMatcher below).
class StatusMatcher {
 public:
  explicit StatusMatcher(testing::Matcher<const Status&> matcher) : matcher_(std::move(matcher)) {}
  // For matchers of matchers: Not(), AllOf().
  template <typename T>
  operator testing::Matcher<T>() const {  // NOLINT(google-explicit-constructor)
    return testing::Matcher<T>(new Adapted<T>(matcher_));
  }
  const testing::Matcher<const Status&>& matcher() const { return matcher_; }

 private:
  template <typename T>
  class Adapted final : public testing::MatcherInterface<T> {
   public:
    explicit Adapted(testing::Matcher<const Status&> matcher) : matcher_(std::move(matcher)) {}
    bool MatchAndExplain(T value, testing::MatchResultListener* listener) const override {
      return matcher_.MatchAndExplain(StatusOf(value), listener);
    }
    void DescribeTo(std::ostream* os) const override { matcher_.DescribeTo(os); }
    void DescribeNegationTo(std::ostream* os) const override { matcher_.DescribeNegationTo(os); }

   private:
    testing::Matcher<const Status&> matcher_;
  };
  testing::Matcher<const Status&> matcher_;
};

// EXPECT_THAT(Store::Open(path), IsOk());
StatusMatcher IsOk();

// EXPECT_THAT(reader.Read(0, buffer), HasCode(Code::kDataLoss));
StatusMatcher HasCode(testing::Matcher<Code> code);

// A failure whose message matches: a string is a substring that must be there, otherwise a matcher
// of strings. EXPECT_THAT(status, HasMessage("tensor layers.3.w [0:16, 128:256]"));
StatusMatcher HasMessageLike(testing::Matcher<const std::string&> message);
template <typename Inner>
StatusMatcher HasMessage(const Inner& inner) {
  if constexpr (std::is_convertible_v<Inner, std::string>) {
    return HasMessageLike(testing::HasSubstr(std::string(inner)));
  } else {
    return HasMessageLike(testing::SafeMatcherCast<const std::string&>(inner));
  }
}

// Implement EXPECT_THAT with a StatusMatcher, and ASSERT_OK. `text` is the tested expression.
testing::AssertionResult Matches(const char* text, const Status& status,
                                 const StatusMatcher& matcher);
testing::AssertionResult Succeeds(const char* text, const Status& status);

// A Result whose value matches: EXPECT_THAT(file.Size(), IsOkAndHolds(12u));
MATCHER_P(IsOkAndHolds, inner, "is OK and holds a value that is as asked") {
  if (!arg.ok()) {
    *result_listener << arg.status().ToString();
    return false;
  }
  return testing::ExplainMatchResult(inner, arg.value(), result_listener);
}

}  // namespace tensormount

// EXPECT_THAT calls this function for every matcher. The overload for StatusMatcher avoids gmock's
// templates, which would be instantiated for each Result.
namespace testing::internal {
struct StatusPredicate {
  tensormount::StatusMatcher matcher;
  template <typename T>
  AssertionResult operator()(const char* text, const T& value) const {
    return tensormount::Matches(text, tensormount::StatusOf(value), matcher);
  }
};
inline StatusPredicate MakePredicateFormatterFromMatcher(tensormount::StatusMatcher matcher) {
  return {std::move(matcher)};
}
}  // namespace testing::internal

// Go on only where `expr` (a Status or Result) is OK.
#define ASSERT_OK(expr) ASSERT_PRED_FORMAT1(::tensormount::Succeeds, ::tensormount::StatusOf(expr))
#define EXPECT_OK(expr) EXPECT_PRED_FORMAT1(::tensormount::Succeeds, ::tensormount::StatusOf(expr))

// ASSERT_OK_AND_ASSIGN(auto file, fs.Open(path)): only in functions that return void.
#define ASSERT_OK_AND_ASSIGN(decl, expr) \
  ASSERT_OK_AND_ASSIGN_(TENSORMOUNT_CONCAT_(tensormount_result_, __COUNTER__), decl, expr)
#define ASSERT_OK_AND_ASSIGN_(tmp, decl, expr)      \
  auto tmp = (expr);                                \
  ASSERT_TRUE(tmp.ok()) << tmp.status().ToString(); \
  decl = std::move(tmp).value()

#endif  // TENSORMOUNT_TESTS_SUPPORT_STATUS_MATCHERS_H_
