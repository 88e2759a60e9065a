// SPDX-License-Identifier: Apache-2.0
// `tensormount map check` (commands.h): shows what a name map makes of a checkpoint, from the index
// alone.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/counted.h"
#include "base/file_system_for.h"
#include "index/records/name_binding.h"
#include "mount-tools/commands.h"
#include "mount-tools/source.h"

namespace tensormount::tools {
namespace {

using OrderedJson = nlohmann::ordered_json;

std::string SideText(const NameRule::Side& side) {
  return side.axes ? side.key.text() + " : " + side.axes->ToString() : side.key.text();
}

// What a rule did.
struct RuleUse {
  std::uint64_t stored = 0;   // Stored tensors that it took.
  std::uint64_t tensors = 0;  // Tensors that it made.
  // Cells of these stored tensors, and how many of them the tensors that it made have.
  std::int64_t stored_cells = 0;
  std::int64_t shown_cells = 0;
};

// A mapped tensor, and the stored tensors from which it comes.
struct MappedText {
  TensorEntry entry;
  std::optional<std::uint32_t> rule;
  std::string from;  // The stored key if it is whole, else the sides of the rule.
  bool zeros = false;
};

class MapCheck {
 public:
  explicit MapCheck(const OpenedCheckpoint& mapped)
      : mapped_(mapped),
        binding_(*mapped.binding()),
        rules_(binding_.rules()),
        before_(mapped.source()->index()),
        uses_(rules_.rules.size()) {
    if (mapped.source()->is_mapped()) first_ = std::make_unique<MapCheck>(*mapped.source());
  }

  Status Run() {
    if (first_) TENSORMOUNT_RETURN_IF_ERROR(first_->Run());
    TENSORMOUNT_RETURN_IF_ERROR(before_.ForEachTensor(0, [&](const TensorEntry& entry) {
      const std::string& key = entry.meta.key();
      const std::optional<std::size_t> rule = rules_.RuleFor(key);
      if (rule) {
        ++uses_[*rule].stored;
        uses_[*rule].stored_cells += *CheckedProduct(entry.meta.shape());
      }
      const bool dropped = !rules_.Splits(key) && rules_.NameOf(key).empty();
      if (dropped) dropped_.push_back(key);
      return true;
    }));
    dropped_tensors_ = dropped_.size();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<ObjectRecord> objects, before_.Objects());
    for (const ObjectRecord& object : objects) {
      if (!rules_.NameOf(object.key).empty()) continue;
      if (dropped_.empty() || dropped_.back() != object.key) dropped_.push_back(object.key);
    }
    Status failure;
    TENSORMOUNT_RETURN_IF_ERROR(mapped_.index().ForEachTensor(0, [&](const TensorEntry& entry) {
      Result<MappedText> text = TextOf(entry);
      failure = text.status();
      if (!failure.ok()) return false;
      if (text.value().rule) {
        RuleUse& use = uses_[*text.value().rule];
        ++use.tensors;
        use.shown_cells += CellsOf(entry);
      }
      if (text.value().zeros) padded_.push_back(entry.meta.key());
      tensors_.push_back(std::move(text).value());
      return true;
    }));
    return failure;
  }

  void Print(Terminal& terminal) const {
    if (terminal.json) return terminal.Json(ToJson());
    if (first_) {
      first_->Print(terminal);
      terminal.Line("and then, from these names:");
    }
    for (const MappedText& tensor : tensors_) {
      terminal.Line(fmt::format("{}  {} {}  <- {}", tensor.entry.meta.key(),
                                InfoOf(tensor.entry.meta.dtype()).name,
                                tensor.entry.meta.shape().ToString(), tensor.from));
    }
    for (const std::string& key : dropped_) {
      const std::optional<std::size_t> rule = rules_.RuleFor(key);
      terminal.Line(
          fmt::format("dropped: {} ({})", key, rule ? rules_.rules[*rule].position : "\"others\""));
    }
    for (const std::string& key : padded_) {
      terminal.Line(fmt::format("filled with zeros in part: {}", key));
    }
    for (std::size_t r = 0; r < uses_.size(); ++r) {
      if (!LeavesOut(r)) continue;
      terminal.Line(fmt::format("left out: {} of {} cells of {} ({}, \"unused\")",
                                uses_[r].stored_cells - uses_[r].shown_cells, uses_[r].stored_cells,
                                rules_.rules[r].from[0].key.text(), rules_.rules[r].position));
    }
    for (std::size_t r = 0; r < uses_.size(); ++r) {
      if (uses_[r].stored == 0 && uses_[r].tensors == 0 && rules_.rules[r].slot.empty()) {
        terminal.Line(fmt::format("not used: {}", rules_.rules[r].position));
      }
    }
    if (const MadeConfig* config = mapped_.made_config()) {
      terminal.Line(config->text.empty() ? "config.json: give it by --with, because " + config->why
                                         : "config.json: made of what the trainer saved");
    }
    if (terminal.quiet) return;
    bool leaves_out = false;
    for (std::size_t r = 0; r < uses_.size(); ++r) leaves_out = leaves_out || LeavesOut(r);
    terminal.Line(fmt::format(
        "{} from {}; {} dropped; every cell of the others{} is used once",
        Counted(tensors_.size(), "tensor"),
        Counted(before_.tensor_count() - dropped_tensors_, first_ ? "tensor" : "stored tensor"),
        dropped_.size(), leaves_out ? " that is not left out" : ""));
  }

 private:
  // Whether the rule leaves out cells of its stored tensors.
  bool LeavesOut(std::size_t r) const {
    return rules_.rules[r].kind == NameRule::Kind::kAxes &&
           uses_[r].shown_cells < uses_[r].stored_cells;
  }

  // Cells of a mapped tensor that come from a stored one.
  std::int64_t CellsOf(const TensorEntry& entry) const {
    if (binding_.WholeSource(entry.ordinal)) return *CheckedProduct(entry.meta.shape());
    std::int64_t cells = 0;
    for (const CellTerm& term : binding_.At(entry.ordinal).terms) {
      if (!term.from) continue;
      std::int64_t here = 1;
      for (int name = 0; name < term.extents.rank(); ++name) {
        const bool in_key = std::ranges::find(term.to.in_key, name) != term.to.in_key.end();
        if (!in_key) here *= term.extents[name];
      }
      cells += here;
    }
    return cells;
  }

  Result<MappedText> TextOf(const TensorEntry& entry) const {
    MappedText text{.entry = entry, .rule = binding_.RuleOf(entry.ordinal), .from = {}};
    if (binding_.WholeSource(entry.ordinal)) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const TensorEntry whole,
                                   before_.At(*binding_.WholeSource(entry.ordinal)));
      text.from = whole.meta.key();
      return text;
    }
    const MappedTensor mapped = binding_.At(entry.ordinal);
    const NameRule& rule = rules_.rules[*text.rule];
    std::vector<bool> used(mapped.sources.size());
    for (const CellTerm& term : mapped.terms) {
      text.zeros = text.zeros || !term.from;
      if (term.from) used[term.source] = true;
    }
    for (std::size_t s = 0; s < used.size(); ++s) {
      if (!used[s]) continue;
      // An alias has the sources of the tensor whose other name it is.
      const bool own = rule.kind == NameRule::Kind::kAxes;
      text.from += (text.from.empty() ? "" : ", ") + (own ? SideText(rule.from[s]) : "");
    }
    if (rule.kind == NameRule::Kind::kAlias) text.from = rule.from[0].key.text();
    return text;
  }

  OrderedJson ToJson() const {
    OrderedJson json = {{"event", "map"}};
    if (first_) json["first"] = first_->ToJson();
    json["rules"] = OrderedJson::array();
    for (std::size_t r = 0; r < uses_.size(); ++r) {
      json["rules"].push_back(
          {{"position", rules_.rules[r].position},
           {"stored", uses_[r].stored},
           {"cells_left_out", LeavesOut(r) ? uses_[r].stored_cells - uses_[r].shown_cells : 0},
           {"tensors", uses_[r].tensors}});
    }
    json["tensors"] = OrderedJson::array();
    for (const MappedText& tensor : tensors_) {
      OrderedJson one = {{"key", tensor.entry.meta.key()},
                         {"dtype", InfoOf(tensor.entry.meta.dtype()).name},
                         {"shape", tensor.entry.meta.shape().span()},
                         {"from", tensor.from}};
      if (tensor.rule) one["rule"] = *tensor.rule;
      json["tensors"].push_back(std::move(one));
    }
    json["dropped"] = dropped_;
    json["padded"] = padded_;
    if (const MadeConfig* config = mapped_.made_config(); config && !config->text.empty()) {
      json["config"] = OrderedJson::parse(config->text);
    }
    return json;
  }

  const OpenedCheckpoint& mapped_;
  const NameBinding& binding_;
  const NameRules& rules_;
  const CheckpointIndex& before_;    // To which the map is applied.
  std::unique_ptr<MapCheck> first_;  // If that is mapped itself.
  std::vector<RuleUse> uses_;        // By rule.
  std::vector<MappedText> tensors_;
  std::vector<std::string> dropped_;
  std::uint64_t dropped_tensors_ = 0;
  std::vector<std::string> padded_;
};

}  // namespace

int RunMap(const MapArgs& args, Terminal& terminal) {
  // RULES is a file, or what --as would take.
  NameMapArgs given = args.map;
  const auto fs = FileSystemFor(given.rules);
  if (!fs.ok() || !fs.value()->Exists(given.rules)) {
    if (!given.rules.ends_with(".json")) given.as = std::exchange(given.rules, {});
  }
  const auto names = ReadNameMap(given);
  if (!names.ok()) return terminal.Fail(names.status());
  const auto stored = OpenSource(args.source, terminal);
  if (!stored.ok()) return terminal.Fail(stored.status());
  const auto source = ApplyNames(stored.value(), names.value());
  if (!source.ok()) return terminal.Fail(source.status());
  MapCheck check(*source.value());
  if (const Status ran = check.Run(); !ran.ok()) return terminal.Fail(ran);
  check.Print(terminal);
  return terminal.Flush();
}

}  // namespace tensormount::tools
