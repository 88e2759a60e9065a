// SPDX-License-Identifier: Apache-2.0
#include "tests/support/interleaving.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "tests/support/observed_file_system.h"

namespace tensormount {
namespace {

// Who may go on: the director, or one program. All that is here is under one mutex; a program that
// may not go on waits within its call.
class Stage {
 public:
  enum class State { kNotBegun, kStopped, kAsleep, kEnded };
  struct Actor {
    State state = State::kNotBegun;
    int left = 0;  // Deciding calls until it is stopped.
    bool kill = false;
    Interleaving::Ended ended;
  };

  Stage(MemoryFileSystem& fs, std::size_t programs, const Interleaving::Decides& decides,
        bool patient)
      : fs_(fs), decides_(decides), patient_(patient), actors_(programs) {}

  // ---- The director ----

  // Lets a program go on until it stops, sleeps or ends.
  void Let(int program, const std::function<void()>& begin) {
    std::unique_lock lock(mutex_);
    Actor& actor = Of(program);
    current_ = program;
    if (actor.state == State::kNotBegun) {
      actor.state = State::kStopped;
      begin();
    }
    changed_.notify_all();
    changed_.wait(lock, [&] { return current_ == kDirector; });
  }
  Actor& Of(int program) { return actors_[static_cast<std::size_t>(program)]; }
  void Wake(int program) { Of(program).state = State::kStopped; }

  // ---- A program's thread ----

  void Enter(int program) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return current_ == program; });
  }
  void Leave(int program) {
    const std::lock_guard lock(mutex_);
    Of(program).state = State::kEnded;
    current_ = kDirector;
    changed_.notify_all();
  }
  Status Call(int program, const FileEvent& event) {
    std::unique_lock lock(mutex_);
    Actor& actor = Of(program);
    const Status killed(Code::kUnavailable, "the program was killed");
    if (actor.ended.killed) return killed;
    if (!decides_(event)) return Status();
    while (actor.left == 0 && !actor.kill) HandOver(lock, program, State::kStopped);
    if (actor.left == 0) {
      actor.ended.killed = true;
      return killed;
    }
    --actor.left;
    actor.ended.calls.push_back(event);
    return Status();
  }
  void Sleep(int program, std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    if (Of(program).ended.killed) return;
    if (patient_) {
      const bool others = HandOver(lock, program, State::kAsleep);
      if (others) return;
    }
    fs_.Advance(time);
  }
  // Whether anybody but the one who sleeps made progress meanwhile: the director says.
  void TellSleeper(bool others) { others_ = others; }

 private:
  static constexpr int kDirector = -1;

  bool HandOver(std::unique_lock<std::mutex>& lock, int program, State state) {
    Of(program).state = state;
    others_ = false;
    current_ = kDirector;
    changed_.notify_all();
    changed_.wait(lock, [&] { return current_ == program; });
    return others_;
  }

  MemoryFileSystem& fs_;
  const Interleaving::Decides& decides_;
  const bool patient_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int current_ = kDirector;
  bool others_ = false;
  std::vector<Actor> actors_;
};

class ProgramFileSystem final : public ObservedFileSystem {
 public:
  ProgramFileSystem(MemoryFileSystem& fs, Stage& stage, int program)
      : ObservedFileSystem(
            fs, [&stage, program](const FileEvent& event) { return stage.Call(program, event); }),
        fs_(fs),
        stage_(stage),
        program_(program) {}
  Result<std::shared_ptr<const std::string>> PinDirectory(const std::string& path) override {
    return fs_.PinDirectory(path);
  }
  void SleepFor(std::chrono::milliseconds time) override { stage_.Sleep(program_, time); }

 private:
  MemoryFileSystem& fs_;
  Stage& stage_;
  const int program_;
};

}  // namespace

std::vector<Interleaving::Ended> Interleaving::Run(const std::vector<Move>& moves,
                                                   Sleepers sleepers,
                                                   const std::function<void(int)>& at_end) {
  Stage stage(fs_, programs_.size(), decides_, sleepers == Sleepers::kLetOthersGo);
  std::vector<std::unique_ptr<ProgramFileSystem>> systems;
  std::vector<std::thread> threads(programs_.size());
  for (std::size_t p = 0; p < programs_.size(); ++p) {
    systems.push_back(std::make_unique<ProgramFileSystem>(fs_, stage, static_cast<int>(p)));
  }
  const auto let = [&](int program) {
    const auto p = static_cast<std::size_t>(program);
    stage.Let(program, [&, program, p] {
      threads[p] = std::thread([&, program, p] {
        stage.Enter(program);
        programs_[p].run(*systems[p]);
        stage.Leave(program);
      });
    });
    if (stage.Of(program).state == Stage::State::kEnded && threads[p].joinable()) {
      threads[p].join();
      if (at_end) at_end(program);
    }
  };
  const auto count = static_cast<int>(programs_.size());
  // Until it stops or ends. While it sleeps another one goes on to its end.
  const auto go_on = [&](int program, int calls, bool kill) {
    Stage::Actor& actor = stage.Of(program);
    if (actor.state == Stage::State::kEnded) return;
    actor.left = calls;
    actor.kill = kill;
    let(program);
    while (actor.state == Stage::State::kAsleep) {
      bool others = false;
      for (int other = 0; other < count && !others; ++other) {
        Stage::Actor& them = stage.Of(other);
        if (other == program || them.state == Stage::State::kEnded ||
            them.state == Stage::State::kAsleep) {
          continue;
        }
        them.left = Move::kToItsEnd;
        let(other);
        others = true;
      }
      // Who else sleeps may look again.
      for (int other = 0; other < count; ++other) {
        if (other != program && stage.Of(other).state == Stage::State::kAsleep) stage.Wake(other);
      }
      stage.Wake(program);
      stage.TellSleeper(others);
      let(program);
    }
  };
  for (const Move& move : moves) go_on(move.program, move.calls, move.killed);
  for (int p = 0; p < count; ++p) go_on(p, Move::kToItsEnd, false);
  std::vector<Ended> ended;
  for (int p = 0; p < count; ++p) ended.push_back(std::move(stage.Of(p).ended));
  return ended;
}

std::string DescribeMoves(const std::vector<Interleaving::Program>& programs,
                          const std::vector<Interleaving::Move>& moves) {
  std::string text;
  for (const Interleaving::Move& move : moves) {
    if (!text.empty()) text += ", ";
    text += programs[static_cast<std::size_t>(move.program)].name;
    if (move.calls != Interleaving::Move::kToItsEnd) {
      text += (move.killed ? " killed before call " : " up to call ") + std::to_string(move.calls);
    }
  }
  return text;
}

}  // namespace tensormount
