// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_FORMAT_H_
#define TENSORMOUNT_INDEX_FOREIGN_FORMAT_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/status.h"

#include "index/foreign/foreign.h"

// Foreign formats. A new one is a class of these two calls in a file of its own, declared below and
// listed in formats.cc; docs/architecture.md ("I want to ...") has what goes with it. No command,
// mount or reader learns of it otherwise.

namespace tensormount {

class ForeignFormat {
 public:
  virtual ~ForeignFormat() = default;
  virtual std::string_view name() const = 0;  // "torch.distributed.checkpoint"
  // Whether the folder (or file) looks like one: names, and at most the first bytes of a file.
  // Never fails: what cannot be read is no such format. Formats are asked in the order of
  // formats.cc.
  virtual bool Probe(const ForeignFolder& folder) const = 0;
  // Reads what describes the checkpoint and adds its records. Sizes are checked before anything is
  // allocated for them. kDataLoss, kUnsupported, or the errno of a read.
  // `folder` has passed Probe; between the two files may have changed, so nothing that Probe saw
  // may be relied on.
  virtual Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const = 0;
};

// Stateless objects that live as long as the program; every call may come from any thread.
std::span<const ForeignFormat* const> ForeignFormats();

// The first whose Probe says so; null: none.
const ForeignFormat* FindForeignFormat(const ForeignFolder& folder);

// Reads a folder or file with the first format whose Probe says so. kUnsupported: none; says what
// is there instead where that can be told (".distcp files without .metadata: a save that did not
// end"). kStale: somebody replaced it meanwhile.
Result<ForeignInventory> ReadForeign(const ForeignFolder& folder);

// A training directory of checkpoints in a foreign format: Megatron-LM's (iter_0001000/, release/,
// latest_checkpointed_iteration.txt), OLMo-core's and others' (step1000/). Shown like a store.
struct ForeignStep {
  std::string name;              // Of its folder: "iter_0001000".
  std::uint64_t generation = 0;  // The iteration; 0 for "release".
};
struct ForeignSteps {
  std::vector<ForeignStep> steps;  // By name.
  std::string latest;              // One of them, or empty.
};
// nullopt: the folder is no such directory.
Result<std::optional<ForeignSteps>> ReadForeignSteps(const ForeignFolder& folder);

// The iteration that a folder of this name holds, by the prefixes that trainers use
// ("iter_0001000", "release": 0, "step1000", "checkpoint-500"). nullopt: another name.
std::optional<std::uint64_t> IterationOf(std::string_view name);
// Which of the steps that there are is the latest: the one that latest_checkpointed_iteration.txt
// names, else the one of the highest iteration; empty where there are none.
std::string LatestStep(const ForeignFolder& folder, const std::vector<ForeignStep>& steps);
// What changes when somebody replaces the checkpoint in a folder: the newest of the files that its
// format is found by, where `inode` is a number made of all of them.
Result<FileInfo> MarkOf(const ForeignFolder& folder);

// One instance each; in formats.cc. Adapters live in files of these names.
const ForeignFormat& TorchDcpFormat();      // dcp.cc: DCP, Megatron torch_dist, OLMo-core >= 1.0
const ForeignFormat& TorchDcpRankFormat();  // dcp.cc: __R.metadata only
const ForeignFormat& MegatronZarrFormat();  // megatron_zarr.cc
const ForeignFormat& OlmoFormat();          // olmo.cc: 0.1
const ForeignFormat& HuggingFaceFormat();   // hugging_face.cc: folders and .safetensors files
const ForeignFormat&
TorchSaveFormat();  // torch_save.cc: .pt .pth .bin files, Megatron's mp_rank_* folders
const ForeignFormat& NumpyFormat();  // numpy.cc: .npz, .npy, folders of .npy

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_FORMAT_H_
