"""SAO (arXiv 2607.07508) in JAX. `ops` holds the pure functions; the other packages build on them."""

from __future__ import annotations

from sao_jax import ops, types
from sao_jax.utils import moved_modules
from sao_jax.version import __version__

__all__ = ["__version__", "ops", "types"]

moved_modules.install()
