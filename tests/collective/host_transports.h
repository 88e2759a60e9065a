// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_COLLECTIVE_HOST_TRANSPORTS_H_
#define TENSORMOUNT_TESTS_COLLECTIVE_HOST_TRANSPORTS_H_

#include <memory>

#include "tensormount/communicator.h"
#include "tensormount/status.h"

#include "collective/comm/bulk_transport.h"

namespace tensormount {

// Transports of host memory, which show what BulkTransport does without a device. The product moves
// host memory by UnitStream instead (docs/bulk.md, "Between hosts"). Both are made by all ranks
// together, as BulkTransport::Make.

// Ranks that are threads of one process: one copy, by whoever comes second. kUnsupported where one
// is in another process.
Result<std::unique_ptr<BulkTransport>> MakeMemoryTransport(Communicator& control,
                                                           const Timeouts& timeouts);
// By messages of `control` itself, of whatever kind, eight at a time between two ranks.
Result<std::unique_ptr<BulkTransport>> MakeMessageTransport(Communicator& control,
                                                            const Timeouts& timeouts);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_COLLECTIVE_HOST_TRANSPORTS_H_
