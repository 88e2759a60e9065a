// SPDX-License-Identifier: Apache-2.0
// The two failures that most files make, in one spelling. Threads: any.
#ifndef TENSORMOUNT_BASE_ERRORS_H_
#define TENSORMOUNT_BASE_ERRORS_H_

#include <string>
#include <string_view>
#include <utility>

#include "tensormount/status.h"

namespace tensormount {

// The two failures that half of all checks end with; tensormount/status.h has all codes. A message
// names the object first and then what is wrong with it; callers add what they know around it with
// Status::WithContext.

// Only these two, because only they are said all over the tree in the same way. Whoever makes a
// third helper should have dozens of callers for it: a code and a sentence in place read better.

// What is stored, or came from another rank, is not what it must be (kDataLoss).
inline Status DataLoss(std::string why) { return Status(Code::kDataLoss, std::move(why)); }

// "what: why".
inline Status DataLoss(std::string_view what, std::string_view why) {
  std::string message(what);
  message += ": ";
  message += why;
  return Status(Code::kDataLoss, std::move(message));
}

// What the caller passed can never work (kInvalidArgument).
inline Status InvalidArgument(std::string why) {
  return Status(Code::kInvalidArgument, std::move(why));
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_ERRORS_H_
