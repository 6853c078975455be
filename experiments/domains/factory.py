"""From `config.env` to a domain; a module of its own, so that engines in other processes can import it."""

from __future__ import annotations

import difflib
import importlib
import types

from sao_jax.config import RunConfig
from sao_jax.types import Domain


class FactoryError(ValueError):
  """`config.env.factory` names nothing."""


def import_named(module: str) -> types.ModuleType:
  """Imports a module that a user has named.

  Raises:
    FactoryError: it is not there. What it fails to import itself is raised as it is.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if error.name is None or not f"{module}.".startswith(f"{error.name}."):
      raise  # the module is there, and lacks something itself
    raise FactoryError(str(error)) from error


def make_domain(config: RunConfig) -> Domain:
  """Calls the function that `config.env.factory` names.

  Raises:
    FactoryError: there is no such module or function.
    TypeError: it returns something else.
  """
  module, _, function = config.env.factory.partition(":")
  try:
    found = import_named(module)
  except FactoryError as error:
    raise FactoryError(
      f"env.factory must be module:function of a module that can be imported; received {config.env.factory!r}: "
      f"{error}. A file of yours must lie in the working directory or on PYTHONPATH."
    ) from error
  if (factory := getattr(found, function, None)) is None:
    close = difflib.get_close_matches(function, [name for name, value in vars(found).items() if callable(value)], n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise FactoryError(f"env.factory {config.env.factory!r}: {module} has no {function!r}{hint}")
  domain = factory(**config.env.options)
  if not isinstance(domain, Domain):
    raise TypeError(f"env.factory {config.env.factory!r} must return a Domain; received {type(domain).__name__}.")
  return domain
