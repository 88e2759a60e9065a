// SPDX-License-Identifier: Apache-2.0
// The parts of a Communicator that do not depend on the transport: job numbers, and objects kept
// with a communicator (such as plans).
#include "tensormount/communicator.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/hash.h"

namespace tensormount {

// State shared by a communicator with its channels and subgroups.
struct Communicator::Root {
  std::mutex mutex;
  using Group = std::pair<std::uint32_t, std::string>;  // The communicator's channel_ and group_.
  std::map<Group, std::uint64_t> jobs;
  std::map<std::pair<Group, std::string>, std::shared_ptr<void>> kept;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<void>> kept_by_ranks;
};

Communicator::Communicator(std::uint32_t channel, const Communicator* parent, std::string group)
    : channel_(channel),
      // The ranks of a group are numbers in the parent group, so only the whole path of groups
      // identifies a group.
      group_(parent == nullptr ? std::move(group) : parent->group_ + "> " + group),
      root_(parent != nullptr ? parent->root_ : std::make_shared<Root>()) {}

Communicator::Job Communicator::BeginJob() {
  std::lock_guard lock(root_->mutex);
  return {root_->jobs[{channel_, group_}]++, Xxh3Low64(std::to_string(channel_) + ": " + group_)};
}

void Communicator::WaitForChange(std::uint64_t /*seen*/, std::chrono::nanoseconds most) {
  std::this_thread::sleep_for(most);
}

std::shared_ptr<void> Communicator::Kept(const std::string& name,
                                         const std::function<std::shared_ptr<void>()>& make) {
  std::lock_guard lock(root_->mutex);
  std::shared_ptr<void>& kept = root_->kept[{{channel_, group_}, name}];
  if (kept == nullptr) kept = make();
  return kept;
}

std::shared_ptr<void> Communicator::KeptByRanks(
    const std::string& name, const std::function<std::shared_ptr<void>()>& make) {
  // Leaves out the empty steps of group_, which channels add, so that a communicator and its
  // channels find the same object.
  static const std::string kSame = "> ";
  std::string ranks;
  for (std::size_t at = 0; at < group_.size();) {
    const std::size_t next = std::min(group_.find(kSame, at + kSame.size()), group_.size());
    const std::string step = group_.substr(at, next - at);
    if (step != kSame) ranks += step;
    at = next;
  }
  std::lock_guard lock(root_->mutex);
  std::shared_ptr<void>& kept = root_->kept_by_ranks[{ranks, name}];
  if (kept == nullptr) kept = make();
  return kept;
}

}  // namespace tensormount
