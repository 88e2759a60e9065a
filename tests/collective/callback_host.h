// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_CALLBACK_HOST_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_CALLBACK_HOST_H_

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tensormount/callback_communicator.h"

namespace tensormount {

// A host for communicators of callbacks, as mean as its contract lets it be: nothing is taken over,
// a message moves only when its receive is there too, and whatever breaks the contract is written
// down.
class CallbackHost {
 public:
  explicit CallbackHost(int ranks);

  // For rank `rank`; `this` must outlive their use.
  CommunicatorCallbacks Callbacks(int rank, bool can_cancel = true);
  // Communicators on these, made by every rank for itself.
  Result<std::unique_ptr<Communicator>> Make(int rank, const CallbackOptions& options = {});

  // From now on every request with this rank fails with `code`.
  void Break(int rank, int code);
  // The next message from `rank` has its first byte turned round.
  void DamageNext(int rank);

  std::vector<std::string> violations();
  std::size_t under_way();
  std::size_t cancelled();
  std::uint64_t tests();  // How often a request was asked about.

 private:
  struct Seat {
    CallbackHost* host = nullptr;
    int rank = 0;
    bool busy = false;
  };
  struct Post {
    int owner = 0;
    int peer = 0;
    bool is_send = false;
    void* data = nullptr;
    std::uint64_t size = 0;
    bool done = false;
  };
  using Key = std::tuple<int, int, std::uint32_t>;  // From, to, tag.
  struct Queue {
    std::deque<std::uint64_t> sends;
    std::deque<std::uint64_t> receives;
  };
  class Call;

  static int Start(void* context, int peer, std::uint32_t tag, void* data, std::uint64_t size,
                   std::uint64_t* request, bool is_send);
  static int Send(void* context, int to, std::uint32_t tag, const void* data, std::uint64_t size,
                  std::uint64_t* request);
  static int Receive(void* context, int from, std::uint32_t tag, void* data, std::uint64_t size,
                     std::uint64_t* request);
  static int Test(void* context, std::uint64_t request);
  static void Cancel(void* context, std::uint64_t request);
  void Note(const std::string& what) { violations_.insert(what); }

  std::mutex mutex_;
  std::deque<Seat> seats_;
  std::map<std::uint64_t, Post> posts_;
  std::map<Key, Queue> queues_;
  std::uint64_t next_ = 1;
  std::map<int, int> broken_;
  std::set<int> damaged_;
  std::set<std::string> violations_;
  std::size_t cancelled_ = 0;
  std::uint64_t tests_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_CALLBACK_HOST_H_
