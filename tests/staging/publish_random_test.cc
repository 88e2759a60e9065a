// SPDX-License-Identifier: Apache-2.0
// Several mounts write random ranges of random boxes over each other, forget some, and what is
// published must be what a byte by byte model says.

#include <optional>

#include "index/store/store_moves.h"
#include "shard/box_access.h"
#include "tests/staging/staging_test_support.h"
#include "tests/support/random.h"

namespace tensormount::fs {
namespace {

struct RandomTarget {
  Box box;
  Box bytes_box;
  std::uint32_t number = 0;
  std::vector<std::size_t> cells;  // Byte of the tensor at each packed byte.
  std::vector<int> sequence;       // 0: not written.
  std::string values;
};

struct ModelMount {
  explicit ModelMount(TestMount m) : mount(std::move(m)) {}
  TestMount mount;
  std::vector<RandomTarget> targets;
  int next = 0;
};

class Case {
 public:
  Case(Random& random, const TensorMeta& meta, std::vector<ModelMount>& mounts)
      : random_(random), meta_(meta), mounts_(mounts), truth_(random.Bytes(Size(meta.bytes()))) {
    for (ModelMount& m : mounts_) {
      m.targets.clear();
      const auto n = random_.Int(1, 4);
      for (int i = 0; i < n; ++i) AddTarget(m, i == 0);
    }
  }
  const std::string& truth() const { return truth_; }

  void Run() {
    const auto writes = random_.Int(0, 24);
    for (int i = 0; i < writes; ++i) {
      ModelMount& m = Pick(mounts_);
      RandomTarget& t = Pick(m.targets);
      const std::uint64_t size = t.cells.size();
      const std::uint64_t begin = static_cast<std::uint64_t>(random_.Int(0, Last(size)));
      const std::uint64_t length =
          static_cast<std::uint64_t>(random_.Int(1, static_cast<std::int64_t>(size - begin)));
      if (random_.OneIn(6)) {
        m.mount.Forget(t.number, begin, begin + length);
        for (std::uint64_t b = begin; b < begin + length; ++b) t.sequence[b] = 0;
      } else if (random_.OneIn(4)) {
        WriteRuns(m, t);
      } else {
        Write(m, t, begin, length, random_.OneIn(3));
      }
    }
    // What is wrong is written over, what nobody has is written by somebody.
    for (ModelMount& m : mounts_) {
      ForEachRange(
          [&](std::size_t cell) {
            const auto got = Live(m, cell);
            return got && *got != truth_[cell];
          },
          m);
    }
    ForEachRange(
        [&](std::size_t cell) {
          for (ModelMount& m : mounts_) {
            if (Live(m, cell)) return false;
          }
          return true;
        },
        Pick(mounts_));
  }

 private:
  static std::size_t Size(std::uint64_t v) { return static_cast<std::size_t>(v); }
  static std::int64_t Last(std::uint64_t size) { return static_cast<std::int64_t>(size) - 1; }
  template <typename T>
  T& Pick(std::vector<T>& items) {
    return items[static_cast<std::size_t>(random_.Next() % items.size())];
  }

  void AddTarget(ModelMount& m, bool whole) {
    Box box = Box::Whole(meta_.shape());
    for (int attempt = 0; !whole && attempt < 8; ++attempt) {
      Box tried = box;
      for (int a = 0; a < box.rank(); ++a) {
        const std::int64_t begin = random_.Int(0, meta_.shape()[a] - 1);
        tried = BoxAccess::WithAxis(tried, a, begin, random_.Int(1, meta_.shape()[a] - begin));
      }
      if (!ByteRegion(meta_.dtype(), meta_.shape(), Region(tried)).ok()) continue;
      box = tried;
      break;
    }
    RandomTarget t;
    t.box = box;
    t.bytes_box = ByteRegion(meta_.dtype(), meta_.shape(), Region(box)).value().box();
    t.number = m.mount.Target(meta_, box);
    const Dims shape = ByteShape(meta_.dtype(), meta_.shape());
    Dims at = Dims::Filled(shape.rank(), 0);
    for (std::int64_t i = 0; i < t.bytes_box.volume(); ++i) {
      std::int64_t linear = 0;
      for (int a = 0; a < shape.rank(); ++a) {
        linear = linear * shape[a] + t.bytes_box.begin(a) + at[a];
      }
      t.cells.push_back(static_cast<std::size_t>(linear));
      for (int a = shape.rank() - 1; a >= 0; --a) {
        if (++at[a] < t.bytes_box.extent(a)) break;
        at[a] = 0;
      }
    }
    t.sequence.assign(t.cells.size(), 0);
    t.values.assign(t.cells.size(), '\0');
    m.targets.push_back(std::move(t));
  }

  char ValueFor(std::size_t cell, bool garbage) {
    return garbage ? static_cast<char>(random_.Next()) : truth_[cell];
  }
  void Put(ModelMount& m, RandomTarget& t, std::uint64_t at, char value) {
    t.sequence[at] = m.next;
    t.values[at] = value;
  }

  void Write(ModelMount& m, RandomTarget& t, std::uint64_t begin, std::uint64_t length,
             bool garbage) {
    std::string bytes;
    ++m.next;
    for (std::uint64_t b = begin; b < begin + length; ++b) {
      bytes.push_back(ValueFor(t.cells[b], garbage));
      Put(m, t, b, bytes.back());
    }
    m.mount.Write(t.number, begin, bytes);
  }

  void WriteRuns(ModelMount& m, RandomTarget& t) {
    const std::uint64_t size = t.cells.size();
    // Often the distance of rows, sometimes any.
    std::uint64_t stride = static_cast<std::uint64_t>(random_.Int(2, 40));
    if (!random_.OneIn(4)) {
      stride = 1;
      const int axis = static_cast<int>(random_.Int(1, t.bytes_box.rank()));
      for (int a = t.bytes_box.rank() - 1; a >= t.bytes_box.rank() - axis; --a) {
        stride *= static_cast<std::uint64_t>(t.bytes_box.extent(a));
      }
    }
    const std::uint64_t begin = static_cast<std::uint64_t>(random_.Int(0, Last(size)));
    if (stride < 2) return;
    const std::uint64_t length =
        static_cast<std::uint64_t>(random_.Int(1, static_cast<std::int64_t>(stride) - 1));
    if (begin + length > size) return;
    const std::uint64_t most = (size - begin - length) / stride + 1;
    const std::uint64_t runs =
        static_cast<std::uint64_t>(random_.Int(1, static_cast<std::int64_t>(most)));
    std::string bytes;
    ++m.next;
    const bool garbage = random_.OneIn(3);
    for (std::uint64_t r = 0; r < runs; ++r) {
      for (std::uint64_t i = 0; i < length; ++i) {
        const std::uint64_t at = begin + r * stride + i;
        bytes.push_back(ValueFor(t.cells[at], garbage));
        Put(m, t, at, bytes.back());
      }
    }
    m.mount.WriteRuns(t.number, begin, length, runs, stride, bytes);
  }

  std::optional<char> Live(const ModelMount& m, std::size_t cell) const {
    int best = 0;
    char value = 0;
    for (const RandomTarget& t : m.targets) {
      for (std::size_t i = 0; i < t.cells.size(); ++i) {
        if (t.cells[i] != cell || t.sequence[i] <= best) continue;
        best = t.sequence[i];
        value = t.values[i];
      }
    }
    if (best == 0) return std::nullopt;
    return value;
  }

  // Writes the truth of each run of cells that `wanted` says, through the whole tensor.
  template <typename Wanted>
  void ForEachRange(Wanted wanted, ModelMount& by) {
    for (std::size_t cell = 0; cell < truth_.size();) {
      if (!wanted(cell)) {
        ++cell;
        continue;
      }
      std::size_t end = cell + 1;
      while (end < truth_.size() && wanted(end)) ++end;
      Write(by, by.targets[0], cell, end - cell, false);
      cell = end;
    }
  }

  Random& random_;
  const TensorMeta& meta_;
  std::vector<ModelMount>& mounts_;
  const std::string truth_;
};

class PublishRandomTest : public StagingTest {};

TEST_F(PublishRandomTest, PublishedCheckpointsMatchTheModel) {
  const Store store = MakeStore();
  Random random(TestSeed());
  const DType types[] = {DType::kU8,   DType::kBF16, DType::kF32,
                         DType::kC128, DType::kF4,   DType::kF6E2M3};
  const int cases = TestScale(12);
  for (int i = 0; i < cases; ++i) {
    SCOPED_TRACE("case " + std::to_string(i));
    const std::string name = "step-" + std::to_string(i);
    std::vector<TensorMeta> metas;
    std::string schema;
    const auto tensors = random.Int(2, 6);
    for (int t = 0; t < tensors; ++t) {
      const DType dtype = types[random.Next() % std::size(types)];
      Dims shape;
      for (std::int64_t left = random.Int(0, 3); left > 0; --left) {
        shape.push_back(random.Int(1, 6));
      }
      if (InfoOf(dtype).bits < 8) shape.push_back(random.OneIn(3) ? 4 : 8);
      if (random.OneIn(3) && InfoOf(dtype).bits == 4 && shape.rank() > 1) {
        shape[shape.rank() - 1] = 3;  // Rows that are no whole bytes: axes are joined.
        shape[shape.rank() - 2] = 2;
      }
      const std::string key = "t" + std::to_string(t);
      auto meta = TensorMeta::Make(key, dtype, shape);
      ASSERT_OK(meta);
      metas.push_back(meta.value());
      schema += (t > 0 ? ", " : "") + std::string("\"") + key + "\": {\"dtype\": \"" +
                std::string(InfoOf(dtype).name) + "\", \"shape\": " + shape.ToString() + "}";
    }
    const Staging staging = Make(store, name, "{\"tensors\": {" + schema + "}}");
    std::vector<ModelMount> mounts;
    for (std::int64_t m = random.Int(1, 3); m > 0; --m) {
      mounts.emplace_back(TestMount(fs(), staging, static_cast<std::uint64_t>(m)));
    }
    std::vector<std::string> truths;
    for (const TensorMeta& meta : metas) {
      for (ModelMount& m : mounts) m.next = 0;
      Case one(random, meta, mounts);
      one.Run();
      truths.push_back(one.truth());
    }
    for (ModelMount& m : mounts) ASSERT_OK(m.mount.Flush());
    StagingReport report;
    ASSERT_OK(PublishStaging(store, fs(), name, name, &report)) << report.ToText();
    for (std::size_t t = 0; t < metas.size(); ++t) {
      ASSERT_EQ(BytesOf(name, metas[t].key()), truths[t])
          << metas[t].key() << " " << InfoOf(metas[t].dtype()).name << " "
          << metas[t].shape().ToString();
    }
    ASSERT_TRUE(IsSound(name));
    ASSERT_OK(store_moves::SweepShared(fs(), InStore(name)));  // As gc does.
    EXPECT_THAT(NamesIn(InStore(name)),
                testing::ElementsAre("COMMIT", "data", "index", "manifest"));
    ASSERT_OK(store.Remove(name));
  }
  EXPECT_THAT(NamesIn(InStore(".staging")), testing::IsEmpty());
}

}  // namespace
}  // namespace tensormount::fs
