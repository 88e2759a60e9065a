// SPDX-License-Identifier: Apache-2.0
// Standard output and error (terminal.h): lines, colours, errors, progress.
#include "mount-tools/terminal.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "base/status_json.h"
#include "base/thread.h"
#include "mount-tools/shown_text.h"

namespace tensormount::tools {

bool Terminal::colours() const {
  if (json || isatty(STDOUT_FILENO) == 0) return false;
  const char* none = std::getenv("NO_COLOR");
  const char* kind = std::getenv("TERM");
  return (none == nullptr || *none == '\0') &&
         (kind == nullptr || std::string_view(kind) != "dumb");
}

// The text is escaped first, so that control characters in it cannot end the colour.
void Terminal::Line(std::string_view text, Colour colour) {
  if (!colours()) return Line(text);
  static constexpr const char* kCodes[] = {"\033[31m", "\033[32m", "\033[33m"};
  Text(kCodes[static_cast<std::size_t>(colour)] + ShownText(text, "\t") + "\033[0m");
}

int Terminal::Columns() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

std::string Terminal::LastName(std::string_view name, std::size_t taken) const {
  if (json || verbose || isatty(STDOUT_FILENO) == 0) return std::string(name);
  const std::string shown = ShownText(name, {});
  // Byte positions at which characters begin. Each character counts as one column.
  std::vector<std::size_t> starts;
  for (std::size_t i = 0; i < shown.size(); ++i) {
    if ((static_cast<unsigned char>(shown[i]) & 0xC0U) != 0x80U) starts.push_back(i);
  }
  const auto columns = static_cast<std::size_t>(std::max(Columns(), 1));
  const std::size_t room = std::max<std::size_t>(columns > taken ? columns - taken : 0, 16);
  if (starts.size() <= room) return shown;
  constexpr std::string_view kCut = "...";
  const std::size_t kept = room - kCut.size();
  // Two thirds of the kept characters are from the end, because the end of a key tells more than
  // its start: weight or bias, and of which layer.
  const std::size_t front = kept / 3;
  return shown.substr(0, starts[front]) + std::string(kCut) +
         shown.substr(starts[starts.size() - (kept - front)]);
}

void Terminal::Line(std::string_view text) { Text(ShownText(text, "\t")); }

void Terminal::Text(std::string_view text) {
  // After an error nothing more is printed; Flush() reports the error.
  if (output_failed_) return;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
      std::fputc('\n', stdout) == EOF) {
    output_failed_ = true;
    output_errno_ = errno;
  }
}

// The error is also stored, so that Flush() reports it even if the caller ignores the status.
Status Terminal::Write(const void* data, std::size_t size) {
  if (std::fwrite(data, 1, size, stdout) != size) {
    output_failed_ = true;
    output_errno_ = errno;
    return Status::FromErrno(output_errno_, "write", "standard output");
  }
  return {};
}

int Terminal::Flush() {
  // Standard output is buffered, so a full disk may be noticed only here.
  if (std::fflush(stdout) != 0 && !output_failed_) {
    output_failed_ = true;
    output_errno_ = errno;
  }
  if (!output_failed_) return kDone;
  return Fail(Status::FromErrno(output_errno_, "write", "standard output"));
}

int Terminal::Fail(const Status& status, std::string_view hint) {
  if (json) {
    nlohmann::ordered_json error = StatusJson(status);
    if (!hint.empty()) error["hint"] = hint;
    const std::string line = nlohmann::ordered_json{{"error", std::move(error)}}.dump(
                                 -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
                             "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
    return kFailed;
  }
  std::string line = "tensormount: ";
  // Line breaks in a message are kept, but lines after the first are indented, so that they cannot
  // look like an error line.
  for (const char c : ShownText(status.ToString(), "\n")) {
    line += c;
    if (c == '\n') line += "    ";
  }
  line += '\n';
  if (!hint.empty()) line += fmt::format("tensormount: hint: {}\n", ShownText(hint));
  std::fwrite(line.data(), 1, line.size(), stderr);
  return kFailed;
}

void Terminal::Warn(std::string_view text) {
  if (quiet) return;
  const std::string line = fmt::format("tensormount: warning: {}\n", ShownText(text));
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void Terminal::Note(std::string_view text) {
  if (!verbose) return;
  const std::string line = fmt::format("tensormount: {}\n", ShownText(text));
  std::fwrite(line.data(), 1, line.size(), stderr);
}

std::string HumanSeconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.0f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string DigestHex(std::uint64_t digest) { return fmt::format("{:016x}", digest); }

Progress::Progress(const Terminal& terminal, std::string label)
    : label_(ShownText(label)), start_(std::chrono::steady_clock::now()) {
  // No thread is started if the progress line would not be visible.
  if (terminal.quiet || terminal.json || isatty(STDERR_FILENO) == 0) return;
  thread_ = Thread([this] { Run(); });
}

Progress::~Progress() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Progress::Set(std::uint64_t done, std::uint64_t total) {
  done_ = done;
  total_ = total;
}

// Shows the counters five times a second.
void Progress::Run() {
  std::unique_lock lock(mutex_);
  bool shown = false;
  // The first wait is a second, so shorter operations show nothing.
  auto pause = std::chrono::milliseconds(1000);
  while (!wake_.wait_for(lock, pause, [this] { return stop_; })) {
    pause = std::chrono::milliseconds(200);
    const std::uint64_t done = done_;
    const std::uint64_t total = total_;
    const double elapsed =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const double rate = static_cast<double>(done) / elapsed;
    // Returns to the start of the line and erases it.
    std::string line = fmt::format("\r\033[K{}: {}", label_, HumanBytes(done));
    if (total > 0) line += fmt::format(" of {}", HumanBytes(total));
    line += fmt::format(", {}/s", HumanBytes(static_cast<std::uint64_t>(rate)));
    if (total > done && rate > 0) {
      line += fmt::format(", {:.0f} s left", static_cast<double>(total - done) / rate);
    }
    std::fwrite(line.data(), 1, line.size(), stderr);
    shown = true;
  }
  if (shown) std::fputs("\r\033[K", stderr);
}

}  // namespace tensormount::tools
