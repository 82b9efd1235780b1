#!/usr/bin/env bash
# Builds the documentation site into build/docs; every warning is an error. In an environment with the library built
# (scripts/setup.sh), arguments go to sphinx-build: "bash scripts/docs.sh -E" reads all pages again.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -x .venv/bin/python ] && [ -z "${VIRTUAL_ENV:-}" ]; then export PATH="$PWD/.venv/bin:$PATH"; fi

if ! python -c 'import furo, latex2mathml, myst_nb, sphinx, transformers' 2>/dev/null; then
  echo "the documentation needs Sphinx, furo, myst-nb, latex2mathml and transformers:" \
    "pip install -c scripts/constraints.txt '.[docs]'" >&2
  exit 1
fi
python -m sphinx -q -W --keep-going -c docs -b html -d build/docs-cache . build/docs "$@"
echo "build/docs/index.html"
