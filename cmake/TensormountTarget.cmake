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

# What loops over bytes: not optimised, tests would spend most of their time there. Only where
# nothing is optimised, as in the presets that tests use: to compile quickly counts more there.
set(TENSORMOUNT_HOT_FOLDERS)
if(CMAKE_BUILD_TYPE STREQUAL "Debug" AND CMAKE_CXX_FLAGS_DEBUG MATCHES "-O0")
  set(TENSORMOUNT_HOT_FOLDERS base shard)
endif()

# tensormount_add_library(<folder> SOURCES file... [PUBLIC target...] [PRIVATE target...] [SMALL])
# A static, position-independent library tensormount_<folder> with the alias tensormount::<folder>.
# SMALL: what it does is not done often enough for speed to count; the wheel has a limit.
function(tensormount_add_library folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SMALL" "" "SOURCES;PUBLIC;PRIVATE")
  add_library(tensormount_${folder} STATIC ${arg_SOURCES})
  add_library(tensormount::${folder} ALIAS tensormount_${folder})
  target_link_libraries(tensormount_${folder}
    PUBLIC tensormount_flags Threads::Threads ${arg_PUBLIC}
    PRIVATE ${arg_PRIVATE})
  if(folder IN_LIST TENSORMOUNT_HOT_FOLDERS)
    # Without the precompiled headers, which were made for -O0.
    target_compile_options(tensormount_${folder} PRIVATE -O1)
  elseif(arg_SMALL AND CMAKE_BUILD_TYPE STREQUAL "RelWithDebInfo")
    target_compile_options(tensormount_${folder} PRIVATE -Os)  # Nor for -O2.
  else()
    target_precompile_headers(tensormount_${folder} REUSE_FROM tensormount_pch)
  endif()
endfunction()

# tensormount_add_executable(<name> SOURCES file... [DEPS target...])
function(tensormount_add_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPS")
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE tensormount_flags ${arg_DEPS})
  target_precompile_headers(${name} REUSE_FROM tensormount_pch)
endfunction()
