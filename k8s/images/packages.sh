#!/bin/sh
# The packages of this Debian or Ubuntu that programs and libraries load at run time, one a line.
#   packages.sh FILE...    with LD_LIBRARY_PATH for what lies elsewhere
# A library that is nowhere is an error. The names differ between releases, so no image states them.
set -eu
loaded=$(ldd "$@")
if missing=$(echo "$loaded" | grep 'not found'); then
  echo "$missing" >&2
  exit 1
fi
echo "$loaded" | awk '$2 == "=>" && $3 ~ "^/" {print $3}' | sort -u | while read -r library; do
  # One that no package owns comes with the files themselves. dpkg may know it by its former place.
  file=$(readlink -f "$library")
  { dpkg-query -S "$file" || dpkg-query -S "${file#/usr}" || true; } 2>/dev/null
done | cut -d: -f1 | sort -u
