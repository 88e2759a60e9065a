// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_METRICS_TEXT_H_
#define TENSORMOUNT_FS_METRICS_TEXT_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace tensormount::fs {

// Writes Prometheus' text format 0.0.4 (.tensormount/metrics) as a sequence of families of samples.
// Not thread-safe.
class MetricsText {
 public:
  using Labels = std::initializer_list<std::pair<std::string_view, std::string_view>>;
  enum class Type { kCounter, kGauge, kHistogram };

  // Begins a family; its samples follow before the next family. `name` lacks the common prefix
  // "tensormount_", is unique in a text, and for a counter ends in "_total".
  void Family(std::string_view name, Type type, std::string_view help);
  // Adds a sample to the last family.
  template <std::integral T>
  void Sample(Labels labels, T value) {
    Line("", labels, std::to_string(value));
  }
  void Sample(Labels labels, double value);
  // One sample of a histogram: `suffix` is "_bucket" (with the label le), "_sum" or "_count".
  void Part(std::string_view suffix, Labels labels, const std::string& value) {
    Line(suffix, labels, value);
  }
  // A family of one sample without labels.
  template <typename T>
  void One(std::string_view name, Type type, std::string_view help, T value) {
    Family(name, type, help);
    Sample({}, value);
  }
  static std::string Number(double value);

  std::string Take() && { return std::move(text_); }

 private:
  void Line(std::string_view suffix, Labels labels, const std::string& value);

  std::string text_;
  std::string family_;
};

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_METRICS_TEXT_H_
