// SPDX-License-Identifier: Apache-2.0
// PlanDcp of export_plan.h. A folder as torch.distributed.checkpoint's FileSystemWriter of
// torch 2.13 writes it: items, each a torch archive of its own, in .distcp files, and .metadata,
// which says where they are.
//
//   __0_0.distcp   one file for each rank of the export, of about equally many bytes
//     item         a zip archive as of torch.save: data.pkl (a tensor over storage "0", or a value)
//                  and the small entries that go with it, of a tensor also data/0 (its bytes)
//   .metadata      a pickle of class Metadata: of each key its type, shape and chunks
//                  (state_dict_metadata), its path in nested dicts (planner_data), and of each
//                  chunk the file, offset and length of its item (storage_data)
//
// The steps: find the values that are no tensors, measure everything, lay items out file after
// file, then write .metadata from what was laid out. No data are read but the first bytes of
// objects that may be archives already.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>

#include <fmt/core.h>

#include "base/checked.h"
#include "fs/export/export_plan.h"
#include "fs/formats/dcp_metadata.h"
#include "fs/formats/torch_text.h"
#include "index/read/saved_paths.h"

namespace tensormount::fs {
namespace {

// About what an item's archive has besides data: so that many small items count as work too.
constexpr std::uint64_t kItemOverhead = 1600;

// A value that is no tensor: a common value or a part of an object.
// `fqn` (fully qualified name) is what DCP calls a key.
struct ByteItem {
  std::string fqn;
  std::string stored;
  const CommonValue* value = nullptr;  // Null: part number `part`.
  std::vector<CommonKey> below = {};   // Of what is in a dict: where, from the value `stored`.
  std::optional<SavedPath> path = {};  // Where it stood, if the stored name does not tell.
  std::vector<ByteItem> items = {};    // Not empty: a list, or a tuple, of these.
  bool tuple = false;
  std::uint32_t part = 0;
  DcpItem item;
};

class Planner {
 public:
  Planner(const CheckpointView& view, const ExportOptions& options, int files, ExportPlan& plan)
      : view_(view),
        shown_(view.shown()),
        chunk_bytes_(options.dcp_chunk_bytes),
        files_(static_cast<std::uint64_t>(files)),
        plan_(plan) {}

  Status Run() {
    plan_.folder = true;
    TENSORMOUNT_ASSIGN_OR_RETURN(common_, shown_.opened.index().Common());
    std::set<std::string, std::less<>> keys;
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachTensor([&](std::uint32_t n, const TensorEntry& tensor) -> Status {
          TENSORMOUNT_ASSIGN_OR_RETURN(std::string stored,
                                       StoredTensorKey(shown_, n, tensor.meta.key()));
          keys.insert(std::move(stored));
          return {};
        }));
    paths_ =
        SavedPaths::Make(common_.values, [&](std::string_view key) { return keys.contains(key); });
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

  // Objects first, in the order of their paths, then common values by name. The order is that of
  // the items in the files.
  Status FindByteItems() {
    std::set<std::string> as_stored;
    const std::vector<ObjectRecord>& parts = shown_.objects.parts();
    for (std::uint32_t n = 0; n < parts.size(); ++n) {
      ByteItem item{.fqn = {}, .stored = parts[n].key, .value = nullptr, .part = n, .item = {}};
      const std::string_view renamed = shown_.objects.stored_key(n);
      TENSORMOUNT_ASSIGN_OR_RETURN(item.fqn, shown_.objects.tree().keys().KeyAt(n));
      if (!renamed.empty()) item.stored = renamed;
      if (parts[n].grid.rank() > 0) {
        // As Megatron-Core calls the parts of its sharded objects.
        // The path ends in "/0.3"; Megatron's name is KEY/shard_0.3_2.4, with the size of the grid
        // behind.
        const std::string index = Join(parts[n].index);
        item.fqn.resize(item.fqn.size() - index.size());
        item.fqn += fmt::format("shard_{}_{}", index, Join(parts[n].grid));
        item.stored.clear();
      }
      // What an adopted DCP checkpoint has as a plain value, it has as it was stored, too.
      // It then goes out as the very same archive, and not as a pickle of ours.
      if (common_.values.contains(item.fqn)) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const bool archive, IsArchive(n));
        if (archive) as_stored.insert(item.fqn);
      }
      byte_items_.push_back(std::move(item));
    }
    std::vector<std::string> lost;
    for (const auto& [name, value] : common_.values) {
      if (SavedPaths::IsInternal(name) || as_stored.contains(name)) continue;
      if (!paths_.IsEncoded(name)) {
        AddValue(name, value);
        continue;
      }
      if (CanPickleEncoded(value)) {
        byte_items_.push_back({.fqn = name, .stored = name, .value = &value});
      } else {
        lost.push_back(name);
      }
    }
    NoteLost("dcp cannot hold the values", lost, plan_);
    for (const SavedPaths::Empty& empty : paths_.empty()) {
      byte_items_.push_back(
          {.fqn = Dotted(empty.path), .stored = {}, .value = &empty.value, .path = empty.path});
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
    // {"a.b": 1, "a": {"b": 2}} would be "a.b" twice: then the dict stays one item.
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

  // Depth is bounded by that of common values. An empty dict or list is a leaf itself, or it would
  // be lost.
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

  // For planner_data: the path of the value that the leaf was cut from, and the way to it from
  // there.
  std::vector<CommonKey> PathOf(const ByteItem& item) const {
    if (flat_) return {CommonKey(item.fqn)};
    if (item.below.empty()) return PlannerPath(PathOfValue(item), item.fqn);
    std::vector<CommonKey> path = SavedPaths::ForPlanner(paths_.OfValue(item.stored, item.stored));
    path.insert(path.end(), item.below.begin(), item.below.end());
    return path;
  }

  SavedPath PathOfValue(const ByteItem& item) const {
    return item.path ? *item.path : paths_.OfValue(item.fqn, item.stored);
  }

  // The path of an item for planner_data, whose outermost is a dict.
  std::vector<CommonKey> PlannerPath(const SavedPath& path, const std::string& key) const {
    if (flat_) return {CommonKey(key)};
    if (path.front().kind == PathStep::Kind::kName ||
        path.front().kind == PathStep::Kind::kNumberKey) {
      return SavedPaths::ForPlanner(path);
    }
    return {CommonKey(key)};
  }

  static std::string Join(const Dims& numbers) {
    std::string out;
    for (const std::int64_t n : numbers) out += (out.empty() ? "" : ".") + std::to_string(n);
    return out;
  }

  // Fills named_. `names`: those that are taken.
  Status FindNames(std::set<std::string, std::less<>>& names) {
    return ForEachTensor([&](std::uint32_t n, const TensorEntry& tensor) -> Status {
      const std::string& key = tensor.meta.key();
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::string stored, StoredTensorKey(shown_, n, key));
      const std::vector<SavedPath> paths = paths_.Of(key, stored);
      std::vector<Named> found;
      for (const SavedPath& path : paths) {
        std::string fqn = Dotted(path);
        if (fqn == key || (!fqn.empty() && names.insert(fqn).second)) {
          found.push_back({std::move(fqn), path});
        }
      }
      if (found.size() < paths.size()) twins_.push_back(key);
      // At the root, where nothing else can have the name.
      if (found.empty()) found.push_back({key, {{key, PathStep::Kind::kName}}});
      const bool as_stored =
          found.size() == 1 && found.front().fqn == key && found.front().path == paths.front();
      if (!as_stored) named_.emplace(n, std::move(found));
      return {};
    });
  }

  // A value that the checkpoint has under another name than planners would give it gets theirs.
  void NameAsPlannersDo(std::set<std::string, std::less<>>& names, ByteItem& item) const {
    SavedPath path = AsPlanned(PathOf(item));
    std::string dotted = Dotted(path);
    if (dotted == item.fqn || dotted.empty() || dotted.front() == '$' ||
        SavedPaths::IsInternal(dotted) || !names.insert(dotted).second) {
      return;
    }
    names.erase(item.fqn);
    item.fqn = std::move(dotted);
    item.path = std::move(path);
    item.below.clear();
  }

  // Whether some value would stand within another one. Then each stands under its name.
  Status FindFlat() {
    if (!paths_.nested() &&
        std::ranges::all_of(byte_items_, [](const ByteItem& item) { return item.below.empty(); })) {
      return {};
    }
    std::set<CommonKey> values;
    std::set<CommonKey> containers;
    const auto add = [&](const std::vector<CommonKey>& path) {
      (path.size() == 1 ? values : containers).insert(path.front());
    };
    for (const ByteItem& item : byte_items_) add(PathOf(item));
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachTensor([&](std::uint32_t n, const TensorEntry& tensor) -> Status {
          TENSORMOUNT_ASSIGN_OR_RETURN(const auto names, NamesOf(n, tensor.meta.key()));
          for (const Named& name : names) add(PlannerPath(name.path, name.fqn));
          return {};
        }));
    flat_ =
        std::ranges::any_of(values, [&](const CommonKey& key) { return containers.contains(key); });
    if (flat_) plan_.notes.emplace_back("its values' paths contradict each other: a flat dict");
    return {};
  }

  // What planner_data says of a list: the positions that have values.
  struct ListItems {
    std::set<std::int64_t> there;
    std::int64_t count = 0;
    std::map<std::int64_t, std::size_t> leaves;  // Numbers of byte items that a pickle can hold.
    bool tuple = false;
  };
  using Lists = std::map<SavedPath, ListItems>;

  // As planner_data has a path: what is no position is text.
  static SavedPath AsPlanned(std::vector<CommonKey> keys) {
    SavedPath path;
    for (CommonKey& key : keys) {
      const bool position = std::holds_alternative<std::int64_t>(key);
      path.push_back(
          {std::move(key), position ? PathStep::Kind::kListItem : PathStep::Kind::kName});
    }
    return path;
  }

  // `leaf`: the number of a byte item that can be an item of another one.
  static void AddToLists(Lists& lists, const SavedPath& path, std::optional<std::size_t> leaf) {
    for (std::size_t i = 0; i < path.size(); ++i) {
      const auto* position = std::get_if<std::int64_t>(&path[i].key);
      if (position == nullptr) continue;
      ListItems& items = lists[{path.begin(), path.begin() + static_cast<std::ptrdiff_t>(i)}];
      items.there.insert(*position);
      items.count = std::max(items.count, *position + 1);
      if (leaf && i + 1 == path.size()) items.leaves.emplace(*position, *leaf);
    }
  }

  // torch makes its lists anew from planner_data, and then asks for what it has cut from them: for
  // every item of one that holds tensors or dicts, and for one without these as a whole.
  Status MendLists(std::set<std::string, std::less<>>& names) {
    Lists lists;
    for (std::size_t n = 0; n < byte_items_.size(); ++n) {
      AddToLists(lists, AsPlanned(PathOf(byte_items_[n])),
                 byte_items_[n].value != nullptr ? std::optional(n) : std::nullopt);
    }
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachTensor([&](std::uint32_t n, const TensorEntry& tensor) -> Status {
          TENSORMOUNT_ASSIGN_OR_RETURN(const auto of, NamesOf(n, tensor.meta.key()));
          for (const Named& name : of) {
            AddToLists(lists, AsPlanned(PlannerPath(name.path, name.fqn)), std::nullopt);
          }
          return {};
        }));
    for (const auto& [path, container] : paths_.containers()) {
      const auto list = lists.find(AsPlanned(SavedPaths::ForPlanner(path)));
      if (list == lists.end()) continue;
      list->second.count = std::max(list->second.count, container.items);
      list->second.tuple = container.kind == SavedPaths::Container::Kind::kTuple;
    }
    // The innermost first.
    std::vector<Lists::value_type*> order;
    for (auto& list : lists) order.push_back(&list);
    std::ranges::stable_sort(
        order, [](const auto* a, const auto* b) { return a->first.size() > b->first.size(); });
    std::set<std::size_t> merged;
    for (const auto* list : order) {
      const auto& [path, items] = *list;
      std::string fqn = Dotted(path);
      const bool plain = items.leaves.size() == items.there.size();
      if (plain && !path.empty() && names.insert(fqn).second) {
        ByteItem whole{.fqn = std::move(fqn), .stored = {}, .path = path, .tuple = items.tuple};
        for (std::int64_t position = 0; position < items.count; ++position) {
          const auto leaf = items.leaves.find(position);
          if (leaf == items.leaves.end()) {
            whole.items.push_back({.fqn = {}, .stored = {}, .value = &None()});
            continue;
          }
          merged.insert(leaf->second);
          whole.items.push_back(std::move(byte_items_[leaf->second]));
        }
        byte_items_.push_back(std::move(whole));
        AddLeaf(lists, path, byte_items_.size() - 1);
        continue;
      }
      for (std::int64_t position = 0; position < items.count; ++position) {
        if (items.there.contains(position)) continue;
        SavedPath gap = path;
        gap.push_back({position, PathStep::Kind::kListItem});
        std::string name = Dotted(gap);
        if (!names.insert(name).second) continue;
        byte_items_.push_back(
            {.fqn = std::move(name), .stored = {}, .value = &None(), .path = std::move(gap)});
      }
    }
    std::vector<ByteItem> kept;
    for (std::size_t n = 0; n < byte_items_.size(); ++n) {
      if (!merged.contains(n)) kept.push_back(std::move(byte_items_[n]));
    }
    byte_items_ = std::move(kept);
    return {};
  }

  // A list that became one item is an item of the list that it lies in.
  static void AddLeaf(Lists& lists, const SavedPath& path, std::size_t leaf) {
    const auto* position = std::get_if<std::int64_t>(&path.back().key);
    if (position == nullptr) return;
    const auto list = lists.find({path.begin(), path.end() - 1});
    if (list != lists.end()) list->second.leaves.emplace(*position, leaf);
  }

  static const CommonValue& None() {
    static const CommonValue none;
    return none;
  }

  // How much there is in all, and whether every name is there once.
  Status Measure() {
    std::set<std::string, std::less<>> names;
    const auto twice = [](const std::string& key) {
      return Status(Code::kUnsupported,
                    fmt::format("dcp has one name for tensors, objects and common values: "
                                "there are two of {}",
                                key));
    };
    // Nothing once a sum did not fit 64 bits.
    std::optional<std::uint64_t> total = 0;
    const auto add = [&total](std::uint64_t bytes) {
      total = total ? CheckedAdd(*total, bytes) : total;
    };
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachTensor([&](std::uint32_t, const TensorEntry& tensor) -> Status {
          if (!names.insert(tensor.meta.key()).second) return twice(tensor.meta.key());
          add(tensor.meta.bytes());
          add(DcpCut(tensor.meta, chunk_bytes_).chunks() * kItemOverhead);
          return {};
        }));
    // What an empty container would be called may be another rank's value.
    std::set<std::string, std::less<>> values;
    for (const ByteItem& item : byte_items_) {
      if (!item.path) values.insert(item.fqn);
    }
    std::erase_if(byte_items_, [&](const ByteItem& item) {
      if (!item.path) return false;
      const bool twin =
          item.fqn.empty() || names.contains(item.fqn) || !values.insert(item.fqn).second;
      if (twin) twins_.push_back(item.fqn);
      return twin;
    });
    for (const ByteItem& item : byte_items_) {
      if (!names.insert(item.fqn).second) return twice(item.fqn);
      add(kItemOverhead);
      if (item.value == nullptr) add(shown_.objects.parts()[item.part].length);
    }
    if (paths_.nested()) {
      TENSORMOUNT_RETURN_IF_ERROR(FindNames(names));
      for (ByteItem& item : byte_items_) {
        if (item.path) continue;
        NameAsPlannersDo(names, item);
        if (item.path || Dotted(AsPlanned(PathOf(item))) == item.fqn) continue;
        item.below.clear();
        item.path = SavedPath{{item.fqn, PathStep::Kind::kName}};
        twins_.push_back(item.fqn);
      }
    }
    NoteLost("dcp has one name for values whose paths read alike; under another one, or left out",
             twins_, plan_);
    TENSORMOUNT_RETURN_IF_ERROR(FindFlat());
    if (paths_.nested() && !flat_) {
      TENSORMOUNT_RETURN_IF_ERROR(MendLists(names));
      for (std::size_t n = 0; n < byte_items_.size(); ++n) add(kItemOverhead);
    }
    // Leaves room for the product in NextItem.
    if (!total || !CheckedMul(*total, files_)) {
      return Status(Code::kUnsupported, "dcp: too many bytes for one checkpoint");
    }
    total_ = std::max<std::uint64_t>(*total, 1);
    return {};
  }

  // The file that the next item goes into: about equally many bytes for each.
  // An item belongs to the file in whose share of all bytes it begins, and is never cut.
  void NextItem(std::uint64_t bytes) {
    const auto wanted = static_cast<std::uint32_t>(std::min(done_ * files_ / total_, files_ - 1));
    if (wanted != file_) {
      FinishFile();
      file_ = wanted;
    }
    done_ += bytes + kItemOverhead;
  }

  // Templates go with the builder: they are ranges of its kept text.
  void FinishFile() {
    if (builder_.size() > 0) {
      AddMadeFile(plan_, view_, DcpFileName(file_), builder_.Finish(), std::move(holes_));
    }
    builder_ = FileBuilder();
    holes_.clear();
    templates_.clear();
  }

  // From offsets of the archive to those of the data file.
  void AddHoles(const std::vector<CrcHole>& of_item, std::uint64_t begin) {
    for (CrcHole hole : of_item) {
      hole.covered = {hole.covered.begin + begin, hole.covered.end + begin};
      for (std::uint64_t& position : hole.positions) position += begin;
      holes_.push_back(hole);
    }
  }

  // Items of one type and shape differ in their data alone.
  struct Template {
    ByteRange head;  // In the kept text of the builder.
    ByteRange tail;
    std::vector<CrcHole> holes;
  };
  // A model has few combinations of type and shape and may have a million tensors: text and holes
  // are made once for each.
  const Template& TemplateOf(DType dtype, const Dims& shape) {
    const auto [it, added] =
        templates_.try_emplace({dtype, std::vector<std::int64_t>(shape.begin(), shape.end())});
    if (!added) return it->second;
    PickleWriter pickle(2);
    PickleTensor(pickle, dtype, shape, "0");
    std::uint64_t bytes = TorchElementBytes(dtype);
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

  // items_ has one for each chunk, in the order in which Metadata() asks for them again.
  void AddTensor(const TensorEntry& tensor) {
    const DcpCut cut(tensor.meta, chunk_bytes_);
    for (std::uint64_t n = 0; n < cut.chunks(); ++n) {
      const DcpChunk chunk = cut.At(n);
      NextItem(chunk.bytes);
      const Template& around = TemplateOf(tensor.meta.dtype(), chunk.sizes);
      DcpItem item{.file = file_, .offset = builder_.size(), .length = 0};
      AddHoles(around.holes, item.offset);
      builder_.Add(around.head);
      builder_.AddTensor(tensor.ordinal, chunk.skip, chunk.bytes);
      builder_.Add(around.tail);
      item.length = builder_.size() - item.offset;
      items_.push_back(item);
    }
  }

  // Whether the bytes of an object are a torch archive as they are: its first entry tells.
  Result<bool> IsArchive(std::uint32_t part) const {
    const std::uint64_t length = shown_.objects.parts()[part].length;
    // A local zip header has 30 bytes, then the name, whose length stands at 26.
    char head[30 + 256];
    const std::size_t size = std::min<std::uint64_t>(length, sizeof head);
    if (size < 30) return false;
    TENSORMOUNT_RETURN_IF_ERROR(view_.data().ReadObject(part, 0, head, size));
    const std::string_view text(head, size);
    const std::size_t name = static_cast<unsigned char>(head[26]) +
                             std::size_t{256} * static_cast<unsigned char>(head[27]);
    return text.starts_with("PK\x03\x04") && text.substr(30, name).ends_with("/data.pkl");
  }

  // Recursive; as deep as paths are long.
  void PickleItem(PickleWriter& pickle, const ByteItem& bytes) const {
    if (bytes.items.empty()) {
      if (!paths_.IsEncoded(bytes.stored) || !PickleEncoded(pickle, *bytes.value)) {
        pickle.Common(*bytes.value);
      }
      return;
    }
    if (!bytes.tuple) pickle.EmptyList();
    pickle.Mark();
    for (const ByteItem& item : bytes.items) PickleItem(pickle, item);
    if (bytes.tuple) {
      pickle.TupleFromMark();
    } else {
      pickle.Appends();
    }
  }

  Status AddBytes(ByteItem& bytes) {
    if (bytes.value != nullptr || !bytes.items.empty()) {
      NextItem(0);
      bytes.item = {.file = file_, .offset = builder_.size(), .length = 0};
      PickleWriter pickle(2);
      PickleItem(pickle, bytes);
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
  // data.pkl is then one BINBYTES8 and a STOP: the object's bytes pass through unread.
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

  // A name of a tensor and where it stood in the state dict. DCP has all names of a tied tensor,
  // and the bytes once.
  struct Named {
    std::string fqn;
    SavedPath path;
  };

  // Calls fn for each name of each tensor, in the order of AddTensor.
  Status ForEachName(
      const std::function<void(const TensorEntry&, std::span<const Named>)>& fn) const {
    return ForEachTensor([&](std::uint32_t n, const TensorEntry& tensor) -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto names, NamesOf(n, tensor.meta.key()));
      fn(tensor, names);
      return {};
    });
  }

  Result<std::string> Metadata() {
    DcpMetadataWriter out;
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachName([&](const TensorEntry& tensor, std::span<const Named> names) {
          const DcpCut cut(tensor.meta, chunk_bytes_);
          for (const Named& name : names) out.AddTensor(name.fqn, tensor.meta, cut);
        }));
    for (const ByteItem& bytes : byte_items_) out.AddBytes(bytes.fqn);
    out.BeginPaths();
    TENSORMOUNT_RETURN_IF_ERROR(ForEachName([&](const TensorEntry&, std::span<const Named> names) {
      for (const Named& name : names) out.AddPath(name.fqn, PlannerPath(name.path, name.fqn));
    }));
    for (const ByteItem& bytes : byte_items_) out.AddPath(bytes.fqn, PathOf(bytes));
    out.BeginItems();
    for (const ByteItem& bytes : byte_items_) out.AddItem(bytes.fqn, bytes.item);
    std::size_t next = 0;
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachName([&](const TensorEntry& tensor, std::span<const Named> names) {
          const DcpCut cut(tensor.meta, chunk_bytes_);
          for (std::uint64_t n = 0; n < cut.chunks(); ++n) {
            const DcpChunk chunk = cut.At(n);
            const DcpItem& item = items_.at(next++);
            for (const Named& name : names) out.AddItem(name.fqn, item, chunk.offsets, n);
          }
        }));
    return out.Finish();
  }

  Result<std::vector<Named>> NamesOf(std::uint32_t n, const std::string& key) const {
    if (const auto found = named_.find(n); found != named_.end()) return found->second;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string stored, StoredTensorKey(shown_, n, key));
    return std::vector<Named>{{key, paths_.Of(key, stored).front()}};
  }

  const CheckpointView& view_;
  const ShownCheckpoint& shown_;
  const std::uint64_t chunk_bytes_;  // Most bytes of a tensor in one item.
  const std::uint64_t files_;
  ExportPlan& plan_;
  CommonState common_;
  SavedPaths paths_;
  // By the number of the tensor, where its key does not say all.
  std::map<std::uint32_t, std::vector<Named>> named_;
  std::vector<std::string> twins_;  // Whose dotted paths others have.
  bool flat_ = false;
  std::vector<ByteItem> byte_items_;
  std::vector<DcpItem> items_;  // Of tensors' chunks, in order.
  std::uint64_t total_ = 1;
  std::uint64_t done_ = 0;
  std::uint32_t file_ = 0;
  FileBuilder builder_;
  std::vector<CrcHole> holes_;
  std::map<std::pair<DType, std::vector<std::int64_t>>, Template> templates_;
};

}  // namespace

Status PlanDcp(const CheckpointView& view, const ExportOptions& options, int files,
               ExportPlan& plan) {
  if (files < 1 || options.dcp_chunk_bytes == 0) {
    return Status(Code::kInvalidArgument, "dcp: one file at least, of pieces of a byte at least");
  }
  return Planner(view, options, files, plan).Run();
}

}  // namespace tensormount::fs
