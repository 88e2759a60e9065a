// SPDX-License-Identifier: Apache-2.0
// Exports by all ranks of a job: rank 0 plans the destination, all write their share, and one
// rename makes the result appear. The plan comes from export_plan.h or from a format's own planner;
// all else is shared.
//
//   all ranks      Plan          open the view, make the plan; agree that all could
//   all            AgreeOnPlan   compare identities: ranks that see another source stop here
//   rank 0         Begin         check the destination, make the temporary folder; tell its name
//   all            Share         clone or link files that are stored ones as they are; tell which
//   all            Write         each its ranges; agree
//   all            PutCrcs       exchange CRCs of parts, write them
//   all            Sync          agree that all is durable
//   rank 0         Publish       sync folders, rename; tell
// Every step ends in a collective call, so a rank that failed never leaves others waiting, and all
// return the same verdict.
#include "fs/export/export.h"

#include <chrono>
#include <optional>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/coding.h"
#include "collective/comm/collective.h"
#include "collective/guarded.h"
#include "fs/export/destination.h"
#include "fs/export/export_writer.h"

namespace tensormount::fs {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Whether all ranks have stopped: they all returned from the call that failed.
// After a deadline or a lost rank some may still be writing, and removing what they write would
// race with them.
bool AllStopped(const Status& failure) {
  return failure.code() != Code::kDeadlineExceeded && failure.code() != Code::kUnavailable;
}

// One rank's part of one export, with what its steps hand to each other. Exceptions (no memory)
// become a Status of the step (Guarded).
class Job {
 public:
  Job(FileSystem& fs, const std::string& destination, Communicator& comm,
      const ExportOptions& options)
      : fs_(fs),
        destination_(destination),
        options_(options),
        comm_(comm),
        collective_(comm, options.timeouts, options.cancel) {}

  Result<ExportReport> Run(const Status& before, std::shared_ptr<OpenedCheckpoint> source) {
    const Status status = Steps(before, std::move(source));
    if (status.ok()) return report_;
    // Before Begin there is nothing to clean up.
    if (!temporary_.empty()) return CleanUp(status);
    return status;
  }

 private:
  Status Steps(const Status& before, std::shared_ptr<OpenedCheckpoint> source) {
    auto start = Clock::now();
    Status mine = before;
    if (mine.ok()) mine = Guarded([&] { return Plan(std::move(source)); });
    TENSORMOUNT_RETURN_IF_ERROR(AgreeOnPlan(mine));
    TENSORMOUNT_RETURN_IF_ERROR(Begin());
    report_.plan_seconds = SecondsSince(start);

    start = Clock::now();
    ExportWriter writer(fs_, *view_, plan_, temporary_, comm_.rank(), comm_.size(), options_);
    TENSORMOUNT_RETURN_IF_ERROR(Share(writer));
    mine = Guarded([&] { return writer.Write(); });
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(mine, "export: write"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto crcs,
                                 collective_.AllGather(writer.PartialCrcs(), "export: CRCs"));
    report_.write_seconds = SecondsSince(start);

    start = Clock::now();
    mine = Guarded([&]() -> Status {
      TENSORMOUNT_RETURN_IF_ERROR(writer.PutCrcs(crcs));
      return writer.Sync();
    });
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(mine, "export: sync"));
    ByteWriter written;
    written.U64(writer.bytes_written());
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto all,
                                 collective_.AllGather(written.bytes(), "export: report"));
    for (const std::string& one : all) report_.bytes_written += ByteReader(one, "report").U64();
    TENSORMOUNT_RETURN_IF_ERROR(Publish());
    report_.sync_seconds = SecondsSince(start);
    return {};
  }

  Status Plan(std::shared_ptr<OpenedCheckpoint> source) {
    CheckpointView::Options how;
    // Any but 0, which is the mount's own.
    how.slot = 1;
    how.name = source->name();
    how.list_views = true;
    // Every byte is compared with its hash: the copy must not carry damage on without a word.
    how.verify = ServeVerify::kAlways;
    how.map = options_.map;
    how.hf = options_.hf;
    source_ = source->directory();
    TENSORMOUNT_ASSIGN_OR_RETURN(view_, CheckpointView::Of(fs_, std::move(source), {}, how));
    TENSORMOUNT_ASSIGN_OR_RETURN(plan_, MakeExportPlan(*view_, options_, comm_.size(),
                                                       ExportDestination::RoomAt(destination_)));
    report_.files = plan_.files.size();
    report_.tensors = plan_.tensors;
    report_.bytes = plan_.bytes;
    report_.notes = plan_.notes;
    return {};
  }

  Status AgreeOnPlan(const Status& mine) {
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(mine, "export: plan"));
    // Ranks that were called for different things would each be told that theirs is there.
    TENSORMOUNT_RETURN_IF_ERROR(
        AgreeOn(fmt::format("{}, {}{}", destination_, ExportFormatName(options_.format),
                            options_.replace ? ", replaced" : ""),
                "export: same call", [](int rank, const std::string& a, const std::string& b) {
                  return fmt::format("export: to {} on rank 0, and to {} on rank {}", a, b, rank);
                }));
    ByteWriter identity;
    identity.Hash(plan_.Identity());
    return AgreeOn(identity.bytes(), "export: same plan",
                   [](int rank, const std::string&, const std::string&) {
                     return fmt::format(
                         "ranks 0 and {} see different sources, or have other rules for keys",
                         rank);
                   });
  }

  template <typename Words>
  Status AgreeOn(std::string_view mine, std::string_view phase, const Words& words) {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto all, collective_.AllGather(mine, phase));
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank] == all[0]) continue;
      return Status(Code::kInvalidArgument, words(static_cast<int>(rank), all[0], all[rank]));
    }
    return {};
  }

  // Rank 0 looks at the destination and makes the temporary folder.
  Status Begin() {
    Result<std::string> made = Status(Code::kInternal, "rank 0's");
    if (comm_.rank() == 0) {
      const Status status = Guarded([&]() -> Status {
        std::vector<std::string> sources = {source_};
        const OpenedCheckpoint& opened = view_->opened();
        if (!opened.index().info().self_contained) {
          for (std::uint32_t n = 0; n < opened.index().files().size(); ++n) {
            sources.push_back(opened.FilePath(n));
          }
        }
        TENSORMOUNT_ASSIGN_OR_RETURN(
            rank0_, ExportDestination::Prepare(fs_, destination_, options_, plan_,
                                               std::move(sources), report_.warnings));
        return {};
      });
      if (status.ok()) {
        made = rank0_->temporary();
      } else {
        made = status;
      }
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(temporary_, collective_.Broadcast(made, "export: begin"));
    // "NAME.12345678.tmp"
    // The absolute path is known to rank 0 alone; the others take it from here.
    report_.path = temporary_.substr(0, temporary_.size() - 13);
    return {};
  }

  Status Share(ExportWriter& writer) {
    bool any = false;
    for (const ExportFile& file : plan_.files) any = any || file.backed;
    // No exchange then.
    if (!any) return {};  // On all ranks alike.
    ByteWriter mine;
    // A rank that cannot share anything says so with an empty list; its files are written.
    (void)Guarded([&] {
      for (const ExportWriter::Shared& file : writer.ShareFiles()) {
        mine.U32(file.file);
        mine.U8(file.linked ? 1 : 0);
      }
      return Status();
    });
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto all,
                                 collective_.AllGather(mine.bytes(), "export: share"));
    std::vector<ExportWriter::Shared> shared;
    for (const std::string& one : all) {
      ByteReader in(one, "shared files");
      while (in.left() > 0) {
        const std::uint32_t file = in.U32();
        shared.push_back({.file = file, .linked = in.U8() != 0});
        ++(shared.back().linked ? report_.files_linked : report_.files_cloned);
      }
    }
    writer.Skip(shared);
    return {};
  }

  Status Publish() {
    // All have written: who is cancelled from now on waits for the verdict.
    collective_.IgnoreCancel();
    Result<std::string> done = std::string();
    if (comm_.rank() == 0) {
      const Status status = Guarded([&]() -> Status {
        TENSORMOUNT_RETURN_IF_ERROR(CheckNotCancelled(options_));
        // Deepest first, as their entries are made durable upwards.
        for (auto folder = plan_.folders.rbegin(); folder != plan_.folders.rend(); ++folder) {
          TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(JoinPath(temporary_, *folder)));
        }
        if (plan_.folder) TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(temporary_));
        return rank0_->Publish();
      });
      if (!status.ok()) done = status;
    }
    const Status told = collective_.Broadcast(done, "export: publish").status();
    // So rank 0 neither discards it nor tells that it is left.
    // Past this point the temporary name is gone, whatever the others heard.
    if (done.ok()) published_ = comm_.rank() == 0;
    return told;
  }

  Status CleanUp(const Status& failure) {
    const auto left = [&](std::string_view why) {
      return failure.WithMessage(fmt::format("{}; {} {}", failure.message(), temporary_, why));
    };
    if (published_) return failure;
    if (!AllStopped(failure)) return left("is left: remove it when no rank writes to it any more");
    // All ranks must say the same: what rank 0 could not remove, it only warns of.
    if (comm_.rank() != 0 || !rank0_) return failure;
    const Status removed = Guarded([&] { return rank0_->Discard(); });
    if (!removed.ok()) return left("is left: " + removed.message());
    if (failure.code() != Code::kCancelled) return failure;
    return Status(Code::kCancelled, failure.message() + "; what was written is removed");
  }

  FileSystem& fs_;
  const std::string& destination_;
  const ExportOptions& options_;
  Communicator& comm_;
  Collective collective_;
  std::string source_;
  std::shared_ptr<const CheckpointView> view_;
  ExportPlan plan_;
  std::optional<ExportDestination> rank0_;
  std::string temporary_;
  bool published_ = false;
  ExportReport report_;
};

}  // namespace

Result<ExportReport> Export(FileSystem& fs, const Status& before,
                            std::shared_ptr<OpenedCheckpoint> source,
                            const std::string& destination, Communicator& comm,
                            const ExportOptions& options) {
  return Job(fs, destination, comm, options).Run(before, std::move(source));
}

nlohmann::ordered_json ExportJson(const ExportReport& report, ExportFormat format, int ranks) {
  return {{"path", report.path},
          {"format", ExportFormatName(format)},
          {"ranks", ranks},
          {"files", report.files},
          {"tensors", report.tensors},
          {"bytes", report.bytes},
          {"bytes_written", report.bytes_written},
          {"files_cloned", report.files_cloned},
          {"files_linked", report.files_linked},
          {"plan_seconds", report.plan_seconds},
          {"write_seconds", report.write_seconds},
          {"sync_seconds", report.sync_seconds},
          {"notes", report.notes}};
}

}  // namespace tensormount::fs
