// SPDX-License-Identifier: Apache-2.0
// Reads stored bytes by windows of whole leaves, each first compared with the journal's hashes. The
// readers of index/read do not apply: they take hashes from the manifests of an opened checkpoint.
#include "fs/save/staged_reader.h"

#include <algorithm>
#include <cstring>

#include "shard/box_access.h"
#include "shard/copy_plan.h"
#include "shard/leaf_hash.h"

namespace tensormount::fs {
namespace {

// 64 leaves of 64 KiB: 4 MiB a window, 16 MiB in all.
constexpr std::uint64_t kWindowLeaves = 64;
constexpr std::size_t kMaxOpenFiles = 64;

}  // namespace

StagedReader::StagedReader(FileSystem& fs, const std::string& staging_directory,
                           const std::vector<Journal>& journals)
    : fs_(fs), directory_(staging_directory), journals_(journals) {}

Result<File*> StagedReader::Open(std::uint32_t journal, std::uint32_t file) {
  const auto found = files_.find({journal, file});
  if (found != files_.end()) return found->second.get();
  // This happens rarely, because a tensor comes from a few files.
  if (files_.size() >= kMaxOpenFiles) files_.clear();
  const std::string path = JoinPath(directory_, journals_[journal].files[file]);
  Result<std::unique_ptr<File>> opened = fs_.OpenRead(path);
  if (opened.status().code() == Code::kNotFound) {
    return Status(Code::kDataLoss, path + ": the file is missing, although a journal refers to it");
  }
  if (!opened.ok()) return opened.status();
  return (files_[{journal, file}] = std::move(opened).value()).get();
}

// Returns a loaded window that contains byte `at`, or loads one with as many of `size` bytes as
// fit.
Result<StagedReader::Window*> StagedReader::Load(const StagedRun& run, std::uint64_t at,
                                                 std::size_t size) {
  const StagedExtent& extent = run.extent();
  for (Window& window : windows_) {
    if (window.leaves != &extent.leaves || at < window.begin ||
        at >= window.begin + window.data.size()) {
      continue;
    }
    window.used = ++clock_;
    return &window;
  }
  Window& window =
      *std::min_element(windows_.begin(), windows_.end(),
                        [](const Window& a, const Window& b) { return a.used < b.used; });
  // The window stays without leaves until its bytes are verified, so that no call uses unverified
  // bytes.
  window.leaves = nullptr;
  const std::uint64_t first = at / kLeafBytes;
  const std::uint64_t count = std::min(LeafCount(at + size) - first, kWindowLeaves);
  window.begin = first * kLeafBytes;
  const std::uint64_t end = std::min(extent.bytes(), (first + count) * kLeafBytes);
  window.data.resize(static_cast<std::size_t>(end - window.begin));
  TENSORMOUNT_ASSIGN_OR_RETURN(File * file, Open(run.journal, extent.file));
  TENSORMOUNT_RETURN_IF_ERROR(
      file->ReadExactAt(extent.offset + window.begin, window.data.data(), window.data.size()));
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::size_t from = static_cast<std::size_t>(i * kLeafBytes);
    const std::size_t n = std::min<std::size_t>(kLeafBytes, window.data.size() - from);
    if (Xxh3(window.data.data() + from, n) != extent.leaves[first + i]) {
      return Status(Code::kDataLoss, file->path() + ": checksum mismatch at byte " +
                                         std::to_string(extent.offset + window.begin + from));
    }
  }
  window.leaves = &extent.leaves;
  window.used = ++clock_;
  return &window;
}

Status StagedReader::Read(const StagedRun& run, std::uint64_t at, std::size_t size,
                          std::byte* out) {
  while (size > 0) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const Window* window, Load(run, at, size));
    const auto from = static_cast<std::size_t>(at - window->begin);
    const std::size_t n = std::min(size, window->data.size() - from);
    std::memcpy(out, window->data.data() + from, n);
    out += n;
    at += n;
    size -= n;
  }
  return Status();
}

Status StagedReader::ReadBox(const StagedRun& run, const Box& bytes, std::byte* out) {
  const PlacedBox to{bytes, 0, PackedStrides(bytes.extent())};
  for (const PlacedBox& from : PlacePacked(run.bytes, run.at)) {
    const Box part = Intersect(from.box, bytes);
    if (part.empty()) continue;
    Status status;
    PlanCopy(part, from, to)
        .ForEachRun([&](std::int64_t src, std::int64_t dst, std::uint64_t size) {
          if (!status.ok()) return;
          status =
              Read(run, static_cast<std::uint64_t>(src), static_cast<std::size_t>(size), out + dst);
        });
    TENSORMOUNT_RETURN_IF_ERROR(status);
  }
  return Status();
}

}  // namespace tensormount::fs
