// SPDX-License-Identifier: Apache-2.0
// How long it takes to open a checkpoint of somebody else's: adoptbench SOURCE [ROUNDS]
//
// One line of JSON, times in milliseconds, the best of the rounds: reading the .metadata of a
// DCP checkpoint and each step of making records of it, then all that comes before a reader can be
// asked (`open`, by whatever format the source is), then the first byte of its first tensor.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "index/archives/pickle.h"
#include "index/foreign/dcp_metadata.h"
#include "index/foreign/format.h"
#include "index/read/checkpoint.h"

namespace tensormount {
namespace {

class Stopwatch {
 public:
  double Ms() const {
    return std::chrono::duration<double, std::milli>(Clock::now() - begin_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
};

struct Figures {
  std::map<std::string, double> best;
  std::map<std::string, std::uint64_t> counts;
  void Add(const std::string& name, double ms) {
    const auto [it, fresh] = best.emplace(name, ms);
    if (!fresh) it->second = std::min(it->second, ms);
  }
};

Status MeasureMetadata(const ForeignFolder& folder, Figures& out) {
  constexpr std::uint64_t kMost = std::uint64_t{2} << 30;
  Stopwatch read;
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string bytes, folder.ReadFile(".metadata", kMost));
  out.Add("read", read.Ms());
  out.counts["metadata_bytes"] = bytes.size();
  {
    std::string copy = bytes;
    Stopwatch parse;
    TENSORMOUNT_ASSIGN_OR_RETURN(const pickle::Document document, pickle::Parse(std::move(copy)));
    out.Add("pickle", parse.Ms());
    out.counts["pickle_memory"] = document.memory();
  }
  OmissionCounter left_out;
  Stopwatch records;
  TENSORMOUNT_ASSIGN_OR_RETURN(const DcpMetadata metadata,
                               ParseDcpMetadata(std::move(bytes), left_out));
  out.Add("pickle_and_records", records.Ms());
  out.counts["chunks"] = metadata.items.size();
  return Status();
}

Status Measure(const std::string& path, Figures& out) {
  FileSystem& fs = HostFileSystem();
  {
    TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder, ForeignFolder::Open(fs, path, {}));
    if (folder.Has(".metadata")) TENSORMOUNT_RETURN_IF_ERROR(MeasureMetadata(folder, out));
  }
  Stopwatch whole;
  TENSORMOUNT_ASSIGN_OR_RETURN(const ForeignFolder folder, ForeignFolder::Open(fs, path, {}));
  TENSORMOUNT_ASSIGN_OR_RETURN(ForeignInventory inventory, ReadForeign(folder));
  out.Add("content", whole.Ms());
  out.counts["tensors"] = inventory.inventory.tensors.size();
  std::string first;
  for (const TensorRecord& tensor : inventory.inventory.tensors) {
    if (first.empty() && tensor.meta.bytes() > 0) first = tensor.meta.key();
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<OpenedCheckpoint> opened,
                               OpenedCheckpoint::OpenForeign(fs, std::move(inventory), path, {}));
  out.Add("open", whole.Ms());
  if (first.empty()) return Status();
  TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry tensor, opened->index().Find(first));
  // Metadata alone, with files of nothing, serve to measure what comes before.
  char byte = 0;
  if (opened->ReadBytes(tensor, 0, &byte, 1, ReadVerify::kWholeLeaves, nullptr).ok()) {
    out.Add("first_byte", whole.Ms());
  }
  return Status();
}

}  // namespace
}  // namespace tensormount

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: adoptbench SOURCE [ROUNDS]\n");
    return 2;
  }
  const int rounds = argc > 2 ? std::max(1, std::atoi(argv[2])) : 5;
  tensormount::Figures figures;
  for (int i = 0; i < rounds; ++i) {
    if (const tensormount::Status status = tensormount::Measure(argv[1], figures); !status.ok()) {
      std::fprintf(stderr, "adoptbench: %s\n", status.ToString().c_str());
      return 1;
    }
  }
  std::printf("{");
  const char* comma = "";
  for (const auto& [name, count] : figures.counts) {
    std::printf("%s\"%s\": %llu", comma, name.c_str(), static_cast<unsigned long long>(count));
    comma = ", ";
  }
  for (const auto& [name, ms] : figures.best) {
    std::printf("%s\"%s_ms\": %.3f", comma, name.c_str(), ms);
    comma = ", ";
  }
  std::printf("}\n");
  return 0;
}
