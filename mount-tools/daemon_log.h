// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_DAEMON_LOG_H_
#define TENSORMOUNT_MOUNT_TOOLS_DAEMON_LOG_H_

#include <string>

#include "tensormount/status.h"

namespace tensormount::tools {

// Where the lines of Log() go in a program without a terminal.

// To the system's log, facility "daemon". What a mount in the background has to say after its start
// has nowhere else to go: its standard error is /dev/null.
void LogToSyslog();
// Appended to `path`, one line each: "2026-03-01T12:00:00.123Z tensormount[PID] WARNING: ...".
// The file is opened anew where somebody has moved or removed it (logrotate needs no signal). What
// cannot be written is lost: a full disk must not stop a mount. Fails where it cannot be opened.
Status LogToFile(const std::string& path);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_DAEMON_LOG_H_
