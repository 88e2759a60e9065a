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

#include "index/archives/torch_archive.h"
#include "index/foreign/file_begin.h"
#include "index/foreign/format.h"
#include "index/foreign/model_files.h"
#include "index/foreign/torch_tree.h"
#include "index/foreign/weight_files.h"
#include "index/read/saved_paths.h"

namespace tensormount {
namespace {

constexpr std::string_view kRankFolder = "mp_rank_";
constexpr std::array<std::string_view, 2> kRankModels = {"model_optim_rng.pt", "model_rng.pt"};
// Of all paths, in the common values, which are read whole when a checkpoint is opened.
// Bytes.
constexpr std::size_t kMaxPaths = std::size_t{1} << 20;
constexpr std::uint64_t kMaxTorchPickle = std::uint64_t{256} << 20;
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
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, builder_.OpenFile(number));
    const FileBegin begin = BeginOf(*file);
    if (begin == FileBegin::kLfsPointer) return IsLfsPointer(folder_.Shown(name));
    if (begin == FileBegin::kLegacyTorch) {
      return Status(Code::kUnsupported,
                    folder_.Shown(name) +
                        ": written by torch.save before 1.6, or told to write no zip: load it and "
                        "save it again");
    }
    const std::uint64_t length = builder_.FileLength(number);
    pickle::Options options;
    options.max_bytes = kMaxTorchPickle;
    options.unknown = pickle::Unknown::kForeignClasses;
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
  Status AddIndexed(const std::string& index) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const WeightMap files, ReadWeightMap(folder_, index));
    Status first;
    std::size_t read = 0;
    for (const auto& [name, keys] : files) {
      const Status status = AddFile(name, "", &keys);
      // One file that is missing or damaged takes away its own tensors and no others.
      if (status.code() == Code::kNotFound || status.code() == Code::kDataLoss ||
          status.code() == Code::kUnsupported) {
        const bool missing = status.code() == Code::kNotFound;
        if (!missing && first.ok()) first = status;
        for (const std::string& key : keys) {
          builder_.Lose(name, missing ? "the file is missing" : ReasonOf(status, name),
                        ForeignBuilder::What::kTensor, key);
        }
        continue;
      }
      TENSORMOUNT_RETURN_IF_ERROR(status);
      ++read;
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
    return read > 0 ? Status() : first;
  }

  // A file of tensors, or an index and what it lists.
  Status AddNamed(const std::string& name) {
    return IsWeightIndex(name) ? AddIndexed(name) : AddFile(name, "");
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
        if (entry.kind == FileKind::kDirectory || entry.name.starts_with('.') ||
            !entry.name.ends_with(".pt")) {
          continue;
        }
        const bool model = std::ranges::find(kRankModels, entry.name) != kRankModels.end();
        const std::string name = rank + "/" + entry.name;
        const Status status =
            AddFile(name, rank + "/" + (model ? std::string() : StemOf(entry.name) + "/"));
        if (status.ok()) {
          ++added;
        } else if (status.code() == Code::kUnsupported || status.code() == Code::kDataLoss ||
                   status.code() == Code::kNotFound) {
          if (first.ok()) first = status;
          if (status.code() != Code::kUnsupported) {
            builder_.LoseFile(name, ReasonOf(status, name));
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
  // A loss begins with the name of its file: the reason without it.
  static std::string ReasonOf(const Status& status, const std::string& name) {
    const std::size_t at = status.message().rfind(name + ": ");
    return at == std::string::npos ? status.message()
                                   : status.message().substr(at + name.size() + 2);
  }

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
      return !WeightsOf(folder).empty() || !RankFolders(folder).empty();
    }
    if (IsWeightIndex(folder.file())) return folder.file().ends_with(".bin.index.json");
    // The name says it of whatever could be such a file; bytes do where a hub or a link gave it
    // another name.
    switch (BeginOf(folder, folder.file())) {
      case FileBegin::kTorchZip:
      case FileBegin::kLegacyTorch:
        return true;
      case FileBegin::kZip:
      case FileBegin::kNumpyZip:
        for (const std::string_view end : {".pt", ".pth", ".pth.tar", ".bin", ".ckpt"}) {
          if (folder.file().ends_with(end)) return true;
        }
        return false;
      default:
        return false;
    }
  }

  Status Read(const ForeignFolder& folder, ForeignBuilder& builder) const override {
    TorchSaveReader reader(folder, builder);
    const WeightFiles files = folder.file().empty() ? WeightsOf(folder) : WeightFiles();
    TENSORMOUNT_RETURN_IF_ERROR(ReadAll(folder, files, builder, reader));
    reader.AddPaths();
    // A model of transformers from before safetensors.
    const bool model = !files.empty() || IsWeightIndex(folder.file());
    return model ? AddModelFiles(folder, builder) : Status();
  }

 private:
  static WeightFiles WeightsOf(const ForeignFolder& folder) {
    const Result<std::vector<DirectoryEntry>> entries = folder.List("");
    return entries.ok() ? TorchWeightFiles(entries.value()) : WeightFiles();
  }

  static Status ReadAll(const ForeignFolder& folder, const WeightFiles& files,
                        ForeignBuilder& builder, TorchSaveReader& reader) {
    if (!folder.file().empty()) return reader.AddNamed(folder.file());
    if (!files.single.empty() && !files.index.empty()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const std::string chosen,
          ChooseWeights(files, builder, [&](const std::string& name) -> Result<ForeignInventory> {
            ForeignBuilder alone(folder, {});
            TorchSaveReader one(folder, alone);
            TENSORMOUNT_RETURN_IF_ERROR(one.AddNamed(name));
            return alone.Finish();
          }));
      return reader.AddNamed(chosen);
    }
    if (!files.empty()) return reader.AddNamed(files.single.empty() ? files.index : files.single);
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
