"""AdamW, clipping and checkpoints against a fake worker."""

import unittest

import torch

import lrmoe
from fake_session import E, FakeSession
from reference import moe


class OptimizerTest(FakeSession):
    def test_is_a_torch_optimizer(self):
        worker = self.connect()
        self.layer(worker)
        optimizer = lrmoe.AdamW(worker, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** step)
        for _ in range(3):
            optimizer.step()
            schedule.step()
        requests = self.requests("OptimizerStep")
        self.assertEqual([r.lr for r in requests], [0.1, 0.05, 0.025])
        self.assertEqual([r.step for r in requests], [1, 2, 3])
        last = requests[-1]
        self.assertEqual((last.beta1, last.beta2, last.eps, last.weight_decay, last.gradient_scale),
                         (0.8, 0.9, 1e-6, 0.2, 1.0))
        self.assertEqual(optimizer.step(lambda: 3.5), 3.5)
        restored = lrmoe.AdamW(worker)
        restored.load_state_dict(optimizer.state_dict())
        self.assertEqual(restored.param_groups[0]["weight_decay"], 0.2)
        with self.assertRaises(ValueError):
            optimizer.add_param_group({"params": [torch.zeros(1)]})
        with self.assertRaisesRegex(ValueError, "lr: -1"):
            lrmoe.AdamW(worker, lr=-1)

    def test_norm_and_clipping(self):
        worker = self.connect()
        layer = self.layer(worker)
        optimizer = lrmoe.AdamW(worker)
        layer(*self.batch(8)).sum().backward()
        squared = sum(float(g.double().pow(2).sum()) for parts in layer.expert_gradients().values() for g in parts)
        self.assertAlmostEqual(optimizer.grad_norm() ** 2 / squared, 1.0, places=6)
        dense = torch.zeros(3, requires_grad=True)
        dense.grad = torch.tensor([3.0, 0.0, 4.0])
        norm, scale = lrmoe.clip_grad_norm_([dense], optimizer, 0.5, gradient_scale=0.25)
        self.assertAlmostEqual(norm ** 2, 25 + squared / 16, places=4)
        self.assertAlmostEqual(float(dense.grad.norm()), 5 * 0.5 / norm, places=5)
        self.assertAlmostEqual(scale, 0.25 * 0.5 / norm, places=5)
        norm, scale = lrmoe.clip_grad_norm_([dense], optimizer, 1e9)
        self.assertEqual(scale, 1.0)
        optimizer.zero_grad()
        self.assertEqual(optimizer.grad_norm(), 0.0)

    def test_joint_optimizer_equals_one_over_everything(self):
        worker = self.connect()
        layer = self.layer(worker)
        settings = dict(lr=0.05, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
        dense = torch.nn.Parameter(self.random(3))
        joint = lrmoe.JointOptimizer(torch.optim.AdamW([dense], **settings), lrmoe.AdamW(worker, **settings), max_norm=0.7)
        copies = [w.clone().requires_grad_() for w in layer.weights]
        twin = torch.nn.Parameter(dense.detach().clone())
        plain = torch.optim.AdamW([twin, *copies], **settings)
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (joint, plain)]
        for step in range(5):
            x, ids, alpha = (t.detach() for t in self.batch(6))
            (layer(x, ids, alpha).sum() * dense.sum()).backward()
            plain.zero_grad()
            (moe(x, ids, alpha, *copies).sum() * twin.sum()).backward()
            norm = torch.nn.utils.clip_grad_norm_([twin, *copies], 0.7)
            joint.step()  # leaves the experts' gradients zero
            dense.grad = None  # as frameworks do
            plain.step()
            self.assertAlmostEqual(joint.last_norm / float(norm), 1.0, places=4)
            for schedule in schedules:
                schedule.step()
            if step == 2:  # saved and loaded in between
                joint.load_state_dict(joint.state_dict())
        self.assertLess(float((dense - twin).detach().abs().max()), 1e-4)
        for expert, parts in layer.expert_weights().items():
            for mine, theirs in zip(parts, copies):
                self.assertLess(float((mine - theirs[expert]).detach().abs().max()), 1e-4)
        self.assertEqual(len(joint.param_groups), 2)
        joint.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        self.assertEqual([len(group["params"]) for group in joint.param_groups], [1, 1, 1])
        with self.assertRaisesRegex(ValueError, "max_norm: 0"):
            lrmoe.JointOptimizer(joint.dense, joint.experts, max_norm=0)

    def test_checkpoint(self):
        worker = self.connect()
        layer = self.layer(worker)
        optimizer = lrmoe.AdamW(worker, lr=0.01)
        batches = [[t.detach() for t in self.batch(6)] for _ in range(4)]

        def train(batch):
            optimizer.zero_grad()
            layer(*batch).sum().backward()
            optimizer.step()

        train(batches[0])
        train(batches[1])
        folder = self.folder + "/checkpoints"
        self.assertEqual(worker.save_checkpoint(folder), 2)
        train(batches[2])
        train(batches[3])
        expected = layer.expert_weights()
        self.assertEqual(worker.load_checkpoint(folder), 2)
        train(batches[2])
        train(batches[3])
        for expert, parts in layer.expert_weights().items():
            for mine, theirs in zip(parts, expected[expert]):
                self.assertTrue(torch.equal(mine, theirs))
        # Bias correction went back, invocation numbers did not.
        self.assertEqual([r.step for r in self.requests("OptimizerStep")], [1, 2, 3, 4, 3, 4])
        self.assertEqual([r.invocation.step for r in self.requests("Forward")], [0, 1, 2, 3, 4, 5])
        with self.assertRaisesRegex(lrmoe.Error, "NOT_FOUND.*step 9"):
            worker.load_checkpoint(folder, step=9)

    def test_weights_are_loaded_at_the_first_use(self):
        worker = self.connect()
        layers = [self.layer(worker, index) for index in (0, 1)]
        weights = layers[0].weights[0].clone()
        layers[0].weights[0].zero_()  # ours to change: load_experts kept a copy
        self.assertFalse(self.fake.calls)
        for expert in range(E):
            self.assertTrue(torch.equal(layers[0].expert_weights()[expert][0], weights[expert]))
        self.assertEqual(self.fake.model.num_layers, 2)

    def test_weights_are_loaded_at_once_when_the_number_of_layers_is_known(self):
        self.layer(self.connect(num_layers=3))
        self.assertEqual(len(self.requests("FinishLoad")), 1)
        self.assertEqual(self.fake.model.num_layers, 3)


if __name__ == "__main__":
    unittest.main()
