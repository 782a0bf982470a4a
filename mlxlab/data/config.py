"""The options of a data set."""

from __future__ import annotations

from dataclasses import dataclass

TRUNCATIONS = ("keep_end", "drop")
TEMPLATES = ("auto", "chat", "raw")


@dataclass(frozen=True)
class DataConfig:
    """Which rows are trained on, and how they become tokens.

    Args:
        path: a folder with train.jsonl and, if there is one, valid.jsonl; a single .jsonl file (no validation); or
            mlxlab://NAME, a set that comes with mlxlab. Relative to the folder where the program was started. A
            sub-folder preference/ or completion/, whichever the method asks for, is preferred to the folder itself.
        max_tokens: longest branch in tokens, >= 2.
        truncation: what happens to rows that are longer. "keep_end": the prompt loses tokens from its start, the same
            ones in both branches of a pair, and plain text loses its end; rows whose prompt alone or response alone
            fills `max_tokens` are left out. "drop": all longer rows are left out. Both are counted and reported.
        template: how a prompt given as a string is encoded. "chat": as one user turn, its response as the assistant's;
            "raw": as it is, with EOS after the response; "auto": "chat" if the tokenizer has a chat template.
    """

    path: str
    max_tokens: int = 2048
    truncation: str = "keep_end"
    template: str = "auto"

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError(f"path must name a folder, a .jsonl file or mlxlab://NAME, got {self.path!r}")
        if not self.max_tokens >= 2:
            raise ValueError(f"max_tokens must be >= 2, got {self.max_tokens}")
        for name, allowed in (("truncation", TRUNCATIONS), ("template", TEMPLATES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
