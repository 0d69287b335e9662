"""Text of one growing sequence: incremental detokenization with stop strings.

Owns the text that waits for a possible stop string. It must not know the engine or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from allotrope.request import SamplingParams
from allotrope.text.stop_strings import StopMatcher
from allotrope.text.tokenizer import Tokenizer


class TextStream:
    """Turns the ids of one sequence into text, and returns text as soon as it is final.

    All pushes together return `tokenizer.decode` of the ids, cut at the first stop string, for any portions of ids. The
    cost of a push does not grow with the text. `stopped_by`: the stop string that was found, if any; later pushes
    return "". `used_tokens`: number of ids up to the one that completed the stop string (of all ids, if none did).
    `characters`: of the ids so far, whether they are final or not; an incomplete one does not count yet.

    `params`: the stream reads `stop`, `include_stop_str_in_output`, `min_tokens` (stop strings completed by earlier
    tokens are ignored) and `skip_special_tokens`. `continues_text`: keep the space that a sentencepiece tokenizer puts
    before the first word, because the text continues a prompt. `textless`: ids that add no text, whatever theirs is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        continues_text: bool = False,
        textless: frozenset[int] = frozenset(),
    ) -> None:
        self.stopped_by: str | None = None
        self.used_tokens = 0
        self.characters = 0
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, continues_text=continues_text
        )
        self._textless = textless
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Add the next ids. Returns the text that is final now, which may be "".

        `final`: these are the last ids, so held text and incomplete characters (as U+FFFD) are returned too.
        """
        if self._matcher is None:
            self.used_tokens += len(token_ids)
            text = self._decoded(token_ids)
            return text + self._detokenizer.flush() if final else text
        parts = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self.used_tokens += 1
            parts.append(self._match(self._matcher, self._decoded((token_id,))))
        if final and self.stopped_by is None:
            parts.append(self._match(self._matcher, self._detokenizer.flush()))
            parts.append(self._held)
            self._held = ""
        return "".join(parts)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        text = self._detokenizer.push(
            [i for i in token_ids if i not in self._textless] if self._textless else token_ids
        )
        self.characters += len(text)
        return text

    def _match(self, matcher: StopMatcher, text: str) -> str:
        """Append `text` to the held text. Returns the part that is final."""
        match = matcher.feed(text, armed=self.used_tokens >= self._min_tokens)
        whole = self._held + text
        if match is not None:
            self.stopped_by, read = match
            end = len(self._held) + read
            self._held = ""
            return whole[: end if self._include_stop else end - len(self.stopped_by)]
        # If the output includes the stop string, no text has to wait for it.
        cut = len(whole) - (0 if self._include_stop else matcher.pending)
        self._held = whole[cut:]
        return whole[:cut]
