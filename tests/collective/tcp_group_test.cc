// SPDX-License-Identifier: Apache-2.0
#include "tensormount/tcp_group.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <memory>
#include <poll.h>
#include <string>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "collective/comm/collective.h"
#include "collective/comm/tcp_address.h"
#include "collective/comm/tcp_handshake.h"
#include "tests/collective/collective_cases.h"
#include "tests/collective/communicator_conformance.h"
#include "tests/collective/group_view_cases.h"
#include "tests/collective/tcp_testing.h"
#include "tests/support/fd.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

std::size_t EntriesOf(const char* folder) {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

Status GatherOnce(Communicator& comm, const std::string& what) {
  Collective c(comm, kPatient);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto all,
                               c.AllGather(what + std::to_string(comm.rank()), "gather"));
  for (int r = 0; r < comm.size(); ++r) {
    if (all[static_cast<std::size_t>(r)] != what + std::to_string(r)) {
      return {Code::kInternal, "rank " + std::to_string(r) + " said something else"};
    }
  }
  return {};
}

class TcpThreadsTest : public testing::TestWithParam<TcpWay> {};

// As threads, for the sanitizer of threads: a heartbeat beside the caller, waits that are ended.
TEST_P(TcpThreadsTest, ConformsAndIsCollective) {
  if (!CanUse(GetParam())) GTEST_SKIP() << "this machine has no ::1";
  EXPECT_OK(RunTcpThreads(3, OptionsFor(GetParam()), [](Communicator& comm) -> Status {
    TENSORMOUNT_RETURN_IF_ERROR(ExerciseCollective(comm));
    TENSORMOUNT_RETURN_IF_ERROR(ExerciseFailures(comm, 10));
    TENSORMOUNT_RETURN_IF_ERROR(Conform(comm, /*cancels=*/false));
    return Conform(comm, /*cancels=*/true);
  }));
}

INSTANTIATE_TEST_SUITE_P(All, TcpThreadsTest,
                         testing::Values(TcpWay::kIpv4, TcpWay::kIpv6, TcpWay::kUnix),
                         [](const auto& one) { return NameOf(one.param); });

TEST(TcpGroupTest, AllAddressKindsOfOneMachineWorkTogether) {
  // Default options: the addresses that a rank would tell another machine.
  for (const bool unix_sockets : {true, false}) {
    TcpOptions options;
    options.interface = "lo";
    options.unix_sockets = unix_sockets;
    EXPECT_OK(RunTcpThreads(3, options, [](Communicator& comm) {
      EXPECT_EQ(comm.kind(), "tcp");
      return GatherOnce(comm, "text of ");
    }));
  }
  // One rank has no Unix socket: the others meet it by TCP.
  ASSERT_OK_AND_ASSIGN(const TcpToken token, MakeTcpToken());
  ASSERT_OK_AND_ASSIGN(auto a, TcpGroup::Listen(OptionsFor(TcpWay::kUnix)));
  ASSERT_OK_AND_ASSIGN(auto b, TcpGroup::Listen(OptionsFor(TcpWay::kIpv4)));
  TcpRanksHere mixed{token, {a->address(), b->address()}, {}};
  ASSERT_OK_AND_ASSIGN(auto first, a->Connect(mixed.addresses, 0, token));
  ASSERT_OK_AND_ASSIGN(auto second, b->Connect(mixed.addresses, 1, token));
  mixed.comms.push_back(std::move(first));
  mixed.comms.push_back(std::move(second));
  EXPECT_OK(OnTcpThreads(mixed, [](Communicator& comm) { return GatherOnce(comm, "mixed "); }));
}

TEST(TcpGroupTest, TwoGroupsInOneProcessStaySeparate) {
  ASSERT_OK_AND_ASSIGN(TcpRanksHere a, MakeTcpRanks(3, OptionsFor(TcpWay::kIpv4)));
  ASSERT_OK_AND_ASSIGN(TcpRanksHere b, MakeTcpRanks(3, OptionsFor(TcpWay::kUnix)));
  Status of_b;
  std::thread other([&] {
    of_b = OnTcpThreads(b, [](Communicator& comm) -> Status {
      for (int i = 0; i < 50; ++i) TENSORMOUNT_RETURN_IF_ERROR(GatherOnce(comm, "b"));
      return {};
    });
  });
  EXPECT_OK(OnTcpThreads(a, [](Communicator& comm) -> Status {
    for (int i = 0; i < 50; ++i) TENSORMOUNT_RETURN_IF_ERROR(GatherOnce(comm, "a"));
    return {};
  }));
  other.join();
  EXPECT_OK(of_b);
}

TEST(TcpGroupTest, HundredGroupsLeakNoDescriptorAndStartNoThread) {
  ASSERT_OK(RunTcpThreads(3, OptionsFor(TcpWay::kUnix),
                          [](Communicator& comm) { return GatherOnce(comm, "first "); }));
  const std::size_t before = EntriesOf("/proc/self/fd");
  for (int i = 0; i < 100; ++i) {
    TcpOptions options = OptionsFor(i % 2 == 0 ? TcpWay::kIpv4 : TcpWay::kUnix);
    if (i % 10 == 0) {
      // Never used, or never connected.
      ASSERT_OK_AND_ASSIGN(const TcpRanksHere idle, MakeTcpRanks(3, options));
      ASSERT_OK_AND_ASSIGN(const auto listening, TcpGroup::Listen(options));
      continue;
    }
    ASSERT_OK(RunTcpThreads(3, options, [](Communicator& comm) { return GatherOnce(comm, "x"); }));
  }
  EXPECT_EQ(EntriesOf("/proc/self/fd"), before);
  const std::size_t threads = EntriesOf("/proc/self/task");
  ASSERT_OK_AND_ASSIGN(const TcpRanksHere ranks, MakeTcpRanks(4, OptionsFor(TcpWay::kIpv4)));
  for (const auto& comm : ranks.comms) EXPECT_OK(comm->Progress());
  EXPECT_EQ(EntriesOf("/proc/self/task"), threads);
}

// At most `spare` more descriptors than are open now.
class FewDescriptors {
 public:
  explicit FewDescriptors(int spare) {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    // Descriptors are the lowest free ones; `spare` of them are left free.
    std::vector<std::unique_ptr<Fd>> free;
    for (int i = 0; i < spare; ++i) {
      free.push_back(std::make_unique<Fd>(::open("/dev/null", O_RDONLY | O_CLOEXEC)));
    }
    rlimit now = before_;
    now.rlim_cur = static_cast<rlim_t>((free.empty() ? 2 : free.back()->fd) + 1);
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &now), 0);
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

 private:
  rlimit before_{};
};

TEST(TcpGroupTest, WorksWithFewDescriptorsOrReportsTheLimit) {
  {
    const FewDescriptors few(200);
    EXPECT_OK(RunTcpThreads(8, OptionsFor(TcpWay::kIpv4),
                            [](Communicator& comm) { return GatherOnce(comm, "few "); }));
  }
  {
    const FewDescriptors few(1);
    const Status status = TcpGroup::Listen(OptionsFor(TcpWay::kUnix)).status();
    EXPECT_EQ(status.ToErrno(), EMFILE) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("Too many open files"));
  }
  ASSERT_OK_AND_ASSIGN(const TcpRanksHere ranks, MakeTcpRanks(2, OptionsFor(TcpWay::kIpv4)));
  const FewDescriptors none(0 + 1);
  const Fd last(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  std::string text(1, 'x');
  ASSERT_OK_AND_ASSIGN(const auto request, ranks.comms[1]->Receive(0, 1, TcpView(text)));
  const Status status = TcpWait(*ranks.comms[1], request);
  EXPECT_EQ(status.ToErrno(), EMFILE) << status.ToString();
  EXPECT_THAT(status.message(), HasSubstr("rank 0 (host "));
  EXPECT_THAT(status.message(), HasSubstr("Too many open files"));
}

// Who listens runs out of descriptors: whoever dials waits, and is accepted later.
TEST(TcpGroupTest, AcceptsAgainOnceDescriptorsAreFree) {
  ASSERT_OK_AND_ASSIGN(TcpRanksHere ranks, MakeTcpRanks(2, OptionsFor(TcpWay::kIpv4)));
  {
    const FewDescriptors one(1);
    ASSERT_OK(ranks.comms[1]->Progress());  // Dials, with the last one.
    for (int i = 0; i < 20; ++i) ASSERT_OK(ranks.comms[0]->Progress());
  }
  EXPECT_OK(OnTcpThreads(ranks, [](Communicator& comm) { return GatherOnce(comm, "again "); }));
}

TEST(TcpGroupTest, PortsAreWithinTheRange) {
  TcpOptions options = OptionsFor(TcpWay::kIpv4);
  ASSERT_OK_AND_ASSIGN(const auto any, TcpGroup::Listen(options));
  std::vector<std::unique_ptr<TcpGroup>> held;
  // Some range of two ports in which others may listen, too.
  for (int first = 20'000; first < 30'000 && held.size() < 2; first += 2) {
    held.clear();
    options.first_port = static_cast<std::uint16_t>(first);
    options.last_port = static_cast<std::uint16_t>(first + 1);
    for (int i = 0; i < 2; ++i) {
      auto group = TcpGroup::Listen(options);
      if (group.ok()) held.push_back(std::move(group).value());
    }
  }
  ASSERT_EQ(held.size(), 2u);
  const Status full = TcpGroup::Listen(options).status();
  EXPECT_EQ(full.ToErrno(), EADDRINUSE);
  EXPECT_THAT(full.message(), HasSubstr("no port from " + std::to_string(options.first_port)));
  options.last_port = static_cast<std::uint16_t>(options.first_port - 1);
  EXPECT_THAT(TcpGroup::Listen(options), HasCode(Code::kInvalidArgument));
  options.first_port = 0;
  EXPECT_THAT(TcpGroup::Listen(options), HasCode(Code::kInvalidArgument));
  options.last_port = 0;
  options.connect_timeout = milliseconds(0);
  EXPECT_THAT(TcpGroup::Listen(options), HasCode(Code::kInvalidArgument));
}

TEST(TcpGroupTest, ErrorNamesTheRankOfAWrongAddress) {
  const TcpOptions options = OptionsFor(TcpWay::kIpv4);
  ASSERT_OK_AND_ASSIGN(const TcpToken token, MakeTcpToken());
  ASSERT_OK_AND_ASSIGN(const auto mine, TcpGroup::Listen(options));
  ASSERT_OK_AND_ASSIGN(const auto other, TcpGroup::Listen(options));
  const auto refused = [&](const std::vector<std::string>& addresses, int rank) {
    const Status status = mine->Connect(addresses, rank, token).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
    return status.message();
  };
  const std::string a = mine->address();
  const std::string b = other->address();
  EXPECT_THAT(refused({}, 0), HasSubstr("rank 0 is outside"));
  EXPECT_THAT(refused({a, b}, 2), HasSubstr("rank 2 is outside"));
  EXPECT_THAT(refused({a, b}, -1), HasSubstr("rank -1 is outside"));
  EXPECT_THAT(refused({a, b}, 1), HasSubstr("rank 1: the address given for this rank"));
  EXPECT_THAT(refused({a, b, b}, 0), HasSubstr("rank 2 has the address of rank 1"));
  EXPECT_THAT(refused({a, b.substr(1)}, 0), HasSubstr("rank 1: the address of a rank is damaged"));
  EXPECT_THAT(refused({a, ""}, 0), HasSubstr("rank 1: the address of a rank is damaged"));
  // All of that changed nothing; one call that goes well takes it.
  EXPECT_OK(mine->Connect({a, b}, 0, token));
  EXPECT_THAT(mine->Connect({a, b}, 0, token), HasCode(Code::kInvalidArgument));
}

// Ranks 0 and 1 of what each takes for its group; what rank 1 is told when it receives.
Status OfTwoThatDisagree(const std::function<void(std::vector<std::string>&, TcpToken&)>& change) {
  TcpOptions options = OptionsFor(TcpWay::kIpv4);
  options.connect_timeout = milliseconds(100);
  TENSORMOUNT_ASSIGN_OR_RETURN(TcpToken token, MakeTcpToken());
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto a, TcpGroup::Listen(options));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto b, TcpGroup::Listen(options));
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto c, TcpGroup::Listen(options));
  std::vector<std::string> addresses = {a->address(), b->address(), c->address()};
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto comm, a->Connect(addresses, 0, token));
  change(addresses, token);
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto wrong, b->Connect(addresses, 1, token));
  std::string text(1, 'x');
  TENSORMOUNT_ASSIGN_OR_RETURN(const auto request, wrong->Receive(0, 1, TcpView(text)));
  const auto give_up = std::chrono::steady_clock::now() + seconds(60);
  while (std::chrono::steady_clock::now() < give_up) {
    TENSORMOUNT_RETURN_IF_ERROR(comm->Progress());
    TENSORMOUNT_RETURN_IF_ERROR(wrong->Progress());
    TENSORMOUNT_RETURN_IF_ERROR(wrong->Test(request).status());
    std::this_thread::sleep_for(milliseconds(1));
  }
  return {};
}

TEST(TcpGroupTest, ErrorNamesTheDisagreementBetweenRanks) {
  const Status token = OfTwoThatDisagree([](auto&, TcpToken& t) { t[31] ^= 1; });
  EXPECT_EQ(token.code(), Code::kUnavailable) << token.ToString();
  EXPECT_THAT(token.message(), HasSubstr("rank 0 (host "));
  EXPECT_THAT(token.message(), HasSubstr("check that all ranks have the same token"));
  const Status fewer =
      OfTwoThatDisagree([](std::vector<std::string>& a, TcpToken&) { a.pop_back(); });
  EXPECT_EQ(fewer.code(), Code::kInvalidArgument) << fewer.ToString();
  EXPECT_THAT(fewer.message(), HasSubstr("was given a different list of addresses than this rank"));
}

// Workers of a data loader are forks that may free what they inherited.
TEST(TcpGroupTest, ForkedChildMayFreeItsCopy) {
  for (const TcpWay way : {TcpWay::kIpv4, TcpWay::kUnix}) {
    ASSERT_OK_AND_ASSIGN(TcpRanksHere ranks, MakeTcpRanks(3, OptionsFor(way)));
    ASSERT_OK(OnTcpThreads(ranks, [](Communicator& comm) { return GatherOnce(comm, "x"); }));
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ranks.comms.clear();
      ::_exit(7);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    EXPECT_OK(OnTcpThreads(ranks, [](Communicator& comm) { return GatherOnce(comm, "y"); }));
  }
}

// Whether what listens at `name` answers a right hello of rank 1 to rank 0.
bool AnswersAt(const TcpRanksHere& ranks, const sockaddr* name, socklen_t size, uid_t user) {
  const TcpAddress address = TcpAddress::Decode(ranks.addresses[0]).value();
  TcpHello hello;
  hello.from = 1;
  hello.to = 0;
  hello.size = static_cast<std::uint32_t>(ranks.addresses.size());
  hello.group = TcpGroupId(ranks.token, ranks.addresses);
  hello.version = kTcpVersion;
  const HandshakeFrame frame = MakeHello(ranks.token, address.listener, hello);
  int hears[2];
  EXPECT_EQ(::pipe2(hears, O_CLOEXEC), 0);
  const Fd from(hears[0]);
  const pid_t child = ::fork();
  if (child == 0) {
    char said = '-';
    if (user != ::getuid() && ::setuid(user) != 0) ::_exit(1);
    const int fd = ::socket(name->sa_family, SOCK_STREAM, 0);
    if (::connect(fd, name, size) != 0) ::_exit(2);
    (void)!::send(fd, frame.data(), frame.size(), MSG_NOSIGNAL);
    if (::recv(fd, &said, 1, 0) == 1) said = '+';
    (void)!::write(hears[1], &said, 1);
    ::_exit(0);
  }
  ::close(hears[1]);
  EXPECT_GE(child, 0);
  const auto give_up = std::chrono::steady_clock::now() + seconds(60);
  char said = '?';
  for (pollfd waiting{from, POLLIN, 0}; std::chrono::steady_clock::now() < give_up;) {
    EXPECT_OK(ranks.comms[0]->Progress());
    if (::poll(&waiting, 1, 1) > 0) break;
  }
  EXPECT_EQ(::read(from, &said, 1), 1);
  ::waitpid(child, nullptr, 0);
  EXPECT_NE(said, '?');
  return said == '+';
}

TEST(TcpGroupTest, ConnectionsAtOtherAddressesAreClosed) {
  TcpOptions options;
  options.interface = "lo";
  options.unix_sockets = false;
  ASSERT_OK_AND_ASSIGN(const TcpRanksHere ranks, MakeTcpRanks(3, options));
  const TcpAddress address = TcpAddress::Decode(ranks.addresses[0]).value();
  if (address.candidates.size() < 2) GTEST_SKIP() << "the loopback has one address alone";
  for (const bool told : {false, true}) {
    sockaddr_storage name{};
    ASSERT_OK_AND_ASSIGN(const IpAddress ip, IpAddress::Parse(told ? "127.0.0.1" : "127.0.0.2"));
    const socklen_t size = ip.ToSocket(address.port, &name);
    EXPECT_EQ(AnswersAt(ranks, reinterpret_cast<const sockaddr*>(&name), size, ::getuid()), told);
  }
}

TEST(TcpGroupTest, OtherUsersAreRefusedAtTheUnixSocket) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_OK_AND_ASSIGN(const TcpRanksHere ranks, MakeTcpRanks(3, OptionsFor(TcpWay::kUnix)));
  const std::string path = TcpAddress::Decode(ranks.addresses[0]).value().UnixName();
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.data(), path.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  EXPECT_FALSE(AnswersAt(ranks, reinterpret_cast<const sockaddr*>(&name), size, 65534));
  EXPECT_TRUE(AnswersAt(ranks, reinterpret_cast<const sockaddr*>(&name), size, 0));
}

TEST(TcpGroupTest, MessageOrOtherThreadWakesAWaitingRank) {
  TcpOptions options = OptionsFor(TcpWay::kIpv4);
  options.keep_alive = milliseconds(0);  // Which would wake it, too.
  ASSERT_OK_AND_ASSIGN(TcpRanksHere ranks, MakeTcpRanks(2, options));
  ASSERT_OK(OnTcpThreads(ranks, [](Communicator& comm) { return GatherOnce(comm, "x"); }));
  Communicator& receiver = *ranks.comms[1];
  EXPECT_TRUE(receiver.HearsChanges());
  constexpr int kMessages = 200;
  std::atomic<int> received{0};
  std::thread sender([&] {
    for (int i = 0; i < kMessages; ++i) {
      // One at a time: the next one would wake who missed this.
      while (received < i) std::this_thread::yield();
      std::string text(10, static_cast<char>('a' + i % 26));
      const auto sent = ranks.comms[0]->Send(1, 1, TcpView(text));
      ASSERT_TRUE(sent.ok());
      EXPECT_OK(TcpWait(*ranks.comms[0], sent.value()));
    }
  });
  // Reads what comes before the one who waits sees it.
  std::atomic<bool> stop{false};
  std::thread thief([&] {
    while (!stop) (void)receiver.Progress();
  });
  const auto give_up = std::chrono::steady_clock::now() + seconds(60);
  for (int i = 0; i < kMessages; ++i) {
    std::string text(10, ' ');
    ASSERT_OK_AND_ASSIGN(const auto request, receiver.Receive(0, 1, TcpView(text)));
    while (true) {
      const std::uint64_t seen = receiver.Changes();
      const Result<bool> done = receiver.Test(request);
      ASSERT_OK(done.status());
      if (done.value()) break;
      ASSERT_LT(std::chrono::steady_clock::now(), give_up) << "was not woken for message " << i;
      receiver.WaitForChange(seen, seconds(120));
    }
    EXPECT_EQ(text, std::string(10, static_cast<char>('a' + i % 26)));
    ++received;
  }
  sender.join();
  stop = true;
  thief.join();
}

}  // namespace
}  // namespace tensormount
