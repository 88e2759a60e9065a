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

// How the tensors of a checkpoint are divided into the parts of hf/: in the order of the shown
// keys, each part closed when the next tensor would pass part_bytes (or its header the format's
// limit). Parts are ranges of tensors, so that nothing is kept of single tensors. Immutable,
// thread-safe.
//
// What the reader expects (transformers, huggingface_hub): files model-0000N-of-0000M.safetensors,
// each a whole safetensors file, and model.safetensors.index.json, whose "weight_map" says which
// tensor is in which; or one model.safetensors and no index. Tensors of one part may stand in any
// order in it; ours stand as in model.safetensors, by falling element size.
// Two passes over the tensors: Divide cuts them into parts, by bounds of header sizes, because
// names of parts (of how many) must be known first; then each part's header is made once to know
// its size and dropped again. Memory is 24 bytes a part, whatever the number of tensors.
class HfParts {
 public:
  struct Part {
    // The part has those of [first, end) that the rules keep and the format can hold.
    std::uint32_t first = 0;  // Numbers of shown tensors.
    std::uint32_t end = 0;
    std::uint64_t header_bytes = 0;
    std::uint64_t data_bytes = 0;
    std::uint64_t size() const { return header_bytes + data_bytes; }
  };

  // Whether the rules fit: kInvalidArgument where two tensors would get one name, or one a name
  // that no key may have. Costs one scan of the keys.
  // At mount, so that rules with a slip fail there and not when somebody opens hf/.
  static Status CheckRules(const ShownCheckpoint& shown, const HfOptions& options);
  // Reads every tensor's entry once or twice. `shown` must outlive the layout. `whole_bytes` are
  // those of model.safetensors, the file of all tensors beside hf/; 0: there is none.
  // `tied_embeddings`: the model's configuration says that its output layer is its input embedding.
  static Result<std::unique_ptr<const HfParts>> Make(const ShownCheckpoint& shown,
                                                     const HfOptions& options,
                                                     std::uint64_t whole_bytes,
                                                     bool tied_embeddings = false);

  // At least one: without tensors it is a file with an empty header.
  // In the order of shown keys.
  const std::vector<Part>& parts() const { return parts_; }
  // "model-00002-of-00003.safetensors", or "model.safetensors" where there is only one.
  std::string NameOf(std::size_t part) const;
  // Whether the only part is the file beside hf/, which then need not be laid out again.
  bool is_whole() const { return is_whole_; }
  // The file of a part: its header as literal 0, then its tensors. Nothing is kept.
  Result<FileSegments> Build(std::size_t part) const;

  // Whether there is a model.safetensors.index.json: not for one part that has everything.
  // Also for one part where tensors are left out: "tensormount_left_out" of its metadata names
  // them, and there is no other file in which a reader would look.
  bool has_index() const { return parts_.size() > 1 || left_out_ > 0; }
  // Its text; the layout must outlive it.
  Result<std::shared_ptr<const GeneratedText>> IndexJson() const;
  // Further names of tied tensors that are written, the tensor's bytes once for each.
  std::uint64_t further_names() const { return further_names_; }

 private:
  HfParts(const ShownCheckpoint& shown, const HfOptions& options)
      : shown_(shown), options_(options) {}
  // The name of a key there; empty where the rules drop it.
  std::string Renamed(std::string_view shown_key) const {
    return options_.rules ? options_.rules->Apply(shown_key) : std::string(shown_key);
  }
  // All names of a tensor; none where the rules drop it.
  std::vector<std::string> NamesOf(std::uint32_t number, const std::string& shown_key) const;
  // Fills tied_. Models that tie their output layer have the embedding alone in their files, and
  // their readers want it; where nothing says so, every name is written.
  Status FindTied(bool tied_embeddings);
  Status Divide();
  Status RenderIndex(std::uint32_t first, std::uint32_t count, std::string& out) const;

  ShownCheckpoint shown_;
  HfOptions options_;
  std::vector<Part> parts_;
  std::map<std::uint32_t, std::vector<std::string>> tied_;  // All names, by number of the tensor.
  std::uint64_t further_names_ = 0;
  bool is_whole_ = false;
  std::uint64_t total_bytes_ = 0;  // Of all tensors that are held.
  std::uint32_t left_out_ = 0;     // Tensors that the format cannot hold.
  // Of the first tensor that is held, and that is left out: no comma before them.
  std::uint32_t first_held_ = 0;
  std::uint32_t first_left_out_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_HF_PARTS_H_
