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

// A value of the common state: a typed tree, the same on every rank, stored once, shown in
// common.json. What a checkpoint has besides tensors: iteration, learning rate, arguments, the
// hyperparameters of an optimizer. Nothing is lost on the way: 64-bit integers, every float bit
// (NaNs, infinities, minus zero), lists and tuples apart, integer and string keys apart, bytes.
//
// Example:
//
//   CommonDict args;
//   args.items["lr"] = 0.1;
//   args.items["betas"] = CommonTuple{{0.9, 0.999}};
//   state.SetCommon("args", args);                               // Saved with the checkpoint.
//   const auto lr = checkpoint.common("args").value().At("lr");  // 0.1
//
// A value: copies are deep. Limits are those of docs/format.md (64 MiB, 64 containers in each
// other); they are checked where a value is set or decoded, not while a tree is built.
class CommonValue;
TENSORMOUNT_EXPORT bool operator==(const CommonValue& a, const CommonValue& b);

// Python's None, JSON's null.
struct CommonNone {
  friend bool operator==(CommonNone, CommonNone) { return true; }
};
// Any bytes; a std::string is text, which need not be UTF-8.
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
// The order in which keys were put in is not kept.
struct TENSORMOUNT_EXPORT CommonDict {
  std::map<CommonKey, CommonValue> items;
  // Null where there is none.
  const CommonValue* Find(const CommonKey& key) const;
};

// Deeper trees are refused everywhere (encoding, decoding, JSON), so that no input can exhaust a
// stack.
inline constexpr int kMaxCommonDepth = 64;

class TENSORMOUNT_EXPORT CommonValue {
 public:
  // On disk and on the wire (docs/format.md): never renumber.
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
    kUnsigned = 9,  // Over 2^63 - 1; smaller ones are kInt.
  };

  // Conversions are implicit so that trees can be written down as literals. Integers of every width
  // become int; only those over 2^63 - 1 unsigned. `float` becomes double, without loss.
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
  // "int", "tuple", ...: for messages.
  std::string_view kind_name() const;

  // The value where it is of that type, null otherwise.
  // The types are those of the variant below: bool, std::int64_t, std::uint64_t, double,
  // std::string, CommonNone and the containers. The pointer is into this value.
  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&value_);
  }
  template <typename T>
  T* get_if() {
    return std::get_if<T>(&value_);
  }

  // By path: "param_groups[0].lr", "{3}" for the integer key 3, "(1)" for a tuple's element; a
  // string key that is no plain word is quoted as in JSON: `."a.b"`. kNotFound names the first
  // part that is not there. The empty path is the value itself.
  Result<CommonValue> At(std::string_view path) const;

  // Floats by their bits: a NaN equals itself, 0.0 and -0.0 differ, 1 and 1.0 differ.
  friend bool operator==(const CommonValue& a, const CommonValue& b);

 private:
  std::variant<CommonNone, bool, std::int64_t, std::uint64_t, double, std::string, CommonBytes,
               CommonList, CommonTuple, CommonDict>
      value_;
};

// Where two trees differ first, in the order of keys, and how, as people would say it:
//   "optimizer.param_groups[0].lr: 0.001 and 0.01", "args.seed: int 1 and string \"1\"",
//   "flags: has 2 items and 3", "args.fp8: only in the second".
// nullopt where they are equal. Long values are cut.
struct CommonMismatch {
  std::string path;
  std::string what;  // Without the path.
};
using CommonDifference [[deprecated("CommonMismatch")]] = CommonMismatch;  // Until 0.2.
TENSORMOUNT_EXPORT std::optional<CommonMismatch> FirstDifference(const CommonValue& a,
                                                                 const CommonValue& b);

// The text of common.json and back, without loss (docs/format.md, "common.json"): what JSON has is
// written plainly, everything else as an object with one key that begins with '$'. A dict that has
// such a key itself is written as {"$dict": [[key, value], ...]}.
TENSORMOUNT_EXPORT std::string CommonToJson(const CommonValue& value);
// kInvalidArgument says where the text breaks a rule.
TENSORMOUNT_EXPORT Result<CommonValue> CommonFromJson(std::string_view text);

}  // namespace tensormount

#endif  // TENSORMOUNT_COMMON_VALUE_H_
