"""Chat templates: the text of a conversation, and where each answer begins as generation would begin it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from mlxlab.data.messages import Message, call_names
from mlxlab.errors import DataError

Span = tuple[int, int]  # first and last + 1 character
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations as mlx-lm does for generation.

    Args:
        tokenizer: of transformers, or mlx-lm's wrapper of one (which has defaults of its own for thinking).
        plain: the tokenizer inside the wrapper.
    """

    tokenizer: Any
    plain: Any

    @property
    def exists(self) -> bool:
        wrapped = self.tokenizer is not self.plain and self.tokenizer.has_chat_template
        return bool(self.plain.chat_template) or wrapped

    @property
    def has_marks(self) -> bool:
        """Whether the template says itself which text is generated."""
        template = self.plain.chat_template
        return bool(template) and any(map(_MARK.search, [template] if isinstance(template, str) else template.values()))

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, generation: bool = False) -> str:
        """The text of some turns; with `generation` it goes on to where an answer begins."""
        return self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=generation
        )

    def answer(
        self, prompt: Sequence[Message], responses: Mapping[str, Sequence[Message]], tools: Any, source: str
    ) -> tuple[str, dict[str, str]]:
        """The text that all branches begin with (what generation sees), and the whole text of each branch.

        Raises:
            DataError: the template refuses the row (its own message is quoted), leaves something out, or rewrites the
                prompt once an answer follows.
        """
        try:
            before = self.render(prompt, tools, True) if prompt else ""
            full = {branch: self.render([*prompt, *turns], tools) for branch, turns in responses.items()}
            for branch, turns in responses.items():
                self._check_complete([*prompt, *turns], tools, full[branch], source)
            if prompt and all(text.startswith(before) for text in full.values()):
                return before, full
            # Some templates open a block for the answer (such as thinking) that a finished turn does not have. The
            # prompt then ends where they part; two made-up answers make sure that it holds no character of a real one.
            turn = next(iter(responses.values()))[-1]
            made_up = [self.render([*prompt, {**turn, "content": content}], tools) for content in ("a", "b")]
            if not prompt:
                return os.path.commonprefix([*full.values(), *made_up]), full
            shared = os.path.commonprefix([before, *full.values(), *made_up])
            if len(shared) < len(os.path.commonprefix([before, self.render(prompt, tools)])):
                raise DataError(
                    f"{source}: the chat template writes the turns before the answer differently once the answer is "
                    "there, so training would not see what generation sees; give strings with data.template=raw."
                )
            return shared, full
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise DataError(f"{source}: the chat template refuses this row: {error}") from error

    def answers(
        self, messages: Sequence[Message], numbers: Sequence[int], tools: Any, source: str
    ) -> tuple[str, list[Span]] | None:
        """The text of a conversation and the spans of the turns `numbers` in it, each as generation would write it.

        None if there is no such text: the template writes an earlier answer differently once turns follow it (it takes
        thinking away, for example).
        """
        spans = []
        text = self.answer(messages[:-1], {"": messages[-1:]}, tools, source)[1][""]
        for number in numbers:
            before, through = self.answer(messages[:number], {"": [messages[number]]}, tools, source)
            if not text.startswith(through[""]):
                return None
            spans.append((len(before), len(through[""])))
        return text, spans

    def marked(self, messages: Sequence[Message], tools: Any, source: str) -> tuple[str, list[Span]]:
        """The text of a conversation and the spans between {% generation %} and {% endgeneration %}."""
        text = self.answer(messages[:-1], {"": messages[-1:]}, tools, source)[1][""]
        thinking = {}
        if self.tokenizer is not self.plain:
            thinking = {"enable_thinking": self.tokenizer.has_thinking, "thinking": self.tokenizer.has_thinking}
        (rendered,), (spans,) = render_jinja_template(
            conversations=[[{k: v for k, v in message.items() if v is not None} for message in messages]],
            tools=list(tools) if tools else None,
            chat_template=self.plain.get_chat_template(tools=list(tools) if tools else None),
            return_assistant_tokens_mask=True,
            **{**self.plain.special_tokens_map, **thinking},
        )
        if rendered != text or not any(end > start for start, end in spans):
            raise DataError(
                f"{source}: the generation marks of the chat template cover no text of this row; use "
                "data.supervise=last."
            )
        return text, [(start, end) for start, end in spans if end > start]

    def _check_complete(self, messages: Sequence[Message], tools: Any, text: str, source: str) -> None:
        """Templates ignore what they do not know without a word."""
        for message in messages:
            if message["role"] in ("system", "developer", "user") and message["content"].strip() not in text:
                raise DataError(
                    f"{source}: the chat template leaves out the {message['role']} turn or changes its text; put it "
                    "into another turn."
                )
        if missing := [name for name in call_names(tuple(messages)) if name not in text]:
            raise DataError(
                f"{source}: the chat template does not write tool calls ({missing[0]}); choose a model that has them, "
                "or write them as content."
            )
        names = [tool.get("function", tool).get("name") for tool in tools or ()]
        if missing := [name for name in names if isinstance(name, str) and name not in text]:
            raise DataError(
                f"{source}: the chat template does not show tools ({missing[0]}); choose a model that has them, or "
                "describe them in the system turn."
            )
