"""Checkpoints on real files: retention, damage of every file, kills during a save, donation, wrong schema."""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sao_jax.io import checkpoints, checksums

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = {"learner": {"eps_low": 0.3, "sizes": [1, 2]}, "num_steps": 10}


def make_state(seed: int):
  key = jax.random.key(seed)
  params = {"layers_0": {"attention": {"q_proj": {"kernel": jax.random.normal(key, (4, 6))}}}}
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  return {
    "policy": params,
    "critic": jax.tree.map(lambda x: x.astype(jnp.bfloat16), params),
    "opt": optimizer.init(params),
    "host_counts": np.arange(3, dtype=np.int64) + seed,
    "scalar": np.float32(seed),
    "key": jax.random.fold_in(key, 7),
    "empty": (),
  }


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def open_(tmp_path, **options):
  return checkpoints.Checkpointer(tmp_path, **{"config": CONFIG} | options)


def save_steps(tmp_path, steps, **options):
  with open_(tmp_path, **options) as checkpointer:
    for step in steps:
      checkpointer.save(step, make_state(step), {"cursor": step, "nan": math.nan, "names": ["a"]})


def test_round_trip_is_exact(tmp_path):
  with open_(tmp_path) as checkpointer:
    assert checkpointer.restore(make_state(0)) is None
    checkpointer.save(3, make_state(3), {"cursor": 12, "mean": 0.1, "nan": math.nan})
    restored = checkpointer.restore(make_state(0))
  assert restored.step == 3
  assert_same(restored.state, make_state(3))
  assert isinstance(restored.state["policy"]["layers_0"]["attention"]["q_proj"]["kernel"], jax.Array)
  assert restored.host["cursor"] == 12 and restored.host["mean"] == 0.1 and math.isnan(restored.host["nan"])


def test_restores_into_shapes_alone_and_onto_the_templates_devices(tmp_path):
  save_steps(tmp_path, [1])
  device = jax.devices()[0]
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=[device])
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

  def abstract(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    placed = isinstance(leaf, jax.Array) and not is_key and leaf.ndim
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding if placed else None)

  with open_(tmp_path, read_only=True) as checkpointer:
    state = checkpointer.restore(jax.tree.map(abstract, make_state(0))).state
  kernel = state["policy"]["layers_0"]["attention"]["q_proj"]["kernel"]
  assert kernel.sharding == sharding
  assert_same(state, make_state(1))


def test_saved_arrays_survive_donation_and_overwriting(tmp_path):
  state = {"x": jnp.full((1000,), 1.0), "y": np.full((1000,), 1.0)}
  step = jax.jit(lambda x: x * 0 + 5.0, donate_argnums=0)
  with open_(tmp_path) as checkpointer:
    checkpointer.save(1, state, {})
    step(state["x"])
    state["y"][:] = 5.0
    restored = checkpointer.restore(
      {"x": jax.ShapeDtypeStruct((1000,), jnp.float32), "y": np.zeros((1000,), np.float64)}
    ).state
  assert (restored["x"] == 1.0).all() and (restored["y"] == 1.0).all()


def test_keeps_the_newest_and_the_best(tmp_path):
  state = {"x": jnp.zeros(2)}
  with open_(tmp_path, keep=2, keep_best=1) as checkpointer:
    for step, metric in enumerate([math.inf, 0.9, math.nan, None, np.float32("nan"), 0.1], start=1):
      checkpointer.save(step, state, {}, metric=metric)
      checkpointer.wait()
    assert checkpointer.steps() == [2, 5, 6]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "5", "6"]


def files_of(folder: pathlib.Path):
  return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_kind_of_damage_falls_back_and_is_named(tmp_path, caplog):
  """Deletes, truncates or flips a byte of each file in turn."""
  save_steps(tmp_path, [1, 2], keep=2, keep_best=0)
  names = [path.relative_to(tmp_path / "checkpoints/2") for path in files_of(tmp_path / "checkpoints/2")]
  backup = tmp_path / "backup"
  (tmp_path / "checkpoints").rename(backup)
  for name in names:
    for damage in ("delete", "truncate", "flip"):
      caplog.clear()
      folder = tmp_path / f"{name.name}-{damage}-{name.parent.name}"
      shutil.copytree(backup, folder / "checkpoints")
      path = folder / "checkpoints/2" / name
      content = path.read_bytes()
      if damage == "delete":
        path.unlink()
      elif damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
      else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :])
      with open_(folder) as checkpointer, caplog.at_level(logging.WARNING):
        restored = checkpointer.restore(make_state(0))
      assert_same(restored.state, make_state(1))
      assert restored.step == restored.host["cursor"] == 1
      assert "checkpoints/2 is damaged" in caplog.text and name.name in caplog.text
      assert (folder / "checkpoints/2.damaged").is_dir() and not (folder / "checkpoints/2").exists()


def test_a_run_goes_on_after_damage(tmp_path):
  save_steps(tmp_path, [1, 2])
  (tmp_path / "checkpoints/2/state/manifest.ocdbt").unlink()
  with open_(tmp_path) as checkpointer:
    assert checkpointer.restore(make_state(0)).step == 1
    checkpointer.save(2, make_state(2), {})
    assert checkpointer.restore(make_state(0)).step == 2


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path):
  save_steps(tmp_path, [1, 2])
  for step in (1, 2):
    (tmp_path / f"checkpoints/{step}/host/metadata").write_text("{")
  with open_(tmp_path, read_only=True) as checkpointer, pytest.raises(checkpoints.CheckpointError, match=r"\[1, 2\]"):
    checkpointer.restore(make_state(0))
  assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


def test_leftovers_of_a_kill_are_named_and_removed_but_not_by_a_reader(tmp_path, caplog):
  save_steps(tmp_path, [1])
  half = tmp_path / "checkpoints/2.partial.orbax-checkpoint-tmp"
  half.mkdir()
  with open_(tmp_path, read_only=True) as reader:
    assert reader.restore(make_state(0)).step == 1
    with pytest.raises(ValueError, match="read_only"):
      reader.save(2, make_state(2), {})
  assert half.exists()
  with caplog.at_level(logging.WARNING), open_(tmp_path) as checkpointer:
    assert checkpointer.restore(make_state(0)).step == 1
  assert not half.exists()
  assert "2.partial.orbax-checkpoint-tmp was being written" in caplog.text


def test_mismatches_list_the_fields(tmp_path, monkeypatch):
  save_steps(tmp_path, [1])
  other = {"learner": {"eps_low": 0.2, "sizes": (1, 2)}, "num_steps": 20}
  with open_(tmp_path, config=other) as checkpointer, pytest.raises(checkpoints.CheckpointError) as caught:
    checkpointer.restore(make_state(0))
  assert "config.learner.eps_low: recorded 0.3, now 0.2" in str(caught.value)
  assert "config.num_steps: recorded 10, now 20" in str(caught.value)
  assert "sizes" not in str(caught.value)
  with open_(tmp_path, config=other, may_differ=("num_steps", "learner")) as checkpointer:
    assert checkpointer.restore(make_state(0)).step == 1

  template = make_state(0)
  template["policy"]["layers_0"]["attention"]["q_proj"]["kernel"] = jnp.zeros((4, 8))
  template["more"] = jnp.zeros(3)
  with open_(tmp_path) as checkpointer, pytest.raises(checkpoints.CheckpointError) as caught:
    checkpointer.restore(template)
  wanted = "array policy/layers_0/attention/q_proj/kernel: recorded float32[4, 6], now float32[4, 8]"
  assert wanted in str(caught.value)
  assert "array more: recorded nothing, now float32[3]" in str(caught.value)

  assert (tmp_path / "checkpoints/1").is_dir()


def test_an_older_library_is_refused_and_a_mended_one_is_not(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr("sao_jax.version.__version__", "0.7.1")
  save_steps(tmp_path, [1])
  monkeypatch.setattr("sao_jax.version.__version__", "0.8.0")
  with open_(tmp_path) as checkpointer, pytest.raises(checkpoints.CheckpointError) as caught:
    checkpointer.restore(make_state(0))
  assert "library_version: recorded 0.7.1, now 0.8.0" in str(caught.value)
  monkeypatch.setattr("sao_jax.version.__version__", "0.7.2")
  with open_(tmp_path) as checkpointer, caplog.at_level(logging.WARNING):
    assert checkpointer.restore(make_state(0)).step == 1
  assert "library_version is 0.7.2 now and was 0.7.1" in caplog.text and "jax_version" not in caplog.text
  monkeypatch.setattr(checkpoints, "_FORMAT", 2)
  with open_(tmp_path) as checkpointer, pytest.raises(checkpoints.CheckpointError, match="format: recorded 1, now 2"):
    checkpointer.restore(make_state(0))


def test_host_arrays_come_back_whatever_their_shapes(tmp_path):
  with open_(tmp_path) as checkpointer:
    for step, size in ((1, 0), (2, 5)):
      arrays = {"a": np.full(size, np.nan, np.float32), "b": np.arange(size, dtype=np.int64) > 1}
      checkpointer.save(step, make_state(step), {}, host_arrays=arrays)
      restored = checkpointer.restore(make_state(0)).host_arrays
      assert {name: (x.dtype, x.tobytes()) for name, x in restored.items()} == {
        name: (x.dtype, x.tobytes()) for name, x in arrays.items()
      }


def test_host_state_alone(tmp_path):
  save_steps(tmp_path, [1, 2])
  (tmp_path / "checkpoints/2/host/metadata").unlink()
  with open_(tmp_path, read_only=True) as checkpointer:
    assert checkpointer.host_state(1)["cursor"] == 1
    with pytest.raises(checkpoints.CheckpointError, match=r"checkpoints/2 is missing or damaged: .*metadata"):
      checkpointer.host_state(2)
    with pytest.raises(checkpoints.CheckpointError, match="no checkpoint of step 7"):
      checkpointer.host_state(7)


def test_arrays_need_no_template(tmp_path):
  save_steps(tmp_path, [3])
  with open_(tmp_path, read_only=True) as checkpointer:
    arrays = checkpointer.arrays(3)
    with pytest.raises(checkpoints.CheckpointError, match="no checkpoint of step 4"):
      checkpointer.arrays(4)
  state = make_state(3)
  kernel = state["critic"]["layers_0"]["attention"]["q_proj"]["kernel"]
  saved = arrays["critic/layers_0/attention/q_proj/kernel"]
  assert saved.dtype == jnp.bfloat16 and saved.tobytes() == np.asarray(kernel).tobytes()
  assert arrays["host_counts"].tolist() == [3, 4, 5] and arrays["scalar"] == 3
  assert len(arrays) == len(jax.tree.leaves(state))


def test_bad_arguments(tmp_path):
  with pytest.raises(ValueError, match="keep must be >= 1"):
    open_(tmp_path, keep=0)
  with open_(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match="'a/b' must be an array; received int"):
      checkpointer.save(1, {"a": {"b": 3}}, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
      checkpointer.save(1, {"a": jnp.zeros(1)}, {"x": object()})
    checkpointer.save(1, {"a": jnp.zeros(1)}, {})
    with pytest.raises(ValueError, match="already exists"):
      checkpointer.save(1, {"a": jnp.zeros(1)}, {})


def test_a_failed_save_surfaces_in_the_next_call(tmp_path, monkeypatch):
  checkpointer = open_(tmp_path)

  def fail(*args, **kwargs):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(checkpointer._orbax, "save", fail)
  checkpointer.save(1, {"a": jnp.zeros(1)}, {})
  with pytest.raises(checkpoints.CheckpointError, match=r"could not be written.*No space left on device.*steps \[\]"):
    checkpointer.wait()
  checkpointer.save(1, {"a": jnp.zeros(1)}, {})
  with pytest.raises(checkpoints.CheckpointError, match="No space left"):
    checkpointer.close()
  assert checkpointer.steps() == []


KILLED = """
import sys
import jax.numpy as jnp
from sao_jax.io import checkpoints, checksums
checkpointer = checkpoints.Checkpointer(sys.argv[1], config={}, keep=3)
step = int(sys.argv[2])
while True:
  step += 1
  checkpointer.save(step, {"a": jnp.full((200_000,), step), "b": jnp.full((3,), step)}, {"step": step})
  print(step, flush=True)
"""


def test_kill_during_saves_always_leaves_one_whole_checkpoint(tmp_path):
  """Kills a process that does nothing but save, at times that fall into all phases of a save."""
  template = {"a": jnp.zeros(200_000, jnp.int32), "b": jnp.zeros(3, jnp.int32)}
  first = 0
  for trial in range(3):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(first)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
      for _ in range(3):
        reported = int(process.stdout.readline())
      time.sleep(0.013 * (trial + 1))
      process.send_signal(signal.SIGKILL)
      rest = process.stdout.read().split()
    reported = int(rest[-1]) if rest else reported
    with checkpoints.Checkpointer(tmp_path, config={}, keep=3) as checkpointer:
      restored = checkpointer.restore(template)
    assert restored.step >= reported - 1, "a save that had completed is lost"
    assert restored.host == {"step": restored.step}
    assert (restored.state["a"] == restored.step).all() and (restored.state["b"] == restored.step).all()
    first = restored.step


def save_two(tmp_path: pathlib.Path) -> pathlib.Path:
  with checkpoints.Checkpointer(tmp_path, config=CONFIG) as checkpointer:
    for step in (1, 2):
      checkpointer.save(step, make_state(step), {"step": step})
  return tmp_path / "checkpoints"


def restored_step(tmp_path: pathlib.Path) -> int | None:
  with checkpoints.Checkpointer(tmp_path, config=CONFIG) as checkpointer:
    restored = checkpointer.restore(make_state(0))
  return None if restored is None else restored.step


def test_names_and_links_that_are_no_checkpoints_of_ours(tmp_path, caplog):
  folder = save_two(tmp_path)
  outside = tmp_path / "outside"
  outside.mkdir()
  (outside / "kept").write_text("x")
  for name in ("007", "٣", "9" * 30):
    (folder / name).mkdir()
  for name, target in (("3", "3"), ("3.partial", "3.partial"), ("4.partial", outside), ("5.deleted", outside)):
    (folder / name).symlink_to(target)
  (folder / "6.partial").write_text("x")
  assert restored_step(tmp_path) == 2
  assert (outside / "kept").exists() and not list(folder.glob("*.partial")) and not list(folder.glob("*.deleted"))
  # A copy under another name holds another step's state.
  shutil.copytree(folder / "1", folder / "9")
  assert restored_step(tmp_path) == 2 and "its files.json is that of step 1, under another name" in caplog.text


@pytest.mark.parametrize("listing", ["[" * 100_000, "[]", "null", '{"crc32": NaN}', "\x00" * 100])
def test_a_listing_that_is_nonsense_is_damage(listing, tmp_path):
  folder = save_two(tmp_path)
  (folder / "2" / "files.json").write_text(listing)
  (folder / "2.damaged").write_text("in the way")
  assert restored_step(tmp_path) == 1
  assert (folder / "2.damaged").is_dir()


def rewrite_listing(folder, **fields):
  """Replaces fields of the listing; its checksum is right again, as anyone can make it."""
  path = folder / "files.json"
  listing = json.loads(path.read_text()) | fields
  del listing["crc32"]
  path.write_text(json.dumps(listing | {"crc32": checksums.of_json(listing)}))


def make_outside_file(folder):
  (folder.parent / "outside").write_text("x")
  return "../outside"


def make_link(target):
  def make(folder):
    (folder / "link").symlink_to(target)
    return "link"

  return make


def make_linked_folder(folder):
  (folder.parent / "elsewhere").mkdir()
  (folder.parent / "elsewhere" / "file").write_text("x")
  (folder / "linked").symlink_to(folder.parent / "elsewhere")
  return "linked/file"


def make_pipe(folder):
  os.mkfifo(folder / "pipe")
  return "pipe"


def make_folder(folder):
  (folder / "more").mkdir()
  return "more"


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda _: "/dev/zero", "must name files by relative paths inside"),
    (lambda folder: str(folder / "files.json"), "must name files by relative paths inside"),
    (make_outside_file, "must name files by relative paths inside"),
    (lambda _: "", "must name files by relative paths inside"),
    (lambda _: "a\0b", "must name files by relative paths inside"),
    (make_link("/dev/zero"), "must stay inside its folder; received a link to /dev/zero"),
    (make_link("link"), "Too many levels"),
    (make_linked_folder, "must stay inside its folder"),
    (make_pipe, "pipe must be a regular file"),
    (make_folder, "Is a directory"),
    (lambda _: "missing", "No such file"),
  ],
)
def test_a_listing_names_files_inside_the_checkpoint_alone(make, message, tmp_path, monkeypatch):
  save_steps(tmp_path, [1])
  folder = tmp_path / "checkpoints" / "1"
  rewrite_listing(folder, files={make(folder): [1, 0]})
  monkeypatch.setattr(checksums, "of_file", lambda path: pytest.fail(f"{path} was read"))
  with open_(tmp_path) as checkpointer, pytest.raises(checkpoints.CheckpointError, match=message):
    checkpointer.host_state(1)


@pytest.mark.parametrize("make", [make_link("/dev/zero"), make_link("link"), make_linked_folder, make_pipe])
def test_what_no_listing_names_is_not_left_to_orbax(make, tmp_path):
  save_steps(tmp_path, [1])
  make(tmp_path / "checkpoints" / "1")
  with (
    open_(tmp_path) as checkpointer,
    pytest.raises(checkpoints.CheckpointError, match=r"must stay inside|Too many levels|must be a regular file"),
  ):
    checkpointer.host_state(1)


def test_a_link_inside_the_checkpoint_is_followed(tmp_path):
  save_steps(tmp_path, [1])
  folder = tmp_path / "checkpoints" / "1"
  (folder / "host.safetensors").rename(folder / "moved")
  (folder / "host.safetensors").symlink_to("moved")
  with open_(tmp_path) as checkpointer:
    assert checkpointer.host_state(1)["cursor"] == 1


def test_a_file_of_another_size_is_not_read(tmp_path):
  save_steps(tmp_path, [1])
  path = tmp_path / "checkpoints" / "1" / "host.safetensors"
  with path.open("r+b") as file:
    file.truncate(1 << 43)  # holds nothing on the disk; reading it would take an hour
  with open_(tmp_path) as checkpointer, pytest.raises(checkpoints.CheckpointError, match=r"host\.safetensors is wrong"):
    checkpointer.host_state(1)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"files": ["a"]}, "'files' of files.json must be an object"),
    ({"files": {"host.safetensors": 5}}, "int"),
    ({"files": {"host.safetensors": []}}, "size or checksum of host.safetensors is wrong"),
    ({"step": 2}, "under another name"),
  ],
)
def test_a_listing_of_wrong_types_is_damage(fields, message, tmp_path):
  save_steps(tmp_path, [1])
  rewrite_listing(tmp_path / "checkpoints" / "1", **fields)
  with open_(tmp_path) as checkpointer, pytest.raises(checkpoints.CheckpointError, match=message):
    checkpointer.host_state(1)


@pytest.mark.parametrize("metric", ["best", [1], True, 1e999])
def test_a_metric_that_is_no_number_does_not_stop_saves(metric, tmp_path, caplog):
  save_steps(tmp_path, [1, 2], keep=3)
  rewrite_listing(tmp_path / "checkpoints" / "1", metric=metric)
  with open_(tmp_path, keep=3) as checkpointer:
    checkpointer.save(3, make_state(3), {}, metric=0.5)
    checkpointer.wait()
    assert 3 in checkpointer.steps()
  assert "metric must be a finite number or null" in caplog.text


def test_a_listing_that_is_a_pipe_is_damage(tmp_path):
  save_steps(tmp_path, [1])
  path = tmp_path / "checkpoints" / "1" / "files.json"
  path.unlink()
  os.mkfifo(path)
  with open_(tmp_path) as checkpointer, pytest.raises(checkpoints.CheckpointError, match="must be a regular file"):
    checkpointer.host_state(1)


def test_a_checkpoint_without_what_this_version_writes_is_refused(tmp_path, monkeypatch):
  original = checkpoints.Checkpointer._commit

  def commit(self, step, partial, metric):
    path = partial / "host" / "metadata"
    body = json.loads(path.read_text())
    del body["library_version"], body["config"]
    path.write_text(json.dumps(body))
    original(self, step, partial, metric)

  monkeypatch.setattr(checkpoints.Checkpointer, "_commit", commit)
  save_two(tmp_path)
  with pytest.raises(checkpoints.CheckpointError, match=r"another version .* lacks \['config', 'library_version'\]"):
    restored_step(tmp_path)
