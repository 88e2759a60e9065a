// SPDX-License-Identifier: Apache-2.0
// `tensormount cat` (commands.h): a tensor or a box of it to standard output, as bytes or as text.
#include <algorithm>
#include <vector>

#include <fmt/core.h>

#include "index/records/layer_names.h"
#include "mount-tools/commands.h"
#include "mount-tools/element_text.h"
#include "mount-tools/nearest.h"
#include "mount-tools/shown_text.h"
#include "mount-tools/source.h"
#include "shard/npy.h"

namespace tensormount::tools {
namespace {

// The tensor and box to write, and the axes of the result for the .npy header.
struct Target {
  TensorEntry tensor;
  Slice slice;
};

// The target for a slice of the tensor or layer `key`. For a layer, the returned tensor is the
// stacked tensor, and the box is the layer's part of it.
Result<Target> TargetOf(const OpenedCheckpoint& checkpoint, const std::string& key,
                        const std::string& slice) {
  auto found = checkpoint.index().Find(key);
  if (!found.ok() && found.status().code() != Code::kNotFound) return found.status();
  // If a tensor and a layer have the same name, the tensor is used.
  std::optional<LayerEntry> layer;
  if (!found.ok()) {
    TENSORMOUNT_ASSIGN_OR_RETURN(layer, checkpoint.index().ResolveLayer(key));
    if (!layer) return found.status();
  }
  const TensorMeta& meta = layer ? layer->meta : found.value().meta;
  auto parsed = ParseSlice(slice, meta.shape());
  if (!parsed.ok()) return parsed.status().WithContext("tensor " + key);
  if (!layer) return Target{found.value(), parsed.value()};
  TENSORMOUNT_ASSIGN_OR_RETURN(const Region in_stack, layer->InStack(parsed.value().box));
  return Target{layer->stacked, {.box = in_stack.box(), .kept = parsed.value().kept}};
}

// Parses KEY, KEY[SLICE] or KEY@SLICE. If a tensor has exactly the name `text`, all of `text` is
// the key. So a key may end with brackets; a slice of such a key is written with '@'.
Result<Target> FindTarget(const OpenedCheckpoint& checkpoint, const std::string& text) {
  auto exact = TargetOf(checkpoint, text, "");
  if (exact.status().code() != Code::kNotFound) return exact;
  std::string key;
  std::string slice;
  if (text.ends_with(']') && text.rfind('[') != std::string::npos) {
    const std::size_t open = text.rfind('[');
    key = text.substr(0, open);
    slice = text.substr(open + 1, text.size() - open - 2);
  } else if (text.rfind('@') != std::string::npos) {
    const std::size_t at = text.rfind('@');
    key = text.substr(0, at);
    slice = text.substr(at + 1);
  } else {
    return exact.status();
  }
  return TargetOf(checkpoint, key, slice);
}

// Calls fn with the packed bytes of the box in blocks, to limit memory.
Status ForEachBlock(const OpenedCheckpoint& checkpoint, const Target& target,
                    const std::function<Status(const std::byte*, std::size_t)>& fn) {
  const TensorMeta& meta = target.tensor.meta;
  const std::int64_t volume = target.slice.box.volume();
  // A multiple of 8 elements is a whole number of bytes for every element size.
  const std::int64_t step =
      std::max<std::int64_t>(8, (std::int64_t{32} << 20) / meta.bits() / 8 * 8);
  std::vector<std::byte> block;
  for (std::int64_t first = 0; first < volume; first += step) {
    const std::int64_t count = std::min(step, volume - first);
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region region, Region::Flat(target.slice.box, first, count));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint64_t size,
                                 RegionBytes(meta.dtype(), meta.shape(), region));
    block.resize(size);
    // The buffer is packed and has the shape of the region, as Read requires.
    const Dims shape = region.is_flat() ? Dims{count} : region.box().extent();
    TENSORMOUNT_RETURN_IF_ERROR(checkpoint.Read(target.tensor, region,
                                                BufferView::Host(meta.dtype(), block.data(), shape),
                                                ReadVerify::kExtendLeaves, nullptr, nullptr));
    TENSORMOUNT_RETURN_IF_ERROR(fn(block.data(), size));
  }
  return {};
}

Status CatText(const OpenedCheckpoint& checkpoint, const Target& target, Terminal& terminal) {
  const TensorMeta& meta = target.tensor.meta;
  const std::size_t item = meta.bits() / 8;
  if (meta.bits() % 8 != 0) {
    return Status(Code::kUnsupported,
                  fmt::format("--as text: {} elements are smaller than a byte; use --as raw",
                              InfoOf(meta.dtype()).name));
  }
  const Dims& kept = target.slice.kept;
  // Each line of text holds the elements along the last axis of the result; a scalar is one line.
  const std::int64_t columns = kept.rank() == 0 ? 1 : kept[kept.rank() - 1];
  std::int64_t n = 0;
  return ForEachBlock(checkpoint, target, [&](const std::byte* data, std::size_t size) {
    std::string text;
    for (std::size_t at = 0; at < size; at += item) {
      text += ElementText(meta.dtype(), data + at);
      text += ++n % columns == 0 ? '\n' : ' ';
    }
    return terminal.Write(text.data(), text.size());
  });
}

// Writes all parts of an object in order: as raw bytes, or for "text" as a description.
Status CatObject(const OpenedCheckpoint& checkpoint, const std::vector<ObjectRecord>& parts,
                 const std::string& as, Terminal& terminal) {
  if (as == "npy") {
    return Status(
        Code::kInvalidArgument,
        fmt::format("--as npy: {} is an object, not a tensor; use raw or text", parts.front().key));
  }
  for (const ObjectRecord& part : parts) {
    if (as == "text") {
      TENSORMOUNT_ASSIGN_OR_RETURN(std::string text, DescribePart(checkpoint, part));
      // The description may contain control characters, which ShownText escapes. Raw bytes are not
      // escaped.
      text = ShownText(text, "\n\t");
      if (!text.ends_with('\n')) text += '\n';
      TENSORMOUNT_RETURN_IF_ERROR(terminal.Write(text.data(), text.size()));
      continue;
    }
    std::string block;
    constexpr std::uint64_t kBlock = std::uint64_t{32} << 20;
    for (std::uint64_t at = 0; at < part.length; at += block.size()) {
      block.resize(static_cast<std::size_t>(std::min(kBlock, part.length - at)));
      TENSORMOUNT_RETURN_IF_ERROR(checkpoint.ReadObject(part, at, block.data(), block.size()));
      TENSORMOUNT_RETURN_IF_ERROR(terminal.Write(block.data(), block.size()));
    }
  }
  return {};
}

}  // namespace

int RunCat(const CatArgs& args, Terminal& terminal) {
  if (args.as != "raw" && args.as != "npy" && args.as != "text") {
    return terminal.Fail(
        Status(Code::kInvalidArgument, fmt::format("--as {}: must be raw, npy or text", args.as)));
  }
  auto opened = OpenSource(args.source, terminal);
  if (!opened.ok()) return terminal.Fail(opened.status());
  const OpenedCheckpoint& checkpoint = *opened.value();
  auto target = FindTarget(checkpoint, args.key);
  // If no tensor or layer has the key, it may be the key of an object.
  if (target.status().code() == Code::kNotFound) {
    const auto parts = checkpoint.index().ObjectParts(args.key);
    if (parts.ok() && !parts.value().empty()) {
      const Status written = CatObject(checkpoint, parts.value(), args.as, terminal);
      return written.ok() ? terminal.Flush() : terminal.Fail(written);
    }
  }
  if (!target.ok()) {
    return terminal.Fail(target.status(), target.status().code() == Code::kNotFound
                                              ? KeyHint(checkpoint, args.source, args.key)
                                              : std::string());
  }
  Status status;
  if (args.as == "text") {
    status = CatText(checkpoint, target.value(), terminal);
  } else {
    if (args.as == "npy") {
      auto header = MakeNpyHeader(target.value().tensor.meta.dtype(), target.value().slice.kept);
      status = header.status();
      if (status.ok()) status = terminal.Write(header.value().data(), header.value().size());
    }
    if (status.ok()) {
      status = ForEachBlock(checkpoint, target.value(), [&](const std::byte* p, std::size_t n) {
        return terminal.Write(p, n);
      });
    }
  }
  if (!status.ok()) return terminal.Fail(status);
  return terminal.Flush();
}

}  // namespace tensormount::tools
