// SPDX-License-Identifier: Apache-2.0
// Removal and retention of checkpoints in a store (tensormount/c.h, over tensormount/store.h and
// retention.h).
#include <optional>

#include <nlohmann/json.hpp>

#include "tensormount/retention.h"
#include "tensormount/store.h"

#include "index/store/retention.h"
#include "lib/c_api.h"

using tensormount::PinnedCheckpoint;
using tensormount::RetentionRules;
using tensormount::Status;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::ReadStruct;
using tensormount::c_api::SetOutput;
using RetentionJson = nlohmann::ordered_json;

namespace {

Status GiveIfWanted(const RetentionJson& document, char** json) {
  return json == nullptr ? Status() : SetOutput(document, json);
}

}  // namespace

tm_status tm_store_remove_with(const char* path, const tm_remove_options* options) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{path, "path"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_remove_options given,
                                 ReadStruct(options, "tm_remove_options"));
    return tensormount::RemoveCheckpoint(path, {.force = given.force != 0});
  });
}

tm_status tm_store_pin(const char* path, const tm_pin_options* options, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{path, "path"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_pin_options given, ReadStruct(options, "tm_pin_options"));
    tensormount::PinOptions how;
    if (given.reason != nullptr) how.reason = given.reason;
    how.expires = given.expires;
    TENSORMOUNT_ASSIGN_OR_RETURN(const PinnedCheckpoint pin, tensormount::PinCheckpoint(path, how));
    return GiveIfWanted(tensormount::retention::PinJson(pin), json);
  });
}

tm_status tm_store_unpin(const char* path) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{path, "path"}}));
    return tensormount::UnpinCheckpoint(path);
  });
}

tm_status tm_store_pins(const char* store, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{store, "store"}, {json, "json"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto list, tensormount::ListPins(store));
    RetentionJson all = RetentionJson::array();
    for (const PinnedCheckpoint& pin : list) all.push_back(tensormount::retention::PinJson(pin));
    return SetOutput(all, json);
  });
}

tm_status tm_store_prune(const char* store, const tm_prune_options* options, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{store, "store"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_prune_options given,
                                 ReadStruct(options, "tm_prune_options"));
    tensormount::PruneOptions how;
    how.dry_run = given.dry_run != 0;
    if (given.rules != nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(how.rules, RetentionRules::Parse(given.rules));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto report, tensormount::PruneCheckpoints(store, how));
    return GiveIfWanted(tensormount::retention::PruneJson(report), json);
  });
}

tm_status tm_store_policy(const char* store, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{store, "store"}, {json, "json"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto rules, tensormount::RetentionPolicy(store));
    RetentionJson said = {{"rules", nullptr}};
    if (rules) said["rules"] = rules->ToText();
    return SetOutput(said, json);
  });
}

tm_status tm_store_set_policy(const char* store, const char* rules) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{store, "store"}}));
    std::optional<RetentionRules> wanted;
    if (rules != nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(wanted, RetentionRules::Parse(rules));
    }
    return tensormount::SetRetentionPolicy(store, wanted);
  });
}
