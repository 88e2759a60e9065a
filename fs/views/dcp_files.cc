// SPDX-License-Identifier: Apache-2.0
// The files of dcp_files.h: items, each of which is a torch archive, are in .distcp files;
// .metadata has their positions.
//
//   __0_0.distcp   one or more data files of about the same size
//     item         a zip archive as torch.save writes it: data.pkl (a tensor over storage "0", or a
//                  value), small fixed entries, and for a tensor data/0 (its bytes)
//   .metadata      a pickle of class Metadata: for each key its type, shape and chunks
//                  (state_dict_metadata) and its path in nested dicts (planner_data); for each
//                  chunk the file, offset and length of its item (storage_data)
//
// Steps: collect the values that are not tensors, measure everything, lay out the items file after
// file, then write .metadata. Of the data only the first bytes of objects are read, to recognize
// objects that are torch archives already.
#include "fs/views/dcp_files.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>

#include <fmt/core.h>

#include "base/checked.h"
#include "fs/formats/dcp_metadata.h"
#include "fs/formats/file_builder.h"
#include "fs/formats/torch_text.h"
#include "index/read/saved_paths.h"

namespace tensormount::fs {
namespace {

// Approximate size of an item's archive without its data, so that many small items are balanced
// between files too.
constexpr std::uint64_t kItemOverhead = 1600;

// An item that is not a tensor: a common value, a part of one, several of them, or an object part.
// `fqn` (fully qualified name) is DCP's term for a key.
struct ByteItem {
  std::string fqn;
  std::string stored;
  // The common value; null if the item is object part number `part`, or `items`.
  const CommonValue* value = nullptr;
  // Path of the item in the common value `stored`, if that was split.
  std::vector<CommonKey> below = {};
  // Path in the state dict, if it does not follow from `stored`.
  std::optional<SavedPath> path = {};
  // If not empty, the item is a list or tuple of these values.
  std::vector<ByteItem> items = {};
  bool tuple = false;
  std::uint32_t part = 0;
  DcpItem item;
};

// Names that Megatron-Core uses: two files, and the key of a sharded object.
constexpr std::string_view kMegatronConfig = "metadata.json";
constexpr std::string_view kMegatronCommon = "common.pt";
constexpr std::string_view kMegatronCommonState = "common_state";

class Planner {
 public:
  Planner(const ShownCheckpoint& shown, const DcpOptions& options)
      : shown_(shown),
        chunk_bytes_(options.chunk_bytes),
        files_(options.files),
        megatron_(options.megatron) {}

  Result<DcpFiles> Run() {
    // With the recorded structures, which have stored keys.
    TENSORMOUNT_ASSIGN_OR_RETURN(common_, shown_.opened.stored_index().Common());
    std::set<std::string, std::less<>> keys;
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachTensor([&](std::uint32_t n, const TensorEntry& tensor) -> Status {
          TENSORMOUNT_ASSIGN_OR_RETURN(std::string stored,
                                       shown_.StoredTensorKey(n, tensor.meta.key()));
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
    TENSORMOUNT_ASSIGN_OR_RETURN(std::string text, Metadata());
    AddText(".metadata", std::move(text));
    if (megatron_) AddMegatronFiles();
    return std::move(out_);
  }

 private:
  Status ForEachTensor(const std::function<Status(std::uint32_t, const TensorEntry&)>& fn) const {
    return shown_.tensors.ForEachEntry(0, shown_.tensors.count(), fn);
  }

  void AddText(std::string_view name, std::string text) {
    FileSegments file;
    file.AddLiteral(std::move(text));
    out_.files.push_back({std::string(name), std::move(file), {}});
  }

  // Adds a note about the values with these names; does nothing if there are none.
  void Note(std::string_view text, std::vector<std::string> names) {
    if (!names.empty()) out_.notes.push_back({std::string(text), std::move(names)});
  }

  // Adds metadata.json, and common.pt: the object of that name, or else the plain common values.
  void AddMegatronFiles() {
    // Megatron-Core 0.16 and 0.19 accept these versions, and write them.
    AddText(kMegatronConfig, R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, )"
                             R"("common_backend": "torch", "common_backend_version": 1})");
    const std::vector<ObjectRecord>& parts = shown_.objects.parts();
    for (std::uint32_t n = 0; n < parts.size(); ++n) {
      if (!IsMegatronFile(parts[n])) continue;
      FileSegments file;
      file.AddObject(n, parts[n].length);
      out_.files.push_back({std::string(kMegatronCommon), std::move(file), {}});
      return;
    }
    PickleWriter pickle(2);
    std::vector<std::string> lost;
    pickle.EmptyDict();
    pickle.Mark();
    for (const auto& [name, value] : common_.values) {
      if (SavedPaths::IsInternal(name)) continue;
      const bool encoded = paths_.IsEncoded(name);
      if (encoded && !CanPickleEncoded(value)) {
        lost.push_back(name);
        continue;
      }
      pickle.String(name);
      if (!encoded || !PickleEncoded(pickle, value)) pickle.Common(value);
    }
    pickle.SetItems();
    Note("common.pt cannot store the values", std::move(lost));
    AddText(kMegatronCommon, Archive(pickle.Finish()));
  }

  // Whether an object is common.pt, which for Megatron-Core is a file and not an item.
  bool IsMegatronFile(const ObjectRecord& object) const {
    return megatron_ && object.grid.rank() == 0 && object.key == kMegatronCommon;
  }

  // Makes a torch archive that contains a pickle and no tensors.
  static std::string Archive(const std::string& pickle) {
    ZipWriter zip;
    std::string text;
    zip.Add("data.pkl", pickle, text);
    AddEntriesBeforeData(zip, text);
    AddEntriesAfterData(zip, text);
    zip.Finish(text);
    return text;
  }

  // Fills byte_items_: objects in the order of their paths, then common values by name, then empty
  // containers. FillListGaps may later move the items of lists to the end.
  Status FindByteItems() {
    std::set<std::string> as_stored;
    const std::vector<ObjectRecord>& parts = shown_.objects.parts();
    for (std::uint32_t n = 0; n < parts.size(); ++n) {
      if (IsMegatronFile(parts[n])) continue;
      ByteItem item{.fqn = {}, .stored = parts[n].key, .value = nullptr, .part = n, .item = {}};
      TENSORMOUNT_ASSIGN_OR_RETURN(item.fqn, shown_.objects.tree().keys().KeyAt(n));
      item.stored = shown_.opened.StoredObjectKey(parts[n].key);
      if (parts[n].grid.rank() > 0) {
        // Parts of sharded objects are named as by Megatron-Core: a path that ends in "/0.3"
        // becomes KEY/shard_0.3_2.4, where 2.4 is the size of the grid.
        const std::string index = Join(parts[n].index);
        item.fqn.resize(item.fqn.size() - index.size());
        item.fqn += fmt::format("shard_{}_{}", index, Join(parts[n].grid));
        item.stored.clear();
      }
      // In an adopted DCP checkpoint a plain value is both a common value and an object, the stored
      // archive. The object is exported, so that the archive stays byte for byte the same.
      if (common_.values.contains(item.fqn)) {
        TENSORMOUNT_ASSIGN_OR_RETURN(const bool archive, IsArchive(n));
        if (archive) as_stored.insert(item.fqn);
      }
      byte_items_.push_back(std::move(item));
    }
    // Megatron-Core takes each item that is not a tensor for a part of a sharded object, so common
    // values are in common.pt instead (AddMegatronFiles).
    if (megatron_) return {};
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
    Note("DCP cannot store the values", std::move(lost));
    for (const SavedPaths::Empty& empty : paths_.empty()) {
      byte_items_.push_back(
          {.fqn = Dotted(empty.path), .stored = {}, .value = &empty.value, .path = empty.path});
    }
    return {};
  }

  // Adds a common value, split as by torch's planners: each entry of a dict, or of a list that
  // contains a dict, becomes an item. A value that would give two items the same name is not split.
  void AddValue(const std::string& name, const CommonValue& value) {
    std::vector<ByteItem> leaves;
    std::vector<CommonKey> below;
    AddLeaves(name, name, value, below, leaves);
    std::set<std::string_view> names;
    // {"a.b": 1, "a": {"b": 2}} would give "a.b" twice, so this dict stays one item.
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

  // Appends the items that a value is split into. An empty dict or list is an item, too. The
  // recursion is as deep as the value.
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

  // Path of an item for planner_data. For an item of a split value: the path of the value, then the
  // path within the value.
  std::vector<CommonKey> PathOf(const ByteItem& item) const {
    if (flat_) return {CommonKey(item.fqn)};
    if (item.below.empty()) return PlannerPath(PathOfValue(item), item.fqn);
    std::vector<CommonKey> path =
        SavedPaths::ToPlannerPath(paths_.OfValue(item.stored, item.stored));
    path.insert(path.end(), item.below.begin(), item.below.end());
    return path;
  }

  SavedPath PathOfValue(const ByteItem& item) const {
    return item.path ? *item.path : paths_.OfValue(item.fqn, item.stored);
  }

  // The path in the form of planner_data. It is only the key if flat_ is set, or if the outermost
  // container is not a dict, because DCP saves dicts.
  std::vector<CommonKey> PlannerPath(const SavedPath& path, const std::string& key) const {
    if (flat_) return {CommonKey(key)};
    if (path.front().kind == PathStep::Kind::kName ||
        path.front().kind == PathStep::Kind::kNumberKey) {
      return SavedPaths::ToPlannerPath(path);
    }
    return {CommonKey(key)};
  }

  static std::string Join(const Dims& numbers) {
    std::string out;
    for (const std::int64_t n : numbers) out += (out.empty() ? "" : ".") + std::to_string(n);
    return out;
  }

  // Fills named_. `names`: the names in use, to which further names of tensors are added.
  Status FindNames(std::set<std::string, std::less<>>& names) {
    return ForEachTensor([&](std::uint32_t n, const TensorEntry& tensor) -> Status {
      const std::string& key = tensor.meta.key();
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::string stored, shown_.StoredTensorKey(n, key));
      const std::vector<SavedPath> paths = paths_.Of(key, stored);
      std::vector<TensorName> found;
      for (const SavedPath& path : paths) {
        std::string fqn = Dotted(path);
        if (fqn == key || (!fqn.empty() && names.insert(fqn).second)) {
          found.push_back({std::move(fqn), path});
        }
      }
      if (found.size() < paths.size()) twins_.push_back(key);
      // Without a usable path the tensor is at the root under its key.
      if (found.empty()) found.push_back({key, {{key, PathStep::Kind::kName}}});
      const bool as_stored =
          found.size() == 1 && found.front().fqn == key && found.front().path == paths.front();
      if (!as_stored) named_.emplace(n, std::move(found));
      return {};
    });
  }

  // Renames an item to the name that torch's planners would give it, if that name is free and not
  // reserved.
  void UsePlannerName(std::set<std::string, std::less<>>& names, ByteItem& item) const {
    SavedPath path = PathFromPlannerKeys(PathOf(item));
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

  // Sets flat_ if a name at the root would be both a value and a container of values. With flat_
  // all values are exported in a flat dict, by their names.
  Status DetectPathConflicts() {
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
          for (const TensorName& name : names) add(PlannerPath(name.path, name.fqn));
          return {};
        }));
    flat_ =
        std::ranges::any_of(values, [&](const CommonKey& key) { return containers.contains(key); });
    if (flat_)
      out_.notes.push_back(
          {"exported as a flat dict, because one path is both a value and a dict or list with "
           "other values",
           {}});
    return {};
  }

  // The items that a list has according to planner_data.
  struct ListItems {
    std::set<std::int64_t> there;
    std::int64_t count = 0;
    // For each position with an item that a pickle can contain: the item's index in byte_items_.
    std::map<std::int64_t, std::size_t> leaves;
    bool tuple = false;
  };
  using Lists = std::map<SavedPath, ListItems>;

  // Converts a path of planner_data: integers are positions in lists, texts are names.
  static SavedPath PathFromPlannerKeys(std::vector<CommonKey> keys) {
    SavedPath path;
    for (CommonKey& key : keys) {
      const bool position = std::holds_alternative<std::int64_t>(key);
      path.push_back(
          {std::move(key), position ? PathStep::Kind::kListItem : PathStep::Kind::kName});
    }
    return path;
  }

  // Adds a path to all lists on it. `leaf`: index in byte_items_ of the item at this path, if it
  // can be nested in another item.
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

  // torch rebuilds lists from planner_data and then requests each item of a list with tensors or
  // dicts, but a list of plain values as one item. So this merges the items of a list of plain
  // values into one item, and adds None for missing items of other lists.
  Status FillListGaps(std::set<std::string, std::less<>>& names) {
    Lists lists;
    for (std::size_t n = 0; n < byte_items_.size(); ++n) {
      AddToLists(lists, PathFromPlannerKeys(PathOf(byte_items_[n])),
                 byte_items_[n].value != nullptr ? std::optional(n) : std::nullopt);
    }
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachTensor([&](std::uint32_t n, const TensorEntry& tensor) -> Status {
          TENSORMOUNT_ASSIGN_OR_RETURN(const auto of, NamesOf(n, tensor.meta.key()));
          for (const TensorName& name : of) {
            AddToLists(lists, PathFromPlannerKeys(PlannerPath(name.path, name.fqn)), std::nullopt);
          }
          return {};
        }));
    for (const auto& [path, container] : paths_.containers()) {
      const auto list = lists.find(PathFromPlannerKeys(SavedPaths::ToPlannerPath(path)));
      if (list == lists.end()) continue;
      list->second.count = std::max(list->second.count, container.items);
      list->second.tuple = container.kind == SavedPaths::Container::Kind::kTuple;
    }
    // Innermost lists come first, because a list that becomes one item is then an item of the list
    // around it (AddLeaf).
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

  // A list that was merged into one item becomes an item of the list that contains it.
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

  // Chooses names and paths, checks that every name is used once, and computes total_.
  Status Measure() {
    std::set<std::string, std::less<>> names;
    const auto twice = [](const std::string& key) {
      return Status(Code::kUnsupported, fmt::format("dcp stores tensors, objects and common values "
                                                    "under one set of names: {} is used twice",
                                                    key));
    };
    // nullopt if the sum exceeds 64 bits.
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
    // Empty containers whose name is also that of a tensor or value are left out.
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
        UsePlannerName(names, item);
        if (item.path || Dotted(PathFromPlannerKeys(PathOf(item))) == item.fqn) continue;
        item.below.clear();
        item.path = SavedPath{{item.fqn, PathStep::Kind::kName}};
        twins_.push_back(item.fqn);
      }
    }
    Note("DCP would give several values the same name; renamed or left out", twins_);
    TENSORMOUNT_RETURN_IF_ERROR(DetectPathConflicts());
    if (paths_.nested() && !flat_) {
      TENSORMOUNT_RETURN_IF_ERROR(FillListGaps(names));
      for (std::size_t n = 0; n < byte_items_.size(); ++n) add(kItemOverhead);
    }
    // NextItem multiplies a number up to the total by files_; the product must fit in 64 bits, too.
    if (!total || !CheckedMul(*total, files_)) {
      return Status(Code::kUnsupported, "dcp: too many bytes for one checkpoint");
    }
    total_ = std::max<std::uint64_t>(*total, 1);
    return {};
  }

  // Chooses the file of the next item. All bytes, in order, are divided evenly among the files, and
  // an item goes to the file in whose share it begins, so that files have about the same size.
  void NextItem(std::uint64_t bytes) {
    const auto wanted = static_cast<std::uint32_t>(std::min(done_ * files_ / total_, files_ - 1));
    if (wanted != file_) {
      FinishFile();
      file_ = wanted;
    }
    done_ += bytes + kItemOverhead;
  }

  // Ends the current file. Templates refer to the text kept in its builder, so they are cleared,
  // too.
  void FinishFile() {
    if (builder_.size() > 0) {
      out_.files.push_back({DcpFileName(file_), builder_.Finish(), std::move(holes_)});
    }
    builder_ = FileBuilder();
    holes_.clear();
    templates_.clear();
  }

  // Adds the holes of an item's archive, which begins at `begin` of the data file.
  void AddHoles(const std::vector<CrcHole>& of_item, std::uint64_t begin) {
    for (CrcHole hole : of_item) {
      hole.covered = {hole.covered.begin + begin, hole.covered.end + begin};
      for (std::uint64_t& position : hole.positions) position += begin;
      holes_.push_back(hole);
    }
  }

  // The text of the archive before and after a chunk's data. It is the same for all chunks of one
  // type and shape.
  struct Template {
    ByteRange head;  // Range of the text kept in builder_.
    ByteRange tail;
    std::vector<CrcHole> holes;
  };
  // A model has few combinations of type and shape but may have a million tensors, so text and
  // holes are made once for each combination in a data file.
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
    it->second = {
        .head = builder_.StoreText(head), .tail = builder_.StoreText(tail), .holes = zip.holes()};
    return it->second;
  }

  // Adds the chunks of a tensor as items. Metadata() reads items_ in the same order.
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

  // Whether an object's bytes already are a torch archive, judged by its first entry.
  Result<bool> IsArchive(std::uint32_t part) const {
    const std::uint64_t length = shown_.objects.parts()[part].length;
    // A local zip header has 30 bytes, then the name; the length of the name is at offset 26.
    char head[30 + 256];
    const std::size_t size = std::min<std::uint64_t>(length, sizeof head);
    if (size < 30) return false;
    TENSORMOUNT_RETURN_IF_ERROR(
        shown_.opened.ReadObject(shown_.objects.parts()[part], 0, head, size));
    const std::string_view text(head, size);
    const std::size_t name = static_cast<unsigned char>(head[26]) +
                             std::size_t{256} * static_cast<unsigned char>(head[27]);
    return text.starts_with("PK\x03\x04") && text.substr(30, name).ends_with("/data.pkl");
  }

  // Writes an item's value as a pickle. The recursion is as deep as lists are nested in its path.
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
      builder_.Add(Archive(pickle.Finish()));
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

  // Adds an object that is not a torch archive as a Python bytes object: data.pkl is BINBYTES8, the
  // object's bytes, which are not read here, and STOP.
  void AddOpaque(std::uint32_t part, std::uint64_t length) {
    const std::string before = PickleWriter::BytesHead(length);
    ZipWriter zip;
    std::string head;
    std::string tail = ".";  // STOP, which ends the pickle.
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

  // A name of a tensor and its path in the state dict. A tied tensor has several names in DCP, but
  // its bytes are exported once.
  struct TensorName {
    std::string fqn;
    SavedPath path;
  };

  // Calls `fn` for each tensor with all its names, in the order of the calls of AddTensor.
  Status ForEachName(
      const std::function<void(const TensorEntry&, std::span<const TensorName>)>& fn) const {
    return ForEachTensor([&](std::uint32_t n, const TensorEntry& tensor) -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(const auto names, NamesOf(n, tensor.meta.key()));
      fn(tensor, names);
      return {};
    });
  }

  Result<std::string> Metadata() {
    DcpMetadataWriter out;
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachName([&](const TensorEntry& tensor, std::span<const TensorName> names) {
          const DcpCut cut(tensor.meta, chunk_bytes_);
          for (const TensorName& name : names) out.AddTensor(name.fqn, tensor.meta, cut);
        }));
    for (const ByteItem& bytes : byte_items_) out.AddBytes(bytes.fqn);
    out.BeginPaths();
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachName([&](const TensorEntry&, std::span<const TensorName> names) {
          for (const TensorName& name : names)
            out.AddPath(name.fqn, PlannerPath(name.path, name.fqn));
        }));
    for (const ByteItem& bytes : byte_items_) out.AddPath(bytes.fqn, PathOf(bytes));
    out.BeginItems();
    for (const ByteItem& bytes : byte_items_) out.AddItem(bytes.fqn, bytes.item);
    std::size_t next = 0;
    TENSORMOUNT_RETURN_IF_ERROR(
        ForEachName([&](const TensorEntry& tensor, std::span<const TensorName> names) {
          const DcpCut cut(tensor.meta, chunk_bytes_);
          for (std::uint64_t n = 0; n < cut.chunks(); ++n) {
            const DcpChunk chunk = cut.At(n);
            const DcpItem& item = items_.at(next++);
            for (const TensorName& name : names) out.AddItem(name.fqn, item, chunk.offsets, n);
          }
        }));
    return out.Finish();
  }

  Result<std::vector<TensorName>> NamesOf(std::uint32_t n, const std::string& key) const {
    if (const auto found = named_.find(n); found != named_.end()) return found->second;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string stored, shown_.StoredTensorKey(n, key));
    return std::vector<TensorName>{{key, paths_.Of(key, stored).front()}};
  }

  const ShownCheckpoint& shown_;
  const std::uint64_t chunk_bytes_;  // DcpOptions::chunk_bytes.
  const std::uint64_t files_;
  const bool megatron_;
  DcpFiles out_;
  CommonState common_;
  SavedPaths paths_;
  // The names, by tensor number, of tensors whose name and path do not follow from the key.
  std::map<std::uint32_t, std::vector<TensorName>> named_;
  // Names and keys of what is renamed or left out, because another tensor or value has the name.
  std::vector<std::string> twins_;
  bool flat_ = false;
  std::vector<ByteItem> byte_items_;
  std::vector<DcpItem> items_;  // Items of the chunks of all tensors.
  std::uint64_t total_ = 1;
  std::uint64_t done_ = 0;
  std::uint32_t file_ = 0;
  FileBuilder builder_;
  std::vector<CrcHole> holes_;
  std::map<std::pair<DType, std::vector<std::int64_t>>, Template> templates_;
};

}  // namespace

bool IsMegatronCheckpoint(const ShownCheckpoint& shown) {
  return std::ranges::any_of(shown.objects.parts(), [](const ObjectRecord& object) {
    return object.key == (object.grid.rank() == 0 ? kMegatronCommon : kMegatronCommonState);
  });
}

Result<DcpFiles> MakeDcpFiles(const ShownCheckpoint& shown, const DcpOptions& options) {
  if (options.files < 1 || options.chunk_bytes == 0) {
    return Status(Code::kInvalidArgument,
                  "dcp: the number of files and the chunk size must be at least 1");
  }
  return Planner(shown, options).Run();
}

}  // namespace tensormount::fs
