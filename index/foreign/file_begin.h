// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_FILE_BEGIN_H_
#define TENSORMOUNT_INDEX_FOREIGN_FILE_BEGIN_H_

#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/foreign/foreign.h"

// The type of a file according to its bytes. Names do not show the type: the cache of a Hugging
// Face hub names files by hashes, and a link may have any name.

namespace tensormount {

enum class FileType {
  kOther,
  kSafetensors,
  kTorchZip,     // A zip with data.pkl.
  kNumpyZip,     // A zip whose first entry is an .npy file.
  kZip,          // Another zip, or one without entries.
  kLegacyTorch,  // A file of torch.save before PyTorch 1.6.
  kNpy,
  kLfsPointer,  // A placeholder for a file that git-lfs has not downloaded.
};

// Reads the first bytes of a file and, of a zip, up to 256 KiB at its end. Returns kOther if the
// file cannot be read.
FileType FileTypeOf(File& file);
FileType FileTypeOf(const ForeignFolder& folder, std::string_view name);

// The error (kDataLoss) for a git-lfs pointer, with how to download the file. `shown`: the file's
// name for the message.
Status IsLfsPointer(std::string_view shown);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_FILE_BEGIN_H_
