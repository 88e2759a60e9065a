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

// Numbers are those of all ranks. Seconds are wall-clock time of this rank: the steps end on all
// ranks together.
struct ExportReport {
  std::string path;  // Absolute.
  std::uint64_t files = 0;
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;          // Of all files.
  std::uint64_t bytes_written = 0;  // Less what is shared with the source's files:
  std::uint64_t files_cloned = 0;   // reflinks,
  std::uint64_t files_linked = 0;   // and hard links to sealed files.
  double plan_seconds = 0;
  double write_seconds = 0;
  double sync_seconds = 0;
  std::vector<std::string> notes;     // What the format has no place for.
  std::vector<std::string> warnings;  // Rank 0's.
};

// Real files out of a checkpoint, made by all ranks together; collective. They are, byte for byte,
// those that a mount shows (safetensors, hf, npy, zarr), or those that torch reads (dcp, torch).
// Every byte is read once and checked against its leaf hash, where it has one. `destination`
// appears whole and durable in one step, or not at all; what a failed export wrote is removed,
// unless ranks could not be reached: then the message names it.
//
// `before`: what this rank found wrong beforehand; `source` may be null then. Every rank opened the
// same checkpoint. Same verdict and report on every rank.
//   kUnsupported        the format cannot hold some tensor; nothing was written
//   kAlreadyExists      `destination` is there, and options.replace is not set
//   kInvalidArgument    what is there is no export of this format; keys or rules do not fit
//   kResourceExhausted  no room; looked at before anything is written, too
//   kDataLoss           names what is damaged or not stored
// Thread-safe in the sense that ranks may be threads of one process, each with its communicator;
// one call a rank. `source` is shared by threads of one process, and read only.
// Costs: the plan is made on every rank, in memory that grows with the number of files (100 bytes
// and the name of each) and not with data; data pass through one block of 8 MiB a rank.
Result<ExportReport> Export(FileSystem& fs, const Status& before,
                            std::shared_ptr<OpenedCheckpoint> source,
                            const std::string& destination, Communicator& comm,
                            const ExportOptions& options);

// The report for programs (docs/cli.md), without its warnings. Include <nlohmann/json.hpp> where it
// is used.
nlohmann::ordered_json ExportJson(const ExportReport& report, ExportFormat format, int ranks);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_EXPORT_H_
