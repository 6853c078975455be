"""From `config.env` to a domain; a module of its own, so that engines in other processes can import it."""

from __future__ import annotations

import difflib
import importlib

from sao_jax.config import RunConfig
from sao_jax.types import Domain


class FactoryError(ValueError):
  """`config.env.factory` names nothing."""


def make_domain(config: RunConfig) -> Domain:
  """Calls the function that `config.env.factory` names.

  Raises:
    FactoryError: there is no such module or function.
    TypeError: it returns something else.
  """
  module, _, function = config.env.factory.partition(":")
  try:
    factory = getattr(importlib.import_module(module), function)
  except ModuleNotFoundError as error:
    if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
      raise  # the module is there, and lacks something itself
    raise FactoryError(
      f"env.factory must be module:function of a module that can be imported; received {config.env.factory!r}: "
      f"{error}. A file of yours must lie in the working directory or on PYTHONPATH."
    ) from error
  except AttributeError as error:
    known = [name for name, value in vars(importlib.import_module(module)).items() if callable(value)]
    close = difflib.get_close_matches(function, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise FactoryError(f"env.factory {config.env.factory!r}: {module} has no {function!r}{hint}") from error
  domain = factory(**config.env.options)
  if not isinstance(domain, Domain):
    raise TypeError(f"env.factory {config.env.factory!r} must return a Domain; received {type(domain).__name__}.")
  return domain
