// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_HF_PARTS_H_
#define TENSORMOUNT_FS_VIEWS_HF_PARTS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "fs/formats/file_segments.h"
#include "fs/formats/generated_text.h"
#include "fs/views/hf_options.h"
#include "fs/views/shown_checkpoint.h"

namespace tensormount::fs {

// Divides the tensors of a checkpoint into the parts of hf/: in the order of the shown keys, where
// a part ends before a tensor that would exceed part_bytes (or the format's header limit). A part
// is a range of tensors, so it takes 24 bytes of memory for any number of tensors. Immutable,
// thread-safe.
//
// Readers (transformers, huggingface_hub) expect files model-0000N-of-0000M.safetensors, each a
// complete safetensors file, and model.safetensors.index.json, whose "weight_map" maps tensors to
// files; or one model.safetensors without an index. Readers accept any order within a part; ours is
// that of model.safetensors, by falling element size.
// Make has two steps: Divide uses upper bounds of header sizes, because the exact size of a header
// is known only once it was made. Then, unless is_whole(), each part's header is made, for its
// size, and dropped.
class HfParts {
 public:
  struct Part {
    // Numbers of shown tensors. The part has the tensors of [first, end) that the rules keep and
    // the format supports.
    std::uint32_t first = 0;
    std::uint32_t end = 0;
    std::uint64_t header_bytes = 0;
    std::uint64_t data_bytes = 0;
    std::uint64_t size() const { return header_bytes + data_bytes; }
  };

  // kInvalidArgument if the rules give two tensors the same name, or one an invalid name. Scans the
  // keys once; called when the checkpoint is opened, so that wrong rules fail there and not in hf/.
  static Status CheckRules(const ShownCheckpoint& shown, const HfOptions& options);
  // Reads every tensor's entry up to three times. `shown` must outlive the result. `whole_bytes`:
  // size of model.safetensors beside hf/; 0: the checkpoint has none. `tied_embeddings`: the
  // model's configuration ties the output layer to the input embedding.
  static Result<std::unique_ptr<const HfParts>> Make(const ShownCheckpoint& shown,
                                                     const HfOptions& options,
                                                     std::uint64_t whole_bytes,
                                                     bool tied_embeddings = false);

  // The parts, in the order of shown keys. There is at least one; without tensors it is a file with
  // an empty header.
  const std::vector<Part>& parts() const { return parts_; }
  // Name of a part: "model-00002-of-00003.safetensors", or "model.safetensors" if there is only
  // one.
  std::string NameOf(std::size_t part) const;
  // Whether the only part equals model.safetensors beside hf/, so that it need not be laid out
  // again.
  bool is_whole() const { return is_whole_; }
  // The file of a part: its header as literal 0, then its tensors. Not cached.
  Result<FileSegments> Build(std::size_t part) const;

  // Whether hf/ has model.safetensors.index.json: with several parts, or if tensors are left out.
  // In hf/, these tensors are named only there, in "tensormount_left_out" of the metadata.
  bool has_index() const { return parts_.size() > 1 || left_out_ > 0; }
  // The text of the index; this object must outlive it.
  Result<std::shared_ptr<const GeneratedText>> IndexJson() const;
  // Number of additional names of tied tensors. For each of them the parts contain the tensor's
  // bytes once more.
  std::uint64_t further_names() const { return further_names_; }

 private:
  HfParts(const ShownCheckpoint& shown, const HfOptions& options)
      : shown_(shown), options_(options) {}
  // The name in hf/ of a shown key; empty if the rules drop it.
  std::string Renamed(std::string_view shown_key) const {
    return options_.rules ? options_.rules->Apply(shown_key) : std::string(shown_key);
  }
  // The names in hf/ of a tensor, several if it is tied; none if the rules drop it.
  std::vector<std::string> NamesOf(std::uint32_t number, const std::string& shown_key) const;
  // Fills tied_. With `tied_embeddings` the names of the output layer are dropped if the tensor has
  // others, because readers of such models expect only the embedding. Names that other tensors have
  // are dropped, too.
  Status FindTied(bool tied_embeddings);
  Status Divide();
  Status RenderIndex(std::uint32_t first, std::uint32_t count, std::string& out) const;

  ShownCheckpoint shown_;
  HfOptions options_;
  std::vector<Part> parts_;
  // All names of a tied tensor, by its number.
  std::map<std::uint32_t, std::vector<std::string>> tied_;
  std::uint64_t further_names_ = 0;
  bool is_whole_ = false;
  std::uint64_t total_bytes_ = 0;  // Bytes of all tensors in the parts.
  std::uint32_t left_out_ = 0;     // Names of tensors that the format does not support.
  // Numbers of the first tensor in the parts and of the first left-out tensor: in the index no
  // comma precedes these.
  std::uint32_t first_held_ = 0;
  std::uint32_t first_left_out_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_HF_PARTS_H_
