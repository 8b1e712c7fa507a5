"""Which devices are served, and what the others are told, without any of them."""

from __future__ import annotations

import re

import torch

from flash_cute import checks


def test_arch_of_another_gpu(monkeypatch):
    device = torch.device("cuda", 1)
    capability = {"value": (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability["value"])
    assert checks._refusal_of_arch("sm90", device) is None
    for other in ((8, 0), (8, 9), (10, 0), (12, 0)):
        capability["value"] = other
        assert checks._refusal_of_arch("sm80", device) is None
        message = r"arch is 'sm90' and q is on cuda:1 \(Card, compute capability .*'sm80' or None"
        assert re.match(message, str(checks._refusal_of_arch("sm90", device)))


def test_fp64_and_old_gpus(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Old")
    capability = {"value": (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability["value"])
    why_not = checks.why_not
    for newer in ((8, 0), (8, 6), (9, 0), (12, 0)):
        capability["value"] = newer
        assert all(why_not(device, dtype) is None for dtype in checks.GPU_DTYPES)
    what, message = why_not(device, torch.float64)
    assert what == "dtype" and "bfloat16 or float32; cast it, or use torch.nn" in message
    capability["value"] = (7, 5)
    what, message = why_not(device, torch.float16)
    assert (
        what == "device" and "Old, compute capability 7.5" in message and "use torch.nn" in message
    )


def test_other_devices():
    what, message = checks.why_not(torch.device("xpu", 0), torch.float16)
    assert what == "device" and "use torch.nn" in message
