// SPDX-License-Identifier: Apache-2.0
#include "bench/ckptbench.h"

namespace tensormount::bench {

Status BenchMountRead(const Options&) { return Status(Code::kUnsupported, "built without FUSE"); }
Status BenchMountWrite(const Options&) { return Status(Code::kUnsupported, "built without FUSE"); }
Status BenchMountLs(const Options&) { return Status(Code::kUnsupported, "built without FUSE"); }

}  // namespace tensormount::bench
