// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_EXPORT_H_
#define TENSORMOUNT_EXPORT_H_

// Marks what the shared library exports; everything else in it is hidden. On classes that users
// derive from, catch or name in a signature, and on free functions.
#define TENSORMOUNT_EXPORT __attribute__((visibility("default")))

#endif  // TENSORMOUNT_EXPORT_H_
