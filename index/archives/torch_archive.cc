// SPDX-License-Identifier: Apache-2.0
// The zip archives that torch.save writes (torch_archive.h): their entries, the pickle, and the
// storages as byte ranges.
//
//   PREFIX/data.pkl     the pickle of the saved object, with storages as persistent ids
//   PREFIX/data/0 ...   one stored entry a storage: raw elements
//   PREFIX/byteorder    "little" or "big"; older releases did not write it
//   PREFIX/version      the version of the format as text; PREFIX/.data/version takes precedence
//
// Torch and this reader must see the same tensors in a file. Where torch is more lenient (names
// that differ in case, storages of two types) the archive or the tensor is refused, because the
// intended reading is unknown.
#include "index/archives/torch_archive.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <optional>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/coding.h"
#include "base/crc32.h"
#include "index/archives/torch_tensor.h"
#include "shard/utf8.h"

namespace tensormount {
namespace {

// Largest pickle, and largest object that is not an archive, that DescribeObject reads.
constexpr std::uint64_t kMaxDescribed = std::uint64_t{64} << 20;
constexpr std::uint32_t kTorchLocalSignature = 0x04034b50;
constexpr std::string_view kPickleName = "data.pkl";
// Bytes after data.pkl that are read together with data.pkl. torch writes three small entries
// there, of 64 to 200 bytes each.
constexpr std::uint64_t kReadBehindPickle = 1024;

Status At(const File& file, std::uint64_t begin, const Status& status) {
  return status.WithContext(file.path() + ": torch archive at byte " + std::to_string(begin));
}

// Only "little" is supported: elements are returned without conversion, and all supported hosts and
// formats are little-endian.
Status CheckByteOrder(std::string_view text) {
  if (text == "little") return Status();
  if (text == "big") {
    return Status(Code::kUnsupported, "the tensors are big-endian");
  }
  return Status(Code::kDataLoss, "the byteorder is neither little nor big");
}

// Bytes of the file that have been read already.
struct KnownBytes {
  std::uint64_t offset = 0;
  std::string bytes;
};

// Most bytes that are read of the entries version and byteorder.
constexpr std::uint64_t kMostOfEntry = 32;

// The first bytes of an entry, at most kMostOfEntry; nullopt if `known` does not have them.
std::optional<std::string> BeginOfEntry(const KnownBytes& known, const ZipEntry& entry) {
  const auto n = static_cast<std::size_t>(std::min(entry.size, kMostOfEntry));
  if (entry.offset < known.offset ||
      !RangeWithin(entry.offset - known.offset, n, known.bytes.size())) {
    return std::nullopt;
  }
  return known.bytes.substr(static_cast<std::size_t>(entry.offset - known.offset), n);
}

const ZipEntry* VersionOf(const ZipArchive& zip, const std::string& prefix) {
  const ZipEntry* entry = zip.Find(prefix + ".data/version");
  return entry != nullptr ? entry : zip.Find(prefix + "version");
}

// Checks the version of the archive. Reads the number as torch does (std::stoull): text after the
// number is ignored. kUnsupported if torch would refuse the archive.
Status CheckVersion(std::string_view text) {
  constexpr unsigned kFirst = 1;  // caffe2/serialize/versions.h
  constexpr unsigned kLast = 10;
  const std::size_t first = std::min(text.find_first_not_of(" \t\n\v\f\r"), text.size());
  const char* const last = text.data() + text.size();
  unsigned version = 0;
  const auto [end, error] = std::from_chars(text.data() + first, last, version);
  if (error == std::errc() && version >= kFirst && version <= kLast) return Status();
  const std::string shown(text.data() + first, error == std::errc() ? end : last);
  return {Code::kUnsupported, "the format version '" + shown + "' is not supported (supported: " +
                                  std::to_string(kFirst) + " to " + std::to_string(kLast) + ")"};
}

// The fault in the names of the entries; empty if there is none. torch finds entries with miniz,
// which ignores case: torch would take two names that differ only in case for the same entry.
std::string NamesFault(const ZipArchive& zip, const std::string& prefix) {
  constexpr std::string_view kLookedFor[] = {
      "data.pkl",        "byteorder",          "version", "constants.pkl",
      ".format_version", ".storage_alignment", ".data/",  ".data/version"};
  std::vector<std::string> lower;
  lower.reserve(zip.entries().size());
  for (const ZipEntry& entry : zip.entries()) {
    if (!entry.name.starts_with(prefix)) return "an entry of the archive is outside of " + prefix;
    std::string name = entry.name.substr(prefix.size());
    const std::string exact = name;
    for (char& c : name) {
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    const bool known =
        std::ranges::find(kLookedFor, std::string_view(name)) != std::end(kLookedFor);
    if ((known && name != exact) || (name.starts_with("data/") && !exact.starts_with("data/"))) {
      return "the name of an entry of the archive differs from " + name.substr(0, 100) +
             " only in case";
    }
    lower.push_back(std::move(name));
  }
  std::ranges::sort(lower);
  const auto twice = std::ranges::adjacent_find(lower);
  return twice == lower.end() ? std::string()
                              : "two entries of the archive are named " + twice->substr(0, 100) +
                                    ", if case is ignored";
}

Status CheckLocalLengths(File& file, std::uint64_t begin, std::uint64_t length) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
  if (RangeWithin(begin, length, info.size)) return Status();
  return Status(Code::kDataLoss, file.path() + ": " + std::to_string(length) + " bytes at byte " +
                                     std::to_string(begin) + " reach past the end of the file");
}

}  // namespace

Result<TorchArchive> TorchArchive::Read(File& file, std::uint64_t begin, std::uint64_t length,
                                        const pickle::Options& options) {
  TorchArchive out;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.zip_, ZipArchive::Read(file, begin, length));
  const auto fail = [&](Code code, const std::string& what) {
    return At(file, begin, Status(code, what));
  };
  const ZipEntry* pickled = nullptr;
  // The prefix is the directory of data.pkl. torch names it after the file that it wrote.
  for (const ZipEntry& entry : out.zip_.entries()) {
    const std::size_t slash = entry.name.find('/');
    if (slash == std::string::npos || std::string_view(entry.name).substr(slash + 1) != kPickleName)
      continue;
    if (pickled != nullptr) return fail(Code::kDataLoss, "the archive has two data.pkl");
    pickled = &entry;
    out.prefix_ = entry.name.substr(0, slash + 1);
  }
  if (pickled == nullptr) return fail(Code::kDataLoss, "the archive has no data.pkl");
  if (const std::string fault = NamesFault(out.zip_, out.prefix_); !fault.empty()) {
    return fail(Code::kDataLoss, fault);
  }
  if (out.zip_.Find(out.prefix_ + "constants.pkl") != nullptr) {
    return fail(Code::kUnsupported, "the archive is a TorchScript program, not a checkpoint");
  }
  if (pickled->size > options.max_bytes) {
    return fail(Code::kResourceExhausted, "the data.pkl takes " + std::to_string(pickled->size) +
                                              " bytes, over the limit of " +
                                              std::to_string(options.max_bytes));
  }
  // The read also covers the entries after data.pkl; in archives that torch wrote, byteorder is
  // one of them.
  const std::uint64_t pickle_end = pickled->offset + pickled->size;
  const std::uint64_t behind = std::min(kReadBehindPickle, begin + length - pickle_end);
  std::string bytes(static_cast<std::size_t>(pickled->size + behind), '\0');
  const ZipEntry* version = VersionOf(out.zip_, out.prefix_);
  const ZipEntry* order = out.zip_.Find(out.prefix_ + "byteorder");
  std::string version_text;
  std::string order_text;
  std::vector<ReadRun> runs = {{pickled->offset, std::as_writable_bytes(std::span(bytes))}};
  for (const auto& [entry, text] : {std::pair(version, &version_text), {order, &order_text}}) {
    if (entry == nullptr || (entry->offset >= pickled->offset &&
                             RangeWithin(entry->offset - pickled->offset,
                                         std::min(entry->size, kMostOfEntry), bytes.size()))) {
      continue;
    }
    text->resize(static_cast<std::size_t>(std::min(entry->size, kMostOfEntry)));
    runs.push_back({entry->offset, std::as_writable_bytes(std::span(*text))});
  }
  std::ranges::sort(runs, {}, &ReadRun::offset);
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadMany(runs));
  const KnownBytes known = {.offset = pickle_end,
                            .bytes = bytes.substr(static_cast<std::size_t>(pickled->size))};
  bytes.resize(static_cast<std::size_t>(pickled->size));
  if (version != nullptr) {
    const Status status = CheckVersion(BeginOfEntry(known, *version).value_or(version_text));
    if (!status.ok()) return At(file, begin, status);
  }
  if (order != nullptr) {
    const Status status = CheckByteOrder(BeginOfEntry(known, *order).value_or(order_text));
    if (!status.ok()) return At(file, begin, status);
  }
  // A CRC of zero means that torch was told not to compute it.
  if (pickled->crc != 0 && Crc32Extend(0, bytes.data(), bytes.size()) != pickled->crc) {
    return fail(Code::kDataLoss, "the data.pkl has a checksum mismatch (CRC-32)");
  }
  Result<pickle::Document> document = pickle::Parse(std::move(bytes), options);
  if (!document.ok()) return At(file, begin, document.status());
  // Damage is reported before a missing version, because a truncated archive may also lack the
  // version.
  if (version == nullptr) {
    return fail(Code::kUnsupported, "the archive has no version entry, so torch cannot read it");
  }
  out.document_ = std::make_unique<pickle::Document>(std::move(document).value());
  out.conflicting_storages_ = ConflictingStorages(*out.document_);
  return out;
}

bool TorchArchive::IsTensor(const pickle::Value& value) { return IsTorchTensor(value); }

Result<StoredTensor> TorchArchive::TensorOf(const pickle::Value& value) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const TorchTensor tensor, TorchTensorOf(value));
  if (conflicting_storages_.contains(tensor.storage)) {
    return Status(Code::kDataLoss, "the storage 'data/" + tensor.storage +
                                       "' is declared with several types or sizes");
  }
  const ZipEntry* entry = zip_.Find(prefix_ + "data/" + tensor.storage);
  if (entry == nullptr) {
    return Status(Code::kDataLoss, "the storage 'data/" + tensor.storage + "' is missing");
  }
  // A difference means that the pickle or the archive is wrong about the size of the storage.
  if (entry->size != tensor.storage_bytes) {
    return Status(Code::kDataLoss, "the storage 'data/" + tensor.storage + "' has " +
                                       std::to_string(entry->size) + " bytes instead of " +
                                       std::to_string(tensor.storage_bytes));
  }
  return tensor.In(entry->offset);
}

Result<StoredTensor> ReadTorchItem(File& file, std::uint64_t begin, std::uint64_t length) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const TorchArchive archive, TorchArchive::Read(file, begin, length));
  const pickle::Value root = archive.document().root();
  if (!TorchArchive::IsTensor(root)) {
    return At(file, begin, Status(Code::kDataLoss, "the archive does not contain a tensor"));
  }
  Result<StoredTensor> out = archive.TensorOf(root);
  if (!out.ok()) return At(file, begin, out.status());
  return out;
}

Result<std::string> DescribeObject(File& file, std::uint64_t begin, std::uint64_t length) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckLocalLengths(file, begin, length));
  if (length == 0) return std::string("the object has no bytes\n");
  char magic[4] = {};
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(
      begin, magic, static_cast<std::size_t>(std::min<std::uint64_t>(length, sizeof(magic)))));
  const std::string size = std::to_string(length) + " bytes";
  pickle::Options options;
  options.unknown = pickle::Unknown::kInert;
  options.max_bytes = kMaxDescribed;
  // Damage, unknown formats and exceeded limits are described in the listing. Only errors of
  // reading (permissions, I/O) are returned to the caller.
  const auto answer = [&](const std::string& what, const Status& status) -> Result<std::string> {
    switch (status.code()) {
      case Code::kDataLoss:
      case Code::kUnsupported:
      case Code::kResourceExhausted:
        return size + " that begin like " + what + ": " + status.message() + "\n";
      default:
        return status;
    }
  };
  if (LoadLittle<std::uint32_t>(magic) == kTorchLocalSignature) {
    const Result<TorchArchive> archive = TorchArchive::Read(file, begin, length, options);
    if (!archive.ok()) return answer("a zip archive", archive.status());
    return pickle::Describe(archive.value().document());
  }
  if (length > kMaxDescribed) return size + ", too large for a listing\n";
  std::string bytes(static_cast<std::size_t>(length), '\0');
  TENSORMOUNT_RETURN_IF_ERROR(file.ReadExactAt(begin, bytes.data(), bytes.size()));
  if (static_cast<unsigned char>(bytes[0]) == 0x80) {
    const Result<pickle::Document> document = pickle::Parse(std::move(bytes), options);
    if (!document.ok()) return answer("a pickle", document.status());
    return pickle::Describe(document.value());
  }
  const bool text =
      IsUtf8(bytes) && std::none_of(bytes.begin(), bytes.end(), [](char c) {
        return static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' && c != '\r';
      });
  return size + (text ? " of text\n" : ", neither a pickle nor a torch archive\n");
}

}  // namespace tensormount
