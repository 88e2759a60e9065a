// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_ASYNC_PROGRESS_FILE_H_
#define TENSORMOUNT_COLLECTIVE_ASYNC_PROGRESS_FILE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "base/file_system.h"
#include "base/thread.h"
#include "index/store/store.h"

namespace tensormount {

// Progress of a save, for people and programs that look at the store: every rank keeps a line about
// itself in STAGING/status/, and rank 0 combines them in STAGING/status.json (docs/format.md,
// "Store"). Progress goes into files, not messages, so that the other ranks do no work for it and a
// dead rank's last line can still be read. Failures to write are ignored. A save shorter than the
// first interval writes nothing. Files are replaced by rename, so a reader never sees half a file.
class ProgressFile {
 public:
  // Size of this rank's shards and objects, and bytes written, or taken from the base, so far. The
  // latter may stay below the former, because other ranks write some of the replicas.
  struct Line {
    std::uint64_t bytes_total = 0;
    std::uint64_t bytes_written = 0;
  };
  // Calls `line` on a thread of its own. Intervals grow with the number of ranks, to bound the load
  // on the file system.
  ProgressFile(FileSystem& fs, const Staging& staging, int rank, int world,
               std::chrono::milliseconds interval, std::function<Line()> line);
  // Stops the thread. The files stay.
  ~ProgressFile();

  void Stop();
  // Call on rank 0 before the staging is published or aborted: the files are not part of a
  // checkpoint.
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
  Thread thread_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_ASYNC_PROGRESS_FILE_H_
