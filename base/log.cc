// SPDX-License-Identifier: Apache-2.0
// Log lines, each written by one write(2). There are few: errors are returned to the caller, and
// mostly events for which no caller waits are logged. Programs that embed the library install their
// own sink (SetLogSink).
#include "base/log.h"

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <pthread.h>
#include <string>
#include <unistd.h>
#include <utility>

namespace tensormount {

std::string_view LogLevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "DEBUG";
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      return "ERROR";
  }
  return "ERROR";
}

std::string OneLine(std::string_view message) {
  std::string line;
  line.reserve(message.size());
  const auto byte = [&](std::size_t at) {
    return at < message.size() ? static_cast<unsigned char>(message[at]) : 0;
  };
  for (std::size_t i = 0; i < message.size(); ++i) {
    const bool c1 = byte(i) == 0xC2 && byte(i + 1) >= 0x80 && byte(i + 1) <= 0x9F;
    // U+200B to U+200F, U+2028 to U+202E, U+2060 to U+206F: invisible, or change text direction.
    const bool mark = byte(i) == 0xE2 &&
                      ((byte(i + 1) == 0x80 && byte(i + 2) >= 0x8B &&
                        (byte(i + 2) <= 0x8F || (byte(i + 2) >= 0xA8 && byte(i + 2) <= 0xAE))) ||
                       (byte(i + 1) == 0x81 && byte(i + 2) >= 0xA0 && byte(i + 2) <= 0xAF));
    const bool plain = byte(i) >= 0x20 && byte(i) != 0x7F && !c1 && !mark;
    line += plain ? message[i] : ' ';
    i += c1 ? 1 : mark ? 2 : 0;
  }
  return line;
}

namespace {

using Sink = std::function<void(LogLevel, std::string_view)>;

struct Logger {
  std::atomic<LogLevel> level{LogLevel::kWarning};
  std::mutex mutex;  // Held while the sink runs: after SetLogSink the old sink is not running.
  // A pointer, so that a child forked during SetLogSink has the old sink or the new one, and not a
  // half-written one.
  std::unique_ptr<const Sink> sink;
};

// Whether this thread is inside the sink; it must then not lock the logger again.
// Aligned because of the linker mold 1.10, which begins the segment that becomes read-only at the
// thread-local variables. If these end at a page boundary and the next section has a larger
// alignment, the program cannot be loaded.
alignas(64) thread_local bool in_sink = false;

// fork does not wait for the lock, because a sink may take any time, and may wait for a lock of the
// forking thread (Python's). The child re-creates the mutex, because its holder does not exist
// there.
Logger& Global() {
  static auto* logger = new Logger;  // Never destroyed: threads may log during exit.
  static const int noted = pthread_atfork(nullptr, nullptr, [] {
    if (!in_sink) new (&logger->mutex) std::mutex;
  });
  (void)noted;
  return *logger;
}

void WriteToStandardError(LogLevel level, std::string_view message) {
  std::string line = "tensormount: ";
  line.append(LogLevelName(level)).append(": ").append(OneLine(message));
  line.push_back('\n');
  // One write, so that lines of several processes do not mix. A failure cannot be reported.
  [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

void Log(LogLevel level, std::string_view message) {
  Logger& logger = Global();
  if (level < logger.level.load(std::memory_order_relaxed)) return;
  if (in_sink) {  // The sink itself logs; this thread already holds logger.mutex.
    WriteToStandardError(level, message);
    return;
  }
  const std::lock_guard lock(logger.mutex);
  if (logger.sink == nullptr) {
    WriteToStandardError(level, message);
    return;
  }
  in_sink = true;
  // The sink is the program's code, and Log is called where no exception may escape (threads,
  // destructors).
  try {
    (*logger.sink)(level, message);
  } catch (...) {
    WriteToStandardError(level, message);
  }
  in_sink = false;
}

void SetLogLevel(LogLevel level) { Global().level.store(level, std::memory_order_relaxed); }

void SetLogSink(std::function<void(LogLevel, std::string_view)> sink) {
  auto made = sink ? std::make_unique<const Sink>(std::move(sink)) : nullptr;
  Logger& logger = Global();
  const std::lock_guard lock(logger.mutex);
  logger.sink.swap(made);
}

}  // namespace tensormount
