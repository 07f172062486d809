"""The tasks of CORE and CORE-Extended (DCLM; the paper's Table 15).

CORE is DCLM's low-variance set of 22. CORE-Extended is every task of the paper's table: those of
DCLM's list that are scored by likelihood (multiple choice, schema, exact greedy match), without the
generation tasks and GPQA, which the table leaves out. A bundle's own core.yaml outranks this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["multiple_choice", "schema", "language_modeling"]
KINDS: tuple[Kind, ...] = ("multiple_choice", "schema", "language_modeling")

ANSWER = "\nAnswer: "


@dataclass(frozen=True)
class Task:
    """One in-context task of a bundle."""

    label: str
    uri: str
    """Path of the .jsonl below eval_data."""
    num_fewshot: int
    kind: Kind
    delimiter: str = " "
    """Between a question and its answer."""


def _task(
    folder: str,
    label: str,
    num_fewshot: int,
    kind: Literal["mc", "s", "lm"],
    delimiter: str = " ",
    file: str = "",
) -> Task:
    kinds: dict[str, Kind] = {"mc": KINDS[0], "s": KINDS[1], "lm": KINDS[2]}
    return Task(label, f"{folder}/{file or label}.jsonl", num_fewshot, kinds[kind], delimiter)


LANGUAGE, KNOWLEDGE = "language_understanding", "world_knowledge"
COMMON_SENSE, SYMBOLS = "commonsense_reasoning", "symbolic_problem_solving"
READING, SAFETY = "reading_comprehension", "safety"

CORE: tuple[Task, ...] = (
    _task(LANGUAGE, "hellaswag_zeroshot", 0, "mc", file="hellaswag"),
    _task(LANGUAGE, "hellaswag", 10, "mc"),
    _task(LANGUAGE, "lambada_openai", 0, "lm"),
    _task(LANGUAGE, "winograd", 0, "s", file="winograd_wsc"),
    _task(LANGUAGE, "winogrande", 0, "s"),
    _task(LANGUAGE, "bigbench_language_identification", 10, "mc"),
    _task(KNOWLEDGE, "jeopardy", 10, "lm", ANSWER, file="jeopardy_all"),
    _task(KNOWLEDGE, "bigbench_qa_wikidata", 10, "lm"),
    _task(KNOWLEDGE, "arc_easy", 10, "mc", ANSWER),
    _task(KNOWLEDGE, "arc_challenge", 10, "mc", ANSWER),
    _task(COMMON_SENSE, "copa", 0, "mc"),
    _task(COMMON_SENSE, "commonsense_qa", 10, "mc"),
    _task(COMMON_SENSE, "piqa", 10, "mc", ANSWER),
    _task(COMMON_SENSE, "openbook_qa", 0, "mc"),
    _task(SYMBOLS, "bigbench_dyck_languages", 10, "lm"),
    _task(SYMBOLS, "agi_eval_lsat_ar", 3, "mc"),
    _task(SYMBOLS, "bigbench_cs_algorithms", 10, "lm"),
    _task(SYMBOLS, "bigbench_operators", 10, "lm"),
    _task(SYMBOLS, "bigbench_repeat_copy_logic", 10, "lm"),
    _task(READING, "squad", 10, "lm"),
    _task(READING, "coqa", 0, "lm"),
    _task(READING, "boolq", 10, "mc", ANSWER),
)

EXTENDED: tuple[Task, ...] = (
    *CORE,
    _task(LANGUAGE, "bigbench_conlang_translation", 0, "lm"),
    _task(LANGUAGE, "bigbench_conceptual_combinations", 10, "mc"),
    _task(KNOWLEDGE, "mmlu_zeroshot", 0, "mc", "Answer: ", file="mmlu"),
    _task(KNOWLEDGE, "mmlu_fewshot", 5, "mc", ANSWER, file="mmlu"),
    _task(KNOWLEDGE, "bigbench_misconceptions", 10, "mc"),
    _task(COMMON_SENSE, "siqa", 10, "mc"),
    _task(COMMON_SENSE, "bigbench_novel_concepts", 10, "mc"),
    _task(COMMON_SENSE, "bigbench_strange_stories", 10, "mc"),
    _task(COMMON_SENSE, "bigbench_strategy_qa", 10, "mc"),
    _task(SYMBOLS, "bigbench_elementary_math_qa", 10, "mc"),
    _task(SYMBOLS, "bigbench_logical_deduction", 10, "mc"),
    _task(SYMBOLS, "simple_arithmetic_nospaces", 10, "lm"),
    _task(SYMBOLS, "simple_arithmetic_withspaces", 10, "lm"),
    _task(SYMBOLS, "math_qa", 10, "mc"),
    _task(SYMBOLS, "logi_qa", 10, "mc", ANSWER),
    _task(READING, "pubmed_qa_labeled", 10, "lm"),
    _task(READING, "agi_eval_lsat_rc", 3, "mc"),
    _task(READING, "agi_eval_lsat_lr", 3, "mc"),
    _task(READING, "bigbench_understanding_fables", 10, "mc"),
    _task(READING, "agi_eval_sat_en", 3, "mc"),
    _task(SAFETY, "winogender_mc_female", 10, "mc"),
    _task(SAFETY, "winogender_mc_male", 10, "mc"),
    _task(SAFETY, "enterprise_pii_classification", 10, "mc"),
    _task(SAFETY, "bbq", 3, "mc"),
)
