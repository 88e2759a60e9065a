// SPDX-License-Identifier: Apache-2.0
#include "remote/sigv4.h"

#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tensormount {
namespace {

using testing::ElementsAre;
using testing::EndsWith;
using testing::StartsWith;

TEST(Sha256Test, HasTheValuesOfTheStandard) {
  EXPECT_EQ(Hexadecimal(Sha256("")), kEmptySha256);
  EXPECT_EQ(Hexadecimal(Sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Hexadecimal(Sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Hexadecimal(Sha256(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// The padding takes one block or two. The values are those of Python's hashlib.
TEST(Sha256Test, EveryLengthAroundABlock) {
  const std::pair<std::size_t, const char*> kKnown[] = {
      {55, "d5e285683cd4efc02d021a5c62014694958901005d6f71e89e0989fac77e4072"},
      {56, "04c26261370ee7541549d16dee320c723e3fd14671e66a099afe0a377c16888e"},
      {63, "75220b47218278e656f2013bb8f0c455a25eaf01e86c64924e9d48d89776d6f2"},
      {64, "7ce100971f64e7001e8fe5a51973ecdfe1ced42befe7ee8d5fd6219506b5393c"},
      {119, "000b48d4edf0fa7bee3c6236ecd2785baa5db4eeb8bb54341b029e0d9fa5fb0c"},
      {120, "13f05a0b594787f5ecd315edc96141bd3243203d1b7d4f0836f37308b276ba98"},
  };
  for (const auto& [length, digest] : kKnown) {
    EXPECT_EQ(Hexadecimal(Sha256(std::string(length, 'x'))), digest) << length;
  }
}

TEST(Sha256Test, InstructionsGiveTheSame) {
  std::string text;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(Sha256(text), Sha256Portable(text)) << i;
    text += static_cast<char>(i * 37 + i / 256);
  }
}

TEST(Sha256Test, Base64PadsTheLastByte) {
  EXPECT_EQ(Base64(Sha256("")), "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
}

TEST(HmacSha256Test, HasTheValuesOfRfc4231) {
  EXPECT_EQ(Hexadecimal(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(Hexadecimal(HmacSha256(std::string(131, '\xaa'),
                                   "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

// "Examples: Signature calculations in AWS Signature Version 4" of the S3 API reference.
TEST(SignV4Test, SignsAsAmazonsExamples) {
  const AwsCredentials credentials{"AKIAIOSFODNN7EXAMPLE",
                                   "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};
  constexpr std::time_t kMay24 = 1369353600;  // 2013
  const auto sign = [&](const char* url) {
    return SignV4("GET", ParseUrl(url).value(), kEmptySha256, credentials, "us-east-1", "s3",
                  kMay24);
  };
  EXPECT_THAT(sign("https://examplebucket.s3.amazonaws.com/?lifecycle"),
              ElementsAre("x-amz-content-sha256: " + std::string(kEmptySha256),
                          "x-amz-date: 20130524T000000Z",
                          "Authorization: AWS4-HMAC-SHA256 "
                          "Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
                          "SignedHeaders=host;x-amz-content-sha256;x-amz-date, "
                          "Signature="
                          "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"));
  EXPECT_THAT(
      sign("https://examplebucket.s3.amazonaws.com/?prefix=J&max-keys=2").back(),
      EndsWith("Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"));
}

TEST(SignV4Test, SessionTokenIsSigned) {
  const auto headers = SignV4("GET", ParseUrl("https://host/b/k").value(), kEmptySha256,
                              {"A", "S", "T"}, "r", "s3", 0);
  ASSERT_EQ(headers.size(), 4u);
  EXPECT_EQ(headers[2], "x-amz-security-token: T");
  EXPECT_THAT(headers[3], testing::HasSubstr("x-amz-date;x-amz-security-token,"));
  EXPECT_THAT(headers[3],
              StartsWith("Authorization: AWS4-HMAC-SHA256 Credential=A/19700101/r/s3/"));
}

}  // namespace
}  // namespace tensormount
