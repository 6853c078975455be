# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own environment
#
# An environment is a class with three methods: `reset` gives the prompt of a task, `step` takes the text of an action
# and answers with an observation, a reward, or the end.

# %%
# In Colab: set REPOSITORY to where you have the library. Where it is installed there is nothing to do.
import importlib.util
import subprocess
import sys

REPOSITORY = "https://github.com/OWNER/sao_jax"
if importlib.util.find_spec("sao_jax") is None:
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"git+{REPOSITORY}"], check=True)

# %%
import dataclasses
import os
import tempfile

from experiments.presets import ablation_cpu
from sao_jax import loop
from sao_jax.config import RunConfig
from sao_jax.envs import base
from sao_jax.io import trajectories
from sao_jax.rollout import EngineConfig
from sao_jax.tokenizers import MathTokenizer
from sao_jax.types import Domain, Step


# %%
class Guess(base.Environment):
  """Find a number from 1 to 9 in four guesses; each wrong one is answered by `higher` or `lower`."""

  def reset(self, task_index):
    self.secret, self.turns = task_index % 9 + 1, 0
    return base.user_prompt("guess")

  def step(self, action):
    self.turns += 1
    kind, text = base.parse_action(action)
    if kind == "answer" and text == str(self.secret):
      return Step(reward=1.0, done=True)
    if self.turns == 4:
      return Step(done=True)
    hint = "?" if not (kind == "answer" and text.isdecimal()) else "higher" if int(text) < self.secret else "lower"
    return Step(observation=base.observation(hint))

  def close(self):
    pass


# %% [markdown]
# Try it by hand before anything is trained on it.

# %%
env = Guess()
print(env.reset(6))
for number in ("5", "8", "7"):
  step = env.step(base.answer(number))
  print(number, "->", step.observation or f"reward {step.reward}")

# %% [markdown]
# Demonstrations to imitate in the warm start: guesses without listening. RL has to find the rest.


# %%
def demonstrate(task, rng):
  env = Guess()
  pieces, done = [(env.reset(task), False)], False
  while not done:
    action = base.answer(str(rng.integers(1, 10)))
    step = env.step(action)
    done = step.done
    pieces += [(action, True)] if done else [(action, True), (step.observation, False)]
  return pieces


def make_domain():
  return Domain(
    make_env=lambda split: Guess(),
    tokenizer=MathTokenizer(),
    num_train_tasks=9,
    num_eval_tasks=9,
    demonstrate=demonstrate,
  )


# %% [markdown]
# A run is a frozen dataclass. This one starts from the preset of the ablations, with the tokenizer's vocabulary.

# %%
small = ablation_cpu.make_config()
tiny = os.environ.get("SAO_JAX_NOTEBOOK_SIZE") == "tiny"  # what the tests run
config: RunConfig = dataclasses.replace(
  small,
  num_steps=2 if tiny else 150,
  batch_size=16 if tiny else 64,
  eval_episodes=18 if tiny else 180,
  policy=dataclasses.replace(small.policy, vocab_size=MathTokenizer().vocab_size),
  warm_start=dataclasses.replace(small.warm_start, num_steps=3 if tiny else 200),
  critic=dataclasses.replace(small.critic, pretraining_trajectories=16 if tiny else 512, pretraining_epochs=1),
  learner=dataclasses.replace(small.learner, row_length=64),
  engine=EngineConfig(
    num_slots=16 if tiny else 64, max_len=64, max_action_tokens=6, max_turns=4, chunk_steps=4, prefill_rows=(16,),
    prefill_tokens=(16,), live_buckets=(64,), env_workers=0,
  ),
)  # fmt: skip
workdir = tempfile.mkdtemp()
summary = loop.train(config, make_domain(), workdir)
print(f"success {summary['success_before']:.3f} -> {summary['success_after']:.3f}")

# %%
for sample in trajectories.read(f"{workdir}/trajectories.jsonl")[-3:]:
  print("solved    " if sample.success else "not solved", sample.text)
