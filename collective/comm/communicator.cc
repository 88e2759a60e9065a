// SPDX-License-Identifier: Apache-2.0
#include "tensormount/communicator.h"

namespace tensormount {

std::shared_ptr<void> Communicator::Kept(const std::string& name,
                                         const std::function<std::shared_ptr<void>()>& make) {
  std::lock_guard lock(kept_mutex_);
  std::shared_ptr<void>& kept = kept_[name];
  if (kept == nullptr) kept = make();
  return kept;
}

}  // namespace tensormount
