"""The hosts that a request may name."""

from __future__ import annotations

import pytest

from sao_jax.rollout.server.config import ServerConfig
from sao_jax.rollout.server.hosts import HostCheck, is_loopback, parse_host

PORT = 8000
OWN = ["localhost:8000", "LocalHost:8000", "localhost.:8000", "127.0.0.1:8000", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000"]
OTHERS = [
  "", "x", "evil.com", "evil.com:8000", "localhost", "127.0.0.1", "[::1]", "localhost:80", "localhost:8001",
  "localhost.evil.com:8000", "127.0.0.1.nip.io:8000", "evil.com.:8000", "localhost..:8000", ".localhost:8000",
  "evil@localhost:8000", "localhost@evil.com:8000", "localhost:8000@evil.com", "localhost:pw@localhost:8000",
  "localhost:", "localhost:0", "localhost:08000", "localhost:+8000", "localhost:8000:8000", "localhost: 8000",
  "localhost:8000 ", " localhost:8000", "localhost:8000,evil.com", "localhost:8000/", "localhost:80000",
  "localhost:0x1f40", "localhost:٨٠٠٠", "ｌocalhost:8000", "loca\u017fhost:8000", "localhost\n:8000",
  "localhost:8000\n",
  "::1:8000", "[::1]8000", "[::1", "[::1]:", "[::1].:8000", "[::2]:8000", "[::1%lo]:8000", "[:::]:8000",
  "[::ffff:127.0.0.1]:8000", "[127.0.0.1]:8000", "127.1:8000", "127.0.0.2:8000", "0.0.0.0:8000", "2130706433:8000",
  "0x7f.0.0.1:8000", "http://localhost:8000",
]  # fmt: skip


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1"])
def test_on_loopback_only_its_own_names_with_its_own_port(bound):
  check = HostCheck(bound, ())
  assert [host for host in OWN if not check.accepts([host], PORT)] == []
  assert [host for host in OTHERS if check.accepts([host], PORT)] == []
  assert not check.accepts([], PORT)
  assert not check.accepts(["localhost:8000", "localhost:8000"], PORT)


def test_the_port_of_http_may_be_left_out():
  check = HostCheck("127.0.0.1", ())
  for host in ("localhost", "127.0.0.1", "[::1]", "localhost:80"):
    assert check.accepts([host], 80)
    assert not check.accepts([f"{host.removesuffix(':80')}:8000"], 80)


def test_the_address_that_the_server_is_bound_to_is_its_name():
  assert HostCheck("127.0.0.2", ()).accepts(["127.0.0.2:8000"], PORT)
  assert not HostCheck("127.0.0.1", ()).accepts(["127.0.0.2:8000"], PORT)


def test_allowed_hosts_with_a_port_or_with_any():
  check = HostCheck("127.0.0.1", ("Model.Example.", "localhost:9000", "[::2]:9000"))
  for host in ("model.example", "MODEL.example:1", "model.example.:8000", "localhost:9000", "[::2]:9000", *OWN):
    assert check.accepts([host], PORT), host
  for host in ("localhost:9001", "localhost", "[::2]:8000", "a.model.example", "example"):
    assert not check.accepts([host], PORT), host


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", ""])
def test_on_other_addresses_any_host_unless_some_are_allowed(bound):
  assert not is_loopback(bound)
  assert HostCheck(bound, ()).accepts([], PORT) and HostCheck(bound, ()).accepts(["model.example"], PORT)
  check = HostCheck(bound, ("model.example",))
  assert check.accepts(["model.example"], PORT) and check.accepts(["localhost:8000"], PORT)
  assert not check.accepts(["evil.com:8000"], PORT)


@pytest.mark.parametrize("bound", ["127.0.0.1", "127.8.9.10", "::1", "localhost", "127.1"])
def test_loopback_in_every_spelling(bound):
  assert is_loopback(bound)


@pytest.mark.parametrize("entry", ["", "*", "a b", "http://a", "a:b", "a:0", "a/", "*.example"])
def test_settings_that_name_no_host_are_rejected(entry):
  assert parse_host(entry) is None
  with pytest.raises(ValueError, match=r"allowed_hosts must be names, or name:port; received"):
    ServerConfig(allowed_hosts=("good.example", entry))
