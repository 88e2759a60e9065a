// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/fake_cuda.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <set>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "tensormount/visibility.h"

#include "gpu/kernels/jobs.h"
#include "tests/gpu/grid.h"
#include "tests/support/random.h"
#include "tests/support/twin_memory.h"
#include "tests/support/work_thread.h"

namespace tensormount::gpu::cuda {

struct ContextRep {
  int ordinal = 0;
  std::uint64_t id = 0;  // Of the present one at this address.
  bool alive = false;
  Result sticky = kSuccess;
};
struct StreamRep {
  ContextRep* context = nullptr;
  std::uint64_t context_id = 0;
  std::shared_ptr<WorkThread> thread;
  bool captures = false;
};
struct EventRep {
  ContextRep* context = nullptr;
  std::uint64_t context_id = 0;
  std::shared_ptr<WorkMark> mark;  // Null: never recorded.
};
struct FunctionRep {
  std::string name;
  unsigned threads = kernels::kBlockThreads;  // Of a block.
  ModuleRep* module = nullptr;
  bool loaded = false;
};
struct PoolRep {
  ContextRep* context = nullptr;
  std::uint64_t context_id = 0;
};
struct ModuleRep {
  ContextRep* context = nullptr;
  Address tables = 0;
  std::array<FunctionRep, 6> functions = {{{"tensormount_copy"},
                                           {"tensormount_runs"},
                                           {"tensormount_tiles"},
                                           {"tensormount_hash", kernels::kHashThreads},
                                           {"tensormount_crc"},
                                           {"floor_read"}}};
};

}  // namespace tensormount::gpu::cuda

namespace tensormount {
namespace {

namespace cuda = gpu::cuda;
using cuda::Address;
using Error = cuda::Result;

constexpr int kMostDevices = 4;

struct Allocation {
  int ordinal = 0;
  bool managed = false;
  std::size_t bytes = 0;
  bool pooled = false;
  bool freed = false;  // By the program; its stream has yet to come to it.
};

struct Fake {
  std::recursive_mutex mutex;
  std::atomic<pid_t> begun_by = 0;
  std::array<cuda::ContextRep, kMostDevices> contexts;
  std::uint64_t ids = 0;
  TwinMemories memory;
  // By first byte. Several may be parts of one piece of memory.
  std::map<const std::byte*, Allocation> allocations;
  std::array<std::size_t, kMostDevices> used = {};
  std::size_t limit = std::size_t{1} << 40;
  std::map<const std::byte*, std::size_t> registered;
  std::set<cuda::Module> modules;  // Also of contexts that are gone.
  std::set<cuda::Stream> streams;
  std::set<cuda::Event> events;
  std::map<int, std::unique_ptr<cuda::StreamRep>> legacy;  // By ordinal.
  std::function<Error(std::string_view)> fault;
  std::atomic<bool> lies = false;
  std::atomic<int> delay_us = 50;
  std::atomic<int> pending = 0;
  std::atomic<int> of_program = 0;  // Work that a test gave to streams.
  std::set<cuda::Pool> pools;       // Also of contexts that are gone.
  std::atomic<std::size_t> reached = 0;
  std::atomic<std::size_t> launches = 0;
  std::atomic<std::size_t> copies = 0;
  std::atomic<std::size_t> crossed = 0;
  std::uint64_t seed = 1;
};
Fake& State() {
  static auto* const fake = new Fake;
  return *fake;
}

// Not thread_local: thread sanitizers do not know how libraries that were opened have that.
struct OfThread {
  std::vector<cuda::Context> stack;
  int capture_mode = 0;  // Global, as CUDA begins.
  std::map<int, std::unique_ptr<cuda::StreamRep>> per_thread;
};
OfThread& Mine() {
  static const pthread_key_t key = [] {
    pthread_key_t made = 0;
    if (pthread_key_create(&made, [](void* own) { delete static_cast<OfThread*>(own); }) != 0) {
      AbortDevice("no key");
    }
    return made;
  }();
  auto* own = static_cast<OfThread*>(pthread_getspecific(key));
  if (own == nullptr) {
    own = new OfThread;
    (void)pthread_setspecific(key, own);
  }
  return *own;
}

int DeviceCount() {
  const char* const said = std::getenv("FAKE_CUDA_DEVICES");
  return std::min(kMostDevices, said == nullptr ? 2 : std::atoi(said));
}

Error Faulted(const std::string& what) {
  std::function<Error(std::string_view)> fault;
  {
    std::lock_guard lock(State().mutex);
    fault = State().fault;
  }
  return fault ? fault(what) : cuda::kSuccess;
}

// Whether a function that needs a context may go on. Fails as the context does.
Error Enter(const char* function) {
  if (State().begun_by != getpid()) return cuda::kNotInitialized;
  if (const Error faulted = Faulted(function); faulted != 0) return faulted;
  if (Mine().stack.empty()) return cuda::kInvalidContext;
  std::lock_guard lock(State().mutex);
  if (!Mine().stack.back()->alive) return cuda::kContextIsDestroyed;
  return Mine().stack.back()->sticky;
}

template <typename Rep>
void MustBeAlive(const Rep* handle, const char* what) {
  std::lock_guard lock(State().mutex);
  if (!handle->context->alive || handle->context->id != handle->context_id) {
    AbortDevice(std::string(what) + " of a context that is gone");
  }
}

std::shared_ptr<WorkThread> NewThread() {
  std::lock_guard lock(State().mutex);
  return std::make_shared<WorkThread>(State().seed++, State().delay_us);
}

std::unique_ptr<cuda::StreamRep> NewStream(cuda::Context context) {
  std::lock_guard lock(State().mutex);
  return std::make_unique<cuda::StreamRep>(
      cuda::StreamRep{context, context->id, NewThread(), false});
}

cuda::StreamRep& Resolve(cuda::Stream stream) {
  std::lock_guard lock(State().mutex);
  const auto number = reinterpret_cast<std::uintptr_t>(stream);
  if (number > cuda::kPerThreadStream) {
    if (State().streams.count(stream) == 0) AbortDevice("a stream that there is not");
    MustBeAlive(stream, "a stream");
    return *stream;
  }
  const cuda::Context context = Mine().stack.back();
  auto& streams = number == cuda::kPerThreadStream ? Mine().per_thread : State().legacy;
  std::unique_ptr<cuda::StreamRep>& own = streams[context->ordinal];
  if (own == nullptr || own->context_id != context->id) own = NewStream(context);
  return *own;
}

// Work of a function for a stream. Waits for it, too, where the driver would.
Error Submit(const char* function, cuda::Stream stream, bool waits, std::function<void()> work) {
  cuda::StreamRep& to = Resolve(stream);
  if (to.captures) return cuda::kCaptureUnsupported;
  ++State().pending;
  to.thread->Add([work = std::move(work), what = "run " + std::string(function),
                  context = to.context, id = to.context_id]() -> Status {
    const Error faulted = Faulted(what);
    bool go_on = faulted == 0;
    {
      std::lock_guard lock(State().mutex);
      if (context->id != id || !context->alive || context->sticky != 0) go_on = false;
      if (faulted != 0) context->sticky = faulted;
    }
    if (go_on) work();
    --State().pending;
    return {};
  });
  if (waits) to.thread->Here()->Wait();
  return cuda::kSuccess;
}

bool IsPinned(const void* data, std::size_t bytes) {
  std::lock_guard lock(State().mutex);
  const auto* const at = static_cast<const std::byte*>(data);
  const auto above = State().registered.upper_bound(at);
  if (above == State().registered.begin()) return false;
  const auto& [begin, size] = *std::prev(above);
  return at + bytes <= begin + size;
}

const void* Pointer(Address address) { return reinterpret_cast<const void*>(address); }
std::byte* Reveal(Address address, std::size_t bytes) {
  return State().memory.Reveal(Pointer(address), bytes);
}

// ---- Kernels ---------------------------------------------------------------------------------

struct Geometry {
  std::uint64_t blocks = 0;
  std::uint64_t threads = 0;  // In all.
  std::uint64_t seed = 0;
};

// What is added to addresses of the device to read there. Checks all that the pieces touch.
std::int64_t Revealing(const kernels::Batch& batch, int m, const std::uint8_t* base, bool to) {
  const auto u = static_cast<std::size_t>(m);
  const std::uint64_t count = batch.begin[u + 1] - batch.begin[u];
  if (count == 0) return 0;
  const auto at = [&](std::uint64_t i) {
    const kernels::RunPart part =
        kernels::PieceAt<std::uint64_t>(batch.strided[u], batch.first[u] + i);
    return std::pair(reinterpret_cast<std::uintptr_t>(base) +
                         static_cast<std::uintptr_t>(to ? part.to : part.from),
                     part.bytes);
  };
  const std::shared_ptr<TwinMemory> memory = State().memory.Find(Pointer(at(0).first));
  if (memory == nullptr) AbortDevice("a kernel outside of memory");
  const auto begin = reinterpret_cast<std::uintptr_t>(memory->address);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto [address, bytes] = at(i);
    if (address < begin || address + bytes > begin + memory->size) {
      AbortDevice("a kernel outside of memory");
    }
  }
  return memory->bytes_here - memory->address;
}

void RunCopy(kernels::CopyJob job, const Geometry& geometry) {
  for (int m = 0; m < job.batch.count; ++m) {
    const auto u = static_cast<std::size_t>(m);
    job.batch.from[u] += Revealing(job.batch, m, job.batch.from[u], false);
    job.to[u] += Revealing(job.batch, m, job.to[u], true);
  }
  Random random(geometry.seed);
  RunGrid(random, geometry.threads,
          [&](std::uint64_t t) { kernels::CopyThread(job, t, geometry.threads); });
}

void RunRuns(kernels::RunJob job, const Geometry& geometry) {
  for (std::size_t m = 0; m < static_cast<std::size_t>(job.count); ++m) {
    const auto bytes = static_cast<std::size_t>(job.bytes[m]);
    job.from[m] = reinterpret_cast<const std::uint8_t*>(State().memory.Reveal(job.from[m], bytes));
    job.to[m] = reinterpret_cast<std::uint8_t*>(State().memory.Reveal(job.to[m], bytes));
  }
  Random random(geometry.seed);
  const std::uint64_t warps = geometry.threads / kernels::kLanes;
  RunGrid(random, warps, [&](std::uint64_t w) {
    kernels::RunWarp(job, kernels::HostWarp(), static_cast<std::uint32_t>(w),
                     static_cast<std::uint32_t>(warps));
  });
}

// As Revealing above; a box of words.
std::int64_t RevealingBox(const kernels::Tiled& t, const std::uint8_t* base, bool to) {
  std::int64_t first = to ? t.to : t.from;
  std::int64_t last = first + t.word;
  const auto reach = [&](std::uint32_t count, std::int64_t step) {
    const std::int64_t way = (std::int64_t{count} - 1) * step;
    (way < 0 ? first : last) += way;
  };
  reach(t.read.count, to ? t.read.to : t.read.from);
  reach(t.written.count, to ? t.written.to : t.written.from);
  for (int a = 0; a < t.axes; ++a) reach(t.count[a], to ? t.to_step[a] : t.from_step[a]);
  const auto begin = reinterpret_cast<std::uintptr_t>(base) + static_cast<std::uintptr_t>(first);
  const auto* const here = reinterpret_cast<const std::uint8_t*>(
      State().memory.Reveal(Pointer(begin), static_cast<std::size_t>(last - first)));
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(here) - begin);
}

void RunTiles(kernels::TileJob job, const Geometry& geometry) {
  for (std::size_t m = 0; m < static_cast<std::size_t>(job.count); ++m) {
    job.from[m] += RevealingBox(job.tiled[m], job.from[m], false);
    job.to[m] += RevealingBox(job.tiled[m], job.to[m], true);
  }
  Random random(geometry.seed);
  const auto memory = std::make_unique<kernels::TileMemory>();
  RunGrid(random, geometry.blocks, [&](std::uint64_t b) {
    kernels::TileBlock(job, kernels::HostBlock<kernels::kBlockThreads>(), *memory, b,
                       geometry.blocks);
  });
}

void RunHash(kernels::HashJob job, const Geometry& geometry) {
  for (std::size_t m = 0; m < static_cast<std::size_t>(job.count); ++m) {
    job.data[m] = reinterpret_cast<const std::uint8_t*>(
        State().memory.Reveal(job.data[m], static_cast<std::size_t>(job.bytes[m])));
  }
  job.out = reinterpret_cast<kernels::Hash*>(State().memory.Reveal(
      job.out, static_cast<std::size_t>(job.leaves()) * sizeof(kernels::Hash)));
  Random random(geometry.seed);
  const std::uint64_t warps = geometry.threads / kernels::kLanes;
  RunGrid(random, warps,
          [&](std::uint64_t w) { kernels::HashWarp(job, kernels::HostWarp(), w, warps); });
  if (State().lies) job.out->low ^= 1;
}

void RunCrc(kernels::CrcJob job, Address tables, const Geometry& geometry) {
  for (int m = 0; m < job.batch.count; ++m) {
    const auto u = static_cast<std::size_t>(m);
    // Where a region goes to is no memory: its places in the tensor.
    job.batch.from[u] += Revealing(job.batch, m, job.batch.from[u], false);
    job.sum[u] = reinterpret_cast<std::uint64_t*>(State().memory.Reveal(job.sum[u], 8));
  }
  const auto& there =
      *reinterpret_cast<const kernels::CrcTables*>(Reveal(tables, sizeof(kernels::CrcTables)));
  Random random(geometry.seed);
  RunGrid(random, geometry.threads, [&](std::uint64_t t) {
    kernels::CrcThread(job, there.bytes, there, t, geometry.threads,
                       [](std::uint64_t* sum, std::uint64_t value) { *sum ^= value; });
  });
  if (State().lies) *job.sum[0] ^= geometry.seed | 1;
}

// ---- The functions ---------------------------------------------------------------------------

Error cuInit(unsigned) {
  pid_t none = 0;
  if (const Error faulted = Faulted("cuInit"); faulted != 0) return faulted;
  if (State().begun_by.compare_exchange_strong(none, getpid())) return cuda::kSuccess;
  return none == getpid() ? cuda::kSuccess : cuda::kNotInitialized;
}
Error cuDriverGetVersion(int* version) {
  *version = 13000;
  return cuda::kSuccess;
}
Error cuGetErrorName(Error error, const char** name) {
  static const std::map<Error, const char*> names = {
      {cuda::kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {cuda::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {cuda::kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
      {cuda::kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {cuda::kNoBinaryForGpu, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {cuda::kEccUncorrectable, "CUDA_ERROR_ECC_UNCORRECTABLE"},
      {cuda::kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {cuda::kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
      {cuda::kNotPermitted, "CUDA_ERROR_NOT_PERMITTED"}};
  const auto found = names.find(error);
  if (found == names.end()) return cuda::kInvalidValue;
  *name = found->second;
  return cuda::kSuccess;
}
Error cuGetErrorString(Error error, const char** words) {
  *words = error == cuda::kIllegalAddress ? "an illegal memory access was encountered" : "in words";
  return cuda::kSuccess;
}
Error cuDeviceGetCount(int* count) {
  if (const Error faulted = Faulted("cuDeviceGetCount"); faulted != 0) return faulted;
  *count = DeviceCount();
  return cuda::kSuccess;
}
Error cuDeviceGet(cuda::Device* device, int ordinal) {
  if (ordinal < 0 || ordinal >= DeviceCount()) return cuda::kInvalidDevice;
  *device = 100 + ordinal;  // Not the ordinal.
  return cuda::kSuccess;
}
Error cuDeviceGetName(char* name, int bytes, cuda::Device) {
  std::strncpy(name, "Fake H100", static_cast<std::size_t>(bytes));
  return cuda::kSuccess;
}
Error cuDeviceGetUuid(cuda::Uuid* uuid, cuda::Device device) {
  std::memset(uuid->bytes, 0xAB, sizeof(uuid->bytes));
  uuid->bytes[15] = static_cast<std::uint8_t>(device - 100);
  return cuda::kSuccess;
}
Error PhysicalUuid(cuda::Uuid* uuid, cuda::Device) {
  std::memset(uuid->bytes, 0xCD, sizeof(uuid->bytes));  // Both are parts of one.
  return cuda::kSuccess;
}
Error cuDeviceGetAttribute(int* value, int attribute, cuda::Device) {
  if (attribute == cuda::kAttributeMajor) *value = 9;
  if (attribute == cuda::kAttributeMinor) *value = 0;
  if (attribute == cuda::kAttributeHostNumaId) *value = 0;
  if (attribute == cuda::kAttributeMemoryPools) *value = Faulted("memory pools") == 0 ? 1 : 0;
  return cuda::kSuccess;
}
Error cuDevicePrimaryCtxRetain(cuda::Context* context, cuda::Device device) {
  if (State().begun_by != getpid()) return cuda::kNotInitialized;
  if (const Error faulted = Faulted("cuDevicePrimaryCtxRetain"); faulted != 0) return faulted;
  std::lock_guard lock(State().mutex);
  cuda::ContextRep& own = State().contexts[static_cast<std::size_t>(device - 100)];
  if (!own.alive) own = {device - 100, ++State().ids, true, cuda::kSuccess};
  *context = &own;
  return cuda::kSuccess;
}
Error cuDeviceCanAccessPeer(int* can, cuda::Device device, cuda::Device peer) {
  *can = device != peer ? 1 : 0;
  return cuda::kSuccess;
}
Error cuDevicePrimaryCtxRelease(cuda::Device) { return cuda::kSuccess; }
Error cuCtxPushCurrent(cuda::Context context) {
  if (State().begun_by != getpid()) return cuda::kNotInitialized;
  std::lock_guard lock(State().mutex);
  if (!context->alive) return cuda::kContextIsDestroyed;
  Mine().stack.push_back(context);
  return cuda::kSuccess;
}
Error cuCtxPopCurrent(cuda::Context* context) {
  if (Mine().stack.empty()) return cuda::kInvalidContext;
  *context = Mine().stack.back();
  Mine().stack.pop_back();
  return cuda::kSuccess;
}
Error cuCtxGetId(cuda::Context context, std::uint64_t* id) {
  std::lock_guard lock(State().mutex);
  if (!context->alive) return cuda::kContextIsDestroyed;
  *id = context->id;
  return cuda::kSuccess;
}
Error cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (const Error entered = Enter("cuCtxGetStreamPriorityRange"); entered != 0) return entered;
  *least = 0;
  *greatest = -5;
  return cuda::kSuccess;
}
Error cuThreadExchangeStreamCaptureMode(int* mode) {
  if (const Error f = Faulted("cuThreadExchangeStreamCaptureMode"); f != 0) return f;
  std::swap(*mode, Mine().capture_mode);
  return cuda::kSuccess;
}
Error cuModuleLoadData(cuda::Module* module, const void* image) {
  if (const Error entered = Enter("cuModuleLoadData"); entered != 0) return entered;
  // That of the tests, or what nvcc made: the kernels that run are those of the host either way.
  constexpr std::uint32_t kFatBinary = 0xBA55ED50;
  if (std::memcmp(image, "fake", 4) != 0 && std::memcmp(image, &kFatBinary, 4) != 0) {
    return cuda::kNoBinaryForGpu;
  }
  *module = new cuda::ModuleRep{Mine().stack.back()};
  std::lock_guard lock(State().mutex);
  State().modules.insert(*module);
  (*module)->tables = reinterpret_cast<Address>(State().memory.Add(sizeof(kernels::CrcTables)));
  return cuda::kSuccess;
}
Error cuModuleUnload(cuda::Module module) {
  if (const Error entered = Enter("cuModuleUnload"); entered != 0) return entered;
  std::lock_guard lock(State().mutex);
  if (State().modules.erase(module) != 1 ||
      !State().memory.Remove(reinterpret_cast<const std::byte*>(module->tables))) {
    AbortDevice("a module that there is not");
  }
  delete module;
  return cuda::kSuccess;
}
Error cuModuleGetFunction(cuda::Function* function, cuda::Module module, const char* name) {
  for (cuda::FunctionRep& own : module->functions) {
    own.module = module;
    if (own.name == name) *function = &own;
  }
  return cuda::kSuccess;
}
Error cuFuncLoad(cuda::Function function) {
  if (const Error entered = Enter("cuFuncLoad"); entered != 0) return entered;
  function->loaded = true;
  return cuda::kSuccess;
}
Error cuModuleGetGlobal(Address* address, std::size_t* bytes, cuda::Module module, const char*) {
  *address = module->tables;
  *bytes = sizeof(kernels::CrcTables);
  return cuda::kSuccess;
}
Error cuLaunchKernel(cuda::Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned,
                     cuda::Stream stream, void** parameters, void**) {
  if (const Error entered = Enter("cuLaunchKernel"); entered != 0) return entered;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 ||
      block_x != function->threads) {
    return cuda::kInvalidValue;
  }
  // A load at a launch may wait for every stream of the context.
  if (!function->loaded && function->name.starts_with("tensormount_")) {
    AbortDevice("a launch of a kernel that was not loaded");
  }
  ++State().launches;
  Geometry geometry{grid_x, std::uint64_t{grid_x} * block_x};
  {
    std::lock_guard lock(State().mutex);
    geometry.seed = State().seed++;
  }
  // What a launch is handed is read at once.
  std::function<void()> work;
  if (function->name == "tensormount_copy") {
    work = [=, job = *static_cast<kernels::CopyJob*>(parameters[0])] { RunCopy(job, geometry); };
  } else if (function->name == "tensormount_runs") {
    work = [=, job = *static_cast<kernels::RunJob*>(parameters[0])] { RunRuns(job, geometry); };
  } else if (function->name == "tensormount_tiles") {
    work = [=, job = *static_cast<kernels::TileJob*>(parameters[0])] { RunTiles(job, geometry); };
  } else if (function->name == "tensormount_hash") {
    work = [=, job = *static_cast<kernels::HashJob*>(parameters[0])] { RunHash(job, geometry); };
  } else if (function->name == "floor_read") {
    work = [] {};  // Of bench/gpubench.cc: it only reads.
  } else {
    work = [=, job = *static_cast<kernels::CrcJob*>(parameters[0]),
            tables = function->module->tables] { RunCrc(job, tables, geometry); };
  }
  return Submit("cuLaunchKernel", stream, false, std::move(work));
}
Error NewAllocation(Address* address, std::size_t bytes, bool pooled) {
  if (bytes == 0) return cuda::kInvalidValue;
  std::lock_guard lock(State().mutex);
  const int ordinal = Mine().stack.back()->ordinal;
  std::size_t& used = State().used[static_cast<std::size_t>(ordinal)];
  if (used + bytes > State().limit) return cuda::kOutOfMemory;
  used += bytes;
  std::byte* const data = State().memory.Add(bytes);
  State().allocations[data] = {ordinal, false, bytes, pooled};
  *address = reinterpret_cast<Address>(data);
  return cuda::kSuccess;
}
Error Release(Address address) {
  std::lock_guard lock(State().mutex);
  auto* const data = reinterpret_cast<std::byte*>(address);
  const auto found = State().allocations.find(data);
  if (found == State().allocations.end()) return cuda::kInvalidValue;
  State().used[static_cast<std::size_t>(found->second.ordinal)] -= found->second.bytes;
  State().allocations.erase(found);
  if (!State().memory.Remove(data)) AbortDevice("freed what was not allocated");
  return cuda::kSuccess;
}
Error cuMemAlloc(Address* address, std::size_t bytes) {
  if (const Error entered = Enter("cuMemAlloc"); entered != 0) return entered;
  return NewAllocation(address, bytes, false);
}
// As the real one it waits for all work of the device, the program's too.
Error cuMemFree(Address address) {
  if (const Error entered = Enter("cuMemFree"); entered != 0) return entered;
  while (State().pending > 0 || State().of_program > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return Release(address);
}
Error cuMemPoolCreate(cuda::Pool* pool, const cuda::PoolProperties* properties) {
  if (const Error entered = Enter("cuMemPoolCreate"); entered != 0) return entered;
  const cuda::Context context = Mine().stack.back();
  if (properties->type != cuda::kPinnedAllocation ||
      properties->location.type != cuda::kLocationDevice ||
      properties->location.ordinal != context->ordinal) {
    return cuda::kInvalidValue;
  }
  std::lock_guard lock(State().mutex);
  *pool = new cuda::PoolRep{context, context->id};
  State().pools.insert(*pool);
  return cuda::kSuccess;
}
// What was not freed stays.
Error cuMemPoolDestroy(cuda::Pool pool) {
  if (const Error entered = Enter("cuMemPoolDestroy"); entered != 0) return entered;
  std::lock_guard lock(State().mutex);
  if (State().pools.erase(pool) != 1) AbortDevice("a pool that there is not");
  delete pool;
  return cuda::kSuccess;
}
Error cuMemPoolSetAccess(cuda::Pool pool, const cuda::PoolAccess* access, std::size_t count) {
  if (const Error entered = Enter("cuMemPoolSetAccess"); entered != 0) return entered;
  MustBeAlive(pool, "a pool");
  if (count != 1 || access->flags != cuda::kAccessReadWrite ||
      access->location.ordinal == pool->context->ordinal) {
    return cuda::kInvalidValue;
  }
  ++State().reached;
  return cuda::kSuccess;
}
Error cuMemAllocFromPoolAsync(Address* address, std::size_t bytes, cuda::Pool pool,
                              cuda::Stream stream) {
  if (const Error entered = Enter("cuMemAllocFromPoolAsync"); entered != 0) return entered;
  MustBeAlive(pool, "a pool");
  // What was freed before it is there again.
  Resolve(stream).thread->Here()->Wait();
  return NewAllocation(address, bytes, true);
}
// In the order of the stream, and of nothing else.
Error cuMemFreeAsync(Address address, cuda::Stream stream) {
  if (const Error entered = Enter("cuMemFreeAsync"); entered != 0) return entered;
  {
    std::lock_guard lock(State().mutex);
    const auto found = State().allocations.find(reinterpret_cast<std::byte*>(address));
    if (found == State().allocations.end() || !found->second.pooled || found->second.freed) {
      return cuda::kInvalidValue;
    }
    found->second.freed = true;
  }
  ++State().pending;
  Resolve(stream).thread->Add([address]() -> Status {
    (void)Release(address);
    --State().pending;
    return {};
  });
  return cuda::kSuccess;
}
Error cuMemHostRegister(void* data, std::size_t bytes, unsigned) {
  if (const Error entered = Enter("cuMemHostRegister"); entered != 0) return entered;
  std::lock_guard lock(State().mutex);
  State().registered[static_cast<std::byte*>(data)] = bytes;
  return cuda::kSuccess;
}
Error cuMemHostUnregister(void* data) {
  if (const Error entered = Enter("cuMemHostUnregister"); entered != 0) return entered;
  std::lock_guard lock(State().mutex);
  return State().registered.erase(static_cast<std::byte*>(data)) == 1 ? cuda::kSuccess
                                                                      : cuda::kInvalidValue;
}
// As the reference says: an address that CUDA does not know is no error, and its attributes are 0.
Error cuPointerGetAttributes(unsigned count, int* attributes, void** values, Address address) {
  if (const Error entered = Enter("cuPointerGetAttributes"); entered != 0) return entered;
  std::lock_guard lock(State().mutex);
  const auto* const at = reinterpret_cast<const std::byte*>(address);
  unsigned type = 0;
  unsigned managed = 0;
  int ordinal = -2;
  const auto above = State().allocations.upper_bound(at);
  if (IsPinned(at, 1)) {
    type = cuda::kMemoryHost;
  } else if (above != State().allocations.begin()) {
    const auto& [begin, allocation] = *std::prev(above);
    if (at < begin + allocation.bytes) {
      type = cuda::kMemoryDevice;
      managed = allocation.managed ? 1 : 0;
      ordinal = allocation.ordinal;
    }
  }
  for (unsigned i = 0; i < count; ++i) {
    switch (attributes[i]) {
      case cuda::kPointerMemoryType:
        std::memcpy(values[i], &type, sizeof(type));
        break;
      case cuda::kPointerIsManaged:
        std::memcpy(values[i], &managed, sizeof(managed));
        break;
      case cuda::kPointerDeviceOrdinal:
        std::memcpy(values[i], &ordinal, sizeof(ordinal));
        break;
      default:
        return cuda::kInvalidValue;
    }
  }
  return cuda::kSuccess;
}
Error cuStreamCreateWithPriority(cuda::Stream* stream, unsigned flags, int) {
  if (const Error entered = Enter("cuStreamCreateWithPriority"); entered != 0) return entered;
  // Work on such a stream would wait for that of PyTorch's default stream, and delay it.
  if (flags != cuda::kStreamNonBlocking) AbortDevice("a stream that waits for the default stream");
  *stream = NewStream(Mine().stack.back()).release();
  std::lock_guard lock(State().mutex);
  State().streams.insert(*stream);
  return cuda::kSuccess;
}
Error cuStreamDestroy(cuda::Stream stream) {
  if (const Error entered = Enter("cuStreamDestroy"); entered != 0) return entered;
  (void)Resolve(stream);
  std::lock_guard lock(State().mutex);
  State().streams.erase(stream);
  // What it was given goes on: on a thread of its own, since that of the stream may hang.
  std::thread([thread = std::move(stream->thread)]() mutable { thread.reset(); }).detach();
  delete stream;
  return cuda::kSuccess;
}
Error cuStreamWaitEvent(cuda::Stream stream, cuda::Event event, unsigned) {
  if (const Error entered = Enter("cuStreamWaitEvent"); entered != 0) return entered;
  MustBeAlive(event, "an event");
  const std::shared_ptr<WorkMark> mark = event->mark;
  if (mark == nullptr) return cuda::kSuccess;
  ++State().pending;
  Resolve(stream).thread->Add([mark]() -> Status {
    mark->Wait();
    --State().pending;
    return {};
  });
  return cuda::kSuccess;
}
Error cuStreamIsCapturing(cuda::Stream stream, int* status) {
  if (const Error entered = Enter("cuStreamIsCapturing"); entered != 0) return entered;
  std::lock_guard lock(State().mutex);
  *status = Resolve(stream).captures ? 1 : 0;
  if (reinterpret_cast<std::uintptr_t>(stream) == cuda::kLegacyStream) {
    for (const cuda::Stream other : State().streams) {
      if (other->captures) return cuda::kCaptureImplicit;
    }
  }
  return cuda::kSuccess;
}
// A thread that is not relaxed spoils the captures of others with what may wait.
Error Unsafe() {
  std::lock_guard lock(State().mutex);
  if (Mine().capture_mode == cuda::kCaptureModeRelaxed) return cuda::kSuccess;
  for (const cuda::Stream stream : State().streams) {
    if (stream->captures) return cuda::kCaptureUnsupported;
  }
  return cuda::kSuccess;
}
Error cuEventCreate(cuda::Event* event, unsigned) {
  if (const Error entered = Enter("cuEventCreate"); entered != 0) return entered;
  std::lock_guard lock(State().mutex);
  *event = new cuda::EventRep{Mine().stack.back(), Mine().stack.back()->id, nullptr};
  State().events.insert(*event);
  return cuda::kSuccess;
}
Error cuEventDestroy(cuda::Event event) {
  if (const Error entered = Enter("cuEventDestroy"); entered != 0) return entered;
  MustBeAlive(event, "an event");
  std::lock_guard lock(State().mutex);
  State().events.erase(event);
  delete event;
  return cuda::kSuccess;
}
Error cuEventRecord(cuda::Event event, cuda::Stream stream) {
  if (const Error entered = Enter("cuEventRecord"); entered != 0) return entered;
  MustBeAlive(event, "an event");
  cuda::StreamRep& of = Resolve(stream);
  if (of.context != event->context) return cuda::kInvalidHandle;
  if (of.captures) return cuda::kCaptureUnsupported;
  event->mark = of.thread->Here();
  return cuda::kSuccess;
}
Error cuEventQuery(cuda::Event event) {
  if (const Error entered = Enter("cuEventQuery"); entered != 0) return entered;
  MustBeAlive(event, "an event");
  if (const Error unsafe = Unsafe(); unsafe != 0) return unsafe;
  if (event->mark == nullptr) return cuda::kSuccess;
  if (!event->mark->Reached().value()) return cuda::kNotReady;
  // What went wrong before it is known by now.
  std::lock_guard lock(State().mutex);
  return event->context->sticky;
}
Error cuMemcpyHtoDAsync(Address to, const void* from, std::size_t bytes, cuda::Stream stream) {
  if (const Error entered = Enter("cuMemcpyHtoDAsync"); entered != 0) return entered;
  ++State().copies;
  State().crossed += bytes;
  if (IsPinned(from, bytes)) {
    return Submit("cuMemcpyHtoDAsync", stream, false,
                  [=] { std::memcpy(Reveal(to, bytes), from, bytes); });
  }
  // Memory that is not pinned has been read when it returns.
  std::vector<std::byte> read(bytes);
  std::memcpy(read.data(), from, bytes);
  return Submit("cuMemcpyHtoDAsync", stream, false, [=, read = std::move(read)] {
    std::memcpy(Reveal(to, bytes), read.data(), bytes);
  });
}
Error cuMemcpyDtoHAsync(void* to, Address from, std::size_t bytes, cuda::Stream stream) {
  if (const Error entered = Enter("cuMemcpyDtoHAsync"); entered != 0) return entered;
  ++State().copies;
  State().crossed += bytes;
  // Memory that is not pinned is there when it returns.
  return Submit("cuMemcpyDtoHAsync", stream, !IsPinned(to, bytes),
                [=] { std::memcpy(to, Reveal(from, bytes), bytes); });
}
Error cuMemsetD8Async(Address to, unsigned char value, std::size_t bytes, cuda::Stream stream) {
  if (const Error entered = Enter("cuMemsetD8Async"); entered != 0) return entered;
  return Submit("cuMemsetD8Async", stream, false,
                [=] { std::memset(Reveal(to, bytes), value, bytes); });
}

// By name, with their types: what is asked for is what is declared.
Error Find(std::string name, int version, void** function) {
  if (name == "cuDeviceGetUuid" && version < 11040) name = "physical uuid";
  static const auto* const functions = new std::map<std::string, void*>{
#define TENSORMOUNT_FAKE_ENTRY(entry, parameters) \
  {#entry,                                        \
   reinterpret_cast<void*>(static_cast<decltype(cuda::Driver::entry)>(&tensormount::entry))},
      TENSORMOUNT_CUDA_FUNCTIONS(TENSORMOUNT_FAKE_ENTRY)
#undef TENSORMOUNT_FAKE_ENTRY
          {"physical uuid", reinterpret_cast<void*>(&PhysicalUuid)},
      {cuda::kFuncLoad, reinterpret_cast<void*>(&cuFuncLoad)},
  };
  const auto found = functions->find(name);
  if (found == functions->end()) return cuda::kInvalidValue;
  *function = found->second;
  return cuda::kSuccess;
}

// ---- What tests ask --------------------------------------------------------------------------

// The thread's context for a moment.
class InContext {
 public:
  explicit InContext(int ordinal) {
    cuda::Context context = nullptr;
    (void)cuInit(0);
    (void)cuDevicePrimaryCtxRetain(&context, 100 + ordinal);
    Mine().stack.push_back(context);
  }
  ~InContext() { Mine().stack.pop_back(); }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
};

std::byte* NewRange(int ordinal, std::size_t bytes, bool managed, std::size_t parts) {
  std::lock_guard lock(State().mutex);
  std::byte* const data = State().memory.Add(bytes);
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t begin = bytes * i / parts;
    State().allocations[data + begin] = {ordinal, managed, bytes * (i + 1) / parts - begin};
  }
  return data;
}

const FakeCuda control = {
    [](int ordinal) {
      const InContext in(ordinal);
      cuda::Stream stream = nullptr;
      if (cuStreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, 0) != 0) {
        AbortDevice("no stream");
      }
      return static_cast<void*>(stream);
    },
    [](int ordinal, void* stream, std::function<void()> work) {
      const InContext in(ordinal);
      ++State().of_program;
      Resolve(static_cast<cuda::Stream>(stream)).thread->Add([work = std::move(work)]() -> Status {
        work();
        --State().of_program;
        return {};
      });
    },
    [](int ordinal, void* stream) {
      const InContext in(ordinal);
      Resolve(static_cast<cuda::Stream>(stream)).thread->Here()->Wait();
    },
    [](void* stream) { static_cast<cuda::Stream>(stream)->captures = true; },
    [](void* stream) { static_cast<cuda::Stream>(stream)->captures = false; },
    [](const void* data) { return State().memory.Reveal(data); },
    [](int ordinal, std::size_t bytes) { return NewRange(ordinal, bytes, false, 2); },
    [](std::size_t bytes) { return NewRange(0, bytes, true, 1); },
    [](int ordinal) {
      std::lock_guard lock(State().mutex);
      State().contexts[static_cast<std::size_t>(ordinal)].alive = false;
      // What was made in it is gone with it: streams by themselves, memory by its owner.
      State().registered.clear();
    },
    [](int ordinal, Error error) {
      std::lock_guard lock(State().mutex);
      State().contexts[static_cast<std::size_t>(ordinal)].sticky = error;
    },
    [](std::function<Error(std::string_view)> fault) {
      std::lock_guard lock(State().mutex);
      State().fault = std::move(fault);
    },
    [](bool lies) { State().lies = lies; },
    [](std::size_t bytes) {
      std::lock_guard lock(State().mutex);
      State().limit = bytes;
    },
    [](int microseconds) { State().delay_us = microseconds; },
    [] {
      while (State().pending > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    },
    [] {
      std::lock_guard lock(State().mutex);
      FakeCuda::Counts counts;
      for (const auto& [data, allocation] : State().allocations)
        counts.allocations += allocation.freed ? 0 : 1;
      for (const auto& [data, bytes] : State().registered) counts.pinned_bytes += bytes;
      counts.streams = State().streams.size();
      counts.events = State().events.size();
      counts.launches = State().launches;
      counts.copies = State().copies;
      counts.crossed_bytes = State().crossed;
      return counts;
    },
    [] { return static_cast<int>(Mine().stack.size()); },
    [] { return Mine().capture_mode; },
    [] { return Mine().stack.empty() ? -1 : Mine().stack.back()->ordinal; },
    [] { return State().reached.load(); },
};

}  // namespace
}  // namespace tensormount

extern "C" {

TENSORMOUNT_EXPORT const tensormount::FakeCuda* fake_cuda_control() {
  return &tensormount::control;
}

// For bench/gpubench.cc.
TENSORMOUNT_EXPORT int cuMemcpyDtoDAsync_v2(std::uint64_t to, std::uint64_t from, std::size_t bytes,
                                            tensormount::gpu::cuda::Stream stream) {
  return tensormount::Submit("cuMemcpyDtoDAsync", stream, false, [=] {
    std::memcpy(tensormount::Reveal(to, bytes), tensormount::Reveal(from, bytes), bytes);
  });
}

TENSORMOUNT_EXPORT int cuGetProcAddress_v2(const char* name, void** function, int version,
                                           std::uint64_t /*flags*/, int* /*found*/) {
  return tensormount::Find(name, version, function);
}

}  // extern "C"
