// SPDX-License-Identifier: Apache-2.0
// Stores, verify, repair, diff, adopt, derive, key maps, and tasks (tensormount/c.h). The command
// makes its JSON with the same functions.
#include <memory>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "tensormount/derive.h"
#include "tensormount/key_map.h"
#include "tensormount/store_copy.h"
#include "tensormount/store_repair.h"

#include "base/cancel_scope.h"
#include "base/file_system.h"
#include "base/file_system_for.h"
#include "index/foreign/adopt.h"
#include "index/foreign/open_source.h"
#include "index/foreign/rule_packs.h"
#include "index/foreign/verify_foreign.h"
#include "index/read/known_defects.h"
#include "index/read/report_json.h"
#include "index/store/costs.h"
#include "index/store/store.h"
#include "index/store/store_json.h"
#include "lib/c_api.h"

using tensormount::Code;
using tensormount::FileSystem;
using tensormount::FoundSource;
using tensormount::KeyMap;
using tensormount::Result;
using tensormount::SourceKind;
using tensormount::Status;
using tensormount::Store;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::ReadRules;
using tensormount::c_api::ReadTask;
using tensormount::c_api::SetOutput;
using OrderedJson = nlohmann::ordered_json;

namespace {

Status GiveJson(const OrderedJson& document, char** json) {
  return json == nullptr ? Status() : SetOutput(document, json);
}

// Finds one checkpoint. A directory of several (a store, or the steps of a foreign training run) is
// refused; STORE/latest is accepted.
Result<FoundSource> FindOne(const char* path, const std::vector<std::string>& roots) {
  TENSORMOUNT_ASSIGN_OR_RETURN(FoundSource found, tensormount::FindSource(path, roots));
  if (found.kind == SourceKind::kStore || found.kind == SourceKind::kForeignSteps) {
    return Status(Code::kInvalidArgument,
                  std::string(path) + ": contains several checkpoints: name one of them");
  }
  return found;
}

}  // namespace

tm_status tm_task_new(tm_task** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{out, "out"}}));
    *out = new tm_task;
    return {};
  });
}

void tm_task_cancel(tm_task* task) {
  if (task != nullptr) task->cancel = true;
}

void tm_task_watch_thread(tm_task* task) {
  tensormount::CancelScope::SetForThread(task == nullptr ? nullptr : &task->cancel);
}

void tm_task_progress(const tm_task* task, uint64_t* done, uint64_t* total) {
  if (done != nullptr) *done = task == nullptr ? 0 : task->done.load();
  if (total != nullptr) *total = task == nullptr ? 0 : task->total.load();
}

void tm_task_free(tm_task* task) { delete task; }

tm_status tm_store_list(const char* store, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{store, "store"}, {json, "json"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto list, tensormount::ListCheckpoints(store));
    OrderedJson all = OrderedJson::array();
    for (const tensormount::StoredCheckpoint& item : list) {
      OrderedJson& one = all.emplace_back(OrderedJson{{"checkpoint", item.name},
                                                      {"uuid", item.uuid},
                                                      {"generation", item.generation},
                                                      {"latest", item.latest}});
      if (!item.problem.ok()) {
        one["problem"] = item.problem.ToString();
        continue;
      }
      one["created"] = item.created;
      one["file_bytes"] = item.file_bytes;
      one["stored_bytes"] = item.stored_bytes;
      one["own_bytes"] = item.own_bytes;
      one["shared_bytes"] = item.stored_bytes - item.own_bytes;
      one["pinned"] = item.pinned;
      if (!item.pins_read.ok()) one["pinned"] = nullptr;
    }
    return SetOutput(all, json);
  });
}

tm_status tm_store_latest(const char* store, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{store, "store"}, {json, "json"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(store));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto latest, opened.Latest());
    OrderedJson found = ListingJson(latest, true);
    found.erase("latest");
    found["path"] = opened.CheckpointPath(latest.name);
    found["warnings"] = latest.warnings;
    return SetOutput(found, json);
  });
}

tm_status tm_store_remove(const char* path) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{path, "path"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, tensormount::SplitCheckpointPath(path));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(parts.store));
    return store.Remove(parts.name);
  });
}

tm_status tm_store_gc(const char* store, const tm_gc_options* options, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{store, "store"}, {json, "json"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_gc_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_gc_options"));
    Store::GcOptions how;
    how.dry_run = given.dry_run != 0;
    if (given.grace_seconds != 0) {
      how.grace = std::chrono::seconds(std::max<std::int64_t>(given.grace_seconds, 0));
      // Without locks only the grace period protects readers, so it is trusted only if the caller
      // chose it.
      how.trust_grace = true;
    }
    if (given.staging_age_seconds > 0) {
      how.staging_age = std::chrono::seconds(given.staging_age_seconds);
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store opened, Store::Open(store));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto report, opened.Gc(how));
    return SetOutput(GcJson(report, how.dry_run), json);
  });
}

tm_status tm_store_copy(const char* const* sources, size_t source_count, const char* destination,
                        const tm_copy_options* options, int32_t* all, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{destination, "destination"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_copy_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_copy_options"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto from,
                                 tensormount::c_api::ReadTexts(sources, source_count, "sources"));
    tensormount::CopyOptions how;
    how.limit_rate = given.limit_rate;
    how.unconditional = given.unconditional != 0;
    how.watch = ReadTask(given.task);
    TENSORMOUNT_ASSIGN_OR_RETURN(const tensormount::CopyReport report,
                                 tensormount::CopyCheckpoints(from, destination, how));
    OrderedJson document = {{"destination", report.destination},
                            {"checkpoints", OrderedJson::array()}};
    bool whole = true;
    for (const tensormount::CopiedCheckpoint& one : report.checkpoints) {
      document["checkpoints"].push_back(CopiedJson(one));
      whole = whole && one.status.ok();
    }
    TENSORMOUNT_RETURN_IF_ERROR(GiveJson(document, json));
    if (all != nullptr) *all = whole ? 1 : 0;
    return {};
  });
}

tm_status tm_verify(const char* path, const tm_verify_options* options, int32_t* whole,
                    char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{path, "path"}, {whole, "whole"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_verify_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_verify_options"));
    tensormount::VerifyOptions how;
    how.quick = given.quick != 0;
    how.threads = given.threads;
    how.watch = ReadTask(given.task);
    TENSORMOUNT_ASSIGN_OR_RETURN(
        how.roots,
        tensormount::c_api::ReadTexts(given.roots, given.root_count, "tm_verify_options.roots"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const FoundSource found, FindOne(path, how.roots));
    FileSystem& fs = *found.fs;
    TENSORMOUNT_ASSIGN_OR_RETURN(tensormount::VerifyReport report,
                                 found.kind == SourceKind::kForeign
                                     ? VerifyForeign(fs, found.path, how)
                                     : VerifyCheckpoint(fs, found.path, how));
    if (found.kind != SourceKind::kForeign) NameSharers(fs, found.path, report);
    if (const auto opened = OpenFound(found, how.roots); opened.ok()) {
      for (std::string& note : tensormount::FindKnownDefects(*opened.value())) {
        report.warnings.push_back(std::move(note));
      }
    }
    OrderedJson document = VerifiedJson(report, how.quick);
    OrderedJson& damage = document["damage"] = OrderedJson::array();
    for (const auto& one : report.damages) damage.push_back(DamageJson(one));
    document["warnings"] = report.warnings;
    TENSORMOUNT_RETURN_IF_ERROR(GiveJson(document, json));
    *whole = report.damages.empty() ? 1 : 0;
    return {};
  });
}

tm_status tm_repair(const char* path, const char* from, const tm_repair_options* options,
                    int32_t* whole, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{path, "path"}, {from, "from"}, {whole, "whole"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_repair_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_repair_options"));
    tensormount::RepairOptions how;
    how.dry_run = given.dry_run != 0;
    how.watch = ReadTask(given.task);
    TENSORMOUNT_ASSIGN_OR_RETURN(
        how.roots,
        tensormount::c_api::ReadTexts(given.roots, given.root_count, "tm_repair_options.roots"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tensormount::RepairReport report,
                                 tensormount::RepairCheckpoint(path, from, how));
    TENSORMOUNT_RETURN_IF_ERROR(GiveJson(tensormount::RepairJson(report), json));
    *whole = report.left.empty() ? 1 : 0;
    return {};
  });
}

tm_status tm_diff(const char* first, const char* second, const tm_diff_options* options,
                  int32_t* same, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({{first, "first"}, {second, "second"}, {same, "same"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_diff_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_diff_options"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto names, tensormount::c_api::ReadNameMap(given.key_map));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto roots,
        tensormount::c_api::ReadTexts(given.roots, given.root_count, "tm_diff_options.roots"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto stored, tensormount::OpenNamed(first, roots));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto a, tensormount::ApplyNames(stored, names));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto b, tensormount::OpenNamed(second, roots));
    tensormount::CompareOptions how;
    how.values = given.values != 0;
    how.watch = ReadTask(given.task);
    if (given.keys != nullptr) how.keys = given.keys;
    const std::uint64_t limit = given.limit == 0 ? 10'000 : given.limit;
    OrderedJson listed = OrderedJson::array();
    std::uint64_t more = 0;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const tensormount::CompareSummary summary,
        CompareCheckpoints(*a, *b, how, [&](const tensormount::Mismatch& mismatch) {
          if (listed.size() < limit) {
            listed.push_back(MismatchJson(mismatch));
          } else {
            ++more;
          }
          return Status();
        }));
    // If the glob matches no key, the sources would be reported as equal.
    if (!how.keys.empty() &&
        summary.added + summary.removed + summary.changed + summary.equal == 0) {
      return Status(Code::kNotFound, "keys '" + how.keys + "': no key matches");
    }
    // Missing data cannot be compared, so the comparison fails.
    for (const auto* lost : {&a->lost(), &b->lost()}) {
      TENSORMOUNT_RETURN_IF_ERROR(tensormount::CheckNoLoss(*lost, how.keys));
    }
    OrderedJson document = ComparedJson(summary);
    document["mismatches"] = std::move(listed);
    document["more"] = more;
    TENSORMOUNT_RETURN_IF_ERROR(GiveJson(document, json));
    *same = summary.same() ? 1 : 0;
    return {};
  });
}

tm_status tm_adopt(const char* source, const char* path, const tm_adopt_options* options,
                   char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{source, "source"}, {path, "path"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_adopt_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_adopt_options"));
    tensormount::AdoptOptions how;
    how.hashes = given.quick == 0;
    how.threads = given.threads;
    how.watch = ReadTask(given.task);
    if (given.replace != 0) how.if_exists = tensormount::IfExists::kReplace;
    TENSORMOUNT_ASSIGN_OR_RETURN(how.map, ReadRules(given.key_map));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto parts, tensormount::SplitAdoptPath(path));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto roots,
        tensormount::c_api::ReadTexts(given.roots, given.root_count, "tm_adopt_options.roots"));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto opened,
        tensormount::OpenComplete(source, roots, /*partial=*/given.partial != 0));
    TENSORMOUNT_RETURN_IF_ERROR(CheckIsForeign(*opened));
    TENSORMOUNT_ASSIGN_OR_RETURN(tensormount::FileSystem* const fs,
                                 tensormount::FileSystemFor(parts.store));
    TENSORMOUNT_ASSIGN_OR_RETURN(Store store, Store::OpenOrCreate(*fs, parts.store, parts.name));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store::Published published,
                                 AdoptSource(store.fs(), *opened, store, parts.name, how));
    return GiveJson({{"path", store.CheckpointPath(parts.name)},
                     {"uuid", published.info.uuid.ToString()},
                     {"generation", published.info.generation},
                     {"tensors", published.tensors},
                     {"chunks", published.chunks},
                     {"bytes", opened->index().tensor_bytes()}},
                    json);
  });
}

tm_status tm_derive(const char* path, const char* from, const tm_derive_options* options,
                    char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{path, "path"}, {from, "from"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_derive_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_derive_options"));
    tensormount::DeriveOptions how;
    if (given.replace != 0) how.if_exists = tensormount::IfExists::kReplace;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        how.keep,
        tensormount::c_api::ReadTexts(given.keep, given.keep_count, "tm_derive_options.keep"));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        how.drop,
        tensormount::c_api::ReadTexts(given.drop, given.drop_count, "tm_derive_options.drop"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto map, ReadRules(given.key_map));
    if (map != nullptr) how.rename = *map;
    TENSORMOUNT_ASSIGN_OR_RETURN(const tensormount::DeriveReport report,
                                 tensormount::Derive(path, from, how));
    return GiveJson(DeriveJson(report), json);
  });
}

tm_status tm_key_map_apply(const char* rules, const char* keys, size_t keys_size, size_t count,
                           tm_list** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{rules, "rules"}, {keys, "keys"}, {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const KeyMap map, KeyMap::FromJson(rules));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto texts,
                                 tensormount::c_api::ReadKeys(keys, keys_size, count));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        auto names, map.ApplyToAll(std::vector<std::string>(texts.begin(), texts.end())));
    return SetOutput(std::move(names), out);
  });
}
