# Sourced by scripts/test and scripts/demo: makes and mends the virtual environments. Needs Python >= 3.11 and its pip, nothing else.
#
# A stamp, written last, holds a hash of all that an installation depends on, so an up-to-date environment costs nothing.
# A marker lies in an environment while it is being filled; where one is found, the installation was interrupted
# (perhaps in the middle of a package, which pip takes for whole) and is done anew.

repository_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
minimum_python="3.11"

fail() {
  echo "error: $*" >&2
  exit 1
}

is_supported_python() {
  "$1" -c "import sys; sys.exit(sys.version_info < tuple(map(int, '$minimum_python'.split('.'))))" >/dev/null 2>&1
}

# Prints the first interpreter that is new enough and able to make virtual environments.
find_python() {
  local candidate without_venv=""
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
    is_supported_python "$candidate" || continue
    if "$candidate" -c "import ensurepip, venv" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
    without_venv=$candidate
  done
  [ -z "$without_venv" ] || fail "$without_venv lacks the venv module (on Debian and Ubuntu: apt install python3-venv)"
  fail "no Python >= $minimum_python found ($(python3 --version 2>/dev/null || echo "there is no python3"))"
}

# installation_key ENVIRONMENT CONSTRAINTS: what the installation in ENVIRONMENT depends on, as one hash.
installation_key() {
  "$1/bin/python" - "$repository_root" "$repository_root/pyproject.toml" "$2" <<'PYTHON'
import hashlib
import sys
from pathlib import Path

root, *files = sys.argv[1:]
key = hashlib.sha256(f"{sys.version} {sys.prefix} {root}".encode())
for file in files:
    key.update(Path(file).read_bytes())
print(key.hexdigest())
PYTHON
}

# create_environment ENVIRONMENT: an empty environment that bears the marker; what an interruption left there goes.
create_environment() {
  local environment=$1 python
  python=$(find_python)
  echo "Creating $environment with $("$python" --version)"
  mkdir -p "$environment"
  touch "$environment/incomplete"
  find "$environment" -mindepth 1 -maxdepth 1 ! -name incomplete -exec rm -rf {} +
  "$python" -m venv "$environment"
}

# set_up_environment ENVIRONMENT CONSTRAINTS [EXTRAS]: brings ENVIRONMENT in step with pyproject.toml and the file CONSTRAINTS.
set_up_environment() {
  local environment=$1 constraints=$2 extras=${3:-train,convert,export,glossary,clean,demo,serve,test} key
  if [ -e "$environment/incomplete" ] || ! is_supported_python "$environment/bin/python"; then
    create_environment "$environment"
  fi
  key=$(installation_key "$environment" "$constraints")
  if [ "$(cat "$environment/installed" 2>/dev/null)" = "$key" ]; then
    return
  fi
  echo "Installing the dependencies into $environment (minutes the first time)"
  touch "$environment/incomplete"
  rm -f "$environment/installed"
  # Twice quiet: errors only.
  "$environment/bin/python" -m pip install --quiet --quiet --no-input --disable-pip-version-check \
    --constraint "$constraints" --editable "$repository_root[$extras]" </dev/null
  echo "$key" >"$environment/installed"
  rm "$environment/incomplete"
}

# fetch_library_tests ENVIRONMENT: the common tests of the installed transformers, which only its source distribution has,
# go to ENVIRONMENT/library_tests. Without a network they are skipped.
fetch_library_tests() {
  local python=$1/bin/python folder=$1/library_tests name
  name=transformers-$("$python" -c 'from importlib.metadata import version; print(version("transformers"))')
  [ ! -d "$folder/$name" ] || return 0
  echo "Fetching the tests of $name"
  mkdir -p "$folder/incomplete"
  if "$python" -m pip download --quiet --quiet --no-input --disable-pip-version-check --no-deps \
    --no-binary transformers --dest "$folder/incomplete" "${name/-/==}" </dev/null &&
    tar -xzf "$folder/incomplete/$name.tar.gz" -C "$folder/incomplete" "$name/tests"; then
    mv "$folder/incomplete/$name" "$folder"
  else
    echo "warning: they cannot be fetched, and will be skipped" >&2
  fi
  rm -rf "$folder/incomplete"
}
