"""Errors that the user can fix: one line on stderr, no traceback, exit code 2."""

EXIT_FINISHED = 0  # finished, early-stopped, or nothing left to do
EXIT_USER_ERROR = 2  # the config or the data is wrong
EXIT_DIVERGED = 70  # stopped by the watch
EXIT_STOPPED = 75  # stopped on request, checkpoint written: run the same command again
EXIT_HUNG = 76  # a rank made no progress: ended by the watchdog; run the same command again


class UserError(Exception):
    """The user's config, data or files are wrong. The message is one clear line a fault (several lines: several faults).

    `alike`: every rank of a node finds the same, so one of them tells it. `agreed` (set by distributed.raise_together): every rank
    of the run has this very error.
    """

    agreed = False

    def __init__(self, message: str, alike: bool = False) -> None:
        super().__init__(message)
        self.alike = alike
