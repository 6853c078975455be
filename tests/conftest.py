"""Settings for the whole suite: they must be in place before jax is imported."""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# The same for all of a process: Ray keeps what it has once read, and a cluster of the other mode kills its actors.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  # pytest's first process makes it; workers and child processes inherit the variable and share what any has compiled.
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="sao_jax-compiled-")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

from tests.child_environment import FAST_COMPILE

if not any(flag in os.environ.get("XLA_FLAGS", "") for flag in FAST_COMPILE):
  os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FAST_COMPILE)).strip()

import hypothesis
import pytest

from tests import shape_checks

shape_checks.install()

ROOT = pathlib.Path(__file__).resolve().parent

hypothesis.settings.register_profile("suite", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("suite")


# The files that take longest on two quiet cores, in this order. They start first: one that started last would keep one
# core busy while the other has nothing left to do.
LONGEST_FILES = (
  "parallel/loop_mesh_test.py", "training/loop_test.py", "parallel/step_test.py", "parallel/split_mesh_test.py",
  "experiments/ablate_test.py", "training/signals_test.py", "learner/update_test.py", "training/cluster_loop_test.py",
  "experiments/chaos_test.py", "experiments/async_speedup_test.py", "parallel/latent_test.py",
  "experiments/standard_domains_test.py", "parallel/distributed_test.py", "training/health_test.py",
  "training/disk_test.py", "models/transformer_test.py", "rollout/ray/cluster_test.py",
  "envs/sandbox/hostile_test.py", "experiments/train_test.py", "experiments/evaluate_test.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Puts the longest files first; the others keep their order."""
  ranks = {ROOT / name: rank for rank, name in enumerate(LONGEST_FILES)}
  items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.fixture(autouse=True)
def no_run_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
  """A signal that meets a main thread which goes on compiling would end the process: here that of all tests."""
  monkeypatch.setattr("sao_jax.training.signals._ABORT_AFTER_S", 1000.0)


@pytest.fixture
def own_checks() -> Iterator[None]:
  """Lets a function's own checks see arguments that its annotations forbid."""
  with shape_checks.without():
    yield
