// SPDX-License-Identifier: Apache-2.0
// tm_state_*: a StateDict filled from C (tensormount/c.h, over tensormount/state_dict.h).
#include <optional>
#include <utility>

#include "tensormount/validate.h"

#include "base/status_json.h"
#include "lib/c_api.h"

using tensormount::BufferView;
using tensormount::Code;
using tensormount::CommonValue;
using tensormount::Dims;
using tensormount::GridPosition;
using tensormount::Region;
using tensormount::Replica;
using tensormount::Result;
using tensormount::Shard;
using tensormount::Status;
using tensormount::c_api::Call;
using tensormount::c_api::CallOnState;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::ReadDims;

namespace {

// Converts a shard. No data are copied: the result refers to the caller's memory.
Result<Shard> ReadShard(const tm_shard* given) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const tm_shard s, tensormount::c_api::ReadStruct(given, "tm_shard"));
  Shard shard;
  TENSORMOUNT_ASSIGN_OR_RETURN(
      shard.replica,
      tensormount::c_api::Choice("tm_shard.replica", s.replica,
                                 {Replica::kUnlabelled, Replica::kMain, Replica::kCopy}));
  TENSORMOUNT_ASSIGN_OR_RETURN(shard.global_shape,
                               ReadDims(s.global_shape, s.global_rank, "tm_shard.global_shape"));
  TENSORMOUNT_ASSIGN_OR_RETURN(shard.region,
                               tensormount::c_api::ReadRegion(s.region, shard.global_shape));
  TENSORMOUNT_ASSIGN_OR_RETURN(shard.data, tensormount::c_api::ReadBuffer(s.data));
  shard.metadata_only = s.metadata_only != 0;
  return shard;
}

// Converts a position on a grid. If `rank` is 0, the object has no grid.
Result<GridPosition> ReadPosition(const int64_t* index, const int64_t* grid, int32_t rank) {
  GridPosition position;
  TENSORMOUNT_ASSIGN_OR_RETURN(position.index, ReadDims(index, rank, "index"));
  TENSORMOUNT_ASSIGN_OR_RETURN(position.grid, ReadDims(grid, rank, "grid"));
  return position;
}

// Parses a common value. In c.h common values are JSON; docs/format.md describes the form of bytes
// and tuples.
Status CommonFromText(const char* json, CommonValue* value) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{json, "json"}}));
  TENSORMOUNT_ASSIGN_OR_RETURN(*value, tensormount::CommonFromJson(json));
  return {};
}

// The state dict and options of a collective call about a layout. If they are invalid, dict() is a
// failed state dict, so that the other ranks get the error.
class LayoutCall {
 public:
  LayoutCall(const tm_state* state, const tm_validate_options* options,
             tensormount::c_api::Argument out) {
    const Result<tm_validate_options> read =
        tensormount::c_api::ReadStruct(options, "tm_validate_options");
    Status status = CheckPointers({{state, "state"}, out});
    if (status.ok()) status = read.status();
    if (status.ok()) {
      dict_ = &state->dict;
    } else {
      (void)failed_.Fail(status);
    }
    const tm_validate_options given = read.ok() ? read.value() : tm_validate_options{};
    if (given.task != nullptr) options_.cancel = &given.task->cancel;
    if (given.limit != 0) options_.limit = given.limit;
    options_.timeouts =
        tensormount::c_api::ReadTimeouts(given.liveness_ms, given.arrival_ms, given.total_ms);
  }
  LayoutCall(const LayoutCall&) = delete;
  LayoutCall& operator=(const LayoutCall&) = delete;

  const tensormount::StateDict& dict() const { return *dict_; }
  const tensormount::ValidateOptions& options() const { return options_; }

 private:
  tensormount::StateDict failed_;
  const tensormount::StateDict* dict_ = &failed_;
  tensormount::ValidateOptions options_;
};

}  // namespace

tm_status tm_state_new(tm_state** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{out, "out"}}));
    *out = new tm_state;
    return {};
  });
}

void tm_state_free(tm_state* state) { delete state; }

tm_status tm_state_add_tensor(tm_state* state, const char* key, const tm_shard* shard) {
  return CallOnState(state, [&](tensormount::StateDict& dict) -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{key, "key"}, {shard, "shard"}}));
    const Result<Shard> read = ReadShard(shard);
    if (!read.ok()) return read.status().WithContext("tensor " + std::string(key));
    return dict.AddTensor(key, read.value());
  });
}

// Copies the bytes, because objects are small compared with tensors.
tm_status tm_state_add_object(tm_state* state, const char* key, const void* data, size_t size,
                              const int64_t* index, const int64_t* grid, int32_t rank) {
  return CallOnState(state, [&](tensormount::StateDict& dict) -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{key, "key"}}));
    if (size != 0) TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{data, "data"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const GridPosition position, ReadPosition(index, grid, rank));
    return dict.AddObject(key, {static_cast<const char*>(data), size}, position);
  });
}

tm_status tm_state_want_object(tm_state* state, const char* key, const int64_t* index,
                               const int64_t* grid, int32_t rank) {
  return CallOnState(state, [&](tensormount::StateDict& dict) -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{key, "key"}}));
    GridPosition position;
    TENSORMOUNT_ASSIGN_OR_RETURN(position.index, ReadDims(index, rank, "index"));
    if (grid != nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(position.grid, ReadDims(grid, rank, "grid"));
    }
    return dict.WantObject(key, position);
  });
}

tm_status tm_state_set_common(tm_state* state, const char* name, const char* json) {
  return CallOnState(state, [&](tensormount::StateDict& dict) -> Status {
    CommonValue value;
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{name, "name"}}));
    TENSORMOUNT_RETURN_IF_ERROR(CommonFromText(json, &value).WithContext(name));
    return dict.SetCommon(name, std::move(value));
  });
}

tm_status tm_state_set_rank_common(tm_state* state, const char* name, const char* json) {
  return CallOnState(state, [&](tensormount::StateDict& dict) -> Status {
    CommonValue value;
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{name, "name"}}));
    TENSORMOUNT_RETURN_IF_ERROR(CommonFromText(json, &value).WithContext(name));
    return dict.SetRankCommon(name, std::move(value));
  });
}

tm_status tm_state_set_metadata(tm_state* state, const char* json) {
  return CallOnState(state, [&](tensormount::StateDict& dict) -> Status {
    CommonValue value;
    TENSORMOUNT_RETURN_IF_ERROR(CommonFromText(json, &value).WithContext("content metadata"));
    // Content metadata are a dict, so lists and plain values are refused.
    auto* object = value.get_if<tensormount::CommonDict>();
    if (object == nullptr) return {Code::kInvalidArgument, "content metadata: not a JSON object"};
    return dict.SetContentMetadata(std::move(*object));
  });
}

tm_status tm_state_set_local(tm_state* state, const char* name, const char* json) {
  return CallOnState(state, [&](tensormount::StateDict& dict) -> Status {
    CommonValue value;
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{name, "name"}}));
    TENSORMOUNT_RETURN_IF_ERROR(CommonFromText(json, &value).WithContext(name));
    return dict.SetLocal(name, std::move(value));
  });
}

// Fails at once if the pattern is invalid; the error also fails the later save (CallOnState).
tm_status tm_state_name_layers(tm_state* state, const char* key, const char* pattern) {
  return CallOnState(state, [&](tensormount::StateDict& dict) -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{key, "key"}, {pattern, "pattern"}}));
    return dict.NameLayers(key, pattern);
  });
}

tm_status tm_state_fail(tm_state* state, tm_status status, const char* message) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{state, "state"}, {message, "message"}}));
    // A failure needs a known code, so that ranks can exchange it.
    if (status <= TM_OK || status > TM_INTERNAL) {
      return {Code::kInvalidArgument, std::to_string(status) + " is not a failure status"};
    }
    (void)state->dict.Fail(Status(static_cast<Code>(status), message));
    return {};
  });
}

tm_status tm_state_fail_json(tm_state* state, const char* json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{state, "state"}, {json, "json"}}));
    Status failure;
    TENSORMOUNT_RETURN_IF_ERROR(tensormount::StatusFromJson(json, failure));
    (void)state->dict.Fail(failure);
    return {};
  });
}

tm_status tm_validate(const tm_state* state, tm_communicator* communicator,
                      const tm_validate_options* options, int32_t* sound, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({tensormount::c_api::Handle(communicator, "communicator")}));
    const LayoutCall call(state, options, {sound, "sound"});
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const tensormount::LayoutReport report,
        tensormount::Validate(call.dict(), *communicator->comm, call.options()));
    if (json != nullptr) {
      TENSORMOUNT_RETURN_IF_ERROR(tensormount::c_api::SetOutput(report.ToJson(), json, nullptr));
    }
    // Findings are the result and not a failure of the call.
    *sound = report.ok() ? 1 : 0;
    return {};
  });
}

tm_status tm_dump_spec(const tm_state* state, tm_communicator* communicator,
                       const tm_validate_options* options, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({tensormount::c_api::Handle(communicator, "communicator")}));
    const LayoutCall call(state, options, {json, "json"});
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string spec,
        tensormount::DumpSpec(call.dict(), *communicator->comm, call.options().timeouts,
                              call.options().cancel));
    return tensormount::c_api::SetOutput(spec, json, nullptr);
  });
}
