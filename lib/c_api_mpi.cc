// SPDX-License-Identifier: Apache-2.0
// tm_mpi_* of tensormount/c.h, in libtensormount_mpi, so that programs without MPI do not load it.
#include <utility>

#include "tensormount/mpi.h"

#include "lib/c_api.h"

using tensormount::Status;

// A session of MPI. Freeing the handle finalises MPI as described for MpiSession.
struct tm_mpi {
  std::unique_ptr<tensormount::MpiSession> session;
};

namespace {

// Like c_api::Call, which cannot be used, because libtensormount does not export its helpers.
template <typename Fn>
tm_status CallMpi(Fn fn) {
  try {
    const Status status = fn();
    if (status.ok()) return TM_OK;
    return tm_set_last_error(static_cast<tm_status>(status.code()), status.ToErrno(),
                             status.message().c_str());
  } catch (const std::exception& e) {
    return tm_set_last_error(TM_INTERNAL, 0, e.what());
  } catch (...) {
    return tm_set_last_error(TM_INTERNAL, 0,
                             "internal error: an exception of an unknown type was thrown");
  }
}

// The error for a NULL argument. It does not name the argument, because libtensormount does not
// export CheckPointers().
Status IsNull() { return {tensormount::Code::kInvalidArgument, "an argument of the call is NULL"}; }

}  // namespace

tm_status tm_mpi_init(tm_mpi** out) {
  return CallMpi([&]() -> Status {
    if (out == nullptr) return IsNull();
    TENSORMOUNT_ASSIGN_OR_RETURN(auto session, tensormount::MpiSession::Init());
    *out = new tm_mpi{std::move(session)};
    return {};
  });
}

tm_status tm_mpi_world(tm_mpi* mpi, tm_communicator** out) {
  return CallMpi([&]() -> Status {
    if (mpi == nullptr || out == nullptr) return IsNull();
    TENSORMOUNT_ASSIGN_OR_RETURN(auto world, mpi->session->World());
    *out = new tm_communicator{std::move(world)};
    return {};
  });
}

void tm_mpi_abandon(tm_mpi* mpi) {
  if (mpi != nullptr) mpi->session->Abandon();
}

void tm_mpi_free(tm_mpi* mpi) { delete mpi; }
