"""Hosts and addresses as texts: DNS names, IPv4 and IPv6 addresses, and `tcp://host:port`.

kvflow keeps an IPv6 host compressed and without brackets, such as `fd00::2`; only in addresses, where a port follows,
it has brackets. Input may have either form: Kubernetes (`status.podIP`), routers and vLLM write IPv6 hosts without
brackets.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

from kvflow import checks
from kvflow.errors import ConfigError, InvalidInput

PORT_MAX = 65535
HOST_CHARS_MAX = 253

ANY, ANY_V4, ANY_V6 = "*", "0.0.0.0", "::"
"""Wildcards in an address to listen at: `*` and `::` are all IPv4 and IPv6 addresses, `0.0.0.0` all IPv4 addresses."""
WILDCARDS = (ANY, ANY_V4, ANY_V6)

_NAME = re.compile(r"([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}")
_ZONE = re.compile(r"[A-Za-z0-9_.~-]{1,15}")  # the name or number of a network interface
_PORT = re.compile(r"[0-9]{1,5}")


def plain_host(text: str) -> str | None:
    """Return the host or wildcard `text` as kvflow keeps it: an IPv6 host is compressed and has no brackets.

    None if `text` is neither a host nor a wildcard.
    """
    return _plain(text) if len(text) <= HOST_CHARS_MAX else None


@lru_cache(maxsize=1024)  # the length is checked first, since texts stay in the cache
def _plain(text: str) -> str | None:
    if text in WILDCARDS or _NAME.fullmatch(text):
        return text
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    number, percent, zone = bare.partition("%")
    if percent and not _ZONE.fullmatch(zone):
        return None
    try:
        return f"{IPv6Address(number).compressed}{percent}{zone}"
    except ValueError:
        return None


def is_host(text: str) -> bool:
    """Return True if `text` has the form of a host to connect to: a DNS name or an IP address, but no wildcard."""
    host = plain_host(text)
    return host is not None and host not in WILDCARDS


def is_v6(host: str) -> bool:
    """Return True if `host`, a result of `plain_host`, is an IPv6 address."""
    return ":" in host


@lru_cache(maxsize=4096)  # called for each rank of every load
def address_at(host: str, port: int | str) -> str:
    """Return `tcp://host:port`, with brackets around an IPv6 host."""
    return f"tcp://{host_in_url(host)}:{port}"


def host_in_url(host: str) -> str:
    """Return `host` as in a URL: an IPv6 host gets brackets, unless it has them."""
    return f"[{host}]" if is_v6(host) and not host.startswith("[") else host


def split_address(address: str, *, what: str = "listen", error: type[InvalidInput] = ConfigError) -> tuple[str, int]:
    """Split `tcp://host:port` into host and port. The port follows the last colon; an IPv6 host loses its brackets.

    Raises:
        InvalidInput: of class `error`, if the address has another form. `what` begins the message.
    """
    scheme, separator, rest = checks.text(address, what, error=error).partition("://")
    host_text, _, port = rest.rpartition(":")
    host = plain_host(host_text)
    if scheme != "tcp" or not separator or host is None or not _PORT.fullmatch(port):
        raise error(f"{what}: expected 'tcp://host:port', got {address[:300]!r}{address_suggestion(address)}")
    if int(port) > PORT_MAX:
        raise error(f"{what}: port {port} is above {PORT_MAX}")
    return host, int(port)


def address_suggestion(address: str) -> str:
    """Return "; did you mean 'tcp://...'?", to end a message, if `address` is host:port without tcp; else ""."""
    rest = address.rpartition("://")[2]
    host, _, port = rest.rpartition(":")
    right = plain_host(host) is not None and _PORT.fullmatch(port)
    return f"; did you mean 'tcp://{rest}'?" if right else ""


def loopback_hint(address: str, setting: str = "advertise_host") -> str:
    """Return a hint, to end a message, if `address` is a loopback address, to which no other host can connect; else "".

    `setting`: the setting that the hint names.
    """
    host = plain_host(address.removeprefix("tcp://").rpartition(":")[0]) or ""
    if host != "localhost" and not checks.try_call(lambda: ip_address(host).is_loopback):
        return ""
    return f"; {host} is a loopback address: an engine on another host must advertise an address of its own ({setting})"


def plain_address(address: str, *, what: str) -> str:
    """Return `address`, a text `tcp://host:port`, with an IPv6 host compressed and in brackets.

    Raises:
        ConfigError: the address has another form. `what` begins the message.
    """
    return address_at(*split_address(address, what=what))


def bracket_ipv6_host(url: str) -> str:
    """Return `url`, of any scheme, with brackets around an IPv6 host that has none. Return other texts unchanged."""
    scheme, separator, rest = url.partition("://")
    authority = re.match(r"[^/?#]*", rest)
    place = authority.group() if authority is not None else ""
    host_text, _, port = place.rpartition(":")
    host = plain_host(host_text)
    if not separator or host is None or not is_v6(host) or not (_PORT.fullmatch(port) or port == "*"):
        return url
    return f"{scheme}://[{host}]:{port}{rest[len(place) :]}"
