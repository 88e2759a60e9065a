// SPDX-License-Identifier: Apache-2.0
// Converts the calls by which a pickle rebuilds a tensor to a strided view of a storage, as torch
// 2.13 would see it. A tensor whose bytes torch would change (conjugate, negate, replace later) is
// refused with the reason, because the view would have wrong values.
#include "index/archives/torch_tensor.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/checked.h"
#include "index/archives/pickle_calls.h"

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

// The integers of a tuple or of a torch.Size. torch allows more axes than kMaxRank, so such a
// tensor is kUnsupported and not damaged.
Result<Dims> DimsOf(const Value& value, std::string_view what) {
  Value tuple = value;
  if (value.Is(KnownClass::kTorchSize)) {
    if (value.args().size() != 1) return Damaged(std::string(what) + " is not a valid torch.Size");
    tuple = value.args().item(0);
  }
  // A list is refused, because the stream may have changed it since the call.
  if (tuple.kind() != Kind::kTuple) return Damaged(std::string(what) + " is not a tuple");
  if (tuple.size() > static_cast<std::size_t>(kMaxRank)) {
    return UnsupportedTensor("the tensor has " + std::to_string(tuple.size()) +
                             " axes, over the limit of " + std::to_string(kMaxRank));
  }
  Dims out;
  for (std::size_t i = 0; i < tuple.size(); ++i) {
    const Value v = tuple.item(i);
    if (v.kind() != Kind::kInt || v.integer() < 0) {
      return Damaged(std::string(what) + " has an element that is not a non-negative integer");
    }
    out.push_back(v.integer());
  }
  return out;
}

// kUnsupported if the stream changes the tensor after the call that made it: BUILD may run set_(),
// which replaces the bytes, and setting items assigns elements.
Status CheckUntouched(const Value& object) {
  if (object.built())
    return UnsupportedTensor(
        "the pickle sets the state of the tensor again after the tensor was created");
  if (object.size() > 0)
    return UnsupportedTensor("the pickle adds items to the tensor after the tensor was created");
  return Status();
}

// Whether torch gives a meaning to an attribute of this name ("data" replaces the bytes). Other
// attributes of a tensor do not affect its bytes. The list has the attributes of PyTorch 2.13 that
// can be set, or raise an error when set, with a space on either side of each. Names with spaces
// and dunder names are treated like names in the list. The list must be compared by hand with new
// releases of PyTorch.
bool IsTensorAttribute(std::string_view name) {
  constexpr std::string_view kOwn =
      " H T data device dtype grad grad_dtype grad_fn imag is_cpu is_cuda is_ipu is_leaf is_maia "
      "is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan "
      "is_xla is_xpu itemsize layout mH mT name names nbytes ndim output_nr real requires_grad "
      "retains_grad shape volatile _backward_hooks _base _cdata _grad _grad_fn "
      "_has_symbolic_sizes_strides _post_accumulate_grad_hooks _python_dispatch _version ";
  if (name.starts_with("__") || name.find(' ') != std::string_view::npos) return true;
  const std::size_t at = kOwn.find(' ' + std::string(name.substr(0, 64)) + ' ');
  return at != std::string_view::npos;
}

// Checks the attributes of a tensor: a dict, or a pair of dict and slots.
Status CheckAttributes(const Value& state) {
  const bool pair = state.kind() == Kind::kTuple && state.size() == 2;
  for (std::size_t part = 0; part < (pair ? 2u : 1u); ++part) {
    const Value names = pair ? state.item(part) : state;
    if (names.kind() == Kind::kNone) continue;
    if (names.kind() != Kind::kDict)
      return UnsupportedTensor("the state of the tensor is not a dict");
    for (std::size_t i = 0; i < names.size(); ++i) {
      const Value name = names.key(i);
      if (name.kind() != Kind::kString || IsTensorAttribute(name.text())) {
        return UnsupportedTensor("the state of the tensor sets attributes of torch.Tensor itself");
      }
    }
  }
  return Status();
}

// Whether tensors of this dtype may require a gradient: floating-point and complex types.
bool MayRequireGrad(std::string_view dtype) {
  return dtype.starts_with("float") || dtype.starts_with("bfloat") || dtype.starts_with("c") ||
         dtype == "double" || dtype == "half";
}

// The call that makes a tensor, without its wrappers.
struct Call {
  Value function;
  Value args;
  // True if the tensor or a wrapper requires a gradient.
  bool requires_grad = false;
};

// Checks the number of arguments of a function that makes a tensor. _rebuild_tensor has (storage,
// offset, size, stride). _rebuild_tensor_v2 has two or three more arguments, and v3 also a dtype
// before the metadata.
Result<Call> CallOf(const Value& function, const Value& args) {
  std::size_t least = 6;  // (storage, offset, size, stride, requires_grad, hooks[, metadata])
  std::size_t most = 7;
  if (function.known() == KnownClass::kRebuildTensor) {
    least = most = 4;
  } else if (function.known() == KnownClass::kRebuildTensorV3) {
    ++least;  // dtype
    ++most;
  }
  if (args.size() < least || args.size() > most) {
    return Damaged(NameOf(function) + " is called with " + std::to_string(args.size()) +
                   " arguments");
  }
  return Call{function, args, false};
}

Result<bool> RequiresGrad(const Value& value) {
  if (value.kind() != Kind::kBool) return Damaged("requires_grad is not a bool");
  return value.boolean();
}

// Removes the wrappers of a tensor. Wrappers are Parameter(data, requires_grad, hooks), and
// _rebuild_from_type_v2 for subclasses that are plain tensors with attributes.
Result<Call> Unwrap(const Value& value) {
  Value at = value;
  bool requires_grad = false;
  const auto found = [&](const Value& function, const Value& args) -> Result<Call> {
    TENSORMOUNT_ASSIGN_OR_RETURN(Call out, CallOf(function, args));
    if (args.size() > 4) {
      TENSORMOUNT_ASSIGN_OR_RETURN(out.requires_grad, RequiresGrad(args.item(4)));
    }
    out.requires_grad = out.requires_grad || requires_grad;
    return out;
  };
  // The deepest valid nesting is a parameter around a subclass around a tensor.
  for (int depth = 0; depth < 4; ++depth) {
    if (at.kind() != Kind::kObject) break;
    TENSORMOUNT_RETURN_IF_ERROR(CheckUntouched(at));
    const Value args = at.args();
    switch (at.callee().known()) {
      case KnownClass::kRebuildTensor:
      case KnownClass::kRebuildTensorV2:
      case KnownClass::kRebuildTensorV3:
        return found(at.callee(), args);
      case KnownClass::kRebuildOther:
        return UnsupportedTensor("the tensor is made by " + NameOf(at.callee()) +
                                 ", which does not store plain rows of elements");
      case KnownClass::kRebuildParameter: {
        // (data, requires_grad, hooks[, state])
        const bool with_state = at.callee().name() == "_rebuild_parameter_with_state";
        if (args.size() != (with_state ? 4u : 3u))
          return Damaged("the call that makes the parameter has the wrong number of arguments");
        TENSORMOUNT_ASSIGN_OR_RETURN(const bool grad, RequiresGrad(args.item(1)));
        requires_grad = requires_grad || grad;
        if (with_state) TENSORMOUNT_RETURN_IF_ERROR(CheckAttributes(args.item(3)));
        at = args.item(0);
        break;
      }
      case KnownClass::kRebuildFromTypeV2: {
        // (function, type, its arguments, state)
        if (args.size() != 4 || args.item(0).kind() != Kind::kGlobal ||
            args.item(1).kind() != Kind::kGlobal || args.item(2).kind() != Kind::kTuple) {
          return Damaged("the call that makes the tensor subclass has the wrong arguments");
        }
        const std::string_view type = args.item(1).name();
        if (args.item(1).known() != KnownClass::kTorchOther ||
            (type != "Tensor" && type != "Parameter" && type != "Buffer")) {
          return UnsupportedTensor("the subclass " + NameOf(args.item(1)) + " is not supported");
        }
        TENSORMOUNT_RETURN_IF_ERROR(CheckAttributes(args.item(3)));
        switch (args.item(0).known()) {
          case KnownClass::kRebuildTensor:
          case KnownClass::kRebuildTensorV2:
          case KnownClass::kRebuildTensorV3:
            return found(args.item(0), args.item(2));
          default:
            return UnsupportedTensor("the tensor is made by " + NameOf(args.item(0)) +
                                     ", which is not supported");
        }
      }
      default:
        return Damaged("the tensor is made by " + NameOf(at.callee()) +
                       ", which does not make tensors");
    }
  }
  return Damaged("the value is not made by a function that makes tensors");
}

// The element type of a storage class such as "FloatStorage". Empty for untyped bytes. Other
// classes, such as the quantised ones, are refused.
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
  return UnsupportedTensor("the tensor is stored in a " + std::string(name) +
                           ", whose elements are not plain numbers");
}

struct Storage {
  std::string key;
  std::string_view dtype;  // torch's name of the element type; empty for untyped bytes.
  std::int64_t count = 0;
};

// Decodes the persistent id ('storage', class, key, location, count). The location ("cpu",
// "cuda:0") does not affect the bytes in the file, so it is ignored, except "meta", which is
// refused.
Result<Storage> StorageOf(const Value& value) {
  if (value.kind() != Kind::kPersistent || value.args().kind() != Kind::kTuple) {
    return Damaged("the storage is not a valid storage reference");
  }
  const Value id = value.args();
  if (id.size() != 5 || id.item(0).kind() != Kind::kString || id.item(0).text() != "storage" ||
      id.item(1).kind() != Kind::kGlobal || id.item(1).known() != KnownClass::kTorchStorage ||
      id.item(2).kind() != Kind::kString || id.item(4).kind() != Kind::kInt ||
      id.item(4).integer() < 0) {
    return Damaged("the storage is not a valid storage reference");
  }
  if (id.item(3).kind() == Kind::kString && id.item(3).text() == "meta") {
    return UnsupportedTensor("the tensor is on the device meta, so it has no bytes");
  }
  Storage out;
  out.key = std::string(id.item(2).text());
  TENSORMOUNT_ASSIGN_OR_RETURN(out.dtype, StorageDType(id.item(1).name()));
  out.count = id.item(4).integer();
  return out;
}

// Refuses views whose bytes are not their values. The metadata mark such views (conj, neg), and
// torch applies the marks of any dict, whatever their values.
Status CheckViewBits(const Value& metadata) {
  if (metadata.kind() == Kind::kNone) return Status();
  if (metadata.kind() == Kind::kDict && metadata.size() == 0) return Status();
  return UnsupportedTensor(
      "the tensor is a lazy view (conj, neg), so its bytes are not its values");
}

// Limits how often a view repeats the elements of a storage, because a stream of 100 bytes may
// expand one element 2^60 times. Real expanded tensors (a mask, a broadcast scalar) have far less
// than 1,024 times the bytes of their storage, or are small.
Status CheckExpansion(std::int64_t volume, std::int64_t item_bytes, std::uint64_t storage_bytes) {
  constexpr std::uint64_t kMaxTimes = 1024;
  constexpr std::uint64_t kSmall = std::uint64_t{1} << 20;
  const std::optional<std::int64_t> shown = CheckedMul(volume, item_bytes);
  if (!shown) return Damaged("the size in bytes overflows");
  const auto bytes = static_cast<std::uint64_t>(*shown);
  if (bytes <= kSmall || bytes / kMaxTimes <= storage_bytes) return Status();
  return UnsupportedTensor("the tensor is a view that expands its storage of " +
                           std::to_string(storage_bytes) + " bytes to " + std::to_string(bytes) +
                           ", over " + std::to_string(kMaxTimes) + " times as many");
}

// Sets strides, offset, length and packed of a view whose dtype and shape are set. Strides are not
// negative, so the last element is at the largest index of every axis, and the length is one
// element plus (extent - 1) * stride for each axis. The arithmetic is checked, because the numbers
// come from the stream.
Status PlaceView(const Dims& torch_strides, std::int64_t first, std::int64_t item_bytes,
                 std::uint64_t storage_bytes, StoredTensor& view) {
  const std::optional<std::int64_t> volume = CheckedProduct(view.shape);
  // The strides of a dense view of this shape, to be compared with the strides of the view.
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
  if (!volume || !packed) return Damaged("the shape " + view.shape.ToString() + " overflows");
  view.strides = *packed;
  view.packed = true;
  if (*volume == 0) return Status();
  const std::optional<std::int64_t> offset = CheckedMul(first, item_bytes);
  std::optional<std::int64_t> span = item_bytes;
  for (int axis = 0; axis < view.shape.rank() && span; ++axis) {
    // The stride of an axis of extent 1 has no effect.
    if (view.shape[axis] == 1) continue;
    const std::optional<std::int64_t> stride = CheckedMul(torch_strides[axis], item_bytes);
    if (!stride) return Damaged("the strides overflow");
    if (*stride != view.strides[axis]) view.packed = false;
    view.strides[axis] = *stride;
    const std::optional<std::int64_t> reach = CheckedMul(view.shape[axis] - 1, *stride);
    span = reach ? CheckedAdd(*span, *reach) : std::nullopt;
  }
  if (!offset || !span ||
      !RangeWithin(static_cast<std::uint64_t>(*offset), static_cast<std::uint64_t>(*span),
                   storage_bytes)) {
    return Damaged("the view reaches past the end of the storage of " +
                   std::to_string(storage_bytes) + " bytes");
  }
  TENSORMOUNT_RETURN_IF_ERROR(CheckExpansion(*volume, item_bytes, storage_bytes));
  view.offset = static_cast<std::uint64_t>(*offset);
  view.length = static_cast<std::uint64_t>(*span);
  return Status();
}

}  // namespace

Result<DType> TorchDType(std::string_view name) {
  if (name == kPairOfF4) return DType::kF4;
  const Result<DType> found = DTypeFromName("torch." + std::string(name));
  if (found.ok()) return found;
  return UnsupportedTensor("the dtype torch." + std::string(name.substr(0, 64)) +
                           " is not supported");
}

bool IsTorchTensor(const Value& value) {
  return value.kind() == Kind::kObject && pickle::IsTensorFunction(value.callee().known());
}

// torch loads a storage at its first id and reuses it for all later ids. A reader that uses the
// type or size of a later id would read something else. O(number of ids).
std::set<std::string, std::less<>> ConflictingStorages(const pickle::Document& document) {
  const auto on_meta = [](const Value& id) {
    return id.item(3).kind() == Kind::kString && id.item(3).text() == "meta";
  };
  // First id of each storage, by the key of the storage.
  std::unordered_map<std::string_view, Value> first;
  std::set<std::string, std::less<>> out;
  for (std::size_t i = 0; i < document.persistent_count(); ++i) {
    const Value id = document.persistent(i).args();
    if (id.kind() != Kind::kTuple || id.size() != 5 || id.item(1).kind() != Kind::kGlobal ||
        id.item(2).kind() != Kind::kString || id.item(4).kind() != Kind::kInt) {
      continue;  // TorchTensorOf reports such an id.
    }
    // torch does not cache a storage without bytes.
    if (id.item(4).integer() == 0) continue;
    const auto [at, fresh] = first.try_emplace(id.item(2).text(), id);
    const Value& before = at->second;
    if (!fresh &&
        (before.item(1).name() != id.item(1).name() ||
         before.item(4).integer() != id.item(4).integer() || on_meta(before) != on_meta(id))) {
      out.emplace(id.item(2).text());
    }
  }
  return out;
}

// Offset and strides are in elements in the stream, and in bytes in the result.
Result<TorchTensor> TorchTensorOf(const Value& value) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Call call, Unwrap(value));
  const Value& args = call.args;
  const KnownClass function = call.function.known();
  TENSORMOUNT_ASSIGN_OR_RETURN(Storage storage, StorageOf(args.item(0)));
  if (args.item(1).kind() != Kind::kInt || args.item(1).integer() < 0) {
    return Damaged("the offset is not a non-negative integer");
  }
  TorchTensor out;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.view.shape, DimsOf(args.item(2), "the size"));
  TENSORMOUNT_ASSIGN_OR_RETURN(Dims strides, DimsOf(args.item(3), "the stride"));
  if (strides.rank() != out.view.shape.rank()) {
    return Damaged("the size has " + std::to_string(out.view.shape.rank()) +
                   " axes, but its stride has " + std::to_string(strides.rank()));
  }
  std::string_view dtype = storage.dtype;
  std::size_t metadata = 6;
  if (function == KnownClass::kRebuildTensorV3) {
    // _rebuild_tensor_v3 has an untyped storage; the dtype is a separate argument.
    metadata = 7;
    if (args.item(6).kind() != Kind::kGlobal || args.item(6).known() != KnownClass::kTorchDtype) {
      return Damaged("the tensor has no dtype");
    }
    if (!storage.dtype.empty())
      return Damaged("the storage is typed, but an untyped storage was expected");
    dtype = args.item(6).name();
  } else if (dtype.empty()) {
    return Damaged("the tensor has no dtype");
  }
  if (args.size() > metadata) TENSORMOUNT_RETURN_IF_ERROR(CheckViewBits(args.item(metadata)));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.view.dtype, TorchDType(dtype));
  if (call.requires_grad && !MayRequireGrad(dtype)) {
    return Damaged("the tensor requires a gradient, which torch." + std::string(dtype) +
                   " cannot have");
  }
  const bool pairs = dtype == kPairOfF4;
  const std::int64_t item_bytes = pairs ? 1 : InfoOf(out.view.dtype).bits / 8;
  const std::optional<std::int64_t> bytes =
      CheckedMul(storage.count, storage.dtype.empty() ? 1 : item_bytes);
  if (!bytes) return Damaged("the size of the storage overflows");
  out.storage = std::move(storage.key);
  out.storage_bytes = static_cast<std::uint64_t>(*bytes);
  TENSORMOUNT_RETURN_IF_ERROR(
      PlaceView(strides, args.item(1).integer(), item_bytes, out.storage_bytes, out.view));
  if (pairs) {
    const int last = out.view.shape.rank() - 1;
    if (last < 0 || !out.view.packed) {
      return UnsupportedTensor(
          "the tensor has dtype torch.float4_e2m1fn_x2, but is not in row-major order");
    }
    const std::optional<std::int64_t> doubled = CheckedMul(out.view.shape[last], std::int64_t{2});
    if (!doubled) return Damaged("the shape overflows");
    out.view.shape[last] = *doubled;
    out.view.strides = Dims();  // There is no stride of half a byte.
  }
  return out;
}

}  // namespace tensormount
