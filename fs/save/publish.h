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

// The problems that prevent a publish. A publish that fails after it took the publisher's lease,
// and finds the staging still in place, rewrites report.json and report.txt from this report, for
// people and for scripts that restart writers; tensormount itself never reads these files.
struct StagingReport {
  // One problem. `code` is "missing", "conflict", "not_done", "no_journal", "bad_journal",
  // "bad_common", "bad_object", "condemned", "unknown", "internal", or the code of a failed call.
  struct Problem {
    std::string code;
    std::string object;  // Such as "tensor w [0:4, 128:256]", "object rng[2]", "writer 3".
    std::string detail;  // Such as "written by no mount", "differs between mounts A and B".
  };
  std::vector<Problem> problems;  // At most 1,000. There are at least `more` others.
  std::uint64_t more = 0;
  std::string verdict;  // Message of the publish's error.
  std::uint64_t bytes_written = 0;
  std::uint64_t bytes_missing = 0;
  // Number of tensors, and number of bytes of tensors and objects, that were taken from the base by
  // hard-linking its files.
  std::uint64_t reused_tensors = 0;
  std::uint64_t reused_bytes = 0;
  std::string reuse_note;  // The problem because of which nothing was reused; empty: none.
  // Number of mounts (incarnations) that wrote: one for each readable journal.
  std::uint32_t mounts = 0;
  std::vector<std::uint32_t> writers_missing;
  std::string ToJson() const;
  std::string ToText() const;  // One line for each problem, with exact boxes in NumPy notation.
};

// Publishes what all mounts wrote into STORE/.staging/NAME as STORE/`as`. Data were hashed and made
// durable when they were synced, so this checks, compares cells that two mounts wrote, writes
// records and renames; it copies few data (PatchFile). Never waits for writers.
// Steps:
//   1. Take the publisher's lease, so that nobody has files open for writing.
//   2. Read schema, done marks and journals; resolve every tensor and object. Problems of the
//      content are found here, before anything but the patch file is written.
//   3. Drop manifests of an earlier attempt; complete the patch file, seal data files, write
//      manifests. After a crash the next attempt makes patch file and manifests anew.
//   4. Store::Publish: index, COMMIT, rename to STORE/`as`. The rename is the commit.
// On failure the staging can still be written to and published. Its report.json and report.txt, if
// written (StagingReport), and `report`, if not null, give the reasons.
//   ok                  committed and durable
//   kUnavailable/EAGAIN done marks are missing
//   kDataLoss/EIO       bytes are missing, or differ between mounts, or a file was condemned
//   kNotFound/ENODATA   the journal that a done mark relies on is missing or too short
//   kNotFound           there is no such staging
//   kBusy/EBUSY         somebody has files open for writing, or is publishing
//   kAlreadyExists      STORE/`as` exists, or schemas of two mounts conflict
//   kInvalidArgument    `as` is not a valid checkpoint name; no schema; bad common.json
//   kStale              the staging was published or removed meanwhile
//   kUnknown/EIO        see Store::Publish
//   others              a call failed
Result<Store::Published> PublishStaging(const Store& store, FileSystem& fs, const std::string& name,
                                        const std::string& as, StagingReport* report);
// Like PublishStaging, but waits up to `wait` for done marks and for writers to close their files:
// retries after pauses of 5 ms to 500 ms while the result is kUnavailable or kBusy, then returns
// the last result.
Result<Store::Published> PublishStagingWhenDone(const Store& store, FileSystem& fs,
                                                const std::string& name, const std::string& as,
                                                std::chrono::milliseconds wait,
                                                StagingReport* report);

// The result of a publish as JSON (docs/cli.md). Callers include <nlohmann/json.hpp>.
nlohmann::ordered_json PublishedJson(const std::string& checkpoint,
                                     const Store::Published& published,
                                     const StagingReport& report);

}  // namespace tensormount::fs

#endif  // TENSORMOUNT_FS_SAVE_PUBLISH_H_
