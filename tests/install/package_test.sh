#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes the Debian packages of the build and looks at what is in them; what they do when they are
# installed is for scripts/fresh --packages. package_test.sh BUILD HAVE_MPI HAVE_GPU
set -euo pipefail
build=$1 have_mpi=$2 have_gpu=$3
for program in cpack dpkg-deb dpkg-shlibdeps bash; do
  command -v $program > /dev/null || { echo "there is no $program"; exit 77; }
done
scratch=$(mktemp -d "${TENSORMOUNT_TEST_TMPDIR:-${TMPDIR:-/tmp}}/tensormount-package.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
fail() { echo "package_test: $*" >&2; exit 1; }

(cd "$build" && umask 022 && cpack -G DEB -B "$scratch" > "$scratch/log" 2>&1) ||
  { cat "$scratch/log"; fail "cpack"; }
command=$(echo "$scratch"/tensormount_*.deb)
mkdir "$scratch/root"
dpkg-deb -x "$command" "$scratch/root"
root=$scratch/root/usr
tool=$root/bin/tensormount

echo "-- the command"
"$tool" --version
[ -z "$(nm "$tool" 2> /dev/null)" ] || fail "it is not stripped"
depends=$(dpkg-deb -f "$command" Depends)
for library in libc6 libfuse3-3 libstdc++6 libxxhash0; do
  grep -q "$library" <<< "$depends" || fail "no dependency on $library: $depends"
done
! grep -qE "mpi|-dev" <<< "$depends" || fail "it depends on $depends"
[ "$(readlink -f "$root/sbin/mount.tensormount")" = "$tool" ] || fail "no mount.tensormount"
for document in spec formats-adopted operations; do  # Named by help and hints.
  [ -s "$root/share/doc/tensormount/$document.md" ] || fail "no $document.md"
done
strange=$(find "$scratch/root" ! -type l -perm /022)
[ -z "$strange" ] || fail "others may write $strange"

echo "-- man pages"
commands=$("$tool" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z][a-z]*\) .*/\1/p')
[ "$(wc -w <<< "$commands")" -gt 15 ] || fail "help lists only $commands"
for page in tensormount $(sed 's/^/tensormount-/' <<< "$commands"); do
  file=$root/share/man/man1/$page.1.gz
  [ -s "$file" ] || fail "no page $page"
  if command -v man > /dev/null; then
    said=$(MANWIDTH=80 man --warnings -E UTF-8 -l "$file" 2>&1 > "$scratch/page")
    [ -z "$said" ] || fail "$page: $said"
  else
    gzip -dc "$file" > "$scratch/page"
  fi
  grep -q 'SYNOPSIS' "$scratch/page" || fail "$page has no synopsis"
done

echo "-- bash completion"
# completed WORD...: what is offered for the last word.
completed() {
  bash -c 'set -u; . "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tensormount; echo "${COMPREPLY[*]-}"' \
    bash "$root/share/bash-completion/completions/tensormount" "$@"
}
expect() {
  local want=$1 got
  shift
  got=$(completed "$@")
  [ "$got" = "$want" ] || fail "completion of '$*': '$got' is not '$want'"
}
expect "import" tensormount im
expect "verify" tensormount --json ver
expect "--placement --page-hashes --partial" tensormount import a b --p
expect "zarr" tensormount export a b --to z
expect "zarr" tensormount export a b --to = z
expect "fail replace" tensormount import a b --if-exists ""
expect "" tensormount ls ""
expect "import" tensormount --log-level debug imp
expect "debug" tensormount --log-level de
[[ " $(completed tensormount "") " == *" mount "* ]] || fail "no commands are offered"

echo "-- the systemd unit"
unit=$root/lib/systemd/system/tensormount@.service
grep -q '^ExecStart=tensormount mount ' "$unit" || fail "the unit does not mount"
if command -v systemd-analyze > /dev/null; then
  # It looks programs up where systemd would: by the path of the package.
  mkdir "$scratch/units"
  sed "s|=tensormount |=$tool |" "$unit" > "$scratch/units/tensormount@data-ckpt.service"
  said=$(systemd-analyze verify --man=no "$scratch/units/tensormount@data-ckpt.service" 2>&1 |
    grep -F tensormount@ || true)
  [ -z "$said" ] || fail "$said"
fi

echo "-- the other packages"
library=$(dpkg-deb -f "$scratch"/libtensormount*.deb Depends)
grep -q librocksdb <<< "$library" || fail "the library depends on $library"
if [ "$have_mpi" = ON ]; then
  dpkg-deb -c "$scratch"/tensormount-mpi_*.deb > "$scratch/list"
  grep -q ' ./usr/lib/tensormount/mpi.so$' "$scratch/list" ||
    fail "tensormount-mpi has no mpi.so"
  mpi=$(dpkg-deb -f "$scratch"/tensormount-mpi_*.deb Depends)
  grep -qE 'libopenmpi|libmpich' <<< "$mpi" || fail "tensormount-mpi depends on $mpi"
fi
if [ "$have_gpu" = ON ]; then
  dpkg-deb -c "$scratch"/tensormount-cuda_*.deb > "$scratch/list"
  grep -q ' ./usr/lib/tensormount/libtensormount_cuda.so$' "$scratch/list" ||
    fail "tensormount-cuda has no libtensormount_cuda.so"
  cuda=$(dpkg-deb -f "$scratch"/tensormount-cuda_*.deb Depends)
  ! grep -qE 'cuda|nvidia|rocksdb' <<< "$cuda" || fail "tensormount-cuda depends on $cuda"
fi
dpkg-deb -c "$scratch"/tensormount-dev_*.deb > "$scratch/list"
for path in include/tensormount/save.h cmake/tensormount/tensormountConfig.cmake 'libtensormount.so ->'; do
  grep -q "/$path" "$scratch/list" || fail "tensormount-dev has no $path"
done
echo "-- fine"
