// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_LOG_H_
#define TENSORMOUNT_BASE_LOG_H_

#include <string>
#include <string_view>

#include "tensormount/log.h"
#include "tensormount/visibility.h"

// Logging from inside the library; tensormount/log.h is the interface for the program.
namespace tensormount {

// Logs one line, to standard error by default ("tensormount: WARNING: ..."). Only for events that
// no return value can report: errors are returned as Status and logged once, at the boundary.
// Thread-safe. Exported for libtensormount_mpi, whose lines go to the same sink.
TENSORMOUNT_EXPORT void Log(LogLevel level, std::string_view message);
// Replaces control characters (C1 too), invisible characters and those that change text direction
// by blanks, because messages contain names from outside.
std::string OneLine(std::string_view message);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_LOG_H_
