// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_SUPPORT_RANDOM_NAMES_H_
#define TENSORMOUNT_TESTS_SUPPORT_RANDOM_NAMES_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/support/random_layout.h"

// Random rules of name maps, with a slow and obvious oracle: each cell of a tensor has a label,
// such as "g=1;h=0;q=3", and cells with equal labels are the same cell.

namespace tensormount {

// Axes as a tree, without the product's parser.
struct NameTree {
  enum class Kind { kName, kOne, kProduct, kSum } kind = Kind::kName;
  std::string name;
  std::int64_t size = 1;  // Of a name.
  std::vector<NameTree> parts;

  std::int64_t Cells() const;
  std::string Text() const;
  // Adds the indices that cell `at` has.
  void Label(std::int64_t at, std::map<std::string, std::int64_t>& indices) const;
};

// A random tree of products and sums with names of 1 to 4 cells, made up from `next` on.
NameTree RandomNameTree(Random& random, int depth, int& next, bool named = false);

struct NamedSide {
  std::string stem;              // The key is the stem and ".{name}" for each name in the key.
  std::vector<NameTree> in_key;  // Names.
  std::vector<NameTree> axes;

  Dims Shape() const;
  std::string Text() const;  // "stem.{l} : a (b + c)".
  // Each combination of the indices in the key.
  std::vector<Dims> KeyIndices() const;
  std::string KeyAt(const Dims& indices) const;
  std::string LabelAt(const Dims& indices, std::int64_t cell) const;
};

// One rule and what it means for random bytes.
struct RandomRule {
  std::vector<NamedSide> from;
  std::vector<NamedSide> to;
  std::set<std::string> unused;
  std::map<std::string, std::int64_t> sizes;
  std::vector<RandomTensor> stored;
  std::vector<RandomTensor> mapped;  // By the oracle. Cells that only it has are zeros.

  std::string Json() const;  // A file with only this rule.
};
// `stem` begins the keys of the rule's tensors, so that several rules fit one checkpoint.
RandomRule MakeRandomRule(Random& random, const std::string& stem);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_SUPPORT_RANDOM_NAMES_H_
