// SPDX-License-Identifier: Apache-2.0
// One rank's connection with one other rank: dialling or accepting, the handshake, then bytes.
#include "collective/comm/tcp_stream.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/socket.h>
#include <sys/uio.h>
#include <utility>

#include "collective/comm/host_bytes.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;

// How long the side that need not dial waits for the other side to dial.
constexpr milliseconds kGrace{200};
// How long this rank refuses the hello of a lower rank (kBusy) while its own hello is unanswered,
// and how long a peer has to confirm an answered hello before this rank dials.
constexpr milliseconds kPatience{5000};
constexpr milliseconds kFirstPause{10};
constexpr milliseconds kLongestPause{1000};
// Time limit for one of several addresses; then the next one is tried.
constexpr milliseconds kRouteTime{2000};
// How long to retry while the process has no free descriptors, because others may be closed.
constexpr milliseconds kDescriptorPatience{250};
// A peer whose addresses all refuse this many times has ended, because it listened before other
// ranks knew its address.
constexpr int kRefusals = 3;
// Addresses must also refuse for this long until the peer counts as ended: a firewall refuses like
// a machine without a listener, and a peer behind it dials within part of this time (kGrace).
constexpr milliseconds kRefusedFor{1500};
constexpr int kMostUnanswered = 20;
// Limit of bytes kept until the stream is open: more than a peer's credit allows.
constexpr std::size_t kKept = 512 << 10;
constexpr std::size_t kAhead = 4096;

}  // namespace

TcpStream::TcpStream(TcpGroupContext& group, int peer, TcpAddress address)
    : group_(group),
      peer_(peer),
      address_(std::move(address)),
      peer_suffix_(address_.PeerSuffix()) {}

std::uint64_t TcpStream::key() const {
  return TcpGroupContext::KeyOf(TcpGroupContext::kStream, static_cast<std::uint32_t>(peer_));
}

Result<std::size_t> TcpStream::TransferResult(ssize_t n, int err) {
  if (n >= 0) return static_cast<std::size_t>(n);
  if (err == EAGAIN || err == EWOULDBLOCK || err == ENOBUFS || err == EINTR) return std::size_t{0};
  return PeerGone(peer_, peer_suffix_);
}

Result<std::size_t> TcpStream::Write(const void* head, std::size_t head_size, const void* body,
                                     std::size_t body_size) {
  if (ended()) return why_;
  if (state_ != State::kOpen) {
    std::size_t taken = 0;
    for (const auto& [data, size] : {std::pair{head, head_size}, std::pair{body, body_size}}) {
      const std::size_t n = std::min(size, kKept - kept_.size());
      const auto* from = static_cast<const char*>(data);
      kept_.insert(kept_.end(), from, from + n);
      taken += n;
      if (n < size) break;
    }
    WantWrite();
    return taken;
  }
  FlushKept();
  if (ended()) return why_;
  if (!kept_.empty()) return std::size_t{0};
  iovec iov[2] = {{const_cast<void*>(head), head_size}, {const_cast<void*>(body), body_size}};
  msghdr msg{};
  msg.msg_iov = iov;
  msg.msg_iovlen = 2;
  const ssize_t n = ::sendmsg(socket_.fd(), &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
  return TransferResult(n, errno);
}

void TcpStream::FlushKept() {
  while (kept_sent_ < kept_.size()) {
    const ssize_t n = ::send(socket_.fd(), kept_.data() + kept_sent_, kept_.size() - kept_sent_,
                             MSG_DONTWAIT | MSG_NOSIGNAL);
    const Result<std::size_t> moved = TransferResult(n, errno);
    if (!moved.ok()) {
      // The stream stays open, because bytes that the peer sent before it left can still be read.
      kept_.clear();
      kept_sent_ = 0;
      return;
    }
    if (moved.value() == 0) return WantWrite();
    kept_sent_ += moved.value();
  }
  std::vector<char>().swap(kept_);
  kept_sent_ = 0;
}

void TcpStream::WantWrite() {
  if (state_ == State::kOpen) {
    if (!write_watched_) group_.epoll.Rewatch(socket_.fd(), EPOLLIN | EPOLLOUT, key());
    write_watched_ = true;
    return;
  }
  RequestOpen();
  // A peer that waits for this rank's message may not know that it should dial.
  if (state_ == State::kWaiting && !tried_ && group_.rank != 0) Retry(Clock::now());
}

void TcpStream::WantRead() {
  if (ahead_at_ == ahead_end_) return;
  group_.unread.push_back(peer_);
  group_.ScheduleTick(Clock::now());
}

Result<std::size_t> TcpStream::Read(void* to, std::size_t size) {
  if (ahead_at_ < ahead_end_) {
    const std::size_t n = std::min(size, ahead_end_ - ahead_at_);
    std::memcpy(to, ahead_.data() + ahead_at_, n);
    ahead_at_ += n;
    return n;
  }
  if (ended()) return why_;
  if (state_ != State::kOpen || drained_) return std::size_t{0};
  const bool ahead = size < kAhead;
  if (ahead && ahead_.empty()) ahead_.resize(kAhead);
  const std::size_t room = ahead ? kAhead : size;
  const ssize_t n = ::recv(socket_.fd(), ahead ? ahead_.data() : to, room, MSG_DONTWAIT);
  const int err = errno;
  if (n == 0) return PeerGone(peer_, peer_suffix_);
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::size_t got, TransferResult(n, err));
  drained_ = got < room;
  if (!ahead || got == 0) return got;
  ahead_at_ = 0;
  ahead_end_ = got;
  return Read(to, size);
}

void TcpStream::Shut() {
  if (!ended()) End(PeerGone(peer_, peer_suffix_));
}

void TcpStream::Drop() {
  if (!socket_.is_open()) return;
  if (group_.IsInChild()) return socket_.Close();
  group_.epoll.Unwatch(socket_.fd());
  // Shuts down explicitly, because a forked child may have the descriptor open.
  ::shutdown(socket_.fd(), SHUT_RDWR);
  socket_.Close();
  write_watched_ = false;
}

bool TcpStream::TryClose() {
  if (ended() || state_ == State::kIdle || group_.IsInChild()) return true;
  if (state_ != State::kOpen) return kept_.empty();  // Does not wait for a handshake without data.
  FlushKept();
  if (!kept_.empty()) return false;
  if (!shut_) ::shutdown(socket_.fd(), SHUT_WR);
  shut_ = true;
  // Reads and drops arriving bytes: unread bytes would turn the close into a reset, which drops
  // bytes that are still on their way to the peer.
  char scratch[16 << 10];
  ssize_t n;
  do {
    n = ::recv(socket_.fd(), scratch, sizeof(scratch), MSG_DONTWAIT);
  } while (n > 0);
  if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return true;
  // Bytes that a Unix socket accepted are already the peer's.
  return is_unix_ || AreAllBytesAcknowledged(socket_.fd());
}

void TcpStream::RequestOpen() {
  if (state_ != State::kIdle) return;
  state_ = State::kWaiting;
  const Clock::time_point now = Clock::now();
  Retry(DialsFirst() ? now : now + kGrace);
}

void TcpStream::Retry(Clock::time_point at) {
  state_ = State::kWaiting;
  next_ = at;
  group_.ScheduleTick(at);
}

bool TcpStream::Tick(Clock::time_point now) {
  if (state_ == State::kWaiting) {
    if (yielded_until_ && now >= *yielded_until_) yielded_until_.reset();
    if (now >= next_ && !yielded_until_) Dial(now);
  } else if (state_ == State::kConnecting && now >= next_) {
    OnDialFailed(Status(Code::kDeadlineExceeded, "no answer from the machine of that rank"), now);
  }
  if (state_ == State::kWaiting) group_.ScheduleTick(yielded_until_ ? *yielded_until_ : next_);
  if (state_ == State::kConnecting) group_.ScheduleTick(next_);
  return ended();
}

void TcpStream::Dial(Clock::time_point now) {
  if (!tried_) {
    const bool neighbour = address_.has_unix && group_.own.has_unix &&
                           address_.machine == group_.own.machine && address_.machine != TcpId{};
    if (neighbour) routes_.push_back({true, {}});
    const bool here = address_.machine == group_.own.machine;
    for (const IpAddress& ip : address_.candidates) {
      // An address that both machines have (such as a container bridge) would lead to this machine.
      const bool ours =
          std::find(group_.own_ips.begin(), group_.own_ips.end(), ip) != group_.own_ips.end();
      if (here || !ours || address_.candidates.size() == 1) routes_.push_back({false, ip});
    }
    if (routes_.empty()) routes_.push_back({false, address_.candidates.front()});
    tried_ = true;
  }
  bool done = false;
  Result<TcpSocket> dialled = BeginDial(routes_[route_], address_, &done);
  if (!dialled.ok()) {
    const Status& why = dialled.status();
    if (!IsOutOfDescriptors(why.ToErrno())) return OnDialFailed(why, now);
    if (!no_descriptor_since_) no_descriptor_since_ = now;
    if (now - *no_descriptor_since_ < kDescriptorPatience) return Retry(now + milliseconds(50));
    return End(
        why.WithContext("rank " + std::to_string(peer_) + peer_suffix_ + " cannot be reached"));
  }
  no_descriptor_since_.reset();
  socket_ = std::move(dialled).value();
  is_unix_ = routes_[route_].is_unix;
  // Set before the handshake, because the peer's machine may fail before it answers.
  if (!is_unix_) TuneTcp(socket_.fd(), group_.options.keep_alive);
  const Status watched = group_.epoll.Watch(socket_.fd(), done ? EPOLLIN : EPOLLOUT, key());
  if (!watched.ok()) return OnDialFailed(watched, now);
  if (done) return SendHello(now);
  state_ = State::kConnecting;
  const milliseconds most = std::max(group_.options.connect_timeout, milliseconds(1));
  next_ = now + (routes_.size() == 1 ? most : std::min(most, std::max(kRouteTime, 2 * pause_)));
}

void TcpStream::SendHello(Clock::time_point now) {
  if (is_unix_ && !IsSameUser(socket_.fd())) {
    return OnDialFailed(
        Status(Code::kPermissionDenied, "the Unix socket of that rank belongs to another user"),
        now);
  }
  TcpHello hello;
  hello.from = static_cast<std::uint32_t>(group_.rank);
  hello.to = static_cast<std::uint32_t>(peer_);
  hello.size = static_cast<std::uint32_t>(group_.size);
  hello.group = group_.group;
  hello.version = kTcpVersion;
  if (const Status random = FillRandom(hello.nonce); !random.ok()) return End(random);
  hello_ = MakeHello(group_.token, address_.listener, hello);
  // The send buffer of a new connection has room for the hello.
  const ssize_t n = ::send(socket_.fd(), hello_.data(), hello_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n != static_cast<ssize_t>(hello_.size())) {
    return OnDialFailed(
        Status::FromErrno(n < 0 ? errno : EIO, "send the handshake to", "that rank"), now);
  }
  state_ = State::kHelloSent;
  hello_at_ = now;
  answer_have_ = 0;
}

bool TcpStream::OnEvents(std::uint32_t events) {
  const Clock::time_point now = Clock::now();
  if (state_ == State::kConnecting) {
    if (const Status failed = DialResult(socket_.fd()); !failed.ok()) {
      OnDialFailed(failed, now);
    } else if ((events & EPOLLOUT) != 0) {
      group_.epoll.Rewatch(socket_.fd(), EPOLLIN, key());
      SendHello(now);
    }
    return ended();
  }
  if (state_ == State::kHelloSent) OnAnswer(now);
  if (state_ != State::kOpen) return ended();
  drained_ = false;
  if (write_watched_ && (events & EPOLLOUT) != 0) {
    // Does not watch for EPOLLOUT until a write falls short again.
    group_.epoll.Rewatch(socket_.fd(), EPOLLIN, key());
    write_watched_ = false;
    FlushKept();
  }
  return true;
}

void TcpStream::OnAnswer(Clock::time_point now) {
  const ssize_t n = ::recv(socket_.fd(), answer_.data() + answer_have_,
                           answer_.size() - answer_have_, MSG_DONTWAIT);
  const int err = errno;
  if (n < 0 && (err == EAGAIN || err == EWOULDBLOCK || err == EINTR)) return;
  if (n <= 0) {
    // A peer that kept the connection for a while was busy, not unreachable.
    if (now - hello_at_ > kLongestPause) missed_since_.reset();
    ++unanswered_;
    return OnDialFailed(Status(Code::kUnavailable,
                               "that rank closed the connection before it answered; check that all "
                               "ranks have the same token"),
                        now);
  }
  answer_have_ += static_cast<std::size_t>(n);
  if (answer_have_ < answer_.size()) return;
  const std::optional<TcpAnswer> answer = ReadAnswer(group_.token, hello_, answer_);
  if (!answer) {
    ++unanswered_;
    return OnDialFailed(
        Status(Code::kDataLoss,
               "the process that answers at its address is not a rank of this group"),
        now);
  }
  const std::string they = "rank " + std::to_string(peer_) + peer_suffix_;
  switch (*answer) {
    case TcpAnswer::kWelcome:
      break;
    case TcpAnswer::kBusy:
      Drop();
      return Retry(now + 10 * kFirstPause);
    case TcpAnswer::kWrongVersion:
      return End(Status(Code::kUnsupported, they + " runs another version of tensormount"));
    case TcpAnswer::kWrongGroup:
      return End(Status(Code::kInvalidArgument,
                        they + " was given a different list of addresses than this rank"));
    case TcpAnswer::kWrongRank:
      return End(Status(Code::kInvalidArgument, they + " does not accept this process as rank " +
                                                    std::to_string(group_.rank)));
    case TcpAnswer::kAlreadyConnected:
      return End(
          Status(Code::kUnavailable, they + " is already connected to another process as rank " +
                                         std::to_string(group_.rank)));
    case TcpAnswer::kConnectionEnded:
      return End(PeerGone(peer_, peer_suffix_));
  }
  const ConfirmFrame confirm = MakeConfirm(group_.token, answer_);
  const ssize_t sent =
      ::send(socket_.fd(), confirm.data(), confirm.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(confirm.size())) {
    // A part of a confirmation confirms nothing, so this rank may dial again.
    return OnDialFailed(
        Status::FromErrno(sent < 0 ? errno : EIO, "confirm the connection to", "that rank"), now);
  }
  Opened();
}

void TcpStream::Opened() {
  state_ = State::kOpen;
  drained_ = false;
  yielded_until_.reset();
  std::vector<TcpRoute>().swap(routes_);
  if (!is_unix_) TuneTcp(socket_.fd(), group_.options.keep_alive);
  FlushKept();
}

void TcpStream::OnDialFailed(const Status& why, Clock::time_point now) {
  Drop();
  if (!missed_since_) missed_since_ = now;
  const bool refused = why.ToErrno() == ECONNREFUSED;
  refused_ += refused ? 1 : 0;
  // On the same machine a missing Unix socket means that the process is gone.
  const bool neighbour_gone = refused && route_ < routes_.size() && routes_[route_].is_unix;
  const std::string they = "rank " + std::to_string(peer_) + peer_suffix_;
  if (now - *missed_since_ >= group_.options.connect_timeout || unanswered_ >= kMostUnanswered) {
    return End(Status(Code::kUnavailable, they + " cannot be reached: " + why.message()));
  }
  if (++route_ < routes_.size() && !neighbour_gone) return Retry(now);
  if (neighbour_gone || refused_ == routes_.size()) {
    if (++refused_rounds_ >= kRefusals && (neighbour_gone || now - *missed_since_ >= kRefusedFor)) {
      return End(PeerGone(peer_, peer_suffix_));
    }
  } else {
    refused_rounds_ = 0;
  }
  route_ = 0;
  refused_ = 0;
  pause_ = std::clamp(2 * pause_, kFirstPause, kLongestPause);
  Retry(now + pause_);
}

void TcpStream::End(const Status& why) {
  Drop();
  state_ = State::kEnded;
  why_ = why;
  std::vector<char>().swap(kept_);
}

TcpAnswer TcpStream::AnswerToHello(Clock::time_point now) const {
  if (state_ == State::kOpen) return TcpAnswer::kAlreadyConnected;
  if (ended()) return TcpAnswer::kConnectionEnded;
  const bool own = state_ == State::kHelloSent && DialsFirst() && now - hello_at_ < kPatience;
  return own ? TcpAnswer::kBusy : TcpAnswer::kWelcome;
}

void TcpStream::Yield(Clock::time_point now) {
  Drop();
  yielded_until_ = now + kPatience;
  if (state_ != State::kIdle) Retry(now);
}

void TcpStream::Resume() {
  yielded_until_.reset();
  if (state_ == State::kWaiting) Retry(Clock::now() + kFirstPause);
}

void TcpStream::Adopt(TcpSocket socket, bool is_unix) {
  Drop();
  socket_ = std::move(socket);
  is_unix_ = is_unix;
  if (const Status watched = group_.epoll.Watch(socket_.fd(), EPOLLIN, key()); !watched.ok()) {
    return End(watched);
  }
  Opened();
}

bool TcpStream::CheckResponsive() {
  if (state_ != State::kOpen || is_unix_ ||
      IsPeerResponsive(socket_.fd(), 2 * group_.options.keep_alive)) {
    return true;
  }
  End(PeerGone(peer_, peer_suffix_));
  return false;
}

}  // namespace tensormount
