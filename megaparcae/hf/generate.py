"""Text from an exported model: single prompts, batches, streams; tokens/s and loops per token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TextStreamer

from megaparcae.errors import UserError
from megaparcae.hf.cache_parcae import ParcaeCache
from megaparcae.hf.load import read_config
from megaparcae.hf.modeling_parcae import ParcaeForCausalLM
from megaparcae.log import logger

# B rows, S positions


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How to continue a prompt."""

    max_new_tokens: int = 128
    """Most tokens to add."""
    num_loops: int | None = None
    """Passes through the core; null is the model's default."""
    temperature: float = 0.0
    """0 takes the likeliest token, 1 samples from the model's distribution."""
    top_k: int = 0
    """Sample among the k likeliest; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest that make up this probability; 1 is off."""
    seed: int = 0
    """Seed of sampling."""
    early_exit: str | None = None
    """kl, entropy or state; null runs all loops."""
    exit_threshold: float | None = None
    """Change below which a token stops looping; null is the rule's default."""
    loop_budget: int | None = None
    """Cache slots along the loop axis; null is the model's default."""

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1; 1 is off")
        for name in ("num_loops", "loop_budget"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")

    def sampling(self) -> dict[str, object]:
        """For transformers' generate."""
        if self.temperature == 0:
            return {"do_sample": False}
        top_k = {"top_k": self.top_k} if self.top_k else {"top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, **top_k}


@dataclass(frozen=True)
class Continuation:
    """What the model added to one prompt."""

    text: str
    num_tokens: int
    """Tokens added, end of text included."""
    loops_per_token: float
    """Mean passes through the core of the added tokens; 1 for a model without a loop."""


class Generator:
    """A model and its tokenizer."""

    def __init__(self, model: ParcaeForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: str | Path, *, dtype: str = "auto", device: str = "cpu") -> Generator:
        """From an exported folder; its code isn't run, ours is."""
        folder = Path(folder)
        kind = read_config(folder).get("model_type")
        if kind != "parcae":
            raise UserError(
                f"{folder} is a {kind!r} model, not an export of ours; convert it with "
                "tools/convert_from_hf.py and tools/convert_to_hf.py"
            )
        if not (folder / "tokenizer.json").is_file():
            raise UserError(
                f"{folder} has no tokenizer.json; export it again with tools/convert_to_hf.py "
                "--tokenizer"
            )
        model = ParcaeForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        return cls(model, PreTrainedTokenizerFast.from_pretrained(folder))

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[str], options: GenerationOptions, *, stream: bool = False
    ) -> list[Continuation]:
        """Continue all prompts as one batch; `stream` prints the only one while it grows."""
        ids, mask = self.encode(prompts)
        length = ids.shape[1] + options.max_new_tokens
        limit = self.model.config.max_position_embeddings
        if length > limit:
            logger.warning("%d positions are more than the %d of training", length, limit)
        cache = ParcaeCache(
            loop_budget=options.loop_budget or self.model.config.loop_budget, max_length=length
        )
        torch.manual_seed(options.seed)
        out = self.model.generate(
            ids,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=options.max_new_tokens,
            num_loops=options.num_loops,
            early_exit=options.early_exit,
            exit_threshold=options.exit_threshold,
            pad_token_id=self.padding(),
            streamer=self.streamer() if stream else None,
            **options.sampling(),
        )
        return self.decode(out[:, ids.shape[1] :], cache.loops_used, options)

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask [B, S], padded on the left; every prompt begins with BOS."""
        bos = self.model.config.bos_token_id
        start = [] if bos is None else [bos]
        rows = [start + self.tokenizer.encode(p, add_special_tokens=False) for p in prompts]
        if not all(rows):
            raise UserError("an empty prompt needs a tokenizer with a BOS token; give some text")
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.padding())
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.tensor(row)
            mask[i, width - len(row) :] = 1
        return ids.to(self.model.device), mask.to(self.model.device)

    def padding(self) -> int:
        """An id for positions that the mask hides."""
        pad = self.model.config.pad_token_id
        return 0 if pad is None else pad

    def streamer(self) -> TextStreamer:
        """Prints text as it grows."""
        return TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)

    def decode(
        self, ids: Tensor, loops_used: Tensor, options: GenerationOptions
    ) -> list[Continuation]:
        """Texts of the added tokens [B, new], each up to its end of text."""
        found = []
        eos, config = self.model.config.eos_token_id, self.model.config
        fixed = options.num_loops or (config.num_loops if config.is_looped else 1)
        for i, row in enumerate(ids):
            ends = (row == eos).nonzero() if eos is not None else row.new_empty(0)
            count = int(ends[0]) + 1 if len(ends) else len(row)
            text = self.tokenizer.decode(row[:count], skip_special_tokens=True)
            # The first token comes from the prompt's pass, which runs all loops.
            used = loops_used[i, : count - 1].sum().item() + fixed if loops_used.numel() else None
            loops = float(fixed) if used is None else used / count
            found.append(Continuation(text, count, loops))
        return found


@dataclass
class Meter:
    """Tokens, loops and seconds since the start."""

    tokens: int = 0
    loops: float = 0.0
    seconds: float = 0.0

    def add(self, continuations: Sequence[Continuation], started: float) -> None:
        """Count a finished batch that began at `started` (time.perf_counter)."""
        self.seconds += time.perf_counter() - started
        self.tokens += sum(c.num_tokens for c in continuations)
        self.loops += sum(c.num_tokens * c.loops_per_token for c in continuations)

    def summary(self) -> str:
        """One line."""
        rate = self.tokens / max(self.seconds, 1e-9)
        loops = self.loops / max(self.tokens, 1)
        return f"{self.tokens} tokens, {rate:.1f} tokens/s, {loops:.2f} loops per token"
