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

// Shared values by key. When the weights exceed `capacity`, the least recently used values are
// dropped, but never the newest value. A dropped value lives as long as somebody uses it.
// Thread-safe.
// A call takes O(1) expected time and locks one mutex for a few pointer moves: values are made
// before Put, and destroyed after the lock is released. If two threads miss at the same time, both
// make the value, and the first Put wins. The caller defines the unit of weights.
template <typename Key, typename Value>
class LruCache {
 public:
  explicit LruCache(std::size_t capacity) : capacity_(capacity) {}

  // The value of `key`; null if it is not cached. Counts as a use.
  std::shared_ptr<Value> Get(const Key& key) {
    std::lock_guard lock(mutex_);
    const auto it = map_.find(key);
    if (it == map_.end()) return nullptr;
    list_.splice(list_.begin(), list_, it->second);
    return it->second->value;
  }

  // Adds a value and returns the cached value: `value`, or the value that another thread put
  // before.
  std::shared_ptr<Value> Put(const Key& key, std::shared_ptr<Value> value, std::size_t weight) {
    std::list<Entry> dropped;  // Destroys the values after the lock is released.
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

  // Removes all values; values in use live on. With `may_wait` false, does nothing if another
  // thread has the lock.
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

  // Removes the value of `key`. Does nothing if the value is not cached.
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
