// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_MODEL_FILES_H_
#define TENSORMOUNT_INDEX_FOREIGN_MODEL_FILES_H_

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/foreign/foreign.h"

namespace tensormount {

// Whether transformers or tokenizers look for a file of this name beside a model's tensors: its
// configuration, tokenizer or templates.
bool IsModelFile(std::string_view name);

// The bytes of model files, by name.
using ModelFiles = std::map<std::string, std::shared_ptr<const std::string>>;
// Reads the model files of a directory (--with). kNotFound: no such directory, or it has none;
// kResourceExhausted: one is larger than 64 MiB.
Result<std::shared_ptr<const ModelFiles>> ReadModelFiles(FileSystem& fs,
                                                         const std::string& directory);

// Adds the model files of the directory as objects, so that an imported, adopted or mounted
// checkpoint is still a complete model. A file that cannot be used (such as a link that leads out
// of the bounds) is left out with a warning, because the tensors do not need it.
Status AddModelFiles(const ForeignFolder& folder, ForeignBuilder& builder);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_MODEL_FILES_H_
