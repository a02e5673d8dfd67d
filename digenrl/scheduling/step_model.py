"""The rest of one step as a deterministic model: what the searches of TAG look ahead with.

Times are integer ticks and relative: 0 is now. The model follows the schedule's own rules (scheduler.py) with known
durations: completions first, then replicas in order of index, then the trainer. Micro-batches are known by the order in
which they were claimed, which is their index, since replicas and TAG both take the lowest pending one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

IDLE, GENERATING, SCORING, OTHER = 0, 1, 2, 3
"""What a replica does; OTHER is work that is not of this step (a stale trajectory, a weight sync)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Durations in ticks."""

    generate: tuple[int, ...]
    """Of one micro-batch, by replica."""
    score: tuple[int, ...] | None
    """Of one micro-batch on each replica; None where scoring is part of generation."""
    update: int
    tag: int
    """Generation of one micro-batch by the trainer."""
    switch_in: int = 0
    """Trainer from training to generating."""
    switch_out: int = 0
    """Trainer back to training."""
    optimizer: int = 0
    sync: int = 0


@dataclass(slots=True, kw_only=True)
class Position:
    """Where a step stands at an instant at which the trainer is free."""

    pending: int
    """Micro-batches that nobody has claimed."""
    left: int
    """Micro-batches that are not accumulated yet."""
    remaining: list[int]
    """Ticks until each replica is free; meaningless where it is idle."""
    task: list[int]
    """IDLE, GENERATING, SCORING or OTHER, by replica."""
    item: list[int]
    """Claim number of the micro-batch that a replica works on."""
    queue: list[int] = field(default_factory=list)
    """Claim numbers of generated micro-batches that wait for scoring, oldest first."""
    scored: list[int] = field(default_factory=list)
    """Claim numbers of scored micro-batches that are not accumulated."""
    claimed: int = 0
    """Claim number of the next micro-batch."""
    following: int = 0
    """Lowest claim number that is not accumulated (update order by index)."""
    generating: bool = False
    """Whether the trainer is in generation mode."""

    def copy(self) -> Position:
        """An independent copy."""
        return Position(
            pending=self.pending,
            left=self.left,
            remaining=self.remaining[:],
            task=self.task[:],
            item=self.item[:],
            queue=self.queue[:],
            scored=self.scored[:],
            claimed=self.claimed,
            following=self.following,
            generating=self.generating,
        )


def start_of_step(costs: StepCosts, micro_batches: int) -> Position:
    """A whole step lies ahead, and all replicas are free; call ``Model.settle`` before asking the trainer."""
    replicas = len(costs.generate)
    return Position(
        pending=micro_batches, left=micro_batches, remaining=[0] * replicas, task=[IDLE] * replicas, item=[0] * replicas
    )


class Model:
    """Moves positions forward. ``by_index``: updates strictly in order of claim; ``after_step``: none before all is scored."""

    def __init__(self, costs: StepCosts, *, by_index: bool = False, after_step: bool = False) -> None:
        self.costs = costs
        self.by_index = by_index
        self.after_step = after_step

    def updatable(self, position: Position) -> bool:
        """Whether the trainer could start an update now."""
        if self.after_step and len(position.scored) < position.left:
            return False
        if self.by_index:
            return position.following in position.scored
        return bool(position.scored)

    def settle(self, position: Position, reserve: int | None = None) -> None:
        """Give every idle replica its next task. With a ``reserve`` (micro-batches left to the trainer) replicas also decline
        what would be finished earlier elsewhere; None: they take whatever is pending, as in the paper.
        """
        costs, task = self.costs, position.task
        for replica, current in enumerate(task):
            if current != IDLE:
                continue
            if position.queue:
                assert costs.score is not None, "nothing waits for scoring where scoring is part of generation"
                position.item[replica] = position.queue.pop(0)
                position.remaining[replica] = costs.score[replica]
                task[replica] = SCORING
            elif position.pending and (reserve is None or may_claim(replica, position, costs.generate, reserve)):
                position.item[replica] = position.claimed
                position.remaining[replica] = costs.generate[replica]
                task[replica] = GENERATING
                position.claimed += 1
                position.pending -= 1

    def advance(self, position: Position, ticks: int) -> None:
        """Let ``ticks`` pass, at most until the first replica is done, and take in what it has finished."""
        inline = self.costs.score is None
        for replica, current in enumerate(position.task):
            if current == IDLE:
                continue
            position.remaining[replica] -= ticks
            if position.remaining[replica] > 0:
                continue
            position.task[replica] = IDLE
            if current == SCORING or (current == GENERATING and inline):
                position.scored.append(position.item[replica])
            elif current == GENERATING:
                position.queue.append(position.item[replica])

    def take_update(self, position: Position) -> int:
        """Start the next update: ticks that it takes, with the switch back to training."""
        if self.by_index:
            position.scored.remove(position.following)
            position.following += 1
        else:
            position.scored.pop(0)
        ticks = self.costs.update + (self.costs.switch_out if position.generating else 0)
        position.generating = False
        return ticks

    def take_tag(self, position: Position) -> tuple[int, int]:
        """Start a TAG: ticks that it takes, with the switch to generation, and its claim number."""
        item, position.claimed = position.claimed, position.claimed + 1
        position.pending -= 1
        ticks = self.costs.tag + (0 if position.generating else self.costs.switch_in)
        position.generating = True
        return ticks, item

    def end_tag(self, position: Position, item: int) -> None:
        """A TAG is done: its micro-batch waits for a replica to score it, or is ready where scoring is part of generation."""
        (position.scored if self.costs.score is None else position.queue).append(item)


def may_claim(replica: int, position: Position, generate: Sequence[int], reserve: int) -> bool:
    """Whether a free replica should take a pending micro-batch.

    It should when earliest-completion list scheduling of the micro-batches that are not reserved for the trainer gives it its
    first one now; a slow replica so leaves the last ones to a faster one that finishes them earlier.
    """
    own = generate[replica]
    jobs = position.pending - reserve
    if jobs <= 0:
        return False
    before = 0
    for other, current in enumerate(position.task):
        if other == replica:
            continue
        spare = own if current == IDLE else own - position.remaining[other]
        if spare > 0:
            # Completions of the other one strictly before this one's, and at the same instant where its index is lower.
            before += (spare - (other > replica)) // generate[other]
            if before >= jobs:
                return False
    return True
