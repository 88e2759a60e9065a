// SPDX-License-Identifier: Apache-2.0
// Byte objects of DCP that are shown as common values beside the objects themselves: small ones,
// read together in few reads.
#include "index/foreign/dcp_objects.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "index/foreign/torch_archive.h"

namespace tensormount {
namespace {

// What is read when a checkpoint is opened, only to show values beside the objects.
constexpr std::uint64_t kMaxValue = std::uint64_t{64} << 10;
constexpr std::uint64_t kMaxCommonState = std::uint64_t{64} << 20;
constexpr std::size_t kMaxValues = 4096;
constexpr std::uint64_t kMaxValuesBytes = std::uint64_t{16} << 20;
// One read; items of one file follow each other.
constexpr std::uint64_t kWindow = std::uint64_t{1} << 20;
constexpr std::uint64_t kMaxGap = std::uint64_t{16} << 10;

// Where Megatron-Core since 0.19 keeps what was in common.pt.
constexpr std::string_view kCommonState = "common_state";

// Some bytes of a file that were read before.
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

bool IsCommonState(const DcpObjects::Item& item) {
  return item.object.key == kCommonState && item.object.grid == Dims{1};
}

}  // namespace

Status DcpObjects::Finish(bool megatron, LeftOut& left_out) {
  for (const Item& item : items_) {
    const Status status = builder_.AddObject(item.object.key, item.file, item.offset, item.length,
                                             item.object.index, item.object.grid);
    if (!status.ok()) left_out.Add("object", item.object.key, status.message());
  }
  return AddCommon(megatron);
}

Status DcpObjects::AddCommon(bool megatron) {
  std::erase_if(items_, [&](const Item& item) {
    if (megatron && IsCommonState(item)) return item.length > kMaxCommonState;
    // A value of several parts has no name of its own.
    return item.length > kMaxValue || CheckedProduct(item.object.grid) != 1;
  });
  std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
    return std::tie(a.file, a.offset, a.object.key) < std::tie(b.file, b.offset, b.object.key);
  });
  std::string window;
  std::uint64_t begin = 0;
  std::uint32_t file = 0;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    if (i == kMaxValues || total > kMaxValuesBytes) {
      builder_.Warn(std::to_string(items_.size() - i) +
                    " small objects are shown as objects only, not as values");
      break;
    }
    total += item.length;
    if (window.empty() || item.file != file || item.offset < begin ||
        item.offset + item.length > begin + window.size()) {
      // As far as others follow closely.
      std::uint64_t end = item.offset + item.length;
      for (std::size_t n = i + 1; n < items_.size() && items_[n].file == item.file; ++n) {
        const std::uint64_t next = items_[n].offset + items_[n].length;
        if (items_[n].offset > end + kMaxGap || next > item.offset + kWindow) break;
        end = std::max(end, next);
      }
      window.resize(end - item.offset);
      file = item.file;
      begin = item.offset;
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> opened, builder_.OpenFile(file));
      TENSORMOUNT_RETURN_IF_ERROR(opened->ReadExactAt(begin, window.data(), window.size()));
    }
    TENSORMOUNT_RETURN_IF_ERROR(
        AddValue(item, window.substr(item.offset - begin, item.length), megatron));
  }
  return Status();
}

Status DcpObjects::AddValue(const Item& item, const std::string& bytes, bool megatron) {
  if (!bytes.starts_with("PK\3\4")) return Status();
  WindowFile file(bytes, item.object.key);
  const Result<TorchArchive> archive = TorchArchive::Read(file, 0, bytes.size());
  if (!archive.ok()) return Status();  // Opaque: whoever wants to know asks for its listing.
  pickle::Value root = archive.value().document().root();
  if (megatron && item.object.grid.rank() > 0) {
    if (IsCommonState(item)) {
      return AddMegatronCommon(archive.value(), item.file, item.offset, item.object.key, builder_,
                               budget_);
    }
    if (root.kind() == pickle::Kind::kList && root.size() == 1) root = root.item(0);
  }
  if (std::optional<CommonValue> value = budget_.Convert(root)) {
    builder_.AddCommon(item.object.key, std::move(*value));
  }
  return Status();
}

}  // namespace tensormount
