"""Check of the `Host` header of requests, against DNS rebinding.

A web page can point a host name of its own at 127.0.0.1. Its scripts then reach a server on loopback as their own
origin. The browser still sends the page's host name in `Host`, so the server can reject the request.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

_HTTP_PORT = 80
_HOST = re.compile(
  r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)(?P<dot>\.?))(?::(?P<port>[1-9][0-9]{0,4}))?",
  re.ASCII | re.IGNORECASE,
)


def parse_host(text: str) -> tuple[str, int | None] | None:
  """Splits `name`, `name:port` or `[address]:port`; returns None for anything else.

  Names are returned in lower case and without a final dot, IPv6 addresses in their short form.

  >>> parse_host("LOCALHOST.:8000"), parse_host("[0:0::1]"), parse_host("user@localhost"), parse_host("localhost:0x50")
  (('localhost', 8000), ('::1', None), None, None)
  """
  match = _HOST.fullmatch(text)
  if match is None:
    return None
  port = None if match["port"] is None else int(match["port"])
  if match["ipv6"] is None:
    return match["name"].lower(), port
  try:
    return ipaddress.IPv6Address(match["ipv6"]).compressed, port
  except ValueError:
    return None


def is_loopback(host: str) -> bool:
  """Whether a server bound to `host` is reachable from this machine only.

  Raises:
    OSError: the name cannot be resolved.
  """
  if not host:  # every interface
    return False
  found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


class HostCheck:
  """Check of the `Host` header of a request.

  A server on loopback accepts localhost, 127.0.0.1, [::1] and the name it is bound to, each with its own port, and the
  allowed hosts. A server on another address does not know its names: it checks only if there are allowed hosts.

  Args:
    bound: name or address that the server is bound to.
    allowed: further hosts, `name` (any port) or `name:port`.
  """

  def __init__(self, bound: str, allowed: Sequence[str]):
    own = bound if ":" not in bound else f"[{bound}]"
    self._checks = bool(allowed) or is_loopback(bound)
    self._own = {"localhost", "127.0.0.1", "::1", (parse_host(own) or ("localhost", None))[0]}
    self._allowed = {parse_host(entry) for entry in allowed}

  def accepts(self, hosts: Sequence[str], port: int) -> bool:
    """Whether a request is accepted.

    Args:
      hosts: values of its `Host` headers. If hosts are checked, there must be exactly one.
      port: port on which the request arrived.
    """
    if not self._checks:
      return True
    parsed = parse_host(hosts[0]) if len(hosts) == 1 else None
    if parsed is None:
      return False
    name, named_port = parsed
    own = name in self._own and (_HTTP_PORT if named_port is None else named_port) == port
    return own or parsed in self._allowed or (name, None) in self._allowed
