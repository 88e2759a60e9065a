// SPDX-License-Identifier: Apache-2.0
// `tensormount init` (commands.h): makes an empty store, so that even the first checkpoint can be
// saved through a mount.
#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "index/store/store.h"
#include "mount-tools/commands.h"

namespace tensormount::tools {

int RunInit(const std::string& path, Terminal& terminal) {
  const Result<Store> there = Store::Open(path);
  const Result<Store> store = Store::OpenOrCreate(path);
  if (!store.ok()) return terminal.Fail(store.status());
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{{"store", store.value().path()},
                                         {"uuid", store.value().uuid().ToString()},
                                         {"made", !there.ok()}});
  } else if (!terminal.quiet) {
    terminal.Line(fmt::format("{} {}", store.value().path(),
                              there.ok() ? "is already a store" : "is now an empty store"));
  }
  return terminal.Flush();
}

}  // namespace tensormount::tools
