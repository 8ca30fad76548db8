"""Asks a stock engine's listener for the metadata of a rank.

The listener is a thread of the engine's scheduler. Any other message ends that thread for good, so this module can send
nothing else, and gives every question its own socket.
"""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from kvflow import checks
from kvflow.checks import counted
from kvflow.config import RANKS_MAX
from kvflow.core.cache.tensors import NAME_CHARS_MAX
from kvflow.core.protocol.codec import WireError
from kvflow.errors import PeerUnreachable, ProtocolError, RequestError
from kvflow.hosts import address_at, loopback_hint, split_address
from kvflow.runtime.channel.lookups import Lookups
from kvflow.stock.wire import METADATA_BYTES_MAX, StockAnswer, decode_answer, encode_question


async def ask_rank(
    address: str,
    *,
    pp_rank: int = 0,
    tp_rank: int = 0,
    timeout_s: float,
    engine_id: str = "",
    bytes_max: int = METADATA_BYTES_MAX,
) -> StockAnswer:
    """Ask a stock engine for the metadata of one of its ranks. Cancelling ends the wait for the answer.

    **The rank has to exist**: vLLM's listener expects no question about another rank. Every engine has rank 0, 0.

    Args:
        address: where the engine listens, `tcp://host:port`.
        pp_rank: pipeline stage of the rank.
        tp_rank: tensor-parallel rank within the stage.
        timeout_s: seconds to wait for the answer at most.
        engine_id: name of the engine, for errors.
        bytes_max: largest size of an answer.

    Returns:
        The engine's compatibility hash, the rank's metadata, and the names of all fields in that metadata.

    Raises:
        PeerUnreachable: no answer came within `timeout_s`, or the address cannot be reached.
        ProtocolError: the answer is not in vLLM's form.
        RequestError: an argument is not a valid address, rank, name or time.
    """
    host, port = split_address(address, what="stock address", error=RequestError)
    checks.text(engine_id, "engine_id", most=NAME_CHARS_MAX)
    timeout_s = checks.seconds(timeout_s, "timeout_s")
    for name, rank in (("pp_rank", pp_rank), ("tp_rank", tp_rank)):
        checks.whole(rank, name, least=0, most=RANKS_MAX - 1)
    question = encode_question(pp_rank, tp_rank)
    where = f"stock engine {engine_id!r} at {address}" if engine_id else f"stock engine at {address}"
    try:
        async with asyncio.timeout(timeout_s):
            endpoint = address_at(await Lookups().find_address(host), port)
            frames = await _exchange(endpoint, question, bytes_max)
    except TimeoutError:
        hint = loopback_hint(address, "VLLM_NIXL_SIDE_CHANNEL_HOST there")
        why = f"{where}: no answer within {timeout_s} s: it has ended or hangs, or this is not its address{hint}"
        raise PeerUnreachable(why, peer=address, engine_id=engine_id) from None
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise PeerUnreachable(f"{where}: {error}", peer=address, engine_id=engine_id) from error
    try:
        if not frames or frames[0] != b"":
            raise WireError(f"{counted(len(frames), 'frame')} without a delimiter")
        return decode_answer(frames[1:], bytes_max)
    except WireError as error:
        why = f"{where}: the answer is not vLLM's: {error}"
        raise ProtocolError(why, peer=address, engine_id=engine_id) from error


async def _exchange(endpoint: str, question: bytes, bytes_max: int) -> list[bytes]:
    context = zmq.asyncio.Context.instance()
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.connect(endpoint)
        await socket.send_multipart([b"", question])
        frames: list[bytes] = await socket.recv_multipart()
        return frames
