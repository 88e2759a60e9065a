# SPDX-License-Identifier: Apache-2.0
# Writes a C++ source with the texts of files, so that the library needs no data files at run time.
#   cmake -DOUTPUT=FILE -DHEADER=FILE -DSTRUCT=NAME -DFUNCTION=NAME "-DFILES=a;b" -P EmbedFiles.cmake
# The source defines `std::span<const STRUCT> FUNCTION()` in namespace tensormount; STRUCT, which
# HEADER declares, has the name of a file and its text.
set(entries "")
foreach(file IN LISTS FILES)
  file(READ "${file}" text)
  get_filename_component(name "${file}" NAME)
  string(APPEND entries "    {\"${name}\", R\"text(${text})text\"},\n")
endforeach()
file(WRITE "${OUTPUT}" "// Made by cmake/EmbedFiles.cmake.
#include \"${HEADER}\"

namespace tensormount {

std::span<const ${STRUCT}> ${FUNCTION}() {
  static constexpr ${STRUCT} kFiles[] = {
${entries}  };
  return kFiles;
}

}  // namespace tensormount
")
