// SPDX-License-Identifier: Apache-2.0
// Byte objects of DCP that are shown as common values beside the objects themselves: small ones,
// read together in few reads.
//
// Objects themselves are bytes that nobody looks into. A checkpoint may have many thousands of
// them, most of them small (rng states, step counts). Their values are read when the checkpoint is
// opened, so bounds keep opening cheap: what is over them is still an object.
#include "index/foreign/dcp_objects.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "index/archives/torch_archive.h"
#include "index/foreign/megatron.h"

namespace tensormount {
namespace {

// What is read when a checkpoint is opened, only to show values beside the objects.
// A larger object is hardly a value that somebody wants to see in a listing.
constexpr std::uint64_t kMaxValue = std::uint64_t{64} << 10;
// The common state of Megatron-Core is one object that has all arguments of the run.
constexpr std::uint64_t kMaxCommonState = std::uint64_t{64} << 20;
constexpr std::size_t kMaxValues = 4096;
constexpr std::uint64_t kMaxValuesBytes = std::uint64_t{16} << 20;
// One read; items of one file follow each other.
constexpr std::uint64_t kWindow = std::uint64_t{1} << 20;
// Gaps of up to this between two objects are read over: less than a call costs.
constexpr std::uint64_t kMaxGap = std::uint64_t{16} << 10;

// Where Megatron-Core since 0.19 keeps what was in common.pt.
constexpr std::string_view kCommonState = "common_state";

// Some bytes of a file that were read before.
// The archive reader wants a File. Its offsets count from the begin of the object, and the values
// that are made of it keep no reference to it.
class WindowFile : public File {
 public:
  WindowFile(std::string_view bytes, std::string path) : bytes_(bytes), path_(std::move(path)) {}

  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    if (offset >= bytes_.size()) return std::size_t{0};
    const std::size_t n = std::min<std::size_t>(size, bytes_.size() - offset);
    if (n > 0) std::memcpy(out, bytes_.data() + offset, n);
    return n;
  }
  Status WriteAt(std::uint64_t, const void*, std::size_t) override { return ReadOnly(); }
  Status Truncate(std::uint64_t) override { return ReadOnly(); }
  Status Sync() override { return ReadOnly(); }
  Status Seal() override { return ReadOnly(); }
  Result<FileInfo> Stat() override {
    FileInfo info;
    info.kind = FileKind::kFile;
    info.size = bytes_.size();
    return info;
  }
  Status TryLockShared() override { return ReadOnly(); }
  Status TryLockExclusive() override { return ReadOnly(); }
  Status Close() override { return Status(); }
  const std::string& path() const override { return path_; }

 private:
  static Status ReadOnly() { return Status(Code::kReadOnly, "bytes in memory are read only"); }

  std::string_view bytes_;
  std::string path_;
};

// nullopt: opaque; whoever wants to know more asks for the listing of the object. Bare pickles stay
// opaque, too: bytes that are no archive may be anything.
std::optional<TorchArchive> ArchiveOf(const std::string& bytes, const std::string& key) {
  if (!bytes.starts_with("PK\3\4")) return std::nullopt;
  WindowFile file(bytes, key);
  Result<TorchArchive> archive = TorchArchive::Read(file, 0, bytes.size());
  if (!archive.ok()) return std::nullopt;
  return std::move(archive).value();
}

bool IsCommonState(const ObjectRecord& part) {
  return part.key == kCommonState && part.grid == Dims{1};
}

}  // namespace

std::optional<CommonValue> ValueOfObject(const std::string& bytes, const std::string& key,
                                         ValueBudget& budget) {
  const std::optional<TorchArchive> archive = ArchiveOf(bytes, key);
  return archive ? budget.Convert(archive->document().root()) : std::nullopt;
}

Status DcpObjects::Finish(bool megatron, LeftOut& left_out) {
  for (const ObjectRecord& part : parts_) {
    const Status status =
        builder_.AddObject(part.key, part.file, part.offset, part.length, part.index, part.grid);
    if (!status.ok()) left_out.Add("object", part.key, status.message());
  }
  return AddCommon(megatron);
}

Status DcpObjects::AddCommon(bool megatron) {
  // Objects are in the builder by now; what stays here is what may become a value.
  std::erase_if(parts_, [&](const ObjectRecord& part) {
    if (megatron && IsCommonState(part)) return part.length > kMaxCommonState;
    // A value of several parts has no name of its own.
    return part.length > kMaxValue || CheckedProduct(part.grid) != 1;
  });
  std::sort(parts_.begin(), parts_.end(), [](const ObjectRecord& a, const ObjectRecord& b) {
    return std::tie(a.file, a.offset, a.key) < std::tie(b.file, b.offset, b.key);
  });
  // Bytes [begin, begin + window.size()) of file number `file`.
  std::string window;
  std::uint64_t begin = 0;
  std::uint32_t file = 0;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const ObjectRecord& part = parts_[i];
    if (i == kMaxValues || total > kMaxValuesBytes) {
      builder_.Warn(std::to_string(parts_.size() - i) +
                    " small objects are shown as objects only, not as values");
      break;
    }
    total += part.length;
    // The parts are sorted by file and offset, so the window only moves forward.
    if (window.empty() || part.file != file || part.offset < begin ||
        part.offset + part.length > begin + window.size()) {
      // As far as others follow closely.
      std::uint64_t end = part.offset + part.length;
      for (std::size_t n = i + 1; n < parts_.size() && parts_[n].file == part.file; ++n) {
        const std::uint64_t next = parts_[n].offset + parts_[n].length;
        if (parts_[n].offset > end + kMaxGap || next > part.offset + kWindow) break;
        end = std::max(end, next);
      }
      window.resize(end - part.offset);
      file = part.file;
      begin = part.offset;
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> opened, builder_.OpenFile(file));
      TENSORMOUNT_RETURN_IF_ERROR(opened->ReadExactAt(begin, window.data(), window.size()));
    }
    TENSORMOUNT_RETURN_IF_ERROR(
        AddValue(part, window.substr(part.offset - begin, part.length), megatron));
  }
  return Status();
}

Status DcpObjects::AddValue(const ObjectRecord& part, const std::string& bytes, bool megatron) {
  const std::optional<TorchArchive> archive = ArchiveOf(bytes, part.key);
  if (!archive) return Status();
  pickle::Value root = archive->document().root();
  if (megatron && part.grid.rank() > 0) {
    if (IsCommonState(part)) {
      return AddMegatronCommon(*archive, part.file, part.offset, part.key, builder_, budget_);
    }
    // Megatron-Core wraps every sharded object in a list of one.
    if (root.kind() == pickle::Kind::kList && root.size() == 1) root = root.item(0);
  }
  if (std::optional<CommonValue> value = budget_.Convert(root)) {
    builder_.AddCommon(part.key, std::move(*value));
  }
  return Status();
}

}  // namespace tensormount
