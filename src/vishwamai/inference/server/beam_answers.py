"""Beam search for a request: the deltas of its answers, each at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.inference.answers import Delta, TokenLogprobs, Writer
from vishwamai.inference.beams import beam_search
from vishwamai.inference.engine import Engine
from vishwamai.inference.sampling import Sampling
from vishwamai.inference.server.job import Job


async def beam_deltas(engine: Engine, job: Job) -> AsyncGenerator[Delta, None]:
    """The answers of a job whose `length_penalty` is a number.

    Raises:
      DeviceError, ShapeError: a step failed, or the request was at fault.
    """
    options, penalty = job.options, job.length_penalty
    assert options is not None and penalty is not None
    ends = frozenset() if options.ignore_eos else engine.end_tokens
    ends |= set(options.stop_token_ids)
    step = Sampling(max_new_tokens=1, logprobs=2 * options.n, ignore_eos=True)

    async def likeliest(prompts: Sequence[tuple[int, ...]]) -> list[TokenLogprobs]:
        entries: dict[int, TokenLogprobs] = {}
        stream = engine.stream(
            prompts, step, priority=job.priority, deadline=job.deadline, adapter=job.adapter, keep_special=()
        )
        try:
            async for delta in stream:
                if delta.finish in ("error", "cancelled", "deadline"):
                    reason = delta.error or f"a step of the beam search ended by {delta.finish}"
                    raise ShapeError(reason) if delta.declined else DeviceError(reason)
                if delta.logprobs:
                    entries[delta.choice] = delta.logprobs[0]
        finally:
            await stream.aclose()
        return [entries[i] for i in range(len(prompts))]

    for i, prompt in enumerate(job.prompts):
        most = engine.check(prompt, options) - len(prompt)
        for k, beam in enumerate(await beam_search(likeliest, prompt, options.n, most, ends, penalty)):
            text = None if engine.tokenizer is None else engine.tokenizer.stream(keep=job.keep_special)
            writer = Writer(options, engine.end_tokens, text, i * options.n + k)
            count = options.logprobs or 0
            logprobs = [TokenLogprobs(entry.token, entry.logprob, entry.top[:count]) for entry in beam.entries]
            yield writer.add(beam.tokens, () if options.logprobs is None else logprobs, len(beam.tokens), 0)
