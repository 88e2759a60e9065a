// SPDX-License-Identifier: Apache-2.0
// Keeps blocks of remote objects, and joins the requests of readers that want the same ones.
#include "remote/block_cache.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <optional>

#include "base/cancel_scope.h"
#include "base/per_process.h"

namespace tensormount {

namespace {

std::atomic<std::int64_t> last_replaced{0};

}  // namespace

void ForgetWhatIsKnown() {
  last_replaced = std::chrono::steady_clock::now().time_since_epoch().count();
}

bool IsForgotten(std::chrono::steady_clock::time_point when) {
  return when.time_since_epoch().count() <= last_replaced.load();
}

HttpRequest RemoteObject::RequestFor(ByteRange range, std::span<std::byte> into) const {
  HttpRequest request;
  request.url = url;
  request.follow_redirects = follow_redirects;
  request.headers = headers;
  request.sign = sign;
  request.range = range;
  request.into = into;
  if (!etag.empty()) {
    request.headers.push_back("If-Match: " + etag);
  } else if (!last_modified.empty()) {
    request.headers.push_back("If-Unmodified-Since: " + last_modified);
  }
  return request;
}

Status CheckAnswer(const RemoteObject& object, const HttpCall& call) {
  const HttpResponse& response = call.response();
  const auto replaced = [&] {
    ForgetWhatIsKnown();
    return Status(Code::kStale, object.path + ": the object was replaced since it was opened");
  };
  if (response.code == 412 || response.code == 404 || response.code == 416) return replaced();
  if (response.code != 206 && response.code != 200) return HttpFailure(object.path, response);
  if (!object.linked_etag.empty()) {
    const auto linked = response.redirect_headers.find("x-linked-etag");
    if (linked == response.redirect_headers.end() || linked->second != object.linked_etag) {
      return replaced();
    }
  }
  // Servers exist that do not know If-Match.
  const std::string_view etag = response.Header("etag");
  if (!object.etag.empty() && etag != object.etag) return replaced();
  if (object.etag.empty() && !object.last_modified.empty() &&
      response.Header("last-modified") != object.last_modified) {
    return replaced();
  }
  if (response.object_size.value_or(object.size) != object.size) return replaced();
  if (response.received != call.request().range->size()) {
    return {Code::kDataLoss, object.path + ": the server sent too little"};
  }
  return {};
}

struct BlockCache::Request {
  std::shared_ptr<const RemoteObject> object;
  ByteRange range;
  std::unique_ptr<std::byte[]> bytes;  // NOLINT(*-avoid-c-arrays)
  std::shared_ptr<HttpCall> call;
  std::list<std::shared_ptr<Request>>::iterator used;
  std::atomic<bool> kept{false};  // Whether it was given to the cache on disk.
  // `call` writes to `bytes`.
  ~Request() {
    if (call == nullptr) return;
    call->Cancel();
    call->AwaitEnd();
  }
};

BlockCache& BlockCache::Get() { return PerProcess<BlockCache>(); }

void BlockCache::Forget(const std::shared_ptr<Request>& request) {
  const std::shared_ptr<Request> held = request;
  bool known = false;
  for (std::uint64_t b = held->range.begin / kBlockBytes; b * kBlockBytes < held->range.end; ++b) {
    const auto found = blocks_.find({held->object->number, b});
    if (found == blocks_.end() || found->second != held) continue;
    blocks_.erase(found);
    known = true;
  }
  if (!known) return;
  by_use_.erase(held->used);
  bytes_ -= held->range.size();
}

std::shared_ptr<BlockCache::Request> BlockCache::Find(const Key& key) {
  const auto found = blocks_.find(key);
  if (found == blocks_.end()) return nullptr;
  const HttpCall& call = *found->second->call;
  const bool good = !call.ended() ||
                    (!call.failed() && call.response().code >= 200 && call.response().code <= 299);
  if (good) return found->second;
  Forget(found->second);
  return nullptr;
}

// Forgets what nobody has used for the longest time, except what is on its way. Whether there is
// room now.
bool BlockCache::MakeRoom(std::uint64_t bytes) {
  for (auto at = by_use_.end(); at != by_use_.begin() && bytes_ + bytes > kMostBytes;) {
    --at;
    if (!(*at)->call->ended()) continue;
    const auto next = std::next(at);
    Forget(*at);
    at = next;
  }
  return bytes_ + bytes <= kMostBytes;
}

Status BlockCache::StartLocked(const std::shared_ptr<const RemoteObject>& object, ByteRange range,
                               bool whatever_the_room,
                               std::vector<std::shared_ptr<Request>>* started) {
  const std::uint64_t end = std::min(range.end, object->size);
  for (std::uint64_t at = range.begin / kBlockBytes * kBlockBytes; at < end;) {
    const auto is_missing = [&](std::uint64_t offset) {
      return Find({object->number, offset / kBlockBytes}) == nullptr;
    };
    if (!is_missing(at)) {
      at += kBlockBytes;
      continue;
    }
    ByteRange missing{at, at};
    while (missing.end < end && missing.size() < kRequestBytes && is_missing(missing.end)) {
      missing.end += kBlockBytes;
    }
    at = missing.end;
    missing.end = std::min(missing.end, object->size);
    if (!MakeRoom(missing.size()) && !whatever_the_room) return {};
    auto request = std::make_shared<Request>();
    request->object = object;
    request->range = missing;
    request->bytes.reset(new std::byte[missing.size()]);
    TENSORMOUNT_ASSIGN_OR_RETURN(
        request->call,
        HttpClient::Get().Start(object->RequestFor(missing, {request->bytes.get(), missing.size()}),
                                std::nullopt, [this](HttpCall&) { changed_.notify_all(); }));
    by_use_.push_front(request);
    request->used = by_use_.begin();
    bytes_ += missing.size();
    for (std::uint64_t b = missing.begin / kBlockBytes; b * kBlockBytes < missing.end; ++b) {
      blocks_[{object->number, b}] = request;
    }
    if (started != nullptr) started->push_back(std::move(request));
  }
  return {};
}

Status BlockCache::Start(const std::shared_ptr<const RemoteObject>& object, ByteRange range,
                         bool wait) {
  if (object->prepare) object->prepare();
  std::unique_lock lock(mutex_);
  const Deadline deadline = Deadline::After(HttpClient::Patience());
  const std::uint64_t most = std::min(range.size(), kMostBytes / 2);
  while (wait && !MakeRoom(most) && !deadline.Passed() && !CancelScope::IsCancelled()) {
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  }
  return StartLocked(object, range, false, nullptr);
}

bool BlockCache::HasAll(const RemoteObject& object, ByteRange range) {
  const std::lock_guard lock(mutex_);
  for (std::uint64_t b = range.begin / kBlockBytes; b * kBlockBytes < range.end; ++b) {
    if (Find({object.number, b}) == nullptr) return false;
  }
  return true;
}

Status BlockCache::Read(const std::shared_ptr<const RemoteObject>& object, ByteRange range,
                        std::byte* out, std::uint64_t ahead, const ReadLimits& limits) {
  if (object->prepare) object->prepare();
  // Held from here on: what makes room for other blocks of this read stays until it is copied.
  std::vector<std::shared_ptr<Request>> requests;
  // Adds the requests of others for blocks of `part`.
  const auto join = [&](ByteRange part) {
    for (std::uint64_t b = part.begin / kBlockBytes; b * kBlockBytes < part.end; ++b) {
      std::shared_ptr<Request> found = Find({object->number, b});
      if (found == nullptr || (!requests.empty() && requests.back() == found)) continue;
      by_use_.splice(by_use_.begin(), by_use_, found->used);
      requests.push_back(std::move(found));
    }
  };
  std::vector<bool> copied(
      range.empty() ? 0 : (range.end - 1) / kBlockBytes - range.begin / kBlockBytes + 1);
  std::size_t earlier = 0;  // So many of them were begun by others.
  {
    const std::lock_guard lock(mutex_);
    join(range);
    earlier = requests.size();
    TENSORMOUNT_RETURN_IF_ERROR(StartLocked(object, range, true, &requests));
    if (ahead > 0) {
      TENSORMOUNT_RETURN_IF_ERROR(
          StartLocked(object, {range.end, range.end + ahead}, false, nullptr));
    }
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::shared_ptr<Request> request = requests[i];
    const Status arrived = request->call->Await(limits);
    if (!arrived.ok() && !request->call->ended()) return arrived;  // The limits.
    const Status answered = arrived.ok() ? CheckAnswer(*object, *request->call) : arrived;
    if (!answered.ok()) {
      const std::lock_guard lock(mutex_);
      Forget(request);  // The next read asks anew.
      if (i >= earlier || answered.code() == Code::kStale) return answered;
      // Somebody asked for it before, perhaps when the server was not well. Another reader that
      // shared the request may have asked anew already: its request is joined.
      const ByteRange again = range.Intersect(request->range);
      join(again);
      TENSORMOUNT_RETURN_IF_ERROR(StartLocked(object, again, true, &requests));
      continue;
    }
    if (object->disk != nullptr && !request->kept.exchange(true)) {
      object->disk->Keep(request->range, request->bytes.get(), request);
    }
    const ByteRange part = range.Intersect(request->range);
    std::memcpy(out + (part.begin - range.begin),
                request->bytes.get() + (part.begin - request->range.begin), part.size());
    for (std::uint64_t b = part.begin / kBlockBytes; b * kBlockBytes < part.end; ++b) {
      copied[b - range.begin / kBlockBytes] = true;
    }
  }
  if (std::find(copied.begin(), copied.end(), false) != copied.end()) {
    return {Code::kInternal, object->path + ": a block was neither read nor refused"};
  }
  return {};
}

}  // namespace tensormount
