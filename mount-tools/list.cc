// SPDX-License-Identifier: Apache-2.0
// `tensormount ls` and `info` (commands.h). `ls` prints each key when it is read from the index, so
// its memory does not grow with the number of keys. `info` of a tensor also prints each chunk.
#include <algorithm>
#include <set>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "base/glob.h"
#include "fs/views/checkpoint_text.h"
#include "index/foreign/format.h"
#include "index/read/known_defects.h"
#include "index/records/common_state.h"
#include "index/records/layer_names.h"
#include "index/records/store_paths.h"
#include "index/store/costs.h"
#include "index/store/kept_statistics.h"
#include "index/store/pins.h"
#include "index/store/store.h"
#include "index/store/store_json.h"
#include "index/store/store_moves.h"
#include "mount-tools/commands.h"
#include "mount-tools/nearest.h"
#include "mount-tools/shown_text.h"
#include "mount-tools/source.h"
#include "mount-tools/value_columns.h"

namespace tensormount::tools {
namespace {

std::vector<std::int64_t> ShapeVector(const TensorEntry& tensor) {
  return {tensor.meta.shape().begin(), tensor.meta.shape().end()};
}

// The fields of a tensor that ls --json and info --json have; docs/cli.md lists them.
nlohmann::ordered_json TensorJson(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor) {
  nlohmann::ordered_json json = {
      {"key", tensor.meta.key()},     {"dtype", InfoOf(tensor.meta.dtype()).name},
      {"shape", ShapeVector(tensor)}, {"bytes", tensor.meta.bytes()},
      {"chunks", tensor.chunks},      {"placement", PlacementOf(checkpoint, tensor)}};
  if (tensor.has_digest) json["digest"] = DigestHex(tensor.digest);
  return json;
}

// A line of ls -l for a checkpoint: 55 columns, then the name.
std::string DetailsLine(const Terminal& terminal, std::uint64_t generation, const std::string& date,
                        const std::string& size, const std::string& own, bool latest,
                        const char* pinned, const std::string& name) {
  std::string line = fmt::format("{:>8} {:<16} {:>8} {:>8} {:<6} {:<3} ", generation, date, size,
                                 own, latest ? "latest" : "", pinned);
  return line + terminal.LastName(name, line.size());
}

// Lists the steps of a training directory. They have no UUIDs, and their generation is the number
// in the directory's name.
int ListSteps(const FoundSource& source, const LsArgs& args, Terminal& terminal) {
  const auto folder = ForeignFolder::Open(*source.fs, source.path, terminal.roots);
  if (!folder.ok()) return terminal.Fail(folder.status());
  const auto steps = ReadForeignSteps(folder.value());
  if (!steps.ok()) return terminal.Fail(steps.status());
  if (!steps.value()) return terminal.Flush();  // All steps were removed meanwhile.
  for (const ForeignStep& step : steps.value()->steps) {
    const bool latest = step.name == steps.value()->latest;
    // The date of a step is that of its directory, because reading the files of all steps would
    // take long.
    const auto info = args.details ? source.fs->Stat(source.path + "/" + step.name)
                                   : Result<FileInfo>(FileInfo{});
    if (!info.ok()) return terminal.Fail(info.status());
    if (terminal.json) {
      nlohmann::ordered_json json = {
          {"checkpoint", step.name}, {"generation", step.generation}, {"latest", latest}};
      if (args.details) json["modified"] = info.value().mtime_seconds;
      terminal.Json(json);
    } else if (args.details) {
      terminal.Line(DetailsLine(terminal, step.generation, DateText(info.value().mtime_seconds), "",
                                "", latest, /*pinned=*/"", step.name));
    } else {
      terminal.Line(
          fmt::format("{}\tgeneration {}{}", step.name, step.generation, latest ? "\tlatest" : ""));
    }
  }
  return terminal.Flush();
}

int InfoSteps(const FoundSource& source, Terminal& terminal) {
  const auto folder = ForeignFolder::Open(*source.fs, source.path, terminal.roots);
  if (!folder.ok()) return terminal.Fail(folder.status());
  const auto steps = ReadForeignSteps(folder.value());
  if (!steps.ok()) return terminal.Fail(steps.status());
  const ForeignSteps all = steps.value().value_or(ForeignSteps());
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{{"training_directory", source.path},
                                         {"checkpoints", all.steps.size()},
                                         {"latest", all.latest}});
  } else {
    terminal.Line(fmt::format("training directory  {}", source.path));
    terminal.Line(fmt::format("checkpoints         {}", all.steps.size()));
    terminal.Line(fmt::format("latest              {}", all.latest.empty() ? "none" : all.latest));
  }
  return terminal.Flush();
}

// Prints an object: its parts, and a description of each.
int InfoObject(const OpenedCheckpoint& checkpoint, const std::vector<ObjectRecord>& parts,
               Terminal& terminal) {
  for (const ObjectRecord& part : parts) {
    // A pickle is parsed and never executed.
    const auto text = DescribePart(checkpoint, part);
    if (!text.ok()) return terminal.Fail(text.status().WithContext("object " + part.key));
    const std::string& file = checkpoint.index().files()[part.file].name;
    if (terminal.json) {
      terminal.Json(nlohmann::ordered_json{
          {"object", part.key},
          {"index", std::vector<std::int64_t>(part.index.begin(), part.index.end())},
          {"file", file},
          {"offset", part.offset},
          {"bytes", part.length},
          {"text", text.value()}});
      continue;
    }
    terminal.Line(fmt::format("object     {}", part.key));
    if (part.grid.rank() > 0) {
      terminal.Line(
          fmt::format("part       {} of {}", part.index.ToString(), part.grid.ToString()));
    }
    terminal.Line(fmt::format("bytes      {} in {} at {}", part.length, file, part.offset));
    terminal.Text(ShownText(text.value(), "\n\t"));
  }
  return terminal.Flush();
}

// Adds the size of the foreign files of an adopted checkpoint to `bytes`. The checkpoint is opened,
// because only its index has these sizes.
Status ReadForeignBytes(FileSystem& fs, const std::string& folder, const Terminal& terminal,
                        std::uint64_t* bytes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened,
                               OpenedCheckpoint::Open(fs, folder, {.roots = terminal.roots}));
  for (const FileRecord& file : opened->index().files()) {
    if (file.placement == Placement::kForeign) *bytes += file.length;
  }
  return {};
}

// The checkpoints of a store; with `details` also the bytes that each takes. Only COMMIT and the
// begin of a manifest of each checkpoint are read, so that a store with thousands is listed
// quickly.
Result<std::vector<CheckpointCost>> ReadListings(const Store& store, bool details) {
  std::vector<CheckpointCost> all;
  if (details) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const StoreCosts costs, StoreCosts::Of(store.fs(), store));
    return costs.checkpoints();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<CheckpointListing> listed, store.List());
  for (CheckpointListing& item : listed) all.push_back({.listing = std::move(item)});
  return all;
}

// Numbers of bytes in a store that belong to no checkpoint.
struct UnreferencedBytes {
  std::uint64_t trash = 0;
  std::uint64_t staging = 0;

  static Result<UnreferencedBytes> Of(const Store& store) {
    const auto below = [&](std::string_view folder) {
      return OwnBytes::Below(store.fs(), JoinPath(store.path(), folder));
    };
    UnreferencedBytes hidden;
    TENSORMOUNT_ASSIGN_OR_RETURN(hidden.trash, below(store_paths::kTrashFolder));
    TENSORMOUNT_ASSIGN_OR_RETURN(hidden.staging, below(store_paths::kStagingFolder));
    return hidden;
  }
  std::string TrashText() const {
    return fmt::format("{} in .trash, which gc frees", HumanBytes(trash));
  }
  std::string StagingText() const {
    return fmt::format("{} in .staging: saves and copies in progress, or leftovers of failed ones",
                       HumanBytes(staging));
  }
};

int ListStore(const FoundSource& source, const LsArgs& args, Terminal& terminal) {
  auto store = Store::Open(*source.fs, source.path);
  if (!store.ok()) return terminal.Fail(store.status());
  const auto list = ReadListings(store.value(), args.details);
  if (!list.ok()) return terminal.Fail(list.status());
  // If the latest checkpoint cannot be determined, no line is marked as latest.
  std::vector<CheckpointListing> listings;
  for (const CheckpointCost& cost : list.value()) listings.push_back(cost.listing);
  const auto latest = store.value().LatestOf(listings);
  pins::PinMap pinned;
  Status pins_read;
  if (args.details) {
    auto all = pins::ReadAll(*source.fs, store.value().path(), source.fs->NowSeconds());
    pins_read = all.status();
    if (!all.ok()) terminal.Warn("cannot read the pins: " + all.status().message());
    if (all.ok()) pinned = std::move(all).value();
  }
  int worst = kDone;
  for (const CheckpointCost& cost : list.value()) {
    CheckpointListing item = cost.listing;
    std::uint64_t foreign = 0;
    if (args.details && item.problem.ok() && !cost.self_contained) {
      item.problem =
          ReadForeignBytes(*source.fs, source.path + "/" + item.name, terminal, &foreign);
      // kNotFound means that the checkpoint was removed meanwhile.
      if (item.problem.code() == Code::kNotFound) continue;
      if (!item.problem.ok()) {
        item.state = item.problem.code() == Code::kDataLoss ? CheckpointListing::State::kDamaged
                                                            : CheckpointListing::State::kUnread;
      }
    }
    const bool is_latest =
        latest.ok() && latest.value().name == item.name && latest.value().uuid == item.uuid;
    const auto pin = pinned.find(item.uuid);
    const bool is_pinned = pin != pinned.end() && !pin->second.expired;
    // A damaged or unreadable checkpoint is listed, and also changes the exit status.
    if (item.state == CheckpointListing::State::kUnread) worst = kFailed;
    if (item.state == CheckpointListing::State::kDamaged) worst = std::max(worst, kCheckFailed);
    if (terminal.json) {
      nlohmann::ordered_json json = ListingJson(item, is_latest);
      if (args.details && item.problem.ok()) {
        AddCostJson(cost, json);
        json["file_bytes"] = cost.data_bytes + foreign;
        json["pinned"] = is_pinned;
        if (!pins_read.ok()) json["pinned"] = nullptr;
      }
      terminal.Json(json);
    } else if (item.problem.ok() && args.details) {
      terminal.Line(DetailsLine(terminal, item.generation, DateText(cost.created),
                                HumanBytes(cost.bytes + foreign), HumanBytes(cost.own_bytes),
                                is_latest,
                                !pins_read.ok() ? "?"
                                : is_pinned     ? "pin"
                                                : "",
                                item.name));
    } else if (item.problem.ok()) {
      terminal.Line(
          fmt::format("{}\tgeneration {}\t{}", item.name, item.generation, item.uuid.ToString()));
    } else {
      terminal.Line(fmt::format("{}\t{}", item.name,
                                item.state == CheckpointListing::State::kNoCheckpoint
                                    ? "the directory is not a checkpoint: it has no COMMIT"
                                    : item.problem.ToString()));
    }
  }
  if (args.details && !terminal.json && !terminal.quiet) {
    const Result<UnreferencedBytes> hidden = UnreferencedBytes::Of(store.value());
    if (!hidden.ok()) return terminal.Fail(hidden.status());
    if (hidden.value().trash > 0) terminal.Line("besides      " + hidden.value().TrashText());
    if (hidden.value().staging > 0) terminal.Line("besides      " + hidden.value().StagingText());
  }
  const int flushed = terminal.Flush();
  return flushed != kDone ? flushed : worst;
}

// Dtype, shape and size of a tensor, with a space at the end: 32 columns for most tensors.
std::string TensorColumns(const TensorMeta& meta) {
  return fmt::format("{:<5} {:<16} {:>8} ", InfoOf(meta.dtype()).name, meta.shape().ToString(),
                     HumanBytes(meta.bytes()));
}

// Lists the names of layers of stacked tensors, pattern by pattern, after the stored keys.
Status ListLayers(const OpenedCheckpoint& checkpoint, const LsArgs& args, Terminal& terminal,
                  std::size_t& listed) {
  const CheckpointIndex& index = checkpoint.index();
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto names, index.Layers());
  for (const auto& [key, pattern] : names->patterns()) {
    const auto stack = index.Find(key);
    if (stack.status().code() == Code::kNotFound) continue;
    TENSORMOUNT_RETURN_IF_ERROR(stack.status());
    const Dims& shape = stack.value().meta.shape();
    for (std::int64_t n = 0; shape.rank() > 0 && n < shape[0]; ++n) {
      const std::string name = LayerKey(pattern, n);
      if (!args.glob.empty() && !GlobMatches(args.glob, name)) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto layer, index.ResolveLayer(name));
      // A tensor with the same key hides the layer.
      if (!layer) continue;
      ++listed;
      const TensorMeta& meta = layer->meta;
      if (terminal.json) {
        terminal.Json(nlohmann::ordered_json{
            {"key", name},
            {"dtype", InfoOf(meta.dtype()).name},
            {"shape", std::vector<std::int64_t>(meta.shape().begin(), meta.shape().end())},
            {"bytes", meta.bytes()},
            {"stacked_key", layer->stacked.meta.key()},
            {"layer", n}});
      } else if (args.details) {
        std::string line = TensorColumns(meta);
        if (terminal.verbose) line += fmt::format("layer {} of {} ", n, layer->stacked.meta.key());
        terminal.Line(line + terminal.LastName(name, line.size()));
      } else {
        terminal.Line(name);
      }
    }
  }
  return {};
}

// What `stats --full` kept. Empty if nothing was kept, or if it cannot be read.
KeptStatistics KeptStatisticsOf(const OpenedCheckpoint& checkpoint, Terminal& terminal) {
  if (checkpoint.commit() == nullptr || checkpoint.is_mapped() ||
      !checkpoint.fs().Can(Ability::kKernelFiles)) {
    return {};
  }
  Result<KeptStatistics> kept = KeptStatistics::Read(checkpoint);
  if (kept.ok()) return std::move(kept).value();
  if (kept.status().code() == Code::kDataLoss) terminal.Warn(kept.status().message());
  return {};
}

// Lists the keys of a checkpoint. The columns of -l have fixed widths, except the last, the key, so
// that each line is printed when its tensor is read.
int ListTensors(const OpenedCheckpoint& checkpoint, const LsArgs& args, Terminal& terminal) {
  std::optional<Condition> where;
  if (!args.where.empty()) {
    Result<Condition> parsed = Condition::Parse(args.where, KindOfField);
    if (!parsed.ok()) return terminal.Fail(parsed.status().WithContext("--where"));
    where = std::move(parsed).value();
  }
  const KeptStatistics kept = where ? KeptStatisticsOf(checkpoint, terminal) : KeptStatistics();
  const bool columns = args.details || args.stats;
  if (args.stats && !terminal.json && !terminal.quiet) {
    terminal.Line(
        fmt::format("{:<5} {:<16} {:>8} {}key", "dtype", "shape", "size", CountsHeading()));
  }
  std::size_t matched = 0;  // By the glob.
  std::size_t listed = 0;
  Status counting;
  const Status status = checkpoint.index().ForEachTensor(0, [&](const TensorEntry& tensor) {
    if (!args.glob.empty() && !GlobMatches(args.glob, tensor.meta.key())) return true;
    ++matched;
    std::optional<ValueCounts> counts;
    if (args.stats || where) {
      Result<std::optional<ValueCounts>> known = checkpoint.CountsOf(tensor);
      counting = known.status();
      if (!known.ok()) return false;
      counts = known.value();
    }
    const auto lookup = [&](std::string_view field) {
      return FieldOf(tensor, counts, kept.Find(tensor), field);
    };
    if (where && where->Holds(lookup) != true) return true;
    ++listed;
    if (terminal.json) {
      nlohmann::ordered_json json = TensorJson(checkpoint, tensor);
      if (args.stats) AddCountsJson(tensor.meta, counts, json);
      terminal.Json(json);
    } else if (columns) {
      std::string line = TensorColumns(tensor.meta);
      if (args.stats) line += CountsColumns(tensor.meta, counts);
      if (terminal.verbose) {
        line += fmt::format("{} {:>5} {:<11} ",
                            tensor.has_digest ? DigestHex(tensor.digest) : std::string(16, '-'),
                            tensor.chunks, PlacementOf(checkpoint, tensor));
      }
      terminal.Line(line + terminal.LastName(tensor.meta.key(), line.size()));
    } else {
      terminal.Line(tensor.meta.key());
    }
    return true;
  });
  if (!status.ok()) return terminal.Fail(status);
  if (!counting.ok()) return terminal.Fail(counting);
  if (args.layers) {
    const Status layers = ListLayers(checkpoint, args, terminal, matched);
    if (!layers.ok()) return terminal.Fail(layers);
  }
  // A glob that matches no key is an error, so that the checkpoint does not seem to be empty.
  if (matched == 0 && !args.glob.empty()) {
    const int flushed = terminal.Flush();
    if (flushed != kDone) return flushed;
    return terminal.Fail(Status(Code::kNotFound, fmt::format("'{}': no key of {} matches it",
                                                             args.glob, args.source)),
                         KeyHint(checkpoint, args.source, args.glob));
  }
  const int flushed = terminal.Flush();
  if (flushed != kDone || !where) return flushed;
  return listed > 0 ? kDone : kCheckFailed;
}

// Prints a layer. Only the stacked tensor has chunks, digest and placement.
int InfoLayer(const LayerEntry& layer, Terminal& terminal) {
  const TensorMeta& meta = layer.meta;
  const std::string& stack = layer.stacked.meta.key();
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json{
        {"key", meta.key()},
        {"dtype", InfoOf(meta.dtype()).name},
        {"shape", std::vector<std::int64_t>(meta.shape().begin(), meta.shape().end())},
        {"bytes", meta.bytes()},
        {"stacked_key", stack},
        {"layer", layer.layer},
        {"offset", layer.offset}});
    return terminal.Flush();
  }
  terminal.Line(fmt::format("key        {}", meta.key()));
  terminal.Line(fmt::format("dtype      {}", InfoOf(meta.dtype()).name));
  terminal.Line(fmt::format("shape      {}", meta.shape().ToString()));
  terminal.Line(fmt::format("bytes      {}", meta.bytes()));
  terminal.Line(fmt::format("layer      {} of {}, from byte {}", layer.layer, stack, layer.offset));
  return terminal.Flush();
}

// How a mount reads the tensor: by passthrough if a file has only this tensor (`whole_file`), else
// through the daemon. Whether the kernel supports passthrough is not considered.
std::string TierOf(const std::vector<ChunkRecord>& chunks, bool whole_file) {
  if (whole_file) return "passthrough";
  std::set<std::uint32_t> files;
  for (const ChunkRecord& chunk : chunks) files.insert(chunk.file);
  return fmt::format("daemon: {} {} in {} {}", chunks.size(),
                     chunks.size() == 1 ? "chunk" : "chunks", files.size(),
                     files.size() == 1 ? "file" : "files");
}

// Largest number of common values in a list.
constexpr std::size_t kShownValues = 20;

// Lists the first common values for `info` of a checkpoint, and how to see all.
void ListCommon(const CommonState& common, const std::string& source, Terminal& terminal) {
  std::size_t left = kShownValues;
  std::size_t more = 0;
  const auto list = [&](const std::string& of, const CommonValues& values) {
    for (const auto& [name, value] : values) {
      if (left == 0) {
        ++more;
        continue;
      }
      --left;
      terminal.Line(fmt::format("{:14} {}: {}", of, name, ShortValue(value)));
    }
  };
  list("common", common.values);
  for (const auto& [rank, values] : common.ranks) list(fmt::format("rank {}", rank), values);
  if (more > 0) {
    terminal.Line(fmt::format("{:14} and {}: tensormount info {} --common", "",
                              Counted(more, "other common value"), source));
  }
}

// Prints all common values as in common.json of a mount.
int InfoCommon(const OpenedCheckpoint& checkpoint, Terminal& terminal) {
  const Result<std::string> text = fs::CommonJson(checkpoint.index());
  if (!text.ok()) return terminal.Fail(text.status());
  if (terminal.json) {
    terminal.Json(nlohmann::ordered_json::parse(text.value()));
  } else {
    terminal.Text(ShownText(text.value(), "\n"));
  }
  return terminal.Flush();
}

int InfoCommonValue(const std::string& name, const CommonValue& value, Terminal& terminal) {
  const std::string text = CommonToJson(value);
  if (terminal.json) {
    terminal.Json(
        nlohmann::ordered_json{{"common", name}, {"value", nlohmann::ordered_json::parse(text)}});
  } else {
    terminal.Line(text);
  }
  return terminal.Flush();
}

// Prints the tensor with this key; if there is none, the layer, the object or the common value.
int InfoTensor(const OpenedCheckpoint& checkpoint, const InfoArgs& args, Terminal& terminal) {
  const std::string& key = args.key;
  auto found = checkpoint.index().Find(key);
  if (found.status().code() == Code::kNotFound) {
    const auto layer = checkpoint.index().ResolveLayer(key);
    if (!layer.ok()) return terminal.Fail(layer.status());
    if (layer.value()) return InfoLayer(*layer.value(), terminal);
    const auto parts = checkpoint.index().ObjectParts(key);
    if (parts.ok() && !parts.value().empty()) {
      return InfoObject(checkpoint, parts.value(), terminal);
    }
    if (!IsReservedCommonName(key)) {
      const Result<CommonValue> value = checkpoint.index().CommonRecord(key);
      if (value.ok()) return InfoCommonValue(key, value.value(), terminal);
      if (value.status().code() != Code::kNotFound) return terminal.Fail(value.status());
    }
  }
  if (!found.ok()) return terminal.Fail(found.status(), KeyHint(checkpoint, args.source, key));
  const TensorEntry& tensor = found.value();
  auto extents = checkpoint.Extents(tensor);
  if (!extents.ok()) return terminal.Fail(extents.status());
  auto chunks = extents.value()->All();
  if (!chunks.ok()) return terminal.Fail(chunks.status());
  const auto whole = checkpoint.WholeFileOf(tensor);
  nlohmann::ordered_json json = TensorJson(checkpoint, tensor);
  json["mtime"] = tensor.mtime;
  const std::string tier = TierOf(chunks.value(), whole.ok());
  json["tier"] = tier;
  const Result<std::optional<ValueCounts>> counts = checkpoint.CountsOf(tensor);
  if (!counts.ok()) terminal.Warn(counts.status().message());
  const std::optional<ValueCounts> known = counts.ok() ? counts.value() : std::nullopt;
  AddCountsJson(tensor.meta, known, json);
  // Which chunks have the values that are not finite.
  std::vector<std::optional<ValueCounts>> chunk_counts(chunks.value().size());
  if (known && known->nonfinite() > 0) {
    for (std::size_t i = 0; i < chunk_counts.size(); ++i) {
      const auto read = checkpoint.CountsOf(tensor, chunks.value()[i]);
      if (!read.ok()) return terminal.Fail(read.status());
      chunk_counts[i] = read.value();
    }
  }
  if (whole.ok()) json["whole_file"] = checkpoint.FilePath(whole.value());
  std::size_t number = 0;
  for (const ChunkRecord& chunk : chunks.value()) {
    nlohmann::ordered_json c = {{"region", chunk.region.ToString()},
                                {"file", checkpoint.index().files()[chunk.file].name},
                                {"offset", chunk.offset},
                                {"length", chunk.length}};
    if (chunk.strides.rank() > 0) {
      c["strides"] = std::vector<std::int64_t>(chunk.strides.begin(), chunk.strides.end());
    }
    if (chunk.has_hash) c["hash"] = chunk.hash.ToHex();
    if (const auto& some = chunk_counts[number++]; some && some->nonfinite() > 0) {
      AddCountsJson(tensor.meta, some, c);
    }
    json["extents"].push_back(c);
  }
  if (terminal.json) {
    terminal.Json(json);
    return terminal.Flush();
  }
  terminal.Line(fmt::format("key        {}", tensor.meta.key()));
  terminal.Line(fmt::format("dtype      {}", InfoOf(tensor.meta.dtype()).name));
  terminal.Line(fmt::format("shape      {}", tensor.meta.shape().ToString()));
  terminal.Line(fmt::format("bytes      {}", tensor.meta.bytes()));
  if (tensor.has_digest) {
    terminal.Line(fmt::format("digest     {} (CRC-64/NVME)", DigestHex(tensor.digest)));
  }
  terminal.Line(fmt::format("placement  {}", PlacementOf(checkpoint, tensor)));
  terminal.Line(fmt::format("tier       {}", tier));
  if (whole.ok()) terminal.Line(fmt::format("file       {}", whole.value()));
  if (known) {
    const std::string odd = known->nonfinite() > 0 ? DescribeNonfinite(*known) : "all finite";
    terminal.Line(fmt::format("values     {}, {}, largest magnitude {}", odd,
                              Counted(known->zeros, "zero"), AbsmaxText(tensor.meta, *known)));
  }
  number = 0;
  for (const ChunkRecord& chunk : chunks.value()) {
    const std::string strides =
        chunk.strides.rank() > 0 ? ", strides " + chunk.strides.ToString() : "";
    const auto& some = chunk_counts[number++];
    const std::string odd = some && some->nonfinite() > 0 ? ": " + DescribeNonfinite(*some) : "";
    terminal.Line(fmt::format("chunk      {} in {} at {}, {}{}{}", chunk.region.ToString(),
                              checkpoint.index().files()[chunk.file].name, chunk.offset,
                              HumanBytes(chunk.length), strides, odd));
  }
  return terminal.Flush();
}

// Largest number of checkpoints that are listed as sharing files; --json lists all.
constexpr std::size_t kShownSharers = 20;

// Prints how many bytes the checkpoint takes in its store, and which checkpoints share them. Prints
// nothing for a checkpoint outside of a store. If `json` is not null, the values are added to
// `json`, and only warnings are printed.
Status InfoCost(const OpenedCheckpoint& checkpoint, nlohmann::ordered_json* json,
                Terminal& terminal) {
  const auto parts = SplitCheckpointPath(checkpoint.directory());
  if (checkpoint.commit() == nullptr || !parts.ok()) return {};
  const auto store = Store::Open(checkpoint.fs(), parts.value().store);
  if (store.status().code() == Code::kNotFound) return {};
  TENSORMOUNT_RETURN_IF_ERROR(store.status());
  const Result<StoreCosts> measured = StoreCosts::Of(checkpoint.fs(), store.value());
  // A server that lists nothing: how much is shared is not known.
  if (measured.status().code() == Code::kUnsupported) return {};
  TENSORMOUNT_RETURN_IF_ERROR(measured.status());
  const StoreCosts& costs = measured.value();
  const CheckpointCost* const cost = costs.Find(parts.value().name);
  if (cost == nullptr) return {};  // The checkpoint was removed meanwhile.
  TENSORMOUNT_RETURN_IF_ERROR(cost->listing.problem);
  // Another checkpoint of the same name has replaced this one meanwhile.
  if (cost->listing.uuid != checkpoint.index().info().uuid) return {};
  // Files shared with a checkpoint that cannot be read are counted as not shared.
  for (const CheckpointCost& other : costs.checkpoints()) {
    if (other.listing.state != CheckpointListing::State::kUnread) continue;
    terminal.Warn(
        fmt::format("{} cannot be read, so its files are not counted in own and shared bytes: {}",
                    other.listing.name, other.listing.problem.message()));
  }
  const std::vector<StoreCosts::Sharer> sharers = costs.SharersOf(parts.value().name);
  if (json != nullptr) {
    (*json)["stored_bytes"] = cost->bytes;
    (*json)["own_bytes"] = cost->own_bytes;
    (*json)["shared_bytes"] = cost->shared_bytes();
    (*json)["shared_with"] = nlohmann::ordered_json::array();
    for (const StoreCosts::Sharer& sharer : sharers) {
      (*json)["shared_with"].push_back(
          {{"checkpoint", sharer.name}, {"bytes", sharer.bytes}, {"files", sharer.files}});
    }
    return {};
  }
  terminal.Line(fmt::format("stored         {}, {} of them only in this checkpoint",
                            HumanBytes(cost->bytes), HumanBytes(cost->own_bytes)));
  for (std::size_t i = 0; i < std::min(sharers.size(), kShownSharers); ++i) {
    terminal.Line(fmt::format("shared         {} in {} with {}", HumanBytes(sharers[i].bytes),
                              Counted(sharers[i].files, "file"), sharers[i].name));
  }
  if (sharers.size() > kShownSharers) {
    terminal.Line(fmt::format("{:14} and with {} (--json lists all)", "",
                              Counted(sharers.size() - kShownSharers, "other checkpoint")));
  }
  return {};
}

std::string CommonKeyText(const CommonKey& key) {
  const auto* text = std::get_if<std::string>(&key);
  return text != nullptr ? *text : std::to_string(*std::get_if<std::int64_t>(&key));
}

// Prints the facts about a checkpoint as a whole: its metadata, the first common values, and the
// numbers of its tensors, chunks, objects and data files.
int InfoCheckpoint(const OpenedCheckpoint& checkpoint, const std::string& source,
                   Terminal& terminal) {
  const CheckpointIndex& index = checkpoint.index();
  auto objects = index.Objects();
  if (!objects.ok()) return terminal.Fail(objects.status());
  auto common = index.Common();
  if (!common.ok()) return terminal.Fail(common.status());
  auto layers = index.Layers();
  if (!layers.ok()) return terminal.Fail(layers.status());
  const std::vector<std::string> notes = FindKnownDefects(checkpoint);
  std::uint64_t file_bytes = 0;
  for (const FileRecord& file : index.files()) file_bytes += file.length;
  const CheckpointInfo& info = index.info();
  const CommonDict& metadata = common.value().content;
  if (terminal.json) {
    nlohmann::ordered_json json =
        nlohmann::ordered_json{{"name", checkpoint.name()},
                               {"path", checkpoint.directory()},
                               {"uuid", info.uuid.ToString()},
                               {"generation", info.generation},
                               {"parent", info.parent_name},
                               {"producer", info.producer},
                               {"world_size", info.world_size},
                               {"created", info.created},
                               {"tensors", index.tensor_count()},
                               {"tensor_bytes", index.tensor_bytes()},
                               {"chunks", index.chunk_count()},
                               {"files", index.files().size()},
                               {"file_bytes", file_bytes},
                               {"objects", objects.value().size()},
                               {"common_values", common.value().values.size()},
                               {"self_contained", info.self_contained},
                               {"warnings", checkpoint.warnings()},
                               {"notes", notes}};
    if (!info.self_contained) json["root"] = info.root;
    if (!checkpoint.beside().empty()) json["beside"] = checkpoint.beside();
    for (const auto& [key, pattern] : layers.value()->patterns()) json["layers"][key] = pattern;
    if (!metadata.items.empty()) {
      json["content"] = nlohmann::ordered_json::parse(CommonToJson(metadata));
    }
    if (const Status costs = InfoCost(checkpoint, &json, terminal); !costs.ok()) {
      return terminal.Fail(costs);
    }
    terminal.Json(json);
    return terminal.Flush();
  }
  terminal.Line(fmt::format("checkpoint     {}", checkpoint.name()));
  terminal.Line(fmt::format("path           {}", checkpoint.directory()));
  if (!info.uuid.IsZero()) {
    terminal.Line(fmt::format("uuid           {}", info.uuid.ToString()));
    terminal.Line(fmt::format("generation     {}", info.generation));
    terminal.Line(
        fmt::format("parent         {}", info.parent_name.empty() ? "none" : info.parent_name));
    terminal.Line(fmt::format("saved by       {} on {} rank{}", info.producer, info.world_size,
                              info.world_size == 1 ? "" : "s"));
  }
  terminal.Line(
      fmt::format("tensors        {}, {}", index.tensor_count(), HumanBytes(index.tensor_bytes())));
  terminal.Line(fmt::format("chunks         {} in {}, {}", index.chunk_count(),
                            Counted(index.files().size(), "data file"), HumanBytes(file_bytes)));
  if (const Status costs = InfoCost(checkpoint, nullptr, terminal); !costs.ok()) {
    return terminal.Fail(costs);
  }
  if (!layers.value()->empty()) {
    terminal.Line(fmt::format("layer names    for {} (ls --layers)",
                              Counted(layers.value()->patterns().size(), "stacked tensor")));
  }
  terminal.Line(fmt::format("objects        {}", objects.value().size()));
  terminal.Line(fmt::format("common values  {}", common.value().values.size()));
  ListCommon(common.value(), source, terminal);
  for (const auto& [key, value] : metadata.items) {
    terminal.Line(fmt::format("content        {}: {}", CommonKeyText(key), CommonToJson(value)));
  }
  if (!info.self_contained) {
    terminal.Line(
        fmt::format("self-contained no: the data stay in the original files under {}", info.root));
  }
  if (!checkpoint.beside().empty()) {
    terminal.Line(fmt::format("beside         {} (not part of the checkpoint)",
                              JoinFirstNames(checkpoint.beside())));
  }
  for (const std::string& note : notes) terminal.Line("note           " + note);
  return terminal.Flush();
}

}  // namespace

int RunLs(const LsArgs& args, Terminal& terminal) {
  auto source = FindSourceArgument(args.source, terminal);
  if (!source.ok()) return terminal.Fail(source.status());
  if (args.glob.empty() && source.value().kind == SourceKind::kStore) {
    return ListStore(source.value(), args, terminal);
  }
  if (args.glob.empty() && source.value().kind == SourceKind::kForeignSteps) {
    return ListSteps(source.value(), args, terminal);
  }
  auto opened = OpenSource(args.source, terminal);
  if (!opened.ok()) return terminal.Fail(opened.status());
  return ListTensors(*opened.value(), args, terminal);
}

int RunInfo(const InfoArgs& args, Terminal& terminal) {
  if (args.common && !args.key.empty()) {
    return terminal.Fail(
        Status(Code::kInvalidArgument,
               "info --common prints all common values of a checkpoint and takes no KEY"));
  }
  auto source = FindSourceArgument(args.source, terminal);
  if (!source.ok()) return terminal.Fail(source.status());
  if (source.value().kind == SourceKind::kForeignSteps && args.key.empty() && !args.common) {
    return InfoSteps(source.value(), terminal);
  }
  if (source.value().kind == SourceKind::kStore && args.key.empty() && !args.common) {
    auto store = Store::Open(*source.value().fs, source.value().path);
    if (!store.ok()) return terminal.Fail(store.status());
    const auto costs = StoreCosts::Of(store.value().fs(), store.value());
    if (!costs.ok()) return terminal.Fail(costs.status());
    const std::vector<CheckpointListing> list = costs.value().Listings();
    auto latest = store.value().LatestOf(list);
    // kNotFound means that there is no latest checkpoint; other errors are reported.
    if (!latest.ok() && latest.status().code() != Code::kNotFound) {
      return terminal.Fail(latest.status(),
                           fmt::format("`tensormount ls {}` lists the checkpoints", args.source));
    }
    const std::string name = latest.ok() ? latest.value().name : "";
    if (latest.ok()) {
      for (const std::string& warning : latest.value().warnings) terminal.Warn(warning);
    } else if (!list.empty()) {
      terminal.Warn(latest.status().message());
    }
    const Result<UnreferencedBytes> looked = UnreferencedBytes::Of(store.value());
    if (!looked.ok()) return terminal.Fail(looked.status());
    const UnreferencedBytes& hidden = looked.value();
    if (terminal.json) {
      terminal.Json(nlohmann::ordered_json{{"store", source.value().path},
                                           {"uuid", store.value().uuid().ToString()},
                                           {"checkpoints", list.size()},
                                           {"latest", name},
                                           {"stored_bytes", costs.value().stored_bytes()},
                                           {"shared_bytes", costs.value().shared_bytes()},
                                           {"trash_bytes", hidden.trash},
                                           {"staging_bytes", hidden.staging}});
    } else {
      terminal.Line(fmt::format("store        {}", source.value().path));
      terminal.Line(fmt::format("uuid         {}", store.value().uuid().ToString()));
      terminal.Line(fmt::format("checkpoints  {}", list.size()));
      terminal.Line(fmt::format("latest       {}", name.empty() ? "none" : name));
      terminal.Line(fmt::format("stored       {}, {} of them shared by several checkpoints",
                                HumanBytes(costs.value().stored_bytes()),
                                HumanBytes(costs.value().shared_bytes())));
      if (hidden.trash > 0) terminal.Line("removed      " + hidden.TrashText());
      if (hidden.staging > 0) terminal.Line("in progress  " + hidden.StagingText());
    }
    return terminal.Flush();
  }
  auto opened = OpenSource(args.source, terminal);
  if (!opened.ok()) return terminal.Fail(opened.status());
  if (args.common) return InfoCommon(*opened.value(), terminal);
  if (args.key.empty()) return InfoCheckpoint(*opened.value(), args.source, terminal);
  return InfoTensor(*opened.value(), args, terminal);
}

}  // namespace tensormount::tools
