// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_LOAD_H_
#define TENSORMOUNT_LOAD_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/export.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

namespace tensormount {

// What to do about keys on one side only.
enum class Strict { kRaise, kLog, kReturn, kIgnore };

enum class LoadVerify {
  kOff,
  kAuto,    // Leaves where whole leaves are read; digest proof of the whole load otherwise.
  kLeaves,  // Every byte by leaf; reads are widened to whole leaves.
};

// kDirect: every rank reads what it needs. kExchange: ranks read long runs and pass pieces on
// (column loads of row-major files). kAuto exchanges where runs are short and the ranks run on
// several machines, so that they share no page cache.
enum class LoadPath { kAuto, kDirect, kExchange };

struct LoadOptions {
  Strict not_stored = Strict::kRaise;   // Asked for, absent.
  Strict not_requested = Strict::kLog;  // Stored, asked for by nobody.
  LoadVerify verify = LoadVerify::kAuto;
  LoadPath path = LoadPath::kAuto;
  Timeouts timeouts = {};
  // Where not null, counts bytes as this rank has read them: for progress displays.
  std::atomic<std::uint64_t>* progress = nullptr;
  // For tests: called on every rank after the bytes arrived and before they are proved.
  void (*before_proof)(int rank) = nullptr;
};

// Asks for an entry of the report in words. Owned by the report.
class TENSORMOUNT_EXPORT LoadReport {
 public:
  std::string uuid;
  std::uint64_t bytes_wanted = 0;  // Of this rank.
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_received = 0;  // From other ranks.
  std::uint64_t bytes_by_leaf = 0;   // Verified how; the three add up to bytes_wanted.
  std::uint64_t bytes_by_digest = 0;
  std::uint64_t bytes_unverified = 0;
  std::vector<std::string> not_stored;  // With Strict::kReturn; the same on every rank.
  std::vector<std::string> not_requested;
  double read_seconds = 0;
  double proof_seconds = 0;

  // kNotFound where it was not asked for or not stored.
  Result<std::string> object(std::string_view key, const Dims& index = {}) const;
  Result<CommonValue> common(std::string_view name) const;

  std::map<std::string, CommonValue> common_values;
  std::map<std::pair<std::string, std::string>, std::string> objects;  // (key, index text) → bytes.
};

// Collective: fills the buffers of `request` in place from a checkpoint ("STORE/NAME", or a
// .safetensors file), whatever the sharding it was saved with. Overlapping and repeated requests
// are legal. Every rank returns the same verdict; on failure buffers may be partly filled.
//   kNotFound         no such checkpoint, or keys that are not stored (not_stored = kRaise)
//   kInvalidArgument  shape or dtype differ from what is stored; a region outside the tensor
//   kDataLoss         stored bytes are missing or damaged: names tensor, box, file and byte; also
//                     where bytes changed on the way to the buffer
TENSORMOUNT_EXPORT Result<LoadReport> Load(const StateDict& request, std::string_view path,
                                           Communicator& comm, const LoadOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_LOAD_H_
