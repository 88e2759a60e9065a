// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_HOST_PINS_H_
#define TENSORMOUNT_BASE_HOST_PINS_H_

#include <memory>
#include <string>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount {

// A path that leads to this folder while it is kept, whatever the folder is called meanwhile
// (FileSystem::PinDirectory). Costs a descriptor. Thread-safe.
Result<std::shared_ptr<const std::string>> PinHostDirectory(const std::string& path);

// `path` as people know it: below a pinned folder by the name under which that was pinned.
std::string ShownPath(const std::string& path);

// Status::FromErrno with the path as people know it.
Status HostError(int error, std::string_view action, const std::string& path);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_HOST_PINS_H_
