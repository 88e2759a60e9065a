// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_BASE_FETCH_PAGES_H_
#define TENSORMOUNT_BASE_FETCH_PAGES_H_

#include <cstdint>
#include <optional>

namespace tensormount {

// The unit of FetchPages: the size of a huge page. It is read whole, even if one byte is wanted.
inline constexpr std::uint64_t kFetchUnitBytes = std::uint64_t{2} << 20;

// Brings bytes of a file from storage into the page cache, in huge pages if its filesystem has
// them. `begin` is a multiple of kFetchUnitBytes. Waits for storage. Beside a read into a buffer
// this takes a tenth of the CPU time, and asks slow storage for larger pieces (docs/performance.md,
// "From storage").
// False if nothing was fetched: the kernel is older than Linux 5.18 or has huge pages of another
// size, the file system is not one of those that are known to work so, the file cannot be mapped,
// or storage failed. What was fetched of the unit is then dropped, so that reads of its intact
// bytes succeed.
bool FetchPages(int fd, std::uint64_t begin, std::uint64_t size);

// Whether the page of a file that has this byte is in the page cache; nullopt if that is unknown.
// True for every page of a file that the process neither owns nor may write.
std::optional<bool> IsPageCached(int fd, std::uint64_t offset);

}  // namespace tensormount

#endif  // TENSORMOUNT_BASE_FETCH_PAGES_H_
