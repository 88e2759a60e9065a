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

# While layers are still missing: drops sources and targets of ours that are not there yet.
function(tensormount_keep_existing sources_variable)
  set(kept "")
  foreach(source IN LISTS ${sources_variable})
    if(source MATCHES "^/|[$]" OR EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${source}")
      list(APPEND kept ${source})
    else()
      message(STATUS "not there yet: ${CMAKE_CURRENT_SOURCE_DIR}/${source}")
    endif()
  endforeach()
  if(NOT kept)
    set(kept "${PROJECT_BINARY_DIR}/pch.cc")
  endif()
  set(${sources_variable} "${kept}" PARENT_SCOPE)
  foreach(variable IN LISTS ARGN)
    set(kept "")
    foreach(target IN LISTS ${variable})
      if(NOT target MATCHES "::" OR TARGET ${target})
        list(APPEND kept ${target})
      else()
        message(STATUS "not there yet: ${target}")
      endif()
    endforeach()
    set(${variable} "${kept}" PARENT_SCOPE)
  endforeach()
endfunction()

# tensormount_add_library(<folder> SOURCES file... [PUBLIC target...] [PRIVATE target...])
# A static, position-independent library tensormount_<folder> with the alias tensormount::<folder>.
function(tensormount_add_library folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;PUBLIC;PRIVATE")
  tensormount_keep_existing(arg_SOURCES arg_PUBLIC arg_PRIVATE)
  add_library(tensormount_${folder} STATIC ${arg_SOURCES})
  add_library(tensormount::${folder} ALIAS tensormount_${folder})
  target_link_libraries(tensormount_${folder}
    PUBLIC tensormount_flags Threads::Threads ${arg_PUBLIC}
    PRIVATE ${arg_PRIVATE})
  target_precompile_headers(tensormount_${folder} REUSE_FROM tensormount_pch)
endfunction()

# tensormount_add_executable(<name> SOURCES file... [DEPS target...])
function(tensormount_add_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPS")
  tensormount_keep_existing(arg_SOURCES arg_DEPS)
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE tensormount_flags ${arg_DEPS})
  target_precompile_headers(${name} REUSE_FROM tensormount_pch)
endfunction()
