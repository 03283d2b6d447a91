"""A request as a cluster sees it, and the messages that its tries are made of."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from twinfire.gateway.backends.request_context import RequestContext
from twinfire.protocol.messages import Submit
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids, unpack_ids


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """What was asked, and what its choices have output so far."""

    prompt: array[int]
    """u32 token ids."""
    packed_prompt: bytes
    sampling: SamplingParams
    priority: int
    cache_salt: str
    context: RequestContext
    outputs: tuple[bytearray, ...]
    """u32 ids per choice; grows as they come."""

    @classmethod
    def of(
        cls,
        prompt: array[int],
        sampling: SamplingParams,
        priority: int,
        cache_salt: str,
        context: RequestContext,
    ) -> ClusterRequest:
        """Return a request without output."""
        outputs = tuple(bytearray() for _ in range(sampling.n))
        return cls(prompt, pack_ids(prompt), sampling, priority, cache_salt, context, outputs)

    def num_output_tokens(self, choices: Sequence[int]) -> int:
        """Most tokens that any of `choices` has output."""
        return max(len(self.outputs[choice]) for choice in choices) // 4

    def tokens_so_far(self, choices: Sequence[int]) -> array[int]:
        """Return what has to be computed before anything new: the prompt, and one choice's output.

        Several choices go on together only while none has output.
        """
        if len(choices) > 1 or not self.outputs[choices[0]]:
            return self.prompt
        return self.prompt + unpack_ids(bytes(self.outputs[choices[0]]))

    def submit(
        self,
        request_id: int,
        attempt: int,
        choices: Sequence[int],
        timeout_s: float | None,
        *,
        resumes: bool,
    ) -> Submit:
        """Return a try's message; `resumes` when the consumer has the prompt's end already."""
        sampling = self.sampling
        if resumes and sampling.prompt_logprobs >= 0:
            # They have been delivered, and to ask again would keep caches from being read.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        has_output = any(self.outputs[choice] for choice in choices)
        is_whole = len(choices) == sampling.n and not has_output
        return Submit(
            request_id=request_id,
            prompt=self.packed_prompt,
            sampling=sampling,
            priority=self.priority,
            cache_salt=self.cache_salt,
            attempt=attempt,
            choices=() if is_whole else tuple(choices),
            outputs=tuple(bytes(self.outputs[choice]) for choice in choices) if has_output else (),
            timeout_s=timeout_s,
            prediction=self.context.prediction,
        )
