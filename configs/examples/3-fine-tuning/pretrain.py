"""A stand-in for a model of the Hugging Face hub: a tiny Llama over bytes, trained a little."""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=192,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(100):
    starts = torch.randint(len(text) - 64, (16,))
    tokens = torch.stack([text[start : start + 64] for start in starts])
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"pretrained: 100 steps, training loss {loss.item():.2f}")
model.save_pretrained("model")
