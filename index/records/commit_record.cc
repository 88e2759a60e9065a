// SPDX-License-Identifier: Apache-2.0
// COMMIT (docs/format.md, "Commit record"): two copies of one record, each with its checksum, that
// share no page of the disk. Whoever reads it takes the one that is whole; a difference between two
// whole ones is damage, never a choice.
#include "index/records/commit_record.h"

#include <algorithm>

#include "base/coding.h"
#include "index/records/record_coding.h"

namespace tensormount {
namespace {

// docs/format.md, "Commit record".
// Offsets that are used before a copy is decoded: the length at 40. The first 40 bytes keep their
// places in every version of the format.
constexpr std::string_view kCommitMagic{"TMCOMMIT", 8};
constexpr std::size_t kPage = 4096;
constexpr std::size_t kCommitHeaderBytes = 112;
constexpr std::size_t kCommitHashBytes = 16;

std::string EncodeCopy(const CommitRecord& record) {
  ByteWriter out;
  out.Raw(kCommitMagic.data(), kCommitMagic.size());
  out.U32(record.version);
  out.U32(kCommitHeaderBytes);
  out.U64(record.compatible);
  out.U64(record.read_compatible);
  out.U64(record.incompatible);
  out.U64(0);  // Length, below.
  EncodeUuid(out, record.uuid);
  out.U64(record.generation);
  EncodeUuid(out, record.parent);
  out.Hash(record.content_root);
  out.U64(record.files.size());
  for (const CommitRecord::Entry& file : record.files) {
    out.String(file.name);
    out.U64(file.length);
    out.Hash(file.hash);
    out.Hash(file.tail);
  }
  StoreLittle<std::uint64_t>(out.bytes().data() + 40, out.size() + kCommitHashBytes);
  out.Hash(Xxh3(out.bytes()));
  return std::move(out.bytes());
}

// One copy with its padding. kDataLoss, or kUnsupported where the checksum holds but a feature is
// unknown.
Result<CommitRecord> DecodeCopy(std::string_view bytes) {
  const auto bad = [](std::string why) { return Status(Code::kDataLoss, std::move(why)); };
  if (bytes.size() < kCommitHeaderBytes + kCommitHashBytes) return bad("truncated");
  if (!bytes.starts_with(kCommitMagic)) return bad("not a commit record");
  const auto length = LoadLittle<std::uint64_t>(bytes.data() + 40);
  if (length < kCommitHeaderBytes + kCommitHashBytes || length > bytes.size())
    return bad("wrong length");
  // Checksum first, then version and feature bits: damage must never look like a newer format,
  // which tools answer differently (kUnsupported and not kDataLoss).
  const std::string_view body = bytes.substr(0, length - kCommitHashBytes);
  ByteReader sum(bytes.substr(body.size(), kCommitHashBytes), "checksum");
  if (sum.Hash() != Xxh3(body)) return bad("checksum differs");
  // Each byte as the one before it, by one memcmp: a loop over them was what took longest of a
  // decode, and a save beside thousands of checkpoints makes thousands.
  const std::string_view padding = bytes.substr(static_cast<std::size_t>(length));
  const bool is_zero =
      padding.empty() ||
      (padding[0] == '\0' && padding.substr(1) == padding.substr(0, padding.size() - 1));
  if (!is_zero) {
    return bad("bytes after its end");
  }
  CommitRecord record;
  ByteReader in(body.substr(kCommitMagic.size()), "commit record");
  record.version = in.U32();
  const std::uint32_t header_bytes = in.U32();
  record.compatible = in.U64();
  record.read_compatible = in.U64();
  record.incompatible = in.U64();
  if (record.version != kFormatVersion || header_bytes != kCommitHeaderBytes) {
    return Status(Code::kUnsupported,
                  "written in a newer format: version " + std::to_string(record.version));
  }
  if (const std::uint64_t unknown = record.incompatible & ~kKnownIncompatible; unknown != 0) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string hex;
    for (std::uint64_t bits = unknown; bits != 0; bits >>= 4) {
      hex.insert(hex.begin(), kDigits[bits & 15]);
    }
    return Status(Code::kUnsupported,
                  "written in a newer format: incompatible feature bits 0x" + hex);
  }
  (void)in.U64();  // The length.
  record.uuid = DecodeUuid(in);
  record.generation = in.U64();
  record.parent = DecodeUuid(in);
  record.content_root = in.Hash();
  const std::uint64_t count = in.U64();
  for (std::uint64_t i = 0; i < count && in.status().ok(); ++i) {
    CommitRecord::Entry& file = record.files.emplace_back();
    file.name = in.String(kMaxFileNameBytes);
    file.length = in.U64();
    file.hash = in.Hash();
    file.tail = in.Hash();
    if (!in.status().ok()) break;
    // Names are joined to the checkpoint's folder later; "../x" must not get that far, also with a
    // checksum that holds.
    if (!IsSafeName(file.name)) return bad("\"" + file.name + "\" is not a name below it");
    if (i > 0 && !(record.files[i - 1].name < file.name)) return bad("files are not in order");
  }
  TENSORMOUNT_RETURN_IF_ERROR(in.Finish());
  return record;
}

}  // namespace

const CommitRecord::Entry* CommitRecord::Find(std::string_view name) const {
  const auto it = std::lower_bound(
      files.begin(), files.end(), name,
      [](const Entry& entry, std::string_view wanted) { return entry.name < wanted; });
  return it != files.end() && it->name == name ? &*it : nullptr;
}

std::string EncodeCommit(const CommitRecord& record) {
  std::string copy = EncodeCopy(record);
  // The copies share no page, so that no torn or bad page takes both.
  copy.resize((copy.size() + kPage - 1) / kPage * kPage, '\0');
  return copy + copy;
}

// Where the second copy begins follows from the first one's length, or, where that is damaged, from
// the file's size: both copies have the same padded size. Four outcomes: both whole and equal; one
// damaged (a warning); both damaged; both whole and unequal, which no crash can make, so nothing is
// guessed.
Result<DecodedCommit> DecodeCommit(std::string_view bytes, std::string_view name) {
  // The first copy says how long both are; where it cannot, they are the halves of the file.
  std::uint64_t copy_bytes = bytes.size() >= 48 ? LoadLittle<std::uint64_t>(bytes.data() + 40) : 0;
  copy_bytes = std::min<std::uint64_t>(copy_bytes, kMaxCommitBytes);
  copy_bytes = (copy_bytes + kPage - 1) / kPage * kPage;
  Result<CommitRecord> copies[2] = {
      DecodeCopy(bytes.substr(0, copy_bytes)),
      Result<CommitRecord>(Status(Code::kDataLoss, "the file has the wrong length"))};
  if (!copies[0].ok()) copy_bytes = (bytes.size() + 1) / 2;
  // Copies of equal bytes say the same, which need not be found out: of thousands of checkpoints
  // that are listed nearly all are such.
  if (copies[0].ok() && bytes.size() == 2 * copy_bytes &&
      bytes.substr(0, copy_bytes) == bytes.substr(copy_bytes)) {
    return DecodedCommit{.record = std::move(copies[0]).value(), .damage = {}};
  }
  if (bytes.size() == 2 * copy_bytes) copies[1] = DecodeCopy(bytes.substr(copy_bytes));
  for (const Result<CommitRecord>& copy : copies) {
    if (copy.status().code() == Code::kUnsupported) return copy.status().WithContext(name);
  }
  if (!copies[0].ok() && !copies[1].ok()) {
    return Status(Code::kDataLoss, std::string(name) + ": both copies are damaged: first: " +
                                       copies[0].status().message() +
                                       "; second: " + copies[1].status().message());
  }
  if (copies[0].ok() && copies[1].ok() &&
      EncodeCopy(copies[0].value()) != EncodeCopy(copies[1].value())) {
    return Status(Code::kDataLoss, std::string(name) + ": its two copies disagree");
  }
  DecodedCommit decoded;
  for (int i = 0; i < 2; ++i) {
    if (copies[i].ok()) {
      decoded.record = std::move(copies[i]).value();
    } else {
      decoded.one_copy_damaged = true;
      decoded.damage = std::string(name) + ": " + (i == 0 ? "first" : "second") +
                       " copy is damaged: " + copies[i].status().message();
    }
  }
  return decoded;
}

Result<std::string> ReadCommitBytes(File& file, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file.Stat());
  if (info.size > kMaxCommitBytes) {
    return Status(Code::kDataLoss, std::string(name) + ": " + std::to_string(info.size) + " bytes");
  }
  std::string bytes(static_cast<std::size_t>(info.size), '\0');
  const Status whole = file.ReadExactAt(0, bytes.data(), bytes.size());
  if (whole.ok()) return bytes;
  // A bad sector fails the read of the whole file. Read by pages it costs the copy that it lies in,
  // whose checksum then differs.
  for (std::size_t at = 0; at < bytes.size(); at += kPage) {
    const std::size_t size = std::min<std::size_t>(kPage, bytes.size() - at);
    if (!file.ReadExactAt(at, bytes.data() + at, size).ok()) {
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), size, '\0');
    }
  }
  // Nothing is proven damaged that was not read.
  if (DecodeCommit(bytes, name).status().code() == Code::kDataLoss) return whole;
  return bytes;
}

Result<DecodedCommit> ReadCommitFile(File& file, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, ReadCommitBytes(file, name));
  return DecodeCommit(bytes, name);
}

}  // namespace tensormount
