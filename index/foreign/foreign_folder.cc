// SPDX-License-Identifier: Apache-2.0
// ForeignFolder of foreign.h: the files of a foreign checkpoint, and the promise that nothing in it
// leads out of it. Apart from the builder because that one never opens a file.
//
// Names come from metadata that anybody may have written, and links may be put anywhere at any
// time, so a check of names alone would not do: every open goes through openat2 with
// RESOLVE_BENEATH below the root (OpenReadBeneath), where the kernel refuses each step that leads
// out, without a moment between check and use. The check of names comes first all the same, because
// it can say what is wrong.
#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "index/foreign/foreign.h"
#include "index/read/foreign_file.h"

namespace tensormount {
namespace {

// Linux takes no longer path.
// PATH_MAX is 4,096 with the NUL at the end.
constexpr std::size_t kMaxPathBytes = 4095;
// What a message shows of a name that came from outside.
constexpr std::size_t kShownBytes = 256;
// A larger file is read only when it begins as it should.
// A sparse file of 2 GiB costs its owner nothing; reading it would cost us as much memory.
constexpr std::uint64_t kReadAtOnce = std::uint64_t{1} << 20;
constexpr std::size_t kFirstBytes = 4096;

// Control characters could rewrite the terminal that shows the message.
std::string Cut(std::string_view name) {
  std::string out;
  for (const char c : name.substr(0, kShownBytes)) {
    const auto u = static_cast<unsigned char>(c);
    out += u < 0x20 || u == 0x7F ? '?' : c;
  }
  if (name.size() > kShownBytes) out += "...";
  return out;
}

// "a/b" below "a" is "b"; the folder itself is "". nullopt: not below it.
// Both are resolved paths, so comparing text is comparing folders. "/ab" is not below "/a".
std::optional<std::string> RelativeTo(const std::string& root, const std::string& path) {
  if (path == root) return std::string();
  if (root == "/") return path.substr(1);
  if (!path.starts_with(root) || path[root.size()] != '/') return std::nullopt;
  return path.substr(root.size() + 1);
}

std::string ParentOrHere(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string JoinedBelow(const std::string& folder, std::string_view name) {
  if (folder.empty()) return std::string(name);
  return name.empty() ? folder : JoinPath(folder, name);
}

// "models--x/blobs" of "models--x/snapshots/0123" and what lies below that, where it is a folder: a
// hub's cache keeps files there, and links to them in the snapshot. nullopt: no such cache.
std::optional<std::string> BlobsOf(FileSystem& fs, const std::string& folder) {
  constexpr std::string_view kSnapshots = "/snapshots/";
  const std::size_t at = folder.rfind(kSnapshots);
  if (at == std::string::npos) return std::nullopt;
  const Result<std::string> blobs = fs.Resolve(folder.substr(0, at) + "/blobs");
  if (!blobs.ok()) return std::nullopt;
  const Result<FileInfo> info = fs.Stat(blobs.value());
  if (!info.ok() || info.value().kind != FileKind::kDirectory) return std::nullopt;
  return blobs.value();
}

// Takes those of `roots` away that a link below `folder` leads into, and adds them to `bounds`.
// Looks at so many entries and no more, `left`.
void FindBounds(FileSystem& fs, const std::string& folder, int depth, std::size_t& left,
                std::vector<std::string>& roots, std::vector<std::string>& bounds) {
  constexpr int kMaxLinkDepth = 4;
  const Result<std::vector<DirectoryEntry>> entries = fs.List(folder);
  if (!entries.ok()) return;
  for (const DirectoryEntry& entry : entries.value()) {
    if (roots.empty() || left == 0) return;
    --left;
    const std::string path = JoinPath(folder, entry.name);
    if (entry.kind == FileKind::kDirectory && depth < kMaxLinkDepth) {
      FindBounds(fs, path, depth + 1, left, roots, bounds);
    }
    if (entry.kind != FileKind::kSymlink) continue;
    const Result<std::string> real = fs.Resolve(path);
    if (!real.ok()) continue;
    const auto found = std::ranges::find_if(
        roots, [&](const std::string& root) { return RelativeTo(root, real.value()).has_value(); });
    if (found == roots.end()) continue;
    bounds.push_back(*found);
    roots.erase(found);
  }
}

// The deepest folder that both lie in.
std::string Above(const std::string& a, const std::string& b) {
  std::string out = a;
  while (!RelativeTo(out, b)) out = ParentOrHere(out);
  return out;
}

}  // namespace

// The deepest of several roots that the folder lies below is taken: it allows the least.
Result<ForeignFolder> ForeignFolder::Open(FileSystem& fs, const std::string& path,
                                          std::span<const std::string> roots) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(path));
  ForeignFolder out;
  out.fs_ = &fs;
  out.path_ = path;
  std::string folder = path;
  if (info.kind == FileKind::kFile) {
    out.file_ = path.substr(path.rfind('/') + 1);
    folder = ParentOrHere(path);
  } else if (info.kind != FileKind::kDirectory) {
    return Status(Code::kInvalidArgument, path + ": neither a file nor a folder");
  }
  out.root_ = folder;
  TENSORMOUNT_RETURN_IF_ERROR(out.AddBounds(roots));
  return out;
}

// root_ is the folder itself before. A root that nothing in the folder leads into does not count,
// so that a root for another source changes no name here.
Status ForeignFolder::AddBounds(std::span<const std::string> roots) {
  constexpr std::size_t kMaxLinksLookedAt = 10'000;
  const std::string folder = root_;
  std::string home = folder;
  std::size_t deepest = 0;
  std::vector<std::string> elsewhere;
  for (const std::string& named : roots) {
    Result<std::string> root = fs_->Resolve(named);
    if (!root.ok()) return root.status().WithContext("--root " + named);
    if (!RelativeTo(root.value(), folder)) {
      if (!RelativeTo(folder, root.value())) elsewhere.push_back(root.value());
    } else if (root.value().size() > deepest) {
      deepest = root.value().size();
      home = root.value();
    }
  }
  if (const std::optional<std::string> blobs = BlobsOf(*fs_, folder);
      blobs && !RelativeTo(home, *blobs)) {
    elsewhere.push_back(*blobs);
  }
  bounds_ = {home};
  root_ = home;
  std::size_t left = kMaxLinksLookedAt;
  if (!elsewhere.empty()) FindBounds(*fs_, folder, 0, left, elsewhere, bounds_);
  for (const std::string& bound : bounds_) root_ = Above(root_, bound);
  folder_ = RelativeTo(root_, folder).value_or(std::string());
  return {};
}

std::string ForeignFolder::Shown(std::string_view name) const {
  const std::string folder = file_.empty() ? path_ : ParentOrHere(path_);
  return name.empty() ? folder : JoinPath(folder, Cut(name));
}

Result<std::string> ForeignFolder::BelowRoot(std::string_view name) const {
  const auto refused = [&](Code code, std::string_view why) {
    return Status(code, Shown("") + ": the name '" + Cut(name) + "' " + std::string(why));
  };
  if (name.empty()) return refused(Code::kDataLoss, "is empty");
  if (name.size() > kMaxPathBytes) return refused(Code::kDataLoss, "is too long");
  if (name.find('\0') != std::string_view::npos) return refused(Code::kDataLoss, "holds a NUL");
  if (name.front() == '/') return refused(Code::kDataLoss, "is no relative path");
  // "a//b" and "a/./b" are refused as well: two spellings of one file would be two files in the
  // table.
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t end = std::min(name.find('/', at), name.size());
    const std::string_view part = name.substr(at, end - at);
    if (part == "..") {
      return refused(Code::kPermissionDenied, "leads out of its folder by '..'");
    }
    if (part.empty() || part == ".") return refused(Code::kDataLoss, "is no plain relative path");
    at = end + 1;
  }
  return JoinedBelow(folder_, name);
}

// Whoever named the checkpoint did nothing wrong where a FIFO, a device or links that lead round
// stand instead of a file.
Status ForeignFolder::DamageOf(std::string_view name, const Status& status) const {
  if (status.ToErrno() == ELOOP) {
    return {Code::kDataLoss, Shown(name) + ": links that lead round, or too many of them"};
  }
  if (status.code() != Code::kInvalidArgument) return status;
  return {Code::kDataLoss, status.message()};
}

// Calls f with a bound and a name below it, and again with where a link out of the first bound
// leads to: the kernel takes none of these, though it may stay inside.
template <typename F>
auto ForeignFolder::Beneath(std::string_view name, F f) const
    -> decltype(f(std::string(), std::string())) {
  std::string below = folder_;
  if (!name.empty()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(below, BelowRoot(name));
  }
  const std::string path = below.empty() ? root_ : JoinPath(root_, below);
  const std::string& home = bounds_.front();
  auto result = f(home, RelativeTo(home, path).value_or(std::string()));
  if (result.ok()) return result;
  // RESOLVE_BENEATH answers EXDEV for an absolute link, wherever it leads. Some tools write
  // absolute links to files that are inside, so it is resolved by hand, and opened again below the
  // bound by the name that came out: if somebody replaces a link in between, the second open
  // refuses what leads out.
  if (result.status().ToErrno() != EXDEV) return DamageOf(name, result.status());
  const Result<std::string> real = fs_->Resolve(path);
  if (!real.ok()) return DamageOf(name, real.status());
  for (const std::string& bound : bounds_) {
    const std::optional<std::string> inside = RelativeTo(bound, real.value());
    if (!inside) continue;
    auto found = f(bound, *inside);
    if (found.ok()) return found;
    return DamageOf(name, found.status());
  }
  return Status(Code::kPermissionDenied, Shown(name) + ": leads to " + real.value() + ", out of " +
                                             home + ": name a folder that holds it with --root");
}

Result<std::unique_ptr<File>> ForeignFolder::OpenRead(std::string_view name) const {
  if (name.empty()) return BelowRoot(name).status();
  return Beneath(name, [&](const std::string& bound, const std::string& below) {
    return fs_->OpenReadBeneath(bound, below);
  });
}

Result<std::unique_ptr<File>> ForeignFolder::OpenLocated(const std::string& below) const {
  const std::optional<BoundedName> found = NameWithin(bounds_, JoinPath(root_, below));
  return found ? fs_->OpenReadBeneath(found->bound, found->name)
               : fs_->OpenReadBeneath(bounds_.front(), below);
}

Result<FileInfo> ForeignFolder::Stat(std::string_view name) const {
  return Beneath(name, [&](const std::string& bound, const std::string& below) {
    return fs_->StatBeneath(bound, below);
  });
}

Result<std::string> ForeignFolder::Locate(std::string_view name) const {
  if (name.empty()) return BelowRoot(name).status();
  return Beneath(name,
                 [&](const std::string& bound, const std::string& below) -> Result<std::string> {
                   TENSORMOUNT_RETURN_IF_ERROR(fs_->StatBeneath(bound, below).status());
                   const std::string path = below.empty() ? bound : JoinPath(bound, below);
                   return RelativeTo(root_, path).value_or(std::string());
                 });
}

Result<std::string> ForeignFolder::ReadFile(std::string_view name, std::uint64_t max_bytes,
                                            std::string_view first) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, OpenRead(name));
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
  if (info.size > max_bytes) {
    return Status(Code::kDataLoss, Shown(name) + ": " + std::to_string(info.size) +
                                       " bytes, at most " + std::to_string(max_bytes) +
                                       " expected");
  }
  std::array<char, kFirstBytes> head{};
  const std::size_t looked_at = std::min<std::uint64_t>(info.size, head.size());
  // Small files are simply read: the parser will say better what is wrong.
  if (!first.empty() && info.size > kReadAtOnce) {
    TENSORMOUNT_RETURN_IF_ERROR(file->ReadExactAt(0, head.data(), looked_at));
    const std::string_view text(head.data(), looked_at);
    const std::size_t begin = text.find_first_not_of(" \t\r\n");
    if (begin == std::string_view::npos || !text.substr(begin).starts_with(first)) {
      return Status(Code::kDataLoss, Shown(name) + ": does not begin as such a file does");
    }
  }
  std::string data(static_cast<std::size_t>(info.size), '\0');
  TENSORMOUNT_RETURN_IF_ERROR(file->ReadExactAt(0, data.data(), data.size()));
  return data;
}

Result<std::vector<DirectoryEntry>> ForeignFolder::List(std::string_view name) const {
  return Beneath(name, [&](const std::string& bound, const std::string& below) {
    return fs_->ListBeneath(bound, below);
  });
}

// What cannot be looked at is not there, for probes; whoever then opens it gets the reason.
bool ForeignFolder::Has(std::string_view name) const { return Stat(name).ok(); }

Result<ForeignFolder> ForeignFolder::Below(std::string_view name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, Stat(name));
  if (info.kind != FileKind::kDirectory) {
    return Status(Code::kNotFound, Shown(name) + ": not a folder");
  }
  // Locate resolves links, so the path of the folder below is again one without links; the root
  // stays.
  ForeignFolder out = *this;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.folder_, Locate(name));
  out.path_ = JoinPath(root_, out.folder_);
  out.file_.clear();
  // A link may lead into another bound, which then is the first to look into.
  const auto holds = std::ranges::find_if(out.bounds_, [&](const std::string& bound) {
    return RelativeTo(bound, out.path_).has_value();
  });
  if (holds != out.bounds_.end()) std::iter_swap(out.bounds_.begin(), holds);
  return out;
}

}  // namespace tensormount
