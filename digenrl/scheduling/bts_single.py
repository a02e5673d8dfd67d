"""Exact bubble-time search for one replica and updates in order of arrival: the same search as bts.py on plain integers.

One replica is the common case and identities do not matter there, so a position is seven numbers. A test holds this
against the general search.
"""

from __future__ import annotations

from digenrl.scheduling.step_model import GENERATING, IDLE, SCORING, Position, StepCosts

_State = tuple[int, int, int, int, int, int]
"""(ticks until the replica is free, its task, scoring queue, pending, left, trainer in generation mode)."""

_NEVER = 1 << 62


class SingleReplicaSearch:
    """See bts.ExactSearch."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._memory: dict[_State, int] = {}

    @property
    def visited(self) -> int:
        """Bubbles searched so far."""
        return len(self._memory)

    def finishes(self, position: Position) -> tuple[int, int]:
        """Ticks to the end of the step when the bubble is skipped, and when it is used; the best choices follow either.

        A branch that cannot win is not searched, and given by its lower bound.
        """
        state = (
            position.remaining[0] if position.task[0] != IDLE else 0,
            position.task[0],
            len(position.queue),
            position.pending,
            position.left,
            int(position.generating),
        )
        skip_bound, tag_bound = self._bounds(state)
        if tag_bound < skip_bound:
            tag = self._branch(state, True)
            # Skipping wins a tie, so it has to be searched unless it is certain to be worse.
            return (self._branch(state, False) if skip_bound <= tag else skip_bound), tag
        skip = self._branch(state, False)
        return skip, (self._branch(state, True) if tag_bound < skip else tag_bound)

    def _best(self, state: _State) -> int:
        known = self._memory.get(state)
        if known is not None:
            return known
        skip_bound, tag_bound = self._bounds(state)
        # The more promising branch first; the other one only if its bound leaves it a chance.
        best = self._branch(state, tag_bound < skip_bound)
        if max(skip_bound, tag_bound) < best:
            best = min(best, self._branch(state, tag_bound >= skip_bound))
        self._memory[state] = best
        return best

    def _bounds(self, state: _State) -> tuple[int, int]:
        """Lower bounds of skipping and of TAG: bounds.lower_bound in closed form; without anything pending TAG never ends."""
        free, task, queue, pending, left, generating = state
        costs = self._costs
        g, tag, score = costs.generate[0], costs.tag, 0 if costs.score is None else costs.score[0]
        to_score = 0 if costs.score is None else (queue + (task == GENERATING) + pending) * score
        pool = free + pending * g + to_score + costs.update
        first = free if task == SCORING else free + score + (0 if queue or task == GENERATING else g)
        updates = left * costs.update
        skip = max(pool, first + updates + (costs.switch_out if generating else 0))
        if not pending:
            return skip, _NEVER
        trainer = updates + costs.switch_out + (0 if generating else costs.switch_in)
        tags = min(max(1, (pool - trainer) // (g + tag)), pending)
        best = max(pool - tags * g, trainer + tags * tag)
        if tags < pending:
            best = min(best, max(pool - (tags + 1) * g, trainer + (tags + 1) * tag))
        # Skipping now and generating later: the trainer's time begins at the first micro-batch that it can update.
        later = trainer + first
        tags = min(max(1, (pool - later) // (g + tag)), pending)
        skip = min(skip, max(pool - tags * g, later + tags * tag))
        if tags < pending:
            skip = min(skip, max(pool - (tags + 1) * g, later + (tags + 1) * tag))
        return skip, best

    def _branch(self, state: _State, tag: bool) -> int:
        """Ticks to the end after one choice: bts.to_next_bubble, then the best from there."""
        free, task, queue, pending, left, generating = state
        costs = self._costs
        g, update, inline = costs.generate[0], costs.update, costs.score is None
        score = 0 if costs.score is None else costs.score[0]
        elapsed = ready = busy = 0
        updating, skipping = False, not tag
        if tag:
            pending -= 1
            busy = costs.tag + (0 if generating else costs.switch_in)
            generating = 1
        while True:
            step = free if task and (not busy or free < busy) else busy
            elapsed += step
            if task:
                free -= step
                if not free:
                    if task == SCORING or (inline and task == GENERATING):
                        ready += 1
                    elif task == GENERATING:
                        queue += 1
                    task = IDLE
            if busy:
                busy -= step
                if not busy:
                    if updating:
                        left -= 1
                        if not left:
                            return elapsed
                        updating = False
                    elif inline:
                        ready += 1
                    else:
                        queue += 1
            if not task:
                if queue:
                    queue -= 1
                    task, free = SCORING, score
                elif pending:
                    pending -= 1
                    task, free = GENERATING, g
            if busy:
                continue
            if ready:
                ready -= 1
                busy = update + (costs.switch_out if generating else 0)
                generating, updating, skipping = 0, True, False
            elif pending and not skipping:
                return elapsed + self._best((free, task, queue, pending, left, generating))
