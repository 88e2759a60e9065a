// SPDX-License-Identifier: Apache-2.0
// Finds and opens the module for CUDA.
#include "device/device_module.h"

#include <cstring>
#include <dlfcn.h>
#include <filesystem>
#include <mutex>
#include <system_error>

namespace tensormount {
namespace {

constexpr char kFileName[] = "libtensormount_cuda.so";

Status NoModule(const std::string& why, const std::string& remedy) {
  return {Code::kUnsupported, "CUDA is not available: " + why + ": " + remedy};
}

// The directory of the library or program that contains this code.
std::filesystem::path OwnFolder() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(&CountDevices), &info) == 0 ||
      info.dli_fname == nullptr) {
    return {};
  }
  std::error_code error;
  // In a program, dli_fname may be the name by which it was called, which need not be a path; then
  // /proc/self/exe gives the path.
  std::filesystem::path file = std::filesystem::canonical(info.dli_fname, error);
  if (error) file = std::filesystem::read_symlink("/proc/self/exe", error);
  return file.parent_path();
}

Result<const DeviceModule*> Open() {
  const std::filesystem::path own = OwnFolder();
  std::filesystem::path file;
  // `own` is, in this order, a library directory, a multi-architecture library directory, bin, or
  // bin/tests of a build directory.
  for (const char* folder :
       {"tensormount", "../tensormount", "../lib/tensormount", "../../lib/tensormount"}) {
    std::error_code error;
    file = own / folder / kFileName;
    if (std::filesystem::exists(file, error)) break;
    file.clear();
  }
  if (file.empty()) {
    return NoModule((own / "tensormount" / kFileName).string() + " does not exist",
                    "install the package tensormount-cuda, or build with nvcc (scripts/setup "
                    "--with cuda) and reinstall");
  }
  void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();
    return NoModule(why == nullptr ? file.string() : why, "reinstall tensormount");
  }
  const auto entry = reinterpret_cast<DeviceModuleEntry>(dlsym(handle, kDeviceModuleEntry));
  const DeviceModule* const module = entry == nullptr ? nullptr : entry();
  if (module == nullptr || module->build != DeviceModuleBuild()) {
    return NoModule(
        file.string() + " comes from another build than this library (" + DeviceModuleBuild() + ")",
        "install both from the same build");
  }
  return module;
}

}  // namespace

// The text consists of the version, a hash of the headers that declare the shared types, and the
// compiler and standard library with their modes (debug, sanitized), because types of the standard
// library are shared, too.
std::string DeviceModuleBuild() {
  std::string build = TENSORMOUNT_VERSION " " TENSORMOUNT_DEVICE_INTERFACE " " __VERSION__;
#if defined(_GLIBCXX_RELEASE)
  build += " libstdc++ " + std::to_string(_GLIBCXX_RELEASE) +
           (_GLIBCXX_USE_CXX11_ABI != 0 ? "" : " old std::string");
#endif
#if defined(_LIBCPP_VERSION)
  build += " libc++ " + std::to_string(_LIBCPP_VERSION);
#endif
#if defined(_GLIBCXX_DEBUG)
  build += " debug";
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  build += " sanitized";
#endif
  return build;
}

Result<const DeviceModule*> OpenDeviceModule() {
  static auto* const mutex = new std::mutex;
  static const DeviceModule* opened = nullptr;
  std::lock_guard lock(*mutex);
  if (opened == nullptr) {
    TENSORMOUNT_ASSIGN_OR_RETURN(opened, Open());
  }
  return opened;
}

Result<int> CountDevices() {
  TENSORMOUNT_ASSIGN_OR_RETURN(const DeviceModule* const module, OpenDeviceModule());
  return module->count();
}

}  // namespace tensormount
