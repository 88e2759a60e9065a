// SPDX-License-Identifier: Apache-2.0
// The old name of visibility.h, until 0.2.
#ifndef TENSORMOUNT_EXPORT_H_
#define TENSORMOUNT_EXPORT_H_

#include "tensormount/visibility.h"

#endif  // TENSORMOUNT_EXPORT_H_
