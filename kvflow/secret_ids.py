"""Secret request ids: "ID#SECRET", which kvflow shows as "ID#...".

A rank opens its leases under a request id, and gives a lease to each reader that asks for that id. So an id that others
can guess must not be all that a reader needs. `errors.without_secrets` removes the secret from text.
"""

from __future__ import annotations

import secrets

from kvflow import checks
from kvflow.checks import LOCAL_REQUEST_ID_CHARS_MAX

_SECRET_BYTES = 16
_PLAIN_CHARS_MAX = LOCAL_REQUEST_ID_CHARS_MAX - 1 - 2 * _SECRET_BYTES


def secret_id(request_id: str) -> str:
    """Return `request_id` with a new secret, for `ServeRequest` and `Ticket.rendezvous`.

    Without the secret nobody can ask for the offer. Error messages, logs, records and `repr` show the id with "..." in
    place of the secret. All ranks of an engine need the same id.

    Args:
        request_id: id of the request, such as the id that the client knows; at most 479 characters.

    Returns:
        `request_id`, "#" and 32 random hexadecimal digits.

    Raises:
        RequestError: `request_id` is not text, is empty or is too long.
    """
    return with_secret(checks.request_id(request_id, _PLAIN_CHARS_MAX), secrets.token_hex(_SECRET_BYTES))


def with_secret(request_id: str, secret: str) -> str:
    """Return `request_id` with `secret`, at least 16 lower-case hexadecimal digits."""
    return f"{request_id}#{secret}"
