// SPDX-License-Identifier: Apache-2.0
// Parses names of axes, solves their sizes, and expands sums into terms. The texts come from users'
// files, so depth, numbers of names and terms, and all products are checked.
#include "shard/axis_names.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"

namespace tensormount {
namespace {

using Node = AxisNames::Node;
using Kind = Node::Kind;

Status BadAxes(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// A recursive descent over
//   sum     := product ("+" product)*
//   product := factor+
//   factor  := NAME | "1" | "(" sum ")"
class AxisParser {
 public:
  explicit AxisParser(std::string_view text) : text_(text) {}

  Result<std::vector<Node>> Axes() {
    std::vector<Node> axes;
    for (SkipBlanks(); at_ < text_.size(); SkipBlanks()) {
      if (axes.size() == kMaxRank) {
        return Error("a tensor has at most " + std::to_string(kMaxRank) + " axes");
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(axes.emplace_back(), Factor(0));
    }
    return axes;
  }

 private:
  Status Error(const std::string& why) const {
    return BadAxes("axes \"" + std::string(text_) + "\": byte " + std::to_string(at_ + 1) + ": " +
                   why);
  }
  void SkipBlanks() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  bool Next(char c) {
    SkipBlanks();
    return at_ < text_.size() && text_[at_] == c;
  }

  Result<Node> Factor(int depth) {
    const char c = text_[at_];
    if (c == '(') {
      if (depth == AxisNames::kMaxDepth) {
        return Error("parentheses are nested more than " + std::to_string(AxisNames::kMaxDepth) +
                     " deep");
      }
      ++at_;
      TENSORMOUNT_ASSIGN_OR_RETURN(Node inner, Sum(depth + 1));
      if (!Next(')')) return Error("expected a name or \")\"");
      ++at_;
      return inner;
    }
    const std::size_t begin = at_;
    while (at_ < text_.size() && IsNameByte(text_[at_])) ++at_;
    const std::string_view name = text_.substr(begin, at_ - begin);
    if (name == "1") return Node{.kind = Kind::kOne, .name = {}, .parts = {}};
    if (!AxisNames::IsName(name)) {
      at_ = begin;
      return Error("expected the name of an axis, \"1\" or \"(\"");
    }
    if (++names_ > AxisNames::kMaxNames) {
      return Error("more than " + std::to_string(AxisNames::kMaxNames) + " names");
    }
    return Node{.kind = Kind::kName, .name = std::string(name), .parts = {}};
  }

  Result<Node> Product(int depth) {
    Node product{.kind = Kind::kProduct, .name = {}, .parts = {}};
    for (;;) {
      SkipBlanks();
      if (at_ == text_.size() || text_[at_] == ')' || text_[at_] == '+') break;
      TENSORMOUNT_ASSIGN_OR_RETURN(product.parts.emplace_back(), Factor(depth));
    }
    if (product.parts.empty()) return Error("expected the name of an axis, \"1\" or \"(\"");
    if (product.parts.size() == 1) {
      Node only = std::move(product.parts[0]);
      return only;
    }
    return product;
  }

  Result<Node> Sum(int depth) {
    Node sum{.kind = Kind::kSum, .name = {}, .parts = {}};
    for (;;) {
      TENSORMOUNT_ASSIGN_OR_RETURN(sum.parts.emplace_back(), Product(depth));
      if (!Next('+')) break;
      ++at_;
    }
    if (sum.parts.size() == 1) {
      Node only = std::move(sum.parts[0]);
      return only;
    }
    return sum;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::size_t names_ = 0;
};

void CollectNames(const Node& node, std::set<std::string>& names) {
  if (node.kind == Kind::kName) names.insert(node.name);
  for (const Node& part : node.parts) CollectNames(part, names);
}

void Print(const Node& node, std::string& out) {
  switch (node.kind) {
    case Kind::kName:
      out += node.name;
      return;
    case Kind::kOne:
      out += '1';
      return;
    case Kind::kProduct:
    case Kind::kSum:
      break;
  }
  const char* const between = node.kind == Kind::kSum ? " + " : " ";
  out += '(';
  for (const Node& part : node.parts) {
    if (&part != &node.parts.front()) out += between;
    // A product in a sum needs no parentheses.
    if (node.kind == Kind::kSum && part.kind == Kind::kProduct) {
      for (const Node& factor : part.parts) {
        if (&factor != &part.parts.front()) out += ' ';
        Print(factor, out);
      }
    } else {
      Print(part, out);
    }
  }
  out += ')';
}

std::string Printed(const Node& node) {
  std::string out;
  Print(node, out);
  return out;
}

// " (g = 8, q is not known)": the sizes of the names in `node`.
std::string SizesIn(const Node& node, const AxisSizes& sizes) {
  std::set<std::string> names;
  CollectNames(node, names);
  std::string out;
  for (const std::string& name : names) {
    out += out.empty() ? " (" : ", ";
    const auto it = sizes.find(name);
    out += it == sizes.end() ? name + " is not known" : name + " = " + std::to_string(it->second);
  }
  return out.empty() ? out : out + ")";
}

// The number of cells of a node. nullopt: a size in it is not known. An error: it exceeds 63 bits.
Result<std::optional<std::int64_t>> SizeOf(const Node& node, const AxisSizes& sizes) {
  switch (node.kind) {
    case Kind::kOne:
      return std::optional<std::int64_t>(1);
    case Kind::kName: {
      const auto it = sizes.find(node.name);
      if (it == sizes.end()) return std::optional<std::int64_t>();
      if (it->second < 0) return BadAxes("the size of " + node.name + " is negative");
      return std::optional(it->second);
    }
    case Kind::kProduct:
    case Kind::kSum:
      break;
  }
  const bool product = node.kind == Kind::kProduct;
  std::int64_t total = product ? 1 : 0;
  bool known = true;
  for (const Node& part : node.parts) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<std::int64_t> size, SizeOf(part, sizes));
    if (!size) {
      known = false;
      continue;
    }
    const std::optional<std::int64_t> next =
        product ? CheckedMul(total, *size) : CheckedAdd(total, *size);
    if (!next) return BadAxes("the axis " + Printed(node) + SizesIn(node, sizes) + " is too long");
    total = *next;
  }
  return known ? std::optional(total) : std::nullopt;
}

// The size of a node as constant + factor * x, where x is the size of the only name in it that is
// not known. nullopt: x occurs twice in a product, or a number exceeds 63 bits.
struct Linear {
  std::int64_t constant = 0;
  std::int64_t factor = 0;
};
std::optional<Linear> LinearIn(const Node& node, const AxisSizes& sizes) {
  if (node.kind == Kind::kOne) return Linear{1, 0};
  if (node.kind == Kind::kName) {
    const auto it = sizes.find(node.name);
    return it == sizes.end() ? Linear{0, 1} : Linear{it->second, 0};
  }
  const bool product = node.kind == Kind::kProduct;
  Linear total{product ? 1 : 0, 0};
  for (const Node& part : node.parts) {
    const std::optional<Linear> size = LinearIn(part, sizes);
    if (!size) return std::nullopt;
    std::optional<std::int64_t> constant;
    std::optional<std::int64_t> factor;
    if (!product) {
      constant = CheckedAdd(total.constant, size->constant);
      factor = CheckedAdd(total.factor, size->factor);
    } else {
      if (total.factor != 0 && size->factor != 0) return std::nullopt;
      constant = CheckedMul(total.constant, size->constant);
      factor = total.factor != 0 ? CheckedMul(total.factor, size->constant)
                                 : CheckedMul(total.constant, size->factor);
    }
    if (!constant || !factor) return std::nullopt;
    total = {*constant, *factor};
  }
  return total;
}

// Learns the size of the one unknown name in `node`, which has `total` cells.
Status Learn(const Node& node, std::int64_t total, AxisSizes& sizes) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<std::int64_t> known, SizeOf(node, sizes));
  const auto misfit = [&] {
    return BadAxes("it has " + std::to_string(total) + " cells, which does not fit " +
                   Printed(node) + SizesIn(node, sizes));
  };
  if (known) return *known == total ? Status() : misfit();
  std::set<std::string> names;
  CollectNames(node, names);
  std::erase_if(names, [&](const std::string& name) { return sizes.contains(name); });
  if (names.size() > 1) return Status();  // Perhaps later.
  const std::optional<Linear> size = LinearIn(node, sizes);
  if (!size) return Status();
  // No cells whatever the size: any size fits.
  if (size->factor == 0) return size->constant == total ? Status() : misfit();
  const std::int64_t rest = total - size->constant;
  if (size->constant > total || rest % size->factor != 0) return misfit();
  sizes.emplace(*names.begin(), rest / size->factor);
  return Status();
}

// A part of a term: the digits of one node, and where the node's first cell is.
struct Partial {
  std::int64_t begin = 0;
  std::vector<AxisTerm::Digit> digits;
};

Status TooManyTerms() {
  return BadAxes("sums with more than " + std::to_string(AxisNames::kMaxTerms) +
                 " combinations of summands");
}

// Appends to each of `partials` each of `more`.
Status Combine(std::vector<Partial>& partials, const std::vector<Partial>& more) {
  if (partials.size() * more.size() > AxisNames::kMaxTerms) return TooManyTerms();
  std::vector<Partial> combined;
  for (const Partial& first : partials) {
    for (const Partial& second : more) {
      Partial both = first;
      both.begin += second.begin;
      both.digits.insert(both.digits.end(), second.digits.begin(), second.digits.end());
      combined.push_back(std::move(both));
    }
  }
  partials = std::move(combined);
  return Status();
}

// The terms of a node whose neighbouring cells are `step` cells of the axis apart. All sizes are
// known, not zero, and the axis has at most 2^63 - 1 cells.
Result<std::vector<Partial>> Expand(const Node& node, int axis, std::int64_t step,
                                    const AxisSizes& sizes) {
  switch (node.kind) {
    case Kind::kOne:
      return std::vector<Partial>(1);
    case Kind::kName:
      return std::vector<Partial>{{.begin = 0,
                                   .digits = {{.name = node.name,
                                               .size = sizes.find(node.name)->second,
                                               .step = step,
                                               .axis = axis}}}};
    case Kind::kProduct: {
      // The step of a factor is the number of cells of the factors after it.
      std::int64_t cells = 1;
      std::vector<std::vector<Partial>> factors(node.parts.size());
      for (std::size_t i = node.parts.size(); i-- > 0;) {
        TENSORMOUNT_ASSIGN_OR_RETURN(factors[i], Expand(node.parts[i], axis, step * cells, sizes));
        TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<std::int64_t> size,
                                     SizeOf(node.parts[i], sizes));
        cells *= *size;
      }
      std::vector<Partial> partials(1);
      for (const std::vector<Partial>& factor : factors) {
        TENSORMOUNT_RETURN_IF_ERROR(Combine(partials, factor));
      }
      return partials;
    }
    case Kind::kSum:
      break;
  }
  std::vector<Partial> partials;
  std::int64_t before = 0;
  for (const Node& part : node.parts) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<std::int64_t> size, SizeOf(part, sizes));
    if (*size == 0) continue;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Partial> summand,
                                 Expand(part, axis, step, sizes));
    for (const Partial& partial : summand) {
      partials.push_back(partial);
      partials.back().begin += before * step;
    }
    if (partials.size() > AxisNames::kMaxTerms) return TooManyTerms();
    before += *size;
  }
  return partials;
}

}  // namespace

bool AxisNames::IsName(std::string_view name) {
  return !name.empty() && !(name[0] >= '0' && name[0] <= '9') &&
         std::all_of(name.begin(), name.end(), IsNameByte);
}

Result<AxisNames> AxisNames::Parse(std::string_view text) {
  AxisNames parsed;
  TENSORMOUNT_ASSIGN_OR_RETURN(parsed.axes_, AxisParser(text).Axes());
  for (const Node& axis : parsed.axes_) CollectNames(axis, parsed.names_);
  return parsed;
}

std::string AxisNames::ToString() const {
  std::string out;
  for (const Node& axis : axes_) {
    if (!out.empty()) out += ' ';
    Print(axis, out);
  }
  return out;
}

Status AxisNames::LearnSizes(const Dims& shape, AxisSizes& sizes) const {
  if (shape.rank() != rank()) {
    return BadAxes("shape " + shape.ToString() + " has " + std::to_string(shape.rank()) +
                   " axes, and \"" + ToString() + "\" names " + std::to_string(rank()));
  }
  for (int a = 0; a < rank(); ++a) {
    const Status learned = Learn(axes_[static_cast<std::size_t>(a)], shape[a], sizes);
    if (!learned.ok()) {
      return learned.WithContext("shape " + shape.ToString() + ": axis " + std::to_string(a));
    }
  }
  return Status();
}

Result<Dims> AxisNames::ShapeOf(const AxisSizes& sizes) const {
  Dims shape;
  for (const Node& axis : axes_) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::optional<std::int64_t> size, SizeOf(axis, sizes));
    if (!size) return BadAxes("the axis " + Printed(axis) + SizesIn(axis, sizes));
    shape.push_back(*size);
  }
  if (!CheckedProduct(shape)) return BadAxes("shape " + shape.ToString() + " has too many cells");
  return shape;
}

Result<std::vector<AxisTerm>> AxisNames::Terms(const AxisSizes& sizes) const {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims shape, ShapeOf(sizes));
  std::vector<AxisTerm> terms(1);
  for (int a = 0; a < rank(); ++a) {
    if (shape[a] == 0) return std::vector<AxisTerm>();
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Partial> partials,
                                 Expand(axes_[static_cast<std::size_t>(a)], a, 1, sizes));
    if (terms.size() * partials.size() > kMaxTerms) return TooManyTerms();
    std::vector<AxisTerm> combined;
    for (const AxisTerm& term : terms) {
      for (const Partial& partial : partials) {
        AxisTerm& both = combined.emplace_back(term);
        both.digits.insert(both.digits.end(), partial.digits.begin(), partial.digits.end());
        both.begin.push_back(partial.begin);
      }
    }
    terms = std::move(combined);
  }
  for (const AxisTerm& term : terms) {
    std::set<std::string_view> seen;
    for (const AxisTerm::Digit& digit : term.digits) {
      if (!seen.insert(digit.name).second) {
        return BadAxes("\"" + ToString() + "\" has the name " + digit.name +
                       " twice for the same cells");
      }
    }
  }
  return terms;
}

}  // namespace tensormount
