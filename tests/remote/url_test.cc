// SPDX-License-Identifier: Apache-2.0
#include "remote/url.h"

#include <string>

#include "remote/xml_text.h"
#include "tests/support/status_matchers.h"

namespace tensormount {
namespace {

TEST(UrlTest, PartsAreFound) {
  ASSERT_OK_AND_ASSIGN(const Url url, ParseUrl("HTTPS://host:8080/a b/%41?sig=x/y#part"));
  EXPECT_EQ(url.origin(), "https://host:8080");
  EXPECT_EQ(url.path, "/a%20b/%41");
  EXPECT_EQ(url.query, "sig=x/y");
  EXPECT_EQ(url.ToString(), "https://host:8080/a%20b/%41?sig=x/y");
  EXPECT_EQ(ParseUrl("http://[::1]:81").value().ToString(), "http://[::1]:81/");
  // As in the header Host, which a signature covers.
  EXPECT_EQ(ParseUrl("http://h:80/").value().host, "h");
  EXPECT_EQ(ParseUrl("https://h:443/").value().host, "h");
  EXPECT_EQ(ParseUrl("https://h:80/").value().host, "h:80");
}

TEST(UrlTest, OthersAreRefused) {
  EXPECT_THAT(ParseUrl("ftp://host/x"), HasMessage("neither http"));
  EXPECT_THAT(ParseUrl("file:///etc/passwd"), HasMessage("neither http"));
  EXPECT_THAT(ParseUrl("https:///x"), HasMessage("no host"));
  EXPECT_THAT(ParseUrl("https://a\nb/x"), HasMessage("malformed"));
  EXPECT_THAT(ParseUrl("https://a:99999/x"), HasMessage("port"));
  // The message does not have the password.
  const Status with_password = ParseUrl("https://me:secret@host/x").status();
  EXPECT_EQ(with_password.code(), Code::kInvalidArgument);
  EXPECT_EQ(with_password.message().find("secret"), std::string::npos);
}

TEST(UrlTest, RedirectsAreResolved) {
  const Url from = ParseUrl("https://a/x/y?q").value();
  EXPECT_EQ(ResolveRedirect(from, "z").value().ToString(), "https://a/x/z");
  EXPECT_EQ(ResolveRedirect(from, "/z?r").value().ToString(), "https://a/z?r");
  EXPECT_EQ(ResolveRedirect(from, "//b/z").value().ToString(), "https://b/z");
  EXPECT_EQ(ResolveRedirect(from, "http://b/z").value().ToString(), "http://b/z");
  EXPECT_THAT(ResolveRedirect(from, "file:///z"), HasCode(Code::kInvalidArgument));
  EXPECT_EQ(ResolveRedirect(from, "/z?next=http://b/").value().ToString(),
            "https://a/z?next=http://b/");
}

TEST(UrlTest, NamesAreEncoded) {
  EXPECT_EQ(PercentEncode("a/b c+\xC3\xA4%", true), "a/b%20c%2B%C3%A4%25");
  EXPECT_EQ(PercentEncode("a/b", false), "a%2Fb");
  EXPECT_EQ(PercentDecode("a%2Fb%zz%4"), "a/b%zz%4");
  EXPECT_EQ(EncodeIllegal("/50%/%41 \x7f"), "/50%25/%41%20%7F");
}

TEST(UrlTest, MessagesHaveNoSecrets) {
  EXPECT_EQ(ShownUrl("https://h/x?X-Amz-Signature=1"), "https://h/x");
  EXPECT_EQ(ShownUrl("https://me:pass@h/x@y"), "https://h/x@y");
}

TEST(XmlTextTest, ReadsFlatAnswers) {
  const std::string xml = "<R><Key>a&amp;b &lt;x&gt;</Key><Key>c</Key><Empty/></R>";
  EXPECT_EQ(XmlText(xml, "Key"), "a&b <x>");
  EXPECT_EQ(XmlElements(xml, "Key").size(), 2u);
  EXPECT_EQ(XmlText(xml, "Missing"), "");
  EXPECT_TRUE(XmlElements("<Key>open", "Key").empty());
}

}  // namespace
}  // namespace tensormount
