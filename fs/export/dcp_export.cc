// SPDX-License-Identifier: Apache-2.0
// PlanDcp of export_plan.h. A folder as torch.distributed.checkpoint's FileSystemWriter of
// torch 2.13 writes it: items, each a torch archive of its own, in .distcp files, and .metadata,
// which says where they are.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include <fmt/core.h>

#include "base/checked.h"
#include "fs/export/export_plan.h"
#include "fs/export/torch_text.h"

namespace tensormount::fs {
namespace {

constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";
// About what an item's archive has besides data: so that many small items count as work too.
constexpr std::uint64_t kItemOverhead = 1600;

// Row-major runs that a tensor is cut into along its first axis of more than one place.
struct Cut {
  int axis = 0;
  std::int64_t rows = 0;  // Of a piece, at most.
  std::uint64_t row_bytes = 0;
  std::uint64_t pieces = 1;
};

Cut CutOf(const TensorMeta& meta, std::uint64_t piece_bytes) {
  Cut cut;
  if (meta.bytes() <= piece_bytes) return cut;
  while (meta.shape()[cut.axis] == 1) ++cut.axis;  // It has elements, and more than one.
  const std::int64_t extent = meta.shape()[cut.axis];
  cut.row_bytes = meta.bytes() / static_cast<std::uint64_t>(extent);
  cut.rows = static_cast<std::int64_t>(std::max<std::uint64_t>(piece_bytes / cut.row_bytes, 1));
  cut.pieces = static_cast<std::uint64_t>((extent + cut.rows - 1) / cut.rows);
  return cut;
}

struct DcpChunk {
  Dims offsets;
  Dims sizes;
  std::uint64_t skip = 0;
  std::uint64_t bytes = 0;
};

DcpChunk ChunkAt(const TensorMeta& meta, const Cut& cut, std::uint64_t n) {
  DcpChunk piece{.offsets = Dims::Filled(meta.shape().rank(), 0),
                 .sizes = meta.shape(),
                 .skip = 0,
                 .bytes = meta.bytes()};
  if (cut.pieces == 1) return piece;
  const std::int64_t first = static_cast<std::int64_t>(n) * cut.rows;
  piece.offsets[cut.axis] = first;
  piece.sizes[cut.axis] = std::min(cut.rows, meta.shape()[cut.axis] - first);
  piece.skip = static_cast<std::uint64_t>(first) * cut.row_bytes;
  piece.bytes = static_cast<std::uint64_t>(piece.sizes[cut.axis]) * cut.row_bytes;
  return piece;
}

struct Item {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// A value that is no tensor: a common value or a part of an object.
struct ByteItem {
  std::string fqn;
  std::string stored;
  const CommonValue* value = nullptr;  // Null: part number `part`.
  std::vector<CommonKey> below = {};   // Of what is in a dict: where, from the value `stored`.
  std::uint32_t part = 0;
  Item item;
};

class Planner {
 public:
  Planner(const CheckpointView& view, const PlanOptions& options, ExportPlan& plan)
      : view_(view), shown_(view.shown()), options_(options), plan_(plan) {}

  Status Run() {
    plan_.folder = true;
    TENSORMOUNT_ASSIGN_OR_RETURN(common_, shown_.opened.index().Common());
    TENSORMOUNT_ASSIGN_OR_RETURN(paths_, PlannerPaths::Make(common_.values));
    TENSORMOUNT_RETURN_IF_ERROR(FindByteItems());
    TENSORMOUNT_RETURN_IF_ERROR(Measure());
    for (ByteItem& item : byte_items_) TENSORMOUNT_RETURN_IF_ERROR(AddBytes(item));
    TENSORMOUNT_RETURN_IF_ERROR(ForEachTensor([this](std::uint32_t, const TensorEntry& tensor) {
      AddTensor(tensor);
      return Status();
    }));
    FinishFile();
    FileSegments metadata;
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string text, Metadata());
    metadata.AddLiteral(std::move(text));
    AddMadeFile(plan_, view_, ".metadata", std::move(metadata), {});
    return {};
  }

 private:
  Status ForEachTensor(const std::function<Status(std::uint32_t, const TensorEntry&)>& fn) const {
    return shown_.tensors.ForEachEntry(0, shown_.tensors.count(), fn);
  }

  Status FindByteItems() {
    std::set<std::string> as_stored;
    const std::vector<ObjectRecord>& parts = shown_.objects.parts();
    for (std::uint32_t n = 0; n < parts.size(); ++n) {
      ByteItem item{.fqn = {}, .stored = parts[n].key, .value = nullptr, .part = n, .item = {}};
      const std::string_view renamed = shown_.objects.stored_key(n);
      TENSORMOUNT_ASSIGN_OR_RETURN(item.fqn, shown_.objects.keys().KeyAt(n));
      if (!renamed.empty()) item.stored = renamed;
      if (parts[n].grid.rank() > 0) {
        // As Megatron-Core calls the parts of its sharded objects.
        const std::string index = Join(parts[n].index);
        item.fqn.resize(item.fqn.size() - index.size());
        item.fqn += fmt::format("shard_{}_{}", index, Join(parts[n].grid));
        item.stored.clear();
      }
      // What an adopted DCP checkpoint has as a plain value, it has as it was stored, too.
      if (common_.values.contains(item.fqn)) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const bool archive, IsArchive(n));
        if (archive) as_stored.insert(item.fqn);
      }
      byte_items_.push_back(std::move(item));
    }
    for (const auto& [name, value] : common_.values) {
      if (name == kPlannerData || as_stored.contains(name)) continue;
      AddValue(name, value);
    }
    return {};
  }

  // As torch's planners cut: what stands in a dict, or in a list that holds one, is an item by
  // itself. Not where that would give two items one name.
  void AddValue(const std::string& name, const CommonValue& value) {
    std::vector<ByteItem> leaves;
    std::vector<CommonKey> below;
    AddLeaves(name, name, value, below, leaves);
    std::set<std::string_view> names;
    const bool apart = std::ranges::all_of(leaves, [&](const ByteItem& leaf) {
      return names.insert(leaf.fqn).second &&
             (leaf.below.empty() || !common_.values.contains(leaf.fqn));
    });
    if (!apart) leaves = {{.fqn = name, .stored = name, .value = &value}};
    std::ranges::move(leaves, std::back_inserter(byte_items_));
  }

  static bool HoldsDict(const CommonValue& value) {
    if (value.get_if<CommonDict>() != nullptr) return true;
    const auto* list = value.get_if<CommonList>();
    return list != nullptr && std::ranges::any_of(list->items, HoldsDict);
  }

  static void AddLeaves(const std::string& stored, const std::string& fqn, const CommonValue& value,
                        std::vector<CommonKey>& below, std::vector<ByteItem>& out) {
    const auto add = [&](const std::string& part, CommonKey key, const CommonValue& item) {
      below.push_back(std::move(key));
      AddLeaves(stored, fqn + "." + part, item, below, out);
      below.pop_back();
    };
    const auto* dict = value.get_if<CommonDict>();
    const auto* list = value.get_if<CommonList>();
    if (dict != nullptr && !dict->items.empty()) {
      for (const auto& [key, item] : dict->items) {
        const auto* number = std::get_if<std::int64_t>(&key);
        const std::string text =
            number != nullptr ? std::to_string(*number) : std::get<std::string>(key);
        add(text, text, item);
      }
    } else if (list != nullptr && HoldsDict(value)) {
      for (std::size_t i = 0; i < list->items.size(); ++i) {
        add(std::to_string(i), static_cast<std::int64_t>(i), list->items[i]);
      }
    } else {
      out.push_back({.fqn = fqn, .stored = stored, .value = &value, .below = below});
    }
  }

  std::vector<CommonKey> PathOf(const ByteItem& item) const {
    if (item.below.empty()) return paths_.PathOf(item.fqn, item.stored);
    std::vector<CommonKey> path = paths_.PathOf(item.stored, item.stored);
    path.insert(path.end(), item.below.begin(), item.below.end());
    return path;
  }

  static std::string Join(const Dims& numbers) {
    std::string out;
    for (const std::int64_t n : numbers) out += (out.empty() ? "" : ".") + std::to_string(n);
    return out;
  }

  // How much there is in all, and whether every name is there once.
  Status Measure() {
    std::set<std::string_view> names;
    const auto twice = [](const std::string& key) {
      return Status(Code::kUnsupported,
                    fmt::format("dcp has one name for tensors, objects and common values: "
                                "there are two of {}",
                                key));
    };
    std::optional<std::uint64_t> total = 0;
    const auto add = [&total](std::uint64_t bytes) {
      total = total ? CheckedAdd(*total, bytes) : total;
    };
    for (const ByteItem& item : byte_items_) {
      if (!names.insert(item.fqn).second) return twice(item.fqn);
      add(kItemOverhead);
      if (item.value == nullptr) add(shown_.objects.parts()[item.part].length);
    }
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachTensor([&](std::uint32_t, const TensorEntry& tensor) -> Status {
          if (names.contains(tensor.meta.key())) return twice(tensor.meta.key());
          add(tensor.meta.bytes());
          add(CutOf(tensor.meta, options_.dcp_piece_bytes).pieces * kItemOverhead);
          return {};
        }));
    // Leaves room for the product below.
    const auto files = static_cast<std::uint64_t>(options_.dcp_files);
    if (!total || !CheckedMul(*total, files)) {
      return Status(Code::kUnsupported, "dcp: too many bytes for one checkpoint");
    }
    total_ = std::max<std::uint64_t>(*total, 1);
    return {};
  }

  // The file that the next item goes into: about equally many bytes for each.
  void NextItem(std::uint64_t bytes) {
    const auto files = static_cast<std::uint64_t>(options_.dcp_files);
    const auto wanted = static_cast<std::uint32_t>(std::min(done_ * files / total_, files - 1));
    if (wanted != file_) {
      FinishFile();
      file_ = wanted;
    }
    done_ += bytes + kItemOverhead;
  }

  void FinishFile() {
    if (builder_.size() > 0) {
      AddMadeFile(plan_, view_, FileName(file_), builder_.Finish(), std::move(holes_));
    }
    builder_ = FileBuilder();
    holes_.clear();
    templates_.clear();
  }

  static std::string FileName(std::uint32_t file) { return fmt::format("__{}_0.distcp", file); }

  void AddHoles(const std::vector<CrcHole>& of_item, std::uint64_t begin) {
    for (CrcHole hole : of_item) {
      hole.begin += begin;
      for (std::uint64_t& place : hole.places) place += begin;
      holes_.push_back(hole);
    }
  }

  // Items of one type and shape differ in their data alone.
  struct Template {
    FileBuilder::Text head;
    FileBuilder::Text tail;
    std::vector<CrcHole> holes;
  };
  const Template& TemplateOf(DType dtype, const Dims& shape) {
    const auto [it, added] =
        templates_.try_emplace({dtype, std::vector<std::int64_t>(shape.begin(), shape.end())});
    if (!added) return it->second;
    PickleWriter pickle(2);
    PickleTensor(pickle, dtype, shape, "0");
    std::uint64_t bytes = InfoOf(dtype).bits / 8;
    for (const std::int64_t extent : shape) bytes *= static_cast<std::uint64_t>(extent);
    ZipWriter zip;
    std::string head;
    std::string tail;
    zip.Add("data.pkl", pickle.Finish(), head);
    AddEntriesBeforeData(zip, head);
    zip.Begin("data/0", bytes, head);
    zip.End(tail);
    AddEntriesAfterData(zip, tail);
    zip.Finish(tail);
    it->second = {.head = builder_.Keep(head), .tail = builder_.Keep(tail), .holes = zip.holes()};
    return it->second;
  }

  void AddTensor(const TensorEntry& tensor) {
    const Cut cut = CutOf(tensor.meta, options_.dcp_piece_bytes);
    for (std::uint64_t n = 0; n < cut.pieces; ++n) {
      const DcpChunk piece = ChunkAt(tensor.meta, cut, n);
      NextItem(piece.bytes);
      const Template& around = TemplateOf(tensor.meta.dtype(), piece.sizes);
      Item item{.file = file_, .offset = builder_.size(), .length = 0};
      AddHoles(around.holes, item.offset);
      builder_.Add(around.head);
      builder_.AddTensor(tensor.ordinal, piece.skip, piece.bytes);
      builder_.Add(around.tail);
      item.length = builder_.size() - item.offset;
      items_.push_back(item);
    }
  }

  // Whether the bytes of an object are a torch archive as they are: its first entry tells.
  Result<bool> IsArchive(std::uint32_t part) const {
    const std::uint64_t length = shown_.objects.parts()[part].length;
    char head[30 + 256];
    const std::size_t size = std::min<std::uint64_t>(length, sizeof head);
    if (size < 30) return false;
    TENSORMOUNT_RETURN_IF_ERROR(view_.data().ReadObject(part, 0, head, size));
    const std::string_view text(head, size);
    const std::size_t name = static_cast<unsigned char>(head[26]) +
                             std::size_t{256} * static_cast<unsigned char>(head[27]);
    return text.starts_with("PK\x03\x04") && text.substr(30, name).ends_with("/data.pkl");
  }

  Status AddBytes(ByteItem& bytes) {
    if (bytes.value != nullptr) {
      NextItem(0);
      bytes.item = {.file = file_, .offset = builder_.size(), .length = 0};
      PickleWriter pickle(2);
      pickle.Common(*bytes.value);
      ZipWriter zip;
      std::string text;
      zip.Add("data.pkl", pickle.Finish(), text);
      AddEntriesBeforeData(zip, text);
      AddEntriesAfterData(zip, text);
      zip.Finish(text);
      builder_.Add(text);
    } else {
      const std::uint64_t length = shown_.objects.parts()[bytes.part].length;
      NextItem(length);
      bytes.item = {.file = file_, .offset = builder_.size(), .length = 0};
      TENSORMOUNT_ASSIGN_OR_RETURN(const bool archive, IsArchive(bytes.part));
      if (archive) {
        builder_.AddObject(bytes.part, length);
      } else {
        AddOpaque(bytes.part, length);
      }
    }
    bytes.item.length = builder_.size() - bytes.item.offset;
    return {};
  }

  // Bytes that torch could not load: as a Python bytes object.
  void AddOpaque(std::uint32_t part, std::uint64_t length) {
    const std::string before = PickleWriter::BytesHead(length);
    ZipWriter zip;
    std::string head;
    std::string tail = ".";  // Ends the pickle.
    zip.Begin("data.pkl", before.size() + length + tail.size(), head);
    zip.End(tail);
    AddEntriesBeforeData(zip, tail);
    AddEntriesAfterData(zip, tail);
    zip.Finish(tail);
    AddHoles(zip.holes(), builder_.size());
    builder_.Add(head + before);
    builder_.AddObject(part, length);
    builder_.Add(tail);
  }

  // ---- .metadata ----

  static void PickleSize(PickleWriter& pickle, const Dims& size) {
    pickle.Global("torch", "Size");
    pickle.Tuple(size);
    pickle.Tuple1();
    pickle.Reduce();
  }

  static void NewObject(PickleWriter& pickle, std::string_view module, std::string_view name) {
    pickle.Global(module, name);
    pickle.EmptyTuple();
    pickle.NewObject();
  }

  void PickleProperties(PickleWriter& pickle, DType dtype) {
    NewObject(pickle, kModule, "TensorProperties");
    pickle.Mark();
    PickleDType(pickle, dtype);
    pickle.Global("torch.serialization", "_get_layout");
    pickle.String("torch.strided");
    pickle.Tuple1();
    pickle.Reduce();
    pickle.Bool(false);  // requires_grad
    pickle.Global(kModule, "_MEM_FORMAT_ENCODING");
    pickle.Int(0);  // TORCH_CONTIGUOUS_FORMAT
    pickle.Tuple1();
    pickle.Reduce();
    pickle.Bool(false);  // pin_memory
    pickle.TupleFromMark();
    pickle.Build();
  }

  void PickleState(PickleWriter& pickle, const TensorEntry& tensor) {
    const Cut cut = CutOf(tensor.meta, options_.dcp_piece_bytes);
    NewObject(pickle, kModule, "TensorStorageMetadata");
    pickle.EmptyDict();
    pickle.Mark();
    pickle.String("properties");
    PickleProperties(pickle, tensor.meta.dtype());
    pickle.String("size");
    PickleSize(pickle, tensor.meta.shape());
    pickle.String("chunks");
    pickle.EmptyList();
    pickle.Mark();
    for (std::uint64_t n = 0; n < cut.pieces; ++n) {
      const DcpChunk piece = ChunkAt(tensor.meta, cut, n);
      NewObject(pickle, kModule, "ChunkStorageMetadata");
      pickle.EmptyDict();
      pickle.Mark();
      pickle.String("offsets");
      PickleSize(pickle, piece.offsets);
      pickle.String("sizes");
      PickleSize(pickle, piece.sizes);
      pickle.SetItems();
      pickle.Build();
    }
    pickle.Appends();
    pickle.SetItems();
    pickle.Build();
  }

  static void PicklePath(PickleWriter& pickle, const std::vector<CommonKey>& path) {
    pickle.Mark();
    for (const CommonKey& part : path) {
      if (const auto* index = std::get_if<std::int64_t>(&part)) {
        pickle.Int(*index);
      } else {
        pickle.String(std::get<std::string>(part));
      }
    }
    pickle.TupleFromMark();
  }

  void PickleWhere(PickleWriter& pickle, const Item& item) {
    NewObject(pickle, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    pickle.EmptyDict();
    pickle.Mark();
    pickle.String("relative_path");
    pickle.String(FileName(item.file));
    pickle.String("offset");
    pickle.Unsigned(item.offset);
    pickle.String("length");
    pickle.Unsigned(item.length);
    pickle.SetItems();
    pickle.Build();
  }

  // `offsets` null: of what is no tensor.
  void PickleIndex(PickleWriter& pickle, std::string_view fqn, const Dims* offsets,
                   std::uint64_t n) {
    NewObject(pickle, kModule, "MetadataIndex");
    pickle.EmptyDict();
    pickle.Mark();
    pickle.String("fqn");
    pickle.String(fqn);
    pickle.String("index");
    if (offsets == nullptr) {
      pickle.None();
    } else {
      pickle.Unsigned(n);
      pickle.String("offset");
      PickleSize(pickle, *offsets);
    }
    pickle.SetItems();
    pickle.Build();
  }

  Result<std::string> Metadata() {
    PickleWriter pickle(4);
    NewObject(pickle, kModule, "Metadata");
    pickle.EmptyDict();
    pickle.Mark();

    pickle.String("state_dict_metadata");
    pickle.EmptyDict();
    pickle.Mark();
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachTensor([&](std::uint32_t, const TensorEntry& tensor) -> Status {
          pickle.String(tensor.meta.key());
          PickleState(pickle, tensor);
          return {};
        }));
    for (const ByteItem& bytes : byte_items_) {
      pickle.String(bytes.fqn);
      NewObject(pickle, kModule, "BytesStorageMetadata");
    }
    pickle.SetItems();

    pickle.String("planner_data");
    pickle.EmptyDict();
    pickle.Mark();
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachTensor([&](std::uint32_t n, const TensorEntry& tensor) -> Status {
          const std::string& key = tensor.meta.key();
          TENSORMOUNT_ASSIGN_OR_RETURN(const std::string stored, StoredTensorKey(shown_, n, key));
          pickle.String(key);
          PicklePath(pickle, paths_.PathOf(key, stored));
          return {};
        }));
    for (const ByteItem& bytes : byte_items_) {
      pickle.String(bytes.fqn);
      PicklePath(pickle, PathOf(bytes));
    }
    pickle.SetItems();

    pickle.String("storage_data");
    pickle.EmptyDict();
    pickle.Mark();
    for (const ByteItem& bytes : byte_items_) {
      PickleIndex(pickle, bytes.fqn, nullptr, 0);
      PickleWhere(pickle, bytes.item);
    }
    std::size_t next = 0;
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachTensor([&](std::uint32_t, const TensorEntry& tensor) -> Status {
          const Cut cut = CutOf(tensor.meta, options_.dcp_piece_bytes);
          for (std::uint64_t n = 0; n < cut.pieces; ++n) {
            const DcpChunk piece = ChunkAt(tensor.meta, cut, n);
            PickleIndex(pickle, tensor.meta.key(), &piece.offsets, n);
            PickleWhere(pickle, items_.at(next++));
          }
          return {};
        }));
    pickle.SetItems();

    // A record of who saved what where, which torch 2.3 began and every release can do without.
    pickle.String("storage_meta");
    pickle.None();
    pickle.String("version");
    pickle.String("1.0.0");
    pickle.SetItems();
    pickle.Build();
    return pickle.Finish();
  }

  const CheckpointView& view_;
  const ShownCheckpoint& shown_;
  const PlanOptions& options_;
  ExportPlan& plan_;
  CommonState common_;
  PlannerPaths paths_;
  std::vector<ByteItem> byte_items_;
  std::vector<Item> items_;  // Of tensors' pieces, in order.
  std::uint64_t total_ = 1;
  std::uint64_t done_ = 0;
  std::uint32_t file_ = 0;
  FileBuilder builder_;
  std::vector<CrcHole> holes_;
  std::map<std::pair<DType, std::vector<std::int64_t>>, Template> templates_;
};

}  // namespace

Status PlanDcp(const CheckpointView& view, const PlanOptions& options, ExportPlan& plan) {
  if (options.dcp_files < 1 || options.dcp_piece_bytes == 0) {
    return Status(Code::kInvalidArgument, "dcp: one file at least, of pieces of a byte at least");
  }
  return Planner(view, options, plan).Run();
}

}  // namespace tensormount::fs
