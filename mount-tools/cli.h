// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_CLI_H_
#define TENSORMOUNT_MOUNT_TOOLS_CLI_H_

namespace tensormount::tools {

// The whole command: parses, runs one subcommand, returns the exit status. Called as
// mount.tensormount (by mount(8), from /etc/fstab) it takes that program's arguments.
// The exit status is that of docs/cli.md: 0 done, 1 the check did not hold, 2 anything else, also
// for arguments that do not parse. Meant for one call a process: what a command sets (signal masks,
// the sink of the log) stays as it left it.
int Main(int argc, const char* const* argv);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_CLI_H_
