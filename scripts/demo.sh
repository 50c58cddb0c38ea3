#!/usr/bin/env bash
# The whole story on a bare machine, in minutes and without a GPU: a verdict on DDP with overlap against without.
#
#   bash scripts/demo.sh [KEY=VALUE...]     the same as `aorta demo`, after set-up
#
# Leaves: the launches in artifacts/demo, the report in reports/demo; exit code of the step that failed. Runs in the
# repository, wherever it is called from.
set -euo pipefail
script=$(readlink -f -- "${BASH_SOURCE[0]}")
cd -- "${script%/scripts/*}"

python=$(bash scripts/setup.sh)
exec "$python" -m aorta demo "$@"
