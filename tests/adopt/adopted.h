// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_ADOPT_ADOPTED_H_
#define TENSORMOUNT_TESTS_ADOPT_ADOPTED_H_

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "index/foreign/format.h"
#include "index/read/checkpoint.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

// Checkpoints of others, opened by one adapter and read as everybody reads them. Cells of every
// fixture are a formula of their index in the whole tensor, so that all of them are compared.

namespace tensormount {

// Element `i`: (i * 7 + 3) % 251 as a number; of bool whether i % 3 == 0; float16, and float8, have
// the number as their bits.
inline std::string CellBytes(DType dtype, std::int64_t i) {
  const std::int64_t value = (i * 7 + 3) % 251;
  std::string out(InfoOf(dtype).bits / 8, '\0');
  const auto put = [&](auto v) { std::memcpy(out.data(), &v, sizeof v); };
  if (dtype == DType::kBool) {
    out[0] = i % 3 == 0 ? 1 : 0;
  } else if (dtype == DType::kF32 || dtype == DType::kC64) {
    put(static_cast<float>(value));
  } else if (dtype == DType::kF64 || dtype == DType::kC128) {
    put(static_cast<double>(value));
  } else if (dtype == DType::kBF16) {
    const auto wide = static_cast<float>(value);
    std::memcpy(out.data(), reinterpret_cast<const char*>(&wide) + 2, 2);
  } else {
    std::memcpy(out.data(), &value, out.size());
  }
  return out;
}

// Elements [begin, end).
inline std::string CellRange(DType dtype, std::int64_t begin, std::int64_t end) {
  std::string out;
  for (std::int64_t i = begin; i < end; ++i) out += CellBytes(dtype, i);
  return out;
}

using Adopted = std::shared_ptr<OpenedCheckpoint>;

// kNotFound where the adapter's Probe says no.
inline Result<Adopted> Adopt(const ForeignFormat& format, const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder,
                               ForeignFolder::Open(HostFileSystem(), path, {}));
  if (!format.Probe(folder)) return Status(Code::kNotFound, path + ": another format");
  ForeignBuilder builder(folder, std::string(format.name()));
  TENSORMOUNT_RETURN_IF_ERROR(format.Read(folder, builder));
  TENSORMOUNT_ASSIGN_OR_RETURN(ForeignInventory found, builder.Finish());
  return OpenedCheckpoint::OpenForeign(HostFileSystem(), std::move(found), path, {});
}

inline Result<std::string> ReadTensor(const Adopted& adopted, const std::string& key) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry entry, adopted->index().Find(key));
  std::string out(entry.meta.bytes(), '?');
  TENSORMOUNT_RETURN_IF_ERROR(
      adopted->ReadBytes(entry, 0, out.data(), out.size(), ReadVerify::kOff, nullptr));
  return out;
}

// All cells are the formula's.
inline void ExpectCells(const Adopted& adopted, const std::string& key, DType dtype,
                        const Dims& shape) {
  SCOPED_TRACE(key);
  const auto entry = adopted->index().Find(key);
  ASSERT_OK(entry);
  EXPECT_EQ(entry.value().meta.dtype(), dtype);
  ASSERT_EQ(entry.value().meta.shape(), shape);
  const auto bytes = ReadTensor(adopted, key);
  ASSERT_OK(bytes);
  EXPECT_EQ(bytes.value(), CellRange(dtype, 0, CheckedProduct(shape).value()));
}

inline std::string WarningsOf(const Adopted& adopted) {
  std::string out;
  for (const std::string& warning : adopted->warnings()) out += warning + "\n";
  return out;
}

inline std::vector<std::string> KeysOf(const Adopted& adopted) {
  std::vector<std::string> out;
  for (std::uint32_t i = 0; i < adopted->index().tensor_count(); ++i) {
    out.push_back(adopted->index().At(i).value().meta.key());
  }
  return out;
}

inline Result<std::string> ReadObject(const Adopted& adopted, const std::string& key) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> parts,
                               adopted->index().ObjectParts(key));
  std::string all;
  for (const ObjectRecord& part : parts) {
    std::string out(part.length, '?');
    TENSORMOUNT_RETURN_IF_ERROR(adopted->ReadObject(part, 0, out.data(), out.size()));
    all += out;
  }
  return all;
}

// A file of a fixture; folders on the way are made.
inline void PutFile(const std::string& path, std::string_view bytes) {
  ASSERT_OK(HostFileSystem().CreateDirectories(path.substr(0, path.rfind('/'))));
  WriteWholeFile(path, bytes);
}

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_ADOPT_ADOPTED_H_
