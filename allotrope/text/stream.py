"""The text of one sequence while it grows: incremental decoding and stop strings together.

Owns what may leave and what must wait. It must not know where ids come from nor how text is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from allotrope.request import SamplingParams
from allotrope.text.stop_strings import StopMatcher
from allotrope.text.tokenizer import Tokenizer


class TextStream:
    """Text of one sequence, given out as soon as it is certain. A push costs the same however long the text is.

    However the ids are portioned, all pushes together give `tokenizer.decode` of them, cut at the first stop string.
    `stopped_by`: the stop string that was found, if any; nothing leaves after that. `used_tokens`: how many of the
    pushed ids were needed, up to the one that completed the stop string (all, if none was found).

    tokenizer: decodes. params: `stop`, `include_stop_str_in_output`, `min_tokens` (stop strings completed by an earlier
    token pass) and `skip_special_tokens` are honoured. continues_text: True keeps the space that a sentencepiece
    tokenizer puts before a text's first word, which belongs there when the text goes on from a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, continues_text: bool = False) -> None:
        self.stopped_by: str | None = None
        self.used_tokens = 0
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, continues_text=continues_text
        )
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Take the next ids; returns the text that is now certain, which may be "".

        final: no more ids will come, so that held-back text and unfinished characters (as U+FFFD) are given out too.
        """
        if self._matcher is None:
            self.used_tokens += len(token_ids)
            text = self._detokenizer.push(token_ids)
            return text + self._detokenizer.flush() if final else text
        parts = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self.used_tokens += 1
            parts.append(self._certain(self._matcher, self._detokenizer.push((token_id,))))
        if final and self.stopped_by is None:
            parts.append(self._certain(self._matcher, self._detokenizer.flush()))
            parts.append(self._held)
            self._held = ""
        return "".join(parts)

    def _certain(self, matcher: StopMatcher, text: str) -> str:
        found = matcher.feed(text, armed=self.used_tokens >= self._min_tokens)
        whole = self._held + text
        if found is not None:
            self.stopped_by, read = found
            end = len(self._held) + read
            self._held = ""
            return whole[: end if self._include_stop else end - len(self.stopped_by)]
        # A stop string that is to be shown need not be waited for.
        cut = len(whole) - (0 if self._include_stop else matcher.pending)
        self._held = whole[cut:]
        return whole[:cut]
