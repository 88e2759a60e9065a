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

// Memory of a device with a copy on the host. Where something failed since all work was last known
// to be over, it stays with the device: some work on it may be under way.
class Twin {
 public:
  Twin(DeviceOps& ops, std::string bytes) : ops_(ops), here_(std::move(bytes)) {}
  ~Twin() {
    if (there_ != nullptr && all_over_) ops_.Free(there_);
  }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  Status Upload(DeviceQueue& queue) {
    // Up to the end of the last word: kernels read all of one of which they want a part, and tools
    // that look for memory nobody wrote would find the rest of it.
    std::string words = here_;
    words.resize((here_.size() + 15) / 16 * 16);
    TENSORMOUNT_ASSIGN_OR_RETURN(there_, ops_.Allocate(words.size()));
    StridedCopy all;
    all.run = words.size();
    const DeviceCopy copy{all, reinterpret_cast<const std::byte*>(words.data()), there()};
    TENSORMOUNT_RETURN_IF_ERROR(queue.CopyIn({&copy, 1}));
    return Settle(queue);
  }
  Result<std::string> Download(DeviceQueue& queue) {
    std::string bytes(here_.size(), '\0');
    const DeviceCopy copy{Whole(), there(), reinterpret_cast<std::byte*>(bytes.data())};
    TENSORMOUNT_RETURN_IF_ERROR(queue.CopyOut({&copy, 1}));
    TENSORMOUNT_RETURN_IF_ERROR(Settle(queue));
    return bytes;
  }
  static Status Settle(DeviceQueue& queue) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceMark> mark, queue.Mark());
    const Status over = AwaitMark(*mark, Deadline::After(kSoon));
    all_over_ = over.ok();
    return over;
  }

  std::byte* here() { return reinterpret_cast<std::byte*>(here_.data()); }
  std::byte* there() {
    all_over_ = false;  // Whoever asks works with it.
    return there_;
  }
  const std::string& bytes() const { return here_; }

 private:
  StridedCopy Whole() const {
    StridedCopy all;
    all.run = here_.size();
    return all;
  }
  // Aligned for mold: see in_sink in base/log.cc.
  alignas(64) static inline thread_local bool all_over_ = false;
  DeviceOps& ops_;
  std::string here_;
  std::byte* there_ = nullptr;
};

std::byte* Raw(std::string& text) { return reinterpret_cast<std::byte*>(text.data()); }

std::vector<Hash128> LeavesOf(const std::string& bytes, std::uint64_t leaf) {
  LeafHasher hasher(leaf);
  hasher.Update(bytes.data(), bytes.size());
  return hasher.Take();
}

// What leads back.
StridedCopy Back(StridedCopy plan) {
  std::swap(plan.src_offset, plan.dst_offset);
  for (StridedCopy::Axis& axis : plan.loops()) std::swap(axis.src, axis.dst);
  return plan;
}

// Words whose rows in memory are columns of what they are packed to, perhaps several such matrices,
// or matrices of vectors; rows may have gaps behind them, and lie backwards.
StridedCopy MakeTranspose(Random& random, std::size_t& memory_bytes) {
  const std::int64_t word = std::int64_t{1} << random.Int(0, 3);
  // Whole tiles, what is around them, and anything.
  const auto side = [&] {
    return random.OneIn(2) ? random.Int(1, 4) * 32 + random.Int(-1, 1) : random.Int(2, 140);
  };
  const std::int64_t rows = side();
  const std::int64_t columns = side();
  const std::int64_t planes = random.OneIn(3) ? random.Int(2, 3) : 1;
  const std::int64_t pitch = columns + (random.OneIn(2) ? random.Int(0, 9) : 0);
  StridedCopy plan;
  plan.run = static_cast<std::uint64_t>(word);
  plan.src_offset = random.OneIn(2) ? random.Int(0, 20) * word : 0;
  if (planes > 1) {
    plan.axis[static_cast<std::size_t>(plan.axes++)] = {planes, pitch * rows * word,
                                                        rows * columns * word};
  }
  const bool back = random.OneIn(4);
  if (back) plan.src_offset += (rows - 1) * pitch * word;
  plan.axis[static_cast<std::size_t>(plan.axes++)] = {columns, word, rows * word};
  plan.axis[static_cast<std::size_t>(plan.axes++)] = {rows, (back ? -pitch : pitch) * word, word};
  if (planes > 1 && random.OneIn(2)) {  // Planes innermost on both sides would be one run.
    std::swap(plan.axis[0], plan.axis[1]);
    plan.axis[0].dst = planes * rows * word;
    plan.axis[1].dst = rows * word;
  }
  memory_bytes = static_cast<std::size_t>((plan.src_offset + planes * rows * pitch * word) + 16);
  return plan;
}

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

Status TransposesAreExact(DeviceOps& ops, std::uint64_t seed, int cases) {
  Random random(seed);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceQueue> queue, ops.MakeQueue({}));
  for (int number = 0; number < cases; ++number) {
    std::size_t bytes = 0;
    const StridedCopy plan = MakeTranspose(random, bytes);
    const auto packed_bytes = static_cast<std::size_t>(plan.bytes());
    Twin memory(ops, random.Bytes(bytes));
    Twin packed(ops, random.Bytes(packed_bytes));
    TENSORMOUNT_RETURN_IF_ERROR(memory.Upload(*queue));
    TENSORMOUNT_RETURN_IF_ERROR(packed.Upload(*queue));
    std::string expected(packed_bytes, '\0');
    ExecuteCopy(plan, memory.here(), Raw(expected));

    const std::uint64_t leaf = std::uint64_t{1} << random.Int(6, 10);
    const std::vector<Hash128> hashes = LeavesOf(expected, leaf);
    std::vector<Hash128> got_hashes(hashes.size());
    TENSORMOUNT_RETURN_IF_ERROR(
        queue->HashLeaves({&plan, 1}, memory.there(), packed_bytes, leaf, got_hashes.data()));
    std::string got(packed_bytes + 3, '\0');
    const auto shift = static_cast<std::size_t>(random.Int(0, 3));  // The host's is not aligned.
    const DeviceCopy out{plan, memory.there(), Raw(got) + shift};
    TENSORMOUNT_RETURN_IF_ERROR(queue->CopyOut({&out, 1}));
    TENSORMOUNT_RETURN_IF_ERROR(Twin::Settle(*queue));
    if (got.substr(shift, packed_bytes) != expected) {
      return Wrong("transposed copies out differ", seed, number);
    }
    if (got_hashes != hashes) return Wrong("hashes of what is transposed differ", seed, number);

    const DeviceCopy within{plan, memory.there(), packed.there()};
    TENSORMOUNT_RETURN_IF_ERROR(queue->CopyWithin({&within, 1}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string moved, packed.Download(*queue));
    if (moved != expected) return Wrong("transposed copies within differ", seed, number);

    std::string changed = random.Bytes(packed_bytes);
    std::string after = memory.bytes();
    ExecuteCopy(Back(plan), Raw(changed), Raw(after));
    const DeviceCopy in{Back(plan), Raw(changed), memory.there()};
    TENSORMOUNT_RETURN_IF_ERROR(queue->CopyIn({&in, 1}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string there, memory.Download(*queue));
    if (there != after) return Wrong("transposed copies in differ", seed, number);
  }
  return {};
}

Status SmallCopiesAreExact(DeviceOps& ops, std::uint64_t seed, int cases) {
  Random random(seed);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceQueue> queue, ops.MakeQueue({}));
  constexpr std::size_t kLine = 64;
  for (int number = 0; number < cases; ++number) {
    struct Placed {
      std::size_t there = 0;
      std::size_t here = 0;
      std::size_t bytes = 0;
    };
    std::vector<Placed> all;
    std::size_t there_bytes = 0;
    std::size_t here_bytes = 0;
    // As often as not each begins a line on both sides, as allocators and saves place them.
    const std::size_t align = random.OneIn(2) ? kLine : 1;
    const std::int64_t most = random.OneIn(2) ? 100 : 9000;
    for (std::int64_t left = random.Int(2, most == 100 ? 2500 : 60); left > 0; --left) {
      all.push_back({there_bytes + static_cast<std::size_t>(random.Int(0, 3)) * align, here_bytes,
                     static_cast<std::size_t>(random.Int(1, most))});
      there_bytes = (all.back().there + all.back().bytes + align - 1) / align * align;
      here_bytes = (here_bytes + all.back().bytes + align - 1) / align * align;
    }
    Twin memory(ops, random.Bytes(there_bytes));
    TENSORMOUNT_RETURN_IF_ERROR(memory.Upload(*queue));
    // Memory of the host that begins a line.
    std::string got(here_bytes + kLine, '\0');
    std::string changed = random.Bytes(here_bytes + kLine);
    const auto line_of = [](std::string& text) {
      return (kLine - reinterpret_cast<std::uintptr_t>(text.data()) % kLine) % kLine;
    };
    const std::size_t got_at = line_of(got);
    const std::size_t changed_at = line_of(changed);
    std::string after = memory.bytes();
    std::vector<DeviceCopy> out;
    std::vector<DeviceCopy> in;
    for (const Placed& one : all) {
      StridedCopy plan;
      plan.run = one.bytes;
      out.push_back({plan, memory.there() + one.there, Raw(got) + got_at + one.here});
      in.push_back({plan, Raw(changed) + changed_at + one.here, memory.there() + one.there});
      after.replace(one.there, one.bytes, changed, changed_at + one.here, one.bytes);
    }
    TENSORMOUNT_RETURN_IF_ERROR(queue->CopyOut(out));
    TENSORMOUNT_RETURN_IF_ERROR(Twin::Settle(*queue));
    for (const Placed& one : all) {
      if (got.compare(got_at + one.here, one.bytes, memory.bytes(), one.there, one.bytes) != 0) {
        return Wrong("small copies out differ", seed, number);
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(queue->CopyIn(in));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string there, memory.Download(*queue));
    if (there != after) return Wrong("small copies in differ", seed, number);
    // Within the device: from there to memory as it was on the host.
    Twin packed(ops, random.Bytes(here_bytes));
    TENSORMOUNT_RETURN_IF_ERROR(packed.Upload(*queue));
    std::string moved = packed.bytes();
    for (std::size_t i = 0; i < all.size(); ++i) {
      out[i].to = packed.there() + all[i].here;
      moved.replace(all[i].here, all[i].bytes, after, all[i].there, all[i].bytes);
    }
    TENSORMOUNT_RETURN_IF_ERROR(queue->CopyWithin(out));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string within, packed.Download(*queue));
    if (within != moved) return Wrong("small copies within differ", seed, number);
  }
  return {};
}

Status LeavesAreThoseOfTheHost(DeviceOps& ops, std::uint64_t seed, int cases) {
  Random random(seed);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceQueue> queue, ops.MakeQueue({}));
  for (int number = 0; number < cases; ++number) {
    Twin memory(ops, random.Bytes(static_cast<std::size_t>(random.Int(1000, 300'000))));
    TENSORMOUNT_RETURN_IF_ERROR(memory.Upload(*queue));
    StridedCopy run;
    run.src_offset = random.OneIn(2) ? random.Int(0, 40) * 16 : random.Int(0, 600);
    run.run = memory.bytes().size() - static_cast<std::size_t>(run.src_offset) -
              static_cast<std::size_t>(random.Int(0, 300));
    const std::uint64_t leaf = random.OneIn(2) ? kLeafBytes : std::uint64_t{1} << random.Int(8, 16);
    const std::vector<Hash128> expected =
        LeavesOf(memory.bytes().substr(static_cast<std::size_t>(run.src_offset), run.run), leaf);
    std::vector<Hash128> leaves(expected.size());
    TENSORMOUNT_RETURN_IF_ERROR(
        queue->HashLeaves({&run, 1}, memory.there(), run.run, leaf, leaves.data()));
    TENSORMOUNT_RETURN_IF_ERROR(Twin::Settle(*queue));
    if (leaves != expected) return Wrong("hashes of leaves differ", seed, number);
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
      a.expected = LeavesOf(packed, leaf);
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
    TENSORMOUNT_RETURN_IF_ERROR(second->WaitFor(written));
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
