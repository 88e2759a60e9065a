# SPDX-License-Identifier: Apache-2.0
# Debian packages by CPack: tensormount (the command), tensormount-mpi (its MPI part, and the MPI
# communicator for programs), tensormount-cuda (where it was built with nvcc), libtensormount0.1 and
# tensormount-dev. scripts/package makes them.
# Every install() names one of the components command, mpi, cuda, library and dev.
set(TENSORMOUNT_CONTACT "The tensormount maintainers <tensormount@example.invalid>"
  CACHE STRING "Maintainer of the Debian packages")

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME tensormount)
set(CPACK_PACKAGE_CONTACT "${TENSORMOUNT_CONTACT}")
set(CPACK_PACKAGE_VENDOR tensormount)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "checkpoints of distributed training as a filesystem")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL command mpi library dev)
if(TENSORMOUNT_HAVE_GPU)
  list(APPEND CPACK_COMPONENTS_ALL cuda)
endif()
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION utils)
# Right also where the one who builds has another umask.
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
  OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
# What the files need is looked up in the package that each library is of; ours are of no package yet.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${PROJECT_BINARY_DIR}/lib")

set(soversion "${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}")
set(library "libtensormount${soversion}")
set(same "(= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_COMMAND_PACKAGE_NAME tensormount)
set(CPACK_DEBIAN_COMMAND_DESCRIPTION "The command: mounts checkpoints, in which every global tensor is a file, and
 imports, loads, exports, verifies and compares them.")
set(CPACK_DEBIAN_COMMAND_PACKAGE_RECOMMENDS "fuse3, libcurl4")
set(CPACK_DEBIAN_COMMAND_PACKAGE_SUGGESTS "tensormount-mpi, tensormount-cuda")
set(CPACK_DEBIAN_MPI_PACKAGE_NAME tensormount-mpi)
set(CPACK_DEBIAN_MPI_DESCRIPTION "MPI: what the command tensormount opens when mpirun starts it,
 and the library with the MPI communicator for programs.")
set(CPACK_DEBIAN_MPI_PACKAGE_DEPENDS "tensormount ${same}, ${library} ${same}")
set(CPACK_DEBIAN_MPI_PACKAGE_RECOMMENDS openmpi-bin)
set(CPACK_DEBIAN_CUDA_PACKAGE_NAME tensormount-cuda)
set(CPACK_DEBIAN_CUDA_DESCRIPTION "CUDA: what the command and the library open where tensors are in
 memory of NVIDIA GPUs. Needs nothing of CUDA to be installed; a driver of CUDA 13 to work.")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME "${library}")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SUGGESTS "tensormount-cuda, libcurl4")
set(CPACK_DEBIAN_LIBRARY_DESCRIPTION "The library: saves and loads checkpoints, for programs in C++ and C.")
# ldconfig, for libtensormount.so.
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS OFF)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_CONTROL_EXTRA "${PROJECT_SOURCE_DIR}/packaging/triggers")
set(CPACK_DEBIAN_MPI_PACKAGE_CONTROL_EXTRA "${PROJECT_SOURCE_DIR}/packaging/triggers")
set(CPACK_DEBIAN_DEV_PACKAGE_NAME tensormount-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_DESCRIPTION "Headers of the library for C++ and C, and what CMake and pkg-config need.")
set(CPACK_DEBIAN_DEV_PACKAGE_SHLIBDEPS OFF)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "${library} ${same}, tensormount-mpi ${same}")
include(CPack)
