"""Packages that are not installed with the library, and the extra of `setup.py` that brings each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class MissingExtraError(ImportError):
  """What was asked for needs packages that are not installed; the message says how to get them."""


@contextlib.contextmanager
def require_extra(extra: str) -> Iterator[None]:
  """Around imports of what an extra brings.

  Args:
    extra: its name in `setup.py`.

  Raises:
    MissingExtraError: a package is not there.
  """
  try:
    yield
  except ModuleNotFoundError as error:
    raise MissingExtraError(
      f"The package {error.name} is not installed: pip install -e '.[{extra}]'", name=error.name
    ) from error
