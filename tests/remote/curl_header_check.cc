// SPDX-License-Identifier: Apache-2.0
// Compares remote/curl_library.h with libcurl's own header, at compile time.
#define CURL_DISABLE_DEPRECATION
#define CURL_DISABLE_TYPECHECK
#include <cstddef>

#include <curl/curl.h>

#include "remote/curl_library.h"

namespace ours = tensormount::curl;

static_assert(ours::kWriteData == CURLOPT_WRITEDATA);
static_assert(ours::kUrl == CURLOPT_URL);
static_assert(ours::kErrorBuffer == CURLOPT_ERRORBUFFER);
static_assert(ours::kPostFields == CURLOPT_POSTFIELDS);
static_assert(ours::kUserAgent == CURLOPT_USERAGENT);
static_assert(ours::kLowSpeedLimit == CURLOPT_LOW_SPEED_LIMIT);
static_assert(ours::kLowSpeedTime == CURLOPT_LOW_SPEED_TIME);
static_assert(ours::kHttpHeader == CURLOPT_HTTPHEADER);
static_assert(ours::kHeaderData == CURLOPT_HEADERDATA);
static_assert(ours::kCustomRequest == CURLOPT_CUSTOMREQUEST);
static_assert(ours::kNoBody == CURLOPT_NOBODY);
static_assert(ours::kFollowLocation == CURLOPT_FOLLOWLOCATION);
static_assert(ours::kCaInfo == CURLOPT_CAINFO);
static_assert(ours::kHttpGet == CURLOPT_HTTPGET);
static_assert(ours::kHttpVersion == CURLOPT_HTTP_VERSION);
static_assert(ours::kBufferSize == CURLOPT_BUFFERSIZE);
static_assert(ours::kNoSignal == CURLOPT_NOSIGNAL);
static_assert(ours::kPrivate == CURLOPT_PRIVATE);
static_assert(ours::kConnectTimeoutMs == CURLOPT_CONNECTTIMEOUT_MS);
static_assert(ours::kProtocols == CURLOPT_PROTOCOLS);
static_assert(ours::kTcpKeepAlive == CURLOPT_TCP_KEEPALIVE);
static_assert(ours::kPathAsIs == CURLOPT_PATH_AS_IS);
static_assert(ours::kWriteFunction == CURLOPT_WRITEFUNCTION);
static_assert(ours::kHeaderFunction == CURLOPT_HEADERFUNCTION);
static_assert(ours::kPostFieldSizeLarge == CURLOPT_POSTFIELDSIZE_LARGE);
static_assert(ours::kNoProxy == CURLOPT_NOPROXY);
static_assert(ours::kNoProgress == CURLOPT_NOPROGRESS);
static_assert(ours::kProgressData == CURLOPT_XFERINFODATA);
static_assert(ours::kProgressFunction == CURLOPT_XFERINFOFUNCTION);
static_assert(sizeof(curl_off_t) == sizeof(std::int64_t));
#if LIBCURL_VERSION_NUM >= 0x075700
static_assert(ours::kQuickExit == CURLOPT_QUICK_EXIT);
#endif
static_assert(ours::kHttpVersion11 == CURL_HTTP_VERSION_1_1);
static_assert(ours::kProtocolHttp == CURLPROTO_HTTP);
static_assert(ours::kProtocolHttps == CURLPROTO_HTTPS);
static_assert(ours::kInfoPrivate == CURLINFO_PRIVATE);
static_assert(ours::kInfoResponseCode == CURLINFO_RESPONSE_CODE);
static_assert(ours::kOk == CURLE_OK);
static_assert(ours::kUnsupportedProtocol == CURLE_UNSUPPORTED_PROTOCOL);
static_assert(ours::kMalformedUrl == CURLE_URL_MALFORMAT);
static_assert(ours::kNoProxyHost == CURLE_COULDNT_RESOLVE_PROXY);
static_assert(ours::kNoHost == CURLE_COULDNT_RESOLVE_HOST);
static_assert(ours::kNoConnection == CURLE_COULDNT_CONNECT);
static_assert(ours::kWriteError == CURLE_WRITE_ERROR);
static_assert(ours::kPeerFailedVerification == CURLE_PEER_FAILED_VERIFICATION);
static_assert(ours::kCaBadFile == CURLE_SSL_CACERT_BADFILE);
static_assert(ours::kMultiMaxConnects == CURLMOPT_MAXCONNECTS);
static_assert(ours::kMessageDone == CURLMSG_DONE);
static_assert(ours::kWaitIn == CURL_WAIT_POLLIN);
static_assert(ours::kGlobalDefault == CURL_GLOBAL_DEFAULT);
static_assert(sizeof(ours::Message) == sizeof(CURLMsg));
static_assert(offsetof(ours::Message, easy) == offsetof(CURLMsg, easy_handle));
static_assert(offsetof(ours::Message, data) == offsetof(CURLMsg, data));
static_assert(sizeof(ours::WaitDescriptor) == sizeof(curl_waitfd));
static_assert(offsetof(ours::WaitDescriptor, events) == offsetof(curl_waitfd, events));
static_assert(sizeof(curl_off_t) == 8);
