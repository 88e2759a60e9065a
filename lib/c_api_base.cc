// SPDX-License-Identifier: Apache-2.0
// The C interface over the C++ one (tensormount/c.h): here statuses, lists, strings and the guard
// around every call, which turns exceptions into codes and keeps the last message of each thread.
// All c_api_*.cc share c_api.h; they are a file for each group of calls in c.h.
//
// What a function of c.h does, always in this order: check pointers (Need), copy the caller's
// structures in the size that they have (ReadStruct), turn what is in them into values of the C++
// interface, call that, and hand out the result. Nothing is kept of the caller's memory but
// buffers, which c.h says. Outputs are written last, so a call that fails leaves them as they were.
#include <cstdlib>
#include <limits>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "tensormount/dtype.h"
#include "tensormount/log.h"
#include "tensormount/mapping_guard.h"

#include "base/deadline.h"
#include "base/mapping.h"
#include "base/status_json.h"
#include "lib/c_api.h"

namespace tensormount::c_api {
namespace {

// A library that is unloaded leaves no handler behind.
[[gnu::destructor]] void PutHandlerBack() { DisableMappingGuard(); }

// One a thread, so that a message cannot be overwritten between a failure and the look at it by a
// call on another thread.
struct LastError {
  tm_status status = TM_OK;
  std::string message;
  int error_number = 0;
  Status failure;  // The same with its fields, where it is one of ours.
};

LastError& Last() {
  static thread_local LastError last;
  return last;
}

// Statuses are cast from one enumeration to the other, and both are written by hand. Known() below
// relies on there being none after TM_INTERNAL.
static_assert(static_cast<int>(Code::kOk) == TM_OK);
static_assert(static_cast<int>(Code::kInvalidArgument) == TM_INVALID_ARGUMENT);
static_assert(static_cast<int>(Code::kNotFound) == TM_NOT_FOUND);
static_assert(static_cast<int>(Code::kAlreadyExists) == TM_ALREADY_EXISTS);
static_assert(static_cast<int>(Code::kPermissionDenied) == TM_PERMISSION_DENIED);
static_assert(static_cast<int>(Code::kReadOnly) == TM_READ_ONLY);
static_assert(static_cast<int>(Code::kResourceExhausted) == TM_RESOURCE_EXHAUSTED);
static_assert(static_cast<int>(Code::kDataLoss) == TM_DATA_LOSS);
static_assert(static_cast<int>(Code::kUnavailable) == TM_UNAVAILABLE);
static_assert(static_cast<int>(Code::kDeadlineExceeded) == TM_DEADLINE_EXCEEDED);
static_assert(static_cast<int>(Code::kBusy) == TM_BUSY);
static_assert(static_cast<int>(Code::kStale) == TM_STALE);
static_assert(static_cast<int>(Code::kUnknown) == TM_UNKNOWN);
static_assert(static_cast<int>(Code::kUnsupported) == TM_UNSUPPORTED);
static_assert(static_cast<int>(Code::kCancelled) == TM_CANCELLED);
static_assert(static_cast<int>(Code::kInternal) == TM_INTERNAL);
static_assert(kMaxRank == TM_MAX_RANK);
static_assert(static_cast<int>(LogLevel::kDebug) == TM_LOG_DEBUG);
static_assert(static_cast<int>(LogLevel::kInfo) == TM_LOG_INFO);
static_assert(static_cast<int>(LogLevel::kWarning) == TM_LOG_WARNING);
static_assert(static_cast<int>(LogLevel::kError) == TM_LOG_ERROR);

// What c.h calls an element type. Written out, because both enumerations are: a number that stands
// for two types would give callers the values of another one without an error. There is no default,
// so that the compiler (-Wswitch) asks for the line of a type that c.h has not got.
constexpr int NumberInC(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return TM_BOOL;
    case DType::kI8:
      return TM_I8;
    case DType::kU8:
      return TM_U8;
    case DType::kI16:
      return TM_I16;
    case DType::kU16:
      return TM_U16;
    case DType::kI32:
      return TM_I32;
    case DType::kU32:
      return TM_U32;
    case DType::kI64:
      return TM_I64;
    case DType::kU64:
      return TM_U64;
    case DType::kF16:
      return TM_F16;
    case DType::kBF16:
      return TM_BF16;
    case DType::kF32:
      return TM_F32;
    case DType::kF64:
      return TM_F64;
    case DType::kF8E4M3:
      return TM_F8E4M3;
    case DType::kF8E5M2:
      return TM_F8E5M2;
    case DType::kF8E8M0:
      return TM_F8E8M0;
    case DType::kF8E4M3FNUZ:
      return TM_F8E4M3FNUZ;
    case DType::kF8E5M2FNUZ:
      return TM_F8E5M2FNUZ;
    case DType::kF6E2M3:
      return TM_F6E2M3;
    case DType::kF6E3M2:
      return TM_F6E3M2;
    case DType::kF4:
      return TM_F4;
    case DType::kC64:
      return TM_C64;
    case DType::kC128:
      return TM_C128;
  }
  return 0;
}

constexpr bool SameNumbers() {
  for (int number = 1; number <= TM_C128; ++number) {
    if (NumberInC(static_cast<DType>(number)) != number) return false;
  }
  return true;
}
static_assert(SameNumbers());

// Statuses come from outside as well (tm_state_fail, callbacks).
bool Known(tm_status status) { return status >= TM_OK && status <= TM_INTERNAL; }

}  // namespace

std::optional<DType> KnownDType(std::uint32_t number) {
  if (number > std::numeric_limits<std::uint8_t>::max()) return std::nullopt;
  const Result<DType> dtype = DTypeFromNumber(static_cast<std::uint8_t>(number));
  if (!dtype.ok()) return std::nullopt;
  return dtype.value();
}

tm_status Report(const Status& status) {
  if (status.ok()) return TM_OK;
  const tm_status code = tm_set_last_error(static_cast<tm_status>(status.code()), status.ToErrno(),
                                           status.message().c_str());
  try {
    Last().failure = status;
  } catch (...) {
    // No memory for its fields: code and message are there.
  }
  return code;
}

// Names the argument as c.h does: in C a NULL is the usual mistake, and a crash in a library says
// less.
Status Need(std::initializer_list<Argument> arguments) {
  for (const Argument& a : arguments) {
    if (a.pointer == nullptr) {
      return {Code::kInvalidArgument, std::string("argument '") + a.name + "' is NULL"};
    }
    if (a.process != 0 && a.process != getpid()) {
      return {Code::kUnsupported, std::string("argument '") + a.name + "' belongs to process " +
                                      std::to_string(a.process) +
                                      ", which this one was forked from: make one here"};
    }
  }
  return {};
}

Result<std::vector<std::string_view>> ReadKeys(const char* keys, std::size_t size,
                                               std::size_t count) {
  std::string_view left(keys, keys == nullptr ? 0 : size);
  // Each has a NUL: nothing is reserved for what is not there.
  if (count > left.size()) {
    return Status(Code::kInvalidArgument,
                  std::to_string(count) + " keys in " + std::to_string(left.size()) + " bytes");
  }
  std::vector<std::string_view> texts;
  texts.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t end = left.find('\0');
    if (end == std::string_view::npos) {
      return Status(Code::kInvalidArgument,
                    "keys: " + std::to_string(i) + " of " + std::to_string(count) + " are there");
    }
    texts.push_back(left.substr(0, end));
    left.remove_prefix(end + 1);
  }
  if (!left.empty()) {
    return Status(Code::kInvalidArgument, std::to_string(left.size()) +
                                              " bytes of keys are left over after " +
                                              std::to_string(count));
  }
  return texts;
}

std::chrono::milliseconds ReadWait(std::int64_t milliseconds) {
  return milliseconds < 0 ? kLongestWait : std::chrono::milliseconds(milliseconds);
}

Result<std::uint32_t> StructSize(const void* given, const char* name) {
  std::uint32_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  if (size < sizeof(size)) {
    return Status(Code::kInvalidArgument, std::string(name) + ": struct_size is not set");
  }
  // Not initialised, rather than of a later version: what follows it is not ours to read.
  // A structure on the stack whose first member was never set holds anything; reading so far behind
  // it would crash.
  constexpr std::uint32_t kLargestStruct = 4096;
  if (size > kLargestStruct) {
    return Status(Code::kInvalidArgument, std::string(name) + ": struct_size is " +
                                              std::to_string(size) + ", which no structure has");
  }
  return size;
}

Status CheckStruct(const void* given, std::size_t known, const char* name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t size, StructSize(given, name));
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (std::size_t i = known; i < size; ++i) {
    // Not ignored: a member that asks for something must not be passed over silently.
    if (bytes[i] == 0) continue;
    return {Code::kUnsupported,
            std::string(name) + ": has members that this version of the library does not know"};
  }
  return {};
}

Result<Dims> ReadDims(const std::int64_t* numbers, std::int32_t rank, const char* name) {
  if (rank < 0 || rank > kMaxRank) {
    return Status(Code::kInvalidArgument, std::string(name) + ": " + std::to_string(rank) +
                                              " axes; at most " + std::to_string(kMaxRank) +
                                              " are possible");
  }
  if (rank == 0) return Dims();
  TENSORMOUNT_RETURN_IF_ERROR(Need({{numbers, name}}));
  return Dims(std::span<const std::int64_t>(numbers, static_cast<std::size_t>(rank)));
}

// A box, or a flat range within one. Bounds are checked by Box::Make and Region::Flat; whether the
// region fits the tensor, by the call that gets it.
Result<Region> ReadRegion(const tm_region* given, const Dims& shape) {
  if (given == nullptr) {
    // The caller's shape is not checked yet.
    // Box::Make does it.
    TENSORMOUNT_ASSIGN_OR_RETURN(const Box all, Box::Make(Dims::Filled(shape.rank(), 0), shape));
    return Region(all);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const tm_region r, ReadStruct(given, "tm_region"));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims extent, ReadDims(r.extent, r.rank, "tm_region.extent"));
  // NULL: at the origin.
  Dims begin = Dims::Filled(extent.rank(), 0);
  if (r.begin != nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(begin, ReadDims(r.begin, r.rank, "tm_region.begin"));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(begin, extent));
  if (r.is_flat != 0) return Region::Flat(box, r.flat_first, r.flat_count);
  return Region(box);
}

Result<BufferView> ReadBuffer(const tm_buffer* given) {
  TENSORMOUNT_RETURN_IF_ERROR(Need({{given, "buffer"}}));
  TENSORMOUNT_ASSIGN_OR_RETURN(const tm_buffer b, ReadStruct(given, "tm_buffer"));
  const std::optional<DType> dtype = KnownDType(b.dtype);
  if (!dtype) {
    return Status(Code::kInvalidArgument,
                  "tm_buffer.dtype: " + std::to_string(b.dtype) + " is no element type");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims shape, ReadDims(b.shape, b.rank, "tm_buffer.shape"));
  if (!CheckedProduct(shape)) {
    return Status(Code::kInvalidArgument, "tm_buffer.shape: " + shape.ToString() + " cannot be");
  }
  // Packed, row-major, until strides say otherwise.
  BufferView view = BufferView::Host(*dtype, b.data, shape);
  if (b.strides != nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(view.strides, ReadDims(b.strides, b.rank, "tm_buffer.strides"));
  }
  TENSORMOUNT_RETURN_IF_ERROR(ReadMemory(b, view).WithContext("tm_buffer"));
  return view;
}

Status ReadMemory(const tm_buffer& given, BufferView& view) {
  TENSORMOUNT_ASSIGN_OR_RETURN(view.device.kind, Choice("device_kind", given.device_kind,
                                                        {DeviceKind::kHost, DeviceKind::kCuda}));
  view.device.ordinal = given.device_ordinal;
  static_assert(sizeof(view.device.uuid) == sizeof(given.device_uuid));
  std::memcpy(view.device.uuid.data(), given.device_uuid, sizeof(given.device_uuid));
  TENSORMOUNT_ASSIGN_OR_RETURN(view.memory, Choice("memory_kind", given.memory_kind,
                                                   {MemoryKind::kPageable, MemoryKind::kPinned,
                                                    MemoryKind::kManaged, MemoryKind::kDevice}));
  TENSORMOUNT_ASSIGN_OR_RETURN(view.stream.kind,
                               Choice("stream_kind", given.stream_kind,
                                      {StreamKind::kNone, StreamKind::kLegacyDefault,
                                       StreamKind::kPerThreadDefault, StreamKind::kHandle}));
  view.stream.handle = given.stream;
  if (view.stream.kind == StreamKind::kNone && given.stream != nullptr) {
    view.stream.kind = StreamKind::kHandle;
  }
  return Status();
}

Result<std::vector<std::string>> ReadTexts(const char* const* texts, std::size_t count,
                                           const char* name) {
  std::vector<std::string> out;
  if (count != 0) TENSORMOUNT_RETURN_IF_ERROR(Need({{texts, name}}));
  for (std::size_t i = 0; i < count; ++i) {
    TENSORMOUNT_RETURN_IF_ERROR(Need({{texts[i], name}}));
    out.emplace_back(texts[i]);
  }
  return out;
}

Timeouts ReadTimeouts(std::int64_t liveness_ms, std::int64_t arrival_ms, std::int64_t total_ms) {
  Timeouts timeouts;
  if (liveness_ms > 0) timeouts.liveness = std::chrono::milliseconds(liveness_ms);
  if (arrival_ms > 0) timeouts.arrival = std::chrono::milliseconds(arrival_ms);
  if (total_ms > 0) timeouts.total = std::chrono::milliseconds(total_ms);
  return timeouts;
}

// The hook is wrapped once a job; each event then costs four small copies.
EventHook ReadHook(tm_event_hook hook, void* context) {
  if (hook == nullptr) return {};
  return [hook, context](const Event& e) {
    // Copies, because views of the C++ side have no NUL at their ends.
    const std::string job(e.job);
    const std::string path(e.path);
    const std::string phase(e.phase);
    const std::string message = e.status.ok() ? std::string() : e.status.message();
    tm_event event{};
    event.struct_size = sizeof(event);
    event.kind = static_cast<std::int32_t>(e.kind);
    event.job = job.c_str();
    event.path = path.c_str();
    event.phase = phase.c_str();
    event.rank = e.rank;
    event.status = static_cast<tm_status>(e.status.code());
    event.message = message.c_str();
    event.bytes = e.bytes;
    event.seconds = e.seconds;
    hook(context, &event);
  };
}

Watch ReadTask(tm_task* task) {
  if (task == nullptr) return {};
  return [task](std::uint64_t done, std::uint64_t total) {
    // Of threads that tell at the same time the last may be behind.
    std::uint64_t before = task->done;
    while (before < done && !task->done.compare_exchange_weak(before, done)) {
    }
    task->total = total;
    return task->cancel ? Status(Code::kCancelled, "cancelled by the caller") : Status();
  };
}

Result<std::shared_ptr<const KeyMap>> ReadRules(const char* rules) {
  if (rules == nullptr) return std::shared_ptr<const KeyMap>();
  TENSORMOUNT_ASSIGN_OR_RETURN(KeyMap map, KeyMap::FromJson(rules));
  return std::make_shared<const KeyMap>(std::move(map));
}

// The one place that allocates for callers, so tm_free is right for all of it.
Status HandOut(std::string_view bytes, void** data, std::size_t* size) {
  TENSORMOUNT_RETURN_IF_ERROR(Need({{data, "data"}, {size, "size"}}));
  // A NUL behind it, so that text can be used as such.
  // Not counted in the size.
  auto* copy = static_cast<char*>(std::malloc(bytes.size() + 1));
  if (copy == nullptr) return {Code::kResourceExhausted, "out of memory"};
  if (!bytes.empty()) std::memcpy(copy, bytes.data(), bytes.size());
  copy[bytes.size()] = '\0';
  *data = copy;
  *size = bytes.size();
  return {};
}

Status HandOut(std::string_view text, char** out, std::size_t* size) {
  TENSORMOUNT_RETURN_IF_ERROR(Need({{out, "json"}}));
  void* data = nullptr;
  std::size_t length = 0;
  TENSORMOUNT_RETURN_IF_ERROR(HandOut(text, &data, &length));
  *out = static_cast<char*>(data);
  if (size != nullptr) *size = length;
  return {};
}

Status HandOut(const nlohmann::ordered_json& json, char** out) {
  return HandOut(json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace), out,
                 nullptr);
}

Status HandOut(std::vector<std::string> items, tm_list** out) {
  TENSORMOUNT_RETURN_IF_ERROR(Need({{out, "out"}}));
  // May throw; Call turns that into a status.
  *out = new tm_list{std::move(items)};
  return {};
}

Status HandOut(const std::map<std::string, CommonValue>& values, const char* name,
               std::string_view what, char** out, std::size_t* size) {
  if (name != nullptr) {
    const auto it = values.find(name);
    if (it == values.end()) {
      return {Code::kNotFound, "there is no " + std::string(what) + " '" + name + "'"};
    }
    return HandOut(CommonToJson(it->second), out, size);
  }
  // NULL as the name: all of them, as one JSON object.
  CommonDict all;
  for (const auto& [key, value] : values) all.items.emplace(key, value);
  return HandOut(CommonToJson(CommonValue(std::move(all))), out, size);
}

}  // namespace tensormount::c_api

using tensormount::CodeName;
using tensormount::InfoOf;
namespace c_api = tensormount::c_api;

// Below here: the functions of c.h that belong to no handle.
const char* tm_status_name(tm_status status) {
  // Names of codes are literals.
  return c_api::Known(status) ? CodeName(static_cast<tensormount::Code>(status)).data()
                              : "UNKNOWN_STATUS";
}

const char* tm_last_error(void) { return c_api::Last().message.c_str(); }

int tm_last_errno(void) { return c_api::Last().error_number; }

tm_status tm_last_error_json(char** json) {
  // What fails here leaves the last error as it is: it is what was asked for.
  if (json == nullptr) return TM_INVALID_ARGUMENT;
  const c_api::LastError& last = c_api::Last();
  if (last.status == TM_OK) return TM_NOT_FOUND;
  try {
    nlohmann::ordered_json all = tensormount::StatusJson(last.failure);
    if (last.failure.ok()) {
      all = {{"code", tm_status_name(last.status)},
             {"status", last.status},
             {"errno", last.error_number},
             {"message", last.message}};
    }
    return c_api::HandOut(all, json).ok() ? TM_OK : TM_RESOURCE_EXHAUSTED;
  } catch (...) {
    return TM_RESOURCE_EXHAUSTED;
  }
}

tm_status tm_set_last_error(tm_status status, int error_number, const char* message) {
  // Exported, so that bindings can report failures of their own in the same way.
  if (status == TM_OK) return TM_OK;
  try {
    c_api::LastError& last = c_api::Last();
    last.status = status;
    last.failure = {};
    last.message.assign(message == nullptr ? "" : message);
    last.error_number = error_number;
    // So tm_last_errno always has a number, as FUSE and POSIX callers want one.
    if (error_number == 0 && c_api::Known(status)) {
      last.error_number = tensormount::Status(static_cast<tensormount::Code>(status), "").ToErrno();
    }
  } catch (...) {
    // No memory for the message: the status says it.
  }
  return status;
}

tm_status tm_enable_mapping_guard(void) {
  return c_api::Call([&]() -> tensormount::Status {
    if (tensormount::EnableMappingGuard()) return {};
    return {tensormount::Code::kUnsupported, "SIGBUS cannot be handled here"};
  });
}

tm_status tm_set_log_level(tm_log_level level) {
  return c_api::Call([&]() -> tensormount::Status {
    if (level < TM_LOG_DEBUG || level > TM_LOG_ERROR) {
      return {tensormount::Code::kInvalidArgument,
              "log level " + std::to_string(level) + ": there are 0 to 3"};
    }
    tensormount::SetLogLevel(static_cast<tensormount::LogLevel>(level));
    return {};
  });
}

tm_status tm_set_log_sink(tm_log_sink sink, void* context) {
  return c_api::Call([&]() -> tensormount::Status {
    if (sink == nullptr) {
      tensormount::SetLogSink({});
      return {};
    }
    tensormount::SetLogSink([sink, context](tensormount::LogLevel level, std::string_view line) {
      sink(context, static_cast<tm_log_level>(level), std::string(line).c_str());
    });
    return {};
  });
}

const char* tm_version(void) { return TENSORMOUNT_VERSION; }

void tm_free(void* memory) { std::free(memory); }

size_t tm_list_size(const tm_list* list) { return list == nullptr ? 0 : list->items.size(); }

const char* tm_list_get(const tm_list* list, size_t index, size_t* length) {
  if (list == nullptr || index >= list->items.size()) return nullptr;
  if (length != nullptr) *length = list->items[index].size();
  return list->items[index].c_str();
}

void tm_list_free(tm_list* list) { delete list; }

const char* tm_dtype_name(uint32_t dtype) {
  const auto known = c_api::KnownDType(dtype);
  return known ? InfoOf(*known).name.data() : nullptr;
}

uint32_t tm_dtype_bits(uint32_t dtype) {
  const auto known = c_api::KnownDType(dtype);
  return known ? InfoOf(*known).bits : 0;
}

tm_status tm_dtype_from_name(const char* name, uint32_t* dtype) {
  return c_api::Call([&]() -> tensormount::Status {
    TENSORMOUNT_RETURN_IF_ERROR(c_api::Need({{name, "name"}, {dtype, "dtype"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tensormount::DType found, tensormount::DTypeFromName(name));
    *dtype = static_cast<uint32_t>(found);
    return {};
  });
}
