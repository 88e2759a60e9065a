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
  // Largest number of bytes of a tensor in one item. Readers load an item as a whole.
  std::uint64_t chunk_bytes = std::uint64_t{512} << 20;
  std::uint32_t files = 1;  // Largest number of data files, which have about the same size.
  // Makes the files of Megatron-Core's format torch_dist: metadata.json is added, and the common
  // values are in common.pt instead of in separate items.
  bool megatron = false;
};

struct DcpFile {
  std::string name;
  FileSegments segments;
  std::vector<CrcHole> holes;  // CRCs that are zero until the data were read; sorted by offset.
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
// tensor (TorchHolds). kUnsupported: a tensor and a value would have the same name.
Result<DcpFiles> MakeDcpFiles(const ShownCheckpoint& shown, const DcpOptions& options);

// Whether the checkpoint has the common state of Megatron-Core: the object common.pt, or the
// sharded object common_state.
bool IsMegatronCheckpoint(const ShownCheckpoint& shown);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_VIEWS_DCP_FILES_H_
