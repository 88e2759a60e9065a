// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_DAEMON_LOG_H_
#define TENSORMOUNT_MOUNT_TOOLS_DAEMON_LOG_H_

#include <string>

#include "tensormount/status.h"

namespace tensormount::tools {

// Targets of Log() for a mount.

// Makes Log() write to the system's log, facility "daemon": a mount in the background has no
// standard error.
void LogToSyslog();
// Makes Log() append lines to `path`: "2026-03-01T12:00:00.123Z tensormount[PID] WARNING: ...". If
// the file was moved or removed, a new file is opened, so logrotate needs no signal. Lines that
// cannot be written are dropped, because a full disk must not stop a mount. Fails if the file
// cannot be opened.
Status LogToFile(const std::string& path);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_DAEMON_LOG_H_
