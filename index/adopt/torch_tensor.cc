// SPDX-License-Identifier: Apache-2.0
#include "index/adopt/torch_tensor.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "base/checked.h"

namespace tensormount {
namespace {

using pickle::Kind;
using pickle::KnownClass;
using pickle::Value;

constexpr std::string_view kPairOfF4 = "float4_e2m1fn_x2";

Status Damaged(std::string_view what) {
  return Status(Code::kDataLoss, "tensor: " + std::string(what));
}
Status UnsupportedTensor(std::string_view what) {
  return Status(Code::kUnsupported, "tensor: " + std::string(what));
}

std::string NameOf(const Value& global) {
  return std::string(global.module()) + "." + std::string(global.name());
}

// A tuple of integers, or torch.Size of one.
Result<Dims> DimsOf(const Value& value, std::string_view what) {
  Value tuple = value;
  if (value.Is(KnownClass::kTorchSize)) {
    if (value.args().size() != 1) return Damaged(std::string(what) + " is no torch.Size");
    tuple = value.args().item(0);
  }
  if (tuple.kind() != Kind::kTuple && tuple.kind() != Kind::kList) {
    return Damaged(std::string(what) + " is no tuple");
  }
  if (tuple.size() > static_cast<std::size_t>(kMaxRank)) {
    return UnsupportedTensor("it has " + std::to_string(tuple.size()) +
                             " axes, over the limit of " + std::to_string(kMaxRank));
  }
  Dims out;
  for (std::size_t i = 0; i < tuple.size(); ++i) {
    const Value v = tuple.item(i);
    if (v.kind() != Kind::kInt || v.integer() < 0) {
      return Damaged(std::string(what) + " holds what is no size");
    }
    out.push_back(v.integer());
  }
  return out;
}

// The function that makes the tensor and its arguments, without what only wraps them.
struct Call {
  Value function;
  Value args;
};

Result<Call> Unwrap(const Value& value) {
  Value at = value;
  // A parameter around a subclass around a tensor, and no deeper.
  for (int depth = 0; depth < 4; ++depth) {
    if (at.kind() != Kind::kObject) break;
    switch (at.callee().known()) {
      case KnownClass::kRebuildTensor:
      case KnownClass::kRebuildTensorV2:
      case KnownClass::kRebuildTensorV3:
        return Call{at.callee(), at.args()};
      case KnownClass::kRebuildOther:
        return UnsupportedTensor("made by " + NameOf(at.callee()) +
                                 ", which keeps no plain rows of elements");
      case KnownClass::kRebuildParameter:
        if (at.args().size() == 0) return Damaged("a parameter without data");
        at = at.args().item(0);
        break;
      case KnownClass::kRebuildFromTypeV2: {
        // (function, type, its arguments, state)
        const Value args = at.args();
        if (args.size() < 3 || args.item(0).kind() != Kind::kGlobal ||
            args.item(1).kind() != Kind::kGlobal || args.item(2).kind() != Kind::kTuple) {
          return Damaged("a subclass without its parts");
        }
        const std::string_view type = args.item(1).name();
        if (type != "Tensor" && type != "Parameter" && type != "Buffer") {
          return UnsupportedTensor("of the subclass " + NameOf(args.item(1)));
        }
        switch (args.item(0).known()) {
          case KnownClass::kRebuildTensor:
          case KnownClass::kRebuildTensorV2:
          case KnownClass::kRebuildTensorV3:
            return Call{args.item(0), args.item(2)};
          default:
            return UnsupportedTensor("made by " + NameOf(args.item(0)));
        }
      }
      default:
        return Damaged("made by " + NameOf(at.callee()) + ", which makes none");
    }
  }
  return Damaged("there is none");
}

// "FloatStorage" and its kin. Empty: bytes without a type.
Result<std::string_view> StorageDType(std::string_view name) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"DoubleStorage", "float64"},
      {"FloatStorage", "float32"},
      {"HalfStorage", "float16"},
      {"BFloat16Storage", "bfloat16"},
      {"LongStorage", "int64"},
      {"IntStorage", "int32"},
      {"ShortStorage", "int16"},
      {"CharStorage", "int8"},
      {"ByteStorage", "uint8"},
      {"BoolStorage", "bool"},
      {"ComplexFloatStorage", "complex64"},
      {"ComplexDoubleStorage", "complex128"},
      {"UntypedStorage", ""},
      {"_UntypedStorage", ""}};
  for (const auto& [storage, dtype] : kNames) {
    if (storage == name) return dtype;
  }
  return UnsupportedTensor("in a " + std::string(name) + ", whose elements are no plain numbers");
}

struct Storage {
  std::string key;
  std::string_view dtype;  // torch's name; empty: bytes.
  std::int64_t count = 0;
};

// ('storage', class, key, location, count[, view])
Result<Storage> StorageOf(const Value& value) {
  if (value.kind() != Kind::kPersistent || value.args().kind() != Kind::kTuple) {
    return Damaged("its storage is no reference to one");
  }
  const Value id = value.args();
  if (id.size() < 5 || id.item(0).kind() != Kind::kString || id.item(0).text() != "storage" ||
      id.item(1).kind() != Kind::kGlobal || id.item(1).known() != KnownClass::kTorchStorage ||
      id.item(2).kind() != Kind::kString || id.item(4).kind() != Kind::kInt ||
      id.item(4).integer() < 0) {
    return Damaged("its storage is no reference to one");
  }
  if (id.item(3).kind() == Kind::kString && id.item(3).text() == "meta") {
    return UnsupportedTensor("on the device meta, which has no bytes");
  }
  Storage out;
  out.key = std::string(id.item(2).text());
  TENSORMOUNT_ASSIGN_OR_RETURN(out.dtype, StorageDType(id.item(1).name()));
  out.count = id.item(4).integer();
  return out;
}

// Conjugate and negated views keep the bytes of what they are views of.
Status CheckViewBits(const Value& metadata) {
  if (metadata.kind() != Kind::kDict) return Status();
  for (const std::string_view bit : {"conj", "neg"}) {
    const std::optional<Value> set = metadata.Find(bit);
    if (set && set->kind() == Kind::kBool && set->boolean()) {
      return UnsupportedTensor("a lazy view (" + std::string(bit) +
                               ") whose bytes are not its values");
    }
  }
  return Status();
}

// Fills strides, offset, length and packed of a view whose dtype and shape are set.
Status PlaceView(const Dims& torch_strides, std::int64_t first, std::int64_t item_bytes,
                 std::uint64_t storage_bytes, StoredTensor& view) {
  const std::optional<std::int64_t> volume = CheckedProduct(view.shape);
  const auto dense = [&]() -> std::optional<Dims> {
    Dims out = Dims::Filled(view.shape.rank(), 0);
    std::optional<std::int64_t> row = item_bytes;
    for (int axis = view.shape.rank() - 1; axis >= 0; --axis) {
      if (!row) return std::nullopt;
      out[axis] = *row;
      row = CheckedMul(*row, std::max<std::int64_t>(view.shape[axis], 1));
    }
    if (!row) return std::nullopt;
    return out;
  };
  const std::optional<Dims> packed = dense();
  if (!volume || !packed) return Damaged("its shape " + view.shape.ToString() + " overflows");
  view.strides = *packed;
  view.packed = true;
  if (*volume == 0) return Status();
  const std::optional<std::int64_t> offset = CheckedMul(first, item_bytes);
  std::optional<std::int64_t> span = item_bytes;
  for (int axis = 0; axis < view.shape.rank() && span; ++axis) {
    // The stride of an axis of one element says nothing.
    if (view.shape[axis] == 1) continue;
    const std::optional<std::int64_t> stride = CheckedMul(torch_strides[axis], item_bytes);
    if (!stride) return Damaged("its strides overflow");
    if (*stride != view.strides[axis]) view.packed = false;
    view.strides[axis] = *stride;
    const std::optional<std::int64_t> reach = CheckedMul(view.shape[axis] - 1, *stride);
    span = reach ? CheckedAdd(*span, *reach) : std::nullopt;
  }
  if (!offset || !span ||
      !RangeWithin(static_cast<std::uint64_t>(*offset), static_cast<std::uint64_t>(*span),
                   storage_bytes)) {
    return Damaged("its view reaches past the end of its storage of " +
                   std::to_string(storage_bytes) + " bytes");
  }
  view.offset = static_cast<std::uint64_t>(*offset);
  view.length = static_cast<std::uint64_t>(*span);
  return Status();
}

}  // namespace

Result<DType> TorchDType(std::string_view name) {
  if (name == kPairOfF4) return DType::kF4;
  const Result<DType> found = DTypeFromName("torch." + std::string(name));
  if (found.ok()) return found;
  return UnsupportedTensor("of torch." + std::string(name.substr(0, 64)) +
                           ", which has no element type here");
}

bool IsTorchTensor(const Value& value) {
  if (value.kind() != Kind::kObject) return false;
  switch (value.callee().known()) {
    case KnownClass::kRebuildTensor:
    case KnownClass::kRebuildTensorV2:
    case KnownClass::kRebuildTensorV3:
    case KnownClass::kRebuildParameter:
    case KnownClass::kRebuildFromTypeV2:
    case KnownClass::kRebuildOther:
      return true;
    default:
      return false;
  }
}

Result<TorchTensor> TorchTensorOf(const Value& value) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Call call, Unwrap(value));
  const Value& args = call.args;
  const KnownClass function = call.function.known();
  if (args.size() < 4) return Damaged(NameOf(call.function) + " with too few arguments");
  TENSORMOUNT_ASSIGN_OR_RETURN(Storage storage, StorageOf(args.item(0)));
  if (args.item(1).kind() != Kind::kInt || args.item(1).integer() < 0) {
    return Damaged("its offset is no number");
  }
  TorchTensor out;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.view.shape, DimsOf(args.item(2), "its size"));
  TENSORMOUNT_ASSIGN_OR_RETURN(Dims strides, DimsOf(args.item(3), "its stride"));
  if (strides.rank() != out.view.shape.rank()) {
    return Damaged("its size has " + std::to_string(out.view.shape.rank()) + " axes, its stride " +
                   std::to_string(strides.rank()));
  }
  std::string_view dtype = storage.dtype;
  std::size_t metadata = 6;
  if (function == KnownClass::kRebuildTensorV3) {
    // Of untyped storage; the type is an argument of its own.
    metadata = 7;
    if (args.size() < 7 || args.item(6).kind() != Kind::kGlobal ||
        args.item(6).known() != KnownClass::kTorchDtype) {
      return Damaged("it says no element type");
    }
    if (!storage.dtype.empty()) return Damaged("a typed storage where bytes were announced");
    dtype = args.item(6).name();
  } else if (dtype.empty()) {
    return Damaged("it says no element type");
  }
  if (args.size() > metadata) TENSORMOUNT_RETURN_IF_ERROR(CheckViewBits(args.item(metadata)));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.view.dtype, TorchDType(dtype));
  const bool pairs = dtype == kPairOfF4;
  const std::int64_t item_bytes = pairs ? 1 : InfoOf(out.view.dtype).bits / 8;
  const std::optional<std::int64_t> bytes =
      CheckedMul(storage.count, storage.dtype.empty() ? 1 : item_bytes);
  if (!bytes) return Damaged("its storage's size overflows");
  out.storage = std::move(storage.key);
  out.storage_bytes = static_cast<std::uint64_t>(*bytes);
  TENSORMOUNT_RETURN_IF_ERROR(
      PlaceView(strides, args.item(1).integer(), item_bytes, out.storage_bytes, out.view));
  if (pairs) {
    const int last = out.view.shape.rank() - 1;
    if (last < 0 || !out.view.packed) {
      return UnsupportedTensor("of torch.float4_e2m1fn_x2 in another order than rows");
    }
    const std::optional<std::int64_t> doubled = CheckedMul(out.view.shape[last], std::int64_t{2});
    if (!doubled) return Damaged("its shape overflows");
    out.view.shape[last] = *doubled;
    out.view.strides = Dims();  // No stride of half a byte.
  }
  return out;
}

}  // namespace tensormount
