// SPDX-License-Identifier: Apache-2.0
// Publishes what mounts wrote: resolves their journals, assembles tensors, compares cells that two
// mounts wrote, writes manifests and publishes through the store. On failure the report lists
// the problems, and the staging can still be written to and published.
#include "fs/save/publish.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>

#include "base/checked.h"
#include "fs/save/journal.h"
#include "fs/save/resolve_journals.h"
#include "fs/save/schema.h"
#include "fs/save/staged_manifests.h"
#include "fs/save/staged_reader.h"
#include "fs/save/staged_reuse.h"
#include "fs/save/staging_common.h"
#include "fs/save/staging_folder.h"
#include "fs/save/tensor_assembly.h"
#include "index/records/common_state.h"
#include "shard/leaf_hash.h"

// docs/format.md, "Staging of mounts", describes how journals become manifests. The bytes of files
// that mounts wrote are not changed; the publisher adds manifests and perhaps a patch file, which a
// retry makes anew, and links to files of the base.

namespace tensormount::fs {
namespace {

constexpr std::string_view kJournalSuffix = ".tmj";
constexpr std::uint64_t kWidestElement = 16;  // In bytes.
constexpr const char* kProducer = "tensormount 0.1 (mount)";

// One attempt to publish. Run has the steps. The steps before Verdict only read (apart from the
// patch file). Once all done marks and their journals exist, they add problems to the report
// instead of stopping at the first one, because the operator of a thousand ranks needs the whole
// list.
class Publisher {
 public:
  Publisher(const Store& store, FileSystem& fs, Staging staging, StagingReport& report)
      : store_(store), fs_(fs), staging_(std::move(staging)), report_(report) {}

  Result<Store::Published> Run(const std::string& as) {
    TENSORMOUNT_RETURN_IF_ERROR(Gather());
    StagedReader reader(fs_, staging_.directory, journals_);
    PatchFile patches(fs_, staging_);
    TENSORMOUNT_RETURN_IF_ERROR(CheckObjects());
    TENSORMOUNT_RETURN_IF_ERROR(AssembleTensors(reader, patches));
    const Result<Inventory> coordinator = Coordinator();
    if (!coordinator.ok()) {
      if (coordinator.status().code() == Code::kInvalidArgument && report_.problems.empty()) {
        AddProblem(report_, "bad_common", "staging " + staging_.name,
                   coordinator.status().message());
      }
      return coordinator.status();
    }
    TENSORMOUNT_RETURN_IF_ERROR(Verdict());

    TENSORMOUNT_RETURN_IF_ERROR(DropManifests());
    StagedManifests manifests(staging_, journals_);
    TENSORMOUNT_RETURN_IF_ERROR(Fill(manifests, patches));
    if (manifests.needs_patch_file()) TENSORMOUNT_RETURN_IF_ERROR(patches.Open());
    TENSORMOUNT_RETURN_IF_ERROR(patches.Finish());
    // The store checks and commits as for a save by the library; `shared`: several mounts wrote
    // this staging.
    const auto publish = [&]() -> Result<Store::Published> {
      TENSORMOUNT_RETURN_IF_ERROR(manifests.Write(fs_, patches));
      Staging named = staging_;
      named.name = as;
      Store::PublishOptions options;
      options.shared = true;
      return store_.Publish(named, coordinator.value(), options);
    };
    Result<Store::Published> published = publish();
    // The files of this attempt are removed only while the staging is in place: after a rename they
    // belong to the checkpoint.
    if (!published.ok() && IsStagingInPlace(fs_, staging_)) {
      patches.Discard();
      (void)DropManifests();  // On failure the next attempt drops them.
    }
    return published;
  }

 private:
  struct AssembledTensor {
    const TensorMeta* meta = nullptr;  // Points into the schema.
    std::vector<StagedChunk> chunks;
  };
  struct CheckedObject {
    std::uint32_t journal = 0;
    const StagedObject* object = nullptr;  // Points into a journal or moved_objects_.
    Dims grid;
  };
  // A range of a written file that the checkpoint needs: a chunk or an object.
  struct LiveRange {
    std::uint32_t bits = 0;  // Bits of an element; 0: an object.
    std::uint32_t journal = 0;
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    std::uint64_t length = 0;
    const std::vector<Hash128>* leaves = nullptr;
    StagedChunk* chunk = nullptr;
    CheckedObject* object = nullptr;
  };

  static Status ProblemsError(const StagingReport& report) {
    const StagingReport::Problem& first = report.problems.front();
    const std::uint64_t others = report.problems.size() - 1 + report.more;
    return Status(Code::kDataLoss,
                  first.object + ": " + first.detail +
                      (others > 0 ? " (and " + std::to_string(others) + " more problems)" : ""));
  }
  Status Verdict() const { return report_.problems.empty() ? Status() : ProblemsError(report_); }

  // Reads schema, done marks and journals. Done marks are read first, because the journals are not
  // final before all marks exist.
  Status Gather() {
    TENSORMOUNT_ASSIGN_OR_RETURN(schema_, ReadSchemas(fs_, staging_.directory));
    if (schema_.empty()) {
      return Status(Code::kInvalidArgument,
                    staging_.directory + ": no schema.json declares a tensor or an object");
    }
    std::vector<DoneMark> marks;
    if (schema_.writers()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(marks, ReadDoneMarks(fs_, staging_));
      TENSORMOUNT_RETURN_IF_ERROR(CheckMarks(marks));
    }
    const std::string folder = JoinPath(staging_.directory, "journal");
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs_.List(folder));
    for (const DirectoryEntry& entry : entries) {
      if (entry.name.starts_with('.') || !entry.name.ends_with(kJournalSuffix)) continue;
      Result<Journal> journal = ReadJournal(fs_, JoinPath(folder, entry.name));
      // The journal's head was never synced, so the journal has no valid record. CheckJournalOfMark
      // reports a done mark that relies on this journal.
      if (journal.status().code() == Code::kNotFound) continue;
      if (!journal.ok()) {
        AddProblem(report_, "bad_journal", "journal/" + entry.name, journal.status().message());
        continue;
      }
      if (journal.value().checkpoint != staging_.uuid || journal.value().name() != entry.name) {
        AddProblem(report_, "bad_journal", "journal/" + entry.name,
                   "the journal belongs to another staging directory or another mount");
        continue;
      }
      journals_.push_back(std::move(journal).value());
    }
    report_.mounts = static_cast<std::uint32_t>(journals_.size());
    for (const DoneMark& mark : marks) TENSORMOUNT_RETURN_IF_ERROR(CheckJournalOfMark(mark));
    TENSORMOUNT_ASSIGN_OR_RETURN(sorted_, SortJournals(journals_, schema_, report_));
    return Status();
  }

  Status CheckMarks(std::vector<DoneMark>& marks) {
    const std::uint32_t writers = *schema_.writers();
    std::erase_if(marks, [&](const DoneMark& m) { return m.rank >= writers; });
    std::size_t next = 0;
    for (std::uint32_t rank = 0; rank < writers; ++rank) {
      if (next < marks.size() && marks[next].rank == rank) {
        ++next;
      } else {
        report_.writers_missing.push_back(rank);
      }
    }
    if (report_.writers_missing.empty()) return Status();
    std::string list;
    for (std::size_t i = 0; i < report_.writers_missing.size() && i < 16; ++i) {
      list += (i > 0 ? ", " : "") + std::to_string(report_.writers_missing[i]);
    }
    if (report_.writers_missing.size() > 16) list += ", ...";
    for (const std::uint32_t rank : report_.writers_missing) {
      AddProblem(report_, "not_done", "writer " + std::to_string(rank), "no done mark");
    }
    return Status(Code::kUnavailable, "done marks are missing for " +
                                          std::to_string(report_.writers_missing.size()) + " of " +
                                          std::to_string(writers) + " writers: " + list);
  }

  // kNotFound instead of kDataLoss, so that callers can try again: the journal may not be visible
  // yet (attribute caches of network filesystems).
  Status CheckJournalOfMark(const DoneMark& mark) {
    if (mark.journal.empty()) return Status();
    const auto found = std::find_if(journals_.begin(), journals_.end(),
                                    [&](const auto& j) { return j.name() == mark.journal; });
    const std::uint64_t there = found == journals_.end() ? 0 : found->bytes;
    if (found != journals_.end() && there >= mark.journal_bytes) return Status();
    const std::string detail = found == journals_.end()
                                   ? "journal/" + mark.journal + " is missing"
                                   : "journal/" + mark.journal + " has " + std::to_string(there) +
                                         " bytes, but had " + std::to_string(mark.journal_bytes) +
                                         " when the writer was done";
    const std::string object = "writer " + std::to_string(mark.rank);
    AddProblem(report_, "no_journal", object, detail);
    return Status::FromParts(Code::kNotFound, ENODATA, object + ": " + detail);
  }

  // Adds tensors and objects to the manifests, except those that the base holds byte for byte and
  // that are linked.
  Status Fill(StagedManifests& manifests, PatchFile& patches) {
    StagedReuse reuse(store_, fs_, staging_, journals_);
    reuse.Open(schema_.reuse());
    std::vector<bool> tensors_taken;
    std::vector<bool> objects_taken;
    for (const AssembledTensor& tensor : tensors_) {
      tensors_taken.push_back(reuse.TryReuse(*tensor.meta, tensor.chunks));
    }
    for (const CheckedObject& object : objects_) {
      objects_taken.push_back(reuse.TryReuse(*object.object, object.grid));
    }
    // A failure to reuse does not fail the publish: then all tensors and objects are recorded as
    // written.
    const bool linked = reuse.Link().ok() && reuse.any();
    report_.reused_tensors = reuse.tensors();
    report_.reused_bytes = reuse.bytes();
    report_.reuse_note = reuse.note();
    if (linked) {
      TENSORMOUNT_RETURN_IF_ERROR(CopyLiveRanges(tensors_taken, objects_taken, patches));
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (linked && tensors_taken[i]) continue;
      manifests.AddTensor(*tensors_[i].meta, tensors_[i].chunks);
    }
    for (std::size_t i = 0; i < objects_.size(); ++i) {
      if (linked && objects_taken[i]) continue;
      const StagedObject& object = *objects_[i].object;
      manifests.AddObject(object.length == 0 ? kPublisher : objects_[i].journal, object,
                          objects_[i].grid);
    }
    return Status();
  }

  // Handles written files with bytes that are now taken from the base: if the other, live ranges
  // are less than half of such a file, they are copied into the publisher's file, and no manifest
  // names the written file. Without this, one changed small tensor would keep a whole shared pack.
  // If the disk is full, nothing is copied and the written files are used.
  Status CopyLiveRanges(const std::vector<bool>& tensors_taken,
                        const std::vector<bool>& objects_taken, PatchFile& patches) {
    std::vector<LiveRange> live = LiveRangesOfDeadFiles(tensors_taken, objects_taken);
    if (live.empty()) return Status();
    // Ranges with wide elements come first, so that each range is aligned without gaps.
    std::stable_sort(live.begin(), live.end(),
                     [](const LiveRange& a, const LiveRange& b) { return a.bits > b.bits; });
    const std::uint64_t before = patches.size();
    std::vector<std::uint64_t> offsets;
    const Status copied = CopyRanges(live, patches, offsets);
    if (copied.code() == Code::kResourceExhausted) return patches.TruncateTo(before);
    TENSORMOUNT_RETURN_IF_ERROR(copied);
    for (std::size_t i = 0; i < live.size(); ++i) {
      if (live[i].chunk != nullptr) {
        live[i].chunk->journal = kPublisher;
        live[i].chunk->file = 0;
        live[i].chunk->offset = offsets[i];
      } else {
        StagedObject& object = moved_objects_.emplace_back(*live[i].object->object);
        object.offset = offsets[i];
        live[i].object->journal = kPublisher;
        live[i].object->object = &object;
      }
    }
    return Status();
  }

  std::vector<LiveRange> LiveRangesOfDeadFiles(const std::vector<bool>& tensors_taken,
                                               const std::vector<bool>& objects_taken) {
    struct Use {
      bool taken = false;  // A part of the file's bytes is taken from the base.
      std::uint64_t live_bytes = 0;
      std::vector<LiveRange> ranges;
    };
    std::map<std::pair<std::uint32_t, std::uint32_t>, Use> files;
    const auto add = [&files](const LiveRange& range, bool taken) {
      if (range.journal == kPublisher || range.length == 0) return;
      Use& use = files[{range.journal, range.file}];
      use.taken = use.taken || taken;
      if (taken) return;
      use.live_bytes = CheckedAdd(use.live_bytes, range.length).value_or(UINT64_MAX);
      use.ranges.push_back(range);
    };
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      for (StagedChunk& chunk : tensors_[i].chunks) {
        add({.bits = tensors_[i].meta->bits(),
             .journal = chunk.journal,
             .file = chunk.file,
             .offset = chunk.offset,
             .length = chunk.length,
             .leaves = &chunk.leaves,
             .chunk = &chunk},
            tensors_taken[i]);
      }
    }
    for (std::size_t i = 0; i < objects_.size(); ++i) {
      const StagedObject& object = *objects_[i].object;
      add({.journal = objects_[i].journal,
           .file = object.file,
           .offset = object.offset,
           .length = object.length,
           .leaves = &object.leaves,
           .object = &objects_[i]},
          objects_taken[i]);
    }
    std::vector<LiveRange> live;
    for (const auto& [id, use] : files) {
      if (!use.taken || use.ranges.empty()) continue;
      const Result<FileInfo> info =
          fs_.LinkStat(JoinPath(staging_.directory, journals_[id.first].files[id.second]));
      // StagedManifests::SealFiles reports problems of the file.
      if (!info.ok()) continue;
      const std::uint64_t size = info.value().size;
      if (use.live_bytes >= size - std::min(use.live_bytes, size)) continue;
      live.insert(live.end(), use.ranges.begin(), use.ranges.end());
    }
    return live;
  }

  // Copies the ranges and returns their offsets in the publisher's file. Verifies the journal's
  // hashes, so that damaged bytes are not copied.
  Status CopyRanges(const std::vector<LiveRange>& ranges, PatchFile& patches,
                    std::vector<std::uint64_t>& offsets) const {
    const std::array<std::byte, kWidestElement> zeros{};
    const std::uint64_t odd = patches.size() % kWidestElement;
    if (odd != 0) {
      TENSORMOUNT_RETURN_IF_ERROR(
          patches.Append(zeros.data(), static_cast<std::size_t>(kWidestElement - odd)));
    }
    std::vector<std::byte> leaf(kLeafBytes);
    std::unique_ptr<File> from;
    const LiveRange* open = nullptr;
    for (const LiveRange& range : ranges) {
      if (open == nullptr || open->journal != range.journal || open->file != range.file) {
        TENSORMOUNT_ASSIGN_OR_RETURN(
            from,
            fs_.OpenRead(JoinPath(staging_.directory, journals_[range.journal].files[range.file])));
        open = &range;
      }
      offsets.push_back(patches.size());
      for (std::size_t i = 0; i < range.leaves->size(); ++i) {
        const std::uint64_t at = i * kLeafBytes;
        const auto n = static_cast<std::size_t>(std::min(kLeafBytes, range.length - at));
        TENSORMOUNT_RETURN_IF_ERROR(from->ReadExactAt(range.offset + at, leaf.data(), n));
        if (Xxh3(leaf.data(), n) != (*range.leaves)[i]) {
          return Status(Code::kDataLoss, from->path() + ": checksum mismatch at byte " +
                                             std::to_string(range.offset + at));
        }
        TENSORMOUNT_RETURN_IF_ERROR(patches.Append(leaf.data(), n));
      }
    }
    return Status();
  }

  // Assembles the tensors of the schema in rising order of keys.
  Status AssembleTensors(StagedReader& reader, PatchFile& patches) {
    TensorAssembly assembly(journals_, reader, patches, report_);
    static const std::vector<TargetRecords> kNone;
    for (const auto& [key, meta] : schema_.tensors()) {
      if (meta.bytes() == 0) {
        tensors_.push_back({&meta, {}});
        continue;
      }
      const auto found = sorted_.tensors.find(key);
      TENSORMOUNT_ASSIGN_OR_RETURN(
          std::vector<StagedRun> runs,
          RunsOf(meta, found == sorted_.tensors.end() ? kNone : found->second));
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<StagedRun> left,
                                   assembly.Resolve(meta, std::move(runs)));
      // After a problem nothing is published, so the loop only looks for further problems.
      if (!report_.problems.empty()) continue;
      TENSORMOUNT_ASSIGN_OR_RETURN(std::vector<StagedChunk> chunks, assembly.Emit(meta, left));
      tensors_.push_back({&meta, std::move(chunks)});
    }
    return Status();
  }

  // Checks that every part of every grid was written, and that mounts that wrote the same part
  // wrote equal bytes. Compares leaf hashes only and reads no data.
  Status CheckObjects() {
    for (const auto& [name, claims] : sorted_.objects) {
      const StagedObject& object = *claims.front().object;
      const std::string text = ObjectText(object.key, object.index);
      const auto spec = schema_.objects().find(object.key);
      const Dims grid = spec == schema_.objects().end() ? Dims() : spec->second.grid;
      bool fits = object.index.rank() == grid.rank() && CheckKey(object.key).ok();
      for (int a = 0; fits && a < grid.rank(); ++a) {
        fits = object.index[a] >= 0 && object.index[a] < grid[a];
      }
      if (!fits) {
        AddProblem(report_, "bad_object", text,
                   grid.rank() == 0
                       ? "schema.json declares no grid for this object"
                       : "schema.json has no such part in the grid " + grid.ToString());
        continue;
      }
      for (std::size_t i = 1; i < claims.size(); ++i) {
        const StagedObject& other = *claims[i].object;
        // Both have leaf hashes of the same 64 KiB blocks, so equal hashes mean equal bytes.
        if (other.length == object.length && other.leaves == object.leaves) continue;
        AddProblem(report_, "conflict", text,
                   "differs between mounts " + journals_[claims[0].journal].incarnation + " and " +
                       journals_[claims[i].journal].incarnation);
      }
      report_.bytes_written += object.length;
      objects_.push_back({claims.front().journal, &object, grid});
    }
    for (const auto& [key, spec] : schema_.objects()) MissingParts(key, spec.grid);
    return Status();
  }

  // Reports the parts of a grid that no mount wrote. Iterates over all indexes, the last axis
  // fastest; a grid without axes has one part without an index.
  void MissingParts(const std::string& key, const Dims& grid) {
    Dims index = Dims::Filled(grid.rank(), 0);
    for (;;) {
      const auto span = index.span();
      if (!sorted_.objects.contains({key, {span.begin(), span.end()}})) {
        AddProblem(report_, "missing", ObjectText(key, index), "not written by any mount");
      }
      int a = grid.rank() - 1;
      for (; a >= 0; --a) {
        if (++index[a] < grid[a]) break;
        index[a] = 0;
      }
      if (a < 0) return;
    }
  }

  // The inventory that rank 0 of the library would write: producer, world size, common values.
  Result<Inventory> Coordinator() {
    Inventory coordinator;
    coordinator.info.producer = schema_.producer().empty() ? kProducer : schema_.producer();
    coordinator.info.world_size =
        schema_.writers().value_or(std::max<std::uint32_t>(report_.mounts, 1));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string text, ReadCommonJson(fs_, staging_));
    if (!text.empty()) {
      TENSORMOUNT_ASSIGN_OR_RETURN(coordinator.common, CommonRecordsOf(text));
    }
    if (schema_.content().items.empty()) return coordinator;
    CommonValue& content = coordinator.common[std::string(kContentMetadataRecord)];
    if (content.get_if<CommonDict>() == nullptr) content = CommonValue(CommonDict());
    CommonDict& dict = *content.get_if<CommonDict>();
    for (const auto& [key, value] : schema_.content().items) {
      const auto [there, fresh] = dict.items.emplace(key, value);
      if (fresh || there->second == value) continue;
      const std::string* name = std::get_if<std::string>(&key);
      return Status(Code::kInvalidArgument, "content" +
                                                (name != nullptr ? "." + *name : std::string()) +
                                                ": differs between schema.json and common.json");
    }
    return coordinator;
  }

  // Removes the manifests of an earlier attempt, because the store merges all manifests in
  // manifest/.
  Status DropManifests() {
    const std::string folder = JoinPath(staging_.directory, "manifest");
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs_.List(folder));
    for (const DirectoryEntry& entry : entries) {
      TENSORMOUNT_RETURN_IF_ERROR(fs_.RemoveTree(JoinPath(folder, entry.name)));
    }
    return Status();
  }

  const Store& store_;
  FileSystem& fs_;
  const Staging staging_;
  StagingReport& report_;
  StagingSchema schema_;
  std::vector<Journal> journals_;
  SortedJournals sorted_;
  std::vector<AssembledTensor> tensors_;  // In rising order of keys.
  std::vector<CheckedObject> objects_;
  std::deque<StagedObject> moved_objects_;  // Objects that were copied into the publisher's file.
};

// Writes report.json and report.txt, which tensormount never reads; failures are ignored.
void WriteReport(FileSystem& fs, const Staging& staging, const StagingReport& report) {
  (void)fs.ReplaceFile(JoinPath(staging.directory, "report.json"), report.ToJson());
  (void)fs.ReplaceFile(JoinPath(staging.directory, "report.txt"), report.ToText());
}

Result<Store::Published> TryPublish(const Store& store, FileSystem& fs, const std::string& name,
                                    const std::string& as, StagingReport& report) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckCheckpointName(as));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Staging staging, OpenStaging(store, fs, name));
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<StagingLease> lease,
                               StagingLease::ForPublishing(fs, staging));
  const auto run = [&]() -> Result<Store::Published> {
    if (fs.Exists(store.CheckpointPath(as))) {
      return Status(Code::kAlreadyExists, store.CheckpointPath(as) + ": exists already");
    }
    return Publisher(store, fs, staging, report).Run(as);
  };
  Result<Store::Published> published = run();
  if (published.ok()) return published;
  const Status status = published.status();
  // If the failure came after the rename (fsync of the directory), the checkpoint exists, but may
  // be lost in a power loss (kUnknown).
  if (!IsStagingInPlace(fs, staging)) {
    if (status.code() == Code::kUnknown) return status;
    return Status(Code::kStale, staging.directory +
                                    ": the staging directory was published or removed meanwhile: " +
                                    status.message());
  }
  report.verdict = status.message();
  if (report.problems.empty()) {
    AddProblem(report, std::string(CodeName(status.code())), "staging " + name, status.message());
  }
  WriteReport(fs, staging, report);
  return status;
}

}  // namespace

Result<Store::Published> PublishStaging(const Store& store, FileSystem& fs, const std::string& name,
                                        const std::string& as, StagingReport* report) {
  StagingReport own;
  StagingReport& used = report != nullptr ? *report : own;
  used = StagingReport();
  Result<Store::Published> published = TryPublish(store, fs, name, as, used);
  if (!published.ok()) used.verdict = published.status().message();
  return published;
}

Result<Store::Published> PublishStagingWhenDone(const Store& store, FileSystem& fs,
                                                const std::string& name, const std::string& as,
                                                std::chrono::milliseconds wait,
                                                StagingReport* report) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + wait;
  std::chrono::milliseconds pause{5};
  for (;;) {
    Result<Store::Published> published = PublishStaging(store, fs, name, as, report);
    const Code code = published.status().code();
    if (code != Code::kUnavailable && code != Code::kBusy) return published;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return published;
    std::this_thread::sleep_for(std::min(pause, left));
    pause = std::min(pause * 2, std::chrono::milliseconds(500));
  }
}

}  // namespace tensormount::fs
