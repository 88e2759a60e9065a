// SPDX-License-Identifier: Apache-2.0
// Stagings under power cuts, failing disks and many threads.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <thread>

#include "fs/save/staging_writer.h"
#include "tests/staging/staging_model.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/power_cut.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

TensorMeta FaultMeta(const std::string& key, DType dtype, const Dims& shape) {
  return TensorMeta::Make(key, dtype, shape).value();
}

StagedInventory ReadStagedInventory(const Staging& staging,
                                    const std::vector<TensorMeta>& tensors) {
  const Result<Journal> journal = ReadJournal(HostFileSystem(), JournalPath(staging));
  EXPECT_OK(journal);
  if (!journal.ok()) return {};
  return Resolve(HostFileSystem(), staging.directory, journal.value(), tensors);
}

TEST(StagingFaultsTest, SyncedBytesSurvivePowerCuts) {
  Random random(TestSeed());
  for (int round = 0; round < TestScale(2); ++round) {
    const TempDir dir;
    ASSERT_OK(HostFileSystem().CreateDirectory(dir.Join("live")));
    // The staging itself is durable: others make it.
    const Staging staging = MakeTestStaging(HostFileSystem(), dir.Join("live/s"));
    PowerCutFileSystem fs(dir.Join("live"));
    const auto writer = std::make_shared<StagingWriter>(fs, staging, kTestIncarnation);
    const std::vector<TensorMeta> tensors = {FaultMeta("a", DType::kU8, {40, 50}),
                                             FaultMeta("big", DType::kU8, {5 << 20})};
    std::vector<std::shared_ptr<TargetWriter>> targets;
    std::vector<std::string> names;
    std::vector<KnownBytes> now;
    for (const TensorMeta& meta : tensors) {
      targets.push_back(writer->OpenTarget(meta, Box::Whole(meta.shape())).value());
      names.push_back(TargetName(meta.key(), Box::Whole(meta.shape())));
      now.emplace_back(meta.bytes());
    }
    ASSERT_OK_AND_ASSIGN(const auto blob, writer->OpenObject("o", {}, true));
    std::string object;
    // What was promised after how many operations.
    struct Promise {
      std::size_t ops = 0;
      std::vector<KnownBytes> targets;
      std::string object;
      std::uint64_t journal_bytes = 0;
    };
    std::vector<Promise> promises = {{0, {KnownBytes(2000), KnownBytes(5 << 20)}, "", 0}};
    for (int sync = 0; sync < 5; ++sync) {
      for (int i = 0; i < 4; ++i) {
        const std::size_t t = random.OneIn(2) ? 0 : 1;
        const std::string data =
            random.Bytes(static_cast<std::size_t>(random.Int(1, t == 0            ? 900
                                                                : random.OneIn(2) ? 3000
                                                                                  : 90'000)));
        const auto at = static_cast<std::uint64_t>(random.Int(0, t == 0 ? 1000 : 150'000));
        ASSERT_OK(targets[t]->Write(at, data.data(), data.size()));
        now[t].Write(at, data);
      }
      const std::string data = random.Bytes(static_cast<std::size_t>(random.Int(1, 300)));
      const auto at = static_cast<std::uint64_t>(random.Int(0, 300));
      ASSERT_OK(blob->Write(at, data.data(), data.size()));
      object.resize(std::max(object.size(), at + data.size()), '\0');
      object.replace(at, data.size(), data);
      ASSERT_OK(writer->SyncAll());
      promises.push_back({fs.op_count(), now, object, writer->journal_bytes()});
    }
    const std::size_t step = 1 + fs.op_count() / static_cast<std::size_t>(TestScale(30));
    for (std::size_t k = 0; k <= fs.op_count(); k += step) {
      SCOPED_TRACE("after " + std::to_string(k) + " operations");
      ASSERT_OK(fs.Materialise(k, random, dir.Join("after")));
      std::size_t i = 0;
      while (i + 1 < promises.size() && promises[i + 1].ops <= k) ++i;
      Staging after = staging;
      after.directory = dir.Join("after/s");
      const Result<Journal> journal = ReadJournal(HostFileSystem(), JournalPath(after));
      if (i == 0 && journal.status().code() == Code::kNotFound) {
        ASSERT_OK(HostFileSystem().RemoveTree(dir.Join("after")));
        continue;
      }
      ASSERT_OK(journal);
      EXPECT_GE(journal.value().bytes, promises[i].journal_bytes);
      // Every record that can be read is true, also those that nobody was promised.
      StagedInventory inventory =
          Resolve(HostFileSystem(), after.directory, journal.value(), tensors);
      const Promise& next = promises[std::min(i + 1, promises.size() - 1)];
      for (std::size_t t = 0; t < targets.size(); ++t) {
        const KnownBytes& got =
            inventory.targets.try_emplace(names[t], now[t].bytes.size()).first->second;
        const KnownBytes& least = promises[i].targets[t];
        std::size_t wrong = 0;
        for (std::size_t b = 0; b < got.bytes.size(); ++b) {
          const auto is = [&](const KnownBytes& want) {
            return got.known[b] == want.known[b] && got.bytes[b] == want.bytes[b];
          };
          if (!is(least) && !is(next.targets[t])) ++wrong;
        }
        EXPECT_EQ(wrong, 0u) << names[t];
      }
      if (i > 0) {
        const std::string& got = inventory.objects["o[]"];
        EXPECT_TRUE(got == promises[i].object || got == next.object);
      }
      ASSERT_OK(HostFileSystem().RemoveTree(dir.Join("after")));
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Before rename(2) has returned either name may be there, or both; never neither, never other
// bytes.
TEST(StagingFaultsTest, RenamedObjectSurvivesPowerCuts) {
  Random random(TestSeed());
  const TempDir dir;
  ASSERT_OK(HostFileSystem().CreateDirectory(dir.Join("live")));
  const Staging staging = MakeTestStaging(HostFileSystem(), dir.Join("live/s"));
  PowerCutFileSystem fs(dir.Join("live"));
  const auto writer = std::make_shared<StagingWriter>(fs, staging, kTestIncarnation);
  const std::string first = random.Bytes(5000);
  const std::string second = random.Bytes(9000);
  ASSERT_OK_AND_ASSIGN(const auto old, writer->OpenObject("state", {}, true));
  ASSERT_OK(old->Write(0, first.data(), first.size()));
  ASSERT_OK(old->Sync());
  ASSERT_OK_AND_ASSIGN(const auto next, writer->OpenObject("state.tmp", {}, true));
  ASSERT_OK(next->Write(0, second.data(), second.size()));
  ASSERT_OK(next->Sync());
  const std::string state = ObjectName("state", {});
  const std::string tmp = ObjectName("state.tmp", {});
  const std::size_t begun = fs.op_count();
  ASSERT_OK(writer->RenameObject("state.tmp", {}, "state", {}));
  const std::size_t ended = fs.op_count();
  for (std::size_t k = begun; k <= ended; ++k) {
    for (int tries = 0; tries < 8; ++tries) {
      SCOPED_TRACE("after " + std::to_string(k - begun) + " operations");
      ASSERT_OK(fs.Materialise(k, random, dir.Join("after")));
      Staging after = staging;
      after.directory = dir.Join("after/s");
      ASSERT_OK_AND_ASSIGN(const Journal journal,
                           ReadJournal(HostFileSystem(), JournalPath(after)));
      const StagedInventory inventory =
          Resolve(HostFileSystem(), after.directory, journal, std::vector<TensorMeta>());
      ASSERT_TRUE(inventory.objects.contains(state));
      const bool moved = inventory.objects.at(state) == second;
      EXPECT_TRUE(moved || inventory.objects.at(state) == first);
      EXPECT_TRUE(moved || k < ended);
      if (inventory.objects.contains(tmp)) {
        EXPECT_TRUE(inventory.objects.at(tmp) == second);
        EXPECT_LT(k, ended);
      } else {
        EXPECT_TRUE(moved);
      }
      ASSERT_OK(HostFileSystem().RemoveTree(dir.Join("after")));
    }
  }
  // Once it has its name, a handle of the one before records nothing under it.
  ASSERT_OK(old->Write(0, "late", 4));
  ASSERT_OK(old->Sync());
  ASSERT_OK(next->Append("!", 1));
  ASSERT_OK(writer->SyncAll());
  EXPECT_TRUE(ReadStagedInventory(staging, {}).objects.at(state) == second + "!");
  EXPECT_EQ(ReadStagedInventory(staging, {}).objects.size(), 1u);
}

TEST(StagingFaultsTest, FailedSyncCondemnsTheFileAndItsTargets) {
  const TempDir dir;
  const Staging staging = MakeTestStaging(HostFileSystem(), dir.Join("s"));
  std::atomic<bool> fail{false};
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
    return event.op == FileOp::kSync && event.path.find("/data/") != std::string::npos &&
                   fail.exchange(false)
               ? Status::FromErrno(EIO, "fsync", event.path)
               : Status();
  });
  const auto writer = std::make_shared<StagingWriter>(fs, staging, kTestIncarnation);
  std::vector<TensorMeta> tensors;
  std::vector<std::shared_ptr<TargetWriter>> targets;
  for (const char* key : {"a", "b", "c", "d"}) {
    tensors.push_back(FaultMeta(key, DType::kU8, {1000}));
    targets.push_back(writer->OpenTarget(tensors.back(), Box::Whole({1000})).value());
  }
  const std::string data(1000, 'x');
  ASSERT_OK(targets[0]->Write(0, data.data(), 1000));
  ASSERT_OK(targets[2]->Write(0, data.data(), 1000));
  ASSERT_OK(targets[0]->Sync());
  ASSERT_OK(targets[2]->Sync());
  // a and b have bytes in the file that were not synced, c and d have none.
  ASSERT_OK(targets[0]->Write(0, std::string(10, 'y').data(), 10));
  ASSERT_OK(targets[1]->Write(0, data.data(), 1000));
  ASSERT_OK_AND_ASSIGN(const auto blob, writer->OpenObject("o", {}, true));
  ASSERT_OK(blob->Write(0, data.data(), 10));
  fail = true;
  EXPECT_THAT(targets[0]->Sync(), HasCode(Code::kDataLoss));
  EXPECT_THAT(targets[0]->Sync(), HasCode(Code::kDataLoss));
  EXPECT_THAT(targets[0]->Write(0, data.data(), 10), HasCode(Code::kDataLoss));
  EXPECT_THAT(targets[1]->Sync(), HasCode(Code::kDataLoss));
  EXPECT_THAT(blob->Sync(), HasCode(Code::kDataLoss));
  // Others go on, with another file.
  const std::string z(1000, 'z');
  for (const std::size_t t : {std::size_t{2}, std::size_t{3}}) {
    ASSERT_OK(targets[t]->Write(500, z.data(), 500));
    ASSERT_OK(targets[t]->Sync());
  }
  EXPECT_FALSE(writer->SyncAll().ok());
  const StagedInventory inventory = ReadStagedInventory(staging, tensors);
  EXPECT_EQ(inventory.condemned, (std::vector<std::string>{"a[0:1000]", "b[0:1000]", "object o"}));
  EXPECT_EQ(inventory.targets.at("a[0:1000]").bytes, data);
  EXPECT_EQ(inventory.targets.at("c[0:1000]").bytes, data.substr(500) + z.substr(500));
  EXPECT_EQ(inventory.targets.at("d[0:1000]").count(), 500u);
  EXPECT_EQ(inventory.objects.size(), 0u);
}

TEST(StagingFaultsTest, FullDiskFailsOnlyTheWrite) {
  const TempDir dir;
  const Staging staging = MakeTestStaging(HostFileSystem(), dir.Join("s"));
  std::atomic<bool> full{false};
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
    return event.op == FileOp::kWrite && full ? Status::FromErrno(ENOSPC, "write", event.path)
                                              : Status();
  });
  const auto writer = std::make_shared<StagingWriter>(fs, staging, kTestIncarnation);
  const TensorMeta meta = FaultMeta("a", DType::kU8, {200'000});
  ASSERT_OK_AND_ASSIGN(const auto target, writer->OpenTarget(meta, Box::Whole({200'000})));
  Random random(TestSeed());
  const std::string data = random.Bytes(200'000);
  ASSERT_OK(target->Write(0, data.data(), 100'000));
  full = true;
  // Over what is there, whose hash was taken, and behind it.
  EXPECT_EQ(target->Write(50, data.data(), 150'000).ToErrno(), ENOSPC);
  full = false;
  EXPECT_EQ(target->written_bytes(), 100'000u);
  ASSERT_OK(target->Write(100'000, data.data() + 100'000, 100'000));
  ASSERT_OK(target->Sync());
  EXPECT_EQ(ReadStagedInventory(staging, {meta}).targets.at("a[0:200000]").bytes, data);
}

TEST(StagingFaultsTest, ConcurrentThreadsWriteOneAndManyTargets) {
  const TempDir dir;
  const Staging staging = MakeTestStaging(HostFileSystem(), dir.Join("s"));
  const auto writer = std::make_shared<StagingWriter>(HostFileSystem(), staging, kTestIncarnation);
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kStep = 100'000;  // Neighbours share blocks of 64 KiB.
  constexpr std::size_t kSteps = 12;
  constexpr std::size_t kSize = kThreads * kSteps * kStep;
  std::vector<TensorMeta> tensors = {
      FaultMeta("w", DType::kU8, {static_cast<std::int64_t>(kSize)})};
  ASSERT_OK_AND_ASSIGN(const auto target, writer->OpenTarget(tensors[0], Box::Whole({kSize})));
  Random random(TestSeed());
  const std::string data = random.Bytes(kSize);
  for (std::size_t t = 0; t < kThreads; ++t) {
    tensors.push_back(FaultMeta("own" + std::to_string(t), DType::kU8, {100'000}));
  }
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto own = writer->OpenTarget(tensors[t + 1], Box::Whole({100'000}));
      ASSERT_OK(own);
      ASSERT_OK_AND_ASSIGN(const auto blob,
                           writer->OpenObject("o", {static_cast<std::int64_t>(t)}, true));
      for (std::size_t i = 0; i < kSteps; ++i) {
        const std::size_t at = (i * kThreads + t) * kStep;
        ASSERT_OK(target->Write(at, data.data() + at, kStep));
        // Everybody writes the same here.
        ASSERT_OK(target->Write(0, data.data(), 3000));
        ASSERT_OK(own.value()->Write(i * 8000, data.data() + i * 8000, 8000));
        ASSERT_OK(blob->Append(data.data(), 1000));
        if (i % 4 == 3) {
          ASSERT_OK(own.value()->Sync());
        }
      }
    });
  }
  std::thread syncer([&] {
    while (!stop) ASSERT_OK(writer->SyncAll());
  });
  std::thread reader([&] {
    std::string read(5000, '\0');
    while (!stop) {
      const Result<std::size_t> got = target->Read(0, read.data(), 3000);
      if (got.ok()) {
        ASSERT_EQ(read.substr(0, 3000), data.substr(0, 3000));
      } else {
        ASSERT_EQ(got.status().ToErrno(), ENODATA);
      }
      (void)target->WrittenRanges();
      (void)writer->Objects();
    }
  });
  for (std::thread& thread : threads) thread.join();
  stop = true;
  syncer.join();
  reader.join();
  ASSERT_OK(writer->SyncAll());
  const StagedInventory inventory = ReadStagedInventory(staging, tensors);
  EXPECT_TRUE(inventory.targets.at(TargetName("w", Box::Whole({kSize}))).bytes == data);
  for (std::size_t t = 0; t < kThreads; ++t) {
    EXPECT_EQ(inventory.targets.at(TargetName(tensors[t + 1].key(), Box::Whole({100'000}))).count(),
              kSteps * 8000);
    EXPECT_EQ(inventory.objects.at(ObjectName("o", {static_cast<std::int64_t>(t)})).size(),
              kSteps * 1000);
  }
}

TEST(StagingFaultsTest, ManyFilesUseFewDescriptorsAndLeakNone) {
  const TempDir dir;
  const Staging staging = MakeTestStaging(HostFileSystem(), dir.Join("s"));
  const auto writer = std::make_shared<StagingWriter>(HostFileSystem(), staging, kTestIncarnation);
  const auto open_files = [&] {
    std::size_t n = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;
      const auto to = std::filesystem::read_symlink(entry.path(), error);
      if (!error && to.string().starts_with(staging.directory)) ++n;
    }
    return n;
  };
  std::vector<std::shared_ptr<TargetWriter>> targets;
  const std::string data(70'000, 'x');
  for (int i = 0; i < 150; ++i) {
    const TensorMeta meta = FaultMeta("w" + std::to_string(i), DType::kU8, {5 << 20});
    targets.push_back(writer->OpenTarget(meta, Box::Whole(meta.shape())).value());
    ASSERT_OK(targets.back()->Write(1000, data.data(), data.size()));
  }
  EXPECT_LE(open_files(), 130u);
  ASSERT_OK(writer->SyncAll());
  EXPECT_LE(open_files(), 33u);
  ASSERT_OK(targets[0]->Write(500'000, data.data(), data.size()));
  ASSERT_OK(targets[0]->Sync());
  std::string read(data.size(), '\0');
  EXPECT_OK(targets[149]->Read(1000, read.data(), read.size()));
  EXPECT_EQ(read, data);
  writer->CloseForGood();
  EXPECT_EQ(open_files(), 0u);
}

}  // namespace
}  // namespace tensormount::fs
