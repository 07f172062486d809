"""A checkpoint from elsewhere can't make its reader run code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_manager import save_steps

from megaparcae.checkpoint.model_tensors import read_model_tensors
from megaparcae.errors import UserError


def call(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls module.name(argument)."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93(" + text(argument) + b"tR."


def read(folder: Path, content: bytes) -> None:
    save_steps(folder, 1)
    checkpoint = folder / "step_00000001"
    (checkpoint / ".metadata").write_bytes(content)
    read_model_tensors(checkpoint)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        (
            "torch.distributed.checkpoint.utils",
            "dist.elastic.multiprocessing.subprocess_handler.subprocess_handler.Popen",
        ),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("torch", "load"),
        ("builtins", "eval"),
    ],
)
def test_names_that_lead_out_of_dcps_metadata_are_refused(module, name, tmp_path):
    with pytest.raises(UserError, match="no part of a checkpoint"):
        read(tmp_path, call(module, name, "/bin/true"))


def test_no_module_is_imported_before_it_is_refused(tmp_path, monkeypatch):
    (tmp_path / "imported_by_a_pickle.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="no part of a checkpoint"):
        read(tmp_path, call("imported_by_a_pickle", "anything", "x"))
    assert "imported_by_a_pickle" not in sys.modules


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x04N."])
def test_metadata_that_is_damaged_is_named(content, tmp_path):
    with pytest.raises(UserError, match=r"\.metadata is"):
        read(tmp_path, content)
