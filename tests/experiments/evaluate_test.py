"""`experiments.evaluate` on a checkpoint: published files, samples, resumption, and rejected input."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
from absl import app, flags

from experiments import evaluate
from experiments.support import benchmark_sets, chaos_run
from experiments.support.fingerprint import fingerprint
from sao_jax import models
from sao_jax.io import trajectories as trajectory_io
from tests.experiments.chat_domain_test import checkpoint as tokenizer_directory  # noqa: F401  (a fixture)
from tests.models import tiny

PROBLEMS = {
  "AIME2025": [{"problem_idx": 1, "problem": "1+1?", "answer": 2}, {"problem_idx": 2, "problem": "2+2?", "answer": 4}],
  "HMMT": [{"problem_idx": 1, "problem": "x?", "answer": "$\\frac{1}{2}$", "problem_type": ["Algebra"]}],
  "BeyondAIME": [{"problem": "y?", "answer": 7}],
  "IMOAnswerBench": [{"Problem ID": "imo-1", "Problem": "z?", "Short Answer": "$2^{10}$", "Category": "Algebra"}],
}


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  return str(path)


def with_mark(path):
  """Writes the same file with a byte order mark and an empty line at the beginning."""
  text = pathlib.Path(path).read_text(encoding="utf-8")
  pathlib.Path(path).write_text("\n" + text, encoding="utf-8-sig")
  return path


@pytest.mark.parametrize(
  ("name", "right"), [("AIME2025", "2"), ("HMMT", "0.5"), ("BeyondAIME", "7"), ("IMOAnswerBench", "1024")]
)
def test_published_fields_are_read_and_graded(name, right, tokenizer_directory, tmp_path):  # noqa: F811
  pytest.importorskip("math_verify")
  data = write(tmp_path / "set.jsonl", PROBLEMS[name])
  domain = benchmark_sets.make_domain(
    benchmark=name, checkpoint=tokenizer_directory, data=data, max_turns=50, tool=False
  )
  assert domain.num_eval_tasks == len(PROBLEMS[name])
  env = domain.make_env("eval")
  assert PROBLEMS[name][0].get("problem", "z?") in env.reset(0)
  assert env.step(f"\\boxed{{{right}}}<end>").reward == 1.0
  env.reset(0)
  assert env.step("\\boxed{-3}<end>").reward == 0.0
  domain.close()


def test_the_papers_numbers_of_runs():
  assert {name: benchmark_sets.default_runs(name) for name in PROBLEMS} == {
    "AIME2025": 16, "HMMT": 16, "BeyondAIME": 4, "IMOAnswerBench": 16,
  }  # fmt: skip
  assert benchmark_sets.default_runs("reasoning_gym:chain_sum") == 1


def test_what_is_no_benchmark_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"benchmark must be one of AIME2025, HMMT.*received 'AIME'"):
    benchmark_sets.default_runs("AIME")
  data = write(tmp_path / "x.jsonl", PROBLEMS["IMOAnswerBench"])
  with pytest.raises(ValueError, match="lines of HMMT must have 'problem' and 'answer'; the first has"):
    benchmark_sets.published_fields("HMMT", data)
  assert benchmark_sets.published_fields("IMOAnswerBench", with_mark(data)) == ("Problem", "Short Answer")
  common = {"checkpoint": "", "max_turns": 1, "tool": False}
  with pytest.raises(ValueError, match="data must name the JSONL or CSV file of HMMT"):
    benchmark_sets.make_domain(benchmark="HMMT", data=None, **common)
  with pytest.raises(ValueError, match="data must be left out"):
    benchmark_sets.make_domain(benchmark="reasoning_gym:lcm", data=data, **common)


def test_problems_of_ones_own(tokenizer_directory, tmp_path):  # noqa: F811
  pytest.importorskip("math_verify")
  data = write(tmp_path / "x.jsonl", [{"question": "1 + 1?", "answer": 2}, {"question": "2 + 2?", "answer": 4}])
  domain = benchmark_sets.make_domain(
    benchmark=None, checkpoint=tokenizer_directory, data=data, max_turns=1, tool=False
  )
  assert domain.num_eval_tasks == 2 and "2 + 2?" in domain.make_env("eval").reset(1)
  domain.close()
  assert benchmark_sets.default_runs(None) == 1
  other = write(tmp_path / "y.jsonl", [{"text": "1 + 1?", "answer": 2}])
  with pytest.raises(ValueError, match="lines of your problems must have 'problem' and 'answer' or 'question' and"):
    benchmark_sets.published_fields(None, other)


def test_a_run_is_evaluated_on_another_file_if_its_task_reads_one(tmp_path):
  config = chaos_run.make_config("sync", num_steps=1)
  with pytest.raises(ValueError, match="--data needs a run whose task has the option held_out; received 'experiments"):
    evaluate.with_problems(config, "x.jsonl")
  env = dataclasses.replace(config.env, options={"train": "a.jsonl", "held_out": None})
  changed = evaluate.with_problems(dataclasses.replace(config, env=env), "x.jsonl")
  assert changed.env.options == {"train": "a.jsonl", "held_out": "x.jsonl"}
  env = dataclasses.replace(config.env, factory="experiments.tasks.chat:math", options={"train": "a.jsonl"})
  changed = evaluate.with_problems(dataclasses.replace(config, env=env), "x.jsonl")  # an option that was left out
  assert changed.env.options == {"train": "a.jsonl", "held_out": "x.jsonl"}


@pytest.mark.timeout(600)
def test_samples_are_written_and_a_stopped_evaluation_goes_on(tokenizer_directory, tmp_path):  # noqa: F811
  """The model is random; the test checks that all episodes run, are written, are counted and can be repeated."""
  pytest.importorskip("math_verify")
  directory = tmp_path / "model"
  config = tiny.dense(vocab_size=261)
  models.save_hf(directory, config, tiny.policy_params(config))
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(pathlib.Path(tokenizer_directory) / name, directory)
  data = write(tmp_path / "aime.jsonl", PROBLEMS["AIME2025"])
  options = types.SimpleNamespace(
    out=str(tmp_path / "out"), checkpoint=str(directory), benchmark="AIME2025", data=data, num_runs=3, num_tasks=100,
    settings="{}", max_turns=2, max_len=112, max_action_tokens=8, temperature=1.0, top_p=1.0, tool=False,
    num_slots=4, dtype=None,
  )  # fmt: skip
  result = evaluate.evaluate_benchmark(options)
  samples = trajectory_io.read(tmp_path / "out" / "samples.jsonl")
  assert sorted(x.episode_id for x in samples) == list(range(6))
  assert sorted(x.task_index for x in samples) == [2, 2, 2, 3, 3, 3]  # after the two training tasks
  assert (result.num_runs, result.num_problems, result.failed, len(result.by_run)) == (3, 2, 0, 3)
  assert result.mean == sum(x.success for x in samples) / 6
  assert all(x.num_actions <= 2 * 8 for x in samples)
  row = json.loads((tmp_path / "out" / "result.json").read_bytes())
  assert row["mean"] == result.mean and row["benchmark"] == "AIME2025"
  # Killed while the third sample was written: the others are the same as before.
  path = tmp_path / "out" / "samples.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join(lines[:2]) + lines[2][:40])
  assert evaluate.evaluate_benchmark(options) == result
  again = {x.episode_id: x.tokens.tolist() for x in trajectory_io.read(path)}
  assert again == {x.episode_id: x.tokens.tolist() for x in samples}
  models.save_hf(directory, config, jax.tree.map(lambda x: x + 0.01, tiny.policy_params(config)))
  with pytest.raises(ValueError, match=r"different config.*\n.*inputs\.checkpoint: recorded"):
    evaluate.evaluate_benchmark(options)
  models.save_hf(directory, config, tiny.policy_params(config))
  options.top_p = 0.9
  with pytest.raises(ValueError, match=r"engine\.top_p"):
    evaluate.evaluate_benchmark(options)
  assert evaluate.benchmark_config(options, config).engine.top_p == 0.9
  options.top_p, options.max_turns = 1.0, 3
  with pytest.raises(ValueError, match="max_turns"):
    evaluate.evaluate_benchmark(options)
  # No episode has room for its prompt: nothing is measured, and no file is left that hinders the next evaluation.
  options.out, options.max_len = str(tmp_path / "short"), 20
  with pytest.raises(RuntimeError, match=r"all 6 episodes failed, so nothing was measured: prompt_too_long \(6\)"):
    evaluate.evaluate_benchmark(options)
  assert not (tmp_path / "short" / "result.json").exists() and not (tmp_path / "short" / "config.json").exists()
  write(tmp_path / "aime.jsonl", [{"problem": "x", "answer": ""}])
  options.out = str(tmp_path / "new")
  with pytest.raises(ValueError, match=r"line 1: .* neither of them empty"):
    evaluate.evaluate_benchmark(options)
  assert not (tmp_path / "new").exists()


GYM = {"checkpoint": "c", "benchmark": "reasoning_gym:chain_sum", "out": "o"}


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({}, "one of --workdir and --checkpoint"),
    ({"workdir": "w", "checkpoint": "c"}, "one of --workdir and --checkpoint"),
    ({"workdir": "w", "benchmark": "HMMT"}, "--benchmark needs --checkpoint"),
    ({"workdir": "w", "top_p": 0.9}, "--top_p needs --checkpoint: a run is evaluated .* with its own settings"),
    ({"checkpoint": "c", "benchmark": "HMMT", "out": "o", "episodes": 9}, "--episodes needs --workdir"),
    ({"checkpoint": "c", "benchmark": "HMMT"}, "--checkpoint needs --benchmark or --data, and --out"),
    ({"checkpoint": "c", "benchmark": "AIME", "out": "o"}, "benchmark must be one of AIME2025"),
    ({"checkpoint": "c", "benchmark": "reasoning_gym:nope", "out": "o"}, r"task must be one of \['.*received 'nope'"),
    ({**GYM, "settings": "{bad"}, r"--settings must be a Python dictionary .*; received '\{bad'"),
    ({**GYM, "settings": "[1]"}, r"--settings must be a Python dictionary .*; received '\[1\]'"),
  ],
)
def test_flags_that_do_not_go_together_are_refused(given, message):
  none = {"workdir": None, "checkpoint": None, "benchmark": None, "out": None}
  with pytest.raises((app.UsageError, ValueError), match=message):
    evaluate.check(types.SimpleNamespace(**{**none, **given}), list(given))


def test_every_flag_is_of_runs_or_of_benchmarks(monkeypatch):
  defined = set()
  for kind in ("string", "integer", "float", "bool", "enum"):
    monkeypatch.setattr(flags, f"DEFINE_{kind}", lambda name, *_, **__: defined.add(name))
  evaluate.define_flags()
  assert defined == {*evaluate.OF_RUNS, *evaluate.OF_BENCHMARKS, "workdir", "checkpoint", "data"}


@pytest.mark.parametrize("size", [10, 3 * 2**24 + 5])
def test_fingerprints_tell_what_has_changed(tmp_path, size):
  (tmp_path / "config.json").write_text("{}")
  weights = tmp_path / "model.safetensors"
  rng = np.random.default_rng(0)
  weights.write_bytes(rng.bytes(size))
  first = fingerprint(tmp_path)
  (tmp_path / "README.md").write_text("changed")
  assert fingerprint(tmp_path) == first
  weights.write_bytes(np.random.default_rng(1).bytes(size))
  assert fingerprint(tmp_path) != first
  with pytest.raises(FileNotFoundError):
    fingerprint(tmp_path / "nowhere")
