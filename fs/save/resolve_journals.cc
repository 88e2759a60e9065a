// SPDX-License-Identifier: Apache-2.0
// Turns the records of journals into runs: the bytes that later writes to a target left of earlier
// ones. In targets with records of columns, TensorAssembly removes the replaced bytes instead.
#include "fs/save/resolve_journals.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <unordered_map>

#include "base/checked.h"
#include "base/errors.h"
#include "fs/save/range_map.h"
#include "shard/box_access.h"

namespace tensormount::fs {
namespace {

constexpr std::size_t kMaxProblems = 1000;

// Whether the name is "data/x": a file directly in data/, without further path components.
bool IsDataFile(const std::string& name) {
  return name.starts_with("data/") && name.size() > 5 && name.find('/', 5) == std::string::npos &&
         name.find('\0') == std::string::npos && name != "data/." && name != "data/..";
}

// Turns records of one target into runs. If all records are single ranges, the usual case, a
// RangeMap computes what later records leave of earlier ones. If some are not, all records become
// runs in their order, and TensorAssembly cuts them as boxes.
class RunsOfTarget {
 public:
  RunsOfTarget(const TensorMeta& meta, const TargetRecords& target, std::vector<StagedRun>& out)
      : meta_(meta), target_(target), out_(out) {}

  Status Add() {
    const Result<Region> bytes = ByteRegion(meta_.dtype(), meta_.shape(), target_.target->box);
    if (!bytes.ok()) return bytes.status();
    of_bytes_ = bytes.value().box();
    size_ = static_cast<std::uint64_t>(of_bytes_.volume());
    bool simple = true;
    for (const JournalRecord* record : target_.records) {
      if (record->kind == JournalRecord::Kind::kForget) continue;
      TENSORMOUNT_RETURN_IF_ERROR(CheckExtent(record->extent));
      simple = simple && record->extent.runs == 1;
    }
    return simple ? AddRanges() : AddInOrder();
  }

 private:
  // Checks an extent against the schema, from which regions are made. RecordDecoder checked it only
  // against the journal's own description of the target.
  Status CheckExtent(const StagedExtent& e) const {
    const auto bad = [&] {
      return DataLoss("record of " + std::to_string(e.runs) + " runs of " +
                      std::to_string(e.length) + " bytes from byte " + std::to_string(e.begin) +
                      " on: not within the " + std::to_string(size_) +
                      " bytes of its write target");
    };
    if (e.runs == 0 || !RangeWithin(e.begin, e.length, size_)) return bad();
    const auto stored = CheckedMul(e.runs, e.length);
    if (!stored || *stored > size_ || e.leaves.size() != LeafCount(*stored)) return bad();
    if (e.runs == 1) return Status();
    const auto steps = CheckedMul(e.runs - 1, e.stride);
    if (!steps || e.stride < e.length) return bad();
    const auto last = CheckedAdd(e.begin, *steps);
    if (!last || !RangeWithin(*last, e.length, size_)) return bad();
    return Status();
  }

  StagedRun RunOf(const JournalRecord* record) const {
    StagedRun run;
    run.journal = target_.journal;
    run.target = target_.number;
    run.record = record;
    run.target_box = target_.target->box;
    run.of_bytes = of_bytes_;
    return run;
  }

  Status AddRange(const JournalRecord* record, std::uint64_t at, const ByteRange& range) {
    if (range.begin >= range.end) return Status();
    StagedRun run = RunOf(record);
    run.at = at;
    run.size = range.size();
    run.is_range = true;
    run.begin = range.begin;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        run.bytes, Region::Flat(of_bytes_, Signed(range.begin), Signed(range.size())));
    out_.push_back(std::move(run));
    return Status();
  }

  // Adds the ranges that remain after all records, in O(log n) for each record. They are disjoint,
  // so TensorAssembly finds a partition at once if no other target was written.
  Status AddRanges() {
    // The source of a range is the index of a record, its offset the position in that record's
    // stored bytes.
    RangeMap ranges;
    for (std::size_t i = 0; i < target_.records.size(); ++i) {
      const JournalRecord& record = *target_.records[i];
      if (record.kind == JournalRecord::Kind::kForget) {
        ranges.Erase({record.begin, record.end});
      } else {
        const StagedExtent& e = record.extent;
        ranges.Insert({{e.begin, e.begin + e.length}, 0, static_cast<std::uint32_t>(i), false});
      }
    }
    for (const StoredRange& range : ranges.All()) {
      TENSORMOUNT_RETURN_IF_ERROR(
          AddRange(target_.records[range.source], range.offset, range.bytes));
    }
    return Status();
  }

  // Adds a run for each record. A kForget becomes a run too: TensorAssembly cuts earlier runs of
  // this target with it and then drops it.
  Status AddInOrder() {
    for (const JournalRecord* record : target_.records) {
      if (record->kind == JournalRecord::Kind::kForget) {
        TENSORMOUNT_RETURN_IF_ERROR(
            AddRange(record, 0, {std::min(record->begin, size_), std::min(record->end, size_)}));
      } else if (record->extent.runs == 1) {
        const StagedExtent& e = record->extent;
        TENSORMOUNT_RETURN_IF_ERROR(AddRange(record, 0, {e.begin, e.begin + e.length}));
      } else {
        TENSORMOUNT_RETURN_IF_ERROR(AddRuns(record));
      }
    }
    return Status();
  }

  // Converts runs at a fixed distance to boxes: if the distance is the stride of an axis and no run
  // reaches into the next step of that axis, the first bytes of the runs form boxes on the axes up
  // to this one.
  Status AddRuns(const JournalRecord* record) {
    const StagedExtent& e = record->extent;
    if (e.length == 0) return Status();
    const int rank = of_bytes_.rank();
    const Dims steps = PackedStrides(of_bytes_.extent());
    for (int axis = rank - 1; axis >= 0; --axis) {
      if (static_cast<std::uint64_t>(steps[axis]) != e.stride) continue;
      // Example: a target of 4 x 8 bytes whose columns 2 and 3 came in 4 writes of 2 bytes. Strides
      // are 8 and 1; distance 8 is the stride of axis 0, each run begins at 2 within it and is 2
      // long, so the cells are rows [0, 4) by columns [2, 4), one box.
      const std::uint64_t within = e.begin % e.stride;
      if (within + e.length > e.stride) break;
      TENSORMOUNT_ASSIGN_OR_RETURN(const Region run,
                                   Region::Flat(of_bytes_, Signed(e.begin), Signed(e.length)));
      if (run.is_flat()) break;
      Dims begin;
      Dims extent;
      for (int a = 0; a <= axis; ++a) {
        begin.push_back(of_bytes_.begin(a));
        extent.push_back(of_bytes_.extent(a));
      }
      TENSORMOUNT_ASSIGN_OR_RETURN(const Box outer, Box::Make(begin, extent));
      TENSORMOUNT_ASSIGN_OR_RETURN(const Region firsts,
                                   Region::Flat(outer, Signed(e.begin / e.stride), Signed(e.runs)));
      std::uint64_t at = 0;
      for (const Box& first : firsts.Boxes()) {
        StagedRun staged = RunOf(record);
        staged.at = at;
        staged.size = static_cast<std::uint64_t>(first.volume()) * e.length;
        Box box = run.box();
        for (int a = 0; a <= axis; ++a) {
          box = BoxAccess::WithAxis(box, a, first.begin(a), first.extent(a));
        }
        staged.bytes = Region(box);
        at += staged.size;
        out_.push_back(std::move(staged));
      }
      return Status();
    }
    for (std::uint64_t i = 0; i < e.runs; ++i) {
      const std::uint64_t begin = e.begin + i * e.stride;
      TENSORMOUNT_RETURN_IF_ERROR(AddRange(record, i * e.length, {begin, begin + e.length}));
    }
    return Status();
  }

  const TensorMeta& meta_;
  const TargetRecords& target_;
  std::vector<StagedRun>& out_;
  Box of_bytes_;
  std::uint64_t size_ = 0;
};

// Sorts the records of one journal: goes through them once and keeps for each target its records,
// for each object the last record, and the kCondemn records. Targets are checked against the schema
// at the end, because a target of a withdrawn schema may have been forgotten meanwhile, which is
// allowed.
class Sorter {
 public:
  Sorter(std::uint32_t number, Journal& journal, const StagingSchema& schema,
         SortedJournals& sorted, StagingReport& report)
      : number_(number), journal_(journal), schema_(schema), sorted_(sorted), report_(report) {}

  Status Run() {
    for (const JournalRecord& record : journal_.records) {
      const Status status = Take(record);
      if (!status.ok()) return status.WithContext("journal/" + journal_.name());
    }
    for (auto& [number, target] : targets_) {
      if (target.records.empty()) continue;
      const std::string& key = target.target->key;
      const auto meta = schema_.tensors().find(key);
      if (meta == schema_.tensors().end()) {
        AddProblem(report_, "unknown", "tensor " + key,
                   "written, but not declared in any schema.json");
        continue;
      }
      const auto bytes =
          RegionBytes(meta->second.dtype(), meta->second.shape(), Region(target.target->box));
      if (!bytes.ok() || bytes.value() != sizes_[number] ||
          !(target.target->shape == meta->second.shape()) ||
          target.target->bits != meta->second.bits()) {
        AddProblem(report_, "unknown", "tensor " + key + " " + target.target->box.ToString(),
                   "written when schema.json declared another shape or dtype (mount " +
                       journal_.incarnation + ")");
        continue;
      }
      sorted_.tensors[key].push_back(std::move(target));
    }
    for (auto& [name, object] : objects_) {
      if (object != nullptr) sorted_.objects[name].push_back({number_, object});
    }
    for (const auto& [target, record] : condemned_) {
      AddProblem(report_, "condemned", record->file_name,
                 record->reason + " (mount " + journal_.incarnation + ")");
    }
    return Status();
  }

 private:
  using Kind = JournalRecord::Kind;

  Status CheckFile(std::uint32_t file) const {
    if (file < journal_.files.size() && !journal_.files[file].empty()) return Status();
    return DataLoss("a record refers to file " + std::to_string(file) + ", which was not declared");
  }

  Status Take(const JournalRecord& record) {
    switch (record.kind) {
      case Kind::kFile: {
        if (!IsDataFile(record.file_name))
          return DataLoss("\"" + record.file_name + "\": not the name of a data file");
        if (record.number > journal_.files.size())
          return DataLoss("file numbers are not consecutive");
        if (record.number == journal_.files.size()) journal_.files.emplace_back();
        journal_.files[record.number] = record.file_name;
        return Status();
      }
      case Kind::kTarget: {
        TargetRecords& target = targets_[record.number];
        if (target.target != nullptr)
          return DataLoss("write target " + std::to_string(record.number) + " is declared twice");
        target.journal = number_;
        target.number = record.number;
        target.target = &record.target;
        sizes_[record.number] = record.end;
        return Status();
      }
      case Kind::kExtent:
      case Kind::kForget: {
        const bool extent = record.kind == Kind::kExtent;
        const auto target = targets_.find(extent ? record.extent.target : record.number);
        if (target == targets_.end())
          return DataLoss("a record refers to a write target that was not declared");
        if (extent) TENSORMOUNT_RETURN_IF_ERROR(CheckFile(record.extent.file));
        // A record that discards the whole target also cancels its kCondemn: a program that
        // truncates or removes a condemned file may write it again. Earlier records, maybe for
        // another schema, no longer count.
        if (!extent && record.begin == 0 && record.end >= sizes_[record.number]) {
          condemned_.erase(record.number);
          target->second.records.clear();
          return Status();
        }
        target->second.records.push_back(&record);
        return Status();
      }
      case Kind::kObject:
      case Kind::kRemoveObject: {
        const StagedObject& object = record.object;
        const bool there = record.kind == Kind::kObject;
        if (there && object.length > 0) {
          TENSORMOUNT_RETURN_IF_ERROR(CheckFile(object.file));
          if (object.leaves.size() != LeafCount(object.length)) {
            return DataLoss("object " + object.key + ": wrong number of leaf hashes");
          }
        }
        const auto span = object.index.span();
        objects_[{object.key, {span.begin(), span.end()}}] = there ? &object : nullptr;
        if (!there) {
          const std::string removed = ObjectText(object.key, object.index);
          const auto [from, to] = condemned_.equal_range(kNoFile);
          for (auto it = from; it != to;) {
            it = it->second->file_name == removed ? condemned_.erase(it) : std::next(it);
          }
        }
        return Status();
      }
      case Kind::kCondemn:
        condemned_.emplace(record.number, &record);
        return Status();
    }
    return DataLoss("unknown record kind");
  }

  const std::uint32_t number_;
  Journal& journal_;
  const StagingSchema& schema_;
  SortedJournals& sorted_;
  StagingReport& report_;
  std::map<std::uint32_t, TargetRecords> targets_;
  std::unordered_map<std::uint32_t, std::uint64_t> sizes_;
  std::map<SortedJournals::ObjectName, const StagedObject*> objects_;
  std::multimap<std::uint32_t, const JournalRecord*> condemned_;
};

}  // namespace

// The list is bounded, because a list of millions of holes would not help and could fill the disk.
void AddProblem(StagingReport& report, std::string code, std::string object, std::string detail) {
  if (report.problems.size() >= kMaxProblems) {
    ++report.more;
    return;
  }
  report.problems.push_back({std::move(code), std::move(object), std::move(detail)});
}

// The text is in index notation, so that it can be pasted into a program.
std::string TensorBoxText(const TensorMeta& meta, const Box& box) {
  std::string text = "tensor " + meta.key() + " [";
  for (int a = 0; a < box.rank(); ++a) {
    if (a > 0) text += ", ";
    const bool all = box.begin(a) == 0 && box.extent(a) == meta.shape()[a];
    text += all ? ":" : std::to_string(box.begin(a)) + ":" + std::to_string(box.end(a));
  }
  return text + "]";
}

std::string ObjectText(const std::string& key, const Dims& index) {
  return "object " + key + (index.rank() > 0 ? index.ToString() : "");
}

Result<SortedJournals> SortJournals(std::vector<Journal>& journals, const StagingSchema& schema,
                                    StagingReport& report) {
  SortedJournals sorted;
  std::map<std::string, std::string> owners;
  for (std::size_t i = 0; i < journals.size(); ++i) {
    journals[i].files.clear();
    Sorter sorter(static_cast<std::uint32_t>(i), journals[i], schema, sorted, report);
    TENSORMOUNT_RETURN_IF_ERROR(sorter.Run());
    // A data file belongs to one mount, or it would be unclear who may write to it.
    for (const std::string& file : journals[i].files) {
      const auto [owner, fresh] = owners.emplace(file, journals[i].name());
      if (!fresh) {
        return DataLoss(file + ": declared in both " + owner->second + " and " +
                        journals[i].name());
      }
    }
  }
  return sorted;
}

Result<std::vector<StagedRun>> RunsOf(const TensorMeta& meta,
                                      const std::vector<TargetRecords>& targets) {
  std::vector<StagedRun> runs;
  for (const TargetRecords& target : targets) {
    const Status added = RunsOfTarget(meta, target, runs).Add();
    if (!added.ok()) {
      return DataLoss("tensor " + meta.key() + " " + target.target->box.ToString() + ": " +
                      added.message());
    }
  }
  std::stable_sort(runs.begin(), runs.end(), [](const StagedRun& a, const StagedRun& b) {
    return std::tie(a.journal, a.record) < std::tie(b.journal, b.record);
  });
  return runs;
}

}  // namespace tensormount::fs
