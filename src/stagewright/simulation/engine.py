"""The event engine: start and end of every action of a program, compiled by numba.

It knows tokens, streams and links, but no schedules: tables list what each action needs and makes. Ranks are advanced one
after the other until each is blocked. The times are exact because everything that imposes an order (a rank on its actions, a
sender on its link) is advanced in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stagewright.arrays import Floats, Ints
from stagewright.compiled import compiled, compiled_helper
from stagewright.simulation.streams import NUM_STREAMS

LOCAL, AT_ONCE, WHEN_POSTED, POST = range(4)
"""How a token is sent: not at all; as soon as it is made; once its receive is posted; and the posting itself."""


class Tables(NamedTuple):
    """The needs, results and seconds of each pattern of action, and how each token is sent.

    Pattern `p` of microbatch `m` needs the tokens ``need_first[n] + m * need_step[n]`` for `n` from
    ``need_offsets[p]`` to ``need_offsets[p + 1]``, and so on. A slot is a token without its microbatch.
    """

    need_first: Ints
    need_step: Ints
    need_offsets: Ints
    make_first: Ints
    make_step: Ints
    make_posted: Ints  # for WHEN_POSTED: the posted receive it waits for, of microbatch 0
    make_slot: Ints
    make_travel: Ints  # LOCAL, AT_ONCE, WHEN_POSTED or POST
    make_offsets: Ints
    seconds: Floats
    stream: Ints
    slot_link: Ints  # index of the link, for every slot that is not LOCAL
    slot_seconds: Floats  # seconds on that link
    slot_user: Ints  # the rank that may wait for it


class Links(NamedTuple):
    """State of the links. Transfers that wait for their receive are queued in the order of their sends."""

    free: Floats  # when the link can take the next transfer
    is_shared: bool
    token: Ints
    posted: Ints  # token of the posted receive
    slot: Ints
    sent: Floats
    head: Ints
    tail: Ints


# For every signed index compiled code checks whether it counts from the end, which takes a third of the time.
_index = np.uint64
_ONE = _index(1)


@compiled
def run(pattern, microbatch, offsets, tables, num_links, is_shared, start, end, token_s):
    """Fill in `start` and `end` of every action and `token_s`, the time at which each token is available (negative if
    never); return per rank the index of the first action that cannot start.

    The caller allocates the arrays because numpy uses large pages, which saves a fifth of the time of a million actions.
    """
    num_ranks = len(offsets) - 1
    token_s[:] = -1.0
    links = _links(pattern, tables, num_links, is_shared)
    stream_free = np.zeros((num_ranks, NUM_STREAMS))
    reached = offsets[:-1].copy()
    waits_for = np.full(num_ranks, -1)
    ready = np.arange(num_ranks)[::-1].copy()
    num_ready = num_ranks
    while num_ready > 0:
        num_ready -= 1
        rank = ready[num_ready]
        index = _index(reached[rank])
        stop = _index(offsets[rank + 1])
        now = stream_free[rank, 0]
        while index < stop:
            p = _index(pattern[index])
            m = microbatch[index]
            begin, missing = ready_at(p, m, now, tables, token_s)
            if missing >= 0:
                waits_for[rank] = missing
                break
            stream = tables.stream[p]
            if stream > 0:
                begin = max(begin, stream_free[rank, stream])
            finish = begin + tables.seconds[p]
            if stream > 0:
                stream_free[rank, stream] = finish
            elif stream == 0:
                now = finish
            start[index] = begin
            end[index] = finish
            index += _ONE
            for n in range(_index(tables.make_offsets[p]), _index(tables.make_offsets[p + _ONE])):
                token = _index(tables.make_first[n] + m * tables.make_step[n])
                travel = tables.make_travel[n]
                if travel == LOCAL:
                    token_s[token] = finish
                    continue
                slot = _index(tables.make_slot[n])
                if travel == AT_ONCE:
                    token_s[token] = _carry(slot, finish, tables, links)
                    num_ready = _wake(token, tables.slot_user[slot], waits_for, ready, num_ready)
                else:
                    if travel == POST:
                        token_s[token] = finish
                    else:
                        posted = tables.make_posted[n] + m * tables.make_step[n]
                        _queue(slot, token, posted, finish, tables, links)
                    num_ready = _drain(
                        tables.slot_link[slot], token_s, tables, links, waits_for, ready, num_ready
                    )
        reached[rank] = index
        stream_free[rank, 0] = now
    return reached


@compiled_helper
def ready_at(p, m, now, tables, token_s):
    """Return when pattern `p` of microbatch `m` has all its tokens, and a missing token or -1."""
    for n in range(_index(tables.need_offsets[p]), _index(tables.need_offsets[p + _ONE])):
        token = _index(tables.need_first[n] + m * tables.need_step[n])
        at = token_s[token]
        if at < 0.0:
            return now, np.int64(token)
        if at > now:
            now = at
    return now, -1


@compiled_helper
def _carry(slot, depart, tables, links):
    """Return the arrival of a transfer that starts at `depart` or as soon as its link is free."""
    link = tables.slot_link[slot]
    if links.is_shared and links.free[link] > depart:
        depart = links.free[link]
    links.free[link] = depart + tables.slot_seconds[slot]
    return links.free[link]


@compiled_helper
def _wake(token, rank, waits_for, ready, num_ready):
    """Make `rank` ready if it waits for `token`; return the number of ready ranks."""
    if waits_for[rank] != token:
        return num_ready
    waits_for[rank] = -1
    ready[num_ready] = rank
    return num_ready + 1


@compiled_helper
def _queue(slot, token, posted, sent, tables, links):
    """Append a transfer to its link's queue."""
    link = tables.slot_link[slot]
    place = links.tail[link]
    links.token[place] = token
    links.posted[place] = posted
    links.slot[place] = slot
    links.sent[place] = sent
    links.tail[link] = place + 1


@compiled_helper
def _drain(link, token_s, tables, links, waits_for, ready, num_ready):
    """Start the transfers at the head of the link's queue whose receives are posted."""
    while links.head[link] < links.tail[link]:
        place = links.head[link]
        posted = token_s[links.posted[place]]
        if posted < 0.0:
            break
        slot = links.slot[place]
        token_s[links.token[place]] = _carry(slot, max(links.sent[place], posted), tables, links)
        num_ready = _wake(links.token[place], tables.slot_user[slot], waits_for, ready, num_ready)
        links.head[link] = place + 1
    return num_ready


@compiled
def _links(pattern, tables, num_links, is_shared):
    """Return idle links, with space in every queue for all transfers of the program that may wait for their receives."""
    offsets = queue_offsets(pattern, tables, num_links)
    size = offsets[-1]
    return Links(
        np.zeros(num_links), is_shared,
        np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size),
        offsets[:-1].copy(), offsets[:-1].copy(),
    )  # fmt: skip


@compiled
def queue_offsets(pattern, tables, num_links):
    """Return the offsets of the queues of the links if all transfers wait for their receives."""
    lengths = np.zeros(num_links + 1, np.int64)
    if np.any(tables.make_travel == WHEN_POSTED):
        for p in pattern:
            for n in range(tables.make_offsets[p], tables.make_offsets[p + 1]):
                if tables.make_travel[n] == WHEN_POSTED:
                    lengths[tables.slot_link[tables.make_slot[n]] + 1] += 1
    return np.cumsum(lengths)
