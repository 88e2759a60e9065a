// SPDX-License-Identifier: Apache-2.0
// ForeignFolder of foreign.h gives access to the files of a foreign checkpoint. No name or link can
// lead out of the bounds.
//
// Names come from metadata that anybody may have written, and links may change at any time, so
// checking names is not enough: every open goes through OpenReadBeneath, in which the kernel
// refuses each step that leads out of the bound, without a race (openat2 with RESOLVE_BENEATH; on
// kernels without it no link is followed at all). Names are also checked before, for better error
// messages.
#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "index/foreign/foreign.h"
#include "index/read/foreign_file.h"

namespace tensormount {
namespace {

// Longest name: PATH_MAX of Linux is 4,096 with the NUL at the end.
constexpr std::size_t kMaxPathBytes = 4095;
// At most this many bytes of a foreign name are shown in a message.
constexpr std::size_t kShownBytes = 256;
// If the caller knows the first bytes of a file, a file larger than kReadAtOnce is read only if it
// begins with them: a sparse file of 2 GiB costs its author nothing, but reading it would take 2
// GiB of memory.
constexpr std::uint64_t kReadAtOnce = std::uint64_t{1} << 20;
constexpr std::size_t kFirstBytes = 4096;

// A foreign name as messages show it: shortened, and with "?" for control characters, which could
// rewrite the terminal.
std::string Cut(std::string_view name) {
  std::string out;
  for (const char c : name.substr(0, kShownBytes)) {
    const auto u = static_cast<unsigned char>(c);
    out += u < 0x20 || u == 0x7F ? '?' : c;
  }
  if (name.size() > kShownBytes) out += "...";
  return out;
}

// `path` relative to `root`: "a/b" below "a" is "b", and `root` itself is "". nullopt: `path` is
// not below `root` ("/ab" is not below "/a"). Both paths are resolved, so they can be compared as
// text.
std::optional<std::string> RelativeTo(const std::string& root, const std::string& path) {
  if (path == root) return std::string();
  if (root == "/") return path.substr(1);
  if (!path.starts_with(root) || path[root.size()] != '/') return std::nullopt;
  return path.substr(root.size() + 1);
}

std::string ParentDirectory(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string JoinedBelow(const std::string& folder, std::string_view name) {
  if (folder.empty()) return std::string(name);
  return name.empty() ? folder : JoinPath(folder, name);
}

// The blobs directory of the Hugging Face cache that `folder` is in: "models--x/blobs" for
// "models--x/snapshots/0123" and directories below, whose links lead there. nullopt: `folder` is
// not in such a cache.
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

// Looks for links below `folder` that lead into a directory of `roots`, and moves that directory to
// `bounds`. Examines at most `left` entries.
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

// The deepest directory that contains both paths.
std::string CommonParent(const std::string& a, const std::string& b) {
  std::string out = a;
  while (!RelativeTo(out, b)) out = ParentDirectory(out);
  return out;
}

}  // namespace

// If several roots are above the directory, the deepest is the bound, because it allows the fewest
// files.
Result<ForeignFolder> ForeignFolder::Open(FileSystem& fs, const std::string& path,
                                          std::span<const std::string> roots) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, fs.Stat(path));
  ForeignFolder out;
  out.fs_ = &fs;
  out.path_ = path;
  std::string folder = path;
  if (info.kind == FileKind::kFile) {
    out.file_ = path.substr(path.rfind('/') + 1);
    folder = ParentDirectory(path);
  } else if (info.kind != FileKind::kDirectory) {
    return Status(Code::kInvalidArgument, path + ": neither a file nor a directory");
  }
  out.root_ = folder;
  TENSORMOUNT_RETURN_IF_ERROR(out.AddBounds(roots));
  return out;
}

// Sets bounds_, root_ and folder_. Before the call, root_ is the directory itself. A root that is
// not above the directory is ignored if no link leads into it: a --root for another source must not
// change the names in the records of this source.
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
  for (const std::string& bound : bounds_) root_ = CommonParent(root_, bound);
  folder_ = RelativeTo(root_, folder).value_or(std::string());
  return {};
}

std::string ForeignFolder::Shown(std::string_view name) const {
  const std::string folder = file_.empty() ? path_ : ParentDirectory(path_);
  return name.empty() ? folder : JoinPath(folder, Cut(name));
}

Result<std::string> ForeignFolder::PathFromRoot(std::string_view name) const {
  const auto refused = [&](Code code, std::string_view why) {
    return Status(
        code, Shown("") + ": refers to a file '" + Cut(name) + "', whose name " + std::string(why));
  };
  if (name.empty()) return refused(Code::kDataLoss, "is empty");
  if (name.size() > kMaxPathBytes) return refused(Code::kDataLoss, "is too long");
  if (name.find('\0') != std::string_view::npos) return refused(Code::kDataLoss, "contains a NUL");
  if (name.front() == '/') return refused(Code::kDataLoss, "is not a relative path");
  // "a//b" and "a/./b" are refused, because with two spellings one file would be two files in the
  // file table.
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t end = std::min(name.find('/', at), name.size());
    const std::string_view part = name.substr(at, end - at);
    if (part == "..") {
      return refused(Code::kPermissionDenied, "leads out of its directory by '..'");
    }
    if (part.empty() || part == ".")
      return refused(Code::kDataLoss, "has an empty or '.' component");
    at = end + 1;
  }
  return JoinedBelow(folder_, name);
}

// Changes the errors for a FIFO, a device or a loop of links in place of a file to kDataLoss: the
// caller's argument is valid, and the checkpoint is damaged.
Status ForeignFolder::DataLossOf(std::string_view name, const Status& status) const {
  if (status.ToErrno() == ELOOP) {
    return {Code::kDataLoss,
            Shown(name) + ": a loop of symbolic links, or too many levels of them"};
  }
  if (status.code() != Code::kInvalidArgument) return status;
  return {Code::kDataLoss, status.message()};
}

// Calls f with the first bound and the name relative to it. If the kernel refuses a link (EXDEV),
// calls f again with the bound that the link leads into and the resolved name relative to that
// bound.
template <typename F>
auto ForeignFolder::WithinBounds(std::string_view name, F f) const
    -> decltype(f(std::string(), std::string())) {
  std::string below = folder_;
  if (!name.empty()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(below, PathFromRoot(name));
  }
  const std::string path = below.empty() ? root_ : JoinPath(root_, below);
  const std::string& home = bounds_.front();
  auto result = f(home, RelativeTo(home, path).value_or(std::string()));
  if (result.ok()) return result;
  // RESOLVE_BENEATH returns EXDEV for every absolute link. Some tools write absolute links to files
  // within the bounds, so the path is resolved here, and f is called with the result. If a link
  // changes meanwhile, the second call of f still cannot leave the bound.
  if (result.status().ToErrno() != EXDEV) return DataLossOf(name, result.status());
  const Result<std::string> real = fs_->Resolve(path);
  if (!real.ok()) return DataLossOf(name, real.status());
  for (const std::string& bound : bounds_) {
    const std::optional<std::string> inside = RelativeTo(bound, real.value());
    if (!inside) continue;
    auto found = f(bound, *inside);
    if (found.ok()) return found;
    return DataLossOf(name, found.status());
  }
  return Status(Code::kPermissionDenied,
                Shown(name) + ": leads to " + real.value() + ", outside of " + home +
                    "; to allow this, pass a directory that contains it as --root");
}

Result<std::unique_ptr<File>> ForeignFolder::OpenRead(std::string_view name) const {
  if (name.empty()) return PathFromRoot(name).status();
  return WithinBounds(name, [&](const std::string& bound, const std::string& below) {
    return fs_->OpenReadBeneath(bound, below);
  });
}

Result<std::unique_ptr<File>> ForeignFolder::OpenLocated(const std::string& below) const {
  const std::optional<BoundedName> found = NameWithin(bounds_, JoinPath(root_, below));
  return found ? fs_->OpenReadBeneath(found->bound, found->name)
               : fs_->OpenReadBeneath(bounds_.front(), below);
}

Result<FileInfo> ForeignFolder::Stat(std::string_view name) const {
  return WithinBounds(name, [&](const std::string& bound, const std::string& below) {
    return fs_->StatBeneath(bound, below);
  });
}

Result<std::string> ForeignFolder::Locate(std::string_view name) const {
  if (name.empty()) return PathFromRoot(name).status();
  return WithinBounds(
      name, [&](const std::string& bound, const std::string& below) -> Result<std::string> {
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
                                       " are allowed");
  }
  std::array<char, kFirstBytes> head{};
  const std::size_t looked_at = std::min<std::uint64_t>(info.size, head.size());
  // Small files are not checked, because the parser has a better error.
  if (!first.empty() && info.size > kReadAtOnce) {
    TENSORMOUNT_RETURN_IF_ERROR(file->ReadExactAt(0, head.data(), looked_at));
    const std::string_view text(head.data(), looked_at);
    const std::size_t begin = text.find_first_not_of(" \t\r\n");
    if (begin == std::string_view::npos || !text.substr(begin).starts_with(first)) {
      return Status(Code::kDataLoss,
                    Shown(name) + ": the file does not begin like a file of its format");
    }
  }
  std::string data(static_cast<std::size_t>(info.size), '\0');
  TENSORMOUNT_RETURN_IF_ERROR(file->ReadExactAt(0, data.data(), data.size()));
  return data;
}

Result<std::vector<DirectoryEntry>> ForeignFolder::List(std::string_view name) const {
  return WithinBounds(name, [&](const std::string& bound, const std::string& below) {
    return fs_->ListBeneath(bound, below);
  });
}

// A file that cannot be examined counts as missing; OpenRead returns the reason.
bool ForeignFolder::Has(std::string_view name) const { return Stat(name).ok(); }

Result<ForeignFolder> ForeignFolder::Subfolder(std::string_view name) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, Stat(name));
  if (info.kind != FileKind::kDirectory) {
    return Status(Code::kNotFound, Shown(name) + ": not a directory");
  }
  // Locate resolves absolute links, so that the new path is below a bound. The root stays the same.
  ForeignFolder out = *this;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.folder_, Locate(name));
  out.path_ = JoinPath(root_, out.folder_);
  out.file_.clear();
  // If a link led into another bound, this bound becomes the first one.
  const auto holds = std::ranges::find_if(out.bounds_, [&](const std::string& bound) {
    return RelativeTo(bound, out.path_).has_value();
  });
  if (holds != out.bounds_.end()) std::iter_swap(out.bounds_.begin(), holds);
  return out;
}

}  // namespace tensormount
