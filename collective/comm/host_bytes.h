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

// The checks and error messages that all communicators share. The communicator in
// libtensormount_mpi calls the exported functions.

// Returns the bytes of a packed host buffer. Fails with kUnsupported for device memory, and with
// kInvalidArgument if the view is not packed, its size overflows or ends within a byte, or its
// pointer is null.
TENSORMOUNT_EXPORT Result<std::span<std::byte>> HostBytes(const BufferView& view);

// Fails with kInvalidArgument if `peer` or `tag` is out of range.
TENSORMOUNT_EXPORT Status CheckEnvelope(const Communicator& comm, int peer, std::uint32_t tag);

// The failure for a peer whose end is closed. `who`: text about the peer (ByteStream::peer_suffix).
Status PeerGone(int rank, std::string_view who = {});
// The failure for a message whose size differs from its receive.
TENSORMOUNT_EXPORT Status SizeDiffers(int from, std::uint32_t tag, std::uint64_t sent,
                                      std::uint64_t wanted);
// The failure for a request that is unknown, or already finished.
TENSORMOUNT_EXPORT Status NoSuchRequest(Communicator::Request request);

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_HOST_BYTES_H_
