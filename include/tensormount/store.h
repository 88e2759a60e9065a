// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_STORE_H_
#define TENSORMOUNT_STORE_H_

namespace tensormount {

// What happens to a save where STORE/NAME exists. kReplace: an exchange at commit; a save that
// fails leaves the old checkpoint as it was.
// kFail: the save is refused with kAlreadyExists on every rank.
enum class IfExists { kFail, kReplace };

}  // namespace tensormount

#endif  // TENSORMOUNT_STORE_H_
