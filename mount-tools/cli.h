// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_CLI_H_
#define TENSORMOUNT_MOUNT_TOOLS_CLI_H_

namespace tensormount::tools {

// Runs the command: parses the arguments, runs one subcommand and returns the exit status of
// docs/cli.md. If the program is called as mount.tensormount (by mount(8), for /etc/fstab), the
// arguments are those of a mount helper. Call it once in a process, because commands change the
// state of the process (signal masks, log sink).
int Main(int argc, const char* const* argv);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_CLI_H_
