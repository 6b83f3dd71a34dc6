"""Prefill and decode: prompts in microbatches through the pipeline stages, tokens back from the last one.

Every rank runs the same loop over the same microbatches in the same order and knows every token, so all ranks agree
on what is alive without asking. Under attention DP prompt i belongs to attention group i % attn_dp, whose ranks alone
hold its cache; all groups forward together, also those without a token.
Activations go from stage to stage by sends that do not block; tokens go from the last
stage straight to all others.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from spmd._cpu import monotonic_ns
from spmd.control.distributed import Distributed
from spmd.control.pipeline import PipelineComm, Receiving
from spmd.errors import InputError
from spmd.models.decoder import Decoder
from spmd.nn.attention import Chunk
from spmd.topology.mapping import Mapping
from spmd.topology.split import split


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_p keeps the likeliest tokens that together reach that probability."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    eos: tuple[int, ...] = ()  # empty: never stop early


@dataclass
class Generation:
    """What one run made. logits: only when kept, and only on the first rank of the prompt's attention group on the last
    stage: [tokens, vocab]."""

    tokens: list[list[int]]
    ttft_ns: int = 0  # until every prompt has its first token
    decode_ns: int = 0
    logits: list[list[torch.Tensor]] = field(default_factory=list)


def leads(mapping: Mapping) -> bool:
    """Whether this rank is the first of those that attend to the same sequences."""
    return mapping.attn_tp_rank == mapping.attn_cp_rank == 0


def sample(logits: torch.Tensor, how: Sampling, prompt: int, position: int) -> int:
    """One token from logits [vocab] fp32. What is drawn depends on seed, prompt and position, not on the layout.

    Source of top-p: Holtzman et al., The Curious Case of Neural Text Degeneration, 2019.
    """
    if how.temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax((logits - logits.max()) / how.temperature, -1).sort(descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities > how.top_p] = 0
    digest = hashlib.blake2b(f"{how.seed} {prompt} {position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def check_prompts(prompts: Sequence[Sequence[int]], decoder: Decoder, max_tokens: int) -> None:
    """InputError for no prompt, an empty one, an unknown token id, or one that does not fit the model's context."""
    context, vocabulary = decoder.config.max_positions, decoder.config.vocab_size
    if not prompts:
        raise InputError("there is no prompt")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InputError(f"prompt {index} is empty: it needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise InputError(f"prompt {index} has token ids outside 0 ... {vocabulary - 1}")
        if len(prompt) + max_tokens > context:
            raise InputError(
                f"prompt {index} has {len(prompt)} tokens, with {max_tokens} new ones more than the context of "
                f"{context}: shorten it or lower --max-tokens"
            )


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    how: Sampling,
    *,
    pipeline: PipelineComm | None = None,
    microbatches: int = 1,
    keep_logits: bool = False,
    forced: list[list[int]] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> Generation:
    """Generate for all prompts; every rank passes the same arguments and gets the same tokens.

    pipeline: needed with several stages. forced: take these tokens instead of sampled ones. on_token(prompt, token) is
    called as tokens become known. Errors: those of `check_prompts`.
    """
    check_prompts(prompts, decoder, how.max_tokens)
    run = _Run(decoder, prompts, how, pipeline, keep_logits, forced, on_token)
    count = min(microbatches, len(prompts))
    with torch.inference_mode(), _no_garbage_collection():
        run.all([list(split(len(prompts), count, index)) for index in range(count)])
    return run.made


class _Run:
    """The state of one `generate` call."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        how: Sampling,
        pipeline: PipelineComm | None,
        keep_logits: bool,
        forced: list[list[int]] | None,
        on_token: Callable[[int, int], None] | None,
    ) -> None:
        self.decoder, self.mapping, self.prompts, self.how = decoder, decoder.mapping, prompts, how
        self.keep_logits, self.forced, self.on_token = keep_logits, forced, on_token
        self._pipeline = pipeline
        slots = len(prompts[self.mapping.attn_dp_rank :: self.mapping.attn_dp_size])
        self.caches = decoder.new_caches(slots, max(map(len, prompts)) + how.max_tokens)
        self.made = Generation([[] for _ in prompts], logits=[[] for _ in prompts])
        self.sampled: dict[int, list[int]] = {}  # on the last stage: first prompt of a microbatch -> its new tokens

    @property
    def pipeline(self) -> PipelineComm:
        if self._pipeline is None:
            raise InputError(f"{self.mapping.pp_size} stages need a pipeline: pass init_pp_comm(mapping)")
        return self._pipeline

    def all(self, batches: list[list[int]]) -> None:
        begin = monotonic_ns()
        prefills = [[Chunk(i, 0, len(self.prompts[i])) for i in batch] for batch in batches]
        expected = [self.expect(chunks) for chunks in prefills]
        for chunks, receiving in zip(prefills, expected, strict=True):
            self.forward(chunks, receiving)
        for batch in batches:
            self.take(batch)
        self.made.ttft_ns = monotonic_ns() - begin
        while batches := [alive for batch in batches if (alive := self.alive(batch))]:
            for batch in batches:
                chunks = [Chunk(i, len(self.prompts[i]) + len(self.made.tokens[i]) - 1, 1) for i in batch]
                self.forward(chunks, self.expect(chunks))
            for batch in batches:
                self.take(batch)
        self.made.decode_ns = monotonic_ns() - begin - self.made.ttft_ns
        if self._pipeline is not None:
            self._pipeline.drain()

    def alive(self, batch: list[int]) -> list[int]:
        """Prompts of a microbatch that want another token."""
        how, tokens = self.how, self.made.tokens
        return [i for i in batch if len(tokens[i]) < how.max_tokens and not (tokens[i] and tokens[i][-1] in how.eos)]

    def own(self, chunks: list[Chunk]) -> list[Chunk]:
        """Those of this rank's attention group."""
        groups, mine = self.mapping.attn_dp_size, self.mapping.attn_dp_rank
        return chunks if groups == 1 else [chunk for chunk in chunks if chunk.slot % groups == mine]

    def expect(self, chunks: list[Chunk]) -> Receiving | None:
        """Post the receive of the previous stage's activations."""
        if self.mapping.is_first_pp_rank():
            return None
        rows = self.decoder.rows(self.own(chunks))
        return self.pipeline.irecv(torch.empty(rows, self.decoder.config.hidden, dtype=self.decoder.dtype))

    def forward(self, chunks: list[Chunk], receiving: Receiving | None) -> None:
        """One microbatch through this stage: its new tokens, or the previous stage's activations of them."""
        own = self.own(chunks)
        if receiving is None:
            texts = (self.prompts[c.slot] if c.start == 0 else self.made.tokens[c.slot][-1:] for c in own)
            x = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        else:
            x = receiving.wait()
        groups = self.mapping.attn_dp_size
        out = self.decoder(x, [replace(c, slot=c.slot // groups) for c in own] if groups > 1 else own, self.caches)
        if not self.mapping.is_last_pp_rank():
            self.pipeline.send(out)
            return
        tokens = []
        for row, prompt in enumerate(chunk.slot for chunk in own):
            position = len(self.made.tokens[prompt])
            if self.keep_logits and leads(self.mapping):
                self.made.logits[prompt].append(out[row].clone())
            if self.forced is None:
                tokens.append(sample(out[row], self.how, prompt, position))
            else:
                tokens.append(self.forced[prompt][position])
        tokens = self.shared(tokens, chunks)
        for stage in self.mapping.pp_group[:-1]:
            self.pipeline.send(torch.tensor(tokens), stage)
        self.sampled[chunks[0].slot] = tokens

    def shared(self, tokens: list[int], chunks: list[Chunk]) -> list[int]:
        """The new tokens of all chunks, from those of this rank's attention group: one rank's choice is everybody's."""
        mapping = self.mapping
        dist = Distributed.get(mapping)
        together = mapping.attention.group(mapping.rank, "attn_tp", "attn_cp")
        if len(together) > 1:
            tokens = dist.along("attention", together).broadcast_int64(tokens).tolist()
        if mapping.attn_dp_size == 1:
            return tokens
        padded = tokens + [0] * (len(chunks) - len(tokens))
        everyone = [iter(row) for row in dist.along("attn_dp").allgather_int64(padded).tolist()]
        return [next(everyone[chunk.slot % mapping.attn_dp_size]) for chunk in chunks]

    def take(self, batch: list[int]) -> None:
        """Append the new tokens of a microbatch, on every stage."""
        if self.mapping.is_last_pp_rank():
            tokens = self.sampled.pop(batch[0])
        else:
            received = torch.empty(len(batch), dtype=torch.int64)
            tokens = self.pipeline.recv(received, self.mapping.pp_group[-1]).tolist()
        for prompt, token in zip(batch, tokens, strict=True):
            self.made.tokens[prompt].append(token)
            if self.on_token is not None:
                self.on_token(prompt, token)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The loop makes no reference cycles, so a collection in it finds nothing and only delays a token."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
