"""Samples for chat models: the tokens of a chat template around each prefix.

    user         <user> INSTRUCTION prefix <end of turn> <assistant> | suffix
    assistant    <user> REQUEST <end of turn> <assistant> prefix | suffix

The template is rendered once, around a word that stands for the prefix, and what it writes before and after that word
is tokenized. So a sample keeps the ids of its prefix and suffix, and the only difference to the sample without a
template is what a chat adds. `user` is what a user of a chat can do. `assistant`, an answer that has begun, needs an
interface that lets its caller write it, and is closer to what the model was trained on.

Source: transformers, `apply_chat_template` with add_generation_prompt and continue_final_message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_axonn_eval.data.samples import Sample


STYLES = ("user", "assistant")
INSTRUCTION = "Continue the following text word for word. Answer with the continuation only.\n\n"
REQUEST = "Write down the text word for word, from where you begin to its end."
_STANDS_FOR_PREFIX = "HERESTANDSTHEPREFIX"


@dataclass
class ChatTemplate:
    """Text and ids that a chat template writes around a prefix.

    Args:
        style: one of STYLES.
        sha256: of the template, in hex.
        before: text before the prefix.
        after: text after it, up to where the model continues.
        before_ids: its token ids.
        after_ids: likewise.
        bos: id that samples may begin with; the template writes its own, so it is left out there. None: there is none.
        other_ids: samples whose ids are others when the full text is tokenized at once; counted as they come.
    """

    style: str
    sha256: str
    before: str
    after: str
    before_ids: tuple[int, ...]
    after_ids: tuple[int, ...]
    bos: int | None
    other_ids: int = field(default=0, compare=False)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, style: str) -> ChatTemplate:
        """Take the template of a tokenizer.

        Raises:
            ValueError: an unknown style, no template, or one that does not write what it is given.
        """
        if style not in STYLES:
            raise ValueError(f"the style of a chat is {style!r}, but it must be one of {', '.join(STYLES)}.")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer ({getattr(tokenizer, 'name_or_path', '')}) has no chat template: the model is none "
                "for chats, or its template is in another directory."
            )
        as_user = style == "user"
        messages = [{"role": "user", "content": INSTRUCTION + _STANDS_FOR_PREFIX if as_user else REQUEST}]
        if not as_user:
            messages.append({"role": "assistant", "content": _STANDS_FOR_PREFIX})
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=as_user, continue_final_message=not as_user
        )
        if text.count(_STANDS_FOR_PREFIX) != 1:
            raise ValueError(
                f"the chat template writes what it is given {text.count(_STANDS_FOR_PREFIX)} times, not once: {text!r}"
            )
        before, _, after = text.partition(_STANDS_FOR_PREFIX)
        return cls(
            style=style,
            sha256=hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest(),
            before=before,
            after=after,
            before_ids=_ids(tokenizer, before),
            after_ids=_ids(tokenizer, after),
            bos=tokenizer.bos_token_id,
        )

    def around(self, samples: Iterable[Sample], tokenizer: Any) -> Iterator[Sample]:
        """Yield the samples with the template's tokens around their prefixes; ids, suffix and all else stay.

        Raises:
            ValueError: a sample's prefix is nothing but BOS.
        """
        for sample in samples:
            prefix = sample.prefix[1:] if sample.prefix[0] == self.bos else sample.prefix
            if not prefix:
                raise ValueError(
                    f"the prefix of sample {sample.sample_id!r} is BOS alone, which is no text for a chat."
                )
            prompt = (*self.before_ids, *prefix, *self.after_ids)
            text = tokenizer.decode(list(prefix), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self.other_ids += _ids(tokenizer, self.before + text + self.after) != prompt
            yield replace(sample, prefix=prompt)

    def record(self) -> dict[str, Any]:
        """Return the entries for the record of the samples: `style`, `sha256` of the template, `before` and `after` as
        they were written (a template may write today's date), and the number of samples with `other_ids`."""
        return {
            "style": self.style,
            "sha256": self.sha256,
            "before": self.before,
            "after": self.after,
            "other_ids": self.other_ids,
        }


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False) if text else ()
    return tuple(ids)
