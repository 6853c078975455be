"""The names under which a server may be asked: a check of the `Host` header against DNS rebinding.

A web page can point a host name of its own at 127.0.0.1, and its scripts then reach a server on loopback as their own
origin. The browser still sends the page's name in `Host`, which gives it away.
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
  """Splits `name`, `name:port` or `[address]:port`; None where it is anything else.

  Case and the final dot of a fully qualified name do not matter; IPv6 addresses come in their short form.

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
  """Whether a server bound to `host` is reachable from this machine only; OSError if the name cannot be resolved."""
  if not host:  # every interface
    return False
  found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


class HostCheck:
  """Decides by its `Host` whether a request is served.

  A server on loopback answers to localhost, 127.0.0.1, [::1] and the name it is bound to, each with its own port, and
  to the allowed hosts. On another address nothing is checked unless hosts are allowed: its names are not known.

  Args:
    bound: name or address that the server is bound to.
    allowed: more hosts, `name` (with any port) or `name:port`.
  """

  def __init__(self, bound: str, allowed: Sequence[str]):
    own = bound if ":" not in bound else f"[{bound}]"
    self._checks = bool(allowed) or is_loopback(bound)
    self._own = {"localhost", "127.0.0.1", "::1", (parse_host(own) or ("localhost", None))[0]}
    self._allowed = {parse_host(entry) for entry in allowed}

  def accepts(self, hosts: Sequence[str], port: int) -> bool:
    """Whether a request is served.

    Args:
      hosts: values of its `Host` headers; there must be one.
      port: that the request came in on.
    """
    if not self._checks:
      return True
    parsed = parse_host(hosts[0]) if len(hosts) == 1 else None
    if parsed is None:
      return False
    name, asked = parsed
    own = name in self._own and (_HTTP_PORT if asked is None else asked) == port
    return own or parsed in self._allowed or (name, None) in self._allowed
