// SPDX-License-Identifier: Apache-2.0
// Writes the progress of a save: each rank replaces its own file, and rank 0 also the combined
// file. Failures are ignored, because a save must not fail for them.
#include "collective/async/progress_file.h"

#include <algorithm>
#include <ctime>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace tensormount {
namespace {

constexpr std::chrono::milliseconds kPerRank{2};
constexpr std::uint64_t kMaxLine = 4096;
constexpr char kFolder[] = "status";

using OrderedJson = nlohmann::ordered_json;

double SecondsSince(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

}  // namespace

ProgressFile::ProgressFile(FileSystem& fs, const Staging& staging, int rank, int world,
                           std::chrono::milliseconds interval, std::function<Line()> line)
    : fs_(fs),
      staging_(staging),
      rank_(rank),
      world_(world),
      interval_(std::max(interval, kPerRank * world)),
      line_(std::move(line)),
      thread_([this] { Run(); }) {}

ProgressFile::~ProgressFile() { Stop(); }

void ProgressFile::Stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void ProgressFile::Remove() {
  Stop();
  (void)fs_.RemoveTree(JoinPath(staging_.directory, kFolder));  // Failures are ignored.
  (void)fs_.RemoveTree(JoinPath(staging_.directory, "status.json.new"));
  (void)fs_.RemoveTree(JoinPath(staging_.directory, "status.json"));
}

void ProgressFile::Run() {
  std::unique_lock lock(mutex_);
  bool first = true;
  while (!stop_changed_.wait_for(lock, interval_, [&] { return stop_; })) {
    lock.unlock();
    try {
      if (first) (void)fs_.CreateDirectory(JoinPath(staging_.directory, kFolder));
      first = false;
      WriteOwn();
      if (rank_ == 0) WriteAll();
    } catch (const std::exception&) {  // Out of memory: the next interval tries again.
    }
    lock.lock();
  }
}

void ProgressFile::WriteOwn() {
  const Line line = line_();
  const OrderedJson json = {{"rank", rank_},
                            {"bytes_total", line.bytes_total},
                            {"bytes_written", line.bytes_written},
                            {"seconds", SecondsSince(start_)}};
  (void)fs_.ReplaceFile(
      JoinPath(JoinPath(staging_.directory, kFolder), "rank-" + std::to_string(rank_)),
      json.dump());
}

void ProgressFile::WriteAll() {
  const std::string folder = JoinPath(staging_.directory, kFolder);
  std::vector<OrderedJson> ranks;
  std::uint64_t total = 0;
  std::uint64_t written = 0;
  for (int r = 0; r < world_; ++r) {
    const Result<std::string> text =
        fs_.ReadFile(JoinPath(folder, "rank-" + std::to_string(r)), kMaxLine);
    if (!text.ok()) continue;  // The rank has written nothing yet.
    OrderedJson line = OrderedJson::parse(text.value(), nullptr, /*allow_exceptions=*/false);
    if (!line.is_object()) continue;
    total += line.value("bytes_total", std::uint64_t{0});
    written += line.value("bytes_written", std::uint64_t{0});
    ranks.push_back(std::move(line));
  }
  const OrderedJson json = {{"name", staging_.name},
                            {"uuid", staging_.uuid.ToString()},
                            {"generation", staging_.generation},
                            {"world_size", world_},
                            {"updated", static_cast<std::int64_t>(std::time(nullptr))},
                            {"bytes_total", total},
                            {"bytes_written", written},
                            {"ranks", ranks}};
  (void)fs_.ReplaceFile(JoinPath(staging_.directory, "status.json"), json.dump(1) + "\n");
}

}  // namespace tensormount
