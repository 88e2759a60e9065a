// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_EXPORT_EXPORT_H_
#define TENSORMOUNT_FS_EXPORT_EXPORT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "fs/export/export_plan.h"
#include "index/read/checkpoint.h"

namespace tensormount::fs {

// The result of an export. Counts are sums over all ranks. Seconds are wall-clock time of this
// rank.
struct ExportReport {
  std::string path;  // Absolute.
  std::uint64_t files = 0;
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;          // Size of all files.
  std::uint64_t bytes_written = 0;  // `bytes` without the files that are shared:
  std::uint64_t files_cloned = 0;   // Number of files shared by a reflink.
  std::uint64_t files_linked = 0;   // Number of files shared by a hard link.
  double plan_seconds = 0;
  double write_seconds = 0;
  double sync_seconds = 0;
  std::vector<std::string> notes;     // Sentences about content that the format cannot store.
  std::vector<std::string> warnings;  // Set only on rank 0.
};

// Exports a checkpoint to real files. All ranks call it together (it is collective). The files have
// the bytes that a mount shows (safetensors, hf, npy, zarr), or are read by torch (dcp, torch).
// Every stored byte is checked against its leaf hash, if it has one. `destination` appears complete
// and durable in one step, or not at all. A failed export removes what it wrote, unless other ranks
// may still be writing; in that case the message names what is left.
//
// `before`: an error that this rank found beforehand; `source` may then be null. Every rank must
// have opened the same checkpoint. The verdict is the same on every rank, and so is the report,
// except seconds and warnings.
//   kUnsupported        the format cannot hold some tensor; nothing was written
//   kAlreadyExists      `destination` exists, and options.replace is not set
//   kInvalidArgument    `destination` is not an export of this format, or the ranks' arguments,
//                       sources or rules differ
//   kResourceExhausted  too few bytes are free (also checked before anything is written)
//   kDataLoss           data are damaged or not stored; the message names them
//   kUnknown            the export is in place, but may not survive a power failure
// Ranks may be threads of one process, each with its own communicator and one call at a time. They
// may share `source`, which is only read.
// Memory: each rank makes the whole plan, about 100 bytes and the name for each file, independent
// of the data size; data pass through one 8 MiB block per rank.
Result<ExportReport> Export(FileSystem& fs, const Status& before,
                            std::shared_ptr<OpenedCheckpoint> source,
                            const std::string& destination, Communicator& comm,
                            const ExportOptions& options);
// The same export, to the filesystem that `destination` names (FileSystemFor).
Result<ExportReport> Export(const Status& before, std::shared_ptr<OpenedCheckpoint> source,
                            const std::string& destination, Communicator& comm,
                            const ExportOptions& options);

// The report as JSON (docs/cli.md), without its warnings. Callers include <nlohmann/json.hpp>.
nlohmann::ordered_json ExportJson(const ExportReport& report, ExportFormat format, int ranks);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_EXPORT_H_
