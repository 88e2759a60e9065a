// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_CHECKPOINT_TEXT_H_
#define TENSORMOUNT_FS_VIEWS_CHECKPOINT_TEXT_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "fs/formats/generated_text.h"
#include "fs/views/shown_checkpoint.h"

// The JSON files of a checkpoint. Their text depends on the committed records alone, so that every
// mount on every machine (with the same map of keys) shows the same bytes.

namespace tensormount::fs {

// checkpoint.json. `shown` must outlive what is made of it. `views`: their names.
// Written by hand and not through a JSON library where lists may have a million items:
// GeneratedText renders any block of it again, and has to get the same bytes each time.
Result<std::shared_ptr<const GeneratedText>> CheckpointJson(const ShownCheckpoint& shown,
                                                            const std::vector<std::string>& views);
// common.json: an object with a line for each value, as CommonToJson writes it, then what is
// reserved (docs/format.md, "common.json").
// Small, so made once as one string when the view is made.
Result<std::string> CommonJson(const CheckpointIndex& index);
// extents/KEY.json. `opened` must outlive what is made of it.
// One object: the fields of the tensor as in checkpoint.json, then "extents", an item for each
// chunk: region, file, offset, bytes, strides where it is not packed, hash where it has one. Where
// the chunks cannot be read it has "error" instead, so that one damaged tensor does not make the
// whole folder fail to list.
Result<std::shared_ptr<const GeneratedText>> ExtentsJson(const OpenedCheckpoint& opened,
                                                         const TensorEntry& tensor);

// "[2, 3]"
std::string DimsText(const Dims& dims);
// "crc64-nvme:" and 16 hex digits.
std::string DigestText(Crc64 digest);
// A JSON string with its quotes; bytes that are no UTF-8 become U+FFFD.
std::string JsonString(std::string_view text);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_CHECKPOINT_TEXT_H_
