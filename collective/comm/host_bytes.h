// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_HOST_BYTES_H_
#define TENSORMOUNT_COLLECTIVE_COMM_HOST_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tensormount/buffer.h"
#include "tensormount/communicator.h"
#include "tensormount/status.h"
#include "tensormount/visibility.h"

namespace tensormount {

// What every communicator checks and says in the same words. Exported is what the one in
// libtensormount_mpi calls.

// The bytes of a packed host buffer. kUnsupported for device memory, kInvalidArgument where the
// view is not packed, its size overflows, ends within a byte, or a pointer is missing.
TENSORMOUNT_EXPORT Result<std::span<std::byte>> HostBytes(const BufferView& view);

// kInvalidArgument where a message to or from `peer` with `tag` cannot be.
TENSORMOUNT_EXPORT Status CheckEnvelope(const Communicator& comm, int peer, std::uint32_t tag);

// A peer whose end is closed. `who`: ByteStream::who.
Status PeerGone(int rank, std::string_view who = {});
// A message of another size than the receive that it met.
TENSORMOUNT_EXPORT Status SizeDiffers(int from, std::uint32_t tag, std::uint64_t sent,
                                      std::uint64_t wanted);
// A request that is not (any more) one of this communicator's.
TENSORMOUNT_EXPORT Status NoSuchRequest(Communicator::Request request);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_HOST_BYTES_H_
