// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_NAME_BINDING_H_
#define TENSORMOUNT_INDEX_RECORDS_NAME_BINDING_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensormount/status.h"

#include "index/records/checkpoint_index.h"
#include "index/records/name_rules.h"
#include "shard/cell_map.h"

namespace tensormount {

// One mapped tensor: the terms that fill it, and the stored tensors from which they come. Valid
// while its NameBinding lives.
struct MappedTensor {
  std::span<const CellTerm> terms;
  Dims key;  // The indices in the mapped tensor's key, for TermSide::Fold of CellTerm::to.
  // The stored tensors of one source of the rule: one for each combination of the indices in its
  // key, in row-major order of `sizes`.
  struct Source {
    std::span<const std::uint32_t> ordinals;
    Dims sizes;
  };
  std::span<const Source> sources;  // By CellTerm::source.
};

// The rules of a name map, applied to the tensors of one checkpoint: which mapped tensors there
// are, and which stored cells each of them has. Nothing is read but the index, and nothing is kept
// for single layers or rows but their keys. Immutable, so thread-safe.
class NameBinding {
 public:
  // Largest number of mapped tensors.
  static constexpr std::size_t kMaxTargets = std::size_t{1} << 22;
  // Largest number of terms of all rules with their sizes. A model has a few dozen.
  static constexpr std::size_t kMaxAllTerms = std::size_t{1} << 18;
  // Largest number of bytes of all keys of mapped tensors.
  static constexpr std::size_t kMaxKeysBytes = std::size_t{1} << 30;
  // Largest number of bytes of keys that are compared with patterns: seconds of work.
  static constexpr std::uint64_t kMaxCompared = std::uint64_t{1} << 32;

  // Applies `rules` to all tensors and objects of `index`.
  // Proves that every cell of a stored tensor is used by one rule, is named as unused, or is
  // dropped, and that every cell of a mapped tensor comes from one stored cell or is named as
  // unused. `lost`: keys of stored tensors that are lost; kDataLoss if a rule needs one of them
  // beside others. kInvalidArgument names the rule and the key: shapes that do not fit, a size that
  // is not known, cells used twice or not at all, two tensors with one name; kNotFound: a tensor
  // that a rule needs is not stored; kUnsupported: elements below one byte.
  static Result<std::shared_ptr<const NameBinding>> Bind(const CheckpointIndex& index,
                                                         const NameRules& rules,
                                                         std::span<const std::string> lost = {});

  // The rules with all numbers that were found.
  const NameRules& rules() const { return rules_; }
  // Mapped tensors are numbered in the order of their keys.
  std::uint32_t size() const { return static_cast<std::uint32_t>(targets_.size()); }
  const std::string& key(std::uint32_t ordinal) const { return targets_[ordinal].key; }
  // The stored tensor of which tensor `ordinal` is only another name; nullopt if it is not whole.
  std::optional<std::uint32_t> WholeSource(std::uint32_t ordinal) const;
  // For a tensor that has no WholeSource.
  MappedTensor At(std::uint32_t ordinal) const;
  // Number of the application of a rule that makes such a tensor. All its tensors have the same
  // sources.
  std::uint32_t ApplicationOf(std::uint32_t ordinal) const { return targets_[ordinal].application; }
  std::size_t applications() const { return applications_.size(); }
  // Shape of such a tensor. All its sources have the same element type.
  const Dims& ShapeOf(std::uint32_t ordinal) const;
  // The position of the rule that makes tensor `ordinal`; nullopt if no rule does.
  std::optional<std::uint32_t> RuleOf(std::uint32_t ordinal) const;
  // The first stored tensor of such a tensor.
  std::uint32_t FirstSource(std::uint32_t ordinal) const;
  // The ordinal of the mapped tensor with this key, or of the first one after it.
  std::uint32_t LowerBound(std::string_view key) const;

  // The stored key of each object that is kept, by its new name.
  const std::map<std::string, std::string, std::less<>>& objects() const { return objects_; }
  // Mapped stacks of layers (index/records/layer_names.h): ordinal and pattern of layer names.
  const std::vector<std::pair<std::uint32_t, std::string>>& layers() const { return layers_; }

 private:
  friend class Binder;
  // A rule whose sizes are known. Applications of a rule with the same sizes share one.
  struct SizedRule {
    struct Target {
      Dims shape;
      Dims key_sizes;  // Of the indices in its key.
      std::vector<CellTerm> terms;
      // Whether each tensor is a whole stored tensor, that of source `whole` at the same indices.
      std::optional<std::uint32_t> whole;
    };
    std::vector<Target> to;
    std::vector<Dims> from_key_sizes;  // Of each source.
  };
  struct Application {
    std::shared_ptr<const SizedRule> rule;
    std::vector<std::uint32_t>
        ordinals;  // Stored tensors of all sources, one source after another.
    std::vector<MappedTensor::Source> sources;
  };
  static constexpr std::uint32_t kWhole = UINT32_MAX;
  static constexpr std::uint32_t kNoRule = UINT32_MAX;
  struct Target {
    std::string key;
    std::uint32_t application = kWhole;  // kWhole: `index` is the ordinal of a stored tensor.
    std::uint32_t part = 0;              // Which of SizedRule::to.
    std::uint32_t index = 0;             // Position of its key indices, in row-major order.
    std::uint32_t rule = kNoRule;
  };

  NameRules rules_;
  std::vector<Target> targets_;  // Sorted by key.
  std::vector<Application> applications_;
  std::map<std::string, std::string, std::less<>> objects_;
  std::vector<std::pair<std::uint32_t, std::string>> layers_;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_NAME_BINDING_H_
