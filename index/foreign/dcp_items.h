// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_DCP_ITEMS_H_
#define TENSORMOUNT_INDEX_FOREIGN_DCP_ITEMS_H_

#include <string>
#include <unordered_set>

#include "tensormount/status.h"

#include "index/foreign/foreign.h"

namespace tensormount {

// Makes the resolver that locates the bytes of items of .distcp files. An item is a torch archive
// of one tensor, which must match the chunk in the metadata. `flattened`: keys of tensors whose
// items have one axis for any region (MegatronFlatShape). The resolver may be called on any thread.
// Each call reads about 10 KiB of the item (zip directory, headers and pickle), but not the
// tensor's bytes.
ItemResolver MakeDcpItemResolver(std::unordered_set<std::string> flattened);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_DCP_ITEMS_H_
