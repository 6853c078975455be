"""The model runner: steps of prefill and decode, budgets, early exit, transfers, copies of pages."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sao_jax.models import ModelConfig, cached_policy, init_policy
from sao_jax.rollout.engine import model_runner, windows
from sao_jax.rollout.engine.model_runner import ModelRunner, Row, StepOutput, StepSpec
from sao_jax.types import SlotPlacement
from tests.rollout.engine.sampling_test import nucleus_oracle
from tests.rollout.fakes import POLICY, STOP, log_softmax, make_params, reference_logits

PAGES = {0: [3, 1, 5, 7], 1: [2, 9, 4, 8], 2: [6, 10, 11, 12]}
"""Pages of 8 tokens of three sequences, in no order."""


def make_runner(temperature=1.0, chunk_steps=4, top_p=1.0, model=POLICY, token_budget=8, num_slots=3) -> ModelRunner:
  spec = StepSpec(model=model, chunk_steps=chunk_steps, temperature=temperature, stop_ids=(STOP,), top_p=top_p)
  return ModelRunner(spec, num_slots=num_slots, num_pages=12, page_size=8, max_pages=4, token_budget=token_budget)


def row(sequence, tokens, budget=100, start=0) -> Row:
  return Row(sequence, start, np.array(tokens, np.int32), budget, PAGES[sequence])


def run(runner: ModelRunner, params, rows) -> StepOutput:
  return runner.fetch(runner.step(params, rows, jax.random.key(0)))


def test_hot_loop_has_no_implicit_transfer_and_donates():
  runner = make_runner()
  params, key = jax.device_put(make_params(0, stop_bias=-20)), jax.random.key(0)
  cache = runner._cache["tokens"]
  for i in range(3):
    with jax.transfer_guard("disallow" if i else "allow"):  # compilation may transfer constants
      output = runner.fetch(runner.step(params, [row(0, [3, 4, 5]), row(1, [6, 7], 0), row(2, [6])], key))
  assert cache.is_deleted()
  np.testing.assert_array_equal(output.num_sampled, [4, 0, 4])


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("lengths", [(50, 300), (300, 50)])
def test_rows_of_any_order_read_their_whole_context(num_slots, lengths):
  """Also where rows are not sorted: an odd number of slots makes one group."""
  spec = StepSpec(model=POLICY, chunk_steps=4, temperature=1.0, stop_ids=(STOP,))
  runner = ModelRunner(
    spec, num_slots=num_slots, num_pages=32 * num_slots, page_size=16, max_pages=32, token_budget=512
  )
  params, rng = make_params(3, stop_bias=-20.0), np.random.default_rng(0)
  contexts = [list(rng.integers(3, 20, size)) for size in lengths]
  starts = [0, 0]
  for _ in range(2):
    rows = [
      Row(i, start, np.array(tokens[start:], np.int32), 100, list(range(1 + 32 * i, 33 + 32 * i)))
      for i, (tokens, start) in enumerate(zip(contexts, starts, strict=True))
    ]
    output = runner.fetch(runner.step(params, rows, jax.random.key(0)))
    for i, tokens in enumerate(contexts):
      for t in range(output.num_sampled[i]):
        expected = log_softmax(reference_logits(params, np.array(tokens)))[output.tokens[t, i]]
        np.testing.assert_allclose(output.logp[t, i], expected, atol=1e-4)
        tokens.append(int(output.tokens[t, i]))
    starts = [len(tokens) - 1 for tokens in contexts]


def test_every_program_over_several_devices_starts_in_its_turn(monkeypatch):
  """Threads that start programs with collectives in different orders would wait for each other for ever."""
  turn, started = threading.RLock(), set()

  def in_turn(name, program):
    def start(*args, **kwargs):
      assert turn._is_owned(), name
      started.add(name)
      return program(*args, **kwargs)

    return start

  programs = set()
  for module in (model_runner, windows):
    for name, value in list(vars(module).items()):  # those of `ragged` need a policy that reads pages
      if hasattr(value, "lower") and callable(value):
        programs.add(name)
        monkeypatch.setattr(module, name, in_turn(name, value))
  whole = NamedSharding(Mesh(np.array(jax.devices()[:1]), "x"), PartitionSpec())
  runner = make_runner(model=POLICY._replace(placement=SlotPlacement(whole, whole, lambda: turn)))
  run(runner, jax.device_put(make_params(0), whole), [row(0, [3, 4])])
  runner.write_pages([2], runner.read_pages([3]))
  assert started == programs


def test_budget_and_stop_end_a_row_inside_the_step():
  runner = make_runner(chunk_steps=6)
  always = {**make_params(0), "table": jnp.zeros((31, 20)).at[:, STOP].set(50.0)}
  never = {**make_params(0), "table": jnp.zeros((31, 20)).at[:, STOP].set(-50.0)}
  output = run(runner, never, [row(0, [3, 4], budget=2), row(1, [5, 6], budget=9)])
  np.testing.assert_array_equal(output.num_sampled, [2, 6])
  output = run(runner, always, [row(1, output.tokens[-1:, 1], start=7, budget=3)])
  np.testing.assert_array_equal(output.num_sampled, [1])
  assert output.tokens[0, 0] == STOP
  # Early exit: nothing was sampled after the first step.
  assert (output.tokens[1:] == 0).all() and (output.logp[1:] == 0).all()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logp_is_of_the_tempered_distribution(temperature):
  # PITFALL 9. The same logits at every step: a two-row table would do, the hash only picks a row.
  params = make_params(0)
  params["table"] = jnp.broadcast_to(params["table"][:1].at[:, STOP].set(-99.0), params["table"].shape)
  output = run(make_runner(temperature, chunk_steps=8), params, [row(0, [3])])
  expected = jax.nn.log_softmax(params["table"][0] / temperature)[output.tokens[:, 0]]
  np.testing.assert_allclose(output.logp[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize("top_p", [0.3, 0.8])
def test_top_p_samples_the_truncated_distribution_and_records_its_log_probs(top_p):
  """PITFALL 9, with a temperature: behaviour log-probs are those of the distribution that was sampled from."""
  params = make_params(0)
  params["table"] = jnp.broadcast_to(params["table"][:1].at[:, STOP].set(-99.0), params["table"].shape)
  output = run(make_runner(0.7, chunk_steps=24, top_p=top_p), params, [row(i, [3]) for i in range(3)])
  expected = nucleus_oracle(np.asarray(params["table"][0]) / 0.7, top_p)
  assert 1 < (expected > 0).sum() < expected.size - 1
  np.testing.assert_allclose(np.exp(output.logp), expected[output.tokens], rtol=1e-5)
  # Over 72 tokens, the frequency of each token is close to its probability.
  shares = np.bincount(output.tokens.ravel(), minlength=expected.size) / output.tokens.size
  assert abs(shares - expected).max() < 4 * np.sqrt(0.25 / output.tokens.size)


def test_a_whole_distribution_is_not_sorted():
  """With top_p = 1 the program has no trace of it."""
  cache = POLICY.init_cache(13, 8)
  packed = jnp.zeros((2, 8), jnp.int32)

  def program(top_p):
    spec = StepSpec(model=POLICY, chunk_steps=2, temperature=1.0, stop_ids=(STOP,), top_p=top_p)
    arguments = (make_params(0), cache, packed, jax.random.key(0))
    return str(windows.decode.lower(*arguments, spec=spec, axes=(1, 1), live_lens=(32,)).as_text())

  assert "stablehlo.sort" not in program(1.0) and "stablehlo.sort" in program(0.9)


def test_tokens_in_any_pieces_give_the_same_logits():
  """Contexts in pages of any order, prefilled in one step or several, by one program or several."""
  params, rng = make_params(3, stop_bias=-20.0), np.random.default_rng(0)
  contexts = [rng.integers(3, 20, n).astype(np.int32) for n in (23, 9, 1)]
  whole = run(make_runner(), params, [row(i, x) for i, x in enumerate(contexts)])
  runner = make_runner(num_slots=4, token_budget=64)  # another order of rows, other programs
  run(runner, params, [row(1, contexts[1][:5], 0), row(0, contexts[0][:17], 0)])
  rest = [row(2, contexts[2]), row(0, contexts[0][17:], start=17), row(1, contexts[1][5:], start=5)]
  pieces = run(runner, params, rest)
  np.testing.assert_array_equal(whole.tokens, pieces.tokens[:, [1, 2, 0]])
  np.testing.assert_allclose(whole.logp, pieces.logp[:, [1, 2, 0]], atol=1e-5)
  for i, context in enumerate(contexts):
    for t in range(4):
      before = np.concatenate([context, whole.tokens[:t, i]])
      assert abs(whole.logp[t, i] - log_softmax(reference_logits(params, before))[whole.tokens[t, i]]) < 1e-4


def test_pages_come_back_from_the_host():
  params, context = make_params(3, stop_bias=-20.0), np.arange(3, 17, dtype=np.int32)
  want = run(make_runner(), params, [row(0, context)])
  runner = make_runner()
  run(runner, params, [row(0, context[:12], 0)])
  kept = runner.read_pages(PAGES[0][:2])
  run(runner, params, [Row(1, 0, context[::-1].copy(), 0, PAGES[0])])  # overwrites them
  runner.write_pages([11, 6], kept)
  got = run(runner, params, [Row(0, 12, context[12:], 100, [11, 6, 9])])
  np.testing.assert_array_equal(got.tokens, want.tokens)


def test_a_cache_without_an_axis_of_time_is_refused():
  with pytest.raises(ValueError, match=r"one axis of max_len positions; \['x'\] has shape \(4, 3\)"):
    windows.time_axes(POLICY._replace(init_cache=lambda slots, max_len: {"x": jnp.zeros((slots, 3))}), 4, 8)


MODEL = ModelConfig(
  vocab_size=20, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=24
)


def test_weights_that_need_no_conversion_are_not_copied():
  params, model = init_policy(MODEL, jax.random.key(0)), cached_policy(MODEL)
  spec = StepSpec(model=model, chunk_steps=4, temperature=1.0, stop_ids=())
  prepared = model_runner.PreparedWeights(spec)
  for scale in (1.0, 2.0):  # the second version runs the same program
    version = jax.tree.map(lambda x, by=scale: by * x, params)
    got, want = prepared(version), model.prepare(version)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got["layers_0"]["mlp"]["down_proj"]["kernel"] is version["layers_0"]["mlp"]["down_proj"]["kernel"]
    assert "qkv" in got["layers_0"] and prepared(version) is got


def test_both_kinds_of_attention_sample_the_same():
  """Prompts in pieces beside rows that decode, a row that ends early, and idle rows: by pages and by windows."""
  params, rng = init_policy(MODEL, jax.random.key(0)), np.random.default_rng(0)
  contexts = [rng.integers(3, 20, n).astype(np.int32) for n in (19, 9, 2)]
  outputs = []
  for use_pages in (False, True):
    spec = StepSpec(model=cached_policy(MODEL), chunk_steps=4, temperature=1.0, stop_ids=(), use_pages=use_pages)
    runner = ModelRunner(spec, num_slots=4, num_pages=12, page_size=8, max_pages=4, token_budget=20)
    first = run(runner, params, [row(1, contexts[1]), row(0, contexts[0][:11], 0), row(2, contexts[2], 2)])
    more = [row(1, first.tokens[3:4, 0], 100, 12), row(0, contexts[0][11:], 3, 11)]
    outputs.append((first, run(runner, params, more)))
    kept = runner.read_pages(PAGES[1])
    runner.write_pages(PAGES[2], kept)
  for windows_output, pages_output in zip(*outputs, strict=True):
    np.testing.assert_array_equal(windows_output.num_sampled, pages_output.num_sampled)
    for i, count in enumerate(windows_output.num_sampled):
      np.testing.assert_array_equal(windows_output.tokens[:count, i], pages_output.tokens[:count, i])
      np.testing.assert_allclose(windows_output.logp[:count, i], pages_output.logp[:count, i], atol=1e-5)
  assert outputs[0][0].num_sampled.tolist() == [4, 0, 2] and outputs[0][1].num_sampled[1] == 3
