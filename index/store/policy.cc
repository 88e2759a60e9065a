// SPDX-License-Identifier: Apache-2.0
// policy.json, of pins.h. Apart from pins because it is about no checkpoint: what cannot be
// understood here stops whoever would remove.
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "index/records/commit_record.h"
#include "index/records/store_paths.h"
#include "index/store/pins.h"
#include "index/store/retained_file.h"
#include "index/store/retention.h"
#include "shard/utf8.h"

namespace tensormount::pins {
namespace {

constexpr std::string_view kPolicyFormat = "tensormount-retention";
constexpr std::uint64_t kPolicyVersion = 1;
// For whom prunes by the rules before.
constexpr double kPolicyLockSeconds = 10;

Result<RetentionRules> DecodePolicy(std::string_view text, const std::string& path) {
  const auto bad = [&](const std::string& why) {
    return Status(Code::kDataLoss, path + ": " + why);
  };
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return bad("not a JSON object");
  const auto format = json.find("format");
  if (format == json.end() || !format->is_string() ||
      format->get_ref<const std::string&>() != kPolicyFormat) {
    return bad("\"format\" is not \"" + std::string(kPolicyFormat) + "\"");
  }
  // What a newer program may mean by the rules is not known before these are. One that may only be
  // read by old programs says nothing that they may remove by.
  for (const char* name : {"incompatible", "read_compatible"}) {
    const auto bits = json.find(name);
    if (bits == json.end() || !bits->is_number_unsigned()) {
      return bad("\"" + std::string(name) + "\" is not a number");
    }
    if (bits->get<std::uint64_t>() != 0) {
      return Status(Code::kUnsupported,
                    path + ": the rules of a newer program: it has unknown " + name + " bits");
    }
  }
  const auto version = json.find("version");
  if (version == json.end() || !version->is_number_unsigned() || *version == 0) {
    return bad("\"version\" is not a number");
  }
  if (version->get<std::uint64_t>() > kPolicyVersion) {
    return Status(Code::kUnsupported, path + ": the rules of a newer program: version " +
                                          std::to_string(version->get<std::uint64_t>()));
  }
  const auto rules = json.find("rules");
  if (rules == json.end() || !rules->is_string()) return bad("\"rules\" is not a text");
  Result<RetentionRules> parsed = RetentionRules::Parse(rules->get_ref<const std::string&>());
  if (!parsed.ok()) return bad(parsed.status().message());
  if (parsed.value().of_store) return bad("\"rules\" are those of the store itself");
  return parsed;
}

}  // namespace

Result<std::optional<RetentionRules>> ReadPolicy(FileSystem& fs, const std::string& store) {
  const std::string path = JoinPath(store, store_paths::kPolicyFile);
  const Result<std::string> text = fs.ReadFile(path, kMaxRetainedFileBytes);
  if (text.status().code() == Code::kNotFound) return std::optional<RetentionRules>();
  if (!text.ok()) return text.status();
  TENSORMOUNT_ASSIGN_OR_RETURN(RetentionRules rules, DecodePolicy(text.value(), path));
  return std::optional(std::move(rules));
}

Status WritePolicy(FileSystem& fs, const std::string& store, const RetentionRules& rules) {
  if (rules.of_store || rules.empty()) {
    return Status(Code::kInvalidArgument, "the policy of a store needs rules of its own");
  }
  const std::string text = rules.ToText();
  TENSORMOUNT_RETURN_IF_ERROR(RetentionRules::Parse(text).status());
  // In JSON such bytes would become others, and so another rule.
  if (!IsUtf8(text)) {
    return Status(Code::kInvalidArgument, "the policy of a store: a metric that is no UTF-8");
  }
  const Status there = ReadPolicy(fs, store).status();
  if (!there.ok() && there.code() != Code::kDataLoss) return there;
  nlohmann::ordered_json json;
  json["format"] = std::string(kPolicyFormat);
  json["version"] = kPolicyVersion;
  json["compatible"] = 0;
  json["read_compatible"] = 0;
  json["incompatible"] = 0;
  json["rules"] = text;
  const std::string file = json.dump(2) + "\n";
  if (file.size() > kMaxRetainedFileBytes) {
    return Status(Code::kInvalidArgument, "the policy of a store: more than " +
                                              HumanBytes(kMaxRetainedFileBytes) + " of rules");
  }
  // Whoever prunes by the old ones has done so, or has not begun.
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto lock, Lock(fs, store, kPolicyLockSeconds));
  return retention::WithTrashHint(fs, store,
                                  ReplaceRetained(fs, store, store_paths::kPolicyFile, file,
                                                  InsteadOfExchange::kNoneForAMoment));
}

Status RemovePolicy(FileSystem& fs, const std::string& store) {
  const Status there = ReadPolicy(fs, store).status();
  if (!there.ok() && there.code() != Code::kDataLoss) return there;
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto lock, Lock(fs, store, kPolicyLockSeconds));
  const Status removed = fs.RemoveFile(JoinPath(store, store_paths::kPolicyFile));
  if (removed.code() == Code::kNotFound) return Status();
  TENSORMOUNT_RETURN_IF_ERROR(removed);
  return fs.SyncDirectory(store);
}

}  // namespace tensormount::pins
