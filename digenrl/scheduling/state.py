"""What the scheduler knows: the stage of every micro-batch, the queues, and what each worker does.

Every change of a micro-batch's stage is a row of ``TRANSITIONS``; anything else is a ProtocolError. Invariant: a micro-batch
is accumulated exactly once, and only into the step that it belongs to. At most two steps are open: the one in training and,
where stale generation is allowed, the next.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from heapq import heappop, heappush

from digenrl.errors import ProtocolError
from digenrl.ids import MicroBatchId, WorkerId
from digenrl.scheduling.commands import Accumulate, Generate, Score, WorkerCommand
from digenrl.scheduling.settings import SchedulerSettings


class Stage(StrEnum):
    """Where a micro-batch is on its way from prompts to gradient."""

    PENDING = "pending"
    GENERATING = "generating"
    SCORING_QUEUE = "scoring_queue"
    SCORING = "scoring"
    UPDATE_QUEUE = "update_queue"
    UPDATING = "updating"
    ACCUMULATED = "accumulated"


class Move(StrEnum):
    """What happens to a micro-batch."""

    START = "start"
    FINISH = "finish"
    FINISH_SCORED = "finish_scored"
    """Generation that includes scoring."""
    FAIL = "fail"
    LOSE = "lose"
    """The trajectory is gone."""


TRANSITIONS: dict[tuple[Stage, type | None, Move], Stage] = {
    (Stage.PENDING, Generate, Move.START): Stage.GENERATING,
    (Stage.GENERATING, Generate, Move.FINISH): Stage.SCORING_QUEUE,
    (Stage.GENERATING, Generate, Move.FINISH_SCORED): Stage.UPDATE_QUEUE,
    (Stage.GENERATING, Generate, Move.FAIL): Stage.PENDING,
    (Stage.SCORING_QUEUE, Score, Move.START): Stage.SCORING,
    (Stage.SCORING, Score, Move.FINISH): Stage.UPDATE_QUEUE,
    (Stage.SCORING, Score, Move.FAIL): Stage.SCORING_QUEUE,
    (Stage.UPDATE_QUEUE, Accumulate, Move.START): Stage.UPDATING,
    (Stage.UPDATING, Accumulate, Move.FINISH): Stage.ACCUMULATED,
    (Stage.UPDATING, Accumulate, Move.FAIL): Stage.UPDATE_QUEUE,
    (Stage.SCORING_QUEUE, None, Move.LOSE): Stage.PENDING,
    (Stage.UPDATE_QUEUE, None, Move.LOSE): Stage.PENDING,
}


NEEDS_NO_PROMPTS = (Stage.UPDATING, Stage.ACCUMULATED)
"""Nothing that starts after these needs the encoded prompts."""

OVERDUE_SHARE = 0.2
"""Of its age, what an overdue command is taken to need still."""


class Worker:
    """One worker as the scheduler sees it."""

    __slots__ = ("alive", "expected_us", "index", "name", "policy_version", "running", "started_us")

    def __init__(self, name: WorkerId, index: int, policy_version: int = 0) -> None:
        self.name = name
        self.index = index
        self.policy_version = policy_version
        """Version whose weights it holds; -1 for a worker that has just joined."""
        self.running: WorkerCommand | None = None
        self.started_us = 0
        self.expected_us = 0
        """When it should be done, as far as durations are known."""
        self.alive = True

    def remaining_us(self, now_us: int) -> int:
        """Microseconds that its command still needs; one that is overdue is taken to need a share of its age once more."""
        if now_us < self.expected_us:
            return self.expected_us - now_us
        return max(1, int(OVERDUE_SHARE * (now_us - self.started_us)))


class StepState:
    """The micro-batches of one open step."""

    def __init__(self, step: int, settings: SchedulerSettings) -> None:
        count = settings.micro_batches
        self.step = step
        self.encoded = False
        self.encoding = False
        """Whether a worker is at it, or has done it."""
        self.encoded_before = False
        """Whether the encoded prompts were there, and got lost."""
        self.stages: list[Stage] = [Stage.PENDING] * count
        self.versions: list[int] = [-1] * count
        """Policy version of each trajectory, fixed when it is claimed."""
        self.attempts: list[int] = [0] * count
        """Failures of each micro-batch so far."""
        self.stale_used = 0
        """Micro-batches that are, or are being, generated with the weights of the step before."""
        self.scored = 0
        """Micro-batches that have their rewards."""
        self.accumulated = 0
        self.update = 0
        """Which of the step's optimizer steps is being accumulated for."""
        self.tags = 0
        """Micro-batches that the trainer has generated."""
        self.reserved = 0
        """Pending micro-batches that the plan leaves to the trainer."""
        self.sticky = False
        """Whether the plan generates them back to back."""
        self.planned = False
        self.bubble_closed = False
        """Whether the present bubble was decided to be skipped."""
        self.scoring_queue: deque[int] = deque()
        """SQ: generated, not yet scored; oldest first."""
        self.update_queue: deque[int] = deque()
        """UQ: scored, not yet accumulated; in order of arrival."""
        self._settings = settings
        self.stale_claims: deque[int] = deque(settings.stale_claims if step == settings.first_version else ())
        """Pending ones that an interrupted run had claimed with the weights of the step before, and that wait for a worker
        which holds those; ascending."""
        claimed = set(self.stale_claims)
        self._available = [index for index in range(count) if index not in claimed]
        self._following = 0
        self.doomed: set[int] = set()
        """Micro-batches whose trajectory was lost while they were scored or accumulated."""

    @property
    def pending(self) -> int:
        """Micro-batches that nobody has claimed."""
        return len(self._available) + len(self.stale_claims)

    @property
    def available(self) -> int:
        """Pending micro-batches that are not kept for the holders of older weights."""
        return len(self._available)

    @property
    def needs_encoding(self) -> bool:
        """Whether its prompts have to be encoded, for the first time or again, and nobody is at it."""
        return not self.encoding and any(stage not in NEEDS_NO_PROMPTS for stage in self.stages)

    def lowest_available(self) -> int:
        """The micro-batch to claim next."""
        return self._available[0]

    def release_stale_claims(self) -> None:
        """Nobody can generate what is left of them any more: anybody may, with the weights of this step."""
        while self.stale_claims:
            heappush(self._available, self.stale_claims.popleft())

    def stage_of(self, index: int) -> Stage | None:
        """Where a micro-batch is; None for an index that the step does not have."""
        return self.stages[index] if 0 <= index < len(self.stages) else None

    def stale(self, index: int) -> bool:
        """Whether a micro-batch was claimed with the weights of the step before."""
        return 0 <= self.versions[index] < self.step

    def target(self, index: int, command: type | None, move: Move) -> Stage:
        """The stage that a move leads to. Raises ProtocolError when the table has no such move."""
        stage = self.stages[index] if 0 <= index < len(self.stages) else None
        target = TRANSITIONS.get((stage, command, move)) if stage is not None else None
        if target is None:
            raise illegal(MicroBatchId(self.step, index), command, move, stage)
        return target

    def move(self, index: int, command: type | None, move: Move) -> None:
        """Change a stage and keep queues and counts in step with it."""
        target = self.target(index, command, move)
        stage = self.stages[index]
        self.stages[index] = target
        if stage is Stage.PENDING:
            self._take(index)
        elif stage is Stage.SCORING_QUEUE:
            self.scoring_queue.remove(index)
        elif stage is Stage.UPDATE_QUEUE:
            self.update_queue.remove(index)
        if target is Stage.PENDING:
            if self.stale(index):
                self.stale_used -= 1
            self.scored -= stage is Stage.UPDATE_QUEUE
            self.versions[index] = -1
            heappush(self._available, index)
        elif target is Stage.SCORING_QUEUE:
            # A failed scoring goes to the front: it is the oldest.
            self.scoring_queue.appendleft(index) if move is Move.FAIL else self.scoring_queue.append(index)
        elif target is Stage.UPDATE_QUEUE and move is Move.FAIL:
            self.update_queue.appendleft(index)  # it has its rewards already, and was next
        elif target is Stage.UPDATE_QUEUE:
            self.scored += 1
            self.update_queue.append(index)
        elif target is Stage.ACCUMULATED:
            self.accumulated += 1

    def _take(self, index: int) -> None:
        """Remove a claimed micro-batch from those that wait for it."""
        stale = bool(self.stale_claims) and self.stale_claims[0] == index
        taken = self.stale_claims.popleft() if stale else heappop(self._available)
        assert taken == index, "the lowest pending micro-batch is claimed first"

    def updatable(self) -> int | None:
        """The micro-batch to accumulate next, or None while the order or ``update_after`` forbids all of them."""
        settings = self._settings
        if settings.update_after == "step" and self.scored < settings.micro_batches:
            return None
        if settings.update_order == "index":
            while self._following < settings.micro_batches and self.stages[self._following] is Stage.ACCUMULATED:
                self._following += 1
            following = self._following
            ready = following < self.update_end and self.stages[following] is Stage.UPDATE_QUEUE
            return following if ready else None
        if settings.updates_per_rollout == 1:
            return self.update_queue[0] if self.update_queue else None
        low, high = settings.update_range(self.update)
        return next((index for index in self.update_queue if low <= index < high), None)

    @property
    def update_end(self) -> int:
        """Micro-batches that are accumulated when the present optimizer step is due."""
        return self._settings.update_range(self.update)[1]


def illegal(micro_batch: MicroBatchId, command: type | None, move: Move, stage: Stage | None) -> ProtocolError:
    """The error for a move that the table does not have."""
    what = f"{command.__name__} of" if command is not None else "The trajectory of"
    verb = {Move.START: "start", Move.FAIL: "fail", Move.LOSE: "be lost"}.get(move, "finish")
    return ProtocolError(
        f"{what} micro-batch {micro_batch} cannot {verb}: it is {stage or 'not of an open step'}.",
        why="Each micro-batch is generated, scored and accumulated exactly once.",
        fix="This is a bug in the executor; please report it with the run's trace.jsonl.",
    )
