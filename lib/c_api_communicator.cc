// SPDX-License-Identifier: Apache-2.0
// tm_communicator_* (tensormount/c.h): communicators made of the caller's callbacks, of a single
// rank, and of the ranks of another communicator. The caller provides send, receive, test and
// cancel, with which the library implements its collective operations
// (collective/comm/callback_communicator).
#include <chrono>
#include <limits>
#include <utility>

#include "tensormount/callback_communicator.h"

#include "lib/c_api.h"

using tensormount::Communicator;
using tensormount::Status;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::Handle;

// Callers allocate buffers of the size in c.h, and the library splits messages at its own constant.
static_assert(TM_MAX_CALLBACK_MESSAGE == tensormount::kMaxCallbackMessage);

void tm_communicator_free(tm_communicator* communicator) {
  tensormount::c_api::FreeHandle(communicator);
}

// For NULL the rank is -1 and the size is 0, because these functions return no status.
int32_t tm_communicator_rank(const tm_communicator* communicator) {
  return communicator == nullptr ? -1 : communicator->comm->rank();
}

int32_t tm_communicator_size(const tm_communicator* communicator) {
  return communicator == nullptr ? 0 : communicator->comm->size();
}

tm_status tm_communicator_self(tm_communicator** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{out, "out"}}));
    *out = new tm_communicator{tensormount::MakeSelfCommunicator()};
    return {};
  });
}

tm_status tm_communicator_from_callbacks(const tm_callbacks* callbacks, int32_t rank, int32_t size,
                                         tm_communicator** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{callbacks, "callbacks"}, {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_callbacks given,
                                 tensormount::c_api::ReadStruct(callbacks, "tm_callbacks"));
    tensormount::CommunicatorCallbacks host;
    host.context = given.context;
    host.send = given.send;
    host.receive = given.receive;
    host.test = given.test;
    host.cancel = given.cancel;
    tensormount::CallbackOptions options;
    options.tag = given.tag;
    // Zero and negative values mean the default of CallbackOptions.
    if (given.leave_wait_ms > 0) {
      options.leave_wait = std::chrono::milliseconds(given.leave_wait_ms);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(auto made,
                                 tensormount::MakeCallbackCommunicator(host, rank, size, options));
    *out = new tm_communicator{std::move(made)};
    return {};
  });
}

// The parent must outlive the channel; both may be used concurrently.
tm_status tm_communicator_channel(tm_communicator* parent, uint32_t channel,
                                  tm_communicator** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(parent, "parent"), {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto made, tensormount::MakeChannel(*parent->comm, channel));
    *out = new tm_communicator{std::move(made)};
    return {};
  });
}

tm_status tm_communicator_subgroup(tm_communicator* parent, const int32_t* ranks, size_t count,
                                   uint32_t channel, tm_communicator** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({Handle(parent, "parent"), {ranks, "ranks"}, {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        auto made,
        tensormount::MakeSubgroup(*parent->comm, std::vector<int>(ranks, ranks + count), channel));
    *out = new tm_communicator{std::move(made)};
    return {};
  });
}
