// SPDX-License-Identifier: Apache-2.0
// What calls in a pickle come to. A call is never made: a function on the allow-list that only
// makes a container or a record is replaced by that container or record.
#include "index/archives/pickle_calls.h"

#include <array>

#include "index/archives/pickle_record.h"

namespace tensormount::pickle {
namespace {

// Of some it is known that they equal no text and no number.
// Equality of a Python object is whatever its class says. These classes are known to differ from
// every text and number; of others nobody knows, so a dict may not mix them with plain keys.
bool MadeByCall(const Value& key) {
  if (key.kind() != Kind::kObject) return false;
  switch (key.callee().known()) {
    case KnownClass::kMetadataIndex:
    case KnownClass::kTorchSize:
    case KnownClass::kTorchDevice:
    case KnownClass::kPath:
    case KnownClass::kDatetime:
      return false;
    default:
      return true;
  }
}

}  // namespace

// In the order of Kind.
std::string_view KindName(Kind kind) {
  constexpr std::array<std::string_view, 14> kNames = {
      "None",    "a bool", "an int", "a long int", "a float", "a str",     "bytes",
      "a tuple", "a list", "a set",  "a dict",     "a name",  "an object", "a persistent id"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string FullName(const Value& global) {
  return ShownName(std::string(global.module()) + "." + std::string(global.name()));
}

// Some versions of Python write a member of an enum as getattr(Enum, "NAME"). Of anything else
// getattr is how a hostile stream walks from a harmless class to os.system, so it is refused though
// nothing here would ever call it.
std::string GetattrFault(const Value& args) {
  if (args.size() != 2 || args.item(0).kind() != Kind::kGlobal ||
      args.item(1).kind() != Kind::kString) {
    return "asks for getattr of something that is no class";
  }
  switch (args.item(0).known()) {
    case KnownClass::kMemFormatEncoding:
    case KnownClass::kWriteItemType:
    case KnownClass::kTrainerRecord:
      return {};
    default:
      return "asks for getattr(" + FullName(args.item(0)) + ", \"" +
             ShownName(args.item(1).text()) + "\"), which is no member of an enum";
  }
}

// As a class (NEWOBJ) they would mean something else to Python than as a function (REDUCE).
bool IsTensorFunction(KnownClass known) {
  switch (known) {
    case KnownClass::kRebuildTensor:
    case KnownClass::kRebuildTensorV2:
    case KnownClass::kRebuildTensorV3:
    case KnownClass::kRebuildParameter:
    case KnownClass::kRebuildFromTypeV2:
    case KnownClass::kRebuildOther:
      return true;
    default:
      return false;
  }
}

bool IsPythonDict(const Value& v) {
  if (v.kind() == Kind::kDict) return true;
  return v.Is(KnownClass::kOrderedDict) || v.Is(KnownClass::kDefaultDict) ||
         v.Is(KnownClass::kCounter) || (v.Is(KnownClass::kDictLike) && v.callee().name() == "dict");
}

std::string_view KeyFault(const Value& beside, const Value& key) {
  if (key.kind() == Kind::kList || key.kind() == Kind::kDict) {
    return "a key that is a list or a dict, which Python does not take";
  }
  if (MadeByCall(beside) != MadeByCall(key)) {
    return "a key made by a call beside others, which it may equal";
  }
  return {};
}

}  // namespace tensormount::pickle
