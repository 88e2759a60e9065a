// SPDX-License-Identifier: Apache-2.0
// The file of known_generations.h. A writer may be stopped at any byte, and two may write at once,
// so the file has a hash of all its bytes, and a reader takes all of it or nothing.
#include "index/store/known_generations.h"

#include <algorithm>

#include "base/coding.h"
#include "index/records/record_coding.h"
#include "index/records/store_paths.h"

namespace tensormount {
namespace {

constexpr std::string_view kMagic = "TMKNOWN1";
// Largest file that is read: half a million checkpoints with names of usual length.
constexpr std::uint64_t kMaxKnownBytes = std::uint64_t{64} << 20;
constexpr std::size_t kMaxNameBytes = 255;
constexpr std::size_t kHashBytes = 16;

std::string PathOfKnown(const std::string& store) {
  return JoinPath(JoinPath(store, store_paths::kGenerationsFolder), store_paths::kKnownFile);
}

}  // namespace

std::string EncodeKnownGenerations(std::span<const KnownGeneration> known) {
  ByteWriter out;
  out.Raw(kMagic.data(), kMagic.size());
  out.U64(known.size());
  for (const KnownGeneration& one : known) {
    out.String(one.name);
    out.U64(one.inode);
    out.I64(one.ctime_seconds);
    out.I64(one.ctime_nanoseconds);
    EncodeUuid(out, one.uuid);
    out.U64(one.generation);
    out.U8(one.derived ? 1 : 0);
  }
  const Hash128 hash = Xxh3(out.bytes());
  out.Hash(hash);
  return std::move(out.bytes());
}

std::vector<KnownGeneration> DecodeKnownGenerations(std::string_view bytes) {
  if (bytes.size() < kMagic.size() + kHashBytes || !bytes.starts_with(kMagic)) return {};
  const std::string_view hashed = bytes.substr(0, bytes.size() - kHashBytes);
  if (ByteReader(bytes.substr(hashed.size()), "hash").Hash() != Xxh3(hashed)) return {};
  ByteReader in(hashed.substr(kMagic.size()), "known generations");
  std::vector<KnownGeneration> known(std::min<std::uint64_t>(in.U64(), in.left()));
  for (KnownGeneration& one : known) {
    one.name = in.String(kMaxNameBytes);
    one.inode = in.U64();
    one.ctime_seconds = in.I64();
    one.ctime_nanoseconds = in.I64();
    one.uuid = DecodeUuid(in);
    one.generation = in.U64();
    one.derived = in.U8() != 0;
    if (!in.status().ok()) return {};
  }
  const bool sorted = std::ranges::is_sorted(known, {}, &KnownGeneration::name);
  return in.Finish().ok() && sorted ? std::move(known) : std::vector<KnownGeneration>();
}

std::vector<KnownGeneration> ReadKnownGenerations(FileSystem& fs, const std::string& store) {
  const Result<std::string> bytes = fs.ReadFile(PathOfKnown(store), kMaxKnownBytes);
  return bytes.ok() ? DecodeKnownGenerations(bytes.value()) : std::vector<KnownGeneration>();
}

void WriteKnownGenerations(FileSystem& fs, const std::string& store,
                           std::span<const KnownGeneration> known) {
  const std::string bytes = EncodeKnownGenerations(known);
  if (bytes.size() <= kMaxKnownBytes) (void)fs.ReplaceFile(PathOfKnown(store), bytes);
}

}  // namespace tensormount
