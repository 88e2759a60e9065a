// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_LIB_C_API_H_
#define TENSORMOUNT_LIB_C_API_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "tensormount/box.h"
#include "tensormount/buffer.h"
#include "tensormount/c.h"
#include "tensormount/common_value.h"
#include "tensormount/communicator.h"
#include "tensormount/event.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

// What the functions of tensormount/c.h share. Nothing may leave them but a status: each is one
// Call, which keeps the message and catches what was thrown.

struct tm_list {
  std::vector<std::string> items;
};

struct tm_communicator {
  std::unique_ptr<tensormount::Communicator> comm;
};

struct tm_state {
  tensormount::StateDict dict;
};

namespace tensormount::c_api {

// Keeps message and errno of a failure.
tm_status Report(const Status& status);

template <typename Fn>
tm_status Call(Fn fn) {
  try {
    return Report(fn());
  } catch (const std::bad_alloc&) {
    return tm_set_last_error(TM_RESOURCE_EXHAUSTED, 0, "out of memory");
  } catch (const std::exception& e) {
    return tm_set_last_error(TM_INTERNAL, 0, e.what());
  } catch (...) {
    return tm_set_last_error(TM_INTERNAL, 0, "unknown exception");
  }
}

struct Argument {
  const void* pointer;
  const char* name;
};
// kInvalidArgument names the first that is NULL.
Status Need(std::initializer_list<Argument> arguments);

// ---- Structures ----

// What the caller set as the size of a structure. kInvalidArgument where it cannot be one.
Result<std::uint32_t> StructSize(const void* given, const char* name);
// Whether the first number of a structure can be its size, and all beyond `known` bytes is zero.
Status CheckStruct(const void* given, std::size_t known, const char* name);

// The caller's structure as this library knows it; zeros where `given` is NULL or shorter.
template <typename T>
Result<T> ReadStruct(const T* given, const char* name) {
  T out{};
  if (given == nullptr) return out;
  TENSORMOUNT_RETURN_IF_ERROR(CheckStruct(given, sizeof(T), name));
  std::memcpy(&out, given, std::min<std::size_t>(given->struct_size, sizeof(T)));
  return out;
}

// As much of `filled` as the caller's structure has room for.
template <typename T>
Status WriteStruct(T filled, T* given, const char* name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t size, StructSize(given, name));
  filled.struct_size = size;
  std::memcpy(given, &filled, std::min<std::size_t>(size, sizeof(T)));
  return {};
}

// One of the values of an enumeration by its number in c.h.
template <typename E>
Result<E> Choice(const char* field, std::int32_t number, std::initializer_list<E> values) {
  if (number < 0 || static_cast<std::size_t>(number) >= values.size()) {
    return Status(Code::kInvalidArgument,
                  std::string(field) + ": " + std::to_string(number) + " is none of its values");
  }
  return values.begin()[number];
}

// ---- What comes in ----

Result<Dims> ReadDims(const std::int64_t* numbers, std::int32_t rank, const char* name);
// NULL: all of `shape`.
Result<Region> ReadRegion(const tm_region* given, const Dims& shape);
Result<BufferView> ReadBuffer(const tm_buffer* given);
Result<std::vector<std::string>> ReadTexts(const char* const* texts, std::size_t count,
                                           const char* name);
Timeouts ReadTimeouts(std::int64_t liveness_ms, std::int64_t arrival_ms);
EventHook ReadHook(tm_event_hook hook, void* context);

// ---- What goes out ----

Status HandOut(std::string_view bytes, void** data, std::size_t* size);
Status HandOut(std::string_view text, char** out, std::size_t* size);
Status HandOut(std::vector<std::string> items, tm_list** out);
// The value `name` of a map as JSON, or all of it as one object. `what`: for the message.
Status HandOut(const std::map<std::string, CommonValue>& values, const char* name,
               std::string_view what, char** out, std::size_t* size);

}  // namespace tensormount::c_api

#endif  // TENSORMOUNT_LIB_C_API_H_
