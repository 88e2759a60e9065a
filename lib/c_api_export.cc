// SPDX-License-Identifier: Apache-2.0
// Exports, and the publish of checkpoints that were written through mounts (tensormount/c.h, over
// fs/export and fs/save).
#include <memory>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/file_system.h"
#include "fs/export/export.h"
#include "fs/save/publish.h"
#include "index/foreign/open_source.h"
#include "index/store/store.h"
#include "lib/c_api.h"

using tensormount::Code;
using tensormount::OpenedCheckpoint;
using tensormount::Result;
using tensormount::Status;
using tensormount::Store;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::Handle;
using tensormount::c_api::ReadRules;
using tensormount::c_api::SetOutput;
using tensormount::fs::ExportFormat;
using tensormount::fs::ExportOptions;
using tensormount::fs::ExportReport;
using OrderedJson = nlohmann::ordered_json;

namespace {

Result<ExportOptions> ReadExportOptions(const tm_export_options& given) {
  ExportOptions out;
  if (given.format != nullptr) {
    const auto format = tensormount::fs::ExportFormatOf(given.format);
    if (!format) {
      return Status(Code::kInvalidArgument,
                    std::string("tm_export_options.format: ") + given.format +
                        ": not one of safetensors, hf, npy, zarr, dcp, torch, torch_dist");
    }
    out.format = *format;
  }
  if (out.format != ExportFormat::kHf && (given.hf_part_bytes != 0 || given.hf_rules != nullptr)) {
    return Status(
        Code::kInvalidArgument,
        "tm_export_options: hf_part_bytes and hf_rules are only allowed with the format hf");
  }
  out.replace = given.replace != 0;
  TENSORMOUNT_ASSIGN_OR_RETURN(out.map, tensormount::c_api::ReadNameMap(given.key_map));
  TENSORMOUNT_ASSIGN_OR_RETURN(out.hf.rules, ReadRules(given.hf_rules));
  if (given.hf_part_bytes != 0) out.hf.part_bytes = given.hf_part_bytes;
  out.timeouts =
      tensormount::c_api::ReadTimeouts(given.liveness_ms, given.arrival_ms, given.total_ms);
  if (given.task != nullptr) {
    out.cancel = &given.task->cancel;
    out.progress = &given.task->done;
  }
  return out;
}

}  // namespace

tm_status tm_export(const char* source, const char* destination, tm_communicator* communicator,
                    const tm_export_options* options, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(communicator, "communicator")}));
    // An error before the collective call is passed to Export, so that the other ranks learn of it.
    ExportOptions how;
    std::shared_ptr<OpenedCheckpoint> opened;
    const Status before = tensormount::Guarded([&]() -> Status {
      TENSORMOUNT_ASSIGN_OR_RETURN(const tm_export_options given,
                                   tensormount::c_api::ReadStruct(options, "tm_export_options"));
      TENSORMOUNT_ASSIGN_OR_RETURN(how, ReadExportOptions(given));
      TENSORMOUNT_RETURN_IF_ERROR(
          CheckPointers({{source, "source"}, {destination, "destination"}}));
      TENSORMOUNT_ASSIGN_OR_RETURN(
          const auto roots,
          tensormount::c_api::ReadTexts(given.roots, given.root_count, "tm_export_options.roots"));
      TENSORMOUNT_ASSIGN_OR_RETURN(
          opened, tensormount::OpenComplete(source, roots, /*partial=*/given.partial != 0));
      // The total is set only for a single rank: with several, this rank's share is not known yet.
      if (given.task != nullptr && communicator->comm->size() == 1) {
        given.task->total = opened->index().tensor_bytes();
      }
      return {};
    });
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const ExportReport report,
        tensormount::fs::Export(before, opened, destination == nullptr ? "" : destination,
                                *communicator->comm, how));
    if (json == nullptr) return {};
    OrderedJson document = ExportJson(report, how.format, communicator->comm->size());
    document["warnings"] = report.warnings;
    return SetOutput(document, json);
  });
}

tm_status tm_store_publish(const char* staging, const tm_publish_options* options, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{staging, "staging"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_publish_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_publish_options"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto path, tensormount::SplitStagingPath(staging));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Store store, Store::Open(path.store));
    const std::string name = given.name == nullptr ? path.name : given.name;
    // A negative value means not to wait. ReadWait is not used, because there it means no limit.
    const std::chrono::milliseconds wait(std::max<std::int64_t>(given.wait_ms, 0));
    tensormount::fs::StagingReport report;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const Store::Published published,
        PublishStagingWhenDone(store, store.fs(), path.name, name, wait, &report));
    if (json == nullptr) return {};
    return SetOutput(tensormount::fs::PublishedJson(store.CheckpointPath(name), published, report),
                     json);
  });
}
