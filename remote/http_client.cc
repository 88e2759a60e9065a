// SPDX-License-Identifier: Apache-2.0
// The thread that runs all requests with libcurl's multi interface, and the rules for answers:
// what is tried again, which redirects are followed, what a range must look like.
#include "remote/http_client.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <set>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>

#include "base/cancel_scope.h"
#include "base/per_process.h"
#include "base/thread.h"
#include "remote/curl_library.h"
#include "remote/environment.h"
#include "remote/text.h"
#include "remote/url.h"

namespace tensormount {
namespace {

// Requests that are sent at a time: to one server, so that one that hangs holds up no other, and in
// all.
constexpr std::size_t kMostOfOrigin = 32;
constexpr std::size_t kMostActive = 256;
constexpr std::size_t kMostHeaderBytes = 64 << 10;
constexpr int kMostRedirects = 10;
// Answers with another range than was asked for: one server of several, or a proxy, may be broken.
constexpr int kMostWrongRanges = 3;
constexpr std::chrono::milliseconds kFirstWait{100};
constexpr std::chrono::milliseconds kLongestBackoff{8'000};
constexpr long kConnectMs = 10'000;
// A transfer that is slower for this long has broken.
constexpr long kSlowBytes = 1024;
constexpr long kSlowSeconds = 20;
constexpr std::chrono::milliseconds kTick{50};
// So many bytes within the patience are progress.
constexpr std::uint64_t kProgressBytes = 256 << 10;
constexpr std::chrono::seconds kDefaultPatience{120};

bool IsTransient(int code) {
  return code == 408 || code == 429 || code == 500 || code == 502 || code == 503 || code == 504;
}

bool IsRedirect(int code) {
  return code == 301 || code == 302 || code == 303 || code == 307 || code == 308;
}

// "bytes 0-9/100": the range and the size of the object. A size of "*" is refused: it would not be
// known whether the range is all of the object.
struct ContentRange {
  ByteRange bytes;
  std::uint64_t size = 0;
};
std::optional<ContentRange> ParseContentRange(std::string_view text) {
  if (!text.starts_with("bytes ")) return std::nullopt;
  text.remove_prefix(6);
  const std::size_t dash = text.find('-');
  const std::size_t slash = text.find('/');
  if (dash == std::string_view::npos || slash == std::string_view::npos || dash > slash) {
    return std::nullopt;
  }
  const auto first = ParseNumber(text.substr(0, dash));
  const auto last = ParseNumber(text.substr(dash + 1, slash - dash - 1));
  const auto size = ParseNumber(text.substr(slash + 1));
  if (!first || !last || !size || *first > *last || *last >= *size) return std::nullopt;
  return ContentRange{{*first, *last + 1}, *size};
}

std::string CodeText(int code) {
  static const std::map<int, const char*> kNames = {{400, "Bad Request"},
                                                    {401, "Unauthorized"},
                                                    {403, "Forbidden"},
                                                    {404, "Not Found"},
                                                    {409, "Conflict"},
                                                    {410, "Gone"},
                                                    {412, "Precondition Failed"},
                                                    {416, "Range Not Satisfiable"},
                                                    {429, "Too Many Requests"},
                                                    {500, "Internal Server Error"},
                                                    {502, "Bad Gateway"},
                                                    {503, "Service Unavailable"},
                                                    {504, "Gateway Timeout"}};
  const auto known = kNames.find(code);
  return std::to_string(code) + (known == kNames.end() ? "" : std::string(" ") + known->second);
}

}  // namespace

std::string_view HttpResponse::Header(std::string_view name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? std::string_view() : std::string_view(found->second);
}

HttpCall::HttpCall(HttpRequest request, const Deadline& deadline, bool extends)
    : request_(std::move(request)), process_(getpid()), deadline_(deadline), extends_(extends) {}
HttpCall::~HttpCall() = default;

Status HttpCall::Await() { return Await(ReadLimits{}); }

void HttpCall::AwaitEnd() {
  const CancelScope uncancelled(nullptr);
  (void)Await();
}

Status HttpCall::Await(const ReadLimits& limits) {
  std::unique_lock lock(mutex_);
  // The client ends every call at its deadline.
  while (!ended()) {
    if (getpid() != process_) {
      return {Code::kUnsupported, ShownUrl(request_.url) + ": was asked for before fork()"};
    }
    if ((limits.cancel != nullptr && limits.cancel->load()) || CancelScope::IsCancelled()) {
      return {Code::kCancelled, "cancelled while a server was asked"};
    }
    if (limits.deadline && limits.deadline->Passed()) {
      return {Code::kDeadlineExceeded, ShownUrl(request_.url) + ": no answer in time"};
    }
    changed_.wait_for(lock, kTick);
  }
  return status_;
}

// One try of a call, or what waits for the next. Only the client's thread uses it.
class HttpTransfer {
 public:
  // `answered`: the origins that have answered so far, of the client's thread.
  HttpTransfer(const curl::Library& library, std::shared_ptr<HttpCall> call,
               std::set<std::string>& answered)
      : library_(library), call_(std::move(call)), answered_(answered), url_(call_->request_.url) {}
  ~HttpTransfer() {
    if (list_ != nullptr) library_.curl_slist_free_all(list_);
  }
  HttpTransfer(const HttpTransfer&) = delete;
  HttpTransfer& operator=(const HttpTransfer&) = delete;

  const HttpCall& call() const { return *call_; }
  Deadline::Clock::time_point not_before() const { return not_before_; }
  // Of the next try.
  std::string origin() const { return Origin(url_); }
  curl::Easy* easy = nullptr;
  std::string counted_as;  // The origin that it counts for while it is active.

  // Sets the options of a try.
  Status Begin() {
    const HttpRequest& request = call_->request_;
    code_ = 0;
    header_bytes_ = 0;
    verdict_ = Status();
    head_checked_ = false;
    wrong_range_ = false;
    cut_ = false;
    sent_ = 0;
    if (call_->extends_ && !std::exchange(begun_, true)) {
      call_->deadline_ = Deadline::After(HttpClient::Patience());
    }
    response().headers.clear();
    if (request.into.empty()) {
      response().body.clear();
      response().received = 0;
    }
    std::vector<std::string> headers;
    const bool own = Origin(url_) == Origin(request.url);
    for (const std::string& header : request.headers) {
      if (own || !IsCredential(header)) headers.push_back(header);
    }
    if (own && request.sign) TENSORMOUNT_RETURN_IF_ERROR(request.sign(request, headers));
    asked_.reset();
    if (request.range) {
      asked_ = ByteRange{request.range->begin + response().received, request.range->end};
      headers.push_back("Range: bytes=" + std::to_string(asked_->begin) + "-" +
                        std::to_string(asked_->end - 1));
    }
    if (!request.body.empty() || request.method == "PUT" || request.method == "POST") {
      headers.push_back("Expect:");  // Without waiting for the server's consent.
    }
    if (list_ != nullptr) library_.curl_slist_free_all(std::exchange(list_, nullptr));
    for (const std::string& header : headers) {
      for (const char c : header) {
        if (static_cast<unsigned char>(c) < 32 && c != '\t') {
          return {Code::kInvalidArgument, "the header " + header.substr(0, header.find(':')) +
                                              " has a control character (a token with a newline?)"};
        }
      }
      curl::List* const longer = library_.curl_slist_append(list_, header.c_str());
      if (longer == nullptr) return {Code::kResourceExhausted, "no memory for a request"};
      list_ = longer;
    }
    int refused = 0;
    const auto set = [&](int option, auto value) {
      const bool taken = library_.curl_easy_setopt(easy, option, value) == curl::kOk;
      if (!taken) refused = option;
      return taken;
    };
    bool ok = set(curl::kUrl, url_.c_str()) && set(curl::kNoSignal, 1L) &&
              set(curl::kFollowLocation, 0L) && set(curl::kHttpVersion, curl::kHttpVersion11) &&
              set(curl::kProtocols, curl::kProtocolHttp | curl::kProtocolHttps) &&
              set(curl::kConnectTimeoutMs, kConnectMs) && set(curl::kPathAsIs, 1L) &&
              set(curl::kTcpKeepAlive, 1L) && set(curl::kUserAgent, "tensormount") &&
              set(curl::kHttpHeader, list_) && set(curl::kPrivate, static_cast<void*>(this)) &&
              set(curl::kWriteFunction, &HttpTransfer::OnBody) &&
              set(curl::kWriteData, static_cast<void*>(this)) &&
              set(curl::kHeaderFunction, &HttpTransfer::OnHeader) &&
              set(curl::kHeaderData, static_cast<void*>(this)) &&
              set(curl::kErrorBuffer, static_cast<char*>(error_));
    // Some versions refuse it for a handle that was used; the size is for speed only.
    (void)library_.curl_easy_setopt(easy, curl::kBufferSize, 512L << 10);
    // Otherwise the end of a request waits for the thread that looks its host up.
    (void)library_.curl_easy_setopt(easy, curl::kQuickExit, 1L);
    if (!request.use_proxy) ok = ok && set(curl::kNoProxy, "*");
    if (!request.answers_late) {
      ok = ok && set(curl::kLowSpeedLimit, kSlowBytes) && set(curl::kLowSpeedTime, kSlowSeconds);
    }
    if (request.body.size() >= kProgressBytes) {
      ok = ok && set(curl::kNoProgress, 0L) &&
           set(curl::kProgressFunction, &HttpTransfer::OnProgress) &&
           set(curl::kProgressData, static_cast<void*>(this));
    }
    error_[0] = '\0';
    if (request.method == "GET") {
      ok = ok && set(curl::kHttpGet, 1L);
    } else if (request.method == "HEAD") {
      ok = ok && set(curl::kNoBody, 1L);
    } else {
      ok = ok && set(curl::kPostFieldSizeLarge, static_cast<std::int64_t>(request.body.size())) &&
           set(curl::kPostFields, request.body.data()) &&
           set(curl::kCustomRequest, request.method.c_str());
    }
    std::string authorities = library_.ca_file != nullptr ? library_.ca_file : "";
    for (const char* name : {"CURL_CA_BUNDLE", "SSL_CERT_FILE", "AWS_CA_BUNDLE"}) {
      std::string file = EnvironmentVariable(name);
      if (!file.empty()) authorities = std::move(file);
    }
    if (!authorities.empty()) ok = ok && set(curl::kCaInfo, authorities.c_str());
    return ok ? Status()
              : Status(Code::kUnsupported, "libcurl refuses its option " + std::to_string(refused) +
                                               "; it is " + library_.curl_version());
  }

  // After a try. True: the call has ended; false: it is to be tried again from not_before() on.
  bool End(int result) {
    library_.curl_easy_getinfo(easy, curl::kInfoResponseCode, &code_);
    response().code = static_cast<int>(code_);
    if (!verdict_.ok()) return EndByVerdict();  // Our own functions ended it.
    if (cut_) result = curl::kOk;               // The text of an error was too long.
    if (result != curl::kOk) {
      const bool no_connection =
          result == curl::kNoProxyHost || result == curl::kNoHost || result == curl::kNoConnection;
      return TryAgain(TransferFailure(result), std::nullopt,
                      !no_connection || answered_.contains(Origin(url_)));
    }
    answered_.insert(Origin(url_));
    const int code = response().code;
    if (IsTransient(code)) return TryAgain(HttpFailure(url_, response()), RetryAfter());
    if (IsRedirect(code) && call_->request_.follow_redirects &&
        !response().Header("location").empty()) {
      return Redirect();
    }
    if (!head_checked_) CheckHead();  // An answer without a body.
    if (!verdict_.ok()) return EndByVerdict();
    if (code < 200 || code > 299 || !asked_) return Finish(Status());
    if (response().received < Expected()) {
      return TryAgain(Status(Code::kUnavailable, ShownUrl(url_) + ": the answer was short: " +
                                                     std::to_string(response().received) + " of " +
                                                     std::to_string(Expected()) + " bytes"),
                      std::nullopt);
    }
    return Finish(Status());
  }

  // Ends a call. Returns true.
  bool Finish(Status status) {
    HttpCall& call = *call_;
    {
      const std::lock_guard lock(call.mutex_);
      call.status_ = std::move(status);
      call.ended_.store(true, std::memory_order_release);
    }
    if (call.at_end_) std::exchange(call.at_end_, {})(call);
    call.changed_.notify_all();
    return true;
  }
  // Ends a call that was cancelled or is late. False: neither.
  bool EndIfOver() {
    if (call_->cancelled_.load()) {
      return Finish(Status(Code::kCancelled, ShownUrl(url_) + ": the request was cancelled"));
    }
    if (!call_->deadline_.Passed()) return false;
    std::string text = ShownUrl(url_) + ": no answer in time";
    if (!last_.ok()) text += "; the last failure: " + std::string(last_.message());
    return Finish(Status(Code::kDeadlineExceeded, std::move(text)));
  }

 private:
  static std::string Origin(std::string_view url) {
    const Result<Url> parsed = ParseUrl(url);
    return parsed.ok() ? parsed.value().origin() : std::string();
  }
  static bool IsCredential(std::string_view header) {
    const std::string name = Lowered(header.substr(0, header.find(':')));
    return name == "authorization" || name == "cookie" || name.starts_with("x-amz-");
  }
  HttpResponse& response() { return call_->response_; }
  // Bytes of the range that the object has.
  std::uint64_t Expected() {
    const ByteRange& range = *call_->request_.range;
    const std::uint64_t end = std::min(range.end, response().object_size.value_or(range.end));
    return end > range.begin ? end - range.begin : 0;
  }

  Status TransferFailure(int result) {
    const std::string text =
        ShownUrl(url_) + ": " + (error_[0] != '\0' ? error_ : library_.curl_easy_strerror(result));
    switch (result) {
      case curl::kMalformedUrl:
        return {Code::kInvalidArgument, text};
      case curl::kUnsupportedProtocol:  // Of the answer: ParseUrl has accepted the URL.
        return {Code::kUnsupported, text};
      case curl::kPeerFailedVerification:
      case curl::kCaBadFile:
        return {Code::kPermissionDenied, text};
      default:
        return {Code::kUnavailable, text};
    }
  }

  std::optional<std::chrono::milliseconds> RetryAfter() {
    const auto seconds = ParseNumber(response().Header("retry-after"));
    if (!seconds) return std::nullopt;
    return std::chrono::seconds(std::min<std::uint64_t>(*seconds, 3600));
  }

  bool EndByVerdict() {
    if (wrong_range_ && ++wrong_ranges_ < kMostWrongRanges) {
      return TryAgain(Status(Code::kUnavailable, std::string(verdict_.message())), std::nullopt);
    }
    return Finish(verdict_);
  }

  bool TryAgain(const Status& failure, std::optional<std::chrono::milliseconds> wait,
                bool has_answered = true) {
    last_ = failure;
    // A name with a mistake should not be looked up for half a minute.
    const int most = has_answered ? call_->request_.tries : std::min(call_->request_.tries, 3);
    if (failure.code() != Code::kUnavailable || ++tries_ >= most) {
      return Finish(tries_ > 1 && failure.code() == Code::kUnavailable
                        ? failure.WithMessage(std::string(failure.message()) + " (" +
                                              std::to_string(tries_) + " tries)")
                        : failure);
    }
    if (!wait) {
      static thread_local std::minstd_rand random(std::random_device{}());
      const auto longest = std::min(kFirstWait * (1 << std::min(tries_ - 1, 10)), kLongestBackoff);
      wait = longest / 2 + std::chrono::milliseconds(random() % (longest.count() / 2 + 1));
    }
    not_before_ = Deadline::Clock::now() + *wait;
    if (not_before_ >= call_->deadline_.time()) {
      return Finish(Status(Code::kDeadlineExceeded,
                           std::string(failure.message()) + "; no time for another try"));
    }
    return false;
  }

  bool Redirect() {
    if (response().redirect_headers.empty() || !response().Header("x-linked-etag").empty()) {
      response().redirect_headers = response().headers;
    }
    const Result<Url> from = ParseUrl(url_);
    const Result<Url> to = ResolveRedirect(from.value(), response().Header("location"));
    if (++redirects_ > kMostRedirects) {
      return Finish(Status(Code::kUnavailable, ShownUrl(call_->request_.url) + ": more than " +
                                                   std::to_string(kMostRedirects) + " redirects"));
    }
    if (!to.ok()) return Finish(to.status().WithContext(ShownUrl(url_) + ": redirect"));
    if (from.value().scheme == "https" && to.value().scheme == "http") {
      return Finish(
          Status(Code::kPermissionDenied, ShownUrl(url_) + ": redirects from https to http"));
    }
    if (call_->request_.refuse_directories &&
        PercentDecode(to.value().path) == PercentDecode(from.value().path) + "/") {
      return Finish(Status(Code::kNotFound, ShownUrl(url_) + ": is a directory of the server"));
    }
    url_ = to.value().ToString();
    not_before_ = {};
    return false;
  }

  // Judges the head of an answer before the first byte of its body is taken.
  void CheckHead() {
    head_checked_ = true;
    long code = 0;
    library_.curl_easy_getinfo(easy, curl::kInfoResponseCode, &code);
    const auto refuse = [&](Code kind, const std::string& why) {
      verdict_ = Status(kind, ShownUrl(url_) + ": " + why);
    };
    if (code < 200 || code > 299) return;
    const std::string_view encoding = response().Header("content-encoding");
    if (!encoding.empty() && encoding != "identity") {
      return refuse(Code::kUnsupported, "the server sends the object encoded (" +
                                            std::string(encoding.substr(0, 40)) + ")");
    }
    if (!asked_) return;
    // A range that continues must be of the object whose begin has arrived; servers exist that do
    // not know If-Match, and pools of servers that are not equal.
    std::string version(response().Header("etag"));
    if (version.empty() || version.starts_with("W/")) version = response().Header("last-modified");
    if (asked_->begin == call_->request_.range->begin) {
      version_ = version;
    } else if (version != version_) {
      return refuse(Code::kStale, "the object was replaced while it was read");
    }
    const auto length = ParseNumber(response().Header("content-length"));
    if (code == 206) {
      const auto got = ParseContentRange(response().Header("content-range"));
      wrong_range_ = true;
      if (!got) return refuse(Code::kDataLoss, "an answer of 206 without a valid Content-Range");
      if (got->bytes.begin != asked_->begin || got->bytes.end > asked_->end ||
          (got->bytes.end < asked_->end && got->bytes.end != got->size)) {
        return refuse(Code::kDataLoss,
                      "asked for the bytes " + std::to_string(asked_->begin) + " to " +
                          std::to_string(asked_->end) + ", the server sends " +
                          std::to_string(got->bytes.begin) + " to " +
                          std::to_string(got->bytes.end) + " of " + std::to_string(got->size));
      }
      wrong_range_ = false;
      if (response().object_size && *response().object_size != got->size) {
        return refuse(Code::kStale, "the object was replaced while it was read");
      }
      response().object_size = got->size;
      return;
    }
    // A whole object that fits, from a server that does not know ranges.
    if (asked_->begin == 0 && length && *length <= asked_->end) {
      response().object_size = *length;
      return;
    }
    refuse(Code::kUnsupported,
           "the server ignores the Range header: it sends whole objects only, so that no part of "
           "this one can be read. Use another server (nginx, S3), or copy the file here first");
  }

  static std::size_t OnHeader(char* data, std::size_t size, std::size_t count, void* self) {
    return static_cast<HttpTransfer*>(self)->TakeHeader({data, size * count}) ? size * count : 0;
  }
  static std::size_t OnBody(char* data, std::size_t size, std::size_t count, void* self) {
    return static_cast<HttpTransfer*>(self)->TakeBody({data, size * count}) ? size * count : 0;
  }

  // The type of curl_off_t is that of 64-bit systems.
  static int OnProgress(void* self, std::int64_t, std::int64_t, std::int64_t, std::int64_t sent) {
    static_cast<HttpTransfer*>(self)->TakeProgress(static_cast<std::uint64_t>(sent));
    return 0;
  }

  // Bytes that were sent extend the deadline as those that arrive.
  void TakeProgress(std::uint64_t sent) {
    if (!call_->extends_ || sent < sent_ + kProgressBytes) return;
    sent_ = sent;
    call_->deadline_ = Deadline::After(HttpClient::Patience());
  }

  bool TakeHeader(std::string_view line) {
    header_bytes_ += line.size();
    if (header_bytes_ > kMostHeaderBytes) {
      verdict_ =
          Status(Code::kDataLoss, ShownUrl(url_) + ": the answer has more than 64 KiB of headers");
      return false;
    }
    if (line.starts_with("HTTP/")) {  // Also after "100 Continue".
      response().headers.clear();
      return true;
    }
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos) return true;
    response().headers[Lowered(Trimmed(line.substr(0, colon)))] = Trimmed(line.substr(colon + 1));
    return true;
  }

  bool TakeBody(std::string_view data) {
    if (!head_checked_) CheckHead();
    if (!verdict_.ok()) return false;
    library_.curl_easy_getinfo(easy, curl::kInfoResponseCode, &code_);
    const bool success = code_ >= 200 && code_ <= 299;
    const HttpRequest& request = call_->request_;
    if (success && !request.into.empty()) {
      if (data.size() > request.into.size() - response().received) {
        verdict_ = Status(Code::kDataLoss,
                          ShownUrl(url_) + ": the server sends more than it was asked for");
        return false;
      }
      std::memcpy(request.into.data() + response().received, data.data(), data.size());
      response().received += data.size();
      if (call_->extends_ && response().received - extended_at_ >= kProgressBytes) {
        extended_at_ = response().received;
        call_->deadline_ = Deadline::After(HttpClient::Patience());
      }
      return true;
    }
    // The text of an error is cut; the rest is not needed.
    constexpr std::size_t kErrorText = 16 << 10;
    const std::uint64_t most = success ? request.most_body : kErrorText;
    if (data.size() > most - std::min<std::uint64_t>(most, response().body.size())) {
      cut_ = !success;
      if (!success) {
        response().body.append(data.substr(0, most - response().body.size()));
        return false;
      }
      verdict_ = Status(Code::kDataLoss, ShownUrl(url_) + ": the answer has more than " +
                                             std::to_string(most) + " bytes");
      return false;
    }
    response().body.append(data);
    if (success) response().received += data.size();
    return true;
  }

  const curl::Library& library_;
  const std::shared_ptr<HttpCall> call_;
  std::set<std::string>& answered_;
  std::string url_;  // Of this try: redirects change it.
  curl::List* list_ = nullptr;
  char error_[256] = {};
  long code_ = 0;
  std::size_t header_bytes_ = 0;
  bool begun_ = false;
  bool head_checked_ = false;
  bool wrong_range_ = false;
  int wrong_ranges_ = 0;
  bool cut_ = false;
  std::string version_;  // Of the object whose begin has arrived.
  std::uint64_t extended_at_ = 0;
  std::uint64_t sent_ = 0;  // Of the body in this try, as far as it has extended the deadline.
  Status verdict_;
  std::optional<ByteRange> asked_;
  int tries_ = 0;
  int redirects_ = 0;
  Status last_;
  Deadline::Clock::time_point not_before_{};
};

// The thread and its queue.
class HttpClient::Loop {
 public:
  static Result<std::shared_ptr<Loop>> Make() {
    TENSORMOUNT_ASSIGN_OR_RETURN(const curl::Library* const library, curl::Open());
    auto loop = std::make_shared<Loop>(*library);
    if (loop->multi_ == nullptr || loop->wake_ < 0) {
      return Status(Code::kResourceExhausted, "cannot start the requests of URLs");
    }
    library->curl_multi_setopt(loop->multi_, curl::kMultiMaxConnects,
                               static_cast<long>(2 * kMostOfOrigin));
    // Lives as long as the process: it may be needed during exit.
    Thread([loop] { loop->Work(); }).detach();
    return loop;
  }
  explicit Loop(const curl::Library& library)
      : library_(library),
        multi_(library.curl_multi_init()),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  void Add(std::shared_ptr<HttpCall> call) {
    auto transfer = std::make_unique<HttpTransfer>(library_, std::move(call), answered_);
    {
      const std::lock_guard lock(mutex_);
      arrived_.push_back(std::move(transfer));
    }
    const std::uint64_t one = 1;
    (void)!write(wake_, &one, sizeof(one));
  }

 private:
  struct Origin {
    std::deque<std::unique_ptr<HttpTransfer>> waiting;
    std::size_t active = 0;
  };
  void Work() {
    for (;;) {
      std::uint64_t count = 0;
      (void)!read(wake_, &count, sizeof(count));
      {
        const std::lock_guard lock(mutex_);
        for (auto& transfer : arrived_) {
          std::string origin = transfer->origin();
          origins_[std::move(origin)].waiting.push_back(std::move(transfer));
        }
        arrived_.clear();
      }
      EndThoseThatAreOver();
      BeginSome();
      int running = 0;
      library_.curl_multi_perform(multi_, &running);
      TakeEnded();
      BeginSome();
      curl::WaitDescriptor wake{wake_, curl::kWaitIn, 0};
      const bool idle = origins_.empty();
      // Without work the thread sleeps until it is woken; connections stay open for a while.
      const int wait = idle ? 60'000 : static_cast<int>(kTick.count());
      int ready = 0;
      library_.curl_multi_wait(multi_, &wake, 1, wait, &ready);
    }
  }

  void BeginSome() {
    for (auto at = origins_.begin(); at != origins_.end();) {
      BeginSomeOf(at->first, at->second);
      at =
          at->second.active == 0 && at->second.waiting.empty() ? origins_.erase(at) : std::next(at);
    }
  }
  void BeginSomeOf(const std::string& name, Origin& origin) {
    const auto now = Deadline::Clock::now();
    auto& waiting = origin.waiting;
    for (auto at = waiting.begin();
         at != waiting.end() && origin.active < kMostOfOrigin && active_.size() < kMostActive;) {
      if ((*at)->not_before() > now) {
        ++at;
        continue;
      }
      std::unique_ptr<HttpTransfer> transfer = std::move(*at);
      at = waiting.erase(at);
      transfer->easy = TakeEasy();
      Status begun = transfer->easy == nullptr
                         ? Status(Code::kResourceExhausted, "no memory for a request")
                         : transfer->Begin();
      if (begun.ok() && library_.curl_multi_add_handle(multi_, transfer->easy) != curl::kOk) {
        begun = Status(Code::kResourceExhausted, "libcurl cannot begin a request");
      }
      if (!begun.ok()) {
        GiveBack(*transfer);
        transfer->Finish(std::move(begun));
        continue;
      }
      transfer->counted_as = name;
      ++origin.active;
      active_.push_back(std::move(transfer));
    }
  }

  void TakeEnded() {
    int left = 0;
    while (const curl::Message* const message = library_.curl_multi_info_read(multi_, &left)) {
      if (message->message != curl::kMessageDone) continue;
      const int result = message->data.result;
      const auto at = std::find_if(active_.begin(), active_.end(), [&](const auto& transfer) {
        return transfer->easy == message->easy;
      });
      if (at == active_.end()) continue;
      std::unique_ptr<HttpTransfer> transfer = std::move(*at);
      active_.erase(at);
      --origins_[transfer->counted_as].active;
      library_.curl_multi_remove_handle(multi_, transfer->easy);
      const bool over = transfer->End(result);
      if (result != curl::kOk) {
        // Such a handle may refuse options.
        library_.curl_easy_cleanup(std::exchange(transfer->easy, nullptr));
      }
      GiveBack(*transfer);
      if (over) continue;
      std::string origin = transfer->origin();  // Another one after a redirect.
      origins_[std::move(origin)].waiting.push_front(std::move(transfer));
    }
  }

  void EndThoseThatAreOver() {
    for (auto at = active_.begin(); at != active_.end();) {
      if (!IsOver((*at)->call())) {
        ++at;
        continue;
      }
      // Before its end nobody may write to the caller's memory any more.
      library_.curl_multi_remove_handle(multi_, (*at)->easy);
      GiveBack(**at);
      (*at)->EndIfOver();
      --origins_[(*at)->counted_as].active;
      at = active_.erase(at);
    }
    for (auto& [name, origin] : origins_) {
      auto& waiting = origin.waiting;
      for (auto at = waiting.begin(); at != waiting.end();) {
        at = IsOver((*at)->call()) && (*at)->EndIfOver() ? waiting.erase(at) : at + 1;
      }
    }
  }
  static bool IsOver(const HttpCall& call) {
    return call.cancelled_.load() || call.deadline_.Passed();
  }

  curl::Easy* TakeEasy() {
    if (free_.empty()) return library_.curl_easy_init();
    curl::Easy* const easy = free_.back();
    free_.pop_back();
    return easy;
  }
  void GiveBack(HttpTransfer& transfer) {
    if (transfer.easy == nullptr) return;
    library_.curl_easy_reset(transfer.easy);
    free_.push_back(std::exchange(transfer.easy, nullptr));
  }

  const curl::Library& library_;
  curl::Multi* const multi_;
  const int wake_;
  // Only the thread uses these.
  std::map<std::string, Origin> origins_;  // Those with requests.
  std::deque<std::unique_ptr<HttpTransfer>> active_;
  std::vector<curl::Easy*> free_;
  std::set<std::string> answered_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<HttpTransfer>> arrived_;
};

HttpClient& HttpClient::Get() { return PerProcess<HttpClient>(); }
HttpClient::HttpClient() = default;

std::chrono::milliseconds HttpClient::Patience() {
  const auto seconds = ParseNumber(EnvironmentVariable("TENSORMOUNT_PATIENCE"));
  if (seconds && *seconds > 0 && *seconds <= 86'400) return std::chrono::seconds(*seconds);
  return kDefaultPatience;
}

Result<std::shared_ptr<HttpCall>> HttpClient::Start(HttpRequest request,
                                                    const std::optional<Deadline>& deadline,
                                                    std::function<void(HttpCall&)> at_end) {
  TENSORMOUNT_RETURN_IF_ERROR(ParseUrl(request.url).status());
  if (request.range && request.range->empty()) {
    return Status(Code::kInternal, "a request for no bytes");
  }
  if (!request.into.empty() && (!request.range || request.range->size() != request.into.size())) {
    return Status(Code::kInternal, "a request whose memory has another size than its range");
  }
  std::shared_ptr<Loop> loop;
  {
    const std::lock_guard lock(mutex_);
    if (loop_ == nullptr) {
      TENSORMOUNT_ASSIGN_OR_RETURN(loop_, Loop::Make());
    }
    loop = loop_;
  }
  // A request that waits for its turn is not late.
  auto call = std::make_shared<HttpCall>(
      std::move(request), deadline.value_or(Deadline::After(kLongestWait)), !deadline);
  call->at_end_ = std::move(at_end);
  loop->Add(call);
  return call;
}

Result<std::vector<std::shared_ptr<HttpCall>>> HttpClient::Run(std::vector<HttpRequest> requests,
                                                               const ReadLimits& limits) {
  HttpBatch batch(limits);
  std::vector<std::shared_ptr<HttpCall>> calls;
  for (HttpRequest& request : requests) {
    TENSORMOUNT_RETURN_IF_ERROR(batch.Start(std::move(request)));
  }
  TENSORMOUNT_RETURN_IF_ERROR(batch.Await([&](const std::shared_ptr<HttpCall>& call) {
    calls.push_back(call);
    return Status();
  }));
  return calls;
}

Result<std::shared_ptr<HttpCall>> HttpClient::Run(HttpRequest request, const ReadLimits& limits) {
  std::vector<HttpRequest> requests;
  requests.push_back(std::move(request));
  TENSORMOUNT_ASSIGN_OR_RETURN(auto calls, Run(std::move(requests), limits));
  return calls.front();
}

HttpBatch::~HttpBatch() {
  for (const auto& call : calls_) call->Cancel();
  for (const auto& call : calls_) call->AwaitEnd();
}

Status HttpBatch::Start(HttpRequest request) {
  TENSORMOUNT_ASSIGN_OR_RETURN(std::shared_ptr<HttpCall> call,
                               HttpClient::Get().Start(std::move(request), limits_.deadline));
  calls_.push_back(std::move(call));
  return {};
}

Status HttpBatch::Await(const std::function<Status(const std::shared_ptr<HttpCall>&)>& arrived) {
  for (const auto& call : calls_) {
    // The call itself ends at the deadline, and says what its last try met.
    TENSORMOUNT_RETURN_IF_ERROR(call->Await(ReadLimits{.cancel = limits_.cancel}));
    TENSORMOUNT_RETURN_IF_ERROR(arrived(call));
  }
  calls_.clear();
  return {};
}

Status HttpFailure(std::string_view url, const HttpResponse& response) {
  const std::string text = ShownUrl(url) + ": " + CodeText(response.code);
  switch (response.code) {
    case 401:
    case 403:
      return {Code::kPermissionDenied, text};
    case 404:
    case 410:
      return {Code::kNotFound, text};
    case 412:
      return {Code::kStale, ShownUrl(url) + ": the object was replaced since it was opened"};
    case 416:
      return {Code::kDataLoss, text};
    default:
      return {IsTransient(response.code) ? Code::kUnavailable : Code::kUnsupported, text};
  }
}

}  // namespace tensormount
