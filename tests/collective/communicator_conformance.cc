// SPDX-License-Identifier: Apache-2.0
#include "tests/collective/communicator_conformance.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

#include "tests/collective/conform.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"

namespace tensormount {
namespace {

using ByteVector = std::vector<unsigned char>;  // std::byte would be compared one by one.
using Request = Communicator::Request;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMiB = 1 << 20;
constexpr std::size_t kLarge = Amount(8 * kMiB, 2 * kMiB);

ByteVector Pattern(std::size_t size, int from, std::size_t index) {
  ByteVector out(size);
  Random(static_cast<std::uint64_t>(from * 7919) + index * 104729 + 1).Fill(out.data(), size);
  return out;
}

BufferView View(ByteVector& bytes) {
  return BufferView::Host(DType::kU8, bytes.data(), Dims{static_cast<std::int64_t>(bytes.size())});
}

Status Wait(Communicator& comm, Request request) {
  const auto deadline = Clock::now() + std::chrono::seconds(60);
  while (true) {
    const Result<bool> done = comm.Test(request);
    if (!done.ok()) return done.status();
    if (done.value()) return {};
    if (Clock::now() > deadline) return {Code::kDeadlineExceeded, "a message never came"};
    TENSORMOUNT_RETURN_IF_ERROR(comm.Progress());
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Status ProgressFor(Communicator& comm, Clock::duration time) {
  for (const auto until = Clock::now() + time; Clock::now() < until;) {
    TENSORMOUNT_RETURN_IF_ERROR(comm.Progress());
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return {};
}

Status WaitAll(Communicator& comm, const std::vector<Request>& requests) {
  for (const Request r : requests) TENSORMOUNT_RETURN_IF_ERROR(Wait(comm, r));
  return {};
}

Status SendNow(Communicator& comm, int to, std::uint32_t tag, ByteVector bytes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Request r, comm.Send(to, tag, View(bytes)));
  return Wait(comm, r);
}

Status ReceiveNow(Communicator& comm, int from, std::uint32_t tag, const ByteVector& expected) {
  ByteVector got(expected.size(), 0x5a);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Request r, comm.Receive(from, tag, View(got)));
  TENSORMOUNT_RETURN_IF_ERROR(Wait(comm, r));
  CONFORM(got == expected);
  return {};
}

// One message of each size goes round a ring, all outstanding at once on one tag.
Status SizesArriveInOrder(Communicator& comm) {
  const std::vector<std::size_t> sizes = {0,    1,     7,        4095,      4096,           4097,
                                          8192, 65536, 300'000,  kMiB,      kLarge,         0,
                                          3,    2048,  kMiB - 1, 512 << 10, (512 << 10) + 1};
  const int to = (comm.rank() + 1) % comm.size();
  const int from = (comm.rank() + comm.size() - 1) % comm.size();
  std::vector<ByteVector> out;
  std::vector<ByteVector> in;
  std::vector<Request> requests;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    out.push_back(Pattern(sizes[i], comm.rank(), i));
    in.push_back(ByteVector(sizes[i]));
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Request r, comm.Receive(from, 100, View(in[i])));
    requests.push_back(r);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Request s, comm.Send(to, 100, View(out[i])));
    requests.push_back(s);
  }
  TENSORMOUNT_RETURN_IF_ERROR(WaitAll(comm, requests));
  for (std::size_t i = 0; i < sizes.size(); ++i) CONFORM(in[i] == Pattern(sizes[i], from, i));
  return {};
}

// Everybody sends many messages to everybody, itself included, before anything is waited for.
Status ManyOutstandingToEverybody(Communicator& comm) {
  constexpr std::size_t kMessages = 120;
  const auto n = static_cast<std::size_t>(comm.size());
  const auto size_of = [](std::size_t i) -> std::size_t {
    return i % 40 == 39 ? 200'000 + i : (i * 37) % 900;
  };
  std::vector<ByteVector> out;
  std::vector<ByteVector> in(n * kMessages);
  std::vector<Request> requests;
  for (std::size_t i = 0; i < kMessages; ++i) out.push_back(Pattern(size_of(i), comm.rank(), i));
  for (std::size_t i = 0; i < kMessages; ++i) {
    for (std::size_t to = 0; to < n; ++to) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Request s,
                                   comm.Send(static_cast<int>(to), 200, View(out[i])));
      requests.push_back(s);
    }
  }
  for (std::size_t from = 0; from < n; ++from) {
    for (std::size_t i = 0; i < kMessages; ++i) {
      ByteVector& b = in[from * kMessages + i];
      b.resize(size_of(i));
      TENSORMOUNT_ASSIGN_OR_RETURN(const Request r,
                                   comm.Receive(static_cast<int>(from), 200, View(b)));
      requests.push_back(r);
    }
  }
  TENSORMOUNT_RETURN_IF_ERROR(WaitAll(comm, requests));
  for (std::size_t from = 0; from < n; ++from) {
    for (std::size_t i = 0; i < kMessages; ++i) {
      CONFORM(in[from * kMessages + i] == Pattern(size_of(i), static_cast<int>(from), i));
    }
  }
  return {};
}

// What nobody asked for yet must not stand in the way of what somebody asks for.
Status TagsDoNotBlockEachOther(Communicator& comm) {
  if (comm.rank() > 1) return {};
  if (comm.rank() == 0) {
    std::vector<ByteVector> out;
    std::vector<Request> requests;
    for (std::size_t tag = 0; tag < 6; ++tag) {
      out.push_back(Pattern(tag % 2 == 0 ? 2 * kMiB : 100, 0, tag));
    }
    for (std::uint32_t tag = 0; tag < 6; ++tag) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const Request s, comm.Send(1, 300 + tag, View(out[tag])));
      requests.push_back(s);
    }
    return WaitAll(comm, requests);
  }
  for (const std::uint32_t tag : {5u, 4u, 1u, 2u, 0u, 3u}) {
    TENSORMOUNT_RETURN_IF_ERROR(
        ReceiveNow(comm, 0, 300 + tag, Pattern(tag % 2 == 0 ? 2 * kMiB : 100, 0, tag)));
  }
  return {};
}

// More small messages than anybody keeps for a receiver that does not ask yet, again and again.
Status LateReceiverGetsAll(Communicator& comm) {
  constexpr std::size_t kMessages = 300;
  if (comm.rank() > 1) return {};
  for (std::size_t burst = 0; burst < 3; ++burst) {
    if (comm.rank() == 0) {
      std::vector<ByteVector> out;
      std::vector<Request> requests;
      for (std::size_t i = 0; i < kMessages; ++i)
        out.push_back(Pattern(3000 + i % 3, 0, i + burst));
      for (ByteVector& b : out) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const Request s, comm.Send(1, 400, View(b)));
        requests.push_back(s);
      }
      TENSORMOUNT_RETURN_IF_ERROR(WaitAll(comm, requests));
      TENSORMOUNT_RETURN_IF_ERROR(ReceiveNow(comm, 1, 401, ByteVector(1)));
      continue;
    }
    TENSORMOUNT_RETURN_IF_ERROR(ProgressFor(comm, std::chrono::milliseconds(30)));
    for (std::size_t i = 0; i < kMessages; ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(ReceiveNow(comm, 0, 400, Pattern(3000 + i % 3, 0, i + burst)));
    }
    TENSORMOUNT_RETURN_IF_ERROR(SendNow(comm, 0, 401, ByteVector(1)));
  }
  return {};
}

// The receiver is told, the sender is not bothered, and the next message is the next message.
Status WrongSizeIsDataLoss(Communicator& comm) {
  if (comm.rank() > 1) return {};
  struct Pair {
    std::size_t sent, wanted;
  };
  const std::vector<Pair> pairs = {{10, 12},
                                   {12, 10},
                                   {0, 1},
                                   {5, 0},
                                   {2 * kMiB, 64},
                                   {64, 2 * kMiB},
                                   {2 * kMiB, 3 * kMiB},
                                   {3 * kMiB, kMiB},
                                   {kMiB, kMiB / 2}};
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (comm.rank() == 0) {
      TENSORMOUNT_RETURN_IF_ERROR(SendNow(comm, 1, 500, Pattern(pairs[i].sent, 0, i)));
      TENSORMOUNT_RETURN_IF_ERROR(SendNow(comm, 1, 500, Pattern(100, 0, i)));
      continue;
    }
    ByteVector got(pairs[i].wanted);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Request r, comm.Receive(0, 500, View(got)));
    const Status status = Wait(comm, r);
    CONFORM(status.code() == Code::kDataLoss);
    CONFORM(status.message().find("rank 0") != std::string::npos);
    TENSORMOUNT_RETURN_IF_ERROR(ReceiveNow(comm, 0, 500, Pattern(100, 0, i)));
  }
  return {};
}

Status WhatCannotBeIsRefused(Communicator& comm) {
  ByteVector bytes(16);
  const auto code = [](const auto& result) { return result.status().code(); };
  CONFORM(code(comm.Send(-1, 0, View(bytes))) == Code::kInvalidArgument);
  CONFORM(code(comm.Send(comm.size(), 0, View(bytes))) == Code::kInvalidArgument);
  CONFORM(code(comm.Receive(comm.size(), 0, View(bytes))) == Code::kInvalidArgument);
  CONFORM(code(comm.Receive(0, Communicator::kMaxTag + 1, View(bytes))) == Code::kInvalidArgument);
  CONFORM(
      code(comm.Send(0, 0, BufferView::HostStrided(DType::kU8, bytes.data(), Dims{4}, Dims{2}))) ==
      Code::kInvalidArgument);
  BufferView device = View(bytes);
  device.device.kind = DeviceKind::kCuda;
  CONFORM(code(comm.Send(0, 0, device)) == Code::kUnsupported);
  CONFORM(code(comm.Receive(0, 0, device)) == Code::kUnsupported);
  BufferView nowhere = View(bytes);
  nowhere.data = nullptr;
  CONFORM(code(comm.Send(0, 0, nowhere)) == Code::kInvalidArgument);
  CONFORM(code(comm.Test(987'654'321)) == Code::kInvalidArgument);
  comm.Cancel(987'654'321);
  return {};
}

Status ARankReachesItself(Communicator& comm) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{33}, 2 * kMiB}) {
    ByteVector out = Pattern(size, comm.rank(), 1);
    ByteVector in(size);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Request s, comm.Send(comm.rank(), 600, View(out)));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Request r, comm.Receive(comm.rank(), 600, View(in)));
    TENSORMOUNT_RETURN_IF_ERROR(WaitAll(comm, {s, r}));
    CONFORM(in == out);
    CONFORM(!comm.Test(s).ok());  // Forgotten.
  }
  CONFORM(comm.SilentFor(comm.rank()) < std::chrono::seconds(30));
  return {};
}

Status ElementsAreBytes(Communicator& comm) {
  std::vector<double> out = {1.5, -2.25, 0.0, 1e300};
  std::vector<double> in(4);
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Request s,
      comm.Send(comm.rank(), 700, BufferView::Host(DType::kF64, out.data(), Dims{2, 2})));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const Request r,
      comm.Receive(comm.rank(), 700, BufferView::Host(DType::kF64, in.data(), Dims{4})));
  TENSORMOUNT_RETURN_IF_ERROR(WaitAll(comm, {s, r}));
  CONFORM(in == out);
  return {};
}

// Rank 0 and the others hear of each other although nobody sends a message.
Status ProgressIsHeard(Communicator& comm) {
  const auto until = Clock::now() + std::chrono::milliseconds(250);
  while (Clock::now() < until) {
    TENSORMOUNT_RETURN_IF_ERROR(comm.Progress());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  // Nobody was silent for the whole time; who is not heard of now may have been held up.
  const int first = comm.rank() == 0 ? 1 : 0;
  const int last = comm.rank() == 0 ? comm.size() - 1 : 0;
  for (int r = first; r <= last; ++r) {
    const auto give_up = Clock::now() + std::chrono::seconds(30);
    while (comm.SilentFor(r) > std::chrono::milliseconds(200)) {
      CONFORM(Clock::now() < give_up);
      TENSORMOUNT_RETURN_IF_ERROR(comm.Progress());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  // The others may still want to hear of this one.
  if (comm.rank() != 0) {
    TENSORMOUNT_RETURN_IF_ERROR(SendNow(comm, 0, 800, ByteVector(1)));
    return ReceiveNow(comm, 0, 800, Pattern(1, 0, 0));
  }
  for (int r = 1; r < comm.size(); ++r) {
    TENSORMOUNT_RETURN_IF_ERROR(ReceiveNow(comm, r, 800, ByteVector(1)));
  }
  for (int r = 1; r < comm.size(); ++r) {
    TENSORMOUNT_RETURN_IF_ERROR(SendNow(comm, r, 800, Pattern(1, 0, 0)));
  }
  return {};
}

// Memory that may vanish at once.
class Mapping {
 public:
  explicit Mapping(std::size_t size)
      : size_(size),
        data_(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Mapping() { ::munmap(data_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  BufferView view() const {
    return BufferView::Host(DType::kU8, data_, Dims{static_cast<std::int64_t>(size_)});
  }

 private:
  std::size_t size_;
  void* data_;
};

// After Cancel the memory is not touched any more: it is unmapped at once, in every state in which
// a request can be, while messages for it are under way.
Status CancelledMemoryIsFree(Communicator& comm) {
  if (comm.rank() > 1) return {};
  const int peer = 1 - comm.rank();
  for (const std::size_t size : {std::size_t{100}, 2 * kLarge}) {
    for (const int us : {0, 200, 1000, 2000, 4000, 8000}) {
      Mapping out(size);
      Mapping in(size);
      TENSORMOUNT_ASSIGN_OR_RETURN(const Request s, comm.Send(peer, 900, out.view()));
      TENSORMOUNT_ASSIGN_OR_RETURN(const Request r, comm.Receive(peer, 900, in.view()));
      TENSORMOUNT_RETURN_IF_ERROR(ProgressFor(comm, std::chrono::microseconds(us)));
      comm.Cancel(s);
      comm.Cancel(r);
      CONFORM(!comm.Test(s).ok());
      CONFORM(!comm.Test(r).ok());
    }
  }
  TENSORMOUNT_RETURN_IF_ERROR(ProgressFor(comm, std::chrono::milliseconds(100)));
  // Other tags still work, so the connection did not lose its place.
  ByteVector out = Pattern(3 * kMiB, comm.rank(), 5);
  ByteVector in(3 * kMiB);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Request s, comm.Send(peer, 901, View(out)));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Request r, comm.Receive(peer, 901, View(in)));
  TENSORMOUNT_RETURN_IF_ERROR(WaitAll(comm, {s, r}));
  CONFORM(in == Pattern(3 * kMiB, peer, 5));
  return {};
}

}  // namespace

const std::vector<ConformanceCase>& ConformanceCases() {
  static const std::vector<ConformanceCase> cases = {
      {"WhatCannotBeIsRefused", 1, WhatCannotBeIsRefused},
      {"ARankReachesItself", 1, ARankReachesItself},
      {"ElementsAreBytes", 1, ElementsAreBytes},
      {"SizesArriveInOrder", 1, SizesArriveInOrder},
      {"ManyOutstandingToEverybody", 1, ManyOutstandingToEverybody},
      {"TagsDoNotBlockEachOther", 2, TagsDoNotBlockEachOther},
      {"LateReceiverGetsAll", 2, LateReceiverGetsAll},
      {"WrongSizeIsDataLoss", 2, WrongSizeIsDataLoss},
      {"ProgressIsHeard", 2, ProgressIsHeard},
      {"CancelledMemoryIsFree", 2, CancelledMemoryIsFree, /*cancels=*/true},
  };
  return cases;
}

Status Conform(Communicator& comm, bool cancels) {
  for (const ConformanceCase& c : ConformanceCases()) {
    if (comm.size() < c.min_ranks || c.cancels != cancels) continue;
    TENSORMOUNT_RETURN_IF_ERROR(c.body(comm).WithContext(c.name));
  }
  return {};
}

}  // namespace tensormount
