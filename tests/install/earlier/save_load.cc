// SPDX-License-Identifier: Apache-2.0
// Saves a small model from four threads that each hold some rows, and loads it on two that each
// want some columns: save_load STORE
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include <tensormount/tensormount.h>

namespace {

using tensormount::Box;
using tensormount::BufferView;
using tensormount::Communicator;
using tensormount::Dims;
using tensormount::DType;
using tensormount::Status;

constexpr std::int64_t kRows = 64;
constexpr std::int64_t kColumns = 48;

float Weight(std::int64_t row, std::int64_t column) {
  return static_cast<float>(row * kColumns + column);
}

Status SaveRows(Communicator& comm, const std::string& path) {
  const std::int64_t rows = kRows / comm.size();
  const std::int64_t first = rows * comm.rank();
  std::vector<float> mine;
  for (std::int64_t row = first; row < first + rows; ++row) {
    for (std::int64_t column = 0; column < kColumns; ++column) mine.push_back(Weight(row, column));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make({first, 0}, {rows, kColumns}));

  tensormount::StateDict state;
  state.AddTensor("layer.weight",
                  {.global_shape = {kRows, kColumns},
                   .region = box,
                   .data = BufferView::Host(DType::kF32, mine.data(), {rows, kColumns})});
  state.SetCommon("step", 1000);
  TENSORMOUNT_ASSIGN_OR_RETURN(const tensormount::SaveReport report,
                               tensormount::Save(state, path, comm));
  if (comm.rank() == 0) {
    std::printf("saved %s: %llu tensor, %llu bytes, generation %llu\n", report.path.c_str(),
                static_cast<unsigned long long>(report.tensors),
                static_cast<unsigned long long>(report.bytes),
                static_cast<unsigned long long>(report.generation));
  }
  return {};
}

Status LoadColumns(Communicator& comm, const std::string& path) {
  const std::int64_t columns = kColumns / comm.size();
  const std::int64_t first = columns * comm.rank();
  std::vector<float> mine(static_cast<std::size_t>(kRows * columns), -1.0f);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make({0, first}, {kRows, columns}));

  tensormount::StateDict wanted;
  wanted.AddTensor("layer.weight",
                   {.global_shape = {kRows, kColumns},
                    .region = box,
                    .data = BufferView::Host(DType::kF32, mine.data(), {kRows, columns})});
  TENSORMOUNT_ASSIGN_OR_RETURN(const tensormount::LoadReport report,
                               tensormount::Load(wanted, path, comm));

  std::size_t next = 0;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t column = first; column < first + columns; ++column) {
      if (mine[next++] != Weight(row, column)) {
        return Status(tensormount::Code::kDataLoss, "compare: a weight differs");
      }
    }
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const tensormount::CommonValue step, report.common("step"));
  std::printf("rank %d loaded columns %s: all equal, %llu of %llu bytes verified, step %lld\n",
              comm.rank(), box.ToString().c_str(),
              static_cast<unsigned long long>(report.bytes_by_leaf + report.bytes_by_digest),
              static_cast<unsigned long long>(report.bytes_wanted),
              static_cast<long long>(*step.get_if<std::int64_t>()));
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: save_load STORE\n");
    return 2;
  }
  const std::string path = std::string(argv[1]) + "/step-1000";
  Status status =
      tensormount::RunOnThreads(4, [&](Communicator& comm) { return SaveRows(comm, path); });
  if (status.ok()) {
    status =
        tensormount::RunOnThreads(2, [&](Communicator& comm) { return LoadColumns(comm, path); });
  }
  if (!status.ok()) {
    std::fprintf(stderr, "save_load: %s\n", status.ToString().c_str());
    return 2;
  }
  return 0;
}
