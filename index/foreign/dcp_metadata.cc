// SPDX-License-Identifier: Apache-2.0
// Converts the pickle of a .metadata to plain structures (dcp_metadata.h). The pickle is only
// parsed (pickle.h), and classes of torch are recognized by name and fields. If an object does not
// have torch's form, the error tells what is wrong.
//
// The pickle has two dicts. state_dict_metadata maps a key to TensorStorageMetadata (dtype, size,
// and a list of chunks with offsets and sizes) or BytesStorageMetadata. storage_data maps
// MetadataIndex(fqn, offset, index) to _StorageInfo(relative_path, offset, length). The dicts are
// joined on (fqn, offset), because the offset of a chunk identifies it within its tensor. `index`
// is only a hint: the position of the chunk in the list, or None.
//
// The metadata of a large run have 100,000 chunks and more. So no chunk has an allocation of its
// own: all numbers are in one vector, all items in another, and texts are views into the pickle.
#include "index/foreign/dcp_metadata.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <unordered_map>

#include "base/checked.h"
#include "index/archives/torch_tensor.h"
#include "index/foreign/foreign.h"
#include "shard/tensor_meta.h"

// The classes below are from torch/distributed/checkpoint/{metadata,filesystem}.py.

namespace tensormount {
namespace {

using pickle::Kind;
using pickle::KnownClass;
using pickle::Value;

Status BadMetadata(std::string what) {
  return Status(Code::kDataLoss, "DCP metadata: " + std::move(what));
}

// At most this many bytes of a key are shown in a message.
constexpr std::size_t kShownFqnBytes = 256;

std::string Short(std::string_view key) { return std::string(key.substr(0, kShownFqnBytes)); }

// Whether an object has neither constructor arguments nor items, but only a state (set by BUILD).
// torch pickles all classes here in this form; constructor arguments could also set attributes.
bool IsRecord(const Value& object) {
  return object.kind() == Kind::kObject && object.args().size() == 0 && object.size() == 0;
}

// An attribute of an object; nullopt if it does not exist. Also nullopt if the object has more than
// 64 attributes, which no class here has: many objects may share one huge state, and each search
// takes time linear in the size of the state.
std::optional<Value> Attribute(const Value& object, std::string_view name) {
  if (!IsRecord(object)) return std::nullopt;
  const Value state = object.state();
  if (state.kind() != Kind::kDict || state.size() > 64) return std::nullopt;
  return state.Find(name);
}

// Reads a non-negative integer. A bool is refused, although Python treats True as 1.
bool ReadUnsigned(const std::optional<Value>& value, std::uint64_t& out) {
  if (!value || value->kind() != Kind::kInt || value->integer() < 0) return false;
  out = static_cast<std::uint64_t>(value->integer());
  return true;
}

// Whether a chunk of these sizes has no elements.
bool IsEmpty(std::span<const std::int64_t> sizes) {
  return std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
}

// Reads the chunks of every tensor from state_dict_metadata, and their locations from storage_data.
class DcpMetadataReader {
 public:
  DcpMetadataReader(DcpMetadata& out, OmissionCounter& left_out) : out_(out), left_out_(left_out) {}

  Status Read() {
    const Value root = out_.document.root();
    if (!root.Is(KnownClass::kMetadata)) {
      return BadMetadata("the pickle is not a Metadata object of torch.distributed.checkpoint");
    }
    const std::optional<Value> states = Attribute(root, "state_dict_metadata");
    if (!states || states->kind() != Kind::kDict)
      return BadMetadata("state_dict_metadata is not a dict");
    const std::optional<Value> storage = Attribute(root, "storage_data");
    if (!storage || storage->kind() != Kind::kDict)
      return BadMetadata("storage_data is not a dict");
    out_.planner_data = Attribute(root, "planner_data").value_or(Value());
    out_.mcore_data = Attribute(root, "mcore_data").value_or(Value());
    slots_.reserve(states->size());
    out_.tensors.reserve(states->size());
    // A checkpoint has about as many chunks as stored items.
    out_.items.reserve(storage->size());
    for (std::size_t i = 0; i < states->size(); ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(AddState(states->key(i), states->item(i)));
    }
    for (std::size_t i = 0; i < storage->size(); ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(AddItem(storage->key(i), storage->item(i)));
    }
    WarnOfIgnored();
    DropDoubled();
    return Status();
  }

 private:
  // The meaning of a key of state_dict_metadata: tensor or object number `number`, or left out.
  // Items of a slot that is left out are skipped silently.
  struct Slot {
    enum class Kind { kTensor, kObject, kLeftOut } kind = Kind::kLeftOut;
    std::size_t number = 0;
  };

  Status AddState(const Value& key, const Value& state) {
    if (key.kind() != Kind::kString)
      return BadMetadata("a key of state_dict_metadata is not a string");
    const std::string_view fqn = key.text();
    // A key that is too long is not added to slots_: many entries may share one long string, and
    // each of them would be hashed.
    if (fqn.size() > kMaxKeyBytes) {
      left_out_.Add("tensor", fqn,
                    "the key has " + std::to_string(fqn.size()) + " bytes, at most " +
                        std::to_string(kMaxKeyBytes) + " are allowed");
      return Status();
    }
    Slot slot;
    if (state.Is(KnownClass::kBytesStorageMetadata)) {
      slot = {Slot::Kind::kObject, out_.objects.size()};
      out_.objects.emplace_back(fqn, DcpItem());
    } else if (state.Is(KnownClass::kTensorStorageMetadata)) {
      std::string why = AddTensor(fqn, state);
      if (why.empty()) {
        slot = {Slot::Kind::kTensor, out_.tensors.size() - 1};
      } else {
        left_out_.Add("tensor", fqn, std::move(why));
      }
    } else {
      return BadMetadata("the entry of '" + std::string(fqn) +
                         "' describes neither a tensor nor an object");
    }
    // A safeguard: the parser has merged equal keys, except long keys, which were left out above.
    if (!slots_.emplace(fqn, slot).second) {
      return BadMetadata("state_dict_metadata has '" + std::string(fqn) + "' twice");
    }
    return Status();
  }

  // Adds a tensor. Returns an empty text, or the reason why the tensor was not added.
  std::string AddTensor(std::string_view fqn, const Value& state) {
    const std::optional<Value> properties = Attribute(state, "properties");
    const std::optional<Value> size = Attribute(state, "size");
    const std::optional<Value> chunks = Attribute(state, "chunks");
    if (!properties || !size || !chunks || chunks->kind() != Kind::kList) {
      return "the metadata has no properties, size or chunks";
    }
    DcpTensor tensor;
    tensor.fqn = fqn;
    if (std::string why = ReadDType(*properties, tensor); !why.empty()) return why;
    scratch_.clear();
    // torch does not accept a list as the size of a tensor.
    if (size->kind() == Kind::kList || !ReadPickledSize(*size, scratch_)) {
      return "the size is not a torch.Size or a tuple of non-negative integers";
    }
    if (scratch_.size() > static_cast<std::size_t>(kMaxRank)) {
      return "the tensor has " + std::to_string(scratch_.size()) + " axes, at most " +
             std::to_string(kMaxRank) + " are allowed";
    }
    if (tensor.pairs && (scratch_.empty() || !DoubleLast(scratch_))) {
      return "the size is not valid for float4_e2m1fn_x2";
    }
    const std::size_t rank = scratch_.size();
    tensor.rank = static_cast<std::uint8_t>(rank);
    tensor.first = out_.items.size();
    tensor.count = chunks->size();
    tensor.numbers = out_.numbers.size();
    // Lists may be shared in a pickle, so all tensors together could have far more chunks than the
    // file has bytes. A real chunk takes at least 18 bytes, so a limit of one in 16 bytes refuses
    // no real file.
    if (tensor.count > out_.document.bytes() / 16 - chunks_)
      return "more chunks are listed than a metadata file of this size can have";
    chunks_ += tensor.count;
    out_.numbers.insert(out_.numbers.end(), scratch_.begin(), scratch_.end());
    for (std::size_t i = 0; i < tensor.count; ++i) {
      const Value chunk = chunks->item(i);
      const std::size_t before = out_.numbers.size();
      const bool read = chunk.Is(KnownClass::kChunkStorageMetadata) &&
                        AppendSize(chunk, "offsets", tensor.pairs) &&
                        AppendSize(chunk, "sizes", tensor.pairs);
      if (!read || out_.numbers.size() - before != 2 * rank) {
        // Removes the numbers of this tensor, which is left out.
        out_.numbers.resize(tensor.numbers);
        return "a chunk of the tensor does not have offsets and sizes of " + std::to_string(rank) +
               " numbers";
      }
    }
    out_.items.resize(tensor.first + tensor.count);
    out_.tensors.push_back(tensor);
    return {};
  }

  bool AppendSize(const Value& object, std::string_view name, bool pairs) {
    const std::optional<Value> value = Attribute(object, name);
    if (!value || !ReadPickledSize(*value, out_.numbers)) return false;
    return !pairs || DoubleLast(out_.numbers);
  }

  // torch counts pairs of float4_e2m1fn_x2 elements on the last axis. Doubles the last number, so
  // that it counts elements. False: there is no number, or it overflows.
  static bool DoubleLast(std::vector<std::int64_t>& numbers) {
    const auto doubled =
        numbers.empty() ? std::nullopt : CheckedMul(numbers.back(), std::int64_t{2});
    if (doubled) numbers.back() = *doubled;
    return doubled.has_value();
  }

  // Returns an empty text, or the reason why the dtype cannot be read. The state of
  // TensorProperties is a tuple of five (__getstate__), and the first of them is the dtype. A dict
  // of attributes is accepted too.
  static std::string ReadDType(const Value& properties, DcpTensor& out) {
    if (!properties.Is(KnownClass::kTensorProperties) || !IsRecord(properties))
      return "the properties are not a TensorProperties object";
    const Value state = properties.state();
    std::optional<Value> dtype;
    if (state.kind() == Kind::kTuple && state.size() == 5) {
      dtype = state.item(0);
    } else {
      dtype = Attribute(properties, "dtype");
    }
    if (!dtype || dtype->kind() != Kind::kGlobal || dtype->known() != KnownClass::kTorchDtype) {
      return "the dtype is not a torch dtype";
    }
    Result<DType> known = TorchDType(dtype->name());
    if (!known.ok()) {
      return "the dtype torch." + std::string(dtype->name()) + " is not supported";
    }
    out.dtype = known.value();
    out.pairs = out.dtype == DType::kF4;
    return {};
  }

  // Adds an entry of storage_data. An entry that names no key of state_dict_metadata is counted for
  // a warning and skipped. If the location in an entry cannot be read, the whole read fails.
  Status AddItem(const Value& key, const Value& info) {
    std::optional<Value> fqn;
    std::optional<Value> offset;
    std::optional<Value> hint;
    if (key.Is(KnownClass::kMetadataIndex)) {
      fqn = Attribute(key, "fqn");
      offset = Attribute(key, "offset");
      hint = Attribute(key, "index");
    } else if (key.kind() == Kind::kString) {
      // Older releases of torch have the key itself in place of a MetadataIndex.
      fqn = key;
    }
    if (!fqn || fqn->kind() != Kind::kString) {
      ++other_keys_;
      return Status();
    }
    DcpItem item;
    TENSORMOUNT_RETURN_IF_ERROR(ReadItem(info, fqn->text(), item));
    const Slot* slot = Find(*fqn);
    if (slot == nullptr) {
      stray_.Add(fqn->text().substr(0, kShownFqnBytes));
    } else if (slot->kind == Slot::Kind::kObject) {
      out_.objects[slot->number].second = item;
    } else if (slot->kind == Slot::Kind::kTensor) {
      PlaceItem(slot->number, offset, hint, item);
    }
    return Status();
  }

  static Status ReadItem(const Value& info, std::string_view fqn, DcpItem& item) {
    const auto bad = [&](std::string_view what) {
      return BadMetadata("the storage_data entry of '" + Short(fqn) + "': " + std::string(what));
    };
    if (!info.Is(KnownClass::kStorageInfo)) return bad("not a _StorageInfo object");
    const std::optional<Value> path = Attribute(info, "relative_path");
    if (!path || path->kind() != Kind::kString) return bad("relative_path is not a string");
    item.path = path->text();
    if (!ReadUnsigned(Attribute(info, "offset"), item.offset) ||
        !ReadUnsigned(Attribute(info, "length"), item.length)) {
      return bad("offset or length is not a non-negative integer");
    }
    const std::optional<Value> transforms = Attribute(info, "transform_descriptors");
    if (transforms && transforms->kind() != Kind::kNone) {
      if (transforms->kind() != Kind::kList && transforms->kind() != Kind::kTuple) {
        return bad("transform_descriptors is not a list");
      }
      if (transforms->size() > 0) {
        const Value first = transforms->item(0);
        item.transform = first.kind() == Kind::kString && !first.text().empty()
                             ? first.text()
                             : std::string_view("something");
      }
    }
    item.stored = true;
    return Status();
  }

  // The slot of a key; null if the key is unknown. Most items of a tensor follow each other and
  // share the string of its key, so the result of the last call is kept.
  const Slot* Find(const Value& fqn) {
    if (last_slot_ != nullptr && last_fqn_.SameAs(fqn)) return last_slot_;
    if (fqn.text().size() > kMaxKeyBytes) return nullptr;
    const auto it = slots_.find(fqn.text());
    if (it == slots_.end()) return nullptr;
    last_fqn_ = fqn;
    last_slot_ = &it->second;
    return last_slot_;
  }

  // Assigns the item to a chunk of the tensor. If the chunk of the hint does not have the item's
  // offset, a binary search finds the chunk, so that wrong hints do not take quadratic time.
  void PlaceItem(std::size_t number, const std::optional<Value>& offset,
                 const std::optional<Value>& hint, const DcpItem& item) {
    const DcpTensor& tensor = out_.tensors[number];
    scratch_.clear();
    if (offset && offset->kind() != Kind::kNone) {
      if (!ReadPickledSize(*offset, scratch_) || (tensor.pairs && !DoubleLast(scratch_))) {
        return stray_.Add(tensor.fqn.substr(0, kShownFqnBytes));
      }
    } else {
      scratch_.assign(tensor.rank, 0);
    }
    // If `at` equals tensor.count, the chunk is not known.
    std::size_t at = tensor.count == 1 ? 0 : tensor.count;
    if (std::uint64_t i = 0; ReadUnsigned(hint, i) && i < tensor.count) at = i;
    if (at >= tensor.count || !std::ranges::equal(out_.Offsets(tensor, at), scratch_)) {
      at = Search(number);
    }
    if (at >= tensor.count) return stray_.Add(tensor.fqn.substr(0, kShownFqnBytes));
    DcpItem& target = out_.items[tensor.first + at];
    if (target.stored && !IsEmpty(out_.Sizes(tensor, at))) doubled_.push_back(number);
    target = item;
  }

  // Returns the number of the chunk at offset scratch_. If several chunks have this offset, a chunk
  // that is not empty is preferred. tensor.count: no chunk has this offset.
  std::size_t Search(std::size_t number) {
    const DcpTensor& tensor = out_.tensors[number];
    std::vector<std::size_t>& order = Order(number);
    const auto it =
        std::lower_bound(order.begin(), order.end(), scratch_,
                         [&](std::size_t a, const std::vector<std::int64_t>& b) {
                           return std::ranges::lexicographical_compare(out_.Offsets(tensor, a), b);
                         });
    if (it == order.end() || !std::ranges::equal(out_.Offsets(tensor, *it), scratch_)) {
      return tensor.count;
    }
    return *it;
  }

  // Numbers of the chunks of a tensor, sorted by offset; computed at the first call, which is rare.
  // Ranks without a shard write empty chunks at the offset of another chunk. Empty chunks sort
  // behind that chunk, so that lower_bound finds the chunk with data.
  std::vector<std::size_t>& Order(std::size_t number) {
    const DcpTensor& tensor = out_.tensors[number];
    std::vector<std::size_t>& order = orders_[number];
    if (!order.empty() || tensor.count == 0) return order;
    order.resize(tensor.count);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      const auto left = out_.Offsets(tensor, a);
      const auto right = out_.Offsets(tensor, b);
      if (!std::ranges::equal(left, right)) {
        return std::ranges::lexicographical_compare(left, right);
      }
      const bool left_empty = IsEmpty(out_.Sizes(tensor, a));
      const bool right_empty = IsEmpty(out_.Sizes(tensor, b));
      return left_empty != right_empty ? right_empty : a < b;
    });
    return order;
  }

  void WarnOfIgnored() {
    if (stray_.count > 0) {
      out_.warnings.push_back(
          std::to_string(stray_.count) +
          " stored items match no chunk in the metadata (the first: " + stray_.first + ")");
    }
    if (other_keys_ > 0) {
      out_.warnings.push_back(std::to_string(other_keys_) +
                              " entries of storage_data do not name a tensor or an object");
    }
    // The offset identifies a chunk. If two non-empty chunks have the same offset, it is unknown to
    // which of them the item belongs.
    for (std::size_t number = 0; number < out_.tensors.size(); ++number) {
      const DcpTensor& tensor = out_.tensors[number];
      bool missing = false;
      for (std::size_t i = 0; i < tensor.count && !missing; ++i) {
        missing = !out_.items[tensor.first + i].stored && !IsEmpty(out_.Sizes(tensor, i));
      }
      // torch stores one item for each offset. So if every chunk with data has an item, no two
      // chunks have the same offset.
      if (!missing) continue;
      const std::vector<std::size_t>& order = Order(number);
      for (std::size_t i = 1; i < order.size(); ++i) {
        if (!IsEmpty(out_.Sizes(tensor, order[i])) &&
            std::ranges::equal(out_.Offsets(tensor, order[i - 1]),
                               out_.Offsets(tensor, order[i]))) {
          doubled_.push_back(number);
          break;
        }
      }
    }
  }

  // Removes tensors with two chunks at one offset. This is done last, because numbers of tensors
  // are positions in out_.tensors.
  void DropDoubled() {
    std::sort(doubled_.begin(), doubled_.end());
    doubled_.erase(std::unique(doubled_.begin(), doubled_.end()), doubled_.end());
    auto next = doubled_.begin();
    std::size_t number = 0;
    std::erase_if(out_.tensors, [&](const DcpTensor& tensor) {
      if (next == doubled_.end() || *next != number++) return false;
      left_out_.Add("tensor", tensor.fqn, "two chunks of the tensor have the same offsets");
      ++next;
      return true;
    });
  }

  DcpMetadata& out_;
  OmissionCounter& left_out_;
  // The meaning of each key; the keys are views into the document.
  std::unordered_map<std::string_view, Slot> slots_;
  Value last_fqn_;
  const Slot* last_slot_ = nullptr;
  // The size or offset that is being read; a member, so that its memory is reused.
  std::vector<std::int64_t> scratch_;
  std::unordered_map<std::size_t, std::vector<std::size_t>> orders_;
  std::vector<std::size_t> doubled_;
  std::size_t chunks_ = 0;
  CountedNames stray_;  // Stored items without a chunk in the metadata.
  std::size_t other_keys_ = 0;
};

}  // namespace

void OmissionCounter::Add(std::string_view what, std::string_view key, std::string why) {
  counts_[{std::move(why), std::string(what)}].Add(key.substr(0, kShownFqnBytes));
}

void OmissionCounter::WarnAll(ForeignBuilder& builder) const {
  for (const auto& [reason, count] : counts_) {
    const auto& [why, what] = reason;
    if (count.count == 1) {
      builder.Warn(what + " " + count.first + ": left out: " + why);
    } else {
      builder.Warn(std::to_string(count.count) + " " + what + "s left out: " + why +
                   " (the first: " + count.first + ")");
    }
  }
}

Dims DcpMetadata::Shape(const DcpTensor& tensor) const {
  return Dims(std::span(numbers).subspan(tensor.numbers, tensor.rank));
}

std::span<const std::int64_t> DcpMetadata::Offsets(const DcpTensor& tensor,
                                                   std::size_t chunk) const {
  return std::span(numbers).subspan(tensor.numbers + (1 + 2 * chunk) * tensor.rank, tensor.rank);
}

std::span<const std::int64_t> DcpMetadata::Sizes(const DcpTensor& tensor, std::size_t chunk) const {
  return std::span(numbers).subspan(tensor.numbers + (2 + 2 * chunk) * tensor.rank, tensor.rank);
}

// torch.Size((1, 2)) is a call with one argument, a tuple. Older releases of torch store only the
// tuple, and other fields a tuple or list.
bool ReadPickledSize(const Value& value, std::vector<std::int64_t>& out) {
  Value items = value;
  if (value.Is(KnownClass::kTorchSize)) {
    const Value args = value.args();
    // A list as the argument is refused: torch.Size would copy the list when it is called, and the
    // pickle may change the list afterwards.
    if (args.size() != 1 || args.item(0).kind() != Kind::kTuple) return false;
    items = args.item(0);
  }
  if (items.kind() != Kind::kTuple && items.kind() != Kind::kList) return false;
  const std::size_t size = items.size();
  // A shared list could be huge; no tensor has this many axes.
  if (size > 64) return false;
  for (std::size_t i = 0; i < size; ++i) {
    const Value item = items.item(i);
    if (item.kind() != Kind::kInt || item.integer() < 0) return false;
    out.push_back(item.integer());
  }
  return true;
}

Result<DcpMetadata> ParseDcpMetadata(std::string bytes, OmissionCounter& left_out) {
  TENSORMOUNT_ASSIGN_OR_RETURN(pickle::Document document, pickle::Parse(std::move(bytes)));
  DcpMetadata out{std::move(document), {}, {}, {}, {}, {}, {}, {}};
  TENSORMOUNT_RETURN_IF_ERROR(DcpMetadataReader(out, left_out).Read());
  return out;
}

}  // namespace tensormount
