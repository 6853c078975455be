"""Weight updates of a server: one at a time, and clients that disconnect during theirs."""

from __future__ import annotations

import asyncio
import json
import pathlib
import socket
import threading
import urllib.parse

import pytest

from sao_jax.rollout.server import weight_updates
from sao_jax.rollout.server.request_fields import BadRequestError
from sao_jax.rollout.server.weight_updates import WeightUpdates
from tests.rollout.http_server import call, serving
from tests.waiting import LONG_S, until


class Engine:
  """Fake engine with `running` completions; records the weights that it receives."""

  def __init__(self, running=0):
    self.paused, self.running, self.label, self.weights = False, running, "a", []

  def abort_all(self):
    return self.running

  def set_weights(self, params, label):
    assert self.paused and not self.running
    self.weights.append(params)
    self.label = label

  def check(self):
    pass

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass


class Loads:
  """Loader that blocks until `may_end` is set; the weights are the folder's name."""

  def __init__(self):
    self.may_end, self.events, self.lock = threading.Event(), [], threading.Lock()

  def __call__(self, folder):
    with self.lock:
      self.events.append(f"begin {folder.name}")
    assert self.may_end.wait(LONG_S)
    with self.lock:
      self.events.append(f"end {folder.name}")
    if folder.name == "bad":
      raise ValueError("of another model")
    return folder.name

  async def begun(self, name):
    await asyncio.to_thread(until, lambda: f"begin {name}" in self.events)


async def settle():
  """Runs all tasks that are ready."""
  for _ in range(50):
    await asyncio.sleep(0)
  await asyncio.to_thread(lambda: None)


async def cancelled(task):
  task.cancel()
  with pytest.raises(asyncio.CancelledError):
    await task


def start(updates, name, *, abort=False):
  return asyncio.create_task(updates.update(pathlib.Path(name), "model_path", name, abort=abort))


def test_the_next_load_starts_when_an_abandoned_one_has_ended():
  async def run():
    engine, loads = Engine(), Loads()
    updates = WeightUpdates(engine, loads)
    first, second, third, fourth = (start(updates, name) for name in "bcde")
    await loads.begun("b")
    await cancelled(first)
    await cancelled(third)  # before its turn
    await settle()
    assert loads.events == ["begin b"]
    loads.may_end.set()
    assert await second == await fourth == 0
    assert loads.events == [f"{what} {name}" for name in "bce" for what in ("begin", "end")]
    assert engine.weights == ["c", "e"] and engine.label == "e" and not engine.paused

  asyncio.run(run())


def test_an_update_that_is_abandoned_while_completions_run_changes_nothing():
  async def run():
    engine, loads = Engine(running=2), Loads()
    loads.may_end.set()
    updates = WeightUpdates(engine, loads)
    update = start(updates, "b")
    await asyncio.to_thread(until, lambda: engine.paused)
    await cancelled(update)
    await updates.close()
    assert not engine.paused and engine.weights == [] and engine.label == "a"
    engine.running = 0
    assert await start(updates, "c") == 0
    assert engine.weights == ["c"]

  asyncio.run(run())


def test_a_failed_load_lets_the_next_update_start_and_is_reported(caplog):
  async def run():
    engine, loads = Engine(), Loads()
    updates = WeightUpdates(engine, loads)
    abandoned = start(updates, "bad")
    await loads.begun("bad")
    await cancelled(abandoned)
    loads.may_end.set()
    with pytest.raises(BadRequestError, match=r"model_path bad cannot be loaded: ValueError.*of another") as caught:
      await start(updates, "bad")
    assert caught.value.field == "model_path" and caught.value.status == 400
    assert await start(updates, "c") == 0
    assert engine.weights == ["c"] and not engine.paused

  asyncio.run(run())
  assert caplog.text.count("a client disconnected during its weight update: model_path bad cannot be loaded") == 1


def test_too_many_waiting_updates_are_rejected_and_a_disconnect_frees_a_place(monkeypatch):
  monkeypatch.setattr(weight_updates, "_MAX_WAITING", 2)

  async def run():
    engine, loads = Engine(), Loads()
    updates = WeightUpdates(engine, loads)
    first = start(updates, "b")
    await loads.begun("b")
    second, third = start(updates, "c"), start(updates, "d")
    await settle()
    with pytest.raises(BadRequestError, match="2 weight updates are waiting already; try again later") as caught:
      await start(updates, "e")
    assert caught.value.status == 503
    await cancelled(second)
    last = start(updates, "f")
    loads.may_end.set()
    await asyncio.gather(first, third, last)
    assert engine.weights == ["b", "d", "f"]

  asyncio.run(run())


def test_close_waits_for_an_abandoned_load():
  async def run():
    loads = Loads()
    updates = WeightUpdates(Engine(), loads)
    await updates.close()  # nothing to wait for
    update = start(updates, "b")
    await loads.begun("b")
    await cancelled(update)
    end = asyncio.create_task(updates.close())
    await settle()
    assert not end.done()
    loads.may_end.set()
    await end
    assert loads.events == ["begin b", "end b"]

  asyncio.run(run())


def test_pause_and_resume_do_not_wait_for_a_load_and_rename_does():
  async def run():
    engine, loads = Engine(), Loads()
    updates = WeightUpdates(engine, loads)
    update = start(updates, "b")
    await loads.begun("b")
    await updates.pause(abort=False)
    assert engine.paused
    updates.resume()
    assert not engine.paused
    rename = asyncio.create_task(updates.rename("c"))
    await settle()
    assert engine.label == "a"
    loads.may_end.set()
    await asyncio.gather(update, rename)
    assert engine.label == "c" and engine.weights == ["b"] and not engine.paused

  asyncio.run(run())


def test_a_resume_during_the_swap_takes_effect_at_its_end():
  async def run():
    engine, loads = Engine(running=1), Loads()
    loads.may_end.set()
    updates = WeightUpdates(engine, loads)
    pause = asyncio.create_task(updates.pause(abort=True))
    update = start(updates, "b", abort=True)
    await asyncio.to_thread(until, lambda: updates._swapping)
    updates.resume()
    assert engine.paused
    engine.running = 0
    assert await update == 1
    await pause
    assert not engine.paused

  asyncio.run(run())


def test_disconnects_leave_one_load_at_a_time(tmp_path):
  """The same over HTTP."""
  engine, loads = Engine(), Loads()
  for name in "bcd":
    (tmp_path / name).mkdir()
  with serving(completions=engine, weights_root=tmp_path, load=loads) as url:
    parts = urllib.parse.urlsplit(url)
    body = json.dumps({"model_path": "b"}).encode()
    head = ["POST /update_weights_from_disk HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
    for _ in range(6):
      with socket.create_connection((parts.hostname, parts.port), timeout=LONG_S) as connection:
        connection.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        until(lambda: loads.events)
    assert call(f"{url}/health") == (200, None)
    assert call(f"{url}/resume", {})[0] == 200
    loads.may_end.set()
    status, response = call(f"{url}/update_weights_from_disk", {"model_path": "d", "weight_version": "d"})
    assert (status, response["success"]) == (200, True)
  assert engine.label == "d" and engine.weights[-1] == "d"
  begun, ended = loads.events[::2], loads.events[1::2]
  assert [x.removeprefix("begin ") for x in begun] == [x.removeprefix("end ") for x in ended]
