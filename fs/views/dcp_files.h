// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_VIEWS_DCP_FILES_H_
#define TENSORMOUNT_FS_VIEWS_DCP_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tensormount/status.h"

#include "fs/formats/file_segments.h"
#include "fs/formats/zip_writer.h"
#include "fs/views/shown_checkpoint.h"

// A checkpoint as a directory of torch.distributed.checkpoint (DCP) in the layout that
// FileSystemWriter of torch 2.13 writes, for the view dcp/ and for exports.

namespace tensormount::fs {

struct DcpOptions {
  // Largest number of bytes of a tensor in one item, unless a single row has more (DcpCut). Readers
  // load an item as a whole.
  std::uint64_t chunk_bytes = std::uint64_t{512} << 20;
  std::uint32_t files = 1;  // Largest number of data files, which have about the same size.
  // Makes the files of Megatron-Core's format torch_dist: metadata.json and common.pt are added.
  // common.pt is the object of that name; without one it has the common values. Common
  // values have no items of their own then.
  bool megatron = false;
};

struct DcpFile {
  std::string name;
  FileSegments segments;
  std::vector<CrcHole> holes;  // CRCs that are zero until an export fills them; sorted by offset.
};

// A sentence about content that DCP cannot hold as it is stored.
struct DcpNote {
  std::string text;
  std::vector<std::string> names;  // Names of the values concerned; may be empty.
};

struct DcpFiles {
  // Data files, then .metadata, then the files of Megatron-Core, if any.
  std::vector<DcpFile> files;
  std::vector<DcpNote> notes;
};

// Makes the files. Reads no data but the first bytes of objects. torch must have a type for each
// tensor (TorchHolds). kUnsupported: two tensors, objects or common values would have the same
// name, or there are too many bytes.
Result<DcpFiles> MakeDcpFiles(const ShownCheckpoint& shown, const DcpOptions& options);

// Whether the checkpoint has the common state of Megatron-Core: the object common.pt, or the
// sharded object common_state.
bool IsMegatronCheckpoint(const ShownCheckpoint& shown);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_DCP_FILES_H_
