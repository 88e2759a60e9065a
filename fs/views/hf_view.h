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

// hf/: the checkpoint as a model folder of the Hugging Face kind. Safetensors parts of a chosen
// size with their index (or one model.safetensors), and the files that stand beside them, which
// are objects with these names. Which tensor is in which part is worked out when somebody first
// looks into it, because most mounts are never asked: it takes a walk over all tensors.
//
// Items: 1 the folder, 2 the index, from 3 on the carried objects by name, then the parts. Numbers
// follow from the checkpoint and the options, so nothing is kept for them; the carried objects are
// known at once, the parts when HfParts is made.
// The files that are carried are those that from_pretrained looks for beside a model: its
// configuration and its tokenizer. Looking up any other name must not work parts out: transformers
// probes for many files that are not there.
class HfView : public View {
 public:
  // kInvalidArgument where the rules do not fit the shown keys (HfParts::CheckRules). `whole` is
  // the view model.safetensors, which hf/ shows again where it is what hf/ would have; it must
  // outlive this.
  static Result<std::unique_ptr<const View>> Make(const ShownCheckpoint& shown, const View& whole,
                                                  const HfOptions& options);

  std::string_view name() const override { return "hf"; }
  // kRoot is kNotFound in a checkpoint without tensors.
  Result<ViewNode> Stat(std::uint64_t item) const override;
  Result<ViewChild> Lookup(std::uint64_t folder, std::string_view name) const override;
  Status List(std::uint64_t folder, std::uint64_t cookie, const Visit& fn) const override;
  Result<FileSegments> Open(std::uint64_t file) const override;
  std::string PathOf(std::uint64_t item) const override;
  Result<std::map<std::string, std::string>> Attributes(std::uint64_t item) const override;

 private:
  static constexpr std::uint64_t kIndexItem = 2;
  static constexpr std::uint64_t kFirstCarried = 3;
  // Of the segments of parts that are kept though nobody has them open. A reader of such a folder
  // opens the same part many times.
  static constexpr std::uint64_t kKeptBytes = 12 << 20;

  HfView(const ShownCheckpoint& shown, const View& whole, const HfOptions& options)
      : shown_(shown), whole_(whole), options_(options), part_files_(kKeptBytes) {}
  void FindCarried();
  const ObjectRecord& CarriedAt(std::uint64_t item) const {
    return shown_.objects.parts()[carried_[item - kFirstCarried]];
  }
  std::uint64_t first_part() const { return kFirstCarried + carried_.size(); }
  // How tensors are divided; the first call walks over all of them. Failures are not kept: the next
  // call tries again.
  Result<std::shared_ptr<const HfParts>> Parts() const;
  Result<std::shared_ptr<const GeneratedText>> Index() const;
  // Whether config.json says that the output layer is the input embedding (tie_word_embeddings).
  bool HasTiedEmbeddings() const;
  // Segments of a part, from part_files_ or laid out now.
  Result<FileSegments> PartFile(const HfParts& parts, std::size_t part) const;
  // kStale for what is no item.
  Result<std::string> NameOf(std::uint64_t item) const;

  ShownCheckpoint shown_;
  const View& whole_;
  HfOptions options_;
  // Objects that stand beside the parts, as numbers in ShownObjects::parts(), by their names here.
  // Of two objects with one last name the one without a folder, else the first by key.
  std::vector<std::uint32_t> carried_;

  // Guards all below; held while parts are worked out, so that many programs that open a model at
  // once do it once.
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const HfParts> parts_;
  mutable std::shared_ptr<const GeneratedText> index_;
  mutable LruCache<std::size_t, const FileSegments> part_files_;  // By part; used under mutex_.
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_HF_VIEW_H_
