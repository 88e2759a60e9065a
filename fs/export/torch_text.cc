// SPDX-License-Identifier: Apache-2.0
// How PyTorch calls dtypes, storages and devices in its pickles.
#include "fs/export/torch_text.h"

#include <algorithm>

namespace tensormount::fs {
namespace {

// Of the types that had a storage class of their own before torch 2.1; others are bytes with a
// type.
// torch.load with weights_only knows these classes by name. Newer types never got one.
std::string_view StorageClass(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return "BoolStorage";
    case DType::kI8:
      return "CharStorage";
    case DType::kU8:
      return "ByteStorage";
    case DType::kI16:
      return "ShortStorage";
    case DType::kI32:
      return "IntStorage";
    case DType::kI64:
      return "LongStorage";
    case DType::kF16:
      return "HalfStorage";
    case DType::kBF16:
      return "BFloat16Storage";
    case DType::kF32:
      return "FloatStorage";
    case DType::kF64:
      return "DoubleStorage";
    case DType::kC64:
      return "ComplexFloatStorage";
    case DType::kC128:
      return "ComplexDoubleStorage";
    default:
      return {};
  }
}

// Empty where it is no sequence of names and indices.
std::vector<CommonKey> PathFrom(const CommonValue& value) {
  const std::vector<CommonValue>* items = nullptr;
  if (const auto* tuple = value.get_if<CommonTuple>()) items = &tuple->items;
  if (const auto* list = value.get_if<CommonList>()) items = &list->items;
  std::vector<CommonKey> path;
  if (items == nullptr) return path;
  for (const CommonValue& item : *items) {
    if (const auto* name = item.get_if<std::string>()) {
      path.emplace_back(*name);
    } else if (const auto* index = item.get_if<std::int64_t>()) {
      path.emplace_back(*index);
    } else {
      return {};
    }
  }
  return path;
}

}  // namespace

// The table has "torch.bfloat16"; a pickle wants module and name.
void PickleDType(PickleWriter& pickle, DType dtype) {
  std::string_view name = InfoOf(dtype).torch;
  name.remove_prefix(std::min(name.size(), std::string_view("torch.").size()));
  pickle.Global("torch", name);
}

void PickleTensor(PickleWriter& pickle, DType dtype, const Dims& shape, std::string_view storage) {
  // Two forms of one thing: _rebuild_tensor_v2 takes the type from the storage, _rebuild_tensor_v3
  // has it as its last argument, over bytes.
  const std::string_view typed = StorageClass(dtype);
  std::int64_t elements = 1;
  Dims strides = Dims::Filled(shape.rank(), 1);
  std::int64_t stride = 1;
  for (int a = shape.rank() - 1; a >= 0; --a) {
    strides[a] = stride;
    // torch counts an axis of no elements as one, in strides.
    stride *= std::max<std::int64_t>(shape[a], 1);
    elements *= shape[a];
  }
  pickle.Global("torch._utils", typed.empty() ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  pickle.Mark();
  pickle.Mark();
  pickle.String("storage");
  if (typed.empty()) {
    pickle.Global("torch.storage", "UntypedStorage");
  } else {
    pickle.Global("torch", typed);
  }
  pickle.String(storage);
  pickle.String("cpu");
  pickle.Int(typed.empty() ? elements * (InfoOf(dtype).bits / 8) : elements);
  pickle.TupleFromMark();
  pickle.PersistentId();
  pickle.Int(0);
  pickle.Tuple(shape);
  pickle.Tuple(strides);
  pickle.Bool(false);  // requires_grad
  pickle.Global("collections", "OrderedDict");
  pickle.EmptyTuple();
  pickle.Reduce();
  if (typed.empty()) PickleDType(pickle, dtype);
  pickle.TupleFromMark();
  pickle.Reduce();
}

void AddEntriesBeforeData(ZipWriter& zip, std::string& out) {
  zip.Add(".format_version", "1", out);
  zip.Add(".storage_alignment", "64", out);
  zip.Add("byteorder", "little", out);
}

void AddEntriesAfterData(ZipWriter& zip, std::string& out) {
  zip.Add("version", "3\n", out);
  // torch puts a hash of names and one of CRCs here, and never looks at them.
  zip.Add(".data/serialization_id", std::string(40, '0'), out);
}

// Nothing of it is required: a checkpoint that was not adopted from DCP has no such value.
Result<PlannerPaths> PlannerPaths::Make(const CommonValues& values) {
  PlannerPaths out;
  const auto it = values.find(std::string(kPlannerData));
  if (it == values.end()) return out;
  const auto* dict = it->second.get_if<CommonDict>();
  if (dict == nullptr) return out;
  for (const auto& [key, value] : dict->items) {
    const auto* name = std::get_if<std::string>(&key);
    std::vector<CommonKey> path = PathFrom(value);
    if (name != nullptr && !path.empty()) out.paths_.emplace(*name, std::move(path));
  }
  return out;
}

std::vector<CommonKey> PlannerPaths::PathOf(std::string_view shown, std::string_view stored) const {
  // A path belongs to the key that was stored: a map that renamed the key has said where it goes.
  if (shown == stored) {
    const auto it = paths_.find(shown);
    if (it != paths_.end()) return it->second;
  }
  return {CommonKey(std::string(shown))};
}

Result<std::string> StoredTensorKey(const ShownCheckpoint& shown, std::uint32_t n,
                                    std::string_view shown_key) {
  if (shown.tensors.has_own_keys()) return std::string(shown_key);
  return shown.tensors.StoredKeyAt(n);
}

}  // namespace tensormount::fs
