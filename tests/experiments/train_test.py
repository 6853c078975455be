"""The README's own environment, saved to a file and trained on by the README's own command, made short."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

from sao_jax.io.metrics import LEARNER_KEYS, read_metrics
from sao_jax.io.trajectories import read
from sao_jax.io.workdir import SUMMARY_KEYS
from tests.child_environment import fast_compile

ROOT = pathlib.Path(__file__).parents[2]
SHORT = (
  "--config.num_steps=2", "--config.batch_size=16", "--config.eval_episodes=18", "--config.warm_start.num_steps=10",
  "--config.warm_start.optimizer.warmup_steps=2", "--config.critic.pretraining_trajectories=16",
  "--config.policy.num_layers=1",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_the_readmes_environment_trains_and_evaluates(tmp_path: pathlib.Path) -> None:
  readme = (ROOT / "README.md").read_text()
  code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
  command = re.search(r"python (-m experiments.train .*--config.env.factory=guess:make_domain)", readme)
  assert code is not None and command is not None
  (tmp_path / "guess.py").write_text(code[1])

  def run(*arguments: str) -> str:
    done = subprocess.run(
      [sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=500,
      env=fast_compile(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout

  train = command[1].replace("experiments/presets", str(ROOT / "experiments" / "presets")).split()
  out = run(*train, "--workdir=run", *SHORT)
  for what in ("the step of the warm start", "the step of value pretraining", "the learner step"):
    assert out.count(f"compiling {what} ...\n") == 1 and out.count(f"compiled {what} and ran it once in ") == 1
  assert "held-out success" in out and "attention" in out and "python -m experiments.evaluate --workdir=run" in out

  workdir = tmp_path / "run"
  rows, evaluations = read_metrics(workdir)
  assert [row["step"] for row in rows] == [1, 2] and set(LEARNER_KEYS) <= set(rows[0])
  assert [(row["step"], row["eval_n"]) for row in evaluations] == [(0, 18), (2, 18)]
  assert set(SUMMARY_KEYS) <= set(json.loads((workdir / "summary.json").read_text()))
  assert read(workdir / "trajectories.jsonl") and list((workdir / "plots").glob("*.png"))
  assert (workdir / "checkpoints" / "2").is_dir() and list(workdir.glob("events.out.tfevents.*"))
  assert "checkpoint 2: success" in run("-m", "experiments.evaluate", "--workdir=run", "--episodes=9")
