// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_ASYNC_PROGRESS_FILE_H_
#define TENSORMOUNT_COLLECTIVE_ASYNC_PROGRESS_FILE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "base/file_system.h"
#include "index/store/store.h"

namespace tensormount {

// How far a save is, for people and programs that look at the store: every rank keeps a line about
// itself in STAGING/status/, and rank 0 puts them together as STAGING/status.json
// (docs/format.md, "Progress"). Through the file system and not by messages, so that it costs the
// ranks nothing, and what a dead rank said last can still be read. Best effort: a failure to write
// it is no failure of the save. A save that is over within the first interval writes nothing.
// A file each, replaced by rename: a reader never sees half of one. The line of a rank that hangs
// or is gone stays as it was while those of the others go on.
class ProgressFile {
 public:
  // Bytes that this rank has to write in this save, and has written.
  struct Line {
    std::uint64_t bytes_total = 0;
    std::uint64_t bytes_written = 0;
  };
  // `line` is called on a thread of its own. Intervals grow with the number of ranks, so that a
  // large job does not keep a file system busy with this.
  ProgressFile(FileSystem& fs, const Staging& staging, int rank, int world,
               std::chrono::milliseconds interval, std::function<Line()> line);
  // Stops, without removing anything.
  ~ProgressFile();

  void Stop();
  // Rank 0, before the staging is published or given up: nothing of this stays in a checkpoint.
  void Remove();

 private:
  void Run();
  void WriteOwn();
  void WriteAll();

  FileSystem& fs_;
  const Staging staging_;
  const int rank_;
  const int world_;
  const std::chrono::milliseconds interval_;
  const std::function<Line()> line_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_ASYNC_PROGRESS_FILE_H_
