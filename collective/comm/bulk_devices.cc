// SPDX-License-Identifier: Apache-2.0
// MakeDeviceTransport of bulk_transport.h, for every kind of device. Before the ranks make their
// movers, it checks that all have the same link version and that no two share a device.
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/comm/bulk_transport.h"
#include "collective/comm/collective.h"

namespace tensormount {
namespace {

Status CompareLinks(const std::vector<std::string>& versions,
                    const std::vector<std::string>& devices) {
  for (std::size_t r = 0; r < versions.size(); ++r) {
    if (versions[r] != versions[0]) {
      return Status(Code::kUnsupported, "rank " + std::to_string(r) + " has " + versions[r] +
                                            ", rank 0 has " + versions[0] +
                                            ": all ranks need the same version")
          .With({.rank = static_cast<int>(r)});
    }
    for (std::size_t other = 0; other < r && !devices[r].empty(); ++other) {
      if (devices[other] != devices[r]) continue;
      return Status(Code::kUnsupported, versions[r] + " allows one rank per device: ranks " +
                                            std::to_string(other) + " and " + std::to_string(r) +
                                            " are both on " + devices[r])
          .With({.rank = static_cast<int>(r)});
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<BulkTransport>> MakeDeviceTransport(
    Communicator& control, const Timeouts& timeouts, Result<std::unique_ptr<DeviceLink>> link) {
  Collective collective(control, timeouts);
  return MakeDeviceTransport(collective, DefaultConnectTimeout(timeouts), std::move(link));
}

Result<std::unique_ptr<BulkTransport>> MakeDeviceTransport(
    Collective& collective, std::chrono::milliseconds patience,
    Result<std::unique_ptr<DeviceLink>> link) {
  TENSORMOUNT_RETURN_IF_ERROR(collective.Agree(link.status(), "agree to use a device transport"));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const auto versions,
      collective.AllGather(link.value()->version(), "compare the ranks' device transports"));
  TENSORMOUNT_ASSIGN_OR_RETURN(
      const auto devices,
      collective.AllGather(link.value()->device(), "compare the devices of the ranks"));
  TENSORMOUNT_RETURN_IF_ERROR(CompareLinks(versions, devices));
  return BulkTransport::Make(collective, patience, [&](std::uint64_t /*group*/) {
    return link.value()->MakeMover(collective.rank(), collective.size());
  });
}

}  // namespace tensormount
