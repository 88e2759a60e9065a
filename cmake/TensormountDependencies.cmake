# SPDX-License-Identifier: Apache-2.0
# Finds what is built on. Required: xxHash, RocksDB, zlib, fmt, nlohmann-json, threads. Optional parts
# (TENSORMOUNT_MPI, _FUSE, _GPU) end in TENSORMOUNT_HAVE_<PART> = ON or OFF.

set(THREADS_PREFER_PTHREAD_FLAG OFF)
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)

# tensormount::<name> from one library and one header; Debian's own package configurations of these
# pull in what we do not link.
function(tensormount_import name library header)
  find_library(TENSORMOUNT_${name}_LIBRARY ${library} REQUIRED)
  find_path(TENSORMOUNT_${name}_INCLUDE ${header} REQUIRED)
  mark_as_advanced(TENSORMOUNT_${name}_LIBRARY TENSORMOUNT_${name}_INCLUDE)
  add_library(tensormount::${name} UNKNOWN IMPORTED GLOBAL)
  set_target_properties(tensormount::${name} PROPERTIES
    IMPORTED_LOCATION "${TENSORMOUNT_${name}_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${TENSORMOUNT_${name}_INCLUDE}")
endfunction()
tensormount_import(xxhash xxhash xxhash.h)
tensormount_import(rocksdb rocksdb rocksdb/db.h)
tensormount_import(zlib z zlib.h)

# A command starts in two thirds of the time where RocksDB is a part of it: its 12,000 symbols are
# not looked up at every start. For executables with the property TENSORMOUNT_STARTS_OFTEN.
find_library(TENSORMOUNT_rocksdb_ARCHIVE librocksdb.a)
mark_as_advanced(TENSORMOUNT_rocksdb_ARCHIVE)
set(tensormount_rocksdb_archive)
if(TENSORMOUNT_rocksdb_ARCHIVE)
  set(tensormount_rocksdb_archive "${TENSORMOUNT_rocksdb_ARCHIVE}")
  foreach(library IN ITEMS snappy bz2 lz4 zstd z gflags)
    find_library(TENSORMOUNT_${library}_OF_ROCKSDB ${library})
    mark_as_advanced(TENSORMOUNT_${library}_OF_ROCKSDB)
    if(TENSORMOUNT_${library}_OF_ROCKSDB)
      list(APPEND tensormount_rocksdb_archive "${TENSORMOUNT_${library}_OF_ROCKSDB}")
    else()
      set(TENSORMOUNT_rocksdb_ARCHIVE "")
    endif()
  endforeach()
endif()
if(TENSORMOUNT_rocksdb_ARCHIVE)
  set(tensormount_often "$<BOOL:$<TARGET_PROPERTY:TENSORMOUNT_STARTS_OFTEN>>")
  add_library(tensormount::rocksdb_or_archive INTERFACE IMPORTED GLOBAL)
  set_target_properties(tensormount::rocksdb_or_archive PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${TENSORMOUNT_rocksdb_INCLUDE}"
    INTERFACE_LINK_LIBRARIES
      "$<${tensormount_often}:${tensormount_rocksdb_archive}>;$<$<NOT:${tensormount_often}>:${TENSORMOUNT_rocksdb_LIBRARY}>")
else()
  add_library(tensormount::rocksdb_or_archive ALIAS tensormount::rocksdb)
endif()

# Decides one optional part: wanted says AUTO, ON or OFF, found whether it is there.
macro(tensormount_decide part found what)
  set(TENSORMOUNT_HAVE_${part} OFF)
  set(TENSORMOUNT_REASON_${part} "switched off")
  if(NOT TENSORMOUNT_${part} STREQUAL "OFF")
    if(${found})
      set(TENSORMOUNT_HAVE_${part} ON)
      set(TENSORMOUNT_REASON_${part} "${what}")
    elseif(TENSORMOUNT_${part} STREQUAL "ON")
      message(FATAL_ERROR "TENSORMOUNT_${part}=ON, but ${what} was not found")
    else()
      set(TENSORMOUNT_REASON_${part} "${what} not found")
    endif()
  endif()
endmacro()

set(TENSORMOUNT_FOUND_MPI OFF)
if(NOT TENSORMOUNT_MPI STREQUAL "OFF")
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(TENSORMOUNT_FOUND_MPI ON)
  endif()
endif()
tensormount_decide(MPI TENSORMOUNT_FOUND_MPI "MPI ${MPI_CXX_VERSION}")
if(TENSORMOUNT_HAVE_MPI)
  # Headers and libraries only: the compile options of the wrapper (-pthread) would define macros
  # that the shared precompiled headers were made without.
  add_library(tensormount::mpi_c UNKNOWN IMPORTED GLOBAL)
  # As they are called outside of the folder of links to them, where no run path is needed.
  set(tensormount_mpi_libraries)
  foreach(library IN LISTS MPI_CXX_LIBRARIES)
    get_filename_component(library "${library}" REALPATH)
    list(APPEND tensormount_mpi_libraries "${library}")
  endforeach()
  list(GET tensormount_mpi_libraries -1 tensormount_mpi_library)
  set_target_properties(tensormount::mpi_c PROPERTIES
    IMPORTED_LOCATION "${tensormount_mpi_library}"
    INTERFACE_LINK_LIBRARIES "${tensormount_mpi_libraries}"
    INTERFACE_COMPILE_DEFINITIONS "OMPI_SKIP_MPICXX;MPICH_SKIP_MPICXX"
    INTERFACE_INCLUDE_DIRECTORIES "${MPI_CXX_INCLUDE_DIRS}")
endif()

set(TENSORMOUNT_FOUND_FUSE OFF)
if(NOT TENSORMOUNT_FUSE STREQUAL "OFF")
  find_library(TENSORMOUNT_fuse3_LIBRARY fuse3)
  find_path(TENSORMOUNT_fuse3_INCLUDE fuse3/fuse_lowlevel.h)
  if(TENSORMOUNT_fuse3_LIBRARY AND TENSORMOUNT_fuse3_INCLUDE)
    set(TENSORMOUNT_FOUND_FUSE ON)
  endif()
endif()
tensormount_decide(FUSE TENSORMOUNT_FOUND_FUSE "libfuse 3")
if(TENSORMOUNT_HAVE_FUSE)
  # Included as <fuse3/fuse_lowlevel.h>.
  tensormount_import(fuse3 fuse3 fuse3/fuse_lowlevel.h)
endif()

# Only nvcc: the driver is found at run time, and its functions are declared in gpu/cuda_api.h. That
# of the system, or what scripts/setup --with cuda installs.
set(TENSORMOUNT_CUDA_ARCHITECTURES 80 90 100 120 CACHE STRING
  "Compute capabilities that the kernels are compiled for, times ten")
set(TENSORMOUNT_FOUND_GPU OFF)
if(NOT TENSORMOUNT_GPU STREQUAL "OFF")
  file(GLOB tensormount_nvcc_of_setup
    "${PROJECT_SOURCE_DIR}/.cache/venv-cuda/lib/python3*/site-packages/nvidia/cu13/bin")
  find_program(TENSORMOUNT_NVCC nvcc
    HINTS ENV CUDA_HOME PATHS /usr/local/cuda/bin ${tensormount_nvcc_of_setup} PATH_SUFFIXES bin)
  mark_as_advanced(TENSORMOUNT_NVCC)
  if(TENSORMOUNT_NVCC)
    execute_process(COMMAND "${TENSORMOUNT_NVCC}" --version OUTPUT_VARIABLE tensormount_nvcc)
    string(REGEX MATCH "release ([0-9]+)\\.[0-9]+" tensormount_nvcc "${tensormount_nvcc}")
    # Older ones do not know all of these devices.
    if(CMAKE_MATCH_1 GREATER_EQUAL 13)
      set(TENSORMOUNT_FOUND_GPU ON)
    endif()
  endif()
endif()
tensormount_decide(GPU TENSORMOUNT_FOUND_GPU "nvcc of CUDA 13")

function(tensormount_print_summary)
  message(STATUS "tensormount ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}")
  foreach(part IN ITEMS MPI FUSE GPU)
    message(STATUS "  ${part}: ${TENSORMOUNT_HAVE_${part}} (${TENSORMOUNT_REASON_${part}})")
  endforeach()
  foreach(pair IN ITEMS "sanitizers TENSORMOUNT_SANITIZE" "linker TENSORMOUNT_LINKER"
                        "compiler cache TENSORMOUNT_CCACHE")
    string(REGEX MATCH "[^ ]+$" variable "${pair}")
    string(REPLACE " ${variable}" "" label "${pair}")
    if(${variable})
      message(STATUS "  ${label}: ${${variable}}")
    else()
      message(STATUS "  ${label}: none")
    endif()
  endforeach()
endfunction()
