#!/bin/sh
# Builds libfinegrained_alloc.so beside this file, or at the path given: build.sh [OUTPUT]
# Does nothing when the library is newer than every source. Several ranks may run it at once: the compiler writes to a name
# of its own, which is then moved into place. CC and CFLAGS are respected. No GPU compiler and no GPU header is needed.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
output=${1:-$here/libfinegrained_alloc.so}

if [ -e "$output" ] && [ -z "$(find "$here"/*.c "$here"/*.h "$here/build.sh" -newer "$output")" ]; then
    exit 0
fi

temporary=$(mktemp "$output.XXXXXX")
trap 'rm -f "$temporary"' EXIT
# shellcheck disable=SC2086 # CC and CFLAGS may hold several words
${CC:-cc} -std=c11 -O2 -g -fPIC -shared -fvisibility=hidden -pthread -Wall -Wextra ${CFLAGS:-} \
    -o "$temporary" "$here"/*.c -ldl
chmod 755 "$temporary"
mv -f "$temporary" "$output"
