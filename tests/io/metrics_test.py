"""Metrics rows: written at once, whole, each once, also across a kill and a resume."""

from __future__ import annotations

import json
import logging
import math
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from sao_jax.io import metrics
from sao_jax.io.metric_table import tag


def values(step, **more):
  return dict.fromkeys(metrics.LEARNER_KEYS[1:], float(step)) | more


def lines(path):
  return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_rows_are_on_disk_at_once_and_strict_json(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write_evaluation(0, success_rate=0.25, n=40, low=0.1)
    writer.write(1, values(1, explained_variance=math.nan, reward_mean=np.float32(0.5), entropy=jnp.asarray(2.0)))
    rows = lines(tmp_path / "metrics.jsonl")
  assert rows[0] == {"step": 0, "eval_success_rate": 0.25, "eval_n": 40, "low": 0.1}
  assert tuple(rows[1]) == metrics.LEARNER_KEYS
  assert rows[1]["explained_variance"] is None
  assert (rows[1]["reward_mean"], rows[1]["entropy"]) == (0.5, 2.0)
  learner, evaluation = metrics.read_metrics(tmp_path)
  assert math.isnan(learner[0]["explained_variance"]) and evaluation[0]["eval_n"] == 40


def events(path):
  """The records of a TensorBoard file: length, checksum, `Event`, checksum."""
  content = path.read_bytes()
  while content:
    (length,) = struct.unpack("<Q", content[:8])
    yield event_pb2.Event.FromString(content[12 : 12 + length])
    content = content[16 + length :]


def test_tensorboard_gets_the_finite_numbers_and_where_a_run_went_on(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(1, values(1, explained_variance=math.nan))
    writer.write(2, values(2))
    (path,) = tmp_path.glob("events.out.tfevents.*")
    version, start, first, second = events(path)  # on disk at once
  assert version.file_version == "brain.Event:2" and start.session_log.status == 1 and start.step == 1
  assert (first.step, second.step) == (1, 2)
  tags = {value.tag: value.simple_value for value in first.summary.value}
  assert set(tags) == {tag(key) for key in metrics.LEARNER_KEYS} - {"progress/step", "critic/explained_variance"}
  assert tags["policy/entropy"] == 1.0
  path.unlink()
  with metrics.MetricsWriter(tmp_path, restored_step=2):
    (path,) = tmp_path.glob("events.out.tfevents.*")
  assert [event.step for event in events(path)] == [0, 3]


def test_resume_drops_later_rows_and_a_half_written_line(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write_evaluation(0, success_rate=0.1, n=10)
    for step in range(1, 6):
      writer.write(step, values(step))
      if step in (2, 4):
        writer.write_evaluation(step, success_rate=0.1, n=10)
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"step": 6, "reward_me')
  with metrics.MetricsWriter(tmp_path, restored_step=3) as writer:
    assert writer.has_evaluation(0) and writer.has_evaluation(2) and not writer.has_evaluation(4)
    with pytest.raises(ValueError, match="evaluation of step 2 is already"):
      writer.write_evaluation(2, success_rate=0.2, n=10)
    for step in (4, 5):
      writer.write(step, values(step))
    writer.write_evaluation(4, success_rate=0.3, n=10)
  learner, evaluation = metrics.read_metrics(tmp_path)
  assert [row["step"] for row in learner] == [1, 2, 3, 4, 5]
  assert [row["step"] for row in evaluation] == [0, 2, 4]


def test_a_new_run_does_not_keep_old_rows(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(1, values(1))
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(1, values(1))
  assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_missing_rows_are_reported(tmp_path, caplog):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(1, values(1))
  with caplog.at_level(logging.WARNING), metrics.MetricsWriter(tmp_path, restored_step=2):
    assert "expected rows of steps 1 to 2, found 1" in caplog.text


@pytest.mark.parametrize(
  ("step", "row", "message"),
  [
    (2, values(2), "step must be 1, the next one; received 2"),
    (1, {"reward_mean": 1.0}, "lack .*'policy_version'"),
    (1, values(1, entropy="high"), "'entropy' must be a scalar number; received 'high'"),
    (1, values(1, entropy=np.zeros(2)), "'entropy' must be a scalar number"),
    (1, values(1, entropy=None), "'entropy' must be a scalar number"),
  ],
)
def test_bad_rows_are_refused_and_leave_no_trace(tmp_path, step, row, message):
  with metrics.MetricsWriter(tmp_path) as writer:
    with pytest.raises(ValueError, match=message):
      writer.write(step, row)
    writer.write(1, values(1))
  assert len(lines(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ('{"step": 1}\nnonsense\n', r"metrics\.jsonl:2: not valid JSON"),
    ('{"step": NaN}\n', r"metrics\.jsonl:1: not valid JSON: NaN"),
    ("[1]\n", r"metrics\.jsonl:1: a line must be a JSON object; received list"),
    ('{"step": "1"}\n', r"metrics\.jsonl:1: key 'step' must be an integer; received '1'"),
    ('{"step": true}\n', r"metrics\.jsonl:1: key 'step' must be an integer; received True"),
    (
      '{"step": 1, "loss": "x"}\n',
      r"metrics\.jsonl:1: key 'loss' must be a number or null; received 'x'",
    ),
    ('{"step": 1, "loss": 1e999}\n', r"metrics\.jsonl:1: not valid JSON: 1e999 is out of range"),
    (b'{"step": 1, "\xff": 1}\n', r"metrics\.jsonl:1: not valid JSON"),
    ("[" * 100_000 + "\n", r"metrics\.jsonl:1: not valid JSON"),
  ],
)
def test_malformed_files_are_named_with_their_line(tmp_path, content, message):
  (tmp_path / "metrics.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(ValueError, match=message):
    metrics.read_metrics(tmp_path)


def test_a_folder_without_metrics_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"must be the folder of a run; '.*nowhere' holds no metrics\.jsonl\.$"):
    metrics.read_metrics(tmp_path / "nowhere")
