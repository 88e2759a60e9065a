// SPDX-License-Identifier: Apache-2.0
// Doorbell: poll(2) over an eventfd, which Ring() writes to, and an inotify descriptor of one
// directory or file, or two. Without inotify only Ring() and the timeout end a wait.
#include "base/doorbell.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <unistd.h>

namespace tensormount {

Result<std::unique_ptr<Doorbell>> Doorbell::Make(const std::string& path) {
  const int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event < 0) return Status::FromErrno(errno, "make", "an event descriptor");
  int inotify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  // For a directory, inotify reports these events of its entries; for a file, events of the file.
  constexpr std::uint32_t kMask =
      IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF | IN_MOVE_SELF;
  if (inotify >= 0 && inotify_add_watch(inotify, path.c_str(), kMask) < 0) {
    close(inotify);
    inotify = -1;
  }
  return std::unique_ptr<Doorbell>(new Doorbell(event, inotify));
}

Doorbell::~Doorbell() {
  close(event_);
  if (inotify_ >= 0) close(inotify_);
}

bool Doorbell::WatchMoves(const std::string& directory) {
  if (inotify_ < 0) return false;
  moves_ = inotify_add_watch(inotify_, directory.c_str(), IN_MOVED_TO | IN_ONLYDIR);
  return moves_ >= 0;
}

void Doorbell::Ring() {
  // Fails only after 2^64 - 2 rings without a Wait().
  [[maybe_unused]] const int failed = eventfd_write(event_, 1);
}

bool Doorbell::Wait(std::optional<std::chrono::milliseconds> patience,
                    std::vector<std::string>* moved) {
  int timeout = -1;
  if (patience) {
    timeout = static_cast<int>(std::clamp<std::int64_t>(patience->count(), 0, INT_MAX));
  }
  pollfd fds[2] = {{.fd = event_, .events = POLLIN, .revents = 0},
                   {.fd = inotify_, .events = POLLIN, .revents = 0}};
  if (poll(fds, 2, timeout) <= 0) return false;
  eventfd_t count = 0;
  [[maybe_unused]] const int failed = eventfd_read(event_, &count);
  if (fds[1].revents == 0) return false;
  // Any event means a change, also an overflow of the event queue.
  alignas(inotify_event) char buffer[4096];
  ssize_t got = 0;
  while ((got = read(inotify_, buffer, sizeof buffer)) > 0) {
    if (moved == nullptr || moves_ < 0) continue;
    inotify_event event;
    for (ssize_t at = 0; at + static_cast<ssize_t>(sizeof event) <= got;
         at += static_cast<ssize_t>(sizeof event) + event.len) {
      std::memcpy(&event, buffer + at, sizeof event);
      constexpr std::uint32_t kMovedDirectory = IN_MOVED_TO | IN_ISDIR;
      if (event.wd != moves_ || (event.mask & kMovedDirectory) != kMovedDirectory) continue;
      const char* const name = buffer + at + sizeof event;
      moved->emplace_back(name, strnlen(name, event.len));
    }
  }
  return true;
}

}  // namespace tensormount
