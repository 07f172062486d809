"""NVIDIA's apex is used when it is there, and PyPI's program of that name is not taken for it."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megaparcae.ops.apex import nvidia_apex
from megaparcae.ops.rms_norm import rms_norm
from megaparcae.optim.adamw import AdamW


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """A folder that is first on the path; nothing is known about apex before and after."""

    def forget() -> None:
        nvidia_apex.cache_clear()
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
            del sys.modules[name]

    forget()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logging.getLogger("megaparcae"), "propagate", True)
    caplog.set_level(logging.WARNING)
    yield tmp_path
    forget()


def install(site: Path, *files: str, text: str = "") -> None:
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)


def test_pypis_apex_is_recognised_named_and_never_run(site, caplog):
    install(site, "apex/__init__.py", "apex/amp.py", text="raise SystemExit('it was run')")
    assert not nvidia_apex()
    assert not nvidia_apex()
    (record,) = caplog.records
    assert "is not NVIDIA's" in record.getMessage()
    assert str(site / "apex") in record.getMessage()
    assert "pip uninstall apex" in record.getMessage()


def test_nvidias_apex_without_its_kernels_is_not_used(site, caplog):
    install(site, "apex/__init__.py", "apex/normalization/__init__.py")
    install(site, "apex/normalization/fused_layer_norm.py", text="import fused_layer_norm_cuda")
    assert not nvidia_apex()
    (record,) = caplog.records
    assert "fused_layer_norm_cuda" in record.getMessage()
    assert "--cuda_ext" in record.getMessage()


def test_nvidias_apex_with_its_kernels_is_used(site, caplog):
    names = "apex/__init__.py", "apex/normalization/__init__.py", "amp_C.py"
    install(site, *names, "fused_layer_norm_cuda.py", "apex/normalization/fused_layer_norm.py")
    assert nvidia_apex()
    assert not caplog.records


def test_nothing_is_said_where_no_apex_is(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    nvidia_apex.cache_clear()
    assert not nvidia_apex()
    assert not caplog.records
    nvidia_apex.cache_clear()


needs_apex = pytest.mark.skipif(
    not (torch.cuda.is_available() and nvidia_apex()), reason="needs a GPU and NVIDIA's apex"
)


@needs_apex
def test_apexs_norm_is_pytorchs():
    x, grad = torch.randn(2, 4, 33, 64, device="cuda").unbind()
    weight = torch.rand(64, device="cuda").requires_grad_()
    x.requires_grad_()
    found = rms_norm(x, weight, 1e-5)
    expected = F.rms_norm(x, (64,), weight, 1e-5)
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        *(torch.autograd.grad(y, (x, weight), grad) for y in (found, expected)), strict=True
    ):
        torch.testing.assert_close(a, b)


@needs_apex
def test_apexs_adam_is_pytorchs():
    results = []
    for apex in (False, True):
        rule = AdamW(lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1, apex=apex)
        draw = torch.Generator("cuda").manual_seed(0)
        value, grad = torch.randn(2, 1000, device="cuda", generator=draw).unbind()
        states = torch.zeros(2, 1000, device="cuda").unbind()
        for step in (1, 2, 3):
            rule.update(
                [value], [grad * step], states[:1], states[1:],
                lr=0.01, decayed=[True], step=step, mean_over_parameters=lambda x: x,
            )  # fmt: skip
        results.append(value)
    torch.testing.assert_close(*results)
