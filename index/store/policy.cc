// SPDX-License-Identifier: Apache-2.0
// policy.json, part of pins.h. If the policy cannot be parsed, no checkpoint is removed by rule.
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
// Longest wait for a prune that is running by the old rules.
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
  // The feature bits are checked before the rules, because they may change the meaning of the
  // rules. With unknown read-compatible bits the policy can be read, but a prune must not follow
  // it.
  for (const char* name : {"incompatible", "read_compatible"}) {
    const auto bits = json.find(name);
    if (bits == json.end() || !bits->is_number_unsigned()) {
      return bad("\"" + std::string(name) + "\" is not a number");
    }
    if (bits->get<std::uint64_t>() != 0) {
      return Status(Code::kUnsupported,
                    path + ": the policy was written by a newer version of tensormount: unknown " +
                        name + " bits");
    }
  }
  const auto version = json.find("version");
  if (version == json.end() || !version->is_number_unsigned() || *version == 0) {
    return bad("\"version\" is not a number");
  }
  if (version->get<std::uint64_t>() > kPolicyVersion) {
    return Status(Code::kUnsupported,
                  path + ": the policy was written by a newer version of tensormount: version " +
                      std::to_string(version->get<std::uint64_t>()));
  }
  const auto rules = json.find("rules");
  if (rules == json.end() || !rules->is_string()) return bad("\"rules\" is not a string");
  Result<RetentionRules> parsed = RetentionRules::Parse(rules->get_ref<const std::string&>());
  if (!parsed.ok()) return bad(parsed.status().message());
  if (parsed.value().of_store) return bad("\"rules\" must not be \"policy\"");
  return parsed;
}

}  // namespace

Result<std::optional<RetentionRules>> ReadPolicy(FileSystem& fs, const std::string& store,
                                                 bool* unread) {
  const std::string path = JoinPath(store, store_paths::kPolicyFile);
  const RetainedText read = ReadRetained(fs, path);
  const Result<std::string>& text = read.text;
  if (unread != nullptr) *unread = read.unread;
  if (text.status().code() == Code::kNotFound) return std::optional<RetentionRules>();
  if (!text.ok()) return text.status();
  TENSORMOUNT_ASSIGN_OR_RETURN(RetentionRules rules, DecodePolicy(text.value(), path));
  return std::optional(std::move(rules));
}

Status WritePolicy(FileSystem& fs, const std::string& store, const RetentionRules& rules) {
  if (rules.of_store || rules.empty()) {
    return Status(Code::kInvalidArgument, "cannot save a policy without rules: give at least one");
  }
  const std::string text = rules.ToText();
  TENSORMOUNT_RETURN_IF_ERROR(RetentionRules::Parse(text).status());
  // JSON would change bytes that are not UTF-8, and thereby the rules.
  if (!IsUtf8(text)) {
    return Status(Code::kInvalidArgument, "the policy of a store: a metric name is not UTF-8");
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
    return Status(Code::kInvalidArgument,
                  "the policy of a store: the rules exceed " + HumanBytes(kMaxRetainedFileBytes));
  }
  // With the lock held, no prune is running by the old rules.
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto lock, Lock(fs, store, kPolicyLockSeconds));
  return retention::WithTrashHint(fs, store,
                                  ReplaceRetained(fs, store, store_paths::kPolicyFile, file,
                                                  ExchangeFallback::kBrieflyMissing));
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
