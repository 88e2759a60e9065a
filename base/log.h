// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_LOG_H_
#define TENSORMOUNT_BASE_LOG_H_

#include <functional>
#include <string>
#include <string_view>

#include "tensormount/visibility.h"

namespace tensormount {

// Ordered: SetLogLevel drops what is lower.
enum class LogLevel { kDebug, kInfo, kWarning, kError };

// One line, to standard error by default ("tensormount: WARNING: ..."). Only for what no caller
// can be told: errors go up as Status and are logged once, at the boundary. Thread-safe.
// Exported for libtensormount_mpi, whose lines go to the same sink.
TENSORMOUNT_EXPORT void Log(LogLevel level, std::string_view message);
// Drops what is below; kWarning at start.
void SetLogLevel(LogLevel level);
// "WARNING". Ends with a NUL, which its size does not count.
std::string_view LogLevelName(LogLevel level);
// Names from outside stand in messages: with blanks for control characters (C1 too), invisible
// ones and those that turn the direction of text, a message stays one line and does no more than
// show.
std::string OneLine(std::string_view message);
// Where lines go instead; an empty function restores standard error.
void SetLogSink(std::function<void(LogLevel, std::string_view)> sink);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_LOG_H_
