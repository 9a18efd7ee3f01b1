"""Load what the run has published with transformers alone, and go on with a text."""

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("tuned")
prompt = torch.tensor([list(b"    def __init__(self, ")])
written = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
print("generated:", bytes(written[0].tolist()).decode(errors="replace").encode("unicode_escape"))
