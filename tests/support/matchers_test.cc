// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>

#include "tensormount/status.h"

#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using testing::HasSubstr;
using testing::Not;

Result<std::unique_ptr<int>> Seven() { return std::make_unique<int>(7); }

Result<int> Broken() { return Status(Code::kDataLoss, "read w: short"); }

TEST(StatusMatchers, MatchSuccessAndFailureCodes) {
  EXPECT_THAT(Status(), IsOk());
  EXPECT_THAT(Broken(), Not(IsOk()));
  EXPECT_THAT(Broken(), HasCode(Code::kDataLoss));
  EXPECT_THAT(Broken(), Not(HasCode(Code::kNotFound)));
  EXPECT_THAT(Broken(), HasMessage("short"));
  EXPECT_THAT(Broken(), Not(HasMessage("long")));
  EXPECT_THAT(Broken().status(), HasMessage(HasSubstr("read w")));
  EXPECT_THAT(Status(), Not(HasMessage("")));
  EXPECT_THAT(Result<int>(3), IsOkAndHolds(3));
  EXPECT_THAT(Result<int>(3), Not(IsOkAndHolds(4)));
  EXPECT_THAT(Broken(), Not(IsOkAndHolds(3)));
}

TEST(StatusMatchers, AssignMoveOnlyValues) {
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<int> seven, Seven());
  EXPECT_EQ(*seven, 7);
  EXPECT_OK(Seven());
}

TEST(StatusMatchers, FailuresPrintTheirMessage) {
  EXPECT_THAT(testing::PrintToString(Broken()), HasSubstr("read w: short"));
  EXPECT_THAT(testing::PrintToString(Status(Code::kBusy, "open writers")),
              HasSubstr("open writers"));
}

}  // namespace
}  // namespace tensormount
