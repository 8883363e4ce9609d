"""An iteration of a language model's loop as eager PyTorch programs write it: ``pytorch_language.py FOLDER N``.

FOLDER holds `model`, a checkpoint, and `rows.npz` with the episodes of a batch: a row of tokens for each action taken
and each of its six candidates. Every action taken is one forward pass of its six rows when it is sampled, another for
the reference policy, and one with its gradient in each of two optimizer steps. Needs torch and transformers only.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2LMHeadModel

CANDIDATES = 6


def main(folder, repetitions):
    rows = np.load(Path(folder) / "rows.npz", allow_pickle=False)
    tokens, starts, ends = (torch.from_numpy(rows[name]).long() for name in ("tokens", "starts", "ends"))
    network = GPT2LMHeadModel.from_pretrained(Path(folder) / "model", local_files_only=True).eval()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def log_probs(row):
        six = slice(row, row + CANDIDATES)
        ids = tokens[six, : ends[six].max()]
        each = network(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        index = torch.arange(1, ids.shape[1])
        scored = (index >= starts[six, None]) & (index < ends[six, None])
        return (each * scored).sum(1).log_softmax(0)

    def iterate():
        with torch.no_grad():
            for row in [*range(0, len(tokens), CANDIDATES)] * 2:  # sampling and reference
                log_probs(row)
        for _ in range(2):
            optimizer.zero_grad()
            for row in range(0, len(tokens), CANDIDATES):
                log_probs(row).sum().backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()

    iterate()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        iterate()
        seconds.append(time.perf_counter() - start)
    figures = {"seconds": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds)}
    print(json.dumps({**figures, "torch": torch.__version__, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
