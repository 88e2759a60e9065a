// SPDX-License-Identifier: Apache-2.0
// What removes, holds and adds checkpoints of one store, interleaved: programs of the product over
// a file system in memory, stopped and killed before each call that decides something
// (docs/steps.md, "Removal and holds"). After each schedule nothing that a pin, a
// rule, a base or an acknowledgement holds is lost or altered, nothing is stuck, and everybody was
// told the truth.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "fs/save/publish.h"
#include "fs/save/schema.h"
#include "fs/save/staged_reuse.h"
#include "fs/save/staging_folder.h"
#include "index/read/checkpoint.h"
#include "index/records/store_paths.h"
#include "index/store/copy.h"
#include "index/store/derive.h"
#include "index/store/pins.h"
#include "index/store/repair.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "index/store/store_moves.h"
#include "tests/staging/test_mount.h"
#include "tests/support/interleaving.h"
#include "tests/support/memory_file_system.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_checkpoint.h"

namespace tensormount {
namespace {

using Move = Interleaving::Move;
using Sleepers = Interleaving::Sleepers;

constexpr char kStore[] = "/s";
constexpr char kOther[] = "/d";   // A copy of the store, with its pins.
constexpr char kBackup[] = "/r";  // A copy of step-1, which repairs take bytes from.

// ---- Calls at which programs are stopped ----

// Calls on names that others look at: of the store and of its own folders, and what says which
// checkpoint a folder holds. What happens deeper in a staging or a checkpoint nobody else sees
// before a name or a COMMIT leads there.
bool Decides(const FileEvent& event) {
  const auto shallow = [](const std::string& path) {
    return !path.empty() && std::count(path.begin(), path.end(), '/') <= 3;
  };
  const auto tells = [](const std::string& path) {
    for (const char* name : {"/COMMIT", "/BASE", "/UUID", "/staging.json", "/policy.json"}) {
      if (path.ends_with(name)) return true;
    }
    return path.find("/.pins/") != std::string::npos;
  };
  switch (event.op) {
    case FileOp::kLock:
      return true;
    case FileOp::kList:
      return shallow(event.path);
    case FileOp::kOpenRead:
      return tells(event.path);
    case FileOp::kCreate:
    case FileOp::kOpenShared:
    case FileOp::kCreateDirectory:
    case FileOp::kRename:
    case FileOp::kExchange:
    case FileOp::kLink:
    case FileOp::kRemoveFile:
    case FileOp::kRemoveDirectory:
      return shallow(event.path) || shallow(event.path2) || tells(event.path);
    default:
      return false;
  }
}
bool ChangesNames(const FileEvent& event) {
  return event.op != FileOp::kLock && event.op != FileOp::kList && event.op != FileOp::kOpenRead;
}

// ---- What stands where ----

using Standing = std::map<std::string, Uuid>;  // By name.

Standing Look(FileSystem& fs, const std::string& store) {
  Standing standing;
  const auto entries = fs.List(store);
  if (!entries.ok()) return standing;
  for (const DirectoryEntry& e : entries.value()) {
    if (e.kind != FileKind::kDirectory || e.name.starts_with('.')) continue;
    const auto commit = store_moves::ReadCommit(fs, JoinPath(store, e.name));
    standing[e.name] = commit.ok() ? commit.value().record.uuid : Uuid();
  }
  return standing;
}
bool StandsIn(const Standing& standing, const Uuid& uuid) {
  return std::ranges::any_of(standing, [&](const auto& one) { return one.second == uuid; });
}
// Folders of .trash that hold this checkpoint, whole or not.
std::vector<std::string> InTrash(FileSystem& fs, const Uuid& uuid) {
  std::vector<std::string> found;
  const std::string trash = JoinPath(kStore, store_paths::kTrashFolder);
  const auto entries = store_moves::ListIfExists(fs, trash);
  if (!entries.ok()) return found;
  for (const DirectoryEntry& e : entries.value()) {
    if (e.kind != FileKind::kDirectory) continue;
    const auto commit = store_moves::ReadCommit(fs, JoinPath(trash, e.name));
    if (commit.ok() && commit.value().record.uuid == uuid) found.push_back(e.name);
  }
  return found;
}
TinySpec SpecOf(std::uint64_t seed) {
  TinySpec spec;
  spec.writers = 1;
  spec.tensors = {{"w", DType::kU8, {64}, seed, 1, 0, true}, {"b", DType::kU8, {8}, 7, 1, 0, true}};
  return spec;
}

// ---- The store that every schedule begins with ----

// step-1 to step-4, the newest last; step-2 is pinned; the policy keeps the last one. In .trash a
// damaged copy of step-1, and a mark that an earlier removal of step-3 left. A staging of mounts,
// all written, that reuses step-1. /d: a copy of step-4, and the pin of step-1, which comes later.
// Where there is a repair a file of step-1 is damaged.
struct Template {
  std::unique_ptr<MemoryFileSystem> fs;
  std::map<std::string, Uuid> uuids;
  Uuid published;  // Of the staging of mounts.
};

void CopyFolder(MemoryFileSystem& fs, const std::string& from, const std::string& to) {
  ASSERT_OK(fs.CreateDirectory(to));
  for (const DirectoryEntry& e : fs.List(from).value()) {
    if (e.kind == FileKind::kDirectory) {
      CopyFolder(fs, JoinPath(from, e.name), JoinPath(to, e.name));
    } else {
      ASSERT_OK(fs.WriteFileDurably(JoinPath(to, e.name),
                                    fs.ReadFile(JoinPath(from, e.name), 1 << 20).value()));
    }
  }
}

void WriteStagingOfMounts(MemoryFileSystem& fs, const Store& store, Uuid* uuid) {
  const auto staging = fs::CreateStaging(store, fs, "step-9");
  ASSERT_OK(staging);
  *uuid = staging.value().uuid;
  const auto schema = fs::StagingSchema::Parse(
      R"({"reuse": "step-1", "tensors": {"w": {"dtype": "u8", "shape": [64]}}})");
  ASSERT_OK(schema);
  ASSERT_OK(fs::HoldNamedBase(fs, staging.value(), schema.value().reuse()));
  ASSERT_OK(fs::AddSchema(fs, staging.value().directory, "00000000000000aa", schema.value()));
  const auto metas = fs::ReadSchemas(fs, staging.value().directory).value();
  fs::TestMount mount(fs, staging.value(), 1);
  mount.Write(mount.Whole(metas.tensors().at("w")), 0, TinyBytes(SpecOf(1).tensors[0]));
  ASSERT_OK(mount.Flush());
}

const Template& TheStore() {
  static const Template* const made = [] {
    auto* out = new Template;
    out->fs = std::make_unique<MemoryFileSystem>(1'800'000'000);
    MemoryFileSystem& fs = *out->fs;
    for (std::uint64_t i = 1; i <= 4; ++i) {
      const std::string name = "step-" + std::to_string(i);
      const auto saved = WriteTinyCheckpoint(fs, kStore, name, SpecOf(i));
      EXPECT_OK(saved);
      out->uuids[name] = saved.value().info.uuid;
    }
    const Store store = Store::Open(fs, kStore).value();
    EXPECT_OK(pins::Pin(fs, store, "step-2", {.reason = "for the paper"}));
    EXPECT_OK(pins::WritePolicy(fs, kStore, RetentionRules::Parse("last=1").value()));
    const std::string trash = JoinPath(kStore, store_paths::kTrashFolder);
    const std::string twin = JoinPath(trash, out->uuids["step-1"].ToString());
    CopyFolder(fs, std::string(kStore) + "/step-1", twin);
    for (const DirectoryEntry& e : fs.List(twin + "/data").value()) {
      EXPECT_OK(fs.SetBytes(twin + "/data/" + e.name, "damaged"));
    }
    store_moves::MarkTrashed(fs, twin);
    const std::string stale = JoinPath(trash, out->uuids["step-3"].ToString());
    store_moves::MarkTrashed(fs, stale);
    EXPECT_OK(fs.SetMtime(stale + std::string(store_paths::kSinceSuffix), 1'799'000'000));
    WriteStagingOfMounts(fs, store, &out->published);
    EXPECT_OK(CopyCheckpoints(fs, {std::string(kStore) + "/step-4"}, kOther, {}));
    EXPECT_OK(CopyCheckpoints(fs, {std::string(kStore) + "/step-1"}, kBackup, {}));
    const std::string pin = "/.pins/" + out->uuids["step-1"].ToString();
    EXPECT_OK(fs.CreateDirectory(std::string(kOther) + "/.pins"));
    EXPECT_OK(pins::Pin(fs, store, "step-1", {.reason = "here, too"}));
    EXPECT_OK(fs.WriteFileDurably(kOther + pin, fs.ReadFile(kStore + pin, 1 << 20).value()));
    EXPECT_OK(pins::Unpin(fs, store, "step-1"));
    fs.Advance(std::chrono::seconds(5));
    return out;
  }();
  return *made;
}

// The largest data file of step-1, or its last manifest: what a repair finds damaged.
std::string FileToDamage(const std::string& folder) {
  MemoryFileSystem& fs = *TheStore().fs;
  std::pair<std::uint64_t, std::string> found;
  for (const DirectoryEntry& e : fs.List(std::string(kStore) + "/step-1/" + folder).value()) {
    const std::string file = folder + "/" + e.name;
    found =
        std::max(found, {fs.LinkStat(std::string(kStore) + "/step-1/" + file).value().size, file});
  }
  return found.second;
}

// Empty: every byte of it is as it was saved. What no program has touched since is. `planted`:
// files that may hold these bytes.
std::string DamageOf(MemoryFileSystem& fs, const std::string& directory, const Uuid& uuid,
                     const std::map<std::string, std::string>& planted) {
  for (const auto& [name, known] : TheStore().uuids) {
    if (known == uuid && fs.SameBelow(directory, *TheStore().fs, JoinPath(kStore, name))) return "";
  }
  const auto report = VerifyCheckpoint(fs, directory, {.threads = 1});
  if (!report.ok()) return report.status().ToString();
  for (const auto& damage : report.value().damages) {
    const auto known = planted.find(damage.file);
    const bool expected =
        known != planted.end() &&
        fs.ReadFile(JoinPath(directory, damage.file), 1 << 20).value() == known->second;
    if (!expected) return damage.file + ": " + damage.reason;
  }
  return "";
}

// ---- Programs ----

// What a program was told when it ended.
struct Told {
  bool ended = false;  // It was not killed.
  Status status;
  PruneReport prune;
  RepairReport repair;
  Uuid made;  // By a save.
  std::uint64_t generation = 0;
  Standing then;  // What stood when it ended.
};

struct StoreOperation {
  std::string name;
  std::function<void(FileSystem&, Told&)> run;
};

void Made(const CheckpointInfo& info, Told& told) {
  told.made = info.uuid;
  told.generation = info.generation;
}
void Prune(FileSystem& fs, const char* store, const std::string& rules, Told& told) {
  PruneOptions options;
  options.rules = RetentionRules::Parse(rules).value();
  Result<PruneReport> report = retention::Prune(fs, Store::Open(fs, store).value(), options);
  told.status = report.status();
  if (report.ok()) told.prune = std::move(report).value();
}
void Collect(FileSystem& fs, const char* store, int grace, Told& told) {
  Store::GcOptions options;
  options.grace = std::chrono::seconds(grace);
  const auto report = Store::Open(fs, store).value().Gc(options);
  told.status = report.status();
  if (report.ok() && !report.value().failed.empty()) {
    told.status = Status(Code::kInternal, "gc: " + report.value().failed[0]);
  }
}

void Repair(FileSystem& fs, const std::string& name, Told& told) {
  auto other = OpenedCheckpoint::Open(fs, std::string(kBackup) + "/step-1", {});
  told.status = other.status();
  if (!other.ok()) return;
  auto report = RepairOn(fs, JoinPath(kStore, name), std::move(other).value(), {});
  told.status = report.status();
  if (report.ok()) told.repair = std::move(report).value();
}

// Store::Open of a killed program fails.
template <typename F>
void WithStore(FileSystem& fs, Told& told, F use) {
  const Result<Store> store = Store::Open(fs, kStore);
  told.status = store.status();
  if (store.ok()) use(store.value());
}

const std::vector<StoreOperation>& Operations() {
  static const auto* const all = new std::vector<StoreOperation>{
      {"save",
       [](FileSystem& fs, Told& told) {
         const auto saved = WriteTinyCheckpoint(fs, kStore, "step-5", SpecOf(5));
         told.status = saved.status();
         if (saved.ok()) Made(saved.value().info, told);
       }},
      {"replace",
       [](FileSystem& fs, Told& told) {
         Store::PublishOptions options;
         options.if_exists = IfExists::kReplace;
         const auto saved = WriteTinyCheckpoint(fs, kStore, "step-1", SpecOf(11), options);
         told.status = saved.status();
         if (saved.ok()) Made(saved.value().info, told);
       }},
      {"derive",
       [](FileSystem& fs, Told& told) {
         const auto derived = DeriveOn(fs, std::string(kStore) + "/step-6", "step-1", {});
         told.status = derived.status();
         if (derived.ok()) told.made = *Uuid::Parse(derived.value().uuid);
       }},
      {"publish",
       [](FileSystem& fs, Told& told) {
         WithStore(fs, told, [&](const Store& store) {
           const auto saved = fs::PublishStaging(store, fs, "step-9", "step-9", nullptr);
           told.status = saved.status();
           if (saved.ok()) Made(saved.value().info, told);
         });
       }},
      {"pin",
       [](FileSystem& fs, Told& told) {
         WithStore(fs, told, [&](const Store& store) {
           told.status = pins::Pin(fs, store, "step-1", {}).status();
         });
       }},
      {"unpin",
       [](FileSystem& fs, Told& told) {
         WithStore(fs, told,
                   [&](const Store& store) { told.status = pins::Unpin(fs, store, "step-2"); });
       }},
      {"rm",
       [](FileSystem& fs, Told& told) {
         WithStore(fs, told, [&](const Store& store) { told.status = store.Remove("step-1"); });
       }},
      {"prune by policy",
       [](FileSystem& fs, Told& told) {
         WithStore(fs, told, [&](const Store&) { Prune(fs, kStore, "policy", told); });
       }},
      {"prune by rules",
       [](FileSystem& fs, Told& told) {
         WithStore(fs, told, [&](const Store&) { Prune(fs, kStore, "last=2", told); });
       }},
      {"policy that keeps",
       [](FileSystem& fs, Told& told) {
         told.status = pins::WritePolicy(fs, kStore, RetentionRules::Parse("last=100").value());
       }},
      {"clear policy",
       [](FileSystem& fs, Told& told) { told.status = pins::RemovePolicy(fs, kStore); }},
      {"gc",
       [](FileSystem& fs, Told& told) {
         WithStore(fs, told, [&](const Store&) { Collect(fs, kStore, 60, told); });
       }},
      {"gc --grace 0",
       [](FileSystem& fs, Told& told) {
         WithStore(fs, told, [&](const Store&) { Collect(fs, kStore, 0, told); });
       }},
      {"copy",
       [](FileSystem& fs, Told& told) {
         told.status = CopyCheckpoints(fs, {std::string(kStore) + "/step-1"}, kOther, {}).status();
       }},
      {"gc of the copy",
       [](FileSystem& fs, Told& told) {
         WithStore(fs, told, [&](const Store&) { Collect(fs, kOther, 60, told); });
       }},
      {"prune of the copy",
       [](FileSystem& fs, Told& told) {
         WithStore(fs, told, [&](const Store&) { Prune(fs, kOther, "last=1", told); });
       }},
      {"repair", [](FileSystem& fs, Told& told) { Repair(fs, "step-1", told); }},
      {"repair a manifest", [](FileSystem& fs, Told& told) { Repair(fs, "step-1", told); }},
  };
  return *all;
}

// ---- One schedule, and what must be so after it ----

class Schedule {
 public:
  explicit Schedule(std::vector<int> operations) : operations_(std::move(operations)) {
    told_.resize(operations_.size());
    for (std::size_t p = 0; p < operations_.size(); ++p) {
      const StoreOperation& operation = Op(p);
      programs_.push_back(
          {operation.name, [this, p, &operation](FileSystem& fs) { operation.run(fs, told_[p]); }});
    }
  }

  std::vector<Interleaving::Ended> Run(const std::vector<Move>& moves,
                                       Sleepers sleepers = Sleepers::kLetOthersGo) {
    for (Told& told : told_) told = Told();
    fs_ = TheStore().fs->Clone();
    planted_.clear();
    if (Has("repair")) Plant(FileToDamage("data"));
    if (Has("repair a manifest")) Plant(FileToDamage("manifest"));
    begin_ = fs_->NowSeconds();
    std::vector<Interleaving::Ended> ended =
        Interleaving(*fs_, programs_, Decides).Run(moves, sleepers, [&](int program) {
          Told& told = told_[static_cast<std::size_t>(program)];
          told.then = Look(*fs_, kStore);
        });
    for (std::size_t p = 0; p < ended.size(); ++p) told_[p].ended = !ended[p].killed;
    return ended;
  }

  // What is wrong; empty: nothing.
  std::string Check() {
    wrong_.clear();
    const Standing now = Look(*fs_, kStore);
    TheRepairs();
    Answers();
    MustStand(now);
    for (const auto& [name, uuid] : now) {
      if (uuid.IsZero()) {
        Wrong(name + " cannot be read");
        continue;
      }
      const std::string damage = DamageOf(JoinPath(kStore, name), uuid);
      if (!damage.empty()) Wrong(name + " is damaged: " + damage);
    }
    ThePin(now);
    TheOther();
    TheTrash(now);
    AfterThat(now);
    return wrong_;
  }
  const std::vector<Interleaving::Program>& programs() const { return programs_; }

 private:
  const StoreOperation& Op(std::size_t p) const {
    return Operations()[static_cast<std::size_t>(operations_[p])];
  }
  std::string DamageOf(const std::string& directory, const Uuid& uuid) const {
    return tensormount::DamageOf(*fs_, directory, uuid, planted_);
  }
  void Plant(const std::string& file) {
    const std::string path = JoinPath(std::string(kStore) + "/step-1", file);
    std::string bytes = fs_->ReadFile(path, 1 << 20).value();
    bytes.back() ^= 1;
    planted_[file] = bytes;
    EXPECT_OK(fs_->SetBytes(path, bytes));
  }
  bool HasRepair() const { return !Repairs().empty(); }
  std::vector<const Told*> Repairs() const {
    std::vector<const Told*> repairs;
    for (std::size_t p = 0; p < operations_.size(); ++p) {
      if (Op(p).name.starts_with("repair")) repairs.push_back(&told_[p]);
    }
    return repairs;
  }
  void Wrong(const std::string& what) {
    if (!wrong_.empty()) wrong_ += "; ";
    wrong_ += what;
  }
  const Told* Find(std::string_view name) const {
    for (std::size_t p = 0; p < operations_.size(); ++p) {
      if (Op(p).name == name) return &told_[p];
    }
    return nullptr;
  }
  bool Has(std::string_view name) const { return Find(name) != nullptr; }
  bool Killed(std::string_view name) const {
    const Told* told = Find(name);
    return told != nullptr && !told->ended;
  }
  bool AnyKilled() const {
    return std::ranges::any_of(told_, [](const Told& told) { return !told.ended; });
  }
  bool Ok(std::string_view name) const {
    const Told* told = Find(name);
    return told != nullptr && told->ended && told->status.ok();
  }
  // Whether it may have done its work, whatever it was told.
  bool Perhaps(std::string_view name) const {
    const Told* told = Find(name);
    return told != nullptr &&
           (!told->ended || told->status.ok() || told->status.code() == Code::kUnknown);
  }
  const Uuid& U(const std::string& name) const { return TheStore().uuids.at(name); }

  // Where one was told that it is done no damage is left anywhere.
  void TheRepairs() {
    for (const Told* told : Repairs()) {
      if (!told->ended || !told->status.ok()) continue;
      for (const RepairLeft& left : told->repair.left) {
        Wrong("repair left " + left.file + ": " + left.reason);
      }
      if (told->repair.uuid == U("step-1").ToString()) planted_.clear();
    }
  }
  // After one that was killed or came too late the next one ends well, for each that needs it.
  void RepairAgain(const Standing& now) {
    if (planted_.empty()) return;
    for (const char* store : {kStore, kOther}) {
      for (const auto& [name, uuid] : store == kStore ? now : Look(*fs_, kOther)) {
        if (tensormount::DamageOf(*fs_, JoinPath(store, name), uuid, {}).empty()) continue;
        auto other = OpenedCheckpoint::Open(*fs_, std::string(kBackup) + "/step-1", {});
        const auto repaired = RepairOn(*fs_, JoinPath(store, name), std::move(other).value(), {});
        if (!repaired.ok()) Wrong("repair afterwards: " + repaired.status().ToString());
        const std::string left = tensormount::DamageOf(*fs_, JoinPath(store, name), uuid, {});
        if (!left.empty()) Wrong("a repair afterwards leaves " + left);
      }
    }
  }

  // What each was told, by itself.
  void Answers() {
    const bool removers =
        Has("rm") || Has("replace") || Has("prune by policy") || Has("prune by rules");
    for (std::size_t p = 0; p < operations_.size(); ++p) {
      const Told& told = told_[p];
      if (!told.ended || told.status.ok()) continue;
      const std::string& name = Op(p).name;
      const Code code = told.status.code();
      const bool gone = code == Code::kNotFound || code == Code::kStale;
      const bool expected =
          ((name == "derive" || name == "pin" || name == "copy" || name == "rm" ||
            name.starts_with("repair")) &&
           removers && gone) ||
          ((name == "derive" || name == "copy") && HasRepair() && code == Code::kDataLoss) ||
          (name.starts_with("repair") && Repairs().size() > 1 && code == Code::kBusy) ||
          ((name == "rm" || name == "replace") && Has("pin") && code == Code::kPermissionDenied) ||
          // Where the other one has the lock for longer than anybody waits.
          ((name.starts_with("prune") || name.find("policy") != std::string::npos) &&
           code == Code::kBusy) ||
          (name.starts_with("prune") && code == Code::kStale) ||
          (name == "publish" && code == Code::kBusy && Has("gc --grace 0"));
      if (!expected) Wrong(name + " was told " + told.status.ToString());
    }
    for (const char* name : {"prune by policy", "prune by rules"}) {
      const Told* told = Find(name);
      if (told == nullptr || !told->ended) continue;
      for (const PruneReport::Decision& d : told->prune.decisions) {
        const auto at = told->then.find(d.checkpoint);
        const bool stands = at != told->then.end() && at->second.ToString() == d.uuid;
        if (d.removed && stands) Wrong(std::string(name) + " says it removed " + d.checkpoint);
        const bool others =
            Has("rm") || Has("replace") || (Has("prune by policy") && Has("prune by rules"));
        if (d.kept && d.failed.ok() && !stands && !others) {
          Wrong(std::string(name) + " says it kept " + d.checkpoint);
        }
        if (!d.failed.ok() && d.failed.code() != Code::kStale) {
          Wrong(std::string(name) + ": " + d.checkpoint + ": " + d.failed.ToString());
        }
      }
    }
    if (const Told* rm = Find("rm");
        Ok("rm") && !Has("replace") && StandsIn(rm->then, U("step-1"))) {
      Wrong("rm says it removed step-1");
    }
  }

  // Whether somebody may have let it go.
  bool MayGo(const std::string& name, const Uuid& uuid) const {
    const bool first = name == "step-1";
    if (first && Ok("pin") && !Has("replace")) return false;
    if (first && (Perhaps("rm") || (Perhaps("replace") && uuid == U("step-1")))) return true;
    for (const char* prune : {"prune by policy", "prune by rules"}) {
      const Told* told = Find(prune);
      if (told == nullptr) continue;
      if (!told->ended) {
        const bool old = uuid == U("step-1") || (uuid == U("step-2") && Perhaps("unpin")) ||
                         (uuid == U("step-3") && prune == std::string_view("prune by policy"));
        if (old) return true;
      }
      for (const PruneReport::Decision& d : told->prune.decisions) {
        if (d.uuid == uuid.ToString() && d.removed) return true;
      }
    }
    return false;
  }

  std::uint64_t GenerationOf(const Uuid& uuid) const {
    for (const Told& told : told_) {
      if (told.made == uuid) return told.generation;
    }
    return 0;
  }
  void MustStand(const Standing& now) {
    std::vector<std::pair<std::string, Uuid>> all(TheStore().uuids.begin(), TheStore().uuids.end());
    static const std::map<std::string, std::string> kNames{
        {"save", "step-5"}, {"replace", "step-1"}, {"derive", "step-6"}, {"publish", "step-9"}};
    for (std::size_t p = 0; p < operations_.size(); ++p) {
      if (told_[p].ended && !told_[p].made.IsZero()) {
        all.emplace_back(kNames.at(Op(p).name), told_[p].made);
      }
    }
    for (const auto& [name, uuid] : all) {
      // The newest of those that are there from the beginning goes by nobody's rule.
      const bool rules_let_go =
          uuid == U("step-1") || uuid == U("step-2") || uuid == U("step-3") || uuid == U("step-4");
      if (MayGo(name, uuid)) {
        const std::uint64_t generation = GenerationOf(uuid);
        const bool newest = std::ranges::none_of(
            told_, [&](const Told& told) { return told.generation > generation; });
        if (!rules_let_go && newest && !(name == "step-1" && Perhaps("rm"))) {
          Wrong(name + ", a new one, was removed by rule");
        }
        continue;
      }
      const auto at = now.find(name);
      if (at != now.end() && at->second == uuid) continue;
      // One who was killed leaves it where gc keeps it and says so.
      const bool by_the_killed = AnyKilled() && !InTrash(*fs_, uuid).empty();
      const bool pinned_while_replaced = name == "step-1" && Has("replace") && Ok("pin");
      if (by_the_killed || pinned_while_replaced) {
        kept_in_trash_.insert(uuid);
        continue;
      }
      Wrong(name + " (" + uuid.Short() + ") is lost");
    }
    ThePolicy(now);
  }
  // From the moment that a policy stands nothing goes that it keeps.
  void ThePolicy(const Standing& now) {
    if (!Has("prune by policy") || Has("rm") || Has("replace") || Has("prune by rules")) return;
    for (const char* name : {"policy that keeps", "clear policy"}) {
      if (!Ok(name)) continue;
      for (const auto& [checkpoint, uuid] : Find(name)->then) {
        if (!StandsIn(now, uuid) && !AnyKilled()) {
          Wrong(checkpoint + " went although " + name + " was done");
        }
      }
    }
  }

  void ThePin(const Standing& now) {
    const Told* pin = Find("pin");
    if (pin == nullptr || !pin->ended) return;
    const bool there = pins::Find(*fs_, kStore, U("step-1"), 0).value().has_value() ||
                       (Has("replace") && Ok("pin"));
    if (pin->status.ok()) {
      if (!there && !Has("replace")) Wrong("the pin is gone");
      const bool replaced = Has("replace");
      if (!replaced && !StandsIn(pin->then, U("step-1")))
        Wrong("pin was told done of what is gone");
      if (!replaced && !StandsIn(now, U("step-1"))) Wrong("what is pinned is gone");
    } else if (there) {
      Wrong("the pin failed, and holds");
    }
  }

  void TheOther() {
    const Standing there = Look(*fs_, kOther);
    // What replaced step-1 before it was copied is newer.
    const bool newer = there.contains("step-1") && there.at("step-1") != U("step-1");
    if (!StandsIn(there, U("step-4")) && !(newer && Has("prune of the copy"))) {
      Wrong("step-4 of the copy is lost");
    }
    for (const auto& [name, uuid] : there) {
      const std::string damage = DamageOf(JoinPath(kOther, name), uuid);
      if (!damage.empty()) Wrong(name + " of the copy is damaged: " + damage);
    }
    const auto copied = there.find("step-1");
    // What stood there when it began.
    if (!Ok("copy") || (Has("replace") && copied != there.end() && copied->second != U("step-1"))) {
      return;
    }
    if (!StandsIn(there, U("step-1"))) Wrong("what was copied, and is pinned, is gone");
    if (!pins::Find(*fs_, kOther, U("step-1"), 0).value()) Wrong("the pin of the copy is gone");
  }

  bool GoesByRule(const Uuid& uuid) const {
    for (const char* prune : {"prune by policy", "prune by rules"}) {
      const Told* told = Find(prune);
      if (told == nullptr) continue;
      if (!told->ended) return true;
      for (const PruneReport::Decision& d : told->prune.decisions) {
        if (d.uuid == uuid.ToString() && d.removed) return true;
      }
    }
    return false;
  }
  // The default grace holds for what was removed a moment ago.
  void TheTrash(const Standing& now) {
    if (Has("gc --grace 0") || fs_->NowSeconds() - begin_ > 50) return;
    for (const auto& [name, uuid] : TheStore().uuids) {
      if (StandsIn(now, uuid)) continue;
      if (GoesByRule(uuid)) continue;  // That is freed at once.
      const std::vector<std::string> entries = InTrash(*fs_, uuid);
      const bool whole = std::ranges::any_of(entries, [&](const std::string& entry) {
        return DamageOf(JoinPath(JoinPath(kStore, store_paths::kTrashFolder), entry), uuid).empty();
      });
      const bool on_its_way = AnyKilled() && Has("replace");  // In .staging.
      if (!whole && !on_its_way) Wrong(name + " was removed a moment ago, and gc has freed it");
    }
  }

  // Who comes later finds nothing stuck, and nothing that holds goes.
  void AfterThat(const Standing& now) {
    RepairAgain(now);
    const Store store = Store::Open(*fs_, kStore).value();
    // Of checkpoints it looks at what was looked at above, so not every time.
    const auto findings =
        (number_++ % 4 != 0 && !AnyKilled())
            ? Result<std::vector<Store::FsckFinding>>(std::vector<Store::FsckFinding>())
            : store.Fsck({});
    if (!findings.ok()) return Wrong("fsck: " + findings.status().ToString());
    std::set<std::string> said_to_go;
    for (const Store::FsckFinding& f : findings.value()) {
      if (f.damage && !f.repaired) Wrong("fsck: " + f.object + ": " + f.problem);
      if (f.remedy == "gc deletes it") said_to_go.insert(f.object);
    }
    Store::GcOptions options;
    options.grace = std::chrono::seconds(0);
    options.staging_age = std::chrono::seconds(0);
    fs_->Advance(std::chrono::hours(30));
    for (int round = 0; round < 2; ++round) {
      const auto report = store.Gc(options);
      if (!report.ok()) return Wrong("gc afterwards: " + report.status().ToString());
      for (const std::string& failed : report.value().failed) Wrong("gc afterwards: " + failed);
      kept_.clear();
      for (const std::string& kept : report.value().kept) kept_.push_back(kept);
    }
    const Standing later = Look(*fs_, kStore);
    for (const auto& [name, uuid] : now) {
      const auto at = later.find(name);
      if (at == later.end() || at->second != uuid) Wrong("gc afterwards took " + name);
    }
    for (const auto& [name, uuid] : later) {
      const std::string damage = DamageOf(JoinPath(kStore, name), uuid);
      if (!damage.empty()) Wrong("gc afterwards damaged " + name + ": " + damage);
    }
    for (const Uuid& uuid : kept_in_trash_) {
      if (StandsIn(later, uuid)) continue;
      bool whole = false;
      for (const std::string& entry : InTrash(*fs_, uuid)) {
        const std::string below = JoinPath(store_paths::kTrashFolder, entry);
        const bool named = std::ranges::any_of(
            kept_, [&](const std::string& kept) { return kept.starts_with(below + ":"); });
        whole = whole || (named && DamageOf(JoinPath(kStore, below), uuid).empty());
      }
      if (!whole)
        Wrong("gc afterwards freed " + uuid.Short() + ", which nobody was told was removed");
    }
    for (const std::string& object : said_to_go) {
      if (object.starts_with(std::string(store_paths::kTrashFolder) + "/") &&
          fs_->LinkStat(JoinPath(kStore, object)).ok()) {
        Wrong("fsck says that gc deletes " + object + ", which it keeps");
      }
    }
    kept_in_trash_.clear();
    for (const DirectoryEntry& e :
         fs_->List(JoinPath(kStore, store_paths::kStagingFolder)).value()) {
      Wrong("gc afterwards left .staging/" + e.name);
    }
    const auto lock = pins::Lock(*fs_, kStore, 0);
    if (!lock.ok()) Wrong("the lock afterwards: " + lock.status().ToString());
    const auto saved = WriteTinyCheckpoint(*fs_, kStore, "after", SpecOf(99));
    if (!saved.ok()) Wrong("a save afterwards: " + saved.status().ToString());
  }

  const std::vector<int> operations_;
  std::vector<Interleaving::Program> programs_;
  std::vector<Told> told_;
  std::unique_ptr<MemoryFileSystem> fs_;
  std::map<std::string, std::string>
      planted_;  // Damaged files that may stand yet, and their bytes.
  std::int64_t begin_ = 0;
  int number_ = 0;
  std::set<Uuid> kept_in_trash_;
  std::vector<std::string> kept_;
  std::string wrong_;
};

// ---- All of them ----

class RemovalModelTest : public testing::Test {
 protected:
  void One(Schedule& schedule, const std::vector<Move>& moves, Sleepers sleepers) {
    ++explored_;
    if (std::ranges::any_of(moves, [](const Move& move) { return move.killed; })) ++crashes_;
    schedule.Run(moves, sleepers);
    const std::string wrong = schedule.Check();
    if (wrong.empty()) return;
    ++failed_;
    // The first of each kind; the others are counted.
    std::string kind;
    for (const char c : wrong) {
      if (c < '0' || c > '9') kind += c;
    }
    if (kinds_[kind.substr(0, 60)]++ < 1) {
      ADD_FAILURE() << DescribeMoves(schedule.programs(), moves)
                    << (sleepers == Sleepers::kLetOthersGo ? "" : ", impatient") << ": " << wrong;
    }
  }
  void TearDown() override {
    std::printf("%ld schedules of %ld, %ld with a program killed, %ld wrong\n", explored_, all_,
                crashes_, failed_);
    for (const auto& [kind, times] : kinds_) std::printf("  %ld: %s\n", times, kind.c_str());
  }
  // Whether one more of those that there are is run: a part of them, at random.
  bool Chosen() {
    ++all_;
    return random_.Int(0, 999'999) < static_cast<std::int64_t>(share_ * 1'000'000);
  }
  // Calls of an operation where nobody is beside it, and which of them change names.
  const std::vector<FileEvent>& CallsOf(int operation) {
    std::vector<FileEvent>& calls = calls_[operation];
    if (calls.empty()) calls = Schedule({operation}).Run({})[0].calls;
    return calls;
  }

  double share_ = 1;
  Random random_{TestSeed()};
  long explored_ = 0;
  long all_ = 0;
  long crashes_ = 0;
  long failed_ = 0;
  std::map<std::string, long> kinds_;
  std::map<int, std::vector<FileEvent>> calls_;
};

double ScaleFactor() { return TestScale(1000) / 1000.0; }

int Count() { return static_cast<int>(Operations().size()); }

TEST_F(RemovalModelTest, EachOperationAloneKeepsTheInvariants) {
  for (int a = 0; a < Count(); ++a) {
    Schedule schedule({a});
    ++all_;
    One(schedule, {}, Sleepers::kLetOthersGo);
    std::printf("  %s: %zu calls\n", Operations()[static_cast<std::size_t>(a)].name.c_str(),
                CallsOf(a).size());
  }
}

TEST_F(RemovalModelTest, InterleavedPairsKeepTheInvariants) {
  share_ = std::min(1.0, 0.0024 * ScaleFactor());
  for (int a = 0; a < Count(); ++a) {
    for (int b = 0; b < Count(); ++b) {
      if (a == b) continue;
      Schedule schedule({a, b});
      const int calls_a = static_cast<int>(CallsOf(a).size());
      const int calls_b = static_cast<int>(CallsOf(b).size());
      for (int i = 0; i <= calls_a; ++i) {
        for (const Sleepers sleepers : {Sleepers::kLetOthersGo, Sleepers::kLoseTime}) {
          for (int j = 1; j <= calls_b; ++j) {
            if (!Chosen()) continue;
            One(schedule, {{.program = 0, .calls = i}, {.program = 1, .calls = j}, {.program = 0}},
                sleepers);
          }
        }
      }
    }
  }
}

TEST_F(RemovalModelTest, PairsWithOneKilledKeepTheInvariants) {
  share_ = std::min(1.0, 0.0065 * ScaleFactor());
  for (int a = 0; a < Count(); ++a) {
    for (int b = 0; b < Count(); ++b) {
      if (a == b) continue;
      Schedule schedule({a, b});
      const int calls_a = static_cast<int>(CallsOf(a).size());
      const int calls_b = static_cast<int>(CallsOf(b).size());
      for (int i = 0; i < calls_a; ++i) {
        if (ChangesNames(CallsOf(a)[static_cast<std::size_t>(i)]) && Chosen()) {
          One(schedule, {{.program = 0, .calls = i, .killed = true}, {.program = 1}},
              Sleepers::kLetOthersGo);
        }
        for (int j = 0; j < calls_b; ++j) {
          if (ChangesNames(CallsOf(b)[static_cast<std::size_t>(j)]) && Chosen()) {
            One(schedule, {{.program = 0, .calls = i}, {.program = 1, .calls = j, .killed = true}},
                Sleepers::kLetOthersGo);
          }
        }
        for (int j = i + 1; j < calls_a; ++j) {
          if (ChangesNames(CallsOf(a)[static_cast<std::size_t>(j)]) && Chosen()) {
            One(schedule,
                {{.program = 0, .calls = i},
                 {.program = 1},
                 {.program = 0, .calls = j - i, .killed = true}},
                Sleepers::kLetOthersGo);
          }
        }
      }
    }
  }
}

TEST_F(RemovalModelTest, InterleavedTriplesKeepTheInvariants) {
  share_ = std::min(1.0, 0.00004 * ScaleFactor());
  for (int a = 0; a < Count(); ++a) {
    for (int b = 0; b < Count(); ++b) {
      for (int c = 0; c < Count(); ++c) {
        if (a == b || b == c || a == c) continue;
        Schedule schedule({a, b, c});
        const int calls_a = static_cast<int>(CallsOf(a).size());
        const int calls_b = static_cast<int>(CallsOf(b).size());
        for (int i = 1; i <= calls_a; ++i) {
          for (int j = 1; j <= calls_b; ++j) {
            for (const bool first_a : {true, false}) {
              if (!Chosen()) continue;
              One(schedule,
                  {{.program = 0, .calls = i},
                   {.program = 1, .calls = j},
                   {.program = 2},
                   {.program = first_a ? 0 : 1}},
                  Sleepers::kLetOthersGo);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tensormount
