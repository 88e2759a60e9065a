// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_LOG_H_
#define TENSORMOUNT_LOG_H_

#include <functional>
#include <string_view>

#include "tensormount/visibility.h"

namespace tensormount {

// The library logs only what no caller can be told: what a thread in the background met, what a
// load was asked to log, leftovers that could not be removed. Failures are returned.

// Ordered: SetLogLevel drops what is lower.
enum class LogLevel { kDebug, kInfo, kWarning, kError };

// "WARNING". Ends with a NUL, which its size does not count.
TENSORMOUNT_EXPORT std::string_view LogLevelName(LogLevel level);

// Of the whole process; kWarning at start. Thread-safe.
TENSORMOUNT_EXPORT void SetLogLevel(LogLevel level);

// Where lines go instead of to standard error; an empty function restores that. `sink` is called on
// any thread, by one at a time, with a line without its end, which may hold control characters:
// names in it come from outside. It must not wait for calls of the library; what it logs itself,
// and what it throws, goes to standard error. When this returns, the former sink is not running and
// is not called again. Thread-safe; not from a sink.
TENSORMOUNT_EXPORT void SetLogSink(std::function<void(LogLevel, std::string_view line)> sink);

}  // namespace tensormount

#endif  // TENSORMOUNT_LOG_H_
