// SPDX-License-Identifier: Apache-2.0
// COMMIT (docs/format.md, "Commit record"): two copies of one record that share no disk page, each
// with a checksum. A reader takes the sound copy; two sound copies that differ are damage.
#include "index/records/commit_record.h"

#include <algorithm>

#include "base/coding.h"
#include "index/records/record_coding.h"

namespace tensormount {
namespace {

// Magic of a copy. The length of a copy is at offset 40, directly behind the fields that keep their
// positions in every version of the format (docs/format.md, "Commit record").
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
  out.U64(0);  // Length, filled in below.
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

// Decodes one copy including its padding. kUnsupported if the checksum matches but a feature is
// unknown; kDataLoss for any other fault.
Result<CommitRecord> DecodeCopy(std::string_view bytes) {
  const auto bad = [](std::string why) { return Status(Code::kDataLoss, std::move(why)); };
  if (bytes.size() < kCommitHeaderBytes + kCommitHashBytes) return bad("truncated");
  if (!bytes.starts_with(kCommitMagic)) return bad("the bytes are not a commit record");
  const auto length = LoadLittle<std::uint64_t>(bytes.data() + 40);
  if (length < kCommitHeaderBytes + kCommitHashBytes || length > bytes.size())
    return bad("the recorded length is wrong");
  // The checksum is compared before version and feature bits: damage must not look like a newer
  // format, which tools handle differently (kUnsupported, not kDataLoss).
  const std::string_view body = bytes.substr(0, length - kCommitHashBytes);
  ByteReader sum(bytes.substr(body.size(), kCommitHashBytes), "checksum");
  if (sum.Hash() != Xxh3(body)) return bad("checksum mismatch");
  // The padding is zero if its first byte is zero and each byte equals its predecessor, which one
  // memcmp finds. A loop took most of the decoding time, and a save beside thousands of checkpoints
  // decodes thousands of records.
  const std::string_view padding = bytes.substr(static_cast<std::size_t>(length));
  const bool is_zero =
      padding.empty() ||
      (padding[0] == '\0' && padding.substr(1) == padding.substr(0, padding.size() - 1));
  if (!is_zero) {
    return bad("unexpected bytes after the end of the record");
  }
  CommitRecord record;
  ByteReader in(body.substr(kCommitMagic.size()), "commit record");
  record.version = in.U32();
  const std::uint32_t header_bytes = in.U32();
  record.compatible = in.U64();
  record.read_compatible = in.U64();
  record.incompatible = in.U64();
  if (record.version != kFormatVersion || header_bytes != kCommitHeaderBytes) {
    return Status(Code::kUnsupported, "the checkpoint is written in a newer format: version " +
                                          std::to_string(record.version));
  }
  if (const std::uint64_t unknown = record.incompatible & ~kKnownIncompatible; unknown != 0) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string hex;
    for (std::uint64_t bits = unknown; bits != 0; bits >>= 4) {
      hex.insert(hex.begin(), kDigits[bits & 15]);
    }
    return Status(
        Code::kUnsupported,
        "the checkpoint is written in a newer format: incompatible feature bits 0x" + hex);
  }
  (void)in.U64();  // Length.
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
    // Names are joined to the checkpoint's directory later, so "../x" is refused even if the
    // checksum matches.
    if (!IsSafeName(file.name))
      return bad("\"" + file.name + "\" is not a path inside the checkpoint");
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
  // The copies share no page, so that a torn or bad page damages only one.
  copy.resize((copy.size() + kPage - 1) / kPage * kPage, '\0');
  return copy + copy;
}

// Decodes both copies, which have the same padded size. The position of the second copy follows
// from the length of the first, or, if that is damaged, from the size of the file. The copies may
// both be sound and equal; or one is damaged (a warning); or both are damaged; or they are sound
// but different, which no crash can cause, so it is damage.
Result<DecodedCommit> DecodeCommit(std::string_view bytes, std::string_view name) {
  std::uint64_t copy_bytes = bytes.size() >= 48 ? LoadLittle<std::uint64_t>(bytes.data() + 40) : 0;
  copy_bytes = std::min<std::uint64_t>(copy_bytes, kMaxCommitBytes);
  copy_bytes = (copy_bytes + kPage - 1) / kPage * kPage;
  Result<CommitRecord> copies[2] = {
      DecodeCopy(bytes.substr(0, copy_bytes)),
      Result<CommitRecord>(Status(Code::kDataLoss, "the file has the wrong length"))};
  if (!copies[0].ok()) copy_bytes = (bytes.size() + 1) / 2;
  // Byte-equal copies need no second decoding. Nearly all checkpoints have them, and a listing
  // decodes thousands.
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
  // A bad sector fails the read of the whole file. Reading page by page loses only the copy in that
  // sector, because its checksum then differs.
  for (std::size_t at = 0; at < bytes.size(); at += kPage) {
    const std::size_t size = std::min<std::size_t>(kPage, bytes.size() - at);
    if (!file.ReadExactAt(at, bytes.data() + at, size).ok()) {
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), size, '\0');
    }
  }
  // If no copy is intact, return the read error: a page that could not be read does not prove
  // damage.
  if (DecodeCommit(bytes, name).status().code() == Code::kDataLoss) return whole;
  return bytes;
}

Result<DecodedCommit> ReadCommitFile(File& file, std::string_view name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, ReadCommitBytes(file, name));
  return DecodeCommit(bytes, name);
}

}  // namespace tensormount
