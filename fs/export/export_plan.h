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
#include "tensormount/key_map.h"
#include "tensormount/status.h"

#include "fs/formats/file_builder.h"
#include "fs/formats/zip_writer.h"
#include "fs/node.h"
#include "fs/views/checkpoint_view.h"
#include "fs/views/hf_options.h"
#include "fs/views/virtual_file.h"

// What an export consists of: files, each a virtual file of the checkpoint. Those that a view shows
// are the view's; those of torch are made here of the same segments.
// Why all ranks make the whole plan: it follows from the index and the options alone, so making it
// costs less than sending it. What it says of a file must be the same on every rank; that is
// compared by Identity().

namespace tensormount::fs {

// The first four are views of a mount; dcp (torch.distributed.checkpoint) and torch (torch.save)
// exist as exports only, since their files hold CRCs of the data, which a mount would have to read
// everything for.
enum class ExportFormat { kSafetensors, kHf, kNpy, kZarr, kDcp, kTorch };
// "hf"
std::string_view ExportFormatName(ExportFormat format);
std::optional<ExportFormat> ExportFormatOf(std::string_view name);

struct ExportOptions {
  ExportFormat format = ExportFormat::kSafetensors;
  bool replace = false;  // An earlier export of the same format; nothing else is ever replaced.
  std::shared_ptr<const KeyMap> map;  // Other names for keys; null: none.
  HfOptions hf;
  // Readers of DCP load an item whole; smaller ones also share the work between files.
  std::uint64_t dcp_chunk_bytes = std::uint64_t{512} << 20;  // Most bytes of a tensor in one item.
  Timeouts timeouts;
  std::atomic<std::uint64_t>* progress = nullptr;  // Bytes that this process is done with.
  // Not null: set to end the export, looked at after each block and before the rename. Where one
  // rank sees it set all end with kCancelled, and what was written is removed.
  const std::atomic<bool>* cancel = nullptr;
};

// kCancelled "interrupted" once options.cancel is set.
Status CheckNotCancelled(const ExportOptions& options);

// One file of an export: what of the checkpoint it is made of, and where it goes.
// Either a node of the view, opened when somebody writes it, or `made`, a virtual file that the
// plan holds: millions of small files cost a node each and no open file.
struct ExportFile {
  std::string name;  // Below the folder; empty: the export is this one file.
  std::uint64_t size = 0;
  Node node;                                // In the view, where `made` is null.
  std::shared_ptr<const VirtualFile> made;  // Null: the view opens it.
  std::vector<CrcHole> holes;               // By offset.
  bool backed = false;                      // A stored file is byte for byte this one.
};

// All that an export will write, worked out before anything is: every rank makes the plan for
// itself, and ranks compare Identity() before they begin.
// Not changed once it is made. ExportWriter and ExportDestination refer to it.
struct ExportPlan {
  bool folder = false;               // Otherwise one file.
  std::vector<std::string> folders;  // Below it, parents first.
  std::vector<ExportFile> files;
  std::uint64_t bytes = 0;  // Of all files.
  std::uint64_t tensors = 0;
  // Objects that stand among the plain values of the format.
  std::set<std::string, std::less<>> objects_as_values;
  std::vector<std::string> notes;  // What the format has no place for.

  // kInternal where it has not the size of the plan: ranks would write over each other's ranges.
  Result<std::shared_ptr<const VirtualFile>> Open(const CheckpointView& view,
                                                  const ExportFile& file) const;
  // Equal where the files' names and sizes are.
  // Order counts too. Data do not: sources that differ there, under the same names and sizes, were
  // opened from one path by all ranks.
  Hash128 Identity() const;
};

// The same for the same checkpoint and options, on every rank. Reads no data.
// kUnsupported names what the format cannot hold: "npy cannot hold 2 of the tensors: a (f4), b
// (f4)". kResourceExhausted: the tensors alone take more than the room, or the view has more files
// than a plan lists; a shape costs whoever writes it nothing.
// `options`: those that `view` was made with. `dcp_files`: into how many data files (DCP), the
// number of ranks. `room`: bytes that there is room for.
Result<ExportPlan> MakeExportPlan(const CheckpointView& view, const ExportOptions& options,
                                  int dcp_files, std::uint64_t room);

// ---- For the makers of formats -----------------------------------------------------------------

// Notes the names of values that a format cannot hold; none is nothing. `what`: how the note
// begins, "dcp cannot hold the values".
void NoteLost(std::string_view what, const std::vector<std::string>& names, ExportPlan& plan);

// Adds a file to a plan.
// The file keeps `view` open.
void AddMadeFile(ExportPlan& plan, const CheckpointView& view, std::string name,
                 FileSegments segments, std::vector<CrcHole> holes);

// `files`: how many data files, at least one; about equally large. Common values of a checkpoint
// become items of bytes, as torch saves values that are no tensors.
Status PlanDcp(const CheckpointView& view, const ExportOptions& options, int files,
               ExportPlan& plan);
// One file, a state dict, nested where the checkpoint says how (kPlannerData).
Status PlanTorch(const CheckpointView& view, ExportPlan& plan);

// Of number `n` of the shown tensors, which is shown as `shown_key`.
Result<std::string> StoredTensorKey(const ShownCheckpoint& shown, std::uint32_t n,
                                    std::string_view shown_key);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_EXPORT_PLAN_H_
