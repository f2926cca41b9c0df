#!/usr/bin/env bash
# Installs this kit into a folder for PYTHONPATH: bash install.sh [FOLDER]
# It needs no network, and changes nothing in the machine's own Python, which PYTHON=... chooses.
set -euo pipefail
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
site=${1:-$kit/site}
python=${PYTHON:-python3}
"$python" -c 'import platform, sys
if platform.python_version_tuple()[:2] != tuple("@PYTHON@".split(".")):
    sys.exit(f"this kit is for Python @PYTHON@, and {sys.executable} is {platform.python_version()}: set PYTHON")'
# Settings of a pip that has an index would only be in the way.
PIP_CONFIG_FILE=/dev/null "$python" -m pip --isolated install --quiet --no-index --no-deps --no-compile \
    --no-cache-dir --upgrade --disable-pip-version-check --root-user-action=ignore --target "$site" "$kit"/*.whl
site=$(cd "$site" && pwd)
PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} "$python" -P -c 'import importlib.util, sys
if importlib.util.find_spec("torch") is None:
    print(f"{sys.executable} has no torch, so releases were not compared", file=sys.stderr)
    sys.exit()
try:
    @CHECK@
except ValueError as problem:
    sys.exit(str(problem))'
echo "export PYTHONPATH=$site\${PYTHONPATH:+:\$PYTHONPATH}"
