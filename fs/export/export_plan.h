// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_EXPORT_EXPORT_PLAN_H_
#define TENSORMOUNT_FS_EXPORT_EXPORT_PLAN_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "fs/export/zip_writer.h"
#include "fs/node.h"
#include "fs/views/checkpoint_view.h"
#include "fs/views/virtual_file.h"

// What an export consists of: files, each a virtual file of the checkpoint. Those that a view shows
// are the view's; those of torch are made here of the same segments.

namespace tensormount::fs {

enum class ExportFormat { kSafetensors, kHf, kNpy, kZarr, kDcp, kTorch };
// "hf"
std::string_view ExportFormatName(ExportFormat format);
std::optional<ExportFormat> ExportFormatOf(std::string_view name);

// One file of an export: what of the checkpoint it is made of, and where it goes.
struct ExportFile {
  std::string name;  // Below the folder; empty: the export is this one file.
  std::uint64_t size = 0;
  Node node;                                // In the view, where `made` is null.
  std::shared_ptr<const VirtualFile> made;  // Null: the view opens it.
  std::vector<CrcHole> holes;               // By place.
  bool backed = false;                      // A stored file is byte for byte this one.
};

// All that an export will write, worked out before anything is: every rank makes the plan for
// itself, and ranks compare Identity() before they begin.
struct ExportPlan {
  bool folder = false;               // Otherwise one file.
  std::vector<std::string> folders;  // Below it, parents first.
  std::vector<ExportFile> files;
  std::uint64_t bytes = 0;  // Of all files.
  std::uint64_t tensors = 0;
  std::vector<std::string> notes;  // What the format has no place for.

  Result<std::shared_ptr<const VirtualFile>> Open(const CheckpointView& view,
                                                  const ExportFile& file) const;
  // Equal where the files' names and sizes are.
  Hash128 Identity() const;
};

struct PlanOptions {
  ExportFormat format = ExportFormat::kSafetensors;
  HfOptions hf;  // As the view was made with.
  // DCP: into how many data files, and how large a stored piece of a tensor may be.
  int dcp_files = 1;
  std::uint64_t dcp_piece_bytes = std::uint64_t{512} << 20;
  // Bytes that there is room for.
  std::uint64_t room = std::numeric_limits<std::uint64_t>::max();
};

// The same for the same checkpoint and options, on every rank. Reads no data.
// kUnsupported names what the format cannot hold: "npy cannot hold 2 of the tensors: a (f4), b
// (f4)". kResourceExhausted: the tensors alone take more than the room, or the view has more files
// than a plan lists; a shape costs whoever writes it nothing.
Result<ExportPlan> MakeExportPlan(const CheckpointView& view, const PlanOptions& options);

// ---- For the makers of formats -----------------------------------------------------------------

// A file of text and stored bytes, put together in the order of its bytes. Text is kept once,
// however often it is used: a million zip headers differ in few bytes.
class FileBuilder {
 public:
  // Where kept text stands.
  struct Text {
    std::uint64_t skip = 0;
    std::uint64_t length = 0;
  };
  std::uint64_t size() const { return size_; }
  Text Keep(std::string_view text);
  void Add(Text kept);
  void Add(std::string_view text) { Add(Keep(text)); }
  // Bytes [skip, skip + length) of the tensor of that ordinal in the index.
  void AddTensor(std::uint32_t ordinal, std::uint64_t skip, std::uint64_t length);
  void AddObject(std::uint32_t part, std::uint64_t length);
  // Once.
  FileSegments Finish();

 private:
  void Append(FileSegments::Segment::Kind kind, std::uint32_t ordinal, std::uint64_t length,
              std::uint64_t skip);
  std::uint64_t size_ = 0;
  std::string text_;
  std::vector<FileSegments::Segment> segments_;
};

// Adds a file to a plan.
void AddMadeFile(ExportPlan& plan, const CheckpointView& view, std::string name,
                 FileSegments segments, std::vector<CrcHole> holes);

Status PlanDcp(const CheckpointView& view, const PlanOptions& options, ExportPlan& plan);
Status PlanTorch(const CheckpointView& view, ExportPlan& plan);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_EXPORT_EXPORT_PLAN_H_
