// SPDX-License-Identifier: Apache-2.0
// A pinned folder is an open descriptor, and its name /proc/self/fd/N: paths below it lead to that
// folder whatever is renamed on the way. This file also turns such names back into what people
// know, for messages.
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

// A fork waits for it, as it is held for a few look-ups only: what is pinned is so in the child,
// too.
std::mutex& PinsMutex() {
  static constinit std::mutex mutex;
  static const int noted =
      pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  (void)noted;
  return mutex;
}

// Names of pinned folders by descriptor; only under PinsMutex.
std::map<int, std::string>& PinNames() {
  static auto* const names =
      new std::map<int, std::string>;  // Never destroyed: others may still fail.
  return *names;
}

// "/proc/self/fd/17/data/x" taken apart.
struct DescriptorPath {
  int fd = -1;             // None: it is no such path.
  std::string_view below;  // "/data/x", or nothing.
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
  // Without /proc (some containers) the name has to do: no worse than before there were pins.
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
  // The name goes before the descriptor: as soon as that is closed, its number may be another
  // folder's.
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
