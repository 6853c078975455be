"""The environment of docs/environments.md: trained on by the command given there, made short, and tried as it says."""

from __future__ import annotations

import json
import math
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from experiments import train
from sao_jax.io.metrics import LEARNER_KEYS, read_metrics
from sao_jax.io.trajectories import read
from sao_jax.io.workdir import SUMMARY_KEYS
from tests.child_environment import fast_compile

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
"""The environment, and how it is tried by hand."""
SHORT = (
  "--config.num_steps=2", "--config.batch_size=16", "--config.eval_episodes=18", "--config.warm_start.num_steps=10",
  "--config.warm_start.optimizer.warmup_steps=2", "--config.critic.pretraining_trajectories=16",
  "--config.policy.num_layers=1",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_the_documented_environment_trains_and_evaluates(tmp_path: pathlib.Path) -> None:
  command = re.search(r"python (-m experiments.train .*--config.env.factory=guess:make_domain)", PAGE)
  assert command is not None and command[0] in (ROOT / "README.md").read_text()
  (tmp_path / "guess.py").write_text(CODE[0])

  def run(*arguments: str) -> str:
    done = subprocess.run(
      [sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=500,
      env=fast_compile(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout

  out = run(*command[1].split(), "--workdir=run", *SHORT)
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


def test_the_documented_environment_is_tried_as_the_page_says(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  (tmp_path / "guess.py").write_text(CODE[0])
  monkeypatch.syspath_prepend(tmp_path)
  exec(compile(CODE[1], "environments.md", "exec"), {})
  rows = capsys.readouterr().out.splitlines()
  assert len(rows) == 9 and rows[4] == "4 <|answer|>5<|end|>  1.0 True" and "higher<|assistant|> 0.0 False" in rows[8]


def test_the_documented_kinds_of_failure_are_those_of_the_engine() -> None:
  first_cells = re.findall(r"^\| (`[a-z_`, ]+`) \|", PAGE.partition("| kind |")[2], re.MULTILINE)
  listed = re.findall(r"`([a-z_]+)`", "".join(first_cells))
  source = "".join(path.read_text() for path in (ROOT / "sao_jax" / "rollout").rglob("*.py"))
  source = source.replace('f"bad_{what}"', '"bad_prompt" "bad_observation"')
  source = source.replace('f"{what}_too_long"', '"prompt_too_long" "observation_too_long"')
  kinds = set(listed[: listed.index("bad_tokens") + 1])
  assert len(kinds) == 11 and all(f'"{kind}"' in source for kind in kinds)


@pytest.mark.parametrize(("reward", "failed", "shown"), [(1.0, 10, False), (0.5, 10, True), (math.nan, 20, False)])
def test_the_reward_is_shown_where_it_differs_from_the_success_of_those_that_did_not_fail(
  reward: float, failed: int, shown: bool
) -> None:
  success = (20 - failed) / 20
  summary: dict[str, Any] = {"n": 20}
  for when in train.WHEN:
    summary |= {f"success_{when}": success, f"success_{when}_interval": (0.0, 1.0)}
    summary |= {f"reward_{when}": reward, f"eval_failed_{when}": failed}
  headers = [column.header for column in train.success_table(summary).columns]
  assert ("reward" in headers) is shown
