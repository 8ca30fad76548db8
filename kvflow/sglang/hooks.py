"""Hooks in SGLang's schedulers, for three things that SGLang's interface for transfer backends lacks.

- For a refused prompt, a server makes no sender or receiver, so the other server would wait in vain.
- Neither senders nor receivers get the tokens of a prompt, which the two servers have to compare.
- A decode server frees the pages of a failed request after 30 s, whether or not reads into them have stopped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.network import NetworkAddress

from kvflow.connector.kv_hints import KVHints
from kvflow.errors import RequestError
from kvflow.sglang.receiver import KVFlowReceiver
from kvflow.sglang.sender import KVFlowSender

_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_DECODE = "sglang.srt.disaggregation.decode"


def hook_prefill(manager: type) -> None:
    """Install the hooks in the scheduler of a prefill server. `manager` is the class KVFlowManager."""
    _hook(f"{_PREFILL}.add", partial(_after_prefill_add, manager))


def hook_decode(manager: type) -> None:
    """Install the hooks in the scheduler of a decode server. `manager` is the class KVFlowManager."""
    _hook(f"{_DECODE}.DecodePreallocQueue.add", partial(_after_decode_add, manager))
    _hook(f"{_DECODE}.DecodePreallocQueue._create_receiver_and_enqueue", _after_create_receiver)
    _hook(f"{_DECODE}.DecodeTransferQueue._defer_release", _after_defer_release)


def _hook(target: str, hook: Callable[..., Any]) -> None:
    if target not in HookRegistry._hooks:
        HookRegistry.register(target, hook, HookType.AFTER)
        HookRegistry.apply_hooks()


@functools.cache
def _hints() -> KVHints:
    """Return the reader of KV hints, which ignores all: nothing is pulled into SGLang's cache.

    SGLang shows all metrics of the process, if it shows any.
    """
    from prometheus_client import Counter  # not before SGLang has named the folder for the metrics of its processes

    ignored = Counter("sglang:kvflow_hints_ignored", "Routers' KV hints that were ignored.", ["reason"])
    return KVHints(pulls=False, on_ignored=lambda reason: ignored.labels(reason).inc())


def _ignore_hints(req: Any) -> None:
    if (hints := getattr(req, "kv_hints", None)) is not None:  # SGLang 0.5.23 and later
        _hints().source(hints)


def _after_prefill_add(manager_class: type[Any], result: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    """After a prefill server has queued `req`, pass the prompt tokens of `req` to the request's sender.

    If the server has refused `req`, there is no sender. Then notify the decode server of the refusal.
    """
    _ignore_hints(req)
    sender = req.disagg_kv_sender
    if isinstance(sender, KVFlowSender):
        sender.prompt = prompt_of(req)
    elif sender is None and _has_counterpart(req) and isinstance(queue.kv_manager, manager_class):
        reason = req.finished_reason or req.to_finish
        queue.kv_manager.refuse(
            req.bootstrap_room, getattr(reason, "message", None) or "the prefill server refused the prompt"
        )


def _after_create_receiver(result: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    """Pass the prompt tokens of `req` to the receiver that a decode server has just created for it."""
    _ignore_hints(req)
    if isinstance(result.kv_receiver, KVFlowReceiver):
        result.kv_receiver.prompt = prompt_of(req)


def _after_decode_add(manager_class: type[Any], result: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    """If a decode server has just refused `req`, which then has no receiver, notify the prefill server."""
    manager, reason = queue.kv_manager, _reason_of(req)
    refused = reason and not any(queued.req is req for queued in queue.queue)
    if refused and _has_counterpart(req) and isinstance(manager, manager_class):
        address = NetworkAddress(req.bootstrap_host, req.bootstrap_port).to_host_port_str()
        receiver = KVFlowReceiver(manager, address, req.bootstrap_room)
        receiver.refuse(RequestError(f"the decode server refuses the prompt: {reason}"))
        receiver.clear()


def _after_defer_release(result: Any, queue: Any, decode_req: Any, *_: Any, **__: Any) -> None:
    """Remove the time limit after which a decode server frees the pages of a failed request.

    The server then keeps the pages until `KVFlowManager.is_abort_release_safe` says that all reads have stopped.
    """
    if isinstance(decode_req.kv_receiver, KVFlowReceiver):
        held, start_s, _, index, acks = queue._deferred_releases[-1]
        queue._deferred_releases[-1] = (held, start_s, math.inf, index, acks)


def _reason_of(req: Any) -> str:
    """Return SGLang's reason why `req` has ended or will end; "" if it goes on."""
    reason = req.finished_reason or req.to_finish
    return "" if reason is None else getattr(reason, "message", None) or "it does not say why"


def _has_counterpart(req: Any) -> bool:
    """Return True if the other server also has a request for `req`. It has none for SGLang's own health checks."""
    return req.bootstrap_room is not None and req.bootstrap_host != FAKE_BOOTSTRAP_HOST


def prompt_of(req: Any) -> npt.NDArray[np.int64]:
    """Return the ids of those tokens of `req` for which KV is transferred.

    The prefill and the decode server compare these ids. Placeholders of pictures and sounds are -1, since SGLang's ids
    for these may differ between servers. If the request is computed again after a change of weights, its generated
    tokens are included.
    """
    parts = [np.asarray(req.origin_input_ids, np.int64)]
    if getattr(req, "pd_rebootstrap_in_progress", False):
        parts.append(np.asarray(req.output_ids, np.int64))
    tokens = np.concatenate(parts)
    if getattr(req, "multimodal_inputs", None) is not None:
        tokens[tokens >= MM_PAD_SHIFT_VALUE] = -1
    return tokens
