// SPDX-License-Identifier: Apache-2.0
// The proof of coverage beside two others in the same run, one JSON line a case: the check of every
// pair, and a sweep along the longest axis of the tensor as torch.distributed.checkpoint 2.10 and
// later does it (sorted by begin, a list of active boxes sorted by end, every active one tested),
// both on plain arrays. Rounds are interleaved; figures are medians of CPU time, from boxes in
// columns to the verdict. Boxes come in the order in which ranks would hold them, or shuffled.
//
//   coveragebench [--rounds N] [--only SUBSTRING] [--large]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "shard/coverage.h"

namespace tensormount {
namespace {

struct Generator {
  std::uint64_t state;
  std::uint64_t Next() {
    std::uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::int64_t Below(std::int64_t n) {
    return static_cast<std::int64_t>(Next() % static_cast<std::uint64_t>(n));
  }
};

// Begins and ends of a box of up to three axes.
struct Plain {
  std::int64_t low[3] = {0, 0, 0};
  std::int64_t high[3] = {1, 1, 1};
};

struct Layout {
  std::string name;
  Dims shape;
  std::vector<Plain> boxes;
  std::vector<std::pair<std::int64_t, std::int64_t>> flats;  // First and count in the shape.
};

Layout Rows(std::string name, const Dims& shape, std::int64_t n, int axis) {
  Layout layout{std::move(name), shape, {}, {}};
  for (std::int64_t i = 0; i < n; ++i) {
    Plain box;
    for (int a = 0; a < shape.rank(); ++a) box.high[a] = shape[a];
    box.low[axis] = shape[axis] * i / n;
    box.high[axis] = shape[axis] * (i + 1) / n;
    layout.boxes.push_back(box);
  }
  return layout;
}

// A grid of parts[a] cells per axis. Where `jitter`, the cuts of an axis are drawn anew within
// every cell of the axes before it.
Layout Grid(std::string name, const Dims& shape, const Dims& parts, bool jitter,
            Generator& random) {
  Layout layout{std::move(name), shape, {}, {}};
  const std::function<void(int, Plain)> cut = [&](int axis, const Plain& box) {
    if (axis == shape.rank()) {
      layout.boxes.push_back(box);
      return;
    }
    const std::int64_t width = shape[axis] / parts[axis];
    Plain part = box;
    part.high[axis] = 0;
    for (std::int64_t i = 0; i < parts[axis]; ++i) {
      part.low[axis] = part.high[axis];
      const std::int64_t shift = jitter && axis > 0 ? random.Below(width / 2) : 0;
      part.high[axis] = i + 1 == parts[axis] ? shape[axis] : (i + 1) * width + shift;
      cut(axis + 1, part);
    }
  };
  cut(0, Plain());
  return layout;
}

// Cut in two again and again, at a random place of a random axis.
Layout Splits(std::string name, const Dims& shape, int depth, Generator& random) {
  Layout layout{std::move(name), shape, {}, {}};
  const std::function<void(const Plain&, int)> cut = [&](const Plain& box, int rest) {
    int axis = static_cast<int>(random.Below(shape.rank()));
    for (int a = 0; a < shape.rank(); ++a) {
      if (box.high[axis] - box.low[axis] < 2) axis = (axis + 1) % shape.rank();
    }
    const std::int64_t extent = box.high[axis] - box.low[axis];
    if (rest == 0 || extent < 2) {
      layout.boxes.push_back(box);
      return;
    }
    // Not too near the edge, so that there is something left to cut.
    const std::int64_t at =
        box.low[axis] +
        std::clamp<std::int64_t>(extent / 4 + random.Below(extent / 2 + 1), 1, extent - 1);
    Plain part = box;
    part.high[axis] = at;
    cut(part, rest - 1);
    part = box;
    part.low[axis] = at;
    cut(part, rest - 1);
  };
  Plain whole;
  for (int a = 0; a < shape.rank(); ++a) whole.high[a] = shape[a];
  cut(whole, depth);
  return layout;
}

// Courses of bricks, every other one shifted by half a brick.
Layout Bricks(std::string name, std::int64_t courses, std::int64_t bricks) {
  Layout layout{std::move(name), {courses * 4, bricks * 10 + 5}, {}, {}};
  for (std::int64_t r = 0; r < courses; ++r) {
    const std::int64_t shift = r % 2 == 0 ? 0 : 5;
    for (std::int64_t c = 0; c < bricks; ++c) {
      const std::int64_t begin = c == 0 ? 0 : c * 10 + shift;
      const std::int64_t end = c + 1 == bricks ? bricks * 10 + 5 : (c + 1) * 10 + shift;
      layout.boxes.push_back({{r * 4, begin, 0}, {r * 4 + 4, end, 1}});
    }
  }
  return layout;
}

// Two combs: half of the tensor in rows that are as long as it can hold, half in columns, so that
// on either axis half of the boxes are open at a time.
Layout Combs(std::string name, std::int64_t teeth) {
  Layout layout{std::move(name), {teeth * 2, teeth * 2}, {}, {}};
  for (std::int64_t i = 0; i < teeth; ++i) {
    layout.boxes.push_back({{i * 2, 0, 0}, {i * 2 + 2, teeth, 1}});
    layout.boxes.push_back({{0, teeth + i, 0}, {teeth * 2, teeth + i + 1, 1}});
  }
  return layout;
}

// Rods along all three axes that pass each other, and the cubes that are left between them.
Layout Rods(std::string name, std::int64_t n) {
  Layout layout{std::move(name), {n * 2, n * 2, n * 2}, {}, {}};
  const auto box = [&](std::int64_t x, std::int64_t y, std::int64_t z, int axis) {
    Plain p{{x, y, z}, {x + 1, y + 1, z + 1}};
    if (axis >= 0) {
      p.low[axis] = 0;
      p.high[axis] = n * 2;
    }
    layout.boxes.push_back(p);
  };
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      box(0, 2 * i, 2 * j, 0);
      box(2 * i, 0, 2 * j + 1, 1);
      box(2 * i + 1, 2 * j + 1, 0, 2);
      for (std::int64_t k = 0; k < n; ++k) {
        box(2 * i + 1, 2 * j, 2 * k + 1, -1);
        box(2 * i, 2 * j + 1, 2 * k, -1);
      }
    }
  }
  return layout;
}

Layout JitteredFlats(std::string name, const Dims& shape, std::int64_t n, Generator& random) {
  Layout layout{std::move(name), shape, {}, {}};
  const std::int64_t elements = shape[0] * shape[1];
  std::int64_t begin = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t width = elements / n;
    const std::int64_t end = i + 1 == n ? elements : (i + 1) * width + random.Below(width / 2);
    layout.flats.emplace_back(begin, end - begin);
    begin = end;
  }
  return layout;
}

template <typename T>
void Shuffle(std::vector<T>& items, Generator& random) {
  for (std::size_t i = items.size(); i > 1; --i) {
    std::swap(items[i - 1], items[static_cast<std::size_t>(random.Next() % i)]);
  }
}

void FillSet(const Layout& layout, RegionSet& set) {
  set.Reset(layout.shape);
  set.Reserve(layout.boxes.size() + layout.flats.size());
  std::uint32_t owner = 0;
  for (const Plain& box : layout.boxes) {
    const std::int64_t extent[3] = {box.high[0] - box.low[0], box.high[1] - box.low[1],
                                    box.high[2] - box.low[2]};
    set.AddBox(box.low, extent, owner++);
  }
  const Dims zero = Dims::Filled(layout.shape.rank(), 0);
  for (const auto& [first, count] : layout.flats) {
    set.AddFlat(zero.begin(), layout.shape.begin(), first, count, owner++);
  }
}

RegionSet SetOf(const Layout& layout) {
  RegionSet set;
  FillSet(layout, set);
  return set;
}

// What both others check besides overlaps: bounds, and that the volumes add up.
bool VolumesFit(const Layout& layout) {
  std::int64_t sum = 0;
  for (const Plain& box : layout.boxes) {
    std::int64_t volume = 1;
    for (int a = 0; a < layout.shape.rank(); ++a) {
      if (box.low[a] < 0 || box.high[a] > layout.shape[a]) return false;
      volume *= box.high[a] - box.low[a];
    }
    sum += volume;
  }
  return sum == CheckedProduct(layout.shape).value_or(-1);
}

bool PlainOverlap(const Plain& a, const Plain& b, int rank) {
  for (int k = 0; k < rank; ++k) {
    if (a.low[k] >= b.high[k] || b.low[k] >= a.high[k]) return false;
  }
  return true;
}

bool PairsAreFine(const Layout& layout) {
  const std::vector<Plain>& boxes = layout.boxes;
  const int rank = layout.shape.rank();
  bool fine = VolumesFit(layout);
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (PlainOverlap(boxes[i], boxes[j], rank)) fine = false;
    }
  }
  return fine;
}

bool LongestAxisSweepIsFine(const Layout& layout) {
  const std::vector<Plain>& boxes = layout.boxes;
  const int rank = layout.shape.rank();
  bool fine = VolumesFit(layout);
  int axis = 0;
  for (int a = 1; a < rank; ++a) {
    if (layout.shape[a] > layout.shape[axis]) axis = a;
  }
  std::vector<std::uint32_t> order(boxes.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](std::uint32_t x, std::uint32_t y) {
    const Plain& a = boxes[x];
    const Plain& b = boxes[y];
    if (a.low[axis] != b.low[axis]) return a.low[axis] < b.low[axis];
    return std::lexicographical_compare(a.low, a.low + rank, b.low, b.low + rank);
  });
  using Active = std::pair<std::int64_t, std::uint32_t>;
  std::vector<Active> active;  // By end.
  for (const std::uint32_t i : order) {
    const Plain& box = boxes[i];
    active.erase(active.begin(), std::upper_bound(active.begin(), active.end(),
                                                  Active{box.low[axis], ~std::uint32_t{0}}));
    for (const Active& other : active) {
      if (PlainOverlap(box, boxes[other.second], rank)) fine = false;
    }
    const Active entry{box.high[axis], i};
    active.insert(std::upper_bound(active.begin(), active.end(), entry), entry);
  }
  return fine;
}

double CpuMilliseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

double Milliseconds(const std::function<bool()>& check, bool want, const char* what) {
  const double start = CpuMilliseconds();
  if (check() != want) {
    std::fprintf(stderr, "coveragebench: %s gives the wrong answer\n", what);
    std::exit(1);
  }
  return CpuMilliseconds() - start;
}

double Median(std::vector<double>& times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Options {
  int rounds = 5;
  std::string only;
  bool large = false;
};

void Run(const Options& options, const Layout& layout, bool shuffled, bool others) {
  const std::string name = layout.name + (shuffled ? ", shuffled" : "");
  if (name.find(options.only) == std::string::npos) return;
  const RegionSet set = SetOf(layout);
  // One box in the middle taken away.
  Layout holed = layout;
  if (!holed.boxes.empty()) {
    holed.boxes.erase(holed.boxes.begin() + static_cast<std::ptrdiff_t>(holed.boxes.size() / 2));
  } else {
    holed.flats.erase(holed.flats.begin() + static_cast<std::ptrdiff_t>(holed.flats.size() / 2));
  }
  const RegionSet hole = SetOf(holed);
  std::vector<double> ours;
  RegionSet filled;
  std::vector<double> fill;
  std::vector<double> faulty;
  std::vector<double> group;
  std::vector<double> sweep;
  std::vector<double> pairs;
  const bool pairwise = others && layout.boxes.size() <= std::size_t{1} << 14;
  for (int round = 0; round < options.rounds; ++round) {
    fill.push_back(Milliseconds(
        [&] {
          FillSet(layout, filled);
          return filled.size() == set.size();
        },
        true, "fill"));
    ours.push_back(Milliseconds([&] { return IsPartition(set); }, true, name.c_str()));
    if (others) {
      sweep.push_back(Milliseconds([&] { return LongestAxisSweepIsFine(layout); }, true, "sweep"));
    }
    if (pairwise) {
      pairs.push_back(Milliseconds([&] { return PairsAreFine(layout); }, true, "pairs"));
    }
    faulty.push_back(Milliseconds(
        [&] {
          const CoverageReport report = CheckCoverage(hole);
          return report.overlaps.empty() && !report.missing.empty();
        },
        true, "fault"));
    RegionSet distinct;
    group.push_back(Milliseconds([&] { return GroupEqual(set, &distinct).size() == set.size(); },
                                 true, "group"));
  }
  const auto n = static_cast<double>(set.size());
  const double own = Median(ours);
  std::printf(
      "{\"case\": \"%s\", \"boxes\": %zu, \"check_ms\": %.3f, \"ns_per_box\": %.1f, "
      "\"fill_ns_per_box\": %.1f, \"find_a_hole_ms\": %.2f, \"group_ns_per_box\": %.1f",
      name.c_str(), set.size(), own, own * 1e6 / n, Median(fill) * 1e6 / n, Median(faulty),
      Median(group) * 1e6 / n);
  if (others) {
    const double other = Median(sweep);
    std::printf(", \"longest_axis_sweep_ms\": %.3f, \"of_sweep\": %.1f", other, other / own);
  }
  if (pairwise) {
    const double other = Median(pairs);
    std::printf(", \"pairwise_ms\": %.1f, \"of_pairwise\": %.0f", other, other / own);
  }
  std::printf("}\n");
  std::fflush(stdout);
}

// Many ranks, few regions: replicas are joined first.
void RunReplicas(const Options& options, const Layout& layout, std::size_t copies) {
  const std::string name = std::to_string(copies) + " replicas of " + layout.name + ", in turns";
  if (name.find(options.only) == std::string::npos) return;
  Layout all = layout;
  for (std::size_t i = 1; i < copies; ++i) {
    all.boxes.insert(all.boxes.end(), layout.boxes.begin(), layout.boxes.end());
  }
  const RegionSet set = SetOf(all);
  std::vector<double> times;
  for (int round = 0; round < options.rounds; ++round) {
    times.push_back(Milliseconds(
        [&] {
          RegionSet distinct;
          return !IsPartition(set) && GroupEqual(set, &distinct).size() == set.size() &&
                 IsPartition(distinct);
        },
        true, name.c_str()));
  }
  const double own = Median(times);
  std::printf("{\"case\": \"%s\", \"boxes\": %zu, \"check_ms\": %.3f, \"ns_per_box\": %.1f}\n",
              name.c_str(), set.size(), own, own * 1e6 / static_cast<double>(set.size()));
  std::fflush(stdout);
}

void RunAll(const Options& options) {
  Generator random{42};
  const auto both = [&](Layout layout, bool others) {
    Run(options, layout, false, others);
    Shuffle(layout.boxes, random);
    Shuffle(layout.flats, random);
    Run(options, layout, true, others);
  };
  both(Rows("4096 rows of [16384, 4096]", {16384, 4096}, 4096, 0), true);
  both(Rows("4096 rows of [4096, 16384]", {4096, 16384}, 4096, 0), true);
  both(Rows("16384 rows", {1 << 20, 8192}, 16384, 0), false);
  both(Rows("4096 columns of [4096, 16384]", {4096, 16384}, 4096, 1), true);
  both(Grid("grid 128 x 128", {1 << 20, 1 << 20}, {128, 128}, false, random), true);
  both(Grid("jittered grid 128 x 128", {1 << 20, 1 << 20}, {128, 128}, true, random), true);
  both(Splits("2^14 random splits, 2 axes", {1 << 24, 1 << 24}, 14, random), true);
  both(Splits("2^14 random splits, 3 axes", {1 << 16, 1 << 16, 1 << 16}, 14, random), true);
  both(Bricks("bricks 128 x 128", 128, 128), true);
  both(Combs("combs of 8192", 8192), true);
  both(JitteredFlats("16384 jittered flat ranges", {1 << 16, 8192}, 16384, random), false);
  RunReplicas(options, Rows("128 rows", {1 << 20, 8192}, 128, 0), 128);
  RunReplicas(options, Grid("grid 16 x 8", {1 << 20, 8192}, {16, 8}, false, random), 128);
  if (!options.large) return;
  constexpr std::int64_t kMany = 1 << 20;
  both(Rows("2^20 rows", {kMany * 8, 64}, kMany, 0), false);
  both(Rows("2^20 columns of a wide matrix", {64, kMany * 8}, kMany, 1), false);
  both(Grid("grid 1024 x 1024", {1 << 24, 1 << 24}, {1024, 1024}, false, random), false);
  both(Grid("grid 128 x 128 x 64", {1 << 16, 1 << 16, 1 << 16}, {128, 128, 64}, false, random),
       false);
  both(Grid("jittered grid 1024 x 1024", {1 << 24, 1 << 24}, {1024, 1024}, true, random), false);
  both(Grid("jittered grid 128 x 128 x 64", {1 << 16, 1 << 16, 1 << 16}, {128, 128, 64}, true,
            random),
       false);
  both(Bricks("bricks 1024 x 1024", 1024, 1024), false);
  both(Splits("2^20 random splits, 2 axes", {1 << 28, 1 << 28}, 20, random), false);
  both(Splits("2^20 random splits, 3 axes", {1 << 20, 1 << 20, 1 << 20}, 20, random), false);
  both(Combs("combs of 2^19", kMany / 2), false);
  both(Rods("rods and cubes", 80), false);
  both(JitteredFlats("2^20 jittered flat ranges", {kMany, 4096}, kMany, random), false);
}

}  // namespace
}  // namespace tensormount

int main(int argc, char** argv) {
  tensormount::Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
      options.rounds = std::max(1, std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
      options.only = argv[++i];
    } else if (std::strcmp(argv[i], "--large") == 0) {
      options.large = true;
    } else {
      std::fprintf(stderr, "usage: coveragebench [--rounds N] [--only SUBSTRING] [--large]\n");
      return 2;
    }
  }
  tensormount::RunAll(options);
  return 0;
}
