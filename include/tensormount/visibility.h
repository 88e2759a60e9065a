// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_VISIBILITY_H_
#define TENSORMOUNT_VISIBILITY_H_

// Marks what the shared library exports; everything else in it is hidden. On classes that users
// derive from, catch or name in a signature ("class TENSORMOUNT_EXPORT Name"), and first in the
// declaration of free functions.
#define TENSORMOUNT_EXPORT [[gnu::visibility("default")]]

#endif  // TENSORMOUNT_VISIBILITY_H_
