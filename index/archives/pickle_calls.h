// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CALLS_H_
#define TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CALLS_H_

#include <string>
#include <string_view>

#include "index/archives/pickle.h"

// What Python would make of what a stream asks to be called, as far as records must say the same.

namespace tensormount::pickle {

// "a list".
std::string_view KindName(Kind kind);
// "os.system" of a kGlobal, printable.
std::string FullName(const Value& global);

// getattr is how enums of some versions are written, and means nothing else here. Empty: it is one.
std::string GetattrFault(const Value& args);

// Whether it makes tensors when it is called, and only then.
bool IsTensorFunction(KnownClass known);

// A dict, or an object that is one: what a copy of it is made from.
bool IsPythonDict(const Value& v);

// Why `key` cannot be a key of a dict that has the key `beside`; empty: it can. All keys of a dict
// were made by calls or none was: a call may make what equals a text or a number.
std::string_view KeyFault(const Value& beside, const Value& key);

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CALLS_H_
