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
#include "tensormount/name_map.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"
#include "tensormount/validate.h"
#include "tensormount/visibility.h"

namespace tensormount {

// Handling of keys of tensors and objects that are requested but not stored, or stored but not
// requested. kRaise: the load fails on all ranks. kLog: rank 0 logs a warning. kReturn: LoadReport
// lists the keys. kIgnore: nothing is done.
enum class Strict { kRaise, kLog, kReturn, kIgnore };

// not_stored: keys requested but absent. not_requested: keys stored but requested by no rank.
struct StrictPolicy {
  Strict not_stored = Strict::kRaise;
  Strict not_requested = Strict::kLog;
};
// Accepts Megatron-Core's eight names: "assume_ok_unexpected", "log_unexpected", "log_all",
// "raise_unexpected", "raise_all", "return_unexpected", "return_all", "ignore_all", in any case.
// (Megatron's "unexpected" keys are our not_stored, its "missing" keys our not_requested.) The
// message of kInvalidArgument lists the names.
TENSORMOUNT_EXPORT Result<StrictPolicy> StrictFromMegatron(std::string_view name);

// How loaded bytes are verified. A leaf hash covers 64 KiB of a stored range; a digest is one CRC
// of a whole tensor.
enum class LoadVerify {
  kOff,
  kAuto,    // By leaf hashes or by the tensor's digest, if it has one: whichever is cheaper.
  kLeaves,  // Every byte by leaf hash; reads are widened to whole leaves.
  // Like kAuto, but the digest is computed from the buffers after all bytes have arrived, instead
  // of from each block when it has been written. For buffers that others may write during the load.
  kEnd,
};

// kDirect: every rank reads what it needs. kExchange: a group of ranks reads each byte once, in
// long runs, and sends it to the ranks that need it, with bounded buffers (column loads of
// row-major files; replicated loads from slow storage). kAuto exchanges a tensor of at least 8 MiB
// that several ranks want if its runs are short and the ranks run on several machines, which share
// no page cache. Behind a server kAuto exchanges what several ranks of one machine would ask for
// (docs/loading.md). Elements below one byte and some foreign tensors are always read directly.
enum class LoadPath { kAuto, kDirect, kExchange };

// How exchanged bytes travel. kDevices: from device to device (NCCL), for tensors that a digest
// verifies, and with LoadVerify::kOff for all tensors; other tensors go through the host. All ranks
// must then be in one exchange group, and each must request tensors, all in memory of one device
// that only this rank uses; otherwise the load fails with kUnsupported, kUnavailable or
// kDeadlineExceeded. kAuto: devices for tensors that a digest verifies, if possible and if they
// exceed 2 GiB; otherwise the host. With AsyncLoad kAuto means kHost, because NCCL concurrent with
// the program's own NCCL may deadlock; kDevices is unchanged (docs/bulk.md).
enum class ExchangeVia { kAuto, kHost, kDevices };

// Handling of a stored tensor or object that differs from the requested one. By default each
// difference is an error.
struct LoadRule {
  // Whether requested extents may be smaller than the stored ones; the tail is then not loaded.
  bool allow_shrink = false;
  // What happens if requested extents exceed the stored ones. kError: the load fails. kZero, kKeep:
  // cells past the stored ones are set to zero, or keep the caller's values, and are reported
  // (LoadReport::uncovered).
  enum class Grow : std::uint8_t { kError, kZero, kKeep } grow = Grow::kError;
  // Whether elements are converted: between floats with rounding to nearest even, between integers
  // and bools if the value fits (kInvalidArgument names the first value that does not), and from
  // integers to floats. If false, a different dtype is an error.
  bool convert_dtype = false;
  // What happens if an object is stored on another grid: the load fails, or uses the part of the
  // same index, the first part, or no part.
  enum class Grid : std::uint8_t { kError, kByIndex, kFirst, kSkip } grid = Grid::kError;
};
// A rule for the keys that match a glob.
struct KeyRule {
  std::string keys;  // A glob; '*' crosses '/'.
  LoadRule rule;
};

// Options of a load. All must be equal on every rank, except exchange_group and the options below
// "Of this rank alone".
struct LoadOptions {
  Strict not_stored = Strict::kRaise;   // Keys requested but absent.
  Strict not_requested = Strict::kLog;  // Keys stored but requested by no rank.
  // Globs of keys that are never reported as not_stored or not_requested.
  std::vector<std::string> strict_exempt = {};
  // The first rule that matches a key is used.
  std::vector<KeyRule> rules = {};
  // Whether the load also checks, like a save, that the requests cover every tensor exactly once
  // except for replicas (Megatron's access validation). If false, any requests are valid.
  bool validate = false;
  LoadVerify verify = LoadVerify::kAuto;
  LoadPath path = LoadPath::kAuto;
  ExchangeVia exchange_via = ExchangeVia::kAuto;
  // Ranks with equal numbers form a group that exchanges data. May differ between ranks.
  int exchange_group = 0;
  // Whether plans of earlier loads of the same checkpoint with the same requests are used again.
  bool reuse_plan = true;
  Timeouts timeouts = {};

  // A name map of the checkpoint: the keys of the request are names that it gives. Errors of the
  // map are those of a wrong argument; kNotFound: a tensor that a rule needs is not stored.
  NameMap names = {};
  // OpenOptions::roots: directories below which data of adopted and foreign checkpoints may lie.
  std::vector<std::string> roots = {};

  // ---- Of this rank alone ----
  EventHook events = {};
  // Reading threads of this rank. 0: one per core, divided by the ranks of this machine, at most
  // 12.
  int threads = 0;
  // If not null, counts the bytes that this rank has read, for progress displays.
  std::atomic<std::uint64_t>* progress = nullptr;
};

// The results of a load, other than the data in the caller's buffers. All counts are of this rank.
class TENSORMOUNT_EXPORT LoadReport {
 public:
  std::string uuid;
  std::uint64_t bytes_wanted = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_received = 0;  // Bytes received from other ranks.
  // Part of bytes_received that did not pass through the host.
  std::uint64_t bytes_between_devices = 0;
  // Bytes by kind of verification: leaf hashes, digests, none. The three add up to bytes_wanted.
  // The leaf hashes of received bytes were checked by the rank that read the bytes; this rank
  // checked that rank's checksum.
  std::uint64_t bytes_by_leaf = 0;
  std::uint64_t bytes_by_digest = 0;
  std::uint64_t bytes_unverified = 0;
  std::uint64_t messages_sent = 0;      // Messages of the exchange that this rank sent.
  std::uint64_t peak_buffer_bytes = 0;  // Largest memory used besides the caller's buffers.
  bool plan_reused = false;
  // Keys listed because of Strict::kReturn; the same on every rank.
  std::vector<std::string> not_stored;
  std::vector<std::string> not_requested;
  // Keys of this rank's request of which nothing was loaded: not stored, or an object on another
  // grid with LoadRule::Grid::kSkip. Their buffers are unchanged.
  std::vector<std::string> skipped;
  // Requested cells of this rank outside the stored tensor (LoadRule::grow).
  struct Uncovered {
    std::string key;
    Box box;
    bool zeroed = false;  // False: the caller's values were kept.
  };
  std::vector<Uncovered> uncovered;
  // Tensors whose elements were converted.
  std::vector<std::string> converted;
  double plan_seconds = 0;
  double read_seconds = 0;
  double proof_seconds = 0;

  // The bytes of an object. kNotFound if it was not requested or not stored.
  Result<std::string> object(std::string_view key, const Dims& index = {}) const;
  Result<CommonValue> common(std::string_view name) const;
  // The value that rank `rank` of the save set for itself.
  Result<CommonValue> rank_common(int rank, std::string_view name) const;
  // The request's local value (StateDict::SetLocal).
  Result<CommonValue> local(std::string_view name) const;

  std::map<std::string, CommonValue> common_values;
  std::map<int, std::map<std::string, CommonValue>> rank_common_values;
  CommonDict content_metadata;
  std::map<std::string, CommonValue> locals;
  std::map<std::pair<std::string, std::string>, std::string> objects;  // (key, index text) → bytes.
};

// Collective: fills the buffers of `request` in place from a checkpoint (`path` is as in
// Checkpoint::Open), whatever sharding it was saved with. Overlapping and repeated requests are
// valid. Every rank returns the same result. No buffer is written before the whole request is
// validated; a failure while bytes are read may leave buffers partly filled.
//   kNotFound         no such checkpoint, or keys that are not stored (not_stored = kRaise)
//   kInvalidArgument  shape, dtype or grid differ from the stored ones and no rule allows it; a
//                     region outside the tensor; with `validate`, requests that do not cover every
//                     tensor; a buffer whose cells share memory (an expanded tensor); keys that no
//                     rank requests (not_requested = kRaise)
//   kDataLoss         stored bytes are missing or damaged: names tensor, box, file and byte; also
//                     if bytes changed on the way to the buffer
//   kStale            the ranks opened different checkpoints
//
// Example: two ranks load the halves of a tensor that any number of ranks saved:
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
