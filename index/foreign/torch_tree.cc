// SPDX-License-Identifier: Apache-2.0
// Adds the tensors in nested dicts and lists of a pickle, and all other values as common values
// (torch_tree.h). A shared value may be reached by many paths, so the number of visited values is
// limited.
//
// There are two passes in the same order. Scan counts the values below each value, and records in
// nodes_ whether a tensor is among them; it fails if there are more values than a real file could
// have. Emit visits the values with tensors below them, and makes one common value of each other
// value.
#include "index/foreign/torch_tree.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "index/archives/pickle_calls.h"
#include "shard/tensor_meta.h"

namespace tensormount {
namespace {

using pickle::Kind;
using pickle::KnownClass;
using pickle::Value;

// Largest depth of visited values: the passes are recursive, and values may contain themselves.
constexpr int kMaxTreeDepth = 200;
// The limit of visited values is this number plus two for each byte of the pickle. Values may be
// shared, so the number of paths can grow exponentially with the size of a pickle, but real files
// share few values.
constexpr std::size_t kMinValues = std::size_t{1} << 20;
constexpr std::uint32_t kHoldsTensor = std::uint32_t{1} << 31;
// Largest total length of a checkpoint's keys, and largest number of attempts to make a key unique.
constexpr std::size_t kMaxTreeNameBytes = std::size_t{128} << 20;
constexpr int kMaxSpellings = 8;

std::string JoinedPath(const std::vector<TorchNames::Part>& path) {
  std::string out;
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (i > 0) out += '.';
    out += path[i].text;
  }
  return out;
}

// Spells a path as ["a.b"][0], with quotes and backslashes escaped, so that different paths have
// different spellings.
std::string PythonSpelling(const std::vector<TorchNames::Part>& path) {
  std::string out;
  for (const TorchNames::Part& part : path) {
    out += '[';
    if (!part.number) out += '"';
    for (const char c : part.text) {
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
    out += part.number ? "]" : "\"]";
  }
  return out;
}

bool IsDict(const Value& value) {
  if (value.kind() == Kind::kDict) return true;
  return value.kind() == Kind::kObject &&
         (value.Is(KnownClass::kOrderedDict) || value.Is(KnownClass::kDefaultDict) ||
          value.Is(KnownClass::kCounter) || value.Is(KnownClass::kDictLike));
}

// The part of a path for a dict key or a position in a list; nullopt if the key is neither text nor
// an integer, or too long.
std::optional<TorchNames::Part> PartOf(const Value& key) {
  if (key.kind() == Kind::kString && key.text().size() <= kMaxKeyBytes) {
    return TorchNames::Part{std::string(key.text()), false, false};
  }
  if (key.kind() == Kind::kInt) return TorchNames::Part{std::to_string(key.integer()), true, false};
  return std::nullopt;
}

TorchNames::Part PartOf(std::size_t index) { return {std::to_string(index), true, true}; }

// Calls f(key or position, child) for the children of a value, in a fixed order, until f fails.
// Attributes (in the state of an object) are children only of Namespace objects.
template <typename F>
Status ForEachChild(const Value& value, F f) {
  if (IsDict(value)) {
    const bool bag = value.Is(KnownClass::kDictLike) && value.callee().name() != "dict";
    if (bag && value.size() > 0) {
      return Status(Code::kUnsupported, std::string(value.callee().name()) +
                                            " objects that contain items are not supported");
    }
    for (std::size_t i = 0; i < value.size(); ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(f(value.key(i), value.item(i)));
    }
    if (value.kind() == Kind::kDict || !value.built()) return Status();
    const Value state = value.state();
    // States of another form are refused. Python would set attributes from them too: a pair (dict,
    // slots), for example.
    const bool has_attributes =
        bag || value.Is(KnownClass::kOrderedDict) || value.Is(KnownClass::kCounter);
    if (!has_attributes || state.kind() != Kind::kDict) {
      return Status(Code::kUnsupported,
                    std::string(value.callee().name()) +
                        " objects are supported only if their state is a dict of attributes");
    }
    if (!bag) return Status();
    for (std::size_t i = 0; i < state.size(); ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(f(state.key(i), state.item(i)));
    }
  } else if (value.kind() == Kind::kList || value.kind() == Kind::kTuple) {
    for (std::size_t i = 0; i < value.size(); ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(f(i, value.item(i)));
    }
  }
  return Status();
}

std::string ForeignClass(const Value& foreign) {
  return pickle::FullName(foreign.kind() == Kind::kGlobal ? foreign : foreign.callee());
}

// Whether the value has an identity (Value::record), so that the pickle may share it, or change it
// later.
bool HasIdentity(const Value& value) {
  return value.kind() == Kind::kDict || value.kind() == Kind::kList || value.kind() == Kind::kSet ||
         value.kind() == Kind::kObject;
}

// Whether objects of this class are immutable, so that later code cannot change them.
bool IsImmutable(const Value& object) {
  return object.Is(KnownClass::kTorchSize) || object.Is(KnownClass::kTorchDevice) ||
         object.Is(KnownClass::kTorchLayout) || object.Is(KnownClass::kPath) ||
         object.Is(KnownClass::kDatetime) || object.Is(KnownClass::kNumpyDtype);
}

// Whether an error concerns only one tensor, which is then left out.
bool IsTensorError(const Status& status) {
  return status.code() == Code::kUnsupported || status.code() == Code::kDataLoss;
}

}  // namespace

// A key depends only on the earlier calls, so a file gives the same keys each time.
std::optional<std::string> TorchNames::Of(const std::string& prefix,
                                          const std::vector<Part>& path) {
  std::string name = prefix + JoinedPath(path);
  if (name.size() == prefix.size() || taken_.contains(name)) name = prefix + PythonSpelling(path);
  // The spelling was returned before only if a key of the file looks like a spelling, or if the
  // same path occurs again, for example in another file.
  for (int i = 0; taken_.contains(name); ++i) {
    if (i == kMaxSpellings) return std::nullopt;
    name += '\'';
  }
  if (name.size() > kMaxTreeNameBytes - bytes_) return std::nullopt;
  bytes_ += name.size();
  taken_.insert(name);
  return name;
}

TorchTree::TorchTree(ForeignBuilder& builder, const TorchArchive& archive, std::uint32_t file,
                     TorchNames& tensors, TorchNames& common, ValueBudget& budget,
                     const TorchTreeOptions& options)
    : builder_(builder),
      archive_(archive),
      file_(file),
      tensor_names_(tensors),
      common_names_(common),
      budget_(budget),
      options_(options) {}

std::string TorchTree::Shown() const { return options_.prefix + JoinedPath(path_).substr(0, 256); }

Status TorchTree::Add() {
  const Value root = options_.root ? *options_.root : archive_.document().root();
  TENSORMOUNT_ASSIGN_OR_RETURN(const bool any, Scan(root, 0));
  if (!foreign_.empty()) TENSORMOUNT_RETURN_IF_ERROR(CheckForeign(root));
  // If the root is not a dict, and not a list or tuple with tensors, it is one tensor or value with
  // the name of the file.
  const bool container =
      IsDict(root) || (any && (root.kind() == Kind::kList || root.kind() == Kind::kTuple));
  if (!container) path_.push_back({options_.root_key, false, false});
  if (any || container) return Emit(root);
  AddCommon(root);
  return Status();
}

Result<bool> TorchTree::Scan(const Value& value, int depth) {
  const std::size_t at = nodes_.size();
  // Numbers in nodes_ must leave the top bit free, which marks tensors.
  if (at >= kMinValues + 2 * archive_.document().bytes() || at >= kHoldsTensor - 1) {
    return Status(Code::kDataLoss,
                  "the values of the file refer to each other in an endless loop, or too often");
  }
  nodes_.push_back(0);
  bool any = TorchArchive::IsTensor(value);
  tensors_ += any ? 1 : 0;
  // Objects of unknown classes are marked like tensors, so that Emit visits and reports them.
  if (pickle::IsForeign(value)) {
    if (foreign_.empty()) foreign_ = ForeignClass(value);
    any = true;
  }
  if (!any && depth < kMaxTreeDepth) {
    TENSORMOUNT_RETURN_IF_ERROR(ForEachChild(value, [&](const auto&, const Value& child) {
      const Result<bool> below = Scan(child, depth + 1);
      any = any || (below.ok() && below.value());
      return below.status();
    }));
    // The arguments of a call are not shown, but they count for the limits, because the conversion
    // to a common value visits them.
    if (value.kind() == Kind::kObject) {
      TENSORMOUNT_RETURN_IF_ERROR(Scan(value.args(), depth + 1).status());
    }
  }
  if (!any && depth >= kMaxTreeDepth) TENSORMOUNT_RETURN_IF_ERROR(CheckBelow(value));
  nodes_[at] = static_cast<std::uint32_t>(nodes_.size() - at) | (any ? kHoldsTensor : 0);
  return any;
}

// Checks values below the deepest level that is shown. The file is refused if an object of an
// unknown class is among them, because the object's code could have changed a tensor that is shown.
Status TorchTree::CheckBelow(const Value& top) {
  std::vector<Value> left{top};
  while (!left.empty()) {
    const Value value = left.back();
    left.pop_back();
    if (value.kind() == Kind::kObject && pickle::IsForeign(value)) {
      return Status(Code::kUnsupported, "contains a Python object (" + ForeignClass(value) +
                                            ") that is not loaded for safety, nested deeper than " +
                                            std::to_string(kMaxTreeDepth) +
                                            " levels; save its state_dict() instead");
    }
    if (TorchArchive::IsTensor(value) ||
        (HasIdentity(value) && !below_.insert(value.record()).second)) {
      continue;
    }
    // Tuples have no identity, so a shared tuple is visited many times, and a small file may lead
    // to very many visits.
    if (++noted_ > kMinValues + 2 * archive_.document().bytes()) {
      return Status(Code::kDataLoss, "values of the file refer to each other too often");
    }
    if (value.kind() == Kind::kObject) {
      left.push_back(value.args());
      left.push_back(value.state());
    }
    TENSORMOUNT_RETURN_IF_ERROR(ForEachChild(value, [&](const auto&, const Value& child) {
      left.push_back(child);
      return Status();
    }));
  }
  return {};
}

Status TorchTree::CollectRecords(const Value& value, int depth, Records& into) {
  if (++noted_ > kMinValues + 2 * archive_.document().bytes() || depth > kMaxTreeDepth) {
    return Status(Code::kUnsupported,
                  "contains a Python object (" + foreign_ + ") with too many values");
  }
  const auto items = [&]() -> Status {
    for (std::size_t i = 0; i < value.size(); ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(CollectRecords(value.item(i), depth + 1, into));
    }
    return {};
  };
  switch (value.kind()) {
    case Kind::kTuple:
      return items();
    case Kind::kDict:
    case Kind::kList:
    case Kind::kSet:
      // If the identifier is known, the value was visited before with its content.
      return into.insert(std::to_string(value.record())).second ? items() : Status();
    case Kind::kPersistent: {
      const Value id = value.args();
      const bool storage =
          id.kind() == Kind::kTuple && id.size() > 2 && id.item(2).kind() == Kind::kString;
      into.insert("storage " + std::string(storage ? id.item(2).text() : ""));
      return {};
    }
    case Kind::kObject:
      if (IsImmutable(value)) return {};
      if (!into.insert(std::to_string(value.record())).second) return {};
      TENSORMOUNT_RETURN_IF_ERROR(CollectRecords(value.args(), depth + 1, into));
      TENSORMOUNT_RETURN_IF_ERROR(CollectRecords(value.state(), depth + 1, into));
      return items();
    default:
      return {};
  }
}

Status TorchTree::CollectShownAndGiven(const Value& value, int depth, Records& shown,
                                       Records& given) {
  if (pickle::IsForeign(value)) return CollectRecords(value, depth, given);
  if (TorchArchive::IsTensor(value)) return CollectRecords(value, depth, shown);
  if (depth >= kMaxTreeDepth) return {};
  if (HasIdentity(value) && !IsImmutable(value) &&
      !shown.insert(std::to_string(value.record())).second) {
    return {};
  }
  if (value.kind() == Kind::kObject) {
    TENSORMOUNT_RETURN_IF_ERROR(CollectShownAndGiven(value.args(), depth + 1, shown, given));
    TENSORMOUNT_RETURN_IF_ERROR(CollectShownAndGiven(value.state(), depth + 1, shown, given));
  }
  return ForEachChild(value, [&](const auto&, const Value& child) {
    return CollectShownAndGiven(child, depth + 1, shown, given);
  });
}

Status TorchTree::CheckForeign(const Value& root) {
  const auto refused = [&](const std::string& why) {
    return Status(Code::kUnsupported, "contains a Python object (" + foreign_ +
                                          ") that is not loaded for safety" + why +
                                          "; save its state_dict() instead");
  };
  if (tensors_ == 0) return refused("");
  Records shown;
  Records given;
  TENSORMOUNT_RETURN_IF_ERROR(CollectShownAndGiven(root, 0, shown, given));
  const bool apart =
      std::ranges::none_of(given, [&](const std::string& one) { return shown.contains(one); });
  return apart ? Status() : refused(" and may change other values");
}

// Adds a value, whose entry in nodes_ is at next_, and all values below it. Items without a usable
// key are skipped with all values below them.
Status TorchTree::Emit(const Value& value) {
  ++next_;
  if (TorchArchive::IsTensor(value)) return AddTensor(value);
  if (pickle::IsForeign(value)) {
    builder_.ReportLost(
        {},
        "the value is a Python object (" + ForeignClass(value) +
            ") that is not loaded for safety; save plain values or a state_dict() instead",
        ForeignBuilder::LostKind::kObject, Shown());
    return Status();
  }
  std::uint64_t number = 0;  // Position of the item, for messages.
  return ForEachChild(value, [&](const auto& key, const Value& child) {
    ++number;
    const std::uint32_t node = nodes_[next_];
    const std::size_t end = next_ + (node & ~kHoldsTensor);
    std::optional<TorchNames::Part> part = PartOf(key);
    const std::size_t bytes = part ? part->text.size() + 1 : 0;
    if (!part) {
      const std::string in = Shown();
      builder_.Warn("item " + std::to_string(number) + " of " + (in.empty() ? "the file" : in) +
                    " is left out: its key is neither text nor a number, or too long");
    } else if (path_bytes_ + bytes > kMaxKeyBytes) {
      builder_.Warn("item " + std::to_string(number) + " of " + Shown() + ", " +
                    part->text.substr(0, 64) + ", is left out: its name would be too long");
      part.reset();
    } else {
      path_.push_back(*std::move(part));
      path_bytes_ += bytes;
    }
    Status status;
    if (part && (node & kHoldsTensor) != 0) {
      status = Emit(child);
    } else if (part) {
      AddCommon(child);
    }
    next_ = end;
    if (part) {
      path_.pop_back();
      path_bytes_ -= bytes;
    }
    return status;
  });
}

// Adds a tensor. If it cannot be read in place, it is left out with a warning; a read error is
// returned.
Status TorchTree::AddTensor(const Value& value) {
  const Result<StoredTensor> stored = archive_.TensorOf(value);
  Status status = stored.status();
  if (status.ok()) {
    const std::optional<std::string> key = tensor_names_.Of(options_.prefix, path_);
    if (!key) {
      status =
          Status(Code::kDataLoss, "too many values have this name, or names are too long in total");
    } else if (const Status good = CheckKey(*key); !good.ok()) {
      status = Status(Code::kDataLoss, good.message());
    } else {
      status = AddStored(*key, stored.value());
    }
  }
  if (status.ok() || !IsTensorError(status)) return status;
  builder_.Warn("tensor " + Shown() + ": left out: " + status.message());
  return Status();
}

Status TorchTree::AddStored(const std::string& key, const StoredTensor& stored) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t tensor,
                               builder_.AddTensor(key, stored.dtype, stored.shape));
  if (options_.added) options_.added(key);
  ReportPath(key);
  const Status status =
      builder_.AddChunk(tensor, Box::Whole(stored.shape), file_, options_.at + stored.offset,
                        stored.length, stored.packed ? Dims() : stored.strides);
  if (IsTensorError(status)) {
    builder_.Drop(tensor, status.message());
    return Status();
  }
  return status;
}

void TorchTree::ReportPath(const std::string& name) const {
  const bool plain = path_.size() == 1 && path_[0].text == name;
  if (options_.nested && !plain) options_.nested(name, path_);
}

void TorchTree::AddCommon(const Value& value) {
  if (options_.tensors_only) return;
  std::optional<CommonValue> plain = budget_.Convert(value);
  if (!plain) {
    builder_.Warn("common value " + Shown() + ": left out: it is not plain data, or too large");
  } else if (std::optional<std::string> name = common_names_.Of(options_.prefix, path_)) {
    ReportPath(*name);
    builder_.AddCommon(*name, *std::move(plain));
  } else {
    builder_.Warn("common value " + Shown() +
                  ": left out: too many values have this name, or names are too long in total");
  }
}

}  // namespace tensormount
