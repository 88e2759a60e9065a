// SPDX-License-Identifier: Apache-2.0
#include "tests/support/status_matchers.h"

#include <sstream>
#include <utility>

namespace tensormount {
namespace {

class OkMatcher final : public testing::MatcherInterface<const Status&> {
 public:
  bool MatchAndExplain(const Status& status,
                       testing::MatchResultListener* listener) const override {
    if (!status.ok()) *listener << status.ToString();
    return status.ok();
  }
  void DescribeTo(std::ostream* os) const override { *os << "is OK"; }
  void DescribeNegationTo(std::ostream* os) const override { *os << "is a failure"; }
};

class CodeMatcher final : public testing::MatcherInterface<const Status&> {
 public:
  explicit CodeMatcher(testing::Matcher<Code> code) : code_(std::move(code)) {}
  bool MatchAndExplain(const Status& status,
                       testing::MatchResultListener* listener) const override {
    *listener << status.ToString();
    return code_.Matches(status.code());
  }
  void DescribeTo(std::ostream* os) const override {
    *os << "has a code that ";
    code_.DescribeTo(os);
  }
  void DescribeNegationTo(std::ostream* os) const override {
    *os << "has a code that ";
    code_.DescribeNegationTo(os);
  }

 private:
  testing::Matcher<Code> code_;
};

class MessageMatcher final : public testing::MatcherInterface<const Status&> {
 public:
  explicit MessageMatcher(testing::Matcher<const std::string&> message)
      : message_(std::move(message)) {}
  bool MatchAndExplain(const Status& status,
                       testing::MatchResultListener* listener) const override {
    *listener << status.ToString();
    return !status.ok() && message_.MatchAndExplain(status.message(), listener);
  }
  void DescribeTo(std::ostream* os) const override {
    *os << "is a failure whose message ";
    message_.DescribeTo(os);
  }
  void DescribeNegationTo(std::ostream* os) const override {
    *os << "is OK, or its message ";
    message_.DescribeNegationTo(os);
  }

 private:
  testing::Matcher<const std::string&> message_;
};

}  // namespace

StatusMatcher IsOk() { return StatusMatcher(testing::Matcher<const Status&>(new OkMatcher)); }

StatusMatcher HasCode(testing::Matcher<Code> code) {
  return StatusMatcher(testing::Matcher<const Status&>(new CodeMatcher(std::move(code))));
}

StatusMatcher HasMessageLike(testing::Matcher<const std::string&> message) {
  return StatusMatcher(testing::Matcher<const Status&>(new MessageMatcher(std::move(message))));
}

testing::AssertionResult Matches(const char* text, const Status& status,
                                 const StatusMatcher& matcher) {
  if (matcher.matcher().Matches(status)) return testing::AssertionSuccess();
  std::ostringstream expected;
  matcher.matcher().DescribeTo(&expected);
  return testing::AssertionFailure() << "Value of: " << text << "\nExpected: " << expected.str()
                                     << "\n  Actual: " << status.ToString();
}

testing::AssertionResult Succeeds(const char* text, const Status& status) {
  if (status.ok()) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "Value of: " << text << "\nExpected: is OK\n  Actual: " << status.ToString();
}

}  // namespace tensormount
