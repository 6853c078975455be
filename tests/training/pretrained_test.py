"""Where a run's first policy comes from: another run, as a whole or at a step; see also `components_test`."""

from __future__ import annotations

import dataclasses
import json

import chex
import jax
import pytest

from experiments.support import chaos_run
from experiments.tasks import digits
from sao_jax import models
from sao_jax.io.checkpoints import CheckpointError
from sao_jax.training import loop, pretrained
from sao_jax.training.components import Components
from sao_jax.training.config import CheckpointConfig


@pytest.fixture(name="run", scope="module")
def fixture_run(tmp_path_factory):
  """A finished run of two steps with a checkpoint of each: `(config, workdir)`."""
  workdir = tmp_path_factory.mktemp("run")
  config = dataclasses.replace(
    chaos_run.make_config("sync", num_steps=2), eval_episodes=0, checkpoint=CheckpointConfig(every_steps=1)
  )
  loop.train(config, digits.make_domain(), workdir)
  return config, workdir


def test_a_run_starts_from_the_policy_of_another(run):
  config, workdir = run
  assert pretrained.read_config(workdir, dtype="bfloat16", param_dtype="float32") == dataclasses.replace(
    config.policy, dtype="bfloat16"
  )
  policies = {}
  for name, path in (("newest", workdir), ("1", workdir / "checkpoints" / "1"), ("2", workdir / "checkpoints" / "2")):
    with Components(dataclasses.replace(config, policy_checkpoint=str(path)), digits.make_domain()) as parts:
      policies[name] = jax.device_get(parts.init_policy())
  chex.assert_trees_all_equal(policies["newest"], policies["2"])
  with pytest.raises(AssertionError):
    chex.assert_trees_all_equal(policies["1"], policies["2"])


def test_its_parameters_take_the_dtype_of_the_new_run(run):
  config, workdir = run
  policy = dataclasses.replace(config.policy, param_dtype="bfloat16")
  config = dataclasses.replace(config, policy=policy, policy_checkpoint=str(workdir))
  with Components(config, digits.make_domain()) as parts:
    assert {leaf.dtype.name for leaf in jax.tree.leaves(parts.init_policy())} == {"bfloat16"}


def test_what_is_no_checkpoint_of_a_run_is_refused(run, tmp_path):
  config, workdir = run
  with (
    Components(
      dataclasses.replace(config, policy_checkpoint=str(workdir / "checkpoints" / "7")), digits.make_domain()
    ) as parts,
    pytest.raises(CheckpointError, match=r"no checkpoint of step 7 in .*/checkpoints; there are steps \[1, 2\]\.$"),
  ):
    parts.init_policy()
  (tmp_path / "config.json").write_text((workdir / "config.json").read_text())
  with (
    Components(dataclasses.replace(config, policy_checkpoint=str(tmp_path)), digits.make_domain()) as parts,
    pytest.raises(ValueError, match="holds no checkpoint"),
  ):
    parts.init_policy()


def test_the_tokenizer_of_a_run_is_that_of_its_task_or_of_its_start(tmp_path):
  def write(name, start, **options):
    (tmp_path / name).mkdir()
    record = {"policy": {}, "learner": {}, "policy_checkpoint": start, "env": {"options": options}}
    (tmp_path / name / "config.json").write_text(json.dumps(record))
    return str(tmp_path / name)

  first = write("first", "published")
  second = write("second", first)
  assert pretrained.tokenizer_source("published") == "published"
  assert pretrained.tokenizer_source(second) == "published"
  assert pretrained.tokenizer_source(f"{second}/checkpoints/3") == "published"
  assert pretrained.tokenizer_source(write("third", first, checkpoint="own")) == "own"
  assert pretrained.tokenizer_source(write("fresh", None)) is None


def test_an_architecture_that_differs_is_named_by_field(tmp_path):
  config = chaos_run.make_config("sync", num_steps=1).policy
  models.save_hf(tmp_path, config, models.init_policy(config, jax.random.key(0)))
  pretrained.check(tmp_path, dataclasses.replace(config, remat="full", dtype="bfloat16"))
  with pytest.raises(ValueError, match=r"must be that of policy_checkpoint, .*: num_layers is 7 here and \d there"):
    pretrained.check(tmp_path, dataclasses.replace(config, num_layers=7))


@pytest.mark.parametrize(("name", "told"), [("nodir", "there is no '.*nodir'"), ("", "'.*' holds no config.json")])
def test_a_path_without_a_model_is_named(name, told, tmp_path):
  with pytest.raises(FileNotFoundError, match=rf"a Hugging Face directory, a GGUF file or .* run; {told}\.$"):
    pretrained.read_config(tmp_path / name, dtype="float32", param_dtype="float32")
