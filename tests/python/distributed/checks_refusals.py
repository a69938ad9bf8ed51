"""On every rank: what is refused is refused on all ranks, says who, and the workers go on serving."""

import unittest

import torch

import lrmoe
from session import E, H, K, RANK, WORLD_SIZE, Session, batch, gathered, main

session = None


def setUpModule():
    global session
    session = Session()


class RefusalChecks(unittest.TestCase):
    def refused(self, message, bad_rank, call):
        """`call(bad)` raises on every rank, where bad is true on bad_rank; then a good call works everywhere."""
        with self.assertRaises(lrmoe.Error) as raised:
            call(RANK == bad_rank)
        error = raised.exception
        self.assertNotIsInstance(error, lrmoe.WorkerLost)
        for text in gathered(str(error)):
            self.assertRegex(text, message)
            self.assertRegex(text, f"(?i)rank {bad_rank}")
        x, ids, alpha = batch(1, 8)
        session.layers[0](x, ids, alpha).sum().backward()
        self.assertTrue(bool(torch.isfinite(x.grad.float()).all()))

    def test_inputs_of_one_rank(self):
        layer = session.layers[0]
        x, ids, alpha = batch(2, 8)
        bad_inputs = [
            ("x", (torch.zeros(8, H + 1), ids, alpha)),
            ("x", (x.long(), ids, alpha)),
            ("expert_idx", (x, ids[:5], alpha)),
            ("expert_idx", (x, torch.full_like(ids, E), alpha)),
            ("expert_idx", (x, torch.full_like(ids, -1), alpha)),
            ("expert", (x, torch.zeros_like(ids), alpha)),  # the same expert twice in a token
            ("alpha", (x, ids, torch.full_like(alpha, float("nan")))),
            ("alpha", (x, ids, torch.ones(8, K + 1))),
        ]
        for bad_rank in range(WORLD_SIZE):
            for message, inputs in bad_inputs:
                with self.subTest(message=message, bad_rank=bad_rank):
                    self.refused(message, bad_rank, lambda bad: layer(*(inputs if bad else (x, ids, alpha))))

    def test_ranks_that_disagree_on_the_layer(self):
        x, ids, alpha = batch(3, 8)
        self.refused("layer", 1, lambda bad: session.layers[1 if bad else 0](x, ids, alpha))

    def test_ranks_that_disagree_on_the_operation(self):
        x, ids, alpha = batch(4, 8)
        self.refused("(?i)forward|zero", 1,
                     lambda bad: session.optimizer.zero_grad() if bad else session.layers[0](x, ids, alpha))

    def test_optimizer_settings_of_one_rank(self):
        optimizer = lrmoe.AdamW(session.worker)
        optimizer.param_groups[0]["lr"] = -1.0
        self.refused("lr", 0, lambda bad: (optimizer if bad else session.optimizer).step())

    def test_gradient_that_is_not_a_number(self):
        layer = session.layers[0]
        x, ids, alpha = batch(5, 8)
        y = layer(x, ids, alpha)
        with self.assertRaisesRegex(lrmoe.Error, "(?i)nan|finite|not a number"):
            y.backward(torch.full_like(y, float("nan")))
        self.refused("x", 1, lambda bad: layer(torch.zeros(8, H - 1) if bad else x, ids, alpha))

    def test_checkpoint_that_is_not_there(self):
        with self.assertRaises(lrmoe.Error) as raised:
            session.worker.load_checkpoint("/nonexistent/lrmoe-checkpoint")
        self.assertIn("/nonexistent/lrmoe-checkpoint", str(raised.exception))


if __name__ == "__main__":
    setUpModule()
    main(RefusalChecks)
