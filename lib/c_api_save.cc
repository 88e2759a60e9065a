// SPDX-License-Identifier: Apache-2.0
// tm_save in the foreground and in the background (tensormount/c.h, over tensormount/save.h and
// async_save.h).
#include <chrono>
#include <utility>

#include <nlohmann/json.hpp>

#include "tensormount/async_save.h"
#include "tensormount/save.h"

#include "lib/c_api.h"

using tensormount::Code;
using tensormount::CommonCheck;
using tensormount::Nonfinite;
using tensormount::PlacementRule;
using tensormount::ReplicaCheck;
using tensormount::Result;
using tensormount::SaveOptions;
using tensormount::SaveReport;
using tensormount::SaveStrategy;
using tensormount::Status;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::Choice;
using tensormount::c_api::Handle;
using tensormount::c_api::SetOutput;

// The report of a save; functions of c.h return its parts.
struct tm_save_report {
  SaveReport report;
};

// A save in the background.
struct tm_save_job {
  tensormount::SaveHandle handle;
  const pid_t process = getpid();
};

struct tm_saver {
  std::unique_ptr<tensormount::AsyncSaver> saver;
  const pid_t process = getpid();
};

namespace {

// The status that a caller's hook returned, with the last message of this thread, which the hook
// should have set.
Status ReadVerdict(tm_status returned) {
  if (returned == TM_OK) return {};
  const bool known = returned > TM_OK && returned <= TM_INTERNAL;
  const char* const message = tm_last_error();
  return {known ? static_cast<Code>(returned) : Code::kInternal,
          *message == '\0' ? "the hook before_publish of the caller failed" : message};
}

// Converts the options. Checks numbers of enumerations; most other values are checked by the save.
Result<SaveOptions> ReadSaveOptions(const tm_save_options* options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const tm_save_options given,
                               tensormount::c_api::ReadStruct(options, "tm_save_options"));
  SaveOptions out;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.placement,
                               Choice("tm_save_options.placement", given.placement,
                                      {PlacementRule::kAuto, PlacementRule::kTensorFile,
                                       PlacementRule::kRankShard, PlacementRule::kSafetensors}));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      out.replicas, Choice("tm_save_options.replica_check", given.replica_check,
                           {ReplicaCheck::kRotating, ReplicaCheck::kFull, ReplicaCheck::kOff,
                            ReplicaCheck::kWarn}));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.strategy,
                               Choice("tm_save_options.strategy", given.strategy,
                                      {SaveStrategy::kParallel, SaveStrategy::kMain}));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      out.common, Choice("tm_save_options.common_check", given.common_check,
                         {CommonCheck::kError, CommonCheck::kWarn, CommonCheck::kOff}));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      out.common_exempt,
      tensormount::c_api::ReadTexts(given.common_exempt, given.common_exempt_count,
                                    "tm_save_options.common_exempt"));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.nonfinite,
                               Choice("tm_save_options.nonfinite", given.nonfinite,
                                      {Nonfinite::kAllow, Nonfinite::kWarn, Nonfinite::kRefuse}));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      out.nonfinite_exempt,
      tensormount::c_api::ReadTexts(given.nonfinite_exempt, given.nonfinite_exempt_count,
                                    "tm_save_options.nonfinite_exempt"));
  if (given.no_statistics != 0) out.statistics = tensormount::Statistics::kOff;
  // In c.h 0 is the default of each member, hence names like skip_validation and no_plan_reuse.
  if (given.replace != 0) out.if_exists = tensormount::IfExists::kReplace;
  out.validate = given.skip_validation == 0;
  out.reuse_plan = given.no_plan_reuse == 0;
  out.page_hashes = given.page_hashes != 0;
  if (given.no_reuse != 0) out.reuse = tensormount::Reuse::kOff;
  if (given.full_every != 0) {
    out.full_every = given.full_every < 0 ? 0 : static_cast<std::uint32_t>(given.full_every);
  }
  if (given.reuse_from != nullptr) out.reuse_from = given.reuse_from;
  if (given.inherit != nullptr) out.inherit = given.inherit;
  // An empty name is an error: SaveOptions would take "" as "none", and the checkpoint would lack
  // the data that it should inherit.
  if ((given.inherit != nullptr && out.inherit.empty()) ||
      (given.reuse_from != nullptr && out.reuse_from.empty())) {
    return tensormount::Status(tensormount::Code::kInvalidArgument,
                               "inherit, reuse_from: the name is empty; pass NULL for none");
  }
  if (given.staging != nullptr) out.staging = given.staging;
  if (given.producer != nullptr) out.producer = given.producer;
  out.ephemeral = given.ephemeral != 0;
  out.writers = given.writers;
  if (given.retention != nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(out.retention,
                                 tensormount::RetentionRules::Parse(given.retention));
  }
  out.timeouts =
      tensormount::c_api::ReadTimeouts(given.liveness_ms, given.arrival_ms, given.total_ms);
  out.events = tensormount::c_api::ReadHook(given.on_event, given.on_event_context);
  if (given.before_publish != nullptr) {
    out.before_publish = [hook = given.before_publish,
                          context = given.before_publish_context](const SaveReport& report) {
      const tm_save_report said{report};
      return ReadVerdict(hook(context, &said));
    };
  }
  if (given.on_commit != nullptr) {
    out.on_commit = [hook = given.on_commit,
                     context = given.on_commit_context](const SaveReport& report) {
      const tm_save_report said{report};
      hook(context, &said);
    };
  }
  return out;
}

// The arguments of a save. If they are invalid, this rank takes part in the collective call with a
// failed state dict, so that the other ranks do not wait for it, and get the error.
struct SaveArguments {
  SaveArguments(const tm_state* state, const char* to, const tm_save_options* how,
                Status status = {})
      : given(state), path(to == nullptr ? "" : to) {
    if (status.ok()) status = CheckPointers({{state, "state"}, {to, "path"}});
    Result<SaveOptions> read = ReadSaveOptions(how);
    if (status.ok()) status = read.status();
    if (read.ok()) options = std::move(read.value());
    if (!status.ok()) (void)failed.Fail(status);
  }
  const tensormount::StateDict& state() const {
    return failed.status().ok() ? given->dict : failed;
  }
  const tm_state* given;
  tensormount::StateDict failed;
  std::string path;
  SaveOptions options;
};

// Makes the saver of a communicator, if it has none.
Status GiveSaver(tm_communicator* communicator) {
  if (communicator->saver != nullptr) return {};
  TENSORMOUNT_ASSIGN_OR_RETURN(communicator->saver,
                               tensormount::AsyncSaver::Of(*communicator->comm));
  return {};
}

// Outputs the job of a save. If `out` is NULL, SaveArguments has made the save fail on all ranks,
// and HandOutJob waits until the save has ended.
Status HandOutJob(Result<tensormount::SaveHandle> handle, tm_save_job** out) {
  TENSORMOUNT_RETURN_IF_ERROR(handle.status());
  if (out == nullptr) return handle.value().WaitCommitted().status();
  *out = new tm_save_job{std::move(handle).value()};
  return {};
}

}  // namespace

void tm_save_report_free(tm_save_report* report) { delete report; }

tm_status tm_save(const tm_state* state, const char* path, tm_communicator* communicator,
                  const tm_save_options* options, tm_save_report** report) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(communicator, "communicator")}));
    const SaveArguments asked(state, path, options);
    // Memory for the report is allocated before the save, because this call must not fail after the
    // checkpoint is published.
    auto out = std::make_unique<tm_save_report>();
    TENSORMOUNT_ASSIGN_OR_RETURN(
        out->report,
        tensormount::Save(asked.state(), asked.path, *communicator->comm, asked.options));
    if (report != nullptr) *report = out.release();
    return {};
  });
}

tm_status tm_save_report_json(const tm_save_report* report, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}, {json, "json"}}));
    const SaveReport& r = report->report;
    nlohmann::ordered_json out = {
        {"path", r.path},
        {"uuid", r.uuid},
        {"base", r.reused.base},
        {"note", r.reused.note},
        {"plan_reused", r.plan_reused},
        {"generation", r.generation},
        {"tensors", r.tensors},
        {"bytes", r.bytes},
        {"bytes_written", r.bytes_written},
        {"bytes_written_here", r.bytes_written_here},
        {"replica_bytes", r.replica_bytes},
        {"replica_bytes_compared", r.replica_bytes_compared},
        {"validate_seconds", r.validate_seconds},
        {"plan_seconds", r.plan_seconds},
        {"write_seconds", r.write_seconds},
        {"compare_seconds", r.compare_seconds},
        {"publish_seconds", r.publish_seconds},
        {"reuse_seconds", r.reuse_seconds},
        {"reused_tensors", r.reused.tensors},
        {"reused_objects", r.reused.objects},
        {"reused_bytes", r.reused.bytes},
        {"reused_bytes_by_leaf", r.reused.bytes_by_leaf},
        {"reused_bytes_by_comparison", r.reused.bytes_by_comparison},
        {"files_linked", r.reused.files_linked},
        {"bytes_linked", r.reused.bytes_linked},
        {"files_copied", r.reused.files_copied},
        {"bytes_copied", r.reused.bytes_copied},
        {"staged", r.staged},
        {"bytes_sent", r.bytes_sent},
        {"bytes_copied_in_bucket", r.bytes_copied_in_bucket},
        {"copy_seconds", r.copy_seconds},
        {"files", nlohmann::ordered_json::array()},
        {"warnings", r.warnings},
        {"pruned", r.pruned},
        {"not_pruned", r.not_pruned},
    };
    for (const SaveReport::File& file : r.files) out["files"].push_back(file.name);
    return SetOutput(out, json);
  });
}

tm_status tm_save_report_numbers(const tm_save_report* report, tm_save_numbers* out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}, {out, "out"}}));
    const SaveReport& r = report->report;
    tm_save_numbers n{};
    n.plan_reused = r.plan_reused ? 1 : 0;
    n.generation = r.generation;
    n.tensors = r.tensors;
    n.bytes = r.bytes;
    n.bytes_written = r.bytes_written;
    n.bytes_written_here = r.bytes_written_here;
    n.replica_bytes = r.replica_bytes;
    n.replica_bytes_compared = r.replica_bytes_compared;
    n.validate_seconds = r.validate_seconds;
    n.plan_seconds = r.plan_seconds;
    n.write_seconds = r.write_seconds;
    n.compare_seconds = r.compare_seconds;
    n.publish_seconds = r.publish_seconds;
    n.reuse_seconds = r.reuse_seconds;
    n.reused_tensors = r.reused.tensors;
    n.reused_objects = r.reused.objects;
    n.reused_bytes = r.reused.bytes;
    n.reused_bytes_by_leaf = r.reused.bytes_by_leaf;
    n.reused_bytes_by_comparison = r.reused.bytes_by_comparison;
    n.files_linked = r.reused.files_linked;
    n.bytes_linked = r.reused.bytes_linked;
    n.files_copied = r.reused.files_copied;
    n.bytes_copied = r.reused.bytes_copied;
    return tensormount::c_api::WriteStruct(n, out, "tm_save_numbers");
  });
}

const char* tm_save_report_path(const tm_save_report* report) {
  // The text is valid until the report is freed.
  return report == nullptr ? "" : report->report.path.c_str();
}

const char* tm_save_report_uuid(const tm_save_report* report) {
  return report == nullptr ? "" : report->report.uuid.c_str();
}

const char* tm_save_report_base(const tm_save_report* report) {
  return report == nullptr ? "" : report->report.reused.base.c_str();
}

const char* tm_save_report_note(const tm_save_report* report) {
  return report == nullptr ? "" : report->report.reused.note.c_str();
}

tm_status tm_save_report_files(const tm_save_report* report, tm_list** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}}));
    // The list has only names; the C++ report also has lengths.
    std::vector<std::string> names;
    for (const SaveReport::File& file : report->report.files) names.push_back(file.name);
    return SetOutput(std::move(names), out);
  });
}

tm_status tm_save_report_warnings(const tm_save_report* report, tm_list** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}}));
    return SetOutput(report->report.warnings, out);
  });
}

tm_status tm_save_report_pruned(const tm_save_report* report, tm_list** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}}));
    return SetOutput(report->report.pruned, out);
  });
}

tm_status tm_save_report_not_pruned(const tm_save_report* report, tm_list** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}}));
    return SetOutput(report->report.not_pruned, out);
  });
}

tm_status tm_saver_new(tm_communicator* communicator, const tm_saver_options* options,
                       tm_saver** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({Handle(communicator, "communicator"), {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_saver_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_saver_options"));
    tensormount::AsyncOptions how;
    how.staging_bytes = given.staging_bytes;
    how.device_staging_bytes = given.device_staging_bytes;
    how.stage_in_background = given.stage_in_background != 0;
    if (given.cancel_on_free != 0) how.on_drop = tensormount::AsyncOptions::OnDrop::kCancel;
    TENSORMOUNT_ASSIGN_OR_RETURN(auto made,
                                 tensormount::AsyncSaver::Make(*communicator->comm, how));
    *out = new tm_saver{std::move(made)};
    return {};
  });
}

void tm_saver_free(tm_saver* saver) { tensormount::c_api::FreeHandle(saver); }

// Returns when the snapshot is taken (unless stage_in_background is set); the caller may then
// change its buffers.
tm_status tm_saver_save(tm_saver* saver, const tm_state* state, const char* path,
                        const tm_save_options* options, tm_save_job** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(saver, "saver")}));
    const SaveArguments asked(state, path, options, CheckPointers({{out, "out"}}));
    return HandOutJob(saver->saver->Save(asked.state(), asked.path, asked.options), out);
  });
}

tm_status tm_save_async(const tm_state* state, const char* path, tm_communicator* communicator,
                        const tm_save_options* options, tm_save_job** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(communicator, "communicator")}));
    const SaveArguments asked(state, path, options, CheckPointers({{out, "out"}}));
    TENSORMOUNT_RETURN_IF_ERROR(GiveSaver(communicator));
    return HandOutJob(communicator->saver->Save(asked.state(), asked.path, asked.options), out);
  });
}

tm_status tm_save_in_place(const tm_state* state, const char* path, tm_communicator* communicator,
                           const tm_save_options* options, tm_save_job** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(communicator, "communicator")}));
    const SaveArguments asked(state, path, options, CheckPointers({{out, "out"}}));
    TENSORMOUNT_RETURN_IF_ERROR(GiveSaver(communicator));
    return HandOutJob(communicator->saver->SaveInPlace(asked.state(), asked.path, asked.options),
                      out);
  });
}

// May be called repeatedly, with the same result.
tm_status tm_save_job_wait(tm_save_job* job, tm_save_report** report) {
  int32_t done = 0;
  return tm_save_job_wait_for(job, -1, &done, report);
}

tm_status tm_save_job_wait_for(tm_save_job* job, int64_t timeout_ms, int32_t* done,
                               tm_save_report** report) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(job, "job"), {done, "done"}}));
    auto out = std::make_unique<tm_save_report>();
    auto verdict = job->handle.WaitCommittedFor(tensormount::c_api::ReadWait(timeout_ms));
    *done = verdict.has_value() ? 1 : 0;
    if (!verdict) return {};
    TENSORMOUNT_ASSIGN_OR_RETURN(out->report, *std::move(verdict));
    if (report != nullptr) *report = out.release();
    return {};
  });
}

tm_status tm_save_job_wait_staged(tm_save_job* job, int64_t timeout_ms, int32_t* done) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(job, "job"), {done, "done"}}));
    // `done` is 1 also if staging failed, because then there is nothing to wait for.
    *done = 1;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const bool staged, job->handle.WaitStagedFor(tensormount::c_api::ReadWait(timeout_ms)));
    *done = staged ? 1 : 0;
    return {};
  });
}

tm_status tm_save_job_staged_fd(tm_save_job* job, int* fd) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(job, "job"), {fd, "fd"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(*fd, job->handle.StagedFd());
    return {};
  });
}

tm_status tm_save_job_fd(tm_save_job* job, int* fd) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(job, "job"), {fd, "fd"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(*fd, job->handle.CommittedFd());
    return {};
  });
}

void tm_save_job_cancel(tm_save_job* job) {
  if (job == nullptr) return;
  // The result is reported by tm_save_job_wait.
  (void)Call([&] {
    job->handle.Cancel();
    return Status();
  });
}

tm_status tm_save_job_progress(const tm_save_job* job, tm_job_progress* out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(job, "job"), {out, "out"}}));
    const tensormount::SaveProgress p = job->handle.progress();
    tm_job_progress n{};
    // The enumerators have the same numbers as in c.h.
    n.state = static_cast<int32_t>(p.state);
    n.bytes_total = p.bytes_total;
    n.bytes_staged = p.bytes_staged;
    n.bytes_written = p.bytes_written;
    n.stalled_seconds = std::chrono::duration<double>(p.stalled).count();
    return tensormount::c_api::WriteStruct(n, out, "tm_job_progress");
  });
}

void tm_save_job_free(tm_save_job* job) { tensormount::c_api::FreeHandle(job); }
