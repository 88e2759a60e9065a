// SPDX-License-Identifier: Apache-2.0
// The rules of `--shard`: rows, cols, dim:K, grid:AxB, flat, replicate, or a JSON file with a rule
// for each pattern of keys. Uneven extents are cut like torch.chunk: ceil-sized parts first, the
// last ones shorter or empty.
#include "state/shard_rule.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/file_system_for.h"
#include "base/glob.h"

namespace tensormount {
namespace {

std::optional<std::int64_t> ParseNumber(std::string_view text) {
  std::int64_t v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (error != std::errc() || end != text.data() + text.size() || v < 0) return std::nullopt;
  return v;
}

// Cuts an axis like torch.chunk: pieces of ceil(extent / parts), the last ones shorter or empty.
// Sizes are multiples of `unit` elements, so that a cut never falls inside a byte.
void ChunkAxis(std::int64_t extent, std::int64_t parts, std::int64_t index, std::int64_t unit,
               std::int64_t* begin, std::int64_t* count) {
  const std::int64_t ceil = extent / parts + (extent % parts != 0 ? 1 : 0);
  const std::int64_t step = (ceil + unit - 1) / unit * unit;
  // index * step cannot pass 2^63: index < parts, and step <= extent / parts + 1 + unit.
  *begin = std::min(extent, index * step);
  *count = std::min(step, extent - *begin);
}

}  // namespace

Result<Box> CutBox(DType dtype, const Dims& shape, const Dims& parts, const Dims& index) {
  if (parts.rank() > shape.rank() || index.rank() != parts.rank()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("a grid of {} axes does not fit a tensor of {} axes", parts.rank(),
                              shape.rank()));
  }
  const Box whole = Box::Whole(shape);
  Dims begin = whole.begin();
  Dims extent = whole.extent();
  for (int axis = 0; axis < parts.rank(); ++axis) {
    if (index[axis] < 0 || index[axis] >= parts[axis]) {
      return Status(
          Code::kInvalidArgument,
          fmt::format("piece index {} is out of range for {} pieces", index[axis], parts[axis]));
    }
    // The number of bits of one step along this axis, modulo 8. `unit` is the smallest number of
    // steps that are whole bytes.
    std::int64_t step_bits = InfoOf(dtype).bits % 8;
    for (int inner = axis + 1; inner < shape.rank(); ++inner) {
      step_bits = step_bits * (shape[inner] % 8) % 8;
    }
    const std::int64_t unit = 8 / std::gcd(std::int64_t{8}, step_bits);
    ChunkAxis(shape[axis], parts[axis], index[axis], unit, &begin[axis], &extent[axis]);
  }
  return Box::Make(begin, extent);
}

Result<Region> CutFlat(DType dtype, const Box& box, std::int64_t parts, std::int64_t index) {
  if (index < 0 || index >= parts) {
    return Status(Code::kInvalidArgument,
                  fmt::format("piece index {} is out of range for {} pieces", index, parts));
  }
  std::int64_t first = 0;
  std::int64_t count = 0;
  // Elements of fp4 and fp6 share bytes: 2 or 4 of them make whole bytes.
  const std::int64_t unit =
      8 / std::gcd(std::int64_t{8}, static_cast<std::int64_t>(InfoOf(dtype).bits));
  ChunkAxis(box.volume(), parts, index, unit, &first, &count);
  return Region::Flat(box, first, count);
}

Result<ShardRule::Rule> ShardRule::ParseRule(std::string_view text, int ranks) {
  Rule rule;
  if (text == "rows") return rule;
  if (text == "cols") {
    rule.axis = 1;
    return rule;
  }
  if (text == "flat") {
    rule.kind = Rule::Kind::kFlat;
    return rule;
  }
  if (text == "replicate") {
    rule.kind = Rule::Kind::kReplicate;
    return rule;
  }
  if (text.starts_with("dim:")) {
    const auto axis = ParseNumber(text.substr(4));
    if (!axis || *axis >= kMaxRank) {
      return Status(Code::kInvalidArgument,
                    fmt::format("shard rule '{}': expected an axis from 0 to {} after dim:", text,
                                kMaxRank - 1));
    }
    rule.axis = static_cast<int>(*axis);
    return rule;
  }
  if (text.starts_with("grid:")) {
    rule.kind = Rule::Kind::kGrid;
    std::string_view rest = text.substr(5);
    std::int64_t product = 1;
    for (;;) {
      const std::size_t x = rest.find('x');
      const auto n = ParseNumber(rest.substr(0, x));
      if (!n || *n < 1 || *n > 1 << 20 || product > 1 << 20 || rule.grid.rank() == kMaxRank) {
        return Status(Code::kInvalidArgument,
                      fmt::format("shard rule '{}': expected a grid like 2x4 after grid:", text));
      }
      rule.grid.push_back(*n);
      product *= *n;
      if (x == std::string_view::npos) break;
      rest = rest.substr(x + 1);
    }
    if (product != ranks) {
      return Status(Code::kInvalidArgument,
                    fmt::format("shard rule '{}' is for {} ranks, but there {} {}", text, product,
                                ranks == 1 ? "is" : "are", ranks));
    }
    return rule;
  }
  return Status(
      Code::kInvalidArgument,
      fmt::format(
          "shard rule '{}': expected rows, cols, dim:K, grid:AxB, flat, replicate or a JSON file",
          text));
}

Result<ShardRule> ShardRule::Parse(const std::string& text, int ranks) {
  ShardRule out;
  out.ranks_ = ranks;
  TENSORMOUNT_ASSIGN_OR_RETURN(Rule rule, ParseRule(text, ranks));
  out.matchers_.push_back({"*", rule});
  return out;
}

Result<ShardRule> ShardRule::ParseOrRead(const std::string& text, int ranks) {
  if (!text.ends_with(".json")) return Parse(text, ranks);
  ShardRule out;
  out.ranks_ = ranks;
  TENSORMOUNT_ASSIGN_OR_RETURN(FileSystem* const fs, FileSystemFor(text));
  TENSORMOUNT_ASSIGN_OR_RETURN(std::string bytes, fs->ReadFile(text, 16 << 20));
  const auto json = nlohmann::json::parse(bytes, nullptr, /*allow_exceptions=*/false);
  if (!json.is_array()) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("{}: expected a JSON list of {{\"match\": GLOB, \"shard\": RULE}}", text));
  }
  for (std::size_t i = 0; i < json.size(); ++i) {
    const auto& item = json[i];
    if (!item.is_object() || item.size() != 2 || !item.contains("match") ||
        !item.contains("shard") || !item["match"].is_string() || !item["shard"].is_string()) {
      return Status(
          Code::kInvalidArgument,
          fmt::format("{}: entry {}: expected the strings \"match\" and \"shard\"", text, i));
    }
    auto rule = ParseRule(item["shard"].get<std::string>(), ranks);
    if (!rule.ok()) return rule.status().WithContext(fmt::format("{}: entry {}", text, i));
    out.matchers_.push_back({item["match"].get<std::string>(), rule.value()});
  }
  out.matchers_.push_back({"*", Rule{}});
  return out;
}

const ShardRule::Rule* ShardRule::RuleOf(std::string_view key) const {
  const std::string name(key);
  for (const Matcher& matcher : matchers_) {
    if (GlobMatches(matcher.glob, name)) return &matcher.rule;
  }
  return nullptr;
}

bool ShardRule::Cuts(std::string_view key, int axes) const {
  const Rule* rule = RuleOf(key);
  if (rule == nullptr) return false;
  switch (rule->kind) {
    case Rule::Kind::kReplicate:
      return false;
    case Rule::Kind::kFlat:
      return true;
    case Rule::Kind::kGrid:
      return rule->grid.rank() <= axes;
    case Rule::Kind::kDim:
      return rule->axis < axes;
  }
  return false;
}

Result<Region> ShardRule::RegionOf(std::string_view key, DType dtype, const Dims& shape,
                                   int rank) const {
  const Rule* rule = RuleOf(key);
  if (rule == nullptr) return Status(Code::kInternal, "no rule matches");
  return Cut(*rule, dtype, shape, rank, ranks_);
}

Result<Region> ShardRule::Cut(const Rule& rule, DType dtype, const Dims& shape, int rank,
                              int ranks) {
  const Box whole = Box::Whole(shape);
  if (rule.kind == Rule::Kind::kReplicate) return Region(whole);
  if (rule.kind == Rule::Kind::kFlat) return CutFlat(dtype, whole, ranks, rank);
  Dims grid;
  if (rule.kind == Rule::Kind::kGrid) {
    grid = rule.grid;
  } else {
    if (rule.axis >= shape.rank()) return Region(whole);
    grid = Dims::Filled(rule.axis + 1, 1);
    grid[rule.axis] = ranks;
  }
  if (grid.rank() > shape.rank()) return Region(whole);
  Dims index = Dims::Filled(grid.rank(), 0);
  std::int64_t rest = rank;
  for (int axis = grid.rank() - 1; axis >= 0; --axis) {
    index[axis] = rest % grid[axis];
    rest /= grid[axis];
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, CutBox(dtype, shape, grid, index));
  return Region(box);
}

}  // namespace tensormount
