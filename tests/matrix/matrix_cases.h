// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_MATRIX_MATRIX_CASES_H_
#define TENSORMOUNT_TESTS_MATRIX_MATRIX_CASES_H_

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/communicator.h"
#include "tensormount/load.h"
#include "tensormount/save.h"
#include "tensormount/status.h"

// The acceptance matrix: tensors of every kind, cut in every usual way over any number of ranks,
// saved, and loaded under any other cut on any other number. What a cell must hold is computed from
// its global index, never stored, so that no mistake of a save can hide in what it is compared
// with. One rank's part, over any communicator.

namespace tensormount {

enum class Cut {
  kRows,        // torch.chunk along axis 0.
  kColumns,     // Along the last axis.
  kGrid,        // Two axes.
  kFlatJitter,  // Flat ranges of the whole, of different lengths.
  kUneven,      // Rows, of different lengths.
  kEmpties,     // Everything on rank 0 but the last row, on the last rank.
  kLayers,      // One shard for each index of axis 0, its buffer without that axis.
  kReplicated,  // Halves, each on half of the ranks.
};
std::span<const Cut> AllCuts();
std::string_view CutName(Cut cut);

// What `rank` of `world` holds; disjoint, possibly empty ones among them.
std::vector<Region> RegionsOf(Cut cut, const Dims& shape, int rank, int world);

// Saves and loads this rank's part of the matrix tensors. A failure of LoadCut says which cell of
// which tensor is wrong.
Status SaveCut(Communicator& comm, const std::string& path, Cut cut,
               const SaveOptions& options = {});
Status LoadCut(Communicator& comm, const std::string& path, Cut cut,
               const LoadOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_MATRIX_MATRIX_CASES_H_
