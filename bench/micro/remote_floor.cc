// SPDX-License-Identifier: Apache-2.0
// The floor of reads from a server: libcurl's multi interface asks for the same ranges of one
// object, and copies what arrives to memory. Prints seconds. bench/remote.py runs it.
//
//   remotefloor URL BYTES RANGE_BYTES CONNECTIONS
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "remote/curl_library.h"

namespace {

namespace curl = tensormount::curl;

struct Part {
  char* to = nullptr;
  std::size_t left = 0;
};

std::size_t Take(char* data, std::size_t size, std::size_t count, void* into) {
  auto* part = static_cast<Part*>(into);
  if (size * count > part->left) return 0;
  std::memcpy(part->to, data, size * count);
  part->to += size * count;
  part->left -= size * count;
  return size * count;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const auto library = curl::Open();
  if (!library.ok()) return 1;
  const curl::Library& c = *library.value();
  const std::uint64_t bytes = std::strtoull(argv[2], nullptr, 10);
  const std::uint64_t range = std::strtoull(argv[3], nullptr, 10);
  const std::size_t connections = std::strtoull(argv[4], nullptr, 10);
  std::vector<char> memory(bytes, 1);
  curl::Multi* const multi = c.curl_multi_init();
  std::vector<curl::Easy*> free;
  for (std::size_t i = 0; i < connections; ++i) free.push_back(c.curl_easy_init());
  std::vector<Part> parts((bytes + range - 1) / range);
  std::vector<std::string> texts(parts.size());
  std::vector<curl::List*> lists(parts.size(), nullptr);
  std::size_t next = 0;
  std::size_t done = 0;
  const auto begin = std::chrono::steady_clock::now();
  while (done < parts.size()) {
    for (; next < parts.size() && !free.empty(); ++next) {
      curl::Easy* const easy = free.back();
      free.pop_back();
      const std::uint64_t at = next * range;
      const std::uint64_t n = std::min(range, bytes - at);
      parts[next] = {memory.data() + at, n};
      texts[next] = "Range: bytes=" + std::to_string(at) + "-" + std::to_string(at + n - 1);
      lists[next] = c.curl_slist_append(nullptr, texts[next].c_str());
      c.curl_easy_setopt(easy, curl::kUrl, argv[1]);
      c.curl_easy_setopt(easy, curl::kHttpVersion, curl::kHttpVersion11);
      c.curl_easy_setopt(easy, curl::kBufferSize, 512L << 10);
      c.curl_easy_setopt(easy, curl::kHttpHeader, lists[next]);
      c.curl_easy_setopt(easy, curl::kWriteFunction, &Take);
      c.curl_easy_setopt(easy, curl::kWriteData, static_cast<void*>(&parts[next]));
      c.curl_multi_add_handle(multi, easy);
    }
    int running = 0;
    c.curl_multi_perform(multi, &running);
    int left = 0;
    while (const curl::Message* const message = c.curl_multi_info_read(multi, &left)) {
      if (message->message != curl::kMessageDone) continue;
      curl::Easy* const easy = message->easy;
      if (message->data.result != curl::kOk) return 1;
      c.curl_multi_remove_handle(multi, easy);
      free.push_back(easy);
      ++done;
    }
    int ready = 0;
    c.curl_multi_wait(multi, nullptr, 0, 1000, &ready);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  for (const Part& part : parts) {
    if (part.left != 0) return 1;
  }
  std::printf("%.6f\n", seconds.count());
  return 0;
}
