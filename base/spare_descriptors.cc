// SPDX-License-Identifier: Apache-2.0
// Who keeps files open only to be fast gives them back when the process has no descriptor left:
// whoever gets EMFILE asks all keepers and tries once more.
#include "base/spare_descriptors.h"

#include <mutex>
#include <set>

namespace tensormount {
namespace {

struct Keepers {
  std::mutex mutex;
  std::set<const SpareDescriptors*> all;
};

Keepers& AllKeepers() {
  static Keepers* const keepers = new Keepers;  // Never destroyed: others may still open files.
  return *keepers;
}

}  // namespace

SpareDescriptors::SpareDescriptors(std::function<void()> let_go) : let_go_(std::move(let_go)) {
  std::lock_guard lock(AllKeepers().mutex);
  AllKeepers().all.insert(this);
}

SpareDescriptors::~SpareDescriptors() {
  std::lock_guard lock(AllKeepers().mutex);
  AllKeepers().all.erase(this);
}

// Under the lock, so that no keeper is destroyed while it is asked. All are asked, not one after
// the other until there is a descriptor: how many the caller still needs nobody knows.
bool SpareDescriptors::LetGo() {
  std::lock_guard lock(AllKeepers().mutex);
  for (const SpareDescriptors* keeper : AllKeepers().all) keeper->let_go_();
  return !AllKeepers().all.empty();
}

}  // namespace tensormount
