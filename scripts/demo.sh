#!/usr/bin/env bash
# Sets up, builds, and runs "attnpack demo" with the arguments given.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

set_up demo
build
say "attnpack demo"
exec attnpack demo "$@"
