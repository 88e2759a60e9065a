// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_ENVIRONMENT_H_
#define TENSORMOUNT_REMOTE_ENVIRONMENT_H_

#include <cstdlib>
#include <string>

namespace tensormount {

// An environment variable; empty if it is not set.
inline std::string EnvironmentVariable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_ENVIRONMENT_H_
