// SPDX-License-Identifier: Apache-2.0
#include "tests/collective/save_testing.h"

#include <array>
#include <cstdlib>

#include <gtest/gtest.h>

#include "base/hash.h"
#include "collective/layout/layout_exchange.h"
#include "index/read/checkpoint.h"
#include "tests/support/device_mode.h"
#include "tests/support/status_matchers.h"

namespace tensormount {

void RankState::Add(const RandomTensor& tensor, const Region& region, Random* strided) {
  if (strided != nullptr) {
    memory.push_back(MakeShardMemory(*strided, tensor, region, true));
  } else {
    ShardMemory packed;
    packed.region = region;
    const std::string bytes = OracleBytes(tensor, region);
    const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
    packed.memory.assign(data, data + bytes.size());
    packed.memory.resize(packed.memory.size() + 1);  // Never null.
    packed.view =
        BufferView::Host(tensor.dtype, static_cast<void*>(packed.memory.data()),
                         region.is_flat() ? Dims{region.volume()} : region.box().extent());
    memory.push_back(std::move(packed));
  }
  EXPECT_OK(dict.AddTensor(tensor.key, {tensor.shape, region, memory.back().view}));
}

std::vector<Result<SaveReport>> SaveOnThreads(const std::string& path, int ranks,
                                              const std::function<void(int, RankState&)>& fill,
                                              const SaveOptions& options,
                                              const std::function<FileSystem&(int)>& fs_of,
                                              const SaveControl& control) {
  // Owners in turn: as many as the job asks for (one), three, two.
  static int calls = 0;
  ForceOwners(std::array<std::uint32_t, 3>{0, 3, 2}[static_cast<std::size_t>(calls++ % 3)]);
  std::vector<RankState> states(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) fill(r, states[static_cast<std::size_t>(r)]);
  std::vector<Result<SaveReport>> results(static_cast<std::size_t>(ranks),
                                          Status(Code::kInternal, "did not run"));
  const Status ran = RunOnThreads(ranks, [&](Communicator& comm) {
    const auto r = static_cast<std::size_t>(comm.rank());
    FileSystem& fs = fs_of ? fs_of(comm.rank()) : HostFileSystem();
    const OnDevices state(states[r].dict);
    results[r] = SaveOn(fs, state.dict(), path, comm, options, control);
    return Status();
  });
  EXPECT_OK(ran);
  return results;
}

Status OneVerdict(const std::vector<Result<SaveReport>>& results) {
  for (const Result<SaveReport>& r : results) {
    EXPECT_EQ(r.status().ToString(), results[0].status().ToString());
  }
  return results[0].status();
}

RandomTensor MakeTensor(const std::string& key, DType dtype, const Dims& shape) {
  RandomTensor tensor;
  tensor.key = key;
  tensor.dtype = dtype;
  tensor.shape = shape;
  const auto bits = static_cast<std::uint64_t>(CheckedProduct(shape).value()) * InfoOf(dtype).bits;
  tensor.bytes = Random(Xxh3Low64(key)).Bytes(bits / 8);
  return tensor;
}

std::map<std::string, std::string> ReadAll(const std::string& path) {
  std::map<std::string, std::string> all;
  auto opened = OpenedCheckpoint::Open(HostFileSystem(), path, {});
  EXPECT_OK(opened);
  if (!opened.ok()) return all;
  const OpenedCheckpoint& checkpoint = *opened.value();
  EXPECT_OK(checkpoint.index().ForEachTensor(0, [&](const TensorEntry& entry) {
    std::string bytes(entry.meta.bytes(), '\0');
    ReadStats stats;
    EXPECT_OK(checkpoint.ReadBytes(entry, 0, bytes.data(), bytes.size(), ReadVerify::kExtendLeaves,
                                   &stats));
    EXPECT_EQ(stats.bytes_by_leaf, bytes.size()) << entry.meta.key();
    EXPECT_TRUE(entry.has_digest);
    EXPECT_EQ(entry.digest, Crc64Extend(0, bytes.data(), bytes.size())) << entry.meta.key();
    all[entry.meta.key()] = std::move(bytes);
    return true;
  }));
  return all;
}

std::vector<std::string> Inside(const std::string& store) {
  std::vector<std::string> inside;
  FileSystem& fs = HostFileSystem();
  const auto list = [&](const std::string& path) {
    auto entries = fs.List(path);
    return entries.ok() ? std::move(entries).value() : std::vector<DirectoryEntry>();
  };
  for (const DirectoryEntry& entry : list(store)) {
    if (entry.name == "store.json" || entry.name == ".generations") continue;
    if (entry.name == ".staging" || entry.name == ".trash" || entry.name == ".derived") {
      for (const DirectoryEntry& below : list(JoinPath(store, entry.name))) {
        // What an aborted save leaves for gc: its uuid, since when, and folders without data.
        const std::string path = JoinPath(JoinPath(store, entry.name), below.name);
        if (below.name.ends_with(".aborted.since")) continue;
        const bool told = fs.Exists(JoinPath(path, "UUID")) || fs.Exists(JoinPath(path, "COMMIT"));
        if (below.name.ends_with(".aborted") && told && list(JoinPath(path, "data")).empty()) {
          continue;
        }
        inside.push_back(entry.name + "/" + below.name);
      }
      continue;
    }
    inside.push_back(entry.name);
  }
  return inside;
}

}  // namespace tensormount
