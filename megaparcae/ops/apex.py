"""NVIDIA's apex: used when it is really there, never installed by us.

PyPI's package of the same name is an unrelated web program, a frequent accident of
`pip install apex`. It is recognised by its files, without running it.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path

from megaparcae.log import logger

EXTENSIONS = ("apex.normalization.fused_layer_norm", "fused_layer_norm_cuda", "amp_C")
"""What its kernels need: the last two are compiled, and missing in a Python-only build."""


@cache
def nvidia_apex() -> bool:
    """Whether NVIDIA's apex can be imported with its kernels; says once why one can't be used."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "normalization").is_dir() for folder in folders):
        logger.warning(
            "the installed package apex (%s) is not NVIDIA's but an unrelated program of that "
            "name from PyPI; PyTorch's own kernels are used. Remove it with: pip uninstall apex",
            spec.origin or ", ".join(map(str, folders)),
        )
        return False
    try:
        for name in EXTENSIONS:
            importlib.import_module(name)
    except ImportError as error:
        logger.warning(
            "NVIDIA's apex is installed without working kernels (%s); PyTorch's own are used. "
            "Build it with --cuda_ext and --cpp_ext, or remove it",
            error,
        )
        return False
    return True
