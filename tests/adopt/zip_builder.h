// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_ADOPT_ZIP_BUILDER_H_
#define TENSORMOUNT_TESTS_ADOPT_ZIP_BUILDER_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "base/crc32.h"
#include "tests/adopt/bytes.h"

namespace tensormount {

// Makes zip archives, and such that lie: every optional field replaces what would be true.
struct ZipBuilder {
  struct Entry {
    std::string name;
    std::string data;
    std::uint16_t flags = 0;
    std::uint16_t method = 0;
    bool described = false;  // Flag bit 3: sizes follow the data.
    bool wide_descriptor = false;
    bool sizes_in_64 = false;
    int padding = 0;    // Of the local header's extra field, as torch aligns; 0 or at least 4.
    std::string extra;  // More of it, in both headers.
    std::optional<std::uint32_t> crc;
    std::optional<std::uint64_t> size, packed_size, header;
    std::optional<std::string> local_name;
    std::optional<std::uint16_t> local_method, local_flags;
    // The packed sizes are the others where they are not given.
    std::optional<std::uint32_t> local_size, local_packed, local_crc;
    std::optional<std::uint32_t> descriptor_size, descriptor_packed, descriptor_crc;
    bool lose_descriptor = false;
    bool lose_field_64 = false;
  };

  Entry& Add(std::string name, std::string data) {
    entries.push_back({});
    entries.back().name = std::move(name);
    entries.back().data = std::move(data);
    return entries.back();
  }

  std::string Finish() const {
    std::string out;
    std::string listing;
    for (const Entry& e : entries) {
      const std::uint64_t begin = out.size();
      const std::uint32_t crc = e.crc.value_or(Crc32Extend(0, e.data.data(), e.data.size()));
      const std::uint64_t size = e.data.size();
      const auto flags = static_cast<std::uint16_t>(e.flags | (e.described ? 8 : 0));
      const std::string& local_name = e.local_name ? *e.local_name : e.name;
      std::string extra = e.extra;
      if (e.padding > 0) {
        const auto n = static_cast<std::size_t>(e.padding - 4);
        extra += "FB" + U16(n) + std::string(n, 'Z');
      }
      const std::uint64_t said = e.described ? 0 : e.local_size.value_or(size);
      const std::uint64_t packed = e.described ? 0 : e.local_packed.value_or(said);
      out += "PK\3\4" + U16(0) + U16(e.local_flags.value_or(flags)) +
             U16(e.local_method.value_or(e.method)) + U32(0) +
             U32(e.described ? 0 : e.local_crc.value_or(crc)) + U32(packed) + U32(said) +
             U16(local_name.size()) + U16(extra.size()) + local_name + extra + e.data;
      if (e.described && !e.lose_descriptor) {
        const std::uint64_t n = e.descriptor_size.value_or(size);
        const std::uint64_t p = e.descriptor_packed.value_or(n);
        out += "PK\7\10" + U32(e.descriptor_crc.value_or(crc)) +
               (e.wide_descriptor ? U64(p) + U64(n) : U32(p) + U32(n));
      }
      std::string field = e.extra;
      if (e.sizes_in_64 && !e.lose_field_64) {
        field += U16(1) + U16(24) + U64(size) + U64(size) + U64(begin);
      }
      const auto number = [&](std::uint64_t v) { return U32(e.sizes_in_64 ? 0xffffffff : v); };
      listing += "PK\1\2" + U16(0) + U16(0) + U16(flags) + U16(e.method) + U32(0) + U32(crc) +
                 number(e.packed_size.value_or(e.size.value_or(size))) +
                 number(e.size.value_or(size)) + U16(e.name.size()) + U16(field.size()) + U16(0) +
                 U16(0) + U16(0) + U32(0) + number(e.header.value_or(begin)) + e.name + field;
    }
    const std::uint64_t at = out.size();
    out += listing;
    const std::uint64_t end64 = out.size();
    if (zip64_end) {
      out += "PK\6\6" + U64(44) + U16(0) + U16(0) + U32(0) + U32(0) +
             U64(count64.value_or(entries.size())) + U64(count64.value_or(entries.size())) +
             U64(directory64_bytes.value_or(listing.size())) + U64(at);
      out += "PK\6\7" + U32(0) + U64(locator.value_or(end64)) + U32(1);
    }
    const auto field16 = [&](std::uint64_t v) { return U16(end_fields_in_64 ? 0xffff : v); };
    const auto field32 = [&](std::uint64_t v) { return U32(end_fields_in_64 ? 0xffffffff : v); };
    out += "PK\5\6" + U16(disk) + U16(disk) +
           field16(count_here.value_or(count.value_or(entries.size()))) +
           field16(count.value_or(entries.size())) +
           field32(directory_bytes.value_or(listing.size())) + field32(directory.value_or(at)) +
           U16(comment.size()) + comment;
    out.resize(out.size() - cut);
    return out;
  }

  std::deque<Entry> entries;  // References stay.
  std::string comment;
  bool zip64_end = false;
  bool end_fields_in_64 = false;
  std::uint64_t disk = 0;
  std::size_t cut = 0;  // Bytes lost at the end.
  std::optional<std::uint64_t> count, count_here, directory, directory_bytes, locator, count64,
      directory64_bytes;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_ADOPT_ZIP_BUILDER_H_
