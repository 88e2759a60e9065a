#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Installs the build into a scratch folder and uses it from outside as a stranger would:
# install_test.sh SOURCE BUILD COMPILER HAVE_MPI HAVE_GPU
set -euo pipefail
source=$1 build=$2 compiler=$3 have_mpi=$4 have_gpu=$5
scratch=$(mktemp -d "${TENSORMOUNT_TEST_TMPDIR:-${TMPDIR:-/tmp}}/tensormount-install.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
fail() { echo "install_test: $*" >&2; exit 1; }

echo "-- what is installed is built by --target tensormount"
if [ -f "$build/build.ninja" ]; then
  ninja -C "$build" -t inputs tensormount > "$scratch/inputs"
  while read -r file; do
    [ "$file" = bin/tensormount ] ||
      grep -qx "$file" "$scratch/inputs" || fail "--target tensormount does not build $file"
  done < <(grep -hoE "\"$build/(bin|lib)/[^\"]*(\.so[^\"]*|/tensormount)\"" \
    "$build"/{lib,mount-tools}/cmake_install.cmake | tr -d '"' | grep -v '/CMakeFiles/' |
    sed "s|^$build/||; s|\.so\.[0-9]*\.[0-9]*$|.so|" | sort -u)
fi

cmake --install "$build" --prefix "$scratch/first" > "$scratch/install.log" ||
  { cat "$scratch/install.log"; fail "cmake --install failed (is everything built?)"; }
# The tree must work wherever it is moved to.
mv "$scratch/first" "$scratch/prefix"
prefix=$scratch/prefix
library=$(find "$prefix" -name libtensormount.so)
[ -n "$library" ] || fail "no libtensormount.so"
libraries=$(dirname "$library")

echo "-- only the public API is visible"
for name in tensormount tensormount_mpi; do
  strangers=$(nm -D --defined-only "$libraries/lib$name.so" |
    awk '$3 !~ /^(_Z(N|NK|TIN|TSN|TVN)11tensormount|tm_)/ {print $3}')
  [ -z "$strangers" ] || fail "lib$name.so exports $strangers"
done
# A symbol that goes, or gets another signature, breaks programs that are linked already: whoever
# means that says so in CHANGELOG.md, and here.
for name in tensormount tensormount_mpi; do
  nm -D --defined-only "$libraries/lib$name.so" | awk -v library=$name '{print library, $3}'
done | LC_ALL=C sort > "$scratch/symbols"
diff "$source/tests/install/symbols.txt" "$scratch/symbols" ||
  fail "other symbols than tests/install/symbols.txt lists (c++filt shows what they are)"
# Not by a pipe into grep -q: nm would end by SIGPIPE, and pipefail would call that a failure.
exported=$(nm -DC --defined-only "$library")
grep -q ' T tensormount::Save(' <<< "$exported" || fail "Save is not exported"
# All that the C header declares, in one library or the other.
companion=$(nm -D --defined-only "$libraries/libtensormount_mpi.so")
for name in $(grep -oE '^TM_EXPORT .*' "$prefix/include/tensormount/c.h" | grep -oE 'tm_[a-z_]+\(' |
  tr -d '('); do
  grep -qE " T $name\$" <<< "$exported"$'\n'"$companion" || fail "$name is not exported"
done
loaded=$(ldd "$library")
! grep -q libmpi <<< "$loaded" || fail "libtensormount.so loads MPI"

echo "-- public headers name no third party"
# mpi.h, which may include MPI, is the last: a header that was read before is not listed again.
for header in $(ls "$prefix"/include/tensormount/*.h | grep -v '/mpi[.]h$') "$prefix/include/tensormount/mpi.h"; do
  echo "#include \"$header\""
done > "$scratch/all.h"
"$compiler" -std=c++20 -I "$prefix/include" -H -E -x c++ "$scratch/all.h" 2> "$scratch/headers" > /dev/null
# Each line has a dot for each header that it is included by, and the outermost header is one of ours.
strangers=$(awk -v third='/(rocksdb|fuse3|nlohmann|fmt|CLI|cuda[^/]*|mpi[^/]*|openmpi)/|/(mpi|xxhash)[.]h' \
  '$1 == "." {ours = $2} $2 ~ third && ours !~ "/tensormount/mpi[.]h$" {print ours " includes " $2}' "$scratch/headers")
[ "$(grep -c '^[.] ' "$scratch/headers")" = "$(wc -l < "$scratch/all.h")" ] || fail "not every public header was read"
[ -z "$strangers" ] || fail "third-party headers: $strangers"

echo "-- the command needs no MPI"
command=$prefix/bin/tensormount
needed=$(ldd "$command")
! grep -q libmpi <<< "$needed" || fail "the command loads MPI"
python3 - "$scratch/model.safetensors" << 'END'
import json, struct, sys
header = json.dumps({"w": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(header)) + header + bytes(range(32)))
END
# refused WORDS: an import as a rank of MPI ends with UNSUPPORTED and these words.
refused() {
  local result=0
  OMPI_COMM_WORLD_SIZE=1 "$command" import "$scratch/model.safetensors" "$scratch/refused/a" \
    2> "$scratch/log" || result=$?
  { [ $result = 2 ] && grep -q "UNSUPPORTED: MPI: .*$1" "$scratch/log"; } ||
    { cat "$scratch/log"; fail "without its module MPI is not refused with: $1"; }
  [ ! -e "$scratch/refused" ] || fail "a refused import wrote something"
}
module=$prefix/lib/tensormount/mpi.so
if [ "$have_mpi" = ON ]; then
  [ -f "$module" ] || fail "no $module"
  mv "$module" "$scratch/mpi.so"
fi
refused "mpi.so does not exist: install the package tensormount-mpi"
"$command" import "$scratch/model.safetensors" "$scratch/alone/a" > "$scratch/log" ||
  fail "without MPI nothing is imported"
# The module without the library of MPI, and one of another version.
mkdir -p "$prefix/lib/tensormount"
echo 'int gone(void) { return 0; }' | cc -shared -fPIC -x c - -o "$scratch/libgone.so.1"
echo 'int gone(void); int here(void) { return gone(); }' |
  cc -shared -fPIC -x c - -x none "$scratch/libgone.so.1" -o "$module"
rm "$scratch/libgone.so.1"
refused "libgone.so.1: cannot open shared object file.*libopenmpi3"
echo 'const char tensormount_mpi_module_version[] = "0.0.9"; void tensormount_mpi_module_init(void) {}' |
  cc -shared -fPIC -x c - -o "$module"
refused "has a different version than this command"
rm "$module"
[ "$have_mpi" != ON ] || mv "$scratch/mpi.so" "$module"
if [ "$have_mpi" = ON ]; then
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
    timeout 60 mpirun -n 2 "$command" import "$scratch/model.safetensors" "$scratch/alone/b" \
    > "$scratch/log" || { cat "$scratch/log"; fail "mpirun -n 2 tensormount import"; }
  grep -q '2 ranks' "$scratch/log" || fail "mpirun -n 2 did not save by 2 ranks"
fi

echo "-- the part with CUDA, over the driver of the tests"
cuda=$prefix/lib/tensormount/libtensormount_cuda.so
# says WORDS: what the command finds of CUDA.
says() {
  local said
  said=$(LD_LIBRARY_PATH=$build/fake_driver "$command" doctor --dir "$scratch" | grep ' cuda: ')
  grep -q "$1" <<< "$said" || fail "doctor says '$said', not '$1'"
}
if [ "$have_gpu" = ON ]; then
  [ -f "$cuda" ] || fail "no $cuda"
  says "^yes cuda: 2 devices$"
  if readelf -dW "$cuda" | grep -E 'NEEDED.*(cuda|nvidia|rocksdb)'; then fail "it is linked to that"; fi
  mv "$cuda" "$scratch/cuda.so"
fi
says "libtensormount_cuda.so does not exist: install the package tensormount-cuda"
echo 'const void* tensormount_device_module(void) { static const void* m[] = {"another"}; return m; }' |
  cc -shared -fPIC -x c - -o "$cuda"
says "comes from another build than this library"
rm "$cuda"
[ "$have_gpu" != ON ] || mv "$scratch/cuda.so" "$cuda"

echo "-- find_package"
cmake -S "$source/examples" -B "$scratch/examples" -DCMAKE_PREFIX_PATH="$prefix" \
  -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_CXX_FLAGS="-Wall -Wextra -Werror" > "$scratch/log" ||
  { cat "$scratch/log"; fail "examples do not configure"; }
cmake --build "$scratch/examples" -j 2 > "$scratch/log" 2>&1 ||
  { cat "$scratch/log"; fail "examples do not build"; }
cmake -S "$source/tests/install/earlier" -B "$scratch/earlier" -DCMAKE_PREFIX_PATH="$prefix" \
  -DCMAKE_CXX_COMPILER="$compiler" > "$scratch/log" ||
  { cat "$scratch/log"; fail "earlier programs do not configure"; }
cmake --build "$scratch/earlier" -j 2 > "$scratch/log" 2>&1 ||
  { cat "$scratch/log"; fail "earlier programs do not build"; }
"$scratch/earlier/renamed" || fail "an old name does not do what the new one does"

"$scratch/examples/save_load" "$scratch/store" | tee "$scratch/output"
[ "$(grep -c 'all equal' "$scratch/output")" = 2 ] || fail "save_load did not load on 2 ranks"
[ -f "$scratch/store/step-1000/COMMIT" ] || fail "save_load left no checkpoint"
if [ "$have_mpi" = ON ]; then
  # As root and with more processes than cores, in a container too.
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
    timeout 60 mpirun -n 2 "$scratch/examples/save_mpi" "$scratch/store" | tee "$scratch/output"
  grep -q '2 processes saved' "$scratch/output" || fail "save_mpi did not save on 2 processes"
fi

"$scratch/examples/c_read" "$scratch/store/step-1000" | tee "$scratch/output"
grep -q '^layer.weight f32 \[64, 48\]$' "$scratch/output" || fail "c_read does not list"
row=$("$scratch/examples/c_read" "$scratch/store/step-1000" layer.weight)
[ "${row:0:8}" = "0 1 2 3 " ] || fail "c_read shows $row"

echo "-- the C interface"
cc=${CC:-cc}
"$cc" -std=c99 -Wall -Wextra -Wpedantic -Werror -I "$prefix/include" -I "$source" \
  "$source/tests/c/c_api_test.c" "$source/tests/c/mail_host.c" -o "$scratch/c_api_test" \
  -L "$libraries" -ltensormount -pthread -Wl,-rpath,"$libraries"
mkdir "$scratch/c"
"$scratch/c_api_test" "$scratch/c" 2> "$scratch/log" || { cat "$scratch/log"; fail "c_api_test"; }
if [ "$have_mpi" = ON ]; then
  "$cc" -std=c99 -Wall -Wextra -Wpedantic -Werror -I "$prefix/include" \
    "$source/tests/install/c_mpi.c" -o "$scratch/c_mpi" \
    -L "$libraries" -ltensormount_mpi -ltensormount -Wl,-rpath,"$libraries"
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
    timeout 60 mpirun -n 2 "$scratch/c_mpi" "$scratch/store/step-2" | tee "$scratch/output"
  grep -q '2 processes saved in C' "$scratch/output" || fail "c_mpi did not save on 2 processes"
fi
python3 "$source/tests/install/ctypes_test.py" "$library" "$scratch/store/step-1000"

echo "-- pkg-config"
export PKG_CONFIG_PATH=$libraries/pkgconfig
# shellcheck disable=SC2046
"$compiler" -std=c++20 "$source/examples/save_load.cc" -o "$scratch/by_pkg_config" \
  $(pkg-config --cflags --libs tensormount) -Wl,-rpath,"$libraries"
"$scratch/by_pkg_config" "$scratch/store2" > /dev/null || fail "the pkg-config build does not run"
pkg-config --exists tensormount-mpi || fail "no tensormount-mpi.pc"

echo "-- stripped, and uninstalled without a rest"
DESTDIR=$scratch/staged cmake --install "$build" --prefix /usr --strip > "$scratch/install.log" ||
  { cat "$scratch/install.log"; fail "cmake --install --strip failed"; }
"$scratch/staged/usr/bin/tensormount" --version > /dev/null || fail "stripped, it does not start"
[ -z "$(nm "$scratch/staged/usr/bin/tensormount" 2> /dev/null)" ] || fail "--strip strips nothing"
[ "$(readlink -f "$scratch/staged/usr/sbin/mount.tensormount")" = "$scratch/staged/usr/bin/tensormount" ] ||
  fail "no mount.tensormount"
DESTDIR=$scratch/staged cmake "-DMANIFEST=$build/install_manifest.txt" \
  -P "$source/cmake/uninstall.cmake" > "$scratch/log" || { cat "$scratch/log"; fail "uninstall"; }
left=$(find "$scratch/staged" ! -type d)
[ -z "$left" ] || fail "uninstall leaves $left"
echo "-- fine"
