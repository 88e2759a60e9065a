// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_CACHE_OPTIONS_H_
#define TENSORMOUNT_MOUNT_TOOLS_CACHE_OPTIONS_H_

#include <string_view>

#include "tensormount/status.h"

#include "mount-tools/terminal.h"

namespace tensormount::tools {

bool IsUrl(std::string_view source);

// Makes --cache and --cache-size the settings of this process, by setting TENSORMOUNT_CACHE and
// TENSORMOUNT_CACHE_SIZE (remote/disk_cache.h); the daemon of a mount inherits them. Fails if the
// cache that --cache names cannot be used. `by_default`: if neither the option nor the environment
// names a directory, $XDG_CACHE_HOME/tensormount or ~/.cache/tensormount is used; if that is not
// possible, there is a warning and no cache. Call it before other threads exist.
Status ApplyCacheOptions(Terminal& terminal, bool by_default);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_CACHE_OPTIONS_H_
