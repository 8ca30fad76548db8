"""Fail one request in vLLM's scheduler, whatever the policy for failed loads is.

vLLM has no call for that. It ends a waiting request whose grammar cannot be compiled, with an error for its client and
without a step for it, so a request that must not be computed is given such a grammar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request

_ANY = StructuredOutputsParams(json_object=True)


def fail(request: Request, error: Exception) -> None:
    """Have vLLM end `request`, which is waiting and has no blocks, with its next step."""
    request.structured_output_request = StructuredOutputRequest(_ANY, error)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
