"""The scripts of `examples/`: short, and each runs."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest

from examples import environment, losses, train

ROOT = pathlib.Path(__file__).parents[1]


def test_each_is_a_page_and_is_named_in_the_readme():
  paths = sorted((ROOT / "examples").glob("*.py"))
  assert [path.stem for path in paths] == ["environment", "losses", "train"]
  for path in paths:
    assert len(path.read_text().splitlines()) <= 60
    assert f"(examples/{path.name})" in (ROOT / "README.md").read_text()


def test_the_losses_train_a_policy():
  assert losses.main(num_steps=100) > 0.4  # 0.1 by chance


def test_the_scripted_policy_solves_the_environment(capsys: pytest.CaptureFixture[str]):
  runpy.run_path(environment.__file__, run_name="__main__")
  rows = capsys.readouterr().out.splitlines()
  assert len(rows) == 9 and all(row.startswith("1.0 <|user|>guess<|assistant|>") for row in rows)


def test_the_environment_refuses_what_is_no_guess():
  env = environment.Guess()
  env.reset(4)
  assert "?" in env.step("anything").observation
  assert [env.step(environment.base.answer("1")).done for _ in range(3)] == [False, False, True]


@pytest.mark.timeout(600)
def test_training_from_python(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  summary = train.main(num_steps=2)
  assert summary["num_steps"] == 2 and "success_after" in summary
  assert re.search(r"success [01]\.\d+ -> [01]\.\d+; metrics are in ", capsys.readouterr().out)


def test_the_code_of_the_readme(capsys: pytest.CaptureFixture[str]):
  (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
  exec(code, {})
  assert capsys.readouterr().out.startswith("[0.74 0.   0.6 ] 0.40")
