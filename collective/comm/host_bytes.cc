// SPDX-License-Identifier: Apache-2.0
// The checks of messages and the error messages that all communicators share.
#include "collective/comm/host_bytes.h"

#include <optional>
#include <string>

#include "tensormount/box.h"
#include "tensormount/dtype.h"

#include "base/checked.h"
#include "shard/host_memory.h"

namespace tensormount {

Result<std::span<std::byte>> HostBytes(const BufferView& view) {
  TENSORMOUNT_RETURN_IF_ERROR(CheckHostMemory(view).WithContext("send or receive"));
  const std::optional<std::int64_t> elements = CheckedProduct(view.shape);
  const std::optional<std::int64_t> bits =
      elements ? CheckedMul<std::int64_t>(*elements, InfoOf(view.dtype).bits) : std::nullopt;
  if (!bits || *bits % 8 != 0) {
    return Status(Code::kInvalidArgument, "send or receive: shape " + view.shape.ToString() +
                                              " is not a whole number of bytes, or is too large");
  }
  if (!view.IsPacked()) {
    return Status(Code::kInvalidArgument, "send or receive: the buffer is not contiguous");
  }
  const auto size = static_cast<std::size_t>(*bits / 8);
  if (view.data == nullptr && size != 0) {
    return Status(Code::kInvalidArgument, "send or receive: the buffer is null");
  }
  return std::span<std::byte>(static_cast<std::byte*>(view.data), size);
}

Status CheckEnvelope(const Communicator& comm, int peer, std::uint32_t tag) {
  if (peer < 0 || peer >= comm.size()) {
    return {Code::kInvalidArgument, "rank " + std::to_string(peer) + " is outside [0, " +
                                        std::to_string(comm.size()) + ")"};
  }
  if (tag > Communicator::kMaxTag) {
    return {Code::kInvalidArgument, "tag " + std::to_string(tag) + " exceeds the largest, " +
                                        std::to_string(Communicator::kMaxTag)};
  }
  return {};
}

Status PeerGone(int rank, std::string_view who) {
  return Status(Code::kUnavailable, "rank " + std::to_string(rank) + std::string(who) + " is gone")
      .With({.rank = rank});
}

Status SizeDiffers(int from, std::uint32_t tag, std::uint64_t sent, std::uint64_t wanted) {
  return Status(Code::kDataLoss, "receive from rank " + std::to_string(from) + ", tag " +
                                     std::to_string(tag) + ": " + std::to_string(sent) +
                                     " bytes came where " + std::to_string(wanted) +
                                     " were expected")
      .With({.rank = from});
}

Status NoSuchRequest(Communicator::Request request) {
  return {Code::kInvalidArgument, "request " + std::to_string(request) +
                                      " does not exist: it was never started, or it has ended"};
}

}  // namespace tensormount
