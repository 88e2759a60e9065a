// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_LOAD_H_
#define TENSORMOUNT_LOAD_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/common_value.h"
#include "tensormount/communicator.h"
#include "tensormount/event.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/validate.h"
#include "tensormount/visibility.h"

namespace tensormount {

// What to do about keys on one side only. Objects count as keys.
// kRaise: the load fails on all ranks. kLog: a warning. kReturn: LoadReport lists them. kIgnore:
// nothing.
enum class Strict { kRaise, kLog, kReturn, kIgnore };

// The two sets and what is done about each: asked for and absent; stored and asked for by nobody
// (in the whole group of ranks).
struct StrictPolicy {
  Strict not_stored = Strict::kRaise;
  Strict not_requested = Strict::kLog;
};
// Megatron-Core's eight names: "assume_ok_unexpected", "log_unexpected", "log_all",
// "raise_unexpected", "raise_all", "return_unexpected", "return_all", "ignore_all", in any case.
// (Its "unexpected" keys are our not_stored, its "missing" ones our not_requested.)
// kInvalidArgument lists them.
TENSORMOUNT_EXPORT Result<StrictPolicy> StrictFromMegatron(std::string_view name);

// Proof that what arrived in the buffers is what was saved. Leaves are checksums of 64 KiB of a
// stored range; the digest is one CRC of a whole tensor.
enum class LoadVerify {
  kOff,
  kAuto,    // Leaves where whole leaves are read; digest proof of the whole load otherwise.
  kLeaves,  // Every byte by leaf; reads are widened to whole leaves.
};

// kDirect: every rank reads what it needs. kExchange: each byte is read from storage once in a
// group of ranks, in long runs, and passed on with bounded buffers (column loads of row-major
// files; replicated loads from slow storage). kAuto exchanges where runs are short and the ranks
// run on several machines, so that they share no page cache.
enum class LoadPath { kAuto, kDirect, kExchange };

// How bytes that ranks pass on go. kDevices: from device to device (NCCL), where every tensor that
// a rank asks for is in memory of one device, of its own. So go tensors that a digest proves, and
// with LoadVerify::kOff all; others go through the host. kUnsupported, kUnavailable or
// kDeadlineExceeded say why it cannot be. kAuto: so go tensors that a digest proves, where it can
// be and they have more than 2 GiB; else all go through the host. With AsyncLoad kAuto is kHost,
// because NCCL beside the program's own NCCL may deadlock; kDevices stays what it is
// (docs/bulk.md).
enum class ExchangeVia { kAuto, kHost, kDevices };

// What a load does where the stored tensor or object differs from the one that is asked for.
// Whoever asks for nothing special gets an error.
struct LoadRule {
  // Extents asked for are smaller than the stored ones: the tail is left out.
  bool allow_shrink = false;
  // Extents asked for are larger: cells past the stored ones are set to zero, or keep what the
  // caller put there. Both are reported (LoadReport::uncovered).
  enum class Grow : std::uint8_t { kError, kZero, kKeep } grow = Grow::kError;
  // Elements are converted: between floats with rounding to nearest even, between integers and
  // bools where the value fits (kInvalidArgument names the first that does not), from integers to
  // floats. Otherwise a different dtype is an error.
  bool convert_dtype = false;
  // An object that is stored on another grid: the part of the same index, the first part, or none.
  enum class Grid : std::uint8_t { kError, kByIndex, kFirst, kSkip } grid = Grid::kError;
};
// Rules for the keys that a glob matches.
struct KeyRule {
  std::string keys;  // A glob; '*' crosses '/'.
  LoadRule rule;
};

// The same on every rank, but for exchange_group and what stands below "Of this rank alone".
struct LoadOptions {
  Strict not_stored = Strict::kRaise;   // Asked for, absent.
  Strict not_requested = Strict::kLog;  // Stored, asked for by nobody.
  // Globs of keys that neither set contains.
  std::vector<std::string> strict_exempt = {};
  // The first that matches a key holds.
  std::vector<KeyRule> rules = {};
  // Also proves, like a save, that what the ranks ask for covers every tensor exactly once but for
  // replicas (Megatron's access validation). Off: any requests are legal.
  bool validate = false;
  LoadVerify verify = LoadVerify::kAuto;
  LoadPath path = LoadPath::kAuto;
  ExchangeVia exchange_via = ExchangeVia::kAuto;
  // Ranks with equal numbers form a group that exchanges; others read for themselves. May differ
  // between ranks, as the only option.
  int exchange_group = 0;
  // Plans of earlier loads of the same checkpoint with the same requests are used again.
  bool reuse_plan = true;
  Timeouts timeouts = {};

  // OpenOptions::roots: folders below which data of adopted and foreign checkpoints may lie.
  std::vector<std::string> roots = {};

  // ---- Of this rank alone ----
  EventHook events = {};
  // That read what this rank reads for itself. 0: as many as have a core each, with the other ranks
  // of this machine, at most 12.
  int threads = 0;
  // Where not null, counts bytes as this rank has read them: for progress displays.
  std::atomic<std::uint64_t>* progress = nullptr;
};

// Asks for an entry of the report in words. Owned by the report.
class TENSORMOUNT_EXPORT LoadReport {
 public:
  std::string uuid;
  std::uint64_t bytes_wanted = 0;  // Of this rank.
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_received = 0;         // From other ranks.
  std::uint64_t bytes_between_devices = 0;  // Of them: that came without the host.
  // Verified how; the three add up to bytes_wanted. What another rank read was compared with its
  // leaves by that rank, and with that rank's checksum by this one.
  std::uint64_t bytes_by_leaf = 0;
  std::uint64_t bytes_by_digest = 0;
  std::uint64_t bytes_unverified = 0;
  std::uint64_t messages_sent = 0;      // Pieces of the exchange, by this rank.
  std::uint64_t peak_buffer_bytes = 0;  // Of memory besides the caller's, on this rank.
  bool plan_reused = false;
  // With Strict::kReturn; the same on every rank.
  std::vector<std::string> not_stored;
  std::vector<std::string> not_requested;
  // Keys of this rank's request of which nothing was loaded: not stored, or an object on another
  // grid with LoadRule::Grid::kSkip. Their buffers are as they were.
  std::vector<std::string> skipped;
  // Cells of this rank's request that the stored tensor does not have (LoadRule::grow).
  struct Uncovered {
    std::string key;
    Box box;
    bool zeroed = false;  // Otherwise the caller's values were kept.
  };
  std::vector<Uncovered> uncovered;
  // Tensors whose elements were converted.
  std::vector<std::string> converted;
  double plan_seconds = 0;
  double read_seconds = 0;
  double proof_seconds = 0;

  // kNotFound where it was not asked for or not stored.
  Result<std::string> object(std::string_view key, const Dims& index = {}) const;
  Result<CommonValue> common(std::string_view name) const;
  // What rank `rank` of the save set for itself.
  Result<CommonValue> rank_common(int rank, std::string_view name) const;
  // What the request had (StateDict::SetLocal).
  Result<CommonValue> local(std::string_view name) const;

  std::map<std::string, CommonValue> common_values;
  std::map<int, std::map<std::string, CommonValue>> rank_common_values;
  CommonDict content_metadata;
  std::map<std::string, CommonValue> locals;
  std::map<std::pair<std::string, std::string>, std::string> objects;  // (key, index text) → bytes.
};

// Collective: fills the buffers of `request` in place from a checkpoint ("STORE/NAME", or a
// .safetensors file), whatever the sharding it was saved with. Overlapping and repeated requests
// are legal. Every rank returns the same verdict. Nothing of an entry is written before it is known
// that the request is legal as a whole; once bytes are being read, a failure may leave buffers
// partly filled.
//   kNotFound         no such checkpoint, or keys that are not stored (not_stored = kRaise)
//   kInvalidArgument  shape, dtype or grid differ from what is stored and no rule allows it; a
//                     region outside the tensor; requests that do not cover (validate); a buffer
//                     whose cells share memory (an expanded tensor)
//   kDataLoss         stored bytes are missing or damaged: names tensor, box, file and byte; also
//                     where bytes changed on the way to the buffer
//
// Example, two ranks that want the halves of a tensor that was saved by any number of ranks:
//
//   StateDict want;
//   want.AddTensor("w", {.global_shape = {8, 4},
//                        .region = Box::Make({4 * rank, 0}, {4, 4}).value(),
//                        .data = BufferView::Host(DType::kF32, mine, {4, 4})});
//   const auto report = Load(want, "STORE/latest", comm);
TENSORMOUNT_EXPORT Result<LoadReport> Load(const StateDict& request, std::string_view path,
                                           Communicator& comm, const LoadOptions& options = {});

}  // namespace tensormount

#endif  // TENSORMOUNT_LOAD_H_
