// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_LOG_H_
#define TENSORMOUNT_LOG_H_

#include <functional>
#include <string_view>

#include "tensormount/visibility.h"

namespace tensormount {

// The library logs little: events that no return value can report (errors of background threads,
// leftovers that could not be removed), and on rank 0 some warnings of saves and loads.

// The levels of log lines, lowest first. SetLogLevel drops lines below a level.
enum class LogLevel { kDebug, kInfo, kWarning, kError };

// The name of a level, such as "WARNING". NUL-terminated; the NUL is not part of its size.
TENSORMOUNT_EXPORT std::string_view LogLevelName(LogLevel level);

// Drops log lines below `level`, in the whole process; kWarning at the start. Thread-safe.
TENSORMOUNT_EXPORT void SetLogLevel(LogLevel level);

// Sends lines to `sink` instead of standard error; an empty function restores standard error.
// `sink` is called on any thread, one call at a time, with a line without line end, which may
// contain control characters because names in it come from outside. It must not wait for calls of
// the library; a line that it logs itself, or on which it throws, goes to standard error. After the
// return the former sink is not running and is not called again. Thread-safe; must not be called
// from a sink.
TENSORMOUNT_EXPORT void SetLogSink(std::function<void(LogLevel, std::string_view line)> sink);

}  // namespace tensormount

#endif  // TENSORMOUNT_LOG_H_
