"""SAO (arXiv 2607.07508) in JAX. `ops` holds the pure functions; the other packages build on them."""

from __future__ import annotations

import typing

from sao_jax import ops, types
from sao_jax.utils import moved_modules
from sao_jax.version import __version__

if typing.TYPE_CHECKING:
  from sao_jax.training.trainer import Trainer  # noqa: F401 (made by __getattr__)

__all__ = ["__version__", "ops", "types"]

moved_modules.install()


def __getattr__(name: str) -> typing.Any:
  """Imports `Trainer` at its first use: `import sao_jax` loads the pure functions only."""
  if name == "Trainer":
    from sao_jax.training.trainer import Trainer

    return Trainer
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
