// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_STAGING_TEST_MOUNT_H_
#define TENSORMOUNT_TESTS_STAGING_TEST_MOUNT_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fs/save/journal.h"
#include "fs/save/schema.h"
#include "fs/save/staging_folder.h"
#include "index/store/store.h"
#include "shard/tensor_meta.h"

namespace tensormount::fs {

// What a mount leaves in a staging, made by hand: data files, then a journal. Nothing is on disk
// before Flush.
class TestMount {
 public:
  TestMount(FileSystem& fs, const Staging& staging, std::uint64_t number);

  const std::string& incarnation() const { return incarnation_; }
  std::string journal_name() const { return incarnation_ + ".tmj"; }
  std::uint64_t journal_bytes() const { return journal_bytes_; }  // After Flush.

  std::uint32_t Target(const TensorMeta& meta, const Box& box);
  std::uint32_t Whole(const TensorMeta& meta) { return Target(meta, Box::Whole(meta.shape())); }
  // Bytes from `begin` of the target on: appended to the pack, or at `offset` of a file of their
  // own that is called by the tensor.
  void Write(std::uint32_t target, std::uint64_t begin, std::string_view bytes);
  void WriteRuns(std::uint32_t target, std::uint64_t begin, std::uint64_t length,
                 std::uint64_t runs, std::uint64_t stride, std::string_view bytes);
  void WriteInPlace(std::uint32_t target, std::uint64_t begin, std::string_view bytes);
  void Forget(std::uint32_t target, std::uint64_t begin, std::uint64_t end);
  void Object(const std::string& key, const Dims& index, std::string_view bytes);
  void RemoveObject(const std::string& key, const Dims& index);
  void Condemn(std::uint32_t target, const std::string& what, const std::string& reason);
  // Data files and journal, durable.
  Status Flush();

 private:
  struct Known {
    TensorMeta meta;
    Box box;
    std::uint64_t bytes = 0;
  };
  std::uint32_t FileNumber(const std::string& name, Placement placement);
  void Extent(std::uint32_t target, StagedExtent extent, std::string_view bytes);
  void Append(const JournalRecord& record) { records_ += EncodeRecord(record); }

  FileSystem& fs_;
  const Staging& staging_;
  const std::string incarnation_;
  std::vector<Known> targets_;
  std::map<std::string, std::uint32_t> file_numbers_;
  std::map<std::string, std::string> files_;
  std::string records_;
  std::uint64_t journal_bytes_ = 0;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_TESTS_STAGING_TEST_MOUNT_H_
