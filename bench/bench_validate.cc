// SPDX-License-Identifier: Apache-2.0
// What the check of a large job's layout costs, without the job: its messages are made here, read
// and judged as the ranks would do it. All times are CPU times of one core.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "bench/ckptbench.h"
#include "bench/peak_memory.h"
#include "collective/layout/layout.h"
#include "collective/layout/layout_round.h"
#include "collective/layout/wire.h"

namespace tensormount::bench {
namespace {

// Of this thread: everything here is computation, and machines are busy.
class CpuTimer {
 public:
  CpuTimer() : start_(Now()) {}
  double Seconds() const { return Now() - start_; }

 private:
  static double Now() {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  }
  double start_;
};

constexpr std::int64_t kTensorRanks = 8;
constexpr std::int64_t kPipelineRanks = 16;

std::string KeyOf(int tensor) {
  char key[64];
  std::snprintf(key, sizeof(key), "model.layers.%06d.mlp.gate_proj.weight", tensor);
  return key;
}

// The part of rank `at` of `parts` along one axis.
Region Part(const Dims& shape, int axis, std::int64_t at, std::int64_t parts) {
  Dims begin = Dims::Filled(shape.rank(), 0);
  Dims extent = shape;
  extent[axis] = shape[axis] / parts;
  begin[axis] = at * extent[axis];
  return Box::Make(begin, extent).value();
}

std::uint64_t SizeOf(const std::vector<std::string>& messages) {
  std::uint64_t bytes = 0;
  for (const std::string& m : messages) bytes += m.size();
  return bytes;
}

// The least that could be done with messages: look at every byte once.
Result<double> HashAll(const std::vector<std::string>& messages) {
  const CpuTimer timer;
  std::uint64_t sum = 0;
  for (const std::string& m : messages) sum ^= Xxh3Low64(m);
  asm volatile("" : : "r"(sum));
  return timer.Seconds();
}

Status WantSound(const LayoutReport& report) {
  return report.ok() ? Status() : report.ToStatus().WithContext("a sound layout");
}

RoundMessage MessageOf(const LayoutEncoder& encoder, const StateDict& state, int world) {
  RoundMessage m;
  m.world = static_cast<std::uint32_t>(world);
  m.boxes = static_cast<std::uint32_t>(state.tensors().size());
  m.layout = encoder.Hashes();
  return m;
}

// ---- Tensor, pipeline and data parallel ----------------------------------------------------

// Every pipeline rank has its share of the tensors; of these, some are cut by rows, some by
// columns, and every fourth is a replica on all tensor-parallel ranks.
StateDict GridState(const Options& options, std::int64_t tensor_rank, std::int64_t stage) {
  StateDict state;
  for (int t = static_cast<int>(stage); t < options.tensors; t += kPipelineRanks) {
    const std::string key = KeyOf(t);
    const int cut = t / static_cast<int>(kPipelineRanks) % 4;
    const Dims shape = cut == 3 ? Dims{4096} : Dims{4096, 16384};
    const Region region =
        cut == 3 ? Region(Box::Whole(shape)) : Part(shape, cut % 2, tensor_rank, kTensorRanks);
    (void)state.AddTensor(key, MetadataOnly(DType::kBF16, shape, region));
  }
  return state;
}

struct GridJob {
  std::vector<std::string> first;    // By rank.
  std::vector<std::string> layouts;  // By distinct layout.
};

GridJob MakeGridJob(const Options& options) {
  GridJob job;
  const auto distinct = static_cast<std::size_t>(kTensorRanks * kPipelineRanks);
  std::vector<std::string> first;
  for (std::int64_t stage = 0; stage < kPipelineRanks; ++stage) {
    for (std::int64_t rank = 0; rank < kTensorRanks; ++rank) {
      const StateDict state = GridState(options, rank, stage);
      const LayoutEncoder encoder(state);
      first.push_back(EncodeRound(MessageOf(encoder, state, options.world)));
      job.layouts.push_back(std::move(encoder.Encode(1, LayoutPart::kAll)[0]));
    }
  }
  for (int r = 0; r < options.world; ++r) {
    job.first.push_back(first[static_cast<std::size_t>(r) % distinct]);
  }
  return job;
}

// Everything that rank 0 does, owner of all keys: first messages, layouts, verdict.
Result<LayoutReport> JudgeGridJob(const Options& options, const GridJob& job) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const RoundAnswer answer, AnswerRound(job.first, 1));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const RoundAnswer told,
      DecodeAnswer(EncodeAnswer(answer), static_cast<std::uint32_t>(options.world)));
  const std::vector<std::vector<int>> ranks = RanksByClass(told.tensors);
  LayoutTable table;
  for (std::size_t i = 0; i < job.layouts.size() && i < ranks.size(); ++i) {
    TENSORMOUNT_RETURN_IF_ERROR(table.Add(job.layouts[i], ranks[i]));
  }
  return CheckLayout(table, {options.world, 100, nullptr});
}

Status BenchGrid(const Options& options) {
  const GridJob job = MakeGridJob(options);
  LayoutReport report;
  PeakMemory peak;
  double mib = 0;
  Case c;
  c.workload = "validate";
  c.name = "tp8 x pp16 x dp, one rank judges all";
  c.floor_name = "XXH3 of the messages";
  c.ours = [&]() -> Result<double> {
    peak.Begin();
    const CpuTimer timer;
    TENSORMOUNT_ASSIGN_OR_RETURN(report, JudgeGridJob(options, job));
    const double seconds = timer.Seconds();
    mib = std::max(mib, peak.MiB());
    TENSORMOUNT_RETURN_IF_ERROR(WantSound(report));
    return seconds;
  };
  c.floor = [&]() -> Result<double> {
    TENSORMOUNT_ASSIGN_OR_RETURN(const double first, HashAll(job.first));
    TENSORMOUNT_ASSIGN_OR_RETURN(const double layouts, HashAll(job.layouts));
    return first + layouts;
  };
  c.facts = [&] {
    return std::map<std::string, double>{
        {"world", options.world},
        {"tensors", static_cast<double>(report.tensors)},
        {"boxes", static_cast<double>(report.boxes)},
        {"layouts", static_cast<double>(report.layouts)},
        {"messages", static_cast<double>(job.first.size() + job.layouts.size())},
        {"message_bytes", static_cast<double>(SizeOf(job.first) + SizeOf(job.layouts))},
        {"peak_mib", mib}};
  };
  TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));

  c.name = "unchanged: 64 bytes a rank";
  c.floor_name = "XXH3 of the messages";
  c.ours = [&]() -> Result<double> {
    const CpuTimer timer;
    TENSORMOUNT_ASSIGN_OR_RETURN(const RoundAnswer answer, AnswerRound(job.first, 0));
    asm volatile("" : : "r"(answer.owners));
    return timer.Seconds();
  };
  c.floor = [&] { return HashAll(job.first); };
  c.facts = [&] {
    return std::map<std::string, double>{{"world", options.world},
                                         {"messages", static_cast<double>(job.first.size())},
                                         {"message_bytes", static_cast<double>(SizeOf(job.first))}};
  };
  return RunCase(options, c);
}

// ---- FSDP -----------------------------------------------------------------------------------

// Every rank has one row of every tensor.
StateDict RowState(const Options& options, int rank, const std::vector<int>& tensors) {
  StateDict state;
  const Dims shape = {options.world, 4096};
  for (const int t : tensors) {
    (void)state.AddTensor(KeyOf(t),
                          MetadataOnly(DType::kBF16, shape, Part(shape, 0, rank, options.world)));
  }
  return state;
}

Status BenchRows(const Options& options) {
  const std::uint64_t boxes =
      static_cast<std::uint64_t>(options.world) * static_cast<std::uint64_t>(options.tensors);
  const auto owners = static_cast<std::uint32_t>(std::min<std::uint64_t>(
      boxes / kBoxesAnOwner + 1, static_cast<std::uint64_t>(options.world)));
  std::vector<int> all;
  std::vector<int> owned;
  for (int t = 0; t < options.tensors; ++t) {
    all.push_back(t);
    if (OwnerOf(KeyOf(t), owners) == 0) owned.push_back(t);
  }
  if (owned.empty()) owned.push_back(0);
  std::vector<std::string> messages;
  std::vector<std::vector<int>> ranks;
  for (int r = 0; r < options.world; ++r) {
    const StateDict state = RowState(options, r, owned);
    messages.push_back(std::move(LayoutEncoder(state).Encode(1, LayoutPart::kAll)[0]));
    ranks.push_back({r});
  }

  LayoutReport report;
  PeakMemory peak;
  double mib = 0;
  double best = 1e9;
  Case c;
  c.workload = "validate";
  c.name = "fsdp, the share of one owner";
  c.floor_name = "XXH3 of the messages";
  c.ours = [&]() -> Result<double> {
    peak.Begin();
    const CpuTimer timer;
    LayoutTable table;
    for (std::size_t r = 0; r < messages.size(); ++r) {
      TENSORMOUNT_RETURN_IF_ERROR(table.Add(messages[r], ranks[r]));
    }
    report = CheckLayout(table, {options.world, 100, nullptr});
    const double seconds = timer.Seconds();
    mib = std::max(mib, peak.MiB());
    best = std::min(best, seconds);
    TENSORMOUNT_RETURN_IF_ERROR(WantSound(report));
    return seconds;
  };
  c.floor = [&] { return HashAll(messages); };
  c.facts = [&] {
    const double here = static_cast<double>(report.boxes);
    const double each = best / here;
    return std::map<std::string, double>{
        {"world", options.world},
        {"owners", owners},
        {"tensors", static_cast<double>(report.tensors)},
        {"boxes", here},
        {"best_ns_a_box", each * 1e9},
        // All boxes of the job, by all of its ranks.
        {"best_ms_a_rank", each * static_cast<double>(boxes) / options.world * 1e3},
        {"messages", static_cast<double>(messages.size())},
        {"message_bytes", static_cast<double>(SizeOf(messages))},
        {"peak_mib", mib}};
  };
  TENSORMOUNT_RETURN_IF_ERROR(RunCase(options, c));

  const StateDict state = RowState(options, 1, all);
  std::vector<std::string> sent;
  c.name = "fsdp, what one rank sends";
  c.floor_name = "XXH3 of the messages";
  c.ours = [&]() -> Result<double> {
    const CpuTimer timer;
    const LayoutEncoder encoder(state);
    const std::string first = EncodeRound(MessageOf(encoder, state, options.world));
    asm volatile("" : : "r"(first.data()));
    sent = encoder.Encode(owners, LayoutPart::kAll);
    return timer.Seconds();
  };
  c.floor = [&]() -> Result<double> {
    if (sent.empty()) sent = LayoutEncoder(state).Encode(owners, LayoutPart::kAll);
    return HashAll(sent);
  };
  c.facts = [&] {
    return std::map<std::string, double>{
        {"world", options.world},
        {"boxes", static_cast<double>(all.size())},
        {"messages", static_cast<double>(std::count_if(sent.begin(), sent.end(),
                                                       [](const auto& m) { return !m.empty(); }))},
        {"message_bytes", static_cast<double>(SizeOf(sent))}};
  };
  return RunCase(options, c);
}

}  // namespace

Status BenchValidate(const Options& options) {
  if (options.world % (kTensorRanks * kPipelineRanks) != 0) {
    return Status(Code::kInvalidArgument, "--world must be a multiple of 128");
  }
  TENSORMOUNT_RETURN_IF_ERROR(BenchGrid(options));
  return BenchRows(options);
}

}  // namespace tensormount::bench
