// SPDX-License-Identifier: Apache-2.0
// Names for tensors in nested dicts and lists of a pickle, and the rest as common values. A value
// that is shared may be reached by any number of paths; work is bounded by what the tree would come
// to, not by the size of the stream.
//
// Two passes over the same order of values. Scan counts, for every value, how many values lie below
// it and whether a tensor is among them; it fails where the count passes what an honest file could
// have. Emit walks again, goes into what holds tensors, and makes a common value of everything else
// at the highest level at which there is no tensor. nodes_ carries what Scan found from one to the
// other, so nothing is hashed or looked up.
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

// The walk is recursive, and cycles have no end.
constexpr int kMaxTreeDepth = 200;
// Values may be shared: a stream of n bytes can describe 2^n paths. Honest ones share a few.
// What is allowed besides two values a byte of the stream.
constexpr std::size_t kMinValues = std::size_t{1} << 20;
constexpr std::uint32_t kHoldsTensor = std::uint32_t{1} << 31;
// Names of one checkpoint together; so many of one spelling.
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

// ["a.b"][0], with quotes and backslashes escaped: different paths have different spellings.
std::string SpelledOut(const std::vector<TorchNames::Part>& path) {
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

// nullopt: neither text nor a number, or a text of which no key can be made.
std::optional<TorchNames::Part> PartOf(const Value& key) {
  if (key.kind() == Kind::kString && key.text().size() <= kMaxKeyBytes) {
    return TorchNames::Part{std::string(key.text()), false, false};
  }
  if (key.kind() == Kind::kInt) return TorchNames::Part{std::to_string(key.integer()), true, false};
  return std::nullopt;
}

TorchNames::Part PartOf(std::size_t index) { return {std::to_string(index), true, true}; }

// Calls f(key or index, value) for what a value holds, always in the same order, until it fails.
// A state that Python would set on a dict changes attributes of it, which have no key in a listing:
// only bags of names (Namespace) show them as their items.
template <typename F>
Status ForEachChild(const Value& value, F f) {
  if (IsDict(value)) {
    const bool bag = value.Is(KnownClass::kDictLike) && value.callee().name() != "dict";
    if (bag && value.size() > 0) {
      return Status(Code::kUnsupported, std::string(value.callee().name()) + " that has items");
    }
    for (std::size_t i = 0; i < value.size(); ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(f(value.key(i), value.item(i)));
    }
    if (value.kind() == Kind::kDict || !value.built()) return Status();
    const Value state = value.state();
    // Python sets attributes of a pair (dict, slots) too, and others have none.
    const bool has_attributes =
        bag || value.Is(KnownClass::kOrderedDict) || value.Is(KnownClass::kCounter);
    if (!has_attributes || state.kind() != Kind::kDict) {
      return Status(Code::kUnsupported, std::string(value.callee().name()) +
                                            " that is given a state which is no dict " +
                                            "of attributes");
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

// Nothing that a stream does to a value of these changes it.
bool IsImmutable(const Value& object) {
  return object.Is(KnownClass::kTorchSize) || object.Is(KnownClass::kTorchDevice) ||
         object.Is(KnownClass::kTorchLayout) || object.Is(KnownClass::kPath) ||
         object.Is(KnownClass::kDatetime) || object.Is(KnownClass::kNumpyDtype);
}

// Whether it concerns one tensor only.
bool LeavesOut(const Status& status) {
  return status.code() == Code::kUnsupported || status.code() == Code::kDataLoss;
}

}  // namespace

// Deterministic: the same stream gives the same names in the same order, so that a checkpoint keeps
// its keys from one open to the next.
std::optional<std::string> TorchNames::Of(const std::string& prefix,
                                          const std::vector<Part>& path) {
  std::string name = prefix + JoinedPath(path);
  if (name.size() == prefix.size() || taken_.contains(name)) name = prefix + SpelledOut(path);
  // Only a key that is itself such a spelling gets here, or one that is said again.
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
  // A root that is a list without tensors is one common value, called like the file.
  const bool container =
      IsDict(root) || (any && (root.kind() == Kind::kList || root.kind() == Kind::kTuple));
  if (!container) path_.push_back({options_.alone, false, false});
  if (any || container) return Emit(root);
  AddCommon(root);
  return Status();
}

Result<bool> TorchTree::Scan(const Value& value, int depth) {
  const std::size_t at = nodes_.size();
  // The top bit of a node is the mark for tensors.
  if (at >= kMinValues + 2 * archive_.document().bytes() || at >= kHoldsTensor - 1) {
    return Status(Code::kDataLoss, "values that hold each other so often that they have no end");
  }
  nodes_.push_back(0);
  bool any = TorchArchive::IsTensor(value);
  tensors_ += any ? 1 : 0;
  // Met again by Emit, as tensors are.
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
    // Not listed, but walked by whoever makes a common value of it.
    if (value.kind() == Kind::kObject) {
      TENSORMOUNT_RETURN_IF_ERROR(Scan(value.args(), depth + 1).status());
    }
  }
  nodes_[at] = static_cast<std::uint32_t>(nodes_.size() - at) | (any ? kHoldsTensor : 0);
  return any;
}

Status TorchTree::NoteAll(const Value& value, int depth, Records& into) {
  if (++noted_ > kMinValues + 2 * archive_.document().bytes() || depth > kMaxTreeDepth) {
    return Status(Code::kUnsupported, "asks for " + foreign_ + ", which is given too many values");
  }
  const auto items = [&]() -> Status {
    for (std::size_t i = 0; i < value.size(); ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(NoteAll(value.item(i), depth + 1, into));
    }
    return {};
  };
  switch (value.kind()) {
    case Kind::kTuple:
      return items();
    case Kind::kDict:
    case Kind::kList:
    case Kind::kSet:
      // What it holds was noted with it.
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
      TENSORMOUNT_RETURN_IF_ERROR(NoteAll(value.args(), depth + 1, into));
      TENSORMOUNT_RETURN_IF_ERROR(NoteAll(value.state(), depth + 1, into));
      return items();
    default:
      return {};
  }
}

Status TorchTree::NoteApart(const Value& value, int depth, Records& shown, Records& given) {
  if (pickle::IsForeign(value)) return NoteAll(value, depth, given);
  if (TorchArchive::IsTensor(value)) return NoteAll(value, depth, shown);
  if (depth >= kMaxTreeDepth) return {};
  const bool record = value.kind() == Kind::kDict || value.kind() == Kind::kList ||
                      value.kind() == Kind::kSet || value.kind() == Kind::kObject;
  if (record && !IsImmutable(value) && !shown.insert(std::to_string(value.record())).second) {
    return {};
  }
  if (value.kind() == Kind::kObject) {
    TENSORMOUNT_RETURN_IF_ERROR(NoteApart(value.args(), depth + 1, shown, given));
    TENSORMOUNT_RETURN_IF_ERROR(NoteApart(value.state(), depth + 1, shown, given));
  }
  return ForEachChild(value, [&](const auto&, const Value& child) {
    return NoteApart(child, depth + 1, shown, given);
  });
}

Status TorchTree::CheckForeign(const Value& root) {
  const auto refused = [&](const std::string& why) {
    return Status(Code::kUnsupported,
                  "asks for " + foreign_ +
                      ", which is not among the names that a checkpoint may speak of" + why);
  };
  if (tensors_ == 0) return refused("");
  Records shown;
  Records given;
  TENSORMOUNT_RETURN_IF_ERROR(NoteApart(root, 0, shown, given));
  const bool apart =
      std::ranges::none_of(given, [&](const std::string& one) { return shown.contains(one); });
  return apart ? Status() : refused(", and may change what others of its values show");
}

// Adds what was found in `value`, which is the next one of nodes_.
// Items that cannot be named are passed over with their whole subtree: next_ jumps to the end of
// it.
Status TorchTree::Emit(const Value& value) {
  ++next_;
  if (TorchArchive::IsTensor(value)) return AddTensor(value);
  if (pickle::IsForeign(value)) {
    builder_.Lose({},
                  "it is of " + ForeignClass(value) +
                      ", which is not loaded: save plain values or a state_dict() instead",
                  ForeignBuilder::What::kObject, Shown());
    return Status();
  }
  std::uint64_t number = 0;  // Names an item whose key is none.
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

// A tensor that cannot be read in place leaves the others alone; errors of reading end the walk.
Status TorchTree::AddTensor(const Value& value) {
  const Result<StoredTensor> stored = archive_.TensorOf(value);
  Status status = stored.status();
  if (status.ok()) {
    const std::optional<std::string> key = tensor_names_.Of(options_.prefix, path_);
    if (!key) {
      status = Status(Code::kDataLoss, "there are too many of that name, or of long names");
    } else if (const Status good = CheckKey(*key); !good.ok()) {
      status = Status(Code::kDataLoss, good.message());
    } else {
      status = AddStored(*key, stored.value());
    }
  }
  if (status.ok() || !LeavesOut(status)) return status;
  builder_.Warn("tensor " + Shown() + ": left out: " + status.message());
  return Status();
}

Status TorchTree::AddStored(const std::string& key, const StoredTensor& stored) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t tensor,
                               builder_.AddTensor(key, stored.dtype, stored.shape));
  if (options_.added) options_.added(key);
  TellPath(key);
  const Status status =
      builder_.AddChunk(tensor, Box::Whole(stored.shape), file_, options_.at + stored.offset,
                        stored.length, stored.packed ? Dims() : stored.strides);
  if (LeavesOut(status)) {
    builder_.Drop(tensor, status.message());
    return Status();
  }
  return status;
}

void TorchTree::TellPath(const std::string& name) const {
  const bool plain = path_.size() == 1 && path_[0].text == name;
  if (options_.nested && !plain) options_.nested(name, path_);
}

void TorchTree::AddCommon(const Value& value) {
  if (options_.tensors_only) return;
  std::optional<CommonValue> plain = budget_.Convert(value);
  if (!plain) {
    builder_.Warn("common value " + Shown() + ": left out: it is no plain data, or too much");
  } else if (std::optional<std::string> name = common_names_.Of(options_.prefix, path_)) {
    TellPath(*name);
    builder_.AddCommon(*name, *std::move(plain));
  } else {
    builder_.Warn("common value " + Shown() +
                  ": left out: there are too many of that name, or of long names");
  }
}

}  // namespace tensormount
