// SPDX-License-Identifier: Apache-2.0
#include "fs/save/journal.h"

#include <atomic>
#include <cerrno>
#include <thread>

#include "shard/leaf_hash.h"
#include "tests/support/observed_file_system.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

constexpr Uuid kUuid = {1, 2};
constexpr char kIncarnation[] = "00ff00ff00ff00ff";

std::vector<JournalRecord> SomeRecords() {
  std::vector<JournalRecord> records(7);
  records[0].kind = JournalRecord::Kind::kFile;
  records[0].file_name = "data/x-p0.bin";
  records[1].kind = JournalRecord::Kind::kTarget;
  records[1].target = {"w", Box::Make({0, 4}, {100, 1000}).value(), {100, 2000}, 16};
  records[1].end = 400'000;
  records[2].extent.begin = 100;
  records[2].extent.length = 100'000;
  records[2].extent.offset = 7;
  records[2].extent.leaves = {{1, 2}, {3, 4}};
  records[2].extent.contribution = 99;
  records[3].extent.length = 16;
  records[3].extent.runs = 100;
  records[3].extent.stride = 4000;
  records[3].extent.leaves = {{5, 6}};
  records[4].kind = JournalRecord::Kind::kForget;
  records[4].begin = 5;
  records[4].end = 50;
  records[5].kind = JournalRecord::Kind::kObject;
  records[5].object = {"rng", {3}, 0, 12, 5, {{8, 9}}};
  records[6].kind = JournalRecord::Kind::kCondemn;
  records[6].file_name = "w[0:100, 4:1004]";
  records[6].reason = "disk on fire";
  return records;
}

std::string EncodeAll(const std::vector<JournalRecord>& records) {
  std::string bytes;
  for (const JournalRecord& record : records) bytes += EncodeRecord(record);
  return bytes;
}

Result<Journal> ReadBytes(const TempDir& dir, const std::string& bytes) {
  RemoveTree(dir.Join("read.tmj"));  // ext4 flushes what replaces the bytes of a file.
  WriteWholeFile(dir.Join("read.tmj"), bytes);
  return ReadJournal(HostFileSystem(), dir.Join("read.tmj"));
}

// Three batches with a sync behind each. `ends[i]`: what was synced after i of them.
std::string WriteSome(const TempDir& dir, std::vector<std::uint64_t>* ends) {
  const std::string path = dir.Join("write.tmj");
  auto writer = JournalWriter::Create(HostFileSystem(), path, kUuid, kIncarnation);
  EXPECT_OK(writer);
  JournalWriter& journal = *writer.value();
  ends->push_back(journal.synced_bytes());
  const std::vector<JournalRecord> records = SomeRecords();
  for (const auto& [from, to] : {std::pair(0, 3), std::pair(3, 4), std::pair(4, 7)}) {
    EXPECT_OK(journal.Append(EncodeAll({records.begin() + from, records.begin() + to})));
    EXPECT_OK(journal.Sync());
    ends->push_back(journal.synced_bytes());
  }
  std::string bytes = ReadWholeFile(path);
  RemoveTree(path);
  return bytes;
}

bool IsPrefix(const std::vector<JournalRecord>& records) {
  const std::vector<JournalRecord> all = SomeRecords();
  if (records.size() > all.size()) return false;
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (EncodeRecord(records[i]) != EncodeRecord(all[i])) return false;
  }
  return true;
}

TEST(JournalTest, RecordsRoundTrip) {
  const TempDir dir;
  std::vector<std::uint64_t> ends;
  const std::string bytes = WriteSome(dir, &ends);
  ASSERT_OK_AND_ASSIGN(const Journal journal, ReadBytes(dir, bytes));
  EXPECT_EQ(journal.checkpoint, kUuid);
  EXPECT_EQ(journal.incarnation, kIncarnation);
  EXPECT_EQ(journal.records.size(), 7u);
  EXPECT_TRUE(IsPrefix(journal.records));
  EXPECT_EQ(journal.records[3].extent.runs, 100u);
  EXPECT_EQ(journal.records[5].object.index, Dims{3});
  EXPECT_EQ(journal.bytes, bytes.size());
  EXPECT_LT(ends.back(), bytes.size());  // A mark follows.
}

TEST(JournalTest, TruncatedJournalGivesWholeRecords) {
  const TempDir dir;
  std::vector<std::uint64_t> ends;
  const std::string bytes = WriteSome(dir, &ends);
  for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
    const Result<Journal> journal = ReadBytes(dir, bytes.substr(0, cut));
    if (cut < ends[0]) {
      EXPECT_THAT(journal, HasCode(Code::kNotFound));
      continue;
    }
    ASSERT_OK(journal);
    EXPECT_TRUE(IsPrefix(journal.value().records));
    EXPECT_LE(journal.value().bytes, cut);
    const std::size_t least = cut >= ends[3] ? 7 : cut >= ends[2] ? 4 : cut >= ends[1] ? 3 : 0;
    EXPECT_GE(journal.value().records.size(), least) << cut;
  }
}

TEST(JournalTest, FlippedBitIsDamageOrATornTail) {
  const TempDir dir;
  std::vector<std::uint64_t> ends;
  const std::string bytes = WriteSome(dir, &ends);
  Random random(TestSeed());
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::string bad = bytes;
    bad[at] = static_cast<char>(bad[at] ^ (1 << random.Int(0, 7)));
    const Result<Journal> journal = ReadBytes(dir, bad);
    if (at < ends[3]) {
      EXPECT_THAT(journal, HasCode(Code::kDataLoss)) << at;
    } else {
      ASSERT_OK(journal);
      EXPECT_EQ(journal.value().records.size(), 7u);
    }
    // Without the last mark the end is a tail that nobody was promised, as far as the file says.
    const Result<Journal> unmarked = ReadBytes(dir, bad.substr(0, ends[3]));
    if (at >= ends[2] + 29 && at < ends[3]) {
      ASSERT_OK(unmarked);
      EXPECT_LT(unmarked.value().records.size(), 7u);
      EXPECT_TRUE(IsPrefix(unmarked.value().records));
      EXPECT_LT(unmarked.value().bytes, ends[3]);
    }
  }
}

TEST(JournalTest, GarbageIsNeverReadAsRecords) {
  const TempDir dir;
  std::vector<std::uint64_t> ends;
  const std::string bytes = WriteSome(dir, &ends);
  Random random(TestSeed());
  for (int i = 0; i < TestScale(500); ++i) {
    std::string bad = bytes;
    const auto at =
        static_cast<std::size_t>(random.Int(0, static_cast<std::int64_t>(bytes.size()) - 1));
    const auto n = static_cast<std::size_t>(random.Int(1, 40));
    switch (random.Int(0, 3)) {
      case 0:
        bad.replace(at, n, random.Bytes(n));
        break;
      case 1:
        bad.replace(at, n, std::string(std::min(n, bad.size() - at), '\0'));
        break;
      case 2:
        bad.erase(at, n);
        break;
      default:
        bad.insert(at, random.OneIn(2) ? random.Bytes(n) : bytes.substr(at / 2, n));
    }
    const Result<Journal> journal = ReadBytes(dir, bad);
    if (journal.ok()) {
      EXPECT_TRUE(IsPrefix(journal.value().records));
    }
  }
}

TEST(JournalTest, ContradictoryRecordsAreDamage) {
  const TempDir dir;
  std::vector<std::uint64_t> ends;
  const std::string head = WriteSome(dir, &ends).substr(0, ends[0]);
  const auto broken = [&](std::size_t which, const std::function<void(JournalRecord&)>& change) {
    std::vector<JournalRecord> records = SomeRecords();
    change(records[which]);
    EXPECT_THAT(ReadBytes(dir, head + EncodeAll(records)), HasCode(Code::kDataLoss));
  };
  broken(0, [](JournalRecord& r) { r.number = 1; });
  broken(0, [](JournalRecord& r) { r.file_name = "data/../../etc/passwd"; });
  broken(0, [](JournalRecord& r) { r.file_name = "/data/x"; });
  broken(0, [](JournalRecord& r) { r.placement = Placement::kForeign; });
  broken(1, [](JournalRecord& r) { r.number = 7; });
  broken(1, [](JournalRecord& r) { r.target.key.clear(); });
  broken(2, [](JournalRecord& r) { r.extent.target = 1; });
  broken(2, [](JournalRecord& r) { r.extent.file = 1; });
  broken(2, [](JournalRecord& r) { r.extent.begin = 300'001; });
  broken(2, [](JournalRecord& r) { r.extent.begin = ~std::uint64_t{0}; });
  broken(2, [](JournalRecord& r) { r.extent.offset = ~std::uint64_t{0} - 10; });
  broken(2, [](JournalRecord& r) { r.extent.leaves.pop_back(); });
  broken(2, [](JournalRecord& r) { r.extent.leaves.push_back({}); });
  broken(2, [](JournalRecord& r) { r.extent.runs = 0; });
  broken(2, [](JournalRecord& r) { r.extent.stride = 1; });
  broken(3, [](JournalRecord& r) { r.extent.stride = 16; });
  broken(3, [](JournalRecord& r) { r.extent.runs = 101; });
  broken(3, [](JournalRecord& r) { r.extent.stride = std::uint64_t{1} << 62; });
  broken(3, [](JournalRecord& r) { r.extent.length = 0; });
  broken(4, [](JournalRecord& r) { r.end = 400'001; });
  broken(4, [](JournalRecord& r) { r.begin = 51; });
  broken(5, [](JournalRecord& r) { r.object.length = 0; });
  broken(5, [](JournalRecord& r) { r.object.file = 9; });
  broken(5, [](JournalRecord& r) { r.object.length = std::uint64_t{1} << 40; });
  broken(6, [](JournalRecord& r) { r.number = 1; });
}

TEST(JournalTest, ConcurrentSyncsAreGroupedAndDurable) {
  const TempDir dir;
  std::atomic<int> syncs{0};
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
    if (event.op == FileOp::kSync) {
      ++syncs;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return Status();
  });
  ASSERT_OK_AND_ASSIGN(const auto journal,
                       JournalWriter::Create(fs, dir.Join("j"), kUuid, kIncarnation));
  const std::string records = EncodeAll({SomeRecords()[6]});
  JournalRecord plain = SomeRecords()[6];
  plain.number = kNoFile;
  const std::string one = EncodeRecord(plain);
  syncs = 0;
  constexpr int kThreads = 8;
  constexpr int kEach = 20;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) {
        EXPECT_OK(journal->Append(one));
        EXPECT_OK(journal->Sync());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(syncs, kThreads * kEach * 2 / 3);
  const int before = syncs;
  EXPECT_OK(journal->Sync());  // Nothing new.
  EXPECT_EQ(syncs, before);
  ASSERT_OK_AND_ASSIGN(const Journal read, ReadJournal(fs, dir.Join("j")));
  EXPECT_EQ(read.records.size(), static_cast<std::size_t>(kThreads * kEach));
  journal->Close();
  EXPECT_THAT(journal->Append(one), HasCode(Code::kStale));
}

TEST(JournalTest, RecordAppendedDuringAnFsyncIsSyncedAgain) {
  const TempDir dir;
  std::unique_ptr<JournalWriter> journal;
  const std::string record = EncodeRecord(SomeRecords()[0]);
  std::atomic<int> syncs{0};
  // The kernel's fsync has begun: what comes now may not be in it.
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
    if (event.op == FileOp::kSync && journal != nullptr && ++syncs == 1) {
      EXPECT_OK(journal->Append(record));
    }
    return Status();
  });
  journal = JournalWriter::Create(fs, dir.Join("j"), kUuid, kIncarnation).value();
  const std::uint64_t empty = journal->synced_bytes();
  ASSERT_OK(journal->Append(record));
  ASSERT_OK(journal->Sync());
  EXPECT_EQ(syncs, 1);
  EXPECT_EQ(journal->synced_bytes(), empty + record.size());
  ASSERT_OK(journal->Sync());
  EXPECT_EQ(syncs, 2);
  EXPECT_GE(journal->synced_bytes(), empty + 2 * record.size());
}

TEST(JournalTest, FailedSyncCondemnsTheJournal) {
  const TempDir dir;
  std::atomic<bool> fail{false};
  ObservedFileSystem fs(HostFileSystem(), [&](const FileEvent& event) {
    return event.op == FileOp::kSync && fail.exchange(false)
               ? Status::FromErrno(EIO, "fsync", event.path)
               : Status();
  });
  ASSERT_OK_AND_ASSIGN(const auto journal,
                       JournalWriter::Create(fs, dir.Join("j"), kUuid, kIncarnation));
  const std::string file = EncodeRecord(SomeRecords()[0]);
  ASSERT_OK(journal->Append(file));
  fail = true;
  EXPECT_THAT(journal->Sync(), HasCode(Code::kDataLoss));
  EXPECT_THAT(journal->Sync(), HasCode(Code::kDataLoss));
  EXPECT_THAT(journal->Append(file), HasCode(Code::kDataLoss));
}

}  // namespace
}  // namespace tensormount::fs
