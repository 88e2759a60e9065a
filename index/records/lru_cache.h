// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_INDEX_RECORDS_LRU_CACHE_H_
#define TENSORMOUNT_INDEX_RECORDS_LRU_CACHE_H_

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace tensormount {

// Shared values by key, the least recently used dropped where their weights pass `capacity`; the
// newest always stays. Values live on while somebody holds them. Thread-safe.
// All calls are O(1) expected and hold one mutex for a few pointer moves: values are made by the
// caller before Put and destroyed after the lock is released, so a slow destructor or a failure to
// make one holds up nobody. Two threads that miss at the same time both make the value, and the
// first Put wins. The unit of weights is the caller's; bytes everywhere today.
template <typename Key, typename Value>
class LruCache {
 public:
  explicit LruCache(std::size_t capacity) : capacity_(capacity) {}

  // Null where it is not there.
  // Counts as a use.
  std::shared_ptr<Value> Get(const Key& key) {
    std::lock_guard lock(mutex_);
    const auto it = map_.find(key);
    if (it == map_.end()) return nullptr;
    list_.splice(list_.begin(), list_, it->second);
    return it->second->value;
  }

  // What is in the cache afterwards: `value`, or what somebody else put there meanwhile.
  std::shared_ptr<Value> Put(const Key& key, std::shared_ptr<Value> value, std::size_t weight) {
    std::list<Entry> dropped;  // Outlives the lock, so that values are destroyed outside it.
    std::lock_guard lock(mutex_);
    const auto it = map_.find(key);
    if (it != map_.end()) return it->second->value;
    list_.push_front(Entry{key, value, weight});
    map_.emplace(key, list_.begin());
    weight_ += weight;
    while (weight_ > capacity_ && list_.size() > 1) {
      weight_ -= list_.back().weight;
      map_.erase(list_.back().key);
      dropped.splice(dropped.begin(), list_, std::prev(list_.end()));
    }
    return value;
  }

  // Values that somebody holds stay alive; they are just not found any more. No-op where it may not
  // wait and somebody has the lock.
  void Clear(bool may_wait = true) {
    std::list<Entry> dropped;  // Destroyed outside the lock.
    std::unique_lock lock(mutex_, std::defer_lock);
    if (may_wait) {
      lock.lock();
    } else if (!lock.try_lock()) {
      return;
    }
    map_.clear();
    dropped.swap(list_);
    weight_ = 0;
  }

  // No-op where it is not there.
  void Erase(const Key& key) {
    std::shared_ptr<Value> dropped;  // Destroyed outside the lock.
    std::lock_guard lock(mutex_);
    const auto it = map_.find(key);
    if (it == map_.end()) return;
    dropped = std::move(it->second->value);
    weight_ -= it->second->weight;
    list_.erase(it->second);
    map_.erase(it);
  }

 private:
  struct Entry {
    Key key;
    std::shared_ptr<Value> value;
    std::size_t weight;
  };
  const std::size_t capacity_;
  std::mutex mutex_;
  std::list<Entry> list_;  // Most recently used first.
  std::unordered_map<Key, typename std::list<Entry>::iterator> map_;
  std::size_t weight_ = 0;
};

}  // namespace tensormount

#endif  // TENSORMOUNT_INDEX_RECORDS_LRU_CACHE_H_
