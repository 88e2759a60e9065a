// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_WATCH_H_
#define TENSORMOUNT_BASE_WATCH_H_

#include <cstdint>
#include <functional>

#include "tensormount/status.h"

namespace tensormount {

// Who looks at a long work: told now and then, from several threads at once, how many bytes are
// done, and in all as far as that is known. What it returns other than ok ends the work, which
// fails with it: kCancelled, say.
using Watch = std::function<Status(std::uint64_t done, std::uint64_t total)>;

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_WATCH_H_
