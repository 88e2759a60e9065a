// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_INTERLEAVING_H_
#define TENSORMOUNT_TESTS_SUPPORT_INTERLEAVING_H_

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/file_system.h"
#include "tests/support/memory_file_system.h"
#include "tests/support/observed_file_system.h"

namespace tensormount {

// Runs programs that share a file system one at a time, and changes from one to the other, or ends
// one as kill -9 does, exactly where a schedule says: before a call that decides something.
//
//   Interleaving run(fs, {prune, pin}, decides);
//   run.Run({{.program = 0, .calls = 7}, {.program = 1}, {.program = 0}});
//
// Each program is the code as it is, on a thread of its own, over a FileSystem of its own. One that
// sleeps waits for another one: that goes on until its end, and time passes only where all sleep.
class Interleaving {
 public:
  struct Program {
    std::string name;
    std::function<void(FileSystem&)> run;
  };
  struct Move {
    static constexpr int kToItsEnd = std::numeric_limits<int>::max();
    int program = 0;
    int calls = kToItsEnd;  // Deciding calls that it makes before it is stopped ahead of the next.
    bool killed = false;    // Instead of stopped: no call of it has any effect from there on.
  };
  // Patient: who sleeps lets another one go on. Otherwise its time passes, as where the other one
  // is slow: until the deadline of its wait if need be.
  enum class Sleepers { kLetOthersGo, kLoseTime };
  using Decides = std::function<bool(const FileEvent&)>;

  Interleaving(MemoryFileSystem& fs, std::vector<Program> programs, Decides decides)
      : fs_(fs), programs_(std::move(programs)), decides_(std::move(decides)) {}

  struct Ended {
    bool killed = false;
    std::vector<FileEvent> calls;  // The deciding calls that it made.
  };
  // One entry a program. What no move brings to its end goes on to it, in the order of programs.
  // `at_end` is called when a program has ended, before another one goes on.
  std::vector<Ended> Run(const std::vector<Move>& moves, Sleepers sleepers = Sleepers::kLetOthersGo,
                         const std::function<void(int)>& at_end = {});

 private:
  MemoryFileSystem& fs_;
  const std::vector<Program> programs_;
  const Decides decides_;
};

// "prune to its call 7 (rename /s/step-1), pin, prune" for messages of tests.
std::string DescribeMoves(const std::vector<Interleaving::Program>& programs,
                          const std::vector<Interleaving::Move>& moves);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_INTERLEAVING_H_
