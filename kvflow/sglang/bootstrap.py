"""SGLang's bootstrap server, which also stores how kvflow reaches each rank of the prefill server.

When a prefill rank registers, `KVFlowManager` adds an *introduction*: for each pool, a ticket that names the rank. A
decode rank that asks about the prefill rank gets the introduction, too.
"""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

INTRODUCTION = "kvflow"
"""Name of the field with a prefill rank's tickets, in the rank's registration and in the bootstrap server's answers."""

_RankIndexes = tuple[int, int, int, int]


class KVFlowBootstrapServer(CommonKVBootstrapServer):
    """SGLang's bootstrap server, which also stores the tickets with which kvflow reaches each prefill rank.

    A rank has one ticket for each pool. The tickets are stored by the rank's (DP, CP, TP, PP) indexes.
    """

    def __init__(self, host: str, port: int) -> None:
        self._introductions: dict[_RankIndexes, Any] = {}
        super().__init__(host, port)

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        response: web.Response = await super()._handle_route_put(request)
        data = await request.json()
        if response.status == 200 and INTRODUCTION in data:
            dp_rank = data["attn_dp_rank"] if data["system_dp_size"] == 1 else data["system_dp_rank"]
            place = (dp_rank, data["attn_cp_rank"], data["attn_tp_rank"], data["pp_rank"])
            self._introductions[place] = data[INTRODUCTION]
        return response

    async def _handle_route_get(self, request: web.Request) -> web.Response:
        response: web.Response = await super()._handle_route_get(request)
        if response.status != 200:
            return response
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        dp_rank, cp_rank, tp_rank, pp_rank = (int(request.query[name]) for name in names)
        known = self._introductions.get((dp_rank, cp_rank, tp_rank, pp_rank))
        if known is None:
            return response
        return web.json_response({**json.loads(response.text or "{}"), INTRODUCTION: known})
