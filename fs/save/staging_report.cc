// SPDX-License-Identifier: Apache-2.0
// StagingReport of publish.h as text and JSON; tensormount itself never reads these.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "fs/save/publish.h"

namespace tensormount::fs {

std::string StagingReport::ToJson() const {
  nlohmann::ordered_json json;
  json["verdict"] = verdict;
  nlohmann::ordered_json& list = json["problems"] = nlohmann::ordered_json::array();
  for (const Problem& p : problems) {
    list.push_back({{"code", p.code}, {"object", p.object}, {"detail", p.detail}});
  }
  json["more"] = more;
  json["bytes_written"] = bytes_written;
  json["bytes_missing"] = bytes_missing;
  json["mounts"] = mounts;
  json["writers_missing"] = writers_missing;
  // Object names and system messages need not be UTF-8.
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string StagingReport::ToText() const {
  std::string text = verdict.empty() ? std::string() : verdict + "\n";
  for (const Problem& p : problems) {
    const std::string line = p.object + ": " + p.detail;
    if (line != verdict) text += line + "\n";
  }
  if (more > 0) text += fmt::format("and {} more problems\n", more);
  // Both numbers are 0 if tensors were not examined, for example because a done mark is missing.
  if (mounts == 0 && bytes_missing == 0) return text;
  text += fmt::format("{} bytes written by {} mount{}, {} missing\n", bytes_written, mounts,
                      mounts == 1 ? "" : "s", bytes_missing);
  return text;
}

nlohmann::ordered_json PublishedJson(const std::string& checkpoint,
                                     const Store::Published& published,
                                     const StagingReport& report) {
  nlohmann::ordered_json json = {{"checkpoint", checkpoint},
                                 {"uuid", published.info.uuid.ToString()},
                                 {"generation", published.info.generation},
                                 {"tensors", published.tensors},
                                 {"chunks", published.chunks},
                                 {"bytes", published.bytes},
                                 {"mounts", report.mounts},
                                 {"reused_tensors", report.reused_tensors},
                                 {"reused_bytes", report.reused_bytes}};
  if (!report.reuse_note.empty()) json["reuse_note"] = report.reuse_note;
  return json;
}

}  // namespace tensormount::fs
