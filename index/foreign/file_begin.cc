// SPDX-License-Identifier: Apache-2.0
// See file_begin.h. Of a zip the list at its end is read, because what it is for is said by the
// names of its entries alone.
#include "index/foreign/file_begin.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "base/coding.h"

namespace tensormount {
namespace {

// PROTO 2, LONG1 of the magic number, STOP: how torch.save began before it wrote zips.
constexpr std::string_view kLegacyMagic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.",
                                        15);
constexpr std::string_view kLfsVersion = "version https://git-lfs.github.com/spec/";
constexpr std::string_view kNpyMagic = "\x93NUMPY";
constexpr std::string_view kZipMagic("PK\3\4", 4);
constexpr std::string_view kEmptyZipMagic("PK\5\6", 4);
// The header of a safetensors file.
constexpr std::uint64_t kMaxHeader = 100'000'000;
// Of a local header of a zip, whose name follows.
constexpr std::size_t kLocalHeaderBytes = 30;
constexpr std::size_t kLocalNameLength = 26;
constexpr std::size_t kHeadBytes = 1024;
constexpr std::uint64_t kTailBytes = std::uint64_t{256} << 10;

// torch writes data.pkl first, but whoever packs a zip again may not: the names at its end tell.
FileBegin KindOfZip(File& file, std::string_view head, std::uint64_t size) {
  if (head.size() >= kLocalHeaderBytes) {
    const auto length = LoadLittle<std::uint16_t>(head.data() + kLocalNameLength);
    const std::string_view name = head.substr(kLocalHeaderBytes, length);
    if (name.ends_with(".npy")) return FileBegin::kNumpyZip;
    if (name.ends_with("/data.pkl")) return FileBegin::kTorchZip;
  }
  std::string tail(std::min(size, kTailBytes), '\0');
  if (!file.ReadExactAt(size - tail.size(), tail.data(), tail.size()).ok()) return FileBegin::kZip;
  return tail.find("/data.pkl") != std::string::npos ? FileBegin::kTorchZip : FileBegin::kZip;
}

}  // namespace

FileBegin BeginOf(File& file) {
  const Result<FileInfo> info = file.Stat();
  if (!info.ok()) return FileBegin::kElse;
  std::array<char, kHeadBytes> bytes{};
  const Result<std::size_t> got = file.ReadAt(0, bytes.data(), bytes.size());
  if (!got.ok()) return FileBegin::kElse;
  const std::string_view head(bytes.data(), got.value());
  if (head.starts_with(kZipMagic)) return KindOfZip(file, head, info.value().size);
  if (head.starts_with(kEmptyZipMagic)) return FileBegin::kZip;
  if (head.starts_with(kLegacyMagic)) return FileBegin::kLegacyTorch;
  if (head.starts_with(kNpyMagic)) return FileBegin::kNpy;
  if (head.starts_with(kLfsVersion)) return FileBegin::kLfsPointer;
  // Enough to tell a safetensors file from text and pickles: a header length that fits, and the
  // header's '{'. The header itself is checked when it is read.
  if (head.size() > 8 && head[8] == '{') {
    const auto length = LoadLittle<std::uint64_t>(head.data());
    if (length >= 2 && length <= kMaxHeader && length <= info.value().size - 8) {
      return FileBegin::kSafetensors;
    }
  }
  return FileBegin::kElse;
}

FileBegin BeginOf(const ForeignFolder& folder, std::string_view name) {
  const Result<std::unique_ptr<File>> file = folder.OpenRead(name);
  return file.ok() ? BeginOf(*file.value()) : FileBegin::kElse;
}

Status IsLfsPointer(std::string_view shown) {
  return {Code::kDataLoss, std::string(shown) +
                               ": a git-lfs pointer, which stands for a file that was not "
                               "downloaded: run `git lfs pull`"};
}

}  // namespace tensormount
