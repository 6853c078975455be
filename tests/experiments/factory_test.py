"""Factories in `config.env.factory`, existing and missing ones."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.presets import ablation_cpu
from experiments.tasks.factory import FactoryError, make_domain
from sao_jax.training.config import EnvConfig, RunConfig


def config_of(factory: str) -> RunConfig:
  return dataclasses.replace(ablation_cpu.make_config(), env=EnvConfig(factory=factory))


def test_a_domain_is_made_with_the_options() -> None:
  config = dataclasses.replace(
    ablation_cpu.make_config(), env=EnvConfig(factory="tests.tiny_domain:tiny_domain", options={})
  )
  assert make_domain(config).num_train_tasks >= 1


@pytest.mark.parametrize(
  ("factory", "message"),
  [
    ("no_such_module:make_domain", r"received 'no_such_module:make_domain': No module named 'no_such_module'"),
    ("experiments.tasks.nothing:make_domain", r"received 'experiments.tasks.nothing:make_domain'"),
    ("experiments.tasks.digits:make_domian", r"digits has no 'make_domian'; did you mean make_domain\?"),
    ("experiments.tasks.digits:x", r"digits has no 'x'; it has .*make_domain"),
  ],
)
def test_what_is_not_there_is_named(factory: str, message: str) -> None:
  with pytest.raises(FactoryError, match=message):
    make_domain(config_of(factory))


def test_a_module_that_lacks_something_itself_says_so(tmp_path, monkeypatch) -> None:
  (tmp_path / "half_there.py").write_text("import surely_not_installed\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
    make_domain(config_of("half_there:make_domain"))


@pytest.mark.parametrize(
  ("factory", "message"),
  [
    ("experiments.tasks.bisection:make_domain", r"unexpected keyword argument 'tran'.*; it takes num_train_tasks, "),
    ("experiments.tasks.standard:textarena", r"unknown options of TextArenaConfig: tran; it has game"),
  ],
)
def test_options_that_it_does_not_take_are_named(factory: str, message: str) -> None:
  config = dataclasses.replace(ablation_cpu.make_config(), env=EnvConfig(factory=factory, options={"tran": 1}))
  with pytest.raises(ValueError, match=message):
    make_domain(config)


def test_a_type_error_of_its_own_is_no_matter_of_options(tmp_path, monkeypatch) -> None:
  (tmp_path / "broken_factory.py").write_text("def make_domain():\n  return len(3)\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(TypeError, match="has no len"):
    make_domain(config_of("broken_factory:make_domain"))


def test_another_result_is_refused() -> None:
  with pytest.raises(TypeError, match=r"must return a Domain; received dict"):
    make_domain(config_of("builtins:dict"))
