// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_MOUNT_TOOLS_SOURCE_H_
#define TENSORMOUNT_MOUNT_TOOLS_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/key_map.h"
#include "tensormount/name_map.h"
#include "tensormount/status.h"

#include "index/foreign/model_files.h"
#include "index/foreign/open_source.h"
#include "index/foreign/rule_packs.h"
#include "index/read/checkpoint.h"
#include "index/store/store.h"
#include "mount-tools/name_map_args.h"
#include "mount-tools/terminal.h"
#include "state/shard_rule.h"

namespace tensormount::tools {

// FindSource for an argument of a command. For a directory in a tensormount mount (MNT, MNT/step-1)
// it finds the source that the mount shows, and prints a note. For a name that does not exist the
// error suggests a similar name. Applies --file, but not to the source of a mount.
Result<FoundSource> FindSourceArgument(const std::string& text, Terminal& terminal);

// The file that --file selects in a foreign directory; kNotFound if it does not exist. Other
// sources, and all sources without --file, are returned unchanged.
Result<FoundSource> ApplyFileOption(FoundSource source, Terminal& terminal);

// Opens the store that an argument names. kInvalidArgument: it is a checkpoint. kUnsupported: it is
// a training directory of another program.
Result<Store> OpenStoreArgument(const std::string& text, Terminal& terminal);

// What OpenSource does if a foreign checkpoint has missing data.
enum class LossPolicy {
  kWarn,      // Prints a warning.
  kRefuse,    // Fails with kDataLoss, because the output must be complete.
  kLeaveOut,  // Prints a warning and removes incomplete tensors (--partial).
};
// Opens one checkpoint. For a store or training directory, opens the latest and prints a note.
// Prints the warnings of the opening (damaged copy, rebuilt index, data left out of a foreign
// checkpoint).
Result<std::shared_ptr<OpenedCheckpoint>> OpenSource(const std::string& text, Terminal& terminal,
                                                     LossPolicy lost = LossPolicy::kWarn);

// The names as "a, b, c and 5 more"; at most 8 are listed.
std::string JoinFirstNames(const std::vector<std::string>& names);

inline LossPolicy LossPolicyOf(bool partial) {
  return partial ? LossPolicy::kLeaveOut : LossPolicy::kRefuse;
}

// kDataLoss if data are missing for a key that matches `keys` (a glob; empty: all keys). A loss
// without keys (a file that cannot be read) always counts, because it may affect any key.
Status CheckSourceComplete(const OpenedCheckpoint& source, const std::string& keys = {});

// Reads a file that an option or argument names. Fails if it is larger than `max_bytes`.
Result<std::string> ReadNamedFile(const std::string& path, std::uint64_t max_bytes);

// Reads rules that only rename and drop keys; null if `path` is empty. kInvalidArgument: the rules
// are invalid; the message names the file and the rule.
Result<std::shared_ptr<const KeyMap>> ReadKeyMap(const std::string& path);
// Reads the name map of --map, --as and the options beside them. kInvalidArgument: options that
// cannot be together, a text that is not NAME=NUMBER, or rules that are invalid; the message names
// the file, the rule and its line.
Result<NameMap> ReadNameMap(const NameMapArgs& args);
// The model files of --with; null without it.
Result<std::shared_ptr<const ModelFiles>> ReadFilesBeside(const NameMapArgs& args);

// kInvalidArgument if the rule (parsed from `text`, the value of --shard) splits no tensor, for
// example because no tensor has the axis. Then every rank would have all data, as with the rule
// `replicate`. Sources with a scalar, a single rank and `replicate` itself pass.
Status CheckShardRuleSplits(const OpenedCheckpoint& source, const std::string& text,
                            const ShardRule& rule, int ranks);

// A description of an object's bytes for people (DescribeObject of index/archives/torch_archive.h).
Result<std::string> DescribePart(const OpenedCheckpoint& checkpoint, const ObjectRecord& part);

// Where a tensor's chunks are stored: the name of their placement (PlacementName), "mixed" for
// several, or "none" without chunks. "damaged" if the extents cannot be read, so that `ls` still
// lists the tensor.
std::string PlacementOf(const OpenedCheckpoint& checkpoint, const TensorEntry& tensor);

}  // namespace tensormount::tools

#endif  // TENSORMOUNT_MOUNT_TOOLS_SOURCE_H_
