// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_BULK_EXCHANGE_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_BULK_EXCHANGE_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "collective/comm/collective.h"

namespace tensormount {

// The simplest LocalWork: point to point bulk, all at once. Between one pair, sends and receives
// match in the order given. Memory is the caller's, and free again on return; empty transfers are
// skipped.
struct BulkTransfer {
  int peer = 0;  // kInvalidArgument where there is no such rank.
  void* data = nullptr;
  std::uint64_t size = 0;
};
Status ExchangeBulk(Collective& collective, std::span<const BulkTransfer> sends,
                    std::span<const BulkTransfer> receives, std::string_view phase);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_BULK_EXCHANGE_H_
