"""Training: the loop that a newcomer reads first, the stages before it, and everything that hangs on them."""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
  from sao_jax.training.trainer import Trainer  # noqa: F401 (made by __getattr__)


def __getattr__(name: str) -> typing.Any:
  """Imports `Trainer` at its first use: most modules of this package need only a part of the library."""
  if name == "Trainer":
    from sao_jax.training.trainer import Trainer

    return Trainer
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
