// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_LOAD_TESTING_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_LOAD_TESTING_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tensormount/load.h"
#include "tensormount/save.h"

#include "base/file_system.h"

// Small global tensors, cut by rule, saved and loaded on threads, with an oracle that copies
// element by element.

namespace tensormount {

struct GlobalTensor {
  std::string key;
  DType dtype = DType::kU8;
  Dims shape;
  std::string bytes;  // Row-major.
};
// With bytes that depend on key and position.
GlobalTensor MakeGlobal(const std::string& key, DType dtype, const Dims& shape);

// What each rank holds under "rows", "cols", "grid:AxB" (torch.chunk's cuts), "flat" or
// "replicate". Tensors without that axis are replicated.
std::vector<Region> CutByRule(const Dims& shape, const std::string& rule, int ranks);

// Bytes of a region, packed.
std::string BytesOf(const GlobalTensor& tensor, const Region& region);

// Saves on `ranks` threads.
Status SaveByRule(const std::string& path, const std::vector<GlobalTensor>& tensors,
                  const std::string& rule, int ranks, const SaveOptions& options = {});

// One rank's wish for one region of one tensor.
struct Wish {
  std::size_t tensor = 0;
  Region region;
};
struct LoadedRank {
  Status status;
  LoadReport report;
  std::vector<std::string> buffers;  // One a wish, packed.
};
// Loads on one thread for each element of `wishes`. `more` adds to a rank's request.
std::vector<LoadedRank> LoadWishes(
    const std::string& path, const std::vector<GlobalTensor>& tensors,
    const std::vector<std::vector<Wish>>& wishes, const LoadOptions& options = {},
    const std::function<void(int rank, StateDict& request)>& more = {});

// The same with what differs between ranks. What is empty is as in LoadWishes.
struct LoadSetup {
  std::function<LoadOptions(int rank)> options;
  std::function<FileSystem&(int rank)> fs;
  std::function<void(int rank, StateDict& request)> more;
  // Called on each rank instead of one load.
  std::function<Result<LoadReport>(FileSystem&, const StateDict&, Communicator&,
                                   const LoadOptions&)>
      load;
};
std::vector<LoadedRank> LoadWishesWith(const std::string& path,
                                       const std::vector<GlobalTensor>& tensors,
                                       const std::vector<std::vector<Wish>>& wishes,
                                       const LoadSetup& setup);

std::vector<std::vector<Wish>> WishesByRule(const std::vector<GlobalTensor>& tensors,
                                            const std::string& rule, int ranks);

// Empty where every rank loaded what the oracle says and its report adds up; otherwise what is
// wrong.
std::string WhatIsWrong(const std::vector<GlobalTensor>& tensors,
                        const std::vector<std::vector<Wish>>& wishes,
                        const std::vector<LoadedRank>& loaded);

// Names below DIRECTORY/data, sorted.
std::vector<std::string> DataFiles(const std::string& checkpoint);
// Element `at` of a tensor.
std::string ElementOf(const GlobalTensor& tensor, const Dims& at);
// Every element of a region, in the region's order.
void ForEachElement(const Region& region, const std::function<void(const Dims& at)>& fn);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_LOAD_TESTING_H_
