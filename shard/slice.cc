// SPDX-License-Identifier: Apache-2.0
// ParseSlice of tensormount/box.h: NumPy's a:b notation, with negative numbers and without steps. A
// separate file because the text form is for people and file names, the rest of box.h for code.
#include <charconv>
#include <string>

#include "tensormount/box.h"

#include "shard/box_access.h"

namespace tensormount {
namespace {

std::string_view Trim(std::string_view s) {
  while (!s.empty() && s.front() == ' ') s.remove_prefix(1);
  while (!s.empty() && s.back() == ' ') s.remove_suffix(1);
  return s;
}

bool ParseNumber(std::string_view s, std::int64_t* value) {
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), *value);
  return error == std::errc() && end == s.data() + s.size();
}

// Parses one part between commas, for an axis of `extent` elements.
Status ParsePart(std::string_view part, std::int64_t extent, std::int64_t* begin,
                 std::int64_t* count, bool* drop) {
  const std::string named = "'" + std::string(part) + "'";
  const std::size_t colon = part.find(':');
  if (colon == std::string_view::npos) {
    std::int64_t index = 0;
    if (!ParseNumber(part, &index)) {
      return Status(Code::kInvalidArgument, named + " is neither a number nor a range");
    }
    if (index < -extent || index >= extent) {
      return Status(Code::kInvalidArgument,
                    named + " is out of range for " + std::to_string(extent) + " elements");
    }
    *begin = index < 0 ? index + extent : index;
    *count = 1;
    *drop = true;
    return Status();
  }
  std::string_view low = Trim(part.substr(0, colon));
  std::string_view high = part.substr(colon + 1);
  if (const std::size_t second = high.find(':'); second != std::string_view::npos) {
    // Some programs print "a:b:1" for "a:b".
    const std::string_view step = Trim(high.substr(second + 1));
    if (!step.empty() && step != "1") {
      return Status(Code::kInvalidArgument, named + ": only steps of 1 are supported");
    }
    high = high.substr(0, second);
  }
  high = Trim(high);
  std::int64_t from = 0;
  std::int64_t to = extent;
  if ((!low.empty() && !ParseNumber(low, &from)) || (!high.empty() && !ParseNumber(high, &to))) {
    return Status(Code::kInvalidArgument, named + " is not a range of numbers");
  }
  if (from < -extent || from > extent || to < -extent || to > extent) {
    return Status(Code::kInvalidArgument,
                  named + " is out of range for " + std::to_string(extent) + " elements");
  }
  // Negative numbers count from the end, as in Python. An index out of range was refused above,
  // because Python's clipping would silently return less than requested.
  if (from < 0) from += extent;
  if (to < 0) to += extent;
  if (to < from) return Status(Code::kInvalidArgument, named + " ends before it begins");
  *begin = from;
  *count = to - from;
  *drop = false;
  return Status();
}

}  // namespace

// Parses from left to right, one part per axis. Errors name the whole slice and the wrong part.
Result<Slice> ParseSlice(std::string_view text, const Dims& shape) {
  Dims begin = Dims::Filled(shape.rank(), 0);
  Dims extent = shape;
  Slice slice;
  int axis = 0;
  std::string_view rest = Trim(text);
  const auto context = [&] {
    return "slice [" + std::string(text.substr(0, 256)) + "] of shape " + shape.ToString();
  };
  while (!rest.empty()) {
    if (axis == shape.rank()) {
      return Status(Code::kInvalidArgument, context() + ": more parts than axes");
    }
    const std::size_t comma = rest.find(',');
    const std::string_view part = Trim(rest.substr(0, comma));
    bool drop = false;
    if (Status s = ParsePart(part, shape[axis], &begin[axis], &extent[axis], &drop); !s.ok()) {
      return s.WithContext(context());
    }
    if (!drop) slice.kept.push_back(extent[axis]);
    ++axis;
    if (comma == std::string_view::npos) break;
    rest = rest.substr(comma + 1);
    if (Trim(rest).empty()) {
      return Status(Code::kInvalidArgument, context() + ": nothing after the last comma");
    }
  }
  for (; axis < shape.rank(); ++axis) slice.kept.push_back(shape[axis]);
  slice.box = BoxAccess::Make(begin, extent);
  return slice;
}

}  // namespace tensormount
