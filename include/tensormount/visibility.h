// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_VISIBILITY_H_
#define TENSORMOUNT_VISIBILITY_H_

// Marks symbols that the shared library exports; all others are hidden. Use it on classes that
// users derive from, catch or name in a signature ("class TENSORMOUNT_EXPORT Name"), and first in
// the declaration of free functions.
#define TENSORMOUNT_EXPORT [[gnu::visibility("default")]]

#endif  // TENSORMOUNT_VISIBILITY_H_
