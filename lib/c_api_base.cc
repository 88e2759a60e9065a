// SPDX-License-Identifier: Apache-2.0
// The base of the C interface (tensormount/c.h): the helpers of c_api.h, and the functions of c.h
// for errors, logging, lists and dtypes. Each other c_api_*.cc has one group of functions of c.h.
//
// A function checks pointers (CheckPointers), copies the caller's structures (ReadStruct), converts
// them to C++ values, calls the C++ interface, and sets the outputs. It keeps no pointers to the
// caller's memory, except to buffers and contexts of hooks. Outputs are set last, so a call that
// fails leaves them unchanged (except *done and *got).
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
#include "remote/remote.h"
#include "shard/strict_json.h"

namespace tensormount::c_api {
namespace {

// When the library is unloaded, restores the signal handler that EnableMappingGuard replaced.
[[gnu::destructor]] void RestoreSignalHandler() { DisableMappingGuard(); }
// For programs of C++, too, which call no function of c.h.
[[gnu::constructor]] void KnowUrls() { AddRemoteFileSystems(); }

// The last error of a thread. Each thread has its own, so that calls on other threads do not
// overwrite it.
struct LastError {
  tm_status status = TM_OK;
  std::string message;
  int error_number = 0;
  Status failure;  // The whole failure, if a function of the library returned it.
};

LastError& Last() {
  static thread_local LastError last;
  return last;
}

// The code casts statuses and log levels between the enumerations of C and C++, which are both
// written by hand. Known() requires that TM_INTERNAL is the last code.
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

// The number of an element type in c.h. SameNumbers() compares the numbers of c.h with those of
// DType, because different numbers would silently give callers wrong values. There is no default
// case, so that the compiler (-Wswitch) reports a type that is missing here.
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

// Whether a status is a valid code: statuses also come from callers (tm_state_fail, callbacks).
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
    // Without memory for the whole failure, code and message are still set.
  }
  return code;
}

// The error names the argument as c.h does. NULL is a frequent mistake in C, and an error is more
// useful than a crash.
Status CheckPointers(std::initializer_list<Argument> arguments) {
  for (const Argument& a : arguments) {
    if (a.pointer == nullptr) {
      return {Code::kInvalidArgument, std::string("argument '") + a.name + "' is NULL"};
    }
    if (a.process != 0 && a.process != getpid()) {
      return {Code::kUnsupported,
              std::string("argument '") + a.name + "' was created by process " +
                  std::to_string(a.process) +
                  ", from which this process was forked; create it in this process"};
    }
  }
  return {};
}

Result<std::vector<std::string_view>> ReadKeys(const char* keys, std::size_t size,
                                               std::size_t count) {
  std::string_view left(keys, keys == nullptr ? 0 : size);
  // Each key ends with a NUL, so there are at most as many keys as bytes. The check comes before
  // memory is reserved for `count` keys.
  if (count > left.size()) {
    return Status(Code::kInvalidArgument, std::to_string(count) + " keys do not fit in " +
                                              std::to_string(left.size()) + " bytes");
  }
  std::vector<std::string_view> texts;
  texts.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t end = left.find('\0');
    if (end == std::string_view::npos) {
      return Status(Code::kInvalidArgument, "the text of keys has only " + std::to_string(i) +
                                                " of " + std::to_string(count) +
                                                " keys that end with a NUL");
    }
    texts.push_back(left.substr(0, end));
    left.remove_prefix(end + 1);
  }
  if (!left.empty()) {
    return Status(Code::kInvalidArgument, std::to_string(left.size()) +
                                              " bytes of keys are left over after " +
                                              std::to_string(count) + " keys");
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
  // An uninitialised structure may have any size, and reading so many bytes could crash.
  constexpr std::uint32_t kLargestStruct = 4096;
  if (size > kLargestStruct) {
    return Status(Code::kInvalidArgument,
                  std::string(name) + ": struct_size is " + std::to_string(size) +
                      ", larger than any structure; it may be uninitialized");
  }
  return size;
}

Status CheckStruct(const void* given, std::size_t known, const char* name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t size, StructSize(given, name));
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (std::size_t i = known; i < size; ++i) {
    // An unknown member that is set must not be ignored silently.
    if (bytes[i] == 0) continue;
    return {Code::kUnsupported,
            std::string(name) +
                ": the structure has members that this version of the library does not know"};
  }
  return {};
}

Result<Dims> ReadDims(const std::int64_t* numbers, std::int32_t rank, const char* name) {
  if (rank < 0 || rank > kMaxRank) {
    return Status(Code::kInvalidArgument, std::string(name) + ": " + std::to_string(rank) +
                                              " axes, at most " + std::to_string(kMaxRank) +
                                              " are allowed");
  }
  if (rank == 0) return Dims();
  TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{numbers, name}}));
  return Dims(std::span<const std::int64_t>(numbers, static_cast<std::size_t>(rank)));
}

// Does not check that the region is within the tensor: the functions that use the region do.
Result<Region> ReadRegion(const tm_region* given, const Dims& shape) {
  if (given == nullptr) {
    // Box::Make checks the caller's shape.
    TENSORMOUNT_ASSIGN_OR_RETURN(const Box all, Box::Make(Dims::Filled(shape.rank(), 0), shape));
    return Region(all);
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const tm_region r, ReadStruct(given, "tm_region"));
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims extent, ReadDims(r.extent, r.rank, "tm_region.extent"));
  // If `begin` is NULL, the box begins at the origin.
  Dims begin = Dims::Filled(extent.rank(), 0);
  if (r.begin != nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(begin, ReadDims(r.begin, r.rank, "tm_region.begin"));
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Box box, Box::Make(begin, extent));
  if (r.is_flat != 0) return Region::Flat(box, r.flat_first, r.flat_count);
  return Region(box);
}

Result<BufferView> ReadBuffer(const tm_buffer* given) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{given, "buffer"}}));
  TENSORMOUNT_ASSIGN_OR_RETURN(const tm_buffer b, ReadStruct(given, "tm_buffer"));
  const std::optional<DType> dtype = KnownDType(b.dtype);
  if (!dtype) {
    return Status(Code::kInvalidArgument,
                  "tm_buffer.dtype: " + std::to_string(b.dtype) + " is not a dtype");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const Dims shape, ReadDims(b.shape, b.rank, "tm_buffer.shape"));
  if (!CheckedProduct(shape)) {
    return Status(Code::kInvalidArgument, "tm_buffer.shape: " + shape.ToString() + " overflows");
  }
  // Without strides, the buffer is row-major and packed.
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
  if (count != 0) TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{texts, name}}));
  for (std::size_t i = 0; i < count; ++i) {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{texts[i], name}}));
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

// The wrapper is made once for each job; each event copies four texts.
EventHook ReadHook(tm_event_hook hook, void* context) {
  if (hook == nullptr) return {};
  return [hook, context](const Event& e) {
    // The texts are copied, because the views of an event have no NUL at their end.
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
    // Threads report concurrently, so `done` is the largest reported value.
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

Result<NameMap> ReadNameMap(const char* json) {
  NameMap map;
  if (json == nullptr) return map;
  // Rules, or an object with "as", with the rules as its member "rules", or with both. An empty
  // text is no JSON, and must not be taken for no map.
  map.rules = *json == '\0' ? " " : json;
  constexpr std::size_t kMaxNameMap = std::size_t{8} << 20;
  if (map.rules.size() > kMaxNameMap) {
    return Status(Code::kInvalidArgument, "name map: more than 8 MiB");
  }
  const Result<nlohmann::json> strict = ParseStrictJson(map.rules);
  if (!strict.ok()) return map;  // The error is that of the rules.
  const nlohmann::json& parsed = strict.value();
  const auto inner = parsed.find("rules");
  if (!parsed.contains("as") && (inner == parsed.end() || !inner->is_object())) return map;
  map.rules.clear();
  const auto invalid = [](const std::string& field) {
    return Status(Code::kInvalidArgument,
                  "name map: \"" + field + "\" is not valid beside \"as\" or an object of rules");
  };
  for (const auto& [name, value] : parsed.items()) {
    if ((name == "as" || name == "from") && value.is_string()) {
      (name == "as" ? map.as : map.from) = value.get<std::string>();
    } else if (name == "rules" && value.is_object()) {
      map.rules = value.dump();
    } else if (name == "config" && value.is_object()) {
      map.config = value.dump();
    } else if (name == "numbers" && value.is_object()) {
      for (const auto& [number, size] : value.items()) {
        if (!size.is_number_integer()) return invalid(name);
        map.numbers[number] = size.get<std::int64_t>();
      }
    } else {
      return invalid(name);
    }
  }
  if (parsed.contains("as") && map.as.empty()) return invalid("as");
  if (!map.from.empty() && map.as.empty()) return invalid("from");
  return map;
}

// All memory that callers free with tm_free is allocated here, with malloc, because tm_free calls
// free.
Status SetOutput(std::string_view bytes, void** data, std::size_t* size) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{data, "data"}, {size, "size"}}));
  // The final NUL makes the copy a C string; it does not count in the size.
  auto* copy = static_cast<char*>(std::malloc(bytes.size() + 1));
  if (copy == nullptr) return {Code::kResourceExhausted, "out of memory"};
  if (!bytes.empty()) std::memcpy(copy, bytes.data(), bytes.size());
  copy[bytes.size()] = '\0';
  *data = copy;
  *size = bytes.size();
  return {};
}

Status SetOutput(std::string_view text, char** out, std::size_t* size) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{out, "json"}}));
  void* data = nullptr;
  std::size_t length = 0;
  TENSORMOUNT_RETURN_IF_ERROR(SetOutput(text, &data, &length));
  *out = static_cast<char*>(data);
  if (size != nullptr) *size = length;
  return {};
}

Status SetOutput(const nlohmann::ordered_json& json, char** out) {
  return SetOutput(json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace), out,
                   nullptr);
}

Status SetOutput(std::vector<std::string> items, tm_list** out) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{out, "out"}}));
  // If `new` throws, Call converts the exception to a status.
  *out = new tm_list{std::move(items)};
  return {};
}

Status SetOutput(const std::map<std::string, CommonValue>& values, const char* name,
                 std::string_view what, char** out, std::size_t* size) {
  if (name != nullptr) {
    const auto it = values.find(name);
    if (it == values.end()) {
      return {Code::kNotFound, "there is no " + std::string(what) + " '" + name + "'"};
    }
    return SetOutput(CommonToJson(it->second), out, size);
  }
  CommonDict all;
  for (const auto& [key, value] : values) all.items.emplace(key, value);
  return SetOutput(CommonToJson(CommonValue(std::move(all))), out, size);
}

}  // namespace tensormount::c_api

using tensormount::CodeName;
using tensormount::InfoOf;
namespace c_api = tensormount::c_api;

const char* tm_status_name(tm_status status) {
  // Code names are literals, so they end with a NUL.
  return c_api::Known(status) ? CodeName(static_cast<tensormount::Code>(status)).data()
                              : "UNKNOWN_STATUS";
}

const char* tm_last_error(void) { return c_api::Last().message.c_str(); }

int tm_last_errno(void) { return c_api::Last().error_number; }

tm_status tm_last_error_json(char** json) {
  // An error of this function does not replace the last error, which the caller wants to read.
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
    return c_api::SetOutput(all, json).ok() ? TM_OK : TM_RESOURCE_EXHAUSTED;
  } catch (...) {
    return TM_RESOURCE_EXHAUSTED;
  }
}

tm_status tm_set_last_error(tm_status status, int error_number, const char* message) {
  if (status == TM_OK) return TM_OK;
  try {
    c_api::LastError& last = c_api::Last();
    last.status = status;
    last.failure = {};
    last.message.assign(message == nullptr ? "" : message);
    last.error_number = error_number;
    // After a failure with a known status tm_last_errno is never 0, because FUSE and POSIX callers
    // need an errno.
    if (error_number == 0 && c_api::Known(status)) {
      last.error_number = tensormount::Status(static_cast<tensormount::Code>(status), "").ToErrno();
    }
  } catch (...) {
    // Without memory for the message, the caller still gets the status.
  }
  return status;
}

tm_status tm_enable_mapping_guard(void) {
  return c_api::Call([&]() -> tensormount::Status {
    if (tensormount::EnableMappingGuard()) return {};
    return {tensormount::Code::kUnsupported, "cannot install a handler for SIGBUS in this process"};
  });
}

tm_status tm_set_log_level(tm_log_level level) {
  return c_api::Call([&]() -> tensormount::Status {
    if (level < TM_LOG_DEBUG || level > TM_LOG_ERROR) {
      return {tensormount::Code::kInvalidArgument,
              "log level " + std::to_string(level) + ": not from 0 to 3"};
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
    TENSORMOUNT_RETURN_IF_ERROR(c_api::CheckPointers({{name, "name"}, {dtype, "dtype"}}));
    TENSORMOUNT_ASSIGN_OR_RETURN(const tensormount::DType found, tensormount::DTypeFromName(name));
    *dtype = static_cast<uint32_t>(found);
    return {};
  });
}
