// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_THREAD_MASKS_H_
#define TENSORMOUNT_TESTS_SUPPORT_THREAD_MASKS_H_

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace tensormount {

// The blocked signals of each thread of this process, by "number name".
inline std::map<std::string, std::uint64_t> ThreadMasks() {
  std::map<std::string, std::uint64_t> masks;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(thread.path() / "status");
    std::string name;
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("Name:")) name = line.substr(6);
      if (!line.starts_with("SigBlk:")) continue;
      masks[thread.path().filename().string() + " " + name] =
          std::stoull(line.substr(7), nullptr, 16);
    }
  }
  return masks;
}

inline bool Blocks(std::uint64_t mask, int signal) {
  return (mask & (std::uint64_t{1} << (signal - 1))) != 0;
}

// The threads that are not in `before` and may take SIGTERM, SIGINT or SIGALRM from the process.
// `started`: the number of threads that are not in `before`.
inline std::string ThreadsThatTakeSignals(const std::map<std::string, std::uint64_t>& before,
                                          int* started) {
  std::string found;
  *started = 0;
  for (const auto& [thread, mask] : ThreadMasks()) {
    if (before.contains(thread)) continue;
    ++*started;
    if (!Blocks(mask, SIGTERM) || !Blocks(mask, SIGINT) || !Blocks(mask, SIGALRM)) {
      found += thread + "\n";
    }
  }
  return found;
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_THREAD_MASKS_H_
