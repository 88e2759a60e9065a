// SPDX-License-Identifier: Apache-2.0
#include "tests/collective/load_testing.h"

#include <algorithm>
#include <mutex>
#include <sys/stat.h>

#include <gtest/gtest.h>

#include "base/file_system.h"
#include "collective/save_load.h"
#include "tests/support/cells.h"
#include "tests/support/device_mode.h"
#include "tests/support/random.h"
#include "tests/support/temp_dir.h"

namespace tensormount {
namespace {

std::size_t ElementBytes(DType dtype) { return InfoOf(dtype).bits / 8; }

Dims Extents(const Region& region) {
  return region.is_flat() ? Dims{region.volume()} : region.box().extent();
}

Region SplitAxes(const Dims& shape, const Dims& grid, int rank) {
  Dims begin = Dims::Filled(shape.rank(), 0);
  Dims extent = shape;
  int rest = rank;
  for (int a = grid.rank() - 1; a >= 0; --a) {
    const std::int64_t at = rest % grid[a];
    rest /= static_cast<int>(grid[a]);
    const std::int64_t step = (shape[a] + grid[a] - 1) / grid[a];
    begin[a] = std::min(shape[a], at * step);
    extent[a] = std::min(shape[a], (at + 1) * step) - begin[a];
  }
  return Box::Make(begin, extent).value();
}

}  // namespace

GlobalTensor MakeGlobal(const std::string& key, DType dtype, const Dims& shape) {
  GlobalTensor tensor{key, dtype, shape, {}};
  const auto elements = static_cast<std::size_t>(CheckedProduct(shape).value());
  Random random(std::hash<std::string>()(key));
  tensor.bytes = random.Bytes(elements * ElementBytes(dtype));
  return tensor;
}

std::vector<Region> CutByRule(const Dims& shape, const std::string& rule, int ranks) {
  std::vector<Region> regions;
  for (int r = 0; r < ranks; ++r) {
    const Region whole = Box::Whole(shape);
    if (rule == "flat") {
      const std::int64_t n = whole.volume();
      const std::int64_t step = (n + ranks - 1) / ranks;
      const std::int64_t first = std::min(n, r * step);
      regions.push_back(
          Region::Flat(whole.box(), first, std::min(n, (r + 1) * step) - first).value());
    } else if (rule == "rows" && shape.rank() >= 1) {
      regions.push_back(SplitAxes(shape, Dims{ranks}, r));
    } else if (rule == "cols" && shape.rank() >= 2) {
      regions.push_back(SplitAxes(shape, Dims{1, ranks}, r));
    } else if (rule.rfind("grid:", 0) == 0 && shape.rank() >= 2) {
      const auto rows = std::stoll(rule.substr(5));
      regions.push_back(SplitAxes(shape, Dims{rows, ranks / rows}, r));
    } else {
      regions.push_back(whole);
    }
  }
  return regions;
}

std::string BytesOf(const GlobalTensor& tensor, const Region& region) {
  const std::size_t size = ElementBytes(tensor.dtype);
  std::string out;
  ForEachCellRow(tensor.shape, region, [&](auto, auto element, auto length) {
    out.append(tensor.bytes, static_cast<std::size_t>(element) * size,
               static_cast<std::size_t>(length) * size);
  });
  return out;
}

Status SaveByRule(const std::string& path, const std::vector<GlobalTensor>& tensors,
                  const std::string& rule, int ranks, const SaveOptions& options) {
  return RunOnThreads(ranks, [&](Communicator& comm) -> Status {
    StateDict state;
    std::vector<std::string> buffers;
    buffers.reserve(tensors.size());
    for (const GlobalTensor& tensor : tensors) {
      const Region region =
          CutByRule(tensor.shape, rule, ranks)[static_cast<std::size_t>(comm.rank())];
      buffers.push_back(BytesOf(tensor, region));
      const void* data = buffers.back().data();
      TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor(
          tensor.key,
          {tensor.shape, region, BufferView::Host(tensor.dtype, data, Extents(region))}));
    }
    const OnDevices moved(state);
    return Save(moved.dict(), path, comm, options).status();
  });
}

std::vector<LoadedRank> LoadWishes(const std::string& path,
                                   const std::vector<GlobalTensor>& tensors,
                                   const std::vector<std::vector<Wish>>& wishes,
                                   const LoadOptions& options,
                                   const std::function<void(int, StateDict&)>& more) {
  LoadSetup setup;
  setup.options = [&](int) { return options; };
  setup.more = more;
  return LoadWishesWith(path, tensors, wishes, setup);
}

std::vector<LoadedRank> LoadWishesWith(const std::string& path,
                                       const std::vector<GlobalTensor>& tensors,
                                       const std::vector<std::vector<Wish>>& wishes,
                                       const LoadSetup& setup) {
  std::vector<LoadedRank> loaded(wishes.size());
  const Status all = RunOnThreads(static_cast<int>(wishes.size()), [&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    LoadedRank& mine = loaded[rank];
    StateDict request;
    mine.buffers.reserve(wishes[rank].size());
    for (const Wish& wish : wishes[rank]) {
      const GlobalTensor& tensor = tensors[wish.tensor];
      mine.buffers.push_back(std::string(
          static_cast<std::size_t>(wish.region.volume()) * ElementBytes(tensor.dtype), '\xEE'));
      void* data = mine.buffers.back().data();
      (void)request.AddTensor(
          tensor.key,
          {tensor.shape, wish.region, BufferView::Host(tensor.dtype, data, Extents(wish.region))});
    }
    if (setup.more) setup.more(comm.rank(), request);
    FileSystem& fs = setup.fs ? setup.fs(comm.rank()) : HostFileSystem();
    const LoadOptions options = setup.options ? setup.options(comm.rank()) : LoadOptions();
    OnDevices moved(request);
    Result<LoadReport> result = setup.load ? setup.load(fs, moved.dict(), comm, options)
                                           : LoadOn(fs, moved.dict(), path, comm, options);
    moved.BringBack();
    mine.status = result.status();
    if (result.ok()) mine.report = std::move(result).value();
    return Status();
  });
  EXPECT_TRUE(all.ok()) << all.ToString();
  return loaded;
}

std::string ElementOf(const GlobalTensor& tensor, const Dims& at) {
  std::int64_t place = 0;
  for (int a = 0; a < at.rank(); ++a) place = place * tensor.shape[a] + at[a];
  const std::size_t size = ElementBytes(tensor.dtype);
  return tensor.bytes.substr(static_cast<std::size_t>(place) * size, size);
}

void ForEachElement(const Region& region, const std::function<void(const Dims& at)>& fn) {
  const Box& box = region.box();
  for (std::int64_t i = 0; i < region.volume(); ++i) {
    std::int64_t rest = region.flat_first() + i;
    Dims at = box.begin();
    for (int a = box.rank() - 1; a >= 0; --a) {
      at[a] += rest % box.extent(a);
      rest /= box.extent(a);
    }
    fn(at);
  }
}

std::vector<std::vector<Wish>> WishesByRule(const std::vector<GlobalTensor>& tensors,
                                            const std::string& rule, int ranks) {
  std::vector<std::vector<Wish>> wishes(static_cast<std::size_t>(ranks));
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const std::vector<Region> regions = CutByRule(tensors[t].shape, rule, ranks);
    for (std::size_t r = 0; r < regions.size(); ++r) wishes[r].push_back({t, regions[r]});
  }
  return wishes;
}

std::string WhatIsWrong(const std::vector<GlobalTensor>& tensors,
                        const std::vector<std::vector<Wish>>& wishes,
                        const std::vector<LoadedRank>& loaded) {
  for (std::size_t r = 0; r < wishes.size(); ++r) {
    const std::string rank = "rank " + std::to_string(r) + ": ";
    if (!loaded[r].status.ok()) return rank + loaded[r].status.ToString();
    std::uint64_t wanted = 0;
    for (std::size_t i = 0; i < wishes[r].size(); ++i) {
      const GlobalTensor& tensor = tensors[wishes[r][i].tensor];
      const std::string expected = BytesOf(tensor, wishes[r][i].region);
      wanted += expected.size();
      if (loaded[r].buffers[i] != expected) {
        return rank + tensor.key + " " + wishes[r][i].region.ToString() + " differs";
      }
    }
    const LoadReport& report = loaded[r].report;
    if (report.bytes_wanted != wanted) {
      return rank + "reports " + std::to_string(report.bytes_wanted) + " bytes wanted instead of " +
             std::to_string(wanted);
    }
    if (report.bytes_by_leaf + report.bytes_by_digest + report.bytes_unverified != wanted) {
      return rank + "verified bytes do not add up";
    }
  }
  return {};
}

std::vector<std::string> DataFiles(const std::string& checkpoint) {
  std::vector<std::string> names;
  Result<std::vector<DirectoryEntry>> list = HostFileSystem().List(checkpoint + "/data");
  EXPECT_TRUE(list.ok()) << list.status().ToString();
  if (!list.ok()) return names;
  for (const DirectoryEntry& entry : list.value()) {
    names.push_back(checkpoint + "/data/" + entry.name);
  }
  return names;
}

}  // namespace tensormount
