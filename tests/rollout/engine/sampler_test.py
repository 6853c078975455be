"""The sampler: distribution, log-probs, noise, chunks, early exit, transfers."""

from __future__ import annotations

import threading

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy import stats

from sao_jax.rollout.engine import sampler
from sao_jax.rollout.engine.nucleus import nucleus
from sao_jax.rollout.engine.sampler import PrefillRow, RowState, Sampler, SamplerSpec, sample_tokens
from sao_jax.types import SlotPlacement
from tests.rollout.fakes import POLICY, STOP, make_params

_sample = jax.jit(sample_tokens)


@pytest.mark.parametrize("size", [5, 32, 70, 257])
def test_chi_square(size):
  draws = 40_000
  logits = np.random.default_rng(size).normal(scale=1.5, size=size).astype(np.float32)
  uniform = jax.random.uniform(jax.random.key(size), (draws,))
  tokens, logp = _sample(jnp.broadcast_to(jnp.asarray(logits), (draws, size)), uniform)
  probabilities = np.exp(logits.astype(np.float64) - logits.max())
  probabilities /= probabilities.sum()
  counts = np.bincount(tokens, minlength=size)
  large = probabilities * draws >= 5
  observed = np.append(counts[large], counts[~large].sum())
  expected = np.append(probabilities[large], probabilities[~large].sum()) * draws
  keep = expected > 0
  assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-4
  np.testing.assert_allclose(np.exp(logp), probabilities[tokens], rtol=1e-4)


@hypothesis.given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]), masked=st.booleans())
def test_edges_never_choose_an_impossible_token(seed, scale, masked):
  # Fixed shapes: one compilation. Uniforms at the very ends of [0, 1), and logits of -inf.
  rng = np.random.default_rng(seed)
  logits = (rng.normal(size=(6, 70)) * scale).astype(np.float32)
  if masked:
    logits[:, rng.integers(0, 70, size=60)] = -np.inf
    logits[:, 3] = 0.0
  uniform = np.array([0.0, 1e-30, 0.5, 1 - 2**-24, 1 - 2**-23, rng.uniform()], np.float32)
  tokens, logp = _sample(logits, uniform)
  assert ((np.asarray(tokens) >= 0) & (np.asarray(tokens) < 70)).all()
  chosen = np.take_along_axis(logits, np.asarray(tokens)[:, None], -1)[:, 0]
  assert np.isfinite(chosen).all() and np.isfinite(logp).all() and (np.asarray(logp) <= 0).all()


def test_noise_is_a_function_of_episode_and_position():
  key = jax.random.key(0)
  slot_noise = jax.jit(sampler.slot_noise, static_argnames="steps")
  noise = slot_noise(key, jnp.array([7, 8, 9]), jnp.array([3, 3, 10]), steps=4)
  other = slot_noise(key, jnp.array([9, 7]), jnp.array([11, 5]), steps=2)
  np.testing.assert_array_equal(noise[1:3, 2], other[:, 0])
  np.testing.assert_array_equal(noise[2:4, 0], other[:, 1])
  assert len(np.unique(noise)) == 12
  assert not np.isin(slot_noise(jax.random.key(1), jnp.array([7]), jnp.array([3]), steps=4), noise).any()


def make_sampler(temperature=1.0, chunk_steps=4, num_slots=3, top_p=1.0) -> Sampler:
  spec = SamplerSpec(model=POLICY, chunk_steps=chunk_steps, temperature=temperature, stop_ids=(STOP,), top_p=top_p)
  return Sampler(spec, num_slots=num_slots, max_len=32)


def row(slot, tokens, budget=100, activate=True, episode=0, start=0) -> PrefillRow:
  return PrefillRow(slot, start, np.array(tokens[:-1], np.int32), RowState(tokens[-1], budget, activate, episode))


def test_hot_loop_has_no_implicit_transfer_and_donates():
  made = make_sampler()
  params, key = jax.device_put(make_params(0, stop_bias=-20)), jax.random.key(0)
  cache = made._streams[0].cache["tokens"]
  for i in range(3):
    with jax.transfer_guard("disallow" if i else "allow"):  # compilation may transfer constants
      made.prefill(params, [row(0, [3, 4, 5]), row(2, [6])], num_rows=2, width=4, live_len=16)
      chunk = made.fetch(made.decode(params, key, stream=0, live_lens=(16,)))
  assert cache.is_deleted()
  np.testing.assert_array_equal(chunk.num_sampled, [4, 0, 4])
  np.testing.assert_array_equal(chunk.active, [True, False, True])


def test_every_program_over_several_devices_starts_in_its_turn(monkeypatch):
  """Threads that start programs with collectives in different orders would wait for each other for ever."""
  turn, started = threading.RLock(), set()

  def in_turn(name, program):
    def start(*args, **kwargs):
      assert turn._is_owned(), name
      started.add(name)
      return program(*args, **kwargs)

    return start

  programs = {name: value for name, value in vars(sampler).items() if hasattr(value, "lower") and callable(value)}
  for name, program in programs.items():
    monkeypatch.setattr(sampler, name, in_turn(name, program))
  whole = NamedSharding(Mesh(np.array(jax.devices()[:1]), "x"), PartitionSpec())
  model = POLICY._replace(placement=SlotPlacement(whole, whole, lambda: turn))
  made = Sampler(SamplerSpec(model=model, chunk_steps=2, temperature=1.0, stop_ids=(STOP,)), num_slots=2, max_len=8)
  params = jax.device_put(make_params(0), whole)
  made.prefill(params, [row(0, [3, 4])], num_rows=1, width=4, live_len=8)
  made.fetch(made.decode(params, jax.random.key(0), stream=0, live_lens=(8,)))
  made.write_row(1, made.read_row(0, to_host=False))
  assert started == programs.keys()


def test_budget_and_stop_end_a_slot_inside_the_chunk():
  made = make_sampler(chunk_steps=6)
  always = {**make_params(0), "table": jnp.zeros((31, 20)).at[:, STOP].set(50.0)}
  never = {**make_params(0), "table": jnp.zeros((31, 20)).at[:, STOP].set(-50.0)}
  rows = [row(0, [3, 4], budget=2), row(1, [5, 6], budget=9)]
  made.prefill(never, rows, num_rows=4, width=4, live_len=32)
  chunk = made.fetch(made.decode(never, jax.random.key(0), stream=0, live_lens=(32,)))
  np.testing.assert_array_equal(chunk.num_sampled, [2, 6, 0])
  np.testing.assert_array_equal(chunk.active, [False, True, False])
  chunk = made.fetch(made.decode(always, jax.random.key(0), stream=0, live_lens=(32,)))
  np.testing.assert_array_equal(chunk.num_sampled, [0, 1, 0])
  assert chunk.tokens[0, 1] == STOP
  # Early exit: nothing was sampled after the first step.
  assert (chunk.tokens[1:] == 0).all() and (chunk.logp[1:] == 0).all()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logp_is_of_the_tempered_distribution(temperature):
  # PITFALL 9. The same logits at every step: a two-row table would do, the hash only picks a row.
  params = make_params(0)
  params["table"] = jnp.broadcast_to(params["table"][:1].at[:, STOP].set(-99.0), params["table"].shape)
  made = make_sampler(temperature, chunk_steps=8)
  made.prefill(params, [row(0, [3])], num_rows=2, width=4, live_len=32)
  chunk = made.fetch(made.decode(params, jax.random.key(0), stream=0, live_lens=(32,)))
  expected = jax.nn.log_softmax(params["table"][0] / temperature)[chunk.tokens[:, 0]]
  np.testing.assert_allclose(chunk.logp[:, 0], expected, rtol=1e-5)


def nucleus_oracle(logits: np.ndarray, top_p: float) -> np.ndarray:
  """Returns the truncated distribution in float64, from its definition; NaN if rounding decides its tokens."""
  p = np.exp(logits.astype(np.float64) - logits.max())
  p /= p.sum()
  before = np.array([p[p > x].sum() for x in p])
  if (abs(before - top_p) < 1e-5).any():
    return np.full_like(p, np.nan)
  kept = np.where(before < top_p, p, 0.0)
  return kept / kept.sum()


_nucleus = jax.jit(nucleus, static_argnames="top_p")


@hypothesis.given(
  seed=st.integers(0, 2**31),
  scale=st.sampled_from([0.0, 1.0, 30.0]),
  top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.95]),
  ties=st.booleans(),
)
def test_nucleus_matches_its_definition(seed, scale, top_p, ties):
  rng = np.random.default_rng(seed)
  logits = (rng.normal(size=(4, 37)) * scale).astype(np.float32)
  if ties:
    logits = np.round(logits)
  logits[0, 5:] = -np.inf
  found = np.asarray(jax.nn.softmax(_nucleus(logits, top_p=top_p)), np.float64)
  for row, kept in zip(logits, found, strict=True):
    expected = nucleus_oracle(row, top_p)
    assert kept[row == row.max()].min() > 0
    if np.isfinite(expected).all():
      np.testing.assert_array_equal(kept > 0, expected > 0)
      np.testing.assert_allclose(kept, expected, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize(("top_p", "left"), [(0.3, [0]), (0.4, [0]), (0.45, [0, 1, 2]), (0.85, [0, 1, 2, 3])])
def test_nucleus_of_a_row_with_ties(top_p, left):
  # The two of 0.2 are both in or both out; 0.4 is reached by the first token.
  logits = np.log(np.array([[0.402, 0.2, 0.2, 0.15, 0.048]], np.float32))
  assert np.flatnonzero(np.isfinite(np.asarray(_nucleus(logits, top_p=top_p))[0])).tolist() == left


@pytest.mark.parametrize("top_p", [0.3, 0.8])
def test_top_p_samples_the_truncated_distribution_and_records_its_log_probs(top_p):
  """PITFALL 9, with a temperature: behaviour log-probs are those of the distribution that was sampled from."""
  params = make_params(0)
  params["table"] = jnp.broadcast_to(params["table"][:1].at[:, STOP].set(-99.0), params["table"].shape)
  made = make_sampler(0.7, chunk_steps=24, top_p=top_p)
  for slot in range(3):
    made.prefill(params, [row(slot, [3], episode=slot)], num_rows=2, width=4, live_len=32)
  chunk = made.fetch(made.decode(params, jax.random.key(0), stream=0, live_lens=(32,)))
  expected = nucleus_oracle(np.asarray(params["table"][0]) / 0.7, top_p)
  assert 1 < (expected > 0).sum() < expected.size - 1
  np.testing.assert_allclose(np.exp(chunk.logp), expected[chunk.tokens], rtol=1e-5)
  # Over 72 tokens, the frequency of each token is close to its probability.
  shares = np.bincount(chunk.tokens.ravel(), minlength=expected.size) / chunk.tokens.size
  assert abs(shares - expected).max() < 4 * np.sqrt(0.25 / chunk.tokens.size)


def test_a_whole_distribution_is_not_sorted():
  """With top_p = 1 the program has no trace of it."""
  made = make_sampler()
  arguments = (make_params(0), made._streams[0].cache, made._streams[0].state, jax.random.key(0))

  def program(top_p):
    spec = SamplerSpec(model=POLICY, chunk_steps=2, temperature=1.0, stop_ids=(STOP,), top_p=top_p)
    return str(sampler._decode.lower(*arguments, spec=spec, live_lens=(32,)).as_text())

  assert "stablehlo.sort" not in program(1.0) and "stablehlo.sort" in program(0.9)
