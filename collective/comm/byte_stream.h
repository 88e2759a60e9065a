// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_BYTE_STREAM_H_
#define TENSORMOUNT_COLLECTIVE_COMM_BYTE_STREAM_H_

#include <cstddef>
#include <string>

#include "tensormount/status.h"

namespace tensormount {

// A bidirectional, ordered byte connection between two ranks. No call waits: a caller with nothing
// to do calls again later (StreamPeer does, from Communicator::Progress). Three kinds: a socket
// between forked ranks, packets that a host program carries (callback_communicator.cc), and
// connections made on first use (TcpStream). A stream delivers every byte once and in order, or
// ends; frames and their checksums belong to the layers above. Not thread-safe.
class ByteStream {
 public:
  virtual ~ByteStream() = default;

  // Writes as much of `head` and then `body` as possible without waiting, and returns the count.
  // The memory is free again on return. Fails with kUnavailable if the other end is gone.
  virtual Result<std::size_t> Write(const void* head, std::size_t head_size, const void* body,
                                    std::size_t body_size) = 0;
  // Ends a series of writes: sends the accepted bytes now.
  virtual void Flush() {}
  // The caller has more to write: the watcher (StreamHub) must ask for writability again.
  virtual void WantWrite() {}
  // Reads the available bytes, at most `size`; 0 if there are none. Fails with kUnavailable if the
  // other end is gone.
  virtual Result<std::size_t> Read(void* to, std::size_t size) = 0;

  // The caller stopped before all bytes were read: the watcher (StreamHub) must report readability
  // again.
  virtual void WantRead() {}

  // The caller will not read or write any more. Bytes accepted before may still be in flight; the
  // other end reads them before it sees the end.
  virtual void Shut() = 0;
  // Closes the stream in an orderly way, before destruction. Call TryClose repeatedly until it
  // returns true: then the stream may be destroyed, and accepted bytes reach the other end unless
  // the stream has failed.
  virtual bool TryClose() { return true; }

  // Asks the stream to open. Until it is open, the stream accepts small writes, and reads return
  // nothing.
  virtual void RequestOpen() {}
  virtual bool open() const { return true; }
  // Suffix for the rank in messages: " (host node7, pid 4242)".
  virtual std::string peer_suffix() const { return {}; }

  // Descriptor for poll(); -1 if there is none.
  virtual int fd() const { return -1; }
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_BYTE_STREAM_H_
