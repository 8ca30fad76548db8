"""A router that speaks to both sides exactly as vLLM's own toy proxy does, for tests that need one in front.

    python tests/vllm/router.py --port 8000 --prefiller-ports 8100 --decoder-ports 8200

Its prefill requests have all that vLLM's have: the parameters that are null, one token, no stream, the id that both
legs share. What the prefill side answers is handed on unread, and what the decode side answers is streamed. vLLM's own
(`toy_proxy_server.py` of its NIXL integration tests, in no wheel) takes the same options: `KVFLOW_VLLM_PROXY=FILE` lets
the tests use that one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvflow.connector.parameters import params_of_several

PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")


def prefill_request(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the request for the prefill side, for a client's request."""
    body = {key: value for key, value in asked.items() if key not in NOT_FOR_PREFILL}
    body |= {"kv_transfer_params": dict(PARAMS), "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return body


class Router:
    """Takes the engines of each side in turn. What one prefill engine, or several, cannot do is done by the next."""

    def __init__(self, prefillers: list[str], decoders: list[str], copies: int) -> None:
        self._prefillers = list(map(_client, prefillers))
        self._decoders: Iterator[httpx.AsyncClient] = itertools.cycle(map(_client, decoders))
        self._turns = itertools.cycle(range(len(prefillers)))
        self._copies = copies
        self._counts = {"prefill_instances": len(prefillers), "decode_instances": len(decoders)}

    def app(self) -> Starlette:
        """Return the application."""
        paths = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(path, self._complete, methods=["POST"]) for path in paths]
        return Starlette(routes=[*routes, Route("/healthcheck", self._health)])

    async def _health(self, _: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", **self._counts})

    async def _complete(self, request: Request) -> Response:
        body, path, turn = await request.json(), request.url.path, next(self._turns)
        engines, answer = [*self._prefillers[turn:], *self._prefillers[:turn]], Response(status_code=503)
        for start in range(0, len(engines), self._copies):
            headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}", "X-Request-Id": str(uuid.uuid4())}
            asked = (_prefill(one, path, body, headers) for one in engines[start : start + self._copies])
            params = [one for one in await asyncio.gather(*asked) if one is not None]
            if params:
                given = params[0] if len(params) == 1 else params_of_several(params)
                more = {"kv_transfer_params": given} if given else {}
                answer = await _decode(next(self._decoders), path, {**body, **more}, headers)
                if answer.status_code != 500:
                    break
        return answer


async def _prefill(
    engine: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]
) -> dict[str, Any] | None:
    """Return the answer of the prefill side, or None if it has failed."""
    try:
        answer = (await engine.post(path, json=prefill_request(body), headers=headers)).raise_for_status()
    except httpx.HTTPError:
        return None
    return answer.json().get("kv_transfer_params") or {}


async def _decode(engine: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
    request = engine.build_request("POST", path, json=body, headers=headers)
    answer = await engine.send(request, stream=True)
    if answer.status_code != 200:
        return Response(await answer.aread(), answer.status_code, media_type="application/json")
    return StreamingResponse(
        answer.aiter_bytes(), media_type="application/json", background=BackgroundTask(answer.aclose)
    )


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=None, base_url=url, limits=httpx.Limits(max_connections=None))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for side, port in (("prefiller", 8100), ("decoder", 8200)):
        parser.add_argument(f"--{side}-hosts", f"--{side}-host", nargs="+", default=["localhost"])
        parser.add_argument(f"--{side}-ports", f"--{side}-port", nargs="+", type=int, default=[port])
    parser.add_argument("--copies", type=int, default=1, help="prefill engines that compute a prompt at once")
    options = parser.parse_args()
    sides = (
        [f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        for hosts, ports in (
            (options.prefiller_hosts, options.prefiller_ports),
            (options.decoder_hosts, options.decoder_ports),
        )
    )
    uvicorn.run(Router(*sides, options.copies).app(), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
