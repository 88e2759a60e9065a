// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "fuzz/memory_file.h"
#include "index/archives/zip_archive.h"

using namespace tensormount;

// Entries that were accepted lie in the file, apart from each other.
extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  MemoryFile file({reinterpret_cast<const char*>(data), size});
  const Result<ZipArchive> archive = ZipArchive::Read(file, 0, size);
  if (!archive.ok()) return 0;
  for (const ZipEntry& entry : archive.value().entries()) {
    if (entry.offset > size || entry.size > size - entry.offset) std::abort();
    if (archive.value().Find(entry.name) != &entry) std::abort();
    (void)CheckZipCrc(file, entry);
  }
  return 0;
}
