// SPDX-License-Identifier: Apache-2.0
// Caches of open files close them when the process or the system runs out of descriptors: an open
// that fails with EMFILE or ENFILE asks all caches and tries again.
#include "base/spare_descriptors.h"

#include <mutex>
#include <pthread.h>
#include <set>
#include <unistd.h>
#include <utility>

namespace tensormount {
namespace {

struct Keepers {
  std::mutex mutex;
  std::set<const SpareDescriptors*> all;
  Keepers* parents = nullptr;  // The keepers of the parent process; kept, never used.
};

// fork does not wait for the lock, because closing files takes as long as storage does. A child
// forked while the lock is held ignores its parent's caches; any other child inherits them, because
// their files are open in the child, too.
Keepers& GlobalKeepers() {
  static auto* here = new Keepers;  // Never destroyed: other threads may still open files.
  static const int noted = pthread_atfork(nullptr, nullptr, [] {
    if (here->mutex.try_lock()) {
      here->mutex.unlock();
    } else {
      auto* const own = new Keepers;
      own->parents = std::exchange(here, own);
    }
  });
  (void)noted;
  return *here;
}

}  // namespace

SpareDescriptors::SpareDescriptors(std::function<void(bool may_wait)> close_spare)
    : process_(getpid()), close_spare_(std::move(close_spare)) {
  Keepers& keepers = GlobalKeepers();
  std::lock_guard lock(keepers.mutex);
  keepers.all.insert(this);
}

SpareDescriptors::~SpareDescriptors() {
  Keepers& keepers = GlobalKeepers();
  std::lock_guard lock(keepers.mutex);
  keepers.all.erase(this);
}

// Holds the lock, so that no cache is destroyed while it is asked. Asks all caches, because the
// caller may soon need more than one descriptor.
bool SpareDescriptors::CloseSpare() {
  Keepers& keepers = GlobalKeepers();
  std::lock_guard lock(keepers.mutex);
  for (const SpareDescriptors* keeper : keepers.all)
    keeper->close_spare_(keeper->process_ == getpid());
  return !keepers.all.empty();
}

}  // namespace tensormount
