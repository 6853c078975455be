"""Run-time checks of the shapes and dtypes in signatures, for the tests only."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import beartype
import jaxtyping

PACKAGES = ("ops", "learner", "models")
OWN_CHECKS = ("config",)
"""Modules whose dataclasses check all their fields themselves."""

# An int is accepted for a float, as it is by static type checkers.
_CHECK = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a function check its arguments and results against its annotations."""
  return _CHECK(function)


def install() -> None:
  """Checks every call of a function in the modules of `PACKAGES`. Must run before these are imported."""
  jaxtyping.install_import_hook(modules(), "tests.shape_checks.checked")


def modules() -> list[str]:
  """Names of the checked modules."""
  library = pathlib.Path(__file__).parent.parent / "sao_jax"
  files = (file for package in PACKAGES for file in sorted((library / package).glob("*.py")))
  return [f"sao_jax.{file.parent.name}.{file.stem}" for file in files if file.stem not in ("__init__", *OWN_CHECKS)]


@contextlib.contextmanager
def without() -> Iterator[None]:
  """Switches the checks off, so that a function's own checks see bad arguments."""
  jaxtyping.config.update("jaxtyping_disable", True)
  try:
    yield
  finally:
    jaxtyping.config.update("jaxtyping_disable", False)
