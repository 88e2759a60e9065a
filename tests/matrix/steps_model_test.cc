// SPDX-License-Identifier: Apache-2.0
// A store over many steps against a plain model of it: random saves by ranks and through mounts,
// with and without a base, derived ones, removals, rules, pins, copies and collections, with links
// that are refused, storage that fails, clocks that jump, readers beside, and power cuts. What the
// model has reads as it was, what it dropped is not there, and what a step costs is foreseen.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/store_copy.h"

#include "base/file_system.h"
#include "collective/save_load.h"
#include "fs/save/publish.h"
#include "fs/save/schema.h"
#include "fs/save/staging_folder.h"
#include "index/read/checkpoint.h"
#include "index/store/copy.h"
#include "index/store/derive.h"
#include "index/store/pins.h"
#include "index/store/retention.h"
#include "index/store/store.h"
#include "tests/collective/save_testing.h"
#include "tests/shard/boxes.h"
#include "tests/staging/test_mount.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/power_cut.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

Region PartOfRank(int kind, const Dims& shape, int rank, int ranks) {
  if (shape.rank() == 0 || kind == 3) return Box::Whole(shape);
  if (kind == 2) {
    const Box whole = Box::Whole(shape);
    const std::int64_t step = (whole.volume() + ranks - 1) / ranks;
    const std::int64_t first = std::min(whole.volume(), rank * step);
    return Region::Flat(whole, first, std::min(step, whole.volume() - first)).value();
  }
  const int axis = kind == 1 ? shape.rank() - 1 : 0;
  const std::int64_t step = (shape[axis] + ranks - 1) / ranks;
  const std::int64_t begin = std::min(shape[axis], rank * step);
  Dims from = Dims::Filled(shape.rank(), 0);
  Dims extent = shape;
  from[axis] = begin;
  extent[axis] = std::min(step, shape[axis] - begin);
  return B(from, extent);
}

// What a checkpoint holds.
struct Held {
  std::map<std::string, RandomTensor> tensors;
  std::map<std::string, std::string> objects;
  friend bool operator==(const Held& a, const Held& b) {
    const auto same = [](const auto& x, const auto& y) {
      return x.first == y.first && x.second.bytes == y.second.bytes;
    };
    return a.objects == b.objects &&
           std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(), same);
  }
};
struct Step {
  Held held;
  std::uint64_t generation = 0;
  Uuid uuid;
  bool pinned = false;
  bool derived = false;
  // False: the save said that a power cut may undo it, and nothing synced the store since.
  bool durable = true;
};
using Model = std::map<std::string, Step>;

// What a checkpoint in a store really holds, every byte compared with its hashes.
Result<Held> ReadHeld(const std::string& path) {
  FileSystem& fs = HostFileSystem();
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto opened, OpenedCheckpoint::Open(fs, path, {}));
  Held held;
  Status failed;
  TENSORMOUNT_RETURN_IF_ERROR(opened->index().ForEachTensor(0, [&](const TensorEntry& entry) {
    RandomTensor& tensor = held.tensors[entry.meta.key()];
    tensor.key = entry.meta.key();
    tensor.dtype = entry.meta.dtype();
    tensor.shape = entry.meta.shape();
    tensor.bytes.resize(entry.meta.bytes());
    failed = opened->ReadBytes(entry, 0, tensor.bytes.data(), tensor.bytes.size(),
                               ReadVerify::kExtendLeaves, nullptr);
    if (failed.ok() && entry.digest != Crc64Extend(0, tensor.bytes.data(), tensor.bytes.size())) {
      failed = Status(Code::kDataLoss, "digest of " + entry.meta.key());
    }
    return failed.ok();
  }));
  TENSORMOUNT_RETURN_IF_ERROR(failed);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto objects, opened->index().Objects());
  for (const ObjectRecord& object : objects) {
    std::string& bytes = held.objects[object.key];
    bytes.resize(object.length);
    TENSORMOUNT_RETURN_IF_ERROR(opened->ReadObject(object, 0, bytes.data(), bytes.size()));
  }
  return held;
}

class StepsModel {
 public:
  // `may_fork`: `fs` is the same in a child.
  StepsModel(FileSystem& fs, std::string root, std::uint64_t seed, bool may_fork)
      : random_(seed),
        may_fork_(may_fork),
        root_(std::move(root)),
        store_path_(root_ + "/store"),
        fs_(fs, [this](const FileEvent& e) { return Disturb(e); }) {
    const int tensors = static_cast<int>(random_.Int(3, 8));
    for (int t = 0; t < tensors; ++t) {
      const std::string key = "t" + std::to_string(t);
      // Packs, rank shards, chunks of several leaves.
      const std::uint64_t most = random_.OneIn(3) ? 200'000 : random_.OneIn(2) ? 70'000 : 2'000;
      state_.tensors[key] = MakeRandomTensor(random_, key, most);
    }
    state_.objects["rng"] = random_.Bytes(30);
    // The same ranks and cuts for some steps, as a run has them.
    Reshard();
  }

  const Model& model() const { return model_; }
  const Model& other() const { return other_; }

  void Act() {
    what_ = "";
    Train();
    if (random_.OneIn(4)) Reshard();
    refuse_links_ = random_.OneIn(4);
    const std::int64_t action = random_.Int(0, 19);
    // Another process saves into the store meanwhile; who prunes or is foreseen could not say how
    // it ends. Before there are threads here.
    const bool alone = !may_fork_ || model_.empty() || (action >= 14 && action < 16);
    if (!alone && random_.OneIn(6)) BeginOther();
    const std::shared_ptr<OpenedCheckpoint> reader = OpenSome();
    std::optional<std::thread> beside;
    Result<Held> read = Held();
    if (reader != nullptr) {
      beside.emplace([&] { read = ReadHeld(reader->pinned_directory()); });
    }
    if (action < 9 || model_.empty()) {
      SaveByRanks();
    } else if (action < 11) {
      SaveByMounts();
    } else if (action < 13) {
      DeriveOne();
    } else if (action < 14) {
      RemoveOne();
    } else if (action < 16) {
      PruneSome();
    } else if (action < 17) {
      PinOne();
    } else if (action < 18) {
      Collect();
    } else {
      CopySome();
    }
    if (beside) {
      beside->join();
      EXPECT_OK(read) << what_ << ": " << reader->directory();
      if (read.ok()) {
        EXPECT_TRUE(read.value() == reading_) << what_ << ": " << reader->directory();
      }
    }
    refuse_links_ = false;
    EndOther();
    Check();
  }

  // Everything, and that a collection leaves nothing.
  void Finish() {
    Collect();
    for (const auto& [name, step] : model_) ExpectHeld(store_path_ + "/" + name, step.held);
    for (const auto& [name, step] : other_) ExpectHeld(root_ + "/other/" + name, step.held);
    ExpectOneRootAFile();
    if (model_.empty()) return;
    const Result<Store> store = Store::Open(fs_, store_path_);
    ASSERT_OK(store);
    const auto findings = store.value().Fsck({.read_data = true});
    ASSERT_OK(findings);
    for (const Store::FsckFinding& finding : findings.value()) {
      EXPECT_FALSE(finding.damage) << finding.object << ": " << finding.problem;
    }
  }

  // In a store that a power cut left: what is in both models is there and right, what is in
  // neither is not; `exact`: all of `after` is there.
  static void ExpectAfterCut(const std::string& store, const Model& before, const Model& after,
                             bool exact) {
    std::set<std::string> there;
    const auto entries = HostFileSystem().List(store);
    if (entries.ok()) {
      for (const DirectoryEntry& e : entries.value()) {
        if (e.kind == FileKind::kDirectory && CheckCheckpointName(e.name).ok())
          there.insert(e.name);
      }
    }
    const auto find = [](const Model& model, const std::string& name) {
      const auto at = model.find(name);
      return at == model.end() ? nullptr : &at->second;
    };
    for (const auto& [name, step] : after) {
      const Step* const was = exact ? &step : find(before, name);
      if (was != nullptr && was->uuid == step.uuid && was->durable) {
        EXPECT_TRUE(there.contains(name)) << name;
      }
    }
    for (const std::string& name : there) {
      const Step* a = find(before, name);
      const Step* b = find(after, name);
      if (exact) a = nullptr;
      ASSERT_TRUE(a != nullptr || b != nullptr) << name << " is back";
      const Result<Held> held = ReadHeld(store + "/" + name);
      ASSERT_OK(held) << name;
      EXPECT_TRUE((a != nullptr && held.value() == a->held) ||
                  (b != nullptr && held.value() == b->held))
          << name;
    }
  }

  const std::string& what() const { return what_; }

 private:
  Status Disturb(const FileEvent& e) {
    if (e.op == FileOp::kLink && refuse_links_ && refused_.fetch_add(1) % 2 == 0) {
      static constexpr int kErrors[] = {EXDEV, EMLINK, EPERM, EDQUOT};
      return Status::FromErrno(kErrors[refused_ / 2 % 4], "link", e.path2);
    }
    if (fail_at_ >= 0 && seen_.fetch_add(1) == fail_at_) {
      return Status::FromErrno(EIO, FileOpName(e.op), e.path);
    }
    return Status();
  }

  void Train() {
    for (auto& [key, tensor] : state_.tensors) {
      if (tensor.bytes.empty() || !random_.OneIn(4)) continue;
      char& byte = tensor.bytes[static_cast<std::size_t>(random_.Next() % tensor.bytes.size())];
      byte = static_cast<char>(byte ^ 1);
    }
    if (random_.OneIn(3)) state_.objects["rng"] = random_.Bytes(30);
  }
  void Reshard() {
    ranks_ = static_cast<int>(random_.Int(1, 3));
    for (const auto& [key, tensor] : state_.tensors) {
      cuts_[key] = static_cast<int>(random_.Int(0, 3));
    }
  }

  std::string NewName() { return "step-" + std::to_string(++number_); }
  const std::string& SomeName() {
    auto at = model_.begin();
    std::advance(at, random_.Int(0, static_cast<std::int64_t>(model_.size()) - 1));
    return at->first;
  }
  std::string LatestName() const {
    std::string latest;
    std::pair<bool, std::uint64_t> highest;
    for (const auto& [name, step] : model_) {
      // Derived ones are behind all others.
      const std::pair rank(!step.derived, step.generation);
      if (latest.empty() || rank > highest) {
        highest = rank;
        latest = name;
      }
    }
    return latest;
  }

  std::shared_ptr<OpenedCheckpoint> OpenSome() {
    if (model_.empty() || !random_.OneIn(4)) return nullptr;
    const std::string name = SomeName();
    reading_ = model_.at(name).held;
    const auto opened = OpenedCheckpoint::Open(HostFileSystem(), store_path_ + "/" + name, {});
    EXPECT_OK(opened);
    return opened.ok() ? opened.value() : nullptr;
  }

  // ---- Another process ----

  void BeginOther() {
    child_name_ = NewName();
    child_held_ = state_;
    for (auto& [key, tensor] : child_held_.tensors) {
      if (!tensor.bytes.empty() && random_.OneIn(2)) {
        tensor.bytes[0] = static_cast<char>(tensor.bytes[0] ^ 64);
      }
    }
    child_ = fork();
    ASSERT_GE(child_, 0);
    if (child_ != 0) return;
    const auto results = SaveOnThreads(store_path_ + "/" + child_name_, 1, [&](int, RankState& s) {
      for (const auto& [key, tensor] : child_held_.tensors) {
        s.Add(tensor, Box::Whole(tensor.shape));
      }
      (void)s.dict.AddObject("rng", child_held_.objects["rng"], {});
    });
    _exit(results[0].ok() ? 0 : 1);
  }
  void EndOther() {
    if (child_ <= 0) return;
    int status = 0;
    ASSERT_EQ(waitpid(child_, &status, 0), child_);
    child_ = -1;
    what_ += ", beside a save of " + child_name_;
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << what_;
    Committed(child_name_, child_held_, /*newest=*/false);
  }

  // ---- What is done ----

  void Committed(const std::string& name, Held held, bool newest = true) {
    const Result<Store> store = Store::Open(HostFileSystem(), store_path_);
    ASSERT_OK(store);
    const auto opened = OpenedCheckpoint::Open(HostFileSystem(), store_path_ + "/" + name, {});
    ASSERT_OK(opened);
    const CheckpointInfo& info = opened.value()->index().info();
    for (const auto& [other, step] : model_) {
      if (newest) {
        EXPECT_LT(step.generation, info.generation) << other;
      }
    }
    model_[name] = {std::move(held), info.generation, info.uuid, false};
  }
  void Ended(const Status& status, const std::string& name, Held held) {
    what_ += ": " + status.ToString();
    if (status.ok()) {
      for (auto& [other, step] : model_) step.durable = true;
      return Committed(name, std::move(held));
    }
    if (status.code() == Code::kUnknown && HostFileSystem().Exists(store_path_ + "/" + name)) {
      Committed(name, std::move(held));
      if (model_.contains(name)) model_[name].durable = false;
      return;
    }
    EXPECT_TRUE(fail_at_ >= 0) << what_;
  }

  void SaveByRanks() {
    const std::string name = NewName();
    what_ = "save " + name;
    SaveOptions options;
    Held saved = state_;
    Held whole = saved;
    std::string base = LatestName();
    if (random_.OneIn(6)) options.reuse = Reuse::kOff;
    if (!model_.empty() && random_.OneIn(5)) {
      base = SomeName();
      if (random_.OneIn(2)) {
        options.reuse_from = base;
      } else {
        options.inherit = base;
        // A part of the state; the rest is the base's.
        std::erase_if(saved.tensors, [&](const auto&) { return random_.OneIn(2); });
        if (random_.OneIn(2)) saved.objects.clear();
        whole = model_.at(base).held;
        for (const auto& [key, tensor] : saved.tensors) whole.tensors[key] = tensor;
        for (const auto& [key, bytes] : saved.objects) whole.objects[key] = bytes;
      }
    }
    static constexpr PlacementRule kRules[] = {PlacementRule::kAuto, PlacementRule::kAuto,
                                               PlacementRule::kRankShard};
    options.placement = kRules[random_.Int(0, 2)];
    options.full_every = random_.OneIn(4) ? 3 : 50;
    options.page_hashes = random_.OneIn(6);
    SaveControl control;
    control.now = 1'700'000'000 + random_.Int(-500'000'000, 500'000'000);
    const bool foreseen = options.placement == PlacementRule::kAuto && !options.page_hashes &&
                          options.reuse == Reuse::kAuto && options.full_every == 50 &&
                          !refuse_links_ && !base.empty() && child_ <= 0;
    std::uint64_t forecast = 0;
    if (foreseen) forecast = Forecast(base, saved, whole);
    if (random_.OneIn(6)) FailSomewhere();
    const bool failing = fail_at_ >= 0;
    const auto results = SaveOnThreads(
        store_path_ + "/" + name, ranks_,
        [&](int rank, RankState& state) {
          for (const auto& [key, tensor] : saved.tensors) {
            state.Add(tensor, PartOfRank(cuts_[key], tensor.shape, rank, ranks_));
          }
          for (const auto& [key, bytes] : saved.objects) {
            EXPECT_OK(state.dict.AddObject(key, bytes, {}));
          }
        },
        options, [&](int) -> FileSystem& { return fs_; }, control);
    const Status status = OneVerdict(results);
    Ended(status, name, whole);
    fail_at_ = -1;
    if (!status.ok() || failing || !foreseen) return;
    if (results[0].value().reused.note.empty()) {
      // Headers of rank shards are multiples of 4 KiB here.
      const std::uint64_t own = OwnBytes(name);
      const std::uint64_t slack = forecast / 50 + static_cast<std::uint64_t>(ranks_) * 8192;
      EXPECT_LE(own, forecast + slack) << what_;
      EXPECT_GE(own + slack, forecast) << what_;
    }
  }

  // Bytes of data files that a save of `saved` on top of `base` adds: what differs, and what is
  // live in files of the base of which it is less than half.
  std::uint64_t Forecast(const std::string& base, const Held& saved, const Held& whole) {
    const auto opened =
        OpenedCheckpoint::Open(HostFileSystem(), store_path_ + "/" + base, {}).value();
    const CheckpointIndex& index = opened->index();
    const Held& old = model_.at(base).held;
    std::map<std::uint32_t, std::uint64_t> live;
    std::uint64_t bytes = 0;
    const auto kept = [&](const auto& mine, const auto& theirs, const std::string& key) {
      return mine.contains(key) && theirs.contains(key);
    };
    for (const auto& [key, tensor] : whole.tensors) {
      const bool same =
          kept(old.tensors, whole.tensors, key) && old.tensors.at(key).bytes == tensor.bytes;
      if (!same) {
        bytes += tensor.bytes.size();
        continue;
      }
      const auto extents = index.Extents(index.Find(key).value().ordinal).value();
      for (std::size_t i = 0; i < extents->size(); ++i) {
        const ChunkRecord chunk = extents->At(i).value();
        live[chunk.file] += chunk.length;
      }
    }
    for (const auto& [key, object] : whole.objects) {
      const auto at = old.objects.find(key);
      if (at == old.objects.end() || at->second != object) {
        bytes += object.size();
        continue;
      }
      const auto parts = index.ObjectParts(key).value();
      for (const ObjectRecord& part : parts) live[part.file] += part.length;
    }
    (void)saved;
    for (const auto& [file, sum] : live) {
      if (2 * sum < index.files()[file].length) bytes += sum;
    }
    return bytes;
  }
  std::uint64_t OwnBytes(const std::string& name) {
    std::uint64_t own = 0;
    const std::string folder = store_path_ + "/" + name + "/data";
    for (const DirectoryEntry& e : HostFileSystem().List(folder).value()) {
      const FileInfo info = HostFileSystem().LinkStat(folder + "/" + e.name).value();
      if (info.links == 1) own += info.size;
    }
    return own;
  }

  void SaveByMounts() {
    const std::string name = NewName();
    what_ = "mount " + name;
    const Result<Store> opened = Store::OpenOrCreate(fs_, store_path_);
    ASSERT_OK(opened);
    const Store& store = opened.value();
    const auto staging = fs::CreateStaging(store, fs_, name);
    ASSERT_OK(staging);
    std::string json = R"({"tensors": {)";
    for (const auto& [key, tensor] : state_.tensors) {
      json += (json.back() == '{' ? "" : ", ") + ("\"" + key) + R"(": {"dtype": ")" +
              std::string(InfoOf(tensor.dtype).name) + R"(", "shape": )" + tensor.shape.ToString() +
              "}";
    }
    json += "}}";
    const auto schema = fs::StagingSchema::Parse(json);
    ASSERT_OK(schema) << json;
    ASSERT_OK(fs::AddSchema(fs_, staging.value().directory, "00000000000000aa", schema.value()));
    const auto metas = fs::ReadSchemas(fs_, staging.value().directory).value();
    fs::TestMount mount(fs_, staging.value(), static_cast<std::uint64_t>(number_));
    for (const auto& [key, tensor] : state_.tensors) {
      if (tensor.bytes.empty()) continue;
      mount.Write(mount.Whole(metas.tensors().at(key)), 0, tensor.bytes);
    }
    mount.Object("rng", {}, state_.objects["rng"]);
    ASSERT_OK(mount.Flush());
    fs::StagingReport report;
    const Status published = fs::PublishStaging(store, fs_, name, name, &report).status();
    Ended(published, name, state_);
  }

  void DeriveOne() {
    const std::string from = SomeName();
    const std::string name = NewName();
    what_ = "derive " + name + " from " + from;
    Held held = model_.at(from).held;
    DeriveOptions options;
    for (const auto& [key, tensor] : model_.at(from).held.tensors) {
      if (!random_.OneIn(3)) continue;
      options.drop.push_back(key);
      held.tensors.erase(key);
    }
    if (random_.OneIn(6)) FailSomewhere();
    const Status derived = DeriveOn(fs_, store_path_ + "/" + name, from, options).status();
    Ended(derived, name, std::move(held));
    if (model_.contains(name)) model_[name].derived = true;
    fail_at_ = -1;
  }

  void RemoveOne() {
    const std::string name = SomeName();
    what_ = "rm " + name;
    const Status removed = Store::Open(fs_, store_path_).value().Remove(name);
    if (model_.at(name).pinned) {
      EXPECT_THAT(removed, HasCode(Code::kPermissionDenied));
    } else {
      EXPECT_OK(removed);
      model_.erase(name);
    }
  }

  void PruneSome() {
    PruneOptions options;
    options.rules = {};
    options.rules.keep_last = static_cast<std::uint64_t>(random_.Int(1, 4));
    if (random_.OneIn(3)) {
      options.rules.keep_every.push_back({2, RetentionRules::Every::Unit::kSteps});
    }
    options.dry_run = random_.OneIn(4);
    what_ = "prune " + options.rules.ToText();
    const auto report = retention::Prune(fs_, Store::Open(fs_, store_path_).value(), options);
    ASSERT_OK(report) << what_;
    std::vector<std::pair<std::uint64_t, std::string>> by_age;
    for (const auto& [name, step] : model_) {
      if (!step.derived) by_age.emplace_back(step.generation, name);
    }
    std::sort(by_age.rbegin(), by_age.rend());
    for (std::size_t i = options.rules.keep_last; i < by_age.size(); ++i) {
      const std::string& name = by_age[i].second;
      const bool even = (name.back() - '0') % 2 == 0;
      if (model_.at(name).pinned || (!options.rules.keep_every.empty() && even)) continue;
      if (!options.dry_run) model_.erase(name);
    }
  }

  void PinOne() {
    const std::string name = SomeName();
    Step& step = model_.at(name);
    what_ = (step.pinned ? "unpin " : "pin ") + name;
    if (step.pinned) {
      EXPECT_OK(pins::Unpin(fs_, Store::Open(fs_, store_path_).value(), name));
    } else {
      EXPECT_OK(pins::Pin(fs_, Store::Open(fs_, store_path_).value(), name, {}).status());
    }
    step.pinned = !step.pinned;
  }

  void Collect() {
    what_ = "gc";
    const Result<Store> store = Store::Open(fs_, store_path_);
    if (!store.ok()) return;
    Store::GcOptions options;
    options.grace = std::chrono::seconds(0);
    const auto report = store.value().Gc(options);
    ASSERT_OK(report);
    EXPECT_TRUE(report.value().failed.empty()) << report.value().failed.front();
  }

  void CopySome() {
    std::vector<std::string> sources;
    std::vector<std::string> names;
    for (const auto& [name, step] : model_) {
      if (!random_.OneIn(2)) continue;
      sources.push_back(store_path_ + "/" + name);
      names.push_back(name);
    }
    if (sources.empty()) return;
    what_ = "copy";
    if (random_.OneIn(4)) FailSomewhere();
    const auto copied = CopyCheckpoints(fs_, sources, root_ + "/other", {});
    what_ += ": " + copied.status().ToString();
    const bool failing = fail_at_ >= 0;
    fail_at_ = -1;
    if (failing) {
      // What is there is whole; the next one goes on.
      for (const std::string& name : names) {
        if (!HostFileSystem().Exists(root_ + "/other/" + name)) continue;
        other_[name] = model_.at(name);
        other_[name].durable = false;
      }
      return;
    }
    EXPECT_OK(copied) << what_;
    for (const std::string& name : names) other_[name] = model_.at(name);
    for (auto& [name, step] : other_) step.durable = true;
  }

  void FailSomewhere() {
    seen_ = 0;
    fail_at_ = static_cast<int>(random_.Int(0, 250));
  }

  // ---- What must be so ----

  void Check() {
    SCOPED_TRACE(what_);
    ExpectNames(store_path_, model_);
    ExpectNames(root_ + "/other", other_);
    for (const auto& [name, step] : model_) {
      if (random_.OneIn(3)) ExpectHeld(store_path_ + "/" + name, step.held);
    }
    if (!other_.empty() && random_.OneIn(3)) {
      ExpectHeld(root_ + "/other/" + other_.begin()->first, other_.begin()->second.held);
    }
  }
  static void ExpectNames(const std::string& store, const Model& model) {
    std::vector<std::string> there;
    const auto entries = HostFileSystem().List(store);
    if (entries.ok()) {
      for (const DirectoryEntry& e : entries.value()) {
        if (e.kind == FileKind::kDirectory && e.name[0] != '.') there.push_back(e.name);
      }
    }
    std::vector<std::string> wanted;
    for (const auto& [name, step] : model) wanted.push_back(name);
    EXPECT_EQ(there, wanted);
  }
  // All who have a file say the same of all of its bytes, of those that they do not use, too.
  void ExpectOneRootAFile() {
    std::map<std::string, Hash128> roots;
    for (const auto& [name, step] : model_) {
      const auto opened =
          OpenedCheckpoint::Open(HostFileSystem(), store_path_ + "/" + name, {}).value();
      for (const CommitRecord::Entry& entry : opened->commit()->record.files) {
        if (!entry.name.starts_with("data/")) continue;
        // What mounts wrote and nobody names is no part of a root.
        const auto [at, fresh] = roots.emplace(entry.name, entry.hash);
        EXPECT_TRUE(fresh || at->second == entry.hash) << name << ": " << entry.name;
      }
    }
  }
  static void ExpectHeld(const std::string& path, const Held& wanted) {
    const Result<Held> held = ReadHeld(path);
    ASSERT_OK(held) << path;
    EXPECT_TRUE(held.value() == wanted) << path;
    const auto report = VerifyCheckpoint(HostFileSystem(), path, {.threads = 1});
    ASSERT_OK(report);
    for (const VerifyReport::Damage& damage : report.value().damages) {
      ADD_FAILURE() << path << ": " << damage.object << ": " << damage.reason;
    }
  }

  Random random_;
  const bool may_fork_;
  pid_t child_ = -1;
  std::string child_name_;
  Held child_held_;
  const std::string root_;
  const std::string store_path_;
  ObservedFileSystem fs_;
  Held state_;
  int ranks_ = 1;
  std::map<std::string, int> cuts_;
  Model model_;
  Model other_;
  int number_ = 0;
  Held reading_;
  std::string what_;
  // Of Disturb, which several threads call.
  std::atomic<bool> refuse_links_{false};
  std::atomic<int> refused_{0};
  std::atomic<int> fail_at_{-1};
  std::atomic<int> seen_{0};
};

TEST(StepsModelTest, RandomSequencesMatchTheModel) {
  for (int round = 0; round < TestScale(200); ++round) {
    const std::uint64_t seed = TestSeed() + static_cast<std::uint64_t>(round);
    SCOPED_TRACE("sequence of seed " + std::to_string(seed));
    const TempDir dir;
    StepsModel steps(HostFileSystem(), dir.path(), seed, /*may_fork=*/true);
    for (int act = 0; act < 8 && !testing::Test::HasFailure(); ++act) steps.Act();
    steps.Finish();
    if (testing::Test::HasFailure()) return;
  }
}

TEST(StepsModelTest, PowerCutsAnywhereMatchTheModel) {
  for (int round = 0; round < TestScale(30); ++round) {
    const std::uint64_t seed = TestSeed() + 100'000 + static_cast<std::uint64_t>(round);
    SCOPED_TRACE("sequence of seed " + std::to_string(seed));
    const TempDir dir;
    const std::string live = dir.Join("live");
    ASSERT_OK(HostFileSystem().CreateDirectory(live));
    PowerCutFileSystem fs(live);
    StepsModel steps(fs, live, seed, /*may_fork=*/false);
    Random random(seed);
    for (int act = 0; act < 5 && !testing::Test::HasFailure(); ++act) {
      const std::size_t begin = fs.op_count();
      const Model before = steps.model();
      const Model other_before = steps.other();
      steps.Act();
      const std::size_t end = fs.op_count();
      for (int cut = 0; cut < 2; ++cut) {
        const std::size_t at =
            cut == 0 ? end
                     : static_cast<std::size_t>(random.Int(static_cast<std::int64_t>(begin),
                                                           static_cast<std::int64_t>(end)));
        SCOPED_TRACE(steps.what() + ", cut after operation " + std::to_string(at) + " of " +
                     std::to_string(end));
        const std::string after = dir.Join("after");
        ASSERT_OK(fs.Materialise(at, random, after));
        StepsModel::ExpectAfterCut(after + "/store", before, steps.model(), at == end);
        StepsModel::ExpectAfterCut(after + "/other", other_before, steps.other(), at == end);
        ASSERT_OK(HostFileSystem().RemoveTree(after));
      }
    }
  }
}

}  // namespace
}  // namespace tensormount
