"""Makes the domain that `config.env` names. A separate module, so that engines in other processes can import it."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable

from experiments.tasks.options import closest
from sao_jax.training.config import RunConfig
from sao_jax.types import Domain


class FactoryError(ValueError):
  """`config.env.factory` does not exist, or does not accept `config.env.options`."""


def import_named(module: str) -> types.ModuleType:
  """Imports a module named by the user.

  Raises:
    FactoryError: the module does not exist. If it exists and fails to import another module, that error is raised.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if error.name is None or not f"{module}.".startswith(f"{error.name}."):
      raise  # the module exists, and one of its own imports is missing
    raise FactoryError(str(error)) from error


def find_factory(config: RunConfig) -> Callable[..., Domain]:
  """Returns the function that `config.env.factory` names.

  Raises:
    FactoryError: the module or function does not exist.
  """
  if config.env.factory is None:
    raise FactoryError("env.factory must name a task, as module:function; received None.")
  module, _, function = config.env.factory.partition(":")
  try:
    found = import_named(module)
  except FactoryError as error:
    raise FactoryError(
      f"env.factory must be module:function of a module that can be imported; received {config.env.factory!r}: "
      f"{error}. Your own file must be in the working directory or on PYTHONPATH."
    ) from error
  if (factory := getattr(found, function, None)) is None:
    defined = [name for name, value in vars(found).items() if inspect.isfunction(value) and not name.startswith("_")]
    raise FactoryError(f"env.factory {config.env.factory!r}: {module} has no {function!r}{closest(function, defined)}")
  return factory  # type: ignore[no-any-return]


def make_domain(config: RunConfig) -> Domain:
  """Calls the function that `config.env.factory` names.

  Raises:
    FactoryError: the module or function does not exist, or it does not accept the options.
    TypeError: the function returns something other than a Domain.
  """
  factory = find_factory(config)
  try:
    domain = factory(**config.env.options)
  except TypeError as error:
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
      raise  # raised inside the function, not by the call
    takes = ", ".join(inspect.signature(factory).parameters) or "none"
    raise FactoryError(
      f"env.options do not fit env.factory {config.env.factory!r}: {error}; it takes {takes}."
    ) from error
  if not isinstance(domain, Domain):
    raise TypeError(f"env.factory {config.env.factory!r} must return a Domain; received {type(domain).__name__}.")
  return domain
