// SPDX-License-Identifier: Apache-2.0
// What saves and loads of memory of a GPU reach, each figure beside its floor in the same run: the
// same bytes by plain calls of the driver, or by the same save and load of host memory.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <dlfcn.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tensormount/async_save.h"
#include "tensormount/load.h"
#include "tensormount/save.h"

#include "base/deadline.h"
#include "base/file_system.h"
#include "base/parallel.h"
#include "bench/ckptbench.h"
#include "collective/load/direct_read.h"
#include "device/device_module.h"
#include "device/devices.h"
#include "gpu/cuda_driver.h"
#include "shard/leaf_hash.h"

namespace tensormount::bench {
namespace {

namespace cuda = gpu::cuda;

constexpr Device kDevice{DeviceKind::kCuda, 0};
constexpr std::chrono::seconds kPatience{60};
constexpr std::uint64_t kLeaf = kLeafBytes;

cuda::Address AddressOf(const void* data) { return reinterpret_cast<cuda::Address>(data); }

// The device of the module with other pinned memory than its own.
class ShapedDevice final : public DeviceOps {
 public:
  ShapedDevice(std::shared_ptr<DeviceOps> ops, PinnedShape shape)
      : ops_(std::move(ops)), shape_(shape) {}
  std::string name() const override { return ops_->name(); }
  bool gone() const override { return ops_->gone(); }
  PinnedShape pinned() const override { return shape_; }
  Status Check(const BufferView& view) override { return ops_->Check(view); }
  Result<std::byte*> AllocatePinned(std::size_t n) override { return ops_->AllocatePinned(n); }
  void FreePinned(std::byte* data) override { ops_->FreePinned(data); }
  Result<std::byte*> Allocate(std::size_t n) override { return ops_->Allocate(n); }
  void Free(std::byte* data) override { ops_->Free(data); }
  Result<std::shared_ptr<DeviceMark>> MarkStream(const DeviceStream& stream) override {
    return ops_->MarkStream(stream);
  }
  Status HoldStream(const DeviceStream& stream, const std::shared_ptr<DeviceMark>& mark) override {
    return ops_->HoldStream(stream, mark);
  }
  Result<std::unique_ptr<DeviceQueue>> MakeQueue(const QueueLimits& rules) override {
    return ops_->MakeQueue(rules);
  }

 private:
  const std::shared_ptr<DeviceOps> ops_;
  const PinnedShape shape_;
};

// The device by the driver alone.
class Plain {
 public:
  static Result<std::unique_ptr<Plain>> Make() {
    auto made = std::make_unique<Plain>();
    TENSORMOUNT_ASSIGN_OR_RETURN(made->driver_, gpu::OpenDriver());
    const cuda::Driver& driver = *made->driver_;
    cuda::Device device = 0;
    TENSORMOUNT_RETURN_IF_ERROR(made->Check(driver.cuDeviceGet(&device, 0)));
    TENSORMOUNT_RETURN_IF_ERROR(
        made->Check(driver.cuDevicePrimaryCtxRetain(&made->context_, device)));
    // For as long as the program runs.
    TENSORMOUNT_RETURN_IF_ERROR(made->Check(driver.cuCtxPushCurrent(made->context_)));
    TENSORMOUNT_RETURN_IF_ERROR(made->Check(
        driver.cuStreamCreateWithPriority(&made->stream_, cuda::kStreamNonBlocking, 0)));
    TENSORMOUNT_RETURN_IF_ERROR(
        made->Check(driver.cuEventCreate(&made->event_, cuda::kEventDisableTiming)));
    TENSORMOUNT_RETURN_IF_ERROR(made->Check(driver.cuMemAlloc(&made->word_, 16)));
    return made;
  }

  // Seconds until the stream has done what `submit` gives it.
  template <typename Fn>
  Result<double> Time(Fn submit) {
    const Clock::time_point start = Clock::now();
    TENSORMOUNT_RETURN_IF_ERROR(submit());
    TENSORMOUNT_RETURN_IF_ERROR(Check(driver_->cuEventRecord(event_, stream_)));
    cuda::Result reached = cuda::kNotReady;
    while (reached == cuda::kNotReady) reached = driver_->cuEventQuery(event_);
    TENSORMOUNT_RETURN_IF_ERROR(Check(reached));
    return SecondsSince(start);
  }
  Result<double> Copy(const std::byte* from, std::byte* to, std::size_t bytes) {
    return Time([&] { return Check(copy_(AddressOf(to), AddressOf(from), bytes, stream_)); });
  }
  Result<double> Read(const std::byte* data, std::size_t bytes) {
    return Time([&]() -> Status {
      cuda::Address from = AddressOf(data);
      std::uint64_t words = bytes / 16;
      void* parameters[] = {&from, &words, &word_};
      return Check(
          driver_->cuLaunchKernel(read_, 2048, 1, 1, 256, 1, 1, 0, stream_, parameters, nullptr));
    });
  }
  // The same block again and again.
  Result<double> Out(const std::byte* from, std::byte* block, std::size_t block_bytes,
                     std::size_t bytes) {
    return Time([&]() -> Status {
      for (std::size_t done = 0; done < bytes; done += block_bytes) {
        TENSORMOUNT_RETURN_IF_ERROR(Check(driver_->cuMemcpyDtoHAsync(
            block, AddressOf(from + done), std::min(block_bytes, bytes - done), stream_)));
      }
      return {};
    });
  }
  Result<double> In(const std::byte* block, std::byte* to, std::size_t block_bytes,
                    std::size_t bytes) {
    return Time([&]() -> Status {
      for (std::size_t done = 0; done < bytes; done += block_bytes) {
        TENSORMOUNT_RETURN_IF_ERROR(Check(driver_->cuMemcpyHtoDAsync(
            AddressOf(to + done), block, std::min(block_bytes, bytes - done), stream_)));
      }
      return {};
    });
  }
  // Fills memory of the device with numbers that differ.
  Status Fill(std::byte* there, std::size_t bytes) {
    std::vector<std::uint64_t> some(std::size_t{1} << 17);
    std::uint64_t next = 88172645463325252ULL;
    for (std::size_t done = 0; done < bytes;) {
      for (std::uint64_t& word : some) {
        next ^= next << 13;
        next ^= next >> 7;
        next ^= next << 17;
        word = next;
      }
      const std::size_t part = std::min(bytes - done, some.size() * 8);
      TENSORMOUNT_RETURN_IF_ERROR(Time([&] {
                                    return Check(driver_->cuMemcpyHtoDAsync(
                                        AddressOf(there + done), some.data(), part, stream_));
                                  }).status());
      done += part;
    }
    return {};
  }

  // Needs the compiled kernel that reads, beside this program.
  Status LoadFloors() {
    std::error_code error;
    const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
    const std::string path = (self.parent_path() / "gpu_floor.fatbin").string();
    std::ifstream file(path, std::ios::binary);
    image_.assign(std::istreambuf_iterator<char>(file), {});
    if (image_.empty()) return {Code::kNotFound, path};
    cuda::Module module = nullptr;
    TENSORMOUNT_RETURN_IF_ERROR(Check(driver_->cuModuleLoadData(&module, image_.data())));
    TENSORMOUNT_RETURN_IF_ERROR(Check(driver_->cuModuleGetFunction(&read_, module, "floor_read")));
    void* const library = dlopen(cuda::kLibrary, RTLD_NOW | RTLD_LOCAL);
    copy_ = reinterpret_cast<decltype(copy_)>(dlsym(library, "cuMemcpyDtoDAsync_v2"));
    return copy_ == nullptr ? Status(Code::kUnsupported, "no cuMemcpyDtoDAsync") : Status();
  }

 private:
  Status Check(cuda::Result result) const { return gpu::CudaStatus(*driver_, result, "floor"); }

  std::shared_ptr<const cuda::Driver> driver_;
  cuda::Context context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  cuda::Event event_ = nullptr;
  cuda::Address word_ = 0;
  std::string image_;
  cuda::Function read_ = nullptr;
  cuda::Result (*copy_)(cuda::Address, cuda::Address, std::size_t, cuda::Stream) = nullptr;
};

// Seconds until a queue of ours has done what `submit` gives it.
template <typename Fn>
Result<double> TimeQueue(DeviceQueue& queue, Fn submit) {
  const Clock::time_point start = Clock::now();
  TENSORMOUNT_RETURN_IF_ERROR(submit());
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceMark> mark, queue.Mark());
  const Deadline deadline = Deadline::After(kPatience);
  for (;;) {  // Without pauses, as the floor waits.
    TENSORMOUNT_ASSIGN_OR_RETURN(const bool reached, mark->Reached());
    if (reached) return SecondsSince(start);
    if (deadline.Passed()) return Status(Code::kDeadlineExceeded, "the device");
  }
}

StridedCopy Contiguous(std::uint64_t bytes) {
  StridedCopy all;
  all.run = bytes;
  return all;
}

class GpuBench {
 public:
  // `part`: kernels, crossings, held or jobs; empty: all. `threads`: of loads, in turn.
  GpuBench(const Options& options, std::string part, std::vector<int> threads)
      : options_(options),
        part_(std::move(part)),
        threads_(std::move(threads)),
        bytes_(std::max<std::uint64_t>(
            std::uint64_t{1} << 22,
            static_cast<std::uint64_t>(options.gib * (1 << 30)) / kSquare * kSquare)) {}

  Status Run() {
    TENSORMOUNT_ASSIGN_OR_RETURN(plain_, Plain::Make());
    TENSORMOUNT_RETURN_IF_ERROR(plain_->LoadFloors());
    TENSORMOUNT_ASSIGN_OR_RETURN(device_, OpenDevice(kDevice));
    std::fprintf(stderr, "gpubench: %s, %.2f GiB\n", device_->ops->name().c_str(),
                 static_cast<double>(bytes_) / (1 << 30));
    TENSORMOUNT_ASSIGN_OR_RETURN(queue_, device_->ops->MakeQueue({}));
    TENSORMOUNT_ASSIGN_OR_RETURN(a_, device_->ops->Allocate(bytes_));
    TENSORMOUNT_ASSIGN_OR_RETURN(b_, device_->ops->Allocate(bytes_));
    TENSORMOUNT_ASSIGN_OR_RETURN(block_, device_->ops->AllocatePinned(block_bytes_));
    TENSORMOUNT_RETURN_IF_ERROR(plain_->Fill(a_, bytes_));
    if (Wanted("kernels")) TENSORMOUNT_RETURN_IF_ERROR(Kernels());
    if (Wanted("crossings")) TENSORMOUNT_RETURN_IF_ERROR(Crossings());
    if (Wanted("held")) TENSORMOUNT_RETURN_IF_ERROR(Held());
    return Wanted("jobs") ? Jobs() : Status();
  }

 private:
  bool Wanted(std::string_view part) const { return part_.empty() || part_ == part; }
  static constexpr std::uint64_t kSquare = std::uint64_t{1} << 22;  // What cases divide evenly.

  Status Kernels() {
    std::vector<Hash128> leaves(bytes_ / kLeaf);
    const StridedCopy all = Contiguous(bytes_);
    const Round read = [this] { return plain_->Read(a_, bytes_); };
    TENSORMOUNT_RETURN_IF_ERROR(RunCase(
        options_, {"kernel",
                   "leaf hashes",
                   bytes_,
                   "read the same memory",
                   [&] {
                     return TimeQueue(*queue_, [&] {
                       return queue_->HashLeaves({&all, 1}, a_, bytes_, kLeaf, leaves.data());
                     });
                   },
                   read,
                   {},
                   {}}));
    const Dims shape{static_cast<std::int64_t>(bytes_)};
    const PlacedBox whole{Box::Whole(shape), 0, {1}};
    Crc64 digest = 0;
    TENSORMOUNT_RETURN_IF_ERROR(
        RunCase(options_, {"kernel",
                           "digest",
                           bytes_,
                           "read the same memory",
                           [&] {
                             return TimeQueue(*queue_, [&] {
                               return queue_->Digest({&whole, 1}, a_, shape, &digest);
                             });
                           },
                           read,
                           {},
                           {}}));
    const Round copy = [this] { return plain_->Copy(a_, b_, bytes_); };
    // Rows of 4 KiB into blocks of columns; rows of 2 bytes become columns.
    const auto rows = static_cast<std::int64_t>(bytes_ / 4096);
    StridedCopy gather;
    gather.run = 512;
    gather.axes = 2;
    gather.axis[0] = {8, 512, static_cast<std::int64_t>(bytes_ / 8)};
    gather.axis[1] = {rows, 4096, 512};
    StridedCopy transposed;
    transposed.run = 2;
    transposed.axes = 2;
    transposed.axis[0] = {2048, 2, static_cast<std::int64_t>(bytes_ / 2048)};
    transposed.axis[1] = {rows, 4096, 2};
    StridedCopy wider = transposed;
    wider.run = 4;
    wider.axis[0] = {1024, 4, static_cast<std::int64_t>(bytes_ / 1024)};
    wider.axis[1] = {rows, 4096, 4};
    // Of 2,049 elements: no two of them are aligned alike.
    const auto odd_rows = static_cast<std::int64_t>(bytes_ / 4098);
    StridedCopy odd = transposed;
    odd.axis[0] = {2049, 2, odd_rows * 2};
    odd.axis[1] = {odd_rows, 4098, 2};
    StridedCopy back = gather;
    for (StridedCopy::Axis& axis : back.loops()) std::swap(axis.src, axis.dst);
    const std::pair<const char*, StridedCopy> plans[] = {
        {"pack columns of 512 bytes", gather},
        {"unpack columns of 512 bytes", back},
        {"transpose elements of 2 bytes", transposed},
        {"transpose elements of 4 bytes", wider},
        {"transpose elements of 2 bytes, odd rows", odd}};
    for (const auto& [name, plan] : plans) {
      const DeviceCopy one{plan, a_, b_};
      TENSORMOUNT_RETURN_IF_ERROR(RunCase(options_, {"kernel",
                                                     name,
                                                     bytes_,
                                                     "copy as much within the device",
                                                     [&] {
                                                       return TimeQueue(*queue_, [&] {
                                                         return queue_->CopyWithin({&one, 1});
                                                       });
                                                     },
                                                     copy,
                                                     {},
                                                     {}}));
    }
    return {};
  }

  // `plan` goes from the device to the host; the other way where it does not leave.
  static DeviceCopy Crossing(StridedCopy plan, std::byte* there, std::byte* here, bool leaves) {
    if (leaves) return {plan, there, here};
    std::swap(plan.src_offset, plan.dst_offset);
    for (StridedCopy::Axis& axis : plan.loops()) std::swap(axis.src, axis.dst);
    return {plan, here, there};
  }

  Status Crossings() {
    const Round out = [this] { return plain_->Out(a_, block_, block_bytes_, bytes_); };
    const Round in = [this] { return plain_->In(block_, b_, block_bytes_, bytes_); };
    // A block at a time, as saves and loads do: whole, of rows, of small tensors.
    const auto blocks = [this](bool leaves, std::uint64_t run, std::uint64_t pitch) {
      return TimeQueue(*queue_, [&, this]() -> Status {
        std::vector<DeviceCopy> copies;
        for (std::uint64_t done = 0; done + block_bytes_ <= bytes_; done += block_bytes_) {
          copies.clear();
          if (run == 0) {
            copies.push_back(Crossing(Contiguous(block_bytes_), a_ + done, block_, leaves));
          } else if (pitch == 0) {
            for (std::uint64_t at = 0; at < block_bytes_; at += run) {
              copies.push_back(Crossing(Contiguous(run), a_ + done + at, block_ + at, leaves));
            }
          } else {  // One strided copy, of memory of twice the bytes.
            StridedCopy plan = Contiguous(run);
            plan.axes = 1;
            plan.axis[0] = {static_cast<std::int64_t>(block_bytes_ / run),
                            static_cast<std::int64_t>(pitch), static_cast<std::int64_t>(run)};
            copies.push_back(
                Crossing(plan, a_ + done * 2 % (bytes_ - 2 * block_bytes_), block_, leaves));
          }
          TENSORMOUNT_RETURN_IF_ERROR(leaves ? queue_->CopyOut(copies) : queue_->CopyIn(copies));
        }
        return {};
      });
    };
    struct Kind {
      const char* name;
      std::uint64_t run;
      std::uint64_t pitch;
    };
    for (const bool leaves : {true, false}) {
      for (const Kind& kind : {Kind{"whole blocks", 0, 0}, Kind{"every other kilobyte", 1024, 2048},
                               Kind{"every other element of 2 bytes", 2, 4},
                               Kind{"small tensors of 8 KiB", 8192, 0}}) {
        TENSORMOUNT_RETURN_IF_ERROR(
            RunCase(options_, {leaves ? "out" : "in",
                               kind.name,
                               bytes_ / block_bytes_ * block_bytes_,
                               "pinned blocks by the driver",
                               [&] { return blocks(leaves, kind.run, kind.pitch); },
                               leaves ? out : in,
                               {},
                               {}}));
      }
    }
    return {};
  }

  BufferView ViewOf(std::byte* data, bool there, std::int64_t bytes) const {
    BufferView view = BufferView::Host(DType::kU8, static_cast<void*>(data), {bytes});
    if (!there) return view;
    view.device = kDevice;
    view.memory = MemoryKind::kDevice;
    return view;
  }

  // `tensors` of one size over all bytes, at `data`.
  StateDict StateOf(std::byte* data, bool there, std::int64_t tensors) const {
    StateDict state;
    const std::int64_t each = static_cast<std::int64_t>(bytes_) / tensors;
    for (std::int64_t i = 0; i < tensors; ++i) {
      (void)state.AddTensor("w" + std::to_string(i),
                            {{each}, Box::Whole({each}), ViewOf(data + i * each, there, each)});
    }
    return state;
  }

  // What a save in the background holds of the caller's time, with memory for copies in the host
  // or on the device.
  Status Held() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto folder, WorkFolder::Make(options_));
    const std::unique_ptr<Communicator> alone = MakeSelfCommunicator();
    for (const bool within : {false, true}) {
      AsyncOptions async;
      async.device_staging_bytes = within ? 2 * bytes_ : 0;
      TENSORMOUNT_ASSIGN_OR_RETURN(const std::unique_ptr<AsyncSaver> saver,
                                   AsyncSaver::Make(*alone, async));
      for (const std::int64_t tensors : {std::int64_t{16}, std::int64_t{options_.tensors}}) {
        const StateDict there = StateOf(a_, true, tensors);
        const auto held = [&]() -> Result<double> {
          SaveOptions options;
          options.if_exists = IfExists::kReplace;
          const Clock::time_point start = Clock::now();
          TENSORMOUNT_ASSIGN_OR_RETURN(SaveHandle handle,
                                       saver->Save(there, folder->Join("store/held"), options));
          TENSORMOUNT_RETURN_IF_ERROR(handle.WaitStaged());
          const double seconds = SecondsSince(start);
          TENSORMOUNT_RETURN_IF_ERROR(handle.WaitCommitted().status());
          return seconds;
        };
        TENSORMOUNT_RETURN_IF_ERROR(RunCase(
            options_, {within ? "held, copy within the device" : "held, copy to the host",
                       std::to_string(tensors) + " tensors",
                       bytes_,
                       within ? "copy as much within the device" : "pinned blocks by the driver",
                       held,
                       [&]() -> Result<double> {
                         return within ? plain_->Copy(a_, b_, bytes_)
                                       : plain_->Out(a_, block_, block_bytes_, bytes_);
                       },
                       {},
                       {}}));
      }
    }
    return {};
  }

  // Seconds that `threads` need to read all files of a folder into pinned memory.
  Result<double> ReadFiles(const std::string& folder, int threads) {
    struct Stretch {
      std::shared_ptr<File> file;
      std::uint64_t offset = 0;
      std::size_t bytes = 0;
    };
    constexpr std::size_t each = std::size_t{4} << 20;
    constexpr std::size_t kBlocks = 32;
    if (reads_ == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(reads_, device_->ops->AllocatePinned(kBlocks * each));
    }
    std::vector<Stretch> stretches;
    TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> list,
                                 HostFileSystem().List(folder));
    for (const DirectoryEntry& entry : list) {
      TENSORMOUNT_ASSIGN_OR_RETURN(auto opened,
                                   HostFileSystem().OpenRead(folder + "/" + entry.name));
      const std::shared_ptr<File> file = std::move(opened);
      TENSORMOUNT_ASSIGN_OR_RETURN(const FileInfo info, file->Stat());
      for (std::uint64_t at = 0; at < info.size; at += each) {
        stretches.push_back(
            {file, at, static_cast<std::size_t>(std::min<std::uint64_t>(each, info.size - at))});
      }
    }
    struct Block {
      std::byte* data = nullptr;
    };
    std::atomic<std::size_t> next{0};
    const Clock::time_point start = Clock::now();
    TENSORMOUNT_RETURN_IF_ERROR(ForEachParallel<Block>(
        stretches.size(), ReadThreads(threads, 1), [&](std::size_t i, Block& block) -> Status {
          if (block.data == nullptr) {
            block.data = reads_ + next++ % kBlocks * each;
          }
          return stretches[i]
              .file->ReadAt(stretches[i].offset, block.data, stretches[i].bytes)
              .status();
        }));
    return SecondsSince(start);
  }

  Status Jobs() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto folder, WorkFolder::Make(options_));
    const std::unique_ptr<Communicator> alone = MakeSelfCommunicator();
    PageBuffer host(bytes_);
    for (const std::int64_t tensors : {std::int64_t{16}, std::int64_t{options_.tensors}}) {
      const std::string count = std::to_string(tensors) + " tensors";
      const StateDict there = StateOf(a_, true, tensors);
      const StateDict here = StateOf(host.data(), false, tensors);
      const auto save = [&](const StateDict& state, const std::string& name) -> Result<double> {
        SaveOptions options;
        options.if_exists = IfExists::kReplace;
        const Clock::time_point start = Clock::now();
        TENSORMOUNT_RETURN_IF_ERROR(Save(state, folder->Join(name), *alone, options).status());
        return SecondsSince(start);
      };
      const auto load = [&](const StateDict& state, int n) -> Result<double> {
        LoadOptions options;
        options.threads = n;
        const Clock::time_point start = Clock::now();
        TENSORMOUNT_RETURN_IF_ERROR(
            Load(state, folder->Join("store/there"), *alone, options).status());
        return SecondsSince(start);
      };
      TENSORMOUNT_RETURN_IF_ERROR(RunCase(options_, {"save",
                                                     count,
                                                     bytes_,
                                                     "the same save of host memory",
                                                     [&] { return save(there, "store/there"); },
                                                     [&] { return save(here, "store/here"); },
                                                     {},
                                                     {}}));
      // Also where saves were not asked for.
      TENSORMOUNT_RETURN_IF_ERROR(save(there, "store/there").status());
      for (const int n : threads_) {
        const std::string by = n == 0 ? count : count + " by " + std::to_string(n);
        const auto ours = [&] { return load(there, n); };
        TENSORMOUNT_RETURN_IF_ERROR(RunCase(options_, {"load",
                                                       by,
                                                       bytes_,
                                                       "the same load into host memory",
                                                       ours,
                                                       [&] { return load(here, n); },
                                                       {},
                                                       {}}));
        TENSORMOUNT_RETURN_IF_ERROR(
            RunCase(options_, {"load",
                               by + " beside the bus",
                               bytes_,
                               "pinned blocks by the driver",
                               ours,
                               [this] { return plain_->In(block_, b_, block_bytes_, bytes_); },
                               {},
                               {}}));
        TENSORMOUNT_RETURN_IF_ERROR(
            RunCase(options_, {"load",
                               by + " beside reads",
                               bytes_,
                               "read(2) into pinned blocks by as many threads",
                               ours,
                               [&] { return ReadFiles(folder->Join("store/there/data"), n); },
                               {},
                               {}}));
      }
    }
    return {};
  }

  const Options options_;
  const std::string part_;
  const std::vector<int> threads_;
  const std::uint64_t bytes_;
  const std::size_t block_bytes_ = std::min<std::size_t>(std::size_t{16} << 20, bytes_ / 4);
  std::unique_ptr<Plain> plain_;
  std::shared_ptr<const OpenedDevice> device_;
  std::unique_ptr<DeviceQueue> queue_;
  std::byte* a_ = nullptr;
  std::byte* b_ = nullptr;
  std::byte* block_ = nullptr;
  std::byte* reads_ = nullptr;
};

}  // namespace
}  // namespace tensormount::bench

int main(int argc, char** argv) {
  namespace bench = tensormount::bench;
  bench::Options options;
  options.dir = "/tmp";
  CLI::App app(
      "Figures of saves and loads of memory of a GPU, each beside its floor in the same run.\n"
      "One line a case; medians of interleaved rounds.\n"
      "Example: gpubench --gib 4 --dir /dev/shm --json");
  std::string part;
  app.add_option("part", part, "kernels, crossings, held or jobs; all where none is given")
      ->check(CLI::IsMember({"kernels", "crossings", "held", "jobs"}));
  std::vector<int> threads = {0};
  app.add_option("--threads", threads, "that read in a load, in turn; 0: as many as are usual")
      ->delimiter(',')
      ->check(CLI::Range(0, 256));
  std::size_t blocks = 0;
  app.add_option("--pinned-blocks", blocks, "of pinned memory; 0: what is usual");
  double block_mib = 16;
  app.add_option("--block-mib", block_mib, "MiB of each of them");
  app.add_option("--gib", options.gib, "GiB of the device that a case moves")
      ->check(CLI::PositiveNumber);
  options.tensors = 16'384;
  app.add_option("--tensors", options.tensors, "how many are many")->check(CLI::Range(1, 1 << 20));
  app.add_option("--rounds", options.rounds, "rounds that count, of each")
      ->check(CLI::Range(1, 1000));
  app.add_option("--dir", options.dir, "where files are made")->check(CLI::ExistingDirectory);
  app.add_option("--case", options.only, "only cases whose workload and name contain this");
  app.add_flag("--json", options.json, "one JSON object a line");
  CLI11_PARSE(app, argc, argv);
  if (blocks > 0) {
    const tensormount::PinnedShape shape{blocks, static_cast<std::size_t>(block_mib * (1 << 20))};
    tensormount::SetDeviceSource(
        [shape](const tensormount::Device& device)
            -> tensormount::Result<std::shared_ptr<tensormount::DeviceOps>> {
          TENSORMOUNT_ASSIGN_OR_RETURN(const tensormount::DeviceModule* const module,
                                       tensormount::OpenDeviceModule());
          TENSORMOUNT_ASSIGN_OR_RETURN(auto ops, module->open(device));
          return std::shared_ptr<tensormount::DeviceOps>(
              std::make_shared<bench::ShapedDevice>(std::move(ops), shape));
        });
  }
  const tensormount::Status status = bench::GpuBench(options, part, std::move(threads)).Run();
  if (!status.ok()) std::fprintf(stderr, "gpubench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 2;
}
