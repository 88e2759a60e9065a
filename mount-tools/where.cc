// SPDX-License-Identifier: Apache-2.0
// The conditions of `ls --where`: a recursive-descent parser and an evaluation with unknown values.
#include "mount-tools/where.h"

#include <cctype>
#include <charconv>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include "base/glob.h"

namespace tensormount::tools {

struct Condition::Node {
  enum class Form { kAnd, kOr, kNot, kCompare };
  enum class Operator {
    kEqual,
    kNotEqual,
    kLess,
    kLessEqual,
    kGreater,
    kGreaterEqual,
    kGlob,
    kNotGlob
  };
  Form form = Form::kCompare;
  std::vector<std::shared_ptr<const Node>> parts;  // Of kAnd, kOr and kNot.
  std::string field;
  Operator op = Operator::kEqual;
  std::string other;  // The field that is compared with; empty: `value` is.
  Value value;
};

namespace {

using Node = Condition::Node;
using Operator = Node::Operator;

// A condition nested deeper than this is refused, so that parsing cannot exhaust the stack.
constexpr int kDeepest = 64;

class ConditionParser {
 public:
  ConditionParser(std::string_view text, const Condition::Fields& fields)
      : text_(text), fields_(fields) {}

  Result<std::shared_ptr<const Node>> Run() {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const Node> root, Any());
    SkipSpace();
    if (at_ != text_.size()) return Expected("and, or, or the end");
    return root;
  }

 private:
  Status Expected(std::string_view what) const {
    return Status(Code::kInvalidArgument,
                  fmt::format("the condition {}: {} was expected at position {}{}", text_, what,
                              at_ + 1, at_ == text_.size() ? ", at its end" : ""));
  }
  void SkipSpace() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
  }
  static bool IsWordCharacter(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  }
  // The word at the position, which is not passed.
  std::string_view Word() {
    SkipSpace();
    std::size_t end = at_;
    while (end < text_.size() && IsWordCharacter(text_[end])) ++end;
    return text_.substr(at_, end - at_);
  }
  bool TakeWord(std::string_view word) {
    if (Word() != word) return false;
    at_ += word.size();
    return true;
  }
  bool Take(std::string_view symbol) {
    SkipSpace();
    if (!text_.substr(at_).starts_with(symbol)) return false;
    at_ += symbol.size();
    return true;
  }

  using Part = Result<std::shared_ptr<const Node>>;

  Part Any() {
    return Joined("or", Node::Form::kOr, [this] { return All(); });
  }
  Part All() {
    return Joined("and", Node::Form::kAnd, [this] { return One(); });
  }

  template <typename Next>
  Part Joined(std::string_view word, Node::Form form, Next next) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const Node> first, next());
    if (Word() != word) return first;
    auto node = std::make_shared<Node>();
    node->form = form;
    node->parts.push_back(std::move(first));
    while (TakeWord(word)) {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const Node> more, next());
      node->parts.push_back(std::move(more));
    }
    return std::shared_ptr<const Node>(std::move(node));
  }

  Part One() {
    if (++depth_ > kDeepest) {
      return Status(Code::kInvalidArgument,
                    fmt::format("the condition {}: nested deeper than {}", text_, kDeepest));
    }
    Part part = Inner();
    --depth_;
    return part;
  }

  Part Inner() {
    if (TakeWord("not")) {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const Node> inner, One());
      auto node = std::make_shared<Node>();
      node->form = Node::Form::kNot;
      node->parts.push_back(std::move(inner));
      return std::shared_ptr<const Node>(std::move(node));
    }
    if (Take("(")) {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<const Node> inner, Any());
      if (!Take(")")) return Expected("a closing parenthesis");
      return inner;
    }
    return Comparison();
  }

  Part Comparison() {
    auto node = std::make_shared<Node>();
    node->field = std::string(Word());
    const std::optional<Condition::Kind> kind = fields_(node->field);
    if (!kind) return Expected("the name of a field");
    at_ += node->field.size();
    // Longer symbols before those that they begin with.
    constexpr std::pair<std::string_view, Operator> kOperators[] = {
        {"==", Operator::kEqual},        {"!=", Operator::kNotEqual}, {"<=", Operator::kLessEqual},
        {">=", Operator::kGreaterEqual}, {"!~", Operator::kNotGlob},  {"=", Operator::kEqual},
        {"<", Operator::kLess},          {">", Operator::kGreater},   {"~", Operator::kGlob}};
    bool found = false;
    for (const auto& [symbol, op] : kOperators) {
      if (!Take(symbol)) continue;
      node->op = op;
      found = true;
      break;
    }
    if (!found) return Expected("an operator");
    const bool glob = node->op == Operator::kGlob || node->op == Operator::kNotGlob;
    if (glob && *kind != Condition::Kind::kText) {
      return Expected(fmt::format("no glob for the number {}", node->field));
    }
    if (const std::string_view other = Word(); fields_(other) == *kind) {
      node->other = std::string(other);
      at_ += other.size();
      return std::shared_ptr<const Node>(std::move(node));
    }
    if (*kind == Condition::Kind::kText) {
      TENSORMOUNT_ASSIGN_OR_RETURN(node->value, Text());
    } else {
      TENSORMOUNT_ASSIGN_OR_RETURN(node->value, Number());
    }
    return std::shared_ptr<const Node>(std::move(node));
  }

  Result<Condition::Value> Text() {
    if (at_ >= text_.size() || (text_[at_] != '"' && text_[at_] != '\'')) {
      return Expected("a text in quotes");
    }
    const std::size_t end = text_.find(text_[at_], at_ + 1);
    if (end == std::string_view::npos) return Expected("a closing quote");
    std::string text(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return Condition::Value(std::move(text));
  }

  Result<Condition::Value> Number() {
    // from_chars takes no plus sign.
    std::size_t from = at_;
    if (from < text_.size() && text_[from] == '+') ++from;
    double value = 0;
    const char* const end = text_.data() + text_.size();
    const auto [stop, error] = std::from_chars(text_.data() + from, end, value);
    if (error != std::errc() || (stop < end && IsWordCharacter(*stop))) return Expected("a number");
    at_ = static_cast<std::size_t>(stop - text_.data());
    return Condition::Value(value);
  }

  std::string_view text_;
  const Condition::Fields& fields_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

bool Compares(Operator op, const Condition::Value& a, const Condition::Value& b) {
  switch (op) {
    case Operator::kEqual:
      return a == b;
    case Operator::kNotEqual:
      return a != b;
    case Operator::kLess:
      return a < b;
    case Operator::kLessEqual:
      return a <= b;
    case Operator::kGreater:
      return a > b;
    case Operator::kGreaterEqual:
      return a >= b;
    case Operator::kGlob:
      return GlobMatches(std::get<std::string>(b), std::get<std::string>(a));
    case Operator::kNotGlob:
      return !GlobMatches(std::get<std::string>(b), std::get<std::string>(a));
  }
  return false;
}

// true, false or unknown: a part that decides the result does so whatever the unknown parts are.
std::optional<bool> Evaluate(const Node& node, const Condition::Lookup& lookup) {
  switch (node.form) {
    case Node::Form::kCompare: {
      const std::optional<Condition::Value> value = lookup(node.field);
      const std::optional<Condition::Value> other =
          node.other.empty() ? std::optional(node.value) : lookup(node.other);
      if (!value || !other || value->index() != other->index()) return std::nullopt;
      return Compares(node.op, *value, *other);
    }
    case Node::Form::kNot: {
      const std::optional<bool> inner = Evaluate(*node.parts.front(), lookup);
      return inner ? std::optional(!*inner) : std::nullopt;
    }
    case Node::Form::kAnd:
    case Node::Form::kOr: {
      const bool decides = node.form == Node::Form::kOr;
      bool unknown = false;
      for (const auto& part : node.parts) {
        const std::optional<bool> one = Evaluate(*part, lookup);
        if (one == decides) return decides;
        unknown = unknown || !one;
      }
      return unknown ? std::nullopt : std::optional(!decides);
    }
  }
  return std::nullopt;
}

}  // namespace

Result<Condition> Condition::Parse(std::string_view text, const Fields& fields) {
  Condition condition;
  TENSORMOUNT_ASSIGN_OR_RETURN(condition.root_, ConditionParser(text, fields).Run());
  return condition;
}

std::optional<bool> Condition::Holds(const Lookup& lookup) const {
  return Evaluate(*root_, lookup);
}

}  // namespace tensormount::tools
