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

// Why an operation failed. Each code has one errno, so that the mount and the library report the
// same error.
enum class Code {
  kOk = 0,
  kInvalidArgument,    // EINVAL: the caller passed something that can never work
  kNotFound,           // ENOENT: no such checkpoint, tensor or chunk
  kAlreadyExists,      // EEXIST: refusing to overwrite a committed checkpoint
  kPermissionDenied,   // EACCES
  kReadOnly,           // EROFS: writing below a committed checkpoint, or to read-only storage
  kResourceExhausted,  // ENOSPC: disk, memory, device memory, descriptors or quota
  kDataLoss,           // EIO: stored bytes are missing, short or fail their checksum
  kUnavailable,        // EAGAIN: a peer, device or file system failed and may come back
  kDeadlineExceeded,   // ETIMEDOUT: a peer (named in the message) did not answer in time
  kBusy,               // EBUSY: the object is in use, or is being changed
  kStale,              // ESTALE: the checkpoint or staging directory no longer exists
  kUnknown,            // EIO: not known whether a commit happened
  kUnsupported,        // EOPNOTSUPP: not built in, not possible here, or a newer format version
  kCancelled,          // EINTR
  kInternal,           // EIO: a bug in tensormount
};

// The name of a code, "DATA_LOSS" for kDataLoss; error lines begin with it.
TENSORMOUNT_EXPORT std::string_view CodeName(Code code);

// The facts of a failure for programs; the message has them as text. A field is unset if it is
// unknown or does not apply.
struct ErrorFields {
  int rank = -1;           // The first rank that failed or did not come; -1: unknown.
  std::string key = {};    // Key of a tensor, an object or a common value.
  std::string file = {};   // Below the checkpoint's directory ("data/..."), or a path.
  std::string cause = {};  // The likely cause, as text.
  // The affected cells of the tensor `key`, one number per axis. Both are empty if unknown, and for
  // a tensor without axes.
  std::vector<std::int64_t> box_begin = {};
  std::vector<std::int64_t> box_extent = {};
  // A device may still access memory of the call that failed, and the caller's streams do not wait
  // for it: the process must never reuse that memory.
  bool memory_in_use = false;
  // The device that failed, or whose driver did: "cuda:0", with its model if known. With
  // kUnavailable: the device is lost, not the rank; `rank` is its rank.
  std::string device = {};

  friend bool operator==(const ErrorFields&, const ErrorFields&) = default;
};

// The result of an operation without a value. Success allocates nothing, and copies share the
// message. Thread-compatible. Test the code, never the text: codes are stable, messages may change.
// For instance:
//
//   Status s = ...;
//   if (s.code() == Code::kNotFound) return MakeNew();
//   if (!s.ok()) return s.WithContext("opening " + path);
class TENSORMOUNT_EXPORT [[nodiscard]] Status {
 public:
  Status() = default;  // Ok.
  Status(Code code, std::string message);

  // For a failed system call: derives the code from `err`, keeps `err`, and makes a message from
  // the action and its object ("read data/w.bin: No space left on device").
  static Status FromErrno(int err, std::string_view action, std::string_view object);

  // A failure received from another process. Code, errno (0: the code's own errno) and message are
  // unchanged.
  static Status FromParts(Code code, int err, std::string message);

  bool ok() const { return rep_ == nullptr; }
  Code code() const;
  const std::string& message() const;

  // The errno to return to the kernel: that of the failed system call, or the code's own errno.
  int ToErrno() const;

  // The fields of the failure; all are unset when ok.
  const ErrorFields& fields() const;

  // "DATA_LOSS: ..." for logs and test failures; "OK" when ok.
  std::string ToString() const;

  // The same failure with the message "<context>: <message>". No-op when ok.
  Status WithContext(std::string_view context) const;
  // The same failure with another message. No-op when ok.
  Status WithMessage(std::string message) const;
  // Takes unset fields from `more`: fields set earlier, closer to the failure, are more exact and
  // stay. A box is taken only for the same key. No-op when ok.
  Status With(const ErrorFields& more) const;

 private:
  struct Rep {
    Code code;
    int err;  // 0 if no system call failed.
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
  // Implicit, so that a function can return a value or a status. `status` must not be ok.
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

  // These functions require ok(); otherwise they throw. On a named result value() returns a
  // reference; std::move(result).value() moves the value out.
  T& value() & {
    RequireValue();
    return value_;
  }
  const T& value() const& {
    RequireValue();
    return value_;
  }
  T value() && {  // By value, so that a range-for over it does not dangle.
    RequireValue();
    return std::move(value_);
  }

 private:
  // The memory layout is that of std::variant<T, Status>, which earlier headers used (ABI).
  // std::variant is not used, because its templates took up to a fifth of a file's compile time.
  enum Holds : unsigned char { kValue, kStatus, kNothing };

  template <typename Other>
  void Take(Other&& other) {
    holds_ = kNothing;  // Remains if the value's constructor throws.
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

// Returns the failure from the enclosing function, if there is one.
#define TENSORMOUNT_RETURN_IF_ERROR(expr)                                                \
  do {                                                                                   \
    if (::tensormount::Status tensormount_status_ = (expr); !tensormount_status_.ok()) { \
      return tensormount_status_;                                                        \
    }                                                                                    \
  } while (false)

// Declares a variable with the value of a Result, or returns the failure from the enclosing
// function:
//   TENSORMOUNT_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(path));
#define TENSORMOUNT_ASSIGN_OR_RETURN(decl, expr) \
  TENSORMOUNT_ASSIGN_OR_RETURN_(TENSORMOUNT_CONCAT_(tensormount_result_, __COUNTER__), decl, expr)
#define TENSORMOUNT_ASSIGN_OR_RETURN_(tmp, decl, expr) \
  auto tmp = (expr);                                   \
  if (!tmp.ok()) return tmp.status();                  \
  decl = std::move(tmp).value()
#define TENSORMOUNT_CONCAT_(a, b) TENSORMOUNT_CONCAT2_(a, b)
#define TENSORMOUNT_CONCAT2_(a, b) a##b

#endif  // TENSORMOUNT_STATUS_H_
