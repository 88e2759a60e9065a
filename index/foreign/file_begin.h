// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_FILE_BEGIN_H_
#define TENSORMOUNT_INDEX_FOREIGN_FILE_BEGIN_H_

#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/foreign/foreign.h"

// What a file is by its bytes. Names say it too, but a hub keeps files under their hashes, and a
// link may have any name.

namespace tensormount {

enum class FileBegin {
  kElse,
  kSafetensors,
  kTorchZip,     // A zip with data.pkl.
  kNumpyZip,     // A zip whose first entry is an .npy file.
  kZip,          // Another zip, or one without entries.
  kLegacyTorch,  // torch.save before 1.6.
  kNpy,
  kLfsPointer,  // What git checks out in place of a file that git-lfs has not downloaded.
};

// Reads the first bytes, and of a zip up to 256 KiB of its end. Never fails: a file that cannot be
// read is kElse.
FileBegin BeginOf(File& file);
FileBegin BeginOf(const ForeignFolder& folder, std::string_view name);

// kDataLoss: names the file and what brings its bytes. `shown`: the file, for the message.
Status IsLfsPointer(std::string_view shown);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_FILE_BEGIN_H_
