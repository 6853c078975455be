"""The audit finds every kind of loss, and one real run is killed and resumed."""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from experiments import chaos
from experiments.support import chaos_run


def make_outcome(*, in_background: bool) -> chaos.Outcome:
  """Two steps of two episodes: 0 to 3 are trained on, 4 waits, 5 runs, 6 was dropped."""
  ledger = {
    1: {"step": 1, "episodes": [0, 1], "staleness": [0, 0]},
    2: {"step": 2, "episodes": [2, 3], "staleness": [1, 0]},
  }
  rows = [
    {"step": 1, "staleness_mean": 0.0, "staleness_max": 0, "entropy": 0.5, "explained_variance": float("nan")},
    {"step": 2, "staleness_mean": 0.5, "staleness_max": 1, "entropy": 0.4, "time_s": 7.0},
  ]
  host: dict[str, Any] = {
    "waiting": [], "schedule": {"requests": {"cursor": 4, "again": []}}, "metrics": {"seconds": 1.0},
  }  # fmt: skip
  if in_background:
    host = {
      "waiting": [4],
      "schedule": {
        "requests": {"cursor": 7, "again": [5]},
        "queue": {"dropped_stale": 1, "dropped_incomplete_group": 0, "failed": 0},
      },
    }
  evaluations = [{"step": 0, "eval_success_rate": 0.5}, {"step": 2, "eval_success_rate": 0.6}]
  arrays = {"policy/w": np.ones(3, np.float32)}
  return chaos.Outcome(rows=rows, evaluations=evaluations, arrays=arrays, host=host, ledger=ledger)


def test_a_whole_outcome_passes():
  outcome = make_outcome(in_background=False)
  assert chaos.audit_rows(outcome, 2) == []
  other = copy.deepcopy(outcome)
  other.rows[1]["time_s"] = 9.0
  other.host["metrics"]["seconds"] = 3.0
  assert chaos.audit_same(other, outcome) == []
  assert chaos.audit_episodes(make_outcome(in_background=True), max_staleness=1) == []


def test_rows_and_batches_that_differ_are_found():
  reference = make_outcome(in_background=False)
  changed = copy.deepcopy(reference)
  changed.arrays["policy/w"][1] = np.nextafter(np.float32(1), np.float32(2))
  changed.rows[1]["entropy"] = 0.41
  changed.host["schedule"]["requests"]["cursor"] = 5
  changed.ledger[2]["episodes"] = [3, 2]
  assert chaos.audit_same(changed, reference) == [
    "array policy/w differs", "rows, step 2: entropy differ", "resume state 'schedule' differs", "batches differ",
  ]  # fmt: skip
  assert chaos.audit_same(dataclasses.replace(reference, rows=reference.rows[:1]), reference) != []
  doubled = dataclasses.replace(reference, rows=[*reference.rows, reference.rows[1]])
  assert "expected 1 to 2 once each" in chaos.audit_rows(doubled, 2)[0]
  reference.ledger[2]["staleness"] = [2, 0]
  assert "step 2: staleness 0.5 does not match" in chaos.audit_rows(reference, 2)[0]


@pytest.mark.parametrize(
  ("change", "fault"),
  [
    (lambda o: o.ledger[2].update(episodes=[2, 1]), "episodes [1] were trained on twice"),
    (lambda o: o.host["waiting"].append(3), "episodes [3] were trained on and would be trained on again"),
    (lambda o: o.host["schedule"]["requests"].update(again=[]), "2 of 7 episodes are missing; 1 are counted"),
    (lambda o: o.host["schedule"]["queue"].update(dropped_stale=0), "1 of 7 episodes are missing; 0 are counted"),
    (lambda o: o.ledger[2].update(staleness=[2, 0]), "staleness 2 is above 1"),
  ],
)
def test_lost_and_doubled_episodes_are_found(change, fault):
  outcome = make_outcome(in_background=True)
  change(outcome)
  assert any(fault in found for found in chaos.audit_episodes(outcome, max_staleness=1))


def test_every_kind_of_kill_is_planned():
  shares = chaos.plan(20, ["sync", "lagged", "async"], random.Random(3))
  assert [len(share) for share in shares.values()] == [7, 7, 6]
  assert all(set(share) == set(chaos.PLACES) for share in shares.values())


def test_a_run_killed_in_a_checkpoint_write_ends_as_if_it_had_not_been(tmp_path):
  inside: collections.Counter[str] = collections.Counter()
  assert chaos.kill_and_audit("lagged", ["checkpoint"], 4, tmp_path, random.Random(0), inside) == []
  assert inside["publication"] == 0 and set(inside) == set(chaos_run.WINDOWS)


def test_what_a_kill_fell_into_is_told(tmp_path):
  assert chaos_run.killed_inside(tmp_path / "run") == []
  log = "+publication -publication +checkpoint +publication -checkpoint"
  chaos_run.windows_log(tmp_path / "run").write_text(log.replace(" ", "\n"))
  assert chaos_run.killed_inside(tmp_path / "run") == ["publication"]
