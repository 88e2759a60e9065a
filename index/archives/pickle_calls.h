// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CALLS_H_
#define TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CALLS_H_

#include <string>
#include <string_view>

#include "index/archives/pickle.h"

// Checks of the calls in a pickle. No call is made, so these functions refuse the calls whose
// results the records could not show.

namespace tensormount::pickle {

// A kind for messages: "a list".
std::string_view KindName(Kind kind);
// The name in a kGlobal as printable text: "os.system".
std::string FullName(const Value& global);

// The reason why the arguments of getattr are refused. Empty if the arguments are an enum, or a
// kTrainerRecord (which may be one), and a text: some versions of Python write enum members as
// calls of getattr.
std::string GetattrFault(const Value& args);

// Whether `known` is a function that makes tensors. Such a function is not a class.
bool IsTensorFunction(KnownClass known);

// Whether `v` is a dict or an object of a dict class.
bool IsPythonDict(const Value& v);

// The reason why `key` cannot be in a dict that already has the key `beside`; empty if it can be.
// Lists and dicts are refused. A dict must not mix keys made by calls (except of a few known
// classes) with other keys, because the result of a call may equal a text or a number.
std::string_view KeyFault(const Value& beside, const Value& key);

}  // namespace tensormount::pickle

#endif  // TENSORMOUNT_INDEX_ARCHIVES_PICKLE_CALLS_H_
