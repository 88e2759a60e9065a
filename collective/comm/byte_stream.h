// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_COLLECTIVE_COMM_BYTE_STREAM_H_
#define TENSORMOUNT_COLLECTIVE_COMM_BYTE_STREAM_H_

#include <cstddef>
#include <string>

#include "tensormount/status.h"

namespace tensormount {

// A connection between two ranks over which bytes go in both directions, in order. Nothing here
// waits: whoever has nothing to do calls again later (StreamPeer does, from
// Communicator::Progress). There are three kinds: a socket between forked ranks, packets that a
// host program carries for us (CallbackCommunicator), of which a stream is made by numbering them,
// and connections that are made when they are first used (TcpStream).
// A stream delivers every byte once and unchanged, or ends; frames and their checksums are the
// business of those above. Not thread-safe.
class ByteStream {
 public:
  virtual ~ByteStream() = default;

  // Takes what goes now of `head` and then `body`; 0 where nothing does. The memory is free again
  // on return. kUnavailable: the other end is gone.
  virtual Result<std::size_t> Write(const void* head, std::size_t head_size, const void* body,
                                    std::size_t body_size) = 0;
  // Ends a turn of writes: what was taken sets out now.
  virtual void Flush() {}
  // More is to be written than went now: whoever watches it (StreamHub) asks for it again.
  virtual void WantWrite() {}
  // What is there, at most `size` bytes; 0 where nothing is. kUnavailable: the other end is gone.
  virtual Result<std::size_t> Read(void* to, std::size_t size) = 0;

  // Reading stopped before nothing was there: whoever watches it (StreamHub) asks for it again.
  virtual void WantRead() {}

  // No more is read or written from here on; what was taken before may still be on its way, and the
  // other end reads it before it sees the end.
  virtual void Shut() = 0;
  // Takes leave; called again and again, after which only destruction follows. True once nothing is
  // under way in either direction.
  // A stream may need several turns for it because nothing here waits.
  virtual bool Leave() { return true; }

  // It is going to be used. Until it is open it takes what is small, and nothing comes of it.
  virtual void Want() {}
  virtual bool open() const { return true; }
  // How messages call the other end behind its number: " (host node7, pid 4242)".
  virtual std::string who() const { return {}; }

  // For poll(); -1 where there is none.
  virtual int fd() const { return -1; }
};

}  // namespace tensormount

#endif  // TENSORMOUNT_COLLECTIVE_COMM_BYTE_STREAM_H_
