// SPDX-License-Identifier: Apache-2.0
// Checks of the calls in a pickle (pickle_calls.h). The parser records calls and never makes them.
#include "index/archives/pickle_calls.h"

#include <array>

#include "index/archives/pickle_record.h"

namespace tensormount::pickle {
namespace {

// Whether a key is an object that may equal other keys, because its class defines equality. The
// classes listed below are known to differ from every text and number. A dict may not mix objects
// of other classes with plain keys.
bool IsMadeByCall(const Value& key) {
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

std::string_view KindName(Kind kind) {
  constexpr std::array<std::string_view, 14> kNames = {
      "None",    "a bool", "an int", "a long int", "a float", "a str",     "bytes",
      "a tuple", "a list", "a set",  "a dict",     "a name",  "an object", "a persistent id"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string FullName(const Value& global) {
  return ShownName(std::string(global.module()) + "." + std::string(global.name()));
}

// Accepts only getattr(CLASS, "NAME") of known enums and of kTrainerRecord, because some versions
// of Python write it for a member of an enum. Hostile streams use getattr to reach os.system from a
// harmless class, so all other uses are refused, although no call is ever made.
std::string GetattrFault(const Value& args) {
  if (args.size() != 2 || args.item(0).kind() != Kind::kGlobal ||
      args.item(1).kind() != Kind::kString) {
    return "calls getattr on something that is not a class";
  }
  switch (args.item(0).known()) {
    case KnownClass::kMemFormatEncoding:
    case KnownClass::kWriteItemType:
    case KnownClass::kTrainerRecord:
      return {};
    default:
      return "calls getattr(" + FullName(args.item(0)) + ", \"" + ShownName(args.item(1).text()) +
             "\"), which is not an enum member";
  }
}

// Machine::CheckCall refuses the opcode NEWOBJ for these functions, because Python applies NEWOBJ
// to classes only.
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
    return "a key of a dict is a list or a dict, which Python does not allow";
  }
  if (IsMadeByCall(beside) != IsMadeByCall(key)) {
    return "a key of a dict is made by a call, so it may be equal to another key";
  }
  return {};
}

}  // namespace tensormount::pickle
