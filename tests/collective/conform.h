// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_CONFORM_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_CONFORM_H_

#include <string>

#include "tensormount/status.h"

// Of functions that return a Status, which ranks in other processes run, too: the condition and its
// line are the failure.
#define CONFORM(condition)                                                                     \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      return Status(Code::kInternal,                                                           \
                    std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition); \
    }                                                                                          \
  } while (false)

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_CONFORM_H_
