"""The comparisons: arms differ as described, statistics follow their definitions, and a suite runs for real."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from experiments import ablate
from experiments.ablations import report, results, run_arm, suites, tuning
from experiments.ablations.statistics import bootstrap_mean, paired_difference
from experiments.ablations.suites import SUITES, Arm, Suite, arm_config
from experiments.presets import ablation_cpu
from tests.child_environment import fast_compile
from tests.experiments import tiny_base

ALL = [(name, arm) for name, suite in SUITES.items() for arm in suite.arms]


@pytest.mark.parametrize(("suite", "arm"), ALL, ids=[f"{suite}-{arm.slug}" for suite, arm in ALL])
def test_arm_is_the_base_but_for_what_it_names(suite, arm):
  base = ablation_cpu.make_config()
  config = arm_config(base, arm, seed=3, start="policy")
  assert config.algorithm == arm.algorithm and config.seed == 3 and config.policy_checkpoint == "policy"
  assert (config.batch_size, config.num_steps) == (base.batch_size, arm.length * base.num_steps)
  assert config.engine == base.engine
  assert config.policy == base.policy and config.warm_start.num_steps == 0
  assert config.learner.policy_optimizer == base.learner.policy_optimizer
  clipped = config.learner.critic_optimizer.max_grad_norm is not None
  assert clipped == arm.critic_clipping
  if arm.lag is None:
    assert (config.schedule, config.lag) == (base.schedule, base.lag)
    assert config.lag_switch_chunks == base.lag_switch_chunks
  else:
    assert (config.schedule, config.lag, config.lag_switch_chunks) == ("lagged", arm.lag, None)
  assert config.batch_size % config.group_size == 0
  if arm == suites.SAO:
    assert config.learner == base.learner


def test_names_of_a_suite_differ():
  for suite in SUITES.values():
    assert len({arm.slug for arm in suite.arms}) == len({arm.name for arm in suite.arms}) == len(suite.arms)


def test_what_is_run_once_for_several_suites_is_the_same():
  """Runs are in folders named after the arm's slug; tuned rates are named after the arm's family."""
  by_slug = {}
  families = {}
  for _, arm in ALL:
    assert by_slug.setdefault(arm.slug, arm) == arm
    assert families.setdefault(arm.family.slug, arm.family) == arm.family
    assert (arm.family.lag, arm.family.length) == (None, 1)
  assert families["sao"] == suites.SAO


def test_every_suite_compares_with_sao_at_the_same_lag():
  for name, suite in SUITES.items():
    for arm in suite.arms:
      reference = suites.reference_of(suite, arm)
      assert reference.algorithm == "sao" and not reference.learner and reference.lag == arm.lag, name


def test_tuned_learning_rate_and_cold_critic():
  base = ablation_cpu.make_config()
  arm = suites.find("critic", "no_value_pretraining")
  config = arm_config(base, arm, seed=0, start=None, learning_rate=0.5)
  assert config.learner.policy_optimizer.learning_rate == 0.5 and config.policy_checkpoint is None
  assert config.critic.pretraining_trajectories == 0 < base.critic.pretraining_trajectories
  with pytest.raises(ValueError, match=r"arm must be one of sao, k___1.*received 'nope'"):
    suites.find("critic", "nope")


def test_clipping_arms_have_ratios_to_clip():
  """With one update per batch pi_old is the policy itself, and clipping does nothing: the arm's name says so."""
  for _, arm in ALL:
    loss = arm_config(ablation_cpu.make_config(), arm, seed=0, start=None).learner
    if loss.policy_loss in ("ppo_clip", "icepop") and not arm.name.endswith(", 1 update"):
      assert loss.policy_minibatches > 1 or loss.old_policy == "rollout", arm.name


def test_arms_of_the_correction_suite_differ_in_the_policys_loss_alone():
  base = ablation_cpu.make_config()
  blocks = {}
  for arm in SUITES["correction"].arms:
    assert arm.family == suites.SAO  # one tuned rate for all
    config = arm_config(base, arm, seed=0, start=None)
    config = dataclasses.replace(config, algorithm="sao")
    learner = dataclasses.replace(config.learner, policy_loss="dis", old_policy="learner")
    key = arm.lag, arm.updates
    assert arm.rate_factor * arm.updates == 1.0  # a matched nominal step
    assert blocks.setdefault(key, learner) == learner, arm.name
  assert {lag for lag, _ in blocks} == {0, 2, 8, 32} and len(blocks) == 8


def test_bootstrap_interval_is_that_of_resampled_means():
  values = [0.1, 0.4, 0.7]
  # All 27 resamples, equally likely: percentiles of the exact distribution.
  exact = sorted(np.mean([a, b, c]) for a in values for b in values for c in values)
  found = bootstrap_mean(values)
  assert found.mean == pytest.approx(0.4) and found.n == 3
  assert (found.low, found.high) == (pytest.approx(exact[0]), pytest.approx(exact[-1]))
  assert bootstrap_mean(values) == found
  wide = np.random.default_rng(0).normal(size=400)
  assert np.diff(bootstrap_mean(wide)[1:3]) == pytest.approx(2 * 1.96 * wide.std() / 20, rel=0.05)


def test_one_seed_has_no_interval():
  found = bootstrap_mean([0.5])
  assert found.mean == 0.5 and math.isnan(found.low) and str(found) == "0.500"


@pytest.mark.parametrize("values", [[], [float("nan")], [[1.0]]])
def test_means_of_nothing_are_refused(values):
  with pytest.raises(ValueError, match="one or more finite numbers"):
    bootstrap_mean(values)


def test_differences_are_paired_by_seed():
  found = paired_difference({0: 0.5, 1: 0.9, 7: 0.0}, {0: 0.4, 1: 0.8, 2: 1.0})
  assert found.n == 2 and found.mean == pytest.approx(0.1) and found.low == pytest.approx(0.1)
  with pytest.raises(ValueError, match="must share a seed"):
    paired_difference({0: 1.0}, {1: 1.0})


@pytest.fixture
def rows():
  """Two arms, two seeds, 20 steps; SAO's success rises to 0.2 + seed / 10."""
  made = []
  for arm, bonus in (("SAO", 0.2), ("other", 0.1)):
    for seed in (0, 1):
      common = {"suite": "s", "arm": arm, "learning_rate": 0.001, "seed": seed}
      made += [{**common, "step": step, "success_rate": step / 20, "entropy": 1.5} for step in range(1, 21)]
      made += [{**common, "step": 0, "eval_success_rate": 0.0, "eval_n": 9}]
      made += [{**common, "step": 20, "eval_success_rate": bonus + seed / 10, "eval_n": 9}]
  return made


def test_a_suite_of_ones_own(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "own_suites.py").write_text(
    "from experiments.ablations.suites import SAO, Arm, Suite\n"
    "BOUNDS = Suite(title='T', arms=(SAO, Arm(name='wide', learner={'eps_high': 9.0})), curves=('success_rate',))\n"
    "ALONE = Suite(title='T', arms=(Arm(name='wide'),), curves=())\n"
  )
  runner = ablate.Runner(
    "own_suites:BOUNDS", base="tests.experiments.tiny_base:make_config", workdir=tmp_path / "w", quick=True, jobs=1
  )
  arm = suites.find("own_suites:BOUNDS", "wide")
  assert runner.name == "BOUNDS" and "--suite=own_suites:BOUNDS" in runner._arm_flags(arm, 0, 0.1)
  assert arm_config(tiny_base.make_config(), arm, seed=0, start=None).learner.eps_high == 9.0
  for name, message in (
    ("nope", r"suite must be one of clipping, .*, or module:NAME; received 'nope'"),
    ("nowhere:X", "suite must name a module that can be imported; received 'nowhere:X'"),
    ("own_suites:SAO", "must be a `suites.Suite`; received Arm"),
    ("own_suites:ALONE", r"it lacks \['SAO'\]"),
  ):
    with pytest.raises(ValueError, match=message):
      suites.load(name)


ARMS = Suite(title="T", arms=(suites.SAO, Arm(name="other"), Arm(name="absent")), curves=("success_rate", "entropy"))


def test_csv_comes_back(tmp_path, rows):
  rows.append({"suite": "s", "arm": "SAO", "lag": 2, "seed": 5, "step": 1, "explained_variance": float("nan")})
  results.write_csv(tmp_path / "x.csv", rows)
  back = results.read_csv(tmp_path / "x.csv")
  assert back[:-1] == [{key: pytest.approx(value) for key, value in row.items()} for row in rows[:-1]]
  assert back[-1]["lag"] == 2 and math.isnan(back[-1]["explained_variance"])


def test_table(rows):
  lines = results.table(ARMS, rows).splitlines()
  assert "| SAO | 0.001 | 1 | 2 | 0.250 (0.200 to 0.300) |  | 0.975 |  |  | 0 |" in lines
  assert "| other | 0.001 | 1 | 2 | 0.150 (0.100 to 0.200) | -0.100 (-0.100 to -0.100) | 0.975 |  |  | 0 |" in lines
  assert "| absent |  | 1 | 0 |  |  |  |  |  |  |" in lines


def test_table_says_how_many_seeds_a_difference_is_of(rows):
  lines = results.table(ARMS, [row for row in rows if (row["arm"], row["seed"]) != ("SAO", 1)]).splitlines()
  assert any(line.startswith("| other | 0.001 | 1 | 2 | 0.150 (0.100 to 0.200) | -0.100, n = 1 |") for line in lines)


def test_collapse_is_found_where_it_begins():
  def rows(rates, seed):
    return [{"arm": "SAO", "seed": seed, "step": i + 1, "success_rate": x} for i, x in enumerate(rates)]

  falls = [0.8] * 40 + [0.1] * 40
  dips = [0.8] * 40 + [0.1] * 20 + [0.8] * 40
  found = results.collapses([*rows(falls, 0), *rows(dips, 1), *rows(np.linspace(0.1, 0.9, 50), 2)], "SAO")
  # The running mean over 11 steps passes 0.7 x 0.8 when four of them are low: at step 39 of 80 (5 after it).
  assert found == {0: 39, 1: None, 2: None}


def test_last_mean_leaves_nan_out(rows):
  rows.append({"arm": "SAO", "seed": 0, "step": 20, "entropy": float("nan")})
  assert results.last_mean(rows, "SAO", "entropy") == {0: 1.5, 1: 1.5}


@pytest.mark.parametrize("tuning", [True, False])
def test_a_run_that_a_signal_ended_is_no_result(tmp_path, monkeypatch, tuning):
  """A tuning process exits with code 0 but without its last file: no learning rate may be chosen from it."""
  runner = ablate.Runner(
    "granularity", base="tests.experiments.tiny_base:make_config", workdir=tmp_path, quick=True, jobs=1
  )
  asked = []

  def stopped(command, **_):
    folder = pathlib.Path(next(x for x in command if x.startswith("--folder=")).partition("=")[2])
    asked.append(folder.relative_to(tmp_path))
    (folder / "metrics.jsonl").write_text('{"step": 1, "success_rate": 1.0}\n')
    return subprocess.CompletedProcess(command, 0)

  monkeypatch.setattr(subprocess, "run", stopped)
  (tmp_path / "start" / f"seed{ablate.TUNING_SEED if tuning else 0}").mkdir(parents=True)
  (tmp_path / "start" / f"seed{ablate.TUNING_SEED if tuning else 0}" / "done").touch()
  with pytest.raises(RuntimeError, match=r"ended with code 0 and without summary\.json"):
    runner.tune() if tuning else runner.run([0])
  assert len(asked) == (12 if tuning else 3) and not (tmp_path / "tuned.json").exists()


def test_learning_rates_are_handed_over_as_they_are(tmp_path):
  base = "tests.experiments.tiny_base:make_config"
  runner = ablate.Runner("granularity", base=base, workdir=tmp_path, quick=True, jobs=1)
  assert "--learning_rate=0.00031622776" in runner._arm_flags(suites.SAO, 0, 0.00031622776)


def test_a_tuned_workdir_keeps_its_rates_without_the_flag(tmp_path, capsys):
  """Otherwise the same suite without --tune would run everything again at the base's rate and overwrite the results."""
  base = "tests.experiments.tiny_base:make_config"
  (tmp_path / "tuned.json").write_text('{"sao": 0.125}')
  runner = ablate.Runner("granularity", base=base, workdir=tmp_path, quick=True, jobs=1)
  assert runner.folder(suites.SAO, 0) == tmp_path / "runs" / "sao_lr0.125" / "seed0"
  other = next(arm for arm in SUITES["granularity"].arms if arm != suites.SAO)
  assert runner.learning_rate(other) == tiny_base.make_config().learner.policy_optimizer.learning_rate
  runner.print_rates()
  said = capsys.readouterr().out
  assert f"from {tmp_path / 'tuned.json'}; the base's for {other.name}" in said and "for SAO" not in said
  ablate.Runner("granularity", base=base, workdir=tmp_path / "untuned", quick=True, jobs=1).print_rates()
  assert not capsys.readouterr().out


@pytest.mark.parametrize(
  ("base", "message"),
  [
    ("nope:f", r"base must be module:function of a run; received 'nope:f': No module named 'nope'"),
    ("experiments.presets.nope:f", "No module named 'experiments.presets.nope'"),
    ("experiments.presets.ablation_cpu:nope", "ablation_cpu has no such function"),
    ("experiments.presets.ablation_cpu", "base must be module:function of a run"),
    ("experiments.presets.ablation_cpu:make_policy", "must return a RunConfig; received ModelConfig"),
  ],
)
def test_a_base_that_there_is_not_is_refused(base, message):
  with pytest.raises(ValueError, match=message):
    run_arm.base_config(base, quick=False)


def test_a_bad_base_is_told_in_a_line(tmp_path, monkeypatch):
  options = types.SimpleNamespace(
    workdir=tmp_path / "w", report=False, suite="main", base="nope:f", quick=True, jobs=1, seeds=1
  )
  monkeypatch.setattr(ablate.flags, "FLAGS", options)
  with pytest.raises(ValueError, match="base must be module:function of a run; received 'nope:f'"):
    ablate.main(["ablate"])
  assert not (tmp_path / "w").exists()


def test_jobs_are_the_cores_this_process_may_use(monkeypatch):
  monkeypatch.setattr(ablate.os, "cpu_count", lambda: 64)
  monkeypatch.setattr(ablate.os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
  assert ablate.usable_cores() == 2
  monkeypatch.delattr(ablate.os, "sched_getaffinity")
  assert ablate.usable_cores() == 64


@pytest.mark.timeout(1800)
def test_a_suite_from_start_to_table(tmp_path):
  """Runs the command twice; the second time nothing is run again."""
  command = [
    sys.executable, "-m", "experiments.ablate", "--suite=granularity", "--seeds=1", "--quick", f"--workdir={tmp_path}",
    "--base=tests.experiments.tiny_base:make_config",
  ]  # fmt: skip
  first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500, env=fast_compile())
  assert first.returncode == 0, first.stdout + first.stderr
  assert first.stdout.count("done ") == 4  # the start and three arms
  rows = results.read_csv(tmp_path / "granularity" / "granularity.csv")
  base = suites.quick(tiny_base.make_config())
  rate = base.learner.policy_optimizer.learning_rate
  for arm in SUITES["granularity"].arms:
    mine = [row for row in rows if row["arm"] == arm.name]
    assert [row["step"] for row in mine if "success_rate" in row] == list(range(1, base.num_steps + 1))
    assert [row["step"] for row in mine if "eval_success_rate" in row] == [0, base.num_steps]
    config = json.loads((tmp_path / "runs" / f"{arm.slug}_lr{rate:g}" / "seed0" / "config.json").read_bytes())
    assert config["algorithm"] == arm.algorithm
  # All arms began with the same policy: the evaluation before RL is the same.
  assert len({row["eval_success_rate"] for row in rows if row["step"] == 0}) == 1
  assert (tmp_path / "granularity" / "granularity.png").stat().st_size > 10_000
  made = (tmp_path / "granularity" / "granularity.md").read_text()
  assert f"| step level, mean | {rate:g} | 1 |" in made
  second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
  assert second.returncode == 0 and "done " not in second.stdout
  (tmp_path / "granularity" / "granularity.png").unlink()
  assert report.rebuild(tmp_path) == ["granularity"]
  assert (tmp_path / "granularity" / "granularity.md").read_text() == made
  other = [*command, "--base=experiments.presets.ablation_cpu:make_config"]
  refused = subprocess.run(other, capture_output=True, text=True, check=False, timeout=1500)
  assert refused.returncode != 0 and "different config" in refused.stderr


@pytest.mark.parametrize("size", [1, 2, 4, 5, 40])
def test_smoothing_keeps_length_and_means(size):
  values = np.random.default_rng(size).normal(size=size)
  values[size // 2] = np.nan if size > 2 else values[size // 2]
  smooth = results._smooth(values)
  half = min(11, size - 1) // 2
  want = [np.nanmean(values[max(0, i - half) : i + half + 1]) for i in range(size)]
  np.testing.assert_allclose(smooth, want)


def test_tables_of_results_md_are_those_of_the_committed_files():
  """Every number in a table of RESULTS.md can be rebuilt from a committed CSV file."""
  root = pathlib.Path(__file__).parents[2]
  text = (root / "RESULTS.md").read_text(encoding="utf-8")
  assert report.fill(text, root / "experiments" / "results") == text
  assert all(f"<!-- {name} -->" in text for name in SUITES)
  found = list((root / "experiments" / "results").rglob("*.md"))
  assert len(found) >= 7
  for path in found:
    made = path.read_text(encoding="utf-8")
    rows = results.read_csv(path.with_suffix(".csv"))
    assert results.table(SUITES[path.stem], rows) in made and "python -m experiments.ablate" in made


def test_documents_are_filled(tmp_path, rows):
  for folder in ("granularity", "tool_math/granularity"):
    (tmp_path / folder).mkdir(parents=True)
    results.write_csv(tmp_path / folder / "granularity.csv", rows)
  marks = ("granularity", "main", "tool_math/granularity")
  text = report.fill("A\n" + "".join(f"<!-- {mark} -->\nold\n<!-- end -->\nB\n" for mark in marks), tmp_path)
  assert "old" not in text and text.count("| SAO | 0.001 | 1 | 2 | 0.250") == 2 and text.startswith("A\n")
  assert "<!-- tool_math/granularity -->" in text
  assert f"<!-- main -->\n\n{report.NOTHING}\n\n<!-- end -->\n" in text
  with pytest.raises(ValueError, match=r"a table must be that of one of main.*received 'nope'"):
    report.fill("<!-- nope -->\n<!-- end -->", tmp_path)
  with pytest.raises(ValueError, match=r"must hold SUITE/SUITE\.csv"):
    report.rebuild(tmp_path / "granularity")


def test_what_tuning_found_is_kept(tmp_path):
  for rate, rates in (("0.002", [0.5, 0.5, 0.5, 0.0, 0.1]), ("0.0005", [0.1, 0.2, 0.3, 0.4, 0.5])):
    folder = tmp_path / "tuning" / "sao" / rate
    folder.mkdir(parents=True)
    rows = [{"step": i + 1, "success_rate": x} for i, x in enumerate(rates)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text("{}")
  (tmp_path / "tuning" / "other" / "0.001").mkdir(parents=True)  # has not finished
  outcomes = tuning.collect(ARMS, tmp_path / "tuning")
  assert outcomes == {"SAO": {0.0005: pytest.approx(0.45), 0.002: pytest.approx(0.05)}, "other": {}}
  tuning.write_csv(tmp_path / "x.csv", outcomes)
  assert tuning.read_csv(tmp_path / "x.csv") == {"SAO": outcomes["SAO"]}
  assert tuning.table(outcomes).splitlines()[2:] == ["| SAO | 0.450 | 0.050 |", "| other |  |  |"]
