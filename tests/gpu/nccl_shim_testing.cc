// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/nccl_shim_testing.h"

#include <cstdlib>
#include <dlfcn.h>
#include <iostream>
#include <utility>

namespace tensormount::gpu {
namespace {

template <typename Function>
void FindInShim(void* handle, const char* name, Function*& out) {
  out = reinterpret_cast<Function*>(::dlsym(handle, name));
  if (out != nullptr) return;
  std::cerr << "the shim has no " << name << '\n';
  std::abort();
}

}  // namespace

// A stream of the shim's, which is a thread.
class ShimStream final : public NcclStream {
 public:
  ShimStream(const NcclShim& shim, int device, std::string name)
      : set_device_(shim.set_device),
        destroy_(shim.stream_destroy),
        mark_(shim.stream_mark),
        done_(shim.stream_done),
        device_(device),
        name_(std::move(name)),
        stream_(shim.stream_create()) {}
  ~ShimStream() override { destroy_(stream_); }

  void* handle() const override { return stream_; }
  std::string device() const override { return name_; }
  Status RunOnDevice(const std::function<Status()>& calls) override {
    set_device_(device_);
    const Status said = calls();
    set_device_(-1);
    return said;
  }
  Status Mark() override {
    marked_ = mark_(stream_);
    return {};
  }
  Result<bool> Done() override { return done_(stream_, marked_) != 0; }

 private:
  void (*const set_device_)(int);
  void (*const destroy_)(void*);
  std::uint64_t (*const mark_)(void*);
  int (*const done_)(void*, std::uint64_t);
  const int device_;
  const std::string name_;
  void* const stream_;
  std::uint64_t marked_ = 0;
};

std::string NcclShim::PathOf(Version version) {
  return version == Version::kNew ? TENSORMOUNT_NCCL_SHIM : TENSORMOUNT_NCCL_SHIM_OLD;
}

NcclShim::NcclShim(Version version) : library_(NcclLibrary::Open(PathOf(version))) {
  void* const handle = ::dlopen(PathOf(version).c_str(), RTLD_NOW | RTLD_LOCAL);
  FindInShim(handle, "nccl_shim_add_fault", add_fault);
  FindInShim(handle, "nccl_shim_clear_faults", clear_faults);
  FindInShim(handle, "nccl_shim_reset", reset);
  FindInShim(handle, "nccl_shim_calls", calls);
  FindInShim(handle, "nccl_shim_live", live);
  FindInShim(handle, "nccl_shim_misuse", misuse);
  FindInShim(handle, "nccl_shim_largest", largest);
  FindInShim(handle, "nccl_shim_set_device", set_device);
  FindInShim(handle, "nccl_shim_stream_create", stream_create);
  FindInShim(handle, "nccl_shim_stream_destroy", stream_destroy);
  FindInShim(handle, "nccl_shim_stream_mark", stream_mark);
  FindInShim(handle, "nccl_shim_stream_done", stream_done);
  reset();
}

std::shared_ptr<NcclStream> NcclShim::MakeStream(int device, std::string name) const {
  return std::make_shared<ShimStream>(*this, device, std::move(name));
}

Result<std::unique_ptr<DeviceLink>> NcclShim::MakeLink(const NcclOptions& options,
                                                       std::shared_ptr<NcclStream> stream) const {
  TENSORMOUNT_RETURN_IF_ERROR(library_.status());
  return MakeNcclLink(library_.value(), stream == nullptr ? MakeStream() : std::move(stream),
                      options);
}

}  // namespace tensormount::gpu
