// SPDX-License-Identifier: Apache-2.0
// Exports by all ranks of a job: rank 0 plans the destination, all write their share, and one
// rename makes the result appear. The plan comes from export_plan.h or from a format's own planner;
// all else is shared.
#include "fs/export/export.h"

#include <chrono>
#include <optional>

#include <fmt/core.h>

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
bool AllStopped(const Status& failure) {
  return failure.code() != Code::kDeadlineExceeded && failure.code() != Code::kUnavailable;
}

class Job {
 public:
  Job(FileSystem& fs, const std::string& destination, Communicator& comm,
      const ExportOptions& options)
      : fs_(fs),
        destination_(destination),
        options_(options),
        comm_(comm),
        collective_(comm, options.timeouts) {}

  Result<ExportReport> Run(const Status& before, std::shared_ptr<OpenedCheckpoint> source) {
    const Status status = Steps(before, std::move(source));
    if (status.ok()) return report_;
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
    ExportWriter writer(fs_, *view_, plan_, temporary_, comm_.rank(), comm_.size(),
                        options_.progress);
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
    how.slot = 1;
    how.name = source->name();
    how.list_views = true;
    how.verify = ServeVerify::kAlways;
    how.map = options_.map;
    how.hf = options_.hf;
    source_ = source->directory();
    TENSORMOUNT_ASSIGN_OR_RETURN(view_, CheckpointView::Of(fs_, std::move(source), {}, how));
    const PlanOptions plan{.format = options_.format,
                           .hf = options_.hf,
                           .dcp_files = comm_.size(),
                           .dcp_piece_bytes = options_.dcp_piece_bytes,
                           .room = ExportDestination::RoomAt(destination_)};
    TENSORMOUNT_ASSIGN_OR_RETURN(plan_, MakeExportPlan(*view_, plan));
    report_.files = plan_.files.size();
    report_.tensors = plan_.tensors;
    report_.bytes = plan_.bytes;
    report_.notes = plan_.notes;
    return {};
  }

  Status AgreeOnPlan(const Status& mine) {
    TENSORMOUNT_RETURN_IF_ERROR(collective_.Agree(mine, "export: plan"));
    ByteWriter identity;
    identity.Hash(plan_.Identity());
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto all,
                                 collective_.AllGather(identity.bytes(), "export: same plan"));
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank] == all[0]) continue;
      return Status(Code::kInvalidArgument,
                    fmt::format("ranks 0 and {} see different sources", rank));
    }
    return {};
  }

  // Rank 0 looks at the destination and makes the temporary folder.
  Status Begin() {
    Result<std::string> made = Status(Code::kInternal, "rank 0's");
    if (comm_.rank() == 0) {
      const Status status = Guarded([&]() -> Status {
        ExportDestination::Options how{.format = options_.format,
                                       .folder = plan_.folder,
                                       .replace = options_.replace,
                                       .bytes = 0,
                                       .written = {},
                                       .sources = {source_}};
        const OpenedCheckpoint& opened = view_->opened();
        if (!opened.index().info().self_contained) {
          for (std::uint32_t n = 0; n < opened.index().files().size(); ++n) {
            how.sources.push_back(opened.FilePath(n));
          }
        }
        for (const ExportFile& file : plan_.files) {
          if (!file.backed) how.bytes += file.size;
          if (plan_.folder && file.name.find('/') == std::string::npos) {
            how.written.insert(file.name);
          }
        }
        TENSORMOUNT_ASSIGN_OR_RETURN(
            rank0_, ExportDestination::Prepare(fs_, destination_, how, report_.warnings));
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
    report_.path = temporary_.substr(0, temporary_.size() - 13);
    return {};
  }

  Status Share(ExportWriter& writer) {
    bool any = false;
    for (const ExportFile& file : plan_.files) any = any || file.backed;
    if (!any) return {};  // On all ranks alike.
    ByteWriter mine;
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
    Result<std::string> done = std::string();
    if (comm_.rank() == 0) {
      const Status status = Guarded([&]() -> Status {
        for (auto folder = plan_.folders.rbegin(); folder != plan_.folders.rend(); ++folder) {
          TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(JoinPath(temporary_, *folder)));
        }
        if (plan_.folder) TENSORMOUNT_RETURN_IF_ERROR(fs_.SyncDirectory(temporary_));
        return rank0_->Publish();
      });
      if (!status.ok()) done = status;
    }
    const Status told = collective_.Broadcast(done, "export: publish").status();
    // Past this point the temporary name is gone, whatever the others heard.
    if (done.ok()) published_ = comm_.rank() == 0;
    return told;
  }

  Status CleanUp(const Status& failure) {
    const auto left = [&](std::string_view why) {
      return Status::FromParts(failure.code(), failure.ToErrno(),
                               fmt::format("{}; {} {}", failure.message(), temporary_, why));
    };
    if (published_) return failure;
    if (!AllStopped(failure)) return left("is left: remove it when no rank writes to it any more");
    // All ranks must say the same: what rank 0 could not remove, it only warns of.
    if (comm_.rank() != 0 || !rank0_) return failure;
    const Status removed = Guarded([&] { return rank0_->Discard(); });
    if (!removed.ok()) return left("is left: " + removed.message());
    return failure;
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

}  // namespace tensormount::fs
