"""The README.md of an exported model."""

from __future__ import annotations

from collections.abc import Mapping

from megaparcae.config.schema import ModelConfig

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- parcae
- looped-transformer
---

# {title}

{kind}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(PATH, trust_remote_code=True)
prompt = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50{example})[0]))
```
{usage}
## Training

| | |
|---|---|
{facts}

Exported by megaparcae. Logits agree with the trainer's to {difference:.0e} (relative, fp32).
The tokenizer adds no token by itself; training sequences begin with the BOS token.
"""

LOOPS = """
`num_loops` is the number of passes through the core (default {mean}); fewer are faster.
`loop_budget=b` keeps b loop slots in the cache (loop t uses slot t mod b). `early_exit="kl"` stops
a token when its distribution changes by less than `exit_threshold` (5e-4 nats); `"entropy"` and
`"state"` are the alternatives. The cache takes `model.config.cache_bytes(batch, length)` bytes.
"""


def model_card(config: ModelConfig, facts: Mapping[str, object], difference: float) -> str:
    """Markdown with what the model is, how to run it and how it was trained."""
    looped = config.architecture == "looped"
    mean = config.recurrence.mean_recurrence
    if looped:
        title = "A looped language model (Parcae)"
        kind = (
            f"{config.num_prelude_layers} prelude, {config.num_core_layers} core and "
            f"{config.num_coda_layers} coda blocks of width {config.hidden_size}; the core runs "
            f"{mean} times on average in training."
        )
    else:
        title = "A fixed-depth Transformer"
        kind = f"{config.num_layers} blocks of width {config.hidden_size}."
    rows = {"context": config.sequence_length, "vocabulary": config.vocab_size, **facts}
    return CARD.format(
        title=title,
        kind=kind,
        example=f", num_loops={mean}" if looped else "",
        usage=LOOPS.format(mean=mean) if looped else "",
        facts="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        difference=max(difference, 1e-9),
    )
