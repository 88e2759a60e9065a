// SPDX-License-Identifier: Apache-2.0
// Exports into buckets: a stream for each object.
#include "fs/export/bucket_export.h"

#include <algorithm>
#include <optional>

#include "base/cancel_scope.h"

namespace tensormount::fs {
namespace {

constexpr std::size_t kSendBlock = std::size_t{8} << 20;

}  // namespace

bool BucketExport::IsLast(const ExportFile& file) const {
  return plan_.folder && file.name.find('/') == std::string::npos &&
         (file.name.ends_with(".json") || file.name.starts_with(".z"));
}

std::string BucketExport::PathOf(const ExportFile& file) const {
  return file.name.empty() ? destination_ : JoinPath(destination_, file.name);
}

Status BucketExport::Prepare() const {
  const bool holes = std::any_of(plan_.files.begin(), plan_.files.end(),
                                 [](const ExportFile& file) { return !file.holes.empty(); });
  if (holes) {
    return {Code::kUnsupported,
            destination_ + ": files of the format " +
                std::string(ExportFormatName(options_.format)) +
                " are not written from begin to end, as objects of a bucket are; export to a "
                "directory, and copy it with the tools of your storage"};
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const ObjectListing below, writer_.ListBelow(destination_));
  if (!below.objects.empty()) {
    return {Code::kAlreadyExists, destination_ + ": has objects (" + below.objects.front().path +
                                      "); a directory in a bucket is never replaced"};
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ObjectInfo> there, writer_.InfoOf(destination_));
  if (there && !(options_.replace && !plan_.folder)) {
    return {Code::kAlreadyExists, destination_ + ": exists already"};
  }
  return {};
}

Status BucketExport::Put() {
  std::size_t number = 0;
  for (const ExportFile& file : plan_.files) {
    if (IsLast(file)) continue;
    const bool mine =
        number++ % static_cast<std::size_t>(ranks_) == static_cast<std::size_t>(rank_);
    if (mine) TENSORMOUNT_RETURN_IF_ERROR(Send(file));
  }
  return {};
}

Status BucketExport::PutLast() {
  for (const ExportFile& file : plan_.files) {
    if (IsLast(file)) TENSORMOUNT_RETURN_IF_ERROR(Send(file));
  }
  return {};
}

Status BucketExport::Send(const ExportFile& file) {
  const CancelScope scope(options_.cancel);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto source, plan_.Open(view_, file));
  const std::string path = PathOf(file);
  PutOptions options;
  options.if_absent = !options_.replace;
  begun_.push_back(path);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto upload, writer_.Upload(path, file.size, options));
  buffer_.resize(std::min<std::uint64_t>(kSendBlock, std::max<std::uint64_t>(file.size, 1)));
  for (std::uint64_t at = 0; at < file.size;) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckNotCancelled(options_));
    const auto n =
        static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size(), file.size - at));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got,
                                 source->Read(at, buffer_.data(), n, nullptr));
    if (got != n) return {Code::kDataLoss, source->label() + ": the file became shorter"};
    TENSORMOUNT_RETURN_IF_ERROR(upload->Add(buffer_.data(), n));
    at += n;
    bytes_written_ += n;
    if (options_.progress != nullptr) *options_.progress += n;
  }
  return upload->Finish().status();
}

Status BucketExport::Discard() {
  // An object that was there before stays if it was not replaced yet, and the new one otherwise.
  if (!options_.replace) {
    std::vector<ObjectInfo> sent;
    for (const std::string& path : begun_) sent.push_back({.path = path});
    TENSORMOUNT_RETURN_IF_ERROR(writer_.Delete(sent));
  }
  const auto unfinished = writer_.Unfinished(destination_);
  if (!unfinished.ok()) return {};  // A server that does not tell.
  for (const UnfinishedUpload& upload : unfinished.value()) {
    if (std::find(begun_.begin(), begun_.end(), upload.path) == begun_.end()) continue;
    TENSORMOUNT_RETURN_IF_ERROR(writer_.Abort(upload));
  }
  return {};
}

}  // namespace tensormount::fs
