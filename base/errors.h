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

// Only these two have helpers, because a code and a sentence in place read better; a third would
// need dozens of callers.

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
