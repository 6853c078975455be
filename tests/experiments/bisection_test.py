"""The task of the ablations: bisection always wins, demonstrations are worse, texts and tokens agree."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.presets import ablation_cpu
from experiments.tasks import bisection


def play(env, index, choose):
  """Plays one episode; returns (reward, actions, text)."""
  text = prompt = env.reset(index)
  turns = 0
  while True:
    low, high = int(prompt[:2]), int(prompt[3:5])
    action = choose(low, high)
    step = env.step(action)
    turns += 1
    text += action + step.observation
    if step.done:
      return step.reward, turns, text
    prompt = step.observation


def test_bisection_always_wins_and_guessing_does_not():
  env = bisection.Bisection("train", 4096)
  rng = np.random.default_rng(0)
  middle = [play(env, i, lambda low, high: f"{(low + high) // 2:02d};") for i in range(300)]
  assert all(reward == 1.0 for reward, _, _ in middle)
  assert {turns for _, turns, _ in middle} >= {1, 2, 3, 4, 5} and max(turns for _, turns, _ in middle) == 5
  inside = [play(env, i, lambda low, high: f"{rng.integers(low, high + 1):02d};")[0] for i in range(300)]
  assert 0.6 < np.mean(inside) < 0.8


def test_guesses_that_tell_nothing_are_lost():
  env = bisection.Bisection("train", 4096)
  env.problem = bisection.Problem(3, 9, 7)
  env.low, env.high, env.left = 3, 9, 3
  for action in ("12;", "x;", ";", "071;", "7;", "07"):
    env.low, env.high, env.left = 3, 9, 3
    step = env.step(action)
    assert (step.observation, step.reward, step.done) == ("03-09:2?", 0.0, False), action
  assert env.step("05;").observation == "06-09:1?"
  last = env.step("08;")
  assert (last.observation, last.reward, last.done) == ("06-07:0?", 0.0, True)


def test_problems_repeat_and_the_splits_differ():
  assert [bisection.make_problem(i, "train") for i in range(9)] == [
    bisection.make_problem(i, "train") for i in range(9)
  ]
  assert [bisection.make_problem(i, "train") for i in range(9)] != [bisection.make_problem(i, "eval") for i in range(9)]
  for i in range(500):
    problem = bisection.make_problem(i, "eval")
    assert 0 <= problem.low <= problem.secret <= problem.high < bisection.NUMBERS


def test_demonstrations_are_episodes_that_fit():
  domain = bisection.make_domain()
  rng = np.random.default_rng(0)
  solved = 0
  for i in range(200):
    pieces = domain.demonstrate(i, rng)
    assert [action for _, action in pieces] == [j % 2 == 1 for j in range(len(pieces))]
    ids = [domain.tokenizer.encode(text) for text, _ in pieces]
    assert [domain.tokenizer.decode(x) for x in ids] == [text for text, _ in pieces]
    assert all(x[-1] in domain.tokenizer.stop_ids for x in ids[1::2])
    assert sum(map(len, ids)) <= ablation_cpu.MAX_LEN
    solved += int(pieces[-1][0][:2]) == bisection.make_problem(i, "train").secret
  assert 0.3 < solved / 200 < 0.6
  with pytest.raises(ValueError, match=r"careless must be in \[0, 1\]; received 2"):
    bisection.make_domain(careless=2)
