// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_HTTP_CLIENT_H_
#define TENSORMOUNT_REMOTE_HTTP_CLIENT_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

#include "tensormount/status.h"

#include "base/byte_range.h"
#include "base/deadline.h"
#include "base/file_system.h"

namespace tensormount {

struct HttpRequest {
  std::string method = "GET";
  std::string url;
  std::vector<std::string> headers;  // "name: value", without Range.
  // Adds headers that depend on the time, such as a signature; called before each try, on the
  // client's thread, so it must not wait. Only for
  // the origin of `url`: a redirect to another one gets neither these nor "authorization".
  std::function<Status(const HttpRequest&, std::vector<std::string>&)> sign;
  std::string body;
  std::string body_sha256;  // Of `body`, in hexadecimal, for `sign`; empty: not computed yet.
  // Asks for these bytes of the object. The answer must have exactly them, or end with the object.
  std::optional<ByteRange> range;
  // Where the bytes of `range` go; as large as the range. Empty: they go to HttpResponse::body.
  std::span<std::byte> into;
  // Of HttpResponse::body. A longer answer fails with kDataLoss.
  std::uint64_t most_body = std::uint64_t{1} << 20;
  bool follow_redirects = true;
  // A redirect that only adds a slash, as servers send it for directories, fails with kNotFound.
  bool refuse_directories = false;
  bool use_proxy = true;
  int tries = 8;
  // The server works for long before it answers; the caller sets a deadline.
  bool answers_late = false;
};

struct HttpResponse {
  int code = 0;                                             // The last one; 0: none came.
  std::map<std::string, std::string, std::less<>> headers;  // Names in lower case.
  std::string body;
  // Bytes of the range that have arrived.
  std::uint64_t received = 0;
  // Size of the object, from Content-Range, or from Content-Length of a whole object.
  std::optional<std::uint64_t> object_size;
  // Headers of the redirect that names the object (x-linked-etag, of the hub); else of the first
  // one; empty: there was no redirect.
  std::map<std::string, std::string, std::less<>> redirect_headers;

  // The value of a header; empty: there is none.
  std::string_view Header(std::string_view name) const;
};

// A request on its way. Made by HttpClient::Start.
class HttpCall {
 public:
  HttpCall(HttpRequest request, const Deadline& deadline, bool extends);
  ~HttpCall();
  HttpCall(const HttpCall&) = delete;
  HttpCall& operator=(const HttpCall&) = delete;

  // Waits for the end. After it, nothing writes to `into` any more. Ok: an answer has come, with
  // any code that is not a transient failure (HttpResponse::code).
  Status Await();
  // The same, also if the caller is cancelled.
  void AwaitEnd();
  // Like Await, but gives up at the limits, and leaves the request on its way.
  Status Await(const ReadLimits& limits);
  // Whether it has ended without an answer.
  bool failed() const { return ended() && !status_.ok(); }
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // Asks for the end; Await still has to be called.
  void Cancel() { cancelled_.store(true); }
  const HttpRequest& request() const { return request_; }
  const HttpResponse& response() const { return response_; }
  HttpResponse& response() { return response_; }

 private:
  friend class HttpClient;
  friend class HttpTransfer;
  const HttpRequest request_;
  const pid_t process_;
  // Only the client's thread uses these two. `extends_`: the deadline moves while bytes arrive.
  Deadline deadline_;
  const bool extends_;
  HttpResponse response_;
  Status status_;
  // Runs on the client's thread at the end.
  std::function<void(HttpCall&)> at_end_;
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> ended_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
};

// Requests that are awaited together. When it is destroyed, those that are still on their way end,
// so that nobody writes to the caller's memory any more. For one thread.
class HttpBatch {
 public:
  // `limits`, which must live longer, are as in File::ReadMany.
  explicit HttpBatch(const ReadLimits& limits) : limits_(limits) {}
  ~HttpBatch();
  HttpBatch(const HttpBatch&) = delete;
  HttpBatch& operator=(const HttpBatch&) = delete;

  Status Start(HttpRequest request);
  // Waits for all, in their order. `arrived` is called for each answer, while later ones may be on
  // their way. The first failure, also of `arrived`, ends the others. Afterwards the batch is
  // empty.
  Status Await(const std::function<Status(const std::shared_ptr<HttpCall>&)>& arrived);

 private:
  const ReadLimits& limits_;
  std::vector<std::shared_ptr<HttpCall>> calls_;
};

// Requests over HTTP/1.1, up to 32 at a time to one server, by one thread of this process.
// Transient failures (no connection, a connection that broke, an answer that is short, 408, 429,
// 5xx) are tried again with growing waits, or the wait that the server asks for, until the
// deadline; a range continues where it stopped. Redirects are followed, at most ten, never from
// https to http. Proxies as libcurl has them (https_proxy, no_proxy). Thread-safe.
class HttpClient {
 public:
  // The one of this process.
  static HttpClient& Get();
  HttpClient();

  // kUnsupported: no libcurl. `at_end` runs on the client's thread, and must not wait. Without a
  // deadline the request has Patience() from the time when it is sent, and again from each 256 KiB
  // that arrive or are sent.
  Result<std::shared_ptr<HttpCall>> Start(HttpRequest request,
                                          const std::optional<Deadline>& deadline,
                                          std::function<void(HttpCall&)> at_end = {});
  // An HttpBatch of these requests.
  Result<std::vector<std::shared_ptr<HttpCall>>> Run(std::vector<HttpRequest> requests,
                                                     const ReadLimits& limits = {});
  Result<std::shared_ptr<HttpCall>> Run(HttpRequest request, const ReadLimits& limits = {});

  // How long a request may bring nothing, with all tries, if the caller sets no limit.
  // TENSORMOUNT_PATIENCE (seconds) changes it.
  static std::chrono::milliseconds Patience();

 private:
  class Loop;
  std::mutex mutex_;
  std::shared_ptr<Loop> loop_;
};

// The error for an answer that is not the object: "URL: 404 Not Found", with the code that fits.
Status HttpFailure(std::string_view url, const HttpResponse& response);

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_HTTP_CLIENT_H_
