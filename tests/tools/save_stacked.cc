// SPDX-License-Identifier: Apache-2.0
// Saves a checkpoint with a stacked tensor from two threads, each with half of every layer's rows:
//   save_stacked STORE/NAME [LR]
// "w" is f32 [4, 6, 5] and counts from 0; its layers are called "layers.{}.w". "bias" is u8 [3].
// With LR there are also a common value "args" that has it as "lr", and an object "rng", the
// first 4 characters of it.
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "tensormount/communicator.h"
#include "tensormount/save.h"

namespace tensormount {
namespace {

Status SaveHalf(Communicator& comm, const char* path, const char* rate) {
  const std::int64_t first = comm.rank() * 3;
  std::vector<float> rows;
  for (std::int64_t layer = 0; layer < 4; ++layer) {
    for (std::int64_t i = 0; i < 15; ++i) {
      rows.push_back(static_cast<float>(layer * 30 + first * 5 + i));
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make({0, first, 0}, {4, 3, 5}));
  const std::uint8_t bias[] = {1, 2, 3};
  StateDict state;
  state.AddTensor("w", {.global_shape = {4, 6, 5},
                        .region = box,
                        .data = BufferView::Host(DType::kF32, rows.data(), {4, 3, 5})});
  state.AddTensor("bias", {.global_shape = {3},
                           .region = Box::Whole({3}),
                           .data = BufferView::Host(DType::kU8, bias, {3})});
  if (rate != nullptr) {
    const std::string text = rate;
    state.SetCommon("args", CommonDict{.items = {{"lr", std::stod(text)}, {"seed", 1}}});
    if (comm.rank() == 0) state.AddObject("rng", text.substr(0, 4));
  }
  state.NameLayers("w", "layers.{}.w");
  return Save(state, path, comm).status();
}

}  // namespace
}  // namespace tensormount

int main(int argc, char** argv) {
  using namespace tensormount;  // NOLINT
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: save_stacked STORE/NAME [LR]\n");
    return 2;
  }
  const Status status =
      RunOnThreads(2, [&](Communicator& comm) { return SaveHalf(comm, argv[1], argv[2]); });
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
