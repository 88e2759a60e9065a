// SPDX-License-Identifier: Apache-2.0
// Accepts connections, does handshakes, and reports which streams have events.
#include "collective/comm/tcp_hub.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include "base/log.h"
#include "base/spare_descriptors.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;

// Time limit for a pending peer's hello of 128 bytes, which is sent with its connection: only a
// rank that was stopped between the two needs longer, and dials again.
constexpr std::chrono::seconds kHelloTime{10};
constexpr int kAcceptsPerTurn = 256;
// Limit of connections of one rank after the hello but before the confirmation. A rank has one;
// others repeat a recorded hello.
constexpr std::size_t kMostUnconfirmed = 4;
constexpr milliseconds kFirstAcceptPause{10};
constexpr milliseconds kLongestAcceptPause{1000};
constexpr std::chrono::seconds kRejectionLogInterval{10};

}  // namespace

TcpHub::TcpHub(Parts parts, EpollSet epoll, TcpSocket wake)
    : addresses_(std::move(parts.addresses)),
      tcp_(std::move(parts.tcp)),
      unix_(std::move(parts.unix_socket)),
      streams_(addresses_.size()),
      check_at_(Clock::now() + parts.options.keep_alive),
      wake_(std::move(wake)) {
  group_.rank = parts.rank;
  group_.size = static_cast<int>(addresses_.size());
  group_.token = parts.token;
  group_.group = parts.group;
  group_.options = parts.options;
  group_.own = std::move(parts.own);
  group_.epoll = std::move(epoll);
  if (group_.options.keep_alive > milliseconds(0)) group_.ScheduleTick(check_at_);
}

TcpHub::~TcpHub() = default;

Result<std::unique_ptr<TcpHub>> TcpHub::Make(Parts parts) {
  TENSORMOUNT_ASSIGN_OR_RETURN(EpollSet epoll, EpollSet::Make());
  TcpSocket wake(OpenDescriptor([] { return ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); }));
  if (!wake.is_open()) return Status::FromErrno(errno, "make", "an eventfd");
  std::unique_ptr<TcpHub> hub(new TcpHub(std::move(parts), std::move(epoll), std::move(wake)));
  TENSORMOUNT_ASSIGN_OR_RETURN(hub->group_.own_ips, OwnAddresses());
  TENSORMOUNT_RETURN_IF_ERROR(hub->WatchListeners());
  return hub;
}

Status TcpHub::WatchListeners() {
  TENSORMOUNT_RETURN_IF_ERROR(group_.epoll.Watch(
      tcp_.fd(), EPOLLIN, TcpGroupContext::KeyOf(TcpGroupContext::kListenTcp, 0)));
  if (!unix_.is_open()) return {};
  return group_.epoll.Watch(unix_.fd(), EPOLLIN,
                            TcpGroupContext::KeyOf(TcpGroupContext::kListenUnix, 0));
}

TcpStream& TcpHub::StreamTo(int peer) {
  TcpStream*& stream = streams_[static_cast<std::size_t>(peer)];
  if (stream == nullptr) {
    TcpAddress address = TcpAddress::Decode(addresses_[static_cast<std::size_t>(peer)]).value();
    auto made = std::make_unique<TcpStream>(group_, peer, std::move(address));
    stream = made.get();
    unclaimed_.emplace(peer, std::move(made));
    opening_.push_back(peer);
  }
  return *stream;
}

std::unique_ptr<ByteStream> TcpHub::Open(int peer) {
  (void)StreamTo(peer);
  const auto it = unclaimed_.find(peer);
  std::unique_ptr<ByteStream> out = std::move(it->second);
  unclaimed_.erase(it);
  return out;
}

void TcpHub::Poll(std::vector<int>* ready) {
  ready->insert(ready->end(), group_.unread.begin(), group_.unread.end());
  group_.unread.clear();
  std::array<epoll_event, 256> room;
  for (const epoll_event& event : group_.epoll.Poll(room)) {
    const auto which = static_cast<std::uint32_t>(event.data.u64);
    switch (event.data.u64 >> 32) {
      case TcpGroupContext::kListenTcp:
        Accept(tcp_, false, ready);
        break;
      case TcpGroupContext::kListenUnix:
        Accept(unix_, true, ready);
        break;
      case TcpGroupContext::kStream: {
        const int peer = static_cast<int>(which);
        if (streams_[which]->OnEvents(event.events)) ready->push_back(peer);
        break;
      }
      case TcpGroupContext::kPendingPeer:
        // An event before this one may have dropped the pending peer.
        if (const auto it = pending_peers_.find(which); it != pending_peers_.end())
          ReadPendingPeer(it, ready);
        break;
    }
  }
  if (Clock::now() >= group_.next_tick.load()) ScanSockets(ready);
}

void TcpHub::ScanSockets(std::vector<int>* ready) {
  const Clock::time_point now = Clock::now();
  group_.next_tick = Clock::time_point::max();
  std::vector<int> still;
  for (const int peer : opening_) {
    TcpStream& stream = *streams_[static_cast<std::size_t>(peer)];
    if (stream.open()) continue;
    if (stream.Tick(now)) {
      ready->push_back(peer);
      continue;
    }
    still.push_back(peer);
  }
  opening_.swap(still);
  std::vector<std::uint32_t> late;
  for (const auto& [id, guest] : pending_peers_) {
    if (guest.peer >= 0) continue;
    if (now >= guest.deadline) {
      late.push_back(id);
    } else {
      group_.ScheduleTick(guest.deadline);
    }
  }
  for (const std::uint32_t id : late) {
    // This rank may have been late itself: a hello that arrived in time counts.
    auto it = pending_peers_.find(id);
    if (it == pending_peers_.end() || !ReadPendingPeer(it, ready)) continue;
    it = pending_peers_.find(id);
    if (it != pending_peers_.end() && it->second.peer < 0) DropPendingPeer(it);
  }
  if (accept_again_ && now < *accept_again_) group_.ScheduleTick(*accept_again_);
  if (accept_again_ && now >= *accept_again_) {
    accept_again_.reset();
    // Can fail only for lack of kernel memory, which Unwatch freed before the pause.
    (void)WatchListeners();
  }
  if (group_.options.keep_alive > milliseconds(0)) {
    if (now >= check_at_) {
      check_at_ = now + group_.options.keep_alive;
      for (std::size_t r = 0; r < streams_.size(); ++r) {
        if (streams_[r] && !streams_[r]->CheckResponsive()) ready->push_back(static_cast<int>(r));
      }
    }
    group_.ScheduleTick(check_at_);
  }
}

void TcpHub::Wait(std::chrono::nanoseconds most, const std::function<bool()>& changed) {
  {
    std::lock_guard lock(wait_mutex_);
    ++waiters_;
  }
  if (!changed()) {
    const std::chrono::nanoseconds due = group_.next_tick.load() - Clock::now();
    const auto limit = std::clamp(due, std::chrono::nanoseconds(0), most).count();
    pollfd fds[2] = {{group_.epoll.fd(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
    constexpr std::int64_t kSecond = 1'000'000'000;
    timespec time{};
    time.tv_sec = limit / kSecond;
    time.tv_nsec = limit % kSecond;
    (void)::ppoll(fds, 2, &time, nullptr);  // The caller checks again in any case.
  }
  std::lock_guard lock(wait_mutex_);
  // Only the last waiter resets the event: a later one gets a new event.
  if (--waiters_ > 0) return;
  std::uint64_t count = 0;
  (void)!::read(wake_.fd(), &count, sizeof(count));
}

void TcpHub::Wake() {
  if (waiters_ == 0) return;
  std::lock_guard lock(wait_mutex_);
  if (waiters_ == 0) return;
  const std::uint64_t one = 1;
  (void)!::write(wake_.fd(), &one, sizeof(one));  // The counter cannot overflow.
}

void TcpHub::Accept(const TcpSocket& listener, bool is_unix, std::vector<int>* ready) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    TcpSocket socket(OpenDescriptor(
        [&] { return ::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); }));
    if (socket.is_open()) {
      accept_pause_ = milliseconds(0);
      Admit(std::move(socket), is_unix, ready);
      continue;
    }
    const int err = errno;
    if (err == EAGAIN || err == EWOULDBLOCK) return;
    if (IsErrorOfPeer(err)) continue;
    if (IsOutOfDescriptors(err) && DropOldestUnauthenticated()) continue;
    // Waiting connections stay in the kernel's queue. The listeners are not watched meanwhile,
    // because they would report these connections in every Poll.
    group_.epoll.Unwatch(tcp_.fd());
    if (unix_.is_open()) group_.epoll.Unwatch(unix_.fd());
    if (accept_pause_ == milliseconds(0)) {
      Log(LogLevel::kWarning,
          Status::FromErrno(err, "accept connections for", "rank " + std::to_string(group_.rank))
                  .message() +
              "; retrying");
    }
    accept_pause_ = std::clamp(2 * accept_pause_, kFirstAcceptPause, kLongestAcceptPause);
    accept_again_ = Clock::now() + accept_pause_;
    group_.ScheduleTick(*accept_again_);
    return;
  }
}

void TcpHub::Admit(TcpSocket socket, bool is_unix, std::vector<int>* ready) {
  if (is_unix) {
    if (!IsSameUser(socket.fd())) return;
  } else {
    // The socket may listen on all addresses of the machine; connections at an unpublished address
    // are refused.
    const std::vector<IpAddress>& ours = group_.own.candidates;
    IpAddress at;
    if (!LocalAddress(socket.fd(), &at)) return;
    if (std::find(ours.begin(), ours.end(), at) == ours.end()) return;
  }
  if (unauthenticated_ >= kMaxUnauthenticated) (void)DropOldestUnauthenticated();
  const std::uint32_t id = next_pending_id_++;
  const auto [it, added] = pending_peers_.emplace(id, PendingPeer{});
  if (!added) return;  // The id wrapped around to a pending peer that still exists.
  ++unauthenticated_;
  // Set before the handshake, because the peer's machine may fail during it.
  if (!is_unix) TuneTcp(socket.fd(), group_.options.keep_alive);
  it->second.socket = std::move(socket);
  it->second.is_unix = is_unix;
  it->second.deadline = Clock::now() + kHelloTime;
  if (!ReadPendingPeer(it, ready) || it->second.watched) return;
  it->second.watched = true;
  const auto key = TcpGroupContext::KeyOf(TcpGroupContext::kPendingPeer, id);
  if (!group_.epoll.Watch(it->second.socket.fd(), EPOLLIN, key).ok()) return DropPendingPeer(it);
  group_.ScheduleTick(it->second.deadline);
}

bool TcpHub::DropOldestUnauthenticated() {
  for (auto it = pending_peers_.begin(); it != pending_peers_.end(); ++it) {
    if (it->second.peer >= 0) continue;
    DropPendingPeer(it);
    return true;
  }
  return false;
}

void TcpHub::DropPendingPeer(PendingPeers::iterator it) {
  const int peer = it->second.peer;
  if (it->second.watched) group_.epoll.Unwatch(it->second.socket.fd());
  pending_peers_.erase(it);
  if (peer < 0) {
    --unauthenticated_;
    return;
  }
  const auto same = [&](const auto& entry) { return entry.second.peer == peer; };
  if (std::none_of(pending_peers_.begin(), pending_peers_.end(), same)) StreamTo(peer).Resume();
}

bool TcpHub::ReadPendingPeer(PendingPeers::iterator it, std::vector<int>* ready) {
  PendingPeer& guest = it->second;
  const bool known = guest.peer >= 0;
  char* const to = known ? guest.confirm.data() : guest.hello.data();
  const std::size_t size = known ? guest.confirm.size() : guest.hello.size();
  const ssize_t n = ::recv(guest.socket.fd(), to + guest.have, size - guest.have, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return true;
  if (n <= 0) {
    DropPendingPeer(it);
    return false;
  }
  guest.have += static_cast<std::size_t>(n);
  if (guest.have < size) return true;
  guest.have = 0;
  return known ? OnConfirm(it, ready) : OnHello(it);
}

bool TcpHub::OnHello(PendingPeers::iterator it) {
  PendingPeer& guest = it->second;
  const std::optional<TcpHello> hello = ReadHello(group_.token, group_.own.listener, guest.hello);
  if (!hello) {
    LogRejected(guest, "it does not have the token of this group");
    DropPendingPeer(it);
    return false;
  }
  const Clock::time_point now = Clock::now();
  const int peer = hello->from < addresses_.size() ? static_cast<int>(hello->from) : -1;
  TcpAnswer answer = TcpAnswer::kWelcome;
  if (hello->version != kTcpVersion) {
    answer = TcpAnswer::kWrongVersion;
  } else if (hello->size != addresses_.size() || hello->group != group_.group) {
    answer = TcpAnswer::kWrongGroup;
  } else if (peer < 0 || peer == group_.rank ||
             hello->to != static_cast<std::uint32_t>(group_.rank)) {
    answer = TcpAnswer::kWrongRank;
  } else {
    answer = StreamTo(peer).AnswerToHello(now);
  }
  // A repeated recorded hello must not replace the connection that it was made for.
  for (const auto& [id, other] : pending_peers_) {
    if (id != it->first && peer >= 0 && other.peer == peer && other.hello == guest.hello) {
      LogRejected(guest, "it sent a copy of an earlier handshake");
      DropPendingPeer(it);
      return false;
    }
  }
  TcpId nonce{};
  bool sent = FillRandom(nonce).ok();
  if (sent) {
    guest.answer = MakeAnswer(group_.token, guest.hello, answer, nonce);
    const ssize_t n = ::send(guest.socket.fd(), guest.answer.data(), guest.answer.size(),
                             MSG_DONTWAIT | MSG_NOSIGNAL);
    sent = n == static_cast<ssize_t>(guest.answer.size());
  }
  if (answer == TcpAnswer::kWrongVersion || answer == TcpAnswer::kWrongGroup ||
      answer == TcpAnswer::kWrongRank) {
    LogRejected(
        guest,
        "it has the token of this group, but another version of tensormount, another list of "
        "addresses, or another rank than this list says");
  }
  if (!sent || answer != TcpAnswer::kWelcome) {
    DropPendingPeer(it);
    return false;
  }
  --unauthenticated_;
  guest.peer = peer;
  std::vector<PendingPeers::iterator> same;
  for (auto other = pending_peers_.begin(); other != pending_peers_.end(); ++other) {
    if (other != it && other->second.peer == peer) same.push_back(other);
  }
  for (std::size_t i = 0; i + kMostUnconfirmed <= same.size(); ++i) DropPendingPeer(same[i]);
  StreamTo(peer).Yield(now);
  return true;
}

bool TcpHub::OnConfirm(PendingPeers::iterator it, std::vector<int>* ready) {
  PendingPeer& guest = it->second;
  const int peer = guest.peer;
  TcpStream& stream = StreamTo(peer);
  const bool right = IsConfirm(group_.token, guest.answer, guest.confirm);
  const TcpAnswer now = stream.AnswerToHello(Clock::now());
  if (!right || now == TcpAnswer::kAlreadyConnected || now == TcpAnswer::kConnectionEnded) {
    DropPendingPeer(it);
    return false;
  }
  if (guest.watched) group_.epoll.Unwatch(guest.socket.fd());
  guest.watched = false;
  stream.Adopt(std::move(guest.socket), guest.is_unix);
  ready->push_back(peer);
  for (auto other = pending_peers_.begin(); other != pending_peers_.end();) {
    const auto same = other++;
    if (same->second.peer == peer) DropPendingPeer(same);
  }
  return false;
}

void TcpHub::LogRejected(const PendingPeer& guest, const std::string& why) {
  const Clock::time_point now = Clock::now();
  if (last_rejection_log_ != Clock::time_point{} &&
      now - last_rejection_log_ < kRejectionLogInterval) {
    ++unlogged_rejections_;
    return;
  }
  std::string text = "rank " + std::to_string(group_.rank) + " refused a connection from " +
                     PeerText(guest.socket.fd()) + ": " + why;
  if (unlogged_rejections_ > 0) {
    text += " (and " + std::to_string(unlogged_rejections_) + " more since the last warning)";
  }
  last_rejection_log_ = now;
  unlogged_rejections_ = 0;
  Log(LogLevel::kWarning, text);
}

}  // namespace tensormount
