"""The kinds of failure a user can meet; each says what happened, why it matters and how to mend it.

ConfigError: yours to mend (exit code 2). RunFailed: the run cannot go on (exit code 3); RewardUnavailable: because a service
that scores stays away (exit code 4). ProtocolError: an executor reported something that cannot have happened, which is a bug
and never a user's mistake.
"""

from __future__ import annotations


class DigenError(Exception):
    """Base of all errors that DigenRL raises on purpose: three sentences, so that nobody has to read a traceback."""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        super().__init__(what, why, fix)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments: the default would rebuild with three positional ones and fail on the way out of a worker.
        return (_rebuild, (type(self), self.what, self.why, self.fix))

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class ConfigError(DigenError):
    """A recipe, an input file or a command line that cannot work; raised before any worker starts. Exit code 2."""


class RunFailed(DigenError):
    """The run stopped and cannot be continued as it is: three voided steps in a row, a reward that raises. Exit code 3."""


class WorkerError(RunFailed):
    """A machine or a process failed, not the recipe."""


class RewardUnavailable(RunFailed):
    """A service that scores does not answer, or not as agreed, within its deadline. Exit code 4: try again when it is back."""


class ProtocolError(DigenError):
    """An event that the schedule does not allow. The scheduler's state is unchanged when this is raised."""


def _rebuild(kind: type[DigenError], what: str, why: str, fix: str) -> DigenError:
    return kind(what, why=why, fix=fix)
