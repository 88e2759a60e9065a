// SPDX-License-Identifier: Apache-2.0
// Keeps the table rows of chunks between the reading of manifests and the writing of tensors. Works
// like the runs of an external sort; a table in memory has the position of each segment, so no
// merge is needed.
#include "index/records/row_spool.h"

#include <algorithm>
#include <utility>

namespace tensormount {
namespace {

// Segments of a run are collected until a write has this many bytes.
constexpr std::size_t kSpoolWriteBytes = std::size_t{1} << 20;

}  // namespace

Status RowSpool::Append(std::uint32_t tensor, const ExtentTable& rows,
                        std::span<const std::uint32_t> file_map, std::uint32_t manifest) {
  if (tensor >= tensors_.size()) tensors_.resize(std::size_t{tensor} + 1);
  Tensor& to = tensors_[tensor];
  if (to.held.size() == 0 && to.spilled.empty()) to.held = ExtentTable(rows.rank());
  const std::size_t before = to.held.packed().size();
  TENSORMOUNT_RETURN_IF_ERROR(to.held.AppendMapped(rows, file_map, manifest));
  held_bytes_ += to.held.packed().size() - before;
  return Status();
}

Status RowSpool::Spill(FileSystem& fs, const std::string& path,
                       std::span<const std::uint32_t> order) {
  if (file_ == nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs.CreateExclusive(path));
    TENSORMOUNT_RETURN_IF_ERROR(fs.RemoveFile(path));
    file_ = std::move(file);
  }
  std::string run;
  const auto write = [&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(file_->WriteAt(file_bytes_, run.data(), run.size()));
    file_bytes_ += run.size();
    run.clear();
    return Status();
  };
  for (const std::uint32_t number : order) {
    if (number >= tensors_.size()) continue;
    Tensor& tensor = tensors_[number];
    const std::string_view rows = tensor.held.packed();
    if (rows.empty()) continue;
    if (!run.empty() && run.size() + rows.size() > kSpoolWriteBytes) {
      TENSORMOUNT_RETURN_IF_ERROR(write());
    }
    tensor.spilled.push_back({file_bytes_ + run.size(), rows.size(), tensor.held.wide()});
    run.append(rows);
    held_bytes_ -= rows.size();
    tensor.held.Release();
  }
  return run.empty() ? Status() : write();
}

Result<ExtentTable> RowSpool::Take(std::uint32_t tensor) {
  if (tensor >= tensors_.size()) return ExtentTable(0);
  Tensor& from = tensors_[tensor];
  held_bytes_ -= from.held.packed().size();
  if (from.spilled.empty()) return std::exchange(from.held, ExtentTable(0));
  const int rank = from.held.rank();
  bool wide = from.held.wide();
  std::uint64_t bytes = from.held.packed().size();
  for (const Segment& segment : from.spilled) {
    wide = wide || segment.wide;
    bytes += segment.bytes;
  }
  ExtentTable all(rank, wide);
  all.Reserve(bytes / all.row_bytes() + 1);
  for (const Segment& segment : from.spilled) {
    std::string rows(segment.bytes, '\0');
    TENSORMOUNT_RETURN_IF_ERROR(file_->ReadExactAt(segment.offset, rows.data(), rows.size()));
    TENSORMOUNT_ASSIGN_OR_RETURN(const ExtentTable part,
                                 ExtentTable::FromPacked(rank, std::move(rows), segment.wide));
    TENSORMOUNT_RETURN_IF_ERROR(all.AppendAll(part));
  }
  TENSORMOUNT_RETURN_IF_ERROR(all.AppendAll(from.held));
  from.held.Release();
  std::vector<Segment>().swap(from.spilled);
  return all;
}

}  // namespace tensormount
