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

// The JSON files of a checkpoint. Their text depends only on the records of the checkpoint (with
// foreign files: also on the path of their root) and on the key map, so that every mount of it
// shows the same bytes.

namespace tensormount::fs {

// The text of checkpoint.json. `shown` must outlive the result. `views`: the names that its list
// "views" has.
// Lists that may have a million items are written as text, without a JSON document in memory,
// because GeneratedText renders them in blocks.
Result<std::shared_ptr<const GeneratedText>> CheckpointJson(const ShownCheckpoint& shown,
                                                            const std::vector<std::string>& views);
// common.json: an object with a line for each value, as CommonToJson writes it, then the reserved
// members (docs/format.md, "common.json"). The text is small, so the view makes it once.
Result<std::string> CommonJson(const CheckpointIndex& index);
// The text of extents/KEY.json. `opened` must outlive the result.
// One object: the fields of the tensor as in checkpoint.json, then "extents" with an item for each
// chunk: region, file, offset, bytes, strides if not packed, hash if known. If the table of chunks
// cannot be read, the object has "error" instead of "extents", so that one damaged tensor does not
// make the whole directory fail to list. A damaged record in the table makes this call fail.
Result<std::shared_ptr<const GeneratedText>> ExtentsJson(const OpenedCheckpoint& opened,
                                                         const TensorEntry& tensor);

// The dimensions as a JSON array: "[2, 3]".
std::string DimsText(const Dims& dims);
// The digest as files of a mount show it: "crc64-nvme:" and 16 hex digits.
std::string DigestText(Crc64 digest);
// A JSON string with quotes; invalid UTF-8 becomes U+FFFD.
std::string JsonString(std::string_view text);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_CHECKPOINT_TEXT_H_
