# SPDX-License-Identifier: Apache-2.0
# How libraries and programs of this tree are declared.

# One precompiled header for all layers and tools: what nearly every file includes. Headers of our
# own do not belong here, a change of one would rebuild everything.
file(WRITE "${PROJECT_BINARY_DIR}/pch.cc.in" "// SPDX-License-Identifier: Apache-2.0\n")
configure_file("${PROJECT_BINARY_DIR}/pch.cc.in" "${PROJECT_BINARY_DIR}/pch.cc" COPYONLY)
set(TENSORMOUNT_STD_HEADERS
  <algorithm> <array> <atomic> <chrono> <compare> <condition_variable> <cstdint> <cstring>
  <deque> <functional> <map> <memory> <mutex> <optional> <set> <span> <string> <string_view>
  <thread> <unordered_map> <utility> <variant> <vector>)
add_library(tensormount_pch OBJECT "${PROJECT_BINARY_DIR}/pch.cc")
target_link_libraries(tensormount_pch PRIVATE tensormount_flags)
target_precompile_headers(tensormount_pch PRIVATE ${TENSORMOUNT_STD_HEADERS})

# What is optimised less cannot use that header: one for SMALL libraries of the optimised build.
if(CMAKE_BUILD_TYPE STREQUAL "RelWithDebInfo")
  add_library(tensormount_small_pch OBJECT "${PROJECT_BINARY_DIR}/pch.cc")
  target_link_libraries(tensormount_small_pch PRIVATE tensormount_flags)
  target_compile_options(tensormount_small_pch PRIVATE -Os)
  target_precompile_headers(tensormount_small_pch PRIVATE ${TENSORMOUNT_STD_HEADERS})
endif()

# What loops over bytes or cells is optimised where nothing else is: tests would spend most of their
# time there. As little as possible: clang takes three times as long to optimise what it instruments.
set(TENSORMOUNT_HOT OFF)
if(CMAKE_BUILD_TYPE STREQUAL "Debug" AND CMAKE_CXX_FLAGS_DEBUG MATCHES "-O0")
  set(TENSORMOUNT_HOT ON)
endif()
# Under sanitizers each test program would have 150 MB of layers in it, and linking them took a tenth of
# such a build.
set(TENSORMOUNT_LAYERS STATIC)
if(TENSORMOUNT_SANITIZE)
  set(TENSORMOUNT_LAYERS SHARED)
endif()

# tensormount_hot_sources(file...): of tests, which are not optimised otherwise. Of the files: what a
# target says comes before what tensormount_test_support asks for.
function(tensormount_hot_sources)
  set_source_files_properties(${ARGN} PROPERTIES
    COMPILE_OPTIONS -O1
    SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# What libFuzzer measures: edges that were reached, and operands of comparisons. Not by
# -fsanitize=fuzzer-no-link, with which no precompiled header made without it can be used.
set(TENSORMOUNT_FUZZ_COVERAGE)
if(TENSORMOUNT_FUZZ)
  set(TENSORMOUNT_FUZZ_COVERAGE -fsanitize-coverage=inline-8bit-counters,pc-table,indirect-calls,trace-cmp)
endif()

# tensormount_add_library(<folder> SOURCES file... [HOT file...] [PUBLIC target...] [PRIVATE target...]
#                         [SMALL] [FUZZED])
# A position-independent library tensormount_<folder> with the alias tensormount::<folder>; static but
# under sanitizers.
# SMALL: what it does is not done often enough for speed to count; the wheel has a limit. FUZZED: fuzz
# targets feed its readers. HOT: sources too, which are optimised where nothing else is; they
# parse nothing that other programs wrote.
function(tensormount_add_library folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SMALL;FUZZED" "" "SOURCES;HOT;PUBLIC;PRIVATE")
  set(hot FALSE)
  if(arg_HOT AND TENSORMOUNT_HOT)
    # lib/ takes the objects of a layer, which those of another library are not among.
    if(TENSORMOUNT_SANITIZE)
      set(hot TRUE)
    else()
      tensormount_hot_sources(${arg_HOT})
    endif()
  endif()
  if(hot)
    # Batches of their own, without the precompiled headers, which were made for -O0.
    add_library(tensormount_${folder}_hot OBJECT ${arg_HOT})
    target_link_libraries(tensormount_${folder}_hot PRIVATE tensormount_flags Threads::Threads ${arg_PUBLIC}
      ${arg_PRIVATE})
    target_compile_options(tensormount_${folder}_hot PRIVATE -O1)
    list(APPEND arg_SOURCES $<TARGET_OBJECTS:tensormount_${folder}_hot>)
  else()
    list(APPEND arg_SOURCES ${arg_HOT})
  endif()
  add_library(tensormount_${folder} ${TENSORMOUNT_LAYERS} ${arg_SOURCES})
  add_library(tensormount::${folder} ALIAS tensormount_${folder})
  target_link_libraries(tensormount_${folder}
    PUBLIC tensormount_flags Threads::Threads ${arg_PUBLIC}
    PRIVATE ${arg_PRIVATE})
  if(TENSORMOUNT_SANITIZE)
    # A layer calls its own copies of inline functions, which are checked for more than those of tests.
    target_link_options(tensormount_${folder} PRIVATE LINKER:-Bsymbolic-functions)
  endif()
  if(arg_FUZZED)
    target_compile_options(tensormount_${folder} PRIVATE ${TENSORMOUNT_FUZZ_COVERAGE})
  endif()
  if(arg_SMALL AND TARGET tensormount_small_pch)
    target_compile_options(tensormount_${folder} PRIVATE -Os)
    target_precompile_headers(tensormount_${folder} REUSE_FROM tensormount_small_pch)
  else()
    target_precompile_headers(tensormount_${folder} REUSE_FROM tensormount_pch)
  endif()
endfunction()

# tensormount_add_executable(<name> SOURCES file... [DEPS target...] [SMALL])
function(tensormount_add_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SMALL" "" "SOURCES;DEPS")
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE tensormount_flags ${arg_DEPS})
  if(arg_SMALL AND TARGET tensormount_small_pch)
    target_compile_options(${name} PRIVATE -Os)
    target_precompile_headers(${name} REUSE_FROM tensormount_small_pch)
  else()
    target_precompile_headers(${name} REUSE_FROM tensormount_pch)
  endif()
endfunction()
