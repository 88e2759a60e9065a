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

namespace tensormount::fs {

// hf/: the checkpoint as a model folder of the Hugging Face kind. Safetensors parts of a chosen
// size with their index (or one model.safetensors), and the files that stand beside them, which
// are objects with these names. Which tensor is in which part is worked out when somebody first
// looks into it, because most mounts are never asked: it takes a walk over all tensors.
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
  // An object that stands beside the parts.
  struct Carried {
    std::string name;
    std::uint32_t part = 0;  // Number in ShownObjects::parts().
  };
  // The segments of a part, kept for whoever opens it next.
  struct Kept {
    HfParts::File file;
    std::uint64_t used = 0;  // When, as a count.
  };
  static constexpr std::uint64_t kIndexItem = 2;
  static constexpr std::uint64_t kFirstCarried = 3;
  // Of the segments of parts that are kept though nobody has them open. A reader of such a folder
  // opens the same part many times.
  static constexpr std::uint64_t kKeptBytes = 12 << 20;

  HfView(const ShownCheckpoint& shown, const View& whole, const HfOptions& options)
      : shown_(shown), whole_(whole), options_(options) {}
  void FindCarried();
  std::uint64_t first_part() const { return kFirstCarried + carried_.size(); }
  Result<std::shared_ptr<const HfParts>> Parts() const;
  Result<std::shared_ptr<const GeneratedText>> Index() const;
  Result<HfParts::File> PartFile(const HfParts& parts, std::size_t part) const;
  // kStale for what is no item.
  Result<std::string> NameOf(std::uint64_t item) const;

  ShownCheckpoint shown_;
  const View& whole_;
  HfOptions options_;
  std::vector<Carried> carried_;  // By name.

  mutable std::mutex mutex_;
  mutable std::shared_ptr<const HfParts> parts_;
  mutable std::shared_ptr<const GeneratedText> index_;
  mutable std::map<std::size_t, Kept> kept_;  // By part.
  mutable std::uint64_t kept_bytes_ = 0;
  mutable std::uint64_t uses_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_HF_VIEW_H_
