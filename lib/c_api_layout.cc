// SPDX-License-Identifier: Apache-2.0
// tm_layout_* and tm_state_add_tensors: many shards described by one array of numbers, whose form
// is documented at tm_state_add_tensors in c.h. A layout is parsed and checked once, and can then
// be added to several states, each time with other data addresses.
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/c_api.h"

using tensormount::Box;
using tensormount::BufferView;
using tensormount::Code;
using tensormount::Dims;
using tensormount::DType;
using tensormount::kMaxRank;
using tensormount::Region;
using tensormount::Replica;
using tensormount::Result;
using tensormount::Shard;
using tensormount::Status;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::ReadMemory;

// The shards that an array of numbers describes, with the addresses in it.
struct tm_layout {
  struct Item {
    std::string key;
    Shard shard;
  };
  std::vector<Item> items;
};

namespace {

constexpr std::uint64_t kKnownFlags =
    TM_WORDS_STRIDED | TM_WORDS_FLAT | TM_WORDS_METADATA_ONLY | TM_WORDS_MEMORY;

// Reads the caller's numbers in order. After the last number it returns zeros, and ended_early() is
// true.
class Words {
 public:
  Words(const std::int64_t* words, std::size_t count) : words_(words, count) {}

  std::int64_t Take() {
    if (words_.empty()) {
      short_ = true;
      return 0;
    }
    const std::int64_t word = words_.front();
    words_ = words_.subspan(1);
    return word;
  }
  Dims TakeDims(int rank) {
    Dims dims = Dims::Filled(rank, 0);
    for (int a = 0; a < rank; ++a) dims[a] = Take();
    return dims;
  }
  bool ended_early() const { return short_; }
  std::size_t left() const { return words_.size(); }

 private:
  std::span<const std::int64_t> words_;
  bool short_ = false;
};

// Reads the members of a tm_buffer that describe its memory. A number that does not fit its member
// becomes INT32_MAX, which is not a valid kind or device.
tm_buffer TakeMemory(Words& words) {
  const auto narrow = [&] {
    const std::int64_t word = words.Take();
    return word < INT32_MIN || word > INT32_MAX ? INT32_MAX : static_cast<std::int32_t>(word);
  };
  tm_buffer memory = {};
  memory.device_kind = narrow();
  memory.device_ordinal = narrow();
  const std::int64_t uuid[2] = {words.Take(), words.Take()};
  static_assert(sizeof(uuid) == sizeof(memory.device_uuid));
  std::memcpy(memory.device_uuid, uuid, sizeof(uuid));
  memory.memory_kind = narrow();
  memory.stream_kind = narrow();
  memory.stream = reinterpret_cast<void*>(static_cast<std::uintptr_t>(words.Take()));
  return memory;
}

Result<Shard> ParseShard(Words& words) {
  const std::int64_t dtype_number = words.Take();
  const auto flags = static_cast<std::uint64_t>(words.Take());
  const std::int64_t replica = words.Take();
  const std::int64_t rank = words.Take();
  const auto address = static_cast<std::uint64_t>(words.Take());
  if (words.ended_early()) return Shard();  // The caller reports the error.
  if ((flags & ~kKnownFlags) != 0) {
    return Status(Code::kUnsupported, "flags " + std::to_string(flags) + " contain unknown bits");
  }
  if (rank < 0 || rank > kMaxRank) {
    return Status(Code::kInvalidArgument, std::to_string(rank) + " axes, at most " +
                                              std::to_string(kMaxRank) + " are allowed");
  }
  std::optional<DType> dtype;
  if (dtype_number >= 0 && dtype_number <= UINT32_MAX) {
    dtype = tensormount::c_api::KnownDType(static_cast<std::uint32_t>(dtype_number));
  }
  if (!dtype) {
    return Status(Code::kInvalidArgument, std::to_string(dtype_number) + " is not a dtype");
  }
  if (replica < TM_REPLICA_UNLABELLED || replica > TM_REPLICA_COPY) {
    return Status(Code::kInvalidArgument, std::to_string(replica) + " is not a TM_REPLICA_ value");
  }
  Shard shard;
  shard.replica = static_cast<Replica>(replica);
  const int axes = static_cast<int>(rank);
  shard.global_shape = words.TakeDims(axes);
  const Dims begin = words.TakeDims(axes);
  const Dims extent = words.TakeDims(axes);
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(begin, extent));
  shard.region = Region(box);
  Dims shape = extent;
  if ((flags & TM_WORDS_FLAT) != 0) {
    const std::int64_t first = words.Take();
    const std::int64_t count = words.Take();
    TENSORMOUNT_ASSIGN_OR_RETURN(shard.region, Region::Flat(box, first, count));
    shape = Dims{count};
  }
  shard.data = BufferView::Host(*dtype, reinterpret_cast<void*>(address), shape);
  if ((flags & TM_WORDS_STRIDED) != 0) shard.data.strides = words.TakeDims(shape.rank());
  if ((flags & TM_WORDS_MEMORY) != 0) {
    TENSORMOUNT_RETURN_IF_ERROR(ReadMemory(TakeMemory(words), shard.data));
  }
  shard.metadata_only = (flags & TM_WORDS_METADATA_ONLY) != 0;
  return shard;
}

// Parses the numbers of `count` shards. `keys`: their keys, as for ReadKeys.
Result<std::unique_ptr<tm_layout>> Parse(const char* keys, std::size_t size,
                                         const std::int64_t* numbers, std::size_t word_count,
                                         std::size_t count) {
  if (count != 0) TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{keys, "keys"}, {numbers, "words"}}));
  // Each shard has a key that ends with a NUL, and at least five numbers. The check comes before
  // memory is reserved for `count` shards.
  if (count > size || count > word_count / 5) {
    return Status(Code::kInvalidArgument, std::to_string(count) + " shards do not fit in " +
                                              std::to_string(size) + " bytes of keys and " +
                                              std::to_string(word_count) + " numbers");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<std::string_view> texts,
                               tensormount::c_api::ReadKeys(keys, size, count));
  Words words(numbers, word_count);
  auto layout = std::make_unique<tm_layout>();
  layout->items.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::string key(texts[i]);
    Result<Shard> shard = ParseShard(words);
    if (words.ended_early()) {
      return Status(Code::kInvalidArgument,
                    "the numbers end within shard " + std::to_string(i) + ", tensor " + key);
    }
    if (!shard.ok()) return shard.status().WithContext("tensor " + key);
    layout->items.push_back({std::move(key), std::move(shard).value()});
  }
  if (words.left() != 0) {
    return Status(Code::kInvalidArgument, std::to_string(words.left()) +
                                              " numbers of the array are left over after " +
                                              std::to_string(count) + " shards");
  }
  return layout;
}

// Adds all shards to the state. `addresses`: the memory of each shard, or NULL for the addresses in
// the layout. Returns the first failure.
Status AddAll(tm_state* state, const tm_layout& layout, void* const* addresses) {
  for (std::size_t i = 0; i < layout.items.size(); ++i) {
    const tm_layout::Item& item = layout.items[i];
    if (addresses == nullptr || item.shard.metadata_only) {
      TENSORMOUNT_RETURN_IF_ERROR(state->dict.AddTensor(item.key, item.shard));
      continue;
    }
    Shard shard = item.shard;
    shard.data.data = addresses[i];
    TENSORMOUNT_RETURN_IF_ERROR(state->dict.AddTensor(item.key, shard));
  }
  return {};
}

}  // namespace

tm_status tm_layout_new(const char* keys, size_t keys_size, const int64_t* words, size_t word_count,
                        size_t count, tm_layout** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<tm_layout> layout,
                                 Parse(keys, keys_size, words, word_count, count));
    *out = layout.release();
    return {};
  });
}

void tm_layout_free(tm_layout* layout) { delete layout; }

tm_status tm_state_add_layout(tm_state* state, const tm_layout* layout, void* const* addresses,
                              size_t count) {
  return tensormount::c_api::CallOnState(state, [&](tensormount::StateDict&) -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{layout, "layout"}}));
    if (addresses != nullptr && count != layout->items.size()) {
      return {Code::kInvalidArgument, std::to_string(count) +
                                          " addresses were given for a layout of " +
                                          std::to_string(layout->items.size()) + " shards"};
    }
    return AddAll(state, *layout, addresses);
  });
}

tm_status tm_state_add_tensors(tm_state* state, const char* keys, size_t keys_size,
                               const int64_t* words, size_t word_count, size_t count) {
  return tensormount::c_api::CallOnState(state, [&](tensormount::StateDict&) -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<tm_layout> layout,
                                 Parse(keys, keys_size, words, word_count, count));
    return AddAll(state, *layout, nullptr);
  });
}
