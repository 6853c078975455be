"""From `config.env` to a domain; a module of its own, so that engines in other processes can import it."""

from __future__ import annotations

import importlib
import inspect
import types

from experiments.tasks.options import closest
from sao_jax.training.config import RunConfig
from sao_jax.types import Domain


class FactoryError(ValueError):
  """`config.env.factory` names nothing, or what does not take `config.env.options`."""


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
    FactoryError: there is no such module or function, or it does not take the options.
    TypeError: it returns something else.
  """
  if config.env.factory is None:
    raise FactoryError("env.factory must name a task, as module:function; received None.")
  module, _, function = config.env.factory.partition(":")
  try:
    found = import_named(module)
  except FactoryError as error:
    raise FactoryError(
      f"env.factory must be module:function of a module that can be imported; received {config.env.factory!r}: "
      f"{error}. A file of yours must lie in the working directory or on PYTHONPATH."
    ) from error
  if (factory := getattr(found, function, None)) is None:
    defined = [name for name, value in vars(found).items() if inspect.isfunction(value) and not name.startswith("_")]
    raise FactoryError(f"env.factory {config.env.factory!r}: {module} has no {function!r}{closest(function, defined)}")
  try:
    domain = factory(**config.env.options)
  except TypeError as error:
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
      raise  # of its own, not of how it was called
    takes = ", ".join(inspect.signature(factory).parameters) or "none"
    raise FactoryError(
      f"env.options do not fit env.factory {config.env.factory!r}: {error}; it takes {takes}."
    ) from error
  if not isinstance(domain, Domain):
    raise TypeError(f"env.factory {config.env.factory!r} must return a Domain; received {type(domain).__name__}.")
  return domain
