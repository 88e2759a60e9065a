// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_REQUIRE_H_
#define TENSORMOUNT_TESTS_SUPPORT_REQUIRE_H_

#include <string>
#include <string_view>

#include <gtest/gtest.h>

namespace tensormount {

// Whether TENSORMOUNT_REQUIRE (a list, "fuse,mpi") names `part`: a machine without it then fails
// the tests that need it.
bool IsRequired(std::string_view part);

// Empty where FUSE mounts are possible here, otherwise why not.
std::string WhyNoFuse();

}  // namespace tensormount

// Skips the current test with `reason`, or fails it where `part` is required. Only in functions
// that return void.
#define TENSORMOUNT_SKIP_UNLESS_REQUIRED(part, reason)                                     \
  do {                                                                                     \
    if (::tensormount::IsRequired(part)) FAIL() << (part) << " is required: " << (reason); \
    GTEST_SKIP() << (reason);                                                              \
  } while (false)

// First line of a test, or of SetUp, that mounts.
#define TENSORMOUNT_NEEDS_FUSE()                                                            \
  if (std::string tensormount_why_ = ::tensormount::WhyNoFuse(); !tensormount_why_.empty()) \
  TENSORMOUNT_SKIP_UNLESS_REQUIRED("fuse", tensormount_why_)

#endif  // TENSORMOUNT_TESTS_SUPPORT_REQUIRE_H_
