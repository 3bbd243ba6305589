"""What the diagnosis says: a finding, and the kinds that there are. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

ACTIONS = ("off", "note", "warn", "skip", "rollback", "stop")  # from the mildest to the gravest


@dataclass(frozen=True)
class Finding:
    kind: str
    step: int  # updates offered when it was found
    message: str  # with the numbers
    cause: str
    advice: str
    action: str  # one of ACTIONS, but not "off"
    since: int | None = None  # the step at which it began, if that was earlier

    def record(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if not (k == "since" and v is None)}

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}: {self.message} Likely: {self.cause} Do: {self.advice}"


def gravest(findings: Iterable[Finding]) -> str:
    """The action to take; "" if there is nothing to do."""
    return max((f.action for f in findings), key=ACTIONS.index, default="")
