// SPDX-License-Identifier: Apache-2.0
// Exports by all ranks of a job. Rank 0 prepares the destination, all ranks write their share, and
// one rename publishes the result. Only the plan depends on the format (export_plan.h).
//
//   all ranks      Plan          open the view, make the plan; agree that all succeeded
//   all            AgreeOnPlan   compare identities: ranks that see another source stop here
//   rank 0         Begin         check the destination, make the temporary directory; send its name
//   all            Share         clone or link files that equal stored files; exchange which
//   all            Write         write own ranges; agree
//   all            PutCrcs       exchange CRCs of parts, write them
//   all            Sync          agree that all is durable
//   rank 0         Publish       sync directories, rename; send the verdict
// Every step ends in a collective call, so a failed rank never leaves others waiting and all ranks
// return the same verdict.
#include "fs/export/export.h"

#include <chrono>
#include <optional>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/coding.h"
#include "base/file_system_for.h"
#include "collective/comm/collective.h"
#include "collective/guarded.h"
#include "fs/export/bucket_export.h"
#include "fs/export/destination.h"
#include "fs/export/export_writer.h"

namespace tensormount::fs {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Whether no rank is still writing after this failure. After a timeout or a lost rank some ranks
// may be, so files must not be removed.
bool AllStopped(const Status& failure) {
  return failure.code() != Code::kDeadlineExceeded && failure.code() != Code::kUnavailable;
}

// One rank's part of an export, with the state that its steps share. Guarded converts exceptions,
// such as std::bad_alloc, to the Status of the step.
class ExportJob {
 public:
  // `fs`: null only if Run is called with an error.
  ExportJob(FileSystem* fs, const std::string& destination, Communicator& comm,
            const ExportOptions& options)
      : fs_(fs),
        destination_(destination),
        options_(options),
        comm_(comm),
        collective_(comm, options.timeouts, options.cancel) {}

  Result<ExportReport> Run(const Status& before, std::shared_ptr<OpenedCheckpoint> source) {
    const Status status = Steps(before, std::move(source));
    if (status.ok()) return report_;
    // Until Begin has succeeded there is nothing to clean up.
    if (!temporary_.empty()) return CleanUp(status);
    return status;
  }

 private:
  Status Steps(const Status& before, std::shared_ptr<OpenedCheckpoint> source) {
    auto start = Clock::now();
    Status mine = before;
    if (mine.ok()) mine = Guarded([&] { return Plan(std::move(source)); });
    TENSORMOUNT_RETURN_IF_ERROR(AgreeOnPlan(mine));
    if (ObjectWriter* const bucket = fs_->object_writer()) return ToBucket(*bucket, start);
    TENSORMOUNT_RETURN_IF_ERROR(Begin());
    report_.plan_seconds = SecondsSince(start);

    start = Clock::now();
    ExportWriter writer(*fs_, *view_, plan_, temporary_, comm_.rank(), comm_.size(), options_);
    TENSORMOUNT_RETURN_IF_ERROR(Share(writer));
    mine = Guarded([&] { return writer.Write(); });
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(mine, "export: write the files"));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto crcs,
        collective_.AllGather(writer.PartialCrcs(), "export: join the checksums of the files"));
    report_.write_seconds = SecondsSince(start);

    start = Clock::now();
    mine = Guarded([&]() -> Status {
      TENSORMOUNT_RETURN_IF_ERROR(writer.PutCrcs(crcs));
      return writer.Sync();
    });
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(mine, "export: sync the files"));
    TENSORMOUNT_RETURN_IF_ERROR(AddUpWritten(writer.bytes_written()));
    TENSORMOUNT_RETURN_IF_ERROR(Publish());
    report_.sync_seconds = SecondsSince(start);
    return {};
  }

  Status AddUpWritten(std::uint64_t by_this_rank) {
    ByteWriter written;
    written.U64(by_this_rank);
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const auto all,
        collective_.AllGather(written.bytes(), "export: add up the sizes of the files"));
    for (const std::string& one : all) report_.bytes_written += ByteReader(one, "report").U64();
    return {};
  }

  // Every rank sends objects of its own; rank 0 sends those by which readers find the others when
  // all are there.
  Status ToBucket(ObjectWriter& writer, Clock::time_point start) {
    report_.path = WithoutTrailingSlashes(destination_);
    BucketExport job(writer, *view_, plan_, report_.path, comm_.rank(), comm_.size(), options_);
    const auto by_rank0 = [&](const auto& step, std::string_view phase) -> Status {
      Result<std::string> done = std::string();
      if (comm_.rank() == 0) {
        const Status status = Guarded(step);
        if (!status.ok()) done = status;
      }
      return collective_.Broadcast(done, phase).status();
    };
    TENSORMOUNT_RETURN_IF_ERROR(
        by_rank0([&] { return job.Prepare(); }, "export: check the destination"));
    report_.plan_seconds = SecondsSince(start);
    start = Clock::now();
    Status status = collective_.Agree(Guarded([&] { return job.Put(); }), "export: send the files");
    if (status.ok()) {
      collective_.IgnoreCancel();
      status = by_rank0([&] { return job.PutLast(); }, "export: publish the files");
    }
    if (!status.ok()) {
      // Of a file that readers find the others by, rank 0 alone knows whether it is there.
      if (!AllStopped(status)) {
        return status.WithMessage(status.message() + "; objects below " + report_.path +
                                  " may have been left behind");
      }
      const Status removed = Guarded([&] { return job.Discard(); });
      if (removed.ok()) return status;
      return status.WithMessage(status.message() + "; objects below " + report_.path +
                                " remain: " + removed.message());
    }
    TENSORMOUNT_RETURN_IF_ERROR(AddUpWritten(job.bytes_written()));
    report_.write_seconds = SecondsSince(start);
    return {};
  }

  Status Plan(std::shared_ptr<OpenedCheckpoint> source) {
    CheckpointView::Options how;
    // Any slot but 0, which would mean the mount itself.
    how.slot = 1;
    how.name = source->name();
    how.list_views = true;
    // Every byte is checked against its hash, so that damage is never copied silently.
    how.verify = ServeVerify::kAlways;
    how.map = options_.map;
    how.hf = options_.hf;
    source_ = source->directory();
    TENSORMOUNT_ASSIGN_OR_RETURN(view_, CheckpointView::FromOpened(std::move(source), {}, how));
    TENSORMOUNT_ASSIGN_OR_RETURN(plan_, MakeExportPlan(*view_, options_, comm_.size(),
                                                       ExportDestination::RoomAt(destination_)));
    report_.files = plan_.files.size();
    report_.tensors = plan_.tensors;
    report_.bytes = plan_.bytes;
    report_.notes = plan_.notes;
    return {};
  }

  Status AgreeOnPlan(const Status& mine) {
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(mine, "export: plan the files"));
    // Without this check, ranks with different arguments would each report that their own export
    // succeeded.
    TENSORMOUNT_RETURN_IF_ERROR(AgreeOn(
        fmt::format("{}, {}{}", destination_, ExportFormatName(options_.format),
                    options_.replace ? ", replaced" : ""),
        "export: compare the ranks' arguments",
        [](int rank, const std::string& a, const std::string& b) {
          return fmt::format(
              "export: ranks were called with different arguments: {} on rank 0, {} on rank {}", a,
              b, rank);
        }));
    ByteWriter identity;
    identity.Hash(plan_.Identity());
    return AgreeOn(identity.bytes(), "export: compare the ranks' plans",
                   [](int rank, const std::string&, const std::string&) {
                     return fmt::format(
                         "export: ranks 0 and {} have different sources or different key rules",
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

  // Rank 0 checks the destination and makes the temporary directory.
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
            rank0_, ExportDestination::Prepare(*fs_, destination_, options_, plan_,
                                               std::move(sources), report_.warnings));
        return {};
      });
      if (status.ok()) {
        made = rank0_->temporary();
      } else {
        made = status;
      }
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(temporary_,
                                 collective_.Broadcast(made, "export: create the files"));
    // Strips ".12345678.tmp". Only rank 0 knows the absolute path; the other ranks derive it from
    // the name that rank 0 sent.
    report_.path = temporary_.substr(0, temporary_.size() - 13);
    return {};
  }

  Status Share(ExportWriter& writer) {
    bool any = false;
    for (const ExportFile& file : plan_.files) any = any || file.backed;
    // All ranks have the same plan, so all return here and none waits for an exchange.
    if (!any) return {};
    ByteWriter mine;
    // If this throws, no file counts as shared: those that are not linked yet are written. A file
    // that is linked already cannot be written, and the export then fails.
    (void)Guarded([&] {
      for (const ExportWriter::SharedExportFile& file : writer.ShareFiles()) {
        mine.U32(file.file);
        mine.U8(file.linked ? 1 : 0);
      }
      return Status();
    });
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto all,
                                 collective_.AllGather(mine.bytes(), "export: link the files"));
    std::vector<ExportWriter::SharedExportFile> shared;
    for (const std::string& one : all) {
      ByteReader in(one, "list of linked files");
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
    // All ranks have finished writing, so a rank that is cancelled now still waits for the verdict.
    collective_.IgnoreCancel();
    Result<std::string> done = std::string();
    if (comm_.rank() == 0) {
      const Status status = Guarded([&]() -> Status {
        TENSORMOUNT_RETURN_IF_ERROR(CheckNotCancelled(options_));
        // Subdirectories are synced before their parents, whose sync makes the entries durable.
        for (auto folder = plan_.folders.rbegin(); folder != plan_.folders.rend(); ++folder) {
          TENSORMOUNT_RETURN_IF_ERROR(fs_->SyncDirectory(JoinPath(temporary_, *folder)));
        }
        if (plan_.folder) TENSORMOUNT_RETURN_IF_ERROR(fs_->SyncDirectory(temporary_));
        return rank0_->Publish();
      });
      if (!status.ok()) done = status;
    }
    const Status told = collective_.Broadcast(done, "export: publish the files").status();
    // If rank 0 has published, the temporary name does not exist any more, even if the broadcast
    // failed. So rank 0 must not remove it or report it as left.
    if (done.ok()) published_ = comm_.rank() == 0;
    return told;
  }

  Status CleanUp(const Status& failure) {
    const auto left = [&](std::string_view why) {
      return failure.WithMessage(fmt::format("{}; {} {}", failure.message(), temporary_, why));
    };
    if (published_) return failure;
    if (!AllStopped(failure))
      return left("was left behind; remove it when no rank writes to it any more");
    // Only rank 0 removes the files; the other ranks return the failure itself.
    if (comm_.rank() != 0 || !rank0_) return failure;
    const Status removed = Guarded([&] { return rank0_->Discard(); });
    if (!removed.ok()) return left("remains: " + removed.message());
    if (failure.code() != Code::kCancelled) return failure;
    return Status(Code::kCancelled, failure.message() + "; the files written so far were removed");
  }

  FileSystem* fs_;
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
  return ExportJob(&fs, destination, comm, options).Run(before, std::move(source));
}

Result<ExportReport> Export(const Status& before, std::shared_ptr<OpenedCheckpoint> source,
                            const std::string& destination, Communicator& comm,
                            const ExportOptions& options) {
  const Result<FileSystem*> fs = FileSystemFor(destination);
  return ExportJob(fs.ok() ? fs.value() : nullptr, destination, comm, options)
      .Run(before.ok() ? fs.status() : before, std::move(source));
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
