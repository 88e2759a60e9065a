// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "fuzz/memory_file.h"
#include "fuzz/walk.h"
#include "index/archives/torch_archive.h"

using namespace tensormount;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  MemoryFile file({reinterpret_cast<const char*>(data), size});
  const auto check = [&](const Result<StoredTensor>& tensor) {
    if (!tensor.ok()) return;
    const StoredTensor& t = tensor.value();
    if (t.offset > size || t.length > size - t.offset) std::abort();
  };
  check(ReadTorchItem(file, 0, size));
  const Result<std::string> text = DescribeObject(file, 0, size);
  if (text.ok() && text.value().empty()) std::abort();
  const Result<TorchArchive> archive = TorchArchive::Read(file, 0, size);
  if (!archive.ok()) return 0;
  const pickle::Value root = archive.value().document().root();
  int left = 500;
  Walk(root, 0, left);
  if (root.kind() == pickle::Kind::kDict) {
    for (std::size_t i = 0; i < root.size() && i < 100; ++i) {
      if (TorchArchive::IsTensor(root.item(i))) check(archive.value().TensorOf(root.item(i)));
    }
  }
  return 0;
}
