// SPDX-License-Identifier: Apache-2.0
#include "tests/support/random_names.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace tensormount {
namespace {

using Kind = NameTree::Kind;

// A term: the names of its cells.
using Term = std::vector<NameTree>;

NameTree Product(std::vector<NameTree> parts) {
  if (parts.size() == 1) return std::move(parts[0]);
  NameTree tree;
  tree.kind = Kind::kProduct;
  tree.parts = std::move(parts);
  return tree;
}

NameTree One() {
  NameTree tree;
  tree.kind = Kind::kOne;
  return tree;
}

// One tensor that has the cells of all `terms`, which share the names of `common`.
NamedSide MakeSide(Random& random, const std::string& stem, std::vector<NameTree> common,
                   const std::vector<Term>& own, bool may_have_key) {
  NamedSide side;
  side.stem = stem;
  random.Shuffle(common);
  std::vector<NameTree> factors;
  if (own.size() == 1) {
    factors = common;
    factors.insert(factors.end(), own[0].begin(), own[0].end());
    random.Shuffle(factors);
  } else {
    // Some common names go into every summand, in an order of their own.
    std::vector<NameTree> inner;
    while (!common.empty() && random.OneIn(3)) {
      inner.push_back(std::move(common.back()));
      common.pop_back();
    }
    NameTree sum;
    sum.kind = Kind::kSum;
    for (const Term& term : own) {
      std::vector<NameTree> summand = inner;
      summand.insert(summand.end(), term.begin(), term.end());
      random.Shuffle(summand);
      sum.parts.push_back(Product(std::move(summand)));
    }
    random.Shuffle(sum.parts);
    factors = common;
    factors.push_back(std::move(sum));
    random.Shuffle(factors);
  }
  // Plain names may be in the key instead.
  std::vector<NameTree> left;
  for (NameTree& factor : factors) {
    if (may_have_key && factor.kind == Kind::kName && random.OneIn(4)) {
      side.in_key.push_back(std::move(factor));
    } else {
      left.push_back(std::move(factor));
    }
  }
  // Consecutive factors share an axis.
  for (std::size_t i = 0; i < left.size();) {
    if (random.OneIn(12)) side.axes.push_back(One());
    const std::size_t take =
        std::min<std::size_t>(left.size() - i, static_cast<std::size_t>(random.Int(1, 3)));
    std::vector<NameTree> together(left.begin() + static_cast<std::ptrdiff_t>(i),
                                   left.begin() + static_cast<std::ptrdiff_t>(i + take));
    if (together.size() == 3 && random.OneIn(2)) {  // The same cells, with more parentheses.
      NameTree nested = Product({together[1], together[2]});
      together = {together[0], std::move(nested)};
    }
    side.axes.push_back(Product(std::move(together)));
    i += take;
  }
  return side;
}

// Tensors that have the cells of `terms`.
std::vector<NamedSide> MakeSides(Random& random, const std::string& stem,
                                 const std::vector<NameTree>& common, std::vector<Term> terms) {
  random.Shuffle(terms);
  std::vector<NamedSide> sides;
  while (!terms.empty()) {
    const auto take =
        static_cast<std::ptrdiff_t>(random.Int(1, static_cast<std::int64_t>(terms.size())));
    const std::vector<Term> own(terms.end() - take, terms.end());
    terms.erase(terms.end() - take, terms.end());
    sides.push_back(
        MakeSide(random, stem + std::to_string(sides.size()), common, own, !random.OneIn(3)));
  }
  return sides;
}

std::vector<RandomTensor> MakeTensors(Random& random, const std::vector<NamedSide>& sides,
                                      DType dtype) {
  std::vector<RandomTensor> tensors;
  for (const NamedSide& side : sides) {
    for (const Dims& indices : side.KeyIndices()) {
      RandomTensor& tensor = tensors.emplace_back();
      tensor.key = side.KeyAt(indices);
      tensor.dtype = dtype;
      tensor.shape = side.Shape();
      tensor.bytes = random.Bytes(static_cast<std::size_t>(*CheckedProduct(tensor.shape)) *
                                  tensor.element_bytes());
    }
  }
  return tensors;
}

}  // namespace

std::int64_t NameTree::Cells() const {
  if (kind == Kind::kName) return size;
  std::int64_t cells = kind == Kind::kSum ? 0 : 1;
  for (const NameTree& part : parts) {
    cells = kind == Kind::kSum ? cells + part.Cells() : cells * part.Cells();
  }
  return cells;
}

std::string NameTree::Text() const {
  if (kind == Kind::kName) return name;
  if (kind == Kind::kOne) return "1";
  std::string text = "(";
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += kind == Kind::kSum ? " + " : " ";
    text += parts[i].Text();
  }
  return text + ")";
}

void NameTree::Label(std::int64_t at, std::map<std::string, std::int64_t>& indices) const {
  if (kind == Kind::kName) indices[name] = at;
  if (kind == Kind::kProduct) {
    for (std::size_t i = parts.size(); i-- > 0;) {
      parts[i].Label(at % parts[i].Cells(), indices);
      at /= parts[i].Cells();
    }
  }
  if (kind == Kind::kSum) {
    for (const NameTree& part : parts) {
      if (at < part.Cells()) return part.Label(at, indices);
      at -= part.Cells();
    }
  }
}

// With `named` the tree has a name, so that its cells have labels of their own.
NameTree RandomNameTree(Random& random, int depth, int& next, bool named) {
  NameTree tree;
  if (depth == 0 || random.OneIn(3)) {
    if (!named && random.OneIn(8)) return One();
    tree.name = "n" + std::to_string(next++);
    tree.size = random.Int(1, 4);
    return tree;
  }
  tree.kind = random.OneIn(3) ? Kind::kSum : Kind::kProduct;
  for (std::int64_t n = random.Int(2, 3); n > 0; --n) {
    const bool first = tree.parts.empty();
    tree.parts.push_back(
        RandomNameTree(random, depth - 1, next, tree.kind == Kind::kSum || (named && first)));
  }
  return tree;
}

Dims NamedSide::Shape() const {
  Dims shape;
  for (const NameTree& axis : axes) shape.push_back(axis.Cells());
  return shape;
}

std::string NamedSide::Text() const {
  std::string text = stem;
  for (const NameTree& name : in_key) text += ".{" + name.name + "}";
  text += " :";
  for (const NameTree& axis : axes) text += " " + axis.Text();
  return text;
}

std::vector<Dims> NamedSide::KeyIndices() const {
  std::vector<Dims> all = {Dims()};
  for (const NameTree& name : in_key) {
    std::vector<Dims> more;
    for (const Dims& indices : all) {
      for (std::int64_t i = 0; i < name.size; ++i) {
        more.push_back(indices);
        more.back().push_back(i);
      }
    }
    all = std::move(more);
  }
  return all;
}

std::string NamedSide::KeyAt(const Dims& indices) const {
  std::string key = stem;
  for (const std::int64_t index : indices) key += "." + std::to_string(index);
  return key;
}

std::string NamedSide::LabelAt(const Dims& indices, std::int64_t cell) const {
  std::map<std::string, std::int64_t> label;
  for (std::size_t i = 0; i < in_key.size(); ++i) {
    label[in_key[i].name] = indices[static_cast<int>(i)];
  }
  for (std::size_t a = axes.size(); a-- > 0;) {
    axes[a].Label(cell % axes[a].Cells(), label);
    cell /= axes[a].Cells();
  }
  std::string text;
  for (const auto& [name, index] : label) text += name + "=" + std::to_string(index) + ";";
  return text;
}

std::string RandomRule::Json() const {
  const auto list = [](const std::vector<NamedSide>& sides) {
    std::string text = "[";
    for (const NamedSide& side : sides) {
      text += (text.size() > 1 ? ", \"" : "\"") + side.Text() + "\"";
    }
    return text + "]";
  };
  std::string text = R"({"version": 1, "others": "keep", "rules": [{"from": )" + list(from) +
                     R"(, "to": )" + list(to) + R"(, "sizes": {)";
  for (const auto& [name, size] : sizes) {
    text += (text.ends_with('{') ? "\"" : ", \"") + name + "\": " + std::to_string(size);
  }
  text += R"(}, "unused": [)";
  for (const std::string& name : unused)
    text += (text.ends_with('[') ? "\"" : ", \"") + name + "\"";
  return text + "]}]}";
}

RandomRule MakeRandomRule(Random& random, const std::string& stem) {
  static const std::vector<DType> kTypes = {DType::kU8, DType::kBF16, DType::kF32, DType::kF64,
                                            DType::kC128};
  RandomRule rule;
  int next = 0;
  const auto name = [&](std::int64_t most) {
    NameTree tree;
    tree.name = std::string(1, static_cast<char>('a' + next % 26)) + std::to_string(next);
    ++next;
    tree.size = random.Int(1, most);
    rule.sizes[tree.name] = tree.size;
    return tree;
  };
  std::vector<NameTree> common;
  for (std::int64_t n = random.Int(0, 3); n > 0; --n) common.push_back(name(5));
  std::vector<Term> terms(static_cast<std::size_t>(random.Int(1, 4)));
  for (Term& term : terms) {
    for (std::int64_t n = random.Int(1, 2); n > 0; --n) term.push_back(name(4));
  }
  // Some terms are on one side only.
  std::vector<Term> from = terms;
  std::vector<Term> to = terms;
  if (random.OneIn(3)) {
    Term extra = {name(3)};
    rule.unused.insert(extra[0].name);
    (random.OneIn(2) ? from : to).push_back(std::move(extra));
  }
  rule.from = MakeSides(random, stem + "from", common, std::move(from));
  rule.to = MakeSides(random, stem + "to", common, std::move(to));

  const DType dtype = random.Pick(kTypes);
  rule.stored = MakeTensors(random, rule.from, dtype);
  rule.mapped = MakeTensors(random, rule.to, dtype);
  std::unordered_map<std::string, std::string> cells;  // The bytes of each label.
  const std::size_t bytes = InfoOf(dtype).bits / 8;
  std::size_t t = 0;
  for (const NamedSide& side : rule.from) {
    for (const Dims& indices : side.KeyIndices()) {
      const RandomTensor& tensor = rule.stored[t++];
      for (std::size_t cell = 0; cell * bytes < tensor.bytes.size(); ++cell) {
        cells[side.LabelAt(indices, static_cast<std::int64_t>(cell))] =
            tensor.bytes.substr(cell * bytes, bytes);
      }
    }
  }
  t = 0;
  for (const NamedSide& side : rule.to) {
    for (const Dims& indices : side.KeyIndices()) {
      RandomTensor& tensor = rule.mapped[t++];
      for (std::size_t cell = 0; cell * bytes < tensor.bytes.size(); ++cell) {
        const auto found = cells.find(side.LabelAt(indices, static_cast<std::int64_t>(cell)));
        tensor.bytes.replace(cell * bytes, bytes,
                             found == cells.end() ? std::string(bytes, '\0') : found->second);
      }
    }
  }
  return rule;
}

}  // namespace tensormount
