// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_LIB_C_API_H_
#define TENSORMOUNT_LIB_C_API_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <unistd.h>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tensormount/async_save.h"
#include "tensormount/box.h"
#include "tensormount/buffer.h"
#include "tensormount/c.h"
#include "tensormount/common_value.h"
#include "tensormount/communicator.h"
#include "tensormount/event.h"
#include "tensormount/key_map.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/watch.h"
#include "collective/guarded.h"

// What the functions of tensormount/c.h share. Nothing may leave them but a status: each is one
// Call, which keeps the message and catches what was thrown.

// What the handles of c.h point to. They are made by functions of the library with new and freed by
// its tm_..._free functions with delete: the caller's allocator never meets ours. A handle is not
// locked: one thread at a time, or the caller's lock, as c.h says for each.
struct tm_list {
  // Bytes of any kind, with a NUL behind each (std::string has one), so that they can be used as C
  // strings.
  std::vector<std::string> items;
};

// Also made by libtensormount_mpi, which is why it stands in this header.
struct tm_communicator {
  std::unique_ptr<tensormount::Communicator> comm;
  // From the first tm_save_async on. Goes first: it waits for the saves that are under way.
  std::shared_ptr<tensormount::AsyncSaver> saver = nullptr;
  const pid_t process = getpid();
};

// Buffers of the dict are the caller's, and must live as long as c.h says.
struct tm_state {
  tensormount::StateDict dict;
};

// Between the thread that works and others; see tm_task_new.
struct tm_task {
  std::atomic<bool> cancel = false;
  std::atomic<std::uint64_t> done = 0;
  std::atomic<std::uint64_t> total = 0;
};

namespace tensormount::c_api {

// Keeps message and errno of a failure.
// Per thread, for tm_last_error. Ok changes nothing: an old message stays readable, as errno does.
tm_status Report(const Status& status);

// Every exported function that can fail has its body in one of these. An exception that left it
// would end a C program, or unwind through frames of Python.
// `fn` takes nothing and returns Status.
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

// A pointer that must not be NULL, and what c.h calls it.
struct Argument {
  const void* pointer;
  const char* name;
  pid_t process = 0;  // That made what it points to; 0: which does not matter.
};
// A handle that has threads, locks or connections, which a forked child has only in name: a lock
// may be held by a thread that is not there, and a connection is the parent's.
template <typename T>
Argument Handle(const T* handle, const char* name) {
  return {handle, name, handle == nullptr ? 0 : handle->process};
}
// kInvalidArgument names the first that is NULL, kUnsupported a handle of the process that this one
// was forked from.
Status Need(std::initializer_list<Argument> arguments);

// Frees a handle, in the process that made it. In a forked child it stays where it is: taking it
// down would talk to the parent's peers and wait for the parent's threads.
template <typename T>
void FreeHandle(T* handle);

template <typename T>
void FreeHandle(T* handle) {
  if (handle == nullptr || handle->process != getpid()) return;
  (void)Call([&] {  // What a destructor could not do is not known to anybody else either.
    delete handle;
    return Status();
  });
}

// What was wrong before the state saw it fails it, too.
// So a caller that ignores the status of a tm_state_add_... still gets it from tm_save, on all
// ranks, instead of a checkpoint that lacks a tensor.
template <typename Fn>
tm_status On(tm_state* state, Fn fn) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(Need({{state, "state"}}));
    const Status status = Guarded([&] { return fn(state->dict); });
    (void)state->dict.Fail(status);  // Returned, too.
    return status;
  });
}

// ---- Structures ----
// A structure of c.h begins with its own size as the caller's compiler knew it, and only ever grows
// at its end. So a program that was built with an older header passes a shorter one, whose missing
// members count as zero, their default; and one that was built with a newer header is served as
// long as it sets none of the members that this library does not know.

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
// The same the other way: members that the caller does not know are left out. struct_size stays the
// caller's.
template <typename T>
Status WriteStruct(T filled, T* given, const char* name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t size, StructSize(given, name));
  filled.struct_size = size;
  std::memcpy(given, &filled, std::min<std::size_t>(size, sizeof(T)));
  return {};
}

// One of the values of an enumeration by its number in c.h.
// `values` in the order of their numbers, from 0 on. Checked, because the caller's number may be
// anything, and a cast of it to the enumeration would be undefined where code relies on the
// enumerators.
template <typename E>
Result<E> Choice(const char* field, std::int32_t number, std::initializer_list<E> values) {
  if (number < 0 || static_cast<std::size_t>(number) >= values.size()) {
    return Status(Code::kInvalidArgument,
                  std::string(field) + ": " + std::to_string(number) + " is none of its values");
  }
  return values.begin()[number];
}

// ---- What comes in ----

// kInvalidArgument where the rank is not possible. Extents are not checked here; what they are of
// does that.
Result<Dims> ReadDims(const std::int64_t* numbers, std::int32_t rank, const char* name);
// By its number in c.h; nothing for others.
std::optional<DType> KnownDType(std::uint32_t number);
// Milliseconds of a wait; less than 0: without a limit.
std::chrono::milliseconds ReadWait(std::int64_t milliseconds);
// NULL: all of `shape`.
// Fails where `shape` itself is none, since it is the caller's too.
Result<Region> ReadRegion(const tm_region* given, const Dims& shape);
// Checks type, rank and sizes that overflow, not the memory: whether `data` is large enough nobody
// can know.
Result<BufferView> ReadBuffer(const tm_buffer* given);
// What it says of device, memory and stream alone.
Status ReadMemory(const tm_buffer& given, BufferView& view);
// Copied: the caller's array need not outlive the call.
Result<std::vector<std::string>> ReadTexts(const char* const* texts, std::size_t count,
                                           const char* name);
// `count` texts, each with a NUL behind it, that fill `size` bytes. Views of the caller's memory.
Result<std::vector<std::string_view>> ReadKeys(const char* keys, std::size_t size,
                                               std::size_t count);
// 0 and less: the default.
Timeouts ReadTimeouts(std::int64_t liveness_ms, std::int64_t arrival_ms, std::int64_t total_ms);
// Called on threads of the library; the strings of an event live for that call only.
EventHook ReadHook(tm_event_hook hook, void* context);

// NULL: nobody looks.
Watch ReadTask(tm_task* task);
// Rules of a key map as JSON; NULL: none.
Result<std::shared_ptr<const KeyMap>> ReadRules(const char* rules);

// ---- What goes out ----
// Memory that goes out is from malloc, to be freed with tm_free: the caller may use another C++
// runtime, or none. Outputs are only set on success.

Status HandOut(std::string_view bytes, void** data, std::size_t* size);
Status HandOut(std::string_view text, char** out, std::size_t* size);
// On one line; what is no UTF-8 in it, as names from outside may be, is replaced.
Status HandOut(const nlohmann::ordered_json& json, char** out);
Status HandOut(std::vector<std::string> items, tm_list** out);
// The value `name` of a map as JSON, or all of it as one object. `what`: for the message.
// `size` may be NULL: the text ends with a NUL.
Status HandOut(const std::map<std::string, CommonValue>& values, const char* name,
               std::string_view what, char** out, std::size_t* size);

}  // namespace tensormount::c_api

#endif  // TENSORMOUNT_LIB_C_API_H_
