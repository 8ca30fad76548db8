"""Names of transfer backends of SGLang: kvflow's own, and the one that kvflow can stand in for."""

from __future__ import annotations

NAME, NIXL = "kvflow", "nixl"
