// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_SOURCE_H_
#define TENSORMOUNT_MOUNT_TOOLS_SOURCE_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/key_map.h"
#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/foreign/open_source.h"
#include "index/read/checkpoint.h"
#include "mount-tools/terminal.h"
#include "state/shard_rule.h"

namespace tensormount::tools {

// FindSource, and what people mean besides: a folder that a mount of ours shows (MNT, MNT/step-1)
// is its source, said in a note. Of what is not there the message says what is nearly. With --file
// the file of a foreign checkpoint's folder.
Result<FoundSource> FindNamed(FileSystem& fs, const std::string& text, Terminal& terminal);

// The file of a foreign checkpoint's folder that --file names; other sources, and all where the
// option was not given, as they are. kNotFound: there is no such file.
Result<FoundSource> ChosenFile(FileSystem& fs, FoundSource source, const Terminal& terminal);

// Opens a source (FindNamed, with the terminal's --root) as one checkpoint; of a store or a
// training directory the latest, said in a note. Warnings of the open (damaged copy, rebuilt index,
// what was left out of a foreign one) are printed. `lost`: what to do where a foreign checkpoint
// names what its files lack.
enum class IfLost {
  kShow,      // Only tell: what is there can be looked at.
  kRefuse,    // kDataLoss, naming it: what would be made could not be told from a whole one.
  kLeaveOut,  // --partial: tell, and take the tensors that are whole.
};
// A store's latest checkpoint is resolved once, here: a command that reads it for an hour reads the
// same one to the end.
Result<std::shared_ptr<OpenedCheckpoint>> OpenSource(FileSystem& fs, const std::string& text,
                                                     Terminal& terminal,
                                                     IfLost lost = IfLost::kShow);

// "a, b, c and 5 more".
std::string ListedNames(const std::vector<std::string>& names);

// Of --partial.
inline IfLost IfLostOf(bool partial) { return partial ? IfLost::kLeaveOut : IfLost::kRefuse; }

// kDataLoss where something is lost that `keys` chooses (a glob; empty: everything).
// What is known to be lost by name can be chosen by keys; a loss without names (a file that cannot
// be read) may be of anything, and always counts.
Status CheckNothingLost(const OpenedCheckpoint& source, const std::string& keys = {});

// --map RULES.json: no map where the option was not given (empty `path`). kInvalidArgument names
// the file and the rule.
Result<std::shared_ptr<const KeyMap>> ReadKeyMap(FileSystem& fs, const std::string& path);

// kInvalidArgument where a rule (--shard `text`) of several ranks cuts no tensor, as that of an
// axis that none has: all ranks would have all of it, which `replicate` says.
Status CheckRuleCuts(const OpenedCheckpoint& source, const std::string& text, const ShardRule& rule,
                     int ranks);

// What an object's bytes are, for a person (DescribeObject of index/archives/torch_archive.h).
Result<std::string> DescribePart(const OpenedCheckpoint& checkpoint, const ObjectRecord& part);

// Where a tensor's chunks lie, in words: "tensor-file", "rank-shard", "pack", or "mixed".
// "damaged" where its extents cannot be read: `ls -l` lists it all the same.
std::string PlacementOf(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_SOURCE_H_
