// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BENCH_NULL_FUSE_H_
#define TENSORMOUNT_BENCH_NULL_FUSE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "tensormount/status.h"

namespace tensormount::bench {

// The floor of mount-read: a FUSE server whose only file "f" is answered out of a buffer, with
// the flags, request size and number of threads of our mount. It does nothing but answer.
class NullFuse {
 public:
  struct Options {
    std::string mount_point;
    std::uint64_t file_bytes = 0;
    int threads = 2;
    // Bytes that it answers out of, at least a request: one request's stay in the cache; as many as
    // the file has must come from memory, as those of any server do that has something to say.
    std::uint64_t memory_bytes = 0;
    bool direct_io = true;  // FOPEN_DIRECT_IO; false: through the page cache of the kernel.
  };
  // kUnsupported where this build has no FUSE.
  static Result<std::unique_ptr<NullFuse>> Start(const Options& options);
  virtual ~NullFuse() = default;  // Unmounts.
};

}  // namespace tensormount::bench

#endif  // TENSORMOUNT_BENCH_NULL_FUSE_H_
