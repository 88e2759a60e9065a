// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_TINY_CHECKPOINT_H_
#define TENSORMOUNT_TESTS_SUPPORT_TINY_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tensormount/dtype.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/records/inventory.h"
#include "index/store/store.h"

// Small checkpoints without the collective layer: data files and manifests are written here, by
// hand, as a save would write them, and published by Store. Contents depend on the spec alone.

namespace tensormount {

struct TinyTensor {
  std::string key;
  DType dtype = DType::kU8;
  Dims shape;
  std::uint64_t seed = 0;  // Of its bytes: another seed, other bytes.
  // Cut along `axis` into `parts` ceil-sized pieces; piece p is writer p % writers's.
  int parts = 1;
  int axis = 0;
  // A file of its own in row-major order (axis 0 only); otherwise in the writers' rank shards.
  bool tensor_file = false;
};

struct TinyObject {
  std::string key;
  std::string bytes;
  Dims index;  // Both empty: the plain kind.
  Dims grid;
};

struct TinySpec {
  int writers = 2;
  std::vector<TinyTensor> tensors;
  std::vector<TinyObject> objects;  // Writer 0's.
  std::map<std::string, CommonValue> common;
};

// Two writers; "embed.weight" bf16 [8, 16] by rows in rank shards, "layers.0.w" f32 [16, 32] as a
// tensor file by rows, "layers.0.cols" f32 [6, 10] by columns, "bias" f32 [32] whole, "step" i64
// scalar, "empty" f32 [0, 4]; objects "rng" (2 parts) and "config"; common "iteration" and "lr".
TinySpec DefaultTinySpec(std::uint64_t seed = 1);

// The row-major bytes of a tensor.
std::string TinyBytes(const TinyTensor& tensor);

// Data files and manifests into a staging, sealed and fsynced, folders not.
Status WriteTinyStaging(FileSystem& fs, const Staging& staging, const TinySpec& spec);

// What the coordinator brings to Store::Publish.
Inventory TinyCoordinator(const TinySpec& spec);

// Store::OpenOrCreate, Begin, WriteTinyStaging, Publish.
Result<Store::Published> WriteTinyCheckpoint(FileSystem& fs, const std::string& store_path,
                                             const std::string& name, const TinySpec& spec,
                                             const Store::PublishOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_TINY_CHECKPOINT_H_
