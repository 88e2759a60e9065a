// SPDX-License-Identifier: Apache-2.0
// Addresses of a TCP group by shared memory, for tests and benchmarks.
#include "bench/tcp_ranks.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

#include "base/deadline.h"

namespace tensormount {

struct SharedTcpRanks::Seat {
  std::atomic<bool> told{false};
  char address[513] = "";
};

Result<std::unique_ptr<SharedTcpRanks>> SharedTcpRanks::Make(int ranks) {
  std::unique_ptr<SharedTcpRanks> out(new SharedTcpRanks);
  TENSORMOUNT_ASSIGN_OR_RETURN(out->token_, MakeTcpToken());
  out->ranks_ = ranks;
  out->bytes_ = static_cast<std::size_t>(ranks) * sizeof(Seat);
  void* shared =
      ::mmap(nullptr, out->bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return Status::FromErrno(errno, "map", "memory for addresses");
  out->seats_ = static_cast<Seat*>(shared);
  for (int r = 0; r < ranks; ++r) new (out->seats_ + r) Seat;
  return out;
}

SharedTcpRanks::~SharedTcpRanks() {
  if (seats_ != nullptr) ::munmap(seats_, bytes_);
}

Result<std::unique_ptr<Communicator>> SharedTcpRanks::Join(int rank, const TcpOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto mine, TcpGroup::Listen(options));
  Seat& seat = seats_[rank];
  std::strncpy(seat.address, mine->address().c_str(), sizeof(seat.address) - 1);
  seat.told = true;
  const Deadline deadline = Deadline::After(std::chrono::minutes(1));
  std::vector<std::string> addresses;
  // With a thousand threads that wait, short pauses would be all that the cores do.
  std::chrono::milliseconds pause{1};
  for (int r = 0; r < ranks_; ++r) {
    while (!seats_[r].told) {
      if (deadline.Passed()) {
        return Status(Code::kDeadlineExceeded,
                      "rank " + std::to_string(r) + " did not tell its address");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::milliseconds(50));
    }
    addresses.emplace_back(seats_[r].address);
  }
  return mine->Connect(addresses, rank, token_);
}

}  // namespace tensormount
