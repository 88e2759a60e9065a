// SPDX-License-Identifier: Apache-2.0
// Opens the command's MPI module (mpi_entry.cc) at run time.
#include "mount-tools/mpi_module.h"

#include <cerrno>
#include <cstring>
#include <dlfcn.h>
#include <filesystem>
#include <system_error>

#include <fmt/core.h>

#include "mount-tools/mpi_entry.h"

namespace tensormount::tools {
namespace {

struct MpiModule {
  std::string path;
  decltype(&tensormount_mpi_module_init) init = nullptr;
};

Status MpiUnavailableError(const std::string& why, const char* remedy) {
  return {Code::kUnsupported, fmt::format("MPI: {}: {}", why, remedy)};
}

// Opens the module, which is in ../lib beside the command, in the build directory and when
// installed.
Result<MpiModule> OpenMpiModule() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return Status::FromErrno(error.value(), "read", "/proc/self/exe");
  MpiModule module;
  module.path = (self.parent_path().parent_path() / TENSORMOUNT_MPI_MODULE).string();
  if (!std::filesystem::exists(module.path, error)) {
    return MpiUnavailableError(module.path + " does not exist",
                               "install the package tensormount-mpi, or build with MPI "
                               "(Debian: libopenmpi-dev) and reinstall");
  }
  // RTLD_GLOBAL, because plug-ins of MPI use symbols of the MPI library without linking it.
  void* handle = dlopen(module.path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return MpiUnavailableError(
        why == nullptr ? module.path : std::string(why),
        "install the MPI library that it was built with (Debian: the packages libopenmpi3 "
        "and openmpi-bin)");
  }
  const auto* version = static_cast<const char*>(dlsym(handle, "tensormount_mpi_module_version"));
  void* init = dlsym(handle, "tensormount_mpi_module_init");
  if (version == nullptr || init == nullptr || std::strcmp(version, TENSORMOUNT_VERSION) != 0) {
    return MpiUnavailableError(module.path + " has a different version than this command",
                               "install both in version " TENSORMOUNT_VERSION);
  }
  module.init = reinterpret_cast<decltype(module.init)>(init);
  return module;
}

}  // namespace

Result<std::unique_ptr<MpiSession>> InitMpi() {
  TENSORMOUNT_ASSIGN_OR_RETURN(const MpiModule module, OpenMpiModule());
  Result<std::unique_ptr<MpiSession>> session =
      Status(Code::kInternal, "MPI: the module did not report whether MPI was initialised");
  module.init(&session);
  return session;
}

Result<std::string> FindMpi() {
  TENSORMOUNT_ASSIGN_OR_RETURN(MpiModule module, OpenMpiModule());
  return std::move(module.path);
}

}  // namespace tensormount::tools
