"""`Config`: the settings of one rank of an engine, frozen. Its `Limits` are bounds that are seldom changed.

Nothing here is read from the environment; NIXL and UCX read their own variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike, fspath
from typing import Annotated, TypeAlias, cast

from msgspec import Meta

from kvflow import checks
from kvflow.checks import Count, Seconds, Share, Size, is_name, short_repr
from kvflow.errors import ConfigError
from kvflow.hosts import PORT_MAX, WILDCARDS, is_host, plain_address, plain_host, split_address
from kvflow.limits import ByDevice, Limits, with_device_defaults

ENGINE_ID_CHARS_MAX = 256
RANKS_MAX = 1 << 10

_KEY_NAME = re.compile(r"[A-Za-z0-9_:\[][A-Za-z0-9_.@:+=%\[\]-]{0,99}")
_BACKEND = re.compile(r"[A-Za-z0-9_]{1,64}")
STORE_BACKEND = "POSIX"
"""NIXL's backend for files, which `kvflow.storage` uses."""
NIXL_BACKENDS = (
    *("UCX", "LIBFABRIC", "MOONCAKE", "UCCL", "GPUNETIO", "GDS", "GDS_MT", STORE_BACKEND, "OBJ", "AZURE_BLOB"),
    *("HF3FS", "GUSLI", "INFINIA"),
)
"""Backends that NIXL ships. Other names are accepted: when NIXL starts, it reports whether it has them."""
_AUTO = re.compile(r"auto(?::(.+))?", re.DOTALL)


def is_key_name(text: str) -> bool:
    """Return True if `text` can be an engine id and also part of the name of a CURVE key file."""
    return is_name(text, ENGINE_ID_CHARS_MAX) and _KEY_NAME.fullmatch(text) is not None


def auto_target(advertise_host: str | None) -> str | None:
    """Return HOST if `advertise_host` is "auto:HOST", "" if it is "auto", else None."""
    match = _AUTO.fullmatch(advertise_host or "")
    return None if match is None else match.group(1) or ""


def rank_offset(dp_rank: int, pp_rank: int, tp_rank: int, *, tp_size: int, pp_size: int) -> int:
    """Return a rank's number within its engine, from 0: the offset of its port from the engine's base port.

    From one number to the next, tp_rank varies fastest, pp_rank next and dp_rank slowest.
    """
    return (dp_rank * pp_size + pp_rank) * tp_size + tp_rank


@partial(checks.refuse_unknown_arguments, limits=Limits)
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one rank of an engine, each described in docs/reference/config and in the source below the setting.

    The Configs of an engine's ranks differ only in dp_rank, pp_rank and tp_rank. The constructor raises ConfigError,
    which names an unknown or invalid setting.
    """

    engine_id: EngineId
    """Name of the engine, the same for all its ranks: printable, without spaces."""
    listen: ListenAddress = "tcp://127.0.0.1:5600"
    """Base address of the side channel, tcp://host:port; an IPv6 host with or without brackets. Each rank listens at
    this port plus the rank's number within the engine. With port 0 the system chooses a free port, which tickets name.
    The wildcards `*` and `[::]` listen on all IPv4 and IPv6 addresses, 0.0.0.0 on all IPv4 addresses."""
    advertise_host: AdvertisedHost | None = None
    """Host of this rank that tickets name; required when `listen` binds a wildcard such as 0.0.0.0. "auto": the source
    address of this host's default route when the runtime opens. "auto:HOST": the source address of the route to HOST,
    such as a peer or a head node. If `listen` binds one address, "auto" and "auto:HOST" both mean that address."""

    model: ModelName = ""
    """Name of the model, the same on both sides of a load."""

    tp_rank: Count = 0
    """Index of this tensor-parallel rank, from 0."""
    tp_size: RankCount = 1
    """Number of tensor-parallel ranks of each pipeline stage."""
    dp_rank: Count = 0
    """Index of this rank's data-parallel replica, from 0. Each replica has its own ports."""
    pp_rank: Count = 0
    """Index of this rank's pipeline stage, from 0."""
    pp_size: RankCount = 1
    """Number of pipeline stages of the engine."""
    num_kv_heads: Size | None = None
    """Number of KV heads of the whole model. Required if tp_size may exceed it. None: inferred from the heads of this
    rank and of the peer."""

    curve_secret_key_file: Path | None = None
    """File with this engine's secret key, made by `kvflow keys new`. With the key, ZeroMQ CURVE encrypts and
    authenticates the side channel."""
    curve_peers_dir: Path | None = None
    """Folder with the public keys of peers, each in a file `<engine_id>.public`."""

    role: Role = "both"
    """Role of the engine: "producer" (serves blocks), "consumer" (loads blocks) or "both". Memory is registered with
    the transport only for this role."""

    transport: TransportName = "nixl"
    """Transport of the bytes: "nixl", or "inproc" between runtimes of one process, for tests."""
    cuda_ipc: bool = False
    """True to map the CUDA caches of peers on this machine, and copy all pieces of a read from there as one batch, past
    NIXL. Both engines need it; where memory cannot be mapped, NIXL reads it. Not yet run on a device."""
    nixl_backend: BackendNames = "UCX"
    """Name of the NIXL backend for transfers between engines. Several names are separated by commas, such as
    "UCX,LIBFABRIC": NIXL takes the first backend that can reach the memory of both sides."""
    nixl_backend_params: Texts = field(default_factory=dict)
    """Parameters of NIXL's backends: "key" for each backend in `nixl_backend`, "NAME.key" for the backend NAME alone,
    such as "POSIX.use_uring" for `kvflow.storage`."""

    lease_ttl_s: Seconds = 30.0
    """Time for which a lease keeps blocks for its readers, unless a reader renews the lease. Readers renew it while
    they load.
    """
    lease_lifetime_s: Seconds = 600.0
    """Time after the opening of a lease during which readers can renew it. A lease with a longer `ttl_s` is not
    shortened."""
    load_deadline_s: Seconds = 30.0
    """Maximum time of a load without a deadline in its request."""
    handshake_timeout_s: Seconds = 5.0
    """Time within which a peer has to answer a question on the side channel."""
    cancel_grace_s: Seconds = 1.0
    """Time for which a load that is cancelled, or has missed its deadline, waits for bytes in flight. If bytes are
    still in flight after that, the load's blocks are quarantined.
    """
    drain_timeout_s: Seconds = 10.0
    """Time for which closing the runtime waits for open loads and leases to end."""

    verify_share: Share = 0.0
    """Share of loads, chosen at random, that compare checksums of local and remote bytes: 0 is no load, 1 is all loads.
    `LoadRequest.verify` decides for a single load."""

    loads_waiting_max: Size = 1 << 12
    """Maximum number of loads that wait to begin. Any further load raises `Overloaded`."""
    in_flight_bytes_max: ByDevice = 0
    """Maximum bytes in flight, summed over all loads. A larger read is posted alone. 0: 256 MiB for a cache in host
    memory, 1 GiB on CUDA."""

    scratch: Mode = "auto"
    """For blocks that would land in the cache as many small pieces: when to read these blocks whole into scratch
    memory and copy the pieces from there into the cache. "auto" (if that is faster), "always" or "never"."""
    staging: Mode = "auto"
    """When to copy blocks through host buffers: "auto" (if the transport cannot reach the cache's device), "always" or
    "never". With "never", registering a cache that needs host buffers raises ConfigError."""
    host_buffer_bytes_max: ByDevice = 0
    """Bytes of host memory for the host buffers of offers and loads (`staging`). 0: a quarter of the cache's size, but
    at least 256 MiB, and at most an eighth of the host's or container's memory, divided among the engine's ranks."""

    limits: GivenLimits = field(default_factory=Limits)
    """Bounds that are seldom changed: a `Limits`, or a dict with fields of `Limits`."""

    def __post_init__(self) -> None:
        checks.normalize_fields(self, ConfigError)
        _check_together(self)

    @property
    def nixl_backends(self) -> Mapping[str, Mapping[str, str]]:
        """Parameters of each backend in `nixl_backend`, by the backend's name."""
        return {name: params_of(self, name) for name in self.nixl_backend.split(",")}

    @property
    def ending_s(self) -> float:
        """Maximum seconds from the deadline of `drain` until all leases and loads have ended."""
        return self.limits.seal_hold_s + self.cancel_grace_s + self.drain_timeout_s

    @property
    def listen_port_offset(self) -> int:
        """Number to add to the port in `listen` for this rank's port."""
        return rank_offset(self.dp_rank, self.pp_rank, self.tp_rank, tp_size=self.tp_size, pp_size=self.pp_size)

    @property
    def listen_host(self) -> str:
        """Host in `listen`, at which this rank listens; may be a wildcard."""
        return split_address(self.listen)[0]

    @property
    def listens_everywhere(self) -> bool:
        """True if the host in `listen` is a wildcard, which tickets cannot name."""
        return self.listen_host in WILDCARDS

    @property
    def advertise_toward(self) -> str | None:
        """HOST if `advertise_host` is "auto:HOST", "" if it is "auto", else None."""
        return auto_target(self.advertise_host)

    @property
    def listen_port(self) -> int:
        """Port at which this rank listens: the port in `listen` plus the rank's offset; 0 for any free port."""
        port = split_address(self.listen)[1]
        return port + self.listen_port_offset if port else 0


def config_for_device(config: Config, kind: str) -> Config:
    """Return a copy of `config` with the defaults of a device in place of bounds that are 0.

    `kind`: kind of the device, such as "cuda". A bound is replaced only if `limits.BY_DEVICE` has a default for it. The
    bounds of `config.limits` are replaced like those of `config`.
    """
    return replace(with_device_defaults(config, kind), limits=with_device_defaults(config.limits, kind))


def params_of(config: Config, backend: str) -> Mapping[str, str]:
    """Return the parameters of `backend` in `config.nixl_backend_params`, which has keys "BACKEND.key" and "key".

    The values of the keys with the backend's name are always returned. If `config.nixl_backend` names the backend, the
    values of the keys without a backend are returned, too; "BACKEND.key" takes precedence over "key".
    """
    named = backend in config.nixl_backend.split(",")
    params = config.nixl_backend_params.items()
    common = {key: value for key, value in params if named and "." not in key}
    return common | {key.partition(".")[2]: value for key, value in params if key.startswith(f"{backend}.")}


def _listen(value: object, name: str) -> str:
    return plain_address(checks.text(value, name, error=ConfigError), what=name)


def _advertised(value: object, name: str) -> str:
    plain = checks.text(value, name, error=ConfigError)
    toward = auto_target(plain)
    host = plain_host(toward or plain)
    if host is None or not is_host(host):
        raise ConfigError(f"{name}: {plain[:300]!r} is not a host that peers can connect to")
    return f"auto:{host}" if toward else host


def _backends(value: object, name: str) -> str:
    """Return `value` as str: names of backends, separated by commas.

    ConfigError if a name looks like a misspelled backend of NIXL, or if the only name is that of the backend for files.
    """
    plain = checks.text(value, name, error=ConfigError)
    names = plain.split(",")
    if len(set(names)) < len(names) or not all(_BACKEND.fullmatch(backend) for backend in names):
        raise ConfigError(f"{name}: expected names separated by commas, got {short_repr(value)}")
    for backend in names:
        meant = "" if backend in NIXL_BACKENDS else checks.did_you_mean(backend.upper(), NIXL_BACKENDS)
        if meant:
            raise ConfigError(f"{name}: {short_repr(backend)} is not a backend that NIXL ships{meant}")
    if names == [STORE_BACKEND]:
        raise ConfigError(f"{name}: {STORE_BACKEND} reaches files only, no peers: it is what kvflow.storage uses")
    return plain


def _path(value: object, name: str) -> object:
    """Return `value`, a str or os.PathLike, unchanged. ConfigError if the system cannot use it as a path."""
    path = checks.try_call(lambda: fspath(cast("PathLike[str]", value)))
    plain = checks.text(path, name, error=ConfigError) if isinstance(path, str) else "\0"
    if "\0" in plain:
        raise ConfigError(f"{name}: expected a path, got {short_repr(value)}")
    return plain if isinstance(value, str) else value


def _texts(value: object, name: str) -> Mapping[str, str]:
    texts = checks.mapping(value, name, error=ConfigError)
    return {key: checks.text(entry, f"{name}[{short_repr(key)}]", error=ConfigError) for key, entry in texts.items()}


def _limits(value: object, name: str) -> Limits:
    """Return `value` if it is a `Limits`; convert a dict, as in configuration files. ConfigError for other values."""
    if not isinstance(value, Mapping):
        return checks.instance(value, Limits, name, error=ConfigError)
    values = checks.mapping(value, name, error=ConfigError)
    try:
        return Limits(**values)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _check_together(config: Config) -> None:
    """Raise ConfigError if settings that are valid alone contradict each other."""
    for rank_name, size_name in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
        rank, size = getattr(config, rank_name), getattr(config, size_name)
        if rank >= size:
            raise ConfigError(f"{rank_name}: expected 0 <= {rank_name} < {size_name}, got {rank} and {size}")
    if (config.curve_secret_key_file is None) != (config.curve_peers_dir is None):
        both = f"{short_repr(config.curve_secret_key_file)} and {short_repr(config.curve_peers_dir)}"
        raise ConfigError(f"curve_secret_key_file, curve_peers_dir: expected both or none, got {both}")
    if config.curve_peers_dir is not None and not is_key_name(config.engine_id):
        raise ConfigError(f"engine_id: {config.engine_id[:80]!r} cannot name key files, as curve_peers_dir needs")
    known = tuple(dict.fromkeys((*config.nixl_backend.split(","), STORE_BACKEND)))
    for key in config.nixl_backend_params:
        whose, dot, _ = key.partition(".")
        if dot and whose not in known:
            raise ConfigError(
                f"nixl_backend_params: {short_repr(key)} is for {short_repr(whose)}, there are {', '.join(known)}"
            )
    host, port = split_address(config.listen)
    if port and port + config.listen_port_offset > PORT_MAX:
        raise ConfigError(f"listen: port {port} + rank offset {config.listen_port_offset} is above {PORT_MAX}")
    if config.advertise_host is None and host in WILDCARDS:
        raise ConfigError(f"listen: {host!r} is a wildcard, so advertise_host must say what tickets name")


RankCount: TypeAlias = Annotated[int, Meta(ge=1, le=RANKS_MAX)]
EngineId: TypeAlias = Annotated[str, partial(checks.name, most=ENGINE_ID_CHARS_MAX, error=ConfigError)]
ModelName: TypeAlias = Annotated[str, Meta(max_length=1024)]
ListenAddress: TypeAlias = Annotated[str, _listen]
AdvertisedHost: TypeAlias = Annotated[str, _advertised]
BackendNames: TypeAlias = Annotated[str, _backends]
Path: TypeAlias = Annotated[str | PathLike[str], _path]
Texts: TypeAlias = Annotated[Mapping[str, str], _texts]
GivenLimits: TypeAlias = Annotated[Limits, _limits]
Mode: TypeAlias = Annotated[str, partial(checks.one_of, known=("auto", "always", "never"), error=ConfigError)]
_ROLES_MEANT = {"prefill": "producer", "decode": "consumer"}
Role: TypeAlias = Annotated[
    str,
    partial(checks.one_of, known=("producer", "consumer", "both"), error=ConfigError, meant=_ROLES_MEANT),
]
TransportName: TypeAlias = Annotated[str, partial(checks.one_of, known=("nixl", "inproc"), error=ConfigError)]
