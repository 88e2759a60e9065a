// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_STORE_COPY_TARGET_H_
#define TENSORMOUNT_INDEX_STORE_COPY_TARGET_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/store_copy.h"

#include "index/store/copy_source.h"
#include "index/store/store.h"

// What is common to copies into directories (copy.cc) and into buckets (bucket_copy.h).

namespace tensormount::copies {

// Reports progress and limits the rate. The caller's `watch` is called by the thread that made this
// object only; other threads see its verdict. Thread-safe.
class CopyPace {
 public:
  explicit CopyPace(const CopyOptions& options);

  // Begins to count anew, up to `total` bytes.
  void Expect(std::uint64_t total);
  // Reports progress after a read of `bytes`, and sleeps if reads are faster than the rate limit.
  Status Read(std::uint64_t bytes);
  // Counts `bytes` of a checkpoint that are in place, and reports progress.
  Status Done(std::uint64_t bytes);
  // Size of a read; smaller than 1 MiB if the rate limit is low.
  std::size_t Block() const;

 private:
  Status ReportProgress();

  const CopyOptions& options_;
  std::atomic<std::uint64_t> total_ = 0;
  const std::thread::id owner_;
  std::atomic<std::uint64_t> done_ = 0;
  std::atomic<bool> stopped_ = false;
  std::mutex mutex_;
  Status verdict_;  // Of the watch, once it has ended the copy.
  std::chrono::steady_clock::time_point next_{};
};

// A store that checkpoints are copied to.
class CopyTarget {
 public:
  // `store` and `options` must outlive this object.
  CopyTarget(const Store& store, const CopyOptions& options) : store_(store), pace_(options) {}
  virtual ~CopyTarget() = default;

  // Before copies of `total` bytes: finds out which checkpoints the store has, and which of the
  // files in `keys`. The store is read at the first call only.
  Status Prepare(Keys keys, std::uint64_t total);
  virtual Status Copy(const CopyRequest& wanted, CopiedCheckpoint& out) = 0;

 protected:
  // The entry of the store with this name, without following a link.
  virtual CheckpointListing EntryAt(const std::string& name) const {
    return store_.FindListing(name);
  }
  // Checks whether the name can be used. OK if it is free. Also OK if this checkpoint already has
  // the name there, which sets `out.was_there`.
  Status CheckName(const CopyRequest& wanted, CopiedCheckpoint& out) const;
  // Reads a file of the source in blocks, compares them with its hashes, and passes each on.
  // Thread-safe.
  using Sink = std::function<Status(std::uint64_t at, const std::byte* data, std::size_t size)>;
  Status ReadProven(const OpenedSource& source, const CommitRecord::Entry& entry, File& from,
                    const Sink& sink);
  // The checkpoint `name`, which was just copied, has the files of `record`. Only the files of the
  // last few are remembered.
  void RememberCopied(const std::string& name, const CommitRecord& record);

  const Store& store_;
  CopyPace pace_;
  Keys keys_;
  // For each key of a file, a checkpoint of the store that has the file.
  std::unordered_map<Hash128, std::string, KeyHasher> holders_;
  std::map<Uuid, std::string> names_;  // Checkpoints of the store.

 private:
  bool inspected_ = false;
  // Names of the checkpoints that were copied last, and the keys of their files.
  std::deque<std::pair<std::string, std::vector<Hash128>>> copied_;
};

}  // namespace tensormount::copies

#endif  // TENSORMOUNT_INDEX_STORE_COPY_TARGET_H_
