// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_HF_OPTIONS_H_
#define TENSORMOUNT_FS_VIEWS_HF_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "tensormount/key_map.h"
#include "tensormount/status.h"

#include "index/foreign/model_files.h"

namespace tensormount::fs {

// Options of hf/, for the mount (--hf-part-size, --hf-rules), for `export --to hf` and for the
// view. In its own header, so that mount options do not depend on views.
struct HfOptions {
  // Largest number of tensor bytes in a part of hf/; a larger tensor is a part of its own. Not 0.
  // The default is huggingface_hub's "5GB".
  std::uint64_t part_bytes = 5'000'000'000;
  // Selects and renames the tensors of hf/, by shown keys; null: all, unchanged.
  std::shared_ptr<const KeyMap> rules = nullptr;
  // Files that hf/ has beside the tensors, instead of objects of the same name; null: none.
  std::shared_ptr<const ModelFiles> beside = nullptr;
};

// Number of bytes of a text like "5GB", "512MiB" or "100000". K, M, G, KB, MB and GB are powers of
// 1000; KiB, MiB and GiB are powers of 1024. kInvalidArgument for other texts, 0 and overflow.
Result<std::uint64_t> ParsePartSize(std::string_view text);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_HF_OPTIONS_H_
