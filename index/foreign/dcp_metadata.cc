// SPDX-License-Identifier: Apache-2.0
// From the pickle of a .metadata to plain structures. It is read as data (pickle.h), and each class
// of torch's is known by name and fields; one that is not as torch writes it is refused, with what
// is wrong in it.
//
// The pickle has two dicts. state_dict_metadata: key to TensorStorageMetadata (dtype, size, a list
// of chunks with offsets and sizes) or BytesStorageMetadata. storage_data: MetadataIndex(fqn,
// offset, index) to _StorageInfo(relative_path, offset, length). They are joined on (fqn, offset):
// the offset of a chunk within its tensor is its identity, and `index` is a hint of its position in
// the list, which may be None and is checked.
//
// The metadata of a large run have 100,000 chunks and more, so: numbers of all chunks stand in one
// vector, items in another, nothing is allocated a chunk, texts are views into the stream, and
// lookups by name remember the last one.
#include "index/foreign/dcp_metadata.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <unordered_map>

#include "base/checked.h"
#include "index/archives/torch_tensor.h"
#include "index/foreign/foreign.h"
#include "shard/tensor_meta.h"

// torch/distributed/checkpoint/{metadata,filesystem}.py are where the classes below come from.

namespace tensormount {
namespace {

using pickle::Kind;
using pickle::KnownClass;
using pickle::Value;

Status BadMetadata(std::string what) {
  return Status(Code::kDataLoss, "DCP metadata: " + std::move(what));
}

constexpr std::size_t kShownFqnBytes = 256;  // What a message shows of a key.

std::string Short(std::string_view key) { return std::string(key.substr(0, kShownFqnBytes)); }

// Whether an object has what BUILD set and nothing else: none of these classes is made by a call
// with arguments, which would set attributes too, or has items.
bool IsRecord(const Value& object) {
  return object.kind() == Kind::kObject && object.args().size() == 0 && object.size() == 0;
}

// An attribute of an object; nullopt where it has none, or more of them than any class here: their
// number must not be multiplied by that of the objects that share them. None of these classes has
// slots, so that a pair (dict, slots) has none either.
std::optional<Value> Attribute(const Value& object, std::string_view name) {
  if (!IsRecord(object)) return std::nullopt;
  const Value state = object.state();
  if (state.kind() != Kind::kDict || state.size() > 64) return std::nullopt;
  return state.Find(name);
}

// Bools are another kind in these values, though Python takes True for 1.
bool ReadUnsigned(const std::optional<Value>& value, std::uint64_t& out) {
  if (!value || value->kind() != Kind::kInt || value->integer() < 0) return false;
  out = static_cast<std::uint64_t>(value->integer());
  return true;
}

// Whether a chunk with these sizes has no elements.
bool IsEmpty(std::span<const std::int64_t> sizes) {
  return std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
}

// Puts together the two halves of the metadata: the chunks of every tensor, and where they lie.
class DcpMetadataReader {
 public:
  DcpMetadataReader(DcpMetadata& out, LeftOut& left_out) : out_(out), left_out_(left_out) {}

  Status Read() {
    const Value root = out_.document.root();
    if (!root.Is(KnownClass::kMetadata)) {
      return BadMetadata("the pickle is no Metadata of torch.distributed.checkpoint");
    }
    const std::optional<Value> states = Attribute(root, "state_dict_metadata");
    if (!states || states->kind() != Kind::kDict)
      return BadMetadata("state_dict_metadata is no dict");
    const std::optional<Value> storage = Attribute(root, "storage_data");
    if (!storage || storage->kind() != Kind::kDict) return BadMetadata("storage_data is no dict");
    out_.planner_data = Attribute(root, "planner_data").value_or(Value());
    out_.mcore_data = Attribute(root, "mcore_data").value_or(Value());
    slots_.reserve(states->size());
    out_.tensors.reserve(states->size());
    // A checkpoint has about as many stored items as chunks.
    out_.items.reserve(storage->size());
    for (std::size_t i = 0; i < states->size(); ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(AddState(states->key(i), states->item(i)));
    }
    for (std::size_t i = 0; i < storage->size(); ++i) {
      TENSORMOUNT_RETURN_IF_ERROR(AddItem(storage->key(i), storage->item(i)));
    }
    TellRest();
    DropDoubled();
    return Status();
  }

 private:
  // What a key of state_dict_metadata became, for the second dict. kLeftOut: it was told already,
  // so items of it are passed over in silence.
  struct Slot {
    enum class Kind { kTensor, kObject, kLeftOut } kind = Kind::kLeftOut;
    std::size_t number = 0;
  };

  Status AddState(const Value& key, const Value& state) {
    if (key.kind() != Kind::kString)
      return BadMetadata("a key of state_dict_metadata is no string");
    const std::string_view fqn = key.text();
    if (fqn.size() > kMaxKeyBytes) {  // Not even looked up: many keys may be one long string.
      left_out_.Add("tensor", fqn, "its key has " + std::to_string(fqn.size()) + " bytes");
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
                         "' is neither a tensor's nor an object's");
    }
    // The machine keeps one pair of equal keys; only keys that are too long for it to compare could
    // get here twice, and those were left out above.
    if (!slots_.emplace(fqn, slot).second) {
      return BadMetadata("state_dict_metadata has '" + std::string(fqn) + "' twice");
    }
    return Status();
  }

  // Empty, or why the tensor is left out; then nothing was added.
  std::string AddTensor(std::string_view fqn, const Value& state) {
    const std::optional<Value> properties = Attribute(state, "properties");
    const std::optional<Value> size = Attribute(state, "size");
    const std::optional<Value> chunks = Attribute(state, "chunks");
    if (!properties || !size || !chunks || chunks->kind() != Kind::kList) {
      return "its metadata lack properties, size or chunks";
    }
    DcpTensor tensor;
    tensor.fqn = fqn;
    if (std::string why = ReadDType(*properties, tensor); !why.empty()) return why;
    scratch_.clear();
    // A list is no size to torch, which compares it with one.
    if (size->kind() == Kind::kList || !ReadPickledSize(*size, scratch_)) {
      return "its size is no size";
    }
    if (scratch_.size() > static_cast<std::size_t>(kMaxRank)) {
      return "it has " + std::to_string(scratch_.size()) + " axes, more than " +
             std::to_string(kMaxRank);
    }
    if (tensor.pairs && (scratch_.empty() || !DoubleLast(scratch_))) {
      return "its size is none of pairs of f4";
    }
    const std::size_t rank = scratch_.size();
    tensor.rank = static_cast<std::uint8_t>(rank);
    // Chunk i of this tensor is items[first + i], and numbers [numbers + (1 + 2 i) rank, ...).
    tensor.first = out_.items.size();
    tensor.count = chunks->size();
    tensor.numbers = out_.numbers.size();
    // Lists may be shared in a pickle, so that the chunks of all tensors could be many more than
    // the file has bytes for. A real one takes at least 18 of them.
    if (tensor.count > out_.document.bytes() / 16 - chunks_)
      return "it has more chunks than the file";
    chunks_ += tensor.count;
    out_.numbers.insert(out_.numbers.end(), scratch_.begin(), scratch_.end());
    for (std::size_t i = 0; i < tensor.count; ++i) {
      const Value chunk = chunks->item(i);
      const std::size_t before = out_.numbers.size();
      const bool read = chunk.Is(KnownClass::kChunkStorageMetadata) &&
                        AppendSize(chunk, "offsets", tensor.pairs) &&
                        AppendSize(chunk, "sizes", tensor.pairs);
      if (!read || out_.numbers.size() - before != 2 * rank) {
        // Nothing of a tensor that is left out may stay: the next one takes the same positions.
        out_.numbers.resize(tensor.numbers);
        return "a chunk of it has no offsets and sizes of " + std::to_string(rank) + " numbers";
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

  // torch counts pairs of f4 (float4_e2m1fn_x2), we count single ones along the last axis.
  static bool DoubleLast(std::vector<std::int64_t>& numbers) {
    const auto doubled =
        numbers.empty() ? std::nullopt : CheckedMul(numbers.back(), std::int64_t{2});
    if (doubled) numbers.back() = *doubled;
    return doubled.has_value();
  }

  // TensorProperties gives a tuple of five, dtype first, as its state (__getstate__); a dict of
  // attributes is taken as well.
  static std::string ReadDType(const Value& properties, DcpTensor& out) {
    if (!properties.Is(KnownClass::kTensorProperties) || !IsRecord(properties))
      return "its properties are no properties";
    const Value state = properties.state();
    std::optional<Value> dtype;
    if (state.kind() == Kind::kTuple && state.size() == 5) {
      dtype = state.item(0);
    } else {
      dtype = Attribute(properties, "dtype");
    }
    if (!dtype || dtype->kind() != Kind::kGlobal || dtype->known() != KnownClass::kTorchDtype) {
      return "its dtype is no dtype of torch";
    }
    Result<DType> known = TorchDType(dtype->name());
    if (!known.ok()) {
      return "its dtype is torch." + std::string(dtype->name()) + ", which cannot be read in place";
    }
    out.dtype = known.value();
    out.pairs = out.dtype == DType::kF4;
    return {};
  }

  // An entry that names nothing in the metadata is counted and passed over; one that cannot be read
  // ends the read, because nobody knows which tensor would be wrong.
  Status AddItem(const Value& key, const Value& info) {
    std::optional<Value> fqn;
    std::optional<Value> offset;
    std::optional<Value> hint;
    if (key.Is(KnownClass::kMetadataIndex)) {
      fqn = Attribute(key, "fqn");
      offset = Attribute(key, "offset");
      hint = Attribute(key, "index");
    } else if (key.kind() == Kind::kString) {
      fqn = key;  // Written before there was MetadataIndex.
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
      return BadMetadata("where '" + Short(fqn) + "' is stored: " + std::string(what));
    };
    if (!info.Is(KnownClass::kStorageInfo)) return bad("no _StorageInfo");
    const std::optional<Value> path = Attribute(info, "relative_path");
    if (!path || path->kind() != Kind::kString) return bad("relative_path is no string");
    item.path = path->text();
    if (!ReadUnsigned(Attribute(info, "offset"), item.offset) ||
        !ReadUnsigned(Attribute(info, "length"), item.length)) {
      return bad("offset or length is no number of bytes");
    }
    const std::optional<Value> transforms = Attribute(info, "transform_descriptors");
    if (transforms && transforms->kind() != Kind::kNone) {
      if (transforms->kind() != Kind::kList && transforms->kind() != Kind::kTuple) {
        return bad("transform_descriptors is no list");
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

  // Items of one tensor mostly follow each other and share the string of its name.
  const Slot* Find(const Value& fqn) {
    if (last_slot_ != nullptr && last_fqn_.SameAs(fqn)) return last_slot_;
    if (fqn.text().size() > kMaxKeyBytes) return nullptr;
    const auto it = slots_.find(fqn.text());
    if (it == slots_.end()) return nullptr;
    last_fqn_ = fqn;
    last_slot_ = &it->second;
    return last_slot_;
  }

  // Finds the chunk of the tensor that the item belongs to: by the hint where that agrees, else by
  // binary search. O(log chunks), so a file in which no hint agrees is not quadratic.
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
    // `count` stands for none.
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

  // The chunk that begins at scratch_; of several the one that is not empty. `count` where none.
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

  // Chunks by where they begin, empty ones behind others that begin there too.
  // Made when it is first needed, and kept: most tensors never need it. Empty chunks may share the
  // offset of a full one (ranks without a share write them), so they sort behind it and lower_bound
  // finds the full one.
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

  void TellRest() {
    if (stray_.count > 0) {
      out_.warnings.push_back(
          std::to_string(stray_.count) +
          " stored items belong to no chunk of the metadata (the first: " + stray_.first + ")");
    }
    if (other_keys_ > 0) {
      out_.warnings.push_back(std::to_string(other_keys_) +
                              " entries of storage_data name no tensor or object");
    }
    // Identity is where a chunk begins. Two that begin at one position and are not empty have one
    // item between them, and nobody knows whose.
    for (std::size_t number = 0; number < out_.tensors.size(); ++number) {
      const DcpTensor& tensor = out_.tensors[number];
      bool missing = false;
      for (std::size_t i = 0; i < tensor.count && !missing; ++i) {
        missing = !out_.items[tensor.first + i].stored && !IsEmpty(out_.Sizes(tensor, i));
      }
      // Only where some chunk got no item can two of them have shared one.
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

  // Numbers of tensors are positions in out_.tensors, so the vector is thinned once, at the end,
  // when nobody needs numbers any more.
  void DropDoubled() {
    std::sort(doubled_.begin(), doubled_.end());
    doubled_.erase(std::unique(doubled_.begin(), doubled_.end()), doubled_.end());
    auto next = doubled_.begin();
    std::size_t number = 0;
    std::erase_if(out_.tensors, [&](const DcpTensor& tensor) {
      if (next == doubled_.end() || *next != number++) return false;
      left_out_.Add("tensor", tensor.fqn, "two of its chunks begin at the same cell");
      ++next;
      return true;
    });
  }

  DcpMetadata& out_;
  LeftOut& left_out_;
  // By fqn; views into the document.
  std::unordered_map<std::string_view, Slot> slots_;
  Value last_fqn_;
  const Slot* last_slot_ = nullptr;
  // The size or offset that is looked at; a member so that it is allocated once.
  std::vector<std::int64_t> scratch_;
  std::unordered_map<std::size_t, std::vector<std::size_t>> orders_;
  std::vector<std::size_t> doubled_;
  std::size_t chunks_ = 0;
  CountedNames stray_;  // Stored items of no chunk that the metadata have.
  std::size_t other_keys_ = 0;
};

}  // namespace

void LeftOut::Add(std::string_view what, std::string_view key, std::string why) {
  counts_[{std::move(why), std::string(what)}].Add(key.substr(0, kShownFqnBytes));
}

void LeftOut::WarnAll(ForeignBuilder& builder) const {
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

// torch.Size((1, 2)) is a call with one argument, which is a tuple; older writers and other fields
// have the tuple or a list itself.
bool ReadPickledSize(const Value& value, std::vector<std::int64_t>& out) {
  Value items = value;
  if (value.Is(KnownClass::kTorchSize)) {
    const Value args = value.args();
    // Of a list it would be a copy, as that was then.
    if (args.size() != 1 || args.item(0).kind() != Kind::kTuple) return false;
    items = args.item(0);
  }
  if (items.kind() != Kind::kTuple && items.kind() != Kind::kList) return false;
  const std::size_t size = items.size();
  if (size > 64) return false;  // Nothing has so many axes, and tuples may be shared.
  for (std::size_t i = 0; i < size; ++i) {
    const Value item = items.item(i);
    if (item.kind() != Kind::kInt || item.integer() < 0) return false;
    out.push_back(item.integer());
  }
  return true;
}

Result<DcpMetadata> ParseDcpMetadata(std::string bytes, LeftOut& left_out) {
  TENSORMOUNT_ASSIGN_OR_RETURN(pickle::Document document, pickle::Parse(std::move(bytes)));
  DcpMetadata out{std::move(document), {}, {}, {}, {}, {}, {}, {}};
  TENSORMOUNT_RETURN_IF_ERROR(DcpMetadataReader(out, left_out).Read());
  return out;
}

}  // namespace tensormount
