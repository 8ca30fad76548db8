"""Bugs that the test suite has to find: small mistakes all over the package, each with the tests that should fail.

The bugs of the simulator and of the planner are elsewhere (tests/simulator/test_mutations.py and
tests/runtime/test_plan_mutations.py). A bug is a piece of text that is in the package exactly once, and its
replacement. So a bug stays valid when code moves. If the text itself has changed, the bug has to be written again:
`python -m tests.planted` reports it.
"""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    """A mistake: `new` in place of `old`. `within` is a part of the module's path, if other modules also have `old`."""

    old: str
    new: str
    finders: tuple[str, ...]
    """Ids of tests, or test files. At least one test has to fail."""
    within: str = ""


RUNTIME, CORE, STOCK = "tests/runtime/test_", "tests/core/", "tests/stock/test_"
MAPPING = "tests/accelerator/test_mapping.py::"

BUGS: dict[str, Bug] = {
    # --- leases
    "a renewal gives more than the lifetime": Bug(
        "max(entry.expires_s, min(now_s + entry.ttl_s, entry.lifetime_ends_s))",
        "max(entry.expires_s, now_s + entry.ttl_s)",
        (CORE + "policy/test_lease_book.py",),
    ),
    "a reader that tells twice counts twice": Bug(
        "            return Counted.DUPLICATE, None",
        "            reader += '!'",
        (CORE + "policy/test_lease_book.py",),
    ),
    "a restart gives no time": Bug(
        "entry.ttl_s, entry.expires_s = ttl_s, max(entry.expires_s, now_s + ttl_s)",
        "entry.ttl_s = ttl_s",
        (RUNTIME + "leases.py::test_a_lease_that_is_restarted_lasts_as_if_it_were_offered_then",),
    ),
    "leases are renewed once only": Bug(
        "                kept.due_s = now_s + kept.pause_s",
        "                kept.due_s = now_s + 1e9",
        (RUNTIME + "leases.py::test_a_lease_is_renewed_soon_and_then_at_thirds",),
        within="runtime/load/leases.py",
    ),
    # --- weights
    "blocks of other weights are read": Bug(
        "    if lease.weights != ours:\n",
        "    if False:\n",
        (RUNTIME + "weights.py", "tests/connector/test_scheduler.py"),
    ),
    "a connected reader compares no weights": Bug(
        "            if lease.weights != weights:\n                return None\n",
        "",
        (RUNTIME + "weights.py::test_it_is_refused_by_a_reader_that_is_connected",),
    ),
    "a load outlasts the weights that it is for": Bug(
        "        if load.weights != self._weights.version:",
        "        if False:",
        (RUNTIME + "weights.py",),
    ),
    "entries of other weights are restored": Bug(
        "fingerprint_of((self._cache_fingerprint, version)) if version else self._cache_fingerprint",
        "self._cache_fingerprint",
        ("tests/storage/test_storing.py::test_entries_of_other_weights_are_not_found",),
    ),
    "what a holder had before new weights is shared after": Bug(
        "        if question.weights != self._weights.version:  # an asynchronous",
        "        if False:  # an asynchronous",
        ("tests/prefix/test_prefix.py",),
    ),
    # --- seals
    "a torn seal is taken for a whole one": Bug(
        "word[:_SECRET_BYTES] != wanted[:_SECRET_BYTES]",
        "word[:8] != wanted[:8]",
        (CORE + "protocol/test_seals.py",),
    ),
    "a lease that was over is open again": Bug(
        "            if tokens_missing is not None or not self.lease_ended:\n"
        "                self._seen = tokens_missing\n"
        "            self.lease_ended = True\n        elif not self.lease_ended:",
        "            self._seen = tokens_missing\n            self.lease_ended = True\n        else:\n"
        "            self.lease_ended = False",
        (CORE + "protocol/test_proof.py",),
    ),
    "a clock that stands still vouches for several reads": Bug(
        "(read_s < self._quick_read_max_s and not self._read_since)",
        "read_s < self._quick_read_max_s",
        (
            CORE + "protocol/test_proof.py",
            RUNTIME + "leases.py::test_a_lease_that_is_revoked_in_the_middle_of_a_read_is_never_read_stale",
        ),
    ),
    "tokens that land after a seal was fetched are proven by it": Bug(
        "        proven = min(self._proven.values())\n",
        "        proven = self._landed_stop if min(self._proven.values()) > self._first else self._first\n",
        ("tests/growing/test_growing.py::test_a_paused_reader_reports_no_token_of_another_prompt",),
    ),
    "a hold begins when the lease ends, before its seal is wiped": Bug(
        "        self._blocks.close(offer.held, failed=failed)\n        self._book.hold(entry, self._clock.now_s())",
        "        now_s = self._clock.now_s()\n        self._blocks.close(offer.held, failed=failed)\n"
        "        self._book.hold(entry, now_s)",
        (RUNTIME + "leases.py::test_a_hold_begins_when_the_seal_is_wiped",),
    ),
    # --- loads of several tickets
    "the next source is read under the last one": Bug(
        "        if load.flight is not None:\n            await load.flight.settled()\n",
        "",
        ("tests/failover/test_surviving.py::test_the_next_source_is_read_once_nothing_of_the_last_one_can_land",),
    ),
    # --- ledger, queue, permits, contacts, rates
    "blocks that are being loaded may be served": Bug(
        '        if (use < _FREE).any():\n            self._refuse(ids, use < _FREE, "served")\n',
        "",
        (CORE + "policy/test_ledger.py",),
    ),
    "parts of one pool's block are counted apart": Bug(
        "own = np.unique(own // split)",
        "own = np.unique(own)",
        (CORE + "policy/test_ledger.py",),
    ),
    "a permit that is given back lets nobody go": Bug(
        "return self._grant() if self.waiting else []",
        "return []",
        (CORE + "policy/test_queue.py",),
    ),
    "the bound for one peer is no bound": Bug(
        "            if _fits(head.permit.amount, budget):\n                able.append(head)",
        "            able.append(head)",
        (CORE + "policy/test_queue.py",),
    ),
    "small copies pass a large one for ever": Bug(
        "self._passed = self._passed + size if index else 0",
        "self._passed = 0",
        (CORE + "policy/test_queue.py",),
    ),
    "the newest contact makes way instead of the oldest": Bug(
        "oldest = next(iter(self._under_way))",
        "oldest = next(reversed(self._under_way))",
        (CORE + "policy/test_contacts.py", RUNTIME + "contacts.py"),
    ),
    "a peer that fails is asked at once, always": Bug(
        "return Circuit(failures=failures, retry_at_s=now_s + delay_s(failures, back_off, chance))",
        "return Circuit(failures=failures, retry_at_s=now_s)",
        (
            CORE + "policy/test_circuit.py",
            RUNTIME + "peers.py::test_waits_double_while_it_fails_and_each_ends_with_one_question",
        ),
    ),
    "a clock that goes back fills buckets": Bug(
        "max(now_s - counted_s, 0.0) * self._requests_per_s",
        "abs(now_s - counted_s) * self._requests_per_s",
        (CORE + "policy/test_rate_limit.py",),
    ),
    # --- mapped memory of a device
    "a seal is read before the batch that it vouches for": Bug(
        "        elif peer in self._reading:",
        "        elif False:",
        (MAPPING + "test_host_memory_is_read_once_the_batches_before_have_ended",),
    ),
    "a batch has ended when it is posted": Bug(
        "                if not self._mapper.has_happened(batch.event):\n                    return False",
        "                self._mapper.has_happened(batch.event)",
        (
            MAPPING + "test_a_batch_that_fails_is_the_reads_error",
            MAPPING + "test_a_load_is_reported_when_its_batch_has_run",
        ),
    ),
    "a batch that was refused has ended": Bug(
        'batch.error = TransportError(f"the device refuses a batch of copies: {error}")',
        'batch.error = TransportError(f"the device refuses a batch of copies: {error}")\n                return',
        (MAPPING + "test_a_batch_that_is_refused_ends_when_what_was_queued_of_it_has",),
    ),
    "memory stays mapped when its peer is forgotten": Bug(
        "            self._peers[name].close()\n            del self._peers[name]",
        "            del self._peers[name]",
        (MAPPING + "test_memory_is_mapped_as_long_as_the_peer_is_added",),
    ),
    "bytes of a process that has ended are good": Bug(
        "        if batch.error is None and self._process.has_ended:",
        "        if False:",
        (MAPPING + "test_a_process_that_has_ended_is_an_error_and_never_a_byte",),
    ),
    "nixl maps what is mapped already": Bug(
        "MappedPeer(self._mapper, self._kind, shared), shared.host_metadata",
        "MappedPeer(self._mapper, self._kind, shared), metadata",
        (MAPPING + "test_nixl_knows_nothing_of_memory_that_is_mapped",),
    ),
    "an allocation is as large as its owner says": Bug(
        "            if opened.size_bytes < allocation.size_bytes:",
        "            if False:",
        (MAPPING + "test_memory_that_cannot_be_mapped_is_read_by_nixl",),
    ),
    "unregistering waits for no reader": Bug(
        "        if removal is None or not goodbye.awaits_removal:",
        "        if True:",
        (MAPPING + "test_unregistering_waits_until_readers_have_unmapped",),
    ),
    # --- handshakes and incarnations
    "metadata is not held against its checksum": Bug(
        "        if actual != sent:",
        "        if False:",
        (
            RUNTIME + "side_channel.py::test_metadata_that_cannot_be_true_or_does_not_fit",
            RUNTIME + "peers.py::test_no_flipped_bit_of_agent_metadata_reaches_the_transport",
        ),
    ),
    "the agent may have another name than the peer said": Bug(
        "        if name != agent:\n            if name not in",
        "        if False:\n            if name not in",
        (RUNTIME + "side_channel.py::test_metadata_that_cannot_be_true_or_does_not_fit",),
    ),
    "a goodbye ends the connection to any incarnation": Bug(
        "if peer.at[:2] == goodbye.sender[:2] and connection and connection.incarnation == goodbye.incarnation:",
        "if peer.at[:2] == goodbye.sender[:2] and connection:",
        (RUNTIME + "drain.py::test_a_forged_goodbye_changes_nothing",),
    ),
    "a question that times out fails no connection": Bug(
        "                if connection is not None:\n"
        "                    self.note_read_failure(connection, str(error))\n",
        "",
        (RUNTIME + "peers.py::test_a_peer_that_falls_silent_is_asked_a_few_things_only_and_fails_all_who_ask",),
        within="runtime/peers/table.py",
    ),
    # --- tickets
    "a merged ticket lives as long as the last of its leases": Bug(
        "ttl_s=min(ticket.ttl_s for ticket in given))",
        "ttl_s=max(ticket.ttl_s for ticket in given))",
        (CORE + "protocol/test_ticket.py",),
    ),
    "two leases of one rank are merged": Bug(
        '        if known != lease:\n            raise RequestError(\n                f"merge_tickets',
        '        if False:\n            raise RequestError(\n                f"merge_tickets',
        (CORE + "protocol/test_ticket.py",),
    ),
    # --- growth and rendezvous
    "blocks that follow overwrite those that were known": Bug(
        "all_ids = [*table[:known].tolist(), *ids]",
        "all_ids = [*ids, *table[:known].tolist()]",
        ("tests/growing/test_extending.py::test_blocks_come_with_the_chunks",),
    ),
    "tokens may be taken back": Bug(
        "        if not held.announced <= tokens <= held.num_tokens:",
        "        if not tokens <= held.num_tokens:",
        ("tests/growing/test_growing.py::test_advances_that_cannot_be",),
    ),
    "a partly computed unit is read whole": Bug(
        "return self._end if readable_tokens >= self.tokens.stop else readable_tokens // self._unit * self._unit",
        "return self._end if readable_tokens >= self.tokens.stop else -(-readable_tokens // self._unit) * self._unit",
        ("tests/growing/test_growing.py::test_what_is_computed_is_read_as_it_comes",),
    ),
    "ranks that offer different things are believed": Bug(
        "                if ours != theirs:\n                    both =",
        "                if False:\n                    both =",
        ("tests/growing/test_rendezvous.py::test_ranks_that_differ_or_decline",),
        within="growing/pending_tickets.py",
    ),
    "any number of questions may wait": Bug(
        "        if not room or self._of_reader[reader] >= WAITING_OF_READER_MAX or not question.wait_s:",
        "        if not question.wait_s:",
        ("tests/growing/test_rendezvous.py::test_questions_of_strangers_keep_no_honest_one_from_its_answer",),
    ),
    "a payload is told before the prompt is complete": Bug(
        "            if one.source.lease.payload:\n                if await asyncio.shield(one.final_state)"
        " is not LeaseAnswerState.COMPLETE:\n                    return None\n",
        "            if one.source.lease.payload:\n",
        (
            RUNTIME + "turns.py::test_both_turns_of_a_conversation",
            "tests/growing/test_rendezvous.py::test_either_leg_may_come_first",
            "tests/growing/test_rendezvous.py::test_a_payload_without_blocks",
        ),
    ),
    # --- digests
    "tokens beyond the prompt are digested": Bug(
        "weights[(tokens < start) | (tokens >= stop)] = 0",
        "weights[tokens < start] = 0",
        ("tests/verify/test_digests.py",),
    ),
    "heads are digested by their place in the block": Bug(
        "digests.head_weights(asked.model_head, len(heads))",
        "digests.head_weights(heads.start, len(heads))",
        ("tests/verify/test_digests.py",),
    ),
    # --- storage
    "an entry that is being read goes": Bug(
        "            if not entry.readers:\n                victims.append(entry)",
        "            if True:\n                victims.append(entry)",
        ("tests/storage/test_index.py",),
    ),
    "what was saved is not compared with what is restored": Bug(
        "if await self._stored_cache.digests(transfer.tables) != header.digests:",
        "if not await self._stored_cache.digests(transfer.tables):",
        ("tests/storage/test_storing.py::test_what_is_damaged_is_never_good_and_goes",),
    ),
    "blocks of a restore are free while its bytes may land": Bug(
        "        if stopping and not self._under_way and not (self._end",
        "        if stopping and not (self._end",
        (
            "tests/storage/test_storing.py::test_a_cancelled_restore_waits_for_its_bytes",
            "tests/storage/test_storing.py::test_bytes_that_do_not_stop_are_quarantined",
        ),
        within="runtime/load",
    ),
    "a damaged header is read": Bug(
        "    if zlib.crc32(body) != expected:",
        "    if False:",
        ("tests/storage/test_entry.py",),
    ),
    # --- the wire of stock engines
    "a stock lease is believed for its whole time": Bug(
        "self.bound_s = arrived_s + terms.lease_s - terms.router_s",
        "self.bound_s = arrived_s + terms.lease_s",
        ("tests/stock/test_deadline.py",),
    ),
    "a stock read counts as fresh after its deadline": Bug(
        "return ProofStep.FRESH if self._now_s() < self.held_until_s() else ProofStep.STALE",
        "return ProofStep.FRESH",
        (
            "tests/stock/test_deadline.py",
            STOCK + "own_pairs.py::test_what_is_late_is_refused_and_what_is_in_time_is_sealed",
        ),
    ),
    "a stock producer's registrations are not followed": Bug(
        "if asked_s - connection.alive_s < _ASK_AGAIN_S and generation <= connection.generation:",
        "if asked_s - connection.alive_s < _ASK_AGAIN_S:",
        (STOCK + "generations.py",),
    ),
    "parameters of an earlier registration count as new": Bug(
        "newer = ticket.generation > now.generation_before and ticket.generation >= now.generation",
        "newer = True",
        (STOCK + "generations.py", STOCK + "reading.py"),
    ),
    "regions of a stock peer may reach beyond the address space": Bug(
        "        if stride < size or base + stride * blocks >= 1 << 63:",
        "        if stride < size:",
        ("tests/stock/test_wire.py", STOCK + "hostile_producers.py"),
    ),
    "one stock reader ends a lease of two": Bug(
        'reader=f"stock {reports}", numerator=1, denominator=readers',
        'reader=f"stock {reports}", numerator=1, denominator=1',
        (STOCK + "serving.py::test_of_two_readers_both_are_waited_for",),
    ),
    # --- side channel
    "a key may ask in the name of another engine": Bug(
        "            if engine not in (None, claimed):",
        "            if False:",
        (RUNTIME + "curve.py::test_nobody_asks_in_the_name_of_another",),
    ),
    "an answer is given to whoever asked first": Bug(
        "            question = self.waiting.get(number)\n",
        "            question = next(iter(self.waiting.values()), None)\n",
        (RUNTIME + "connections.py::test_so_many_questions_share_a_connection_and_answers_may_come_in_any_order",),
    ),
    "requests of any size are taken": Bug(
        "            (zmq.MAXMSGSIZE, REQUEST_BYTES_MAX),\n",
        "",
        (RUNTIME + "listener_limits.py::test_a_request_that_is_too_large_ends_its_connection_unread",),
    ),
    "a secret key may be open to all": Bug(
        "    if mode & forbidden:",
        "    if False:",
        (RUNTIME + "keyring.py",),
    ),
    # --- checks and Config
    "True is a number": Bug(
        "return partial(checked, kind=_struct_with(Int64 if hint is int else hint), error=error)",
        "return partial(checked, kind=_struct_with((Int64 if hint is int else hint) | bool), error=error)",
        ("tests/test_border.py::test_a_field_of_another_type_is_refused_and_named",),
    ),
    "a rank's port may be above the last": Bug(
        "    if port and port + config.listen_port_offset > PORT_MAX:",
        "    if port > PORT_MAX:",
        ("tests/test_config.py",),
    ),
    # --- connector, blocking, observers, devices
    "a ticket is used by two requests": Bug(
        "        if recorded is not use and not (recorded.shared and recorded.readers):",
        "        if False:",
        (
            "tests/connector/test_scheduler.py::test_a_ticket_is_used_once",
            "tests/connector/test_scheduler.py::test_a_second_request_with_a_ticket_is_computed",
        ),
    ),
    "a preempted prompt stays offered": Bug(
        '            self._fire(request, "preempt")\n            self._withdraw(request)\n',
        '            self._fire(request, "preempt")\n',
        (
            "tests/connector/test_scheduler.py::test_preempted_after_its_prompt_the_lease_is_withdrawn_and_the_next_has_a_secret_of_its_own",
        ),
    ),
    "a blocking load is safe while its bytes land": Bug(
        "return self.done and (self._load is None or self._load.safe)",
        "return self.done",
        (
            "tests/test_blocking.py::test_a_load_that_is_done_says_when_its_blocks_are_safe",
            "tests/test_blocking.py::test_a_cancelled_load_is_done_when_its_bytes_have_stopped",
        ),
    ),
    "failed loads are timed as if they had succeeded": Bug(
        "    if record.error or record.outcome == CANCELLED:\n        return\n",
        "",
        ("tests/observe/test_prometheus.py::test_what_has_happened_is_counted_and_what_is_open_is_shown",),
    ),
    "host blocks are copied from the first of a run": Bug(
        "            places[place : place + count] = rows[start : start + count]",
        "            places[place : place + count] = rows[start : start + 1]",
        (
            "tests/staging/test_copies.py::test_blocks_that_follow_each_other_on_either_side",
            "tests/staging/test_copies.py::test_blocks_are_copied_and_nothing_else",
        ),
    ),
    "draining waits for leases only": Bug(
        "waits = [serving.drained(), loader.drained(), self._parts_drained()]",
        "waits = [serving.drained()]",
        (
            RUNTIME + "drain.py::test_new_work_is_refused_and_old_work_goes_on",
            RUNTIME + "drain.py::test_at_the_deadline_leases_are_revoked_and_named_in_the_log",
            RUNTIME + "drain.py::test_at_the_deadline_loads_are_ended",
        ),
    ),
}
