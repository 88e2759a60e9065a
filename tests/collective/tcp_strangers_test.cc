// SPDX-License-Identifier: Apache-2.0
// What anybody on the network may do to a TCP group while it works: nothing that it notices.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <netinet/in.h>
#include <poll.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "collective/comm/collective.h"
#include "collective/comm/tcp_address.h"
#include "collective/comm/tcp_handshake.h"
#include "collective/comm/tcp_hub.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/tcp_testing.h"
#include "tests/support/fd.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A stranger's connections to one rank, and what it knows.
class Stranger {
 public:
  Stranger(const TcpRanksHere& group, std::uint32_t to)
      : token(group.token),
        group_id(TcpGroupId(group.token, group.addresses)),
        size(static_cast<std::uint32_t>(group.addresses.size())),
        victim(to),
        address(TcpAddress::Decode(group.addresses[to]).value()) {}

  // Of blocking sockets, with a time-out for reading.
  std::unique_ptr<Fd> Connect() const {
    auto fd = std::make_unique<Fd>(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_storage name{};
    const socklen_t size_of_name = address.candidates.front().ToSocket(address.port, &name);
    EXPECT_EQ(::connect(*fd, reinterpret_cast<const sockaddr*>(&name), size_of_name), 0);
    return fd;
  }
  // As much as goes: the other end may close meanwhile.
  static void Say(int fd, const std::string& bytes) {
    std::size_t at = 0;
    while (at < bytes.size()) {
      const ssize_t n = ::send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (n <= 0) return;
      at += static_cast<std::size_t>(n);
    }
  }
  // What comes, until `size` bytes or the end. Empty: closed without a word.
  static std::string Hear(int fd, std::size_t size) {
    std::string out;
    const auto give_up = std::chrono::steady_clock::now() + seconds(60);
    while (out.size() < size && std::chrono::steady_clock::now() < give_up) {
      pollfd waiting{fd, POLLIN, 0};
      if (::poll(&waiting, 1, 100) <= 0) continue;
      char buffer[4096];
      const ssize_t n = ::recv(fd, buffer, std::min(sizeof(buffer), size - out.size()), 0);
      if (n <= 0) return out;
      out.append(buffer, static_cast<std::size_t>(n));
    }
    EXPECT_GE(out.size(), size) << "neither an answer nor an end";
    return out;
  }
  // Says it and is shown the door.
  void IsClosedAfter(const std::string& bytes) const {
    const auto fd = Connect();
    Say(*fd, bytes);
    EXPECT_EQ(Hear(*fd, 1), "");
  }

  TcpHello Hello() const {
    TcpHello hello;
    hello.from = victim == 1 ? 2 : 1;
    hello.to = victim;
    hello.size = size;
    hello.group = group_id;
    hello.version = kTcpVersion;
    return hello;
  }
  static std::string TextOf(const HandshakeFrame& frame) { return {frame.data(), frame.size()}; }
  // The answer to a hello that somebody with the token says. Where the machine stood still for as
  // long as a guest has for it, or others drove it out, it is said again, as ranks do.
  TcpAnswer AnswerTo(const TcpHello& hello) const {
    HandshakeFrame frame{};
    std::string text;
    std::unique_ptr<Fd> fd;
    for (int again = 0; again < 10 && text.empty(); ++again) {
      fd = Connect();
      frame = MakeHello(token, address.listener, hello);
      Say(*fd, TextOf(frame));
      text = Hear(*fd, kHandshakeFrame);
    }
    HandshakeFrame answer{};
    if (text.size() != answer.size()) return TcpAnswer::kWelcome;
    std::copy(text.begin(), text.end(), answer.begin());
    const auto read = ReadAnswer(token, frame, answer);
    EXPECT_TRUE(read.has_value());
    if (*read != TcpAnswer::kWelcome) {
      EXPECT_EQ(Hear(*fd, 1), "");
    }
    return read.value_or(TcpAnswer::kWelcome);
  }

  const SecretKey token;
  const TcpId group_id;
  const std::uint32_t size;
  const std::uint32_t victim;
  const TcpAddress address;
};

struct Behaviour {
  const char* name;
  std::function<void(const Stranger&, const std::atomic<bool>& over)> act;
};

void StayUntil(const std::atomic<bool>& over) {
  while (!over) std::this_thread::sleep_for(milliseconds(1));
}

std::string WrongHello(const Stranger& s) {
  SecretKey wrong = s.token;
  wrong[0] ^= 1;
  return Stranger::TextOf(MakeHello(wrong, s.address.listener, s.Hello()));
}

const std::vector<Behaviour>& Behaviours() {
  static const std::vector<Behaviour> all = {
      {"silent",
       [](const Stranger& s, const std::atomic<bool>& over) {
         const auto fd = s.Connect();
         StayUntil(over);
       }},
      {"rubbish", [](const Stranger& s,
                     const std::atomic<bool>&) { s.IsClosedAfter(std::string(4096, '\x5a')); }},
      {"zeros",
       [](const Stranger& s, const std::atomic<bool>&) {
         s.IsClosedAfter(std::string(kHandshakeFrame, '\0'));
       }},
      {"half a hello, and stays",
       [](const Stranger& s, const std::atomic<bool>& over) {
         const auto fd = s.Connect();
         const HandshakeFrame frame = MakeHello(s.token, s.address.listener, s.Hello());
         Stranger::Say(*fd, Stranger::TextOf(frame).substr(0, 64));
         StayUntil(over);
       }},
      {"half a hello, and leaves",
       [](const Stranger& s, const std::atomic<bool>&) {
         const auto fd = s.Connect();
         Stranger::Say(*fd, WrongHello(s).substr(0, 127));
       }},
      {"wrong token",
       [](const Stranger& s, const std::atomic<bool>&) { s.IsClosedAfter(WrongHello(s)); }},
      {"the token itself",
       [](const Stranger& s, const std::atomic<bool>&) {
         std::string text(s.token.begin(), s.token.end());
         text.resize(kHandshakeFrame);
         s.IsClosedAfter(text);
       }},
      {"right token, for another listener",
       [](const Stranger& s, const std::atomic<bool>&) {
         TcpId elsewhere = s.address.listener;
         elsewhere[15] ^= 1;
         s.IsClosedAfter(Stranger::TextOf(MakeHello(s.token, elsewhere, s.Hello())));
       }},
      {"right token, the victim's own rank",
       [](const Stranger& s, const std::atomic<bool>&) {
         TcpHello hello = s.Hello();
         hello.from = s.victim;
         EXPECT_EQ(s.AnswerTo(hello), TcpAnswer::kWrongRank);
       }},
      {"right token, rank out of range",
       [](const Stranger& s, const std::atomic<bool>&) {
         for (const std::uint32_t from : {s.size, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
           TcpHello hello = s.Hello();
           hello.from = from;
           EXPECT_EQ(s.AnswerTo(hello), TcpAnswer::kWrongRank);
         }
       }},
      {"right token, to another rank",
       [](const Stranger& s, const std::atomic<bool>&) {
         TcpHello hello = s.Hello();
         hello.to = hello.from;
         EXPECT_EQ(s.AnswerTo(hello), TcpAnswer::kWrongRank);
       }},
      {"right token, other group",
       [](const Stranger& s, const std::atomic<bool>&) {
         TcpHello hello = s.Hello();
         hello.group[7] ^= 1;
         EXPECT_EQ(s.AnswerTo(hello), TcpAnswer::kWrongGroup);
       }},
      {"right token, other size",
       [](const Stranger& s, const std::atomic<bool>&) {
         TcpHello hello = s.Hello();
         hello.size += 1;
         EXPECT_EQ(s.AnswerTo(hello), TcpAnswer::kWrongGroup);
       }},
      {"right token, other version",
       [](const Stranger& s, const std::atomic<bool>&) {
         TcpHello hello = s.Hello();
         hello.version = 2;
         EXPECT_EQ(s.AnswerTo(hello), TcpAnswer::kWrongVersion);
       }},
      {"a rank a second time",
       [](const Stranger& s, const std::atomic<bool>&) {
         EXPECT_EQ(s.AnswerTo(s.Hello()), TcpAnswer::kAlreadyConnected);
       }},
      {"closes at once",
       [](const Stranger& s, const std::atomic<bool>&) {
         for (int i = 0; i < 50; ++i) (void)s.Connect();
       }},
      {"resets",
       [](const Stranger& s, const std::atomic<bool>&) {
         for (int i = 0; i < 50; ++i) {
           const auto fd = s.Connect();
           const linger at_once{1, 0};
           ::setsockopt(*fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
         }
       }},
      {"a megabyte after a wrong token",
       [](const Stranger& s, const std::atomic<bool>&) {
         s.IsClosedAfter(WrongHello(s) + std::string(1 << 20, 'm'));
       }},
      {"a byte at a time",
       [](const Stranger& s, const std::atomic<bool>& over) {
         const auto fd = s.Connect();
         const std::string hello = WrongHello(s);
         for (std::size_t i = 0; i < hello.size() && !over; ++i) {
           Stranger::Say(*fd, hello.substr(i, 1));
           std::this_thread::sleep_for(milliseconds(2));
         }
         StayUntil(over);
       }},
      {"a thousand connections",
       [](const Stranger& s, const std::atomic<bool>&) {
         for (int batch = 0; batch < 10; ++batch) {
           std::vector<std::unique_ptr<Fd>> held;
           for (int i = 0; i < 100; ++i) held.push_back(s.Connect());
           // More than are let wait: the oldest had to go.
           EXPECT_EQ(Stranger::Hear(*held.front(), 1), "");
         }
       }},
      {"an HTTP request",
       [](const Stranger& s, const std::atomic<bool>&) {
         s.IsClosedAfter(
             "GET / HTTP/1.1\r\nHost: node7\r\nUser-Agent: a scanner\r\nAccept: */*\r\n" +
             std::string(200, 'x') + "\r\n\r\n");
       }},
      {"a TLS hello",
       [](const Stranger& s, const std::atomic<bool>&) {
         std::string tls("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
         for (int i = 0; i < 400; ++i) tls += static_cast<char>(i * 31);
         s.IsClosedAfter(tls);
       }},
  };
  return all;
}

// Collective jobs on all ranks until rank 0 says that they end.
Status WorkUntil(Communicator& comm, const std::atomic<bool>& over) {
  for (int job = 0;; ++job) {
    Collective c(comm, kPatient);
    const std::string mine = std::to_string(job) + "/" + std::to_string(comm.rank());
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto all, c.AllGather(mine, "all"));
    for (int r = 0; r < comm.size(); ++r) {
      if (all[static_cast<std::size_t>(r)] != std::to_string(job) + "/" + std::to_string(r)) {
        return {Code::kInternal, "job " + std::to_string(job) + ": wrong text"};
      }
    }
    std::vector<std::string> letters(static_cast<std::size_t>(comm.size()),
                                     std::string(5000, static_cast<char>('a' + comm.rank())));
    TENSORMOUNT_ASSIGN_OR_RETURN(const auto in, AllToAll(c, letters, "letters"));
    for (int r = 0; r < comm.size(); ++r) {
      if (in[static_cast<std::size_t>(r)] != std::string(5000, static_cast<char>('a' + r))) {
        return {Code::kInternal, "job " + std::to_string(job) + ": wrong letter"};
      }
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(
        const std::string verdict,
        c.Decide({}, "over?", [&](std::vector<std::string>&) -> Result<std::string> {
          return std::string(over ? "over" : "go on");
        }));
    if (verdict == "over") return {};
  }
}

TEST(TcpStrangersTest, StrangersDoNotDisturbTheGroup) {
  ASSERT_GE(Behaviours().size(), 20u);
  ASSERT_OK_AND_ASSIGN(TcpRanksHere ranks, MakeTcpRanks(4, OptionsFor(TcpWay::kIpv4)));
  // All pairs are connected before anybody comes who says that he is one of them.
  std::atomic<bool> at_once{true};
  ASSERT_OK(OnTcpThreads(ranks, [&](Communicator& comm) { return WorkUntil(comm, at_once); }));

  std::atomic<bool> over{false};
  std::atomic<bool> gone{false};
  std::atomic<int> acting{0};
  std::vector<std::thread> strangers;
  for (const std::uint32_t victim : {0u, 2u}) {
    for (const Behaviour& b : Behaviours()) {
      ++acting;
      strangers.emplace_back([&, victim] {
        SCOPED_TRACE(b.name);
        const Stranger s(ranks, victim);
        // Who stays until the end is no reason for the others to go on.
        const std::string name = b.name;
        const bool stays =
            name == "silent" || name == "half a hello, and stays" || name == "a byte at a time";
        if (stays) --acting;
        b.act(s, gone);
        if (!stays) --acting;
      });
    }
  }
  std::thread watcher([&] {
    const auto give_up = std::chrono::steady_clock::now() + seconds(90);
    while (acting > 0 && std::chrono::steady_clock::now() < give_up) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(acting, 0);
    over = true;
  });
  EXPECT_OK(OnTcpThreads(ranks, [&](Communicator& comm) { return WorkUntil(comm, over); }));
  watcher.join();
  gone = true;
  for (std::thread& t : strangers) t.join();
  EXPECT_OK(OnTcpThreads(ranks, [&](Communicator& comm) { return WorkUntil(comm, at_once); }));
}

// The same from the first moment on: ranks find each other through a crowd.
TEST(TcpStrangersTest, RanksConnectAmongStrangers) {
  ASSERT_OK_AND_ASSIGN(TcpRanksHere ranks, MakeTcpRanks(4, OptionsFor(TcpWay::kIpv4)));
  const Stranger s(ranks, 0);
  std::vector<std::unique_ptr<Fd>> crowd;
  for (std::size_t i = 0; i < 3 * TcpHub::kMaxUnauthenticated; ++i) {
    crowd.push_back(s.Connect());
    if (i % 3 == 1) Stranger::Say(*crowd.back(), WrongHello(s).substr(0, 100));
    if (i % 3 == 2) Stranger::Say(*crowd.back(), WrongHello(s));
  }
  std::atomic<bool> at_once{true};
  EXPECT_OK(OnTcpThreads(ranks, [&](Communicator& comm) { return WorkUntil(comm, at_once); }));
}

// Somebody recorded the hello of a rank and says it first, again and again: without the token the
// answer cannot be confirmed, and the rank itself comes in.
TEST(TcpStrangersTest, ReplayedHelloIsRefused) {
  ASSERT_OK_AND_ASSIGN(TcpRanksHere ranks, MakeTcpRanks(4, OptionsFor(TcpWay::kIpv4)));
  std::vector<std::unique_ptr<Fd>> replays;
  for (const std::uint32_t victim : {0u, 1u, 2u}) {
    const Stranger s(ranks, victim);
    for (int i = 0; i < 8; ++i) {
      TcpHello hello = s.Hello();
      hello.from = victim + 1;
      replays.push_back(s.Connect());
      Stranger::Say(*replays.back(),
                    Stranger::TextOf(MakeHello(s.token, s.address.listener, hello)));
      // And a confirmation that is a guess, of some.
      if (i % 2 == 0) Stranger::Say(*replays.back(), std::string(kConfirmFrame, 'c'));
    }
  }
  std::atomic<bool> at_once{true};
  EXPECT_OK(OnTcpThreads(ranks, [&](Communicator& comm) { return WorkUntil(comm, at_once); }));
}

// A rank that has the token and then says what no rank of ours would: its stream ends by name, and
// those of others go on.
TEST(TcpStrangersTest, InvalidFrameClosesOnlyItsStream) {
  for (const std::string& said :
       {std::string(1000, 'z'), std::string(31, '\0'), std::string("TMSP"), std::string()}) {
    ASSERT_OK_AND_ASSIGN(TcpRanksHere ranks, MakeTcpRanks(3, OptionsFor(TcpWay::kIpv4)));
    ranks.comms[1].reset();  // Somebody else comes in its name.
    const Stranger s(ranks, 0);
    Communicator& victim = *ranks.comms[0];
    std::string text(4, ' ');
    ASSERT_OK_AND_ASSIGN(const auto request, victim.Receive(1, 1, TcpView(text)));
    std::thread member([&] {
      const auto fd = s.Connect();
      const HandshakeFrame hello = MakeHello(s.token, s.address.listener, s.Hello());
      Stranger::Say(*fd, Stranger::TextOf(hello));
      const std::string heard = Stranger::Hear(*fd, kHandshakeFrame);
      HandshakeFrame answer{};
      if (heard.size() != answer.size()) return;
      std::copy(heard.begin(), heard.end(), answer.begin());
      const ConfirmFrame confirm = MakeConfirm(s.token, answer);
      Stranger::Say(*fd, std::string(confirm.data(), confirm.size()) + said);
    });
    const Status status = TcpWait(victim, request);
    member.join();
    EXPECT_EQ(status.code(), said.size() >= 32 ? Code::kDataLoss : Code::kUnavailable)
        << status.ToString();
    EXPECT_THAT(status.message(), testing::HasSubstr("rank 1 (host "));
    // The third rank is not concerned.
    std::atomic<bool> received{false};
    std::thread other([&] {
      std::string out = "text";
      const auto sent = ranks.comms[2]->Send(0, 2, TcpView(out));
      ASSERT_TRUE(sent.ok());
      EXPECT_OK(TcpWait(*ranks.comms[2], sent.value()));
      // Taken over is not sent: its connection is yet to be made.
      while (!received) {
        EXPECT_OK(ranks.comms[2]->Progress());
        std::this_thread::sleep_for(milliseconds(1));
      }
    });
    ASSERT_OK_AND_ASSIGN(const auto good, victim.Receive(2, 2, TcpView(text)));
    EXPECT_OK(TcpWait(victim, good));
    EXPECT_EQ(text, "text");
    received = true;
    other.join();
  }
}

}  // namespace
}  // namespace tensormount
