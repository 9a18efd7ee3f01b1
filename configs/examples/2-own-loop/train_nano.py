"""A small GPT, its own loop, and DiLoCo between islands: train_nano.py RUN.toml ISLAND TEXT.

diloco coordinator nano.toml
python train_nano.py nano.toml east input.txt   # and west
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import diloco


class GPT(nn.Module):
    """Decoder over bytes: learned positions, pre-norm blocks, tied head."""

    def __init__(self, dim, num_layers, num_heads, length):
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, dim), nn.Embedding(length, dim)
        layers = [
            nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, 0.0, F.gelu, 1e-5, True, True)
            for _ in range(num_layers)
        ]
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(dim)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embed(tokens) + self.positions(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.norm(x) @ self.embed.weight.T


run_file, island, text_file = sys.argv[1:]
config = diloco.load_config(run_file, island=island)
text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8).long()
train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
length, sizes = config.data.sequence_length, config.model
batch_size = config.island.tokens_per_inner_step // length
folder = config.checkpoint_dir / "nano" / island
folder.mkdir(parents=True, exist_ok=True)
torch.manual_seed(config.run.seed)
model = GPT(sizes.dim, sizes.num_layers, sizes.num_heads, length)
optimizer = torch.optim.AdamW(model.parameters(), lr=config.inner.optimizer.lr)


def loss_of(data, seed):
    """Loss on a batch that depends on the seed alone, so that a resumed run sees the same."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - length, (batch_size,), generator=generator)
    tokens = torch.stack([data[start : start + length + 1] for start in starts])
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


with diloco.connect(config) as connection:
    outer = diloco.DiLoCo(model, config.outer, transport=connection)
    if outer.resume_step is not None:
        saved = torch.load(folder / f"{outer.resume_step}.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        outer.load_state_dict(saved["outer"])
    for inner_step in range(outer.start_step, outer.inner_steps):
        loss = loss_of(train, hash((config.run.seed, outer.island_slot, inner_step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.log(loss=loss.item())
        for event in outer.step(num_tokens=batch_size * length):
            if event.kind != "phase":  # how long its parts took
                print(f"{island} {inner_step + 1}: {event.kind}, loss {loss.item():.3f}")
        if outer.checkpoint_due:
            with outer.checkpointing():
                state = {"model": model, "optimizer": optimizer, "outer": outer}
                saved = {name: part.state_dict() for name, part in state.items()}
                torch.save(saved, folder / f"{outer.inner_step}.pt")
        if outer.is_stopping:
            break
    outer.finish()
    with outer.global_parameters(), torch.no_grad():
        held_out_loss = loss_of(held_out, 0).item()
        outer.evaluated(held_out_loss)
        print(f"{island} at {outer.inner_step}: held-out loss {held_out_loss:.4f}")
