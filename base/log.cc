// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <atomic>
#include <mutex>
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
  std::string line(message);
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return line;
}

namespace {

struct Logger {
  std::atomic<LogLevel> level{LogLevel::kWarning};
  std::mutex mutex;  // Held while the sink runs, so that a replaced sink is never running.
  std::function<void(LogLevel, std::string_view)> sink;
};

Logger& Global() {
  static auto* logger = new Logger;  // Never destroyed: threads may log during exit.
  return *logger;
}

void ToStandardError(LogLevel level, std::string_view message) {
  std::string line = "tensormount: ";
  line.append(LogLevelName(level)).append(": ").append(OneLine(message));
  line.push_back('\n');
  // One write, so that lines of several processes do not mix. Nobody could be told of a failure.
  [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, line.data(), line.size());
}

thread_local bool in_sink = false;

}  // namespace

void Log(LogLevel level, std::string_view message) {
  Logger& logger = Global();
  if (level < logger.level.load(std::memory_order_relaxed)) return;
  if (in_sink) {  // A sink that logs must not wait for itself.
    ToStandardError(level, message);
    return;
  }
  const std::lock_guard lock(logger.mutex);
  if (!logger.sink) {
    ToStandardError(level, message);
    return;
  }
  in_sink = true;
  try {
    logger.sink(level, message);
  } catch (...) {
    ToStandardError(level, message);
  }
  in_sink = false;
}

void SetLogLevel(LogLevel level) { Global().level.store(level, std::memory_order_relaxed); }

void SetLogSink(std::function<void(LogLevel, std::string_view)> sink) {
  Logger& logger = Global();
  const std::lock_guard lock(logger.mutex);
  logger.sink = std::move(sink);
}

}  // namespace tensormount
