"""Tasks of EleutherAI's lm-evaluation-harness, at any number of loops."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megaparcae.errors import UserError

if TYPE_CHECKING:
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

SETS = {
    "table3": ("hellaswag", "arc_challenge", "arc_easy", "piqa", "boolq", "sciq"),
    "perplexity": ("wikitext", "lambada_openai"),
}
"""The paper's zero-shot tasks (Table 3), and the two texts of its perplexities."""


def evaluate_harness(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tasks: str,
    *,
    num_loops: Sequence[int],
    batch_size: int = 8,
    limit: int | None = None,
    include_path: str | None = None,
) -> dict[int, dict[str, dict[str, Any]]]:
    """Metrics by number of loops and task.

    `tasks` are names with commas; `table3` and `perplexity` stand for several. `include_path` is a
    folder with further task files. Raises UserError when lm-eval is not installed, does not know
    a task, or cannot load its data.
    """
    adapter = _adapter()
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = task_names(tasks)
    manager = TaskManager(include_path=include_path)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise UserError(f"--lm-eval: lm-eval has no task {unknown[0]!r}; see `lm-eval ls tasks`")
    found = {}
    for loops in num_loops:
        lm = adapter(model, tokenizer, loops, batch_size)
        try:
            result = simple_evaluate(
                lm, tasks=list(names), task_manager=manager, limit=limit, log_samples=False
            )
        except (OSError, ConnectionError) as error:  # what `datasets` raises when it finds no data
            raise UserError(
                f"--lm-eval={tasks}: the data of a task can't be loaded ({error}); they come from "
                "the Hugging Face hub: connect, or fill the cache (HF_HOME) on another machine"
            ) from error
        assert result is not None
        found[loops] = {name: dict(values) for name, values in result["results"].items()}
    return found


def task_names(tasks: str) -> list[str]:
    """Names with commas, sets resolved, once each."""
    names = [name for part in tasks.split(",") for name in SETS.get(part, (part,))]
    return list(dict.fromkeys(names))


def require_lm_eval() -> None:
    """UserError when an optional package is not installed."""
    for package in ("lm_eval", "accelerate"):  # lm-eval alone comes without what its models need
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--lm-eval needs the package {package}, which is not installed; run "
                "`pip install 'lm-eval[hf]'`"
            )


def _adapter() -> type[HFLM]:
    require_lm_eval()
    from lm_eval.models.huggingface import HFLM

    class LoopedHFLM(HFLM):
        """lm-eval's Hugging Face model at a fixed depth; every row begins with BOS."""

        def __init__(
            self,
            model: PreTrainedModel,
            tokenizer: PreTrainedTokenizerFast,
            num_loops: int,
            batch_size: int,
        ) -> None:
            self.num_loops = num_loops
            super().__init__(
                pretrained=model,
                tokenizer=tokenizer,
                batch_size=batch_size,
                max_length=model.config.max_position_embeddings,
            )

        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            before, scored = super()._encode_pair(context, continuation)
            start = self.tokenizer.bos_token_id
            if start is not None and before[:1] != [start]:
                before = [start, *before]
            return before, scored

        def _model_call(
            self, inps: torch.Tensor, attn_mask: object = None, labels: object = None
        ) -> torch.Tensor:
            import torch

            with torch.no_grad():
                return self.model(inps, num_loops=self.num_loops, use_cache=False).logits

        def _model_generate(
            self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any
        ) -> torch.Tensor:
            return super()._model_generate(
                context, max_length, stop, num_loops=self.num_loops, **kwargs
            )

    return LoopedHFLM


def harness_table(found: dict[int, dict[str, dict[str, Any]]]) -> str:
    """For the terminal: task, depth, metric, value and standard error."""
    lines = [f"{'task':<24} {'T':>4} {'metric':<20} {'value':>12} {'± stderr':>12}"]
    for loops, tasks in found.items():
        for task, values in tasks.items():
            for key, value in values.items():
                metric, _, kind = key.partition(",")
                if metric.endswith("_stderr") or not isinstance(value, float):
                    continue
                error = values.get(f"{metric}_stderr,{kind}")
                shown = f"{error:.4f}" if isinstance(error, float) else "-"
                lines.append(f"{task:<24} {loops:>4} {metric:<20} {value:>12.4f} {shown:>12}")
    return "\n".join(lines)
