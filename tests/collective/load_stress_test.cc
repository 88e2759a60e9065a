// SPDX-License-Identifier: Apache-2.0
// Random tensors, cuts, rules, groups and ways, one load after the other on the same communicator;
// every byte of every buffer, gaps too, must be what a copy cell by cell says. Then a stored byte
// is flipped.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tensormount/load.h"

#include "collective/save_load.h"
#include "shard/convert.h"
#include "tests/collective/load_testing.h"
#include "tests/collective/save_testing.h"
#include "tests/support/random.h"
#include "tests/support/random_layout.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

// One tensor as a load asks for it.
struct Asked {
  RandomTensor tensor;  // With what a buffer holds after the load: 0xA5 where nothing is stored.
  Partition regions;
};

// How one load is called, and what it must leave.
struct Call {
  LoadOptions options;
  std::vector<int> groups;
  std::vector<Asked> asked;
  std::uint64_t seed = 0;  // Of the memory.
};

DType OtherType(Random& random, DType from) {
  std::vector<DType> to;
  for (const DType type : {DType::kI64, DType::kF32, DType::kF64, DType::kBF16, DType::kF8E4M3}) {
    // From bytes at random, only what always fits.
    const bool fits = type != DType::kI64 || (from != DType::kU64 && from != DType::kI64);
    if (type != from && fits && CanConvert(from, type).ok()) to.push_back(type);
  }
  return to.empty() ? from : random.Pick(to);
}

Asked MakeAsked(Random& random, const RandomTensor& stored, const LoadRule& rule, int ranks) {
  Asked asked;
  RandomTensor& t = asked.tensor;
  t.key = stored.key;
  t.dtype = rule.convert_dtype && random.OneIn(2) ? OtherType(random, stored.dtype) : stored.dtype;
  t.shape = stored.shape;
  for (int a = 0; a < t.shape.rank(); ++a) {
    if (rule.allow_shrink && t.shape[a] > 0 && random.OneIn(3)) {
      t.shape[a] = random.Int(0, t.shape[a]);
    } else if (rule.grow != LoadRule::Grow::kError && random.OneIn(3)) {
      t.shape[a] += random.Int(1, 3);
    }
  }
  const auto cells = static_cast<std::size_t>(CheckedProduct(t.shape).value());
  const std::size_t size = t.element_bytes();
  t.bytes.assign(cells * size, rule.grow == LoadRule::Grow::kZero ? '\0' : '\xA5');
  for (std::size_t i = 0; i < cells; ++i) {
    auto rest = static_cast<std::int64_t>(i);
    std::int64_t from = 0;
    std::int64_t step = 1;
    bool in = true;
    for (int a = t.shape.rank() - 1; a >= 0; --a) {
      const std::int64_t at = rest % t.shape[a];
      rest /= t.shape[a];
      in = in && at < stored.shape[a];
      from += at * step;
      step *= stored.shape[a];
    }
    if (!in) continue;
    const auto* src = reinterpret_cast<const std::byte*>(stored.bytes.data()) +
                      static_cast<std::size_t>(from) * stored.element_bytes();
    auto* dst = reinterpret_cast<std::byte*>(t.bytes.data()) + i * size;
    if (t.dtype == stored.dtype) {
      std::memcpy(dst, src, size);
    } else {
      EXPECT_FALSE(ConvertElements(stored.dtype, src, t.dtype, dst, 0, 1).has_value());
    }
  }
  asked.regions = RandomRequest(random, t.shape, ranks, random.OneIn(2));
  return asked;
}

Call MakeCall(Random& random, const std::vector<RandomTensor>& stored, int ranks) {
  Call call;
  call.options.not_requested = Strict::kIgnore;
  const std::vector<LoadVerify> verifies = {LoadVerify::kOff, LoadVerify::kAuto, LoadVerify::kEnd,
                                            LoadVerify::kLeaves};
  const std::vector<LoadPath> paths = {LoadPath::kAuto, LoadPath::kDirect, LoadPath::kExchange,
                                       LoadPath::kExchange};
  call.options.verify = random.Pick(verifies);
  call.options.path = random.Pick(paths);
  const std::int64_t groups = random.Int(1, 3);
  for (int r = 0; r < ranks; ++r) call.groups.push_back(static_cast<int>(random.Int(1, groups)));
  call.seed = random.Next();
  for (const RandomTensor& tensor : stored) {
    LoadRule rule;
    if (random.OneIn(2)) {
      rule.allow_shrink = random.OneIn(2);
      rule.grow = static_cast<LoadRule::Grow>(random.Int(0, 2));
      rule.convert_dtype = random.OneIn(2);
      call.options.rules.push_back({tensor.key, rule});
    }
    if (random.OneIn(6)) continue;
    call.asked.push_back(MakeAsked(random, tensor, rule, ranks));
  }
  return call;
}

// The memory of one rank's shards, in the order of its request.
std::vector<ShardMemory> MemoryOf(const Call& call, int rank, bool filled) {
  Random random(call.seed + static_cast<std::uint64_t>(rank));
  std::vector<ShardMemory> memory;
  for (const Asked& asked : call.asked) {
    for (const Region& region : asked.regions[static_cast<std::size_t>(rank)]) {
      memory.push_back(MakeShardMemory(random, asked.tensor, region, filled));
    }
  }
  return memory;
}

struct Loaded {
  Status status;
  LoadReport report;
  std::string wrong;
};

Loaded LoadOnce(const Call& call, const std::string& path, Communicator& comm) {
  const int rank = comm.rank();
  std::vector<ShardMemory> memory = MemoryOf(call, rank, false);
  StateDict request;
  std::size_t at = 0;
  for (const Asked& asked : call.asked) {
    for (const Region& region : asked.regions[static_cast<std::size_t>(rank)]) {
      EXPECT_OK(
          request.AddTensor(asked.tensor.key, {asked.tensor.shape, region, memory[at++].view}));
    }
  }
  LoadOptions options = call.options;
  options.exchange_group = call.groups[static_cast<std::size_t>(rank)];
  Loaded loaded;
  Result<LoadReport> result = LoadOn(HostFileSystem(), request, path, comm, options);
  loaded.status = result.status();
  if (!result.ok()) return loaded;
  loaded.report = std::move(result).value();
  const std::vector<ShardMemory> expected = MemoryOf(call, rank, true);
  for (std::size_t i = 0; i < memory.size(); ++i) {
    if (memory[i].memory == expected[i].memory) continue;
    loaded.wrong += request.tensors()[i].key + " " + memory[i].region.ToString() + " differs; ";
  }
  const LoadReport& report = loaded.report;
  if (report.bytes_by_leaf + report.bytes_by_digest + report.bytes_unverified !=
      report.bytes_wanted) {
    loaded.wrong += "verified bytes do not add up; ";
  }
  if (options.verify != LoadVerify::kOff && report.bytes_unverified != 0) {
    loaded.wrong += "bytes not verified; ";
  }
  if (report.peak_buffer_bytes > (12u << 20)) loaded.wrong += "too much memory; ";
  return loaded;
}

// Loads on all threads, each call twice; results by load and rank.
std::vector<std::vector<Loaded>> LoadAll(const std::vector<Call>& calls, const std::string& path,
                                         int ranks) {
  std::vector<std::vector<Loaded>> all(2 * calls.size(),
                                       std::vector<Loaded>(static_cast<std::size_t>(ranks)));
  EXPECT_OK(RunOnThreads(ranks, [&](Communicator& comm) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      // In turn, so that plans are kept while others are made.
      all[i][static_cast<std::size_t>(comm.rank())] = LoadOnce(calls[i % calls.size()], path, comm);
    }
    return Status();
  }));
  return all;
}

void ExpectOneVerdict(const std::vector<Loaded>& ranks) {
  for (const Loaded& rank : ranks) {
    EXPECT_EQ(rank.status.ToString(), ranks[0].status.ToString());
  }
}

TEST(LoadStress, RandomLoadsMatchTheCellModel) {
  const int cases = TestScale(6);
  for (int n = 0; n < cases; ++n) {
    SCOPED_TRACE("case " + std::to_string(n));
    Random random(TestSeed() + static_cast<std::uint64_t>(n) * 1000003);
    TempDir dir;
    const std::string path = dir.Join("store/step");
    std::vector<RandomTensor> tensors;
    for (int t = 0; t < 4; ++t) {
      const std::uint64_t most = random.OneIn(6) ? 400'000 : 20'000;
      tensors.push_back(MakeRandomTensor(random, "t" + std::to_string(t), most));
    }
    const int savers = static_cast<int>(random.Int(1, 4));
    std::vector<Partition> parts;
    for (const RandomTensor& tensor : tensors) {
      parts.push_back(RandomPartition(random, tensor.shape, savers));
    }
    ASSERT_OK(OneVerdict(SaveOnThreads(path, savers, [&](int rank, RankState& state) {
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        for (const Region& region : parts[t][static_cast<std::size_t>(rank)]) {
          state.Add(tensors[t], region);
        }
      }
    })));
    const int ranks = static_cast<int>(random.Int(1, 5));
    std::vector<Call> calls;
    for (int c = 0; c < 4; ++c) calls.push_back(MakeCall(random, tensors, ranks));
    const auto all = LoadAll(calls, path, ranks);
    for (std::size_t i = 0; i < all.size(); ++i) {
      ExpectOneVerdict(all[i]);
      for (std::size_t r = 0; r < all[i].size(); ++r) {
        const Loaded& loaded = all[i][r];
        EXPECT_OK(loaded.status) << "load " << i;
        EXPECT_EQ(loaded.wrong, "") << "load " << i << " rank " << r << " verify "
                                    << static_cast<int>(calls[i % 4].options.verify) << " path "
                                    << static_cast<int>(calls[i % 4].options.path);
        if (loaded.status.ok()) {
          EXPECT_EQ(loaded.report.plan_reused, i >= calls.size());
        }
      }
    }
    // A damaged byte is found, or nobody asked for it.
    const std::vector<std::string> files = DataFiles(path);
    if (files.empty()) continue;
    const std::string& file = files[static_cast<std::size_t>(random.Next() % files.size())];
    const std::size_t length = ReadWholeFile(file).size();
    if (length == 0) continue;
    FlipByte(file, random.Next() % length);
    std::erase_if(calls, [](const Call& c) { return c.options.verify == LoadVerify::kOff; });
    if (calls.empty()) continue;
    for (const std::vector<Loaded>& load : LoadAll(calls, path, ranks)) {
      ExpectOneVerdict(load);
      for (const Loaded& loaded : load) {
        if (!loaded.status.ok()) {
          EXPECT_THAT(loaded.status, HasCode(Code::kDataLoss));
        }
        EXPECT_EQ(loaded.wrong, "");
      }
    }
  }
}

}  // namespace
}  // namespace tensormount
