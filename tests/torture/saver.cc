// SPDX-License-Identifier: Apache-2.0
// Saves in the background, for crash.py and faults.py: saver MARK LIST MODEL...
// Two ranks, as threads, call AsyncSaver::Save for one model after another and go on; "begin N" is
// appended to the file MARK before the call, "done N" or "fail N" when the verdict is there. LIST
// has for each model:
//   N PATH TENSORS                N is for the marks; MODEL is the file with the bytes
//   KEY DTYPE OFFSET AXES DIM...  where in it a tensor lies; each rank holds half of the rows
// Exit status 0: all are committed; 2: one is not, and stderr says why; 3: ranks got different
// verdicts.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "tensormount/async_save.h"
#include "tensormount/communicator.h"
#include "tensormount/state_dict.h"

namespace tensormount {
namespace {

struct TensorInModel {
  std::string key;
  DType dtype;
  std::size_t offset;
  Dims shape;
};

struct Job {
  std::string number;
  std::string path;
  std::string bytes;
  std::vector<TensorInModel> tensors;
  std::array<Status, 2> verdicts;  // By rank.
};

void Say(const Status& status) {
  std::fprintf(stderr, "tensormount: %s\n", status.ToString().c_str());
}

void Mark(const char* file, const std::string& what) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const std::string text = what + "\n";
  const int fd = ::open(file, O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd < 0 || ::write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    std::perror(file);
  if (fd >= 0) ::close(fd);
}

Result<std::vector<Job>> ReadJobs(const char* path, char** models) {
  std::ifstream list(path);
  std::vector<Job> jobs;
  std::string word;
  std::size_t tensors = 0;
  for (Job job; list >> job.number >> job.path >> tensors; job = {}, ++models) {
    std::ifstream file(*models, std::ios::binary);
    job.bytes.assign(std::istreambuf_iterator<char>(file), {});
    while (tensors-- > 0) {
      TensorInModel tensor;
      int axes = 0;
      list >> tensor.key >> word >> tensor.offset >> axes;
      TENSORMOUNT_ASSIGN_OR_RETURN(tensor.dtype, DTypeFromName(word));
      for (std::int64_t extent = 0; axes-- > 0 && list >> extent;) tensor.shape.push_back(extent);
      job.tensors.push_back(std::move(tensor));
    }
    jobs.push_back(std::move(job));
  }
  return jobs;
}

// The half of the rows that `rank` holds; the first rank has what cannot be cut.
Status AddHalf(const Job& job, const TensorInModel& tensor, int rank, StateDict& state) {
  Dims begin = Dims::Filled(tensor.shape.rank(), 0);
  Dims extent = tensor.shape;
  std::size_t offset = tensor.offset;
  if (tensor.shape.rank() == 0 || tensor.shape[0] < 2) {
    if (rank != 0) return {};
  } else {
    const std::int64_t half = tensor.shape[0] / 2;
    begin[0] = rank == 0 ? 0 : half;
    extent[0] = rank == 0 ? half : tensor.shape[0] - half;
    std::size_t row = InfoOf(tensor.dtype).bits / 8;
    for (int axis = 1; axis < tensor.shape.rank(); ++axis)
      row *= static_cast<std::size_t>(tensor.shape[axis]);
    offset += row * static_cast<std::size_t>(begin[0]);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(begin, extent));
  const void* data = job.bytes.data() + offset;
  return state.AddTensor(tensor.key, {.global_shape = tensor.shape,
                                      .region = box,
                                      .data = BufferView::Host(tensor.dtype, data, extent)});
}

Status SaveAll(Communicator& comm, std::vector<Job>& jobs, const char* mark) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver, AsyncSaver::Make(comm));
  std::vector<std::jthread> waiting;  // Gone before the saver is.
  for (Job& job : jobs) {
    if (comm.rank() == 0) Mark(mark, "begin " + job.number);
    StateDict state;
    for (const TensorInModel& tensor : job.tensors)
      TENSORMOUNT_RETURN_IF_ERROR(AddHalf(job, tensor, comm.rank(), state));
    SaveOptions options;
    options.writers = 1 + static_cast<int>(job.bytes.size() % 4);
    TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle, saver->Save(state, job.path, options));
    waiting.emplace_back([&comm, &job, mark, handle = std::move(handle)]() mutable {
      Status& status = job.verdicts[static_cast<std::size_t>(comm.rank())];
      status = handle.WaitCommitted().status();
      if (comm.rank() != 0) return;
      Mark(mark, (status.ok() ? "done " : "fail ") + job.number);
      if (!status.ok()) Say(status.WithContext(job.path));
    });
  }
  return {};
}

}  // namespace
}  // namespace tensormount

int main(int argc, char** argv) {
  using namespace tensormount;  // NOLINT
  if (argc < 4) {
    std::fprintf(stderr, "usage: saver MARK LIST MODEL...\n");
    return 2;
  }
  Result<std::vector<Job>> jobs = ReadJobs(argv[2], argv + 3);
  Status status = jobs.status();
  if (status.ok()) {
    status =
        RunOnThreads(2, [&](Communicator& comm) { return SaveAll(comm, jobs.value(), argv[1]); });
  }
  if (!status.ok()) {
    Say(status);
    return 2;
  }
  int end = 0;
  for (const Job& job : jobs.value()) {
    const auto& [first, second] = job.verdicts;
    if (!first.ok()) end = std::max(end, 2);
    if (first.code() == second.code()) continue;
    Say(second.WithContext(job.path + ": rank 1"));
    end = 3;
  }
  return end;
}
