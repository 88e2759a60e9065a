// SPDX-License-Identifier: Apache-2.0
// `tensormount load` (commands.h): loads every rank's shards into memory, as a job would, and
// measures the time. Each process opens the sources and reads map and rule. Each rank allocates its
// buffers, and the ranks agree that all succeeded, so that their clocks start together. After Load,
// with --compare, each rank compares its regions with the other source. Rank 0 prints the figures
// of all ranks.
#include "tensormount/load.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "base/glob.h"
#include "collective/comm/collective.h"
#include "index/records/name_binding.h"
#include "mount-tools/commands.h"
#include "mount-tools/host_memory.h"
#include "mount-tools/ranks.h"
#include "mount-tools/source.h"
#include "state/shard_rule.h"

namespace tensormount::tools {
namespace {

// The figures of one rank. Ranks exchange them as raw memory, which is safe because all ranks run
// the same program.
struct RankFigures {
  std::uint64_t wanted = 0;
  std::uint64_t read = 0;
  std::uint64_t received = 0;
  std::uint64_t by_leaf = 0;
  std::uint64_t by_digest = 0;
  std::uint64_t unverified = 0;
  std::uint64_t messages = 0;
  std::uint64_t peak_buffers = 0;
  std::uint64_t tensors = 0;
  std::uint64_t compared_bytes = 0;
  std::uint64_t different_tensors = 0;
  std::uint64_t peak_memory = 0;  // Peak memory of the process, in bytes.
  double seconds = 0;
};

// The peak memory of this process, in bytes. ru_maxrss of getrusage is not used, because it
// includes memory of the process that started this one.
std::uint64_t PeakMemory() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with("VmHWM:")) return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
  }
  return 0;
}

// Adds this rank's region of each tensor that matches --keys, with buffers from `memory`.
Status FillRequest(const OpenedCheckpoint& source, const LoadArgs& args, const ShardRule& rule,
                   int rank, HostMemory& memory, StateDict& request) {
  Status failure;
  TENSORMOUNT_RETURN_IF_ERROR(source.index().ForEachTensor(0, [&](const TensorEntry& tensor) {
    const TensorMeta& meta = tensor.meta;
    if (!args.keys.empty() && !GlobMatches(args.keys, meta.key())) return true;
    auto region = rule.RegionOf(meta.key(), meta.dtype(), meta.shape(), rank);
    failure = region.status();
    if (!failure.ok()) return false;
    auto buffer = memory.BufferFor(meta, region.value());
    failure = buffer.status();
    if (!failure.ok()) return false;
    failure = request.AddTensor(
        meta.key(),
        Shard{.global_shape = meta.shape(), .region = region.value(), .data = buffer.value()});
    return failure.ok();
  }));
  return failure;
}

// Calls fn with the key of each tensor.
Status ForEachKey(const CheckpointIndex& index, const std::function<void(const std::string&)>& fn) {
  return index.ForEachTensor(0, [&](const TensorEntry& tensor) {
    fn(tensor.meta.key());
    return true;
  });
}

// Fails if --keys matches no key of either source, because then nothing would be loaded, and the
// sources would be reported as equal.
Status CheckKeysMatch(const OpenedCheckpoint& source, const OpenedCheckpoint* other,
                      const LoadArgs& args) {
  if (args.keys.empty()) return {};
  bool any = false;
  const auto look = [&](const std::string& name) { any |= GlobMatches(args.keys, name); };
  TENSORMOUNT_RETURN_IF_ERROR(ForEachKey(source.index(), look));
  if (!any && other != nullptr) TENSORMOUNT_RETURN_IF_ERROR(ForEachKey(other->index(), look));
  if (any) return {};
  return {Code::kNotFound, fmt::format("--keys '{}': no key matches it", args.keys)};
}

// Warns of and counts the keys that only the second source has, except stored keys that the map
// drops from the first.
Status CompareKeys(const OpenedCheckpoint& source, const OpenedCheckpoint& other,
                   const LoadArgs& args, Terminal& terminal, RankFigures& figures) {
  std::unordered_set<std::string> names;
  const auto note = [&](const std::string& name) { names.insert(name); };
  TENSORMOUNT_RETURN_IF_ERROR(ForEachKey(source.index(), note));
  if (source.is_mapped()) {
    TENSORMOUNT_RETURN_IF_ERROR(ForEachKey(source.stored_index(), [&](const std::string& key) {
      if (source.LeavesOut(key)) note(key);
    }));
  }
  return ForEachKey(other.index(), [&](const std::string& name) {
    if (names.contains(name) || (!args.keys.empty() && !GlobMatches(args.keys, name))) return;
    ++figures.different_tensors;
    terminal.Warn(fmt::format("tensor {}: missing in the first source", name));
  });
}

// Compares the loaded data with the same regions of `other`, byte for byte, and warns of the first
// byte that differs in each tensor. Takes memory for one region at a time.
Status Compare(const OpenedCheckpoint& source, const OpenedCheckpoint& other,
               const StateDict& loaded, Terminal& terminal, RankFigures& figures) {
  for (const StateDict::TensorItem& item : loaded.tensors()) {
    const Region& region = item.shard.region;
    if (region.empty()) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry mine, source.index().Find(item.key));
    const TensorMeta& meta = mine.meta;
    const std::string& name = meta.key();
    auto entry = other.index().Find(name);
    const bool same_kind = entry.ok() && entry.value().meta.dtype() == meta.dtype() &&
                           entry.value().meta.shape() == meta.shape();
    if (!same_kind) {
      if (!entry.ok() && entry.status().code() != Code::kNotFound) return entry.status();
      ++figures.different_tensors;
      terminal.Warn(fmt::format("tensor {}: {} in the second source", name,
                                entry.ok() ? "different dtype or shape" : "missing"));
      continue;
    }
    HostMemory memory;
    TENSORMOUNT_ASSIGN_OR_RETURN(BufferView theirs, memory.BufferFor(meta, region));
    TENSORMOUNT_RETURN_IF_ERROR(
        other.Read(entry.value(), region, theirs, ReadVerify::kExtendLeaves, nullptr, nullptr));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t size,
                                 RegionBytes(meta.dtype(), meta.shape(), region));
    figures.compared_bytes += size;
    const auto* a = static_cast<const unsigned char*>(item.shard.data.data);
    const auto* b = static_cast<const unsigned char*>(theirs.data);
    if (std::memcmp(a, b, size) != 0) {
      ++figures.different_tensors;
      const auto at = static_cast<std::uint64_t>(std::mismatch(a, a + size, b).first - a);
      terminal.Warn(
          fmt::format("tensor {} {}: byte {} of the slice differs", name, region.ToString(), at));
    }
  }
  return {};
}

nlohmann::ordered_json FiguresJson(const RankFigures& f) {
  return {{"bytes_wanted", f.wanted},
          {"bytes_read", f.read},
          {"bytes_received", f.received},
          {"bytes_by_leaf", f.by_leaf},
          {"bytes_by_digest", f.by_digest},
          {"bytes_unverified", f.unverified},
          {"messages_sent", f.messages},
          {"peak_buffer_bytes", f.peak_buffers},
          {"seconds", f.seconds},
          {"peak_memory", f.peak_memory},
          {"compared_bytes", f.compared_bytes},
          {"different_tensors", f.different_tensors}};
}

// Prints the figures of each rank and of all ranks together.
void PrintFigures(const std::vector<RankFigures>& all, bool compared, Terminal& terminal) {
  RankFigures sum;
  for (const RankFigures& f : all) {
    sum.wanted += f.wanted;
    sum.read += f.read;
    sum.received += f.received;
    sum.by_leaf += f.by_leaf;
    sum.by_digest += f.by_digest;
    sum.unverified += f.unverified;
    sum.messages += f.messages;
    // Buffers, tensors, time and memory are maxima; all other figures are sums.
    sum.peak_buffers = std::max(sum.peak_buffers, f.peak_buffers);
    sum.compared_bytes += f.compared_bytes;
    sum.different_tensors += f.different_tensors;
    sum.tensors = std::max(sum.tensors, f.tensors);
    sum.seconds = std::max(sum.seconds, f.seconds);
    sum.peak_memory = std::max(sum.peak_memory, f.peak_memory);
  }
  if (terminal.json) {
    nlohmann::ordered_json json = FiguresJson(sum);
    json["ranks"] = all.size();
    json["tensors"] = sum.tensors;
    for (const RankFigures& f : all) json["per_rank"].push_back(FiguresJson(f));
    terminal.Json(json);
    return;
  }
  if (terminal.quiet) return;
  for (std::size_t r = 0; r < all.size(); ++r) {
    terminal.Line(fmt::format("rank {}: {} needed, {} read, {}, peak memory {}", r,
                              HumanBytes(all[r].wanted), HumanBytes(all[r].read),
                              HumanSeconds(all[r].seconds), HumanBytes(all[r].peak_memory)));
  }
  terminal.Line(fmt::format("{} on {}: {} verified by leaf, {} by digest, {} unverified",
                            Counted(sum.tensors, "tensor"), Counted(all.size(), "rank"),
                            HumanBytes(sum.by_leaf), HumanBytes(sum.by_digest),
                            HumanBytes(sum.unverified)));
  if (compared) {
    terminal.Line(fmt::format("compared {}: {}", HumanBytes(sum.compared_bytes),
                              sum.different_tensors == 0
                                  ? std::string("all bytes equal")
                                  : fmt::format("{} slices differ", sum.different_tensors)));
  }
}

}  // namespace

int RunLoad(const LoadArgs& args, Terminal& terminal) {
  auto made = Ranks::Make(args.ranks);
  if (!made.ok()) return terminal.Fail(made.status());
  Ranks group = std::move(made).value();

  Status before;
  std::shared_ptr<const OpenedCheckpoint> source;
  std::shared_ptr<OpenedCheckpoint> other;
  ShardRule rule;
  NameMap names;
  // Called once for all ranks of this process. Under mpirun an error is reported to the other ranks
  // by Agree below.
  const auto prepare = [&]() -> Status {
    // OpenSource only warns of missing data. CheckSourceComplete below fails if data of requested
    // keys are missing.
    const LossPolicy lost = args.partial ? LossPolicy::kLeaveOut : LossPolicy::kWarn;
    TENSORMOUNT_ASSIGN_OR_RETURN(source, OpenSource(args.source, terminal, lost));
    if (!args.compare.empty()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(other, OpenSource(args.compare, terminal, lost));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(names, ReadNameMap(args.map));
    TENSORMOUNT_ASSIGN_OR_RETURN(source, ApplyNames(source, names));
    if (!args.partial) {
      TENSORMOUNT_RETURN_IF_ERROR(CheckSourceComplete(*source, args.keys));
      if (other) TENSORMOUNT_RETURN_IF_ERROR(CheckSourceComplete(*other, args.keys));
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(rule, ShardRule::ParseOrRead(args.shard, group.size()));
    TENSORMOUNT_RETURN_IF_ERROR(CheckShardRuleSplits(*source, args.shard, rule, group.size()));
    return CheckKeysMatch(*source, other.get(), args);
  };
  before = prepare();
  if (!before.ok() && !group.is_mpi()) return terminal.Fail(before);
  // The resolved path, so that Load opens the checkpoint that was opened here even if "latest" has
  // changed.
  const std::string path = source ? source->directory() : args.source;

  Progress progress(terminal, "load");
  std::mutex mutex;
  std::vector<RankFigures> all;
  std::uint64_t different = 0;
  const Status status = group.Run([&](Communicator& comm) -> Status {
    HostMemory memory;
    StateDict request;
    Status mine = before;
    if (mine.ok()) mine = FillRequest(*source, args, rule, comm.rank(), memory, request);
    progress.AddTotal(memory.bytes());
    LoadOptions options;
    options.progress = &progress.done();
    options.timeouts = MakeTimeouts(args.liveness_seconds, args.arrival_seconds);
    options.roots = terminal.roots;
    options.names = names;
    // With --keys only some keys are requested, so keys that are not requested are no error.
    options.not_requested = Strict::kIgnore;
    // Agree returns when all ranks have allocated their memory, so their clocks start together.
    Collective collective(comm, options.timeouts);
    TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(mine, "prepare"));
    const auto start = std::chrono::steady_clock::now();
    TENSORMOUNT_ASSIGN_OR_RETURN(LoadReport report, Load(request, path, comm, options));
    RankFigures figures;
    figures.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    figures.wanted = report.bytes_wanted;
    figures.read = report.bytes_read;
    figures.received = report.bytes_received;
    figures.by_leaf = report.bytes_by_leaf;
    figures.by_digest = report.bytes_by_digest;
    figures.unverified = report.bytes_unverified;
    figures.messages = report.messages_sent;
    figures.peak_buffers = report.peak_buffer_bytes;
    figures.tensors = request.tensors().size();
    // The value is that of the process, so ranks that are threads of one process report the same.
    figures.peak_memory = PeakMemory();
    Status compared = other ? Compare(*source, *other, request, terminal, figures) : Status();
    if (compared.ok() && other && comm.rank() == 0) {
      compared = CompareKeys(*source, *other, args, terminal, figures);
    }
    TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(compared, "compare"));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::vector<std::string> gathered,
        collective.AllGather({reinterpret_cast<const char*>(&figures), sizeof figures}, "report"));
    std::lock_guard lock(mutex);
    all.clear();
    different = 0;
    for (const std::string& bytes : gathered) {
      if (bytes.size() != sizeof(RankFigures)) {
        return Status(Code::kInternal,
                      fmt::format("the report of rank {} has {} bytes instead of {}", all.size(),
                                  bytes.size(), sizeof(RankFigures)));
      }
      RankFigures f;
      std::memcpy(&f, bytes.data(), sizeof f);
      different += f.different_tensors;
      all.push_back(f);
    }
    return {};
  });
  if (!status.ok()) return group.Fail(terminal, status);
  if (group.prints_results()) PrintFigures(all, other != nullptr, terminal);
  const int flushed = terminal.Flush();
  if (flushed != kDone) return flushed;
  // Each rank has the figures of all ranks, so all return the same status.
  return different == 0 ? kDone : kCheckFailed;
}

}  // namespace tensormount::tools
