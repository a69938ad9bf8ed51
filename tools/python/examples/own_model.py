"""One's own model in 40 lines. Run: mpirun -n 2 lrmoe-worker --controller HOST:PORT -- python own_model.py"""

import torch
import torch.distributed as dist
from torch import nn

import lrmoe

E, K, H, F, VOCABULARY = 8, 2, 64, 128, 256


class Block(nn.Module):
    def __init__(self, worker, index):
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.router = nn.Linear(H, E, bias=False)
        self.experts = lrmoe.MoELayer(worker, index, E, K, H, F, dtype=torch.float32)
        generator = torch.Generator().manual_seed(index)  # equal on all ranks; each keeps its own experts
        self.experts.load_experts(torch.randn(E, 2 * F, H, generator=generator) / 8,
                                  torch.randn(E, H, F, generator=generator) / 11)

    def forward(self, x):
        h = self.norm(x)
        weights, ids = self.router(h).softmax(dim=-1).topk(K, dim=-1)
        return x + self.experts(h, ids, weights)


dist.init_process_group("gloo")
torch.manual_seed(0)  # dense parameters are equal on all ranks
with lrmoe.connect() as worker:
    model = nn.Sequential(nn.Embedding(VOCABULARY, H), Block(worker, 0), Block(worker, 1), nn.Linear(H, VOCABULARY))
    dense = nn.parallel.DistributedDataParallel(model)  # the experts are not its parameters
    optimizer = lrmoe.JointOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), lrmoe.AdamW(worker, lr=1e-3), max_norm=1.0)
    text = torch.frombuffer(bytearray(open(__file__, "rb").read()), dtype=torch.uint8).long()
    for step in range(30):
        starts = torch.randint(len(text) - 33, (8,), generator=torch.Generator().manual_seed(step * 2 + worker.rank))
        rows = torch.stack([text[start:start + 33] for start in starts])
        loss = nn.functional.cross_entropy(dense(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if worker.rank == 0 and step % 10 == 9:
            plan = model[1].experts.last_plan
            print(f"step {step + 1}  loss {loss:.3f}  kept {plan.kept_rows} of {plan.routed_rows} rows", flush=True)
