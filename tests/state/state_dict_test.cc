// SPDX-License-Identifier: Apache-2.0
#include "tensormount/state_dict.h"

#include <cstdint>
#include <string>

#include "state/state_copy.h"
#include "tests/shard/boxes.h"
#include "tests/support/no_devices.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

Shard Described(const Dims& shape, Replica replica = Replica::kUnlabelled) {
  return MetadataOnly(DType::kF32, shape, Box::Whole(shape), replica);
}

TEST(StateDictTest, ShardsOfOneKeyMustAgree) {
  StateDict state;
  EXPECT_OK(state.AddTensor("w", Described({4, 4})));
  EXPECT_OK(state.AddTensor("w", MetadataOnly(DType::kF32, {4, 4}, B({0, 0}, {2, 4}))));
  EXPECT_OK(state.status());
  EXPECT_THAT(state.AddTensor("w", Described({4, 5})), HasMessage("tensor w: added with shape"));
  EXPECT_THAT(state.AddTensor("w", MetadataOnly(DType::kI32, {4, 4}, Box::Whole({4, 4}))),
              HasMessage("added with dtype f32 and with i32"));
  EXPECT_THAT(state.AddTensor("w", Described({4, 4}, Replica::kMain)), HasMessage("replica label"));
  EXPECT_OK(state.AddTensor("labelled", Described({4, 4}, Replica::kCopy)));
  EXPECT_OK(state.AddTensor("labelled", Described({4, 4}, Replica::kMain)));
  EXPECT_THAT(state.AddTensor("labelled", Described({4, 4})), HasMessage("replica label"));
  EXPECT_EQ(state.tensors().size(), 4u);
  // The first one that was ignored is remembered.
  EXPECT_THAT(state.status(), HasMessage("[4, 5]"));
}

TEST(StateDictTest, ACopyAndItsSourceTakeFurtherTensorsApart) {
  StateDict state;
  EXPECT_OK(state.AddTensor("w", Described({4, 4})));
  EXPECT_OK(state.SetCommon("step", CommonValue(std::int64_t{7})));
  StateDict copy = WithShards(state, [&](std::size_t i) { return state.tensors()[i].shard; });
  EXPECT_OK(copy.AddTensor("only in the copy", Described({2})));
  EXPECT_OK(state.AddTensor("only in the source", Described({3})));
  // Neither sees the key of the other: there it may have any shape.
  EXPECT_OK(state.AddTensor("only in the copy", Described({5})));
  EXPECT_OK(copy.AddTensor("only in the source", Described({6})));
  // Both know the key of before.
  EXPECT_THAT(copy.AddTensor("w", Described({4, 5})), HasMessage("tensor w: added with shape"));
  EXPECT_EQ(copy.tensors().size(), 3u);
  EXPECT_EQ(copy.common().size(), 1u);
  // The first failure of a source is that of its copy.
  EXPECT_THAT(state.AddTensor("w", Described({4, 6})), HasMessage("[4, 6]"));
  const StateDict failed =
      WithShards(state, [&](std::size_t i) { return state.tensors()[i].shard; });
  EXPECT_THAT(failed.status(), HasMessage("[4, 6]"));
}

TEST(StateDictTest, BuffersAreChecked) {
  StateDict state;
  float memory[4] = {};
  const Shard good{.global_shape = {4},
                   .region = Box::Whole({4}),
                   .data = BufferView::Host(DType::kF32, static_cast<void*>(memory), {4})};
  EXPECT_OK(state.AddTensor("w", good));
  Shard bad = good;
  bad.data.data = nullptr;
  EXPECT_THAT(state.AddTensor("w", bad), HasMessage("null"));
  bad.metadata_only = true;  // Then it is not expected.
  EXPECT_OK(state.AddTensor("w", bad));
  bad = good;
  bad.data.device.kind = DeviceKind::kCuda;
  {
    const NoDevices none_here;
    EXPECT_THAT(state.AddTensor("w", bad), HasCode(Code::kUnsupported));
  }
  bad = good;
  bad.region = B({1}, {4});
  EXPECT_THAT(state.AddTensor("w", bad), HasMessage("lies outside of shape [4]"));
  // Layers stacked under one key: the buffer has no axis for them.
  EXPECT_OK(state.AddTensor(
      "layers", {.global_shape = {7, 4}, .region = B({3, 0}, {1, 4}), .data = good.data}));
}

// Which memory the host reaches, and what is said of the others: never read, never waited for in
// vain.
TEST(StateDictTest, AcceptsOnlyMemoryThatTheHostCanAccess) {
  const NoDevices none_here;
  float memory[4] = {};
  const auto add = [&](DeviceKind device, MemoryKind kind, const DeviceStream& stream) {
    StateDict state;
    Shard shard{.global_shape = {4},
                .region = Box::Whole({4}),
                .data = BufferView::Host(DType::kF32, static_cast<void*>(memory), {4})};
    shard.data.device.kind = device;
    shard.data.memory = kind;
    shard.data.stream = stream;
    return state.AddTensor("w", shard);
  };
  const DeviceStream none;
  const DeviceStream legacy(StreamKind::kLegacyDefault, nullptr);
  const DeviceStream handle(StreamKind::kHandle, memory);
  using enum MemoryKind;
  for (const MemoryKind kind : {kPageable, kPinned, kManaged}) {
    EXPECT_OK(add(DeviceKind::kHost, kind, none));
    EXPECT_THAT(add(DeviceKind::kHost, kind, legacy), HasCode(Code::kUnsupported));
    EXPECT_THAT(add(DeviceKind::kHost, kind, handle), HasMessage("cannot wait for"));
  }
  for (const MemoryKind kind : {kPageable, kManaged, kDevice}) {
    EXPECT_THAT(add(DeviceKind::kCuda, kind, none), HasCode(Code::kUnsupported));
    EXPECT_THAT(add(DeviceKind::kCuda, kind, legacy), HasMessage("cannot reach"));
  }
  EXPECT_THAT(add(DeviceKind::kHost, kDevice, none), HasCode(Code::kInvalidArgument));
  EXPECT_THAT(add(DeviceKind::kCuda, kPinned, none), HasCode(Code::kInvalidArgument));
  for (const DeviceKind device : {DeviceKind::kHost, DeviceKind::kCuda}) {
    EXPECT_THAT(add(device, kManaged, DeviceStream(StreamKind::kHandle, nullptr)),
                HasCode(Code::kInvalidArgument));
    EXPECT_THAT(add(device, kManaged, DeviceStream(StreamKind::kNone, memory)),
                HasCode(Code::kInvalidArgument));
  }
}

TEST(DeviceStreamTest, StreamsAreNumberedAsInDLPack) {
  EXPECT_THAT(DeviceStream::FromDLPack(-1), IsOkAndHolds(DeviceStream()));
  EXPECT_THAT(DeviceStream::FromDLPack(1),
              IsOkAndHolds(DeviceStream(StreamKind::kLegacyDefault, nullptr)));
  EXPECT_THAT(DeviceStream::FromDLPack(2),
              IsOkAndHolds(DeviceStream(StreamKind::kPerThreadDefault, nullptr)));
  const auto handle = reinterpret_cast<void*>(std::uintptr_t{0x7f0011223344});
  EXPECT_THAT(DeviceStream::FromDLPack(0x7f0011223344),
              IsOkAndHolds(DeviceStream(StreamKind::kHandle, handle)));
  for (const std::int64_t number : {std::int64_t{0}, std::int64_t{-2}, INT64_MIN}) {
    EXPECT_THAT(DeviceStream::FromDLPack(number), HasCode(Code::kInvalidArgument));
  }
}

TEST(StateDictTest, AllocateDataAllocatesShardsWithoutData) {
  StateDict state;
  float memory[4] = {1, 2, 3, 4};
  EXPECT_OK(state.AddTensor(
      "given", {.global_shape = {4},
                .region = Box::Whole({4}),
                .data = BufferView::Host(DType::kF32, static_cast<void*>(memory), {4})}));
  EXPECT_OK(state.AddTensor("large", MetadataOnly(DType::kBF16, {64, 64}, B({3, 0}, {50, 64}))));
  EXPECT_OK(
      state.AddTensor("flat", MetadataOnly(DType::kI64, {9, 9}, F(B({0, 0}, {9, 9}), 4, 40))));
  EXPECT_OK(state.AddTensor("small", MetadataOnly(DType::kF32, {}, Region())));
  EXPECT_OK(state.AddTensor("none", MetadataOnly(DType::kF32, {0, 4}, Box::Whole({0, 4}))));
  // Whatever the caller left in the fields of its buffer.
  Shard odd = Described({3});
  odd.data.shape = {77};
  EXPECT_OK(state.AddTensor("odd", odd));
  {
    const NoDevices none_here;
    EXPECT_THAT(state.AllocateData({.kind = DeviceKind::kCuda}), HasCode(Code::kUnsupported));
  }
  StateDict host = std::move(state);
  ASSERT_OK(host.AllocateData({}, Fill::kZero));
  for (const StateDict::TensorItem& item : host.tensors()) {
    const BufferView& data = item.shard.data;
    EXPECT_FALSE(item.shard.metadata_only) << item.key;
    if (item.shard.region.empty()) continue;
    ASSERT_NE(data.data, nullptr) << item.key;
    EXPECT_TRUE(data.IsPacked()) << item.key;
    EXPECT_EQ(CheckedProduct(data.shape), item.shard.region.volume()) << item.key;
    if (item.key == "given") {
      EXPECT_EQ(data.data, memory);
      continue;
    }
    const auto bytes =
        static_cast<std::size_t>(item.shard.region.volume()) * (InfoOf(data.dtype).bits / 8);
    const auto* byte = static_cast<const char*>(data.data);
    EXPECT_EQ(std::string(byte, bytes), std::string(bytes, '\0')) << item.key;
    const auto address = reinterpret_cast<std::uintptr_t>(data.data);
    EXPECT_EQ(address % (bytes >= 4096 ? 4096 : 64), 0u) << item.key;
  }
  const void* before = host.tensors()[1].shard.data.data;
  EXPECT_OK(host.AllocateData());
  EXPECT_EQ(host.tensors()[1].shard.data.data, before);
}

TEST(StateDictTest, ImpossibleAllocationIsRefused) {
  StateDict state;
  EXPECT_OK(state.AddTensor("huge", Described({std::int64_t{1} << 56})));
  EXPECT_THAT(state.AllocateData(), HasCode(Code::kResourceExhausted));
  EXPECT_THAT(state.status(), HasMessage("allocate tensors"));
}

TEST(StateDictTest, LayerNamesAreSetAndChecked) {
  StateDict state;
  EXPECT_OK(state.AddTensor("layers.w", Described({12, 3})));
  EXPECT_OK(state.AddTensor("layers.12.w", Described({3})));  // There is no layer 12.
  EXPECT_OK(state.NameLayers("layers.w", "layers.{}.w"));
  EXPECT_OK(state.NameLayers("layers.w", "layers.{}.w"));
  EXPECT_EQ(state.layer_names().at("layers.w"), "layers.{}.w");
  EXPECT_OK(state.status());

  EXPECT_THAT(state.NameLayers("layers.w", "l.{}.w"), HasMessage("already named \"layers.{}.w\""));
  EXPECT_THAT(state.AddTensor("layers.11.w", Described({3})),
              HasMessage("\"layers.11.w\" is already the name of layer 11 of tensor layers.w"));
  EXPECT_OK(state.AddTensor("layers.13.w", Described({3})));
  EXPECT_OK(state.AddTensor("layers.011.w", Described({3})));

  EXPECT_OK(state.AddTensor("layers.b", Described({12, 3})));
  EXPECT_OK(state.AddTensor("b.7", Described({3})));
  EXPECT_OK(state.AddTensor("scalar", Described({})));
  const auto refused = [&](std::string_view key, std::string_view pattern, const char* why) {
    EXPECT_THAT(state.NameLayers(key, pattern), HasMessage(why));
    EXPECT_THAT(state.NameLayers(key, pattern), HasCode(Code::kInvalidArgument));
  };
  refused("layers.b", "b.{}", "\"b.7\" is the key of another tensor");
  refused("layers.b", "layers.{}.w", "is already the name of layer 0 of tensor layers.w");
  refused("layers.b", "b.{}.{}", "exactly one {}");
  refused("layers.b", "b", "exactly one {}");
  refused("layers.b", "", "exactly one {}");
  refused("layers.b", "b1{}", "digit");
  refused("layers.b", std::string(2047, 'b') + "{}", "2049 bytes");
  refused("layers.c", "c.{}", "no such tensor");
  refused("scalar", "s.{}", "a scalar has no layers");
  EXPECT_OK(state.AddTensor("many", Described({1 << 17})));
  refused("many", "m.{}", "131072 layers");
  // Two patterns that meet in one name only.
  EXPECT_OK(state.AddTensor("x", Described({3, 2})));
  EXPECT_OK(state.AddTensor("y", Described({3, 2})));
  EXPECT_OK(state.NameLayers("x", "a.{}.b.1"));
  refused("y", "a.2.b.{}", "\"a.2.b.1\" is already the name of layer 2 of tensor x");
}

}  // namespace
}  // namespace tensormount
