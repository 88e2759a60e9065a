// SPDX-License-Identifier: Apache-2.0
// How fast this machine is: scripts/test compiles and runs it, and counts its stages in that time.
#include <cstdint>
#include <functional>
#include <map>
#include <regex>
#include <string>

int main(int argc, char** argv) {
  const std::regex name("[a-z]+(/[a-z]+)*");
  const std::map<std::string, std::function<bool(const std::string&)>> checks = {
      {"name", [&](const std::string& text) { return std::regex_match(text, name); }}};
  std::uint64_t x = static_cast<std::uint64_t>(argc);
  for (int i = 0; i < 60'000'000; ++i) x = x * 6364136223846793005u + 1442695040888963407u;
  return checks.at("name")(argv[0]) && x == 0 ? 1 : 0;
}
