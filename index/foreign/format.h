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

// A foreign format. Each is a class in its own file, declared below and listed in formats.cc
// (docs/architecture.md, "A foreign format"). For a new format, commands, mounts and readers need
// no change.

namespace tensormount {

class ForeignFormat {
 public:
  virtual ~ForeignFormat() = default;
  virtual std::string_view name() const = 0;  // Name of the format, such as "safetensors".
  // Whether the directory (or file) looks like this format, judged by names and small reads (the
  // first bytes of a file, the end of a zip, metadata.json). Read errors are ignored. Formats are
  // probed in the order of formats.cc.
  virtual bool Probe(const ForeignFolder& folder) const = 0;
  // Reads the metadata of the checkpoint and adds its records. Called after Probe, but the files
  // may have changed since, so Read must not rely on what Probe saw. It must check sizes before it
  // allocates memory. Errors: kDataLoss, kUnsupported, or those of the file system and of
  // ForeignFolder.
  virtual Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const = 0;
};

// All formats, in the order in which they are probed. They have no state, so all calls are
// thread-safe.
std::span<const ForeignFormat* const> ForeignFormats();

// The first format whose Probe matches; null if none does.
const ForeignFormat* FindForeignFormat(const ForeignFolder& folder);

// Reads a directory or file with the first format whose Probe matches. kUnsupported: no format
// matches; the message describes what the directory or file is, if known (".distcp files without
// .metadata: the save did not finish"). kPermissionDenied: no format matches, and a link leads out
// of the bounds. kStale: the checkpoint was replaced meanwhile.
Result<ForeignInventory> ReadForeign(const ForeignFolder& folder);

// One foreign checkpoint of a training directory. Such directories are written by Megatron-LM
// (iter_0001000/, release/, latest_checkpointed_iteration.txt), OLMo-core and others (step1000/),
// and are shown like stores.
struct ForeignStep {
  std::string name;              // The name of its directory, such as "iter_0001000".
  std::uint64_t generation = 0;  // The iteration; 0 for "release".
};
struct ForeignSteps {
  std::vector<ForeignStep> steps;  // Sorted by name.
  std::string latest;              // The name of the latest step; empty without steps.
};
// The checkpoints of a training directory; nullopt if the directory is not one.
Result<std::optional<ForeignSteps>> ReadForeignSteps(const ForeignFolder& folder);

// The iteration in the name of a step directory, by the prefixes that trainers use ("iter_0001000",
// "step1000", "checkpoint-500"; "release" is 0). nullopt for other names.
std::optional<std::uint64_t> IterationOf(std::string_view name);
// The name of the latest step: the step in latest_checkpointed_iteration.txt, else the step of the
// highest iteration; empty without steps.
std::string LatestStep(const ForeignFolder& folder, const std::vector<ForeignStep>& steps);
// A value that changes when the checkpoint in a directory is replaced. The stamp covers the
// metadata files of all formats or, if there are none, the first 1,000 files: its times are those
// of the newest file, and its `inode` is a hash over all of them. For a single file, or a directory
// without files, it is the result of stat.
Result<FileInfo> FormatStamp(const ForeignFolder& folder);

// One instance of each format. The comments name the file that implements it.
const ForeignFormat& TorchDcpFormat();  // dcp.cc: DCP, Megatron torch_dist, OLMo-core >= 1.0
// dcp.cc: saves without a global plan (only __R.metadata of each rank R)
const ForeignFormat& TorchDcpRankFormat();
const ForeignFormat& MegatronZarrFormat();  // megatron_zarr.cc
const ForeignFormat& OlmoFormat();          // olmo.cc: OLMo-core 0.1
const ForeignFormat& HuggingFaceFormat();   // hugging_face.cc: directories and .safetensors files
// torch_save.cc: .pt, .pth and .bin files, mp_rank_* directories of Megatron.
const ForeignFormat& TorchSaveFormat();
const ForeignFormat& NumpyFormat();  // numpy.cc: .npz, .npy, directories of .npy

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_FORMAT_H_
