"""Your own environment, played by a scripted policy: `python -m examples.environment`

`docs/environments.md` describes the protocol, and `examples/train.py` trains a model on it.
"""

from __future__ import annotations

from sao_jax.envs import base
from sao_jax.tokenizers import MathTokenizer
from sao_jax.types import Domain, Environment, Step


class Guess(Environment):
  """Find a number from 1 to 9 in four guesses. Each wrong guess is answered by `higher` or `lower`."""

  def reset(self, task_index):
    self.secret, self.num_guesses = task_index % 9 + 1, 0  # the same index gives the same task
    return base.user_prompt("guess")

  def step(self, action):
    self.num_guesses += 1
    kind, text = base.parse_action(action)  # a model may write anything
    if kind == "answer" and text == str(self.secret):
      return Step(reward=1.0, done=True)
    if self.num_guesses == 4:
      return Step(done=True)
    hint = "?" if kind != "answer" or not text.isdecimal() else "higher" if int(text) < self.secret else "lower"
    return Step(observation=base.observation(hint))

  def close(self):
    """Releases files, processes and the like. This environment holds none."""


def play(env, task_index, choose):
  """Plays an episode. Returns pieces of (text, whether it is an action), and the last step."""
  pieces, step, low, high = [(env.reset(task_index), False)], Step(), 1, 9
  while not step.done:
    guess = choose(low, high)
    step = env.step(base.answer(str(guess)))
    pieces += [(base.answer(str(guess)), True), (step.observation, False)]
    low, high = (guess + 1, high) if "higher" in step.observation else (low, guess - 1)
  return pieces, step


def demonstrate(task_index, rng):
  """An episode to imitate before RL. It guesses at random, so there is much left to learn."""
  return play(Guess(), task_index, lambda low, high: rng.integers(1, 10))[0]


def make_domain():
  return Domain(
    make_env=lambda split: Guess(), tokenizer=MathTokenizer(), num_train_tasks=9, num_eval_tasks=9,
    demonstrate=demonstrate,
  )  # fmt: skip


if __name__ == "__main__":
  for task in range(9):
    pieces, step = play(Guess(), task, lambda low, high: (low + high) // 2)
    print(step.reward, "".join(text for text, _ in pieces))
