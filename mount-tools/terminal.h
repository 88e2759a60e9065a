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
#include <vector>

#include "tensormount/log.h"
#include "tensormount/status.h"

#include "base/thread.h"

namespace tensormount::tools {

// Exit statuses (docs/cli.md).
inline constexpr int kDone = 0;
inline constexpr int kCheckFailed = 1;
inline constexpr int kFailed = 2;

// The output of a command. Under mpirun rank 0 prints the results and the errors that all ranks
// share (Ranks::Fail). Text from outside is escaped (ShownText), and the command fails if its
// output cannot be written (a full disk, a closed pipe).
//
// Warn and Note are thread-safe: each is one fwrite of a whole line. All other functions are for
// the main thread.
class Terminal {
 public:
  // The options --json, --quiet and --verbose.
  bool json = false;
  bool quiet = false;
  bool verbose = false;
  // --log-level, for the library's log (tensormount/log.h). Without the option warnings and errors
  // are logged, and by a mount in the background also messages of level info.
  std::optional<LogLevel> log_level;
  // --root. Not in the argument structures, because OpenSource and FindSourceArgument take the
  // roots from the terminal.
  std::vector<std::string> roots;
  // --file: the file or index to read in a foreign directory; empty if the option was not given.
  std::string file;
  // --cache and --cache-size; empty if the option was not given (cache_options.h).
  std::string cache;
  std::string cache_size;

  enum class Colour { kRed, kGreen, kYellow };
  // Whether to use colours: only on a terminal, and not with --json, NO_COLOR or TERM=dumb.
  bool colours() const;
  // Width of the terminal at standard output; 80 if it is not a terminal.
  static int Columns();
  // The name that ends a line, of which `taken` columns are used already. On a terminal a long name
  // is shortened in the middle ("encoder....weight") to fit the line, but not below 16 columns. In
  // pipes and files, and with -v, it is unchanged.
  std::string LastName(std::string_view name, std::size_t taken) const;

  // Prints one line to standard output. `text` may come from outside, because it is escaped
  // (ShownText). Flush() reports errors of writing.
  void Line(std::string_view text);
  void Line(std::string_view text, Colour colour);
  // Prints several lines, or a line with colours. The caller must have escaped text from outside.
  void Text(std::string_view text);
  // Prints a JSON document or event on one line; text that is not UTF-8 (in file names) gets
  // replacement characters. This is a template, so that this header does not include the JSON
  // library.
  template <typename J>
  void Json(const J& document) {
    Line(document.dump(-1, ' ', false, J::error_handler_t::replace));
  }
  // Writes bytes to standard output unchanged.
  Status Write(const void* data, std::size_t size);
  // Returns kDone, or kFailed after an error line if standard output failed. A command calls it
  // last, because buffered output may fail only here.
  int Flush();

  // Prints "tensormount: CODE: message" and an optional hint line on standard error; further lines
  // of a message are indented. With --json it prints an object on one line instead, {"error": ...}
  // with the members of StatusJson and "hint". Returns kFailed.
  int Fail(const Status& status, std::string_view hint = {});
  void Warn(std::string_view text);  // Prints a warning on standard error; nothing with --quiet.
  // Prints additional information on standard error; nothing without --verbose.
  void Note(std::string_view text);

 private:
  bool output_failed_ = false;
  int output_errno_ = 0;
};

// The progress line of a long operation on standard error. It is shown only on a terminal, without
// --quiet and --json, and only after a second. The destructor erases it, so destroy this object
// before printing results. `done` and `total` are in bytes; a total of 0 means that it is unknown.
// All functions are thread-safe.
class Progress {
 public:
  Progress(const Terminal& terminal, std::string label);
  ~Progress();
  void Set(std::uint64_t done, std::uint64_t total);
  // The counter of bytes done, which operations increment directly.
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
  Thread thread_;
};

// A time as text, such as "1.23 s" or "12 ms".
std::string HumanSeconds(double seconds);
// A digest as 16 hexadecimal digits.
std::string DigestHex(std::uint64_t digest);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_TERMINAL_H_
