"""Environment variables with which processes share compiled programs."""

from __future__ import annotations

import pathlib


def shared_cache(folder: pathlib.Path) -> dict[str, str]:
  """Returns the variables that make JAX keep every compiled program, however small, in a folder."""
  return {
    "JAX_COMPILATION_CACHE_DIR": str(folder),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }
