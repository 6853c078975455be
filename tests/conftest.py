"""Settings for the whole suite: they must be in place before jax is imported."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# The same for all of a process: Ray keeps what it has once read, and a cluster of the other mode kills its actors.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  # What one test, worker or child process has compiled, the others read back.
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="sao_jax-compiled-")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import hypothesis
import pytest

from tests import shape_checks

shape_checks.install()

hypothesis.settings.register_profile("suite", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def no_run_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
  """A signal that meets a main thread which goes on compiling would end the process: here that of all tests."""
  monkeypatch.setattr("sao_jax.training.signals._ABORT_AFTER_S", 1000.0)


@pytest.fixture
def own_checks() -> Iterator[None]:
  """Lets a function's own checks see arguments that its annotations forbid."""
  with shape_checks.without():
    yield
