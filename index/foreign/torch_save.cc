// SPDX-License-Identifier: Apache-2.0
// A ForeignFormat of format.h: files that torch.save of PyTorch 1.6 and later wrote. The source is
// a single file; a directory with pytorch_model.bin of transformers, which may have an index; or a
// legacy directory of Megatron-LM with files for each rank.
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
// Largest size of the paths of nested keys. They are a common value, which is read when the
// checkpoint is opened.
constexpr std::size_t kMaxPaths = std::size_t{1} << 20;
constexpr std::uint64_t kMaxTorchPickle = std::uint64_t{256} << 20;
// The file name without its directory and extension.
std::string StemOf(std::string_view name) {
  name = name.substr(name.rfind('/') + 1);
  const std::size_t dot = name.rfind('.');
  return std::string(dot == 0 ? name : name.substr(0, dot));
}

// Whether a zip is a TorchScript program. A TorchScript archive may have a data.pkl, but also has a
// constants.pkl, whose name is in the central directory. The last 256 KiB are searched for the
// name, which also works if the archive is damaged.
bool IsTorchScript(File& file, std::uint64_t length) {
  std::string tail(std::min<std::uint64_t>(length, 256 << 10), '\0');
  if (!file.ReadExactAt(length - tail.size(), tail.data(), tail.size()).ok()) return false;
  return tail.find("/constants.pkl") != std::string::npos;
}

class TorchSaveReader {
 public:
  TorchSaveReader(const ForeignFolder& folder, ForeignBuilder& builder)
      : folder_(folder), builder_(builder) {}

  // Adds the tensors and values of a file. `listed`: the keys that an index lists for the file;
  // null: all keys are added.
  Status AddFile(const std::string& name, const std::string& prefix,
                 const std::set<std::string>* listed = nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t number, builder_.AddFile(name));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file, builder_.OpenFile(number));
    const FileType begin = FileTypeOf(*file);
    if (begin == FileType::kLfsPointer) return IsLfsPointer(folder_.Shown(name));
    if (begin == FileType::kLegacyTorch) {
      return Status(Code::kUnsupported,
                    folder_.Shown(name) +
                        ": in the legacy format of torch.save (before PyTorch 1.6, not a zip "
                        "archive); load it with torch and save it again");
    }
    const std::uint64_t length = builder_.FileLength(number);
    pickle::Options options;
    options.max_bytes = kMaxTorchPickle;
    options.unknown = pickle::Unknown::kForeignClasses;
    // If the file is a TorchScript program, the error below replaces an error of this read.
    const Result<TorchArchive> archive = TorchArchive::Read(*file, 0, length, options);
    if (IsTorchScript(*file, length)) {
      return Status(Code::kUnsupported,
                    folder_.Shown(name) + ": a TorchScript program, not a checkpoint");
    }
    if (!archive.ok()) return archive.status();
    TorchTreeOptions tree;
    tree.prefix = prefix;
    tree.root_key = StemOf(name);
    tree.added = [&](const std::string& key) { held_[name].insert(key); };
    if (prefix.empty()) {
      tree.nested = [&](const std::string& key, const std::vector<TorchNames::Part>& path) {
        if (listed == nullptr || listed->contains(key) || !held_[name].contains(key)) {
          AddPath(key, path);
        }
      };
    }
    // Each file of an index gets its own TorchNames: a tensor is added only from the file that the
    // index lists for it, so the same key in another file must not change its spelling.
    TorchNames own;
    builder_.TakeOnly(listed);
    const Status status = TorchTree(builder_, archive.value(), number,
                                    listed != nullptr ? own : tensors_, common_, budget_, tree)
                              .Add();
    builder_.TakeOnly(nullptr);
    return status.WithContext(folder_.Shown(name));
  }

  // Adds the paths of nested keys as the common value "torch.planner_data" in the form of DCP, so
  // that exports nest the keys again. Call it after all files were added.
  void AddPaths() {
    if (path_bytes_ > kMaxPaths) {
      builder_.Warn("the paths of nested dicts take more than 1 MiB, so they are left out");
    } else if (!paths_.items.empty()) {
      builder_.AddCommon(std::string(kPlannerData), std::move(paths_));
    }
  }

  // Adds the files of an index. A tensor is taken only from the file that the index lists for it,
  // even if other files have the same key.
  Status AddIndexed(const std::string& index) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const WeightMap files, ReadWeightMap(folder_, index));
    Status first;
    std::size_t read = 0;
    for (const auto& [name, keys] : files) {
      const Status status = AddFile(name, "", &keys);
      // If a file is missing, damaged or not supported, only its tensors are lost.
      if (status.code() == Code::kNotFound || status.code() == Code::kDataLoss ||
          status.code() == Code::kUnsupported) {
        const bool missing = status.code() == Code::kNotFound;
        if (!missing && first.ok()) first = status;
        for (const std::string& key : keys) {
          builder_.ReportLost(name, missing ? "the file is missing" : ReasonOf(status, name),
                              ForeignBuilder::LostKind::kTensor, key);
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
                      " tensors in it are not in the index: left out");
      }
      for (const std::string& key : keys) {
        if (held.contains(key)) continue;
        builder_.ReportLost(name,
                            "the file does not contain all tensors that the index lists for it",
                            ForeignBuilder::LostKind::kTensor, key);
      }
    }
    return read > 0 ? Status() : first;
  }

  // Adds a file of tensors, or an index and the files that it lists.
  Status AddNamed(const std::string& name) {
    return IsWeightIndex(name) ? AddIndexed(name) : AddFile(name, "");
  }

  // Adds the directories that Megatron-LM wrote before dist_checkpointing. No file describes how
  // tensor and pipeline parallelism divided the tensors, so the tensors of each rank are shown
  // separately. Fails if no file of any rank can be read.
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
            builder_.ReportLostFile(name, ReasonOf(status, name));
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
  // The message without the file name; ForeignLoss has the file name in a field of its own.
  static std::string ReasonOf(const Status& status, const std::string& name) {
    const std::size_t at = status.message().rfind(name + ": ");
    return at == std::string::npos ? status.message()
                                   : status.message().substr(at + name.size() + 2);
  }

  // Adds a path to paths_. For kMaxPaths, each text counts 16 bytes more than its length. If the
  // sum exceeds kMaxPaths, all paths are dropped, and AddPaths warns.
  void AddPath(const std::string& key, const std::vector<TorchNames::Part>& path) {
    path_bytes_ += key.size() + 16;
    for (const TorchNames::Part& part : path) path_bytes_ += part.text.size() + 16;
    if (path_bytes_ > kMaxPaths) {
      paths_.items.clear();
      return;
    }
    CommonTuple parts;
    for (const TorchNames::Part& part : path) {
      // In planner_data, an integer is a position in a list, and torch's planners write numeric
      // dict keys as text. Optimizers need numeric dict keys as numbers, so such a key is stored as
      // a list with one number.
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
  // By file: the keys of the tensors that were added from it.
  std::map<std::string, std::set<std::string>> held_;
  CommonDict paths_;
  std::size_t path_bytes_ = 0;
};

// The names of the directories mp_rank_* that contain a model file.
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
    // The bytes decide: a link, or a file in the cache of a Hugging Face hub, may have any name. If
    // the bytes of a zip do not show its purpose, the end of its name decides.
    switch (FileTypeOf(folder, folder.file())) {
      case FileType::kTorchZip:
      case FileType::kLegacyTorch:
        return true;
      case FileType::kZip:
      case FileType::kNumpyZip:
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
    // Directories of transformers models also contain configuration and tokenizer files.
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
