// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BENCH_TCP_RANKS_H_
#define TENSORMOUNT_BENCH_TCP_RANKS_H_

#include <atomic>
#include <cstddef>
#include <memory>

#include "tensormount/communicator.h"
#include "tensormount/status.h"
#include "tensormount/tcp_group.h"

namespace tensormount {

// What a host program's store does for a TCP group: a token, and addresses of ranks that are
// threads or processes of one program, in memory that forks share.
class SharedTcpRanks {
 public:
  // For groups of `ranks`.
  static Result<std::unique_ptr<SharedTcpRanks>> Make(int ranks);
  ~SharedTcpRanks();
  SharedTcpRanks(const SharedTcpRanks&) = delete;
  SharedTcpRanks& operator=(const SharedTcpRanks&) = delete;

  // Listens, tells the address, waits for those of the others (a minute at most) and connects.
  Result<std::unique_ptr<Communicator>> Join(int rank, const TcpOptions& options);
  const TcpToken& token() const { return token_; }
  int size() const { return ranks_; }

 private:
  SharedTcpRanks() = default;
  struct Seat;
  int ranks_ = 0;
  TcpToken token_{};
  std::size_t bytes_ = 0;
  Seat* seats_ = nullptr;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_BENCH_TCP_RANKS_H_
