#!/usr/bin/env bash
# Builds the documentation site into out/site; a warning is an error. It needs the project's extra `docs`, and no
# network. Arguments go to `mkdocs build`.
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# Of the theme: a note about MkDocs 2, which pyproject.toml rules out.
export NO_MKDOCS_2_WARNING=1
exec python -m mkdocs build --strict --clean "$@"
