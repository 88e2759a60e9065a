// SPDX-License-Identifier: Apache-2.0
#include "index/foreign/dcp_metadata.h"
#include "index/foreign/foreign.h"

using namespace tensormount;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  OmissionCounter left_out;
  const auto metadata =
      ParseDcpMetadata(std::string(reinterpret_cast<const char*>(data), size), left_out);
  if (!metadata.ok()) return 0;
  for (const DcpTensor& tensor : metadata.value().tensors) {
    for (std::size_t i = 0; i < tensor.count; ++i) {
      (void)metadata.value().Offsets(tensor, i);
      (void)metadata.value().Sizes(tensor, i);
    }
  }
  return 0;
}
