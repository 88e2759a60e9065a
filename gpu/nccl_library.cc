// SPDX-License-Identifier: Apache-2.0
// Finds NCCL at run time, and translates its results.
#include "gpu/nccl_library.h"

#include <cstdlib>
#include <dlfcn.h>

namespace tensormount::gpu {
namespace {

// NCCL's soname. By this name dlopen finds an NCCL that the process has loaded from any path.
constexpr const char* kNcclName = "libnccl.so.2";

std::string LoaderError() {
  const char* const why = ::dlerror();
  return why == nullptr ? "the loader does not say why" : why;
}

template <typename Function>
void Find(void* handle, const char* name, Function*& out) {
  out = reinterpret_cast<Function*>(::dlsym(handle, name));
}

Code CodeOf(NcclResult result) {
  switch (result) {
    case NcclResult::kSuccess:
    case NcclResult::kInProgress:
      return Code::kOk;
    case NcclResult::kUnhandledCudaError:
    case NcclResult::kSystemError:
    case NcclResult::kRemoteError:
      return Code::kUnavailable;
    case NcclResult::kTimeout:
      return Code::kDeadlineExceeded;
    case NcclResult::kInvalidArgument:
    case NcclResult::kInvalidUsage:
      return Code::kInvalidArgument;
    case NcclResult::kInternalError:
      break;
  }
  return Code::kInternal;
}

}  // namespace

Result<std::shared_ptr<const NcclLibrary>> NcclLibrary::Open(const std::string& path) {
  std::string name = path;
  void* handle = nullptr;
  if (name.empty()) {
    // Prefer a loaded library: two copies in one process have separate threads and memory.
    handle = ::dlopen(kNcclName, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    const char* const said = std::getenv("TENSORMOUNT_NCCL");
    name = handle != nullptr || said == nullptr || *said == '\0' ? kNcclName : said;
  }
  if (handle == nullptr) handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return Status(Code::kUnavailable,
                  "NCCL: " + LoaderError() + "; install NCCL, or set TENSORMOUNT_NCCL to its path");
  }

  std::shared_ptr<NcclLibrary> library(new NcclLibrary());
  NcclApi& api = library->api_;
  const auto need = [&](const char* symbol, auto*& out) -> Status {
    Find(handle, symbol, out);
    if (out != nullptr) return {};
    return {Code::kUnsupported,
            "NCCL: " + name + " has no " + symbol + "; NCCL 2.14 or later is needed"};
  };
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclGetVersion", api.get_version));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclGetErrorString", api.get_error_string));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclGetUniqueId", api.get_unique_id));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclCommInitRankConfig", api.comm_init_rank_config));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclCommGetAsyncError", api.comm_get_async_error));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclCommFinalize", api.comm_finalize));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclCommDestroy", api.comm_destroy));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclCommAbort", api.comm_abort));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclGroupStart", api.group_start));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclGroupEnd", api.group_end));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclSend", api.send));
  TENSORMOUNT_RETURN_IF_ERROR(need("ncclRecv", api.recv));
  Find(handle, "ncclGetLastError", api.get_last_error);
  Find(handle, "ncclCommRevoke", api.comm_revoke);
  Find(handle, "ncclCommSuspend", api.comm_suspend);
  Find(handle, "ncclCommResume", api.comm_resume);

  const NcclResult result = api.get_version(&library->version_);
  if (result != NcclResult::kSuccess || library->version_ < kFirstNcclVersion) {
    return Status(Code::kUnsupported, "NCCL: " + name + " is version " + library->VersionText() +
                                          "; NCCL 2.14 or later is needed");
  }
  return std::shared_ptr<const NcclLibrary>(std::move(library));
}

std::string NcclLibrary::VersionText() const {
  return std::to_string(version_ / 10000) + "." + std::to_string(version_ / 100 % 100) + "." +
         std::to_string(version_ % 100);
}

Status NcclLibrary::ToStatus(NcclResult result, std::string_view action, NcclComm* comm) const {
  const Code code = CodeOf(result);
  if (code == Code::kOk) return {};
  std::string message(action);
  message.append(": ").append(api_.get_error_string(result));
  if (api_.get_last_error != nullptr) {
    const char* const last = api_.get_last_error(comm);
    if (last != nullptr && *last != '\0') message.append(": ").append(last);
  }
  // The text of NCCL's own message, since 2.3.
  if (message.find("Duplicate GPU") != std::string::npos) {
    return {Code::kUnsupported, "NCCL allows one rank per GPU: " + message};
  }
  return {code, std::move(message)};
}

}  // namespace tensormount::gpu
