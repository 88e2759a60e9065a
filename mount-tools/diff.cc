// SPDX-License-Identifier: Apache-2.0
// `tensormount diff` (commands.h): compares two sources (index/read/compare.h), as text or JSON.
// Each mismatch is printed when it is found, so a diff of large checkpoints shows its first lines
// early and takes little memory. The summary comes last. With --sort the rows of --stats are
// printed after all other mismatches.
#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "index/read/compare.h"
#include "index/read/report_json.h"
#include "mount-tools/commands.h"
#include "mount-tools/sort_column.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

// The columns of --stats that rows can be sorted by, the largest change first.
constexpr SortColumn<ValueChange> kChangeColumns[] = {
    {"changed", [](const ValueChange& c) { return c.changed_share(); }},
    {"max", [](const ValueChange& c) { return c.max_abs; }},
    {"mean", [](const ValueChange& c) { return c.mean_abs(); }},
    {"l2", [](const ValueChange& c) { return c.l2_change(); }},
    {"cosine", [](const ValueChange& c) { return c.cosine(); }, Direction::kSmallestFirst},
    {"nonfinite", [](const ValueChange& c) { return static_cast<double>(c.non_finite); }},
};

std::string TensorTypeText(const TensorMeta& meta) {
  return fmt::format("{} {}", InfoOf(meta.dtype()).name, meta.shape().ToString());
}

// Describes how values differ. Positions of elements have the form that `cat` accepts as a slice.
std::string ValuesText(const ValueMismatch& v, const Dims& shape) {
  const auto at = [&](std::uint64_t element) { return IndexOf(element, shape).ToString(); };
  std::string text = fmt::format("{} of {} elements differ", v.differing, v.compared);
  if (v.max_abs) {
    text += v.max_abs_integer ? fmt::format(", max abs {}", *v.max_abs_integer)
                              : fmt::format(", max abs {:.6g}", v.max_abs->value);
    text += fmt::format(" at {}, max rel {:.3g} at {}", at(v.max_abs->at), v.max_rel->value,
                        at(v.max_rel->at));
  }
  if (v.differing > 0) text += ", first at " + at(v.first);
  if (v.nan_beside > 0) text += fmt::format("; {} are NaN on one side", v.nan_beside);
  if (v.nan_both > 0) text += fmt::format("; {} are NaN on both, with different bits", v.nan_both);
  if (v.equal_other_bits > 0) {
    text += fmt::format("; {} are equal with different bits", v.equal_other_bits);
  }
  return text;
}

std::string TensorText(const Mismatch& d) {
  if (d.kind != Mismatch::Kind::kChanged) {
    return fmt::format("{} {}", d.key, TensorTypeText(d.first ? *d.first : *d.second));
  }
  const Dims& shape = d.first->shape();
  // With --values, tensors with different dtypes are compared as numbers, and then d.values is set.
  // The values of tensors with different shapes are not compared.
  const bool same_kind = d.first->dtype() == d.second->dtype() && shape == d.second->shape();
  std::string text = same_kind ? fmt::format("{} {}: ", d.key, TensorTypeText(*d.first))
                               : fmt::format("{}: {}", d.key, d.reason);
  if (d.values) return text + (same_kind ? "" : "; ") + ValuesText(*d.values, shape);
  if (!same_kind) return text;
  text += d.reason;
  if (d.first_element) text += ", first at " + IndexOf(*d.first_element, shape).ToString();
  return text;
}

std::string ObjectText(const Mismatch& d) {
  if (d.kind == Mismatch::Kind::kChanged) return fmt::format("object {}: {}", d.key, d.reason);
  return fmt::format("object {} {}", d.key,
                     HumanBytes(d.first_bytes ? *d.first_bytes : *d.second_bytes));
}

std::string CommonText(const Mismatch& d) {
  const bool changed = d.kind == Mismatch::Kind::kChanged;
  return fmt::format("common {}{} {}", d.key, changed ? ":" : "", d.reason);
}

// The first character of a line and its colour on a terminal, as in diff(1) and git.
struct Mark {
  char sign;
  Terminal::Colour colour;
};

Mark DiffMarkOf(Mismatch::Kind kind) {
  switch (kind) {
    case Mismatch::Kind::kAdded:
      return {'+', Terminal::Colour::kGreen};
    case Mismatch::Kind::kRemoved:
      return {'-', Terminal::Colour::kRed};
    case Mismatch::Kind::kChanged:
      break;
  }
  return {'~', Terminal::Colour::kYellow};
}

void PrintText(const Mismatch& d, Terminal& terminal) {
  const Mark mark = DiffMarkOf(d.kind);
  std::string text;
  switch (d.subject) {
    case Mismatch::Subject::kTensor:
      text = TensorText(d);
      break;
    case Mismatch::Subject::kObject:
      text = ObjectText(d);
      break;
    case Mismatch::Subject::kCommon:
      text = CommonText(d);
      break;
  }
  terminal.Line(fmt::format("{} {}", mark.sign, text), mark.colour);
}

// 57 columns before the name.
constexpr const char* kChangeRow = "{:>8} {:>9} {:>9} {:>9} {:>10} {:>7}";

std::string ChangeText(const ValueChange& c) {
  return fmt::format(kChangeRow, fmt::format("{:.3g}%", 100 * c.changed_share()),
                     fmt::format("{:.3g}", c.max_abs), fmt::format("{:.3g}", c.mean_abs()),
                     fmt::format("{:.3g}", c.l2_change()), fmt::format("{:.7f}", c.cosine()),
                     c.non_finite);
}

// Prints mismatches when they are found. Rows of --stats form a table, and wait for their order.
class DiffPrinter {
 public:
  DiffPrinter(const SortColumn<ValueChange>* sort, Terminal& terminal)
      : sort_(sort), terminal_(terminal) {}

  void Print(const Mismatch& d) {
    if (d.change && sort_ != nullptr) {
      rows_.push_back(d);
    } else {
      PrintNow(d);
    }
  }
  void PrintRows() {
    SortRows(rows_, sort_, [](const Mismatch& d) -> const ValueChange& { return *d.change; });
    for (const Mismatch& d : rows_) PrintNow(d);
  }

 private:
  void PrintNow(const Mismatch& d) {
    if (terminal_.json) return terminal_.Json(MismatchJson(d));
    if (!d.change) return PrintText(d, terminal_);
    if (!header_ && !terminal_.quiet) {
      terminal_.Line("  " +
                     fmt::format(kChangeRow, "CHANGED", "MAX", "MEAN", "L2", "COSINE", "NONFIN") +
                     "  NAME");
    }
    header_ = true;
    const Mark mark = DiffMarkOf(d.kind);
    const std::string row = fmt::format("{} {}  ", mark.sign, ChangeText(*d.change));
    const bool other_type = d.first->dtype() != d.second->dtype();
    terminal_.Line(
        row + terminal_.LastName(d.key, row.size()) + (other_type ? " (" + d.reason + ")" : ""),
        mark.colour);
  }

  const SortColumn<ValueChange>* const sort_;
  Terminal& terminal_;
  std::vector<Mismatch> rows_;
  bool header_ = false;
};

// The change of the whole model, of which unchanged tensors are not read.
void PrintModelChange(const CompareSummary& s, Terminal& terminal) {
  const ValueChange& c = s.change;
  const std::uint64_t all = c.count + s.unchanged_values;
  terminal.Line(fmt::format(
      "{} of {} values changed ({:.3g}%); in the tensors that differ: max {:.6g}, mean {:.6g}, "
      "L2 change {:.6g}, cosine {:.9f}, {} not finite",
      c.changed, all,
      all == 0 ? 0.0 : 100 * static_cast<double>(c.changed) / static_cast<double>(all), c.max_abs,
      c.mean_abs(), c.l2_change(), c.cosine(), c.non_finite));
}

void PrintSummary(const CompareSummary& s, bool stats, Terminal& terminal) {
  if (terminal.json) {
    nlohmann::ordered_json json = {{"event", "compared"}};
    json.update(ComparedJson(s, stats));
    terminal.Json(json);
    return;
  }
  if (stats) PrintModelChange(s, terminal);
  if (terminal.quiet) return;
  std::string text = s.same() ? fmt::format("no difference: {} equal", s.equal)
                              : fmt::format("{} added, {} removed, {} changed, {} equal", s.added,
                                            s.removed, s.changed, s.equal);
  text += fmt::format("; {} compared by digest, {} by bytes", s.by_digest, s.by_bytes);
  if (s.bytes_read > 0) text += fmt::format(" ({} read)", HumanBytes(s.bytes_read));
  terminal.Line(text);
}

}  // namespace

int RunDiff(const DiffArgs& args, Terminal& terminal) {
  const auto sort = FindSortColumn<ValueChange>(kChangeColumns, args.sort);
  if (!sort.ok()) return terminal.Fail(sort.status());
  DiffPrinter printer(sort.value(), terminal);
  // --map is applied to the first source, so that a checkpoint can be compared with an import that
  // renamed its tensors.
  const auto names = ReadNameMap(args.map);
  if (!names.ok()) return terminal.Fail(names.status());
  const auto stored = OpenSource(args.first, terminal);
  if (!stored.ok()) return terminal.Fail(stored.status());
  const auto first = ApplyNames(stored.value(), names.value());
  if (!first.ok()) return terminal.Fail(first.status());
  const auto second = OpenSource(args.second, terminal);
  if (!second.ok()) return terminal.Fail(second.status());
  // The destructor of `progress` erases the progress line before the summary is printed.
  Result<CompareSummary> summary = [&] {
    Progress progress(terminal, "diff");
    CompareOptions options;
    options.values = args.values;
    options.stats = args.stats;
    options.keys = args.keys;
    options.watch = [&](std::uint64_t done, std::uint64_t total) {
      progress.Set(done, total);
      return Status();
    };
    return CompareCheckpoints(*first.value(), *second.value(), options, [&](const Mismatch& d) {
      printer.Print(d);
      return Status();
    });
  }();
  if (!summary.ok()) return terminal.Fail(summary.status());
  const CompareSummary& seen = summary.value();
  // A glob that matches no key is an error, because otherwise the sources would be reported as
  // equal.
  if (!args.keys.empty() && seen.added + seen.removed + seen.changed + seen.equal == 0) {
    return terminal.Fail(
        Status(Code::kNotFound, fmt::format("--keys '{}': no key matches it", args.keys)));
  }
  printer.PrintRows();
  PrintSummary(summary.value(), args.stats, terminal);
  const int flushed = terminal.Flush();
  if (flushed != kDone) return flushed;
  // Missing data could not be compared, so the command fails even if no difference was found.
  const OpenedCheckpoint* const sources[] = {first.value().get(), second.value().get()};
  for (const OpenedCheckpoint* source : sources) {
    const Status whole = CheckSourceComplete(*source, args.keys);
    if (!whole.ok()) return terminal.Fail(whole);
  }
  return summary.value().same() ? kDone : kCheckFailed;
}

}  // namespace tensormount::tools
