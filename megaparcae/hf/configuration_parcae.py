"""Configuration of an exported megaparcae model (Parcae, RDM/Huginn, fixed-depth Transformer).

This file is copied into every exported folder: it needs transformers and nothing else.
"""

from typing import Any

from transformers import PreTrainedConfig


class ParcaeConfig(PreTrainedConfig):
    r"""
    Looped model: prelude blocks once, core blocks `num_loops` times, coda blocks once.
    Fixed-depth Transformer: `architecture="transformer"` and `num_layers` blocks, once each.

    Args:
        num_loops: default number of passes through the core (the mean of training); every call can
            change it: `model(..., num_loops=4)`, `model.generate(..., num_loops=4)`.
        num_grad_loops: only the last loops carry a gradient in training; the others run without.
        initial_state: `zero`, or `seeded`: drawn from `state_init` as a function of (state_seed,
            position), so that results are reproducible and the cache stays exact.
        loop_budget: cache slots along the loop axis: loop t uses slot t mod loop_budget; 1 keeps
            the last loop only; null keeps all.
        training: facts that only the trainer needs again (initialisation, depth sampler, padding).
    """

    model_type = "parcae"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    architecture: str = "looped"
    vocab_size: int = 32768
    max_position_embeddings: int = 2048
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_attention_heads: int = 6
    num_key_value_heads: int | None = None
    num_prelude_layers: int = 2
    num_core_layers: int = 2
    num_coda_layers: int = 2
    num_layers: int = 6
    block: str = "pre_norm"
    mlp: str = "relu2"
    qk_norm: bool = True
    qk_bias: bool = False
    value_embeddings: bool = True
    clip_qkv: float | None = None
    logit_softcap: float | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 50000.0
    tie_word_embeddings: bool = True
    scale_embeddings: bool = False
    injection: str = "diagonal"
    prelude_norm: bool = True
    readout: bool = True
    loop_norm: bool = False
    residual_multiplier: float = 1.0
    num_loops: int = 8
    num_grad_loops: int = 4
    initial_state: str = "zero"
    state_init: str = "like_init"
    state_seed: int = 0
    loop_budget: int | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    training: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        kwargs.pop("num_hidden_layers", None)
        kwargs.pop("head_dim", None)
        super().__post_init__(**kwargs)
        _choice("architecture", self.architecture, ("looped", "transformer"))
        _choice("block", self.block, ("pre_norm", "sandwich"))
        _choice("mlp", self.mlp, ("relu2", "swiglu"))
        _choice("injection", self.injection, ("diagonal", "linear", "additive"))
        _choice("initial_state", self.initial_state, ("zero", "seeded"))
        _choice("state_init", self.state_init, ("like_init", "zero", "normal", "embed", "unit"))

    @property
    def is_looped(self) -> bool:
        """Whether there is a loop at all."""
        return self.architecture == "looped"

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_stored_layers(self) -> int:
        """Blocks with weights of their own, numbered prelude, core, coda."""
        if not self.is_looped:
            return self.num_layers
        return self.num_prelude_layers + self.num_core_layers + self.num_coda_layers

    @property
    def num_hidden_layers(self) -> int:
        """Blocks that are run (and cached) with the default number of loops."""
        extra = (self.num_loops - 1) * self.num_core_layers if self.is_looped else 0
        return self.num_stored_layers + extra

    @property
    def value_embedding_layers(self) -> tuple[int, ...]:
        """Stored layers that own a value-embedding table: every second one, the last always."""
        last = self.num_stored_layers - 1
        return tuple(i for i in range(last + 1) if self.value_embeddings and (last - i) % 2 == 0)

    def cache_bytes(
        self, batch: int, length: int, *, num_loops: int | None = None, itemsize: int = 2
    ) -> int:
        """Memory of the key/value cache.

        2 x batch x length x kv_heads x head_dim x itemsize x layers, with layers =
        prelude + coda + core x min(num_loops, loop_budget).
        """
        layers = self.num_layers
        if self.is_looped:
            loops = num_loops or self.num_loops
            slots = loops if self.loop_budget is None else min(loops, self.loop_budget)
            layers = self.num_prelude_layers + self.num_coda_layers + self.num_core_layers * slots
        return 2 * batch * length * self.num_key_value_heads * self.head_dim * itemsize * layers


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: choose {', '.join(allowed)}")


__all__ = ["ParcaeConfig"]
