// SPDX-License-Identifier: Apache-2.0
// The value counts of a checkpoint, which the coordinator's manifest has and the index lacks
// (docs/format.md, "Value counts").
#include "index/read/value_totals.h"

#include "index/read/checkpoint.h"
#include "index/read/rebuild.h"
#include "index/records/leaf_section.h"
#include "index/records/manifest.h"
#include "index/records/name_binding.h"
#include "index/records/store_paths.h"

namespace tensormount {

Result<std::shared_ptr<const ValueTotals::List>> ValueTotals::Get(FileSystem& fs,
                                                                  const std::string& directory,
                                                                  const CommitRecord& commit,
                                                                  std::size_t tensors) {
  const std::lock_guard lock(mutex_);
  if (list_) return list_;
  auto list = std::make_shared<List>();
  if (commit.Find(kCoordinatorManifest) != nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                                 OpenListedFile(fs, directory, std::string(kCoordinatorManifest)));
    TENSORMOUNT_ASSIGN_OR_RETURN(std::optional<List> totals, ReadManifestTotals(*file));
    if (totals && totals->size() != tensors) {
      return Status(Code::kDataLoss, std::string(kCoordinatorManifest) + ": has value counts of " +
                                         std::to_string(totals->size()) + " tensors, " +
                                         std::to_string(tensors) + " expected");
    }
    if (totals) *list = std::move(*totals);
  }
  list_ = std::move(list);
  return list_;
}

Result<std::optional<std::uint64_t>> CountNonfinite(FileSystem& fs, const std::string& directory) {
  const Result<std::unique_ptr<File>> file =
      OpenListedFile(fs, directory, std::string(kCoordinatorManifest));
  // An adopted checkpoint has no such manifest.
  if (file.status().code() == Code::kNotFound &&
      fs.Exists(JoinPath(directory, store_paths::kCommitFile))) {
    return std::optional<std::uint64_t>();
  }
  TENSORMOUNT_RETURN_IF_ERROR(file.status());
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<ValueTotals::List> totals,
                               ReadManifestTotals(*file.value()));
  if (!totals) return std::optional<std::uint64_t>();
  std::uint64_t sum = 0;
  for (const std::optional<ValueCounts>& counts : *totals) {
    if (!counts) return std::optional<std::uint64_t>();
    sum += counts->nonfinite();
  }
  return std::optional(sum);
}

Result<std::optional<ValueCounts>> OpenedCheckpoint::CountsOf(const TensorEntry& tensor) const {
  if (binding_) {
    const std::optional<std::uint32_t> whole = binding_->WholeSource(tensor.ordinal);
    if (!whole) return std::optional<ValueCounts>();
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry source, source_->index().At(*whole));
    return source_->CountsOf(source);
  }
  if (!has_commit_) return std::optional<ValueCounts>();
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const std::shared_ptr<const ValueTotals::List> all,
      totals_->Get(*fs_, *pinned_, commit_.record, index_->tensor_count()));
  if (tensor.ordinal >= all->size()) return std::optional<ValueCounts>();
  const std::optional<ValueCounts>& counts = (*all)[tensor.ordinal];
  // The counts come from a file that only its own hash protects here.
  const std::uint64_t values = ValuesIn(tensor.meta.dtype(), tensor.meta.elements());
  if (!counts || !CanCount(tensor.meta.dtype()) || !CountsFit(*counts, values)) {
    return std::optional<ValueCounts>();
  }
  return counts;
}

Result<std::optional<ValueCounts>> OpenedCheckpoint::CountsOf(const TensorEntry& tensor,
                                                              const ChunkRecord& chunk) const {
  const bool stored = has_commit_ && !binding_ && chunk.has_hash && chunk.strides.rank() == 0;
  if (!stored || chunk.manifest >= index_->manifests().size()) return std::optional<ValueCounts>();
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                               OpenListedFile(*fs_, *pinned_, index_->manifests()[chunk.manifest]));
  return ReadManifestCounts(*file, tensor.meta, chunk);
}

}  // namespace tensormount
