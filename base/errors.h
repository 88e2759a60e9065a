// SPDX-License-Identifier: Apache-2.0
// Helpers for the two most frequent failures. Thread-safe.
#ifndef TENSORMOUNT_BASE_ERRORS_H_
#define TENSORMOUNT_BASE_ERRORS_H_

#include <string>
#include <string_view>
#include <utility>

#include "tensormount/status.h"

namespace tensormount {

// A message names the object first and then the problem; callers add context with
// Status::WithContext. tensormount/status.h has all codes.

// Other codes have no helper: Status(Code::kBusy, ...) is as short. Add one only for a code that
// dozens of places return.

// Stored data, or data from another rank, are invalid (kDataLoss).
inline Status DataLoss(std::string why) { return Status(Code::kDataLoss, std::move(why)); }

// The same error with the message "what: why".
inline Status DataLoss(std::string_view what, std::string_view why) {
  std::string message(what);
  message += ": ";
  message += why;
  return Status(Code::kDataLoss, std::move(message));
}

// The caller's argument can never work (kInvalidArgument).
inline Status InvalidArgument(std::string why) {
  return Status(Code::kInvalidArgument, std::move(why));
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_ERRORS_H_
