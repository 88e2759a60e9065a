# SPDX-License-Identifier: Apache-2.0
# Compiler, linker and cache settings shared by every target of the tree.

# One set of code-generation flags for libraries and programs alike: precompiled headers can then
# be shared between all of them (-fPIC against -fPIE would make GCC refuse them).
add_compile_options(-fPIC $<$<COMPILE_LANGUAGE:CXX>:-fvisibility-inlines-hidden>)
# Under sanitizers the layers are libraries of their own, which see each other (tensormount_add_library).
if(NOT TENSORMOUNT_SANITIZE)
  add_compile_options(-fvisibility=hidden)
endif()

find_program(TENSORMOUNT_CCACHE ccache)
mark_as_advanced(TENSORMOUNT_CCACHE)
if(TENSORMOUNT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # The settings are what precompiled headers need; the base folder lets build folders share hits;
  # what a compiler says it read is enough, nothing is preprocessed a second time.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND}" -E env
      "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
      "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1
      "${TENSORMOUNT_CCACHE}")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Garbage is collected from 1 GB on, not from 128 MB: a tenth to a fifth less time.
  add_compile_options(-fpch-preprocess $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1000000>)
else()
  # Times of headers in precompiled ones would never let a compiler cache hit.
  add_compile_options("SHELL:-Xclang -fno-pch-timestamp")
endif()
add_compile_options("-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=")

# Files of one target are compiled some thirty at a time: most of the time goes into headers and into
# templates that all of them use. So names in anonymous namespaces are unique in a folder, and
# definitions do not hang on what a neighbour includes (tests/layering/unity_names.py; a build
# without batches is a part of scripts/test --long).
set(CMAKE_UNITY_BUILD ${TENSORMOUNT_UNITY})
set(CMAKE_UNITY_BUILD_BATCH_SIZE 32)

# The quickest linker that works; the default one otherwise.
include(CheckLinkerFlag)
foreach(linker IN ITEMS mold lld gold)
  if(NOT TENSORMOUNT_LINKER)
    check_linker_flag(CXX "-fuse-ld=${linker}" TENSORMOUNT_HAVE_LINKER_${linker})
    if(TENSORMOUNT_HAVE_LINKER_${linker})
      set(TENSORMOUNT_LINKER ${linker})
      add_link_options("-fuse-ld=${linker}")
    endif()
  endif()
endforeach()

# What nobody calls stays out of what is installed; the wheel has a limit.
if(CMAKE_BUILD_TYPE STREQUAL "RelWithDebInfo")
  add_compile_options(-ffunction-sections -fdata-sections)
  add_link_options(LINKER:--gc-sections)
endif()

if(TENSORMOUNT_SANITIZE)
  add_compile_options("-fsanitize=${TENSORMOUNT_SANITIZE}" -fno-sanitize-recover=all
                      -fno-omit-frame-pointer)
  add_link_options("-fsanitize=${TENSORMOUNT_SANITIZE}")
endif()

# Warnings. An INTERFACE target, so that consumers of the installed library never see them.
add_library(tensormount_flags INTERFACE)
target_compile_options(tensormount_flags INTERFACE
  -Wall -Wextra -Wshadow -Wconversion
  $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor> $<$<COMPILE_LANGUAGE:CXX>:-Woverloaded-virtual>
  -Wno-missing-field-initializers  # Designated initialisers leave out what has a default.
  -Werror=unused-result -Werror=return-type -Winvalid-pch)
if(TENSORMOUNT_WERROR)
  target_compile_options(tensormount_flags INTERFACE -Werror)
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # It compares with names of anonymous namespaces too, which in a batch are those of neighbours. And
  # it sees sign changes that GCC's -Wconversion does not: GCC says what the tree is held to.
  target_compile_options(tensormount_flags INTERFACE -Wno-shadow -Wno-sign-conversion)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 reports these for its own std::string and std::variant once they are inlined.
  target_compile_options(tensormount_flags INTERFACE
    -Wno-restrict -Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-stringop-overread
    -Wno-array-bounds)
  if(TENSORMOUNT_UNITY)
    # A class whose members are of an anonymous namespace is one file's own; in a batch GCC takes
    # its file for a header. The build without batches warns.
    target_compile_options(tensormount_flags INTERFACE
      $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
  endif()
  if(TENSORMOUNT_SANITIZE MATCHES "thread")
    target_compile_options(tensormount_flags INTERFACE -Wno-tsan)
  endif()
endif()
target_include_directories(tensormount_flags INTERFACE
  "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/include")
