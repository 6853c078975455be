"""The config that a run recorded, and folders without one."""

from __future__ import annotations

import json
import pathlib

import pytest

from experiments.support import recorded_config
from sao_jax.training import config as config_lib
from tests.bare_run import bare


def test_the_recorded_config_is_read_without_settings_that_are_gone(tmp_path: pathlib.Path) -> None:
  recorded = config_lib.to_json(bare())
  recorded["engine"]["prefix_rows"] = 4
  (tmp_path / "config.json").write_text(json.dumps(recorded))
  assert recorded_config.read(tmp_path) == bare()


def test_a_folder_without_a_run_is_named(tmp_path: pathlib.Path) -> None:
  told = r"^--workdir must be the folder of a run; '.*nope' holds no config\.json\.$"
  with pytest.raises(FileNotFoundError, match=told):
    recorded_config.read(tmp_path / "nope")
