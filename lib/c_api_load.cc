// SPDX-License-Identifier: Apache-2.0
// tm_load and its report (tensormount/c.h, over tensormount/load.h).
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tensormount/async_load.h"
#include "tensormount/load.h"

#include "lib/c_api.h"

using tensormount::Code;
using tensormount::Dims;
using tensormount::LoadOptions;
using tensormount::LoadPath;
using tensormount::LoadReport;
using tensormount::LoadRule;
using tensormount::LoadVerify;
using tensormount::Result;
using tensormount::Status;
using tensormount::Strict;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::Choice;
using tensormount::c_api::Handle;
using tensormount::c_api::SetOutput;

// The report of a load; functions of c.h return its parts.
struct tm_load_report {
  LoadReport report;
};

// A load in the background.
struct tm_load_job {
  tensormount::LoadHandle handle;
  const pid_t process = getpid();
};

namespace {

// In c.h 0 means the default, which differs between not_stored and not_requested; 1 to 4 are the
// values of Strict.
Result<Strict> ReadStrict(const char* field, int32_t number, Strict by_default) {
  return Choice(field, number,
                {by_default, Strict::kRaise, Strict::kLog, Strict::kReturn, Strict::kIgnore});
}

// Converts a rule: a glob for keys, and what is allowed for these keys.
Result<tensormount::KeyRule> ReadRule(const tm_load_rule* rule) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const tm_load_rule given,
                               tensormount::c_api::ReadStruct(rule, "tm_load_rule"));
  TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{given.keys, "tm_load_rule.keys"}}));
  tensormount::KeyRule out;
  out.keys = given.keys;
  out.rule.allow_shrink = given.allow_shrink != 0;
  out.rule.convert_dtype = given.convert_dtype != 0;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.rule.grow, Choice("tm_load_rule.grow", given.grow,
                                                     {LoadRule::Grow::kError, LoadRule::Grow::kZero,
                                                      LoadRule::Grow::kKeep}));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.rule.grid,
                               Choice("tm_load_rule.grid", given.grid,
                                      {LoadRule::Grid::kError, LoadRule::Grid::kByIndex,
                                       LoadRule::Grid::kFirst, LoadRule::Grid::kSkip}));
  return out;
}

Result<LoadOptions> ReadLoadOptions(const tm_load_options* options) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const tm_load_options given,
                               tensormount::c_api::ReadStruct(options, "tm_load_options"));
  LoadOptions out;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      out.not_stored, ReadStrict("tm_load_options.not_stored", given.not_stored, out.not_stored));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      out.not_requested,
      ReadStrict("tm_load_options.not_requested", given.not_requested, out.not_requested));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.verify, Choice("tm_load_options.verify", given.verify,
                                                  {LoadVerify::kAuto, LoadVerify::kOff,
                                                   LoadVerify::kLeaves, LoadVerify::kEnd}));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.path,
                               Choice("tm_load_options.path", given.path,
                                      {LoadPath::kAuto, LoadPath::kDirect, LoadPath::kExchange}));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      out.strict_exempt,
      tensormount::c_api::ReadTexts(given.strict_exempt, given.strict_exempt_count,
                                    "tm_load_options.strict_exempt"));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      out.roots,
      tensormount::c_api::ReadTexts(given.roots, given.root_count, "tm_load_options.roots"));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.names, tensormount::c_api::ReadNameMap(given.name_map));
  if (given.rule_count != 0) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{given.rules, "tm_load_options.rules"}}));
  }
  // In the caller's array a rule has the size of the caller's version of the structure.
  const auto* rule = reinterpret_cast<const char*>(given.rules);
  for (std::size_t i = 0; i < given.rule_count; ++i) {
    TENSORMOUNT_ASSIGN_OR_RETURN(auto read, ReadRule(reinterpret_cast<const tm_load_rule*>(rule)));
    out.rules.push_back(std::move(read));
    rule += given.rules[0].struct_size;
  }
  // In c.h 0 is the default of each member: no validation, and plans are reused.
  out.validate = given.validate != 0;
  out.reuse_plan = given.no_plan_reuse == 0;
  out.exchange_group = given.exchange_group;
  if (given.threads < 0) {
    return Status(Code::kInvalidArgument,
                  "tm_load_options.threads: " + std::to_string(given.threads) + " is negative");
  }
  out.threads = given.threads;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      out.exchange_via, Choice("tm_load_options.exchange_via", given.exchange_via,
                               {tensormount::ExchangeVia::kAuto, tensormount::ExchangeVia::kHost,
                                tensormount::ExchangeVia::kDevices}));
  out.timeouts =
      tensormount::c_api::ReadTimeouts(given.liveness_ms, given.arrival_ms, given.total_ms);
  out.events = tensormount::c_api::ReadHook(given.on_event, given.on_event_context);
  return out;
}

// The arguments of a load. If they are invalid, this rank takes part in the collective call with a
// failed request, so that the other ranks do not wait for it.
struct LoadArguments {
  LoadArguments(const tm_state* state, const char* from, const tm_load_options* how,
                Status status = {})
      : given(state), path(from == nullptr ? "" : from) {
    if (status.ok()) status = CheckPointers({{state, "request"}, {from, "path"}});
    Result<LoadOptions> read = ReadLoadOptions(how);
    if (status.ok()) status = read.status();
    if (read.ok()) options = std::move(read.value());
    if (!status.ok()) (void)failed.Fail(status);
  }
  const tensormount::StateDict& request() const {
    return failed.status().ok() ? given->dict : failed;
  }
  const tm_state* given;
  tensormount::StateDict failed;
  std::string path;
  LoadOptions options;
};

// Outputs one of the four lists of keys in the report.
tm_status GiveList(const tm_load_report* report, std::vector<std::string> LoadReport::*member,
                   tm_list** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}}));
    return SetOutput(report->report.*member, out);
  });
}

}  // namespace

void tm_load_report_free(tm_load_report* report) { delete report; }

tm_status tm_load(const tm_state* request, const char* path, tm_communicator* communicator,
                  const tm_load_options* options, tm_load_report** report) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(communicator, "communicator")}));
    const LoadArguments asked(request, path, options);
    // Memory for the report is allocated before the load, so that a failure to allocate it fails
    // early.
    auto out = std::make_unique<tm_load_report>();
    TENSORMOUNT_ASSIGN_OR_RETURN(
        out->report,
        tensormount::Load(asked.request(), asked.path, *communicator->comm, asked.options));
    if (report != nullptr) *report = out.release();
    return {};
  });
}

tm_status tm_load_async(const tm_state* request, const char* path, tm_communicator* communicator,
                        const tm_load_options* options, tm_load_job** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(communicator, "communicator")}));
    const LoadArguments asked(request, path, options, CheckPointers({{out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(
        auto handle,
        tensormount::AsyncLoad(asked.request(), asked.path, *communicator->comm, asked.options));
    if (out == nullptr) return handle.Wait().status();
    *out = new tm_load_job{std::move(handle)};
    return {};
  });
}

tm_status tm_load_job_wait(tm_load_job* job, int64_t timeout_ms, int32_t* done,
                           tm_load_report** report) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(job, "job"), {done, "done"}}));
    auto out = std::make_unique<tm_load_report>();
    auto verdict = job->handle.WaitFor(tensormount::c_api::ReadWait(timeout_ms));
    *done = verdict.has_value() ? 1 : 0;
    if (!verdict) return {};
    TENSORMOUNT_ASSIGN_OR_RETURN(out->report, *std::move(verdict));
    if (report != nullptr) *report = out.release();
    return {};
  });
}

tm_status tm_load_job_fd(tm_load_job* job, int* fd) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(job, "job"), {fd, "fd"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(*fd, job->handle.EventFd());
    return {};
  });
}

uint64_t tm_load_job_bytes_read(const tm_load_job* job) {
  return job == nullptr ? 0 : job->handle.bytes_read();
}

void tm_load_job_cancel(tm_load_job* job) {
  if (job != nullptr) job->handle.Cancel();
}

void tm_load_job_free(tm_load_job* job) { tensormount::c_api::FreeHandle(job); }

tm_status tm_load_report_json(const tm_load_report* report, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}, {json, "json"}}));
    const LoadReport& r = report->report;
    nlohmann::ordered_json out = {
        {"uuid", r.uuid},
        {"numbers",
         {
             {"plan_reused", r.plan_reused},
             {"bytes_wanted", r.bytes_wanted},
             {"bytes_read", r.bytes_read},
             {"bytes_received", r.bytes_received},
             {"bytes_by_leaf", r.bytes_by_leaf},
             {"bytes_by_digest", r.bytes_by_digest},
             {"bytes_unverified", r.bytes_unverified},
             {"messages_sent", r.messages_sent},
             {"peak_buffer_bytes", r.peak_buffer_bytes},
             {"plan_seconds", r.plan_seconds},
             {"read_seconds", r.read_seconds},
             {"proof_seconds", r.proof_seconds},
             {"bytes_between_devices", r.bytes_between_devices},
         }},
        {"not_stored", r.not_stored},
        {"not_requested", r.not_requested},
        {"skipped", r.skipped},
        {"converted", r.converted},
        {"uncovered", nlohmann::ordered_json::array()},
    };
    for (const LoadReport::Uncovered& one : r.uncovered) {
      const auto& begin = one.box.begin();
      const auto& extent = one.box.extent();
      out["uncovered"].push_back({{"key", one.key},
                                  {"begin", std::vector(begin.begin(), begin.end())},
                                  {"extent", std::vector(extent.begin(), extent.end())},
                                  {"zeroed", one.zeroed}});
    }
    return SetOutput(out, json);
  });
}

tm_status tm_load_report_numbers(const tm_load_report* report, tm_load_numbers* out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}, {out, "out"}}));
    const LoadReport& r = report->report;
    tm_load_numbers n{};
    n.plan_reused = r.plan_reused ? 1 : 0;
    n.bytes_wanted = r.bytes_wanted;
    n.bytes_read = r.bytes_read;
    n.bytes_received = r.bytes_received;
    n.bytes_by_leaf = r.bytes_by_leaf;
    n.bytes_by_digest = r.bytes_by_digest;
    n.bytes_unverified = r.bytes_unverified;
    n.messages_sent = r.messages_sent;
    n.peak_buffer_bytes = r.peak_buffer_bytes;
    n.plan_seconds = r.plan_seconds;
    n.read_seconds = r.read_seconds;
    n.proof_seconds = r.proof_seconds;
    n.bytes_between_devices = r.bytes_between_devices;
    return tensormount::c_api::WriteStruct(n, out, "tm_load_numbers");
  });
}

const char* tm_load_report_uuid(const tm_load_report* report) {
  return report == nullptr ? "" : report->report.uuid.c_str();
}

tm_status tm_load_report_not_stored(const tm_load_report* report, tm_list** out) {
  return GiveList(report, &LoadReport::not_stored, out);
}
tm_status tm_load_report_not_requested(const tm_load_report* report, tm_list** out) {
  return GiveList(report, &LoadReport::not_requested, out);
}
tm_status tm_load_report_skipped(const tm_load_report* report, tm_list** out) {
  return GiveList(report, &LoadReport::skipped, out);
}
tm_status tm_load_report_converted(const tm_load_report* report, tm_list** out) {
  return GiveList(report, &LoadReport::converted, out);
}

size_t tm_load_report_uncovered_count(const tm_load_report* report) {
  return report == nullptr ? 0 : report->report.uncovered.size();
}

tm_status tm_load_report_uncovered(const tm_load_report* report, size_t index, tm_uncovered* out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}, {out, "out"}}));
    const auto& all = report->report.uncovered;
    if (index >= all.size()) {
      return {Code::kNotFound, "index " + std::to_string(index) + ": the report has only " +
                                   std::to_string(all.size()) + " uncovered boxes"};
    }
    // The key in the output is valid until the report is freed.
    const LoadReport::Uncovered& u = all[index];
    tm_uncovered n{};
    n.key = u.key.c_str();
    n.zeroed = u.zeroed ? 1 : 0;
    // A tensor's box has at most TM_MAX_RANK axes.
    n.rank = std::min(u.box.rank(), static_cast<int>(TM_MAX_RANK));
    for (int axis = 0; axis < n.rank; ++axis) {
      n.begin[axis] = u.box.begin(axis);
      n.extent[axis] = u.box.extent(axis);
    }
    return tensormount::c_api::WriteStruct(n, out, "tm_uncovered");
  });
}

tm_status tm_load_report_object(const tm_load_report* report, const char* key, const int64_t* index,
                                int32_t rank, void** data, size_t* size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}, {key, "key"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Dims at, tensormount::c_api::ReadDims(index, rank, "index"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, report->report.object(key, at));
    return SetOutput(bytes, data, size);
  });
}

tm_status tm_load_report_common(const tm_load_report* report, const char* name, char** json,
                                size_t* size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}}));
    return SetOutput(report->report.common_values, name, "common value", json, size);
  });
}

tm_status tm_load_report_rank_common(const tm_load_report* report, int32_t rank, const char* name,
                                     char** json, size_t* size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}}));
    const auto& all = report->report.rank_common_values;
    // A rank without values is not in the map.
    const auto it = all.find(rank);
    return SetOutput(it == all.end() ? decltype(it->second){} : it->second, name,
                     "value of rank " + std::to_string(rank) + " named", json, size);
  });
}

tm_status tm_load_report_metadata(const tm_load_report* report, char** json, size_t* size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}}));
    return SetOutput(CommonToJson(tensormount::CommonValue(report->report.content_metadata)), json,
                     size);
  });
}

tm_status tm_load_report_local(const tm_load_report* report, const char* name, char** json,
                               size_t* size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{report, "report"}}));
    return SetOutput(report->report.locals, name, "local value", json, size);
  });
}
