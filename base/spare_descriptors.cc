// SPDX-License-Identifier: Apache-2.0
// Who keeps files open only to be fast gives them back when the process has no descriptor left:
// whoever gets EMFILE asks all keepers and tries once more.
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
  Keepers* parents = nullptr;  // Kept, never used.
};

// A fork does not wait for the lock: whoever lets go closes files, which takes as long as storage
// likes. A child that was forked meanwhile knows of none of its parent's keepers; any other one
// does, since their files are open in it, too.
Keepers& Here() {
  static auto* here = new Keepers;  // Never destroyed: others may still open files.
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

SpareDescriptors::SpareDescriptors(std::function<void(bool may_wait)> let_go)
    : process_(getpid()), let_go_(std::move(let_go)) {
  Keepers& keepers = Here();
  std::lock_guard lock(keepers.mutex);
  keepers.all.insert(this);
}

SpareDescriptors::~SpareDescriptors() {
  Keepers& keepers = Here();
  std::lock_guard lock(keepers.mutex);
  keepers.all.erase(this);
}

// Under the lock, so that no keeper is destroyed while it is asked. All are asked, not one after
// the other until there is a descriptor: how many the caller still needs nobody knows.
bool SpareDescriptors::LetGo() {
  Keepers& keepers = Here();
  std::lock_guard lock(keepers.mutex);
  for (const SpareDescriptors* keeper : keepers.all) keeper->let_go_(keeper->process_ == getpid());
  return !keepers.all.empty();
}

}  // namespace tensormount
