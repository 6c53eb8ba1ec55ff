"""The event engine for links that several ranks share: everything happens in the order of time.

It gives the times of `engine.run` where links belong to one pair of ranks, and takes twenty times as long:
whose transfer comes first on a shared link is known only once nobody can ask for it earlier.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from stagewright.simulation.engine import AT_ONCE, LOCAL, POST, Floats, Ints, helper, queue_offsets, ready_at
from stagewright.simulation.streams import NUM_STREAMS

_RANK, _REQUEST, _ARRIVAL = range(3)
"""What happens: a rank looks at its next action, a transfer asks for its links, a transfer arrives."""


class Events(NamedTuple):
    """A heap of what is to happen, by time and then in the order in which it was planned."""

    time: Floats
    order: Ints
    what: Ints
    subject: Ints  # a rank, or a slot
    token: Ints
    size: Ints  # [events in the heap, events ever planned]


class Waiting(NamedTuple):
    """Transfers: in a queue per pair of ranks until both sides are posted, then in line for their links."""

    head: Ints
    tail: Ints
    token: Ints
    posted: Ints
    slot: Ints
    line_slot: Ints
    line_token: Ints
    in_line: Ints  # [how many]


@numba.njit(cache=True, nogil=True)
def run_in_time(
    pattern, microbatch, offsets, tables, num_pairs, first_link, second_link, num_links, start, end, known
):
    """As `engine.run`, with the two links of every slot (the second may be -1), out of `num_links`."""
    num_ranks = len(offsets) - 1
    queues = queue_offsets(pattern, tables, num_pairs)
    known[:] = -1.0
    room = len(known) + num_ranks + 1
    events = Events(
        np.empty(room), np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64),
        np.empty(room, np.int64), np.zeros(2, np.int64),
    )  # fmt: skip
    waiting = Waiting(
        queues[:-1].copy(), queues[:-1].copy(),
        np.empty(queues[-1], np.int64), np.empty(queues[-1], np.int64),
        np.empty(queues[-1], np.int64), np.empty(len(known), np.int64), np.empty(len(known), np.int64),
        np.zeros(1, np.int64),
    )  # fmt: skip
    is_busy = np.zeros(num_links, np.bool_)
    stream_free = np.zeros((num_ranks, NUM_STREAMS))
    reached = offsets[:-1].copy()
    waits_for = np.full(num_ranks, -1)
    for rank in range(num_ranks):
        _plan(0.0, _RANK, rank, -1, events)
    while events.size[0] > 0:
        now, what, subject, token = _next(events)
        if what == _RANK:
            _advance(
                subject, now, pattern, microbatch, offsets, tables, stream_free, reached, waits_for,
                start, end, known, events, waiting,
            )  # fmt: skip
            continue
        if what == _REQUEST:
            place = waiting.in_line[0]
            waiting.line_slot[place] = subject
            waiting.line_token[place] = token
            waiting.in_line[0] += 1
        else:
            known[token] = now
            user = tables.slot_user[subject]
            if waits_for[user] == token:
                waits_for[user] = -1
                _plan(now, _RANK, user, -1, events)
            is_busy[first_link[subject]] = False
            if second_link[subject] >= 0:
                is_busy[second_link[subject]] = False
        _start_transfers(now, tables, first_link, second_link, is_busy, events, waiting)
    return reached


@helper
def _advance(
    rank, now, pattern, microbatch, offsets, tables, stream_free, reached, waits_for,
    start, end, known, events, waiting,
):  # fmt: skip
    """Let `rank` run up to and with its next computation, or to where something is missing."""
    while reached[rank] < offsets[rank + 1]:
        index = reached[rank]
        p, m = pattern[index], microbatch[index]
        begin, missing = ready_at(np.uint64(p), m, stream_free[rank, 0], tables, known)
        if missing >= 0:
            waits_for[rank] = missing
            return
        stream = tables.stream[p]
        if stream > 0:
            begin = max(begin, stream_free[rank, stream])
        finish = begin + tables.seconds[p]
        if stream >= 0:
            stream_free[rank, stream] = finish
        start[index] = begin
        end[index] = finish
        reached[rank] = index + 1
        for n in range(tables.make_offsets[p], tables.make_offsets[p + 1]):
            token = tables.make_first[n] + m * tables.make_step[n]
            slot, travel = tables.make_slot[n], tables.make_travel[n]
            if travel == LOCAL:
                known[token] = finish
            elif travel == AT_ONCE:
                _plan(max(finish, now), _REQUEST, slot, token, events)
            else:
                pair = tables.slot_link[slot]
                if travel == POST:
                    known[token] = finish
                else:
                    place = waiting.tail[pair]
                    waiting.token[place] = token
                    waiting.posted[place] = tables.make_posted[n] + m * tables.make_step[n]
                    waiting.slot[place] = slot
                    waiting.tail[pair] += 1
                _ask(pair, max(finish, now), known, events, waiting)
        if stream == 0:
            _plan(max(finish, now), _RANK, rank, -1, events)
            return


@helper
def _ask(pair, now, known, events, waiting):
    """Ask for links for the transfers at the head of a pair's queue whose receives are posted."""
    while waiting.head[pair] < waiting.tail[pair]:
        place = waiting.head[pair]
        if known[waiting.posted[place]] < 0.0:
            return
        _plan(now, _REQUEST, waiting.slot[place], waiting.token[place], events)
        waiting.head[pair] += 1


@helper
def _start_transfers(now, tables, first_link, second_link, is_busy, events, waiting):
    """Start the transfers in line whose links are free, first come first served."""
    kept = 0
    for place in range(waiting.in_line[0]):
        slot, token = waiting.line_slot[place], waiting.line_token[place]
        first, second = first_link[slot], second_link[slot]
        if is_busy[first] or (second >= 0 and is_busy[second]):
            waiting.line_slot[kept] = slot
            waiting.line_token[kept] = token
            kept += 1
            continue
        is_busy[first] = True
        if second >= 0:
            is_busy[second] = True
        _plan(now + tables.slot_seconds[slot], _ARRIVAL, slot, token, events)
    waiting.in_line[0] = kept


@helper
def _comes_before(a, b, events):
    if events.time[a] != events.time[b]:
        return events.time[a] < events.time[b]
    return events.order[a] < events.order[b]


@helper
def _swap(a, b, events):
    events.time[a], events.time[b] = events.time[b], events.time[a]
    events.order[a], events.order[b] = events.order[b], events.order[a]
    events.what[a], events.what[b] = events.what[b], events.what[a]
    events.subject[a], events.subject[b] = events.subject[b], events.subject[a]
    events.token[a], events.token[b] = events.token[b], events.token[a]


@helper
def _plan(time, what, subject, token, events):
    place = events.size[0]
    events.time[place] = time
    events.order[place] = events.size[1]
    events.what[place] = what
    events.subject[place] = subject
    events.token[place] = token
    events.size[0] += 1
    events.size[1] += 1
    while place > 0 and _comes_before(place, (place - 1) // 2, events):
        _swap(place, (place - 1) // 2, events)
        place = (place - 1) // 2


@helper
def _next(events):
    """Take the first event out: its time, what happens, to whom, and with which token."""
    time, what = events.time[0], events.what[0]
    subject, token = events.subject[0], events.token[0]
    events.size[0] -= 1
    size, place = events.size[0], 0
    _swap(0, size, events)
    while True:
        least = place
        for child in (2 * place + 1, 2 * place + 2):
            if child < size and _comes_before(child, least, events):
                least = child
        if least == place:
            return time, what, subject, token
        _swap(place, least, events)
        place = least
