// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_EXPORT_EXPORT_PLAN_H_
#define TENSORMOUNT_FS_EXPORT_EXPORT_PLAN_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/name_map.h"
#include "tensormount/status.h"

#include "fs/formats/file_builder.h"
#include "fs/formats/zip_writer.h"
#include "fs/node.h"
#include "fs/views/checkpoint_view.h"
#include "fs/views/hf_options.h"
#include "fs/views/virtual_file.h"

// The plan of an export: a list of files. Each is a file of a view, or for dcp and torch a virtual
// file that is built from segments like those of views.
// The plan follows from the index, the options and the number of ranks alone. So every rank
// computes it, which costs less than sending it, and ranks compare Identity() to prove that their
// plans agree.

namespace tensormount::fs {

// The first four are copies of views of a mount. dcp (torch.distributed.checkpoint) has the files
// of the view dcp/ with the CRCs of their data, torch_dist (Megatron-Core) is dcp with two more
// files, and torch (torch.save) exists only as an export.
enum class ExportFormat { kSafetensors, kHf, kNpy, kZarr, kDcp, kTorch, kTorchDist };
// Name of a format, such as "hf".
std::string_view ExportFormatName(ExportFormat format);
std::optional<ExportFormat> ExportFormatOf(std::string_view name);

struct ExportOptions {
  ExportFormat format = ExportFormat::kSafetensors;
  // Replace an earlier export of the same format; other files are never replaced.
  bool replace = false;
  NameMap map;  // Empty: tensors are as stored.
  HfOptions hf;
  // For dcp: largest number of bytes of a tensor in one item. Readers load an item as a whole, and
  // smaller items spread more evenly over the files.
  std::uint64_t dcp_chunk_bytes = std::uint64_t{512} << 20;
  Timeouts timeouts;
  // Number of bytes that this process has finished.
  std::atomic<std::uint64_t>* progress = nullptr;
  // If not null, setting this to true cancels the export. It is checked after each block and before
  // the rename. When one rank sees it, all ranks return kCancelled and the written files are
  // removed.
  const std::atomic<bool>* cancel = nullptr;
};

// kCancelled if *options.cancel is true.
Status CheckNotCancelled(const ExportOptions& options);

// One file of an export, with its name and content.
// The content is either a node of the view, opened when the file is written, or `made`, a virtual
// file that the plan holds. Millions of small files thus cost a node each and no open file.
struct ExportFile {
  std::string name;  // Below the destination directory; empty: the export is this one file.
  std::uint64_t size = 0;
  Node node;  // The file in the view, if `made` is null.
  // The file, if it was built from segments; null if the view opens it.
  std::shared_ptr<const VirtualFile> made;
  std::vector<CrcHole> holes;  // Sorted by offset.
  bool backed = false;         // A stored file has the same bytes (found for safetensors and hf).
};

// All files and directories that an export will write. Every rank makes the plan, and ranks compare
// Identity() before they begin.
// Not changed after it was made. ExportWriter and ExportDestination refer to it.
struct ExportPlan {
  bool folder = false;               // Whether the export is a directory, not one file.
  std::vector<std::string> folders;  // Paths below the destination, parents first.
  std::vector<ExportFile> files;
  std::uint64_t bytes = 0;  // Size of all files.
  std::uint64_t tensors = 0;
  // Keys of objects that the export stores as plain values.
  std::set<std::string, std::less<>> objects_as_values;
  std::vector<std::string> notes;  // Sentences about content that the format cannot store.

  // Opens a file of the plan. kInternal if its size is not the planned size, because ranks would
  // overwrite each other's ranges.
  Result<std::shared_ptr<const VirtualFile>> Open(const CheckpointView& view,
                                                  const ExportFile& file) const;
  // Hash of the names, sizes and order of the files, and of their numbers of holes. It does not
  // cover data, because all ranks opened the same path.
  Hash128 Identity() const;
};

// Makes the plan, which is the same on every rank for the same checkpoint and options.
// kUnsupported: the format does not support the dtypes of some tensors, or has a limit or a
// conflict of names that does not allow this export; the message names it.
// kResourceExhausted: the tensors alone exceed `room`, or the view has more files than a plan may
// list (a tiny checkpoint can declare a huge shape).
// `options`: the options with which `view` was made. `dcp_files`: number of DCP data files at most,
// one for each rank. `room`: number of free bytes at the destination.
Result<ExportPlan> MakeExportPlan(const CheckpointView& view, const ExportOptions& options,
                                  int dcp_files, std::uint64_t room);

// ---- For planners of formats -------------------------------------------------------------------

// Adds a note that lists the names of values that a format cannot store; no note if there are no
// names. `what`: the beginning of the note, such as "DCP cannot store the values".
void NoteUnsupportedValues(std::string_view what, const std::vector<std::string>& names,
                           ExportPlan& plan);

// Adds a file built from segments to a plan. The file keeps `view` open.
void AddMadeFile(ExportPlan& plan, const CheckpointView& view, std::string name,
                 FileSegments segments, std::vector<CrcHole> holes);

// Plans one torch.save file with a state dict, nested as the checkpoint records it (SavedPaths in
// index/read/saved_paths.h).
Status PlanTorch(const CheckpointView& view, ExportPlan& plan);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_EXPORT_PLAN_H_
