// SPDX-License-Identifier: Apache-2.0
// Costs of checkpoints that share files.
//
// A link keeps the name that the first writer gave the file, so two checkpoints can share a file
// only if both COMMITs list it with the same name, length and hash. Files that are listed alike are
// found without touching them. Only stat tells whether they are one file, because a refused link
// makes a copy.
#include "index/store/costs.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

#include "base/coding.h"
#include "base/parallel.h"
#include "index/records/manifest.h"
#include "index/records/store_paths.h"

namespace tensormount {
namespace {

// Files are split by hash into this many parts, one for each task, so that threads need no lock.
constexpr std::size_t kBuckets = 64;
constexpr std::uint32_t kNoMember = 0xffffffff;

struct NoState {};

// Whether other checkpoints may share the damaged file. Links are made only of files in data/.
bool MayBeShared(const VerifyReport::Damage& damage) {
  return damage.file.starts_with("data/") && !damage.surplus && !damage.lost;
}

}  // namespace

struct StoreCosts::Gathered {
  // A file of a checkpoint. Files with equal keys are listed alike, and may be the same file.
  struct Item {
    Hash128 key;
    std::uint64_t length = 0;
    std::uint32_t checkpoint = 0;
    std::uint32_t name = 0;  // Offset of the file's name in Checkpoint::names.
  };
  struct Checkpoint {
    std::vector<Item> items;
    std::string names;  // Names, each followed by a NUL.
  };
  std::vector<Checkpoint> checkpoints;
  // For each file name, the number of directories in .trash/ and .staging/ with a file of this
  // name.
  std::unordered_map<std::string, std::uint64_t> elsewhere;

  std::string_view NameOf(const Item& item) const {
    return checkpoints[item.checkpoint].names.data() + item.name;
  }
};

// Reads all COMMITs. Of() later removes checkpoints that disappeared meanwhile.
Status StoreCosts::Gather(FileSystem& fs, const Store& store, Gathered& gathered) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string> names, store.Names());
  if (names.size() >= kNoMember) {
    return Status(Code::kResourceExhausted, store.path() + ": the store has too many checkpoints");
  }
  checkpoints_.resize(names.size());
  gathered.checkpoints.resize(names.size());
  return ForEachParallel<NoState>(names.size(), 0, [&](std::size_t i, NoState&) {
    CheckpointCost& cost = checkpoints_[i];
    CommitRecord commit;
    cost.listing = store.FindListing(names[i], &commit);
    if (!cost.listing.problem.ok()) return Status();
    Gathered::Checkpoint& of = gathered.checkpoints[i];
    ByteWriter alike;
    const auto add = [&](const std::string& name, std::uint64_t length, const Hash128& hash) {
      alike.bytes().clear();
      alike.U64(length);
      alike.Hash(hash);
      alike.Raw(name.data(), name.size());
      of.items.push_back({.key = Xxh3(alike.bytes()),
                          .length = length,
                          .checkpoint = static_cast<std::uint32_t>(i),
                          .name = static_cast<std::uint32_t>(of.names.size())});
      of.names += name;
      of.names += '\0';
      cost.bytes += length;
      if (name.starts_with("data/")) cost.data_bytes += length;
    };
    of.items.reserve(commit.files.size() + 1);
    for (const CommitRecord::Entry& file : commit.files) add(file.name, file.length, file.hash);
    // COMMIT is counted like the listed files: a checkpoint that was copied by `cp -al` shares it.
    add(std::string(store_paths::kCommitFile), cost.listing.commit_bytes, commit.content_root);

    const std::string directory = store.CheckpointPath(names[i]);
    const Result<CheckpointInfo> info = ReadManifestInfo(fs, directory);
    if (info.ok() && info.value().uuid == commit.uuid) {
      cost.created = info.value().created;
      cost.self_contained = info.value().self_contained;
    } else if (const auto written = fs.LinkStat(JoinPath(directory, store_paths::kCommitFile));
               written.ok()) {
      cost.created = written.value().mtime_seconds;
    }
    return Status();
  });
}

// Counts the names of data files in .trash/ and .staging/: removed checkpoints, stagings and copies
// have links to files, too.
void StoreCosts::CountElsewhere(FileSystem& fs, const Store& store, Gathered& gathered) {
  for (const std::string_view folder : {store_paths::kTrashFolder, store_paths::kStagingFolder}) {
    const std::string path = JoinPath(store.path(), folder);
    const Result<std::vector<DirectoryEntry>> entries = fs.List(path);
    if (!entries.ok()) continue;
    for (const DirectoryEntry& entry : entries.value()) {
      if (entry.kind != FileKind::kDirectory) continue;
      for (const char* data : {"data", "checkpoint/data"}) {
        const auto files = fs.List(JoinPath(JoinPath(path, entry.name), data));
        if (!files.ok()) continue;
        for (const DirectoryEntry& file : files.value()) {
          ++gathered.elsewhere["data/" + file.name];
        }
      }
    }
  }
}

// A store of thousands of steps has millions of names, and a stat of each would take a minute. So
// of the names that are listed alike, first only the first and the last are examined. If they are
// the same file, and its link count equals the number of these checkpoints (plus the directories in
// .trash/ and .staging/ with this name), all of them are taken to be links of the file. This is
// wrong only if some of the names are copies (a refused link) or missing, and the file has equally
// many links outside of the store. Otherwise every name is examined.
Status StoreCosts::FindShared(FileSystem& fs, const Store& store, Gathered& gathered) {
  using Item = Gathered::Item;
  std::vector<std::vector<Item>> buckets(kBuckets);
  for (Gathered::Checkpoint& of : gathered.checkpoints) {
    for (const Item& item : of.items) buckets[item.key.low % kBuckets].push_back(item);
    of.items = {};
  }
  // Results of each part. They are joined in order afterwards.
  struct Found {
    std::vector<SharedFile> files;
    std::vector<std::uint32_t> members;
  };
  std::vector<Found> found(kBuckets);
  const Status looked = ForEachParallel<NoState>(kBuckets, 0, [&](std::size_t b, NoState&) {
    std::vector<Item>& items = buckets[b];
    std::sort(items.begin(), items.end(), [](const Item& x, const Item& y) {
      return std::tie(x.key, x.checkpoint) < std::tie(y.key, y.checkpoint);
    });
    std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint32_t>> inodes;
    for (std::size_t i = 0, end = 0; i < items.size(); i = end) {
      for (end = i + 1; end < items.size() && items[end].key == items[i].key;) ++end;
      if (end - i < 2) continue;
      inodes.clear();
      const std::string_view name = gathered.NameOf(items[i]);
      const auto look = [&](std::size_t m) {
        const std::string& checkpoint = checkpoints_[items[m].checkpoint].listing.name;
        return fs.LinkStat(JoinPath(store.CheckpointPath(checkpoint), name));
      };
      const auto outside = gathered.elsewhere.find(std::string(name));
      const std::uint64_t names =
          end - i + (outside == gathered.elsewhere.end() ? 0 : outside->second);
      const Result<FileInfo> first = look(i);
      const Result<FileInfo> last = look(end - 1);
      // A file that cannot be examined may be shared. Ignoring it would give wrong numbers, so the
      // call fails.
      const auto unknown = [](const Result<FileInfo>& info) {
        return !info.ok() && info.status().code() != Code::kNotFound;
      };
      for (const Result<FileInfo>* info : {&first, &last}) {
        if (unknown(*info)) return info->status();
      }
      const bool all = first.ok() && last.ok() && first.value().links == names &&
                       first.value().device == last.value().device &&
                       first.value().inode == last.value().inode;
      const auto share = [&](std::size_t count, const auto& checkpoint_of) {
        Found& out = found[b];
        const std::size_t begin = out.members.size();
        for (std::size_t m = 0; m < count; ++m) out.members.push_back(checkpoint_of(m));
        out.files.push_back({.length = items[i].length, .begin = begin, .end = out.members.size()});
      };
      if (all) {
        share(end - i, [&](std::size_t m) { return items[i + m].checkpoint; });
        continue;
      }
      for (std::size_t m = i; m < end; ++m) {
        const Result<FileInfo> info = m == i ? first : m == end - 1 ? last : look(m);
        if (unknown(info)) return info.status();
        // Missing files and files with one link are not shared.
        if (!info.ok() || info.value().links < 2) continue;
        inodes.emplace_back(info.value().device, info.value().inode, items[m].checkpoint);
      }
      std::sort(inodes.begin(), inodes.end());
      for (std::size_t at = 0, next = 0; at < inodes.size(); at = next) {
        const auto same = [&](std::size_t other) {
          return std::get<0>(inodes[other]) == std::get<0>(inodes[at]) &&
                 std::get<1>(inodes[other]) == std::get<1>(inodes[at]);
        };
        for (next = at + 1; next < inodes.size() && same(next);) ++next;
        if (next - at < 2) continue;
        share(next - at, [&](std::size_t m) { return std::get<2>(inodes[at + m]); });
      }
    }
    items = {};
    return Status();
  });
  TENSORMOUNT_RETURN_IF_ERROR(looked);
  for (const Found& part : found) {
    const std::size_t before = members_.size();
    members_.insert(members_.end(), part.members.begin(), part.members.end());
    for (const SharedFile& file : part.files) {
      shared_.push_back({file.length, before + file.begin, before + file.end});
    }
  }
  return Status();
}

Result<StoreCosts> StoreCosts::Of(FileSystem& fs, const Store& store) {
  StoreCosts costs;
  Gathered gathered;
  TENSORMOUNT_RETURN_IF_ERROR(costs.Gather(fs, store, gathered));
  costs.CountElsewhere(fs, store, gathered);
  TENSORMOUNT_RETURN_IF_ERROR(costs.FindShared(fs, store, gathered));
  for (CheckpointCost& cost : costs.checkpoints_) {
    cost.own_bytes = cost.bytes;
    costs.stored_bytes_ += cost.bytes;
  }
  for (const SharedFile& file : costs.shared_) {
    for (std::size_t m = file.begin; m < file.end; ++m) {
      costs.checkpoints_[costs.members_[m]].own_bytes -= file.length;
    }
    costs.shared_bytes_ += file.length;
    costs.stored_bytes_ -= (file.end - file.begin - 1) * file.length;
  }
  // Checkpoints that disappeared have no items. They are removed, so the positions of the others
  // change.
  std::vector<std::uint32_t> moved(costs.checkpoints_.size(), kNoMember);
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < costs.checkpoints_.size(); ++i) {
    if (costs.checkpoints_[i].listing.problem.code() == Code::kNotFound) continue;
    moved[i] = kept;
    if (kept != i) costs.checkpoints_[kept] = std::move(costs.checkpoints_[i]);
    ++kept;
  }
  costs.checkpoints_.resize(kept);
  for (std::uint32_t& member : costs.members_) member = moved[member];
  return costs;
}

const CheckpointCost* StoreCosts::Find(std::string_view name) const {
  const auto it = std::lower_bound(
      checkpoints_.begin(), checkpoints_.end(), name,
      [](const CheckpointCost& c, std::string_view wanted) { return c.listing.name < wanted; });
  return it != checkpoints_.end() && it->listing.name == name ? &*it : nullptr;
}

std::vector<CheckpointListing> StoreCosts::Listings() const {
  std::vector<CheckpointListing> all;
  for (const CheckpointCost& cost : checkpoints_) all.push_back(cost.listing);
  return all;
}

std::vector<StoreCosts::Sharer> StoreCosts::SharersOf(std::string_view name) const {
  const CheckpointCost* const of = Find(name);
  if (of == nullptr) return {};
  const auto own = static_cast<std::uint32_t>(of - checkpoints_.data());
  // Sharers by position in checkpoints_, which is the order of names.
  std::map<std::uint32_t, Sharer> sharers;
  for (const SharedFile& file : shared_) {
    const auto begin = members_.begin() + static_cast<std::ptrdiff_t>(file.begin);
    const auto end = members_.begin() + static_cast<std::ptrdiff_t>(file.end);
    if (!std::binary_search(begin, end, own)) continue;
    for (auto m = begin; m != end; ++m) {
      if (*m == own) continue;
      Sharer& sharer = sharers[*m];
      sharer.bytes += file.length;
      ++sharer.files;
    }
  }
  std::vector<Sharer> out;
  for (auto& [position, sharer] : sharers) {
    sharer.name = checkpoints_[position].listing.name;
    out.push_back(std::move(sharer));
  }
  return out;
}

void OwnBytes::Add(const std::string& path, int depth) {
  const Result<FileInfo> info = fs_.LinkStat(path);
  if (!info.ok()) return NoteUnseen(info.status());
  if (info.value().kind == FileKind::kFile) {
    // On a filesystem without inode numbers, each name counts as a separate file.
    const bool stamps = fs_.Can(Ability::kStamps);
    Names& names = files_[stamps ? std::pair{info.value().device, info.value().inode}
                                 : std::pair{std::uint64_t{0}, std::uint64_t{files_.size() + 1}}];
    ++names.seen;
    names.links = info.value().links;
    names.bytes = info.value().size;
  }
  if (info.value().kind != FileKind::kDirectory || depth == 0) return;
  const auto entries = fs_.List(path);
  if (!entries.ok()) return NoteUnseen(entries.status());
  for (const DirectoryEntry& e : entries.value()) Add(JoinPath(path, e.name), depth - 1);
}

void OwnBytes::NoteUnseen(const Status& why) {
  // A path that was deleted meanwhile takes no space, so it is not an error.
  if (status_.ok() && why.code() != Code::kNotFound) status_ = why;
}

std::uint64_t OwnBytes::Sum() const {
  std::uint64_t bytes = 0;
  for (const auto& [id, names] : files_) {
    if (names.seen >= names.links) bytes += names.bytes;
  }
  return bytes;
}

Result<std::uint64_t> OwnBytes::Below(FileSystem& fs, const std::string& folder) {
  // A depth that no checkpoint or staging reaches.
  constexpr int kMostFolders = 9;
  OwnBytes own(fs);
  own.Add(folder, kMostFolders);
  TENSORMOUNT_RETURN_IF_ERROR(own.status_);
  return own.Sum();
}

void NameSharers(FileSystem& fs, const std::string& store_path, const std::string& name,
                 VerifyReport& report) {
  if (std::none_of(report.damages.begin(), report.damages.end(), MayBeShared)) return;
  const Result<std::vector<DirectoryEntry>> entries = fs.List(store_path);
  if (!entries.ok()) return;
  std::map<std::string, std::vector<std::string>> known;
  for (VerifyReport::Damage& damage : report.damages) {
    if (!MayBeShared(damage)) continue;
    const auto [at, first] = known.try_emplace(damage.file);
    if (first) {
      const auto stat = [&](const std::string& checkpoint) {
        return fs.LinkStat(JoinPath(JoinPath(store_path, checkpoint), damage.file));
      };
      const Result<FileInfo> own = stat(name);
      if (own.ok() && own.value().links > 1) {
        for (const DirectoryEntry& entry : entries.value()) {
          if (entry.kind != FileKind::kDirectory || entry.name == name ||
              !CheckCheckpointName(entry.name).ok()) {
            continue;
          }
          const Result<FileInfo> other = stat(entry.name);
          if (other.ok() && other.value().device == own.value().device &&
              other.value().inode == own.value().inode) {
            at->second.push_back(entry.name);
          }
        }
      }
    }
    damage.shared_with = at->second;
  }
}

void NameSharers(FileSystem& fs, const std::string& directory, VerifyReport& report) {
  const Result<StoreAndName> parts = SplitCheckpointPath(directory);
  if (!parts.ok() || !fs.Exists(JoinPath(parts.value().store, store_paths::kSuperblockFile))) {
    return;
  }
  NameSharers(fs, parts.value().store, parts.value().name, report);
}

}  // namespace tensormount
