// SPDX-License-Identifier: Apache-2.0
// Watches of stores (tensormount/c_store.h, over CommitWatch).
#include <algorithm>
#include <chrono>
#include <memory>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/log.h"
#include "index/store/commit_watch.h"
#include "lib/c_api.h"

using tensormount::CommitWatch;
using tensormount::Status;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::Handle;
using tensormount::c_api::SetOutput;

namespace {

constexpr std::int64_t kLongestWaitMs = 86'400'000;

}  // namespace

struct tm_watch {
  std::unique_ptr<CommitWatch> watch;
  const pid_t process = getpid();
};

tm_status tm_store_watch(const char* store, const tm_watch_options* options, tm_watch** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{store, "store"}, {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_watch_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_watch_options"));
    CommitWatch::Options how;
    how.existing = given.existing != 0;
    how.above = given.above;
    if (given.since != nullptr) how.since = given.since;
    TENSORMOUNT_ASSIGN_OR_RETURN(auto watch, CommitWatch::Start(store, how));
    *out = new tm_watch{std::move(watch)};
    return {};
  });
}

tm_status tm_watch_next(tm_watch* watch, int64_t wait_ms, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(watch, "watch"), {json, "json"}}));
    const std::chrono::milliseconds wait(std::clamp<std::int64_t>(wait_ms, 0, kLongestWaitMs));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto next, watch->watch->Next(wait));
    // Programs learn from the log of what cannot be read.
    for (const std::string& warning : watch->watch->TakeWarnings()) {
      tensormount::Log(tensormount::LogLevel::kWarning, warning);
    }
    *json = nullptr;
    return next ? SetOutput(CommitJson(*next), json) : Status();
  });
}

void tm_watch_free(tm_watch* watch) { tensormount::c_api::FreeHandle(watch); }
