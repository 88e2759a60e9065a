// SPDX-License-Identifier: Apache-2.0
// A rank's address as text, which a host program carries to the other ranks, and the choice of this
// machine's addresses.
#include "collective/comm/tcp_address.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <ifaddrs.h>
#include <memory>
#include <netinet/in.h>
#include <optional>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <net/if.h>

#include "base/coding.h"
#include "base/hash.h"
#include "base/log.h"

namespace tensormount {
namespace {

constexpr std::string_view kAddressPrefix = "tm1:";
constexpr std::uint8_t kAddressVersion = 1;
constexpr std::size_t kLongestAddress = 512;
constexpr std::uint8_t kHasUnix = 1;
constexpr std::uint8_t kMappedV4[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr std::string_view kBase64 =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

// Base64 without padding: the length modulo 4 determines how many bits of the last character count.
std::string ToBase64(std::string_view bytes) {
  std::string out;
  std::uint32_t bits = 0;
  int have = 0;
  for (const char c : bytes) {
    bits = bits << 8 | static_cast<unsigned char>(c);
    for (have += 8; have >= 6; have -= 6) out += kBase64[bits >> (have - 6) & 63];
  }
  if (have > 0) out += kBase64[bits << (6 - have) & 63];
  return out;
}

// Decodes base64; empty if a character is invalid. The caller checks that the encoding is canonical
// by encoding the bytes again.
std::optional<std::string> FromBase64(std::string_view text) {
  std::string out;
  std::uint32_t bits = 0;
  int have = 0;
  for (const char c : text) {
    const std::size_t value = kBase64.find(c);
    if (value == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<std::uint32_t>(value);
    if ((have += 6) < 8) continue;
    have -= 8;
    out += static_cast<char>(bits >> have & 255);
  }
  return out;
}

Status DamagedAddress(const std::string& why) {
  return {Code::kInvalidArgument, "the address of a rank is damaged: " + why};
}

struct Interface {
  std::string name;
  unsigned flags = 0;
  IpAddress address;
};

Result<std::vector<Interface>> Interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) {
    return Status::FromErrno(errno, "list", "the network interfaces of this machine");
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owned(list, ::freeifaddrs);
  std::vector<Interface> out;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_name == nullptr) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    sockaddr_storage name{};
    std::memcpy(&name, i->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    Interface found{i->ifa_name, i->ifa_flags, {}};
    std::uint16_t port = 0;
    if (IpAddress::FromSocket(name, &found.address, &port)) out.push_back(std::move(found));
  }
  return out;
}

std::vector<std::string> SplitAtCommas(const std::string& list) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    if (end > at) out.push_back(list.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

// Sorts addresses: IPv4 first, because most machines have routes for it, then IPv6, each in the
// system's order. Leaves out duplicates, and addresses beyond kMostCandidates.
std::vector<IpAddress> InOrder(std::vector<IpAddress> addresses) {
  std::stable_partition(addresses.begin(), addresses.end(),
                        [](const IpAddress& a) { return a.is_v4(); });
  std::vector<IpAddress> out;
  for (const IpAddress& a : addresses) {
    if (out.size() < TcpAddress::kMostCandidates &&
        std::find(out.begin(), out.end(), a) == out.end())
      out.push_back(a);
  }
  return out;
}

Result<std::vector<IpAddress>> AddressesOf(const std::string& list, const std::string& origin) {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Interface> all, Interfaces());
  for (const std::string& name : SplitAtCommas(list)) {
    bool exists = false;
    std::vector<IpAddress> found;
    for (const Interface& i : all) {
      if (i.name != name || (i.flags & IFF_UP) == 0) continue;
      exists = true;
      if (!i.address.is_link_local()) found.push_back(i.address);
    }
    if (!found.empty()) return InOrder(std::move(found));
    if (exists) {
      return Status(Code::kNotFound,
                    origin + ": interface " + OneLine(name) +
                        " has only link-local addresses, which other machines cannot reach");
    }
  }
  return Status(Code::kNotFound, origin + ": no interface in the list " + OneLine(list) +
                                     " is up and has an address");
}

}  // namespace

bool IpAddress::is_v4() const {
  return std::memcmp(bytes.data(), kMappedV4, sizeof(kMappedV4)) == 0;
}

bool IpAddress::is_loopback() const {
  if (is_v4()) return bytes[12] == 127;
  return std::all_of(bytes.begin(), bytes.end() - 1, [](std::uint8_t b) { return b == 0; }) &&
         bytes[15] == 1;
}

bool IpAddress::is_link_local() const {
  if (is_v4()) return bytes[12] == 169 && bytes[13] == 254;
  return bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80;
}

std::string IpAddress::ToString() const {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_v4()) {
    ::inet_ntop(AF_INET, bytes.data() + 12, text, sizeof(text));
  } else {
    ::inet_ntop(AF_INET6, bytes.data(), text, sizeof(text));
  }
  return text;
}

Result<IpAddress> IpAddress::Parse(const std::string& text) {
  IpAddress out;
  if (::inet_pton(AF_INET6, text.c_str(), out.bytes.data()) == 1) return out;
  std::memcpy(out.bytes.data(), kMappedV4, sizeof(kMappedV4));
  if (::inet_pton(AF_INET, text.c_str(), out.bytes.data() + 12) == 1) return out;
  return Status(Code::kInvalidArgument,
                "'" + OneLine(text) + "' is not a numeric IPv4 or IPv6 address");
}

bool IpAddress::FromSocket(const sockaddr_storage& name, IpAddress* out, std::uint16_t* port) {
  if (name.ss_family == AF_INET) {
    sockaddr_in in{};
    std::memcpy(&in, &name, sizeof(in));
    std::memcpy(out->bytes.data(), kMappedV4, sizeof(kMappedV4));
    std::memcpy(out->bytes.data() + 12, &in.sin_addr, 4);
    *port = ntohs(in.sin_port);
    return true;
  }
  if (name.ss_family != AF_INET6) return false;
  sockaddr_in6 in{};
  std::memcpy(&in, &name, sizeof(in));
  std::memcpy(out->bytes.data(), &in.sin6_addr, 16);
  *port = ntohs(in.sin6_port);
  return true;
}

socklen_t IpAddress::ToSocket(std::uint16_t port, sockaddr_storage* out) const {
  *out = {};
  if (is_v4()) {
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_port = htons(port);
    std::memcpy(&in.sin_addr, bytes.data() + 12, 4);
    std::memcpy(out, &in, sizeof(in));
    return sizeof(in);
  }
  sockaddr_in6 in{};
  in.sin6_family = AF_INET6;
  in.sin6_port = htons(port);
  std::memcpy(&in.sin6_addr, bytes.data(), 16);
  std::memcpy(out, &in, sizeof(in));
  return sizeof(in);
}

std::string TcpAddress::PeerSuffix() const {
  return " (host " + host + ", pid " + std::to_string(pid) + ")";
}

std::string TcpAddress::UnixName() const {
  std::string name("\0tensormount-", 13);
  for (const std::uint8_t byte : listener) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

std::string TcpAddress::Encode() const {
  ByteWriter w;
  w.U8(kAddressVersion);
  w.U8(has_unix ? kHasUnix : 0);
  w.Raw(listener.data(), listener.size());
  w.Raw(machine.data(), machine.size());
  w.U32(pid);
  w.U16(port);
  w.U8(static_cast<std::uint8_t>(host.size()));
  w.Raw(host.data(), host.size());
  w.U8(static_cast<std::uint8_t>(candidates.size()));
  for (const IpAddress& a : candidates) {
    w.U8(a.is_v4() ? 4 : 6);
    w.Raw(a.bytes.data() + (a.is_v4() ? 12 : 0), a.is_v4() ? 4 : 16);
  }
  w.U64(Xxh3Low64(std::string_view(w.bytes())));
  return std::string(kAddressPrefix) + ToBase64(w.bytes());
}

Result<TcpAddress> TcpAddress::Decode(std::string_view text) {
  if (text.size() > kLongestAddress) {
    return DamagedAddress("the address has " + std::to_string(text.size()) +
                          " characters, the limit is " + std::to_string(kLongestAddress));
  }
  if (text.substr(0, 2) != kAddressPrefix.substr(0, 2)) {
    return DamagedAddress("the address does not begin with 'tm1:'");
  }
  const std::optional<std::string> bytes = text.size() > kAddressPrefix.size()
                                               ? FromBase64(text.substr(kAddressPrefix.size()))
                                               : std::nullopt;
  if (!bytes || bytes->size() < 16) {
    return DamagedAddress("the address is truncated, or has invalid characters");
  }
  const std::string_view fields(bytes->data(), bytes->size() - 8);
  if (Xxh3Low64(fields) != LoadLittle<std::uint64_t>(bytes->data() + fields.size())) {
    return DamagedAddress("checksum mismatch");
  }
  // Reports another version only if the text is intact.
  if (text.substr(0, kAddressPrefix.size()) != kAddressPrefix ||
      static_cast<std::uint8_t>(fields[0]) != kAddressVersion) {
    return Status(Code::kUnsupported,
                  "the address of a rank comes from another version of tensormount");
  }
  TcpAddress out;
  ByteReader r(fields, "the address of a rank");
  r.U8();
  out.has_unix = (r.U8() & kHasUnix) != 0;
  for (TcpId* id : {&out.listener, &out.machine}) {
    const std::string_view raw = r.Raw(id->size());
    if (raw.size() == id->size()) std::memcpy(id->data(), raw.data(), raw.size());
  }
  out.pid = r.U32();
  out.port = r.U16();
  const std::size_t host = r.U8();
  if (host > kMostHost) return DamagedAddress("the host's name is too long");
  out.host = OneLine(r.Raw(host));
  const std::size_t candidates = r.U8();
  if (candidates == 0 || candidates > kMostCandidates) {
    return DamagedAddress("the address has " + std::to_string(candidates) +
                          " IP addresses, allowed are 1 to " + std::to_string(kMostCandidates));
  }
  for (std::size_t i = 0; i < candidates; ++i) {
    const std::uint8_t family = r.U8();
    if (family != 4 && family != 6)
      return DamagedAddress("the address has an IP address of unknown kind");
    IpAddress& a = out.candidates.emplace_back();
    const std::size_t size = family == 4 ? 4 : 16;
    if (family == 4) std::memcpy(a.bytes.data(), kMappedV4, sizeof(kMappedV4));
    const std::string_view raw = r.Raw(size);
    if (raw.size() == size) std::memcpy(a.bytes.data() + 16 - size, raw.data(), size);
  }
  if (const Status whole = r.Finish(); !whole.ok()) return DamagedAddress(whole.message());
  if (out.port == 0) return DamagedAddress("the address has no port");
  if (out.Encode() != text) return DamagedAddress("encoding its contents again gives another text");
  return out;
}

Result<std::vector<IpAddress>> OwnAddresses() {
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Interface> all, Interfaces());
  std::vector<IpAddress> out;
  for (const Interface& i : all) out.push_back(i.address);
  return out;
}

Result<std::vector<IpAddress>> ChooseAddresses(const TcpOptions& options) {
  if (!options.address.empty()) {
    if (!options.interface.empty()) {
      return Status(Code::kInvalidArgument,
                    "TcpOptions: address and interface are both set; set only one");
    }
    TENSORMOUNT_ASSIGN_OR_RETURN(const IpAddress given, IpAddress::Parse(options.address));
    if (given.is_link_local()) {
      return Status(Code::kInvalidArgument, "TcpOptions: other machines cannot reach " +
                                                given.ToString() + " (link-local)");
    }
    return std::vector<IpAddress>{given};
  }
  if (!options.interface.empty()) return AddressesOf(options.interface, "TcpOptions::interface");
  const char* from_gloo = std::getenv("GLOO_SOCKET_IFNAME");
  if (from_gloo != nullptr && *from_gloo != '\0') {
    return AddressesOf(from_gloo, "GLOO_SOCKET_IFNAME");
  }
  TENSORMOUNT_ASSIGN_OR_RETURN(const std::vector<Interface> all, Interfaces());
  std::vector<IpAddress> outside;
  std::vector<IpAddress> loopback;
  for (const Interface& i : all) {
    if ((i.flags & IFF_UP) == 0 || i.address.is_link_local()) continue;
    const bool loops = (i.flags & IFF_LOOPBACK) != 0 || i.address.is_loopback();
    (loops ? loopback : outside).push_back(i.address);
  }
  std::vector<IpAddress> found = InOrder(outside.empty() ? loopback : outside);
  if (found.empty()) {
    return Status(Code::kNotFound, "this machine has no network interface that is up");
  }
  return found;
}

TcpId MachineBootId() {
  TcpId out{};
  char boot[64] = "";
  const int fd = ::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  const ssize_t n = fd < 0 ? -1 : ::read(fd, boot, sizeof(boot));
  if (fd >= 0) ::close(fd);
  struct stat net {};
  if (n <= 0 || ::stat("/proc/self/ns/net", &net) != 0) return out;
  const std::string text = std::string(boot, static_cast<std::size_t>(n)) + " " +
                           std::to_string(net.st_dev) + ":" + std::to_string(net.st_ino);
  const Hash128 hash = Xxh3(text);
  StoreLittle(out.data(), hash.low);
  StoreLittle(out.data() + 8, hash.high);
  return out;
}

}  // namespace tensormount
