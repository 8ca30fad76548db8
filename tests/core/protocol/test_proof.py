"""SealProof: no read of a lease that has ended counts as fresh, and every read of a lasting lease does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.protocol.proof import FAILED, ProofStep, SealProof, quick_read_max_s

HOLD_S = 0.05


def freshness(*, staged: bool = False) -> SealProof:
    return SealProof(grows=staged, quick_read_max_s=quick_read_max_s(HOLD_S))


def see(one: SealProof, tokens_missing: int | None) -> None:
    one.note_fetch_posted()
    one.note_fetched(tokens_missing, 0.0)


def test_a_lease_is_read_at_once_until_its_seal_is_seen_to_be_broken() -> None:
    """The seal is fetched meanwhile."""
    for seen, then, judged in ((0, ProofStep.POST, ProofStep.FRESH), (None, ProofStep.STALE, ProofStep.STALE)):
        one = freshness()
        found = [one.judge_before_post()]
        one.note_fetch_posted()
        found.append(one.judge_before_post())
        one.note_fetched(seen, 0.0)
        assert ([*found, one.judge_before_post()], one.judge_after_read(0.001)) == (
            [ProofStep.POST, ProofStep.POST, then],
            judged,
        )


def test_a_clock_vouches_for_one_post_alone() -> None:
    """A machine may be paused between two posts, and its clock with it."""
    one = freshness()
    one.note_read_posted()
    see(one, 0)
    assert one.judge_after_read(0.001) is ProofStep.FRESH, "posted before the seal's fetch"
    one.note_read_posted()
    assert (one.judge_after_read(0.0), one.judge_after_read(None)) == (ProofStep.FETCH, ProofStep.FRESH)
    see(one, 0)
    assert one.judge_after_read(0.001) is ProofStep.FRESH, "fetched again"


def test_of_a_lease_that_grows_only_what_was_seen_to_be_there_is() -> None:
    one = freshness(staged=True)
    assert (one.readable_tokens(10), one.lease_ended) == (0, False)
    for missing, there in ((7, 3), (0, 10)):
        one.note_fetched(missing, 0.0)
        assert (one.readable_tokens(10), one.lease_ended, one.judge_before_post()) == (there, False, ProofStep.POST)
    one.note_fetched(None, 0.1)
    assert (one.readable_tokens(10), one.lease_ended, one.judge_before_post()) == (0, True, ProofStep.STALE)
    one.note_fetched(FAILED, 0.2)
    assert (one.readable_tokens(10), one.lease_ended, one.failed, one.judge_before_post()) == (
        0,
        True,
        True,
        ProofStep.STALE,
    )
    assert one.judge_after_read(None) is ProofStep.STALE
    whole = freshness()
    assert (whole.readable_tokens(10), whole.lease_ended) == (10, False), "nothing has to be seen"


def test_a_lease_that_was_seen_to_be_over_is_not_open_again() -> None:
    """Nor while another look is under way; and a look that found it over has not found it open when it was posted."""
    one = freshness(staged=True)
    one.note_fetched(3, 0.1)
    one.note_fetched(None, 0.2)
    one.note_fetch_posted()
    assert (one.lease_ended, one.last_open_s, one.readable_tokens(10), one.judge_before_post()) == (
        True,
        0.1,
        0,
        ProofStep.STALE,
    )
    one.note_fetched(3, 0.15)  # posted before the one that has found it over, and here after it
    assert (one.lease_ended, one.last_open_s, one.judge_after_read(None)) == (True, 0.1, ProofStep.STALE)
    one.note_fetched(FAILED, 0.4)
    one.note_fetched(None, 0.5)
    assert (one.lease_ended, one.failed, one.last_open_s) == (True, True, 0.1), "why it is over stays known"


@given(
    staged=st.booleans(),
    ends_s=st.floats(0, 1),
    fetched_s=st.floats(0, 1),
    read_s=st.floats(0, 1),
    refetched_s=st.floats(0, 1),
    paused_s=st.none() | st.floats(0, 1),
)
def test_what_is_called_fresh_was_covered(
    staged: bool, ends_s: float, fetched_s: float, read_s: float, refetched_s: float, paused_s: float | None
) -> None:
    """The read begins at 0 and ends at `read_s`; the blocks are held until HOLD_S after the lease's end.

    With `paused_s` there is a second post, and the reader's machine and its clock stand still for so long before it.
    """
    fetched_s = min(fetched_s, read_s)
    one = freshness(staged=staged)
    see(one, 0 if fetched_s < ends_s else None)
    if paused_s is not None:
        one.note_read_posted()
    verdict = one.judge_after_read(max(read_s - (paused_s or 0.0), 0.0))
    if verdict is ProofStep.FETCH:
        see(one, 0 if read_s + refetched_s < ends_s else None)
        verdict = one.judge_after_read(None)
        assert verdict in (ProofStep.FRESH, ProofStep.STALE), "it is asked once more, not for ever"
    if verdict is ProofStep.FRESH:
        assert read_s < ends_s + HOLD_S, "the blocks were reused before the last byte was read"
    if ends_s > read_s + refetched_s:
        assert verdict is ProofStep.FRESH, "the lease covered everything"


@given(steps=st.lists(st.sampled_from([None, 0, 1, 5]), min_size=1, max_size=5), staged=st.booleans())
def test_a_seal_that_is_broken_stops_the_read(steps: list[int | None], staged: bool) -> None:
    one = freshness(staged=staged)
    assert one.judge_after_read(0.0) is ProofStep.STALE, "nothing vouches before a seal was seen"
    over = False
    for seen in steps:
        one.judge_before_post()
        see(one, seen)
        over = over or seen is None
        assert (one.judge_before_post() is ProofStep.STALE) == over
        read_too_early = seen is not None and seen > 0 and not staged
        assert (one.judge_after_read(0.0) is ProofStep.STALE) == (over or read_too_early)
