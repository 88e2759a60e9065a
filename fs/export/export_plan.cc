// SPDX-License-Identifier: Apache-2.0
// Plans an export. For a copy of a view of the mount: walks its directories and lists its files.
#include "fs/export/export_plan.h"

#include <array>

#include <fmt/core.h>

#include "base/coding.h"
#include "base/hash.h"
#include "fs/formats/torch_text.h"
#include "fs/views/dcp_files.h"
#include "fs/views/tied_names.h"
#include "fs/views/zarr_metadata.h"
#include "index/foreign/weight_files.h"
#include "index/read/saved_paths.h"
#include "index/records/safetensors_order.h"
#include "shard/npy.h"

namespace tensormount::fs {
namespace {

constexpr std::size_t kMostNamed = 8;

// Names of the formats, in the order of the enumeration, because ExportFormatName uses the
// enumerator as an index.
constexpr std::array<std::pair<ExportFormat, std::string_view>, 7> kNames = {{
    {ExportFormat::kSafetensors, "safetensors"},
    {ExportFormat::kHf, "hf"},
    {ExportFormat::kNpy, "npy"},
    {ExportFormat::kZarr, "zarr"},
    {ExportFormat::kDcp, "dcp"},
    {ExportFormat::kTorch, "torch"},
    {ExportFormat::kTorchDist, "torch_dist"},
}};
// Largest number of files in a plan: four million files take half a GB of memory. A hostile zarr
// array could have more.
constexpr std::size_t kMaxPlannedFiles = std::size_t{1} << 22;
// Number of tensors that an error lists.
constexpr std::uint32_t kNamed = 3;

// Whether the format supports the tensor's dtype. For hf this is also true if the rules drop the
// tensor, because the user wants it left out.
bool Holds(const ExportOptions& options, const TensorEntry& tensor) {
  const DType dtype = tensor.meta.dtype();
  switch (options.format) {
    case ExportFormat::kSafetensors:
      return CanStoreInSafetensors(tensor.meta);
    case ExportFormat::kHf:
      return CanStoreInSafetensors(tensor.meta) ||
             (options.hf.rules && options.hf.rules->Apply(tensor.meta.key()).empty());
    case ExportFormat::kNpy:
      return !InfoOf(dtype).npy_descr.empty();
    case ExportFormat::kZarr:
      return !ZarrType(dtype).empty();
    case ExportFormat::kDcp:
    case ExportFormat::kTorchDist:
    case ExportFormat::kTorch:
      return TorchHolds(tensor.meta);
  }
  return false;
}

// Fails if the format does not support the dtype of some tensor, because an export must not
// silently lack tensors.
Status CheckHolds(const ShownCheckpoint& shown, const ExportOptions& options) {
  std::uint64_t lost = 0;
  std::string named;
  const bool safetensors =
      options.format == ExportFormat::kSafetensors || options.format == ExportFormat::kHf;
  TENSORMOUNT_RETURN_IF_ERROR(shown.tensors.ForEachEntry(
      0, shown.tensors.count(), [&](std::uint32_t, const TensorEntry& tensor) -> Status {
        if (Holds(options, tensor)) return {};
        if (safetensors && !InfoOf(tensor.meta.dtype()).safetensors.empty()) {
          return Status(Code::kUnsupported,
                        fmt::format("{} cannot hold a tensor named {}: the name is reserved in "
                                    "safetensors files; rename it with --map RULES.json",
                                    ExportFormatName(options.format), tensor.meta.key()));
        }
        if (lost++ < kNamed) {
          named += fmt::format("{}{} ({})", named.empty() ? "" : ", ", tensor.meta.key(),
                               InfoOf(tensor.meta.dtype()).name);
        }
        return {};
      }));
  if (lost == 0) return {};
  return Status(Code::kUnsupported,
                fmt::format("{} does not support the dtypes of {} of the tensors: {}{}",
                            ExportFormatName(options.format), lost, named,
                            lost > kNamed ? fmt::format(" and {} more", lost - kNamed) : ""));
}

// Appends files and directories below a directory of a view, depth first. Subdirectories are walked
// after the listing has ended, so that one listing is open at a time.
Status Walk(const CheckpointView& view, const Node& folder, const std::string& prefix,
            ExportPlan& plan) {
  std::vector<Child> folders;
  bool too_many = false;
  TENSORMOUNT_RETURN_IF_ERROR(view.List(folder, 0, [&](const Child& child, std::uint64_t) {
    if (child.attributes.kind == FileKind::kDirectory) {
      folders.push_back(child);
    } else {
      if (plan.files.size() == kMaxPlannedFiles) {
        too_many = true;
        return false;
      }
      plan.bytes += child.attributes.size;
      plan.files.push_back({.name = prefix + child.name,
                            .size = child.attributes.size,
                            .node = child.node,
                            .made = nullptr,
                            .holes = {}});
    }
    return true;
  }));
  if (too_many) {
    return Status(Code::kResourceExhausted,
                  fmt::format("the export would create more than {} files", kMaxPlannedFiles));
  }
  for (const Child& below : folders) {
    plan.folders.push_back(prefix + below.name);
    TENSORMOUNT_RETURN_IF_ERROR(Walk(view, below.node, prefix + below.name + "/", plan));
  }
  return {};
}

// Whether the tensors fit in `room` bytes. Called before files are listed, because a tensor may
// have many millions of them.
// Only tensors are counted, so an export that is too large may pass; ExportDestination checks the
// exact sum.
Status CheckRoomFor(const ShownCheckpoint& shown, const ExportOptions& options,
                    std::uint64_t room) {
  std::uint64_t bytes = 0;
  TENSORMOUNT_RETURN_IF_ERROR(shown.tensors.ForEachEntry(
      0, shown.tensors.count(), [&](std::uint32_t, const TensorEntry& tensor) -> Status {
        const bool dropped = options.format == ExportFormat::kHf && options.hf.rules &&
                             options.hf.rules->Apply(tensor.meta.key()).empty();
        if (dropped) return {};
        if (__builtin_add_overflow(bytes, tensor.meta.bytes(), &bytes)) {
          bytes = std::numeric_limits<std::uint64_t>::max();
        }
        return {};
      }));
  if (bytes <= room) return {};
  // Whether a file can be cloned or linked is known only when it is tried, so these count too.
  const bool shareable =
      options.format == ExportFormat::kSafetensors || options.format == ExportFormat::kHf;
  return Status(
      Code::kResourceExhausted,
      fmt::format("the tensors need {} bytes, but only {} are free{}", bytes, room,
                  shareable ? "; tensors in files that could be cloned or hard-linked are counted "
                              "too, because this is not known before the export"
                            : ""));
}

Status PlanOfView(const CheckpointView& view, ExportFormat format, ExportPlan& plan) {
  // Views have the names of the formats, except model.safetensors.
  const std::string name = format == ExportFormat::kSafetensors
                               ? "model.safetensors"
                               : std::string(ExportFormatName(format));
  const Node top{.slot = 0, .view = kOwnView, .item = kRootItem};
  Result<Child> found = view.Lookup(top, name);
  if (!found.ok() && found.status().code() == Code::kNotFound &&
      format == ExportFormat::kSafetensors) {
    return Status(Code::kUnsupported,
                  "too many tensors for one safetensors file: its header would exceed 100,000,000 "
                  "bytes, the limit of the format; use --to hf, which writes several files");
  }
  if (!found.ok()) return found.status().WithContext("the view " + name);
  const Child& root = found.value();
  plan.folder = root.attributes.kind == FileKind::kDirectory;
  if (plan.folder) {
    TENSORMOUNT_RETURN_IF_ERROR(Walk(view, root.node, "", plan));
  } else {
    plan.bytes = root.attributes.size;
    plan.files.push_back({.name = "",
                          .size = root.attributes.size,
                          .node = root.node,
                          .made = nullptr,
                          .holes = {}});
  }
  if (format != ExportFormat::kSafetensors && format != ExportFormat::kHf) return {};
  for (ExportFile& file : plan.files) {
    if (IsWeightIndex(file.name) && file.size > kMaxWeightIndexBytes) {
      return Status(Code::kUnsupported,
                    fmt::format("{}: the index has {} bytes, at most {} are allowed", file.name,
                                file.size, kMaxWeightIndexBytes));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened, plan.Open(view, file));
    file.backed = opened->BackingPath().ok();
  }
  return {};
}

// Makes a text of the first few of many names, and the number of the others.
class NameSummary {
 public:
  void Add(std::string_view name) {
    if (count_++ < kMostNamed) text_ += fmt::format("{}{}", text_.empty() ? "" : ", ", name);
  }
  std::size_t count() const { return count_; }
  std::string Text() const {
    return count_ > kMostNamed ? fmt::format("{} and {} more", text_, count_ - kMostNamed) : text_;
  }

 private:
  std::size_t count_ = 0;
  std::string text_;
};

// Whether the export also contains this object part.
bool HasObject(const ObjectRecord& part, ExportFormat format, const CommonValues& common,
               const ExportPlan& plan) {
  switch (format) {
    case ExportFormat::kDcp:
    case ExportFormat::kTorchDist:
      return true;
    case ExportFormat::kHf:
      // The object is a file beside the parts.
      return part.grid.rank() == 0 && std::ranges::any_of(plan.files, [&](const ExportFile& file) {
               return file.name == part.key || part.key.ends_with("/" + file.name);
             });
    case ExportFormat::kTorch:
      // Plain values of adopted checkpoints are objects, too.
      return part.grid.rank() == 0 &&
             (common.contains(part.key) || plan.objects_as_values.contains(part.key));
    default:
      return false;
  }
}

// Plans a DCP directory with at most `files` data files.
Status PlanDcp(const CheckpointView& view, const ExportOptions& options, int files,
               ExportPlan& plan) {
  plan.folder = true;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      DcpFiles made,
      MakeDcpFiles(view.shown(), {.chunk_bytes = options.dcp_chunk_bytes,
                                  .files = static_cast<std::uint32_t>(files),
                                  .megatron = options.format == ExportFormat::kTorchDist}));
  for (DcpFile& file : made.files) {
    AddMadeFile(plan, view, std::move(file.name), std::move(file.segments), std::move(file.holes));
  }
  for (DcpNote& note : made.notes) {
    if (note.names.empty()) {
      plan.notes.push_back(std::move(note.text));
    } else {
      NoteUnsupportedValues(note.text, note.names, plan);
    }
  }
  return {};
}

// Whether a format stores Python values beside tensors.
bool IsTorchs(ExportFormat format) {
  return format == ExportFormat::kDcp || format == ExportFormat::kTorchDist ||
         format == ExportFormat::kTorch;
}

// transformers does not load a model without config.json. The name map may know how it is made.
void NoteMissingConfig(const CheckpointView& view, ExportPlan& plan) {
  const MadeConfig* const made = view.opened().made_config();
  if (made == nullptr || !made->text.empty()) return;
  const bool exists =
      std::ranges::any_of(plan.files, [](const auto& file) { return file.name == "config.json"; });
  if (exists) return;
  plan.notes.push_back(made->Missing());
}

// Adds notes on objects, values and names that the format cannot store. This is not an error,
// because an export is mainly for tensors.
Status NoteUnsupportedContent(const CheckpointView& view, ExportFormat format, ExportPlan& plan) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const CommonState common, view.opened().index().Common());
  const auto note = [&](const NameSummary& names, std::string_view what) {
    if (names.count() == 0) return;
    plan.notes.push_back(fmt::format("{} cannot store {} {}{} ({}): left out",
                                     ExportFormatName(format), names.count(), what,
                                     names.count() == 1 ? "" : "s", names.Text()));
  };
  NameSummary objects;
  for (const ObjectRecord& part : view.shown().objects.parts()) {
    if (!HasObject(part, format, common.values, plan)) objects.Add(part.key);
  }
  note(objects, "object");
  // Internal values, which record how a state dict was nested, are not reported.
  NameSummary values;
  if (!IsTorchs(format)) {
    for (const auto& [name, value] : common.values) {
      if (!SavedPaths::IsInternal(name)) values.Add(name);
    }
  }
  for (const auto& [rank, of] : common.ranks) {
    for (const auto& [name, value] : of) {
      if (!SavedPaths::IsInternal(name)) values.Add(fmt::format("{} of rank {}", name, rank));
    }
  }
  note(values, "common value");
  if (format == ExportFormat::kHf) NoteMissingConfig(view, plan);
  if (IsTorchs(format) || format == ExportFormat::kHf) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(const TiedNames tied, TiedNames::Make(view.shown()));
  NameSummary names;
  for (const auto& [number, further] : tied.all()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string key, view.shown().tensors.KeyAt(number));
    for (const std::string& name : further) names.Add(fmt::format("{} is {}", name, key));
  }
  if (names.count() > 0) {
    plan.notes.push_back(fmt::format("{} stores only one of the names of each tied tensor: {}",
                                     ExportFormatName(format), names.Text()));
  }
  return {};
}

}  // namespace

void NoteUnsupportedValues(std::string_view what, const std::vector<std::string>& names,
                           ExportPlan& plan) {
  if (names.empty()) return;
  NameSummary listed;
  for (const std::string& name : names) listed.Add(name);
  plan.notes.push_back(fmt::format("{}: {}", what, listed.Text()));
}

std::string_view ExportFormatName(ExportFormat format) {
  return kNames[static_cast<std::size_t>(format)].second;
}

std::optional<ExportFormat> ExportFormatOf(std::string_view name) {
  for (const auto& [format, known] : kNames) {
    if (known == name) return format;
  }
  return std::nullopt;
}

Result<std::shared_ptr<const VirtualFile>> ExportPlan::Open(const CheckpointView& view,
                                                            const ExportFile& file) const {
  if (file.made) return file.made;
  TENSORMOUNT_ASSIGN_OR_RETURN(auto opened, view.OpenFile(file.node));
  if (opened->size() == file.size) return opened;
  return Status(Code::kInternal,
                opened->label() + ": the file has another size than its directory lists");
}

Hash128 ExportPlan::Identity() const {
  // The hash is computed file by file, because the text for millions of files would take hundreds
  // of MB.
  Xxh3Stream stream;
  for (const ExportFile& file : files) {
    ByteWriter record;
    record.String(file.name);
    record.U64(file.size);
    record.U64(file.holes.size());
    stream.Update(record.bytes().data(), record.bytes().size());
  }
  return stream.Value();
}

Status CheckNotCancelled(const ExportOptions& options) {
  const bool cancelled = options.cancel != nullptr && *options.cancel;
  return cancelled ? Status(Code::kCancelled, "interrupted") : Status();
}

// Checks dtypes and free space first, because both checks read only the index.
Result<ExportPlan> MakeExportPlan(const CheckpointView& view, const ExportOptions& options,
                                  int dcp_files, std::uint64_t room) {
  ExportPlan plan;
  TENSORMOUNT_RETURN_IF_ERROR(CheckHolds(view.shown(), options));
  TENSORMOUNT_RETURN_IF_ERROR(CheckRoomFor(view.shown(), options, room));
  plan.tensors = view.shown().tensors.count();
  switch (options.format) {
    case ExportFormat::kDcp:
    case ExportFormat::kTorchDist:
      TENSORMOUNT_RETURN_IF_ERROR(PlanDcp(view, options, dcp_files, plan));
      break;
    case ExportFormat::kTorch:
      TENSORMOUNT_RETURN_IF_ERROR(PlanTorch(view, plan));
      break;
    default:
      TENSORMOUNT_RETURN_IF_ERROR(PlanOfView(view, options.format, plan));
  }
  TENSORMOUNT_RETURN_IF_ERROR(NoteUnsupportedContent(view, options.format, plan));
  return plan;
}

void AddMadeFile(ExportPlan& plan, const CheckpointView& view, std::string name,
                 FileSegments segments, std::vector<CrcHole> holes) {
  ExportFile file{.name = std::move(name),
                  .size = segments.size(),
                  .node = {},
                  .made = nullptr,
                  .holes = std::move(holes)};
  file.made = view.Serve(std::move(segments), file.name.empty() ? "export" : file.name, Node{});
  plan.bytes += file.size;
  plan.files.push_back(std::move(file));
}

}  // namespace tensormount::fs
