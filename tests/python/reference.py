"""A plain PyTorch MoE layer, written without a look at the package: what MoELayer must equal."""

import torch


def expert_output(x, gate_up, down):
    """SwiGLU expert: x [n, H], gate_up [2F, H], down [H, F] -> [n, H]."""
    gate, up = (x @ gate_up.t()).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ down.t()


def moe(x, expert_idx, alpha, gate_up, down, kept=None):
    """x [T, H], expert_idx and alpha [T, k], gate_up [E, 2F, H], down [E, H, F] -> y [T, H].

    kept: bool [T, k]. The value of y is complete; gradients to x and the experts flow through kept pairs only, those
    to alpha through all pairs (the `exact` router gradient).
    """
    outputs = []
    for slot in range(expert_idx.shape[1]):
        rows = []
        for token in range(x.shape[0]):
            expert = int(expert_idx[token, slot])
            row = expert_output(x[token:token + 1], gate_up[expert], down[expert])
            if kept is not None and not bool(kept[token, slot]):
                row = row.detach()
            rows.append(row)
        outputs.append(torch.cat(rows) if rows else expert_output(x, gate_up[0], down[0]))
    return sum(alpha[:, slot, None] * outputs[slot] for slot in range(expert_idx.shape[1]))


def scores(alpha, dy, x, expert_idx, gate_up):
    """LRM score of every pair, alpha^2 |dy|^2 |phi|^2, [T, k]."""
    result = torch.zeros(alpha.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(alpha.shape[1]):
            gate, up = (gate_up[int(expert_idx[token, slot])] @ x[token]).chunk(2)
            phi = torch.nn.functional.silu(gate) * up
            result[token, slot] = alpha[token, slot] ** 2 * dy[token].pow(2).sum() * phi.pow(2).sum()
    return result
