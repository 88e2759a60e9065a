// SPDX-License-Identifier: Apache-2.0
// Who keeps files open only to be fast gives them back when the process has no descriptor left:
// whoever gets EMFILE asks all keepers and tries once more.
#include "base/spare_descriptors.h"

#include <mutex>
#include <set>

namespace tensormount {
namespace {

constinit std::mutex keepers_mutex;

// Only under keepers_mutex. Never destroyed: others may still open files.
std::set<const SpareDescriptors*>& Keepers() {
  static auto* const keepers = new std::set<const SpareDescriptors*>;
  return *keepers;
}

}  // namespace

SpareDescriptors::SpareDescriptors(std::function<void()> let_go) : let_go_(std::move(let_go)) {
  std::lock_guard lock(keepers_mutex);
  Keepers().insert(this);
}

SpareDescriptors::~SpareDescriptors() {
  std::lock_guard lock(keepers_mutex);
  Keepers().erase(this);
}

// Under the lock, so that no keeper is destroyed while it is asked. All are asked, not one after
// the other until there is a descriptor: how many the caller still needs nobody knows.
bool SpareDescriptors::LetGo() {
  std::lock_guard lock(keepers_mutex);
  for (const SpareDescriptors* keeper : Keepers()) keeper->let_go_();
  return !Keepers().empty();
}

}  // namespace tensormount
