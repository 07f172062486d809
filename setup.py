"""Packaging: `pip install -e . -c launch/constraints.txt` in a checkout."""

from setuptools import find_packages, setup

setup(
    name="megaparcae",
    version="0.1.0",
    description="Trainer for Parcae and other looped language models on DeepSpeed",
    python_requires=">=3.10",
    packages=find_packages(include=["megaparcae", "megaparcae.*"]),
    package_data={
        "megaparcae.report": ["page.css", "page.js"],
        "megaparcae.scaling": ["paper.json"],
    },
    install_requires=[
        "torch>=2.9",
        "deepspeed==0.19.8",  # pinned: the engine and the checkpoints use private names
        "numpy",
        "pyyaml",
        "safetensors",
        "transformers>=5",
        "tokenizers",
        "sentencepiece",
        "tiktoken",
        "datasets",
        "pyarrow",
        "zstandard",
        "scipy",
        "matplotlib",
        "tqdm",
        "rich",
    ],
    extras_require={
        "test": [
            "pytest",
            "ruff",
            "mypy",
            "wandb",
            "tensorboard",
            "accelerate",  # transformers' Trainer and LoRA on exports
            "peft",
            "gigatoken",
            # Its reader and ours read each other's shards; wheels are for Linux only.
            "megatron-core>=0.16,<0.17; sys_platform == 'linux' and python_version < '3.14'",
        ],
        "gigatoken": ["gigatoken"],
        "wandb": ["wandb"],
        "tensorboard": ["tensorboard"],
        "eval": ["lm-eval[hf]"],
        # apex is NVIDIA's and is built from source; the package of that name on PyPI is another
        # program. It is used when it is there, never installed.
    },
)
