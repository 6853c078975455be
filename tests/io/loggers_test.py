"""Loggers besides `metrics.jsonl`: a function, and a real W&B run in offline mode."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import pytest

from sao_jax.io import metrics
from sao_jax.io.loggers import CallbackLogger, WandbLogger


def test_every_row_goes_to_a_callback_once(tmp_path: pathlib.Path) -> None:
  seen: list[tuple[int, Mapping[str, float]]] = []
  logger = CallbackLogger(lambda step, values, trajectories: seen.append((step, {**values, "n": len(trajectories)})))
  with metrics.MetricsWriter(tmp_path, loggers=[logger]) as writer:
    writer.write_evaluation(0, success_rate=0.5, n=2)
    writer.write(1, dict.fromkeys(metrics.LEARNER_KEYS[1:], 1.0))
  assert [step for step, _ in seen] == [0, 1]
  assert seen[0][1] == {"eval_success_rate": 0.5, "eval_n": 2, "n": 0} and seen[1][1]["entropy"] == 1.0


@pytest.mark.filterwarnings("default")  # of the package
def test_wandb_offline(tmp_path: pathlib.Path) -> None:
  logger = WandbLogger(tmp_path, project="sao", mode="offline", config={"seed": 1})
  logger.write(1, {"entropy": 0.5, "eval_n": 4})
  logger.close()
  name = (tmp_path / "wandb_id").read_text()  # a resumed run has the same id
  (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{name}.wandb")
  assert b"policy/entropy" in file.read_bytes() and b"eval/n" in file.read_bytes()
