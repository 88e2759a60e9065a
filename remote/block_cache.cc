// SPDX-License-Identifier: Apache-2.0
// Keeps blocks of remote objects, and joins the requests of readers that want the same ones.
#include "remote/block_cache.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

#include "base/per_process.h"

namespace tensormount {

HttpRequest RemoteObject::RequestFor(ByteRange range, std::span<std::byte> into) const {
  if (prepare) prepare();
  HttpRequest request;
  request.url = url;
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
    return Status(Code::kStale, object.path + ": the object was replaced since it was opened");
  };
  if (response.code == 412 || response.code == 404 || response.code == 416) return replaced();
  if (response.code != 206 && response.code != 200) return HttpFailure(object.path, response);
  if (!object.linked_etag.empty()) {
    const auto linked = response.first_headers.find("x-linked-etag");
    if (linked == response.first_headers.end() || linked->second != object.linked_etag) {
      return replaced();
    }
  }
  // Servers exist that do not know If-Match.
  const std::string_view etag = response.Header("etag");
  if (!object.etag.empty() && !etag.empty() && etag != object.etag) return replaced();
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
  // `call` writes to `bytes`.
  ~Request() {
    if (call == nullptr) return;
    call->Cancel();
    (void)call->Await();
  }
};

BlockCache& BlockCache::Get() { return PerProcess<BlockCache>(); }

void BlockCache::Forget(const Key& key) {
  const auto found = blocks_.find(key);
  if (found == blocks_.end()) return;
  by_use_.erase(found->second.used);
  blocks_.erase(found);
}

// Forgets blocks that nobody has used for the longest time, except those on their way. Whether
// there is room now.
bool BlockCache::MakeRoom(std::uint64_t bytes) {
  const std::uint64_t most = kMostBytes / kBlockBytes;
  const std::uint64_t wanted = (bytes + kBlockBytes - 1) / kBlockBytes;
  for (auto at = by_use_.end(); at != by_use_.begin() && blocks_.size() + wanted > most;) {
    --at;
    const auto found = blocks_.find(*at);
    if (!found->second.request->call->ended()) continue;
    at = by_use_.erase(at);
    blocks_.erase(found);
  }
  return blocks_.size() + wanted <= most;
}

Status BlockCache::StartLocked(const std::shared_ptr<const RemoteObject>& object, ByteRange range,
                               bool whatever_the_room,
                               std::vector<std::shared_ptr<Request>>* started) {
  const std::uint64_t end = std::min(range.end, object->size);
  const Deadline deadline = Deadline::After(HttpClient::Patience());
  for (std::uint64_t at = range.begin / kBlockBytes * kBlockBytes; at < end;) {
    if (blocks_.contains({object->number, at / kBlockBytes})) {
      at += kBlockBytes;
      continue;
    }
    ByteRange missing{at, at};
    while (missing.end < end && missing.size() < kRequestBytes &&
           !blocks_.contains({object->number, missing.end / kBlockBytes})) {
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
                                deadline, [this](HttpCall&) { changed_.notify_all(); }));
    for (std::uint64_t b = missing.begin / kBlockBytes; b * kBlockBytes < missing.end; ++b) {
      by_use_.push_front({object->number, b});
      blocks_[{object->number, b}] = {request, by_use_.begin()};
    }
    if (started != nullptr) started->push_back(std::move(request));
  }
  return {};
}

Status BlockCache::Start(const std::shared_ptr<const RemoteObject>& object, ByteRange range,
                         bool wait) {
  std::unique_lock lock(mutex_);
  const Deadline deadline = Deadline::After(HttpClient::Patience());
  while (wait && !MakeRoom(range.size()) && !deadline.Passed()) {
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  }
  return StartLocked(object, range, false, nullptr);
}

bool BlockCache::Has(const RemoteObject& object, std::uint64_t offset) {
  const std::lock_guard lock(mutex_);
  return blocks_.contains({object.number, offset / kBlockBytes});
}

bool BlockCache::HasAll(const RemoteObject& object, ByteRange range) {
  const std::lock_guard lock(mutex_);
  for (std::uint64_t b = range.begin / kBlockBytes; b * kBlockBytes < range.end; ++b) {
    if (!blocks_.contains({object.number, b})) return false;
  }
  return true;
}

Status BlockCache::Read(const std::shared_ptr<const RemoteObject>& object, ByteRange range,
                        std::byte* out, std::uint64_t ahead) {
  // Held from here on: blocks that make room for others of this read stay until it has copied them.
  std::vector<std::shared_ptr<Request>> requests;
  {
    const std::lock_guard lock(mutex_);
    for (std::uint64_t b = range.begin / kBlockBytes; b * kBlockBytes < range.end; ++b) {
      const auto found = blocks_.find({object->number, b});
      if (found == blocks_.end()) continue;
      by_use_.splice(by_use_.begin(), by_use_, found->second.used);
      if (requests.empty() || requests.back() != found->second.request) {
        requests.push_back(found->second.request);
      }
    }
    TENSORMOUNT_RETURN_IF_ERROR(StartLocked(object, range, true, &requests));
    if (ahead > 0) {
      TENSORMOUNT_RETURN_IF_ERROR(
          StartLocked(object, {range.end, range.end + ahead}, false, nullptr));
    }
  }
  for (const std::shared_ptr<Request>& request : requests) {
    Status answered = request->call->Await();
    if (answered.ok()) answered = CheckAnswer(*object, *request->call);
    if (!answered.ok()) {
      // The next read asks anew.
      const std::lock_guard lock(mutex_);
      for (std::uint64_t b = request->range.begin / kBlockBytes;
           b * kBlockBytes < request->range.end; ++b) {
        const auto found = blocks_.find({object->number, b});
        if (found != blocks_.end() && found->second.request == request) {
          Forget({object->number, b});
        }
      }
      return answered;
    }
    const ByteRange part = range.Intersect(request->range);
    std::memcpy(out + (part.begin - range.begin),
                request->bytes.get() + (part.begin - request->range.begin), part.size());
  }
  return {};
}

}  // namespace tensormount
