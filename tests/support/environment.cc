// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "tests/support/random.h"
#include "tests/support/require.h"

namespace tensormount {
namespace {

constexpr std::uint64_t kFixedSeed = 20240607;

}  // namespace

std::uint64_t TestSeed() {
  const char* value = std::getenv("TENSORMOUNT_TEST_SEED");
  if (value == nullptr || *value == '\0') return kFixedSeed;
  return std::strtoull(value, nullptr, 0);
}

int TestScale(int cases) {
  const char* value = std::getenv("TENSORMOUNT_TEST_SCALE");
  double scale = value == nullptr ? 1.0 : std::strtod(value, nullptr);
  if (!(scale > 0)) scale = 1.0;
  return static_cast<int>(std::clamp(std::round(scale * cases), 1.0, 1e9));
}

bool IsRequired(std::string_view part) {
  const char* value = std::getenv("TENSORMOUNT_REQUIRE");
  std::string_view rest = value == nullptr ? "" : value;
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    if (rest.substr(0, comma) == part) return true;
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return false;
}

std::string WhyNoFuse() {
  const int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  if (fd < 0) return std::string("open /dev/fuse: ") + std::strerror(errno);
  close(fd);
  if (geteuid() != 0 && access("/usr/bin/fusermount3", X_OK) != 0 &&
      access("/bin/fusermount3", X_OK) != 0) {
    return "not root, and there is no fusermount3";
  }
  return "";
}

}  // namespace tensormount
