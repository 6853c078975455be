# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own environment
#
# An environment is a class with three methods. `reset` returns the prompt of a task. `step` takes the text of an action
# and returns an observation, a reward, or the end of the episode. `close` releases what the environment holds. `reset`
# and `step` run on worker threads and may block (tools, judges, containers) while other episodes continue.

# %%
# Installs the library if it is missing: from the checkout around this notebook, or else from REPOSITORY.
import importlib.util
import pathlib
import shutil
import subprocess
import sys

REPOSITORY = ""  # in Colab: the address of the library's repository, to be cloned
if importlib.util.find_spec("sao_jax") is None:
  here = pathlib.Path.cwd()
  above = [folder for folder in (here, *here.parents) if (folder / "sao_jax" / "version.py").exists()]
  checkout = above[0] if above else here / "checkout"
  if not checkout.exists():
    if not REPOSITORY:
      raise ValueError("set REPOSITORY, in this cell, to the address of the library's repository")
    subprocess.run(["git", "clone", "-q", "--depth=1", REPOSITORY, str(checkout)], check=True)
  extra = "[cuda12]" if shutil.which("nvidia-smi") else ""
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-e", f"{checkout}{extra}"], check=True)
  sys.path.insert(0, str(checkout))

# %%
import dataclasses
import tempfile

from IPython.display import Image, display

from experiments import plots
from experiments.presets import ablation_cpu
from sao_jax.envs import base
from sao_jax.io import trajectories
from sao_jax.rollout import EngineConfig
from sao_jax.tokenizers import MathTokenizer
from sao_jax.training import loop
from sao_jax.types import Domain, Step

# %% tags=["parameters"]
NUM_STEPS = 150
BATCH_SIZE = 64
WARM_START_STEPS = 200
PRETRAINING_TRAJECTORIES = 512
EVAL_EPISODES = 256


# %%
class Guess(base.Environment):
  """Find a number from 1 to 9 in four guesses. Each wrong guess is answered by `higher` or `lower`."""

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
# Try the environment by hand before you train on it.

# %%
env = Guess()
print(env.reset(6))
for number in ("5", "8", "7"):
  step = env.step(base.answer(number))
  print(number, "->", step.observation or f"reward {step.reward}")

# %% [markdown]
# A policy that starts from nothing needs demonstrations for the warm start. A demonstration is an episode as pieces of
# (text, whether the policy would have written it). These guess at random and ignore the hints, so RL has much to
# improve. A policy that starts from a published checkpoint (`config.policy_checkpoint`) needs no demonstrations.


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
# This run takes the preset of the ablations, with this tokenizer's vocabulary and lengths that fit four guesses. To
# train on the same environment from the command line, save it as `guess.py` and run `python -m experiments.train
# --config=experiments/presets/small_cpu.py --config.env.factory=guess:make_domain`.

# %%
small = ablation_cpu.make_config()
config = dataclasses.replace(
  small,
  num_steps=NUM_STEPS,
  batch_size=BATCH_SIZE,
  eval_episodes=EVAL_EPISODES,
  policy=dataclasses.replace(small.policy, vocab_size=MathTokenizer().vocab_size),
  warm_start=dataclasses.replace(
    small.warm_start,
    num_steps=WARM_START_STEPS,
    optimizer=dataclasses.replace(
      small.warm_start.optimizer, warmup_steps=WARM_START_STEPS // 15, decay_steps=WARM_START_STEPS
    ),
  ),
  critic=dataclasses.replace(small.critic, pretraining_trajectories=PRETRAINING_TRAJECTORIES),
  learner=dataclasses.replace(small.learner, row_length=64),
  engine=EngineConfig(
    num_slots=BATCH_SIZE,
    max_len=64,
    max_action_tokens=6,
    max_turns=4,
    chunk_steps=4,
    env_workers=0,
  ),
)
workdir = tempfile.mkdtemp()
summary = loop.train(config, make_domain(), workdir)
print(f"success {summary['success_before']:.3f} -> {summary['success_after']:.3f} (n = {summary['n']})")

# %% [markdown]
# The last trajectories show what the policy has learned. The plot shows success over the learner's steps.

# %%
for sample in trajectories.read(f"{workdir}/trajectories.jsonl")[-3:]:
  print("solved    " if sample.success else "not solved", sample.text)
display(Image(filename=str(next(path for path in plots.plot_run(workdir) if path.stem == "reward"))))
