// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_DCP_ITEMS_H_
#define TENSORMOUNT_INDEX_FOREIGN_DCP_ITEMS_H_

#include <memory>
#include <string>
#include <unordered_set>

#include "tensormount/status.h"

#include "index/foreign/foreign.h"

namespace tensormount {

// Items of .distcp files: each is a torch archive of one tensor, which must be the chunk that the
// metadata say. `flattened`: keys of tensors whose chunks are stored with one axis, whatever their
// region is (MegatronFlatShape).
std::shared_ptr<const ItemResolver> MakeDcpItemResolver(std::unordered_set<std::string> flattened);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_DCP_ITEMS_H_
