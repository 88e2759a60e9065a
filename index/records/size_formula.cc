// SPDX-License-Identifier: Apache-2.0
// Formulas are short, so they are parsed again for each evaluation instead of kept as trees.
#include "index/records/size_formula.h"

#include <optional>
#include <utility>

#include "base/checked.h"

namespace tensormount {
namespace {

// A recursive descent over
//   sum     := product (("+" | "-") product)*
//   product := factor (("*" | "/") factor)*
//   factor  := INTEGER | NAME | "(" sum ")"
class Evaluation {
 public:
  // With `numbers` it computes. Without, it checks the syntax and adds the formula's names to
  // `names`.
  Evaluation(std::string_view text, const AxisSizes* numbers, std::set<std::string>* names)
      : text_(text), numbers_(numbers), names_(names) {}

  Result<std::int64_t> Run() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t value, Sum(0));
    SkipBlanks();
    if (at_ != text_.size()) return Syntax("expected an operator");
    if (numbers_ != nullptr && value < 0) return Invalid("the result is negative");
    return value;
  }

 private:
  static constexpr int kMaxDepth = 16;

  Status Invalid(const std::string& why) const {
    return Status(Code::kInvalidArgument, std::string(text_) + ": " + why);
  }
  Status Syntax(const std::string& why) const {
    return Invalid("byte " + std::to_string(at_ + 1) + ": " + why);
  }
  void SkipBlanks() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  char Next() {
    SkipBlanks();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  Result<std::int64_t> Sum(int depth) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::int64_t value, Product(depth));
    for (char op = Next(); op == '+' || op == '-'; op = Next()) {
      ++at_;
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t more, Product(depth));
      std::int64_t result = 0;
      const bool overflow = op == '+' ? __builtin_add_overflow(value, more, &result)
                                      : __builtin_sub_overflow(value, more, &result);
      if (overflow) return Invalid("the result does not fit 63 bits");
      value = result;
    }
    return value;
  }

  Result<std::int64_t> Product(int depth) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::int64_t value, Factor(depth));
    for (char op = Next(); op == '*' || op == '/'; op = Next()) {
      ++at_;
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t more, Factor(depth));
      if (op == '*') {
        const std::optional<std::int64_t> result = CheckedMul(value, more);
        if (!result) return Invalid("the result does not fit 63 bits");
        value = *result;
      } else if (numbers_ != nullptr) {
        if (more == 0) return Invalid("division by zero");
        if (value == INT64_MIN || value % more != 0) {
          return Invalid(std::to_string(value) + " is not a multiple of " + std::to_string(more));
        }
        value /= more;
      }
    }
    return value;
  }

  Result<std::int64_t> Factor(int depth) {
    const char c = Next();
    if (c == '(') {
      if (depth == kMaxDepth) return Syntax("too many parentheses");
      ++at_;
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::int64_t value, Sum(depth + 1));
      if (Next() != ')') return Syntax("expected \")\"");
      ++at_;
      return value;
    }
    const std::size_t begin = at_;
    while (at_ < text_.size() && AxisNames::IsName("_" + std::string(1, text_[at_]))) ++at_;
    const std::string_view word = text_.substr(begin, at_ - begin);
    if (word.empty()) return Syntax("expected a number, a name or \"(\"");
    if (AxisNames::IsName(word)) {
      if (numbers_ == nullptr) {
        names_->emplace(word);
        return 1;
      }
      const auto it = numbers_->find(word);
      if (it == numbers_->end()) return Status(Code::kNotFound, std::string(word));
      return it->second;
    }
    std::int64_t value = 0;
    for (const char digit : word) {
      if (digit < '0' || digit > '9') {
        at_ = begin;
        return Syntax("expected a number, a name or \"(\"");
      }
      const auto next = CheckedMul<std::int64_t>(value, 10);
      const auto sum = next ? CheckedAdd<std::int64_t>(*next, digit - '0') : std::nullopt;
      if (!sum) return Syntax("the number is too large");
      value = *sum;
    }
    return value;
  }

  std::string_view text_;
  const AxisSizes* numbers_;
  std::set<std::string>* names_;
  std::size_t at_ = 0;
};

}  // namespace

Result<SizeFormula> SizeFormula::Parse(std::string_view text) {
  SizeFormula formula;
  TENSORMOUNT_RETURN_IF_ERROR(Evaluation(text, nullptr, &formula.names_).Run().status());
  formula.text_ = text;
  return formula;
}

Result<std::int64_t> SizeFormula::Evaluate(const AxisSizes& numbers) const {
  return Evaluation(text_, &numbers, nullptr).Run();
}

}  // namespace tensormount
