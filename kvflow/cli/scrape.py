"""Scrapes of engines' metrics: fetched from their URLs, and what `kvflow top` counts with, by engine and rank."""

from __future__ import annotations

import concurrent.futures
import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvflow.errors import ConfigError
from kvflow.hosts import bracketed

_BYTES_MAX = 32 << 20
_TIMEOUT_S = 5.0
_AT_ONCE_MAX = 32


class RankName(NamedTuple):
    """Rank that samples are of, as their labels name it."""

    engine: str
    dp: str
    pp: str
    tp: str


@dataclass(frozen=True, slots=True)
class Scrape:
    """Answers of endpoints at one moment: for each rank values by metric and its further label."""

    at_s: float
    ranks: Mapping[RankName, Mapping[tuple[str, str], float]]
    problems: Mapping[str, str] = field(default_factory=dict)
    """Reasons why an endpoint has said nothing, by its URL."""


def check_urls(urls: Sequence[str]) -> tuple[str, ...]:
    """The URLs as they can be fetched, `/metrics` where there is no path. ConfigError for what is none."""
    found = []
    for url in map(bracketed, urls):
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"url: {url[:200]!r}: {error}") from None
        if parts.scheme == "tcp":
            why = "a side channel tells no numbers; name the engine's metrics, such as http://host:9100/metrics"
            raise ConfigError(f"url: {url[:200]!r}: {why}")
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"url: expected http://host:port/metrics, got {url[:200]!r}")
        found.append(url if parts.path else f"{url}/metrics")
    return tuple(found)


def scrape(urls: Sequence[str]) -> Scrape:
    """Ask all endpoints at once. Those that do not answer in time, or not with metrics, are among the problems."""
    ranks: dict[RankName, dict[tuple[str, str], float]] = {}
    problems = {}
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE_MAX) as pool:
        for url, answer in zip(urls, pool.map(_fetch, urls), strict=True):
            if isinstance(answer, str):
                problems[url] = answer
            else:
                ranks.update(answer)
    return Scrape(time.monotonic(), ranks, problems)


def parse(text: str) -> dict[RankName, dict[tuple[str, str], float]]:
    """The samples of kvflow in an exposition; histograms by their sums and counts. ValueError if it is none."""
    found: dict[RankName, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if not sample.name.startswith("kvflow_") or "le" in labels or not math.isfinite(sample.value):
                continue
            rank = RankName(*(labels.pop(name, "") for name in RankName._fields))
            found[rank][sample.name, "/".join(labels[name] for name in sorted(labels))] += sample.value
    return {rank: dict(values) for rank, values in found.items()}


def _fetch(url: str) -> dict[RankName, dict[tuple[str, str], float]] | str:
    """Samples of an endpoint, or why there are none."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read(_BYTES_MAX + 1)
        if len(text) > _BYTES_MAX:
            return f"more than {_BYTES_MAX >> 20} MiB"
        return parse(text.decode()) or "no metrics of kvflow"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))[:200] or type(error).__name__
