// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_FOREIGN_MODEL_FILES_H_
#define TENSORMOUNT_INDEX_FOREIGN_MODEL_FILES_H_

#include <string_view>

#include "tensormount/status.h"

#include "index/foreign/foreign.h"

namespace tensormount {

// Whether transformers and tokenizers look for a file of this name beside a model's tensors: its
// configuration, its tokenizer, its templates.
bool IsModelFile(std::string_view name);

// Adds the files of the folder that are such as objects of their names, so that what is imported,
// adopted or mounted is still a model that they can open. One that cannot be used (a link that
// leads out) is left out with a warning: the tensors are as good without.
Status AddModelFiles(const ForeignFolder& folder, ForeignBuilder& builder);

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_FOREIGN_MODEL_FILES_H_
