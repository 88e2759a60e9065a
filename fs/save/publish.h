// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FS_SAVE_PUBLISH_H_
#define TENSORMOUNT_FS_SAVE_PUBLISH_H_

#include <chrono>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/status.h"

#include "base/file_system.h"
#include "index/store/store.h"

namespace tensormount::fs {

// What stands in the way of a publish, or nothing. report.json and report.txt are made of it.
// For people and for scripts that restart writers: report.json and report.txt are rewritten by
// every publish that fails, and nothing acts on them.
struct StagingReport {
  // "missing", "conflict", "not_done", "no_journal", "bad_journal", "bad_common", "bad_object",
  // "condemned", "unknown", or, where a call failed, its code.
  struct Problem {
    std::string code;
    std::string object;  // "tensor w [0:4, 128:256]", "object rng[2]", "writer 3".
    std::string detail;  // "written by no mount", "differs between mounts A and B".
  };
  std::vector<Problem> problems;  // At most 1,000; `more` counts the rest.
  std::uint64_t more = 0;
  std::string verdict;  // What the publish failed with, in words.
  std::uint64_t bytes_written = 0;
  std::uint64_t bytes_missing = 0;
  // Of a publish: what the parent held already, so that its files were linked.
  std::uint64_t reused_tensors = 0;
  std::uint64_t reused_bytes = 0;
  std::string reuse_note;  // Why nothing was, although a base was meant; empty: nothing is wrong.
  // One for each journal that could be read.
  std::uint32_t mounts = 0;  // Incarnations that wrote.
  std::vector<std::uint32_t> writers_missing;
  std::string ToJson() const;
  std::string ToText() const;  // A line a problem, with exact boxes in NumPy's spelling.
};

// The steps, and what a crash leaves after each:
//   1. Take the publisher's lease, so that nobody has files open for writing.
//   2. Read schema, done marks and journals; resolve every tensor and object. Nothing is written,
//   so everything that is wrong is found before anything changes. A crash leaves the staging as it
//   was.
//   3. Drop manifests of an earlier try; write the patch file, seal data files, write manifests. A
//   crash leaves files that the next try drops or makes anew.
//   4. Store::Publish: index, COMMIT, rename to STORE/`as`. The rename is the commit.
// Publishes what all mounts wrote into STORE/.staging/NAME as STORE/`as`. Only checks, compares
// where two mounts wrote the same cells, writes records and renames: data were hashed and made
// durable when they were written. Never waits for writers. Where it fails the staging is as it
// was, and its report.json and report.txt say why (`report` too, where not null).
//   ok                  committed and durable
//   kUnavailable/EAGAIN done marks are missing
//   kDataLoss/EIO       bytes are missing, or differ between mounts, or a file was condemned
//   kNotFound/ENODATA   the journal that a done mark relies on is not there, or shorter
//   kBusy/EBUSY         somebody has files open for writing
//   kAlreadyExists      STORE/`as` exists
//   kInvalidArgument    `as` is no name for a checkpoint; no schema; bad common.json
//   kStale              it was published or removed meanwhile
//   kUnknown/EIO        see Store::Publish
Result<Store::Published> PublishStaging(const Store& store, FileSystem& fs, const std::string& name,
                                        const std::string& as, StagingReport* report);
// The same, waiting up to `wait` for done marks and for writers to close their files.
// Tries again with pauses of 5 ms up to 500 ms while the answer is kUnavailable or kBusy, and gives
// the last answer when `wait` is over.
Result<Store::Published> PublishStagingWhenDone(const Store& store, FileSystem& fs,
                                                const std::string& name, const std::string& as,
                                                std::chrono::milliseconds wait,
                                                StagingReport* report);

// What a publish made, for programs (docs/cli.md). Include <nlohmann/json.hpp> where it is used.
nlohmann::ordered_json PublishedJson(const std::string& checkpoint,
                                     const Store::Published& published,
                                     const StagingReport& report);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_PUBLISH_H_
