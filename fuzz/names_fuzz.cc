// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <vector>

#include "index/records/made_config.h"
#include "index/records/mapped_table.h"
#include "index/records/name_binding.h"
#include "index/records/name_rules.h"
#include "index/records/named_values.h"
#include "shard/tensor_meta.h"

using namespace tensormount;

namespace {

std::shared_ptr<const CheckpointIndex> MakeIndex() {
  Inventory inventory;
  inventory.info.uuid = {1, 2};
  const auto add = [&](const char* key, DType dtype, const Dims& shape) {
    inventory.tensors.emplace_back(TensorMeta::Make(key, dtype, shape).value());
  };
  add("a.0", DType::kF32, {4, 6});
  add("a.1", DType::kF32, {4, 6});
  add("b", DType::kU8, {2, 6, 4});
  add("empty", DType::kU8, {std::int64_t{1} << 40, 0});
  add("huge", DType::kU8, {std::int64_t{1} << 30, std::int64_t{1} << 28});
  add("packed", DType::kF4, {8, 8});
  add("moments.b.m", DType::kU8, {2, 6, 4});
  add("scalar", DType::kF64, {});
  inventory.common.emplace("args", CommonDict{{{"n", 2}, {"rope", true}}});
  return CheckpointIndex::FromInventory(inventory).value();
}

// Every cell of a mapped tensor is in one term.
void CheckTerms(const NameBinding& binding, std::uint32_t ordinal) {
  const Dims& shape = binding.ShapeOf(ordinal);
  const Dims bytes = ByteShape(DType::kU8, shape);
  const MappedTensor mapped = binding.At(ordinal);
  std::int64_t cells = 0;
  for (const CellTerm& term : mapped.terms) {
    std::vector<PlacedBox> boxes;
    term.to.Fold(PlaceWhole(bytes), mapped.key.span(), term.extents.rank(), boxes);
    for (const PlacedBox& box : boxes) cells += box.box.volume();
  }
  if (cells != Box::Whole(shape).volume()) std::abort();
}

// Applies a map, and the ones in its "base" before it; null if it does not fit.
std::shared_ptr<const CheckpointIndex> Apply(std::shared_ptr<const CheckpointIndex> index,
                                             const NameRules& rules) {
  for (const NameRules& first : rules.base) {
    index = Apply(std::move(index), first);
    if (!index) return nullptr;
  }
  const auto binding = NameBinding::Bind(*index, rules);
  if (!binding.ok()) return nullptr;
  auto mapped = CheckpointIndex::Mapped(index, binding.value());
  if (!mapped.ok()) std::abort();
  for (std::uint32_t t = 0; t < binding.value()->size() && t < 1000; ++t) {
    if (!binding.value()->WholeSource(t)) CheckTerms(*binding.value(), t);
    if (!mapped.value()->At(t).ok()) std::abort();
  }
  (void)NameBinding::Bind(*index, rules.Inverse(false));
  const NameRules& bound = binding.value()->rules();
  if (bound.config_rules) {
    NamedValues places(*index, bound.config.get(), nullptr);
    const auto made = MadeConfig::Make(*bound.config_rules, places, bound.numbers, *mapped.value());
    if (!made.ok() || made.value().text.empty() == made.value().why.empty()) std::abort();
  }
  return std::move(mapped).value();
}

}  // namespace

// Rules of name maps, applied to a checkpoint without data.
extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  static const std::shared_ptr<const CheckpointIndex> index = MakeIndex();
  // With `as`, rules need not use the number.
  const NameMap map{.rules = std::string(reinterpret_cast<const char*>(data), size),
                    .as = "hf",
                    .numbers = {{"heads", 2}},
                    .config = R"({"model_type": "llama", "num_attention_heads": 2})"};
  const auto rules = NameRules::FromMap(map);
  if (rules.ok() && rules.value()) (void)Apply(index, *rules.value());
  return 0;
}
