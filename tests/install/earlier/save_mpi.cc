// SPDX-License-Identifier: Apache-2.0
// Every MPI process saves its part of a vector: mpirun -n 2 save_mpi STORE
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <tensormount/mpi.h>
#include <tensormount/tensormount.h>

namespace {

using tensormount::Status;

constexpr std::int64_t kElementsPerRank = 1000;

Status SavePart(tensormount::MpiSession& mpi, const std::string& path) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<tensormount::Communicator> comm, mpi.World());
  const std::vector<double> mine(kElementsPerRank, comm->rank());
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const tensormount::Box box,
      tensormount::Box::Make({comm->rank() * kElementsPerRank}, {kElementsPerRank}));

  tensormount::StateDict state;
  state.AddTensor("bias", {.global_shape = {comm->size() * kElementsPerRank},
                           .region = box,
                           .data = tensormount::BufferView::Host(tensormount::DType::kF64,
                                                                 mine.data(), {kElementsPerRank})});
  TENSORMOUNT_ASSIGN_OR_RETURN(const tensormount::SaveReport report,
                               tensormount::Save(state, path, *comm));
  if (comm->rank() == 0) {
    std::printf("%d processes saved %s: %llu bytes\n", comm->size(), report.path.c_str(),
                static_cast<unsigned long long>(report.bytes));
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: save_mpi STORE\n");
    return 2;
  }
  auto mpi = tensormount::MpiSession::Init();
  Status status = mpi.status();
  if (status.ok()) {
    status = SavePart(*mpi.value(), std::string(argv[1]) + "/step-1");
    // MPI_Finalize would wait for processes that are gone.
    if (!status.ok()) mpi.value()->Abandon();
  }
  if (!status.ok()) {
    std::fprintf(stderr, "save_mpi: %s\n", status.ToString().c_str());
    return 2;
  }
  return 0;
}
