// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_URL_H_
#define TENSORMOUNT_REMOTE_URL_H_

#include <string>
#include <string_view>

#include "tensormount/status.h"

namespace tensormount {

// The parts of an http or https URL. `host` has the port, if the URL has one.
struct Url {
  std::string scheme;  // "https", in lower case.
  std::string host;
  std::string path;   // Begins with '/'.
  std::string query;  // Without '?'; empty: none.

  std::string ToString() const;
  // Scheme and host: credentials are for these.
  std::string origin() const { return scheme + "://" + host; }
};

// kInvalidArgument: no such URL, or one with a user name or password, which would be shown in
// messages.
Result<Url> ParseUrl(std::string_view text);

// `location`, the target of a redirect, absolute or relative to `from`.
Result<Url> ResolveRedirect(const Url& from, std::string_view location);

// Encodes every byte but letters, digits and "-._~", and '/' if `keep_slashes`.
std::string PercentEncode(std::string_view text, bool keep_slashes);
std::string PercentDecode(std::string_view text);
// Encodes what may not be in the path of a URL; "%41" stays.
std::string EncodeIllegal(std::string_view path);

// For messages: without the query, which may be a credential (a URL that was signed beforehand).
std::string ShownUrl(std::string_view url);

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_URL_H_
