// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "shard/strict_json.h"

using namespace tensormount;

// Index files of Hugging Face and all other JSON from outside.
extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  (void)ParseStrictJson(text);
  const auto member = [](const std::string& name, nlohmann::json& value) -> Status {
    if (name.size() > value.dump().size() + 100000) return Status(Code::kInternal, "");
    return {};
  };
  (void)ParseStrictJson(text, "weight_map", member);
  return 0;
}
