// SPDX-License-Identifier: Apache-2.0
// Status of tensormount/status.h. The names and errno of all codes are in one table, so that a new
// code cannot be forgotten in one place.
#include "tensormount/status.h"

#include <cerrno>
#include <cstring>

namespace tensormount {
namespace {

struct CodeRow {
  std::string_view name;
  int err;
};

// Indexed by Code. The errno is for failures that no failed system call caused.
constexpr CodeRow kRows[] = {
    {"OK", 0},
    {"INVALID_ARGUMENT", EINVAL},
    {"NOT_FOUND", ENOENT},
    {"ALREADY_EXISTS", EEXIST},
    {"PERMISSION_DENIED", EACCES},
    {"READ_ONLY", EROFS},
    {"RESOURCE_EXHAUSTED", ENOSPC},
    {"DATA_LOSS", EIO},
    {"UNAVAILABLE", EAGAIN},
    {"DEADLINE_EXCEEDED", ETIMEDOUT},
    {"BUSY", EBUSY},
    {"STALE", ESTALE},
    {"UNKNOWN", EIO},
    {"UNSUPPORTED", EOPNOTSUPP},
    {"CANCELLED", EINTR},
    {"INTERNAL", EIO},
};
static_assert(std::size(kRows) == static_cast<std::size_t>(Code::kInternal) + 1);

const CodeRow& RowOf(Code code) {
  const auto i = static_cast<std::size_t>(code);
  return i < std::size(kRows) ? kRows[i] : kRows[static_cast<std::size_t>(Code::kInternal)];
}

// Groups errnos by what the caller can do, not by the call that failed. The Status also keeps the
// errno itself (Status::ToErrno), and a mount returns that one to the kernel.
Code CodeOfErrno(int err) {
  switch (err) {
    case ENOENT:
    case ENOTDIR:  // A component of the path is a file.
    case ENODATA:
    case ESRCH:
      return Code::kNotFound;
    case EEXIST:
    case ENOTEMPTY:  // POSIX allows rmdir and rename to return either.
      return Code::kAlreadyExists;
    case EACCES:
    case EPERM:
      return Code::kPermissionDenied;
    case EROFS:
      return Code::kReadOnly;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:  // Not a full disk, but it may be temporary, too.
    case EMFILE:
    case ENFILE:
    case EMLINK:
    case ENOBUFS:
      return Code::kResourceExhausted;
    case EIO:
      return Code::kDataLoss;
    case EAGAIN:
    case ENXIO:
    case ENODEV:
    case EPIPE:
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case ENOTCONN:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
    case ENETRESET:
    case ESHUTDOWN:  // Lustre, for a client that the server evicted.
    case ENOLINK:
    case ECOMM:
      return Code::kUnavailable;
    case ETIMEDOUT:
      return Code::kDeadlineExceeded;
    case EBUSY:
    case ETXTBSY:
    case EADDRINUSE:
      return Code::kBusy;
    case ESTALE:
      return Code::kStale;
    case EOPNOTSUPP:
    case ENOSYS:
    case EXDEV:
      return Code::kUnsupported;
    case EINTR:
    case ECANCELED:
      return Code::kCancelled;
    case EINVAL:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case ERANGE:
    case EOVERFLOW:
    case E2BIG:
    case EBADF:
    case EDOM:
      return Code::kInvalidArgument;
    default:
      return Code::kInternal;
  }
}

std::string ErrnoText(int err) {
  char buffer[128] = {};
  return strerror_r(err, buffer, sizeof(buffer));  // GNU's: returns the text.
}

}  // namespace

std::string_view CodeName(Code code) { return RowOf(code).name; }

// An ok Status is a null pointer: no allocation, and one comparison in the common case. Copies of a
// failure share its text, so they are cheap.
Status::Status(Code code, std::string message) {
  if (code != Code::kOk) rep_ = std::make_shared<const Rep>(Rep{code, 0, std::move(message)});
}

Status Status::FromErrno(int err, std::string_view action, std::string_view object) {
  std::string message;
  message.append(action).append(" ").append(object).append(": ");
  // Without an errno the result must still be a failure.
  if (err <= 0) return Status(Code::kInternal, message.append("failed without an errno"));
  ErrorFields fields;
  // Objects other than paths ("an eventfd") have no slash.
  if (object.find('/') != std::string_view::npos) fields.file = object;
  return Status(
      Rep{CodeOfErrno(err), err, std::move(message.append(ErrnoText(err))), std::move(fields)});
}

Status::Status(Rep rep) : rep_(std::make_shared<const Rep>(std::move(rep))) {}

Status Status::FromParts(Code code, int err, std::string message) {
  return code == Code::kOk ? Status() : Status(Rep{code, err, std::move(message)});
}

Code Status::code() const { return rep_ ? rep_->code : Code::kOk; }

const std::string& Status::message() const {
  static const std::string empty;
  return rep_ ? rep_->message : empty;
}

const ErrorFields& Status::fields() const {
  static const ErrorFields none;
  return rep_ ? rep_->fields : none;
}

int Status::ToErrno() const {
  if (!rep_) return 0;
  return rep_->err != 0 ? rep_->err : RowOf(rep_->code).err;
}

std::string Status::ToString() const {
  if (!rep_) return "OK";
  return std::string(CodeName(rep_->code)) + ": " + rep_->message;
}

// Contexts are prepended, so a message reads from the outside in: "save 'step-7': rank 3: write
// /store/...: No space left on device". Code, errno and fields are unchanged.
Status Status::WithContext(std::string_view context) const {
  if (!rep_) return *this;
  std::string message(context);
  return WithMessage(std::move(message.append(": ").append(rep_->message)));
}

Status Status::WithMessage(std::string message) const {
  if (!rep_) return *this;
  return Status(Rep{rep_->code, rep_->err, std::move(message), rep_->fields});
}

Status Status::With(const ErrorFields& more) const {
  if (!rep_) return *this;
  Rep rep = *rep_;
  ErrorFields& mine = rep.fields;
  if (mine.rank < 0) mine.rank = more.rank;
  if (mine.file.empty()) mine.file = more.file;
  if (mine.cause.empty()) mine.cause = more.cause;
  if (mine.key.empty()) mine.key = more.key;
  if (mine.key == more.key && mine.box_begin.empty()) {
    mine.box_begin = more.box_begin;
    mine.box_extent = more.box_extent;
  }
  mine.memory_in_use = mine.memory_in_use || more.memory_in_use;
  if (mine.device.empty()) mine.device = more.device;
  return Status(std::move(rep));
}

}  // namespace tensormount
