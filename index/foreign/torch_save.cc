// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h. Files that torch.save wrote since 1.6: single ones, the sharded form
// that Hugging Face's transformers wrote before safetensors, and Megatron-LM's legacy folders of
// one a rank.
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "index/foreign/format.h"
#include "index/foreign/model_files.h"
#include "index/foreign/torch_archive.h"
#include "index/foreign/torch_tree.h"
#include "shard/strict_json.h"

namespace tensormount {
namespace {

constexpr std::string_view kTorchIndexName = "pytorch_model.bin.index.json";
constexpr std::string_view kSingleName = "pytorch_model.bin";
constexpr std::string_view kRankFolder = "mp_rank_";
constexpr std::array<std::string_view, 2> kRankModels = {"model_optim_rng.pt", "model_rng.pt"};
constexpr std::uint64_t kMaxIndex = std::uint64_t{64} << 20;
// Of all paths, in the common values, which are read whole when a checkpoint is opened.
constexpr std::string_view kPlannerData = "torch.planner_data";
// Bytes.
constexpr std::size_t kMaxPaths = std::size_t{1} << 20;
constexpr std::uint64_t kMaxTorchPickle = std::uint64_t{256} << 20;
// PROTO 2, LONG1 of the magic number, STOP: how torch.save began before it wrote zips.
constexpr std::string_view kLegacyMagic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.",
                                        15);

enum class Begins { kElse, kZip, kLegacy };

Begins BeginningOf(const ForeignFolder& folder, const std::string& name) {
  const Result<std::unique_ptr<File>> file = folder.OpenRead(name);
  if (!file.ok()) return Begins::kElse;
  std::array<char, kLegacyMagic.size()> head{};
  const Result<std::size_t> got = file.value()->ReadAt(0, head.data(), head.size());
  if (!got.ok()) return Begins::kElse;
  const std::string_view bytes(head.data(), got.value());
  if (bytes.starts_with("PK\3\4")) return Begins::kZip;
  return bytes == kLegacyMagic ? Begins::kLegacy : Begins::kElse;
}

// Without its folder and what follows the last dot.
std::string StemOf(std::string_view name) {
  name = name.substr(name.rfind('/') + 1);
  const std::size_t dot = name.rfind('.');
  return std::string(dot == 0 ? name : name.substr(0, dot));
}

// Whether the names at the end of an archive are those of a program.
// A TorchScript archive also begins with "PK" and may have a data.pkl. The names in its central
// directory, at the end, tell: 256 KiB of them are enough, and a damaged archive can be asked as
// well.
bool IsTorchScript(File& file, std::uint64_t length) {
  std::string tail(std::min<std::uint64_t>(length, 256 << 10), '\0');
  if (!file.ReadExactAt(length - tail.size(), tail.data(), tail.size()).ok()) return false;
  return tail.find("/constants.pkl") != std::string::npos;
}

class TorchSaveReader {
 public:
  TorchSaveReader(const ForeignFolder& folder, ForeignBuilder& builder)
      : folder_(folder), builder_(builder) {}

  // `listed`: the keys that an index says are in it; null: all are wanted.
  Status AddFile(const std::string& name, const std::string& prefix,
                 const std::set<std::string>* listed = nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t number, builder_.AddFile(name));
    if (BeginningOf(folder_, name) == Begins::kLegacy) {
      return Status(Code::kUnsupported,
                    folder_.Shown(name) +
                        ": written by torch.save before 1.6, or told to write no zip: load it and "
                        "save it again");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, builder_.OpenFile(number));
    const std::uint64_t length = builder_.FileLength(number);
    pickle::Options options;
    options.max_bytes = kMaxTorchPickle;
    // Looked at below: that it is a program is the better answer where both are true.
    const Result<TorchArchive> archive = TorchArchive::Read(*file, 0, length, options);
    if (IsTorchScript(*file, length)) {
      return Status(Code::kUnsupported, folder_.Shown(name) +
                                            ": a TorchScript archive, which is a program and no "
                                            "table of tensors");
    }
    if (!archive.ok()) return archive.status();
    TorchTreeOptions tree;
    tree.prefix = prefix;
    tree.alone = StemOf(name);
    tree.added = [&](const std::string& key) { held_[name].insert(key); };
    if (prefix.empty()) {
      tree.nested = [&](const std::string& key, const std::vector<TorchNames::Part>& path) {
        if (listed == nullptr || listed->contains(key) || !held_[name].contains(key)) {
          AddPath(key, path);
        }
      };
    }
    // Of files with an index each has its names for itself: that two have one is for it to settle.
    TorchNames own;
    builder_.TakeOnly(listed);
    const Status status = TorchTree(builder_, archive.value(), number,
                                    listed != nullptr ? own : tensors_, common_, budget_, tree)
                              .Add();
    builder_.TakeOnly(nullptr);
    return status.WithContext(folder_.Shown(name));
  }

  // When all files are added: where in nested dicts and lists everything stands, as DCP says it.
  // "torch.planner_data" as DCP has it, so that exports of both forms nest keys in the same way.
  void AddPaths() {
    if (path_bytes_ > kMaxPaths) {
      builder_.Warn("the paths of its nested dicts are larger than 1 MiB and left out");
    } else if (!paths_.items.empty()) {
      builder_.AddCommon(std::string(kPlannerData), std::move(paths_));
    }
  }

  // The form of several files: which tensor stands in which.
  // As with safetensors the index decides: a tensor belongs to the file that the index names for
  // it, wherever else that key occurs.
  Status AddIndexed() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text,
                                 folder_.ReadFile(kTorchIndexName, kMaxIndex, "{"));
    std::map<std::string, std::set<std::string>> files;
    const auto rest = ParseStrictJson(
        text, "weight_map", [&](const std::string& key, const nlohmann::json& file) {
          if (!file.is_string()) {
            return Status(Code::kDataLoss, "weight_map names no file for " + key.substr(0, 256));
          }
          files[file.get<std::string>()].insert(key);
          return Status();
        });
    if (!rest.ok()) return rest.status().WithContext(folder_.Shown(kTorchIndexName));
    if (!rest.value().contains("weight_map") || !rest.value()["weight_map"].is_object()) {
      return Status(Code::kDataLoss,
                    folder_.Shown(kTorchIndexName) + ": has no object 'weight_map'");
    }
    for (const auto& [name, keys] : files) {
      const Status status = AddFile(name, "", &keys);
      if (status.code() == Code::kNotFound) {
        for (const std::string& key : keys) {
          builder_.Lose(name, "the file is missing", ForeignBuilder::What::kTensor, key);
        }
        continue;
      }
      TENSORMOUNT_RETURN_IF_ERROR(status);
      const std::set<std::string>& held = held_[name];
      const auto unlisted = std::ranges::count_if(
          held, [&listed = keys](const std::string& key) { return !listed.contains(key); });
      if (unlisted > 0) {
        builder_.Warn(name + ": " + std::to_string(unlisted) +
                      " tensors in it are not those of the index: left out");
      }
      for (const std::string& key : keys) {
        if (held.contains(key)) continue;
        builder_.Lose(name, "does not hold what the index says", ForeignBuilder::What::kTensor,
                      key);
      }
    }
    return Status();
  }

  // Megatron-LM before dist_checkpointing: nothing says how the ranks' tensors go together.
  // Ranks of tensor and pipeline parallelism are shown side by side: how they were cut is in no
  // file, and guessing would show wrong tensors. Fails only where no file of any rank could be
  // read.
  Status AddRankFolders(const std::vector<std::string>& ranks) {
    Status first;
    std::size_t added = 0;
    for (const std::string& rank : ranks) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, folder_.List(rank));
      for (const DirectoryEntry& entry : entries) {
        if (entry.kind == FileKind::kDirectory || !entry.name.ends_with(".pt")) continue;
        const bool model = std::ranges::find(kRankModels, entry.name) != kRankModels.end();
        const std::string name = rank + "/" + entry.name;
        const Status status =
            AddFile(name, rank + "/" + (model ? std::string() : StemOf(entry.name) + "/"));
        if (status.ok()) {
          ++added;
        } else if (status.code() == Code::kUnsupported || status.code() == Code::kDataLoss) {
          if (first.ok()) first = status;
          if (status.code() == Code::kDataLoss) {
            builder_.LoseFile(name, status.message());
          } else {
            builder_.Warn("file " + name + ": left out: " + status.message());
          }
        } else {
          return status;
        }
      }
    }
    builder_.SetWorldSize(static_cast<std::uint32_t>(ranks.size()));
    return added > 0 ? Status() : first;
  }

 private:
  // 16 bytes stand for what records cost beside texts. Past the limit all are dropped, and the
  // count stays above it.
  void AddPath(const std::string& key, const std::vector<TorchNames::Part>& path) {
    path_bytes_ += key.size() + 16;
    for (const TorchNames::Part& part : path) path_bytes_ += part.text.size() + 16;
    if (path_bytes_ > kMaxPaths) {
      paths_.items.clear();
      return;
    }
    CommonTuple parts;
    for (const TorchNames::Part& part : path) {
      // In planner_data integers are positions in lists. torch's planners make text of keys that
      // are numbers; a list of one says that it was a number, which optimizers are told by.
      if (part.position) {
        parts.items.emplace_back(std::stoll(part.text));
      } else if (part.number) {
        parts.items.emplace_back(CommonList{{std::stoll(part.text)}});
      } else {
        parts.items.emplace_back(part.text);
      }
    }
    paths_.items.insert_or_assign(key, std::move(parts));
  }

  const ForeignFolder& folder_;
  ForeignBuilder& builder_;
  TorchNames tensors_;
  TorchNames common_;
  ValueBudget budget_;
  std::map<std::string, std::set<std::string>> held_;  // Keys by file.
  CommonDict paths_;
  std::size_t path_bytes_ = 0;
};

// Only folders with the model file count: mp_rank_00 may hold an optimizer alone.
std::vector<std::string> RankFolders(const ForeignFolder& folder) {
  std::vector<std::string> out;
  const Result<std::vector<DirectoryEntry>> entries = folder.List("");
  if (!entries.ok()) return out;
  for (const DirectoryEntry& entry : entries.value()) {
    if (entry.kind != FileKind::kDirectory || !entry.name.starts_with(kRankFolder)) continue;
    const bool model = std::ranges::any_of(kRankModels, [&](std::string_view file) {
      return folder.Has(entry.name + "/" + std::string(file));
    });
    if (model) out.push_back(entry.name);
  }
  return out;
}

class TorchSave : public ForeignFormat {
 public:
  std::string_view name() const override { return "torch.save"; }

  bool Probe(const ForeignFolder& folder) const override {
    if (folder.file().empty()) {
      return folder.Has(kTorchIndexName) || folder.Has(kSingleName) || !RankFolders(folder).empty();
    }
    for (const std::string_view end : {".pt", ".pth", ".bin", ".ckpt"}) {
      if (folder.file().ends_with(end)) {
        return BeginningOf(folder, folder.file()) != Begins::kElse;
      }
    }
    return false;
  }

  Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const override {
    TorchSaveReader reader(folder, builder);
    TENSORMOUNT_RETURN_IF_ERROR(ReadAll(folder, builder, reader));
    reader.AddPaths();
    // A model of transformers from before safetensors.
    const bool model =
        folder.file().empty() && (folder.Has(kTorchIndexName) || folder.Has(kSingleName));
    return model ? AddModelFiles(folder, builder) : Status();
  }

 private:
  static Status ReadAll(const ForeignFolder& folder, ForeignBuilder& builder,
                        TorchSaveReader& reader) {
    if (!folder.file().empty()) return reader.AddFile(folder.file(), "");
    if (folder.Has(kTorchIndexName)) return reader.AddIndexed();
    if (folder.Has(kSingleName)) return reader.AddFile(std::string(kSingleName), "");
    builder.SetProducer("megatron-lm");
    return reader.AddRankFolders(RankFolders(folder));
  }
};

}  // namespace

const ForeignFormat& TorchSaveFormat() {
  static const TorchSave kFormat;
  return kFormat;
}

}  // namespace tensormount
