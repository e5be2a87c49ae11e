#!/usr/bin/env bash
# ocloc.sh DIR: Intel's offline compiler in one folder, from Debian's unstable distribution. Its
# packages are unpacked, not installed, and run by their own dynamic linker, since they are built for
# a newer C library than stable distributions have. Needs apt-get and a Debian mirror in /etc/apt.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
[ ! -x "$out/ocloc" ] || exit 0
mirror=$(grep -rhoE '[a-z]+://[^ ]+/debian/?( |$)' /etc/apt/ 2>/dev/null | sort -u | head -n 1 | tr -d ' ' || true)
if [ -z "$mirror" ]; then
  echo "no Debian mirror in /etc/apt: machine code for Intel's GPUs is not built" >&2
  exit 1
fi
apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
chmod 755 "$apt"
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/packages"
key=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$key] $mirror sid main" > "$apt/sources.list"
options=(
  -qq -o Acquire::Retries=3 -o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::lists=$apt/lists" -o Dir::State::status=/dev/null -o "Dir::Cache=$apt/cache"
  -o APT::Sandbox::User=root
)
apt-get "${options[@]}" update
cd "$apt/packages"
apt-get "${options[@]}" download \
  intel-ocloc libigc2 libigdfcl2 libigdgmm12 libc6 libgcc-s1 libstdc++6 zlib1g
for package in *.deb; do
  dpkg -x "$package" "$out/debian"
done
cat > "$out/ocloc" <<'S'
#!/bin/sh
root=$(cd "$(dirname "$0")" && pwd)/debian
exec "$root"/usr/lib64/ld-linux-x86-64.so.2 --library-path "$root/usr/lib/x86_64-linux-gnu" "$root"/usr/bin/ocloc-* "$@"
S
chmod +x "$out/ocloc"
