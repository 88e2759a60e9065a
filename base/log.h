// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_LOG_H_
#define TENSORMOUNT_BASE_LOG_H_

#include <string>
#include <string_view>

#include "tensormount/log.h"
#include "tensormount/visibility.h"

// The side of those who log; tensormount/log.h is that of the program.
namespace tensormount {

// One line, to standard error by default ("tensormount: WARNING: ..."). Only for what no caller
// can be told: errors go up as Status and are logged once, at the boundary. Thread-safe.
// Exported for libtensormount_mpi, whose lines go to the same sink.
TENSORMOUNT_EXPORT void Log(LogLevel level, std::string_view message);
// Names from outside stand in messages: with blanks for control characters (C1 too), invisible
// ones and those that turn the direction of text, a message stays one line and does no more than
// show.
std::string OneLine(std::string_view message);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_LOG_H_
