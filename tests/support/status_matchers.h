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

// EXPECT_THAT(Store::Open(path), IsOk());
MATCHER(IsOk, negation ? "is a failure" : "is OK") {
  const Status& status = StatusOf(arg);
  if (!status.ok()) *result_listener << status.ToString();
  return status.ok();
}

// EXPECT_THAT(reader.Read(0, buffer), HasCode(Code::kDataLoss));
MATCHER_P(HasCode, code,
          (negation ? "has another code than " : "has code ") + std::string(CodeName(code))) {
  const Status& status = StatusOf(arg);
  *result_listener << status.ToString();
  return status.code() == code;
}

// A failure whose message matches: a string is a substring that must be there, otherwise a matcher
// of strings. EXPECT_THAT(status, HasMessage("tensor layers.3.w [0:16, 128:256]"));
MATCHER_P(HasMessage, inner, "has a message that contains or " + testing::PrintToString(inner)) {
  const Status& status = StatusOf(arg);
  *result_listener << status.ToString();
  if (status.ok()) return false;
  if constexpr (std::is_convertible_v<decltype(inner), std::string>) {
    return status.message().find(std::string(inner)) != std::string::npos;
  } else {
    return testing::ExplainMatchResult(inner, status.message(), result_listener);
  }
}

// A Result whose value matches: EXPECT_THAT(file.Size(), IsOkAndHolds(12u));
MATCHER_P(IsOkAndHolds, inner, "is OK and holds a value that is as asked") {
  if (!arg.ok()) {
    *result_listener << arg.status().ToString();
    return false;
  }
  return testing::ExplainMatchResult(inner, arg.value(), result_listener);
}

}  // namespace tensormount

// Go on only where `expr` (a Status or Result) is OK.
#define ASSERT_OK(expr) ASSERT_THAT(expr, ::tensormount::IsOk())
#define EXPECT_OK(expr) EXPECT_THAT(expr, ::tensormount::IsOk())

// ASSERT_OK_AND_ASSIGN(auto file, fs.Open(path)): only in functions that return void.
#define ASSERT_OK_AND_ASSIGN(decl, expr) \
  ASSERT_OK_AND_ASSIGN_(TENSORMOUNT_CONCAT_(tensormount_result_, __COUNTER__), decl, expr)
#define ASSERT_OK_AND_ASSIGN_(tmp, decl, expr)      \
  auto tmp = (expr);                                \
  ASSERT_TRUE(tmp.ok()) << tmp.status().ToString(); \
  decl = std::move(tmp).value()

#endif  // TENSORMOUNT_TESTS_SUPPORT_STATUS_MATCHERS_H_
