// SPDX-License-Identifier: Apache-2.0
#include "fs/save/staging_writer.h"

#include <algorithm>
#include <cerrno>
#include <malloc.h>
#include <memory>

#include "tests/staging/staging_model.h"
#include "tests/support/random.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount::fs {
namespace {

TensorMeta Meta(const std::string& key, DType dtype, const Dims& shape) {
  return TensorMeta::Make(key, dtype, shape).value();
}

class StagingWriterTest : public testing::Test {
 protected:
  StagingWriterTest() { Restart(); }

  void Restart() {
    writer_.reset();
    directory_ = dir_.Join("staging" + std::to_string(number_++));
    staging_ = MakeTestStaging(HostFileSystem(), directory_);
    writer_ = std::make_shared<StagingWriter>(HostFileSystem(), staging_, kTestIncarnation);
  }
  StagedInventory Read(const std::vector<TensorMeta>& tensors) {
    const Result<Journal> journal = ReadJournal(HostFileSystem(), JournalPath(staging_));
    EXPECT_OK(journal);
    if (!journal.ok()) return {};
    EXPECT_EQ(journal.value().checkpoint, staging_.uuid);
    journal_ = journal.value();
    return Resolve(HostFileSystem(), directory_, journal_, tensors);
  }
  std::vector<StagedExtent> Extents() const {
    std::vector<StagedExtent> extents;
    for (const JournalRecord& record : journal_.records) {
      if (record.kind == JournalRecord::Kind::kExtent) extents.push_back(record.extent);
    }
    return extents;
  }
  std::uint64_t JournalSize() const {
    const Result<FileInfo> info = HostFileSystem().Stat(JournalPath(staging_));
    return info.ok() ? info.value().size : 0;
  }

  TempDir dir_;
  int number_ = 0;
  std::string directory_;
  Staging staging_;
  std::shared_ptr<StagingWriter> writer_;
  Journal journal_;
};

// ---- Against a model --------------------------------------------------------------------------

struct ModelTarget {
  std::string name;
  std::shared_ptr<TargetWriter> target;
  KnownBytes now;
  KnownBytes recorded;
  std::uint64_t next = 0;  // Where the last write ended.
};
struct ModelObject {
  Dims index;
  std::shared_ptr<BlobWriter> blob;
  std::string now;
};

class ModelRun {
 public:
  ModelRun(Random& random, StagingWriter& writer, const std::vector<TensorMeta>& tensors)
      : random_(random), writer_(writer) {
    for (const TensorMeta& meta : tensors) {
      Add(meta, Box::Whole(meta.shape()));
      for (int i = 0; i < 2; ++i) {
        Dims begin = Dims::Filled(meta.shape().rank(), 0);
        Dims extent = meta.shape();
        for (int a = 0; a < extent.rank(); ++a) {
          if (!random.OneIn(a == 0 ? 1 : 2)) continue;
          begin[a] = random.Int(0, extent[a] / 4);
          extent[a] = random.Int(extent[a] * 7 / 10, extent[a] - begin[a]);
        }
        Add(meta, Box::Make(begin, extent).value());
      }
    }
  }

  void Step() {
    switch (random_.Int(0, 11)) {
      case 0:
        return Sync(Any());
      case 1:
        return ForgetSome(Any());
      case 2:
        return SyncAll();
      case 3:
      case 4:
        return ChangeObject();
      case 5:
        return Strided(Any());
      case 6:
        return Sequential(Any());
      case 7:
        return CheckRead(Any());
      default:
        return WriteSome(Any());
    }
  }

  void SyncAll() {
    ASSERT_OK(writer_.SyncAll());
    for (ModelTarget& t : targets_) t.recorded = t.now;
    recorded_objects_.clear();
    for (const auto& [name, object] : objects_) recorded_objects_[name] = object.now;
  }

  void CheckAll() {
    for (ModelTarget& t : targets_) {
      EXPECT_EQ(t.target->written_bytes(), t.now.count());
      EXPECT_EQ(t.target->WrittenRanges(), t.now.Ranges());
    }
    EXPECT_EQ(writer_.Objects().size(), objects_.size());
    for (const auto& [name, object] : objects_) {
      std::string read(object.now.size() + 10, '\0');
      EXPECT_EQ(object.blob->size(), object.now.size());
      ASSERT_OK_AND_ASSIGN(const std::size_t n, object.blob->Read(0, read.data(), read.size()));
      EXPECT_TRUE(read.substr(0, n) == object.now) << name;
    }
  }

  void CheckRecorded(const StagedInventory& inventory) const {
    for (const ModelTarget& t : targets_) {
      const auto at = inventory.targets.find(t.name);
      if (at == inventory.targets.end()) {
        EXPECT_EQ(t.recorded.count(), 0u) << t.name;
      } else {
        EXPECT_TRUE(at->second == t.recorded) << t.name;
      }
    }
    EXPECT_EQ(inventory.objects, recorded_objects_);
  }

 private:
  void Add(const TensorMeta& meta, const Box& box) {
    const auto target = writer_.OpenTarget(meta, box);
    ASSERT_OK(target);
    ModelTarget t;
    t.name = TargetName(meta.key(), box);
    t.target = target.value();
    t.now = t.recorded = KnownBytes(t.target->size());
    for (const ModelTarget& other : targets_) {
      if (other.name == t.name) return;
    }
    targets_.push_back(std::move(t));
  }
  ModelTarget& Any() {
    return targets_[static_cast<std::size_t>(
        random_.Int(0, static_cast<std::int64_t>(targets_.size()) - 1))];
  }
  std::uint64_t Below(std::uint64_t n) { return n == 0 ? 0 : random_.Next() % n; }

  void Write(ModelTarget& t, std::uint64_t at, std::uint64_t n) {
    n = std::min(n, t.target->size() - at);
    const std::string data = random_.Bytes(n);
    ASSERT_OK(t.target->Write(at, data.data(), n));
    t.now.Write(at, data);
    t.next = at + n;
  }
  void WriteSome(ModelTarget& t) {
    const std::uint64_t sizes[] = {1, 100, 5'000, 70'000, 300'000, t.target->size()};
    Write(t, Below(t.target->size()), 1 + Below(sizes[Below(6)]));
  }
  void Strided(ModelTarget& t) {
    const std::uint64_t n = 1 + Below(3000);
    const std::uint64_t stride = n + Below(4000);
    std::uint64_t at = Below(t.target->size());
    for (std::uint64_t i = Below(40); i > 0 && at + n <= t.target->size(); --i, at += stride) {
      Write(t, at, n);
    }
  }
  void Sequential(ModelTarget& t) {
    std::uint64_t at = random_.OneIn(2) ? 0 : t.next;
    const std::uint64_t n = 1 + Below(random_.OneIn(2) ? 8192 : 200'000);
    for (std::uint64_t i = Below(20); i > 0 && at < t.target->size(); --i, at = t.next) {
      Write(t, at, n);
    }
  }
  void ForgetSome(ModelTarget& t) {
    const std::uint64_t begin = Below(t.target->size());
    const std::uint64_t end = begin + Below(t.target->size() - begin + 1);
    ASSERT_OK(t.target->Forget({begin, end}));
    t.now.Forget(begin, end);
    t.recorded.Forget(begin, end);
  }
  void Sync(ModelTarget& t) {
    ASSERT_OK(t.target->Sync());
    t.recorded = t.now;
  }
  void CheckRead(ModelTarget& t) {
    const std::uint64_t at = Below(t.target->size());
    const std::uint64_t n = std::min(1 + Below(20'000), t.target->size() - at);
    std::string read(n, '\0');
    const Result<std::size_t> got = t.target->Read(at, read.data(), n);
    if (t.now.known.substr(at, n) == std::string(n, '\1')) {
      EXPECT_THAT(got, IsOkAndHolds(n));
      EXPECT_TRUE(read == t.now.bytes.substr(at, n));
    } else {
      EXPECT_EQ(got.status().ToErrno(), ENODATA);
    }
  }

  void ChangeObject() {
    const Dims index = random_.OneIn(2) ? Dims{} : Dims{random_.Int(0, 2)};
    const std::string name = ObjectName("o", index);
    const auto at = objects_.find(name);
    if (at == objects_.end()) {
      EXPECT_THAT(writer_.OpenObject("o", index, false), HasCode(Code::kNotFound));
      ASSERT_OK_AND_ASSIGN(auto blob, writer_.OpenObject("o", index, true));
      objects_[name] = {index, std::move(blob), ""};
      return;
    }
    ModelObject& o = at->second;
    const std::uint64_t limit = random_.OneIn(8) ? 6'000'000 : 100'000;
    switch (random_.Int(0, 6)) {
      case 0: {
        const std::uint64_t size = random_.OneIn(3) ? 0 : Below(limit);
        ASSERT_OK(o.blob->Truncate(size));
        o.now.resize(size, '\0');
        break;
      }
      case 1:
        ASSERT_OK(o.blob->Sync());
        recorded_objects_[name] = o.now;
        break;
      case 2:
        if (!random_.OneIn(4)) break;
        ASSERT_OK(writer_.RemoveObject("o", o.index));
        recorded_objects_.erase(name);
        objects_.erase(name);
        break;
      case 3: {
        const std::string data = random_.Bytes(Below(5000));
        ASSERT_OK_AND_ASSIGN(const std::uint64_t where, o.blob->Append(data.data(), data.size()));
        EXPECT_EQ(where, o.now.size());
        o.now += data;
        break;
      }
      default: {
        const std::uint64_t offset = Below(limit);
        const std::string data = random_.Bytes(1 + Below(20'000));
        ASSERT_OK(o.blob->Write(offset, data.data(), data.size()));
        o.now.resize(std::max<std::size_t>(o.now.size(), offset + data.size()), '\0');
        o.now.replace(offset, data.size(), data);
      }
    }
  }

  Random& random_;
  StagingWriter& writer_;
  std::vector<ModelTarget> targets_;
  std::map<std::string, ModelObject> objects_;
  std::map<std::string, std::string> recorded_objects_;
};

TEST_F(StagingWriterTest, JournalRecordsExactlyTheSyncedBytes) {
  Random random(TestSeed());
  for (int i = 0; i < TestScale(16); ++i) {
    SCOPED_TRACE(i);
    Restart();
    std::vector<TensorMeta> tensors = {
        Meta("a", DType::kF32, {random.Int(1, 40), random.Int(1, 40), random.Int(1, 20)}),
        Meta("b", DType::kU8, {random.Int(1, 200'000)}), Meta("scalar", DType::kF64, {})};
    if (i % 4 == 0) {
      // Large: a file for the tensor, and one of its own for what is not a run.
      tensors = {Meta("large", DType::kBF16, {random.Int(1400, 1600), 2048})};
    }
    ModelRun run(random, *writer_, tensors);
    for (int step = 0; step < 60 && !HasFailure(); ++step) run.Step();
    run.CheckAll();
    // The program ends here: what is in the files is what was recorded.
    if (JournalSize() > 0) run.CheckRecorded(Read(tensors));
    run.SyncAll();
    run.CheckRecorded(Read(tensors));
    if (HasFailure()) return;
  }
}

// ---- Where bytes go ---------------------------------------------------------------------------

TEST_F(StagingWriterTest, OrderedSmallWritesFillTheTensorFile) {
  const TensorMeta meta = Meta("w", DType::kU8, {5 << 20});
  ASSERT_OK_AND_ASSIGN(const auto target, writer_->OpenTarget(meta, Box::Whole(meta.shape())));
  Random random(TestSeed());
  const std::string data = random.Bytes(5 << 20);
  for (std::size_t at = 0; at < data.size(); at += 4096) {
    ASSERT_OK(target->Write(at, data.data() + at, 4096));
  }
  ASSERT_OK(target->Sync());
  EXPECT_EQ(Read({meta}).extents, 1u);
  const StagedExtent extent = Extents()[0];
  EXPECT_EQ(extent.offset, 0u);
  const auto file = std::ranges::find_if(journal_.records, [&](const JournalRecord& r) {
    return r.kind == JournalRecord::Kind::kFile && r.number == extent.file;
  });
  EXPECT_EQ(file->placement, Placement::kTensorFile);
  EXPECT_TRUE(ReadWholeFile(directory_ + "/" + file->file_name) == data);
  // A first piece that came alone, and then long ones.
  const TensorMeta second = Meta("v", DType::kU8, {5 << 20});
  ASSERT_OK_AND_ASSIGN(const auto other, writer_->OpenTarget(second, Box::Whole(second.shape())));
  ASSERT_OK(other->Write(0, data.data(), 100));
  ASSERT_OK(other->Write(100, data.data() + 100, data.size() - 100));
  ASSERT_OK(other->Sync());
  EXPECT_EQ(Read({meta, second}).extents, 2u);
}

TEST_F(StagingWriterTest, ColumnsBecomeOneRecordOfRuns) {
  const TensorMeta meta = Meta("w", DType::kBF16, {1024, 4096});
  ASSERT_OK_AND_ASSIGN(const auto target, writer_->OpenTarget(meta, Box::Whole(meta.shape())));
  Random random(TestSeed());
  KnownBytes want(target->size());
  for (std::uint64_t row = 0; row < 1024; ++row) {
    const std::string data = random.Bytes(2048);
    ASSERT_OK(target->Write(row * 8192 + 4096, data.data(), data.size()));
    want.Write(row * 8192 + 4096, data);
  }
  ASSERT_OK(target->Sync());
  const StagedInventory inventory = Read({meta});
  EXPECT_TRUE(inventory.targets.begin()->second == want);
  ASSERT_EQ(Extents().size(), 1u);
  EXPECT_EQ(Extents()[0].runs, 1024u);
  EXPECT_EQ(Extents()[0].length, 2048u);
  EXPECT_EQ(Extents()[0].stride, 8192u);
  EXPECT_LT(JournalSize(), 2048u);
}

TEST_F(StagingWriterTest, OverlappingTargetsKeepTheirOwnBytes) {
  const TensorMeta meta = Meta("w", DType::kU8, {3000, 4096});
  const Box upper = Box::Make({0, 0}, {1500, 4096}).value();
  const Box middle = Box::Make({1000, 0}, {1100, 4096}).value();
  const Box lower = Box::Make({1500, 0}, {1500, 4096}).value();
  Random random(TestSeed());
  std::map<std::string, KnownBytes> want;
  for (const Box& box : {upper, middle, lower}) {
    ASSERT_OK_AND_ASSIGN(const auto target, writer_->OpenTarget(meta, box));
    const std::string data = random.Bytes(target->size());
    ASSERT_OK(target->Write(0, data.data(), data.size()));
    KnownBytes& bytes = want.try_emplace(TargetName("w", box), data.size()).first->second;
    bytes.Write(0, data);
    ASSERT_OK(target->Sync());
  }
  EXPECT_TRUE(Read({meta}).targets == want);
}

TEST_F(StagingWriterTest, HundredThousandTinyWritesKeepTheJournalSmall) {
  // A file of its own, of over 4 MiB.
  constexpr std::size_t kRows = Amount(100'000u, 17'500u);
  constexpr std::size_t kRow = Amount(64u, 256u);
  const TensorMeta meta = Meta("w", DType::kU8, {std::int64_t{kRows}, std::int64_t{kRow}});
  ASSERT_OK_AND_ASSIGN(const auto target, writer_->OpenTarget(meta, Box::Whole(meta.shape())));
  std::vector<std::uint64_t> rows(kRows);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = i;
  Random random(TestSeed());
  random.Shuffle(rows);
  // Large blocks are mapped by themselves, or not: that depends on what the program did before.
  const auto heap = [] {
    const struct mallinfo2 info = mallinfo2();
    return kSanitized ? std::size_t{0} : info.uordblks + info.hblkhd;
  };
  const std::size_t before = heap();
  const std::string data = random.Bytes(rows.size() * 32);
  KnownBytes want(target->size());
  const std::size_t bytes_of_test = data.size() + 2 * want.bytes.size();
  for (const std::uint64_t row : rows) {
    ASSERT_OK(target->Write(row * kRow + 16, data.data() + row * 32, 32));
    want.Write(row * kRow + 16, std::string_view(data).substr(row * 32, 32));
  }
  const std::size_t after = heap();
  if (after > 0) {
    EXPECT_LT(after, before + bytes_of_test + rows.size() * 100);
  }
  ASSERT_OK(target->Sync());
  // In no order at all: a record for each.
  EXPECT_LT(JournalSize(), rows.size() * 110);
  // In order: one for all.
  const std::uint64_t journal = JournalSize();
  for (std::uint64_t row = 0; row < rows.size(); ++row) {
    ASSERT_OK(target->Write(row * kRow, data.data() + row * 32, 16));
    want.Write(row * kRow, std::string_view(data).substr(row * 32, 16));
  }
  ASSERT_OK(target->Sync());
  EXPECT_LT(JournalSize() - journal, 4096u);
  const std::string read = [&] {
    std::string out(32, '\0');
    EXPECT_OK(target->Read(kRows / 9 * kRow + 16, out.data(), out.size()));
    return out;
  }();
  EXPECT_EQ(read, want.bytes.substr(kRows / 9 * kRow + 16, 32));
  EXPECT_EQ(target->written_bytes(), want.count());
}

TEST_F(StagingWriterTest, InvalidTargetsAreRefused) {
  const TensorMeta meta = Meta("w", DType::kF32, {4, 4});
  EXPECT_EQ(writer_->journal_name(), "");
  EXPECT_THAT(writer_->OpenTarget(meta, Box::Whole({5, 4})), HasCode(Code::kInvalidArgument));
  ASSERT_OK_AND_ASSIGN(const auto target, writer_->OpenTarget(meta, Box::Whole({4, 4})));
  ASSERT_OK_AND_ASSIGN(const auto same, writer_->OpenTarget(meta, Box::Whole({4, 4})));
  EXPECT_EQ(target, same);
  const std::string data(64, 'x');
  EXPECT_EQ(target->Write(1, data.data(), 64).ToErrno(), EFBIG);
  EXPECT_EQ(target->Write(~std::uint64_t{0}, data.data(), 64).ToErrno(), EFBIG);
  char byte = 0;
  EXPECT_EQ(target->Read(0, &byte, 1).status().ToErrno(), ENODATA);
  EXPECT_THAT(target->Read(64, &byte, 1), IsOkAndHolds(0u));
  EXPECT_EQ(writer_->files(), 0u);  // Nothing was made so far.
  ASSERT_OK(target->Write(0, data.data(), 64));
  ASSERT_OK_AND_ASSIGN(const auto blob, writer_->OpenObject("o", {}, true));
  EXPECT_EQ(blob->Write(~std::uint64_t{0} - 5, data.data(), 64).ToErrno(), EFBIG);
  ASSERT_OK(blob->Write(0, data.data(), 64));
  ASSERT_OK(writer_->SyncAll());
  EXPECT_EQ(writer_->journal_name(), std::string(kTestIncarnation) + ".tmj");
  EXPECT_EQ(Read({meta}).objects.at("o[]"), data);
  EXPECT_LE(writer_->journal_bytes(), journal_.bytes);
  target->Condemn("it may not");
  EXPECT_EQ(Read({meta}).condemned, std::vector<std::string>{"w[0:4, 0:4]"});
  writer_->CloseForGood();
  EXPECT_THAT(target->Write(0, data.data(), 64), HasCode(Code::kStale));
  EXPECT_THAT(target->Sync(), HasCode(Code::kStale));
  EXPECT_THAT(target->Forget({0, 4}), HasCode(Code::kStale));
  EXPECT_THAT(target->Read(0, &byte, 1), HasCode(Code::kStale));
  EXPECT_THAT(blob->Write(0, data.data(), 64), HasCode(Code::kStale));
  EXPECT_THAT(blob->Sync(), HasCode(Code::kStale));
  EXPECT_THAT(writer_->SyncAll(), HasCode(Code::kStale));
  EXPECT_THAT(writer_->OpenObject("p", {}, true), HasCode(Code::kStale));
}

}  // namespace
}  // namespace tensormount::fs
