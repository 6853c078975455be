"""From `config.env` to a domain; a module of its own, so that engines in other processes can import it."""

from __future__ import annotations

import importlib

from sao_jax.config import RunConfig
from sao_jax.types import Domain


def make_domain(config: RunConfig) -> Domain:
  """Calls the function that `config.env.factory` names."""
  module, _, function = config.env.factory.partition(":")
  domain = getattr(importlib.import_module(module), function)(**config.env.options)
  if not isinstance(domain, Domain):
    raise TypeError(f"env.factory {config.env.factory!r} must return a Domain; received {type(domain).__name__}.")
  return domain
