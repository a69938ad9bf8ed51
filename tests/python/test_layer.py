"""MoELayer against a fake worker."""

import unittest

import torch
from torch.utils.checkpoint import checkpoint

import lrmoe
from fake_session import E, F, H, K, FakeSession
from reference import moe


class LayerTest(FakeSession):
    def check(self, layer, x, ids, alpha, tolerance=1e-5):
        dy = self.random(*x.shape[:-1], H).to(x.dtype)
        y = layer(x, ids, alpha)
        y.backward(dy)
        # A copy of the inputs in fp64 through the reference.
        reference = [t.detach().double().requires_grad_() for t in (x, alpha, *layer.weights)]
        rx, ra, gate_up, down = reference
        kept = layer.last_kept.reshape(-1, K)
        ry = moe(rx.reshape(-1, H), ids.reshape(-1, K), ra.reshape(-1, K), gate_up, down, kept)
        ry.backward(dy.double().reshape(-1, H))
        for name, mine, theirs in (("y", y, ry), ("dx", x.grad, rx.grad), ("dalpha", alpha.grad, ra.grad)):
            self.assertEqual(mine.shape, theirs.reshape(mine.shape).shape)
            scale = max(float(theirs.abs().max()) if theirs.numel() else 0.0, 1e-30)
            error = float((mine.double() - theirs.reshape(mine.shape)).abs().max()) / scale if mine.numel() else 0.0
            self.assertLess(error, tolerance, name)
        for expert, parts in layer.expert_gradients().items():
            for mine, theirs in zip(parts, (gate_up.grad[expert], down.grad[expert])):
                self.assertLess(float((mine.double() - theirs).abs().max()),
                                tolerance * max(float(theirs.abs().max()), 1.0))
        return y

    def test_equals_reference(self):
        layer = self.layer(self.connect())
        y = self.check(layer, *self.batch(7))
        self.assertEqual((y.shape, y.dtype), ((7, H), torch.float32))
        self.assertTrue(bool(layer.last_kept.all()))

    def test_leading_dimensions_and_no_tokens(self):
        layer = self.layer(self.connect())
        optimizer = lrmoe.AdamW(layer._worker)
        for leading in ((2, 3), (1,), (0,), (2, 0)):
            optimizer.zero_grad()
            self.assertEqual(self.check(layer, *self.batch(*leading)).shape, (*leading, H))

    def test_types(self):
        layer = self.layer(self.connect(), dtype=torch.bfloat16)
        layer.weights = tuple(w.bfloat16().float() for w in layer.weights)
        x, ids, alpha = self.batch(6)
        x = x.detach().bfloat16().requires_grad_()
        y = self.check(layer, x, ids.int(), alpha, tolerance=2e-2)
        self.assertEqual((y.dtype, x.grad.dtype, alpha.grad.dtype), (torch.bfloat16, torch.bfloat16, torch.float32))
        # Another type outside than inside; half-precision weights.
        x, ids, alpha = self.batch(6)
        alpha = alpha.detach().bfloat16().requires_grad_()
        y = layer(x, ids, alpha)
        y.sum().backward()
        self.assertEqual((y.dtype, x.grad.dtype, alpha.grad.dtype), (torch.float32, torch.float32, torch.bfloat16))

    def test_experts_learn_when_no_input_needs_a_gradient(self):
        layer = self.layer(self.connect())
        x, ids, alpha = self.batch(4)
        layer(x.detach(), ids, alpha.detach()).sum().backward()
        self.assertGreater(sum(float(g.abs().sum()) for parts in layer.expert_gradients().values() for g in parts), 0)

    def test_evaluation_saves_nothing(self):
        layer = self.layer(self.connect())
        x, ids, alpha = self.batch(4)
        with torch.no_grad():
            self.assertFalse(layer(x, ids, alpha).requires_grad)
        layer.eval()
        y = layer(x, ids, alpha)
        self.assertEqual([r.evaluation for r in self.requests("Forward")], [True, True])
        self.assertFalse(self.fake.contexts)
        with self.assertRaisesRegex(lrmoe.Error, "eval"):
            y.sum().backward()

    def test_checkpointed_forward_counts_once(self):
        layer = self.layer(self.connect())
        for reentrant in (False, True):
            with self.subTest(reentrant=reentrant):
                lrmoe.AdamW(layer._worker).zero_grad()
                x, ids, alpha = self.batch(7)
                self.fake.calls.clear()
                y = checkpoint(lambda x, alpha: layer(x, ids, alpha), x, alpha, use_reentrant=reentrant)
                y.backward(torch.ones_like(y))
                forwards, backwards = self.requests("Forward"), self.requests("Backward")
                self.assertEqual([len(forwards), len(backwards)], [2, 1])
                self.assertEqual(forwards[0].invocation, forwards[1].invocation)
                self.assertEqual(backwards[0].invocation, forwards[0].invocation)
                self.assertFalse(forwards[1].evaluation)
                self.assertFalse(self.fake.contexts)
                expected = [t.detach().double().requires_grad_() for t in (x, alpha)]
                moe(expected[0], ids, expected[1], *(w.double() for w in layer.weights), layer.last_kept).sum().backward()
                for mine, theirs in zip((x, alpha), expected):
                    self.assertLess(float((mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max()), 1e-5)

    def test_checkpointed_forwards_that_are_open_together(self):
        layer = self.layer(self.connect())
        results = []
        for tokens in (3, 5):
            x, ids, alpha = self.batch(tokens)
            results.append(checkpoint(lambda x, a, ids=ids: layer(x, ids, a), x, alpha, use_reentrant=False).sum())
        for result in results:  # not the order in which they would be undone
            result.backward()
        forwards = [(r.invocation.micro_batch, r.x.shape[0]) for r in self.requests("Forward")]
        self.assertEqual(forwards, [(0, 3), (1, 5), (0, 3), (1, 5)])
        self.assertEqual([r.invocation.micro_batch for r in self.requests("Backward")], [0, 1])

    def test_numbering(self):
        worker = self.connect()
        layers = [self.layer(worker, index) for index in (0, 1)]
        optimizer = lrmoe.AdamW(worker)
        for _ in range(2):
            for _ in range(2):
                for layer in layers:
                    layer(*self.batch(3)).sum().backward()
            optimizer.step()
        numbers = [(r.invocation.step, r.invocation.layer, r.invocation.micro_batch) for r in self.requests("Forward")]
        self.assertEqual(numbers, [(s, l, m) for s in (0, 1) for m in (0, 1) for l in (0, 1)])
        self.assertEqual([(r.invocation.step, r.invocation.layer, r.invocation.micro_batch)
                          for r in self.requests("Backward")], numbers)
        self.assertEqual(worker.step, 2)

    def test_result_outlives_what_it_was_made_from(self):
        layer = self.layer(self.connect())
        x, ids, alpha = self.batch(32)
        with torch.no_grad():
            view = layer(x, ids, alpha)[5:9].detach()
            before = view.clone()
            for _ in range(20):
                layer(self.random(32, H), ids, alpha)
        self.assertTrue(torch.equal(view, before))

    def test_result_may_be_changed_in_place(self):
        layer = self.layer(self.connect())
        x, ids, alpha = self.batch(4)
        y = layer(x, ids, alpha)
        y += 1
        y.sum().backward()
        self.assertIsNotNone(x.grad)

    def test_memory_is_used_again(self):
        layer = self.layer(self.connect())
        for tokens in [64, 3, 17, 64, 40] * 20:
            x, ids, alpha = self.batch(tokens)
            layer(x, ids, alpha).sum().backward()
        self.assertEqual(len(self.requests("CreateArena")), 1)

    def test_input_in_shared_memory_is_not_copied(self):
        worker = self.connect()
        layer = self.layer(worker)
        _, ids, alpha = self.batch(4)
        x = worker.empty((4, H), torch.float32).copy_(self.random(4, H))
        layer(x, ids, alpha)
        self.assertEqual(self.requests("Forward")[-1].x, worker._tensors().descriptor(x))

    def test_discard(self):
        layer = self.layer(self.connect())
        y = layer(*self.batch(4))
        self.assertEqual(len(self.fake.contexts), 1)
        layer.discard()
        self.assertFalse(self.fake.contexts)
        with self.assertRaisesRegex(lrmoe.Error, "NOT_FOUND"):
            y.sum().backward()

    def test_last_plan(self):
        layer = self.layer(self.connect())
        self.assertIsNone(layer.last_plan)
        self.assertIsNone(layer.last_kept)
        layer(*self.batch(4)).sum().backward()
        plan = layer.last_plan
        self.assertEqual((plan.step, plan.layer, plan.micro_batch, plan.retention_rate), (0, 0, 0, 1.0))
        self.assertEqual((plan.kept_rows, plan.rank_kept_rows, plan.rank_routed_rows), (4 * K, 4 * K, 4 * K))
        self.assertEqual(plan.imbalance.before, 1.0)


class PartialLayerTest(LayerTest):
    """The same, with half of the pairs dropped from the backward pass."""

    retention_rate = 0.5

    def test_equals_reference(self):
        layer = self.layer(self.connect())
        self.check(layer, *self.batch(12))
        self.assertTrue(0 < int(layer.last_kept.sum()) < layer.last_kept.numel())

    def test_last_plan(self):
        layer = self.layer(self.connect())
        layer(*self.batch(8)).sum().backward()
        self.assertEqual(layer.last_plan.rank_kept_rows, int(layer.last_kept.sum()))


class RefusalTest(FakeSession):
    def test_bad_inputs_are_the_workers_to_refuse(self):
        layer = self.layer(self.connect())
        x, ids, alpha = self.batch(4)
        cases = [
            ("x", self.random(4, H + 1), ids, alpha),
            ("expert_idx", x, ids[:3], alpha),
            ("expert_idx", x, ids.expand(2, 4, K), alpha),
            ("alpha", x, ids, alpha[:, :1]),
            ("expert_idx: 5 is not within 0..4", x, torch.full_like(ids, E), alpha),
            ("expert_idx: -1", x, torch.full_like(ids, -3), alpha),
            ("expert_idx: 2147483647", x, torch.full_like(ids, 2**32), alpha),
            ("x: torch.int64 is not a float tensor", x.long(), ids, alpha),
            ("expert_idx: torch.float32", x, ids.float(), alpha),
            ("weights: list", x, ids, [[0.5, 0.5]] * 4),
            ("x: a scalar", torch.tensor(1.0), ids, alpha),
        ]
        for number, (message, *inputs) in enumerate(cases):
            with self.subTest(message=message), self.assertRaisesRegex(lrmoe.Error, message) as raised:
                layer(*inputs)
            self.assertEqual(raised.exception.code, "INVALID_ARGUMENT")
            # The other ranks are in this call: it must have been made.
            self.assertEqual(len(self.requests("Forward")), number + 1)
        layer(x, ids, alpha).sum().backward()  # and the worker goes on serving
        self.assertEqual(self.requests("Forward")[-1].invocation.micro_batch, 0)

    def test_constructor(self):
        worker = self.connect()
        self.layer(worker, 0, load=False)
        with self.assertRaisesRegex(lrmoe.Error, "layer: 0 exists"):
            self.layer(worker, 0)
        with self.assertRaisesRegex(lrmoe.Error, "hidden_size: 8 in layer 1 but 16 in layer 0"):
            lrmoe.MoELayer(worker, 1, E, K, 8, F, dtype=torch.float32)
        with self.assertRaisesRegex(ValueError, "dtype: torch.float16"):
            lrmoe.MoELayer(worker, 1, E, K, H, F, dtype=torch.float16)
        worker.rank
        with self.assertRaisesRegex(lrmoe.Error, "layer: 1 is not below num_layers 1"):
            self.layer(worker, 1)

    def test_load_experts_shape(self):
        layer = self.layer(self.connect(num_layers=1), load=False)
        with self.assertRaisesRegex(lrmoe.Error, r"gate_up: shape \[5, 16, 15\] is not \[5, 16, 16\]"):
            layer.load_experts(self.random(E, 2 * F, H - 1), self.random(E, H, F))
        self.assertEqual(len(self.requests("FinishLoad")), 1)  # the other ranks wait there


if __name__ == "__main__":
    unittest.main()
