// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_CHECKPOINT_TEXT_H_
#define TENSORMOUNT_FS_VIEWS_CHECKPOINT_TEXT_H_

#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "fs/views/generated_text.h"
#include "fs/views/shown_checkpoint.h"

// The JSON files of a checkpoint. Their text depends on the committed records alone, so that every
// mount on every machine (with the same map of keys) shows the same bytes.

namespace tensormount::fs {

// checkpoint.json. `shown` must outlive what is made of it. `views`: their names.
Result<GeneratedText::Parts> CheckpointJson(const ShownCheckpoint& shown,
                                            const std::vector<std::string>& views);
// common.json: an object with a line for each value, as CommonToJson writes it, then what is
// reserved (docs/format.md, "common.json").
Result<std::string> CommonJson(const CheckpointIndex& index);
// extents/KEY.json.
Result<GeneratedText::Parts> ExtentsJson(const OpenedCheckpoint& opened, const TensorEntry& tensor);

// "[2, 3]"
std::string DimsText(const Dims& dims);
// "crc64-nvme:" and 16 hex digits.
std::string DigestText(Crc64 digest);
// A JSON string with its quotes; bytes that are no UTF-8 become U+FFFD.
std::string JsonString(std::string_view text);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_CHECKPOINT_TEXT_H_
