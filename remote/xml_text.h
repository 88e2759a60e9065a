// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_XML_TEXT_H_
#define TENSORMOUNT_REMOTE_XML_TEXT_H_

#include <string>
#include <string_view>
#include <vector>

namespace tensormount {

// The text of the first element <name>; entities are resolved. Empty: there is none. Only for the
// flat answers of S3 and STS: attributes of the element, comments and CDATA are not supported.
std::string XmlText(std::string_view xml, std::string_view name);
// The insides of all elements <name>, as XML.
std::vector<std::string_view> XmlElements(std::string_view xml, std::string_view name);

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_XML_TEXT_H_
