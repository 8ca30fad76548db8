"""vLLM's own requests, without a server: how prompts are distinguished, and requests that are over when they come."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request, RequestStatus

from kvflow import secret_id
from kvflow.connector.scheduler import ConnectorScheduler, EngineRequest, SchedulingConfig, Sharing
from kvflow.connector.step import Step
from kvflow.core.protocol.prompts import prompt_digest
from kvflow.core.protocol.ticket import Ticket
from kvflow.vllm.engine_requests import engine_request_of, picture_ids_from_content, sharing_of, tokens_of
from kvflow.vllm.prefix import RequestPrefixes
from kvflow.vllm.scheduler_side import SchedulerSide
from tests.support.tests_support import any_ticket
from tests.vllm.test_settings import FULL

TOKENS = [11, 12, 13, 14, 15, 16]
REMOTE = secret_id("remote")
REFUSED = "tokens of its prompt are not those that the ticket"
WORDS = {"embeddings": "embeddings", "picture": "pictures", "salt": "cache salt", "adapter": "adapter"}


def picture(identifier: str, offset: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=2))


def embeddings(last: float) -> torch.Tensor:
    return torch.tensor([[float(row), 0.5] for row in range(5)] + [[last, 0.5]], dtype=torch.bfloat16)


PROMPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "other tokens": {"prompt_token_ids": TOKENS[::-1]},
    "an adapter": {"lora_request": LoRARequest("one", 1, "/one")},
    "another adapter": {"lora_request": LoRARequest("two", 2, "/two")},
    "an adapter of the same name": {"lora_request": LoRARequest("one", 1, "/two")},
    "a salt": {"cache_salt": "one"},
    "another salt": {"cache_salt": "two"},
    "adapter and salt": {"cache_salt": "one", "lora_request": LoRARequest("one", 1, "/one")},
    "a picture": {"mm_features": [picture("one", 1)]},
    "another picture": {"mm_features": [picture("two", 1)]},
    "a picture elsewhere": {"mm_features": [picture("one", 2)]},
    "two pictures": {"mm_features": [picture("one", 1), picture("two", 3)]},
    "two pictures in another order": {"mm_features": [picture("two", 1), picture("one", 3)]},
    "embeddings": {"prompt_token_ids": None, "prompt_embeds": embeddings(1.0)},
    "other embeddings": {"prompt_token_ids": None, "prompt_embeds": embeddings(2.0)},
}


def request_of(name: str, request_id: str = "r", **more: Any) -> Request:
    given = {"prompt_token_ids": TOKENS, **PROMPTS[name], **more}
    params = given.pop("params", None)
    sampling = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params} if params else None)
    return Request(request_id, given.pop("prompt_token_ids"), sampling, None, **given)


def engine_request(name: str, **more: Any) -> EngineRequest:
    return engine_request_of(
        request_of(name, **{"params": {"do_remote_decode": True}, **more}), picture_ids_from_content=True
    )


@pytest.mark.parametrize("tokens", [6, 2])
def test_prompts_are_told_apart_as_their_blocks_are(tokens: int) -> None:
    """Also for the offered part of a prompt: marks behind it, such as a picture, do not count."""
    for one, other in itertools.combinations_with_replacement(PROMPTS, 2):
        hashed = [
            (found.all_token_ids[:tokens], generate_block_hash_extra_keys(found, 0, tokens, 0)[0])
            for found in (request_of(one), request_of(other))
        ]
        digests = {prompt_digest("r", engine_request(name).prompt_token_ids[:tokens]) for name in (one, other)}
        assert (len(digests) == 1) == (hashed[0] == hashed[1]), f"{one}, {other}"


def test_a_prompt_with_nothing_but_tokens_has_the_digest_that_it_always_had() -> None:
    assert engine_request("plain").prompt_token_ids == TOKENS


def test_pictures_that_vllm_only_numbers_are_not_compared() -> None:
    assert tokens_of(request_of("a picture"), 6, picture_ids_from_content=False) is None
    assert tokens_of(request_of("plain"), 6, picture_ids_from_content=False) == TOKENS
    for pictures, prefixes, expected in ((0, True, True), (4, False, True), (0, False, False), (None, False, True)):
        multimodal = None if pictures is None else SimpleNamespace(mm_processor_cache_gb=pictures)
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(multimodal_config=multimodal),
            cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
        )
        assert picture_ids_from_content(config) == expected


@pytest.mark.parametrize(
    ("request_id", "alone", "spread"),
    [
        ("cmpl-7-0-1a2b3c4d", Sharing.ALONE, Sharing.ALONE),
        ("12-1a2b3c4d", Sharing.ALONE, Sharing.ALONE),
        ("0_cmpl-7-0-1a2b3c4d", Sharing.SAMPLES, Sharing.SAMPLES),
        ("12_cmpl-7-0-1a2b3c4d", Sharing.SAMPLES, Sharing.SAMPLES_ELSEWHERE),
    ],
)
def test_samples_are_known_by_their_ids(request_id: str, alone: Sharing, spread: Sharing) -> None:
    assert sharing_of(request_id, spread=False) is alone
    assert sharing_of(request_id, spread=True) is spread


def test_the_ids_of_samples_are_those_that_vllm_makes() -> None:
    core = EngineCoreRequest("cmpl-7", TOKENS, None, SamplingParams(n=3), None, 0.0, None, None, None)
    core.external_req_id = "cmpl-7"
    parent = ParentRequest(core)
    found = [sharing_of(parent.get_child_info(index)[0], spread=True) for index in range(3)]
    assert found == [Sharing.SAMPLES, Sharing.SAMPLES_ELSEWHERE, Sharing.SAMPLES_ELSEWHERE]


def test_samples_of_a_request_wait_for_the_first_load() -> None:
    side, ticket = side_of(), ticket_of("plain")
    requests = [request_of("plain", f"{index}_r", params=ticket.to_params()) for index in range(3)]
    for request in requests:
        side.on_new_request(request)
    matched = [side.get_num_new_matched_tokens(request, 0) for request in requests]
    assert matched == [(6, True), (None, False), (None, False)]
    assert side.stats.is_empty()


def side_of(prefixes: RequestPrefixes | None = None) -> SchedulerSide:
    scheduling = SchedulingConfig(block_size=4, lease_ttl_s=9.0)
    scheduler = ConnectorScheduler(scheduling, new_secret=lambda: "secret")
    scheduler.introduce(any_ticket())
    return SchedulerSide(scheduling, scheduler, [FULL], prefixes=prefixes)


def step_of(side: SchedulerSide) -> Step:
    return side._scheduler.build_step({}, preempted=(), block_ids=lambda _: [])


def ticket_of(name: str) -> Ticket:
    digest = prompt_digest(REMOTE, engine_request(name).prompt_token_ids)
    return any_ticket().without_leases(
        request_id=REMOTE, block_ids=[0, 1], num_tokens=6, ttl_s=9.0, prompt_digest=digest
    )


def all_tokens(name: str) -> list[int]:
    return list(request_of(name).all_token_ids)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_ticket_of_other_tokens_is_not_used_and_one_of_the_same_with_something_else_fails_the_request(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of other tokens is computed. A request without its picture would be computed without it."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for of in PROMPTS:
        side, request = side_of(), request_of(name, params=ticket_of(of).to_params())
        side.on_new_request(request)
        counted = (side.stats.data["tickets_refused"], side.stats.data["load_failures"])
        failed = request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if name == of:
            assert counted == ([], [])
            assert not failed
        elif all_tokens(name) != all_tokens(of):
            assert counted == (["PromptMismatch"], []), of
            assert REFUSED in caplog.records[-1].message
            assert not failed
        else:
            assert counted == ([], ["PromptMismatch"]), of
            said = caplog.records[-1].message
            assert any(word in said for part, word in WORDS.items() if part in name + of), said
            assert failed, of
            assert request.structured_output_request is not None
            assert "'remote#...'" in said
            answered = str(request.structured_output_request._grammar)  # vLLM 0.33 sends the client this text
            assert answered == "this prompt is not the one that was prefilled: request 'r'"


@pytest.mark.parametrize("before", [False, True])
def test_the_remains_of_a_request_that_is_over_are_no_request(before: bool, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM adds and aborts a request if an HTTP request was refused, has failed, or has lost its client."""
    side, ticket = side_of(), ticket_of("plain")
    if before:
        side.on_new_request(request_of("plain", params=ticket.to_params()))
    remains = request_of("plain", "remains", prompt_token_ids=[0], params=ticket.to_params(), abort_immediately=True)
    side.on_new_request(remains)
    assert side._scheduler.request_finished("remains", completed=False) == (False, None)
    assert [release.request_id for release in step_of(side).release] == ["remains"] * (not before)
    assert side.stats.is_empty()
    assert not caplog.records
