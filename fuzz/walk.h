// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_FUZZ_WALK_H_
#define TENSORMOUNT_FUZZ_WALK_H_

#include <cstdlib>
#include <optional>

#include "index/archives/pickle.h"
#include "index/foreign/foreign.h"

namespace tensormount {

// Reads a bounded part of a document through every call of Value.
inline void Walk(const pickle::Value& v, int depth, int& left) {
  using pickle::Kind;
  if (depth > 50 || --left < 0) return;
  switch (v.kind()) {
    case Kind::kString:
    case Kind::kBytes:
    case Kind::kLong:
      if (v.text().size() > (std::size_t{1} << 40)) std::abort();
      return;
    case Kind::kGlobal:
      (void)v.known();
      return;
    case Kind::kPersistent:
      Walk(v.args(), depth + 1, left);
      return;
    case Kind::kObject:
      Walk(v.callee(), depth + 1, left);
      Walk(v.args(), depth + 1, left);
      Walk(v.state(), depth + 1, left);
      (void)v.Find("fqn");
      [[fallthrough]];
    case Kind::kDict:
      for (std::size_t i = 0; i < v.size() && left > 0; ++i) {
        const pickle::Value key = v.key(i);
        Walk(key, depth + 1, left);
        Walk(v.item(i), depth + 1, left);
        if (v.kind() == Kind::kDict && key.kind() == Kind::kString && !v.Find(key.text())) {
          std::abort();
        }
      }
      return;
    case Kind::kTuple:
    case Kind::kList:
    case Kind::kSet:
      for (std::size_t i = 0; i < v.size() && left > 0; ++i) Walk(v.item(i), depth + 1, left);
      return;
    default:
      return;
  }
}

}  // namespace tensormount

#endif  // TENSORMOUNT_FUZZ_WALK_H_
