// SPDX-License-Identifier: Apache-2.0
#include "bench/ckptbench.h"

#include <cstdio>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/mapping.h"

int main(int argc, char** argv) {
  // As the command does: a library maps only in programs that allow it (base/mapping.h).
  tensormount::EnableMappingGuard();
  using tensormount::Status;
  namespace bench = tensormount::bench;
  const std::vector<std::pair<std::string, Status (*)(const bench::Options&)>> workloads = {
      {"save", bench::BenchSave},
      {"async", bench::BenchAsync},
      {"steps", bench::BenchSteps},
      {"replicas", bench::BenchReplicas},
      {"plan", bench::BenchPlan},
      {"load", bench::BenchLoad},
      {"reshard", bench::BenchReshard},
      {"staging-write", bench::BenchStagingWrite},
      {"mount-read", bench::BenchMountRead},
      {"mount-write", bench::BenchMountWrite},
      {"mount-ls", bench::BenchMountLs},
      {"publish", bench::BenchPublish},
      {"open", bench::BenchOpen},
      {"hash", bench::BenchHash},
      {"validate", bench::BenchValidate}};

  bench::Options options;
  options.dir = "/tmp";
  std::vector<std::string> wanted;
  CLI::App app(
      "Figures of tensormount, each beside its floor in the same run: the same bytes by\n"
      "plain system calls. One line a case; medians of interleaved rounds.\n"
      "Example: ckptbench load reshard --gib 1 --ranks 4 --dir /tmp --json");
  app.add_option("workload", wanted,
                 "save async steps replicas plan load reshard staging-write mount-read mount-write "
                 "mount-ls publish open hash validate; all where none is given");
  app.add_option("--gib", options.gib, "GiB that a workload moves")->check(CLI::PositiveNumber);
  app.add_option("--ranks", options.ranks, "ranks")->check(CLI::Range(1, 64));
  app.add_option("--rounds", options.rounds, "rounds that count, of each")
      ->check(CLI::Range(1, 1000));
  app.add_option("--tensors", options.tensors, "plan, publish, open, mount-ls: tensors")
      ->check(CLI::Range(1, 10'000'000));
  app.add_option("--chunks", options.chunks, "publish, open: chunks a tensor")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--world", options.world, "validate: ranks of the jobs, a multiple of 128")
      ->check(CLI::Range(128, 1 << 20));
  app.add_option("--row-bytes", options.row_bytes, "bytes of a row of a tensor")
      ->check(CLI::Range(64, 1 << 24));
  app.add_option("--dir", options.dir, "where files are made")->check(CLI::ExistingDirectory);
  app.add_option("--case", options.only, "only cases whose workload and name contain this");
  app.add_flag("--cold", options.cold, "drop cached pages before each reading round");
  app.add_flag("--sockets", options.sockets, "ranks are forked processes, not threads");
  app.add_flag("--json", options.json, "one JSON object a line");
  CLI11_PARSE(app, argc, argv);

  if (wanted.empty()) {
    for (const auto& [name, run] : workloads) wanted.push_back(name);
  }
  int exit_code = 0;
  for (const std::string& name : wanted) {
    Status (*run)(const bench::Options&) = nullptr;
    for (const auto& [known, fn] : workloads) {
      if (known == name) run = fn;
    }
    if (run == nullptr) {
      std::fprintf(stderr, "ckptbench: no workload %s\n", name.c_str());
      return 2;
    }
    if (const Status status = run(options); !status.ok()) {
      std::fprintf(stderr, "ckptbench: %s: %s\n", name.c_str(), status.ToString().c_str());
      exit_code = 2;
    }
  }
  return exit_code;
}
