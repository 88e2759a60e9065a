// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_PLAIN_READS_FILE_SYSTEM_H_
#define TENSORMOUNT_TESTS_SUPPORT_PLAIN_READS_FILE_SYSTEM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/read_only.h"

namespace tensormount {

// The host's files as a server would give them: by names that begin with a scheme ("plain:///a/b"
// is the host's "/a/b"), to be read by offset and nothing else. No descriptors, no locks, no inodes
// and no change times. Counts calls, among them those that it had to refuse. Thread-safe.
class PlainReadsFileSystem : public ReadOnlyFileSystem {
 public:
  explicit PlainReadsFileSystem(std::string scheme) : scheme_(std::move(scheme)) {}

  struct Counts {
    std::atomic<std::uint64_t> opens = 0;
    std::atomic<std::uint64_t> reads = 0;  // Round trips: a ReadAt, or a call for many runs.
    std::atomic<std::uint64_t> hints = 0;  // Stretches that will be read (File::StartReading).
    std::atomic<std::uint64_t> hinted_bytes = 0;
    std::atomic<std::uint64_t> reads_at_hint = 0;  // `reads` as it was at the last hint.
    std::atomic<std::uint64_t> refused = 0;        // Writes and locks that somebody tried.
    std::atomic<std::uint64_t> strays = 0;         // Names without the scheme.
  };
  Counts& counts() { return counts_; }

  std::string_view name() const override { return "the plain file system"; }
  Result<std::unique_ptr<File>> OpenRead(const std::string& path) override;
  Result<std::vector<DirectoryEntry>> List(const std::string& path) override;
  Result<FileInfo> Stat(const std::string& path) override;
  Result<FileInfo> LinkStat(const std::string& path) override;
  Result<std::string> Resolve(const std::string& path) override;

 protected:
  Status Refused(const std::string& path) override;

 private:
  Result<std::string> OnHost(const std::string& path);

  const std::string scheme_;
  Counts counts_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_PLAIN_READS_FILE_SYSTEM_H_
