// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_STAGING_STAGING_TEST_SUPPORT_H_
#define TENSORMOUNT_TESTS_STAGING_STAGING_TEST_SUPPORT_H_

#include <string>
#include <vector>

#include "fs/save/publish.h"
#include "tests/index/store_test_support.h"
#include "tests/staging/test_mount.h"

namespace tensormount::fs {

class StagingTest : public StoreTest {
 protected:
  Staging Make(const Store& store, const std::string& name, const std::string& schema) {
    auto staging = CreateStaging(store, fs(), name);
    EXPECT_OK(staging);
    EXPECT_OK(AddSchema(fs(), staging.value().directory, "00000000000000ff",
                        StagingSchema::Parse(schema).value()));
    return staging.value();
  }
  TensorMeta Meta(const Staging& staging, const std::string& key) {
    return ReadSchemas(fs(), staging.directory).value().tensors().at(key);
  }
  // What the checkpoint holds under `key`, after VerifyCheckpoint found it clean.
  std::string BytesOf(const std::string& name, const std::string& key) {
    const auto opened = OpenedCheckpoint::Open(fs(), InStore(name), OpenedCheckpoint::Options());
    if (!opened.ok()) return opened.status().ToString();
    const auto entry = opened.value()->index().Find(key);
    if (!entry.ok()) return entry.status().ToString();
    std::string bytes(static_cast<std::size_t>(entry.value().meta.bytes()), '?');
    const Status read = opened.value()->ReadBytes(entry.value(), 0, bytes.data(), bytes.size(),
                                                  ReadVerify::kExtendLeaves, nullptr);
    if (!read.ok()) return read.ToString();
    EXPECT_EQ(entry.value().digest, Crc64Extend(0, bytes.data(), bytes.size())) << key;
    return bytes;
  }
  testing::AssertionResult IsSound(const std::string& name) {
    const auto report = VerifyCheckpoint(fs(), InStore(name), VerifyOptions{.threads = 1});
    if (!report.ok()) return testing::AssertionFailure() << report.status().ToString();
    for (const auto& d : report.value().damages) {
      return testing::AssertionFailure() << d.object << ": " << d.file << ": " << d.reason;
    }
    return testing::AssertionSuccess();
  }
  // "missing|tensor w [0:2]|written by no mount" of each problem.
  static std::vector<std::string> Lines(const StagingReport& report) {
    std::vector<std::string> lines;
    for (const auto& p : report.problems) lines.push_back(p.code + "|" + p.object + "|" + p.detail);
    return lines;
  }
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_TESTS_STAGING_STAGING_TEST_SUPPORT_H_
