"""What happened to rows on their way to tokens, as counts, places and sentences."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Iterable, Mapping

SHOWN = 5  # places, and refused rows, in one message
_KEPT = 50  # different reasons, and refused rows, that are remembered


@dataclass
class Group:
    """Some rows: how many, and where the first ones are."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        self.count += 1
        if len(self.places) < SHOWN:
            self.places.append(place)

    def named(self) -> str:
        return f"({', '.join(self.places)}{', ...' if self.count > len(self.places) else ''})"


@dataclass
class Facts:
    """Of the rows of one split of one source.

    Args:
        rows: all, without blank lines.
        formats: name of a format -> rows of it.
        unused: key of another format -> rows that have it as well.
        cut: shortened to `max_tokens`; `cut_learned` of them lost tokens that were to be learned.
        left_out: too long for the policy.
        split: became one example per answer.
        refused: cannot be used; `messages` says why for the first ones, `reasons` counts equal ones.
    """

    rows: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    cut: Group = field(default_factory=Group)
    cut_learned: Group = field(default_factory=Group)
    left_out: Group = field(default_factory=Group)
    split: Group = field(default_factory=Group)
    refused: Group = field(default_factory=Group)
    messages: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)

    def refuse(self, place: str, message: str) -> None:
        self.refused.add(place)
        if len(self.messages) < _KEPT:
            self.messages.append(message)
        reason = message.partition(": ")[2]  # without the place
        if len(self.reasons) >= _KEPT and reason not in self.reasons:
            reason = "other reasons"
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def found(self, format: str, unused: Iterable[str]) -> None:
        self.formats[format] = self.formats.get(format, 0) + 1
        for key in unused:
            self.unused[key] = self.unused.get(key, 0) + 1

    def sentences(self, max_tokens: int) -> list[str]:
        """What a user has to know."""
        result = []
        if len(self.formats) > 1:
            mix = ", ".join(f"{count} {name}" for name, count in sorted(self.formats.items(), key=lambda i: -i[1]))
            result.append(f"{self.rows} rows of {len(self.formats)} formats: {mix}")
        for key, count in self.unused.items():
            result.append(f"{count} of {self.rows} rows also have {key}, which is not used")
        for group, what in (
            (self.split, "became one example per answer: the chat template writes earlier answers differently"),
            (self.cut, f"cut to data.max_tokens={max_tokens}"),
            (self.cut_learned, "lost tokens that were to be learned"),
            (self.left_out, f"left out: too long for data.max_tokens={max_tokens}"),
            (self.refused, "left out: they cannot be used"),
        ):
            if group.count:
                result.append(f"{group.count} of {self.rows} rows {what} {group.named()}")
        return result

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Facts:
        return cls(**{key: Group(**v) if isinstance(v, dict) and "places" in v else v for key, v in values.items()})
