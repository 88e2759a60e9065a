// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_TERMINAL_H_
#define TENSORMOUNT_MOUNT_TOOLS_TERMINAL_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tensormount/log.h"
#include "tensormount/status.h"

namespace tensormount::tools {

// Exit statuses (docs/cli.md).
inline constexpr int kDone = 0;
inline constexpr int kCheckFailed = 1;
inline constexpr int kFailed = 2;

// Where a command prints, and how. One for the process, made by main. Under mpirun only rank 0
// prints results; errors come from whoever has them.
//
// Two rules that it keeps for all commands: text from outside never does anything but show, and
// output that could not be written (a full disk, a closed pipe) is a failure of the command and not
// silence.
// Thread-safe for Warn and Note, which ranks call from their threads: each is one fwrite of a whole
// line. All else is for the main thread.
class Terminal {
 public:
  // Set once, by the options.
  bool json = false;
  bool quiet = false;
  bool verbose = false;
  // --log-level, of what the library logs (tensormount/log.h); where it is not given, warnings, and
  // of a mount in the background infos too.
  std::optional<LogLevel> log_level;
  // --root, of the commands that open sources.
  // Here and not in each structure of arguments: OpenSource and FindSource take them from the
  // terminal.
  std::vector<std::string> roots;
  // --file: of a source that is a folder of a foreign format, the file or index to read; empty: not
  // given.
  std::string file;

  // Colours are for people who look at a terminal: not in files, pipes or JSON, nor where NO_COLOR
  // is set or TERM says "dumb".
  enum class Colour { kRed, kGreen, kYellow };
  bool colours() const;
  // Columns of the terminal that standard output is; 80 where it is none.
  static int Columns();
  // A name at the end of a line, of which `taken` columns are full: on a terminal it is shortened
  // in the middle ("encoder....weight") where the line would wrap, but not below 16 columns. As it
  // is in pipes and files, and with -v.
  std::string LastName(std::string_view name, std::size_t taken) const;

  // Standard output, one line whatever the text holds: keys and names come from outside, and do no
  // more than show (ShownText). Failures of the pipe end up in Flush().
  void Line(std::string_view text);
  void Line(std::string_view text, Colour colour);
  // Several lines, or with colours of ours: what came from outside was made harmless before.
  void Text(std::string_view text);
  // A document or an event on a line of its own. Text that is not UTF-8 (names of files may be
  // anything) is shown with replacement characters.
  // J is nlohmann's; a template keeps that header out of this one.
  template <typename J>
  void Json(const J& document) {
    Line(document.dump(-1, ' ', false, J::error_handler_t::replace));
  }
  // Bytes to standard output as they are.
  Status Write(const void* data, std::size_t size);
  // kDone, or kFailed with an error line where standard output could not take it all.
  // The last call of a command that printed: buffered output fails only here.
  int Flush();

  // "tensormount: CODE: message" and, where there is one, a line about what to do. Further lines of
  // a message are indented: none looks like one of ours. With --json an object on one line instead,
  // on standard error too: {"error": {"code", "message"}}, and "hint". Returns kFailed.
  int Fail(const Status& status, std::string_view hint = {});
  void Warn(std::string_view text);  // Not with --quiet.
  // What happened beside the result; standard error, only with --verbose.
  void Note(std::string_view text);

 private:
  bool output_failed_ = false;
  int output_errno_ = 0;
};

// A line on standard error that shows how far a long work is: only on a terminal, only after a
// second, erased at the end. `done` and `total` in bytes; total 0 = not known.
// Made around the work that it shows; destroying it takes the line away, before the command prints
// its result. Set and the counter may be used from any thread.
class Progress {
 public:
  Progress(const Terminal& terminal, std::string label);
  ~Progress();
  void Set(std::uint64_t done, std::uint64_t total);
  // Counts on its own: for work that bumps a counter.
  std::atomic<std::uint64_t>& done() { return done_; }
  void SetTotal(std::uint64_t total) { total_ = total; }
  void AddTotal(std::uint64_t bytes) { total_ += bytes; }

 private:
  void Run();
  std::string label_;
  std::atomic<std::uint64_t> done_{0};
  std::atomic<std::uint64_t> total_{0};
  std::chrono::steady_clock::time_point start_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;
};

// "1.23 s", "12 ms".
std::string HumanSeconds(double seconds);
// 16 hex digits, as the digest is printed everywhere.
std::string DigestHex(std::uint64_t digest);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_TERMINAL_H_
