"""A training process that never ends by itself: for tests that end it. Says who it is, then counts its steps."""

import os
import sys

import torch
import torch.distributed as dist

import lrmoe

E, K, H, F, TOKENS = 4, 2, 64, 32, 64


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


def main():
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    # In one line, so that ranks do not mix.
    worker_pid = parent(os.getppid())  # between them is the worker's janitor
    print(f"[who] rank {rank} trainer {os.getpid()} worker {worker_pid} socket {os.environ['LRMOE_SOCKET']}", flush=True)
    dist.init_process_group("gloo")
    worker = lrmoe.connect()
    layer = lrmoe.MoELayer(worker, 0, E, K, H, F, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    layer.load_experts(torch.randn(E, 2 * F, H, generator=generator), torch.randn(E, H, F, generator=generator))
    optimizer = lrmoe.AdamW(worker)
    for step in range(1_000_000):
        ids = torch.rand(TOKENS, E, generator=generator).topk(K, dim=-1).indices
        optimizer.zero_grad()
        layer(torch.randn(TOKENS, H), ids, torch.rand(TOKENS, K)).sum().backward()
        optimizer.step()
        print(f"[step] rank {rank} {step}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except lrmoe.WorkerLost as error:
        print(f"[lost] rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        os._exit(3)
