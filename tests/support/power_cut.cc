// SPDX-License-Identifier: Apache-2.0
#include "tests/support/power_cut.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>

namespace tensormount {
namespace {

constexpr std::size_t kSector = 512;

void Require(const Status& s, const char* what) {
  if (s.ok()) return;
  std::fprintf(stderr, "PowerCutFileSystem: %s: %s\n", what, s.ToString().c_str());
  std::abort();
}

}  // namespace

// Passes through, and tells the journal.
class PowerCutFile final : public File {
 public:
  PowerCutFile(PowerCutFileSystem& fs, PowerCutFileSystem::NodeId node, std::unique_ptr<File> base)
      : fs_(fs), node_(node), base_(std::move(base)) {}

  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    return base_->ReadAt(offset, out, size);
  }
  Status WriteAt(std::uint64_t offset, const void* data, std::size_t size) override {
    Op op{.kind = Kind::kWrite};
    op.offset = offset;
    op.data.assign(static_cast<const char*>(data), size);
    op.text = "write " + std::to_string(size) + " bytes at " + std::to_string(offset) + " of ";
    return Do(std::move(op), [&] { return base_->WriteAt(offset, data, size); });
  }
  Status Truncate(std::uint64_t size) override {
    Op op{.kind = Kind::kTruncate};
    op.offset = size;
    op.text = "truncate to " + std::to_string(size) + " ";
    return Do(std::move(op), [&] { return base_->Truncate(size); });
  }
  Status Sync() override {
    Op op{.kind = Kind::kSync};
    op.text = "sync ";
    return Do(std::move(op), [] { return Status(); });
  }
  Status Seal() override {
    Op op{.kind = Kind::kSeal};
    op.text = "seal ";
    return Do(std::move(op), [&] { return base_->Seal(); });
  }
  Result<FileInfo> Stat() override { return base_->Stat(); }
  Status TryLockShared() override { return base_->TryLockShared(); }
  Status TryLockExclusive() override { return base_->TryLockExclusive(); }
  Status Close() override { return base_->Close(); }
  int descriptor() const override { return base_->descriptor(); }
  const std::string& path() const override { return base_->path(); }

 private:
  using Op = PowerCutFileSystem::Op;
  using Kind = Op::Kind;

  template <typename F>
  Status Do(Op op, F f) {
    if (node_ == 0) {
      return Status(Code::kInternal, op.text + path() + ": not made through PowerCutFileSystem");
    }
    const std::lock_guard lock(fs_.mutex_);
    TENSORMOUNT_RETURN_IF_ERROR(f());
    op.node = node_;
    op.text += path();
    fs_.Record(std::move(op));
    return Status();
  }

  PowerCutFileSystem& fs_;
  const PowerCutFileSystem::NodeId node_;
  std::unique_ptr<File> base_;
};

PowerCutFileSystem::PowerCutFileSystem(const std::string& root)
    : base_(HostFileSystem()), root_(root) {
  Result<std::string> real = base_.Resolve(root);
  Require(real.status(), "root");
  real_root_ = std::move(real).value();
  AddNode(true);
  Snapshot(real_root_, 1);
  first_op_ = journal_.size();
}

PowerCutFileSystem::~PowerCutFileSystem() = default;

PowerCutFileSystem::NodeId PowerCutFileSystem::AddNode(bool is_folder) {
  const NodeId id = nodes_.size() + 1;
  nodes_[id].is_folder = is_folder;
  return id;
}

// Journals what is there as made and synced.
void PowerCutFileSystem::Snapshot(const std::string& path, NodeId folder) {
  Result<std::vector<DirectoryEntry>> entries = base_.List(path);
  Require(entries.status(), "snapshot");
  for (const DirectoryEntry& entry : entries.value()) {
    const std::string child = JoinPath(path, entry.name);
    const NodeId node = AddNode(entry.kind == FileKind::kDirectory);
    nodes_[folder].entries[entry.name] = node;
    Record({.kind = Op::Kind::kPlace, .node = node, .folder = folder, .name = entry.name});
    if (entry.kind == FileKind::kDirectory) {
      Snapshot(child, node);
      continue;
    }
    Result<std::string> data = base_.ReadFile(child, ~std::uint64_t{0});
    Require(data.status(), "snapshot");
    Record({.kind = Op::Kind::kWrite, .node = node, .data = std::move(data).value()});
    const Result<FileInfo> info = base_.Stat(child);
    Require(info.status(), "snapshot");
    if ((info.value().mode & 0222) == 0) Record({.kind = Op::Kind::kSeal, .node = node});
    Record({.kind = Op::Kind::kSync, .node = node});
  }
  Record({.kind = Op::Kind::kSyncFolder, .node = folder});
}

void PowerCutFileSystem::Record(Op op) { journal_.push_back(std::move(op)); }

std::size_t PowerCutFileSystem::op_count() const {
  const std::lock_guard lock(mutex_);
  return journal_.size() - first_op_;
}

std::string PowerCutFileSystem::Describe(std::size_t op) const {
  const std::lock_guard lock(mutex_);
  const std::size_t i = first_op_ + op;
  return i < journal_.size() ? journal_[i].text : "the end";
}

Result<PowerCutFileSystem::Place> PowerCutFileSystem::Find(const std::string& path) const {
  std::string_view rest;
  for (const std::string& prefix : {root_, real_root_}) {
    if (path.starts_with(prefix) && (path.size() == prefix.size() || path[prefix.size()] == '/')) {
      rest = std::string_view(path).substr(prefix.size());
    }
  }
  if (rest.data() == nullptr) {
    return Status(Code::kInvalidArgument, path + ": not below " + root_);
  }
  Place place{.folder = 0, .name = "", .node = 1};
  while (!rest.empty()) {
    const std::size_t slash = std::min(rest.find('/'), rest.size());
    const std::string part(rest.substr(0, slash));
    rest.remove_prefix(std::min(slash + 1, rest.size()));
    if (part.empty() || part == ".") continue;
    const auto folder = nodes_.find(place.node);
    if (part == ".." || folder == nodes_.end() || !folder->second.is_folder) {
      return Status(Code::kInternal, path + ": a parent was not made through PowerCutFileSystem");
    }
    const auto entry = folder->second.entries.find(part);
    place = {.folder = folder->first,
             .name = part,
             .node = entry == folder->second.entries.end() ? 0 : entry->second};
  }
  return place;
}

Result<PowerCutFileSystem::Place> PowerCutFileSystem::FindKnown(const std::string& path) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(Place place, Find(path));
  if (place.node == 0) {
    return Status(Code::kInternal, path + ": not made through PowerCutFileSystem");
  }
  return place;
}

Result<std::unique_ptr<File>> PowerCutFileSystem::OpenRead(const std::string& path) {
  const std::lock_guard lock(mutex_);
  return Opened(base_.OpenRead(path), path);
}

Result<std::unique_ptr<File>> PowerCutFileSystem::OpenReadBelow(const std::string& directory,
                                                                const std::string& name) {
  const std::lock_guard lock(mutex_);
  return Opened(base_.OpenReadBelow(directory, name), JoinPath(directory, name));
}

Result<std::unique_ptr<File>> PowerCutFileSystem::Opened(Result<std::unique_ptr<File>> opened,
                                                         const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file, std::move(opened));
  const Result<Place> place = Find(path);
  return std::unique_ptr<File>(
      std::make_unique<PowerCutFile>(*this, place.ok() ? place.value().node : 0, std::move(file)));
}

Result<std::unique_ptr<File>> PowerCutFileSystem::CreateExclusive(const std::string& path) {
  return OpenForWriting(path, true);
}

Result<std::unique_ptr<File>> PowerCutFileSystem::OpenShared(const std::string& path) {
  return OpenForWriting(path, false);
}

Result<std::unique_ptr<File>> PowerCutFileSystem::OpenForWriting(const std::string& path,
                                                                 bool exclusive) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                               exclusive ? base_.CreateExclusive(path) : base_.OpenShared(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(Place place, Find(path));
  if (place.node == 0) {
    place.node = AddNode(false);
    nodes_[place.folder].entries[place.name] = place.node;
    Record({.kind = Op::Kind::kPlace,
            .node = place.node,
            .folder = place.folder,
            .name = place.name,
            .text = "create " + path});
  }
  return std::unique_ptr<File>(std::make_unique<PowerCutFile>(*this, place.node, std::move(file)));
}

Status PowerCutFileSystem::CreateDirectory(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(base_.CreateDirectory(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place place, Find(path));
  const NodeId node = AddNode(true);
  nodes_[place.folder].entries[place.name] = node;
  Record({.kind = Op::Kind::kPlace,
          .node = node,
          .folder = place.folder,
          .name = place.name,
          .text = "mkdir " + path});
  return Status();
}

Result<std::vector<DirectoryEntry>> PowerCutFileSystem::List(const std::string& path) {
  return base_.List(path);
}
Result<FileInfo> PowerCutFileSystem::Stat(const std::string& path) { return base_.Stat(path); }
Result<FileInfo> PowerCutFileSystem::LinkStat(const std::string& path) {
  return base_.LinkStat(path);
}
Result<std::string> PowerCutFileSystem::Resolve(const std::string& path) {
  return base_.Resolve(path);
}

Status PowerCutFileSystem::Link(const std::string& from, const std::string& to) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(base_.Link(from, to));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place source, FindKnown(from));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place place, Find(to));
  nodes_[place.folder].entries[place.name] = source.node;
  Record({.kind = Op::Kind::kPlace,
          .node = source.node,
          .folder = place.folder,
          .name = place.name,
          .text = "link " + from + " to " + to});
  return Status();
}

Status PowerCutFileSystem::RenameNoReplace(const std::string& from, const std::string& to) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(base_.RenameNoReplace(from, to));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place a, FindKnown(from));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place b, Find(to));
  nodes_[a.folder].entries.erase(a.name);
  nodes_[b.folder].entries[b.name] = a.node;
  Record({.kind = Op::Kind::kRename,
          .node = a.node,
          .folder = a.folder,
          .folder2 = b.folder,
          .name = a.name,
          .name2 = b.name,
          .text = "rename " + from + " to " + to});
  return Status();
}

Status PowerCutFileSystem::Exchange(const std::string& a, const std::string& b) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(base_.Exchange(a, b));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place at_a, FindKnown(a));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place at_b, FindKnown(b));
  nodes_[at_a.folder].entries[at_a.name] = at_b.node;
  nodes_[at_b.folder].entries[at_b.name] = at_a.node;
  Record({.kind = Op::Kind::kExchange,
          .node = at_a.node,
          .node2 = at_b.node,
          .folder = at_a.folder,
          .folder2 = at_b.folder,
          .name = at_a.name,
          .name2 = at_b.name,
          .text = "exchange " + a + " and " + b});
  return Status();
}

Status PowerCutFileSystem::RemoveFile(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(base_.RemoveFile(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place place, FindKnown(path));
  nodes_[place.folder].entries.erase(place.name);
  Record({.kind = Op::Kind::kRemove,
          .node = place.node,
          .folder = place.folder,
          .name = place.name,
          .text = "unlink " + path});
  return Status();
}

Status PowerCutFileSystem::RemoveDirectory(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(base_.RemoveDirectory(path));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place place, FindKnown(path));
  nodes_[place.folder].entries.erase(place.name);
  Record({.kind = Op::Kind::kRemove,
          .node = place.node,
          .folder = place.folder,
          .name = place.name,
          .text = "rmdir " + path});
  return Status();
}

Status PowerCutFileSystem::SyncDirectory(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(base_.List(path).status());  // Its errors for a wrong path.
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place place, FindKnown(path));
  Record({.kind = Op::Kind::kSyncFolder, .node = place.node, .text = "sync folder " + path});
  return Status();
}

// The first operations again, with what was durable at each point; then one state to fall back to.
class PowerCutFileSystem::Replay {
 public:
  explicit Replay(const std::map<NodeId, Node>& nodes) : nodes_(nodes) {}

  void Apply(const Op& op);
  // Draws which changes survive.
  void Cut(Random& random);
  Status Write(Random& random, NodeId folder, const std::string& path);
  std::map<NodeId, std::string> Contents() const;

 private:
  // A change of names.
  struct Event {
    std::vector<std::size_t> after;  // Cannot survive without these.
    std::set<NodeId> needs;          // Durable once these folders were synced.
    bool kept = false;
    bool may_leave_old_name = false;
  };
  struct Step {
    std::size_t event;
    NodeId node;      // What the name stands for afterwards.
    bool moved_away;  // By a rename.
  };
  struct FileState {
    std::string durable;
    std::string current;
    std::size_t shortest = 0;  // Since the last sync.
    bool sealed_durable = false;
    bool sealed = false;
  };
  using Slot = std::pair<NodeId, std::string>;

  void Set(Event& event, std::size_t number, const Slot& slot, NodeId node, bool moved_away);
  // `event` puts a name into `folder`, which must then be there with all that it stands in.
  void DependOnFolder(Event& event, NodeId folder);
  void Placed(NodeId node, std::size_t event, NodeId folder);
  std::string Draw(Random& random, const FileState& file) const;

  const std::map<NodeId, Node>& nodes_;
  std::vector<Event> events_;
  std::map<Slot, std::vector<Step>> slots_;
  std::map<NodeId, std::pair<std::size_t, NodeId>> placed_;  // Folders: by which event, where.
  std::map<NodeId, FileState> files_;
  std::map<NodeId, std::map<std::string, NodeId>> tree_;  // After the cut.
  std::map<NodeId, std::string> written_;                 // Files that have a name already.
};

void PowerCutFileSystem::Replay::Set(Event& event, std::size_t number, const Slot& slot,
                                     NodeId node, bool moved_away) {
  std::vector<Step>& steps = slots_[slot];
  if (!steps.empty()) event.after.push_back(steps.back().event);
  steps.push_back({number, node, moved_away});
}

void PowerCutFileSystem::Replay::DependOnFolder(Event& event, NodeId folder) {
  for (auto at = placed_.find(folder); at != placed_.end(); at = placed_.find(at->second.second)) {
    event.after.push_back(at->second.first);
  }
}

void PowerCutFileSystem::Replay::Placed(NodeId node, std::size_t event, NodeId folder) {
  if (nodes_.at(node).is_folder) placed_[node] = {event, folder};
}

void PowerCutFileSystem::Replay::Apply(const Op& op) {
  using Kind = Op::Kind;
  const std::size_t number = events_.size();
  Event event;
  FileState& file = files_[op.node];  // An unused one for folders.
  switch (op.kind) {
    case Kind::kPlace:
      Set(event, number, {op.folder, op.name}, op.node, false);
      event.needs = {op.folder};
      Placed(op.node, number, op.folder);
      break;
    case Kind::kRemove:
      for (const auto& [slot, steps] : slots_) {  // An emptied folder goes last.
        if (slot.first == op.node) event.after.push_back(steps.back().event);
      }
      Set(event, number, {op.folder, op.name}, 0, false);
      event.needs = {op.folder};
      break;
    case Kind::kRename:
      DependOnFolder(event, op.folder2);
      Set(event, number, {op.folder, op.name}, 0, true);
      Set(event, number, {op.folder2, op.name2}, op.node, false);
      event.needs = {op.folder2};
      event.may_leave_old_name = !nodes_.at(op.node).is_folder && op.folder != op.folder2;
      Placed(op.node, number, op.folder2);
      break;
    case Kind::kExchange:
      DependOnFolder(event, op.folder);
      DependOnFolder(event, op.folder2);
      Set(event, number, {op.folder, op.name}, op.node2, false);
      Set(event, number, {op.folder2, op.name2}, op.node, false);
      event.needs = {op.folder, op.folder2};
      Placed(op.node, number, op.folder2);
      Placed(op.node2, number, op.folder);
      break;
    case Kind::kSyncFolder:
      for (Event& e : events_) e.needs.erase(op.node);
      for (const auto& [slot, steps] : slots_) {
        if (slot.first != op.node) continue;
        for (const Step& step : steps) {
          if (step.moved_away) events_[step.event].may_leave_old_name = false;
        }
      }
      return;
    case Kind::kWrite:
      if (file.current.size() < op.offset + op.data.size() && !op.data.empty()) {
        file.current.resize(op.offset + op.data.size());
      }
      file.current.replace(std::min<std::size_t>(op.offset, file.current.size()), op.data.size(),
                           op.data);
      return;
    case Kind::kTruncate:
      file.current.resize(op.offset);
      file.shortest = std::min(file.shortest, file.current.size());
      return;
    case Kind::kSync:
      file.durable = file.current;
      file.shortest = file.current.size();
      file.sealed_durable = file.sealed;
      return;
    case Kind::kSeal:
      file.sealed = true;
      return;
  }
  events_.push_back(std::move(event));
}

void PowerCutFileSystem::Replay::Cut(Random& random) {
  // What is durable, and what that cannot do without.
  for (std::size_t i = events_.size(); i-- > 0;) {
    Event& event = events_[i];
    event.kept = event.kept || event.needs.empty();
    if (!event.kept) continue;
    for (const std::size_t before : event.after) events_[before].kept = true;
  }
  // Often nothing more or all, because these are the states that a bug shows in most.
  const std::int64_t chance = random.OneIn(3) ? 0 : random.OneIn(3) ? 100 : random.Int(5, 95);
  for (Event& event : events_) {
    if (event.kept || random.Int(0, 99) >= chance) continue;
    event.kept = std::all_of(event.after.begin(), event.after.end(),
                             [&](std::size_t before) { return events_[before].kept; });
  }
  for (const auto& [slot, steps] : slots_) {
    NodeId node = 0;
    NodeId before = 0;
    for (const Step& step : steps) {
      if (!events_[step.event].kept) break;
      before = std::exchange(node, step.node);
      // A file that also stays under its old name.
      if (step.moved_away && events_[step.event].may_leave_old_name && random.OneIn(3)) {
        node = before;
      }
    }
    if (node != 0) tree_[slot.first][slot.second] = node;
  }
}

std::string PowerCutFileSystem::Replay::Draw(Random& random, const FileState& file) const {
  const std::string& durable = file.durable;
  const std::string& current = file.current;
  const std::int64_t mode = random.Int(0, 3);
  if (mode == 0) return durable;
  if (mode == 1) return current;
  // From here on the file may have lost its blocks and got new ones.
  const std::size_t fresh = std::min(file.shortest, durable.size());
  std::size_t size = current.size();
  if (mode == 3 && random.OneIn(2)) {
    const std::size_t low = std::min(durable.size(), current.size());
    const std::size_t high = std::max(durable.size(), current.size());
    size = static_cast<std::size_t>(
        random.Int(static_cast<std::int64_t>(low), static_cast<std::int64_t>(high)));
  }
  std::string out = durable;
  out.resize(size);
  for (std::size_t at = 0; at < size; at += kSector) {
    const std::size_t end = std::min(at + kSector, size);
    const std::int64_t choice = mode == 2 ? 2 : random.Int(0, 2);
    if (choice == 1 && at < current.size()) {
      out.replace(at, std::min(end, current.size()) - at, current, at,
                  std::min(end, current.size()) - at);
    }
    if (choice == 2 && end > fresh) {
      std::fill(out.begin() + static_cast<std::ptrdiff_t>(std::max(at, fresh)),
                out.begin() + static_cast<std::ptrdiff_t>(end), '\0');
    }
  }
  return out;
}

Status PowerCutFileSystem::Replay::Write(Random& random, NodeId folder, const std::string& path) {
  FileSystem& host = HostFileSystem();
  TENSORMOUNT_RETURN_IF_ERROR(host.CreateDirectory(path));
  for (const auto& [name, node] : tree_[folder]) {
    const std::string child = JoinPath(path, name);
    if (nodes_.at(node).is_folder) {
      TENSORMOUNT_RETURN_IF_ERROR(Write(random, node, child));
      continue;
    }
    const auto [first, is_new] = written_.emplace(node, child);
    if (!is_new) {
      TENSORMOUNT_RETURN_IF_ERROR(host.Link(first->second, child));
      continue;
    }
    const FileState& file = files_[node];
    const std::string data = Draw(random, file);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> out, host.CreateExclusive(child));
    TENSORMOUNT_RETURN_IF_ERROR(out->WriteAt(0, data.data(), data.size()));
    if (file.sealed_durable || (file.sealed && random.OneIn(2))) {
      TENSORMOUNT_RETURN_IF_ERROR(out->Seal());
    }
    TENSORMOUNT_RETURN_IF_ERROR(out->Close());
  }
  return Status();
}

std::map<PowerCutFileSystem::NodeId, std::string> PowerCutFileSystem::Replay::Contents() const {
  std::map<NodeId, std::string> out;
  for (const auto& [node, file] : files_) out[node] = file.current;
  return out;
}

Status PowerCutFileSystem::Materialise(std::size_t after_op, Random& random,
                                       const std::string& into) const {
  const std::lock_guard lock(mutex_);
  if (after_op > journal_.size() - first_op_) {
    return Status(Code::kInvalidArgument, "operation " + std::to_string(after_op) + " of " +
                                              std::to_string(journal_.size() - first_op_));
  }
  Replay replay(nodes_);
  for (std::size_t i = 0; i < first_op_ + after_op; ++i) replay.Apply(journal_[i]);
  replay.Cut(random);
  return replay.Write(random, 1, into);
}

Status PowerCutFileSystem::CompareWithDisk() const {
  const std::lock_guard lock(mutex_);
  Replay replay(nodes_);
  for (const Op& op : journal_) replay.Apply(op);
  return Compare(real_root_, 1, replay.Contents());
}

Status PowerCutFileSystem::Compare(const std::string& path, NodeId folder,
                                   const std::map<NodeId, std::string>& contents) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, base_.List(path));
  const std::map<std::string, NodeId>& known = nodes_.at(folder).entries;
  if (entries.size() != known.size()) {
    return Status(Code::kInternal, path + ": " + std::to_string(entries.size()) +
                                       " entries, the journal has " + std::to_string(known.size()));
  }
  for (const DirectoryEntry& entry : entries) {
    const std::string child = JoinPath(path, entry.name);
    const auto found = known.find(entry.name);
    if (found == known.end()) return Status(Code::kInternal, child + ": not in the journal");
    if (nodes_.at(found->second).is_folder) {
      TENSORMOUNT_RETURN_IF_ERROR(Compare(child, found->second, contents));
      continue;
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string data, base_.ReadFile(child, ~std::uint64_t{0}));
    const auto content = contents.find(found->second);
    if (data != (content == contents.end() ? std::string() : content->second)) {
      return Status(Code::kInternal, child + ": other bytes than the journal has");
    }
  }
  return Status();
}

}  // namespace tensormount
