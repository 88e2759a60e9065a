// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_HF_OPTIONS_H_
#define TENSORMOUNT_FS_VIEWS_HF_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "tensormount/key_map.h"
#include "tensormount/status.h"

namespace tensormount::fs {

// Used by the mount (--hf-part-size, --hf-rules), by `export --to hf` and by the view. A header of
// its own, so that the options of mounts need no header of views.
struct HfOptions {
  // Bytes of tensors in a part of hf/, at most; a tensor larger than that is a part of its own. Not
  // 0. The default is huggingface_hub's "5GB".
  std::uint64_t part_bytes = 5'000'000'000;
  // Which tensors hf/ has and what they are called there, over the keys that are shown; null: all,
  // under these keys.
  std::shared_ptr<const KeyMap> rules = nullptr;
};

// "5GB", "512MiB", "100000": powers of 1000 for K, M, G, KB, MB, GB, of 1024 for KiB, MiB, GiB.
// kInvalidArgument for anything else, 0 and what overflows.
Result<std::uint64_t> ParsePartSize(std::string_view text);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_HF_OPTIONS_H_
