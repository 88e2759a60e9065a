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
#include "tensormount/name_map.h"
#include "tensormount/state_dict.h"
#include "tensormount/status.h"

#include "base/watch.h"
#include "collective/guarded.h"

// Shared helpers of the functions of tensormount/c.h. The body of nearly every function that
// returns a tm_status is one Call, which stores the error message and converts exceptions to a
// status.

// The types of the handles of c.h. The library allocates handles with new and deletes them in
// tm_..._free. A handle has no lock, so callers use it from one thread at a time; c.h names the
// exceptions.
struct tm_list {
  // Arbitrary bytes; each item has a NUL at its end (std::string), so it can be used as a C string.
  std::vector<std::string> items;
};

// A communicator; in this header, because libtensormount_mpi makes communicators, too.
struct tm_communicator {
  std::unique_ptr<tensormount::Communicator> comm;
  // Made by the first tm_save_async or tm_save_in_place. Destroyed before `comm`, because the
  // destructor waits for the saves in progress.
  std::shared_ptr<tensormount::AsyncSaver> saver = nullptr;
  const pid_t process = getpid();
};

// A state dict. Its buffers belong to the caller, and c.h says how long they must stay valid.
struct tm_state {
  tensormount::StateDict dict;
};

// Progress and cancellation of a call, used by the thread of the call and by other threads
// (tm_task_new).
struct tm_task {
  std::atomic<bool> cancel = false;
  std::atomic<std::uint64_t> done = 0;
  std::atomic<std::uint64_t> total = 0;
};

namespace tensormount::c_api {

// Converts a status, and stores message and errno of a failure for tm_last_error of this thread. OK
// does not change the stored message.
tm_status Report(const Status& status);

// Runs the body of an exported function. `fn` takes no arguments and returns Status. Exceptions
// become a status, because an exception that left the function would end a C program or unwind
// frames of Python.
template <typename Fn>
tm_status Call(Fn fn) {
  try {
    return Report(fn());
  } catch (const std::bad_alloc&) {
    return tm_set_last_error(TM_RESOURCE_EXHAUSTED, 0, "out of memory");
  } catch (const std::exception& e) {
    return tm_set_last_error(TM_INTERNAL, 0, e.what());
  } catch (...) {
    return tm_set_last_error(TM_INTERNAL, 0,
                             "internal error: an exception of an unknown type was thrown");
  }
}

// A pointer that must not be NULL, and its name in c.h.
struct Argument {
  const void* pointer;
  const char* name;
  // The process that made the object; 0 if any process may use it.
  pid_t process = 0;
};
// An Argument for a handle with threads, locks or connections. Such a handle does not work in a
// forked child: threads do not exist there, locks may be held forever, and connections belong to
// the parent.
template <typename T>
Argument Handle(const T* handle, const char* name) {
  return {handle, name, handle == nullptr ? 0 : handle->process};
}
// kInvalidArgument: a pointer is NULL. kUnsupported: a handle was made before this process was
// forked. The message names the first such argument.
Status CheckPointers(std::initializer_list<Argument> arguments);

// Frees a handle in the process that made it. In a forked child it does nothing, because the
// destructor would send to other ranks on the parent's connections and wait for threads that only
// the parent has.
template <typename T>
void FreeHandle(T* handle);

template <typename T>
void FreeHandle(T* handle) {
  if (handle == nullptr || handle->process != getpid()) return;
  (void)Call([&] {  // Errors of a destructor cannot be reported.
    delete handle;
    return Status();
  });
}

// Runs `fn` on the state dict. An error of `fn` is also recorded in the dict: if the caller ignores
// the status of tm_state_add_..., tm_save fails with it on all ranks and does not save a checkpoint
// without the tensor.
template <typename Fn>
tm_status CallOnState(tm_state* state, Fn fn) {
  return Call([&]() -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(CheckPointers({{state, "state"}}));
    const Status status = Guarded([&] { return fn(state->dict); });
    (void)state->dict.Fail(status);  // The status is also returned.
    return status;
  });
}

// ---- Structures ----
// A structure of c.h begins with its size in the caller's header, and new versions only append
// members. So a program built with an older header passes a shorter structure, whose missing
// members are zero, the default; and one built with a newer header works as long as it sets no
// unknown member.

// The size that the caller set in a structure. kInvalidArgument for less than 4 or more than 4,096
// bytes.
Result<std::uint32_t> StructSize(const void* given, const char* name);
// Checks the size of a structure, and that its bytes after the first `known` are zero.
Status CheckStruct(const void* given, std::size_t known, const char* name);

// The caller's structure in this library's version. Members that the caller's version does not have
// are zero; all are zero if `given` is NULL.
template <typename T>
Result<T> ReadStruct(const T* given, const char* name) {
  T out{};
  if (given == nullptr) return out;
  TENSORMOUNT_RETURN_IF_ERROR(CheckStruct(given, sizeof(T), name));
  std::memcpy(&out, given, std::min<std::size_t>(given->struct_size, sizeof(T)));
  return out;
}

// Copies `filled` to the caller's structure, up to its size; struct_size stays the caller's.
template <typename T>
Status WriteStruct(T filled, T* given, const char* name) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::uint32_t size, StructSize(given, name));
  filled.struct_size = size;
  std::memcpy(given, &filled, std::min<std::size_t>(size, sizeof(T)));
  return {};
}

// The enumerator with a number of c.h. `values`: the enumerators in the order of their numbers,
// from 0 on. The number is checked, because other code relies on valid enumerators.
template <typename E>
Result<E> Choice(const char* field, std::int32_t number, std::initializer_list<E> values) {
  if (number < 0 || static_cast<std::size_t>(number) >= values.size()) {
    return Status(Code::kInvalidArgument, std::string(field) + ": " + std::to_string(number) +
                                              " is not one of the values of this field");
  }
  return values.begin()[number];
}

// ---- Inputs ----

// Reads an array of `rank` numbers. kInvalidArgument if `rank` is negative or above kMaxRank. The
// function that uses the numbers checks them.
Result<Dims> ReadDims(const std::int64_t* numbers, std::int32_t rank, const char* name);
// The type with this number in c.h; nullopt for unknown numbers.
std::optional<DType> KnownDType(std::uint32_t number);
// Converts a time to wait; a negative value means no limit.
std::chrono::milliseconds ReadWait(std::int64_t milliseconds);
// Converts a region; NULL means all of `shape`, and fails if `shape` is invalid (tm_shard takes it
// from the caller).
Result<Region> ReadRegion(const tm_region* given, const Dims& shape);
// Converts a buffer. Checks its dtype, number of axes and overflow. The size of the memory at
// `data` cannot be checked.
Result<BufferView> ReadBuffer(const tm_buffer* given);
// Copies only device, memory and stream of a buffer.
Status ReadMemory(const tm_buffer& given, BufferView& view);
// Copies an array of texts, which may be freed after the call.
Result<std::vector<std::string>> ReadTexts(const char* const* texts, std::size_t count,
                                           const char* name);
// Views of `count` texts in the caller's memory. Each text ends with a NUL, and together they must
// fill `size` bytes.
Result<std::vector<std::string_view>> ReadKeys(const char* keys, std::size_t size,
                                               std::size_t count);
// Converts timeouts; zero and negative values mean the default.
Timeouts ReadTimeouts(std::int64_t liveness_ms, std::int64_t arrival_ms, std::int64_t total_ms);
// Converts a hook. The hook is called on the thread that does the work, and the strings of an event
// are valid only during the call.
EventHook ReadHook(tm_event_hook hook, void* context);

// A watch that updates the task and returns an error after tm_task_cancel; empty if the task is
// NULL.
Watch ReadTask(tm_task* task);
// Parses rules that only rename and drop keys; the result is null if `rules` is NULL.
Result<std::shared_ptr<const KeyMap>> ReadRules(const char* rules);
// Reads a name map (tm_open_options.name_map); empty if `json` is NULL. Rules are not parsed.
Result<NameMap> ReadNameMap(const char* json);

// ---- Outputs ----
// Each SetOutput copies an output for the caller. A tm_list is freed with tm_list_free; the other
// outputs are in memory from malloc, and freed with tm_free. Outputs are set only on success.

Status SetOutput(std::string_view bytes, void** data, std::size_t* size);
Status SetOutput(std::string_view text, char** out, std::size_t* size);
// The JSON is written on one line. Bytes in names that are not UTF-8 are replaced.
Status SetOutput(const nlohmann::ordered_json& json, char** out);
Status SetOutput(std::vector<std::string> items, tm_list** out);
// Outputs the value `name` of a map as JSON, or, if `name` is NULL, all values as one object.
// `what`: the kind of value, for the message. `size` may be NULL, because the text ends with a NUL.
Status SetOutput(const std::map<std::string, CommonValue>& values, const char* name,
                 std::string_view what, char** out, std::size_t* size);

}  // namespace tensormount::c_api

#endif  // TENSORMOUNT_LIB_C_API_H_
