// SPDX-License-Identifier: Apache-2.0
// Determines the type of a file (file_begin.h). The type of a zip follows from the names of its
// entries, some of which are only in the zip directory at the end.
#include "index/foreign/file_begin.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "base/coding.h"

namespace tensormount {
namespace {

// The first bytes of files of torch.save before 1.6: opcode PROTO 2, opcode LONG1 with the magic
// number, opcode STOP.
constexpr std::string_view kLegacyMagic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.",
                                        15);
constexpr std::string_view kLfsVersion = "version https://git-lfs.github.com/spec/";
constexpr std::string_view kNpyMagic = "\x93NUMPY";
constexpr std::string_view kZipMagic("PK\3\4", 4);
constexpr std::string_view kEmptyZipMagic("PK\5\6", 4);
// Largest header of a safetensors file.
constexpr std::uint64_t kMaxHeader = 100'000'000;
// The local header of a zip entry has this size, and the entry's name follows it. The length of the
// name is at offset kLocalNameLength of the header.
constexpr std::size_t kLocalHeaderBytes = 30;
constexpr std::size_t kLocalNameLength = 26;
constexpr std::size_t kHeadBytes = 1024;
constexpr std::uint64_t kTailBytes = std::uint64_t{256} << 10;

// torch writes data.pkl first. In a zip that was packed again another entry may be first, so the
// names at the end of the file are searched, too.
FileType ZipFileType(File& file, std::string_view head, std::uint64_t size) {
  if (head.size() >= kLocalHeaderBytes) {
    const auto length = LoadLittle<std::uint16_t>(head.data() + kLocalNameLength);
    const std::string_view name = head.substr(kLocalHeaderBytes, length);
    if (name.ends_with(".npy")) return FileType::kNumpyZip;
    if (name.ends_with("/data.pkl")) return FileType::kTorchZip;
  }
  std::string tail(std::min(size, kTailBytes), '\0');
  if (!file.ReadExactAt(size - tail.size(), tail.data(), tail.size()).ok()) return FileType::kZip;
  return tail.find("/data.pkl") != std::string::npos ? FileType::kTorchZip : FileType::kZip;
}

}  // namespace

FileType FileTypeOf(File& file) {
  const Result<FileInfo> info = file.Stat();
  if (!info.ok()) return FileType::kOther;
  std::array<char, kHeadBytes> bytes{};
  const Result<std::size_t> got = file.ReadAt(0, bytes.data(), bytes.size());
  if (!got.ok()) return FileType::kOther;
  const std::string_view head(bytes.data(), got.value());
  if (head.starts_with(kZipMagic)) return ZipFileType(file, head, info.value().size);
  if (head.starts_with(kEmptyZipMagic)) return FileType::kZip;
  if (head.starts_with(kLegacyMagic)) return FileType::kLegacyTorch;
  if (head.starts_with(kNpyMagic)) return FileType::kNpy;
  if (head.starts_with(kLfsVersion)) return FileType::kLfsPointer;
  // A plausible header length and the '{' of the header suffice to tell a safetensors file from
  // text and pickles. The header itself is checked when the file is read.
  if (head.size() > 8 && head[8] == '{') {
    const auto length = LoadLittle<std::uint64_t>(head.data());
    if (length >= 2 && length <= kMaxHeader && length <= info.value().size - 8) {
      return FileType::kSafetensors;
    }
  }
  return FileType::kOther;
}

FileType FileTypeOf(const ForeignFolder& folder, std::string_view name) {
  const Result<std::unique_ptr<File>> file = folder.OpenRead(name);
  return file.ok() ? FileTypeOf(*file.value()) : FileType::kOther;
}

Status IsLfsPointer(std::string_view shown) {
  return {Code::kDataLoss,
          std::string(shown) +
              ": a git-lfs pointer; the file itself was not downloaded: run `git lfs pull`"};
}

}  // namespace tensormount
