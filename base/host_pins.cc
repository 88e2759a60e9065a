// SPDX-License-Identifier: Apache-2.0
// A pinned directory is an open descriptor with the name /proc/self/fd/N: paths below it lead to
// that directory despite renames. This file also converts such names back for messages.
#include "base/host_pins.h"

#include <cerrno>
#include <charconv>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <pthread.h>
#include <unistd.h>
#include <utility>

#include "base/spare_descriptors.h"

namespace tensormount {
namespace {

constexpr std::string_view kDescriptors = "/proc/self/fd/";

// Protects PinNames. fork waits for this mutex, which is held only for a few look-ups, so that the
// child gets it unlocked and its pins stay valid.
std::mutex& PinsMutex() {
  static constinit std::mutex mutex;
  static const int noted =
      pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  (void)noted;
  return mutex;
}

// Names of pinned directories by descriptor; requires PinsMutex.
std::map<int, std::string>& PinNames() {
  static auto* const names =
      new std::map<int, std::string>;  // Never destroyed: other threads may still report errors.
  return *names;
}

// The parts of "/proc/self/fd/17/data/x".
struct DescriptorPath {
  int fd = -1;             // -1: not such a path.
  std::string_view below;  // "/data/x", or "".
};

DescriptorPath Parse(std::string_view path) {
  DescriptorPath named;
  if (!path.starts_with(kDescriptors)) return named;
  const char* const end = path.data() + path.size();
  int fd = -1;
  const auto [rest, error] = std::from_chars(path.data() + kDescriptors.size(), end, fd);
  if (error != std::errc() || (rest != end && *rest != '/')) return named;
  return {fd, std::string_view(rest, end)};
}

}  // namespace

Result<std::shared_ptr<const std::string>> PinHostDirectory(const std::string& path) {
  const int fd = OpenDescriptor(
      [&] { return open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW); });
  if (fd < 0) return HostError(errno, "open", path);
  std::string pinned = std::string(kDescriptors) + std::to_string(fd);
  // Without /proc (some containers) the directory cannot be pinned: use its path.
  if (access(pinned.c_str(), F_OK) != 0) {
    close(fd);
    return std::make_shared<const std::string>(path);
  }
  std::string name = ShownPath(path);
  if (name.ends_with("/.")) name.resize(name.size() - 2);
  {
    std::lock_guard lock(PinsMutex());
    PinNames()[fd] = std::move(name);
  }
  // Remove the name before closing the descriptor, whose number may then be reused for another
  // directory.
  return std::shared_ptr<const std::string>(new std::string(std::move(pinned)),
                                            [fd](const std::string* p) {
                                              {
                                                std::lock_guard lock(PinsMutex());
                                                PinNames().erase(fd);
                                              }
                                              close(fd);
                                              delete p;
                                            });
}

int PinnedDescriptor(const std::string& path) {
  const DescriptorPath named = Parse(path);
  if (named.fd < 0 || !named.below.empty()) return -1;
  std::lock_guard lock(PinsMutex());
  return PinNames().contains(named.fd) ? named.fd : -1;
}

std::string ShownPath(const std::string& path) {
  const DescriptorPath named = Parse(path);
  if (named.fd < 0) return path;
  std::lock_guard lock(PinsMutex());
  const auto it = PinNames().find(named.fd);
  return it == PinNames().end() ? path : it->second + std::string(named.below);
}

Status HostError(int error, std::string_view action, const std::string& path) {
  return Status::FromErrno(error, action, ShownPath(path));
}

}  // namespace tensormount
