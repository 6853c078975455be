"""Optional packages, and the extra that installs each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class MissingExtraError(ImportError):
  """An optional package is not installed; the message says how to install it."""


@contextlib.contextmanager
def require_extra(extra: str) -> Iterator[None]:
  """Wraps imports of packages that an extra installs.

  Args:
    extra: its name in `pyproject.toml`.

  Raises:
    MissingExtraError: a package is not installed.
  """
  try:
    yield
  except ModuleNotFoundError as error:
    raise MissingExtraError(
      f"The package {error.name} is not installed: pip install -e '.[{extra}]'", name=error.name
    ) from error
