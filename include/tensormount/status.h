// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STATUS_H_
#define TENSORMOUNT_STATUS_H_

#include <cassert>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "tensormount/visibility.h"

namespace tensormount {

// Why an operation failed, in the caller's terms. Each code has one errno,
// so that the mount and the library report the same thing.
enum class Code {
  kOk = 0,
  kInvalidArgument,    // EINVAL: the caller passed something that can never work
  kNotFound,           // ENOENT: no such checkpoint, tensor or chunk
  kAlreadyExists,      // EEXIST: refusing to overwrite a committed checkpoint
  kPermissionDenied,   // EACCES
  kReadOnly,           // EROFS: writing below a committed checkpoint
  kResourceExhausted,  // ENOSPC: disk, memory, device memory or quota
  kDataLoss,           // EIO: stored bytes are missing, short or fail their checksum
  kUnavailable,        // EAGAIN: a peer, device or file system may come back
  kDeadlineExceeded,   // ETIMEDOUT: somebody, who is named, did not answer in time
  kBusy,               // EBUSY: open writers
  kStale,              // ESTALE: the checkpoint or staging is gone
  kUnknown,            // EIO: the store did not say whether a commit happened
  kUnsupported,        // EOPNOTSUPP: not built in, or a newer format version
  kCancelled,          // EINTR
  kInternal,           // EIO: a bug in tensormount
};

// "DATA_LOSS" for kDataLoss, and so on: the word that error lines begin with.
TENSORMOUNT_EXPORT std::string_view CodeName(Code code);

// What a failure is about, for programs: what its message says in words. Each may be missing, and
// is where nothing knew it or it is about nothing of that kind.
struct ErrorFields {
  int rank = -1;           // That failed or did not come, the first of several; -1: not known.
  std::string key = {};    // Of a tensor, an object or a common value.
  std::string file = {};   // Of a checkpoint, below its folder ("data/..."), or a path.
  std::string cause = {};  // What most likely happened, in words.
  // The cells of the tensor `key` that are concerned, a number an axis each. Both are empty where
  // that is not known, and for a tensor without axes.
  std::vector<std::int64_t> box_begin = {};
  std::vector<std::int64_t> box_extent = {};
  // A device may still read or write memory of the call that failed, and the caller's streams do
  // not wait for it: that memory must not be given to anything else as long as the process lives.
  bool memory_in_use = false;
  // The device that failed, and whose driver: "cuda:0", with its model where that is known. With
  // kUnavailable: the device is gone, not a rank; `rank` says whose it is.
  std::string device = {};

  friend bool operator==(const ErrorFields&, const ErrorFields&) = default;
};

// The outcome of an operation that yields no value. Success allocates nothing
// and copies share the message. Thread-compatible.
// An error is looked at by its code, never by its text: codes are stable, messages are for people
// and may change. Example:
//
//   Status s = ...;
//   if (s.code() == Code::kNotFound) return MakeNew();
//   if (!s.ok()) return s.WithContext("opening " + path);
class TENSORMOUNT_EXPORT [[nodiscard]] Status {
 public:
  Status() = default;  // Ok.
  Status(Code code, std::string message);

  // For a failed system call: picks the code from `err`, keeps `err` itself and
  // says what was being done to which object ("read data/w.bin: No space left on device").
  static Status FromErrno(int err, std::string_view action, std::string_view object);

  // A failure that came over a wire: code, errno (0 = the code's own) and message as they were.
  static Status FromParts(Code code, int err, std::string message);

  bool ok() const { return rep_ == nullptr; }
  Code code() const;
  const std::string& message() const;

  // The errno to hand to the kernel: the original one where there was one.
  int ToErrno() const;

  // All of them missing when ok.
  const ErrorFields& fields() const;

  // "DATA_LOSS: ..." for logs and test failures; "OK" when ok.
  std::string ToString() const;

  // The same failure seen one level up: "<context>: <message>". No-op when ok.
  Status WithContext(std::string_view context) const;
  // The same failure in other words. No-op when ok.
  Status WithMessage(std::string message) const;
  // With the fields that are missing taken from `more`: what was known first, where it failed, is
  // the most exact. A box goes with its key: that of another one is not taken. No-op when ok.
  Status With(const ErrorFields& more) const;

 private:
  struct Rep {
    Code code;
    int err;  // 0 where no system call was involved.
    std::string message;
    ErrorFields fields = {};
  };
  explicit Status(Rep rep);
  std::shared_ptr<const Rep> rep_;
};

// A value, or the reason why there is none.
//
// Example:
//
//   Result<Checkpoint> opened = Checkpoint::Open("STORE/latest");
//   if (!opened.ok()) return opened.status();
//   const Checkpoint& checkpoint = opened.value();
//
// or, in a function that returns a Status or Result itself:
//
//   TENSORMOUNT_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open("STORE/latest"));
template <typename T>
class [[nodiscard]] Result {
 public:
  // Implicit, so that a function can return either. `status` must not be ok.
  Result(T value) : holds_(kValue) {  // NOLINT
    ::new (&value_) std::remove_const_t<T>(std::move(value));
  }
  Result(Status status) : holds_(kStatus) {  // NOLINT
    ::new (&status_) Status(std::move(status));
    assert(!status_.ok());
  }
  Result(const Result& other) requires std::is_copy_constructible_v<T> { Take(other); }
  Result(Result&& other) noexcept(std::is_nothrow_move_constructible_v<T>) {
    Take(std::move(other));
  }
  Result& operator=(const Result& other) requires std::is_copy_constructible_v<T> {
    if (this != &other) *this = Result(other);
    return *this;
  }
  Result& operator=(Result&& other) noexcept(std::is_nothrow_move_constructible_v<T>) {
    if (this != &other) {
      Destroy();
      Take(std::move(other));
    }
    return *this;
  }
  ~Result() { Destroy(); }

  bool ok() const { return holds_ == kValue; }
  Status status() const {
    if (holds_ == kNothing) throw std::bad_variant_access();
    return ok() ? Status() : status_;
  }

  // Require ok(); reading the value of a failed result is a bug and throws.
  // Of a named result this is a reference into it; std::move(result).value() takes the value out.
  T& value() & {
    RequireValue();
    return value_;
  }
  const T& value() const& {
    RequireValue();
    return value_;
  }
  T value() && {  // By value: safe in a range-for.
    RequireValue();
    return std::move(value_);
  }

 private:
  // The layout is that of std::variant<T, Status>, which programs compiled against earlier headers
  // have here. The type itself is not used: its templates took up to a fifth of the time to compile
  // a file.
  enum Holds : unsigned char { kValue, kStatus, kNothing };

  template <typename Other>
  void Take(Other&& other) {
    holds_ = kNothing;  // Stays so where the value's constructor throws.
    if (other.holds_ == kValue) {
      ::new (&value_) std::remove_const_t<T>(std::forward<Other>(other).value_);
    } else if (other.holds_ == kStatus) {
      ::new (&status_) Status(std::forward<Other>(other).status_);
    }
    holds_ = other.holds_;
  }
  void Destroy() {
    if (holds_ == kValue) {
      std::destroy_at(&value_);
    } else if (holds_ == kStatus) {
      status_.~Status();
    }
    holds_ = kNothing;
  }
  void RequireValue() const {
    if (holds_ != kValue) throw std::bad_variant_access();
  }

  union {
    std::remove_const_t<T> value_;
    Status status_;
  };
  Holds holds_;
};

}  // namespace tensormount

// Leaves the enclosing function with the failure, if there is one.
#define TENSORMOUNT_RETURN_IF_ERROR(expr)                                                \
  do {                                                                                   \
    if (::tensormount::Status tensormount_status_ = (expr); !tensormount_status_.ok()) { \
      return tensormount_status_;                                                        \
    }                                                                                    \
  } while (false)

// TENSORMOUNT_ASSIGN_OR_RETURN(auto reader, ShardReader::Open(path));
#define TENSORMOUNT_ASSIGN_OR_RETURN(decl, expr) \
  TENSORMOUNT_ASSIGN_OR_RETURN_(TENSORMOUNT_CONCAT_(tensormount_result_, __COUNTER__), decl, expr)
#define TENSORMOUNT_ASSIGN_OR_RETURN_(tmp, decl, expr) \
  auto tmp = (expr);                                   \
  if (!tmp.ok()) return tmp.status();                  \
  decl = std::move(tmp).value()
#define TENSORMOUNT_CONCAT_(a, b) TENSORMOUNT_CONCAT2_(a, b)
#define TENSORMOUNT_CONCAT2_(a, b) a##b

#endif  // TENSORMOUNT_STATUS_H_
