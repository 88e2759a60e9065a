// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mpi_job.h"

#include <chrono>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/temp_dir.h"

namespace tensormount {

std::string WhyNoMpi(const std::string& program) {
  if (::access(BuiltProgram(program).c_str(), X_OK) != 0) return "built without MPI";
  if (RunProcess({"mpirun", "--version"}).exit_code != 0) return "there is no mpirun";
  return "";
}

std::unique_ptr<Subprocess> StartMpi(const std::string& program, int ranks,
                                     const std::vector<std::string>& arguments,
                                     const std::vector<std::string>& options) {
  // A folder each: of two that start at the same time, one fails where both make the usual one.
  static const TempDir folder;
  static int jobs = 0;
  const std::string mine = folder.path() + "/" + std::to_string(jobs++);
  ::mkdir(mine.c_str(), 0700);
  std::vector<std::string> command = {"mpirun", "--allow-run-as-root", "--oversubscribe",
                                      "--mca",  "orte_tmpdir_base",    mine,
                                      "-n",     std::to_string(ranks)};
  command.insert(command.end(), options.begin(), options.end());
  command.push_back(BuiltProgram(program));
  command.insert(command.end(), arguments.begin(), arguments.end());
  ProcessOptions process;
  process.deadline = std::chrono::seconds(200);  // MPI waits by spinning, beside other tests.
  return std::make_unique<Subprocess>(command, process);
}

}  // namespace tensormount
