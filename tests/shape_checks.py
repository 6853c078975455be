"""Run-time checks of the shapes and dtypes in signatures, for the tests only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import beartype
import jaxtyping

PACKAGES = ("sao_jax.ops", "sao_jax.learner", "sao_jax.models")

# An int is accepted for a float, as it is by static type checkers.
_CHECK = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a function check its arguments and results against its annotations."""
  return _CHECK(function)


def install() -> None:
  """Checks every call of a function in `PACKAGES`. Must run before these are imported."""
  jaxtyping.install_import_hook(PACKAGES, "tests.shape_checks.checked")


@contextlib.contextmanager
def without() -> Iterator[None]:
  """Switches the checks off, so that a function's own checks see bad arguments."""
  jaxtyping.config.update("jaxtyping_disable", True)
  try:
    yield
  finally:
    jaxtyping.config.update("jaxtyping_disable", False)
