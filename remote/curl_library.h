// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_CURL_LIBRARY_H_
#define TENSORMOUNT_REMOTE_CURL_LIBRARY_H_

#include "tensormount/status.h"

// libcurl, opened at run time, so that neither the library nor the wheel needs it for local files.
// The numbers are those of curl/curl.h and curl/multi.h, which never change
// (tests/remote/curl_header_check.cc).

namespace tensormount::curl {

// Options of a transfer: the base number of the type and the number of the option.
inline constexpr int kWriteData = 10001;
inline constexpr int kUrl = 10002;
inline constexpr int kErrorBuffer = 10010;
inline constexpr int kPostFields = 10015;
inline constexpr int kUserAgent = 10018;
inline constexpr int kLowSpeedLimit = 19;
inline constexpr int kLowSpeedTime = 20;
inline constexpr int kHttpHeader = 10023;
inline constexpr int kHeaderData = 10029;
inline constexpr int kCustomRequest = 10036;
inline constexpr int kNoBody = 44;
inline constexpr int kFollowLocation = 52;
inline constexpr int kCaInfo = 10065;
inline constexpr int kHttpGet = 80;
inline constexpr int kHttpVersion = 84;
inline constexpr int kBufferSize = 98;
inline constexpr int kNoSignal = 99;
inline constexpr int kPrivate = 10103;
inline constexpr int kConnectTimeoutMs = 156;
inline constexpr int kProtocols = 181;
inline constexpr int kTcpKeepAlive = 213;
inline constexpr int kPathAsIs = 234;
inline constexpr int kWriteFunction = 20011;
inline constexpr int kHeaderFunction = 20079;
inline constexpr int kPostFieldSizeLarge = 30120;
inline constexpr int kNoProxy = 10177;
inline constexpr int kNoProgress = 43;
inline constexpr int kProgressData = 10057;
inline constexpr int kProgressFunction = 20219;
inline constexpr int kQuickExit = 322;  // Since 7.87.

inline constexpr long kHttpVersion11 = 2;
inline constexpr long kProtocolHttp = 1;
inline constexpr long kProtocolHttps = 2;

inline constexpr int kInfoPrivate = 0x100000 + 21;
inline constexpr int kInfoResponseCode = 0x200000 + 2;

// Results of a transfer.
inline constexpr int kOk = 0;
inline constexpr int kUnsupportedProtocol = 1;
inline constexpr int kMalformedUrl = 3;
inline constexpr int kNoProxyHost = 5;
inline constexpr int kNoHost = 6;
inline constexpr int kNoConnection = 7;
inline constexpr int kWriteError = 23;
inline constexpr int kPeerFailedVerification = 60;
inline constexpr int kCaBadFile = 77;

inline constexpr int kMultiMaxConnects = 6;
inline constexpr int kMessageDone = 1;
inline constexpr short kWaitIn = 1;
inline constexpr long kGlobalDefault = 3;

struct Easy;
struct Multi;
struct List;

struct Message {
  int message;
  Easy* easy;
  union {
    void* whatever;
    int result;
  } data;
};
struct WaitDescriptor {
  int fd;
  short events;
  short revents;
};

// X(name, result, (parameters)).
#define TENSORMOUNT_CURL_FUNCTIONS(X)                                                     \
  X(curl_global_init, int, (long flags))                                                  \
  X(curl_easy_init, Easy*, ())                                                            \
  X(curl_easy_cleanup, void, (Easy * easy))                                               \
  X(curl_easy_reset, void, (Easy * easy))                                                 \
  X(curl_easy_setopt, int, (Easy * easy, int option, ...))                                \
  X(curl_easy_getinfo, int, (Easy * easy, int info, ...))                                 \
  X(curl_easy_strerror, const char*, (int code))                                          \
  X(curl_slist_append, List*, (List * list, const char* text))                            \
  X(curl_slist_free_all, void, (List * list))                                             \
  X(curl_multi_init, Multi*, ())                                                          \
  X(curl_multi_setopt, int, (Multi * multi, int option, ...))                             \
  X(curl_multi_add_handle, int, (Multi * multi, Easy * easy))                             \
  X(curl_multi_remove_handle, int, (Multi * multi, Easy * easy))                          \
  X(curl_multi_perform, int, (Multi * multi, int* running))                               \
  X(curl_multi_wait, int,                                                                 \
    (Multi * multi, WaitDescriptor * extra, unsigned count, int timeout_ms, int* numfds)) \
  X(curl_multi_info_read, Message*, (Multi * multi, int* left))                           \
  X(curl_version, char*, ())

struct Library {
#define TENSORMOUNT_DECLARE(name, result, parameters) result(*name) parameters = nullptr;
  TENSORMOUNT_CURL_FUNCTIONS(TENSORMOUNT_DECLARE)
#undef TENSORMOUNT_DECLARE
  // Certificates to trust, for a library that does not know those of the system; null: it does.
  const char* ca_file = nullptr;
};

// The library, which stays open; opened and initialised at the first call. TENSORMOUNT_LIBCURL
// names another file, TENSORMOUNT_LIBCURL_ELSE one for systems that have none. kUnsupported, with the names of the packages: there is none. Thread-safe.
Result<const Library*> Open();

}  // namespace tensormount::curl

#endif  // TENSORMOUNT_REMOTE_CURL_LIBRARY_H_
