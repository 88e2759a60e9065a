// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_CLI_H_
#define TENSORMOUNT_MOUNT_TOOLS_CLI_H_

namespace tensormount::tools {

// The whole command: parses, runs one subcommand, returns the exit status. Called as
// mount.tensormount (by mount(8), from /etc/fstab) it takes that program's arguments.
int Main(int argc, const char* const* argv);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_CLI_H_
