// SPDX-License-Identifier: Apache-2.0
// From the calls by which a pickle rebuilds a tensor to a strided window of a storage, as torch
// 2.13 would see it. Where torch would do something to the bytes (conjugate, negate, replace them
// later) the tensor is refused by name: a wrong window is worse than none.
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

// A tuple of integers, or torch.Size of one. More axes than kMaxRank are well-formed to torch, so
// such a tensor is left out by name and no damage.
Result<Dims> DimsOf(const Value& value, std::string_view what) {
  Value tuple = value;
  if (value.Is(KnownClass::kTorchSize)) {
    if (value.args().size() != 1) return Damaged(std::string(what) + " is no torch.Size");
    tuple = value.args().item(0);
  }
  // No list: that may have changed since the call.
  if (tuple.kind() != Kind::kTuple) return Damaged(std::string(what) + " is no tuple");
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

// What was done to a tensor after it was made: BUILD calls set_() with other data, items are cells.
// BUILD of a tensor may run set_(), which gives it other bytes; whoever would show the ones of the
// call shows something else than torch.
Status CheckUntouched(const Value& object) {
  if (object.built()) return UnsupportedTensor("given another state after it was made");
  if (object.size() > 0) return UnsupportedTensor("given items after it was made");
  return Status();
}

// Attributes that people give to parameters are just that; these mean something to a tensor:
// "data" replaces its bytes. Those of PyTorch 2.13 that can be set, or say that they cannot.
// A list of names, with a blank on either side of each. Names with blanks or in dunder form are
// refused as well. New releases may add names: unknown ones are harmless attributes, and this list
// is compared with a release by hand.
bool IsTensorsOwn(std::string_view name) {
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

// A dict of attributes, or a pair of that and slots.
Status CheckAttributes(const Value& state) {
  const bool pair = state.kind() == Kind::kTuple && state.size() == 2;
  for (std::size_t part = 0; part < (pair ? 2u : 1u); ++part) {
    const Value names = pair ? state.item(part) : state;
    if (names.kind() == Kind::kNone) continue;
    if (names.kind() != Kind::kDict) return UnsupportedTensor("with a state that is no dict");
    for (std::size_t i = 0; i < names.size(); ++i) {
      const Value name = names.key(i);
      if (name.kind() != Kind::kString || IsTensorsOwn(name.text())) {
        return UnsupportedTensor("with a state that changes more than attributes of its own");
      }
    }
  }
  return Status();
}

// Floating point, real and complex.
bool MayRequireGrad(std::string_view dtype) {
  return dtype.starts_with("float") || dtype.starts_with("bfloat") || dtype.starts_with("c") ||
         dtype == "double" || dtype == "half";
}

// The function that makes the tensor and its arguments, without what only wraps them.
struct Call {
  Value function;
  Value args;
  // Of the tensor and of what wraps it.
  bool requires_grad = false;
};

// The functions differ in the number of arguments only: (storage, offset, size, stride) of
// _rebuild_tensor, two or three more of v2, and a dtype before the metadata of v3.
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
    return Damaged(NameOf(function) + " with " + std::to_string(args.size()) + " arguments");
  }
  return Call{function, args, false};
}

Result<bool> RequiresGrad(const Value& value) {
  if (value.kind() != Kind::kBool) return Damaged("requires_grad is neither true nor false");
  return value.boolean();
}

// Takes off what wraps a tensor: Parameter(data, requires_grad, hooks), and _rebuild_from_type_v2
// for subclasses that are plain tensors with attributes.
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
  // A parameter around a subclass around a tensor, and no deeper.
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
        return UnsupportedTensor("made by " + NameOf(at.callee()) +
                                 ", which keeps no plain rows of elements");
      case KnownClass::kRebuildParameter: {
        // (data, requires_grad, hooks[, state])
        const bool with_state = at.callee().name() == "_rebuild_parameter_with_state";
        if (args.size() != (with_state ? 4u : 3u)) return Damaged("a parameter without its parts");
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
          return Damaged("a subclass without its parts");
        }
        const std::string_view type = args.item(1).name();
        if (args.item(1).known() != KnownClass::kTorchOther ||
            (type != "Tensor" && type != "Parameter" && type != "Buffer")) {
          return UnsupportedTensor("of the subclass " + NameOf(args.item(1)));
        }
        TENSORMOUNT_RETURN_IF_ERROR(CheckAttributes(args.item(3)));
        switch (args.item(0).known()) {
          case KnownClass::kRebuildTensor:
          case KnownClass::kRebuildTensorV2:
          case KnownClass::kRebuildTensorV3:
            return found(args.item(0), args.item(2));
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
// The element type that a storage class stands for. Quantised ones are known names and not in this
// list.
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

// ('storage', class, key, location, count)
// The location ("cpu", "cuda:0") says where torch had it and means nothing for the bytes in the
// file.
Result<Storage> StorageOf(const Value& value) {
  if (value.kind() != Kind::kPersistent || value.args().kind() != Kind::kTuple) {
    return Damaged("its storage is no reference to one");
  }
  const Value id = value.args();
  if (id.size() != 5 || id.item(0).kind() != Kind::kString || id.item(0).text() != "storage" ||
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

// What torch keeps there are marks of views whose bytes are not their values (conj, neg), and it
// takes them from any dict, whatever they are set to.
Status CheckViewBits(const Value& metadata) {
  if (metadata.kind() == Kind::kNone) return Status();
  if (metadata.kind() == Kind::kDict && metadata.size() == 0) return Status();
  return UnsupportedTensor("a lazy view (conj, neg) whose bytes are not its values");
}

// Expanded tensors show their elements many times; far more than any that were saved would take
// for ever to read.
// A stream of 100 bytes may show one element 2^60 times; honest expanded tensors (a mask, a scalar
// that is broadcast) are far below 1,024 times their storage, or small.
Status CheckShown(std::int64_t volume, std::int64_t item_bytes, std::uint64_t storage_bytes) {
  constexpr std::uint64_t kMaxTimes = 1024;
  constexpr std::uint64_t kSmall = std::uint64_t{1} << 20;
  const std::optional<std::int64_t> shown = CheckedMul(volume, item_bytes);
  if (!shown) return Damaged("its bytes overflow");
  const auto bytes = static_cast<std::uint64_t>(*shown);
  if (bytes <= kSmall || bytes / kMaxTimes <= storage_bytes) return Status();
  return UnsupportedTensor("a view that shows its storage of " + std::to_string(storage_bytes) +
                           " bytes as " + std::to_string(bytes) + ", over " +
                           std::to_string(kMaxTimes) + " times as many");
}

// Fills strides, offset, length and packed of a view whose dtype and shape are set.
// Elements are at offset + sum(index[a] * stride[a]), strides not negative, so the last element is
// at the largest index of every axis: the span is one element and (extent - 1) * stride for each
// axis. All in checked arithmetic: numbers are the stream's.
Status PlaceView(const Dims& torch_strides, std::int64_t first, std::int64_t item_bytes,
                 std::uint64_t storage_bytes, StoredTensor& view) {
  const std::optional<std::int64_t> volume = CheckedProduct(view.shape);
  // Strides of dense rows, which are compared with those of the view axis by axis.
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
  TENSORMOUNT_RETURN_IF_ERROR(CheckShown(*volume, item_bytes, storage_bytes));
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
  return value.kind() == Kind::kObject && pickle::IsTensorFunction(value.callee().known());
}

// O(ids). Torch loads a storage when it meets its key for the first time and hands it out from then
// on, so a later id with another type or size would be read differently by a reader that looks at
// each id alone.
std::set<std::string, std::less<>> StoragesOfTwoKinds(const pickle::Document& document) {
  const auto on_meta = [](const Value& id) {
    return id.item(3).kind() == Kind::kString && id.item(3).text() == "meta";
  };
  std::unordered_map<std::string_view, Value> first;  // Ids, by the key of their storage.
  std::set<std::string, std::less<>> out;
  for (std::size_t i = 0; i < document.persistent_count(); ++i) {
    const Value id = document.persistent(i).args();
    if (id.kind() != Kind::kTuple || id.size() != 5 || id.item(1).kind() != Kind::kGlobal ||
        id.item(2).kind() != Kind::kString || id.item(4).kind() != Kind::kInt) {
      continue;  // Whoever wants its tensor is told.
    }
    // torch keeps no storage without bytes.
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

// The offset and strides of the stream are in elements; what comes out is in bytes.
Result<TorchTensor> TorchTensorOf(const Value& value) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const Call call, Unwrap(value));
  const Value& args = call.args;
  const KnownClass function = call.function.known();
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
    if (args.item(6).kind() != Kind::kGlobal || args.item(6).known() != KnownClass::kTorchDtype) {
      return Damaged("it says no element type");
    }
    if (!storage.dtype.empty()) return Damaged("a typed storage where bytes were announced");
    dtype = args.item(6).name();
  } else if (dtype.empty()) {
    return Damaged("it says no element type");
  }
  if (args.size() > metadata) TENSORMOUNT_RETURN_IF_ERROR(CheckViewBits(args.item(metadata)));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.view.dtype, TorchDType(dtype));
  if (call.requires_grad && !MayRequireGrad(dtype)) {
    return Damaged("it requires a gradient, which torch." + std::string(dtype) + " cannot have");
  }
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
