// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COMMON_VALUE_H_
#define TENSORMOUNT_COMMON_VALUE_H_

#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// A value of the common state: a typed tree that is equal on every rank, stored once, and shown in
// common.json. For everything besides tensors: iteration, learning rate, arguments, optimizer
// hyperparameters. Values are stored without loss: 64-bit integers, every float bit (NaNs,
// infinities, minus zero), bytes; lists and tuples, and integer and string keys, stay distinct.
//
// Example:
//
//   CommonDict args;
//   args.items["lr"] = 0.1;
//   args.items["betas"] = CommonTuple{{0.9, 0.999}};
//   state.SetCommon("args", args);                               // Saved with the checkpoint.
//   const auto lr = checkpoint.common("args").value().At("lr");  // 0.1
//
// A value type with deep copies. The limits of docs/format.md (64 MiB, 64 levels of containers) are
// checked when a value is set or decoded, not while a tree is built.
class CommonValue;
TENSORMOUNT_EXPORT bool operator==(const CommonValue& a, const CommonValue& b);

// Python's None, JSON's null.
struct CommonNone {
  friend bool operator==(CommonNone, CommonNone) { return true; }
};
// Arbitrary bytes. A std::string is text, which need not be UTF-8.
struct CommonBytes {
  std::string data;
  friend bool operator==(const CommonBytes&, const CommonBytes&) = default;
};
struct TENSORMOUNT_EXPORT CommonList {
  std::vector<CommonValue> items;
};
struct TENSORMOUNT_EXPORT CommonTuple {
  std::vector<CommonValue> items;
};
// Integers sort before strings: 1 and "1" are two keys.
using CommonKey = std::variant<std::int64_t, std::string>;
// A dict, which does not keep the insertion order of its keys.
struct TENSORMOUNT_EXPORT CommonDict {
  std::map<CommonKey, CommonValue> items;
  // The value of a key; null if the key is missing.
  const CommonValue* Find(const CommonKey& key) const;
};

// Deeper trees are refused (encoding, decoding, JSON), so that no input can exhaust the stack.
inline constexpr int kMaxCommonDepth = 64;

class TENSORMOUNT_EXPORT CommonValue {
 public:
  // The numbers are stored on disk and sent (docs/format.md): never renumber.
  enum class Kind : std::uint8_t {
    kBool = 0,
    kInt = 1,
    kFloat = 2,
    kString = 3,
    kBytes = 4,
    kNone = 5,
    kList = 6,
    kTuple = 7,
    kDict = 8,
    kUnsigned = 9,  // Integers above 2^63 - 1; smaller ones are kInt.
  };

  // Conversions are implicit so that trees can be written as literals. Integers of every width
  // become int, or unsigned above 2^63 - 1. `float` becomes double, without loss.
  CommonValue() = default;    // None.
  CommonValue(CommonNone) {}  // NOLINT(google-explicit-constructor): as all below.
  template <std::integral T>
  CommonValue(T value) {  // NOLINT
    if constexpr (std::same_as<T, bool>) {
      value_ = value;
    } else if constexpr (std::unsigned_integral<T> && sizeof(T) >= 8) {
      if (value > static_cast<T>(std::numeric_limits<std::int64_t>::max())) {
        value_ = static_cast<std::uint64_t>(value);
      } else {
        value_ = static_cast<std::int64_t>(value);
      }
    } else {
      value_ = static_cast<std::int64_t>(value);
    }
  }
  CommonValue(double value) : value_(value) {}                         // NOLINT
  CommonValue(std::string value) : value_(std::move(value)) {}         // NOLINT
  CommonValue(const char* value) : value_(std::string(value)) {}       // NOLINT
  CommonValue(std::string_view value) : value_(std::string(value)) {}  // NOLINT
  CommonValue(CommonBytes value) : value_(std::move(value)) {}         // NOLINT
  CommonValue(CommonList value) : value_(std::move(value)) {}          // NOLINT
  CommonValue(CommonTuple value) : value_(std::move(value)) {}         // NOLINT
  CommonValue(CommonDict value) : value_(std::move(value)) {}          // NOLINT

  Kind kind() const;
  // Name of the kind, for messages: "int", "tuple", ...
  std::string_view kind_name() const;

  // The value if it has type T, otherwise null. T is a type of the variant below. The pointer is
  // into this value.
  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&value_);
  }
  template <typename T>
  T* get_if() {
    return std::get_if<T>(&value_);
  }

  // The value at a path: "param_groups[0].lr"; "{3}" is the integer key 3, "(1)" a tuple's element;
  // a string key that is not a plain word is quoted as in JSON: `."a.b"`. kNotFound names the first
  // missing part. The empty path is the value itself.
  Result<CommonValue> At(std::string_view path) const;

  // Compares floats by their bits: a NaN equals itself, 0.0 and -0.0 differ, 1 and 1.0 differ.
  friend bool operator==(const CommonValue& a, const CommonValue& b);

 private:
  std::variant<CommonNone, bool, std::int64_t, std::uint64_t, double, std::string, CommonBytes,
               CommonList, CommonTuple, CommonDict>
      value_;
};

// The first difference of two trees, in the order of keys, as readable text:
//   "optimizer.param_groups[0].lr: 0.001 and 0.01", "args.seed: int 1 and string \"1\"",
//   "flags: has 2 items and 3", "args.fp8: only in the second".
// nullopt if they are equal. Long values are shortened.
struct CommonMismatch {
  std::string path;
  std::string what;  // The difference, without the path.
};
using CommonDifference [[deprecated("CommonMismatch")]] = CommonMismatch;  // Old name, until 0.2.
TENSORMOUNT_EXPORT std::optional<CommonMismatch> FirstDifference(const CommonValue& a,
                                                                 const CommonValue& b);

// Converts to and from the text of common.json, without loss (docs/format.md, "common.json"). Types
// that JSON has are written plainly; others become an object with one key that begins with '$'. A
// dict that has such a key itself is written as {"$dict": [[key, value], ...]}.
TENSORMOUNT_EXPORT std::string CommonToJson(const CommonValue& value);
// Converts text in the form of common.json to a value. The message of kInvalidArgument gives the
// position of the error.
TENSORMOUNT_EXPORT Result<CommonValue> CommonFromJson(std::string_view text);

}  // namespace tensormount

#endif  // TENSORMOUNT_COMMON_VALUE_H_
