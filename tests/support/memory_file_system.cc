// SPDX-License-Identifier: Apache-2.0
#include "tests/support/memory_file_system.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

namespace tensormount {
namespace {

// "/#7/data": below the folder of number 7, which was pinned, wherever it is.
constexpr std::string_view kPinnedPrefix = "/#";

Status Failed(int err, std::string_view action, const std::string& path) {
  return Status::FromErrno(err, action, path);
}

}  // namespace

struct MemoryFileSystem::Node {
  std::uint64_t id = 0;
  FileKind kind = FileKind::kFile;
  std::shared_ptr<const std::string> bytes = std::make_shared<std::string>();  // Shared by clones.
  std::map<std::string, NodePtr> entries;
  std::uint64_t links = 0;
  std::uint32_t mode = 0644;
  std::int64_t mtime = 0;  // Seconds.
  // flock, by open file.
  std::set<const void*> shared_locks;
  const void* exclusive_lock = nullptr;
};

class InMemoryFile final : public File {
 public:
  InMemoryFile(MemoryFileSystem& fs, MemoryFileSystem::NodePtr node, std::string path,
               bool writable)
      : fs_(fs), node_(std::move(node)), path_(std::move(path)), writable_(writable) {}
  ~InMemoryFile() override { (void)Close(); }

  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    const std::lock_guard lock(fs_.mutex_);
    const std::string& bytes = *node_->bytes;
    if (offset >= bytes.size()) return std::size_t{0};
    const std::size_t n = std::min(size, bytes.size() - static_cast<std::size_t>(offset));
    std::memcpy(out, bytes.data() + offset, n);
    return n;
  }
  Status WriteAt(std::uint64_t offset, const void* data, std::size_t size) override {
    const std::lock_guard lock(fs_.mutex_);
    if (!writable_) return Failed(EBADF, "write", path_);
    std::string bytes = *node_->bytes;
    bytes.resize(std::max<std::size_t>(bytes.size(), static_cast<std::size_t>(offset) + size));
    if (size > 0) std::memcpy(bytes.data() + offset, data, size);
    node_->bytes = std::make_shared<std::string>(std::move(bytes));
    fs_.Touch(*node_);
    return Status();
  }
  Status Truncate(std::uint64_t size) override {
    const std::lock_guard lock(fs_.mutex_);
    if (!writable_) return Failed(EBADF, "truncate", path_);
    std::string bytes = *node_->bytes;
    bytes.resize(static_cast<std::size_t>(size));
    node_->bytes = std::make_shared<std::string>(std::move(bytes));
    fs_.Touch(*node_);
    return Status();
  }
  Status Sync() override { return Status(); }
  Status Seal() override {
    const std::lock_guard lock(fs_.mutex_);
    node_->mode &= ~0222U;
    return Status();
  }
  Result<FileInfo> Stat() override {
    const std::lock_guard lock(fs_.mutex_);
    return MemoryFileSystem::InfoOf(*node_);
  }
  Status TryLockShared() override {
    const std::lock_guard lock(fs_.mutex_);
    if (node_->exclusive_lock != nullptr && node_->exclusive_lock != this) {
      return Status(Code::kBusy, path_ + ": locked by somebody else");
    }
    node_->exclusive_lock = nullptr;
    node_->shared_locks.insert(this);
    return Status();
  }
  Status TryLockExclusive() override {
    const std::lock_guard lock(fs_.mutex_);
    const bool others = std::ranges::any_of(node_->shared_locks,
                                            [this](const void* holder) { return holder != this; });
    if (others || (node_->exclusive_lock != nullptr && node_->exclusive_lock != this)) {
      return Status(Code::kBusy, path_ + ": locked by somebody else");
    }
    node_->shared_locks.clear();
    node_->exclusive_lock = this;
    return Status();
  }
  Status Close() override {
    const std::lock_guard lock(fs_.mutex_);
    node_->shared_locks.erase(this);
    if (node_->exclusive_lock == this) node_->exclusive_lock = nullptr;
    return Status();
  }
  const std::string& path() const override { return path_; }

 private:
  MemoryFileSystem& fs_;
  const MemoryFileSystem::NodePtr node_;
  const std::string path_;
  const bool writable_;
};

MemoryFileSystem::MemoryFileSystem(std::int64_t now_seconds)
    : now_milliseconds_(now_seconds * 1000) {
  root_ = NewNode(FileKind::kDirectory);
  root_->links = 1;
}

MemoryFileSystem::~MemoryFileSystem() = default;

MemoryFileSystem::NodePtr MemoryFileSystem::NewNode(FileKind kind) {
  auto node = std::make_shared<Node>();
  std::size_t id = 1;
  while (id < nodes_.size() && !nodes_[id].expired()) ++id;
  if (id == nodes_.size()) nodes_.emplace_back();
  nodes_[id] = node;
  node->id = id;
  node->kind = kind;
  node->mode = kind == FileKind::kDirectory ? 0755 : 0644;
  Touch(*node);
  return node;
}

void MemoryFileSystem::Touch(Node& node) const { node.mtime = now_milliseconds_ / 1000; }

FileInfo MemoryFileSystem::InfoOf(const Node& node) {
  FileInfo info;
  info.kind = node.kind;
  info.size = node.bytes->size();
  info.device = 1;
  info.inode = node.id;
  info.links = node.links;
  info.mode = node.mode;
  info.mtime_seconds = node.mtime;
  info.ctime_seconds = node.mtime;
  return info;
}

std::unique_ptr<MemoryFileSystem> MemoryFileSystem::Clone() const {
  const std::lock_guard lock(mutex_);
  auto out = std::make_unique<MemoryFileSystem>(0);
  out->now_milliseconds_ = now_milliseconds_;
  out->nodes_.resize(nodes_.size());
  std::map<const Node*, NodePtr> copies;
  const auto copy = [&](const auto& self, const NodePtr& node) -> NodePtr {
    NodePtr& made = copies[node.get()];
    if (made != nullptr) return made;
    made = std::make_shared<Node>();
    made->id = node->id;
    out->nodes_[node->id] = made;
    made->kind = node->kind;
    made->bytes = node->bytes;
    made->links = node->links;
    made->mode = node->mode;
    made->mtime = node->mtime;
    const NodePtr result = made;  // The map may move what it holds.
    for (const auto& [name, child] : node->entries) result->entries[name] = self(self, child);
    return result;
  };
  out->root_ = copy(copy, root_);
  return out;
}

void MemoryFileSystem::Advance(std::chrono::milliseconds time) {
  const std::lock_guard lock(mutex_);
  now_milliseconds_ += time.count();
}

Status MemoryFileSystem::SetBytes(const std::string& path, std::string bytes) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, FindNode(path));
  node->bytes = std::make_shared<std::string>(std::move(bytes));
  return Status();
}

Status MemoryFileSystem::SetMtime(const std::string& path, std::int64_t seconds) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, FindNode(path));
  node->mtime = seconds;
  return Status();
}

bool MemoryFileSystem::SameBelow(const std::string& path, const MemoryFileSystem& other,
                                 const std::string& other_path) const {
  const std::scoped_lock lock(mutex_, other.mutex_);
  const Result<NodePtr> mine = FindNode(path);
  const Result<NodePtr> theirs = other.FindNode(other_path);
  const auto same = [](const auto& self, const Node& a, const Node& b) -> bool {
    if (a.kind != b.kind || a.bytes != b.bytes || a.entries.size() != b.entries.size())
      return false;
    return std::ranges::all_of(a.entries, [&](const auto& entry) {
      const auto there = b.entries.find(entry.first);
      return there != b.entries.end() && self(self, *entry.second, *there->second);
    });
  };
  return mine.ok() && theirs.ok() && same(same, *mine.value(), *theirs.value());
}

Result<MemoryFileSystem::Place> MemoryFileSystem::Find(const std::string& path) const {
  std::string_view rest = path;
  Place place{.folder = nullptr, .name = "", .node = root_};
  if (rest.starts_with(kPinnedPrefix)) {
    rest.remove_prefix(kPinnedPrefix.size());
    const std::uint64_t id = std::stoull(std::string(rest));
    const auto found = pinned_.find(id);
    place.node = found == pinned_.end() ? nullptr : found->second.lock();
    if (place.node == nullptr) return Failed(ENOENT, "find", path);
    rest.remove_prefix(std::min(rest.find('/'), rest.size()));
  } else if (!rest.starts_with('/')) {
    return Status(Code::kInvalidArgument, path + ": not absolute");
  }
  while (!rest.empty()) {
    rest.remove_prefix(std::min(rest.find_first_not_of('/'), rest.size()));
    if (rest.empty()) break;
    const std::string name(rest.substr(0, rest.find('/')));
    rest.remove_prefix(name.size());
    if (name == ".") continue;
    if (place.node == nullptr) return Failed(ENOENT, "find", path);
    if (place.node->kind != FileKind::kDirectory) return Failed(ENOTDIR, "find", path);
    place.folder = place.node;
    place.name = name;
    const auto at = place.folder->entries.find(name);
    place.node = at == place.folder->entries.end() ? nullptr : at->second;
  }
  return place;
}

Result<MemoryFileSystem::NodePtr> MemoryFileSystem::FindNode(const std::string& path) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node == nullptr) return Failed(ENOENT, "find", path);
  return place.node;
}

Status MemoryFileSystem::Put(const std::string& path, const NodePtr& node) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node != nullptr) return Failed(EEXIST, "create", path);
  if (place.folder == nullptr || place.folder->links == 0) return Failed(ENOENT, "create", path);
  place.folder->entries[place.name] = node;
  ++node->links;
  Touch(*place.folder);
  return Status();
}

Result<std::unique_ptr<File>> MemoryFileSystem::OpenRead(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, FindNode(path));
  if (node->kind == FileKind::kDirectory) return Failed(EISDIR, "open", path);
  return std::unique_ptr<File>(std::make_unique<InMemoryFile>(*this, node, path, false));
}

Result<std::unique_ptr<File>> MemoryFileSystem::CreateExclusive(const std::string& path) {
  const std::lock_guard lock(mutex_);
  const NodePtr node = NewNode(FileKind::kFile);
  TENSORMOUNT_RETURN_IF_ERROR(Put(path, node));
  return std::unique_ptr<File>(std::make_unique<InMemoryFile>(*this, node, path, true));
}

Result<std::unique_ptr<File>> MemoryFileSystem::OpenShared(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place place, Find(path));
  NodePtr node = place.node;
  if (node == nullptr) {
    node = NewNode(FileKind::kFile);
    TENSORMOUNT_RETURN_IF_ERROR(Put(path, node));
  }
  if (node->kind == FileKind::kDirectory) return Failed(EISDIR, "open", path);
  return std::unique_ptr<File>(std::make_unique<InMemoryFile>(*this, node, path, true));
}

Status MemoryFileSystem::CreateDirectory(const std::string& path) {
  const std::lock_guard lock(mutex_);
  return Put(path, NewNode(FileKind::kDirectory));
}

Result<std::vector<DirectoryEntry>> MemoryFileSystem::List(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, FindNode(path));
  if (node->kind != FileKind::kDirectory) return Failed(ENOTDIR, "list", path);
  std::vector<DirectoryEntry> entries;
  for (const auto& [name, child] : node->entries) entries.push_back({name, child->kind});
  return entries;
}

Result<FileInfo> MemoryFileSystem::Stat(const std::string& path) { return LinkStat(path); }

Result<FileInfo> MemoryFileSystem::LinkStat(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, FindNode(path));
  return InfoOf(*node);
}

Status MemoryFileSystem::Link(const std::string& from, const std::string& to) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, FindNode(from));
  if (node->kind == FileKind::kDirectory) return Failed(EPERM, "link", from);
  return Put(to, node);
}

Status MemoryFileSystem::RenameNoReplace(const std::string& from, const std::string& to) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place source, Find(from));
  if (source.node == nullptr) return Failed(ENOENT, "rename", from);
  TENSORMOUNT_RETURN_IF_ERROR(Put(to, source.node));
  source.folder->entries.erase(source.name);
  --source.node->links;
  Touch(*source.folder);
  return Status();
}

Status MemoryFileSystem::Exchange(const std::string& a, const std::string& b) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place first, Find(a));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place second, Find(b));
  if (first.node == nullptr) return Failed(ENOENT, "exchange", a);
  if (second.node == nullptr) return Failed(ENOENT, "exchange", b);
  first.folder->entries[first.name] = second.node;
  second.folder->entries[second.name] = first.node;
  Touch(*first.folder);
  Touch(*second.folder);
  return Status();
}

Status MemoryFileSystem::RemoveFile(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node == nullptr) return Failed(ENOENT, "remove", path);
  if (place.node->kind == FileKind::kDirectory) return Failed(EISDIR, "remove", path);
  place.folder->entries.erase(place.name);
  --place.node->links;
  Touch(*place.folder);
  return Status();
}

Status MemoryFileSystem::RemoveDirectory(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Place place, Find(path));
  if (place.node == nullptr) return Failed(ENOENT, "remove", path);
  if (place.node->kind != FileKind::kDirectory) return Failed(ENOTDIR, "remove", path);
  if (place.folder == nullptr) return Failed(EBUSY, "remove", path);
  if (!place.node->entries.empty()) return Failed(ENOTEMPTY, "remove", path);
  place.folder->entries.erase(place.name);
  --place.node->links;
  Touch(*place.folder);
  return Status();
}

Status MemoryFileSystem::SyncDirectory(const std::string& path) {
  const std::lock_guard lock(mutex_);
  return FindNode(path).status();
}

Result<std::string> MemoryFileSystem::Resolve(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_RETURN_IF_ERROR(FindNode(path).status());
  return WithoutTrailingSlashes(path);
}

Result<std::shared_ptr<const std::string>> MemoryFileSystem::PinDirectory(const std::string& path) {
  const std::lock_guard lock(mutex_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const NodePtr node, FindNode(path));
  pinned_[node->id] = node;
  // The folder lives as long as the path that leads to it.
  struct Held {
    NodePtr node;
    std::string path;
  };
  auto held =
      std::make_shared<Held>(Held{node, std::string(kPinnedPrefix) + std::to_string(node->id)});
  return std::shared_ptr<const std::string>(held, &held->path);
}

std::int64_t MemoryFileSystem::NowSeconds() {
  const std::lock_guard lock(mutex_);
  return now_milliseconds_ / 1000;
}

void MemoryFileSystem::SleepFor(std::chrono::milliseconds time) { Advance(time); }

}  // namespace tensormount
