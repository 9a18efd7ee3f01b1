"""torchtitan on a machine without a GPU, as far as a small model needs it; for tests.

Imported before anything else of torchtitan, it replaces the device that torchtitan has chosen, if
there is no GPU.
`llama_debug` is its Llama debug model with an attention that CPUs have.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as chosen

_OF_CPU = SimpleNamespace(
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda device: None,
    synchronize=lambda: None,
    empty_cache=lambda: None,
    reset_peak_memory_stats=lambda: None,
    memory_stats=lambda device: {},
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    Event=torch.Event,
    Stream=torch.Stream,
)
if not torch.cuda.is_available():
    chosen.device_type, chosen.device_module = "cpu", _OF_CPU
if not hasattr(torch.distributed, "set_timeout"):  # later versions of torch have it
    torch.distributed.set_timeout = lambda timeout, group: None


def llama_debug() -> Any:
    """Return the configuration; `Any` where torchtitan is not installed."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.lr_scheduler.warmup_steps = 10
    config.training.disable_cuda_graphs = True
    return config


def held_out_loss(trainer: Any, text: str) -> float:
    """Return the mean loss of what a trainer's model holds, on rows of a text."""
    (model,) = trainer.model_parts
    tokens = torch.tensor(trainer.tokenizer.encode(text, add_bos=False, add_eos=False))
    rows = tokens[: len(tokens) // 65 * 65].view(-1, 65).to(next(model.parameters()).device)
    with torch.no_grad():
        logits = model.lm_head(model(rows[:, :-1]))  # the loss of torchtitan applies the head
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), rows[:, 1:].flatten()
    ).item()
