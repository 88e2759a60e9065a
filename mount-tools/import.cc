// SPDX-License-Identifier: Apache-2.0
// `tensormount import` (commands.h): saves a source as a checkpoint of a store. A rule (--shard)
// distributes the tensors over ranks. Each rank saves its regions with tensormount::Save, as a job
// does. Tensors are read from the source when the save needs them, so a rank keeps only a few
// blocks of them in memory. Objects are distributed over the ranks and kept in memory; all ranks
// set the common values, as a save requires.
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "tensormount/save.h"

#include "base/counted.h"
#include "base/log.h"
#include "collective/save_load.h"
#include "index/records/layer_names.h"
#include "mount-tools/commands.h"
#include "mount-tools/interrupt.h"
#include "mount-tools/ranks.h"
#include "mount-tools/source.h"
#include "state/shard_rule.h"

namespace tensormount::tools {
namespace {

// Adds the files of --with as objects, instead of objects of the source with their names.
Status AddBeside(const ModelFiles& files, StateDict& state) {
  for (const auto& [name, bytes] : files) {
    TENSORMOUNT_RETURN_IF_ERROR(state.AddObject(name, *bytes));
  }
  return {};
}

// Adds the config.json that the name map makes, if there is no other. Without one, warns.
void AddMadeConfig(const OpenedCheckpoint& source, std::shared_ptr<const ModelFiles>& beside,
                   Terminal& terminal) {
  const std::string name = "config.json";
  const MadeConfig* const made = source.made_config();
  if (made == nullptr || (beside && beside->contains(name))) return;
  if (source.index().ObjectParts(name).ok()) return;
  if (made->text.empty()) return terminal.Warn(made->Missing());
  ModelFiles files = beside ? *beside : ModelFiles();
  files[name] = std::make_shared<const std::string>(made->text);
  beside = std::make_shared<const ModelFiles>(std::move(files));
}

// Copies the layer names of stacked tensors to the state dict.
Status NameLayers(const CheckpointIndex& index, StateDict& state) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto layers, index.Layers());
  for (const auto& [key, pattern] : layers->patterns()) {
    const Status there = index.Find(key).status();
    if (there.code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(there);
    TENSORMOUNT_RETURN_IF_ERROR(state.NameLayers(key, pattern));
  }
  return {};
}

// Reads a rank's data for the save, in windows of kWindow bytes. The save requests small blocks,
// and a verified read of each block would read all leaves around it. Thread-safe after the last
// Add: each of the save's writers goes on in the window that it filled.
class SourceReader {
 public:
  explicit SourceReader(const OpenedCheckpoint& source) : source_(source) {}

  // Adds an item. Must be called in the order of the state dict's tensors.
  void Add(TensorEntry tensor, const Region& region) {
    items_.emplace_back(std::move(tensor), region);
  }

  // Reads bytes of an item (its position in the order of Add), as a ShardReader does.
  Status Read(std::uint32_t item, std::uint64_t offset, std::span<std::byte> out) {
    std::unique_ptr<Window> window = Take(item, offset);
    const Status read = Read(*window, item, offset, out);
    const std::lock_guard lock(mutex_);
    windows_.push_back(std::move(window));
    return read;
  }

 private:
  static constexpr std::uint64_t kWindow = std::uint64_t{4} << 20;

  // Bytes [begin, begin + bytes.size()) of the region of an item in packed order.
  struct Window {
    std::uint32_t item = 0;
    std::uint64_t begin = 0;
    std::vector<std::byte> bytes;
    std::size_t read = 0;  // Bytes before this one were read.
    bool WasRead() const { return read == bytes.size(); }
    bool Has(std::uint32_t of, std::uint64_t offset) const {
      return item == of && offset >= begin && offset < begin + bytes.size();
    }
  };

  // The window with this place, or one that this read may fill anew: never one in which another
  // writer goes on later, so there are as many as writers.
  std::unique_ptr<Window> Take(std::uint32_t item, std::uint64_t offset) {
    const std::lock_guard lock(mutex_);
    auto found =
        std::ranges::find_if(windows_, [&](const auto& w) { return w->Has(item, offset); });
    if (found == windows_.end()) {
      found = std::ranges::find_if(windows_, [](const auto& w) { return w->WasRead(); });
    }
    if (found == windows_.end()) return std::make_unique<Window>();
    std::unique_ptr<Window> window = std::move(*found);
    windows_.erase(found);
    return window;
  }

  Status Read(Window& window, std::uint32_t item, std::uint64_t offset,
              std::span<std::byte> out) const {
    while (!out.empty()) {
      if (!window.Has(item, offset)) TENSORMOUNT_RETURN_IF_ERROR(Fill(window, item, offset));
      const auto at = static_cast<std::size_t>(offset - window.begin);
      const std::size_t n = std::min(out.size(), window.bytes.size() - at);
      std::copy_n(window.bytes.data() + at, n, out.data());
      out = out.subspan(n);
      offset += n;
      window.read = at + n;
    }
    return {};
  }

  Status Fill(Window& window, std::uint32_t item, std::uint64_t offset) const {
    const auto& [tensor, region] = items_.at(item);
    window.bytes.clear();  // If the read fails, the window stays empty.
    window.read = 0;
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region bytes,
                                 ByteRegion(tensor.meta.dtype(), tensor.meta.shape(), region));
    const auto size = static_cast<std::uint64_t>(bytes.volume());
    if (offset >= size) {
      return Status(Code::kInternal,
                    "tensor " + tensor.meta.key() + ": a read begins past the end of the shard");
    }
    const std::uint64_t n = std::min(kWindow, size - offset);
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const Region part,
        Region::Flat(bytes.box(), bytes.flat_first() + static_cast<std::int64_t>(offset),
                     static_cast<std::int64_t>(n)));
    std::vector<std::byte> filled(static_cast<std::size_t>(n));
    ReadStats stats;
    TENSORMOUNT_RETURN_IF_ERROR(source_.ReadPlaced(tensor, PlacePacked(part, 0), filled.data(),
                                                   ReadVerify::kExtendLeaves, stats, nullptr));
    window.bytes = std::move(filled);
    window.item = item;
    window.begin = offset;
    return {};
  }

  const OpenedCheckpoint& source_;
  std::vector<std::pair<TensorEntry, Region>> items_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Window>> windows_;  // That no read uses.
};

// Adds one rank's shards to `state`, and to `reader` in the same order. After an error `state` is
// incomplete and must not be used.
Status FillState(const OpenedCheckpoint& source, const ShardRule& rule, const ModelFiles* beside,
                 Communicator& comm, SourceReader& reader, StateDict& state) {
  Status failure;
  const Status scan = source.index().ForEachTensor(0, [&](const TensorEntry& tensor) {
    const TensorMeta& meta = tensor.meta;
    auto region = rule.RegionOf(meta.key(), meta.dtype(), meta.shape(), comm.rank());
    if (!region.ok()) {
      failure = region.status().WithContext("tensor " + meta.key());
      return false;
    }
    reader.Add(tensor, region.value());
    failure = state.AddTensor(meta.key(), MetadataOnly(meta.dtype(), meta.shape(), region.value()));
    return failure.ok();
  });
  TENSORMOUNT_RETURN_IF_ERROR(scan);
  TENSORMOUNT_RETURN_IF_ERROR(failure);
  TENSORMOUNT_RETURN_IF_ERROR(NameLayers(source.index(), state));

  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<ObjectRecord> objects, source.index().Objects());
  if (beside != nullptr && comm.rank() == 0) {
    TENSORMOUNT_RETURN_IF_ERROR(AddBeside(*beside, state));
  }
  for (std::size_t i = 0; i < objects.size(); ++i) {
    if (beside != nullptr && beside->contains(objects[i].key)) continue;
    // Each object part is saved by one rank.
    if (static_cast<int>(i % static_cast<std::size_t>(comm.size())) != comm.rank()) continue;
    // The length is checked before memory is allocated: in a damaged index it may be any number.
    if (objects[i].file >= source.index().files().size() ||
        objects[i].length > source.index().files()[objects[i].file].length) {
      return Status(
          Code::kDataLoss,
          fmt::format("object {}: the object is larger than its data file", objects[i].key));
    }
    std::string bytes(objects[i].length, '\0');
    TENSORMOUNT_RETURN_IF_ERROR(source.ReadObject(objects[i], 0, bytes.data(), bytes.size()));
    TENSORMOUNT_RETURN_IF_ERROR(state.AddObject(
        objects[i].key, bytes, {.index = objects[i].index, .grid = objects[i].grid}));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(auto common, source.index().Common());
  for (const auto& [name, value] : common.values) {
    TENSORMOUNT_RETURN_IF_ERROR(state.SetCommon(name, value));
  }
  if (!common.content.items.empty()) {
    TENSORMOUNT_RETURN_IF_ERROR(state.SetContentMetadata(std::move(common.content)));
  }
  if (comm.rank() == 0 && !common.ranks.empty() && common.ranks.rbegin()->first >= comm.size()) {
    Log(LogLevel::kWarning,
        fmt::format("import: common values of single ranks are left out for rank {} and above (up "
                    "to rank {}), which this import does not have",
                    comm.size(), common.ranks.rbegin()->first));
  }
  // Rank n gets the values of rank n of the source, even if the source has another number of ranks.
  for (const auto& [name, value] : common.ranks[comm.rank()]) {
    TENSORMOUNT_RETURN_IF_ERROR(state.SetRankCommon(name, value));
  }
  return {};
}

// Parses --placement. With "auto" the save chooses the placement of each tensor.
Result<PlacementRule> ParsePlacement(const std::string& text) {
  static const std::map<std::string, PlacementRule> kRules = {
      {"auto", PlacementRule::kAuto},
      {"tensor-file", PlacementRule::kTensorFile},
      {"rank-shard", PlacementRule::kRankShard},
      {"safetensors", PlacementRule::kSafetensors}};
  const auto it = kRules.find(text);
  if (it == kRules.end()) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("--placement {}: must be auto, tensor-file, rank-shard or safetensors", text));
  }
  return it->second;
}

// Converts --reuse, --full-every and --inherit to options of the save.
Status ReadBase(const ImportArgs& args, SaveOptions& options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const StoreAndName to, SplitCheckpointPath(args.destination));
  options.full_every = args.full_every;
  if (args.reuse == "off") {
    options.reuse = Reuse::kOff;
  } else if (args.reuse != "auto") {
    const Result<std::string> name = NameInStore(to.store, args.reuse);
    TENSORMOUNT_RETURN_IF_ERROR(name.status().WithContext("--reuse"));
    options.reuse_from = name.value();
  }
  if (!args.inherit.empty()) {
    const Result<std::string> name = NameInStore(to.store, args.inherit);
    TENSORMOUNT_RETURN_IF_ERROR(name.status().WithContext("--inherit"));
    options.inherit = name.value();
  }
  return {};
}

nlohmann::ordered_json ReusedJson(const ReuseReport& reused) {
  return {{"base", reused.base},
          {"note", reused.note},
          {"tensors", reused.tensors},
          {"objects", reused.objects},
          {"bytes", reused.bytes},
          {"bytes_by_leaf", reused.bytes_by_leaf},
          {"bytes_by_comparison", reused.bytes_by_comparison},
          {"files_linked", reused.files_linked},
          {"bytes_linked", reused.bytes_linked},
          {"files_copied", reused.files_copied},
          {"bytes_copied", reused.bytes_copied}};
}

// The data files in rank 0's report.
nlohmann::ordered_json FilesJson(const SaveReport& report) {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const SaveReport::File& file : report.files) {
    files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  }
  return files;
}

// Prints rank 0's report. `beside`: names of other files in the source's directory, which are not
// part of the checkpoint (OpenedCheckpoint::beside).
void PrintImport(const SaveReport& report, const std::vector<std::string>& beside, int ranks,
                 Terminal& terminal) {
  // The time of the save, without the time to open the source.
  const double seconds = report.validate_seconds + report.plan_seconds + report.reuse_seconds +
                         report.write_seconds + report.compare_seconds + report.publish_seconds;
  for (const std::string& warning : report.warnings) terminal.Warn(warning);
  if (!terminal.json && !terminal.quiet) {
    for (const std::string& name : report.pruned)
      terminal.Line("removed by retention rule: " + name);
  }
  for (const std::string& why : report.not_pruned)
    terminal.Warn("not removed by retention rule: " + why);
  if (terminal.json) {
    nlohmann::ordered_json json = {{"path", report.path},
                                   {"uuid", report.uuid},
                                   {"generation", report.generation},
                                   {"ranks", ranks},
                                   {"tensors", report.tensors},
                                   {"bytes", report.bytes},
                                   {"bytes_written", report.bytes_written},
                                   {"replica_bytes", report.replica_bytes},
                                   {"replica_bytes_compared", report.replica_bytes_compared},
                                   {"validate_seconds", report.validate_seconds},
                                   {"plan_seconds", report.plan_seconds},
                                   {"reuse_seconds", report.reuse_seconds},
                                   {"write_seconds", report.write_seconds},
                                   {"compare_seconds", report.compare_seconds},
                                   {"publish_seconds", report.publish_seconds},
                                   {"files", FilesJson(report)},
                                   {"reused", ReusedJson(report.reused)},
                                   {"pruned", report.pruned},
                                   {"not_pruned", report.not_pruned}};
    if (!beside.empty()) json["beside"] = beside;
    if (!report.staged.empty()) {
      json["staged"] = report.staged;
      json["bytes_sent"] = report.bytes_sent;
      json["bytes_copied_in_bucket"] = report.bytes_copied_in_bucket;
      json["copy_seconds"] = report.copy_seconds;
    }
    terminal.Json(json);
    return;
  }
  if (terminal.quiet) return;
  terminal.Line(fmt::format("committed {}: {}, {} by {} in {} ({} written)", report.path,
                            Counted(report.tensors, "tensor"), HumanBytes(report.bytes),
                            Counted(static_cast<std::uint64_t>(ranks), "rank"),
                            HumanSeconds(seconds), HumanBytes(report.bytes_written)));
  if (!report.staged.empty()) {
    terminal.Line(fmt::format("copied from {}: {} sent, {} copied by the server, in {}",
                              report.staged, HumanBytes(report.bytes_sent),
                              HumanBytes(report.bytes_copied_in_bucket),
                              HumanSeconds(report.copy_seconds)));
  }
  const ReuseReport& reused = report.reused;
  if (reused.tensors + reused.objects > 0) {
    terminal.Line(fmt::format("{} of {} reused from {}: {} linked, {} copied",
                              Counted(reused.tensors, "tensor"), HumanBytes(reused.bytes),
                              reused.base, Counted(reused.files_linked, "file"),
                              HumanBytes(reused.bytes_copied)));
  }
  if (!reused.note.empty()) {
    terminal.Line(fmt::format("data of earlier checkpoints was not reused, or only in part: {}",
                              reused.note));
  }
}

// --statistics and --nonfinite.
Status ReadValueOptions(const ImportArgs& args, SaveOptions& options) {
  if (args.statistics != "basic" && args.statistics != "off") {
    return Status(Code::kInvalidArgument,
                  fmt::format("--statistics {}: must be basic or off", args.statistics));
  }
  if (args.statistics == "off") options.statistics = Statistics::kOff;
  if (args.nonfinite == "warn") {
    options.nonfinite = Nonfinite::kWarn;
  } else if (args.nonfinite == "refuse") {
    options.nonfinite = Nonfinite::kRefuse;
  } else if (args.nonfinite != "allow") {
    return Status(Code::kInvalidArgument,
                  fmt::format("--nonfinite {}: must be allow, warn or refuse", args.nonfinite));
  }
  options.nonfinite_exempt = args.nonfinite_exempt;
  return {};
}

}  // namespace

int RunImport(const ImportArgs& args, Terminal& terminal) {
  auto ranks = Ranks::Make(args.ranks);
  if (!ranks.ok()) return terminal.Fail(ranks.status());
  Ranks group = std::move(ranks).value();

  // An error before the collective call is passed to Save, so that the other ranks do not wait.
  Status before = SplitCheckpointPath(args.destination).status();
  SaveOptions options;
  options.timeouts = MakeTimeouts(args.liveness_seconds, args.arrival_seconds);
  if (before.ok()) {
    auto placement = ParsePlacement(args.placement);
    before = placement.status();
    if (placement.ok()) options.placement = placement.value();
  }
  if (before.ok() && args.if_exists != "fail" && args.if_exists != "replace") {
    before = Status(Code::kInvalidArgument,
                    fmt::format("--if-exists {}: must be fail or replace", args.if_exists));
  }
  options.if_exists = args.if_exists == "replace" ? IfExists::kReplace : IfExists::kFail;
  options.page_hashes = args.page_hashes;
  if (before.ok()) before = ReadValueOptions(args, options);
  options.writers = args.writers;
  if (before.ok()) before = ReadBase(args, options);
  options.ephemeral = args.ephemeral;
  options.staging = args.staging;
  if (before.ok() && !args.retain.empty()) {
    auto rules = RetentionRules::Parse(args.retain);
    before = rules.status().WithContext("--retain");
    if (rules.ok()) options.retention = std::move(rules).value();
  }
  std::shared_ptr<const OpenedCheckpoint> source;
  std::shared_ptr<const ModelFiles> beside;
  ShardRule rule;
  if (before.ok()) {
    auto opened = OpenSource(args.source, terminal, LossPolicyOf(args.partial));
    before = opened.status();
    if (opened.ok()) {
      const auto apply = [&]() -> Status {
        TENSORMOUNT_ASSIGN_OR_RETURN(const NameMap names, ReadNameMap(args.map));
        TENSORMOUNT_ASSIGN_OR_RETURN(source, ApplyNames(opened.value(), names));
        TENSORMOUNT_ASSIGN_OR_RETURN(beside, ReadFilesBeside(args.map));
        AddMadeConfig(*source, beside, terminal);
        return {};
      };
      before = apply();
    }
  }
  if (before.ok()) {
    auto parsed = ShardRule::ParseOrRead(args.shard, group.size());
    if (parsed.ok() && source) {
      const Status cuts = CheckShardRuleSplits(*source, args.shard, parsed.value(), group.size());
      if (!cuts.ok()) parsed = cuts;
    }
    before = parsed.status();
    if (parsed.ok()) rule = parsed.value();
  }
  // Without MPI no other process waits in the collective call, so the error ends the command here.
  if (!before.ok() && !group.is_mpi()) return terminal.Fail(before);

  const Interrupt interrupt;
  Progress progress(terminal, "import");
  // With MPI each process shows the progress of its own part.
  const auto writers = static_cast<std::uint64_t>(group.is_mpi() ? group.size() : 1);
  if (source) progress.SetTotal(source->index().tensor_bytes() / writers);
  options.progress = &progress.done();
  std::mutex mutex;
  SaveReport report;
  const Status status = group.Run([&](Communicator& comm) -> Status {
    StateDict state;
    std::optional<SourceReader> reader;
    SaveControl control = {.cancel = interrupt.flag()};
    Status mine = before;
    if (mine.ok()) {
      reader.emplace(*source);
      control.read = [&reader](std::uint32_t item, std::uint64_t offset, std::span<std::byte> out) {
        return reader->Read(item, offset, out);
      };
      mine = FillState(*source, rule, beside.get(), comm, *reader, state);
    }
    // A failed state dict makes Save fail on all ranks with this error.
    if (!mine.ok()) state.Fail(mine);
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveReport r,
                                 Save(state, args.destination, comm, options, control));
    for (const SaveReport::File& file : r.files) {
      terminal.Note(
          fmt::format("rank {}: {} in {}", comm.rank(), HumanBytes(file.bytes), file.name));
    }
    if (comm.rank() == 0) {
      std::lock_guard lock(mutex);
      report = r;
    }
    return {};
  });
  if (!status.ok()) return interrupt.ExitStatus(status, group.Fail(terminal, status));
  if (group.prints_results()) PrintImport(report, source->beside(), group.size(), terminal);
  return terminal.Flush();
}

}  // namespace tensormount::tools
