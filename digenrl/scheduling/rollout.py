"""One complete look ahead: the rest of a step when the trainer generates n micro-batches in a given way.

The same rules as step_model.py, written for speed (plain integers, a heap of the replicas' next completions), because the
planner asks for a few of these at every bubble. A test holds the two against each other.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from digenrl.scheduling.step_model import GENERATING, IDLE, SCORING, Position, StepCosts


class Outcome(NamedTuple):
    """How a look ahead ends; ticks from now."""

    finish: int
    """When the last update ends."""
    free: list[int]
    """From when on each replica has nothing left to do in this step."""


def roll_out(  # noqa: PLR0915 - one loop over local variables: the planner asks for it many times a step
    position: Position, costs: StepCosts, tags: int, *, sticky: bool, by_index: bool = False, after_step: bool = False
) -> Outcome:
    """Follow the schedule to the end of the step.

    tags: micro-batches that the trainer generates; until then they are reserved, and replicas leave them (and what would be
    finished earlier elsewhere). sticky: back to back before any update; else one at a time, when nothing can be updated.
    """
    generate, score = costs.generate, costs.score
    update, tag_ticks = costs.update, costs.tag
    replicas = len(generate)
    task, item = position.task[:], position.item[:]
    ends = [remaining if t != IDLE else 0 for remaining, t in zip(position.remaining, task, strict=True)]
    free = ends[:]
    heap = [(end, i) for i, (end, t) in enumerate(zip(ends, task, strict=True)) if t != IDLE]
    heapify(heap)
    idle = [i for i, t in enumerate(task) if t == IDLE]
    queue, pending, left = position.queue[:], position.pending, position.left
    claimed, following, generating = position.claimed, position.following, position.generating
    scored = set(position.scored) if by_index else set()
    ready = len(position.scored)
    now = busy_until = 0
    busy = 0  # 0 free, 1 update, 2 TAG
    tag_item = -1
    while True:
        # The trainer first looks around at the present instant, then time moves on.
        if not busy:
            can_update = (following in scored) if by_index else ready > 0
            if after_step and ready < left:
                can_update = False
            if tags and pending and (sticky or not can_update):
                busy, busy_until = 2, now + tag_ticks + (0 if generating else costs.switch_in)
                generating = True
                tag_item, claimed = claimed, claimed + 1
                pending -= 1
                tags -= 1
            elif can_update:
                busy, busy_until = 1, now + update + (costs.switch_out if generating else 0)
                generating = False
                ready -= 1
                if by_index:
                    scored.remove(following)
                    following += 1
        assert busy or heap, "something is always under way until the step ends"
        now = heap[0][0] if heap and (not busy or heap[0][0] <= busy_until) else busy_until
        while heap and heap[0][0] == now:
            i = heappop(heap)[1]
            current = task[i]
            if current == SCORING or (current == GENERATING and score is None):
                ready += 1
                if by_index:
                    scored.add(item[i])
            elif current == GENERATING:
                queue.append(item[i])
            task[i] = IDLE
            free[i] = now
            idle.append(i)
        if busy and busy_until == now:
            if busy == 1:
                left -= 1
                if not left:
                    return Outcome(now, free)
            elif score is None:
                ready += 1
                if by_index:
                    scored.add(tag_item)
            else:
                queue.append(tag_item)
            busy = 0
        if idle and (queue or pending > tags):
            if len(idle) > 1:
                idle.sort()
            stay = []
            for position_in_idle, i in enumerate(idle):
                if queue:
                    item[i] = queue.pop(0)
                    task[i] = SCORING
                    ends[i] = now + score[i]  # type: ignore[index]
                elif pending > tags and (replicas == 1 or _claims(i, now, pending - tags, task, ends, generate)):
                    item[i] = claimed
                    claimed += 1
                    pending -= 1
                    task[i] = GENERATING
                    ends[i] = now + generate[i]
                else:
                    stay.append(i)
                    if pending <= tags and not queue:
                        stay.extend(idle[position_in_idle + 1 :])
                        break
                    continue
                heappush(heap, (ends[i], i))
            idle = stay


def _claims(replica: int, now: int, jobs: int, task: list[int], ends: list[int], generate: tuple[int, ...]) -> bool:
    """step_model.may_claim on absolute times."""
    own = generate[replica]
    latest = now + own
    before = 0
    for other, current in enumerate(task):
        if other != replica:
            spare = own if current == IDLE else latest - ends[other]
            if spare > 0:
                before += (spare - (other > replica)) // generate[other]
                if before >= jobs:
                    return False
    return True
