"""On every rank: MoELayer of real workers against the PyTorch reference."""

import math
import unittest

import torch

import lrmoe
from reference import moe, scores
from session import (DTYPE, E, F, H, K, RANK, RATE, TOLERANCE, WORLD_SIZE, Session, batch, gathered, generator, main, rounded)

session = None
worst = {}


def setUpModule():
    global session
    session = Session()


class Case(unittest.TestCase):
    def setUp(self):
        self.worker, self.layers, self.optimizer = session.worker, session.layers, session.optimizer
        self.optimizer.zero_grad()

    def close(self, name, mine, theirs, tolerance=TOLERANCE):
        """Equal up to the tolerance, relative to the largest element."""
        self.assertEqual(tuple(mine.shape), tuple(theirs.shape), name)
        if not mine.numel():
            return
        self.assertTrue(bool(torch.isfinite(mine.float()).all()), name)
        scale = max(float(theirs.abs().max()), 1e-30)
        error = float((mine.double() - theirs.double()).abs().max()) / scale
        worst[name] = max(worst.get(name, 0.0), error)
        self.assertLess(error, tolerance, name)

    def reference(self, index, inputs, dy, kept):
        """(y, dx, dalpha of this rank, gate_up and down gradients over all ranks), in fp64."""
        everything = gathered((tuple(t.detach() for t in inputs), dy, kept))
        gate_up, down = (rounded(w).double().requires_grad_() for w in session.weights[index])
        for rank, ((x, ids, alpha), dy_rank, kept_rank) in enumerate(everything):
            x, alpha = x.double().requires_grad_(), alpha.double().requires_grad_()
            y = moe(x, ids, alpha, gate_up, down, kept_rank)
            y.backward(dy_rank.double())
            if rank == RANK:
                mine = y.detach(), x.grad, alpha.grad
        return (*mine, gate_up.grad, down.grad)

    def compare(self, seed, num_tokens, index=0):
        layer = self.layers[index]
        x, ids, alpha = batch(seed, num_tokens)
        dy = torch.randn(num_tokens, H, generator=generator(seed * 64 + 32 + RANK)).to(DTYPE)
        y = layer(x, ids, alpha)
        y.backward(dy)
        ry, rdx, rdalpha, rgate_up, rdown = self.reference(index, (x, ids, alpha), dy, layer.last_kept)
        self.close("y", y.detach(), ry)
        self.close("dx", x.grad, rdx)
        self.close("dalpha", alpha.grad, rdalpha)
        gradients = layer.expert_gradients()
        self.assertEqual(sorted(gradients), self.worker.owned_experts)
        for expert, (gate_up, down) in gradients.items():
            self.assertEqual(gate_up.dtype, torch.float32)
            # Relative to the largest gradient of any expert: one with a single row may be tiny.
            self.close("dW1", torch.stack([gate_up, rgate_up.float().abs().max().expand_as(gate_up)]),
                       torch.stack([rgate_up[expert], rgate_up.abs().max().expand_as(gate_up)]))
            self.close("dW2", torch.stack([down, rdown.float().abs().max().expand_as(down)]),
                       torch.stack([rdown[expert], rdown.abs().max().expand_as(down)]))
        return x, ids, alpha, dy


class LayerChecks(Case):
    def test_1_equals_reference(self):
        self.assertEqual(self.worker.world_size, WORLD_SIZE)
        self.assertEqual(self.worker.rank, RANK)
        for seed in (1, 2):  # two in a row: buffers are used again
            for index in (0, 1):
                self.optimizer.zero_grad()
                self.compare(seed, 40, index)

    def test_2_different_numbers_of_tokens(self):
        for seed, tokens in ((3, [25, 7]), (4, [0, 12]), (5, [9, 0]), (6, [1, 64]), (7, [0, 0])):
            self.optimizer.zero_grad()
            self.compare(seed, (tokens * WORLD_SIZE)[RANK])

    def test_3_gradients_accumulate(self):
        layer, sums = self.layers[0], None
        for seed in (11, 12, 13):
            x, ids, alpha = batch(seed, 30)
            dy = torch.randn(30, H, generator=generator(seed + RANK)).to(DTYPE)
            layer(x, ids, alpha).backward(dy)
            parts = self.reference(0, (x, ids, alpha), dy, layer.last_kept)[3:]
            sums = parts if sums is None else [a + b for a, b in zip(sums, parts)]
        for expert, (gate_up, down) in layer.expert_gradients().items():
            scale = float(sums[0].abs().max()), float(sums[1].abs().max())
            self.close("accumulated dW1", gate_up / scale[0] + 1, sums[0][expert] / scale[0] + 1)
            self.close("accumulated dW2", down / scale[1] + 1, sums[1][expert] / scale[1] + 1)
        self.close("norm", torch.tensor([self.optimizer.grad_norm()]),
                   torch.stack(list(sums)[:1])[0].pow(2).sum().add(sums[1].pow(2).sum()).sqrt().view(1))
        self.optimizer.zero_grad()
        self.assertEqual(self.optimizer.grad_norm(), 0.0)

    def test_4_evaluation(self):
        layer = self.layers[0]
        x, ids, alpha = batch(21, 20)
        gate_up, down = (rounded(w).double() for w in session.weights[0])
        expected = moe(x.detach().double(), ids, alpha.detach().double(), gate_up, down)
        with torch.no_grad():
            self.close("y, no_grad", layer(x, ids, alpha), expected)
        layer.eval()
        self.close("y, eval", layer(x, ids, alpha).detach(), expected)
        layer.train()
        self.compare(22, 20)

    def test_5_kept_pairs_are_the_highest_scores(self):
        x, ids, alpha, dy = self.compare(31, 50)
        layer = self.layers[0]
        gate_up = rounded(session.weights[0][0]).double()
        mine = scores(alpha.detach().double(), dy.double(), x.detach().double(), ids, gate_up)
        everything = gathered((ids, mine, layer.last_kept))
        ids = torch.cat([rank[0] for rank in everything])
        score = torch.cat([rank[1] for rank in everything])
        kept = torch.cat([rank[2] for rank in everything])
        plan = layer.last_plan
        self.assertEqual(int(kept.sum()), plan.kept_rows)
        self.assertEqual(kept.numel(), plan.routed_rows)
        self.assertEqual(int(layer.last_kept.sum()), plan.rank_kept_rows)
        self.assertLess(abs(plan.kept_rows - RATE * plan.routed_rows), E)
        self.assertAlmostEqual(plan.retention_rate, RATE, delta=0.02)
        for expert in range(E):
            in_order = score[ids == expert].sort(descending=True).values
            low = score[(ids == expert) & kept]
            if DTYPE == torch.float32 and low.numel():
                # Rounding may swap neighbours, nothing more.
                self.assertGreaterEqual(float(low.min()), float(in_order[low.numel() - 1]) * (1 - 1e-4))

    def test_6_recomputation_and_discard(self):
        layer = self.layers[0]
        x, ids, alpha = batch(41, 10)
        first = layer(x, ids, alpha)
        layer.discard()
        with self.assertRaises(lrmoe.Error):
            first.sum().backward()
        self.compare(42, 10)

    def test_7_repeats_bit_for_bit(self):
        results = []
        for _ in range(2):
            self.optimizer.zero_grad()
            x, ids, alpha = batch(51, 33)
            y = self.layers[1](x, ids, alpha)
            y.backward(torch.ones_like(y))
            gradients = [g for pair in self.layers[1].expert_gradients().values() for g in pair]
            results.append([y.detach().clone(), x.grad, alpha.grad, self.layers[1].last_kept.clone(), *gradients])
        for one, other in zip(*results):
            self.assertTrue(torch.equal(one, other))


class WorstErrors(unittest.TestCase):
    def test_report(self):
        everything = gathered(worst)
        if RANK == 0:
            print("worst relative errors: " + ", ".join(
                f"{name} {max(w.get(name, 0.0) for w in everything):.1e}" for name in worst), flush=True)


if __name__ == "__main__":
    setUpModule()
    main(LayerChecks, WorstErrors)
