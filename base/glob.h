// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_GLOB_H_
#define TENSORMOUNT_BASE_GLOB_H_

#include <fnmatch.h>
#include <string>

namespace tensormount {

// Shell matching, except that '*' also matches '/', because keys are not paths.
inline bool GlobMatches(const std::string& glob, const std::string& text) {
  return fnmatch(glob.c_str(), text.c_str(), 0) == 0;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_GLOB_H_
