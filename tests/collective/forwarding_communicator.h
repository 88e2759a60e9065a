// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_FORWARDING_COMMUNICATOR_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_FORWARDING_COMMUNICATOR_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "tensormount/communicator.h"

namespace tensormount {

// Passes every call on to another communicator, which outlives this one. Tests override the calls
// that they disturb.
class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(Communicator& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string kind() const override { return inner_.kind(); }
  Result<Request> Send(int to, std::uint32_t tag, const BufferView& view) override {
    return inner_.Send(to, tag, view);
  }
  Result<Request> Receive(int from, std::uint32_t tag, const BufferView& view) override {
    return inner_.Receive(from, tag, view);
  }
  Result<bool> Test(Request request) override { return inner_.Test(request); }
  void Cancel(Request request) override { inner_.Cancel(request); }
  Status Progress() override { return inner_.Progress(); }
  std::chrono::nanoseconds SilentFor(int rank) const override { return inner_.SilentFor(rank); }

 private:
  Communicator& inner_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_FORWARDING_COMMUNICATOR_H_
