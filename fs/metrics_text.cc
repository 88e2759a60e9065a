// SPDX-License-Identifier: Apache-2.0
// Writes lines of Prometheus' text format; characters that labels may not contain are escaped.
#include "fs/metrics_text.h"

#include <cmath>

#include <fmt/core.h>

#include "shard/utf8.h"

namespace tensormount::fs {
namespace {

std::string LabelText(std::string_view value) {
  const bool utf8 = IsUtf8(value);
  std::string out;
  for (const char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\\' || c == '"') {
      out += '\\';
      out += c;
    } else {
      // Replaces bytes that are not UTF-8, and other control characters, which could disturb a
      // terminal.
      out += byte < 0x20 || byte == 0x7F || (byte >= 0x80 && !utf8) ? '?' : c;
    }
  }
  return out;
}

}  // namespace

void MetricsText::Family(std::string_view name, Type type, std::string_view help) {
  family_ = "tensormount_" + std::string(name);
  const std::string_view word = type == Type::kCounter ? "counter"
                                : type == Type::kGauge ? "gauge"
                                                       : "histogram";
  text_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", family_, help, family_, word);
}

void MetricsText::Sample(Labels labels, double value) { Line("", labels, Number(value)); }

std::string MetricsText::Number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Inf" : "+Inf";
  return fmt::format("{}", value);
}

void MetricsText::Line(std::string_view suffix, Labels labels, const std::string& value) {
  text_ += family_;
  text_ += suffix;
  char before = '{';
  for (const auto& [label, text] : labels) {
    text_ += fmt::format("{}{}=\"{}\"", before, label, LabelText(text));
    before = ',';
  }
  if (before == ',') text_ += '}';
  text_ += " " + value + "\n";
}

}  // namespace tensormount::fs
