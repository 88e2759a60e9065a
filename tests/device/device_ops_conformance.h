// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_TESTS_DEVICE_DEVICE_OPS_CONFORMANCE_H_
#define TENSORMOUNT_TESTS_DEVICE_DEVICE_OPS_CONFORMANCE_H_

#include <cstdint>

#include "device/device_ops.h"

namespace tensormount {

// What every device must do (device/device_ops.h), against host references: `cases` random regions
// of random tensors each. The first that is wrong is the status, in words that replay it.

// Strided copies out, in and within, of any rank, with negative steps, several in one submission.
Status CopiesAreExact(DeviceOps& ops, std::uint64_t seed, int cases);
// Transposes of words of every size, of odd numbers of rows and columns, out, in, within and
// hashed.
Status TransposesAreExact(DeviceOps& ops, std::uint64_t seed, int cases);
// Many small copies that begin anywhere, in one submission.
Status SmallCopiesAreExact(DeviceOps& ops, std::uint64_t seed, int cases);
// Of long runs that begin anywhere.
Status LeavesAreThoseOfTheHost(DeviceOps& ops, std::uint64_t seed, int cases);
// Leaf hashes of gathered bytes, and contributions to digests.
Status HashesAreThoseOfTheHost(DeviceOps& ops, std::uint64_t seed, int cases);
// Submissions in order, also over two queues with a mark between them; marks that are reached once
// and stay so; a queue that goes before its work is done.
Status OrderIsKept(DeviceOps& ops, std::uint64_t seed, int cases);

}  // namespace tensormount

#endif  // TENSORMOUNT_TESTS_DEVICE_DEVICE_OPS_CONFORMANCE_H_
