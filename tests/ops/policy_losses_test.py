"""sao_jax.ops.policy_losses (PITFALLS 1-7, 15, 23)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.ops import importance, masking, policy_losses
from tests.ops import oracles

MATH = {"eps_low": 0.3, "eps_high": 5.0}
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LOGP = st.floats(-6, 0, width=32)
TOKEN = st.tuples(LOGP, LOGP, LOGP, st.floats(-3, 3, width=32), st.booleans())
TOKENS = st.lists(TOKEN, min_size=8, max_size=8)


def dis(logp, old, behavior, adv, mask):
  return policy_losses.dis_policy_loss(logp, behavior, adv, mask, **MATH)


def truncated(logp, old, behavior, adv, mask):
  return policy_losses.truncated_is_loss(logp, behavior, adv, mask, cap=2.0)


def ppo(logp, old, behavior, adv, mask):
  return policy_losses.ppo_clip_loss(logp, old, adv, mask, **CLIP)


def icepop(logp, old, behavior, adv, mask):
  return policy_losses.icepop_loss(logp, old, behavior, adv, mask, low=0.5, high=5.0, **CLIP)


def gspo(logp, old, behavior, adv, mask):
  return policy_losses.gspo_loss(logp, old, adv, mask, **CLIP)


def uncorrected(logp, old, behavior, adv, mask):
  return policy_losses.score_function_loss(logp, adv, mask)


LOSSES = [dis, truncated, ppo, icepop, gspo, uncorrected]


def oracle(loss, logp, old, behavior, adv, mask) -> np.ndarray:
  out = np.zeros(len(mask))
  kept = [t for t in range(len(mask)) if mask[t]]
  sequence = np.exp(np.mean([logp[t] - old[t] for t in kept])) if kept else 1.0
  for t in kept:
    r, rho, k = np.exp(logp[t] - behavior[t]), np.exp(logp[t] - old[t]), np.exp(old[t] - behavior[t])
    out[t] = {
      dis: lambda r=r, t=t: -(r if 0.7 < r < 6 else 0) * adv[t] * logp[t],
      truncated: lambda r=r, t=t: -min(r, 2.0) * adv[t] * logp[t],
      ppo: lambda rho=rho, t=t: -oracles.ppo(rho, adv[t], **CLIP),
      icepop: lambda rho=rho, k=k, t=t: -(k if 0.5 <= k <= 5 else 0) * oracles.ppo(rho, adv[t], **CLIP),
      uncorrected: lambda t=t: -adv[t] * logp[t],
      gspo: lambda t=t: -oracles.ppo(sequence, adv[t], **CLIP),
    }[loss]()
  return out


JITTED = {loss: jax.jit(loss) for loss in LOSSES}
GRADIENTS = {loss: jax.jit(jax.grad(lambda *a, f=loss: f(*a).sum(), argnums=(0, 1, 2, 3))) for loss in LOSSES}


def near_a_bound(logp, old, behavior) -> bool:
  ratios = np.exp(np.concatenate([logp - behavior, logp - old, old - behavior]))
  return bool((np.abs(ratios[:, None] / [0.7, 6.0, 0.5, 5.0, 0.8, 1.28, 2.0] - 1) < 1e-4).any())


@pytest.mark.parametrize("loss", LOSSES)
@given(tokens=TOKENS)
def test_losses_and_gradients_are_their_definitions(loss, tokens):
  logp, old, behavior, adv, mask = (np.array(x) for x in zip(*tokens, strict=True))
  if near_a_bound(logp, old, behavior) or (
    loss is gspo and abs(np.exp(np.mean((logp - old)[mask]) if mask.any() else 0) - 1.04) < 0.25
  ):
    return
  dirty = [np.where(mask, x, np.nan).astype(np.float32) for x in (logp, old, behavior, adv)]
  actual = JITTED[loss](*dirty, mask)
  assert actual.dtype == jnp.float32
  np.testing.assert_allclose(actual, oracle(loss, logp, old, behavior, adv, mask), rtol=1e-4, atol=1e-5)
  grads = GRADIENTS[loss](*dirty, mask)
  for constant in grads[1:]:
    np.testing.assert_array_equal(constant, np.zeros(8))
  h = 1e-6
  for t in range(8):
    if loss in (dis, truncated):  # the coefficient is held: its derivative is no part of the definition
      r = np.exp(logp[t] - behavior[t])
      c = min(r, 2.0) if loss is truncated else (r if 0.7 < r < 6 else 0.0)
      expected = -c * adv[t] if mask[t] else 0.0
    else:
      up, down = (oracle(loss, logp + s * h * (np.arange(8) == t), old, behavior, adv, mask).sum() for s in (1, -1))
      expected = (up - down) / (2 * h)
    np.testing.assert_allclose(grads[0][t], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_off_the_mask_nothing_counts_and_nothing_leaks(loss):
  bad = np.array([np.nan, np.inf, -np.inf, 0.0] * 2, np.float32)
  mask = np.zeros(8, bool)
  np.testing.assert_array_equal(JITTED[loss](bad, bad, bad, bad, mask), np.zeros(8))
  for g in GRADIENTS[loss](bad, bad, bad, bad, mask):
    np.testing.assert_array_equal(g, np.zeros(8))


@pytest.mark.parametrize("loss", LOSSES)
def test_vmap_gives_each_row_its_own_mask(loss):
  rng = np.random.default_rng(0)
  logp, old, behavior = -rng.random((3, 2, 8)).astype(np.float32)
  adv, mask = rng.normal(size=(2, 8)).astype(np.float32), rng.random((2, 8)) < 0.5
  rows = jax.jit(jax.vmap(loss))(logp, old, behavior, adv, mask)
  for i in range(2):
    alone = JITTED[loss](logp[i], old[i], behavior[i], adv[i], mask[i])
    np.testing.assert_allclose(rows[i], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_at_an_action_token_is_not_hidden(loss):
  clean, mask = np.full(8, -1.0, np.float32), np.ones(8, bool)
  broken = np.where(np.arange(8) == 1, np.float32(np.nan), clean)
  assert np.isnan(JITTED[loss](broken, clean, clean, clean, mask)[1])
  assert np.isnan(JITTED[loss](clean, clean, clean, broken, mask)[1])


def test_pitfall_3_gradient_of_equation_1():
  g = jax.grad(lambda x: policy_losses.dis_policy_loss(x, -2.1, 2.0, True, **MATH))(-2.0)
  assert float(g) == pytest.approx(-2.2103, abs=1e-4)


def test_pitfall_4_the_ratio_is_applied_once():
  g = jax.grad(lambda x: policy_losses.dis_policy_loss(x, -1.0 - np.log(2), 1.0, True, **MATH))(-1.0)
  assert float(g) == pytest.approx(-2.0, rel=1e-5)


def test_pitfall_5_masked_tokens_stay_in_the_denominator():
  ratio = np.array([1.0, 1.0, 0.1, 10.0])
  logp = jnp.full(4, -1.0)
  loss = policy_losses.dis_policy_loss(logp, -1.0 - np.log(ratio), jnp.ones(4), jnp.ones(4, bool), **MATH)
  assert float(masking.masked_mean(loss, jnp.ones(4, bool))) == pytest.approx(0.5)


def test_dis_masking_ignores_the_sign_of_the_advantage_and_ppo_does_not():
  logp = jnp.log(jnp.array([0.5, 0.5, 7.0, 7.0]))
  adv, mask, zero = jnp.array([1.0, -1.0, 1.0, -1.0]), jnp.ones(4, bool), jnp.zeros(4)
  g_dis = jax.grad(lambda x: policy_losses.dis_policy_loss(x, zero, adv, mask, **MATH).sum())(logp)
  g_ppo = jax.grad(lambda x: policy_losses.ppo_clip_loss(x, zero, adv, mask, **CLIP).sum())(logp)
  np.testing.assert_array_equal(g_dis, np.zeros(4))
  np.testing.assert_array_equal(np.asarray(g_ppo) != 0, [True, False, False, True])


@pytest.mark.parametrize("loss", [dis, ppo, icepop, gspo])
def test_ratios_that_overflow_but_are_cut_have_zero_gradient(loss):
  logp, other, mask = np.full(8, -1, np.float32), np.full(8, -500, np.float32), np.ones(8, bool)
  for adv in (np.ones(8, np.float32), np.zeros(8, np.float32)):
    assert np.isfinite(JITTED[loss](logp, other, other, adv, mask)).all()
    np.testing.assert_array_equal(GRADIENTS[loss](logp, other, other, adv, mask)[0], np.zeros(8))


def test_a_token_of_probability_zero_contributes_nothing():
  for loss in (dis, truncated):
    value, g = jax.value_and_grad(lambda x, f=loss: f(x, x, jnp.array(-1.0), jnp.array(1.0), True))(-jnp.inf)
    assert (float(value), float(g)) == (0.0, 0.0)


def test_icepop_bounds_are_inclusive_and_weight_is_detached():
  k = np.array([0.5, 5.0, 0.4999, 5.001, 2.0])
  logp = old = jnp.full(5, -1.7)
  behavior = (-1.7 - np.log(k)).astype(np.float32)
  f = partial(policy_losses.icepop_loss, low=0.5, high=5.0, **CLIP)
  np.testing.assert_allclose(f(logp, old, behavior, 1.0, True), [-0.5, -5, 0, 0, -2], rtol=1e-5)
  g = jax.grad(lambda x: f(x, old, behavior, 1.0, True).sum())(logp)
  np.testing.assert_allclose(g, [-0.5, -5, 0, 0, -2], rtol=1e-5)
  below, above = importance.icepop_outside(old, behavior, low=0.5, high=5.0)  # the metrics count what the loss masks
  np.testing.assert_array_equal(below | above, g == 0.0)
  assert below.tolist() == [False, False, True, False, False]


def test_gspo_gradient_is_the_papers():
  """Mean over tokens of the loss: -A s / l on each action token."""
  logp, old, mask = (
    jnp.array([-1.0, -2.0, -3.0, -9.0]),
    jnp.array([-1.1, -2.0, -3.0, 0.0]),
    jnp.array([1, 1, 1, 0], bool),
  )
  f = lambda x: masking.masked_mean(policy_losses.gspo_loss(x, old, 2.0, mask, **CLIP), mask)  # noqa: E731
  s = np.exp(0.1 / 3)
  value, g = jax.value_and_grad(f)(logp)
  assert float(value) == pytest.approx(-2 * s, rel=1e-5)
  np.testing.assert_allclose(g, np.array([1, 1, 1, 0]) * -2 * s / 3, rtol=1e-5)


ENTROPIES = st.lists(st.tuples(st.floats(0, 8, width=32), st.booleans()), min_size=8, max_size=8)
KL = jax.jit(policy_losses.kl_loss)
KL_GRADIENT = jax.jit(jax.grad(lambda *a: policy_losses.kl_loss(*a).sum(), argnums=(0, 1)))
ENTROPY = jax.jit(policy_losses.entropy_loss)
ENTROPY_GRADIENT = jax.jit(jax.grad(lambda *a: policy_losses.entropy_loss(*a).sum()))


@given(tokens=st.lists(st.tuples(LOGP, LOGP, st.booleans()), min_size=8, max_size=8))
def test_kl_to_a_reference_and_its_gradient_are_their_definitions(tokens):
  logp, reference, mask = (np.array(x) for x in zip(*tokens, strict=True))
  dirty = [np.where(mask, x, np.nan).astype(np.float32) for x in (logp, reference)]
  expected, gradient = np.zeros(8), np.zeros(8)
  for t in np.flatnonzero(mask):
    d = reference[t] - logp[t]
    expected[t], gradient[t] = np.exp(d) - d - 1.0, 1.0 - np.exp(d)
  actual = KL(*dirty, mask)
  assert actual.dtype == jnp.float32 and (actual >= 0).all()
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-6)
  of_policy, of_reference = KL_GRADIENT(*dirty, mask)
  np.testing.assert_allclose(of_policy, gradient, rtol=1e-4, atol=2e-6)
  np.testing.assert_array_equal(of_reference, np.zeros(8))


@given(tokens=ENTROPIES)
def test_entropy_loss_is_the_negated_entropy_of_action_tokens(tokens):
  entropy, mask = (np.array(x) for x in zip(*tokens, strict=True))
  dirty = np.where(mask, entropy, np.nan).astype(np.float32)
  np.testing.assert_array_equal(ENTROPY(dirty, mask), np.where(mask, -entropy, 0.0).astype(np.float32))
  np.testing.assert_array_equal(ENTROPY_GRADIENT(dirty, mask), np.where(mask, -1.0, 0.0))


def test_regularizers_off_the_mask_at_equal_policies_and_with_nan():
  bad, mask = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32), np.zeros(4, bool)
  for gradient in (*KL_GRADIENT(bad, bad, mask), ENTROPY_GRADIENT(bad, mask), KL(bad, bad, mask), ENTROPY(bad, mask)):
    np.testing.assert_array_equal(gradient, np.zeros(4))
  logp = np.array([-0.1, -3.0, -20.0, 0.0], np.float32)
  for zero in (KL(logp, logp, ~mask), KL_GRADIENT(logp, logp, ~mask)[0]):
    np.testing.assert_array_equal(zero, np.zeros(4))
  assert np.isnan(KL(bad, logp, ~mask)[0]) and np.isnan(KL(logp, bad, ~mask)[0]) and np.isnan(ENTROPY(bad, ~mask)[0])
  rows = jax.vmap(policy_losses.kl_loss)(np.stack([logp, logp]), np.stack([logp, logp - 1]), np.stack([mask, ~mask]))
  np.testing.assert_array_equal(rows, [np.zeros(4), KL(logp, logp - 1, ~mask)])


def test_bad_input(own_checks):
  ones, mask = jnp.ones(3), jnp.ones(3, bool)
  with pytest.raises(ValueError, match=r"adv \(2,\)"):
    policy_losses.dis_policy_loss(ones, ones, jnp.ones(2), mask, **MATH)
  with pytest.raises(ValueError, match="one common shape"):
    policy_losses.dis_policy_loss(jnp.ones((3, 3)), jnp.ones((3, 3)), ones, jnp.ones((3, 3), bool), **MATH)
  with pytest.raises(TypeError, match="action_mask must be a bool mask"):
    policy_losses.ppo_clip_loss(ones, ones, ones, ones, **CLIP)
  with pytest.raises(ValueError, match="cap"):
    policy_losses.truncated_is_loss(ones, ones, ones, mask, cap=0.0)
  with pytest.raises(ValueError, match="low must be below high"):
    policy_losses.icepop_loss(ones, ones, ones, ones, mask, low=5.0, high=0.5, **CLIP)
  with pytest.raises(ValueError, match="clip_low"):
    policy_losses.ppo_clip_loss(ones, ones, ones, mask, clip_low=1.5, clip_high=0.2)
  with pytest.raises(ValueError, match=r"reference_logp \(2,\)"):
    policy_losses.kl_loss(ones, jnp.ones(2), mask)
  with pytest.raises(TypeError, match="action_mask must be a bool mask"):
    policy_losses.entropy_loss(ones, ones)
  with pytest.raises(ValueError, match="one stream"):
    policy_losses.gspo_loss(jnp.ones((2, 3)), jnp.ones((2, 3)), 1.0, jnp.ones((2, 3), bool), **CLIP)
  with pytest.raises(TypeError, match="eps_high"):
    policy_losses.dis_policy_loss(ones, ones, ones, mask, eps_low=0.3)  # type: ignore[call-arg]


def test_gspo_of_a_packed_row_is_that_of_its_segments():
  rng = np.random.default_rng(1)
  logp, old = -rng.random((2, 9)).astype(np.float32)
  adv, mask = rng.normal(size=9).astype(np.float32), np.array([0, 1, 1, 0, 1, 0, 1, 1, 1], bool)
  ids = np.array([7, 7, 7, 3, 3, 3, 3, 0, 0])  # any ids, as for the advantages; 0 is padding whatever the mask says
  packed = policy_losses.gspo_loss(logp, old, adv, mask, segment_ids=ids, **CLIP)
  alone = [
    policy_losses.gspo_loss(*(x[part] for x in (logp, old, adv, mask)), **CLIP) for part in np.split(np.arange(7), [3])
  ]
  np.testing.assert_allclose(packed, np.concatenate([*alone, np.zeros(2)]), rtol=1e-5)
