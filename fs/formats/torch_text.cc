// SPDX-License-Identifier: Apache-2.0
// Writes dtypes, tensors and encoded values as PyTorch's pickles contain them.
#include "fs/formats/torch_text.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "index/read/saved_paths.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kPairsOfF4 = "torch.float4_e2m1fn_x2";

// Name of the dtype's storage class; empty for newer types, which use untyped storage. torch.load
// with weights_only knows these classes by name.
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

// An encoded value such as {"odict": [[KEY, VALUE], ...]}: a dict whose only key, `tag`, names the
// kind.
struct Tagged {
  std::string_view tag;
  const CommonValue* payload = nullptr;
};
std::optional<Tagged> TaggedOf(const CommonValue& value) {
  const auto* dict = value.get_if<CommonDict>();
  if (dict == nullptr || dict->items.size() != 1) return std::nullopt;
  const auto& [key, payload] = *dict->items.begin();
  const auto* tag = std::get_if<std::string>(&key);
  if (tag == nullptr) return std::nullopt;
  return Tagged{*tag, &payload};
}

// Whether Python can hash the value, as dict keys require. Encoded objects, which are dicts here,
// count as not hashable.
bool IsHashable(const CommonValue& value) {
  if (const auto* tuple = value.get_if<CommonTuple>()) {
    return std::ranges::all_of(tuple->items, IsHashable);
  }
  return value.get_if<CommonList>() == nullptr && value.get_if<CommonDict>() == nullptr;
}

// Whether the text names a device of one of torch's common types, such as "cuda:1".
bool IsDevice(std::string_view text) {
  static constexpr std::string_view kTypes[] = {"cpu", "cuda", "meta", "mps", "xpu", "xla", "hpu"};
  const std::size_t colon = text.find(':');
  const std::string_view number = colon == text.npos ? "0" : text.substr(colon + 1);
  return std::ranges::find(kTypes, text.substr(0, colon)) != std::end(kTypes) && !number.empty() &&
         number.size() <= 3 && number.find_first_not_of("0123456789") == number.npos;
}

// Writes a value of which parts may be encoded. Returns false as PickleEncoded does. If `pickle` is
// null, the value is only checked.
bool WriteEncoded(PickleWriter* pickle, const CommonValue& value);

bool WriteItems(PickleWriter* pickle, const std::vector<CommonValue>& items) {
  return std::ranges::all_of(items,
                             [&](const CommonValue& item) { return WriteEncoded(pickle, item); });
}

bool WritePairs(PickleWriter* pickle, const CommonValue& pairs, std::string_view class_name) {
  const std::vector<CommonValue>* items = ListItems(pairs);
  if (items == nullptr) return false;
  if (pickle != nullptr) {
    if (class_name.empty()) {
      pickle->EmptyDict();
    } else {
      pickle->Global("collections", class_name);
      pickle->EmptyTuple();
      pickle->Reduce();
    }
    pickle->Mark();
  }
  for (const CommonValue& item : *items) {
    const std::vector<CommonValue>* pair = ListItems(item);
    if (pair == nullptr || pair->size() != 2 || !IsHashable(pair->front()) ||
        !WriteItems(pickle, *pair)) {
      return false;
    }
  }
  if (pickle != nullptr) pickle->SetItems();
  return true;
}

bool WriteTagged(PickleWriter* pickle, const Tagged& tagged) {
  const CommonValue& payload = *tagged.payload;
  const std::vector<CommonValue>* items = ListItems(payload);
  const auto* text = payload.get_if<std::string>();
  if (tagged.tag == "dict") return WritePairs(pickle, payload, "");
  if (tagged.tag == "odict") return WritePairs(pickle, payload, "OrderedDict");
  if (tagged.tag == "counter") return WritePairs(pickle, payload, "Counter");
  if (tagged.tag == "numpy" && items != nullptr && items->size() == 2) {
    // NaNs, complex numbers and numbers of ml_dtypes are encoded as their bytes. They are refused,
    // because a pickle would contain a bytes object instead of a number.
    const auto* type = items->front().get_if<std::string>();
    const CommonValue& number = items->back();
    if (type == nullptr || (number.get_if<CommonBytes>() != nullptr && *type != "bytes"))
      return false;
    return WriteEncoded(pickle, number);
  }
  if (tagged.tag == "torch.Size" && items != nullptr) {
    const bool sizes = std::ranges::all_of(*items, [](const CommonValue& item) {
      const auto* number = item.get_if<std::int64_t>();
      return number != nullptr && *number >= 0;
    });
    if (!sizes) return false;
    if (pickle == nullptr) return true;
    pickle->Global("torch", "Size");
    pickle->Mark();
    (void)WriteItems(pickle, *items);
    pickle->TupleFromMark();
    pickle->Tuple1();
    pickle->Reduce();
    return true;
  }
  if (tagged.tag == "torch.dtype" && text != nullptr) {
    // Only known dtypes are written, because loading a pickle imports the names in it.
    const bool known = std::ranges::any_of(
        AllDTypes(), [&](const DTypeInfo& info) { return info.torch == "torch." + *text; });
    if (known && pickle != nullptr) pickle->Global("torch", *text);
    return known;
  }
  if (tagged.tag == "torch.device" && text != nullptr && IsDevice(*text)) {
    if (pickle == nullptr) return true;
    pickle->Global("torch", "device");
    pickle->String(*text);
    pickle->Tuple1();
    pickle->Reduce();
    return true;
  }
  return false;
}

bool WriteEncoded(PickleWriter* pickle, const CommonValue& value) {
  if (value.get_if<CommonDict>() != nullptr) {
    const std::optional<Tagged> tagged = TaggedOf(value);
    return tagged.has_value() && WriteTagged(pickle, *tagged);
  }
  const std::vector<CommonValue>* items = ListItems(value);
  if (items == nullptr || pickle == nullptr) {
    if (pickle != nullptr) pickle->Common(value);
    return items == nullptr || WriteItems(nullptr, *items);
  }
  if (value.get_if<CommonTuple>() != nullptr) {
    if (items->empty()) {
      pickle->EmptyTuple();
      return true;
    }
    pickle->Mark();
    if (!WriteItems(pickle, *items)) return false;
    pickle->TupleFromMark();
    return true;
  }
  pickle->EmptyList();
  pickle->Mark();
  if (!WriteItems(pickle, *items)) return false;
  pickle->Appends();
  return true;
}

}  // namespace

bool TorchHolds(const TensorMeta& meta) {
  if (meta.dtype() != DType::kF4) return !InfoOf(meta.dtype()).torch.empty();
  const int axes = meta.shape().rank();
  return axes > 0 && meta.shape()[axes - 1] % 2 == 0;
}

Dims TorchDims(DType dtype, const Dims& dims) {
  Dims out = dims;
  if (dtype == DType::kF4 && out.rank() > 0) out[out.rank() - 1] /= 2;
  return out;
}

std::uint64_t TorchElementBytes(DType dtype) {
  return dtype == DType::kF4 ? 1 : InfoOf(dtype).bits / 8;
}

// The table in shard/dtype.cc has "torch.bfloat16"; a pickle needs module and name separately.
void PickleDType(PickleWriter& pickle, DType dtype) {
  std::string_view name = dtype == DType::kF4 ? kPairsOfF4 : InfoOf(dtype).torch;
  name.remove_prefix(std::min(name.size(), std::string_view("torch.").size()));
  pickle.Global("torch", name);
}

void PickleTensor(PickleWriter& pickle, DType dtype, const Dims& shape, std::string_view storage) {
  // _rebuild_tensor_v2 takes the type from the storage; _rebuild_tensor_v3 has untyped storage and
  // takes the type as its last argument.
  const std::string_view typed = StorageClass(dtype);
  std::int64_t elements = 1;
  Dims strides = Dims::Filled(shape.rank(), 1);
  std::int64_t stride = 1;
  for (int a = shape.rank() - 1; a >= 0; --a) {
    strides[a] = stride;
    // torch computes strides as if an empty axis had one element.
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
  pickle.Int(typed.empty() ? elements * static_cast<std::int64_t>(TorchElementBytes(dtype))
                           : elements);
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
  // torch stores a hash of names and a hash of CRCs here, and never reads them.
  zip.Add(".data/serialization_id", std::string(40, '0'), out);
}

bool CanPickleEncoded(const CommonValue& value) { return WriteEncoded(nullptr, value); }

bool PickleEncoded(PickleWriter& pickle, const CommonValue& value) {
  return CanPickleEncoded(value) && WriteEncoded(&pickle, value);
}

}  // namespace tensormount::fs
