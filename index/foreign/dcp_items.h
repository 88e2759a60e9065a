// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_DCP_ITEMS_H_
#define TENSORMOUNT_INDEX_FOREIGN_DCP_ITEMS_H_

#include <string>
#include <unordered_set>

#include "tensormount/status.h"

#include "index/foreign/foreign.h"

namespace tensormount {

// Items of .distcp files: each is a torch archive of one tensor, which must be the chunk that the
// metadata say. `flattened`: keys of tensors whose chunks are stored with one axis, whatever their
// region is (MegatronFlatShape). What it returns owns all that it needs and may outlive whoever
// made it; it is called by readers on any thread. Each call reads about 10 KiB of the item (its zip
// directory, headers and pickle), never the payload.
ItemResolver MakeDcpItemResolver(std::unordered_set<std::string> flattened);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_DCP_ITEMS_H_
