// SPDX-License-Identifier: Apache-2.0
// The objects of DCP (dcp_objects.h); small ones are also common values. A checkpoint may have many
// thousands of objects, most of them small (RNG states, step counts). Values are read when the
// checkpoint is opened, so their size and number are limited.
#include "index/foreign/dcp_objects.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/byte_range.h"
#include "base/read_only.h"
#include "index/archives/torch_archive.h"
#include "index/foreign/megatron.h"

namespace tensormount {
namespace {

// Size of the largest object that is shown as a value.
constexpr std::uint64_t kMaxValue = std::uint64_t{64} << 10;
constexpr std::size_t kMaxValues = 4096;
constexpr std::uint64_t kMaxValuesBytes = std::uint64_t{16} << 20;
// A window is a range of a file that is read at once for several neighbouring objects. Windows of
// several objects have at most this size.
constexpr std::uint64_t kWindow = std::uint64_t{1} << 20;
// Windows are read by one call of ReadMany until their total exceeds this size.
constexpr std::uint64_t kMostReadTogether = std::uint64_t{4} << 20;
// Largest gap between objects of one window; reading a small gap costs less than another read.
constexpr std::uint64_t kMaxGap = std::uint64_t{16} << 10;

// A File whose content is the bytes of one object that were already read, for TorchArchive.
class WindowFile : public ReadOnlyFile {
 public:
  WindowFile(std::string_view bytes, std::string path) : bytes_(bytes), path_(std::move(path)) {}

  Result<std::size_t> ReadAt(std::uint64_t offset, void* out, std::size_t size) override {
    if (offset >= bytes_.size()) return std::size_t{0};
    const std::size_t n = std::min<std::size_t>(size, bytes_.size() - offset);
    if (n > 0) std::memcpy(out, bytes_.data() + offset, n);
    return n;
  }
  Result<FileInfo> Stat() override {
    FileInfo info;
    info.kind = FileKind::kFile;
    info.size = bytes_.size();
    return info;
  }
  const std::string& path() const override { return path_; }

 private:
  std::string_view bytes_;
  std::string path_;
};

bool IsCommonState(const ObjectRecord& part) {
  return part.key == kMegatronCommonObject && part.grid == Dims{1};
}

}  // namespace

std::optional<TorchArchive> ArchiveOfObject(const std::string& bytes, const std::string& key) {
  if (!bytes.starts_with("PK\3\4")) return std::nullopt;
  WindowFile file(bytes, key);
  Result<TorchArchive> archive = TorchArchive::Read(file, 0, bytes.size());
  if (!archive.ok()) return std::nullopt;
  return std::move(archive).value();
}

std::optional<CommonValue> ValueOfObject(const std::string& bytes, const std::string& key,
                                         ValueBudget& budget) {
  const std::optional<TorchArchive> archive = ArchiveOfObject(bytes, key);
  return archive ? budget.Convert(archive->document().root()) : std::nullopt;
}

Status DcpObjects::Finish(bool megatron, OmissionCounter& left_out) {
  for (const ObjectRecord& part : parts_) {
    const Status status =
        builder_.AddObject(part.key, part.file, part.offset, part.length, part.index, part.grid);
    if (!status.ok()) left_out.Add("object", part.key, status.message());
  }
  return AddCommon(megatron);
}

Status DcpObjects::AddCommon(bool megatron) {
  // The builder already has all objects. From here on, parts_ contains only objects that may be
  // values.
  std::erase_if(parts_, [&](const ObjectRecord& part) {
    if (megatron && IsCommonState(part)) return part.length > kMaxMegatronCommon;
    // An object in several parts is not a value.
    return part.length > kMaxValue || CheckedProduct(part.grid) != 1;
  });
  std::sort(parts_.begin(), parts_.end(), [](const ObjectRecord& a, const ObjectRecord& b) {
    return std::tie(a.file, a.offset, a.key) < std::tie(b.file, b.offset, b.key);
  });
  std::size_t count = 0;
  for (std::uint64_t total = 0; count < parts_.size(); ++count) {
    if (count == kMaxValues || total > kMaxValuesBytes) {
      builder_.Warn(std::to_string(parts_.size() - count) +
                    " small objects are shown only as objects, not as values: the limit of 4096 "
                    "values or 16 MiB is reached");
      break;
    }
    total += parts_[count].length;
  }
  for (std::size_t i = 0; i < count;) {
    TENSORMOUNT_ASSIGN_OR_RETURN(i, AddValues(i, count, megatron));
  }
  return Status();
}

// Reads parts of one file together and adds their values, beginning with part number `first` and
// ending before `count`. Returns the number of the first part that was not read.
Result<std::size_t> DcpObjects::AddValues(std::size_t first, std::size_t count, bool megatron) {
  std::vector<ByteRange> windows;
  std::vector<std::size_t> window_of;
  std::uint64_t bytes = 0;
  std::size_t end = first;
  for (; end < count && parts_[end].file == parts_[first].file; ++end) {
    const ObjectRecord& part = parts_[end];
    // The parts are sorted by offset, so only the last window can contain the part or grow to
    // contain it.
    const std::uint64_t part_end = part.offset + part.length;
    const bool grows = !windows.empty() && part.offset <= windows.back().end + kMaxGap &&
                       part_end <= windows.back().begin + kWindow;
    if (grows || (!windows.empty() && part_end <= windows.back().end)) {
      bytes -= windows.back().size();
      windows.back().end = std::max(windows.back().end, part_end);
    } else {
      if (bytes > kMostReadTogether) break;
      windows.push_back({part.offset, part_end});
    }
    bytes += windows.back().size();
    window_of.push_back(windows.size() - 1);
  }
  std::vector<std::string> read(windows.size());
  std::vector<ReadRun> runs;
  for (std::size_t i = 0; i < windows.size(); ++i) {
    read[i].resize(windows[i].size());
    runs.push_back({windows[i].begin, std::as_writable_bytes(std::span(read[i]))});
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<File> file,
                               builder_.OpenFile(parts_[first].file));
  TENSORMOUNT_RETURN_IF_ERROR(file->ReadMany(runs));
  for (std::size_t i = first; i < end; ++i) {
    const std::size_t window = window_of[i - first];
    TENSORMOUNT_RETURN_IF_ERROR(AddValue(
        parts_[i], read[window].substr(parts_[i].offset - windows[window].begin, parts_[i].length),
        megatron));
  }
  return end;
}

Status DcpObjects::AddValue(const ObjectRecord& part, const std::string& bytes, bool megatron) {
  const std::optional<TorchArchive> archive = ArchiveOfObject(bytes, part.key);
  if (!archive) return Status();
  pickle::Value root = archive->document().root();
  if (megatron && part.grid.rank() > 0) {
    if (IsCommonState(part)) {
      return AddMegatronCommon(*archive, part.file, part.offset, part.key, builder_, budget_);
    }
    // Megatron-Core wraps every sharded object in a list with one item.
    if (root.kind() == pickle::Kind::kList && root.size() == 1) root = root.item(0);
  }
  if (std::optional<CommonValue> value = budget_.Convert(root)) {
    builder_.AddCommon(part.key, std::move(*value));
  }
  return Status();
}

}  // namespace tensormount
