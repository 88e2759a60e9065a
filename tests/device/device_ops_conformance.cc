// SPDX-License-Identifier: Apache-2.0
#include "tests/device/device_ops_conformance.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "device/pinned_ring.h"
#include "shard/leaf_hash.h"
#include "shard/strided_digest.h"
#include "tests/support/random.h"
#include "tests/support/random_strided.h"

namespace tensormount {
namespace {

constexpr std::chrono::seconds kSoon{60};

Status Wrong(const std::string& what, std::uint64_t seed, int number) {
  return {Code::kInternal,
          what + ", seed " + std::to_string(seed) + ", case " + std::to_string(number)};
}

// Memory of a device with a copy on the host.
class Twin {
 public:
  Twin(DeviceOps& ops, std::string bytes) : ops_(ops), here_(std::move(bytes)) {}
  ~Twin() {
    if (there_ != nullptr) ops_.Free(there_);
  }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  Status Upload(DeviceQueue& queue) {
    TENSORMOUNT_ASSIGN_OR_RETURN(there_, ops_.Allocate(here_.size()));
    const DeviceCopy copy{Whole(), here(), there_};
    TENSORMOUNT_RETURN_IF_ERROR(queue.CopyIn({&copy, 1}));
    return Settle(queue);
  }
  Result<std::string> Download(DeviceQueue& queue) const {
    std::string bytes(here_.size(), '\0');
    const DeviceCopy copy{Whole(), there_, reinterpret_cast<std::byte*>(bytes.data())};
    TENSORMOUNT_RETURN_IF_ERROR(queue.CopyOut({&copy, 1}));
    TENSORMOUNT_RETURN_IF_ERROR(Settle(queue));
    return bytes;
  }
  static Status Settle(DeviceQueue& queue) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceMark> mark, queue.Mark());
    return AwaitMark(*mark, Deadline::After(kSoon));
  }

  std::byte* here() { return reinterpret_cast<std::byte*>(here_.data()); }
  std::byte* there() { return there_; }
  const std::string& bytes() const { return here_; }

 private:
  StridedCopy Whole() const {
    StridedCopy all;
    all.run = here_.size();
    return all;
  }
  DeviceOps& ops_;
  std::string here_;
  std::byte* there_ = nullptr;
};

PlacedBox PackedAt(const Box& box, std::uint64_t offset) {
  return PlacePacked(Region(box), offset).front();
}

}  // namespace

Status CopiesAreExact(DeviceOps& ops, std::uint64_t seed, int cases) {
  Random random(seed);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceQueue> queue, ops.MakeQueue({}));
  for (int number = 0; number < cases; ++number) {
    // Several boxes in one submission, packed side by side on the host.
    std::vector<StridedBytes> boxes;
    std::vector<std::unique_ptr<Twin>> memory;
    std::uint64_t packed_bytes = 0;
    for (std::int64_t i = random.Int(1, 3); i > 0; --i) {
      boxes.push_back(MakeStridedBytes(random));
      memory.push_back(std::make_unique<Twin>(ops, random.Bytes(boxes.back().bytes)));
      TENSORMOUNT_RETURN_IF_ERROR(memory.back()->Upload(*queue));
      packed_bytes += static_cast<std::uint64_t>(boxes.back().box.volume());
    }
    std::string expected(packed_bytes, '\0');
    std::string got(packed_bytes, '\0');
    const std::string changed = random.Bytes(packed_bytes);
    std::vector<DeviceCopy> out;
    std::vector<DeviceCopy> in;
    std::vector<std::string> after;
    std::uint64_t at = 0;
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      const StridedBytes& s = boxes[i];
      const PlacedBox packed = PackedAt(s.box, at);
      at += static_cast<std::uint64_t>(s.box.volume());
      const StridedCopy gather = PlanCopy(s.box, s.placed, packed);
      const StridedCopy scatter = PlanCopy(s.box, packed, s.placed);
      ExecuteCopy(gather, memory[i]->here(), reinterpret_cast<std::byte*>(expected.data()));
      out.push_back({gather, memory[i]->there(), reinterpret_cast<std::byte*>(got.data())});
      in.push_back(
          {scatter, reinterpret_cast<const std::byte*>(changed.data()), memory[i]->there()});
      after.push_back(memory[i]->bytes());
      ExecuteCopy(scatter, reinterpret_cast<const std::byte*>(changed.data()),
                  reinterpret_cast<std::byte*>(after.back().data()));
    }
    TENSORMOUNT_RETURN_IF_ERROR(queue->CopyOut(out));
    TENSORMOUNT_RETURN_IF_ERROR(Twin::Settle(*queue));
    if (got != expected) return Wrong("copies out differ", seed, number);
    TENSORMOUNT_RETURN_IF_ERROR(queue->CopyIn(in));
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::string there, memory[i]->Download(*queue));
      if (there != after[i]) return Wrong("copies in differ", seed, number);
    }
    // From the first into packed memory of the device.
    Twin packed(ops, random.Bytes(static_cast<std::size_t>(boxes[0].box.volume())));
    TENSORMOUNT_RETURN_IF_ERROR(packed.Upload(*queue));
    const DeviceCopy within{PlanCopy(boxes[0].box, boxes[0].placed, PackedAt(boxes[0].box, 0)),
                            memory[0]->there(), packed.there()};
    TENSORMOUNT_RETURN_IF_ERROR(queue->CopyWithin({&within, 1}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string moved, packed.Download(*queue));
    if (moved != changed.substr(0, moved.size()))
      return Wrong("copies within differ", seed, number);
  }
  return {};
}

Status HashesAreThoseOfTheHost(DeviceOps& ops, std::uint64_t seed, int cases) {
  Random random(seed);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceQueue> queue, ops.MakeQueue({}));
  struct Asked {
    StridedBytes s;
    std::unique_ptr<Twin> memory;
    std::vector<Hash128> expected;
    std::vector<Hash128> leaves;
    Crc64 digest = 0;
  };
  for (int number = 0; number < cases;) {
    // Several before one mark.
    std::vector<Asked> asked;
    // Of every class of length that XXH3 treats apart, and several leaves.
    std::uint64_t leaf = std::uint64_t{1} << random.Int(2, 16);
    for (std::int64_t left = random.Int(1, 30); left > 0 && number < cases; --left, ++number) {
      Asked a;
      a.s = MakeStridedBytes(random);
      a.memory = std::make_unique<Twin>(ops, random.Bytes(a.s.bytes));
      TENSORMOUNT_RETURN_IF_ERROR(a.memory->Upload(*queue));
      asked.push_back(std::move(a));
    }
    for (Asked& a : asked) {
      if (random.OneIn(8)) leaf = std::uint64_t{1} << random.Int(2, 16);
      const auto bytes = static_cast<std::uint64_t>(a.s.box.volume());
      const StridedCopy gather = PlanCopy(a.s.box, a.s.placed, PackedAt(a.s.box, 0));
      std::string packed(bytes, '\0');
      ExecuteCopy(gather, a.memory->here(), reinterpret_cast<std::byte*>(packed.data()));
      LeafHasher hasher(leaf);
      hasher.Update(packed.data(), packed.size());
      hasher.Finish();
      a.expected = hasher.leaves();
      a.leaves.resize(a.expected.size());
      TENSORMOUNT_RETURN_IF_ERROR(
          queue->HashLeaves({&gather, 1}, a.memory->there(), bytes, leaf, a.leaves.data()));
      TENSORMOUNT_RETURN_IF_ERROR(
          queue->Digest({&a.s.placed, 1}, a.memory->there(), a.s.byte_shape, &a.digest));
    }
    TENSORMOUNT_RETURN_IF_ERROR(Twin::Settle(*queue));
    for (Asked& a : asked) {
      if (a.leaves != a.expected) return Wrong("leaf hashes differ", seed, number);
      if (a.digest != DigestOfPlaced(a.s.placed, a.memory->here(), a.s.byte_shape)) {
        return Wrong("digests differ", seed, number);
      }
    }
  }
  return {};
}

Status OrderIsKept(DeviceOps& ops, std::uint64_t seed, int cases) {
  Random random(seed);
  for (int number = 0; number < cases; ++number) {
    TENSORMOUNT_ASSIGN_OR_RETURN(std::unique_ptr<DeviceQueue> first, ops.MakeQueue({}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceQueue> second, ops.MakeQueue({}));
    Twin memory(ops, std::string(4096, 'a'));
    TENSORMOUNT_RETURN_IF_ERROR(memory.Upload(*first));
    const std::string b(4096, 'b');
    const std::string c(4096, 'c');
    std::string seen(4096, '\0');
    StridedCopy all;
    all.run = b.size();
    const auto bytes = [](const std::string& s) {
      return reinterpret_cast<const std::byte*>(s.data());
    };
    const DeviceCopy write_b{all, bytes(b), memory.there()};
    const DeviceCopy write_c{all, bytes(c), memory.there()};
    const DeviceCopy read{all, memory.there(), reinterpret_cast<std::byte*>(seen.data())};
    TENSORMOUNT_RETURN_IF_ERROR(first->CopyIn({&write_b, 1}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceMark> written, first->Mark());
    if (random.OneIn(2)) first.reset();
    TENSORMOUNT_RETURN_IF_ERROR(second->After(written));
    TENSORMOUNT_RETURN_IF_ERROR(second->CopyOut({&read, 1}));
    TENSORMOUNT_RETURN_IF_ERROR(second->CopyIn({&write_c, 1}));
    TENSORMOUNT_RETURN_IF_ERROR(Twin::Settle(*second));
    if (seen != b) return Wrong("a copy overtook another one", seed, number);
    const Result<bool> still = written->Reached();
    if (!still.ok() || !still.value()) return Wrong("a mark is not reached any more", seed, number);
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string last, memory.Download(*second));
    if (last != c) return Wrong("copies in of one queue changed places", seed, number);
  }
  return {};
}

}  // namespace tensormount
