"""A model ready to run from any folder we know: run, checkpoint, export, the authors' files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megaparcae.checkpoint.model_tensors import LazyTensors, read_model_tensors, read_run_config
from megaparcae.checkpoint.names import canonical_shapes, check_names, to_hf
from megaparcae.checkpoint.storage import newest_folder
from megaparcae.config.schema import ModelConfig, RunConfig
from megaparcae.errors import UserError
from megaparcae.hf.config import to_hf_config
from megaparcae.hf.load import TABLES, load_folder
from megaparcae.hf.modeling_parcae import ParcaeForCausalLM
from megaparcae.model.build import build_model
from megaparcae.model.looped_lm import LoopedLM
from megaparcae.model.transformer import Transformer


@dataclass(frozen=True)
class LoadedModel:
    """Our model with the weights of a folder, in fp32."""

    folder: Path
    """Where the weights came from; of a run its newest checkpoint."""
    model: LoopedLM | Transformer
    run: RunConfig | None
    """Of a checkpoint."""
    tokenizer: str | None

    def identity(self) -> str:
        """Changes when the folder or a file in it does (names, sizes and times are looked at)."""
        digest = hashlib.sha256(str(self.folder.resolve()).encode())
        for path in sorted(self.folder.iterdir()):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]


def load_model(folder: str | Path, device: torch.device) -> LoadedModel:
    """Raises UserError for a folder without a model or with weights that do not fit its config."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"--model {folder} is no folder; give a run, a checkpoint or an export")
    if (folder / ".metadata").is_file() or any(folder.glob("step_*/.metadata")):
        folder = newest_folder(folder)
        run = read_run_config(folder)
        model = _filled(run.model, read_model_tensors(folder), folder, device)
        return LoadedModel(folder, model, run, run.data.tokenizer)
    loaded = load_folder(folder)
    model = _filled(loaded.config, loaded.tensors, folder, device)
    tokenizer = None if loaded.tokenizer is None else str(loaded.tokenizer)
    return LoadedModel(folder, model, None, tokenizer)


def _filled(
    config: ModelConfig, tensors: LazyTensors, folder: Path, device: torch.device
) -> LoopedLM | Transformer:
    shapes = canonical_shapes(config)
    check_names(tensors, shapes, str(folder))
    with torch.device("meta"):
        model = build_model(config)
    for name, shape in shapes.items():
        tensor = tensors[name].to(device, torch.float32)
        if tuple(tensor.shape) != tuple(shape):
            raise UserError(
                f"{folder}: {name} has the shape {tuple(tensor.shape)}, its config says "
                f"{tuple(shape)}; the weights belong to another config"
            )
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        assert leaf in module._parameters, name
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    return model.eval()


def as_exported(model: LoopedLM | Transformer) -> ParcaeForCausalLM:
    """The same model in transformers' form, as an export has it: without padded rows, fp32."""
    config = model.config
    made = ParcaeForCausalLM(to_hf_config(config)).eval()
    for name, tensor in model.state_dict().items():
        rows = config.vocab_size if name.startswith(TABLES) else None
        made.get_parameter(to_hf(name)).data = tensor[:rows].detach()
    made.tie_weights()
    return made
