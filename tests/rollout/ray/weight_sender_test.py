"""The sender's thread and the transfers to an engine, with a dictionary for Ray's object store."""

from __future__ import annotations

import itertools
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.rollout import WeightStore
from sao_jax.rollout.ray.engine_weights import EngineWeights, WeightSyncError
from sao_jax.rollout.ray.weight_sender import Group, Message, Outbox, Update, WeightSender
from tests.waiting import LONG_S

SIZE = 300_000


class Store:
  """Stands for `ray.put` and `ray.get`."""

  def __init__(self):
    self.objects: dict[int, object] = {}
    self._numbers = itertools.count()

  def put(self, value):
    number = next(self._numbers)
    self.objects[number] = value
    return number


def sent(versions: list[dict]) -> tuple[list[Message], Store]:
  """Publishes versions one after the other; returns the sender's messages."""
  weights, messages, store = WeightStore(), [], Store()
  sender = WeightSender(weights, store.put, messages.append)
  sender.start()
  for version, params in enumerate(versions):
    weights.publish(params, version)
    for _ in range(int(100 * LONG_S)):
      sender.check()
      if messages and messages[-1].shapes is not None and messages[-1].version == version:
        break
      sender._stop.wait(0.01)
  sender.stop(LONG_S)
  return messages, store


def test_only_what_changed_is_sent_again():
  first = {"a": jnp.zeros(SIZE, jnp.bfloat16), "b": jnp.ones(SIZE)}
  second = {**first, "a": first["a"].at[5].set(-0.0)}
  third = {name: x + 1 for name, x in second.items()}
  messages, store = sent([first, second, second, third])
  groups = [message.group for message in messages if message.group is not None]
  assert [group.base for group in groups] == [-1, 0, 1, -1]  # the last one changed too much
  full, delta, same, dense = groups
  assert full.nbytes == 6 * SIZE and not full.delta
  assert delta.delta_nbytes < 100 and len(delta.delta) == 1
  assert same.delta == () and same.full == delta.full and same.checksum == delta.checksum  # nothing is put again
  assert dense.full != delta.full and dense.delta == ()
  np.testing.assert_array_equal(store.objects[full.full[0]][0].values, np.zeros(SIZE, np.uint16))


def test_a_senders_exception_is_raised_by_check():
  def put(value):
    raise OSError("the object store is full")

  weights = WeightStore()
  weights.publish({"a": jnp.zeros(2)}, 0)
  sender = WeightSender(weights, put, lambda message: None)
  sender.start()
  sender._thread.join(LONG_S)
  with pytest.raises(OSError, match="store is full"):
    sender.check()


def group(sender: int, base: int = -1) -> Group:
  return Group((sender, 0), ("full",), 100, 1, base, ("delta",) if base >= 0 else (), 3)


def test_a_version_is_complete_when_every_sender_has_finished():
  outbox = Outbox(2)
  outbox.add(Message(0, 1, group(0)))
  outbox.add(Message(0, 1, shapes={}))
  first = outbox.newest
  assert not first.complete
  outbox.add(Message(0, 3, group(0)))  # before sender 1 was done with 1, which it now may leave out
  assert first.abandoned and outbox.newest.version == 3
  outbox.add(Message(1, 1, group(1)))
  outbox.add(Message(1, 1, shapes={}))
  assert not first.complete and len(outbox.newest.groups) == 1
  outbox.add(Message(0, 3, shapes={}))
  outbox.add(Message(1, 3, group(1)))
  outbox.add(Message(1, 3, shapes={}))
  assert outbox.newest.complete and {x.key for x in outbox.newest.groups} == {(0, 0), (1, 0)}


def complete(version: int, base: int) -> Update:
  return Update(version, [group(0, base), group(1, base)], {0, 1}, shapes={}, complete=True)


def deliver(weights: EngineWeights, update: Update) -> list[str]:
  """Makes all calls of a transfer; returns what was sent, as text."""
  text = []
  while calls := weights.next_calls(update):
    for method, *rest in calls:
      text.append("swap" if method == "swap_weights" else "full" if rest[2] is None else "delta")
      weights.returned(method, True)
  return text


def test_deltas_go_to_engines_with_the_version_before_and_full_weights_to_others():
  weights = EngineWeights("engine")
  assert deliver(weights, complete(1, 0)) == ["full", "full", "swap"]  # a new engine
  assert deliver(weights, complete(2, 1)) == ["delta", "delta", "swap"]
  assert deliver(weights, complete(2, 1)) == []
  assert deliver(weights, complete(4, 3)) == ["full", "full", "swap"]  # it has missed 3
  assert deliver(weights, complete(6, 4)) == ["delta", "delta", "swap"]  # nobody had 5
  assert weights.version == 6
  assert weights.counters == {
    "weight_transfers": 4, "full_weight_transfers": 2, "weight_bytes": 800, "weight_bytes_sent": 412,
  }  # fmt: skip


def test_a_version_that_a_sender_left_out_is_dropped():
  weights = EngineWeights("engine")
  update = Update(1, [group(0)])
  assert [call[0] for call in weights.next_calls(update)] == ["receive_weights"]
  update.abandoned = True
  assert weights.next_calls(complete(2, 1)) == []  # a call is still running
  weights.returned("receive_weights", True)
  assert [call[0] for call in weights.next_calls(complete(2, 1))] == ["drop_weights"]
  assert weights.next_calls(complete(2, 1)) == []
  weights.returned("drop_weights", None)
  assert deliver(weights, complete(2, 1)) == ["full", "full", "swap"]


def test_a_wrong_checksum_leads_to_full_weights_and_a_second_one_to_an_error(caplog):
  weights = EngineWeights("rollout engine 3")
  deliver(weights, complete(1, 0))
  assert len(weights.next_calls(complete(2, 1))) == 2
  with caplog.at_level(logging.WARNING):
    weights.returned("receive_weights", False)
    weights.returned("receive_weights", False)  # of the same transfer
  assert caplog.text.count("the checksum of the weights of version 2 does not match in rollout engine 3") == 1
  assert [call[0] for call in weights.next_calls(complete(2, 1))] == ["drop_weights"]
  weights.returned("drop_weights", None)
  assert deliver(weights, complete(3, 1)) == ["full", "full", "swap"]  # a newer version is there by now
  assert weights.counters["weight_checksum_mismatches"] == 1
  weights.next_calls(complete(4, 3))  # after a good transfer, one mismatch is allowed again
  weights.returned("receive_weights", False)
  weights.returned("receive_weights", True)
  weights.next_calls(complete(4, 3))
  weights.returned("drop_weights", None)
  weights.next_calls(complete(4, 3))
  with pytest.raises(WeightSyncError, match="version 4 does not match in rollout engine 3, after a full transfer"):
    weights.returned("receive_weights", False)
