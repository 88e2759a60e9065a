// SPDX-License-Identifier: Apache-2.0
// Random layouts, sound ones and ones with a fault in them, through everything that stands between
// a state dict and a report. The oracle counts cells on a bitmap.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "collective/layout/layout.h"
#include "tests/collective/layout_testing.h"
#include "tests/support/cells.h"
#include "tests/support/random.h"
#include "tests/support/random_layout.h"

namespace tensormount {
namespace {

struct HeldPiece {
  Region region;
  Replica replica = Replica::kUnlabelled;
};

// One tensor over some ranks.
struct FuzzJob {
  Dims shape;
  std::vector<std::vector<HeldPiece>> held;  // By rank.
  // What a rank takes dtype and shape for; -1: nobody is wrong.
  int odd_rank = -1;
  DType odd_dtype = DType::kF32;
  Dims odd_shape;

  int ranks() const { return static_cast<int>(held.size()); }
};

Dims FuzzShape(Random& random) {
  Dims shape;
  const int rank = static_cast<int>(random.Int(1, 4));
  std::int64_t left = 160;
  for (int a = 0; a < rank; ++a) {
    const std::int64_t extent = random.Int(1, std::min<std::int64_t>(left, a == 0 ? 24 : 8));
    shape.push_back(extent);
    left /= extent;
  }
  return shape;
}

// Equal cells in rank order, replicated some times.
FuzzJob GridJob(Random& random) {
  FuzzJob job;
  const std::int64_t rows = random.Int(1, 3);
  const std::int64_t columns = random.Int(1, 3);
  const std::int64_t copies = random.Int(1, 3);
  const std::int64_t height = random.Int(1, 4);
  const std::int64_t width = random.Int(1, 4);
  job.shape = {rows * height, columns * width};
  for (std::int64_t c = 0; c < copies; ++c) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        const Box box = Box::Make({i * height, j * width}, {height, width}).value();
        job.held.push_back({{box, Replica::kUnlabelled}});
      }
    }
  }
  return job;
}

// All holders of a region labelled, the one with the highest rank main, or nobody.
void LabelAll(Random& random, FuzzJob& job) {
  if (!random.OneIn(3)) return;
  std::vector<Region> seen;
  for (std::size_t r = job.held.size(); r-- > 0;) {
    for (HeldPiece& piece : job.held[r]) {
      const bool known = std::find(seen.begin(), seen.end(), piece.region) != seen.end();
      piece.replica = known ? Replica::kCopy : Replica::kMain;
      seen.push_back(piece.region);
    }
  }
}

FuzzJob SoundJob(Random& random) {
  FuzzJob job;
  if (random.OneIn(2)) {
    job = GridJob(random);
  } else {
    job.shape = FuzzShape(random);
    const int ranks = static_cast<int>(random.Int(1, 6));
    for (const std::vector<Region>& regions : RandomPartition(random, job.shape, ranks)) {
      std::vector<HeldPiece>& held = job.held.emplace_back();
      for (const Region& region : regions) held.push_back({region, Replica::kUnlabelled});
    }
  }
  LabelAll(random, job);
  return job;
}

// ---- Faults ---------------------------------------------------------------------------------

// A piece with cells, or null.
HeldPiece* AnyPiece(Random& random, FuzzJob& job) {
  std::vector<HeldPiece*> pieces;
  for (std::vector<HeldPiece>& held : job.held) {
    for (HeldPiece& piece : held) {
      if (!piece.region.empty()) pieces.push_back(&piece);
    }
  }
  return pieces.empty() ? nullptr : random.Pick(pieces);
}

bool Gap(Random& random, FuzzJob& job) {
  const HeldPiece* piece = AnyPiece(random, job);
  if (piece == nullptr) return false;
  const Region gone = piece->region;
  for (std::vector<HeldPiece>& held : job.held) {
    std::erase_if(held, [&](const HeldPiece& p) { return p.region == gone; });
  }
  return true;
}

// One end of a box on one axis moved, or all of it, by one.
bool Move(Random& random, FuzzJob& job, std::int64_t begin_by, std::int64_t end_by) {
  HeldPiece* piece = AnyPiece(random, job);
  if (piece == nullptr || piece->region.is_flat()) return false;
  const int axis = static_cast<int>(random.Int(0, job.shape.rank() - 1));
  Dims begin = piece->region.box().begin();
  Dims extent = piece->region.box().extent();
  begin[axis] += begin_by;
  extent[axis] += end_by - begin_by;
  if (begin[axis] < 0 || extent[axis] < 0) return false;
  const Result<Box> moved = Box::Make(begin, extent);
  if (!moved.ok() || !moved.value().Within(job.shape)) return false;
  piece->region = moved.value();
  return true;
}

bool OddMeta(Random& random, FuzzJob& job, bool shape) {
  const int rank = static_cast<int>(random.Int(0, job.ranks() - 1));
  if (job.held[static_cast<std::size_t>(rank)].empty()) return false;
  job.odd_rank = rank;
  job.odd_shape = job.shape;
  if (shape) {
    job.odd_shape[static_cast<int>(random.Int(0, job.shape.rank() - 1))] += random.Int(1, 3);
  } else {
    job.odd_dtype = DType::kI32;
  }
  return true;
}

// A state dict refuses ranks that label some shards of a tensor and others not.
bool Relabel(Random& random, FuzzJob& job) {
  std::vector<HeldPiece>& held = job.held[static_cast<std::size_t>(random.Int(0, job.ranks() - 1))];
  if (held.empty()) return false;
  const auto label = static_cast<Replica>(random.Int(0, 2));
  if (random.OneIn(2) || label == Replica::kUnlabelled || held[0].replica == Replica::kUnlabelled) {
    for (HeldPiece& piece : held) piece.replica = label;
  } else {
    held[static_cast<std::size_t>(random.Int(0, std::ssize(held) - 1))].replica = label;
  }
  return true;
}

bool MissingRank(Random& random, FuzzJob& job) {
  job.held[static_cast<std::size_t>(random.Int(0, job.ranks() - 1))].clear();
  return true;
}

// (i, j) exchanged, of a cell or of the box itself.
bool Transpose(Random& random, FuzzJob& job) {
  HeldPiece* piece = AnyPiece(random, job);
  if (piece == nullptr || piece->region.is_flat() || job.shape.rank() < 2) return false;
  Dims begin = piece->region.box().begin();
  Dims extent = piece->region.box().extent();
  if (random.OneIn(2)) {
    if (extent[0] == 0 || extent[1] == 0) return false;
    const std::int64_t row = begin[0] / extent[0];
    begin[0] = begin[1] / extent[1] * extent[0];
    begin[1] = row * extent[1];
  } else {
    std::swap(begin[0], begin[1]);
    std::swap(extent[0], extent[1]);
  }
  const Result<Box> turned = Box::Make(begin, extent);
  if (!turned.ok() || !turned.value().Within(job.shape)) return false;
  piece->region = turned.value();
  return true;
}

bool Spoil(Random& random, FuzzJob& job) {
  switch (random.Int(0, 9)) {
    case 0:
      return Gap(random, job);
    case 1:
      return Move(random, job, 0, 1);
    case 2:
      return Move(random, job, -1, 0);
    case 3:
      return Move(random, job, 1, 1);
    case 4:
      return Move(random, job, 0, -1);
    case 5:
      return OddMeta(random, job, false);
    case 6:
      return OddMeta(random, job, true);
    case 7:
      return Relabel(random, job);
    case 8:
      return MissingRank(random, job);
    default:
      return Transpose(random, job);
  }
}

// ---- The oracle -----------------------------------------------------------------------------

struct Truth {
  std::set<FindingKind> kinds;
  std::set<std::size_t> missing;
  std::set<std::size_t> doubled;
};

Truth TruthOf(const FuzzJob& job) {
  Truth truth;
  int namers = 0;
  bool others = false;
  for (int r = 0; r < job.ranks(); ++r) {
    if (job.held[static_cast<std::size_t>(r)].empty()) continue;
    ++namers;
    others |= r != job.odd_rank;
  }
  if (namers == 0) return truth;  // Nobody knows that there is such a tensor.
  if (job.odd_rank >= 0 && others) {
    if (job.odd_dtype != DType::kF32) truth.kinds.insert(FindingKind::kDType);
    if (!(job.odd_shape == job.shape)) {
      truth.kinds.insert(FindingKind::kShape);
      return truth;
    }
  }
  const Dims& shape = job.odd_rank >= 0 && !others ? job.odd_shape : job.shape;
  std::vector<Region> distinct;
  std::vector<std::size_t> mains;
  std::set<std::size_t> twice;
  std::size_t labelled = 0;
  std::size_t all = 0;
  for (const std::vector<HeldPiece>& held : job.held) {
    std::set<std::size_t> here;
    for (const HeldPiece& piece : held) {
      if (piece.region.empty()) continue;
      const auto g = static_cast<std::size_t>(
          std::find(distinct.begin(), distinct.end(), piece.region) - distinct.begin());
      if (g == distinct.size()) {
        distinct.push_back(piece.region);
        mains.push_back(0);
      }
      if (!here.insert(g).second) twice.insert(g);
      mains[g] += piece.replica == Replica::kMain ? 1 : 0;
      labelled += piece.replica != Replica::kUnlabelled ? 1 : 0;
      ++all;
    }
  }
  std::vector<int> count(static_cast<std::size_t>(CheckedProduct(shape).value()));
  for (std::size_t g = 0; g < distinct.size(); ++g) {
    ForEachCell(shape, distinct[g], [&](std::int64_t, std::int64_t cell) {
      count[static_cast<std::size_t>(cell)] += twice.contains(g) ? 2 : 1;
    });
  }
  for (std::size_t cell = 0; cell < count.size(); ++cell) {
    if (count[cell] == 0) truth.missing.insert(cell);
    if (count[cell] > 1) truth.doubled.insert(cell);
  }
  if (!truth.missing.empty()) truth.kinds.insert(FindingKind::kMissing);
  if (!truth.doubled.empty()) truth.kinds.insert(FindingKind::kOverlap);
  if (labelled > 0 && labelled < all) truth.kinds.insert(FindingKind::kMixedLabels);
  if (labelled > 0 && labelled == all) {
    for (const std::size_t n : mains) {
      if (n == 0) truth.kinds.insert(FindingKind::kNoMain);
      if (n > 1) truth.kinds.insert(FindingKind::kSeveralMains);
    }
  }
  return truth;
}

LayoutReport ReportOf(const FuzzJob& job) {
  LayoutRanks ranks(job.ranks());
  for (int r = 0; r < job.ranks(); ++r) {
    const bool odd = r == job.odd_rank;
    for (const HeldPiece& piece : job.held[static_cast<std::size_t>(r)]) {
      ranks.Tensor(r, "w", odd ? job.odd_dtype : DType::kF32, odd ? job.odd_shape : job.shape,
                   piece.region, piece.replica);
    }
  }
  return ranks.Check(100'000);
}

// What the report says is what is so, cell by cell.
void ExpectTrue(const FuzzJob& job, const Truth& truth, const LayoutReport& report) {
  std::set<FindingKind> kinds;
  std::set<std::size_t> missing;
  std::set<std::size_t> doubled;
  for (const Finding& finding : report.findings) {
    kinds.insert(finding.kind);
    if (finding.kind != FindingKind::kMissing && finding.kind != FindingKind::kOverlap) continue;
    ASSERT_TRUE(finding.box.has_value());
    EXPECT_GT(finding.elements, 0u);
    EXPECT_EQ(finding.elements, static_cast<std::uint64_t>(finding.box->volume()));
    std::set<std::size_t>& cells = finding.kind == FindingKind::kMissing ? missing : doubled;
    const Dims& shape = job.odd_rank >= 0 ? job.odd_shape : job.shape;
    ForEachCell(shape, *finding.box, [&](std::int64_t, std::int64_t element) {
      const auto cell = static_cast<std::size_t>(element);
      const bool added = cells.insert(cell).second;
      // Holes are told once; cells may be in several overlaps.
      EXPECT_TRUE(added || finding.kind == FindingKind::kOverlap) << report.ToText();
    });
  }
  EXPECT_EQ(kinds, truth.kinds) << report.ToText();
  EXPECT_EQ(missing, truth.missing) << report.ToText();
  EXPECT_EQ(doubled, truth.doubled) << report.ToText();
  EXPECT_EQ(report.ok(), truth.kinds.empty());
  EXPECT_EQ(report.finding_count, report.findings.size());
}

TEST(LayoutFuzz, NoFalseAlarmInSoundLayouts) {
  Random random(TestSeed());
  const int cases = TestScale(10'000);
  for (int i = 0; i < cases && !::testing::Test::HasFailure(); ++i) {
    const FuzzJob job = SoundJob(random);
    const LayoutReport report = ReportOf(job);
    EXPECT_TRUE(report.ok()) << "case " << i << ", shape " << job.shape.ToString() << "\n"
                             << report.ToText();
  }
}

TEST(LayoutFuzz, EveryFaultIsReportedWithItsExactBox) {
  Random random(TestSeed() + 1);
  const int cases = TestScale(10'000);
  std::size_t with_cause = 0;
  for (int faults = 0; faults < cases && !::testing::Test::HasFailure();) {
    FuzzJob job = SoundJob(random);
    // Sometimes two faults, that may hide or mend each other.
    if (!Spoil(random, job) || (random.OneIn(8) && !Spoil(random, job))) continue;
    if (job.odd_rank >= 0 && job.held[static_cast<std::size_t>(job.odd_rank)].empty()) {
      job.odd_rank = -1;
    }
    const Truth truth = TruthOf(job);
    const LayoutReport report = ReportOf(job);
    ExpectTrue(job, truth, report);
    ASSERT_FALSE(::testing::Test::HasFailure())
        << "fault " << faults << ", shape " << job.shape.ToString();
    if (truth.kinds.empty()) continue;  // A change, but no fault: a replica less.
    ++faults;
    with_cause += report.findings[0].cause.empty() ? 0 : 1;
  }
  // Most faults of grids have an explanation.
  EXPECT_GT(with_cause, static_cast<std::size_t>(cases) / 5);
}

}  // namespace
}  // namespace tensormount
