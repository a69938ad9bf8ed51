"""PyTorch's grouped_mm on the products of the paper's layer, beside the bench of lrmoe-gpu: forward and backward."""

import time

import torch

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 128, 8, 2048, 768, 32768


def layer(x, w1, w2, offsets):
    a = torch._grouped_mm(x, w1, offs=offsets)
    gate, up = a.chunk(2, dim=-1)
    return torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2, offs=offsets)


def median_ms(call, runs=9, warm_up=2):
    times = []
    for i in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if i >= warm_up:
            times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]


def main():
    rows = TOKENS * TOP_K
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows, HIDDEN, **options, requires_grad=True)
    w1 = (torch.randn(EXPERTS, HIDDEN, 2 * INTERMEDIATE, **options) * 0.02).requires_grad_()
    w2 = (torch.randn(EXPERTS, INTERMEDIATE, HIDDEN, **options) * 0.02).requires_grad_()
    offsets = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * (rows // EXPERTS)
    gradient = torch.randn(rows, HIDDEN, **options)
    forward = median_ms(lambda: layer(x, w1, w2, offsets))
    both = median_ms(lambda: layer(x, w1, w2, offsets).backward(gradient))
    print(f"torch {torch.__version__} _grouped_mm, expert rows in place (no dispatch, no combine): "
          f"forward {forward:.2f} ms, backward {both - forward:.2f} ms")


if __name__ == "__main__":
    main()
