// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_HF_VIEW_H_
#define TENSORMOUNT_FS_VIEWS_HF_VIEW_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "fs/views/hf_parts.h"
#include "fs/views/shown_checkpoint.h"
#include "fs/views/view.h"
#include "index/records/lru_cache.h"

namespace tensormount::fs {

// hf/: the checkpoint as a Hugging Face model directory: safetensors parts of a chosen size with
// their index (or one model.safetensors), and objects with the names of files that belong to a
// model. The parts are computed at the first access, because that walks over all tensors and most
// mounts never need it.
//
// Items: 1 the directory, 2 the index, from 3 on the carried files by name, then the parts.
// Numbers follow from the checkpoint and the options.
// Carried files are saved objects with the names of files that from_pretrained looks for
// (configuration and tokenizer), and the files of HfOptions::beside. Only lookups of other names that begin with "model" may compute the
// parts, because transformers probes many files that do not exist.
class HfView : public View {
 public:
  // kInvalidArgument if the rules give shown keys invalid or equal names (HfParts::CheckRules).
  // `whole` is the view model.safetensors, which hf/ shows if its own file would be the same; it
  // must outlive this object.
  static Result<std::unique_ptr<const View>> Make(const ShownCheckpoint& shown, const View& whole,
                                                  const HfOptions& options);

  std::string_view name() const override { return "hf"; }
  // Stat(kRoot) returns kNotFound if the checkpoint has no tensors.
  Result<ViewNode> Stat(std::uint64_t item) const override;
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  std::string PathOf(std::uint64_t item) const override;
  Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const override;

 private:
  static constexpr std::uint64_t kIndexItem = 2;
  static constexpr std::uint64_t kFirstCarried = 3;
  // Largest number of bytes of cached segments of parts. They are cached because readers of a model
  // directory open the same part many times.
  static constexpr std::uint64_t kKeptBytes = 12 << 20;

  HfView(const ShownCheckpoint& shown, const View& whole, const HfOptions& options)
      : shown_(shown), whole_(whole), options_(options), part_files_(kKeptBytes) {}
  void FindCarried();
  // A file beside the tensors: an object, or bytes.
  struct Carried {
    std::string name;
    std::uint32_t part = 0;  // Number in ShownObjects::parts(), if there are no bytes.
    std::shared_ptr<const std::string> bytes;
  };
  const Carried& CarriedAt(std::uint64_t item) const { return carried_[item - kFirstCarried]; }
  const ObjectRecord& ObjectOf(const Carried& carried) const {
    return shown_.objects.parts()[carried.part];
  }
  std::uint64_t SizeOf(const Carried& carried) const {
    return carried.bytes ? carried.bytes->size() : ObjectOf(carried).length;
  }
  std::uint64_t first_part() const { return kFirstCarried + carried_.size(); }
  // Returns the parts; the first call walks over all tensors. A failure is not cached: the next
  // call tries again.
  Result<std::shared_ptr<const HfParts>> Parts() const;
  Result<std::shared_ptr<const GeneratedText>> Index() const;
  // Whether config.json ties the output layer to the input embedding (tie_word_embeddings).
  bool HasTiedEmbeddings() const;
  // Segments of a part, from part_files_ or newly laid out.
  Result<FileSegments> PartFile(const HfParts& parts, std::size_t part) const;
  // Name of an item below hf/; empty for hf/ itself. kStale for unknown items.
  Result<std::string> NameOf(std::uint64_t item) const;

  ShownCheckpoint shown_;
  const View& whole_;
  HfOptions options_;
  // Sorted by name. If several objects have the same last name, the key without a directory wins,
  // else the first key.
  std::vector<Carried> carried_;

  // Guards the members below. Held while parts are computed, so that concurrent opens of a model
  // compute them once.
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const HfParts> parts_;
  mutable std::shared_ptr<const GeneratedText> index_;
  mutable LruCache<std::size_t, const FileSegments> part_files_;  // Segments, by part.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_HF_VIEW_H_
