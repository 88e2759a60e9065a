// SPDX-License-Identifier: Apache-2.0
// tm_communicator_*: communicators made of a host's callbacks, and the one-rank one
// (tensormount/c.h).
// A host brings send, receive, test and cancel over whatever it has, and the library makes its
// collective operations of these (collective/comm/callback_communicator). The functions are C's, so
// nothing is wrapped: pointers and context are handed on as they are.
#include <chrono>
#include <limits>
#include <utility>

#include "tensormount/callback_communicator.h"

#include "lib/c_api.h"

using tensormount::Communicator;
using tensormount::Status;
using tensormount::c_api::Call;
using tensormount::c_api::Handle;
using tensormount::c_api::Need;

// Hosts allocate by the number in c.h; the library splits by the other.
static_assert(TM_MAX_CALLBACK_MESSAGE == tensormount::kMaxCallbackMessage);

void tm_communicator_free(tm_communicator* communicator) {
  tensormount::c_api::FreeHandle(communicator);
}

// -1 and 0 size for NULL: these two have no status to return.
int32_t tm_communicator_rank(const tm_communicator* communicator) {
  return communicator == nullptr ? -1 : communicator->comm->rank();
}

int32_t tm_communicator_size(const tm_communicator* communicator) {
  return communicator == nullptr ? 0 : communicator->comm->size();
}

tm_status tm_communicator_self(tm_communicator** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(Need({{out, "out"}}));
    *out = new tm_communicator{tensormount::MakeSelfCommunicator()};
    return {};
  });
}

tm_status tm_communicator_from_callbacks(const tm_callbacks* callbacks, int32_t rank, int32_t size,
                                         tm_communicator** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(Need({{callbacks, "callbacks"}, {out, "out"}}));
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
    // Otherwise the default of CallbackOptions.
    if (given.leave_wait_ms > 0) {
      options.leave_wait = std::chrono::milliseconds(given.leave_wait_ms);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(auto made,
                                 tensormount::MakeCallbackCommunicator(host, rank, size, options));
    *out = new tm_communicator{std::move(made)};
    return {};
  });
}

// The parent must outlive the channel; both may be used at once.
tm_status tm_communicator_channel(tm_communicator* parent, uint32_t channel,
                                  tm_communicator** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(Need({Handle(parent, "parent"), {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto made, tensormount::MakeChannel(*parent->comm, channel));
    *out = new tm_communicator{std::move(made)};
    return {};
  });
}

tm_status tm_communicator_subgroup(tm_communicator* parent, const int32_t* ranks, size_t count,
                                   uint32_t channel, tm_communicator** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(Need({Handle(parent, "parent"), {ranks, "ranks"}, {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        auto made,
        tensormount::MakeSubgroup(*parent->comm, std::vector<int>(ranks, ranks + count), channel));
    *out = new tm_communicator{std::move(made)};
    return {};
  });
}
