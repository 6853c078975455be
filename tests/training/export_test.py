"""The exported checkpoint: what it holds, and what transformers makes of it."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import models
from sao_jax.tokenizers import Chat
from sao_jax.training import export
from tests.experiments.chat_checkpoint import write_tokenizer
from tests.models import tiny

FIXTURES = pathlib.Path(__file__).parents[1] / "models" / "fixtures"
IN_TRANSFORMERS = """
import sys
import numpy as np, torch, transformers

folder, tokens = sys.argv[1], np.load(sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.no_grad():
  np.save(sys.argv[3], model(torch.tensor(tokens)).logits.float().numpy())
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
said = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
print(said, model.generation_config.eos_token_id, tokenizer.eos_token, tokenizer(said).input_ids)
"""


def write_source(folder: pathlib.Path, **generation) -> models.ModelConfig:
  config = tiny.dense(vocab_size=264)
  models.save_hf(folder, config, tiny.policy_params(config))
  write_tokenizer(folder)
  if generation:
    (folder / "generation_config.json").write_text(json.dumps(generation))
  return config


def test_everything_that_a_checkpoint_needs_is_there(tmp_path):
  source = tmp_path / "source"
  config = write_source(source, eos_token_id=[256, 259], temperature=0.6)
  (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
  (source / "README.md").write_text("not copied")
  (source / "additional_chat_templates").mkdir()
  (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
  params = jax.tree.map(lambda x: x * 1.5, tiny.policy_params(config))
  names = export.export(tmp_path / "out", config, params, source=source, dtype="bfloat16")
  assert names == [
    "additional_chat_templates", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
    "tokenizer.json", "tokenizer_config.json",
  ]  # fmt: skip
  generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
  assert generation == {"eos_token_id": [256, 259], "temperature": 0.6}
  found, read = models.load_hf(tmp_path / "out")
  assert found.param_dtype == "bfloat16"
  jax.tree.map(np.testing.assert_array_equal, read, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


def test_the_stop_token_is_named_where_the_source_names_none(tmp_path):
  config = write_source(tmp_path / "source")
  export.export(tmp_path / "out", config, tiny.policy_params(config), source=tmp_path / "source")
  stop = Chat.load(tmp_path / "source").tokenizer.stop_ids[0]
  for name in ("config.json", "generation_config.json"):
    assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == stop


def test_the_tokenizer_of_another_model_is_replaced_and_other_files_stay(tmp_path):
  config = write_source(tmp_path / "source")
  out = tmp_path / "out"
  (out / "additional_chat_templates").mkdir(parents=True)
  for name in ("chat_template.jinja", "vocab.json", "generation_config.json", "additional_chat_templates/x.jinja"):
    (out / name).write_text('{"of": "another model"}')
  (out / "notes.txt").write_text("mine")
  names = export.export(out, config, tiny.policy_params(config), source=tmp_path / "source")
  assert sorted(path.name for path in out.iterdir()) == sorted([*names, "notes.txt"])
  assert not {"chat_template.jinja", "vocab.json", "additional_chat_templates", "notes.txt"} & set(names)
  assert "of" not in json.loads((out / "generation_config.json").read_text())


def test_the_source_is_never_overwritten_and_may_be_absent(tmp_path):
  config = write_source(tmp_path / "source")
  params = tiny.policy_params(config)
  with pytest.raises(ValueError, match="must not be the checkpoint that the tokenizer comes from"):
    export.export(tmp_path / "source", config, params, source=tmp_path / "source")
  names = export.export(tmp_path / "out", config, params, source=None)
  assert names == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_transformers_reads_it(name, tmp_path):
  missing = [package for package in ("torch", "transformers") if importlib.util.find_spec(package) is None]
  if missing:
    pytest.skip(f"needs {' and '.join(missing)}, which no extra of this package brings")
  source, out = tmp_path / "source", tmp_path / "out"
  source.mkdir()
  for file in ("config.json", "model.safetensors"):
    shutil.copy(FIXTURES / name / file, source / file)
  config, params = models.load_hf(source)
  write_tokenizer(source)
  settings = json.loads((source / "tokenizer_config.json").read_text())
  settings["tokenizer_class"] = "PreTrainedTokenizerFast"
  (source / "tokenizer_config.json").write_text(json.dumps(settings))
  values = json.loads((source / "config.json").read_text()) | {"eos_token_id": None, "pad_token_id": None}
  (source / "config.json").write_text(json.dumps(values))
  params = jax.tree.map(lambda x: x * 1.01, params)  # trained
  export.export(out, config, params, source=source)
  tokens = np.arange(12).reshape(2, 6) % config.vocab_size
  np.save(tmp_path / "tokens.npy", tokens)
  done = subprocess.run(
    [sys.executable, "-c", IN_TRANSFORMERS, out, tmp_path / "tokens.npy", tmp_path / "logits.npy"],
    capture_output=True, text=True, timeout=300, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2_000:]
  chat = Chat.load(source)
  said = "<user>hi<end><assistant>"
  stop = chat.tokenizer.stop_ids[0]
  assert done.stdout.strip() == f"{said} {stop} <end> {chat.tokenizer.encode(said)}"
  expected = models.policy_logits(config)(params, jnp.asarray(tokens))
  np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, atol=2e-4)
