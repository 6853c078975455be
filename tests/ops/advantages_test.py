"""sao_jax.ops.advantages: both scans against one oracle (PITFALLS 7, 11-16, 18, 23, 27)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.ops import _recurrences, advantages
from tests.ops import oracles

T = 12
IMPLEMENTATIONS = ["sequential", "associative"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
  """Runs a test with the scan of the CPU and with that of accelerators."""
  if request.param == "associative":
    # Under jit: op by op it compiles dozens of slices.
    monkeypatch.setattr(_recurrences, "gae", jax.jit(_recurrences.gae_associative))
    monkeypatch.setattr(_recurrences, "fill", jax.jit(_recurrences.fill_associative, static_argnames="reverse"))
  return request.param


def packed_row(rng: np.random.Generator, length: int, segments: int):
  """Rewards, values, mask and segment ids (ascending from 1, padding at the end); NaN wherever nothing may be read."""
  cuts = np.sort(rng.choice(np.arange(1, length), size=segments, replace=False))
  ids = np.concatenate([np.full(n, i + 1) for i, n in enumerate(np.diff([0, *cuts, length]))])
  ids[ids == segments + 1] = 0
  mask = (rng.random(length) < 0.6) & (ids != 0)
  r, v = (np.where(mask, rng.normal(size=length), np.nan).astype(np.float32) for _ in range(2))
  return r, v, mask, ids.astype(np.int32)


# (packed, discount and lambda_ per token, kind of bootstrap): each is compiled once per scan.
CASES = [(True, False, "zero"), (True, True, "per token"), (True, False, "per segment"), (False, True, "per token")]


@given(seed=st.integers(0, 2**32 - 1), case=st.sampled_from(CASES))
@pytest.mark.parametrize("scan", IMPLEMENTATIONS)
def test_gae_is_the_definition(scan, seed, case):
  packed, vector, kind = case
  rng = np.random.default_rng(seed)
  r, v, mask, ids = packed_row(rng, T, 3)
  discount, lambda_ = rng.random(2).astype(np.float32)
  if vector:
    discount, lambda_ = (np.where(mask, rng.random(T), np.nan).astype(np.float32) for _ in range(2))
  bootstrap = seen = np.float32(0)
  if kind == "per segment":
    bootstrap = rng.normal(size=4).astype(np.float32)  # entry 0 belongs to padding
    seen = bootstrap[ids]
  ids = ids if packed else None
  if kind == "per token":
    bootstrap = seen = np.full(T, np.nan, np.float32)
    for chain in oracles.action_chains(mask, ids):
      bootstrap[chain[-1]] = rng.normal()
  gae = SCANS[scan](r, v, mask, discount, lambda_, bootstrap, ids)
  expected = oracles.gae(r, v, mask, discount=discount, lambda_=lambda_, bootstrap=seen, segment_ids=ids)
  np.testing.assert_allclose(gae, expected, rtol=1e-4, atol=1e-5)
  assert gae.dtype == jnp.float32


def run_gae(scan, r, v, mask, discount, lambda_, bootstrap, ids):
  keywords = {"discount": discount, "lambda_": lambda_, "bootstrap_value": bootstrap, "segment_ids": ids}
  with pytest.MonkeyPatch.context() as patch:
    if scan == "associative":
      patch.setattr(_recurrences, "gae", _recurrences.gae_associative)
      patch.setattr(_recurrences, "fill", _recurrences.fill_associative)
    return advantages.skip_observation_gae(r, v, mask, **keywords)


SCANS = {name: jax.jit(partial(run_gae, name)) for name in IMPLEMENTATIONS}


def test_returns_are_advantages_plus_values_on_action_tokens():
  rng = np.random.default_rng(5)
  r, v, mask, ids = packed_row(rng, T, 3)
  keywords = {"discount": 0.9, "lambda_": 0.8, "segment_ids": ids}
  bootstrap = rng.normal(size=4).astype(np.float32)
  returns = advantages.skip_observation_returns(r, v, mask, bootstrap_value=bootstrap, **keywords)
  expected = oracles.gae(r, v, mask, bootstrap=bootstrap[ids], **keywords) + np.nan_to_num(v)
  np.testing.assert_allclose(returns, np.where(mask, expected, 0), rtol=1e-4, atol=1e-5)
  assert returns.dtype == jnp.float32


@pytest.mark.parametrize(
  ("r", "v", "mask", "keywords", "expected"),
  [
    ([0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], {"discount": 1.0, "lambda_": 0.5}, [0.5, 0, 1, 0]),  # row 11
    ([0, 0, 1], [0.2, 999, 0.4], [1, 0, 1], {"discount": 1.0, "lambda_": 1.0}, [0.8, 0, 0.6]),  # row 12
    ([2], [1], [1], {"discount": 0.5, "lambda_": 0.9, "bootstrap_value": 5.0}, [3.5]),  # row 16
    ([2], [1], [1], {"discount": 0.5, "lambda_": 0.9}, [1.0]),
    ([2, 9, 9], [1, 9, 9], [1, 0, 0], {"discount": 0.5, "lambda_": 0.9, "bootstrap_value": 5.0}, [3.5, 0, 0]),
    ([0, 1], [0.5, 0.5], [1, 1], {"discount": 1.0, "lambda_": 0.0}, [0.0, 0.5]),  # row 15: A = 0 is an action's
  ],
)
def test_pitfalls(implementation, r, v, mask, keywords, expected):
  adv = advantages.skip_observation_gae(jnp.array(r), jnp.array(v), jnp.array(mask, bool), **keywords)
  np.testing.assert_allclose(adv, expected, atol=1e-6)


def test_pitfalls_12_and_13_returns(implementation):
  f = partial(advantages.skip_observation_returns, discount=1.0, lambda_=1.0)
  np.testing.assert_allclose(f(jnp.array([0, 0, 1]), jnp.array([0.2, 999, 0.4]), jnp.array([1, 0, 1], bool)), [1, 0, 1])
  np.testing.assert_allclose(f(jnp.array([0, 1]), jnp.array([0.5, 0.5]), jnp.ones(2, bool)), [1, 1])


def test_per_token_wins_where_a_bootstrap_fits_both_and_padding_is_no_action(implementation):
  ids = jnp.array([1, 1, 2, 0])
  bootstrap = jnp.array([1.0, 2.0, 3.0, 4.0])
  f = partial(advantages.skip_observation_gae, jnp.zeros(4), jnp.zeros(4), discount=1.0, lambda_=0.0, segment_ids=ids)
  np.testing.assert_allclose(f(jnp.ones(4, bool), bootstrap_value=bootstrap), [0, 2, 3, 0])
  np.testing.assert_allclose(f(jnp.ones(4, bool), bootstrap_value=jnp.array([9.0, 1.0, 2.0])), [0, 1, 2, 0])


def test_a_broken_value_stays_in_its_segment(implementation):
  ids = jnp.array([1, 1, 2, 2])
  v = jnp.array([0.0, 0.0, jnp.nan, jnp.inf])
  adv = advantages.skip_observation_gae(jnp.ones(4), v, jnp.ones(4, bool), discount=1.0, lambda_=0.9, segment_ids=ids)
  np.testing.assert_allclose(adv[:2], [1.9, 1.0], rtol=1e-6)
  assert not np.isfinite(adv[2:]).any()


def test_nothing_masked_in_and_gradients_are_finite(implementation):
  bad = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1.0])

  def total(r, v, mask):
    ids = jnp.array([1, 1, 2, 2])
    return advantages.skip_observation_gae(r, v, mask, discount=0.9, lambda_=0.8, segment_ids=ids).sum()

  for mask, expected in ((jnp.zeros(4, bool), np.zeros(4)), (jnp.array([0, 0, 0, 1], bool), [0, 0, 0, 1.0])):
    value, (g_r, g_v) = jax.value_and_grad(total, argnums=(0, 1))(bad, bad, mask)
    assert np.isfinite(value)
    np.testing.assert_allclose(g_r, expected)
    np.testing.assert_allclose(g_v, -np.array(expected))


def test_gradients_are_the_recursions(implementation):
  rng = np.random.default_rng(3)
  r, v, mask, ids = packed_row(rng, T, 2)
  weight = rng.normal(size=T)
  keywords = {"discount": 0.9, "lambda_": 0.7, "segment_ids": ids}
  g_r, g_v = jax.grad(
    lambda a, b: (weight * advantages.skip_observation_gae(a, b, mask, **keywords)).sum(), argnums=(0, 1)
  )(r, v)
  r0, v0 = np.nan_to_num(r).astype(float), np.nan_to_num(v).astype(float)
  unit = np.eye(T)
  for t in range(T):  # linear: differences are exact
    base = weight @ oracles.gae(r0, v0, mask, **keywords)
    np.testing.assert_allclose(g_r[t], weight @ oracles.gae(r0 + unit[t], v0, mask, **keywords) - base, atol=1e-5)
    np.testing.assert_allclose(g_v[t], weight @ oracles.gae(r0, v0 + unit[t], mask, **keywords) - base, atol=1e-5)


@pytest.mark.parametrize("scan", IMPLEMENTATIONS)
def test_65536_tokens(scan):
  rng = np.random.default_rng(0)
  length = 65_536
  r, v, mask, ids = packed_row(rng, length, 40)
  lengths = np.bincount(ids[mask], minlength=41)
  lambda_ = np.asarray(advantages.length_adaptive_lambda(lengths))[ids]
  bootstrap = rng.normal(size=41).astype(np.float32)
  adv = SCANS[scan](r, v, mask, np.float32(1), lambda_, bootstrap, ids)
  expected = oracles.gae(r, v, mask, discount=1.0, lambda_=lambda_, bootstrap=bootstrap[ids], segment_ids=ids)
  np.testing.assert_allclose(adv, expected, rtol=1e-4, atol=2e-3)


def test_cpu_programs_hold_the_sequential_scan_alone():
  x = jnp.zeros(64)
  f = jax.jit(lambda r: advantages.skip_observation_gae(r, x, jnp.ones(64, bool), discount=1.0, lambda_=0.5))
  text = f.lower(x).compile().as_text()
  assert text.count(" while(") == 1
  assert "conditional(" not in text
  exported = jax.export.export(f, platforms=("cuda",))(x).mlir_module()
  assert "stablehlo.while" not in exported


def test_vmap_gives_each_row_its_own_mask_lambda_and_segments(implementation):
  rng = np.random.default_rng(1)
  rows = [packed_row(rng, T, n) for n in (1, 3)]
  r, v, mask, ids = (np.stack(x) for x in zip(*rows, strict=True))
  lambda_ = np.array([0.2, 0.9], np.float32)
  f = lambda r, v, m, s, l: advantages.skip_observation_gae(r, v, m, discount=0.9, lambda_=l, segment_ids=s)  # noqa: E731
  out = jax.vmap(f)(r, v, mask, ids, lambda_)
  for i in range(2):
    expected = oracles.gae(r[i], v[i], mask[i], discount=0.9, lambda_=lambda_[i], segment_ids=ids[i])
    np.testing.assert_allclose(out[i], expected, rtol=1e-4, atol=1e-5)


def test_integer_rewards_and_masks_and_half_precision_values(own_checks):
  adv = advantages.skip_observation_gae(
    jnp.array([0, 1]), jnp.array([0.5, 0.5], jnp.bfloat16), jnp.array([1, 1]), discount=1, lambda_=1
  )
  assert adv.dtype == jnp.float32
  np.testing.assert_allclose(adv, [0.5, 0.5])


# (packed, turn ids given, step_value): each is compiled once.
STEP_CASES = [(True, True, "mean"), (True, False, "last"), (False, True, "last"), (False, False, "mean")]


@given(seed=st.integers(0, 2**32 - 1), case=st.sampled_from(STEP_CASES))
def test_step_level_gae_is_the_definition(seed, case):
  packed, turns, step_value = case
  rng = np.random.default_rng(seed)
  r, v, mask, ids = packed_row(rng, T, 2)
  turn_ids = np.where(mask, np.cumsum(rng.random(T) < 0.5) + 1, 0) if turns else None
  ids = ids if packed else None
  discount, lambda_ = (np.where(mask, rng.random(T), np.nan).astype(np.float32) for _ in range(2))
  bootstrap = np.full(T, np.nan, np.float32)
  for chain in oracles.action_chains(mask, ids):
    bootstrap[chain[-1]] = rng.normal()
  actual = step_level(r, v, mask, discount, lambda_, bootstrap, ids, turn_ids, step_value)
  expected = oracles.step_gae(
    r,
    v,
    mask,
    discount=discount,
    lambda_=lambda_,
    step_value=step_value,
    bootstrap=bootstrap,
    segment_ids=ids,
    turn_ids=turn_ids,
  )
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@partial(jax.jit, static_argnums=8)
def step_level(r, v, mask, discount, lambda_, bootstrap, ids, turn_ids, step_value):
  return advantages.step_level_gae(
    r,
    v,
    mask,
    discount=discount,
    lambda_=lambda_,
    step_value=step_value,
    bootstrap_value=bootstrap,
    segment_ids=ids,
    turn_ids_t=turn_ids,
  )


def test_touching_turns_are_two_steps_only_if_turn_ids_say_so():
  r, v, mask = np.zeros(T, np.float32), np.zeros(T, np.float32), np.arange(T) < 4
  r[:4] = [1, 0, 1, 1]
  half, one, bootstrap = np.full(T, 0.5, np.float32), np.ones(T, np.float32), np.zeros(T, np.float32)
  f = partial(step_level, r, v, mask, half, one, bootstrap, None)
  np.testing.assert_allclose(f(None, "mean")[:4], [3, 3, 3, 3])
  for turns, expected in (([1, 1, 2, 2], [2, 2, 2, 2]), ([1, 1, 1, 2], [2.5, 2.5, 2.5, 1])):
    np.testing.assert_allclose(f(np.array(turns + [0] * (T - 4)), "last")[:4], expected)
  nothing = step_level(r * np.nan, v, mask & False, half, one, bootstrap * np.nan, None, None, "mean")
  np.testing.assert_array_equal(nothing, np.zeros(T))


def test_length_adaptive_lambda():
  lengths, expected = np.array([4, 1, 100, 0]), [5 / 6, 1 / 3, 149 / 150, 0]
  np.testing.assert_allclose(advantages.length_adaptive_lambda(lengths), expected, rtol=1e-6)
  assert float(advantages.length_adaptive_lambda(1, alpha=0.5)) == 0.0
  assert advantages.length_adaptive_lambda(jnp.int32(4)).dtype == jnp.float32
  with pytest.raises(ValueError, match="alpha"):
    advantages.length_adaptive_lambda(4, alpha=0.0)
  with pytest.raises(ValueError, match="num_actions"):
    advantages.length_adaptive_lambda(-1)


@given(
  st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2, width=16)), min_size=10, max_size=10),
  st.booleans(),
)
def test_group_relative_advantages_are_the_definition(pairs, normalize_std):
  ids, rewards = (np.array(x) for x in zip(*pairs, strict=True))
  actual = group(rewards.astype(np.float32), ids, normalize_std)
  expected = oracles.group_advantages(rewards, ids, normalize_std=normalize_std)
  np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-4)


group = jax.jit(
  lambda r, ids, std: advantages.group_relative_advantages(r, ids, num_groups=4, normalize_std=std), static_argnums=2
)


def test_groups_of_equal_rewards_have_no_advantage_at_all():
  rewards = np.full(10, 0.1, np.float32)
  np.testing.assert_array_equal(group(rewards, np.array([0] * 9 + [1]), True), np.zeros(10))
  unknown = group(rewards, np.array([0] * 8 + [4, -1]), True)  # traced ids cannot be checked
  np.testing.assert_array_equal(np.isnan(unknown), [False] * 8 + [True] * 2)


def test_bad_input(own_checks):
  z, m = jnp.zeros(3), jnp.ones(3, bool)
  gae = partial(advantages.skip_observation_gae, discount=1.0, lambda_=1.0)
  with pytest.raises(ValueError, match=r"one stream \[T\] \(use jax.vmap"):
    gae(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3), bool))
  with pytest.raises(ValueError, match=r"v_t \(4,\)"):
    gae(z, jnp.zeros(4), m)
  with pytest.raises(TypeError, match="action_mask_t must be a bool mask"):
    gae(z, z, z)
  with pytest.raises(ValueError, match=r"discount must be in \[0, 1\]; received 1.5"):
    advantages.skip_observation_gae(z, z, m, discount=1.5, lambda_=1.0)
  with pytest.raises(ValueError, match=r"lambda_ must be a scalar or broadcast with \[T\]"):
    advantages.skip_observation_gae(z, z, m, discount=1.0, lambda_=jnp.ones(2))
  with pytest.raises(ValueError, match="segment_ids must be"):
    gae(z, z, m, segment_ids=jnp.ones(2, int))
  with pytest.raises(TypeError, match="segment_ids must be integers"):
    gae(z, z, m, segment_ids=z)
  with pytest.raises(ValueError, match=r"indexed by segment id.*ids up to 2 need at least 3 entries"):
    gae(z, z, m, segment_ids=jnp.array([1, 2, 2]), bootstrap_value=jnp.ones(2))
  with pytest.raises(ValueError, match="no segment_ids"):
    gae(z, z, m, bootstrap_value=jnp.ones(2))
  with pytest.raises(ValueError, match="step_value must be 'mean' or 'last'; received 'max'"):
    advantages.step_level_gae(z, z, m, discount=1.0, lambda_=1.0, step_value="max")
  with pytest.raises(ValueError, match="turn_ids_t"):
    advantages.step_level_gae(z, z, m, discount=1.0, lambda_=1.0, step_value="mean", turn_ids_t=jnp.ones(2, int))
  with pytest.raises(ValueError, match=r"group_ids must be in \[0, num_groups = 2\)"):
    advantages.group_relative_advantages(z, np.array([0, 1, 2]), num_groups=2)
