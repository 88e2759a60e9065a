// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_WATCH_H_
#define TENSORMOUNT_BASE_WATCH_H_

#include <cstdint>
#include <functional>

#include "tensormount/status.h"

namespace tensormount {

// Progress callback of a long operation, called, perhaps concurrently from several threads, with
// the bytes done so far and the bytes in all. A result other than ok ends the operation with that
// error, for example kCancelled.
using Watch = std::function<Status(std::uint64_t done, std::uint64_t total)>;

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_WATCH_H_
