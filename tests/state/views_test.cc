// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tensormount/checkpoint.h"
#include "tensormount/load.h"
#include "tensormount/save.h"
#include "tensormount/shard.h"

#include "tests/shard/boxes.h"
#include "tests/state/cells.h"
#include "tests/support/random.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

// Views through saves and loads: what stands in the checkpoint is what the same views of plain
// arrays are.

namespace tensormount {
namespace {

// All of a stored tensor.
Array Stored(const std::string& path, const std::string& key) {
  const auto checkpoint = Checkpoint::Open(path);
  EXPECT_OK(checkpoint);
  if (!checkpoint.ok()) return {};
  const auto tensor = checkpoint.value().tensor(key);
  EXPECT_OK(tensor);
  if (!tensor.ok()) return {};
  Array array = Array::Counting(tensor.value().shape());
  EXPECT_OK(tensor.value().Read(Box::Whole(array.shape), Ints(array.values.data(), array.shape)));
  return array;
}

// Saves, or loads, what `fill` adds for a rank. `data` is kept until it is done.
Status OnRanks(int ranks, const std::function<Status(int rank, StateDict&)>& fill,
               const std::function<Status(StateDict&, Communicator&)>& act) {
  return RunOnThreads(ranks, [&](Communicator& comm) -> Status {
    StateDict state;
    // A failure is passed on to the save or load, which fails on all ranks then.
    if (Status status = fill(comm.rank(), state); !status.ok()) (void)state.Fail(status);
    return act(state, comm);
  });
}

// A gated layer on 8 ranks, each holding [gate; up] of its share: one tensor in the checkpoint,
// loaded by 2 ranks and as halves of their own.
TEST(ViewsTest, GatedLayerOfEightRanksSavesAndLoads) {
  const TempDir dir;
  const std::string path = dir.Join("store/step-1");
  const Array truth = Array::Counting({64, 3});
  const auto parts_of = [](std::int32_t* local, std::int64_t rank, std::int64_t ranks) {
    const auto naive =
        ShardFromOffsets(Ints(local, {64 / ranks, 3}),
                         std::vector<AxisFragment>{{.axis = 0, .index = rank, .count = ranks}});
    const auto moves = FusedMoves(std::vector<std::int64_t>{32, 32}, rank, ranks);
    return Interleaved(naive.value(), 0, moves.value()).value();
  };
  std::vector<std::vector<std::int32_t>> memory(8, std::vector<std::int32_t>(24));
  ASSERT_OK(OnRanks(
      8,
      [&](int rank, StateDict& state) -> Status {
        for (const Shard& part : parts_of(memory[static_cast<std::size_t>(rank)].data(), rank, 8)) {
          for (const auto& [position, value] : CellsOf(part)) {
            *value = truth.values[static_cast<std::size_t>(position)];
          }
          TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor("fc1", part));
        }
        return Status();
      },
      [&](StateDict& state, Communicator& comm) { return Save(state, path, comm).status(); }));
  EXPECT_EQ(Stored(path, "fc1").values, truth.values);
  // Rows 4 to 8 of gate and up stand in the memory of rank 1.
  EXPECT_EQ(memory[1][0], truth.At({4, 0}));
  EXPECT_EQ(memory[1][12], truth.At({36, 0}));

  std::vector<std::vector<std::int32_t>> loaded(2, std::vector<std::int32_t>(96, -1));
  ASSERT_OK(OnRanks(
      2,
      [&](int rank, StateDict& state) -> Status {
        for (const Shard& part : parts_of(loaded[static_cast<std::size_t>(rank)].data(), rank, 2)) {
          TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor("fc1", part));
        }
        return Status();
      },
      [&](StateDict& state, Communicator& comm) { return Load(state, path, comm).status(); }));
  EXPECT_EQ(loaded[1][0], truth.At({16, 0}));
  EXPECT_EQ(loaded[1][48], truth.At({48, 0}));
  EXPECT_EQ(std::count(loaded[0].begin(), loaded[0].end(), -1), 0);
}

// Layers stacked under one key, whose buffers lack that axis, on pipeline stages of 3, 1 and 4
// layers; transposed storage of each.
TEST(ViewsTest, StackedLayersOnUnevenStagesSaveAndLoad) {
  const TempDir dir;
  const std::string path = dir.Join("store/step-1");
  const Array truth = Array::Counting({8, 4, 5});
  const std::vector<std::vector<std::int64_t>> stages = {{0, 1, 2}, {3}, {4, 5, 6, 7}};
  std::vector<std::vector<std::vector<std::int32_t>>> memory(3);
  for (const bool load : {false, true}) {
    ASSERT_OK(OnRanks(
        3,
        [&](int rank, StateDict& state) -> Status {
          const auto r = static_cast<std::size_t>(rank);
          memory[r].assign(stages[r].size(), std::vector<std::int32_t>(20, -1));
          for (std::size_t i = 0; i < stages[r].size(); ++i) {
            const std::int64_t layer = stages[r][i];
            // Stored transposed: [5, 4].
            TENSORMOUNT_ASSIGN_OR_RETURN(
                const BufferView turned,
                TransposeView(Ints(memory[r][i].data(), {5, 4}), std::vector<int>{1, 0}));
            TENSORMOUNT_ASSIGN_OR_RETURN(
                const Shard shard,
                ShardFromOffsets(
                    turned, std::vector<AxisFragment>{{.axis = 0, .index = layer, .count = 8}}, 1));
            TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor("layers.w", shard));
            if (load) continue;
            ForEachIndex({4, 5}, [&](const Dims& at) {
              memory[r][i][static_cast<std::size_t>(at[1] * 4 + at[0])] =
                  truth.At({layer, at[0], at[1]});
            });
          }
          return load ? Status() : Status(state.NameLayers("layers.w", "layers.{}.w"));
        },
        [&](StateDict& state, Communicator& comm) {
          return load ? Load(state, path, comm).status() : Save(state, path, comm).status();
        }));
  }
  EXPECT_EQ(Stored(path, "layers.w").values, truth.values);
  ForEachIndex(truth.shape, [&](const Dims& at) {
    for (std::size_t r = 0; r < stages.size(); ++r) {
      for (std::size_t i = 0; i < stages[r].size(); ++i) {
        if (stages[r][i] != at[0]) continue;
        EXPECT_EQ(memory[r][i][static_cast<std::size_t>(at[2] * 4 + at[1])], truth.At(at));
      }
    }
  });
}

// ---- Chains of views, drawn at random --------------------------------------------------------

// A tensor with an array that says what it is, and the shards of all ranks.
struct Viewed {
  Array truth;
  std::vector<std::vector<Shard>> shards;  // By rank.
};

// A step of a chain: which tensors it takes, and what becomes of a shard and of an array.
struct Step {
  std::vector<std::size_t> takes;  // Indices into the list of tensors.
  // One list of shards for each result, from a shard of takes[n].
  std::function<Result<std::vector<std::vector<Shard>>>(std::size_t n, const Shard&)> view;
  std::function<std::vector<Array>(const std::vector<Array>&)> oracle;
};

Result<std::vector<std::vector<Shard>>> One(const Result<Shard>& shard) {
  if (!shard.ok()) return shard.status();
  return std::vector<std::vector<Shard>>{{shard.value()}};
}

Step RandomStep(Random& rnd, const std::vector<Viewed>& tensors) {
  const auto pick =
      static_cast<std::size_t>(rnd.Int(0, static_cast<std::int64_t>(tensors.size()) - 1));
  const Dims shape = tensors[pick].truth.shape;
  const int axis = shape.rank() == 0 ? 0 : static_cast<int>(rnd.Int(0, shape.rank() - 1));
  Step step{{pick}, {}, {}};
  std::int64_t kind = rnd.Int(0, 5);
  // Two tensors that fit together?
  std::size_t other = pick;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Dims& s = tensors[i].truth.shape;
    if (i == pick || s.rank() != shape.rank()) continue;
    bool fits = shape.rank() > 0;
    for (int a = 0; a < shape.rank(); ++a) fits = fits && (a == axis || s[a] == shape[a]);
    if (fits) other = i;
  }
  if (kind <= 1 && other != pick) {
    step.takes = {pick, other};
    const std::int64_t first = shape[axis];
    const std::int64_t total = first + tensors[other].truth.shape[axis];
    if (kind == 0 && total == 2 * first && shape.rank() < 4) {
      const int at = static_cast<int>(rnd.Int(0, shape.rank()));
      step.view = [at](std::size_t n, const Shard& s) {
        return One(Stacked(s, at, static_cast<std::int64_t>(n), 2));
      };
      step.oracle = [at](const std::vector<Array>& in) {
        Dims out;
        for (int a = 0; a <= in[0].shape.rank(); ++a) {
          out.push_back(a == at ? 2 : in[0].shape[a > at ? a - 1 : a]);
        }
        return std::vector<Array>{Array::Of(out, [&](const Dims& i) {
          Dims inner;
          for (int a = 0; a < i.rank(); ++a) {
            if (a != at) inner.push_back(i[a]);
          }
          return in[static_cast<std::size_t>(i[at])].At(inner);
        })};
      };
      return step;
    }
    step.view = [axis, first, total](std::size_t n, const Shard& s) {
      return One(Concatenated(s, axis, n == 0 ? 0 : first, total));
    };
    step.oracle = [axis, first, total](const std::vector<Array>& in) {
      Dims out = in[0].shape;
      out[axis] = total;
      return std::vector<Array>{Array::Of(out, [&](Dims i) {
        if (i[axis] < first) return in[0].At(i);
        i[axis] -= first;
        return in[1].At(i);
      })};
    };
    return step;
  }
  if (shape.rank() == 0) kind = 5;
  if (kind <= 2) {
    std::vector<std::int64_t> sizes;
    for (std::int64_t left = shape[axis]; left > 0 || sizes.empty();) {
      sizes.push_back(shape[axis] % 2 == 0 && kind > 0 ? shape[axis] / 2 : rnd.Int(0, left));
      left -= sizes.back();
    }
    step.view = [axis, sizes](std::size_t,
                              const Shard& s) -> Result<std::vector<std::vector<Shard>>> {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Shard> parts, Split(s, axis, sizes));
      std::vector<std::vector<Shard>> out;
      for (const Shard& part : parts) out.push_back({part});
      return out;
    };
    step.oracle = [axis, sizes](const std::vector<Array>& in) {
      std::vector<Array> out;
      Dims begin = Dims::Filled(in[0].shape.rank(), 0);
      for (const std::int64_t size : sizes) {
        Dims extent = in[0].shape;
        extent[axis] = size;
        out.push_back(Part(in[0], B(begin, extent)));
        begin[axis] += size;
      }
      return out;
    };
  } else if (kind == 3) {
    std::vector<int> axes;
    for (int a = 0; a < shape.rank(); ++a) axes.push_back(a);
    rnd.Shuffle(axes);
    step.view = [axes](std::size_t, const Shard& s) { return One(Transposed(s, axes)); };
    step.oracle = [axes](const std::vector<Array>& in) {
      Dims out;
      for (const int a : axes) out.push_back(in[0].shape[a]);
      return std::vector<Array>{Array::Of(out, [&](const Dims& i) {
        Dims old = i;
        for (int a = 0; a < i.rank(); ++a) old[axes[static_cast<std::size_t>(a)]] = i[a];
        return in[0].At(old);
      })};
    };
  } else if (kind == 4) {
    // Blocks of an axis in another order.
    std::vector<std::int64_t> cuts = {0, rnd.Int(0, shape[axis]), rnd.Int(0, shape[axis]),
                                      shape[axis]};
    std::sort(cuts.begin(), cuts.end());
    std::vector<AxisMove> moves;
    for (std::size_t i = 0; i < 3; ++i) moves.push_back({cuts[i], cuts[i + 1] - cuts[i], 0});
    rnd.Shuffle(moves);
    std::int64_t to = 0;
    for (AxisMove& m : moves) {
      m.to = to;
      to += m.extent;
    }
    step.view = [axis, moves](std::size_t,
                              const Shard& s) -> Result<std::vector<std::vector<Shard>>> {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<Shard> parts, Interleaved(s, axis, moves));
      return std::vector<std::vector<Shard>>{std::move(parts)};
    };
    step.oracle = [axis, moves](const std::vector<Array>& in) {
      return std::vector<Array>{Array::Of(in[0].shape, [&](Dims i) {
        for (const AxisMove& m : moves) {
          if (i[axis] >= m.to && i[axis] < m.to + m.extent) {
            i[axis] += m.from - m.to;
            break;
          }
        }
        return in[0].At(i);
      })};
    };
  } else {
    const Box box = RandomBox(rnd, shape);
    step.view = [box](std::size_t, const Shard& s) { return One(Sliced(s, box)); };
    step.oracle = [box](const std::vector<Array>& in) {
      return std::vector<Array>{Part(in[0], box)};
    };
  }
  return step;
}

// False where a flat range stands in the way; then nothing has changed.
bool Apply(const Step& step, std::vector<Viewed>& tensors) {
  std::vector<Array> in;
  for (const std::size_t i : step.takes) in.push_back(tensors[i].truth);
  std::vector<Viewed> results;
  const std::size_t ranks = tensors[step.takes[0]].shards.size();
  for (Array& array : step.oracle(in)) {
    results.push_back({std::move(array), std::vector<std::vector<Shard>>(ranks)});
  }
  for (std::size_t n = 0; n < step.takes.size(); ++n) {
    for (std::size_t r = 0; r < ranks; ++r) {
      for (const Shard& shard : tensors[step.takes[n]].shards[r]) {
        const auto views = step.view(n, shard);
        if (!views.ok()) {
          EXPECT_EQ(views.status().code(), Code::kUnsupported) << views.status().ToString();
          return false;
        }
        for (std::size_t k = 0; k < results.size(); ++k) {
          for (const Shard& view : views.value()[k]) results[k].shards[r].push_back(view);
        }
      }
    }
  }
  std::vector<std::size_t> gone = step.takes;
  std::sort(gone.rbegin(), gone.rend());
  for (const std::size_t i : gone) tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(i));
  for (Viewed& result : results) tensors.push_back(std::move(result));
  return true;
}

// The array cut at random over ranks, in memory of its own; values are -1 unless `filled`.
Viewed Distribute(Random& rnd, const Array& truth, std::size_t ranks, bool flats, bool filled,
                  std::vector<Piece>& memory) {
  Viewed out{truth, std::vector<std::vector<Shard>>(ranks)};
  std::vector<Region> regions;
  CutAtRandom(rnd, Box::Whole(truth.shape), static_cast<int>(rnd.Int(0, 3)), regions);
  const auto add = [&](const Region& region) {
    memory.push_back(MakePiece(truth, region));
    Piece& piece = memory.back();
    const bool turn = !region.is_flat() && truth.shape.rank() == 2 && rnd.OneIn(2);
    if (turn) piece.shard.data.strides = {1, region.box().extent(0)};
    for (const auto& [position, value] : CellsOf(piece.shard)) {
      *value = filled ? truth.values[static_cast<std::size_t>(position)] : -1;
    }
    out.shards[static_cast<std::size_t>(rnd.Int(0, static_cast<std::int64_t>(ranks) - 1))]
        .push_back(piece.shard);
  };
  for (const Region& region : regions) {
    if (flats) {
      add(region);
    } else {
      for (const Box& box : region.Boxes()) add(box);
    }
  }
  return out;
}

Status AddAll(const std::vector<Viewed>& tensors, int rank, StateDict& state) {
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    for (const Shard& shard : tensors[t].shards[static_cast<std::size_t>(rank)]) {
      TENSORMOUNT_RETURN_IF_ERROR(state.AddTensor("t" + std::to_string(t), shard));
    }
  }
  return Status();
}

TEST(ViewsPropertyTest, ChainsOfViewsMatchTheArrayModel) {
  int flat_steps = 0;
  int steps_taken = 0;
  for (int i = 0; i < TestScale(24); ++i) {
    Random rnd(TestSeed() + static_cast<std::uint64_t>(i));
    SCOPED_TRACE(i);
    const TempDir dir;
    const std::string path = dir.Join("store/step-1");
    // Two sources, one of them of even extents, so that parts fit together.
    std::vector<Array> sources = {Array::Counting(RandomShape(rnd, 3, 6)),
                                  Array::Counting({4, 2 * rnd.Int(1, 3)}, 1000)};
    const auto ranks = static_cast<int>(rnd.Int(1, 4));
    const bool flats = rnd.OneIn(2);
    std::vector<Piece> memory;
    std::vector<Viewed> tensors;
    for (const Array& source : sources) {
      tensors.push_back(
          Distribute(rnd, source, static_cast<std::size_t>(ranks), flats, true, memory));
    }
    std::vector<Step> chain;
    for (std::int64_t n = rnd.Int(1, 6); n > 0; --n) {
      const Step step = RandomStep(rnd, tensors);
      if (!Apply(step, tensors)) continue;
      chain.push_back(step);
      ++steps_taken;
      if (flats) ++flat_steps;
    }
    std::int64_t cells = 0;
    for (const Viewed& tensor : tensors) {
      cells += static_cast<std::int64_t>(tensor.truth.values.size());
      for (const auto& of_rank : tensor.shards) {
        for (const Shard& shard : of_rank) ASSERT_TRUE(Holds(shard, tensor.truth));
      }
    }
    // A tensor of no cells may have no shard, and is not there then.
    std::erase_if(tensors, [](const Viewed& t) { return t.truth.values.empty(); });
    ASSERT_OK(OnRanks(
        ranks, [&](int rank, StateDict& state) { return AddAll(tensors, rank, state); },
        [&](StateDict& state, Communicator& comm) { return Save(state, path, comm).status(); }));
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      ASSERT_EQ(Stored(path, "t" + std::to_string(t)).values, tensors[t].truth.values) << t;
    }

    // The same chain of views of other memory, cut otherwise, is filled by a load.
    const auto readers = static_cast<int>(rnd.Int(1, 4));
    std::vector<Piece> loaded_memory;
    std::vector<Viewed> loaded;
    for (const Array& source : sources) {
      loaded.push_back(
          Distribute(rnd, source, static_cast<std::size_t>(readers), false, false, loaded_memory));
    }
    const std::vector<Viewed> views_of = loaded;
    for (const Step& step : chain) ASSERT_TRUE(Apply(step, loaded));
    std::erase_if(loaded, [](const Viewed& t) { return t.truth.values.empty(); });
    ASSERT_OK(OnRanks(
        readers, [&](int rank, StateDict& state) { return AddAll(loaded, rank, state); },
        [&](StateDict& state, Communicator& comm) { return Load(state, path, comm).status(); }));
    // What no slice left out has its value.
    std::int64_t filled = 0;
    for (const Viewed& source : views_of) {
      for (const auto& of_rank : source.shards) {
        for (const Shard& shard : of_rank) {
          for (const auto& [position, value] : CellsOf(shard)) {
            if (*value == -1) continue;
            ASSERT_EQ(*value, source.truth.values[static_cast<std::size_t>(position)]);
            ++filled;
          }
        }
      }
    }
    ASSERT_EQ(filled, cells);
  }
  EXPECT_GT(steps_taken, 20);
  EXPECT_GT(flat_steps, 5);
}

}  // namespace
}  // namespace tensormount
