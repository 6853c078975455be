"""sao_jax.ops.diagnostics, and the names and doctests of the whole package."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax import ops
from sao_jax.ops import diagnostics

ROWS = st.lists(st.tuples(*[st.floats(-5, 0, width=16)] * 2, st.booleans()), min_size=8, max_size=8)
EV = jax.jit(diagnostics.explained_variance)
ESS = jax.jit(diagnostics.effective_sample_size)
KL = jax.jit(diagnostics.approx_kl)


@given(ROWS)
def test_diagnostics_are_their_definitions(rows):
  a, b, mask = (np.array(x) for x in zip(*rows, strict=True))
  dirty = [np.where(mask, x, np.nan).astype(np.float32) for x in (a, b)]
  a, b = a[mask], b[mask]
  r = np.exp(a - b)
  np.testing.assert_allclose(ESS(*dirty, mask), r.sum() ** 2 / (r**2).sum() if mask.any() else 0, rtol=1e-4)
  np.testing.assert_allclose(KL(*dirty, mask), np.mean(r - 1 - (a - b)) if mask.any() else 0, rtol=1e-3, atol=1e-5)
  if not mask.any() or b.std() == 0:
    assert np.isnan(EV(*dirty, mask))
  elif b.std() > 1e-2:
    np.testing.assert_allclose(EV(*dirty, mask), 1 - (b - a).var() / b.var(), rtol=1e-3, atol=1e-3)


def test_explained_variance_of_constant_returns_is_nan_in_spite_of_rounding():
  ones = jnp.ones(4, bool)
  assert np.isnan(diagnostics.explained_variance(jnp.arange(4.0), jnp.full(4, 0.1), ones))
  v = jnp.array([0.1, 0.33, 0.77, 0.2])
  assert np.isnan(diagnostics.explained_variance(v, (1 - v) + v, ones))
  assert float(diagnostics.explained_variance(jnp.zeros(4), jnp.arange(4.0), ones)) == pytest.approx(0.0, abs=1e-6)


def test_extreme_ratios_stay_finite():
  logp, behavior, mask = jnp.array([0.0, -100.0]), jnp.array([-100.0, -100.0]), jnp.ones(2, bool)
  assert float(diagnostics.effective_sample_size(logp, behavior, mask)) == pytest.approx(1.0)
  assert float(diagnostics.approx_kl(logp[1:], behavior[1:], mask[1:], denominator=2)) == 0.0


def test_bad_input(own_checks):
  with pytest.raises(ValueError, match=r"mask \(3,\)"):
    diagnostics.explained_variance(jnp.zeros(2), jnp.zeros(2), jnp.ones(3, bool))


MODULES = [info.name for info in pkgutil.iter_modules(ops.__path__) if not info.name.startswith("_")]


def test_the_package_exports_its_modules_and_all_their_functions_and_classes():
  public = set(MODULES)
  for module in (importlib.import_module(f"sao_jax.ops.{name}") for name in MODULES):
    own = {n: x for n, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__ and n[0] != "_"}
    assert all(getattr(ops, name) is thing for name, thing in own.items())
    public |= set(own)
  assert set(ops.__all__) == public | {"MIN_CHUNKS"}


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
  module = importlib.import_module(f"sao_jax.ops.{name}")
  result = doctest.testmod(module, extraglobs={"jax": jax, "jnp": jnp})
  assert result.failed == 0
  assert result.attempted > 0
