"""The environment of child processes that a test starts to see that a command works, not what it computes."""

from __future__ import annotations

import os

FAST_COMPILE = (
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
  "--xla_cpu_use_fusion_emitters=false",
)
"""XLA's compiler takes no pains. Its older emitters, in place of the fusion emitters, need less than half the time."""


def fast_compile(*flags: str, **environment: str) -> dict[str, str]:
  """This process's environment, on the CPU, with `FAST_COMPILE` and more of XLA's `flags`, and with `environment`."""
  return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join((*flags, *FAST_COMPILE)), **environment}
