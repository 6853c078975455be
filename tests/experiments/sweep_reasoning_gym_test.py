"""The sweep over reasoning-gym: a sample of every kind, all corrected tasks, and faults that it must detect."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

MENDED = (
  "binary_matrix", "boxnet", "coin_flip", "complex_arithmetic", "composite", "countdown", "game_of_life_halting",
  "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24", "simple_integration",
  "spiral_matrix", "string_insertion",
)  # fmt: skip
SAMPLE = (
  "aiw", "arc_1d", "base_conversion", "circuit_logic", "course_schedule", "gsm_symbolic", "knights_knaves", "maze",
  "number_sorting", "propositional_logic", "shortest_path", "sudoku", "word_ladder",
)  # fmt: skip


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
  """Runs in a separate process, because an audit hook stays for the life of a process."""
  command = [sys.executable, "-c", code, *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


def test_sets_of_all_kinds_are_sound() -> None:
  code = "from absl import app\nfrom experiments import sweep_reasoning_gym as s\ns.LEVELS = (None, 1)\napp.run(s.main)"
  done = run(code, f"--tasks={','.join(MENDED + SAMPLE)}")
  assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
  summary = json.loads(done.stdout.splitlines()[-1])
  assert summary["new_faults"] == [] and summary["without_answer"] == ["boxnet", "propositional_logic"]
  assert summary["tasks"] == len(MENDED) + len(SAMPLE) < summary["checks"]


FAULTS = (
  ("puzzle24", "env.may_be_scored = lambda task, text: 'sweep_mark' in text", "ran an answer's text"),
  ("chain_sum", "env.TaskSet._score = lambda *_: 1.0", "gets 1.0"),
  ("chain_sum", "env.TaskSet._score = lambda *_: 0.0", "its own answer"),
  ("aiw", "env.TaskSet._score = lambda *_: float(open('/dev/null', 'w').close() or 0)", "open '/dev/null' 'w'"),
  ("aiw", "s._SLOW_S = -1.0", "took"),
)


def test_faults_are_seen() -> None:
  code = (
    "import json\nfrom experiments import sweep_reasoning_gym as s\n"
    "from sao_jax.envs.adapters import _reasoning_gym_worker as env\n"
  )
  code += "s._NONSENSE, s._LARGE = s._NONSENSE[:1], ()\n"
  for task, fault, _ in FAULTS:
    code += f"{fault}\nprint(json.dumps(s.check('{task}', None, problems=1).unknown))\n"
  done = run(code)
  assert done.returncode == 0, done.stderr[-3_000:]
  lines = [line for line in done.stdout.splitlines() if line.startswith("[")]  # one attack runs `echo`
  for line, (_, _, message) in zip(lines, FAULTS, strict=True):
    assert any(message in fault for fault in json.loads(line)), line
