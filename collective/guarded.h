// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_GUARDED_H_
#define TENSORMOUNT_COLLECTIVE_GUARDED_H_

#include <exception>
#include <new>

#include "tensormount/status.h"

namespace tensormount {

// Runs `fn`. An exception becomes a failure, so that this rank still reaches its next collective
// call and the other ranks learn the reason.
template <typename Fn>
Status Guarded(Fn fn) {
  try {
    return fn();
  } catch (const std::bad_alloc&) {
    return Status(Code::kResourceExhausted, "out of memory");
  } catch (const std::exception& e) {
    return Status(Code::kInternal, e.what());
  } catch (...) {
    return Status(Code::kInternal, "internal error: an exception of an unknown type was thrown");
  }
}

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_GUARDED_H_
