// SPDX-License-Identifier: Apache-2.0
// tm_checkpoint_*: opening, listing, reading (tensormount/c.h, over tensormount/checkpoint.h).
// An opened checkpoint is immutable, so all functions except tm_checkpoint_close are thread-safe. A
// call with a key searches the index, which costs little compared with a read.
#include "lib/c_api_checkpoint.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "tensormount/checkpoint.h"

#include "fs/pictures/layout.h"
#include "index/public_checkpoint.h"
#include "lib/c_api.h"

using tensormount::BufferView;
using tensormount::Checkpoint;
using tensormount::CheckpointInside;
using tensormount::Dims;
using tensormount::Region;
using tensormount::Status;
using tensormount::Tensor;
using tensormount::c_api::Call;
using tensormount::c_api::CheckPointers;
using tensormount::c_api::Handle;
using tensormount::c_api::SetOutput;

// Mapped bytes of a tensor, which keep the checkpoint open.
struct tm_mapping {
  tensormount::MappedBytes bytes;
  const pid_t process = getpid();
};

namespace {

tensormount::Result<tensormount::fs::ChunkMap> LayoutOf(const tm_checkpoint* checkpoint,
                                                        const char* key,
                                                        tensormount::c_api::Argument out) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(checkpoint, "checkpoint"), {key, "key"}, out}));
  return tensormount::fs::DescribeChunkMap(*CheckpointInside::Of(checkpoint->checkpoint), key);
}

}  // namespace

tm_status tm_checkpoint_open(const char* path, tm_checkpoint** out) {
  return tm_checkpoint_open_with(path, nullptr, out);
}

tm_status tm_checkpoint_open_with(const char* path, const tm_open_options* options,
                                  tm_checkpoint** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{path, "path"}, {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tm_open_options given,
                                 tensormount::c_api::ReadStruct(options, "tm_open_options"));
    tensormount::OpenOptions how;
    TENSORMOUNT_ASSIGN_OR_RETURN(
        how.roots,
        tensormount::c_api::ReadTexts(given.roots, given.root_count, "tm_open_options.roots"));
    if (given.file != nullptr) how.file = given.file;
    TENSORMOUNT_ASSIGN_OR_RETURN(how.names, tensormount::c_api::ReadNameMap(given.name_map));
    TENSORMOUNT_ASSIGN_OR_RETURN(Checkpoint opened, Checkpoint::Open(path, how));
    std::string uuid = opened.uuid();
    *out = new tm_checkpoint{std::move(opened), std::move(uuid)};
    return {};
  });
}

void tm_checkpoint_close(tm_checkpoint* checkpoint) { tensormount::c_api::FreeHandle(checkpoint); }

const char* tm_checkpoint_path(const tm_checkpoint* checkpoint) {
  return checkpoint == nullptr ? "" : checkpoint->checkpoint.path().c_str();
}

const char* tm_checkpoint_uuid(const tm_checkpoint* checkpoint) {
  return checkpoint == nullptr ? "" : checkpoint->uuid.c_str();
}

tm_status tm_checkpoint_keys(const tm_checkpoint* checkpoint, tm_list** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(checkpoint, "checkpoint")}));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto keys, checkpoint->checkpoint.keys());
    return SetOutput(std::move(keys), out);
  });
}

tm_status tm_checkpoint_objects(const tm_checkpoint* checkpoint, tm_list** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(checkpoint, "checkpoint")}));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto keys, checkpoint->checkpoint.objects());
    return SetOutput(std::move(keys), out);
  });
}

tm_status tm_checkpoint_warnings(const tm_checkpoint* checkpoint, tm_list** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(checkpoint, "checkpoint")}));
    return SetOutput(checkpoint->checkpoint.warnings(), out);
  });
}

tm_status tm_checkpoint_tensor(const tm_checkpoint* checkpoint, const char* key,
                               tm_tensor_info* info) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({Handle(checkpoint, "checkpoint"), {key, "key"}, {info, "info"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Tensor tensor, checkpoint->checkpoint.tensor(key));
    tm_tensor_info out{};
    out.dtype = static_cast<uint32_t>(tensor.dtype());
    out.rank = tensor.shape().rank();
    for (int axis = 0; axis < out.rank; ++axis) out.shape[axis] = tensor.shape()[axis];
    out.bytes = tensor.bytes();
    // has_digest is a member of its own, because 0 is a valid digest.
    out.has_digest = tensor.digest() ? 1 : 0;
    out.digest = tensor.digest().value_or(0);
    return tensormount::c_api::WriteStruct(out, info, "tm_tensor_info");
  });
}

tm_status tm_checkpoint_statistics(const tm_checkpoint* checkpoint, const char* key,
                                   tm_value_statistics* out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({Handle(checkpoint, "checkpoint"), {key, "key"}, {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Tensor tensor, checkpoint->checkpoint.tensor(key));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto known, tensor.statistics());
    tm_value_statistics found{};
    if (known) {
      found.known = 1;
      found.count = known->count;
      found.zeros = known->zeros;
      found.nan = known->nan;
      found.posinf = known->posinf;
      found.neginf = known->neginf;
      found.has_absmax = known->absmax ? 1 : 0;
      found.absmax = known->absmax.value_or(0);
    }
    return tensormount::c_api::WriteStruct(found, out, "tm_value_statistics");
  });
}

tm_status tm_checkpoint_read(const tm_checkpoint* checkpoint, const char* key,
                             const tm_region* region, const tm_buffer* out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({Handle(checkpoint, "checkpoint"), {key, "key"}, {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Tensor tensor, checkpoint->checkpoint.tensor(key));
    // NULL means the whole tensor.
    TENSORMOUNT_ASSIGN_OR_RETURN(const Region wanted,
                                 tensormount::c_api::ReadRegion(region, tensor.shape()));
    TENSORMOUNT_ASSIGN_OR_RETURN(const BufferView view, tensormount::c_api::ReadBuffer(out));
    return tensor.Read(wanted, view);
  });
}

tm_status tm_checkpoint_read_bytes(const tm_checkpoint* checkpoint, const char* key,
                                   uint64_t offset, void* out, size_t size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(checkpoint, "checkpoint"), {key, "key"}}));
    // NULL with size 0 is an empty read, as for read(2).
    if (size != 0) TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Tensor tensor, checkpoint->checkpoint.tensor(key));
    return tensor.ReadBytes(offset, out, size);
  });
}

tm_status tm_checkpoint_map(const tm_checkpoint* checkpoint, const char* key, uint64_t offset,
                            uint64_t size, tm_mapping** out) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(
        CheckPointers({Handle(checkpoint, "checkpoint"), {key, "key"}, {out, "out"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Tensor tensor, checkpoint->checkpoint.tensor(key));
    TENSORMOUNT_ASSIGN_OR_RETURN(tensormount::MappedBytes bytes, tensor.Map(offset, size));
    *out = new tm_mapping{std::move(bytes)};
    return {};
  });
}

const void* tm_mapping_data(const tm_mapping* mapping) {
  return mapping == nullptr ? nullptr : mapping->bytes.data;
}

void tm_mapping_free(tm_mapping* mapping) { tensormount::c_api::FreeHandle(mapping); }

tm_status tm_checkpoint_layout(const tm_checkpoint* checkpoint, const char* key, char** json) {
  return Call([&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto layout, LayoutOf(checkpoint, key, {json, "json"}));
    return SetOutput(ChunkMapJson(layout), json);
  });
}

tm_status tm_checkpoint_picture(const tm_checkpoint* checkpoint, const char* key, char** svg) {
  return Call([&]() -> Status {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto layout, LayoutOf(checkpoint, key, {svg, "svg"}));
    return SetOutput(ChunkMapSvg(layout), svg, nullptr);
  });
}

tm_status tm_checkpoint_object_grid(const tm_checkpoint* checkpoint, const char* key, int64_t* grid,
                                    int32_t* rank) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers(
        {Handle(checkpoint, "checkpoint"), {key, "key"}, {grid, "grid"}, {rank, "rank"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Dims found, checkpoint->checkpoint.object_grid(key));
    std::copy(found.begin(), found.end(), grid);
    *rank = found.rank();
    return {};
  });
}

tm_status tm_checkpoint_object(const tm_checkpoint* checkpoint, const char* key,
                               const int64_t* index, int32_t rank, void** data, size_t* size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(checkpoint, "checkpoint"), {key, "key"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const Dims at, tensormount::c_api::ReadDims(index, rank, "index"));
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::string bytes, checkpoint->checkpoint.object(key, at));
    return SetOutput(bytes, data, size);
  });
}

tm_status tm_checkpoint_common(const tm_checkpoint* checkpoint, const char* name, char** json,
                               size_t* size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(checkpoint, "checkpoint")}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto values, checkpoint->checkpoint.common());
    return SetOutput(values, name, "common value", json, size);
  });
}

tm_status tm_checkpoint_rank_common(const tm_checkpoint* checkpoint, int32_t rank, const char* name,
                                    char** json, size_t* size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(checkpoint, "checkpoint")}));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto values, checkpoint->checkpoint.rank_common());
    // For a rank without values, a name is kNotFound, and all values are "{}".
    return SetOutput(values[rank], name, "value of rank " + std::to_string(rank) + " named", json,
                     size);
  });
}

tm_status tm_checkpoint_metadata(const tm_checkpoint* checkpoint, char** json, size_t* size) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({Handle(checkpoint, "checkpoint")}));
    TENSORMOUNT_ASSIGN_OR_RETURN(auto metadata, checkpoint->checkpoint.content_metadata());
    return SetOutput(CommonToJson(tensormount::CommonValue(std::move(metadata))), json, size);
  });
}
