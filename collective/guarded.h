// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_GUARDED_H_
#define TENSORMOUNT_COLLECTIVE_GUARDED_H_

#include <exception>
#include <new>

#include "tensormount/status.h"

namespace tensormount {

// Runs work that stands between two collective calls: whatever happens in it, an exception of a
// library included, the rank reaches the next call and the others learn why.
template <typename Fn>
Status Guarded(Fn fn) {
  try {
    return fn();
  } catch (const std::bad_alloc&) {
    return Status(Code::kResourceExhausted, "out of memory");
  } catch (const std::exception& e) {
    return Status(Code::kInternal, e.what());
  } catch (...) {
    return Status(Code::kInternal, "unknown exception");
  }
}

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_GUARDED_H_
