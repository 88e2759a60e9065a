# SPDX-License-Identifier: Apache-2.0
# How tests are declared. One program is one ctest test: starting a program once per case costs
# more than the cases do.

find_package(GTest REQUIRED)

# With the libraries that tests need: `scripts/setup --with python,clients` makes it. Tests that meet
# another skip what they cannot import.
set(TENSORMOUNT_TEST_PYTHON "${PROJECT_SOURCE_DIR}/.cache/venv/bin/python3")
if(NOT EXISTS "${TENSORMOUNT_TEST_PYTHON}")
  set(TENSORMOUNT_TEST_PYTHON python3)
endif()
# With PyTorch and the other programs whose checkpoints are read in place (--with libraries).
set(TENSORMOUNT_LIBRARIES_PYTHON "${PROJECT_SOURCE_DIR}/.cache/venv-libraries/bin/python3")
if(NOT EXISTS "${TENSORMOUNT_LIBRARIES_PYTHON}")
  set(TENSORMOUNT_LIBRARIES_PYTHON "${TENSORMOUNT_TEST_PYTHON}")
endif()
# The wheel of this tree (scripts/wheel), and where tests/wheel installs it.
set(TENSORMOUNT_WHEEL_FOLDER "${PROJECT_SOURCE_DIR}/build/wheel")
set(TENSORMOUNT_WHEEL_ENVIRONMENTS "${TENSORMOUNT_WHEEL_FOLDER}/environments")

# Of the release build, those that take longest to compile or to run; scripts/test --quick leaves them
# out. Each part of the product has others that stay.
set(TENSORMOUNT_SLOW_TESTS
  collective_socket_test collective_tcp_test collective_thread_test communicator_tcp_test
  device_exchange_test index_retention_test install limits_test matrix_mpi_test matrix_test mpi_test
  package python_device python_ends python_group python_interrupts python_kills python_process
  python_typing save_options_test state_test steps_model_test tools_adversity tools_mpi tools_waits)

set(TENSORMOUNT_TIMEOUT_FACTOR 1)
set(TENSORMOUNT_TEST_ENVIRONMENT "")
if(TENSORMOUNT_SANITIZE)
  set(TENSORMOUNT_TIMEOUT_FACTOR 4)
  set(TENSORMOUNT_TEST_ENVIRONMENT
    "ASAN_OPTIONS=detect_leaks=1:abort_on_error=0:exitcode=66:allocator_may_return_null=1:malloc_context_size=8"
    "UBSAN_OPTIONS=print_stacktrace=1:exitcode=66"
    "TSAN_OPTIONS=exitcode=66:allocator_may_return_null=1:second_deadlock_stack=1:suppressions=${PROJECT_SOURCE_DIR}/tests/support/tsan.supp")
endif()

if(TENSORMOUNT_LONG)
  # Random tests have some thirty times the cases then.
  set(TENSORMOUNT_TIMEOUT_FACTOR 40)
endif()

function(tensormount_set_test_properties name labels timeout)
  math(EXPR timeout "${timeout} * ${TENSORMOUNT_TIMEOUT_FACTOR}")
  set_tests_properties(${name} PROPERTIES
    TIMEOUT ${timeout}
    LABELS "${labels}"
    ENVIRONMENT "${TENSORMOUNT_TEST_ENVIRONMENT}")
  # Several processes of one test and another test beside them would only wait for each other. ctest
  # finds two free places for such a test only at the beginning, or after all others.
  if("mpi" IN_LIST labels)
    set_tests_properties(${name} PROPERTIES PROCESSORS 2 COST 500)
  endif()
endfunction()

# tensormount_add_test(<name> SOURCES file... [DEPS target...] [LABELS label...] [TIMEOUT seconds]
#                      [NO_SANITIZE] [NO_TSAN] [ASAN_LONG] [TSAN_LONG] [PLAIN_TOO]
#                      [DEVICES_TOO] [TSAN_CASES filter] [COST seconds])
# A GoogleTest program <name> with the main of tests/support, run as the ctest test <name>.
# NO_SANITIZE: not built under sanitizers (mounts, MPI, tools). NO_TSAN: not under that of threads,
# because it has one (or processes), or has them only as other tests do. ASAN_LONG and TSAN_LONG: under
# that sanitizer only with TENSORMOUNT_LONG, as scripts/test --long does, because the code that touches
# memory by hand, or where threads meet, is run by other tests too. TSAN_CASES: under that of threads only
# these cases without TENSORMOUNT_LONG, a filter of GoogleTest. Labels default to "unit".
# COST: the longest begin first; what begins last would be waited for alone.
#
# A whole run of scripts/test builds with TENSORMOUNT_ASAN_APART, and then a program that the preset
# asan runs is built and run there alone, but for those that are PLAIN_TOO. DEVICES_TOO: built without
# sanitizers too, for tests that run it with tensors on devices. With TENSORMOUNT_QUICK the latter and
# TENSORMOUNT_SLOW_TESTS are left out.
function(tensormount_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "NO_SANITIZE;NO_TSAN;ASAN_LONG;TSAN_LONG;PLAIN_TOO;DEVICES_TOO"
    "TIMEOUT;TSAN_CASES;COST" "SOURCES;DEPS;LABELS")
  set(filter)
  if(TENSORMOUNT_SANITIZE STREQUAL "thread" AND arg_TSAN_CASES AND NOT TENSORMOUNT_LONG)
    set(filter "--gtest_filter=${arg_TSAN_CASES}")
  endif()
  if(TENSORMOUNT_SANITIZE STREQUAL "thread")
    set(only_long ${arg_TSAN_LONG})
    set(never ${arg_NO_TSAN})
  else()
    set(only_long ${arg_ASAN_LONG})
    set(never FALSE)
  endif()
  if(TENSORMOUNT_SANITIZE AND (arg_NO_SANITIZE OR never OR (only_long AND NOT TENSORMOUNT_LONG)))
    return()
  endif()
  if("tensormount::fs_mount" IN_LIST arg_DEPS AND NOT (arg_NO_SANITIZE OR arg_ASAN_LONG))
    message(FATAL_ERROR "${name}: builds with sanitizers have no mount, so it would run nowhere: NO_SANITIZE")
  endif()
  set(elsewhere FALSE)
  if(TENSORMOUNT_ASAN_APART AND NOT TENSORMOUNT_SANITIZE AND
     NOT (arg_NO_SANITIZE OR arg_ASAN_LONG OR arg_PLAIN_TOO))
    if(NOT arg_DEVICES_TOO OR TENSORMOUNT_QUICK)
      return()
    endif()
    set(elsewhere TRUE)
  endif()
  if(TENSORMOUNT_QUICK AND name IN_LIST TENSORMOUNT_SLOW_TESTS)
    return()
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE tensormount_test_support ${arg_DEPS})
  target_precompile_headers(${name} REUSE_FROM tensormount_test_support)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin/tests")
  if(NOT elsewhere)
    add_test(NAME ${name} COMMAND ${name} ${filter})
    tensormount_set_test_properties(${name} "${arg_LABELS}" ${arg_TIMEOUT})
    if(arg_COST)
      set_tests_properties(${name} PROPERTIES COST ${arg_COST})
    endif()
  endif()
endfunction()

# tensormount_add_test_library(<name> SOURCES file... [DEPS target...])
# What several tests share: models, oracles, builders of data. They go over every cell one by one
# (tensormount_hot_sources).
function(tensormount_add_test_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPS")
  add_library(${name} STATIC EXCLUDE_FROM_ALL ${arg_SOURCES})
  target_link_libraries(${name} PUBLIC tensormount_test_support ${arg_DEPS})
  tensormount_hot_sources(${arg_SOURCES})
endfunction()

# tensormount_add_script_test(<name> COMMAND command... [LABELS label...] [TIMEOUT seconds]
#                             [COST seconds])
# Not run under sanitizers.
function(tensormount_add_script_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;COST" "COMMAND;LABELS")
  if(TENSORMOUNT_SANITIZE OR (TENSORMOUNT_QUICK AND name IN_LIST TENSORMOUNT_SLOW_TESTS))
    return()
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS script)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND})
  tensormount_set_test_properties(${name} "${arg_LABELS}" ${arg_TIMEOUT})
  if(arg_COST)
    set_tests_properties(${name} PROPERTIES COST ${arg_COST})
  endif()
endfunction()
