"""Imports of optional packages, with an error that names the extra of `setup.py` to install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class MissingExtraError(ImportError):
  """An optional package is not installed. The message says how to install it."""


@contextlib.contextmanager
def require_extra(extra: str) -> Iterator[None]:
  """Returns a context manager for imports of packages that an extra installs.

  Args:
    extra: the name of the extra in `setup.py`.

  Raises:
    MissingExtraError: a package is not installed.
  """
  try:
    yield
  except ModuleNotFoundError as error:
    raise MissingExtraError(
      f"The package {error.name} is not installed: pip install -e '.[{extra}]'", name=error.name
    ) from error
