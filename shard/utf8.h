// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_SHARD_UTF8_H_
#define TENSORMOUNT_SHARD_UTF8_H_

#include <string_view>

namespace tensormount {

// Whether `text` is well-formed UTF-8 (Unicode 15, table 3-7: no overlong forms, no surrogates,
// nothing past U+10FFFF). NUL is well-formed; CheckKey refuses it for keys. Strict, because
// programs that decode a malformed key differently would disagree about the keys.
bool IsUtf8(std::string_view text);

}  // namespace tensormount

#endif  // TENSORMOUNT_SHARD_UTF8_H_
